"""What csrc/ops/flash_fwd.cpp checks, for tensors without data: meta, and while compiling.

Values of lengths are the exception: they can be read in neither.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM_QK = 576
MAX_HEAD_DIM_V = 512
MAX_LENGTH = 2**31 - 1024
ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)
ELEMENT_NAMES = "float32, float16 or bfloat16"
_MAX_FLOAT = torch.finfo(torch.float32).max
_MIN_FLOAT = torch.finfo(torch.float32).smallest_normal


def _rule(condition: Any, message: Callable[..., str]) -> None:
    torch._check_value(condition, message)


def dense(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """The checks of `metal_attn::flash_fwd`."""
    _operands(q, k, v, ("batch", "heads", "length", "head_dim"))
    for name, tensor in (("k", k), ("v", v)):
        _alike(name, tensor, "q", q, 0, "a batch")
    _alike("v", v, "k", k, 2, "a length")
    _options(q, q.shape[0], q.shape[2], k.shape[2], options)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: dict[str, Any],
) -> None:
    """The checks of `metal_attn::flash_varlen_fwd`."""
    _operands(q, k, v, ("tokens", "heads", "head_dim"))
    _alike("v", v, "k", k, 0, "a length")
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _index(name, tensor, q)
        _rule(
            tensor.shape[0] > 0,
            lambda n=name: f"{n} is empty; it must hold a 0 and each sequence's end",
        )
    _alike("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q, 0, "a length")
    for name, size in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _rule(
            0 <= size <= MAX_LENGTH,
            lambda n=name, s=size: f"{n} is {s}; it must be in 0..{MAX_LENGTH}",
        )
    _options(q, cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k, options)


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    rows: tuple[int, ...],
) -> None:
    """The checks of `flash_bwd` and `flash_varlen_bwd` beyond those; rows: softmax_lse's shape.

    Not the one for head dims whose gradients need more threadgroup memory than there is.
    """
    _like_out("out", out, q, v)
    _like_out("dout", dout, q, v)
    _statistics("softmax_lse", softmax_lse, q, rows)
    _contiguous("softmax_lse", softmax_lse)
    if dlse is not None:
        _statistics("dlse", dlse, q, rows)


def added_gradient(
    name: str,
    dout: Tensor,
    q: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    delta: Tensor,
    rows: tuple[int, ...],
    options: dict[str, Any],
) -> Tensor:
    """Those of `flash_bwd_bias`, `flash_bwd_slopes` and their packed forms; rows as above.

    Returns the option whose gradient is wanted.
    """
    _like_out("dout", dout, q, v)
    for statistic, tensor in (("softmax_lse", softmax_lse), ("delta", delta)):
        _statistics(statistic, tensor, q, rows)
        _contiguous(statistic, tensor)
    value: Tensor | None = options.get(name)
    _rule(value is not None, lambda: f"{name} is None; it must be floating, for its gradient")
    assert value is not None
    return value


def _like_out(name: str, tensor: Tensor, q: Tensor, v: Tensor) -> None:
    _same_device(name, tensor, q)
    _rule(
        tensor.dtype == q.dtype,
        lambda: f"{name} has dtype {tensor.dtype} and q {q.dtype}; they must be alike",
    )
    _shape(name, tensor, [(*q.shape[:-1], v.shape[-1])])
    _last_stride(name, tensor)


def _statistics(name: str, tensor: Tensor, q: Tensor, rows: tuple[int, ...]) -> None:
    _same_device(name, tensor, q)
    _rule(
        tensor.dtype == torch.float32,
        lambda: f"{name} has dtype {tensor.dtype}; it must be float32",
    )
    _shape(name, tensor, [rows])


def _contiguous(name: str, tensor: Tensor) -> None:
    _rule(
        tensor.is_contiguous(),
        lambda: (
            f"{name} has strides {tensor.stride()}; it must be contiguous: pass what the op "
            f"returned, or call {name}.contiguous()"
        ),
    )


def _operands(q: Tensor, k: Tensor, v: Tensor, layout: tuple[str, ...]) -> None:
    rank = len(layout)
    for name, tensor in (("k", k), ("v", v)):
        _same_device(name, tensor, q)
        _rule(
            tensor.dtype == q.dtype,
            lambda n=name, t=tensor: f"{n} has dtype {t.dtype} and q {q.dtype}; they must be alike",
        )
    _element("q", q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _rule(
            tensor.dim() == rank,
            lambda n=name, t=tensor: (
                f"{n} has {t.dim()} dimensions, shape {tuple(t.shape)}; it must have {rank}: "
                f"({', '.join(layout)})"
            ),
        )
        _last_stride(name, tensor)
    head = 1
    _alike("v", v, "k", k, head, "a number of heads")
    _alike("k", k, "q", q, rank - 1, "a head dim")
    heads, kv_heads = q.shape[head], k.shape[head]
    _rule(
        heads == 0 or (kv_heads > 0 and heads % kv_heads == 0),
        lambda: f"q has {heads} heads and k {kv_heads}; k's must divide q's",
    )
    for name, tensor, most in (("q", q, MAX_HEAD_DIM_QK), ("v", v, MAX_HEAD_DIM_V)):
        size = tensor.shape[-1]
        _rule(
            1 <= size <= most,
            lambda n=name, d=size, m=most: f"{n} has a head dim of {d}; it must be in 1..{m}",
        )


def _options(q: Tensor, batch: int, q_length: int, kv_length: int, options: dict[str, Any]) -> None:
    _numbers(options)
    heads = q.shape[1]
    for name in ("seqused_k", "leftpad_k"):
        tensor = options.get(name)
        if tensor is not None:
            _index(name, tensor, q)
            _shape(name, tensor, [(batch,)])
    mask, bias = options.get("attn_mask"), options.get("attn_bias")
    if mask is not None:
        _rule(
            mask.dtype == torch.bool or mask.dtype in ELEMENTS,
            lambda: f"attn_mask has dtype {mask.dtype}; it must be bool, {ELEMENT_NAMES}",
        )
        _rule(
            mask.dtype == torch.bool or bias is None,
            lambda: "attn_mask is floating and attn_bias is given too; add the two yourself",
        )
    if bias is not None:
        _element("attn_bias", bias)
    for name, tensor in (("attn_mask", mask), ("attn_bias", bias)):
        if tensor is not None:
            _same_device(name, tensor, q)
            _broadcasts(name, tensor, (batch, heads, q_length, kv_length))
    slopes, sink = options.get("alibi_slopes"), options.get("learnable_sink")
    if slopes is not None:
        _same_device("alibi_slopes", slopes, q)
        _rule(
            slopes.dtype == torch.float32,
            lambda: f"alibi_slopes has dtype {slopes.dtype}; it must be float32",
        )
        _shape("alibi_slopes", slopes, [(heads,), (batch, heads)])
        _dense_heads("alibi_slopes", slopes, heads)
    if sink is not None:
        _same_device("learnable_sink", sink, q)
        _element("learnable_sink", sink)
        _shape("learnable_sink", sink, [(heads,)])
        _dense_heads("learnable_sink", sink, heads)
    _rotary(q, batch, {"q": q_length, "k": kv_length}, options)
    _dropout(q, options)


def _numbers(options: dict[str, Any]) -> None:
    scale = options.get("softmax_scale")
    _rule(
        scale is None or abs(scale * math.log2(math.e)) <= _MAX_FLOAT,
        lambda: f"softmax_scale is {scale}; it must be finite in float32",
    )
    chunk, softcap = options.get("attention_chunk", 0), options.get("softcap", 0.0)
    _rule(
        0 <= chunk <= MAX_LENGTH,
        lambda: f"attention_chunk is {chunk}; it must be 0 (off) or in 1..{MAX_LENGTH}",
    )
    _rule(
        softcap == 0 or _MIN_FLOAT <= softcap * math.log2(math.e) <= _MAX_FLOAT,
        lambda: f"softcap is {softcap}; it must be 0 (off) or positive and finite in float32",
    )
    right = options.get("window_size_right", -1)
    _rule(
        not (options.get("causal", False) and right > 0),
        lambda: f"window_size_right is {right} with causal=True, which makes it 0; leave it at -1",
    )
    offset = options.get("q_offset")
    _rule(
        offset is None or -MAX_LENGTH <= offset <= MAX_LENGTH,
        lambda: f"q_offset is {offset}; it must be in -{MAX_LENGTH}..{MAX_LENGTH}",
    )


def _dropout(q: Tensor, options: dict[str, Any]) -> None:
    dropout_p, state = options.get("dropout_p", 0.0), options.get("rng_state")
    _rule(0.0 <= dropout_p <= 1.0, lambda: f"dropout_p is {dropout_p}; it must be in 0..1")
    _rule(
        (dropout_p > 0.0) == (state is not None),
        lambda: (
            f"dropout_p is {dropout_p} and rng_state is {'None' if state is None else 'given'}; "
            "dropout needs a random state, and nothing else does"
        ),
    )
    if state is None:
        return
    _same_device("rng_state", state, q)
    _rule(
        state.dtype == torch.int64,
        lambda: f"rng_state has dtype {state.dtype}; it must be int64",
    )
    _shape("rng_state", state, [(2,)])
    _rule(
        state.stride(0) == 1,
        lambda: (
            f"rng_state has strides {state.stride()}; the last must be 1: call "
            "rng_state.contiguous() first"
        ),
    )


def _rotary(q: Tensor, batch: int, lengths: dict[str, int], options: dict[str, Any]) -> None:
    tables = {}
    for side, length in lengths.items():
        names = [f"{side}_rotary_cos", f"{side}_rotary_sin"]
        cos, sin = (options.get(name) for name in names)
        _rule(
            (cos is None) == (sin is None),
            lambda n=names: f"only one of {n[0]} and {n[1]} is given; give both or neither",
        )
        for name, table in zip(names, (cos, sin), strict=True):
            if table is None:
                continue
            tables[name] = table
            _same_device(name, table, q)
            _element(name, table)
            rows_and_columns = table.shape[-2:] if table.dim() in (2, 3) else (-1, -1)
            rows, columns = rows_and_columns
            _rule(
                rows >= length
                and 0 < 2 * columns <= q.shape[-1]
                and (table.dim() == 2 or table.shape[0] in (1, batch)),
                lambda n=name, t=table, r=length: (
                    f"{n} has shape {tuple(t.shape)}; it must be (length, R / 2) or "
                    f"({batch}, length, R / 2) with a length of at least {r} and R in "
                    f"2..{q.shape[-1]}"
                ),
            )
            _last_stride(name, table)
    if not tables:
        _rule(
            not options.get("rotary_interleaved", False),
            lambda: "rotary_interleaved is True and no rotary table is given",
        )
        return
    first_name, first = next(iter(tables.items()))
    for name, table in tables.items():
        _rule(
            table.dtype == first.dtype and table.shape[-1] == first.shape[-1],
            lambda n=name, t=table: (
                f"{n} is {t.dtype} with {t.shape[-1]} columns and {first_name} {first.dtype} with "
                f"{first.shape[-1]}; they must be alike"
            ),
        )


def _alike(name: str, tensor: Tensor, other_name: str, other: Tensor, dim: int, what: str) -> None:
    size, other_size = tensor.shape[dim], other.shape[dim]
    _rule(
        size == other_size,
        lambda: f"{name} has {what} of {size} and {other_name} of {other_size}; they must be equal",
    )


def _same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    _rule(
        tensor.device == q.device,
        lambda: f"{name} is on {tensor.device} and q on {q.device}; they must be on one device",
    )


def _element(name: str, tensor: Tensor) -> None:
    _rule(
        tensor.dtype in ELEMENTS,
        lambda: f"{name} has dtype {tensor.dtype}; it must be {ELEMENT_NAMES}",
    )


def _index(name: str, tensor: Tensor, q: Tensor) -> None:
    _same_device(name, tensor, q)
    _rule(
        tensor.dtype == torch.int32,
        lambda: f"{name} has dtype {tensor.dtype}; it must be int32",
    )
    _rule(
        tensor.dim() == 1 and (tensor.numel() < 2 or tensor.stride(0) == 1),
        lambda: (
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
            f"contiguous with 1 dimension"
        ),
    )


def _last_stride(name: str, tensor: Tensor) -> None:
    _rule(
        tensor.shape[-1] == 1 or tensor.stride(-1) == 1,
        lambda: (
            f"{name} has strides {tensor.stride()}; the last must be 1: call {name}.contiguous() "
            "first"
        ),
    )


def _shape(name: str, tensor: Tensor, allowed: list[tuple[int, ...]]) -> None:
    _rule(
        any(tensor.shape == shape for shape in allowed),
        lambda: (
            f"{name} has shape {tuple(tensor.shape)}; it must be {' or '.join(map(str, allowed))}"
        ),
    )


def _dense_heads(name: str, tensor: Tensor, heads: int) -> None:
    _rule(
        heads < 2 or tensor.stride(-1) == 1,
        lambda: (
            f"{name} has strides {tensor.stride()}; the last must be 1: call {name}.contiguous() "
            "first"
        ),
    )


def _broadcasts(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    fits = 1 <= tensor.dim() <= 4 and all(
        size in (1, whole)
        for size, whole in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )
    _rule(fits, lambda: f"{name} has shape {tuple(tensor.shape)}; it must broadcast to {shape}")
