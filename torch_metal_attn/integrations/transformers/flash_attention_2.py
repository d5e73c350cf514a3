"""Allows transformers' `flash_attention_2` if `flash_attn` is `torch_metal_attn.flash_attn`.

transformers allows it on CUDA only, and has no option to change that. So two things are replaced
where transformers looks them up: the test whether flash-attn 2 is installed, and its devices.
"""

import contextlib

from transformers import modeling_flash_attention_utils as lookups

_REPLACED_NAMES = ("FLASH_ATTENTION_COMPATIBILITY_MATRIX", "_loaded_implementation")


def allow(undo: contextlib.ExitStack) -> None:
    """Allow attn_implementation="flash_attention_2" until `undo` closes."""
    if not all(hasattr(lookups, place) for place in _REPLACED_NAMES):
        raise ImportError(
            "install_flash_attn(transformers=True) needs transformers 5.23 "
            "(pip install 'transformers>=5.23')"
        )
    before = lookups.is_flash_attn_2_available
    if before():  # flash-attn 2 is already allowed
        return
    rules = lookups.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    undo.callback(setattr, lookups, "is_flash_attn_2_available", before)
    undo.callback(rules.__setitem__, 2, rules[2])
    # transformers caches the functions that it has loaded, and does not check again.
    undo.callback(setattr, lookups, "_loaded_implementation", None)
    lookups.is_flash_attn_2_available = _yes
    rules[2] = {
        **rules[2],
        "general_availability_check": _yes,
        "supported_devices": (*rules[2]["supported_devices"], (_yes, "mps")),
    }


def _yes(kernels_fallback_ok: bool = False) -> bool:
    return True
