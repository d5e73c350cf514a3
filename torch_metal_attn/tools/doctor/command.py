"""`python -m torch_metal_attn doctor SCRIPT ...` or `-m MODULE ...`: runs it as `python` does."""

import argparse
import contextlib
import io
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

from torch_metal_attn.runtime.extension import CANNOT_RUN
from torch_metal_attn.tools.doctor import report
from torch_metal_attn.tools.doctor.watch import Watch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", action="store_true", dest="module", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "target",
        nargs=argparse.PARSER,  # all later arguments are the script's
        metavar="SCRIPT",
        help="the script, or with -m the module, and its arguments",
    )


def doctor(options: argparse.Namespace) -> int:
    """Run a script or module, let its exceptions pass, and report to stderr. 2: it is missing."""
    name, *arguments = options.target
    try:
        code, file, folder, spec = (_module if options.module else _script)(name)
    except (OSError, ImportError) as error:
        why = (
            f"cannot run the module {name}: {error}"
            if options.module
            else f"cannot read the script {name}: {getattr(error, 'strerror', error)}"
        )
        print(f"error: {why}", file=sys.stderr)
        return CANNOT_RUN
    process, threads = os.getpid(), set(threading.enumerate())
    with Watch() as watch:
        try:
            with _main_module(file, arguments, folder, spec) as namespace:
                exec(code, namespace)
            for thread in set(threading.enumerate()) - threads:
                if not thread.daemon:  # Python would wait for it too
                    thread.join()
        except BaseException:
            _begin_traceback_at(code)
            raise
        finally:
            if os.getpid() == process:  # not in a fork that ends here
                with contextlib.suppress(BrokenPipeError):  # the reader of stdout has ended
                    sys.stdout.flush()
                shown = f"-m {name}" if options.module else name
                print(report.text(shown, watch), file=sys.stderr)
    return 0


_Program = tuple[CodeType, str, str, ModuleSpec | None]


def _script(file: str) -> _Program:
    """The script's code, file, folder for sys.path, and spec. Raises OSError or SyntaxError."""
    try:
        with io.open_code(os.path.abspath(file)) as text:
            code = compile(text.read(), file, "exec", dont_inherit=True)
    except SyntaxError:
        _begin_traceback_at(None)
        raise
    return code, file, os.path.dirname(os.path.abspath(file)), None


def _module(name: str) -> _Program:
    """The same for a module, or for the `__main__` of a package. Raises ImportError."""
    sys.path.insert(0, os.getcwd())
    try:
        # pdb and cProfile also call this private function.
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    finally:
        sys.path.remove(os.getcwd())
    return code, spec.origin, os.getcwd(), spec


@contextlib.contextmanager
def _main_module(
    file: str, arguments: list[str], folder: str, spec: ModuleSpec | None
) -> Iterator[dict[str, object]]:
    """Set `__main__`, sys.argv and sys.path as `python` does. Yields the globals of `__main__`."""
    main = ModuleType("__main__")
    vars(main).update(__file__=file, __builtins__=__builtins__, __spec__=spec)
    if spec is not None:
        main.__package__ = spec.parent
        main.__loader__ = spec.loader
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"] = main
    sys.argv = [file, *arguments]
    sys.path.insert(0, folder)
    try:
        yield vars(main)
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


def _begin_traceback_at(code: CodeType | None) -> None:
    """Let tracebacks that end this process start at `code`; for None they show no frames."""
    excepthook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        first = frames
        while first is not None and first.tb_frame.f_code is not code:
            first = first.tb_next
        first = frames if first is None and code is not None else first
        excepthook(kind, error.with_traceback(first), first)

    sys.excepthook = show
