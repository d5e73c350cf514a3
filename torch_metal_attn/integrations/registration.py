"""transformers learns of "metal_attn" from `import torch_metal_attn`, in either order.

Importing transformers takes seconds, so that is left to whoever needs it: a finder waits for the
one module that holds its attention functions, and registers ours as soon as it has run.
"""

import importlib
import importlib.abc
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AWAITED = "transformers.modeling_utils"
_INTEGRATION = "torch_metal_attn.integrations.transformers"


def register_with_transformers() -> None:
    """Register now if transformers' models are imported already, else when they are."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited module where the other finders do, with a loader that tells."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder may ask all others too, this one among them.
        if name != _AWAITED or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = _find_elsewhere(self, name, path, target)
        finally:
            self._asking.now = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec


def _find_elsewhere(
    finder: _Finder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for other in list(sys.meta_path):
        find = getattr(other, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find and other is not finder else None
        if spec is not None:
            return spec
    return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, which the module has again before it runs."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Not before: an import that failed may be tried again.
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()
