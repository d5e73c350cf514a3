"""Replace a function under the names that modules have for it."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Their internal references keep the function.
_OWN_PACKAGES = ("torch", __name__.partition(".")[0])


class Renaming:
    """Replaces a function in all modules but torch's and this package's, until `undo`."""

    def __init__(
        self,
        original: Callable[..., Any],
        replacement: Callable[..., Any],
        owner: ModuleType | None = None,
    ) -> None:
        self._original, self._replacement = original, replacement
        self._places: list[tuple[dict[str, Any], str]] = []  # a module's names, and one of them
        for module_name, module in list(sys.modules.items()):
            is_own = module_name.split(".")[0] in _OWN_PACKAGES and module is not owner
            if not isinstance(module, ModuleType) or is_own:
                continue
            names = vars(module)
            for name, value in list(names.items()):
                if value is original:
                    names[name] = replacement
                    self._places.append((names, name))

    def undo(self) -> None:
        """Put the function back, except where a name means something else by now."""
        for names, name in self._places:
            if names.get(name) is self._replacement:
                names[name] = self._original
