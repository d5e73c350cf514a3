"""`explain`: the kernels that an op or a model would run, or why it would be refused."""

import copy
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_metal_attn.call.arguments import as_bool
from torch_metal_attn.kv_cache import CascadePlan, PagedKVCache, StaticKVCache
from torch_metal_attn.tools.explain.flex import explain_flex
from torch_metal_attn.tools.explain.model import ModelExplanation, explain_model
from torch_metal_attn.tools.explain.ops import Explanation, Kernel, Training, explain_op, short_name
from torch_metal_attn.tools.explain.table import LayerCall
from torch_metal_attn.wording import type_text

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
    """Show which kernels attention would run, or why it would be refused. Launches no kernel.

        explain(q, k, v, causal=True)
        explain(torch.ops.metal_attn.flash_decode, q, k, v, num_splits=4)
        explain(model, **inputs)
        explain(model.generate, input_ids, max_new_tokens=8)

    Args: the first argument is one of
        q: followed by the other arguments of `torch.ops.metal_attn.flash_fwd`: q (B, Hq, Lq, D), k
            (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), on the CPU or on mps, and its options; or, with
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k after v, by those of
            `flash_varlen_fwd`. With backward=True the result also has the kernels of the gradients
            and the memory of both passes, which is computed without allocating it.
        flex_attention: `torch_metal_attn.flex_attention`, followed by its arguments. The
            specialisation holds the Metal text of score_mod and mask_mod. backward=True adds the
            gradients of q, k, v and of captured tensors that require grad.
        an op: any op of `torch.ops.metal_attn`, followed by its arguments.
        a model: a torch.nn.Module or a bound method of one, followed by its arguments. The model's
            code runs under no_grad on these inputs and their device. Our ops do not run: each
            is explained, returns zeros of the right shape, and writes nothing. So the model's
            numbers are meaningless, and decisions that depend on them (experts, stop tokens) may
            differ. Compiled parts run uncompiled.
        a method of a plan or a cache: `attend` of a `torch_metal_attn.kv_cache.CascadePlan`, or any
            method of a PagedKVCache or StaticKVCache, followed by its arguments. It runs like a
            model. The cache does not change: neither its memory nor its lengths and pages.

    Returns: an `Explanation` for an op or flex_attention, otherwise a `ModelExplanation`. str()
        gives a text for people, and `as_dict()` plain data. If an op would refuse the call, the
        refusal is in the result, and nothing is raised.

    Raises:
        TypeError: the first argument is none of these.
    """
    backward = as_bool("backward", backward)
    target: object = arguments[0] if arguments else options.get("q")
    if isinstance(target, Tensor):
        packed = len(arguments) > 3 or "cu_seqlens_q" in options
        op = "flash_varlen_fwd" if packed else "flash_fwd"
        return explain_op(op, arguments, options, backward=backward)
    if getattr(target, "__name__", "") == "flex_attention":
        return explain_flex(*arguments[1:], backward=backward, **options)
    if backward:
        raise TypeError(
            "backward=True is for explain(q, k, v, ...) and explain(flex_attention, ...); for the "
            "gradients of another call, explain the op flash_bwd"
        )
    name = short_name(target)
    if name is not None:
        return explain_op(name, arguments[1:], options)
    model = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if isinstance(model, PagedKVCache | StaticKVCache):
        model = _with_the_same_memory(model)
        target = getattr(model, getattr(target, "__name__", ""), None)
    kinds = nn.Module | CascadePlan | PagedKVCache | StaticKVCache
    if isinstance(model, kinds) and callable(target):
        return explain_model(model, target, arguments[1:], options)
    raise TypeError(
        f"explain's first argument is {type_text(target)}; it must be the tensor q, an op of "
        "torch.ops.metal_attn, a torch.nn.Module, or a bound method of one or of a CascadePlan, "
        "PagedKVCache or StaticKVCache"
    )


def _with_the_same_memory(cache: Any) -> Any:
    """A copy of a cache that shares its tensors. Lengths and pages of the copy may change."""
    recent = getattr(cache._storage.recent, "_rows", None)
    held = [*cache.layers, *(recent.layers if recent is not None else ())]
    return copy.deepcopy(cache, {id(layer): layer for layer in held})
