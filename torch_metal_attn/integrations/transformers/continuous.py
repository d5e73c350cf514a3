"""`generate_batch`: transformers' continuous batching, with attention over packed sequences.

transformers batches requests token by token and keeps their keys and values in its own pages. It
assumes that implementations with "flash" in their name need no mask, and refuses to set an unknown
name. So a context manager sets the name where the layers read it.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.generation.continuous_batching import PagedAttentionCache

from torch_metal_attn.call.arguments import as_int, check_rank
from torch_metal_attn.integrations.transformers.attention import BOUNDS, flash_varlen, score_options
from torch_metal_attn.integrations.transformers.latent import EXPAND
from torch_metal_attn.integrations.transformers.refusals import checked_parts, unwrapped
from torch_metal_attn.integrations.transformers.unrotated import Unrotated
from torch_metal_attn.wording import type_text

FLASH_NAME = "metal_flash_attn"

_Model = TypeVar("_Model", bound=nn.Module)

_MANAGER = "_cached_continuous_batching_manager"

# By the id of a configuration, the context in which `continuous_batching` was entered. Layers run
# in a thread of the manager, where `simulate()` has no effect without this context.
_contexts: dict[int, Context] = {}


@contextmanager
def continuous_batching(model: _Model) -> Iterator[_Model]:
    """Let `model.generate_batch` and continuous batching managers run on the kernels.

    Inside the block every attention of the model has the implementation "metal_flash_attn", which
    works for continuous batching only: `forward` and `generate` raise. When the block ends, also by
    an exception, the model is restored and a manager that `persistent_manager=True` kept is
    destroyed. Blocks may be nested, for one model or several. Stop managers inside the block. A
    model may be wrapped as for `enable`.

    Raises: TypeError, NotImplementedError: as `enable`; also NotImplementedError if the model does
        not support attention without masks, or caches latent rows. ImportError: transformers is
        older than 5.20, where attention functions do not update the paged cache.
    """
    if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
        needed = "transformers 5.20 or later (pip install 'transformers>=5.20')"
        raise ImportError(f"continuous_batching needs {needed}")
    inner = unwrapped(model)
    parts = checked_parts(inner, FLASH_NAME)
    for name, part in parts:
        if not part._supports_flash_attn:
            where = f"{type(part).__name__}{f' at {name!r}' if name else ''}"
            raise NotImplementedError(
                f"{where} does not support flash attention, so continuous batching would ignore "
                "its masks; use enable(model) and generate"
            )
    if any(hasattr(module, EXPAND) for module in inner.modules()):
        raise NotImplementedError(
            f"{type(inner).__name__} caches latent rows, which do not fit transformers' pages; use "
            "enable(model, absorb=True) and generate"
        )
    # Every configuration from which a layer may read its implementation.
    held = (getattr(module, "config", None) for module in inner.modules())
    known = (inner.config.get_text_config(), *held)
    configs = {id(config): config for config in known if isinstance(config, PretrainedConfig)}
    names = {number: config._attn_implementation for number, config in configs.items()}
    outer = {number: _contexts[number] for number in configs if number in _contexts}
    # Do not reuse a manager that was made for another attention, because it may use masks.
    manager = inner.__dict__.pop(_MANAGER, None)
    context = copy_context()
    try:
        for number, config in configs.items():
            config._attn_implementation_internal = FLASH_NAME
            _contexts[number] = context
        yield model
    finally:
        inner.destroy_cached_continuous_batching_manager()
        if manager is not None:
            setattr(inner, _MANAGER, manager)
        for number, config in configs.items():
            config._attn_implementation_internal = names[number]
            del _contexts[number]
        _contexts.update(outer)


# A compiled graph would copy the views through which the paged cache is updated in place.
@torch.compiler.disable
def metal_flash_attention(
    module: nn.Module,
    query: Tensor | Unrotated,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention in one step of continuous batching: new tokens of many requests in one row.

    Args: module: the attention module. query: (1, Hq, T, D). key, value: (1, Hkv, T, D) of the new
        tokens. cache: transformers' PagedAttentionCache, which stores the new tokens and returns
        those of all requests, concatenated. From transformers 5.24 on the layer does this itself:
        then cache is None, key and value are those of all requests, and the lengths are those of
        the layer. sliding_window: only checked if there is a cache, which knows its window.
        keywords: scaling, softcap, s_aux and dropout as in `metal_attention`; cu_seq_lens_q, int32
        (requests + 1,); cu_seq_lens_k and max_length_k, by type of layer if there is a cache;
        read_index and write_index, int64 rows of the cache, by group of layers.

    Returns: out (1, T, Hq, D), contiguous, and None.

    Raises: NotImplementedError: there is no paged cache (as in `generate` and `forward`), there is
        a mask, attention is not causal, the window differs from the cache's window, or an argument
        is unknown.
    """
    if isinstance(query, Unrotated):
        query = query.rotated()
    if not hasattr(module, "config"):
        raise TypeError(f"module is {type_text(module)}; it must be a layer of transformers")
    for argument, x in (("query", query), ("key", key), ("value", value)):
        check_rank(argument, x, "(1, H, T, D)")
    name = type(module).__name__
    context = _contexts.get(id(module.config))
    packed = {name: keywords.pop(name, None) for name in (*BOUNDS, "read_index", "write_index")}
    has_lengths = isinstance(packed["cu_seq_lens_k"], Tensor)
    updated = cache is None and packed["read_index"] is not None and has_lengths
    paged = cache is not None or updated
    if not paged or context is None:
        raise NotImplementedError(
            f"{name} has attn_implementation={FLASH_NAME!r} and was called "
            f"{'outside of continuous_batching(model)' if paged else 'without a paged cache'}"
            ": call generate_batch inside continuous_batching(model); for forward and generate use "
            "enable(model) instead"
        )
    if attention_mask is not None or is_causal is False:
        raise NotImplementedError(
            f"{name} got an attention_mask or is_causal=False: in continuous batching every token "
            "sees itself and all earlier tokens"
        )
    options = score_options(module, query.device, **keywords)
    window = None if sliding_window is None else as_int("sliding_window", sliding_window)
    if not updated:
        if not hasattr(cache, "layer_to_allocator"):
            raise TypeError(f"cache is {type_text(cache)}; it must be a PagedAttentionCache")
        window = getattr(cache.layer_to_allocator[module.layer_idx], "sliding_window", None)
        if sliding_window not in (None, window):
            raise NotImplementedError(
                f"sliding_window={sliding_window} in {name}, layer {module.layer_idx}, whose cache "
                f"keeps {'every token' if window is None else f'a window of {window}'}"
            )
        # The update replaces the lengths of all types of layers in `packed` by this layer's.
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=packed
        )
    options |= {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    # A copy, because a context cannot be entered twice at the same time.
    out: Tensor = context.copy().run(flash_varlen, module, query, key, value, packed, **options)
    return out, None
