"""Runs an action when a module is imported. The module is not imported here, which is slow."""

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
        sys.meta_path.insert(0, _Finder(name, action))


def with_each_module(package: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action` with each module of a package: now if it is imported, else after its import."""
    sys.meta_path.insert(0, _PackageFinder(package, action))
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.") and isinstance(module, ModuleType):
            action(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited module by other finders, and adds a loader that runs the action."""

    def __init__(self, awaited: str, action: Callable[[], None]) -> None:
        self.awaited, self.action = awaited, action
        self._asking = threading.local()

    def awaits(self, name: str) -> bool:
        return name == self.awaited

    def imported(self, module: ModuleType) -> None:
        # Only after a successful import, because a failed one may be repeated.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.action()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder may ask all finders too, including this one.
        if not self.awaits(name) or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = _find_elsewhere(self, name, path, target)
        finally:
            self._asking.now = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec


class _PackageFinder(_Finder):
    """The same for every module of a package, until the process ends."""

    def __init__(self, package: str, action: Callable[[ModuleType], None]) -> None:
        super().__init__(f"{package}.", lambda: None)
        self.with_module = action

    def awaits(self, name: str) -> bool:
        return name.startswith(self.awaited)

    def imported(self, module: ModuleType) -> None:
        self.with_module(module)


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
    """Wraps a module's loader, and restores that before the module runs."""

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
