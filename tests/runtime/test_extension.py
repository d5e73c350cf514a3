"""Errors of an import whose extension cannot work, and strings that ops take and return."""

import _ctypes
import ctypes
import gc
import re
import shutil
import subprocess
import sys

import psutil
import pytest
import torch

from tests.helpers.forks import run_program
from tests.packaging.built_wheels import IS_CHECKOUT, ROOT
from torch_metal_attn.runtime import extension


def test_an_old_torch_is_refused():
    """The check comes first, because the package uses newer functions."""
    done = run_program("import torch; torch.__version__ = '2.9.1'; import torch_metal_attn")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_metal_attn needs torch 2.10 or later, and this is 2.9.1: "
        "pip install -U 'torch>=2.10'"
    )


@pytest.mark.parametrize("actual", ["2.10.0a0+git", "3.0"])
def test_a_new_enough_torch_is_accepted(actual, monkeypatch):
    monkeypatch.setattr(torch, "__version__", actual)
    extension._require_torch()


@pytest.fixture
def imported(tmp_path):
    """Runs Python in a folder that has the package without its extension, and without torch."""
    package = tmp_path / "a clone" / "torch_metal_attn"
    (package / "runtime").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "runtime/__init__.py", "runtime/extension.py"):
        shutil.copy(extension.PATH.parent / name, package / name)

    def run(*arguments, setup=True, folder=package.parent, path=""):
        (package.parent / "setup.py").write_text("") if setup else None
        command = [sys.executable, "-S", *arguments]
        environment = {"PYTHONPATH": str(path)} if path else {}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.stdout == ""
        return done.returncode, done.stderr.splitlines()

    run.package = package
    return run


BUILD = "`pip install --no-build-isolation -e '{}'`"


@pytest.mark.parametrize("module", ["torch_metal_attn", "torch_metal_attn.simulator"])
def test_unbuilt_source_code_that_hides_an_installed_package_is_named(module, imported, tmp_path):
    installed = tmp_path / "site" / "torch_metal_attn"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    status, lines = imported("-m", module, "info", path=installed.parent)
    root = imported.package.parent
    expected = (
        f"error: Python found {imported.package}, source code that is not built, before the "
        f"installed package in {installed}: start Python in another folder than {root}, or "
        f"run {BUILD.format(root)}"
    )
    assert (status, lines) == (2, [expected])
    code = ["-c", "import torch_metal_attn"]
    status, actual = imported(*code, path=installed.parent)
    assert (status, actual[-1]) == (1, lines[0].replace("error", "ImportError", 1))
    assert imported(*code, path=installed.parent, folder=tmp_path) == (0, [])


UNBUILT = (
    "{package} is source code that is not built: run "
    "`pip install 'torch>=2.10' 'setuptools>=77' ninja` and {build}"
)
INCOMPLETE = "{package} has no _C.abi3.so, so it is not complete: install the package again"
# The error in an environment without torch.
NO_TORCH = (
    "torch_metal_attn needs torch, which {python} does not have: pip install -U 'torch>=2.10'"
)


@pytest.mark.parametrize(
    ("is_source", "has_extension", "message"),
    [(True, False, UNBUILT), (False, False, INCOMPLETE), (True, True, NO_TORCH)],
    ids=["source", "incomplete", "no torch"],
)
def test_a_package_that_cannot_work_says_why(imported, is_source, has_extension, message):
    if has_extension:
        (imported.package / "_C.abi3.so").write_bytes(b"")
    build = BUILD.format(imported.package.parent)
    said = message.format(package=imported.package, build=build, python=sys.executable)
    assert imported("-m", "torch_metal_attn", setup=is_source) == (2, [f"error: {said}"])


OLDER = """
import torch
class metal_attn: pass
torch.ops.metal_attn = metal_attn()
import torch_metal_attn
"""


@pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
def test_a_build_that_is_older_than_the_source_code_is_named():
    """After `git pull`, for example, the extension can lack an op of the Python code."""
    done = run_program(OLDER)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {extension.PATH} was built from other source code than ")
    assert "build it again with `pip install --no-build-isolation -e " in last
    assert "('metal_attn' object has no attribute " in last


def test_a_library_of_another_machine_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(b"no library of this machine")
    monkeypatch.setattr(extension, "PATH", path)
    with pytest.raises(ImportError, match=r"cannot be loaded .*--force-reinstall.*: .*_C"):
        extension.load.__wrapped__()


@pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
def test_modules_of_the_build_need_only_the_standard_library():
    """setup.py loads these modules by their paths before the package is built."""
    names = re.findall(r'load\("(\w+)"\)', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert set(names) == {"macos", "shaders"}
    for name in names:
        text = (extension.PATH.parent / "runtime" / f"{name}.py").read_text(encoding="utf-8")
        imports = re.findall(r"^ *(?:from|import) (\w+)", text, re.M)
        assert set(imports) <= sys.stdlib_module_names, name


@pytest.mark.parametrize(
    "change, library, fits",
    [
        (lambda text: text, extension.load, True),
        (lambda text: "// New.\n" + text.replace("  int32_t", "\tint32_t "), extension.load, True),
        (lambda text: text.replace("int32_t", "int64_t", 1), extension.load, False),
        # A library that is older than the check; an installed package, without shaders/.
        (lambda text: text, lambda: ctypes.CDLL(_ctypes.__file__), False),
        (None, lambda: ctypes.CDLL(_ctypes.__file__), True),
    ],
)
def test_params_of_another_version_are_refused(change, library, fits, tmp_path, monkeypatch):
    """Structs of another version would look like races in the kernels."""
    monkeypatch.setattr(extension, "PATH", tmp_path / "torch_metal_attn" / "_C.abi3.so")
    text = ctypes.c_char.in_dll(extension.load(), "metal_attn_params_text")
    params = tmp_path / "shaders" / "params"
    if change:
        params.mkdir(parents=True)
        (params / "all.h").write_text(change(ctypes.string_at(ctypes.addressof(text)).decode()))
    if fits:
        extension._require_same_params(library())
        return
    with pytest.raises(ImportError) as caught:
        extension._require_same_params(library())
    assert str(caught.value) == (
        f"_C.abi3.so was built with another version of {params}: build it again with "
        f"`pip install --no-build-isolation -e {tmp_path}`"
    )


LONG = f"return {' && '.join(['true'] * 500)};"
LONG_TEXTS = {"captures": [], "mask": LONG, "shares": [LONG] * 2, "places": [LONG]}


@pytest.mark.parametrize("op, texts", [("flex_fwd", LONG_TEXTS), ("flash_fwd", {})])
def test_ops_free_the_strings_that_they_take_and_return(op, texts):
    """Torch's own conversions (2.13) leak a copy of each string, 2,000 to 16,000 bytes a call."""
    explain, q = getattr(torch.ops.metal_attn_explain, op), torch.zeros(1, 1, 8, 8)

    def memory(calls):
        for _ in range(calls):
            explain(q, q, q, **texts)
        gc.collect()
        return psutil.Process().memory_info().rss

    def grown():
        before = memory(200)
        return memory(2000) - before

    # A leak grows in each round, but memory that was paged out returns only once.
    assert any(grown() < 2 << 20 for _ in range(5))
