"""Registers "metal_attn" with transformers and diffusers, whichever is imported first.

Importing them takes seconds, so they are not imported here. The backend is registered as soon as
the module that holds the library's attention functions has been imported.
"""

import importlib
import sys
import warnings
from functools import partial

from torch_metal_attn.imports import when_imported, with_each_module
from torch_metal_attn.integrations import diffusers_functional

_PACKAGE = "torch_metal_attn.integrations"
_CONSTANTS = "diffusers.utils.constants"
_VARIABLE = "DIFFUSERS_ATTN_BACKEND"  # of the environment; diffusers keeps it under the same name
_NAME = "metal_attn"


def register_with_transformers() -> None:
    """Register now if transformers' modelling code is imported already, else when it is."""
    when_imported("transformers.modeling_utils", partial(_register, "transformers"))


def register_with_diffusers() -> None:
    """Register now if diffusers' attention backends are imported already, else when they are."""
    when_imported(_CONSTANTS, _take_backend_of_environment)
    when_imported("diffusers.models.attention_dispatch", partial(_register, "diffusers"))
    with_each_module("diffusers", diffusers_functional.serve)


def _take_backend_of_environment() -> None:
    """diffusers refuses to be imported with a backend that it does not know yet."""
    constants = sys.modules[_CONSTANTS]
    if getattr(constants, _VARIABLE, None) == _NAME:
        setattr(constants, _VARIABLE, "native")
        when_imported("diffusers.models.attention_dispatch", partial(_activate, constants))


def _activate(constants: object) -> None:
    for module in (constants, sys.modules["diffusers.models.attention_dispatch"]):
        setattr(module, _VARIABLE, _NAME)
    importlib.import_module(f"{_PACKAGE}.diffusers").activate()


def _register(library: str) -> None:
    try:
        importlib.import_module(f"{_PACKAGE}.{library}")
    except ImportError:
        # Too old. The library refuses the name by itself; importing the integration says why.
        pass
    except Exception as error:
        warnings.warn(
            f"torch_metal_attn: {_NAME} is not available in this {library}: {error!r}",
            stacklevel=2,
        )
