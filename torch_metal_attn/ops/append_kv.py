"""`metal_attn::append_kv` in Python: CPU kernel, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.quantisation import ELEMENTS, format_of, quantise


def _places(
    k: Tensor,
    k_cache: Tensor,
    first: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The batch or page of each new row, and the row's index in it: both (B, L) int64."""
    positions = first[:, None] + torch.arange(k.shape[2], device=k.device)
    if block_table is not None:
        page = k_cache.shape[2]
        return block_table.long().gather(1, positions // page), positions % page
    if cache_batch_idx is None:
        cache_batch_idx = torch.arange(k.shape[0], device=k.device)
    return cache_batch_idx.long()[:, None].expand_as(positions), positions


def _write(
    new: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    places: tuple[Tensor, Tensor],
    hadamard: int,
) -> None:
    batch, row = places
    if cache.dtype in ELEMENTS:
        cache[batch, :, row] = new.transpose(1, 2).to(cache.dtype)
        return
    format = format_of(cache, scale)
    head_scale = scale if format == "fp8_e4m3" else None
    data, block_scales = quantise(new, format, head_scale, hadamard=hadamard)
    cache.view(data.view(torch.uint8).dtype)[batch, :, row] = data.view(torch.uint8).transpose(1, 2)
    if scale is not None and head_scale is None:
        assert block_scales is not None
        scale[batch, :, row] = block_scales.transpose(1, 2)


@cpu_kernel("append_kv")
def reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    q: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotate_q_by_token: bool = True,
    rotary_from_leftpad: bool = True,
    steps: Tensor | None = None,
    rotary_first_column: int = 0,
    hadamard: int = 0,
) -> None:
    """The op in torch. steps: (B or 1, L), rotary positions relative to the first token's."""
    if cache_seqlens is None:
        first = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
    else:
        first = cache_seqlens.long()
    if rotary_cos is not None and rotary_sin is not None:
        rotary_first = first
        if leftpad_k is not None and rotary_from_leftpad:
            rotary_first = first - leftpad_k

        def rotate_(x: Tensor, advance: bool) -> None:
            after = torch.arange(x.shape[2], device=x.device) if steps is None else steps
            rows = rotary_first[:, None] + (after if advance else torch.zeros_like(after))
            options = {"positions": rows, "interleaved": rotary_interleaved}
            columns = x[..., rotary_first_column:]
            torch.ops.metal_attn.rope_(columns, None, rotary_cos, rotary_sin, **options)

        k = k.clone()
        rotate_(k, True)
        if q is not None:
            rotate_(q, rotate_q_by_token)
    places = _places(k, k_cache, first, block_table, cache_batch_idx)
    _write(k, k_cache, k_scale, places, hadamard)
    _write(v, v_cache, v_scale, places, hadamard)


_TABLES = ("rotary_cos", "rotary_sin")


def written_caches(arguments: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The caches that the op writes, and the sources of each. Scales per head are only read."""
    sources = {"k": ("k", *_TABLES), "v": ("v",)}
    written = {f"{side}_cache": names for side, names in sources.items()}
    for side, names in sources.items():
        scale = arguments.get(f"{side}_scale")
        if scale is not None and scale.dtype == torch.float16:
            written[f"{side}_scale"] = names
    return written


def _written(arguments: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    q = {"q": _TABLES} if arguments.get("q") is not None else {}
    return q | written_caches(arguments)


refuse("append_kv", "detach it, as a cache keeps no graph", _written)
