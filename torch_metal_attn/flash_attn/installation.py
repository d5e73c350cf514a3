"""`install_flash_attn()`: the package `torch_metal_attn.flash_attn` under the name `flash_attn`."""

import contextlib
import importlib.util
import sys

import torch_metal_attn.flash_attn as flash_attn
from torch_metal_attn.call.arguments import as_bool
from torch_metal_attn.flash_attn import bert_padding, flash_attn_interface, layers
from torch_metal_attn.flash_attn.layers import rotary
from torch_metal_attn.integrations.imports import when_imported

_MODULES = (flash_attn, bert_padding, flash_attn_interface, layers, rotary)
_NAME = "flash_attn"
_DIFFUSERS = "diffusers.models.attention_dispatch"
# Names that diffusers' attention backends "flash" and "flash_varlen" use.
_DIFFUSERS_NAMES = {
    "_CAN_USE_FLASH_ATTN": True,
    "flash_attn_func": flash_attn.flash_attn_func,
    "flash_attn_varlen_func": flash_attn.flash_attn_varlen_func,
}


def install_flash_attn(*, transformers: bool = False) -> contextlib.ExitStack:
    """Make `import flash_attn` find `torch_metal_attn.flash_attn` in this process.

    Call it before a model imports flash-attn by its name. If you can change the import, write
    `import torch_metal_attn.flash_attn as flash_attn` instead. Code that looks for the metadata of
    a distribution `flash-attn` finds none. diffusers looks for it, so this function enables its
    attention backends "flash" and "flash_varlen".

    Args: transformers: also let transformers run its attn_implementation="flash_attention_2", which
        it allows only on CUDA. This replaces transformers' checks of packages and devices.
        "metal_attn" (`torch_metal_attn.integrations.transformers`) needs no such change, and
        supports masks that flash-attn does not, such as PaliGemma's.

    Returns: a context whose end, or `close()`, undoes the installation. Ignore it to keep the
        installation. Changes by earlier calls are kept in both cases.

    Raises:
        ImportError: transformers=True, and transformers is missing or too old.
        RuntimeError: another flash_attn is imported or installed.
    """
    with_transformers = as_bool("transformers", transformers)
    with contextlib.ExitStack() as undo:
        _install(undo)
        if with_transformers:
            from torch_metal_attn.integrations.transformers import flash_attention_2

            flash_attention_2.allow(undo)
        return undo.pop_all()


def _install(undo: contextlib.ExitStack) -> None:
    if sys.modules.get(_NAME) is flash_attn:
        return
    if _NAME in sys.modules:
        raise RuntimeError(
            f"flash_attn is already imported: {sys.modules[_NAME]!r}; call install_flash_attn() "
            "earlier, or import torch_metal_attn.flash_attn by its own name"
        )
    spec = importlib.util.find_spec(_NAME)
    if spec is not None:
        raise RuntimeError(
            f"another flash_attn is installed: {spec.origin or spec.submodule_search_locations}; "
            "uninstall it, or import torch_metal_attn.flash_attn by its own name"
        )
    for module in _MODULES:
        name = module.__name__.removeprefix("torch_metal_attn.")
        sys.modules[name] = module
        undo.callback(sys.modules.pop, name, None)
    when_imported(_DIFFUSERS, _enable_in_diffusers)
    undo.callback(_restore_diffusers)


def _enable_in_diffusers() -> None:
    """Enable flash-attn in diffusers, which checks on import for an installed distribution."""
    names = vars(sys.modules[_DIFFUSERS])
    if sys.modules.get(_NAME) is flash_attn and not names["_CAN_USE_FLASH_ATTN"]:
        names.update(_DIFFUSERS_NAMES)


def _restore_diffusers() -> None:
    names = vars(sys.modules[_DIFFUSERS]) if _DIFFUSERS in sys.modules else {}
    if names.get("flash_attn_func") is flash_attn.flash_attn_func:
        names.update(_CAN_USE_FLASH_ATTN=False, flash_attn_func=None, flash_attn_varlen_func=None)
