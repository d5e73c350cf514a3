"""Switch a model over, or say why its answers would be wrong."""

import inspect
import re
import sys

from transformers import PreTrainedModel

from torch_metal_attn.integrations.transformers.masks import DENSE_MODELS

NAME = "metal_attn"


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch `model` to this attention, in place, and return it.

    Raises: TypeError: `model` is no transformers model. NotImplementedError: a part of the model
        ignores the attention interface, or treats implementations by name, so that its answers
        would not come from here or would be wrong. The message names the part; the model is left as
        it was.
    """
    parts = checked_parts(model, NAME)
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


def checked_parts(model: PreTrainedModel, implementation: str) -> list[tuple[str, PreTrainedModel]]:
    """The models in `model`, itself included, with their names; raises what `enable` does."""
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
                f"interface, so it would ignore attn_implementation={implementation!r}"
            )
        if part.config.model_type not in DENSE_MODELS and re.search(
            r"_attn_implementation\s*(==|!=|in)[^\n]*\"(sdpa|flex_attention)\"", _source(type(part))
        ):
            raise NotImplementedError(
                f"{where} ({part.config.model_type}) prepares its masks for attention "
                f"implementations that it knows by name, so "
                f"attn_implementation={implementation!r} would answer wrongly"
            )
    if not any(
        "ALL_ATTENTION_FUNCTIONS" in _source(kind)
        for kind in {type(part) for part in model.modules()}
    ):
        raise NotImplementedError(
            f"{type(model).__name__} has no attention that goes through transformers' "
            "attention interface"
        )
    return parts


def _source(kind: type) -> str:
    """The text of the Python module that defines `kind`; empty if there is none."""
    try:
        return inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return ""
