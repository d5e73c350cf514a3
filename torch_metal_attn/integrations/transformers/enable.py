"""Switch a model over, or say why its answers would be wrong."""

from transformers import PreTrainedModel

from torch_metal_attn.integrations.transformers import fusion
from torch_metal_attn.integrations.transformers.refusals import NAME, checked_parts


def enable(model: PreTrainedModel, *, fuse_rope: bool = False) -> PreTrainedModel:
    """Switch `model` to this attention, in place, and return it.

    Args: fuse_rope: let the attention kernel turn queries as it loads them. q is then read and
        written once less than if `rope` turned it, and ten times less than by transformers' own
        operations (bench/results/transformers.md counts both). For models whose attention calls
        `apply_rotary_pos_emb` and leaves q as it is behind that; k is turned by `metal_attn::rope`
        as it enters the cache. Packed sequences and continuous batching turn q by `rope` as well.
        enable(model) undoes it. `model` may be a part, such as the language model of several.

    Raises: TypeError: `model` is no transformers model. NotImplementedError: a part of the model
        ignores the attention interface, or treats implementations by name, so that its answers
        would not come from here or would be wrong; or, with fuse_rope, turns its queries in a way
        that is not known. The message names the part; the model is left as it was.
    """
    parts = checked_parts(model, NAME)
    fused = fusion.plan(model) if fuse_rope else []
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
    fusion.unfuse(model)
    for module, kind in fused:
        module.__class__ = kind
    return model
