"""What csrc/ops/cache/check.cpp checks, for tensors without data: meta, and while compiling.

Values of block_table and cache_batch_idx cannot be checked there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_metal_attn.ops import rules
from torch_metal_attn.quantisation import BLOCK, columns

_KV_NAMES = "float32, float16 or bfloat16, or int8, uint8 or float8_e4m3fn with a scale"
# By the dtype of the data: formats by the scale's dtype, and how the allowed ones are named.
_FORMATS: dict[torch.dtype, tuple[dict[torch.dtype | None, str], str]] = {
    torch.int8: ({torch.float16: "q8_0"}, "float16 (q8_0)"),
    torch.uint8: (
        {torch.float16: "q4_0", torch.float32: "fp8_e4m3"},
        "float16 (q4_0) or float32 (fp8_e4m3)",
    ),
    torch.float8_e4m3fn: (
        {None: "fp8_e4m3", torch.float32: "fp8_e4m3"},
        "float32 (fp8_e4m3) or None",
    ),
}


class Names(NamedTuple):
    """An op's names for the tensor that the cache belongs to, and for the two caches."""

    q: str = "q"
    k: str = "k"
    v: str = "v"


NAMES = Names()


def indexed(options: dict[str, Any]) -> bool:
    """Whether k and v are a cache with 4 dimensions and its own batch dimension."""
    return any(options.get(name) is not None for name in ("block_table", "cache_batch_idx"))


def layout(options: dict[str, Any]) -> tuple[str, ...]:
    """The dimensions of such a cache, in words."""
    if options.get("block_table") is not None:
        return ("pages", "kv_heads", "page", "head_dim")
    return ("cache_batch", "kv_heads", "kv_length", "head_dim")


def kv_format(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], names: Names = NAMES
) -> str | None:
    """The format that the dtypes stand for; None if k and v are not quantised."""
    of_k = _format(names.k, k, "k_scale", options.get("k_scale"), names.q, q)
    of_v = _format(names.v, v, "v_scale", options.get("v_scale"), names.q, q)
    rules.rule(
        of_k == of_v,
        lambda: (
            f"{names.v} is {of_v or 'not quantised'} and {names.k} {of_k or 'not quantised'}; "
            "they must be alike"
        ),
    )
    if of_k is None:
        rules.same_dtype(names.v, v, k, names.k)
    return of_k


def capacity(
    q: Tensor, k: Tensor, batch: int, options: dict[str, Any], names: Names = NAMES
) -> int:
    """The number of keys that a sequence may have."""
    table, indices = options.get("block_table"), options.get("cache_batch_idx")
    rules.rule(
        table is None or indices is None,
        lambda: (
            "cache_batch_idx is given with block_table, which says already where each sequence "
            "is; give one of them"
        ),
    )
    if indices is not None:
        rules.index("cache_batch_idx", indices, q, names.q)
        rules.shape("cache_batch_idx", indices, [(batch,)])
    if table is None:
        length: int = k.shape[2]
        return length
    rules.int32("block_table", table, q, names.q)
    rules.rule(
        table.dim() == 2 and table.shape[0] == batch,
        lambda: f"block_table has shape {tuple(table.shape)}; it must be ({batch}, max_blocks)",
    )
    rules.last_stride("block_table", table)
    page = k.shape[2]
    rules.rule(
        page > 0,
        lambda: f"{names.k} has pages of 0 keys; with block_table they must have at least 1",
    )
    pages = table.shape[1]
    rules.rule(
        pages <= rules.MAX_LENGTH // page,
        lambda: (
            f"block_table has {pages} pages of {page} keys a sequence; together they must be at "
            f"most {rules.MAX_LENGTH} keys"
        ),
    )
    keys: int = pages * page
    return keys


def scales(
    k: Tensor,
    v: Tensor,
    batch: int,
    quantised: str | None,
    options: dict[str, Any],
    names: Names = NAMES,
) -> None:
    """Check shapes and strides of k_scale and v_scale."""
    for name, x, scale_name in ((names.k, k, "k_scale"), (names.v, v, "v_scale")):
        scale = options.get(scale_name)
        if scale is None:
            continue
        if quantised == "fp8_e4m3":
            rules.shape(scale_name, scale, [(x.shape[1],), (batch, x.shape[1])])
            continue
        size = columns(x, scale)
        rules.rule(
            size % BLOCK == 0,
            lambda n=name, d=size: (
                f"{n} has a head dim of {d}; {quantised} needs a multiple of {BLOCK}"
            ),
        )
        rules.shape(scale_name, scale, [(*x.shape[:-1], size // BLOCK)])
        rules.last_stride(scale_name, scale)


def _format(
    name: str, x: Tensor, scale_name: str, scale: Tensor | None, q_name: str, q: Tensor
) -> str | None:
    if scale is not None:
        rules.same_device(scale_name, scale, q, q_name)
    if x.dtype not in _FORMATS:
        _stored_dtype(name, x, q_name, q)
        rules.rule(
            scale is None,
            lambda: (
                f"{scale_name} is given and {name} has dtype {x.dtype}; only int8, uint8 and "
                "float8_e4m3fn have scales"
            ),
        )
        return None
    formats, allowed = _FORMATS[x.dtype]
    kind = None if scale is None else scale.dtype
    rules.rule(
        kind in formats,
        lambda: f"{name} has dtype {x.dtype} and {scale_name} is {kind}; it must be {allowed}",
    )
    return formats[kind]


def _stored_dtype(name: str, x: Tensor, q_name: str, q: Tensor) -> None:
    """float32 queries may have a cache in half precision; nothing else is converted."""
    if q.dtype != torch.float32:
        rules.same_dtype(name, x, q, q_name)
        return
    rules.rule(
        x.dtype in rules.ELEMENTS,
        lambda: f"{name} has dtype {x.dtype} and {q_name} {q.dtype}; it must be {_KV_NAMES}",
    )
