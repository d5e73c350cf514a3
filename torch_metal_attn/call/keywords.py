"""Keywords of other libraries' attention functions, and the advice for each."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.compiler import is_compiling

_Function = TypeVar("_Function", bound=Callable[..., Any])

# A row lists the names of one argument in torch, flash-attn, MLX, xformers, vLLM and FlashInfer.
_SYNONYMS = [
    row.split()
    for row in (
        "q query queries",
        "k key keys",
        "v value values",
        "causal is_causal",
        "softmax_scale scale sm_scale scaling",
        "attn_mask mask attention_mask",
        "attn_bias bias attn_mask",
        "dropout_p p dropout attn_dropout",
        "window_size sliding_window window",
        "softcap logits_soft_cap logit_cap soft_cap",
        "learnable_sink sinks sink s_aux",
        "alibi_slopes alibi",
        "return_attn_probs return_softmax_lse return_lse return_softmax need_weights",
        "cu_seqlens_q cu_seqlens cu_seq_lens_q qo_indptr",
        "cu_seqlens_k cu_seqlens cu_seq_lens_k cu_seqlens_kv kv_indptr",
        "max_seqlen_q max_seqlen max_length_q",
        "max_seqlen_k max_seqlen max_length_k max_seqlen_kv",
        "seqused_k cache_seqlens seq_lens context_lens",
        "block_table block_tables page_table",
        "k_scale k_descale",
        "v_scale v_descale",
    )
]
# By function: advice for an argument that it lacks, under the first name of the argument's row.
_ADVICE = {
    "flex_attention": {
        "causal": "make a block_mask with torch's create_block_mask and masks.causal()",
        "attn_mask": "make a block_mask of a bool mask with torch_metal_attn.block_mask",
        "attn_bias": "add it in a score_mod: score + bias[b, h, q_idx, kv_idx]",
        "window_size": "make a block_mask with create_block_mask and masks.sliding_window(...)",
        "softcap": "pass score_mod=scores.soft_cap(...)",
        "alibi_slopes": "pass score_mod=scores.alibi(...)",
    },
    "flash_attn_with_kvcache": {
        "attn_mask": "torch.ops.metal_attn.decode_step takes it, with a column per cache row",
        "attn_bias": "torch.ops.metal_attn.decode_step takes it, with a column per cache row",
    },
}
_GROUPED = "leave it out: heads are grouped if k and v have fewer heads than q"
_OTHER_FUNCTIONS = (
    "flash_attn_func",
    "scaled_dot_product_attention",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
)
# By function: the parameters of each function that calls `check_keywords`.
_KNOWN: dict[str, list[str]] = {}


def show_parameters(function: _Function, parameters: Iterable[inspect.Parameter]) -> _Function:
    """Let help() and inspect.signature show these parameters, and `check_keywords` allow them."""
    signature = inspect.signature(function).replace(parameters=list(parameters))
    function.__signature__ = signature  # type: ignore[attr-defined]
    _KNOWN[function.__name__] = list(signature.parameters)
    return function


def without_unknown(function: _Function) -> _Function:
    """Hide `**unknown`, which only `check_keywords` uses."""
    parameters = inspect.signature(function).parameters.values()
    return show_parameters(function, (p for p in parameters if p.kind is not p.VAR_KEYWORD))


def check_keywords(function: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in _KNOWN[function]:
            advice = _advice(function, _KNOWN[function], name)
            raise TypeError(f"{function} has no argument {name}; {advice}")


def _advice(function: str, known: list[str], name: str) -> str:
    rows = [row for row in _SYNONYMS if name in row]
    for row in rows:
        if row[0] in _ADVICE.get(function, {}):
            return _ADVICE[function][row[0]]
    same = [other for row in rows for other in row if other in known]
    if same:
        return f"use {' and '.join(same)}"
    if name == "enable_gqa":
        return _GROUPED
    for other in _OTHER_FUNCTIONS:
        for parameter in _KNOWN[other]:
            if parameter == name or any(parameter in row for row in rows):
                return f"{other} takes it" + (f" as {parameter}" if parameter != name else "")
    # Dynamo cannot trace difflib.
    near = [] if is_compiling() else difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
