"""The module that `flash_attn.flash_attn_interface` calls flash_attn_gpu, `flash_attn_2_cuda`.

Arguments are in flash-attn 2.8's order. The caller computes gradients, with `bwd` and `varlen_bwd`.
A query without keys has the log-sum-exp -inf, not flash-attn's +inf.
"""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import Window, flag, only_given, whole, window
from torch_metal_attn.call.attention_weights import dense_weights, varlen_weights
from torch_metal_attn.call.names import ArgumentNames
from torch_metal_attn.call.options import op_options
from torch_metal_attn.ops.plain import heads_second
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

Forward = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, softmax_d

_OPS = torch.ops.metal_attn
_NAMES = ArgumentNames(heads_third=True)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
) -> Forward:
    """flash-attn's forward of q (B, Lq, Hq, D), k and v (B, Lk, Hkv, D).

    Returns: out; softmax_lse (B, Hq, Lq); S_dmask, empty unless return_softmax with dropout, as
        `flash_attn_func` returns it; rng_state (2,) int64, for `bwd`.
    """
    _not_given(out=out, gen=gen)
    limits = (window_size_left, window_size_right)
    options = _options(q, p_dropout, softmax_scale, is_causal, limits, softcap, alibi_slopes)
    result, lse = _NAMES.run(heads_second, (_OPS.flash_fwd.default, q, k, v), options)
    weights = dense_weights(q, k, options) if return_softmax else None
    return _forward(q, result, lse, weights, options)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
) -> Forward:
    """`fwd` for packed sequences, q (Tq, Hq, D), as `flash_attn_varlen_func` takes them.

    zero_tensors: accepted; rows that belong to no sequence are always 0.
    """
    _not_given(out=out, gen=gen)
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    limits = (window_size_left, window_size_right)
    options = _options(q, p_dropout, softmax_scale, is_causal, limits, softcap, alibi_slopes)
    options |= only_given(seqused_k=seqused_k, leftpad_k=leftpad_k, block_table=block_table)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    result, lse = _NAMES.run(_OPS.flash_varlen_fwd.default, (q, k, v, *packing), options)
    weights = varlen_weights(q, k, *packing, options) if return_softmax else None
    return _forward(q, result, lse, weights, options)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: None,
    rng_state: Tensor | None,
) -> Gradients:
    """The gradients of `fwd`, whose rng_state says which weights were dropped.

    Returns: dq, dk, dv: copied into those that are given; softmax_d (B, Hq, Lq).
    """
    _not_given(gen=gen)
    limits = (window_size_left, window_size_right)
    options = _options(q, 0.0, softmax_scale, is_causal, limits, softcap, alibi_slopes)
    options |= _dropout(p_dropout, rng_state)
    dout, *operands = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    arguments = (dout, None, *operands, softmax_lse)
    *gradients, delta, _ = _NAMES.run(_OPS.flash_bwd.default, arguments, options)
    found = tuple(x.transpose(1, 2) for x in gradients)
    return (*_into({"dq": dq, "dk": dk, "dv": dv}, found), delta)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: None,
    rng_state: Tensor | None,
) -> Gradients:
    """`bwd` for packed sequences; softmax_d is (Hq, Tq)."""
    _not_given(gen=gen)
    limits = (window_size_left, window_size_right)
    options = _options(q, 0.0, softmax_scale, is_causal, limits, softcap, alibi_slopes)
    options |= _dropout(p_dropout, rng_state)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments = (dout, None, q, k, v, out, softmax_lse, *packing)
    *gradients, delta, _ = _NAMES.run(_OPS.flash_varlen_bwd.default, arguments, options)
    return (*_into({"dq": dq, "dk": dk, "dv": dv}, tuple(gradients)), delta)


def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: None,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache`: out (B, Lq, Hq, D) and softmax_lse (B, Hq, Lq)."""
    _not_given(out=out)
    result = flash_attn_with_kvcache(
        *(q, kcache, vcache, k, v, rotary_cos, rotary_sin, seqlens_k),
        *(cache_batch_idx, leftpad_k, block_table, softmax_scale, is_causal),
        (window_size_left, window_size_right),
        *(softcap, is_rotary_interleaved, alibi_slopes, num_splits, True),
    )
    assert isinstance(result, tuple)
    return result


def _not_given(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is a {type(value).__name__}; it must be None: results are new tensors, "
                "and dropout is drawn from torch's default generator"
            )


def _options(
    q: Tensor,
    p_dropout: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    score = {"softcap": softcap, "alibi_slopes": alibi_slopes}
    causal, limits = flag("is_causal", is_causal), window(window_size)
    return op_options(q, p_dropout, softmax_scale, causal, limits, score)


def _packing(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[Tensor, Tensor, int, int]:
    return (
        *(cu_seqlens_q, cu_seqlens_k),
        whole("max_seqlen_q", max_seqlen_q),
        whole("max_seqlen_k", max_seqlen_k),
    )


def _forward(
    q: Tensor, out: Tensor, lse: Tensor, weights: Tensor | None, options: dict[str, Any]
) -> Forward:
    state = options.get("rng_state")
    return (
        out,
        lse,
        q.new_empty(0) if weights is None else weights,
        q.new_zeros(2, dtype=torch.int64) if state is None else state,
    )


def _dropout(p_dropout: float, rng_state: Tensor | None) -> dict[str, Any]:
    if p_dropout == 0.0:
        return {}
    if rng_state is None:
        raise ValueError(
            f"rng_state is None and p_dropout {p_dropout}; give the rng_state of the forward"
        )
    return {"dropout_p": p_dropout, "rng_state": rng_state}


def _into(
    targets: dict[str, Tensor | None], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    for (name, target), gradient in zip(targets.items(), gradients, strict=True):
        if target is not None and target.shape != gradient.shape:
            raise ValueError(
                f"{name} has shape {tuple(target.shape)}; it must be {tuple(gradient.shape)}"
            )
    dq, dk, dv = (
        gradient if target is None else target.copy_(gradient)
        for target, gradient in zip(targets.values(), gradients, strict=True)
    )
    return dq, dk, dv
