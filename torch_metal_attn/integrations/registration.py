"""Registers "metal_attn" with transformers and diffusers, whichever is imported first.

Importing them takes seconds, so they are not imported here. The backend is registered right after
the import of the library's module with attention functions.
"""

import importlib
import sys
import warnings

from torch_metal_attn.integrations import diffusers_functional
from torch_metal_attn.integrations.imports import when_imported, with_each_module

_TRANSFORMERS_MODULE = "transformers.modeling_utils"
_TRANSFORMERS_INTEGRATION = "torch_metal_attn.integrations.transformers"
_DISPATCH = "diffusers.models.attention_dispatch"
_DIFFUSERS = "torch_metal_attn.integrations.diffusers"
_CONSTANTS = "diffusers.utils.constants"
_VARIABLE = "DIFFUSERS_ATTN_BACKEND"  # the environment variable, and diffusers' constant for it
_NAME = "metal_attn"


def register_with_transformers() -> None:
    when_imported(_TRANSFORMERS_MODULE, _register_transformers)


def register_with_diffusers() -> None:
    when_imported(_CONSTANTS, _postpone_environment_backend)
    when_imported(_DISPATCH, _register_diffusers)
    with_each_module("diffusers", diffusers_functional.replace_functional)


def _register_transformers() -> None:
    _import(_TRANSFORMERS_INTEGRATION, "transformers", 'attn_implementation="metal_attn"')


def _register_diffusers() -> None:
    _import(_DIFFUSERS, "diffusers", 'the attention backend "metal_attn"')


def _postpone_environment_backend() -> None:
    """Activate the environment's backend later: diffusers' import fails for unknown backends."""
    constants = sys.modules[_CONSTANTS]
    if getattr(constants, _VARIABLE, None) == _NAME:
        setattr(constants, _VARIABLE, "native")
        when_imported(_DISPATCH, _activate)


def _activate() -> None:
    for module in (_CONSTANTS, _DISPATCH):
        setattr(sys.modules[module], _VARIABLE, _NAME)
    importlib.import_module(_DIFFUSERS).activate()


def _import(integration: str, library: str, offered: str) -> None:
    try:
        importlib.import_module(integration)
    except ImportError:
        pass  # the library is too old and refuses the name; an import of the integration says why
    except Exception as error:
        warnings.warn(
            f"torch_metal_attn: {offered} is not available in this {library}: {error!r}",
            stacklevel=2,
        )
