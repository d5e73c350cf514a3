"""`metal_attn::flex_fwd` and `flex_bwd` in Python: fake kernels, CPU kernels and autograd.

`torch_metal_attn.flex` generates the Metal texts that the ops take. Users call `flex_attention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import (
    apply,
    autograd_kernel,
    below_autograd,
    nothing_to_differentiate,
    refuse_tangents,
    run_below_autograd,
    save,
    saved,
    without_gradient,
)
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.flash_bwd import (
    Gradients,
    empty_gradients,
    gradient_of,
    refuse_second_derivative,
)

# The names of a BlockMask's lists, which are also the names of the op's options.
LISTS = tuple(
    f"{full}{side}_{what}"
    for side in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
)
# Options that autograd saves.
_BLOCK_OPTIONS = (*LISTS, "kv_order", "q_order")
FlexResult = tuple[Tensor, Tensor]


@register_fake("flex_bwd")
def _flex_bwd_fake(*arguments: Any, **options: Any) -> Gradients:
    _, _, q, k, v, _, softmax_lse = arguments
    return empty_gradients(q, k, v, softmax_lse, True, {})


@register_fake("flex_bwd_captures")
def _flex_bwd_captures_fake(*_: Any, **options: Any) -> list[Tensor]:
    loaded = [options["captures"][i] for i in options.get("share_captures", [])]
    return [x.new_empty(x.shape, dtype=torch.float32) for x in loaded]


def _register_cpu(name: str) -> None:
    @cpu_kernel(name)
    def flex(*arguments: Any, **options: Any) -> Any:
        # The reference needs the Python functions, which are not arguments of the op.
        raise NotImplementedError(
            f"metal_attn::{name} runs on CPU tensors in the simulator only: use "
            "torch_metal_attn.simulate(), or flex_attention outside of torch.compile"
        )


class _FlexFwd(torch.autograd.Function):
    @staticmethod
    def forward(
        options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> FlexResult:
        with below_autograd():
            return torch.ops.metal_attn.flex_fwd(q, k, v, **_with(options, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: FlexResult) -> None:
        ctx.options, *tensors = inputs
        ctx.set_materialize_grads(False)
        save(ctx, *output, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        out, lse, q, k, v, *tensors = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * (4 + len(tensors))
        dout = gradient_of(out, dout)
        ops, options = torch.ops.metal_attn, _with(ctx.options, tensors)
        *gradients, delta, normalisers = ops.flex_bwd(dout, dlse, q, k, v, out, lse, **options)
        needed = ctx.needs_input_grad[1:4]
        operand_gradients = [x if need else None for x, need in zip(gradients, needed, strict=True)]
        tensor_gradients: list[Tensor | None] = [None] * len(tensors)
        if any(ctx.needs_input_grad[4:]):
            known = normalisers if normalisers.numel() > 0 else None
            shares = ops.flex_bwd_captures(dout, q, k, v, lse, delta, known, **options)
            # The sums run in the order of the shares, and are rounded once.
            for i, share in zip(options["share_captures"], shares, strict=True):
                before = tensor_gradients[i]
                tensor_gradients[i] = share if before is None else before + share
            for i, capture in enumerate(options["captures"]):
                gradient = tensor_gradients[i]
                tensor_gradients[i] = None if gradient is None else gradient.to(capture.dtype)
        return (None, *operand_gradients, *tensor_gradients)


def run_without_gradient(inputs: tuple[Tensor, ...], run: Callable[[], Any]) -> Any:
    q, k, *_ = inputs
    message = (
        f"flex_attention has no gradient with key and value in {k.dtype} and query in {q.dtype}: "
        "convert them to one dtype first"
    )
    return without_gradient(message, inputs, run)


def _with(options: dict[str, Any], tensors: Any) -> dict[str, Any]:
    captures = list(tensors[: len(tensors) - len(_BLOCK_OPTIONS)])
    lists = tensors[len(captures) :]
    return options | {"captures": captures} | dict(zip(_BLOCK_OPTIONS, lists, strict=True))


@autograd_kernel("flex_fwd")
def _flex_fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> FlexResult:
    op = torch.ops.metal_attn.flex_fwd
    captures = options["captures"]
    if nothing_to_differentiate((q, k, v), options):
        return run_below_autograd(op, q, k, v, **options)
    if k.dtype != q.dtype:
        return run_without_gradient((q, k, v, *captures), lambda: op(q, k, v, **options))
    refuse_tangents("metal_attn::flex_fwd", {"q": q, "k": k, "v": v})
    for i, tensor in enumerate(captures):
        refuse_tangents("metal_attn::flex_fwd", {f"captures[{i}]": tensor})
        has_share = i in options.get("share_captures", [])
        if torch.is_grad_enabled() and tensor.requires_grad and not has_share:
            raise NotImplementedError(
                f"metal_attn::flex_fwd has no share for captures[{i}], which requires grad: "
                "detach it"
            )
    saved = ("captures", *_BLOCK_OPTIONS)
    plain_options = {n: x for n, x in options.items() if n not in saved}
    tensors = (*captures, *(options.get(n) for n in _BLOCK_OPTIONS))
    return apply(_FlexFwd, plain_options, q, k, v, *tensors)


for _name in ("flex_fwd", "flex_bwd", "flex_bwd_captures"):
    _register_cpu(_name)
refuse_second_derivative("flex_bwd", "flex_bwd_captures")
