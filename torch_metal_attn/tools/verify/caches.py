"""Checks of the ops that write caches, bit for bit: append_kv, decode_step and copy_pages."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.quantisation import quantise, sizes
from torch_metal_attn.testing.judge import Measure, ints, normal, on, same_bits

_STORED = {"q8_0": torch.int8, "q4_0": torch.uint8, "fp8_e4m3": torch.uint8}
_PAGE = 16
_CAPACITY = 64


def _problem(
    dtype: torch.dtype,
    format: str,
    paged: bool,
    rotary: bool,
    batch: int,
    kv_heads: int,
    length: int,
    head_dim: int,
) -> dict[str, Any]:
    """Arguments of `append_kv` by name: caches that hold a few keys, and new keys."""
    t: dict[str, Any] = {
        "k": normal(batch, kv_heads, length, head_dim, seed=1, dtype=dtype),
        "v": normal(batch, kv_heads, length, head_dim, seed=2, dtype=dtype),
        "cache_seqlens": ints(*(3 + 14 * b for b in range(batch))),
    }
    places, rows = batch, _CAPACITY
    if paged:
        places, rows = batch * _CAPACITY // _PAGE, _PAGE
        numbers = torch.randperm(places, generator=torch.Generator().manual_seed(0))
        t["block_table"] = numbers.view(batch, -1).int()
    for seed, name in enumerate("kv"):
        old = normal(places, kv_heads, rows, head_dim, seed=3 + seed, dtype=dtype)
        if not format:
            t[f"{name}_cache"] = old
            continue
        by_head = torch.linspace(0.02, 0.03, kv_heads) if format == "fp8_e4m3" else None
        data, scale = quantise(old, format, by_head)
        t[f"{name}_cache"], t[f"{name}_scale"] = data.view(_STORED[format]), scale
    if rotary:
        angles = 3 * normal(_CAPACITY, head_dim // 2, seed=5)
        t |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return t


def _place(t: dict[str, Any], sequence: int, position: int) -> tuple[int, int]:
    if "block_table" not in t:
        return sequence, position
    return int(t["block_table"][sequence, position // _PAGE]), position % _PAGE


def _expected(t: dict[str, Any], new_k: Tensor, format: str) -> dict[str, Tensor]:
    """The caches afterwards, written row by row; new_k is already rotated."""
    names = [f"{side}_{kind}" for side in "kv" for kind in ("cache", "scale")]
    after = {name: t[name].clone() for name in names if name in t}
    for side, new in (("k", new_k), ("v", t["v"])):
        data, scale = new, None
        if format:
            by_head = t[f"{side}_scale"] if format == "fp8_e4m3" else None
            data, scale = quantise(new, format, by_head)
            data = data.view(_STORED[format])
        for b, first in enumerate(t["cache_seqlens"].tolist()):
            for i in range(new.shape[2]):
                place, row = _place(t, b, first + i)
                after[f"{side}_cache"][place, :, row] = data[b, :, i]
                if scale is not None and sizes(format, new.shape[3])[1]:
                    after[f"{side}_scale"][place, :, row] = scale[b, :, i]
    return after


def _rotated(x: Tensor, t: dict[str, Any], device: torch.device) -> Tensor:
    """Rotate by `rope`, which has its own checks, each sequence from its first new row on."""
    rows = t["cache_seqlens"].long()[:, None] + torch.arange(x.shape[2])
    moved = on(device, {"x": x, "cos": t["rotary_cos"], "sin": t["rotary_sin"], "rows": rows})
    rope = torch.ops.metal_attn.rope
    rotated, _ = rope(moved["x"], None, moved["cos"], moved["sin"], positions=moved["rows"])
    result: Tensor = rotated.cpu()
    return result


def check_append(
    device: torch.device,
    *,
    dtype: torch.dtype,
    format: str = "",
    paged: bool = False,
    rotary: bool = False,
    batch: int = 2,
    kv_heads: int = 2,
    length: int = 5,
    head_dim: int = 64,
) -> list[Measure]:
    """`append_kv` writes what `rope`, `quantise` and an indexed copy give, and nothing else."""
    t = _problem(dtype, format, paged, rotary, batch, kv_heads, length, head_dim)
    new_k = _rotated(t["k"], t, device) if rotary else t["k"]
    after = _expected(t, new_k, format)
    there = {n: x.clone() for n, x in on(device, t).items()}
    torch.ops.metal_attn.append_kv(**there)
    return [same_bits(name, there[name], x) for name, x in after.items()]


def check_step(
    device: torch.device,
    *,
    dtype: torch.dtype,
    format: str = "",
    paged: bool = False,
    rotary: bool = False,
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    length: int = 1,
    head_dim: int = 64,
    num_splits: int = 1,
) -> list[Measure]:
    """`decode_step` has the same bits as `rope`, `append_kv` and `flash_decode` in sequence."""
    t = _problem(dtype, format, paged, rotary, batch, kv_heads, length, head_dim)
    q = normal(batch, heads, length, head_dim, seed=7, dtype=dtype)
    ours = {n: x.clone() for n, x in on(device, t).items()}
    theirs = {n: x.clone() for n, x in ours.items()}
    ops = torch.ops.metal_attn
    options = {"num_splits": num_splits, "causal": True}
    out, lse = ops.decode_step(q.to(device), **ours, **options)
    rotated = _rotated(q, t, device) if rotary else q
    ops.append_kv(**theirs)
    kept = ("block_table", "k_scale", "v_scale")
    expected, expected_lse = ops.flash_decode(
        rotated.to(device),
        theirs["k_cache"],
        theirs["v_cache"],
        seqused_k=(t["cache_seqlens"] + length).to(device),
        **{n: theirs[n] for n in kept if n in theirs},
        **options,
    )
    caches = [n for n in theirs if n.endswith(("_cache", "_scale"))]
    return [
        same_bits("out", out, expected),
        same_bits("softmax_lse", lse, expected_lse),
        *(same_bits(name, ours[name], theirs[name]) for name in caches),
    ]


def check_copy(
    device: torch.device, *, dtype: torch.dtype, page: tuple[int, ...] = (2, 16, 64)
) -> list[Measure]:
    """`copy_pages` copies every byte of some pages, and does not change the others."""
    generator = torch.Generator().manual_seed(0)
    shape = (7, *page[:-1], page[-1] * dtype.itemsize)
    cache = torch.randint(0, 256, shape, generator=generator).byte().view(dtype)
    src, dst = torch.tensor([0, 4, 6]), torch.tensor([5, 1, 2])
    after = cache.clone()
    after.view(torch.uint8)[dst] = cache.view(torch.uint8)[src]
    there = cache.to(device)
    torch.ops.metal_attn.copy_pages(there, src.to(device), dst.to(device))
    return [same_bits("cache", there, after)]
