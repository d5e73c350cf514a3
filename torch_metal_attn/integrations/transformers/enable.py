"""`enable`: switches a model to this attention, or raises if its results would be wrong."""

from typing import TypeVar

from torch import nn

from torch_metal_attn.call.arguments import as_bool
from torch_metal_attn.integrations.transformers import fusion, latent
from torch_metal_attn.integrations.transformers.refusals import NAME, checked_parts, unwrapped

_Model = TypeVar("_Model", bound=nn.Module)


def enable(model: _Model, *, fuse_rope: bool = False, absorb: bool = False) -> _Model:
    """Switch `model` to this attention, in place, and return it.

    Args: model: a transformers model, or a part of one, such as the language model of a multimodal
        model. It may be wrapped by torch.compile, PEFT or (Distributed)DataParallel. fuse_rope: let
        the attention kernel rotate queries as it loads them (bench/results/transformers.md has the
        savings). It needs a model whose attention calls `apply_rotary_pos_emb` and does not change
        q afterwards. `metal_attn::rope` still rotates k before it enters the cache, and q in packed
        sequences and continuous batching. absorb: attend to the latent rows of multi-head latent
        attention (DeepSeek-V3 and related models) directly, instead of expanding them to keys and
        values of every head in each step; `latent_cache` makes a cache with concatenated rows.
        enable(model) undoes both.

    Raises: TypeError: `model` is not a transformers model. NotImplementedError: a part of the model
        ignores the attention interface or depends on the implementation's name, so it would not
        use this library or would give wrong results; with fuse_rope, the queries are rotated in an
        unknown way; with absorb, the model has no multi-head latent attention. The message names
        the part and what to do instead. The model is not changed.
    """
    fuse_rope, absorb = as_bool("fuse_rope", fuse_rope), as_bool("absorb", absorb)
    inner = unwrapped(model)
    parts = checked_parts(inner, NAME)
    replaced = fusion.plan(inner) if fuse_rope else []
    replaced += latent.plan(inner) if absorb else []
    before = [part.config._attn_implementation for _, part in parts]
    inner.set_attn_implementation(NAME)
    for name, part in parts:
        if (chosen := part.config._attn_implementation) != NAME:
            for (_, other), implementation in zip(parts, before, strict=True):
                other.config._attn_implementation_internal = implementation
            raise NotImplementedError(
                f"{type(part).__name__} at {name!r} kept attn_implementation={chosen!r}"
            )
    fusion.restore(inner)
    for module, kind in replaced:
        module.__class__ = kind
    return model
