"""One attention of a script: its shapes, what runs it on mps, and what to change."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.integrations import sdpa_replacement as replacement
from torch_metal_attn.sdpa import is_causal_bias

OURS, TORCHS, BY_HAND = "metal_attn", "torch's function", "written out by hand"
PACKED = "flash_varlen_fwd"  # its tensors are (tokens, heads, head dim)
_BLOCK = "run it inside `with torch_metal_attn.sdpa_replaced():`"
# For each package that calls torch's attention: our integration, and how to enable it.
_INTEGRATIONS = {
    "transformers": ("transformers", 'load the model with attn_implementation="metal_attn"'),
    "diffusers": ("diffusers", 'call model.set_attention_backend("metal_attn")'),
    "comfy": ("comfyui", 'add the node "Metal attention" to the workflow'),
}


@dataclass(frozen=True)
class Attention:
    """Identical calls. scores_bytes: size of one array of all scores; 0 for OURS."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    options: str
    place: str
    goes_to: str
    scores_bytes: int = 0
    why: str = ""
    change: str = ""
    device: str = "cpu"


def ours(op: str, arguments: dict[str, Any], place: str) -> Attention:
    q, k = arguments["q"], arguments.get("k_cache", arguments["k"])
    shapes = (tuple(q.shape), tuple(k.shape))
    return Attention(shapes, q.dtype, op, place, OURS, device=q.device.type)


def torchs(args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> Attention:
    arguments = replacement.arguments_by_name(args, kwargs)
    mask = arguments.get("attn_mask")
    causal = bool(arguments.get("is_causal", False))
    if is_causal_bias(mask):
        mask, causal = None, True
    leaves = [arguments[name] for name in ("query", "key", "value")]
    query, key, _ = autocast(*leaves)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    options = ["is_causal"] * causal + ([] if mask is None else [_mask_text(*autocast(mask))])
    options += ["dropout"] * (arguments.get("dropout_p", 0.0) > 0.0) + ["gradients"] * gradients
    shapes, text = (tuple(query.shape), tuple(key.shape)), ", ".join(options)
    scores = _scores_bytes(query.shape, key.shape, torch.float32 if gradients else query.dtype)
    device = query.device.type
    attention = Attention(shapes, query.dtype, text, place, TORCHS, scores, device=device)
    problem, reason = replacement.problem_or_reason(args, kwargs, on_mps=True)
    refusal = reason if problem is None else problem.refusal()
    if refusal is not None:
        return replace(attention, why=f"metal_attn refuses it: {refusal}")
    if replacement.open_here():
        why = "torch ran it on the CPU" if attention.device == "cpu" else ""
        return replace(attention, goes_to=OURS, scores_bytes=0, why=why)
    if replacement.open_elsewhere():
        change = "open sdpa_replaced(process_wide=True): this thread is not inside the block"
    else:
        change = _switch(place) or _BLOCK
    return replace(attention, change=change)


def by_hand(weights: Tensor, function: str | None, place: str) -> Attention:
    """An attention whose products and softmax the script computes itself."""
    package = place.split("/")[0]
    if function == "multi_head_attention_forward":
        change = f"call the layer with need_weights=False, and {_BLOCK}"
    elif package == "diffusers":
        change = f"do not call enable_attention_slicing(); {_switch(place)}"
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
    """A layer that torch computes as one op on the CPU. mps has no such op."""
    whole = op == "_transformer_encoder_layer_fwd"
    x, (width, heads) = args[0], args[1:3] if whole else args[3:5]
    shape = (x.shape[0], heads, x.shape[1], width // heads)
    # The positions of mask and need_weights in the op's signature; an encoder layer has no weights.
    mask, weights = (args[18], False) if whole else (args[9], args[10])
    attention = Attention(
        (shape, shape),
        x.dtype,
        "" if mask is None else _mask_text(mask),
        place,
        TORCHS,
        _scores_bytes(shape, shape, x.dtype),
        "one op on the CPU; on mps the layer calls torch's function",
        _BLOCK,
        x.device.type,
    )
    if weights:
        change = f"call the layer with need_weights=False, and {_BLOCK}"
        return replace(attention, goes_to=BY_HAND, why="", change=change)
    return attention


def _mask_text(mask: Tensor) -> str:
    return f"attn_mask {tuple(mask.shape)} {str(mask.dtype).removeprefix('torch.')}"


def _scores_bytes(query: Sequence[int], key: Sequence[int], dtype: torch.dtype) -> int:
    try:
        leading = torch.broadcast_shapes(query[:-2], key[:-2])
    except RuntimeError:  # grouped heads
        leading = torch.Size(query[:-2])
    return leading.numel() * query[-2] * key[-2] * dtype.itemsize


def _switch(place: str) -> str:
    """How to switch the caller's library to our kernels; "" for callers without an integration."""
    library, switch = _INTEGRATIONS.get(place.split("/")[0], ("", ""))
    if library:
        try:
            importlib.import_module(f"torch_metal_attn.integrations.{library}")
        except ImportError as error:  # the library is too old
            return str(error)
    return switch
