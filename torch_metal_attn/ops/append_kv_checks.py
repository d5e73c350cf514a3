"""What csrc/ops/append_kv_checks.cpp checks, for tensors without data: meta, and while compiling.

Values of indices and shared memory are the exception: they can be seen in neither.
"""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn import quantisation

_ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)
_rule: Any = torch._check_value

PAGE_MULTIPLE = 8


def append_kv(
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
) -> None:
    """The checks of `metal_attn::append_kv`."""
    operands = {"v": v, "k_cache": k_cache, "v_cache": v_cache}
    indices = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "leftpad_k": leftpad_k,
    }
    others = {"q": q, "block_table": block_table, "k_scale": k_scale, "v_scale": v_scale}
    others |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    for name, tensor in (operands | indices | others).items():
        if tensor is not None:
            _rule(
                tensor.device == k.device,
                lambda n=name, t=tensor: (
                    f"{n} is on {t.device} and k on {k.device}; they must be on one device"
                ),
            )
    _rule(
        k.dtype in _ELEMENTS,
        lambda: f"k has dtype {k.dtype}; it must be float32, float16 or bfloat16",
    )
    _alike("v", v, "k", k)
    for name, tensor in ({"k": k} | operands | ({} if q is None else {"q": q})).items():
        _rows(name, tensor)
    batch, heads, length, head_dim = k.shape
    _shape("v", v, (batch, heads, length, v.shape[3]))

    format = _format(k, k_cache, v_cache, k_scale, v_scale)
    for cache_name, cache, name, new, scale in (
        ("k_cache", k_cache, "k", k, k_scale),
        ("v_cache", v_cache, "v", v, v_scale),
    ):
        columns, blocks = new.shape[3], 0
        if format in ("q8_0", "q4_0"):
            _rule(
                columns % quantisation.BLOCK == 0,
                lambda n=name, c=columns: (
                    f"{n} has a head dim of {c}; for q8_0 and q4_0 it must be a multiple of "
                    f"{quantisation.BLOCK}"
                ),
            )
            columns, blocks = quantisation.sizes(format, columns)
        places = (k_cache.shape[0], heads, k_cache.shape[2])
        _shape(cache_name, cache, (*places, columns))
        if scale is not None and blocks > 0:
            _shape(f"{name}_scale", scale, (*places, blocks))
        elif scale is not None:
            _shape(f"{name}_scale", scale, (heads,), (batch, heads))

    for name, tensor in indices.items():
        if tensor is not None:
            _int32(name, tensor)
            _shape(name, tensor, (batch,))
    capacity = k_cache.shape[2]
    if block_table is not None:
        capacity = _pages(k_cache, block_table, cache_batch_idx, batch)
    elif cache_batch_idx is None:
        _rule(
            k_cache.shape[0] == batch,
            lambda: (
                f"k_cache has a batch of {k_cache.shape[0]} and k of {batch}; without "
                "cache_batch_idx they must be equal"
            ),
        )
    _rule(
        length <= capacity,
        lambda: f"k has a length of {length} and k_cache room for {capacity} rows of a sequence",
    )
    _rotary(rotary_cos, rotary_sin, rotary_interleaved, q, head_dim)
    if q is not None:
        _alike("q", q, "k", k)
        _shape("q", q, (batch, q.shape[1], q.shape[2], head_dim))


def _format(
    k: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> str | None:
    """The caches' format; None if they have k's dtype."""
    _alike("v_cache", v_cache, "k_cache", k_cache)
    _both("k_scale", k_scale, "v_scale", v_scale)
    if k_scale is not None and v_scale is not None:
        _alike("v_scale", v_scale, "k_scale", k_scale)
    if k_cache.dtype == k.dtype:
        _rule(
            k_scale is None,
            lambda: f"k_scale is given and k_cache has k's dtype, {k.dtype}, which needs none",
        )
        return None
    _rule(
        k_cache.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn),
        lambda: (
            f"k_cache has dtype {k_cache.dtype}; it must be k's {k.dtype}, int8, uint8 or "
            "float8_e4m3fn"
        ),
    )
    try:
        return quantisation.format_of(k_cache, k_scale)
    except ValueError as error:
        raise ValueError(f"k_scale is not k_cache's: {error}") from None


def _pages(k_cache: Tensor, block_table: Tensor, cache_batch_idx: Tensor | None, batch: int) -> int:
    """The rows that a sequence may have."""
    page = k_cache.shape[2]
    _rule(
        cache_batch_idx is None,
        lambda: (
            "cache_batch_idx is given with block_table, which says already where each sequence "
            "is; give one of them"
        ),
    )
    _int32("block_table", block_table)
    _rule(
        block_table.dim() == 2 and block_table.shape[0] == batch,
        lambda: (
            f"block_table has shape {tuple(block_table.shape)}; it must be ({batch}, max_blocks)"
        ),
    )
    _rule(
        page >= PAGE_MULTIPLE and page % PAGE_MULTIPLE == 0,
        lambda: (
            f"k_cache has pages of {page} rows; with block_table they must be a multiple of "
            f"{PAGE_MULTIPLE}"
        ),
    )
    return block_table.shape[1] * page


def _rotary(
    cos: Tensor | None, sin: Tensor | None, interleaved: bool, q: Tensor | None, head_dim: int
) -> None:
    _both("rotary_cos", cos, "rotary_sin", sin)
    if cos is None or sin is None:
        _rule(
            q is None,
            lambda: "q is given and rotary_cos is not, which is all that q is for",
        )
        _rule(
            not interleaved,
            lambda: "rotary_interleaved is True and rotary_cos is not given",
        )
        return
    _rule(
        cos.dtype in _ELEMENTS,
        lambda: f"rotary_cos has dtype {cos.dtype}; it must be float32, float16 or bfloat16",
    )
    _alike("rotary_sin", sin, "rotary_cos", cos)
    _rule(
        cos.dim() == 2,
        lambda: f"rotary_cos has {cos.dim()} dimensions; it must have 2: (rows, R / 2)",
    )
    _shape("rotary_sin", sin, tuple(cos.shape))
    _rule(cos.shape[0] > 0, lambda: "rotary_cos has no rows")
    _rule(
        2 * cos.shape[1] <= head_dim,
        lambda: (
            f"rotary_cos has {cos.shape[1]} columns and k a head dim of {head_dim}; they must be "
            "at most half of it"
        ),
    )


def _both(name: str, tensor: Tensor | None, other_name: str, other: Tensor | None) -> None:
    _rule(
        (tensor is None) == (other is None),
        lambda: f"only one of {name} and {other_name} is given; give both or neither",
    )


def _alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    _rule(
        tensor.dtype == other.dtype,
        lambda: (
            f"{name} has dtype {tensor.dtype} and {other_name} {other.dtype}; they must be alike"
        ),
    )


def _rows(name: str, tensor: Tensor) -> None:
    _rule(
        tensor.dim() == 4,
        lambda: (
            f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; it must have 4"
        ),
    )
    _rule(
        tensor.shape[3] <= 1 or tensor.stride(3) == 1,
        lambda: (
            f"{name} has strides {tensor.stride()}; the last must be 1: call {name}.contiguous() "
            "first"
        ),
    )


def _int32(name: str, tensor: Tensor) -> None:
    _rule(tensor.dtype == torch.int32, lambda: f"{name} has dtype {tensor.dtype}; it must be int32")


def _shape(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    _rule(
        any(
            tensor.dim() == len(shape)
            and all(size == other for size, other in zip(tensor.shape, shape, strict=True))
            for shape in allowed
        ),
        lambda: (
            f"{name} has shape {tuple(tensor.shape)}; it must be {' or '.join(map(str, allowed))}"
        ),
    )
