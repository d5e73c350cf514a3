"""Makes the tensors of a case of attention for the ops and for the reference."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.visibility import tree_rows
from torch_metal_attn.quantisation import dequantise, quantise, sizes
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.judge import ints, normal
from torch_metal_attn.testing.tensors import dtype_of, expanded, numbers, wrong_rotation


@dataclass
class Problem:
    """The tensors on the CPU, without layouts.

    Attributes: q, k, v: for the reference, (B, H, L, D), or (T, H, D) for packed sequences; k and v
        are not in a cache, but dequantised and in the dtype of q. packing: cu_seqlens_q,
        cu_seqlens_k and the longest lengths; for packed queries alone cu_seqlens_q, None and the
        longest length; else empty. options: the ops' options, without those of caches. stored: k
        and v as the op takes them. where: the options of the cache that they are in. dout, dlse:
        gradients of the results. poisoned_v: the index (batch or row, head, key, column) of the
        NaN or infinite element of v, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    packing: tuple[Any, ...]
    options: dict[str, Any]
    stored: list[Tensor]
    where: dict[str, Any]
    dout: Tensor | None
    dlse: Tensor | None
    poisoned_v: tuple[int, ...] | None


def build(case: Attention) -> Problem:
    """Make the problem, whose values depend only on the case."""
    dtype = dtype_of(case.dtype)
    batch = len(case.sequences)
    lengths = [k for _, k in case.sequences]
    longest = case.longest[1]
    rows = -(-longest // case.page) * case.page if case.cache == "paged" else longest
    q_shape: tuple[int, ...] = (batch, case.heads, case.q_length)
    kv_shape: tuple[int, ...] = (batch, case.kv_heads, rows)
    if case.packs_queries:
        q_shape = (sum(q for q, _ in case.sequences) + case.spare_rows, case.heads)
    if case.is_packed and not case.cache:
        kv_shape = (sum(lengths) + case.spare_rows, case.kv_heads)

    def make(*shape: int, seed: int, dtype: torch.dtype, values: bool = False) -> Tensor:
        return numbers(*shape, kind=case.values, seed=case.seed + seed, dtype=dtype, values=values)

    # Quantised caches are made from float32. Refused cases may have float64, which has no formats.
    kv_dtype = dtype_of(case.cache_dtype or ("float32" if case.format else case.dtype))
    plain = not case.cache and not case.format
    q = expanded(make(*q_shape, case.head_dim, seed=1, dtype=dtype), case.q_layout)
    k = make(*kv_shape, case.head_dim, seed=2, dtype=kv_dtype)
    v = make(*kv_shape, case.v_head_dim, seed=3, dtype=kv_dtype, values=True)
    if plain:
        k, v = expanded(k, case.k_layout), expanded(v, case.v_layout)
    if case.values_in_keys:
        v = k[..., : case.v_head_dim]
    if "qkvpacked" in case.call:  # one tensor holds all three
        q = q[: len(k)]
    options = options_of(case, batch, rows)
    poisoned_v = _poison(case, q, k, v, options)
    _hide(case, k, v)
    (exact_k, exact_v), kept, where = store(case, k, v)
    if case.cache_dtype:
        exact_k, exact_v = exact_k.to(dtype), exact_v.to(dtype)
    if case.cache and case.is_packed:
        exact_k, exact_v = (_rows_of(x, lengths) for x in (exact_k, exact_v))
    if case.cache == "paged" and not case.is_packed and "seqused_k" not in options:
        options["seqused_k"] = ints(*lengths)
    packing: tuple[Any, ...] = ()
    if case.is_packed:
        ends = [ends_of(lengths) for lengths in zip(*case.sequences, strict=True)]
        packing = (*ends, *case.longest)
    elif case.q_lengths:
        packing = (ends_of(case.q_lengths), None, case.longest[0])
    dout = dlse = None
    if case.backward:
        dout = normal(*q.shape[:-1], case.v_head_dim, seed=case.seed + 8).to(dtype)
    if case.through_lse:
        rows_of_lse = (case.heads, len(q)) if case.packs_queries else q.shape[:3]
        dlse = normal(*rows_of_lse, seed=case.seed + 9)
    return Problem(q, exact_k, exact_v, packing, options, kept, where, dout, dlse, poisoned_v)


def ends_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


# Numeric options of the ops that are fields of a case, except those that belong to a tensor.
_NUMBERS = [
    argument.name
    for argument in torch.ops.metal_attn.flash_fwd.default._schema.arguments
    if argument.name in Attention.__dataclass_fields__
    and "Tensor" not in str(argument.type)
    and argument.name not in ("dropout_p", "rotary_interleaved")
]


def options_of(case: Attention, batch: int, rows: int) -> dict[str, Any]:
    """The ops' options, without those of caches. rows: number of rows per sequence in a cache."""
    options: dict[str, Any] = {n: getattr(case, n) for n in _NUMBERS}
    for name in ("seqused_k", "leftpad_k"):
        value = getattr(case, name)
        if value is not None:
            options[name] = ints(*value)
    longest_q, longest = case.longest
    # A paged cache has as many keys as its pages have rows.
    keys = rows if case.cache and not case.is_packed else longest
    whole = {"b": batch, "h": case.heads, "q": longest_q, "k": keys}
    for seed, name in ((5, "attn_mask"), (6, "attn_bias")):
        value = getattr(case, name)
        if value:
            dtype, dims = value.split(" ")
            sizes = [size if letter in dims else 1 for letter, size in whole.items()]
            options[name] = _mask(*sizes, dtype=dtype_of(dtype), seed=case.seed + seed)
    if case.alibi_slopes:
        sizes = [batch, case.heads] if case.alibi_slopes == "bh" else [case.heads]
        options["alibi_slopes"] = 0.2 * normal(*sizes, seed=case.seed + 10).abs()
    if case.learnable_sink:
        options["learnable_sink"] = normal(
            case.heads, seed=case.seed + 11, dtype=dtype_of(case.learnable_sink)
        )
    for side, seed in (("q", 12), ("k", 13)):
        if side in case.rotary:
            sizes = [longest_q if side == "q" else keys, max(case.rotary_columns // 2, 0)]
            sizes = [batch, *sizes] if case.rotary_by_sequence else sizes
            angles = 3 * normal(*sizes, seed=case.seed + seed)
            options |= {f"{side}_rotary_cos": angles.cos(), f"{side}_rotary_sin": angles.sin()}
            options["rotary_interleaved"] = case.rotary_interleaved
    if case.listed is not None:
        options |= _lists(case, batch, keys)
    if case.tree:
        options[case.tree] = _trees(case)
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p
        torch.manual_seed(case.seed)
        options["rng_state"] = torch.randint(2**31 - 1, (2,), dtype=torch.int64)
    return options


def parents_of(case: Attention) -> Tensor:
    """(sequences or 1, tokens) int32: a random earlier token for each token, or -1 for a root."""
    count = len(case.sequences) if case.tree_by_sequence or case.q_lengths else 1
    tokens = case.longest[0]
    chosen = torch.rand(count, tokens, generator=torch.Generator().manual_seed(case.seed + 15))
    return (chosen * torch.arange(1, tokens + 1)).int() - 1


def _trees(case: Attention) -> Tensor:
    parents = parents_of(case)
    tree = parents if case.tree == "parents" else tree_rows(parents, None)
    assert tree is not None
    if not case.q_lengths:
        return tree if case.tree_by_sequence else tree[0]
    # Spare rows, and columns past a sequence's tokens, hold invalid values.
    rows = sum(case.q_lengths) + case.spare_rows
    packed = tree.new_full((rows, *tree.shape[2:]), -9)
    parts = packed[: sum(case.q_lengths)].split(case.q_lengths)
    for of_sequence, part, length in zip(tree, parts, case.q_lengths, strict=True):
        part[..., :length] = of_sequence[(slice(length),) * (tree.dim() - 1)]
    return packed


def _lists(case: Attention, batch: int, keys: int) -> dict[str, Any]:
    """Lists of random keys, some of which are repeated."""
    sizes = (
        batch if "b" in case.list_dims else 1,
        case.kv_heads if "h" in case.list_dims else 1,
        sum(case.q_lengths) + case.spare_rows
        if case.q_lengths
        else -(-case.q_length // max(case.q_block_size, 1)),
        case.listed or 0,
    )
    generator = torch.Generator().manual_seed(case.seed + 14)
    blocks = max(-(-keys // max(case.kv_block_size, 1)), 1)
    entries = torch.randint(blocks, sizes, generator=generator)
    none = torch.rand(sizes, generator=generator) < 0.2
    return {
        "indices": entries.masked_fill(none, -1).int(),
        "kv_block_size": case.kv_block_size,
        "q_block_size": case.q_block_size,
    }


def _mask(*sizes: int, dtype: torch.dtype, seed: int) -> Tensor:
    visible = normal(*sizes, seed=seed) > -0.84  # four in five
    if dtype == torch.bool:
        return visible
    return normal(*sizes, seed=seed + 1000, dtype=dtype).masked_fill(~visible, -math.inf)


def _poison(
    case: Attention, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[int, ...] | None:
    """Put NaN or infinity into one element. Returns its index in v, or None if v lacks it."""
    if not case.poison:
        return None
    bad, name = case.poison.split(" in ")
    x = {"q": q, "k": k, "v": v, "attn_bias": options.get("attn_bias")}[name]
    assert x is not None
    generator = torch.Generator().manual_seed(case.seed)
    place = tuple(int(torch.randint(size, (1,), generator=generator)) for size in x.shape)
    x[place] = math.nan if bad == "nan" else math.inf
    in_v = name == "v" or (name == "k" and case.values_in_keys and place[-1] < case.v_head_dim)
    return place if in_v else None


def _hide(case: Attention, k: Tensor, v: Tensor) -> None:
    """Put NaN into rows outside of all sequences, which must not be read."""
    lengths = [length for _, length in case.sequences]
    for x, layout in ((k, case.k_layout), (v, case.v_layout)):
        if any(word.startswith("repeated") for word in layout):
            continue
        if x is v and case.values_in_keys:
            continue
        parts = list(x)  # (H, L, D) of each sequence
        if x.dim() == 3:
            x[sum(lengths) :] = math.nan
            parts = [part.transpose(0, 1) for part in x[: sum(lengths)].split(lengths)]
        for b, length in enumerate(lengths):
            end = length if case.seqused_k is None else case.seqused_k[b]
            parts[b][:, max(end, 0) :] = math.nan
            if case.leftpad_k is not None:
                parts[b][:, : max(case.leftpad_k[b], 0)] = math.nan


def _rows_of(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat(
        [x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]
        or [x.new_zeros(0, x.shape[1], x.shape[3])]
    )


def store(
    case: Any, k: Tensor, v: Tensor, table: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """k and v (B, H, L, D) dequantised, k and v in the form of a cache, and the cache's options."""
    exact, kept = [k, v], {"k": k, "v": v}
    scales: dict[str, Tensor] = {}
    if case.format:
        # Rows cannot be rotated in blocks that the call must refuse.
        size = 0 if any(wrong_rotation(case).values()) else case.hadamard
        for i, (name, x, format) in enumerate(
            (("k", k, case.format), ("v", v, case.v_format or case.format))
        ):
            by_head = format == "fp8_e4m3"
            head_scale = torch.linspace(0.02, 0.03, k.shape[1]) if by_head else None
            data, scale = quantise(x, format, head_scale, hadamard=size)
            exact[i] = dequantise(data, scale, torch.float32, hadamard=size)
            # As bytes, because not every device has the dtype of 8-bit floats.
            kept[name] = data.view(torch.uint8) if by_head else data
            assert scale is not None
            scales[f"{name}_scale"] = scale
    rows = {name for name, x in scales.items() if x.dim() > 2}
    where: dict[str, Tensor] = {}
    if case.cache:
        page, spare = (case.page, 2) if case.cache == "paged" else (k.shape[2], 1)
        blocks = k.shape[2] // page if case.cache == "paged" else 1
        count = len(k) * blocks + spare
        if table is None:
            places = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed))
            table = places[: len(k) * blocks].view(len(k), blocks).int()
        kept = {name: _in_pages(x, table, count, page) for name, x in kept.items()}
        scales |= {name: _in_pages(scales[name], table, count, page) for name in rows}
        paged = case.cache == "paged"
        where = {"block_table": table} if paged else {"cache_batch_idx": table.flatten()}
    if case.values_in_keys:
        exact[1] = exact[0][..., : case.v_head_dim]
        views = within_keys(case, kept | scales)
        kept, scales = {n: views[n] for n in kept}, {n: views[n] for n in scales}
    rotation = {"hadamard": case.hadamard} if case.hadamard else {}
    return exact, list(kept.values()), scales | where | rotation


def within_keys(case: Any, arguments: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    """The arguments. With values_in_keys, v and its scale become views of the keys'."""
    if not case.values_in_keys:
        return arguments
    columns, scales = sizes(case.format, case.v_head_dim) if case.format else (case.v_head_dim, 0)
    arguments = arguments | {f"v{suffix}": arguments[f"k{suffix}"][..., :columns]}
    if "k_scale" in arguments:
        scale = arguments["k_scale"]
        arguments["v_scale"] = scale[..., :scales] if scale.dim() > 2 else scale
    return arguments


def _in_pages(x: Tensor, table: Tensor, count: int, page: int) -> Tensor:
    """(B, H, L, D) in pages (count, H, page, D). All bits of unused pages are 1."""
    pages = torch.full((count, x.shape[1], page, x.shape[3] * x.itemsize), -1, dtype=torch.int8)
    pages = pages.view(x.dtype)
    for b, owned in enumerate(table.tolist()):
        for i, place in enumerate(owned):
            pages[place] = x[b, :, i * page : (i + 1) * page]
    return pages
