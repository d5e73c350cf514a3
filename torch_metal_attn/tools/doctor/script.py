"""A user's script or module as `python` runs it: its own arguments, `__main__` and sys.path."""

import io
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType


class NoScript(Exception):
    """The script or module is not there."""


@dataclass(frozen=True)
class Script:
    """A program that has not run yet.

    name: as the user gave it. spec: of a module, None for a file. folder: the first of sys.path.
    """

    name: str
    file: str
    code: CodeType
    arguments: tuple[str, ...]
    folder: str
    spec: ModuleSpec | None = None

    def run(self) -> None:
        """Run it; it may raise anything."""
        main = ModuleType("__main__")
        vars(main).update(__file__=self.file, __builtins__=__builtins__, __spec__=self.spec)
        if self.spec is not None:
            main.__package__ = self.spec.parent
            main.__loader__ = self.spec.loader
        before = sys.modules["__main__"], sys.argv, sys.path[:]
        sys.modules["__main__"] = main
        sys.argv = [self.file, *self.arguments]
        sys.path.insert(0, self.folder)
        try:
            exec(self.code, vars(main))
        except BaseException:
            _begin_traceback_at(self.code)
            raise
        finally:
            sys.modules["__main__"], sys.argv, sys.path[:] = before


def _begin_traceback_at(code: CodeType | None) -> None:
    """Let the traceback that ends this process begin at this code, as `python` would show it.

    None: it shows no frames.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        first = frames
        while first is not None and first.tb_frame.f_code is not code:
            first = first.tb_next
        first = frames if first is None and code is not None else first
        shown(kind, error.with_traceback(first), first)

    sys.excepthook = show


def script(file: str, arguments: list[str]) -> Script:
    """A file; raises NoScript, or the SyntaxError of its text."""
    try:
        with io.open_code(os.path.abspath(file)) as text:
            code = compile(text.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise NoScript(f"cannot read the script {file}: {error.strerror}") from None
    except SyntaxError:
        _begin_traceback_at(None)
        raise
    folder = os.path.dirname(os.path.abspath(file))
    return Script(file, file, code, tuple(arguments), folder)


def module(name: str, arguments: list[str]) -> Script:
    """A module, or the `__main__` of a package; raises NoScript, or what its packages raise."""
    sys.path.insert(0, os.getcwd())
    try:
        # As pdb and cProfile find what `python -m` would run.
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    except ImportError as error:
        raise NoScript(f"cannot run the module {name}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    return Script(f"-m {name}", spec.origin, code, tuple(arguments), os.getcwd(), spec)
