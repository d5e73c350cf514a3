"""Registers "metal_attn" with transformers, whether it or torch_metal_attn is imported first.

Importing transformers takes seconds, so it is not imported here. The implementation is registered
as soon as the module that holds transformers' attention functions has been imported.
"""

import importlib
import warnings

from torch_metal_attn.imports import when_imported

_AWAITED = "transformers.modeling_utils"
_INTEGRATION = "torch_metal_attn.integrations.transformers"


def register_with_transformers() -> None:
    """Register now if transformers' modelling code is imported already, else when it is."""
    when_imported(_AWAITED, _register)


def _register() -> None:
    try:
        importlib.import_module(_INTEGRATION)
    except ImportError:
        # Too old. transformers refuses the name by itself; importing the integration says why.
        pass
    except Exception as error:
        warnings.warn(
            f'torch_metal_attn: attn_implementation="metal_attn" is not available in this '
            f"transformers: {error!r}",
            stacklevel=2,
        )
