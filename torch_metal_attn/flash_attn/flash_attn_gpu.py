"""The functions of `flash_attn_2_cuda`, flash_attn_gpu in `flash_attn.flash_attn_interface`.

Arguments are in flash-attn 2.8's order. Callers compute gradients with `bwd` and `varlen_bwd`. A
query that sees no key has the log-sum-exp -inf, not flash-attn's +inf.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import as_bool, as_int, check_shape, only_given, window
from torch_metal_attn.call.options import op_options
from torch_metal_attn.ops.attention_weights import dense_weights, varlen_weights
from torch_metal_attn.ops.fast_path import call_bhld
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache
from torch_metal_attn.wording import type_text

Forward = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, softmax_d

_OPS = torch.ops.metal_attn
_NAMES = ArgumentNames(blhd=True)
# flash-attn 2.8.4's tests expect this text about the generator.
_REASON = {
    "out": "results are new tensors",
    "gen": "the RNG `generator` argument is no longer supported, as dropout is drawn from torch's "
    "default generator",
}
_SCORES = "is_causal window_size_left window_size_right softcap"


def in_order(names: str, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function with keyword arguments these parameters, also by position."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [inspect.Parameter(n, kind, default=defaults.get(n, empty)) for n in names.split()]
    signature = inspect.Signature(parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            return function(**bound.arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


@in_order(f"q k v out alibi_slopes p_dropout softmax_scale {_SCORES} return_softmax gen")
def fwd(q: Tensor, k: Tensor, v: Tensor, return_softmax: bool, **named: Any) -> Forward:
    """flash-attn's forward of q (B, Lq, Hq, D), k and v (B, Lk, Hkv, D).

    Returns: out; softmax_lse (B, Hq, Lq); S_dmask, empty unless return_softmax with dropout, as
        `flash_attn_func` returns it; rng_state (2,) int64, for `bwd`.
    """
    options = _options(q, named, "out", "gen")
    result, lse = _NAMES.run(call_bhld, (_OPS.flash_fwd.default, q, k, v), options)
    weights = dense_weights(q, k, options) if return_softmax else None
    return _forward(q, result, lse, weights, options)


@in_order(
    "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes "
    "max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors "
    f"{_SCORES} return_softmax gen num_splits",
    num_splits=0,
)
def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    return_softmax: bool,
    **named: Any,
) -> Forward:
    """`fwd` for packed sequences, q (Tq, Hq, D), as `flash_attn_varlen_func` takes them.

    zero_tensors: accepted; rows that belong to no sequence are always 0.
    num_splits: 0 or 1.
    """
    if as_int("num_splits", named["num_splits"]) not in (0, 1):
        raise NotImplementedError(
            f"num_splits is {named['num_splits']}; num_splits > 1 is not supported for packed "
            "sequences: pass 0 or 1"
        )
    options = _options(q, named, "out", "gen") | only_given(
        seqused_k=named["seqused_k"], leftpad_k=named["leftpad_k"], block_table=block_table
    )
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    packing = _packing(named)
    result, lse = _NAMES.run(_OPS.flash_varlen_fwd.default, (q, k, v, *packing), options)
    weights = varlen_weights(q, k, *packing, options) if return_softmax else None
    return _forward(q, result, lse, weights, options)


@in_order(
    "dout q k v out softmax_lse dq dk dv alibi_slopes p_dropout softmax_scale "
    f"{_SCORES} deterministic gen rng_state"
)
def bwd(dout: Tensor, q: Tensor, softmax_lse: Tensor, **named: Any) -> Gradients:
    """The gradients of `fwd`. Its rng_state determines the weights that were dropped.

    Returns: dq, dk, dv, also copied into these arguments if not None; softmax_d (B, Hq, Lq).
    """
    options = _options_of_backward(q, named)
    operands = (x.transpose(1, 2) for x in (q, named["k"], named["v"], named["out"]))
    arguments = (dout.transpose(1, 2), None, *operands, softmax_lse)
    *gradients, delta, _ = _NAMES.run(_OPS.flash_bwd.default, arguments, options)
    return (*_into(named, [x.transpose(1, 2) for x in gradients]), delta)


@in_order(
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k alibi_slopes max_seqlen_q "
    f"max_seqlen_k p_dropout softmax_scale zero_tensors {_SCORES} deterministic gen rng_state"
)
def varlen_bwd(dout: Tensor, q: Tensor, softmax_lse: Tensor, **named: Any) -> Gradients:
    """`bwd` for packed sequences; softmax_d is (Hq, Tq)."""
    options = _options_of_backward(q, named)
    operands = (q, named["k"], named["v"], named["out"])
    arguments = (dout, None, *operands, softmax_lse, *_packing(named))
    *gradients, delta, _ = _NAMES.run(_OPS.flash_varlen_bwd.default, arguments, options)
    return (*_into(named, gradients), delta)


@in_order(
    "q kcache vcache k v seqlens_k rotary_cos rotary_sin cache_batch_idx leftpad_k block_table "
    f"alibi_slopes out softmax_scale {_SCORES} is_rotary_interleaved num_splits"
)
def fwd_kvcache(
    q: Tensor,
    window_size_left: int,
    window_size_right: int,
    out: None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache`: out (B, Lq, Hq, D) and softmax_lse (B, Hq, Lq)."""
    _check_none(out=out)
    renamed = {
        "kcache": "k_cache",
        "vcache": "v_cache",
        "seqlens_k": "cache_seqlens",
        "leftpad_k": "cache_leftpad",
        "is_causal": "causal",
        "is_rotary_interleaved": "rotary_interleaved",
    }
    return flash_attn_with_kvcache(  # type: ignore[return-value]
        q,
        window_size=(window_size_left, window_size_right),
        return_softmax_lse=True,
        **{renamed.get(name, name): value for name, value in named.items()},
    )


def _check_none(**arguments: Any) -> None:
    for name, x in arguments.items():
        if x is not None:
            raise NotImplementedError(f"{name} is {type_text(x)}; it must be None: {_REASON[name]}")


def _options(q: Tensor, named: dict[str, Any], *must_be_none: str) -> dict[str, Any]:
    _check_none(**{name: named[name] for name in must_be_none})
    return op_options(
        q,
        named["p_dropout"],
        named["softmax_scale"],
        as_bool("is_causal", named["is_causal"]),
        window((named["window_size_left"], named["window_size_right"])),
        {name: named[name] for name in ("softcap", "alibi_slopes")},
    )


def _options_of_backward(q: Tensor, named: dict[str, Any]) -> dict[str, Any]:
    options = _options(q, named | {"p_dropout": 0.0}, "gen")
    p, rng_state = named["p_dropout"], named["rng_state"]
    if p == 0.0:
        return options
    if rng_state is None:
        raise ValueError(f"rng_state is None and p_dropout {p}; pass the rng_state of the forward")
    return options | {"dropout_p": p, "rng_state": rng_state}


def _packing(named: dict[str, Any]) -> tuple[Tensor, Tensor, int, int]:
    longest_q, longest_k = (as_int(name, named[name]) for name in ("max_seqlen_q", "max_seqlen_k"))
    return named["cu_seqlens_q"], named["cu_seqlens_k"], longest_q, longest_k


def _forward(
    q: Tensor, out: Tensor, lse: Tensor, weights: Tensor | None, options: dict[str, Any]
) -> Forward:
    state = options.get("rng_state")
    weights = q.new_empty(0) if weights is None else weights
    return out, lse, weights, q.new_zeros(2, dtype=torch.int64) if state is None else state


def _into(named: dict[str, Any], gradients: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, copied into the arguments dq, dk and dv that are not None."""
    pairs = [*zip((named[name] for name in ("dq", "dk", "dv")), gradients, strict=True)]
    for name, (target, gradient) in zip(("dq", "dk", "dv"), pairs, strict=True):
        if target is not None:
            check_shape(name, target, gradient.shape)
    dq, dk, dv = (x if target is None else target.copy_(x) for target, x in pairs)
    return dq, dk, dv
