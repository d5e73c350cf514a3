"""transformers learns of "metal_attn" from `import torch_metal_attn`, in either order.

Importing transformers takes seconds, so that is left to whoever needs it: ours is registered as
soon as the one module that holds its attention functions has been imported.
"""

import importlib
import warnings

from torch_metal_attn.imports import when_imported

_AWAITED = "transformers.modeling_utils"
_INTEGRATION = "torch_metal_attn.integrations.transformers"


def register_with_transformers() -> None:
    """Register now if transformers' models are imported already, else when they are."""
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
