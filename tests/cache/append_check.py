"""`append_kv` against its definition, bit for bit, with all memory around watched."""

from dataclasses import dataclass, field
from typing import Any

import torch

from torch_metal_attn.quantisation import DTYPES, quantise, sizes
from torch_metal_attn.testing.judge import normal

append_kv = torch.ops.metal_attn.append_kv

DATA = DTYPES | {"fp8_e4m3": torch.float8_e4m3fn}


def poisoned(shape, dtype, layout="heads"):
    """A cache (places, heads, rows, columns) whose every byte, and those around it, are NaN's."""
    columns = shape[3]
    order = {"heads": (0, 1, 2), "rows": (0, 2, 1), "gaps": (0, 1, 2)}[layout]
    gap = 3 if layout == "gaps" else 0
    strides = [0, 0, 0, 1]
    step = columns + gap
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim] + gap
    memory = torch.full((step + 16,), -1, dtype=torch.int8)
    memory = memory.repeat(dtype.itemsize).view(dtype)
    return memory.as_strided(shape, strides, 0 if layout == "heads" else gap)


def memory_of(tensor):
    """Every byte of the tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def same_memory(tensor):
    """A copy of the tensor and of all that its storage holds."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass
class Problem:
    """Arguments of `append_kv` by name, and what they are made of."""

    tensors: dict[str, Any]
    formats: dict[str, str | None]  # of k and v
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, op=append_kv):
        return op(**self.tensors, **self.options)


def make(
    *,
    batch=2,
    kv_heads=2,
    length=5,
    head_dim=64,
    head_dim_v=None,
    capacity=32,
    page=None,
    seqlens=None,
    format=None,
    v_format=None,
    dtype=torch.float16,
    cache_dtype=None,
    layout="heads",
    cache_batch_idx=None,
    rotary_dim=None,
    table_dtype=torch.float32,
    leftpad=None,
    q_heads=None,
    q_length=None,
    seed=0,
    scale=True,
    **options,
):
    """`seqlens`, `leftpad` and `cache_batch_idx` are lists; `page` shuffles pages.

    cache_dtype: of caches that are not quantised, if it is not that of the new rows.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    t: dict[str, Any] = {
        "k": normal(batch, kv_heads, length, head_dim, dtype=dtype, seed=seed),
        "v": normal(batch, kv_heads, length, head_dim_v, dtype=dtype, seed=seed + 1),
    }
    generator = torch.Generator().manual_seed(seed)
    places, rows = batch, capacity
    if page is not None:
        blocks = -(-capacity // page)
        places, rows = batch * blocks + 3, page
        numbers = torch.randperm(places, generator=generator)[: batch * blocks]
        t["block_table"] = numbers.view(batch, blocks).int()
    elif cache_batch_idx is not None:
        places = max(cache_batch_idx) + 2
        t["cache_batch_idx"] = torch.tensor(cache_batch_idx).int()
    formats = {"k": format, "v": v_format or format}
    for name, columns in (("k", head_dim), ("v", head_dim_v)):
        format = formats[name]
        data_columns, blocks = (columns, 0) if format is None else sizes(format, columns)
        shape = (places, kv_heads, rows, data_columns)
        t[f"{name}_cache"] = poisoned(shape, DATA.get(format, cache_dtype or dtype), layout)
        if blocks > 0:
            t[f"{name}_scale"] = poisoned((*shape[:3], blocks), torch.float16, layout)
        elif format is not None and scale:
            scale_shape = (kv_heads,) if seed % 2 else (batch, kv_heads)
            t[f"{name}_scale"] = normal(*scale_shape, seed=seed + len(t)).exp() / 8
    if seqlens is not None:
        t["cache_seqlens"] = torch.tensor(seqlens).int()
    if leftpad is not None:
        t["leftpad_k"] = torch.tensor(leftpad).int()
    if rotary_dim is not None:
        angles = 3 * normal(capacity + 3, rotary_dim // 2, seed=seed + 7)
        t["rotary_cos"] = angles.cos().to(table_dtype)
        t["rotary_sin"] = angles.sin().to(table_dtype)
    if q_heads is not None:
        q_length = length if q_length is None else q_length
        t["q"] = normal(batch, q_heads, q_length, head_dim, dtype=dtype, seed=seed + 9)
    return Problem(t, formats, options)


def expected(problem):
    """What every tensor holds afterwards, from the definition: one row after another."""
    after = {name: same_memory(x) for name, x in problem.tensors.items()}
    batch, _, length, _ = problem.tensors["k"].shape
    first = after.get("cache_seqlens", torch.zeros(batch, dtype=torch.int32)).tolist()
    new = {"k": problem.tensors["k"], "v": problem.tensors["v"]}
    if "rotary_cos" in after:
        padding = after.get("leftpad_k", torch.zeros(batch, dtype=torch.int32)).tolist()
        from_leftpad = problem.options.get("rotary_from_leftpad", True)
        starts = torch.tensor(
            [f - p * from_leftpad for f, p in zip(first, padding, strict=True)], dtype=torch.long
        )
        tables = problem.tensors["rotary_cos"], problem.tensors["rotary_sin"]
        interleaved = problem.options.get("rotary_interleaved", False)
        first_column = problem.options.get("rotary_first_column", 0)

        def rotated(x, by_token=True):
            rows = starts[:, None] + torch.arange(x.shape[2]) * by_token
            before, after = x[..., :first_column], x[..., first_column:]
            rope = torch.ops.metal_attn.rope
            turned, _ = rope(after, None, *tables, positions=rows, interleaved=interleaved)
            return torch.cat([before, turned], -1)

        new["k"] = rotated(new["k"])
        if "q" in after:
            by_token = problem.options.get("rotate_q_by_token", True)
            after["q"].copy_(rotated(problem.tensors["q"], by_token))
    for name, x in new.items():
        data, scale, format = x, None, problem.formats[name]
        if format is None:
            data = x.to(after[f"{name}_cache"].dtype)
        else:
            by_head = after.get(f"{name}_scale") if format == "fp8_e4m3" else None
            rotation = problem.options.get("hadamard", 0)
            data, scale = quantise(x, format, by_head, hadamard=rotation)
        for b in range(batch):
            for i in range(length):
                place, row = place_of(after, b, first[b] + i)
                cache = after[f"{name}_cache"]
                bits = torch.uint8 if cache.element_size() == 1 else torch.int8
                cache[place, :, row].view(bits).copy_(data[b, :, i].view(bits))
                if scale is not None and format != "fp8_e4m3":
                    after[f"{name}_scale"][place, :, row] = scale[b, :, i]
    return after


def place_of(tensors, sequence, position):
    """The batch or page of a position, and the row in it."""
    if "block_table" in tensors:
        page = tensors["k_cache"].shape[2]
        return int(tensors["block_table"][sequence, position // page]), position % page
    if "cache_batch_idx" in tensors:
        return int(tensors["cache_batch_idx"][sequence]), position
    return sequence, position


def check_equal(tensors, after, names=None):
    """Every byte of every storage is as expected."""
    for name in names or tensors:
        assert torch.equal(memory_of(tensors[name]), memory_of(after[name])), name


def check(problem):
    """Runs the op and holds all that it was given to the definition."""
    after = expected(problem)
    assert problem.run() is None
    check_equal(problem.tensors, after)
    return after
