"""Hugging Face transformers with `attn_implementation="metal_attn"`.

Importing this module registers the attention function and its mask function; `enable(model)`
switches a model over and refuses the ones that would ignore the implementation or answer wrongly.
Calls take one of two routes:

- kernel: no mask, or plain causal: `metal_attn::flash_fwd`. The mask function leaves the mask out
  whenever it can.
- reference: a dense mask (padding, sliding windows, packed sequences, decoding from a static
  cache): `torch_metal_attn.reference.attention`, in plain torch operations on the tensors' device,
  mps included.

Whatever neither computes (softcap, sinks, position biases, dropout) raises NotImplementedError.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_metal_attn import reference

_NEEDED = (
    "torch_metal_attn.integrations.transformers needs transformers 5.4 or later "
    "(pip install 'transformers>=5.4')"
)

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(f"{_NEEDED}: {error}") from error
if "q_length" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"{_NEEDED}: masks are asked for in another way before that")

NAME = "metal_attn"

# What leaks through to attention functions from a model's **kwargs and changes nothing in the
# attention itself; `deterministic` asks for what every kernel here is.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass
class Routes:
    """How often each route was taken, by description of the call; see `record_routes`."""

    kernel: Counter[str] = field(default_factory=Counter)
    reference: Counter[str] = field(default_factory=Counter)


_recorders: list[Routes] = []


@contextmanager
def record_routes() -> Iterator[Routes]:
    """Count the attention calls of the enclosed code by route, compiled graphs excepted."""
    routes = Routes()
    _recorders.append(routes)
    try:
        yield routes
    finally:
        _recorders.remove(routes)


def metal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' `sdpa_attention_forward` computes, or NotImplementedError.

    Args: module: the attention module; its `is_causal` (True if absent) counts where the argument
        is None. query: (B, Hq, Sq, D), or (1, Hq, Sq, D) for queries shared by the batch. key,
        value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv). attention_mask: None, or a bool or additive
        mask broadcastable to (B, Hq, Sq, Sk), causality included. others: ignored if known to be
        harmless, refused otherwise unless None.

    Returns:
        out (B, Sq, Hq, Dv), contiguous, and None for the attention weights, which are never formed.
    """
    if dropout:
        raise NotImplementedError(
            f"dropout={dropout} in {type(module).__name__}: metal_attn has no dropout yet; "
            "call model.eval() or set the model's attention dropout to 0"
        )
    _refuse_unknown(module, others)

    if query.shape[0] == 1 and key.shape[0] > 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    if attention_mask is not None:
        _record("reference", module, query, key, f"mask {_describe_mask(attention_mask)}")
        out, _ = reference.attention(query, key, value, softmax_scale=scaling, mask=attention_mask)
        return out.transpose(1, 2).contiguous(), None

    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    q_length, kv_length = query.shape[2], key.shape[2]
    # A single query is the last one, so it sees every key.
    causal = bool(causal) and q_length > 1
    reach = min(q_length, kv_length) if causal else kv_length
    if sliding_window is not None and reach > sliding_window:
        raise NotImplementedError(
            f"sliding_window={sliding_window} in {type(module).__name__} with {reach} keys in "
            "reach and no mask"
        )
    _record("kernel", module, query, key, "causal" if causal else "full")
    # More keys than queries and no mask: the prefill of a static cache, whose trailing keys hold
    # nothing yet. The diagonal is therefore aligned top-left.
    out, _ = torch.ops.metal_attn.flash_fwd(
        query, key, value, softmax_scale=scaling, causal=causal, q_offset=0
    )
    return out.transpose(1, 2).contiguous(), None


def metal_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """`sdpa_mask`: None for full and top-left causal attention, else bool (B, 1, Sq, Sk)."""

    def build(skip: bool) -> Tensor | None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=skip,
            **options,
        )

    mask = build(allow_is_causal_skip)
    if (
        mask is None
        and allow_is_causal_skip
        and q_length == 1
        and kv_length + kv_offset > int(q_offset) + 1
    ):
        # One query in front of cache slots that are still empty: without a mask it would see them.
        mask = build(skip=False)
    return mask


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch `model` to this attention, in place, and return it.

    Raises: TypeError: `model` is no transformers model. NotImplementedError: a part of the model
        ignores the attention interface, or treats implementations by name, so that its answers
        would not come from here or would be wrong. The message names the part; the model is left as
        it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    parts = [
        (name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel)
    ]
    for name, part in parts:
        where = f"{type(part).__name__}{f' at {name!r}' if name else ''}"
        if not part._can_set_attn_implementation():
            raise NotImplementedError(
                f"{where} ({part.config.model_type}) does not use transformers' attention "
                f"interface, so it would ignore attn_implementation={NAME!r}"
            )
        if re.search(
            r"_attn_implementation\s*(==|!=|in)[^\n]*\"(sdpa|flex_attention)\"", _source(type(part))
        ):
            raise NotImplementedError(
                f"{where} ({part.config.model_type}) prepares its masks for attention "
                f"implementations that it knows by name, so "
                f"attn_implementation={NAME!r} would answer wrongly"
            )
    if not any(
        "ALL_ATTENTION_FUNCTIONS" in _source(kind)
        for kind in {type(part) for part in model.modules()}
    ):
        raise NotImplementedError(
            f"{type(model).__name__} has no attention that goes through transformers' "
            "attention interface"
        )
    before = [part.config._attn_implementation for _, part in parts]
    model.set_attn_implementation(NAME)
    for name, part in parts:
        if part.config._attn_implementation != NAME:
            chosen = part.config._attn_implementation
            for (_, other), implementation in zip(parts, before, strict=True):
                other.config._attn_implementation_internal = implementation
            raise NotImplementedError(
                f"{type(part).__name__} at {name!r} kept attn_implementation={chosen!r}"
            )
    return model


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in _HARMLESS or value is None or (name == "output_attentions" and not value):
            continue
        shown = (
            f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else repr(value)
        )
        raise NotImplementedError(
            f"{name}={shown} in {type(module).__name__}: metal_attn does not implement it"
        )


def _source(kind: type) -> str:
    """The text of the Python module that defines `kind`; empty if there is none."""
    try:
        return inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return ""


def _describe_mask(mask: Tensor) -> str:
    return f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"


def _record(route: str, module: nn.Module, query: Tensor, key: Tensor, detail: str) -> None:
    if torch.compiler.is_compiling() or not _recorders:
        return
    call = f"{type(module).__name__} q {tuple(query.shape)} k {tuple(key.shape)} {detail}"
    for routes in _recorders:
        getattr(routes, route)[call] += 1


AttentionInterface.register(NAME, metal_attention)
AttentionMaskInterface.register(NAME, metal_attention_mask)
