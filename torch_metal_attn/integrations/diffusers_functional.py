"""Replaces torch.nn.functional in diffusers' modules, so that attention uses diffusers' backend.

diffusers' older attention (UNets, VAEs, Stable Diffusion 3 and others) calls torch's function and
ignores backends. This module replaces `torch.nn.functional` in each module of diffusers, and only
its `scaled_dot_product_attention` is different. This module does not import diffusers.
"""

import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

import torch_metal_attn.sdpa as sdpa
from torch_metal_attn.call.arguments import check_tensor

_DISPATCH = "diffusers.models.attention_dispatch"
_FULL_NAME = "nn.functional.scaled_dot_product_attention"


def __getattr__(name: str) -> Any:
    return getattr(functional, name)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Attention by "metal_attn" if that is diffusers' active backend, else by torch."""
    attend = metal_attention if _metal_is_active() else functional.scaled_dot_product_attention
    return attend(query, key, value, *rest, **options)


def metal_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Attention by the kernels, with contiguous copies; by torch if a hook replaces its result."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
    if replaces_scores():
        return functional.scaled_dot_product_attention(query, key, value, *rest, **options)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return sdpa.scaled_dot_product_attention(query, key, value, *rest, **options)


def _metal_is_active() -> bool:
    dispatch = sys.modules.get(_DISPATCH)
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return registry is not None and registry._active_backend == "metal_attn"


def replaces_scores() -> bool:
    """True if a hook of diffusers intercepts torch's function to replace its result."""
    modes = _get_current_function_mode_stack()
    return any(type(mode).__module__.startswith("diffusers.") for mode in modes)


def replace_functional(module: ModuleType) -> None:
    """Replace `torch.nn.functional` in a module of diffusers by this module."""
    for name, value in list(vars(module).items()):
        if value is functional:
            setattr(module, name, sys.modules[__name__])
        elif value is nn and _FULL_NAME in _source(module):
            setattr(module, name, _TorchNn("torch.nn"))


def calls_replacement(names: Collection[str], known: Mapping[str, Any]) -> bool:
    """True if code that uses `names` calls this module's attention. known: the code's globals."""
    values = (known.get(name) for name in names)
    return "scaled_dot_product_attention" in names and any(
        value is sys.modules[__name__] or isinstance(value, _TorchNn) for value in values
    )


def _source(module: ModuleType) -> str:
    loader = getattr(module, "__loader__", None)
    get_source = getattr(loader, "get_source", None)
    return (get_source and get_source(module.__name__)) or ""


class _TorchNn(ModuleType):
    """torch.nn with this module as its `functional`."""

    functional = sys.modules[__name__]

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)
