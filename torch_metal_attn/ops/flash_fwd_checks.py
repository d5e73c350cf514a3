"""What csrc/ops/attention/check.cpp checks, for tensors without data: meta, and while compiling.

Values of lengths cannot be checked there.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops import cache_checks, rules
from torch_metal_attn.quantisation import columns

MAX_HEAD_DIM_QK = 576
MAX_HEAD_DIM_V = 512
MAX_NUM_SPLITS = 1024
_MAX_FLOAT = torch.finfo(torch.float32).max
_MIN_FLOAT = torch.finfo(torch.float32).smallest_normal


def dense(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """The checks of `metal_attn::flash_fwd`."""
    _operands(q, k, v, ("batch", "heads", "length", "head_dim"), options)
    if not cache_checks.indexed(options):
        for name, tensor in (("k", k), ("v", v)):
            rules.alike(name, tensor, "q", q, 0, "a batch")
    capacity = cache_checks.capacity(q, k, q.shape[0], options)
    _options(q, k, v, q.shape[0], q.shape[2], capacity, options)


def splits(num_splits: int) -> None:
    rules.rule(
        0 <= num_splits <= MAX_NUM_SPLITS,
        lambda: (
            f"num_splits is {num_splits}; it must be 0 (chosen for you) or in 1..{MAX_NUM_SPLITS}"
        ),
    )


def decode(q: Tensor, k: Tensor, v: Tensor, num_splits: int, options: dict[str, Any]) -> None:
    """The checks of `metal_attn::flash_decode`."""
    dense(q, k, v, options)
    splits(num_splits)
    dropout_p = options.get("dropout_p", 0.0)
    rules.rule(
        dropout_p == 0.0,
        lambda: f"dropout_p is {dropout_p}; flash_decode has no dropout: use flash_fwd",
    )
    rules.rule(
        options.get("k_rotary_cos") is None,
        lambda: (
            "k_rotary_cos is given; flash_decode has no rotation of k: rotate it as it enters the "
            "cache, or use flash_fwd"
        ),
    )


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
    _operands(q, k, v, ("tokens", "heads", "head_dim"), options)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        rules.index(name, tensor, q)
        rules.rule(
            tensor.shape[0] > 0,
            lambda n=name: f"{n} is empty; it must hold a 0 and each sequence's end",
        )
    rules.alike("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q, 0, "a length")
    for name, size in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        rules.rule(
            0 <= size <= rules.MAX_LENGTH,
            lambda n=name, s=size: f"{n} is {s}; it must be in 0..{rules.MAX_LENGTH}",
        )
    batch = cu_seqlens_q.shape[0] - 1
    if cache_checks.indexed(options):
        cache_checks.capacity(q, k, batch, options)
    _options(q, k, v, batch, max_seqlen_q, max_seqlen_k, options)


def not_quantised(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What a gradient requires of k and v, whose dtype alone may stand for a format."""
    for name, tensor in (("k", k), ("v", v)):
        rules.same_dtype(name, tensor, q)


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    rows: tuple[int, ...],
) -> None:
    """The additional checks of `flash_bwd` and `flash_varlen_bwd`; rows: softmax_lse's shape.

    Head dims whose gradients need more threadgroup memory than there is are not checked here.
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
    normalisers: Tensor | None,
    rows: tuple[int, ...],
    options: dict[str, Any],
) -> Tensor:
    """The checks of `flash_bwd_bias`, `flash_bwd_slopes` and their packed forms; rows as above.

    Returns the option whose gradient is wanted.
    """
    _like_out("dout", dout, q, v)
    statistics = {"softmax_lse": softmax_lse, "delta": delta, "normalisers": normalisers}
    for statistic, tensor in statistics.items():
        if tensor is not None:
            _statistics(statistic, tensor, q, rows)
            _contiguous(statistic, tensor)
    value: Tensor | None = options.get(name)
    rules.rule(value is not None, lambda: f"{name} is None; it must be floating, for its gradient")
    assert value is not None
    return value


def _like_out(name: str, tensor: Tensor, q: Tensor, v: Tensor) -> None:
    rules.same_device(name, tensor, q)
    rules.same_dtype(name, tensor, q)
    rules.shape(name, tensor, [(*q.shape[:-1], v.shape[-1])])
    rules.last_stride(name, tensor)


def _statistics(name: str, tensor: Tensor, q: Tensor, rows: tuple[int, ...]) -> None:
    rules.same_device(name, tensor, q)
    rules.rule(
        tensor.dtype == torch.float32,
        lambda: f"{name} has dtype {tensor.dtype}; it must be float32",
    )
    rules.shape(name, tensor, [rows])


def _contiguous(name: str, tensor: Tensor) -> None:
    rules.rule(
        tensor.is_contiguous(),
        lambda: (
            f"{name} has strides {tensor.stride()}; it must be contiguous: pass what the op "
            f"returned, or call {name}.contiguous()"
        ),
    )


def _operands(
    q: Tensor, k: Tensor, v: Tensor, layout: tuple[str, ...], options: dict[str, Any]
) -> None:
    for name, tensor in (("k", k), ("v", v)):
        rules.same_device(name, tensor, q)
    rules.element("q", q)
    cache_checks.kv_format(q, k, v, options)
    indexed = cache_checks.indexed(options)
    kv_layout = cache_checks.layout(options) if indexed else layout
    for name, tensor, dimensions in (("q", q, layout), ("k", k, kv_layout), ("v", v, kv_layout)):
        rules.rule(
            tensor.dim() == len(dimensions),
            lambda n=name, t=tensor, d=dimensions: (
                f"{n} has {t.dim()} dimensions, shape {tuple(t.shape)}; it must have {len(d)}: "
                f"({', '.join(d)})"
            ),
        )
        rules.last_stride(name, tensor)
    if indexed:
        what = "a number of pages" if "pages" in kv_layout else "a batch"
        rules.alike("v", v, "k", k, 0, what)
    head = 1
    rules.alike("v", v, "k", k, head, "a number of heads")
    rules.alike("v", v, "k", k, 2 if len(kv_layout) == 4 else 0, "a length")
    head_dim, v_head_dim = (
        columns(tensor, options.get(name)) for name, tensor in (("k_scale", k), ("v_scale", v))
    )
    rules.equal("k", head_dim, "q", q.shape[-1], "a head dim")
    heads, kv_heads = q.shape[head], k.shape[head]
    rules.rule(
        heads == 0 or (kv_heads > 0 and heads % kv_heads == 0),
        lambda: f"q has {heads} heads and k {kv_heads}; k's must divide q's",
    )
    for name, size, most in (
        ("q", q.shape[-1], MAX_HEAD_DIM_QK),
        ("v", v_head_dim, MAX_HEAD_DIM_V),
    ):
        rules.rule(
            1 <= size <= most,
            lambda n=name, d=size, m=most: f"{n} has a head dim of {d}; it must be in 1..{m}",
        )


def _options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: int,
    q_length: int,
    kv_length: int,
    options: dict[str, Any],
) -> None:
    quantised = cache_checks.kv_format(q, k, v, options)
    cache_checks.scales(k, v, batch, quantised, options)
    _numbers(options)
    heads = q.shape[1]
    for name in ("seqused_k", "leftpad_k"):
        tensor = options.get(name)
        if tensor is not None:
            rules.index(name, tensor, q)
            rules.shape(name, tensor, [(batch,)])
    mask, bias = options.get("attn_mask"), options.get("attn_bias")
    if mask is not None:
        rules.rule(
            mask.dtype == torch.bool or mask.dtype in rules.ELEMENTS,
            lambda: f"attn_mask has dtype {mask.dtype}; it must be bool, {rules.ELEMENT_NAMES}",
        )
        rules.rule(
            mask.dtype == torch.bool or bias is None,
            lambda: "attn_mask is floating and attn_bias is given too; add the two yourself",
        )
    if bias is not None:
        rules.element("attn_bias", bias)
    for name, tensor in (("attn_mask", mask), ("attn_bias", bias)):
        if tensor is not None:
            rules.same_device(name, tensor, q)
            rules.broadcasts(name, tensor, (batch, heads, q_length, kv_length))
    slopes, sink = options.get("alibi_slopes"), options.get("learnable_sink")
    if slopes is not None:
        rules.same_device("alibi_slopes", slopes, q)
        rules.rule(
            slopes.dtype == torch.float32,
            lambda: f"alibi_slopes has dtype {slopes.dtype}; it must be float32",
        )
        rules.shape("alibi_slopes", slopes, [(heads,), (batch, heads)])
        rules.dense_heads("alibi_slopes", slopes, heads)
    if sink is not None:
        rules.same_device("learnable_sink", sink, q)
        rules.element("learnable_sink", sink)
        rules.shape("learnable_sink", sink, [(heads,)])
        rules.dense_heads("learnable_sink", sink, heads)
    _rotary(q, batch, {"q": q_length, "k": kv_length}, options)
    rules.rule(
        quantised is None or options.get("k_rotary_cos") is None,
        lambda: "k_rotary_cos is given and k is quantised; rotate keys before they are quantised",
    )
    rules.rule(
        quantised is not None or k.dtype == q.dtype or options.get("k_rotary_cos") is None,
        lambda: (
            f"k_rotary_cos is given and k has dtype {k.dtype} and q {q.dtype}; rotate keys before "
            "they are rounded"
        ),
    )
    _dropout(q, options)


def _numbers(options: dict[str, Any]) -> None:
    scale = options.get("softmax_scale")
    rules.rule(
        scale is None or abs(scale * math.log2(math.e)) <= _MAX_FLOAT,
        lambda: f"softmax_scale is {scale}; it must be finite in float32",
    )
    chunk, softcap = options.get("attention_chunk", 0), options.get("softcap", 0.0)
    rules.rule(
        0 <= chunk <= rules.MAX_LENGTH,
        lambda: f"attention_chunk is {chunk}; it must be 0 (off) or in 1..{rules.MAX_LENGTH}",
    )
    rules.rule(
        softcap == 0 or _MIN_FLOAT <= softcap * math.log2(math.e) <= _MAX_FLOAT,
        lambda: f"softcap is {softcap}; it must be 0 (off) or positive and finite in float32",
    )
    right = options.get("window_size_right", -1)
    rules.rule(
        not (options.get("causal", False) and right > 0),
        lambda: f"window_size_right is {right} with causal=True, which makes it 0; leave it at -1",
    )
    offset = options.get("q_offset")
    rules.rule(
        offset is None or -rules.MAX_LENGTH <= offset <= rules.MAX_LENGTH,
        lambda: f"q_offset is {offset}; it must be in -{rules.MAX_LENGTH}..{rules.MAX_LENGTH}",
    )


def _dropout(q: Tensor, options: dict[str, Any]) -> None:
    dropout_p, state = options.get("dropout_p", 0.0), options.get("rng_state")
    rules.rule(0.0 <= dropout_p <= 1.0, lambda: f"dropout_p is {dropout_p}; it must be in 0..1")
    rules.rule(
        (dropout_p > 0.0) == (state is not None),
        lambda: (
            f"dropout_p is {dropout_p} and rng_state is {'None' if state is None else 'given'}; "
            "dropout needs a random state, and nothing else does"
        ),
    )
    if state is None:
        return
    rules.same_device("rng_state", state, q)
    rules.rule(
        state.dtype == torch.int64,
        lambda: f"rng_state has dtype {state.dtype}; it must be int64",
    )
    rules.shape("rng_state", state, [(2,)])
    rules.rule(
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
        rules.rule(
            (cos is None) == (sin is None),
            lambda n=names: f"only one of {n[0]} and {n[1]} is given; give both or neither",
        )
        for name, table in zip(names, (cos, sin), strict=True):
            if table is None:
                continue
            tables[name] = table
            rules.same_device(name, table, q)
            rules.element(name, table)
            rows_and_columns = table.shape[-2:] if table.dim() in (2, 3) else (-1, -1)
            rows, columns = rows_and_columns
            rules.rule(
                rows >= length
                and 0 < 2 * columns <= q.shape[-1]
                and (table.dim() == 2 or table.shape[0] in (1, batch)),
                lambda n=name, t=table, r=length: (
                    f"{n} has shape {tuple(t.shape)}; it must be (length, R / 2) or "
                    f"({batch}, length, R / 2) with a length of at least {r} and R in "
                    f"2..{q.shape[-1]}"
                ),
            )
            rules.last_stride(name, table)
    if not tables:
        rules.rule(
            not options.get("rotary_interleaved", False),
            lambda: "rotary_interleaved is True and no rotary table is given",
        )
        return
    first_name, first = next(iter(tables.items()))
    for name, table in tables.items():
        rules.rule(
            table.dtype == first.dtype and table.shape[-1] == first.shape[-1],
            lambda n=name, t=table: (
                f"{n} is {t.dtype} with {t.shape[-1]} columns and {first_name} {first.dtype} with "
                f"{first.shape[-1]}; they must be alike"
            ),
        )
