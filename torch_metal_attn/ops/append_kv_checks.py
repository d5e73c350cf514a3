"""What csrc/ops/append_kv_checks.cpp checks, for tensors without data: meta, and while compiling.

Values of indices and shared memory are the exception: they can be seen in neither.
"""

import torch
from torch import Tensor

from torch_metal_attn import quantisation
from torch_metal_attn.ops import rules

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
            rules.same_device(name, tensor, k, "k")
    rules.element("k", k)
    rules.same_dtype("v", v, k, "k")
    for name, tensor in ({"k": k} | operands | ({} if q is None else {"q": q})).items():
        _rows(name, tensor)
    batch, heads, length, head_dim = k.shape
    rules.shape("v", v, [(batch, heads, length, v.shape[3])])

    format = _format(k, k_cache, v_cache, k_scale, v_scale)
    for cache_name, cache, name, new, scale in (
        ("k_cache", k_cache, "k", k, k_scale),
        ("v_cache", v_cache, "v", v, v_scale),
    ):
        columns, blocks = new.shape[3], 0
        if format in ("q8_0", "q4_0"):
            rules.rule(
                columns % quantisation.BLOCK == 0,
                lambda n=name, c=columns: (
                    f"{n} has a head dim of {c}; for q8_0 and q4_0 it must be a multiple of "
                    f"{quantisation.BLOCK}"
                ),
            )
            columns, blocks = quantisation.sizes(format, columns)
        places = (k_cache.shape[0], heads, k_cache.shape[2])
        rules.shape(cache_name, cache, [(*places, columns)])
        if scale is not None and blocks > 0:
            rules.shape(f"{name}_scale", scale, [(*places, blocks)])
        elif scale is not None:
            rules.shape(f"{name}_scale", scale, [(heads,), (batch, heads)])

    for name, tensor in indices.items():
        if tensor is not None:
            rules.int32(name, tensor, k)
            rules.shape(name, tensor, [(batch,)])
    capacity = k_cache.shape[2]
    if block_table is not None:
        capacity = _pages(k_cache, block_table, cache_batch_idx, batch)
    elif cache_batch_idx is None:
        rules.rule(
            k_cache.shape[0] == batch,
            lambda: (
                f"k_cache has a batch of {k_cache.shape[0]} and k of {batch}; without "
                "cache_batch_idx they must be equal"
            ),
        )
    rules.rule(
        length <= capacity,
        lambda: f"k has a length of {length} and k_cache room for {capacity} rows of a sequence",
    )
    _rotary(rotary_cos, rotary_sin, rotary_interleaved, q, head_dim)
    if q is not None:
        rules.same_dtype("q", q, k, "k")
        rules.shape("q", q, [(batch, q.shape[1], q.shape[2], head_dim)])


def _format(
    k: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> str | None:
    """The caches' format; None if they have k's dtype."""
    rules.same_dtype("v_cache", v_cache, k_cache, "k_cache")
    _both("k_scale", k_scale, "v_scale", v_scale)
    if k_scale is not None and v_scale is not None:
        rules.same_dtype("v_scale", v_scale, k_scale, "k_scale")
    if k_cache.dtype == k.dtype:
        rules.rule(
            k_scale is None,
            lambda: f"k_scale is given and k_cache has k's dtype, {k.dtype}, which needs none",
        )
        return None
    rules.rule(
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
    rules.rule(
        cache_batch_idx is None,
        lambda: (
            "cache_batch_idx is given with block_table, which says already where each sequence "
            "is; give one of them"
        ),
    )
    rules.int32("block_table", block_table, k_cache)
    rules.rule(
        block_table.dim() == 2 and block_table.shape[0] == batch,
        lambda: (
            f"block_table has shape {tuple(block_table.shape)}; it must be ({batch}, max_blocks)"
        ),
    )
    rules.rule(
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
        rules.rule(
            q is None,
            lambda: "q is given and rotary_cos is not, which is all that q is for",
        )
        rules.rule(
            not interleaved,
            lambda: "rotary_interleaved is True and rotary_cos is not given",
        )
        return
    rules.element("rotary_cos", cos)
    rules.same_dtype("rotary_sin", sin, cos, "rotary_cos")
    rules.rule(
        cos.dim() == 2,
        lambda: f"rotary_cos has {cos.dim()} dimensions; it must have 2: (rows, R / 2)",
    )
    rules.shape("rotary_sin", sin, [tuple(cos.shape)])
    rules.rule(cos.shape[0] > 0, lambda: "rotary_cos has no rows")
    rules.rule(
        2 * cos.shape[1] <= head_dim,
        lambda: (
            f"rotary_cos has {cos.shape[1]} columns and k a head dim of {head_dim}; they must be "
            "at most half of it"
        ),
    )


def _both(name: str, tensor: Tensor | None, other_name: str, other: Tensor | None) -> None:
    rules.rule(
        (tensor is None) == (other is None),
        lambda: f"only one of {name} and {other_name} is given; give both or neither",
    )


def _rows(name: str, tensor: Tensor) -> None:
    rules.rule(
        tensor.dim() == 4,
        lambda: (
            f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; it must have 4"
        ),
    )
    rules.last_stride(name, tensor)
