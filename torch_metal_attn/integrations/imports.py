"""Runs an action when a module is imported, without importing the module, which may be slow."""

import importlib.abc
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Run `action` right after the module's import, or now if it is already imported."""
    if name in sys.modules:
        action()
    elif not any(
        isinstance(finder, _Finder) and (finder.awaited, finder.action) == (name, action)
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder(name, action, is_package=False))


def with_each_module(package: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action` with each module of a package: now if the module is imported, else later."""
    sys.meta_path.insert(0, _Finder(package, action, is_package=True))
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.") and isinstance(module, ModuleType):
            action(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules by other finders, and adds a loader that runs the action.

    awaited: the name of a module, or of a package; its modules are awaited until the process ends.
    """

    def __init__(self, awaited: str, action: Callable[..., None], *, is_package: bool) -> None:
        self.awaited, self.action, self._is_package = awaited, action, is_package
        self._asking = threading.local()

    def imported(self, module: ModuleType) -> None:
        if self._is_package:
            self.action(module)
            return
        # Stop waiting only after a successful import, because a failed import may be repeated.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.action()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_awaited = (
            name.startswith(f"{self.awaited}.") if self._is_package else name == self.awaited
        )
        # Another finder may ask this one while it asks the others; it must not ask again.
        if not is_awaited or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            others = [finder for finder in sys.meta_path if finder is not self]
            finds = (getattr(other, "find_spec", None) for other in others)
            specs = (find(name, path, target) for find in finds if find)
            spec: ModuleSpec | None = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asking.now = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Wraps a module's loader. Before the module runs, it gets its own loader back."""

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
        self._finder.imported(module)
