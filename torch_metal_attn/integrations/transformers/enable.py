"""Switch a model over, or say why its answers would be wrong."""

from transformers import PreTrainedModel

from torch_metal_attn.integrations.transformers.refusals import NAME, checked_parts


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
