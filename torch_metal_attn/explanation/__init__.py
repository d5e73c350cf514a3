"""What an op, or every attention of a model, would run, or why it would refuse: `explain`."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_metal_attn.explanation.model import LayerCall, ModelExplanation, explain_model
from torch_metal_attn.explanation.ops import Explanation, Kernel, Training, explain_op, short_name

__all__ = ["Explanation", "Kernel", "LayerCall", "ModelExplanation", "Training", "explain"]


@overload
def explain(
    q: Tensor, /, *arguments: Any, backward: bool = False, **options: Any
) -> Explanation: ...


@overload
def explain(
    op: torch._ops.OpOverloadPacket | torch._ops.OpOverload, /, *arguments: Any, **options: Any
) -> Explanation: ...


@overload
def explain(
    model: nn.Module | Callable[..., Any], /, *arguments: Any, **options: Any
) -> ModelExplanation: ...


def explain(
    *arguments: Any, backward: bool = False, **options: Any
) -> Explanation | ModelExplanation:
    """Say what attention would run, with which kernels, or why it would refuse; launch no kernel.

        explain(q, k, v, causal=True)
        explain(torch.ops.metal_attn.flash_decode, q, k, v, num_splits=4)
        explain(model, **inputs)
        explain(model.generate, input_ids, max_new_tokens=8)

    Args: the first is one of
        q: of `torch.ops.metal_attn.flash_fwd`, followed by its arguments: q (B, Hq, Lq, D), k (B,
            Hkv, Lk, D), v (B, Hkv, Lk, Dv), on the CPU or on mps, and its options. With
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k after v, those of
            `flash_varlen_fwd`. backward: also say what the gradients would run, and the memory of
            both; it is computed, and nothing is allocated.
        an op: any of `torch.ops.metal_attn`, followed by its arguments.
        a model: a torch.nn.Module, followed by what it is called with, or a bound method of one.
            The model's own code runs under no_grad, on these inputs and their device, all but our
            ops: each is explained, and gives zeros of the right shape, or leaves what it would
            write as it is. So the model's numbers are meaningless, and what it decides by them
            (experts, stop tokens) may differ. Compiled parts run uncompiled.

    Returns: an `Explanation` of an op, a `ModelExplanation` of a model; str() of either is for
        people, `as_dict()` is plain data. What an op would refuse raises nothing: the refusal is in
        the result.

    Raises:
        TypeError: the first argument is none of these, or an op gets other arguments than it has.
    """
    target: object = arguments[0] if arguments else options.get("q")
    if isinstance(target, Tensor):
        packed = len(arguments) > 3 or "cu_seqlens_q" in options
        op = "flash_varlen_fwd" if packed else "flash_fwd"
        return explain_op(op, arguments, options, backward=backward)
    if backward:
        raise TypeError(
            "backward=True is for explain(q, k, v, ...); explain the op flash_bwd, or a model "
            "without it"
        )
    name = short_name(target)
    if name is not None:
        return explain_op(name, arguments[1:], options)
    model = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if isinstance(model, nn.Module) and callable(target):
        return explain_model(model, target, arguments[1:], options)
    raise TypeError(
        f"explain got {type(target).__name__} first; it takes the tensors q, k and v, an op of "
        "torch.ops.metal_attn, a torch.nn.Module or a bound method of one"
    )
