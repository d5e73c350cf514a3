"""One attention of a script: what it was, where it goes on mps, and what to change."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.integrations import sdpa_replacement as replacement
from torch_metal_attn.sdpa import is_causal_bias
from torch_metal_attn.tools.doctor.torch_on_mps import UNFUSED, Call, way

OURS, BY_HAND = "metal_attn", "written out by hand"
PACKED = "flash_varlen_fwd"  # whose tensors are (tokens, heads, head dim)
_BLOCK = "run it inside `with torch_metal_attn.sdpa_replaced():`"
# By the package that called torch's attention: its integration, and how that is switched on.
_INTEGRATIONS = {
    "transformers": ("transformers", 'load the model with attn_implementation="metal_attn"'),
    "diffusers": ("diffusers", 'call model.set_attention_backend("metal_attn")'),
    "comfy": ("comfyui", 'add the node "Metal attention" to the workflow'),
}


@dataclass(frozen=True)
class Attention:
    """Calls that are the same.

    shapes: of query and key, or of the scores. options: what else they have. place: file and line
    of the caller. goes_to: where they go on mps. scores_bytes: of one array of all scores, which
    the call holds; 0 if it holds none. why, change: lines of the report, "" for none. device: the
    type of the one that the tensors are on.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    options: str
    place: str
    goes_to: str
    scores_bytes: int = 0
    why: str = ""
    change: str = ""
    device: str = "cpu"


def ours(op: str, given: dict[str, Any], place: str) -> Attention:
    """A call of our op, with its arguments by name."""
    q, k = given["q"], given.get("k_cache", given["k"])
    shapes = (tuple(q.shape), tuple(k.shape))
    return Attention(shapes, q.dtype, op, place, OURS, device=q.device.type)


def torchs(args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> Attention:
    """A call of torch's function that our ops did not take."""
    given = replacement.given_by_name(args, kwargs)
    mask = given.get("attn_mask")
    causal = bool(given.get("is_causal", False))
    if is_causal_bias(mask):
        mask, causal = None, True
    leaves = [given[name] for name in ("query", "key", "value")]
    query, key, value = autocast(*leaves)
    if mask is not None:
        (mask,) = autocast(mask)
    call = Call(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        query.dtype,
        None if mask is None else mask.dtype,
        causal,
        given.get("dropout_p", 0.0) > 0.0,
        torch.is_grad_enabled() and any(x.requires_grad for x in leaves),
    )
    found = _by_torch(call, _options(call, mask), place, query.device.type)
    refusal = _refusal(args, kwargs)
    if refusal is not None:
        return replace(found, why=_joined(found.why, f"metal_attn refuses it: {refusal}"))
    if replacement.open_here():
        on_mps = "on the CPU torch ran it" if found.device == "cpu" else ""
        return replace(found, goes_to=OURS, scores_bytes=0, why=on_mps)
    if replacement.open_elsewhere():
        change = "open sdpa_replaced(process_wide=True): this thread is not inside the block"
    else:
        change = _switch(place) or _BLOCK
    return replace(found, change=change)


def by_hand(weights: Tensor, function: str | None, place: str) -> Attention:
    """An attention whose products and softmax the script computes itself, by its weights."""
    package = place.split("/")[0]
    if function == "multi_head_attention_forward":
        change = f"call the layer with need_weights=False, and {_BLOCK}"
    elif package == "diffusers":
        change = f"call no enable_attention_slicing(); {_switch(place)}"
    else:
        change = _switch(place) or (
            f"in {function}, call torch_metal_attn.scaled_dot_product_attention(q, k, v) in place "
            "of the products and the softmax"
        )
    shape, size, device = tuple(weights.shape), weights.nbytes, weights.device.type
    return Attention(
        (shape,), weights.dtype, "", place, BY_HAND, size, change=change, device=device
    )


def fused_layer(op: str, args: tuple[Any, ...], place: str) -> Attention:
    """A layer that torch computes as one op, which it has for the CPU but not for mps."""
    whole = op == "_transformer_encoder_layer_fwd"
    x, (width, heads) = args[0], args[1:3] if whole else args[3:5]
    shape = (x.shape[0], heads, x.shape[1], width // heads)
    mask, weights = (args[18], False) if whole else (args[9], args[10])
    call = Call(shape, shape, shape, x.dtype, None if mask is None else x.dtype)
    found = _by_torch(call, _options(call, mask), place, x.device.type)
    if weights:
        change = f"call the layer with need_weights=False, and {_BLOCK}"
        size = call.scores_bytes
        return replace(found, goes_to=BY_HAND, scores_bytes=size, why="", change=change)
    why = _joined("one op on the CPU; on mps the layer calls torch's function", found.why)
    return replace(found, why=why, change=_BLOCK)


def _by_torch(call: Call, options: str, place: str, device: str) -> Attention:
    goes_to, why = way(call)
    size = call.scores_bytes if goes_to == UNFUSED else 0
    shapes = (call.query, call.key)
    return Attention(shapes, call.dtype, options, place, goes_to, size, why, device=device)


def _options(call: Call, mask: Tensor | None) -> str:
    shown = ["is_causal"] * call.is_causal
    if mask is not None:
        shown.append(f"attn_mask {tuple(mask.shape)} {str(mask.dtype).removeprefix('torch.')}")
    shown += ["dropout"] * call.dropout + ["gradients"] * call.gradients
    return ", ".join(shown)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _refusal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why our kernels would not run the call on mps."""
    problem, reason = replacement.problem_or_reason(args, kwargs, on_mps=True)
    return reason if problem is None else problem.refusal()


def _switch(place: str) -> str:
    """How the caller's library is switched over, or what it lacks; "" if it is none of ours."""
    library, switch = _INTEGRATIONS.get(place.split("/")[0], ("", ""))
    if not library:
        return ""
    try:
        importlib.import_module(f"torch_metal_attn.integrations.{library}")
    except ImportError as error:  # it is too old
        return str(error)
    return switch
