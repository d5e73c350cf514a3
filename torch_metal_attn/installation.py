"""`install_flash_attn()`: the package `torch_metal_attn.flash_attn` under the name `flash_attn`."""

import contextlib
import importlib.util
import sys

from torch_metal_attn import flash_attn
from torch_metal_attn.flash_attn import bert_padding, flash_attn_interface, layers
from torch_metal_attn.flash_attn.layers import rotary

_MODULES = (flash_attn, bert_padding, flash_attn_interface, layers, rotary)
_NAME = "flash_attn"


def install_flash_attn(*, transformers: bool = False) -> contextlib.ExitStack:
    """Lets `import flash_attn` find `torch_metal_attn.flash_attn`, in this process.

    For models that import flash-attn by its name; call it before they do. Whoever can change the
    import writes `import torch_metal_attn.flash_attn as flash_attn` instead. There is still no
    distribution `flash-attn`, so that what asks for one finds none.

    Args: transformers: also let transformers run its attn_implementation="flash_attention_2", which
        it allows on CUDA alone, by replacing its answers to what is there and on which devices.
        "metal_attn" (`torch_metal_attn.integrations.transformers`) needs no such thing, and takes
        masks that flash-attn does not know, as PaliGemma's.

    Returns: a context that takes all of it back where its `with` (or `close()`) ends. Ignored, it
        stays. What was installed before stays too.

    Raises:
        ImportError: transformers is wanted, and missing or too old.
        RuntimeError: there is another flash_attn, imported or installed.
    """
    with contextlib.ExitStack() as undo:
        _take_name(undo)
        if transformers:
            from torch_metal_attn.integrations.transformers import flash_attention_2

            flash_attention_2.allow(undo)
        return undo.pop_all()


def _take_name(undo: contextlib.ExitStack) -> None:
    if sys.modules.get(_NAME) is flash_attn:
        return
    if _NAME in sys.modules:
        raise RuntimeError(
            f"flash_attn is already imported: {sys.modules[_NAME]!r}; call install_flash_attn() "
            "before, or import torch_metal_attn.flash_attn by its own name"
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
