"""Replace a function in every module that has imported it."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Modules of these packages keep the original function.
_UNCHANGED_PACKAGES = ("torch", __name__.partition(".")[0])


class Renaming:
    """Replaces a function in all modules except those of torch and this package, until `undo`."""

    def __init__(
        self,
        original: Callable[..., Any],
        replacement: Callable[..., Any],
        owner: ModuleType | None = None,
    ) -> None:
        self._original, self._replacement = original, replacement
        self._places: list[tuple[dict[str, Any], str]] = []  # (vars of a module, name in it)
        for module_name, module in list(sys.modules.items()):
            is_unchanged = module_name.split(".")[0] in _UNCHANGED_PACKAGES and module is not owner
            if not isinstance(module, ModuleType) or is_unchanged:
                continue
            names = vars(module)
            for name, value in list(names.items()):
                if value is original:
                    names[name] = replacement
                    self._places.append((names, name))

    def undo(self) -> None:
        """Restore the function, except where a name has been rebound since."""
        for names, name in self._places:
            if names.get(name) is self._replacement:
                names[name] = self._original
