"""Converts a problem's tensors into the arguments of each attention function."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_metal_attn.functional as functional
from torch_metal_attn.sdpa import scaled_dot_product_attention
from torch_metal_attn.testing.attention import OPS, Attention
from torch_metal_attn.testing.attention_problem import Problem, within_keys
from torch_metal_attn.testing.tensors import Memory
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

Call = tuple[Callable[..., Any], dict[str, Any]]
# For each function, its names of the ops' arguments if they differ from the ops' names.
_KVCACHE = {"k": "k_cache", "v": "v_cache", "leftpad_k": "cache_leftpad"}
_SDPA = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "causal": "is_causal"}
_RENAMED = {
    "flash_attn_with_kvcache": _KVCACHE | {"seqused_k": "cache_seqlens"},
    "flash_attn_varlen_qkvpacked_func": {
        "cu_seqlens_q": "cu_seqlens",
        "max_seqlen_q": "max_seqlen",
    },
    "scaled_dot_product_attention": _SDPA,
}
_OTHERS: dict[str, Callable[..., Any]] = {
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
    "scaled_dot_product_attention": scaled_dot_product_attention,
}


def call_of(case: Attention, problem: Problem, memory: Memory) -> Call:
    """A function that returns out and the log-sum-exp or None, and its arguments."""
    options = problem.options | problem.where
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = zip(names, problem.packing, strict=False)
    options |= {name: x for name, x in packing if x is not None}
    if case.num_splits:
        options["num_splits"] = case.num_splits
    if case.call in OPS:
        op = getattr(torch.ops.metal_attn, case.call.replace("bwd", "fwd"))
        return op, _arguments(case, problem, memory, options)
    function = _OTHERS.get(case.call) or getattr(functional, case.call)
    options |= {
        "window_size": (case.window_size_left, case.window_size_right),
        "enable_gqa": True,
        "return_attn_probs": True,
        "return_softmax_lse": True,
    }
    names_there, renamed = inspect.signature(function).parameters, _RENAMED.get(case.call, {})
    options = {n: x for n, x in options.items() if renamed.get(n, n) in names_there}
    arguments = _arguments(case, problem, memory, options)
    if "flash_attn" in case.call:
        arguments = {n: _to_blhd(n, x) for n, x in arguments.items()}
    arguments = {renamed.get(n, n): x for n, x in arguments.items()}
    if case.causal_bias:
        arguments["attn_mask"] = _causal_bias(case)

    def run(**arguments: Any) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(case.seed)
        result = function(**arguments)
        out, *others = result if isinstance(result, tuple) else (result,)
        is_transposed = "flash_attn" in case.call and not case.packs_queries
        return out.transpose(1, 2) if is_transposed else out, others[0] if others else None

    return run, arguments


def _to_blhd(name: str, x: Any) -> Any:
    """Operands, pages and their scales as (B, L, H, D). Packed rows are tokens already."""
    is_rows = name in ("q", "k", "v", "k_scale", "v_scale") and x.dim() == 4
    return x.transpose(1, 2) if is_rows else x


def _operands(case: Attention, problem: Problem, memory: Memory) -> dict[str, Any]:
    tensors = {"q": problem.q, "k": problem.stored[0], "v": problem.stored[1]}
    placed: dict[str, Any] = {}
    if case.in_one_tensor:
        together = "qkv" if "qkvpacked" in case.call else "kv"
        parts = [_to_blhd(n, tensors.pop(n)) for n in together]
        placed[together] = memory.place(together, torch.stack(parts, -3))
    layouts = {"q": case.q_layout, "k": case.k_layout, "v": case.v_layout}
    if case.cache or case.format:  # their rows are not repeated
        for name in "kv":
            layouts[name] = tuple(w for w in layouts[name] if not w.startswith("repeated"))
    placed |= {n: memory.place(n, x, layouts[n]) for n, x in tensors.items()}
    return placed


def _arguments(
    case: Attention, problem: Problem, memory: Memory, options: dict[str, Any]
) -> dict[str, Any]:
    arguments = _operands(case, problem, memory) | options
    for n, x in options.items():
        if isinstance(x, Tensor):
            layout = case.mask_layout if n in ("attn_mask", "attn_bias") else ()
            arguments[n] = memory.place(n, x, layout)
    return within_keys(case, arguments)


def _causal_bias(case: Attention) -> Tensor:
    from torch.nn.attention import bias  # the import takes seconds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of queries that see no key
        mask: Tensor = getattr(bias, f"causal_{case.causal_bias}")(case.q_length, case.kv_length)
    return mask
