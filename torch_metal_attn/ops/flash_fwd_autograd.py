"""Autograd of `metal_attn::flash_fwd` and `flash_varlen_fwd`, and of `flash_decode` with lists.

The forward saves the arguments, out and softmax_lse; nothing is quadratic in a length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops import flash_bwd
from torch_metal_attn.ops.differentiation import (
    apply,
    autograd_kernel,
    batched,
    below_autograd,
    needs_gradient,
    nothing_to_differentiate,
    run_below_autograd,
    save,
    saved,
    without_gradient,
)
from torch_metal_attn.ops.listed_bwd import listed_gradients

_OPERANDS = ("q", "k", "v")
_PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# Tensors without a gradient. Integers and bools cannot require one.
_CONSTANTS = tuple(f"{side}_rotary_{table}" for side in "qk" for table in ("cos", "sin"))
# Options of a cache, which also holds keys of other calls.
_CACHE = ("block_table", "cache_batch_idx", "k_scale", "v_scale")
_LISTS = ("indices", "kv_block_size", "q_block_size")
# Arguments that are added to the scores; the suffixes of the ops that compute their gradients.
_ADDED = {"attn_mask": "bias", "attn_bias": "bias", "alibi_slopes": "slopes"}


@dataclass(frozen=True)
class _Call:
    name: str  # of the op
    names: tuple[str, ...]  # of the arguments, in the order of the Function's inputs
    positional: int

    def run(self, values: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        op = getattr(torch.ops.metal_attn, self.name)
        options = dict(zip(self.names[self.positional :], values[self.positional :], strict=True))
        with below_autograd():
            result: tuple[Tensor, Tensor] = op(*values[: self.positional], **options)
            return result

    def __str__(self) -> str:
        return f"metal_attn::{self.name}"


class _FlashFwd(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *values: Any) -> tuple[Tensor, Tensor]:
        return call.run(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *values = inputs
        ctx.values = [None if isinstance(value, Tensor) else value for value in values]
        # A missing gradient stays None, instead of zeros of the size of out or softmax_lse.
        ctx.set_materialize_grads(False)
        save(ctx, *output, *(value if isinstance(value, Tensor) else None for value in values))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        call: _Call = ctx.call
        out, softmax_lse, *tensors = saved(ctx)
        values = [v if t is None else t for v, t in zip(ctx.values, tensors, strict=True)]
        arguments = dict(zip(call.names, values, strict=True))
        needed = dict(zip(call.names, ctx.needs_input_grad[1:], strict=True))
        if dout is None and dlse is None:
            return (None,) * (1 + len(values))
        gradients = _gradients(call, dout, dlse, out, softmax_lse, arguments, needed)
        return None, *(gradients[name] if needed[name] else None for name in call.names)


def _gradients(
    call: _Call,
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    arguments: dict[str, Any],
    needed: dict[str, bool],
) -> dict[str, Tensor]:
    q, k, v = (arguments[name] for name in _OPERANDS)
    if k.dtype != q.dtype:
        raise NotImplementedError(
            f"{call} has no gradient with k and v in {k.dtype} and q in {q.dtype}: convert them to "
            "one dtype first"
        )
    ops = torch.ops.metal_attn
    packed = "cu_seqlens_q" in arguments
    named = (*_OPERANDS, *_PACKING, *_CACHE, "num_splits")
    options = {n: v for n, v in arguments.items() if n not in named}
    lists = {n: options.pop(n) for n in _LISTS if n in options}
    packing = [arguments[name] for name in _PACKING] if packed else []
    dout = flash_bwd.gradient_of(out, dout)
    bwd = "flash_varlen_bwd" if packed else "flash_bwd"
    # With create_graph these ops are recorded, and their derivatives raise.
    tensors = (dout, dlse, q, k, v, out, softmax_lse)
    dq, dk, dv, delta, normalisers = (
        listed_gradients(ops.flash_bwd, *tensors, **lists, **options)
        if lists
        else getattr(ops, bwd)(*tensors, *packing, exact_delta=True, **options)
    )
    gradients = {"q": dq, "k": dk, "v": dv}
    for side, gradient in (("q", dq), ("k", dk)):
        cos, sin = (options.get(f"{side}_rotary_{table}") for table in ("cos", "sin"))
        if cos is not None and sin is not None and needed[side]:
            gradients[side] = flash_bwd.rotated_back(
                gradient,
                cos,
                sin,
                arguments[f"cu_seqlens_{side}"] if packed else None,
                options.get("rotary_interleaved", False),
                # create_graph and vmap need the op that is not in place.
                ops.rope if torch.is_grad_enabled() or batched(gradient) else ops.rope_,
            )
    for name, op in _ADDED.items():
        if needed.get(name, False):
            gradients[name] = getattr(ops, f"{bwd}_{op}")(
                *(dout, q, k, v, softmax_lse, delta, *packing), normalisers=normalisers, **options
            )
    sink = options.get("learnable_sink")
    if sink is not None and needed["learnable_sink"]:
        gradients["learnable_sink"] = flash_bwd.sink_gradient(
            sink, softmax_lse, delta, normalisers, packed
        )
    return gradients


def differentiable(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The Autograd kernel of an op that has the gradients of flash_fwd."""
    op: torch._ops.OpOverload = getattr(torch.ops.metal_attn, name).default
    positional = tuple(a.name for a in op._schema.arguments if not a.kwarg_only)

    # torch.library.register_autograd would drop the tangents of forward-mode derivatives.
    def flash_fwd(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if nothing_to_differentiate(arguments, options):
            result: tuple[Tensor, Tensor] = run_below_autograd(op, *arguments, **options)
            return result
        names = (*positional[: len(arguments)], *options)
        values = (*arguments, *options.values())
        call = _Call(name, names, len(arguments))
        tensors = {n: v for n, v in zip(names, values, strict=True) if isinstance(v, Tensor)}
        if not needs_gradient(call, tensors, _CONSTANTS):
            return call.run(values)
        cache = [n for n in _CACHE if n in tensors]
        # Caches in float8_e4m3fn need no scale.
        cache += [n for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn]
        if cache:
            needing = next(name for name, tensor in tensors.items() if tensor.requires_grad)
            message = (
                f"{call} has no gradient with {cache[0]}, and {needing} requires grad: detach it, "
                "as a cache keeps no graph"
            )
            results: tuple[Tensor, Tensor] = without_gradient(
                message, tensors.values(), lambda: call.run(values)
            )
            return results
        result = apply(_FlashFwd, call, *values)
        return result

    return flash_fwd


autograd_kernel("flash_fwd", "flash_fwd")(differentiable("flash_fwd"))
autograd_kernel("flash_varlen_fwd")(differentiable("flash_varlen_fwd"))
