"""Converts a problem's tensors into arguments of each attention function."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_metal_attn.functional as functional
from torch_metal_attn.sdpa import scaled_dot_product_attention
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.attention_problem import Problem
from torch_metal_attn.testing.tensors import Layout, Memory
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

Call = tuple[Callable[..., Any], dict[str, Any]]
# What the functions call the op's options.
_RENAMED = {"leftpad_k": "cache_leftpad", "seqused_k": "cache_seqlens"}


def call_of(case: Attention, problem: Problem, memory: Memory) -> Call:
    """The function, which returns out and the log-sum-exp or None, and its arguments."""
    if case.call == "scaled_dot_product_attention":
        return _sdpa(case, problem, memory)
    if case.call == "flash_attn_with_kvcache":
        return _with_kvcache(case, problem, memory)
    if "flash_attn" in case.call:
        return _flash_attn(case, problem, memory)
    return _op(case, problem, memory)


def _placed(memory: Memory, options: dict[str, Any], layout: Layout) -> dict[str, Any]:
    return {
        n: memory.place(n, x, layout if n in ("attn_mask", "attn_bias") else ())
        if isinstance(x, Tensor)
        else x
        for n, x in options.items()
    }


def _operands(case: Attention, problem: Problem, memory: Memory) -> dict[str, Tensor]:
    layouts = {"q": case.q_layout, "k": case.k_layout, "v": case.v_layout}
    if case.cache or case.format:  # whose rows are not the operands'
        layouts |= {
            n: tuple(w for w in layouts[n] if not w.startswith("repeated")) for n in ("k", "v")
        }
    tensors = {"q": problem.q, "k": problem.stored[0], "v": problem.stored[1]}
    placed = {n: memory.place(n, x, layouts[n]) for n, x in tensors.items()}
    if case.values_in_keys:
        placed["v"] = placed["k"][..., : case.v_head_dim]
    return placed


def _packing(problem: Problem, memory: Memory) -> dict[str, Any]:
    if not problem.packing:
        return {}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return _placed(memory, dict(zip(names, problem.packing, strict=True)), ())


def _op(case: Attention, problem: Problem, memory: Memory) -> Call:
    arguments: dict[str, Any] = {**_operands(case, problem, memory), **_packing(problem, memory)}
    arguments |= _placed(memory, problem.options | problem.where, case.mask_layout)
    if case.num_splits:
        arguments["num_splits"] = case.num_splits
    name = {"flash_bwd": "flash_fwd", "flash_varlen_bwd": "flash_varlen_fwd"}.get(
        case.call, case.call
    )
    return getattr(torch.ops.metal_attn, name), arguments


def _flash_attn_options(case: Attention, problem: Problem, memory: Memory) -> dict[str, Any]:
    """The options of all of flash-attn's functions."""
    names = ("softmax_scale", "causal", "softcap", "attention_chunk")
    options = {n: problem.options[n] for n in names}
    options["window_size"] = (case.window_size_left, case.window_size_right)
    tensors = ("alibi_slopes", "learnable_sink")
    return options | _placed(
        memory, {n: problem.options[n] for n in tensors if n in problem.options}, ()
    )


def _flash_attn(case: Attention, problem: Problem, memory: Memory) -> Call:
    function = getattr(functional, case.call)
    # A packed row is a token; dense ones are (B, L, H, D) here.
    transposed = (lambda x: x) if case.is_packed else (lambda x: x.transpose(1, 2))
    arguments = _flash_attn_options(case, problem, memory)
    packing = _packing(problem, memory)
    if "qkvpacked" in case.call:
        together = torch.stack([transposed(x) for x in (problem.q, *problem.stored)], -3)
        arguments["qkv"] = memory.place("qkv", together)
        if packing:
            packing = {"cu_seqlens": packing["cu_seqlens_q"], "max_seqlen": packing["max_seqlen_q"]}
    elif "kvpacked" in case.call:
        arguments["q"] = transposed(memory.place("q", problem.q))
        together = torch.stack([transposed(x) for x in problem.stored], -3)
        arguments["kv"] = memory.place("kv", together)
    else:
        operands = _operands(case, problem, memory)
        arguments |= {n: transposed(x) for n, x in operands.items()}
        if case.cache:
            arguments |= {n: operands[n].transpose(1, 2) for n in ("k", "v")}
    arguments |= packing
    more = {n: problem.options[n] for n in ("seqused_k",) if n in problem.options}
    arguments |= _placed(memory, more | problem.where, ())
    arguments["dropout_p"] = case.dropout_p

    def run(**given: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(case.seed)
        out, lse, _ = function(**given, return_attn_probs=True)
        return transposed(out), lse

    return run, arguments


def _with_kvcache(case: Attention, problem: Problem, memory: Memory) -> Call:
    operands = _operands(case, problem, memory)
    arguments = _flash_attn_options(case, problem, memory)
    names = {"q": "q", "k": "k_cache", "v": "v_cache"}
    arguments |= {names[n]: x.transpose(1, 2) for n, x in operands.items()}
    given = {_RENAMED[n]: problem.options[n] for n in _RENAMED if n in problem.options}
    arguments |= _placed(memory, given, ())
    for name, x in _placed(memory, problem.where, ()).items():
        arguments[name] = x.transpose(1, 2) if x.dim() == 4 else x
    arguments["num_splits"] = case.num_splits

    def run(**given: Any) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
        return out.transpose(1, 2), lse

    return run, arguments


def _sdpa(case: Attention, problem: Problem, memory: Memory) -> Call:
    operands = _operands(case, problem, memory)
    arguments: dict[str, Any] = {
        "query": operands["q"],
        "key": operands["k"],
        "value": operands["v"],
        "dropout_p": case.dropout_p,
        "is_causal": case.causal,
        "scale": case.softmax_scale,
        "enable_gqa": True,
    }
    if case.causal_bias:
        arguments["attn_mask"] = _causal_bias(case)
    if case.attn_mask:
        mask = {"attn_mask": problem.options["attn_mask"]}
        arguments |= _placed(memory, mask, case.mask_layout)

    def run(**given: Any) -> tuple[Tensor, None]:
        torch.manual_seed(case.seed)
        return scaled_dot_product_attention(**given), None

    return run, arguments


def _causal_bias(case: Attention) -> Tensor:
    """Imports its module, which takes seconds, only if a case needs it."""
    from torch.nn.attention import bias

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of queries that see no key
        made: Tensor = getattr(bias, f"causal_{case.causal_bias}")(case.q_length, case.kv_length)
    return made
