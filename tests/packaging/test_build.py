"""What is built: a stable-ABI extension and flattened shaders."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.cases import each_case
from tests.packaging.built_wheels import IS_CHECKOUT, ROOT
from torch_metal_attn.runtime import extension, shaders

EXTENSION = extension.PATH

needs_checkout = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")


def symbols(*options):
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    listing = subprocess.run([nm, *options, str(EXTENSION)], capture_output=True, text=True)
    assert listing.returncode == 0, listing.stderr
    names = [line.split()[-1].split("@")[0] for line in listing.stdout.splitlines() if line.strip()]
    return [name.removeprefix("_") for name in names] if sys.platform == "darwin" else names


def undefined_symbols():
    return symbols("-u") if sys.platform == "darwin" else symbols("-D", "--undefined-only")


@needs_checkout
def test_setuptools_that_is_too_old(tmp_path):
    """As a new environment of Python 3.11 has it, where --no-build-isolation uses it."""
    old = tmp_path / "setuptools" / "command"
    old.mkdir(parents=True)
    (old.parent / "__init__.py").write_text('__version__ = "65.5.0"\nExtension = setup = None\n')
    (old / "build_py.py").write_text("build_py = object\n")
    run = subprocess.run(
        [sys.executable, ROOT / "setup.py", "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert run.stderr == (
        "error: the build needs setuptools 77 or later, and this is 65.5.0: "
        "pip install 'setuptools>=77'\n"
    )


def test_extension_needs_no_python():
    """So one file serves every Python, and building it needs no Python headers."""
    assert EXTENSION.name == "_C.abi3.so"
    assert [name for name in undefined_symbols() if re.match(r"_?Py", name)] == []


def test_only_torchs_stable_c_functions_are_used():
    names = undefined_symbols()
    torch_names = [name for name in names if "torch" in name or "c10" in name]
    assert len(torch_names) > 20, "nm found nothing: this test cannot tell"
    assert [name for name in torch_names if not re.match(r"(aoti_torch|torch)_\w+$", name)] == []
    # C++ symbols of namespaces at, c10 and torch: N2at..., N3c10..., N5torch...
    assert [name for name in names if re.match(r"_Z.*N?K?(2at|3c10|5torch)\d", name)] == []


def test_what_others_call_is_exported():
    exported = symbols("-gU") if sys.platform == "darwin" else symbols("-D", "--defined-only")
    mine = {name for name in exported if name.startswith(("metal_attn", "Py"))}
    names = """allow_tf32 hold_tensor let_meta_pass make_tiles params_text refusal
        limit_pieces release_tensor set_gpu_cores set_gpu_name set_shader_text set_simulator
        set_tensor_record simulator_run tensor_tiles_problem tf32_allowed tf32_reason
        track_fresh use_tiles""".split()
    # metal_attn_mps_problem is macOS' only.
    assert mine - {"metal_attn_mps_problem"} == {f"metal_attn_{name}" for name in names}


@needs_checkout
def test_the_same_source_serves_every_torch_from_2_10():
    """The headers hide what came after TORCH_TARGET_VERSION; setup.py must say 2.10."""
    assert 'TORCH_2_10 = "0x020a000000000000"' in (ROOT / "setup.py").read_text()
    later = {"torch_exception_get_what", "torch_mps_set_arg_bytes", "torch_library_def_with_tags"}
    assert later.isdisjoint(undefined_symbols())


@each_case("family", shaders.families())
def test_source_is_ascii_and_self_contained(family):
    text = shaders.source(family)
    assert text.isascii()
    assert not re.search(r'#\s*include\s*"', text)
    assert not re.search(r"#\s*pragma\s+once", text)
    assert re.search(rf"\bkernel\b[^;{{]*\bvoid {family}\w*\(", text)
    for define in ("SIMDGROUPS", "HEAD_DIM_QK"):
        assert f"#define {define}" not in text, "the host defines it"


def test_unknown_family():
    with pytest.raises(ValueError, match=r"family is 'flash'; it must be one of .*flash_fwd"):
        shaders.source("flash")


@needs_checkout
@each_case("family", shaders.families())
def test_line_directives_name_the_original(family):
    """Every line of the flattened text is the line of the file that #line says it is."""
    name, number, checked = None, 0, 0
    head, mark, text = shaders.source(family).partition("#line")
    assert re.fullmatch(r"(#(include <.*>|(if|pragma|define) .*|endif)\n)+", head)
    assert "#include" not in re.sub("#include <cstdint>", "", text), "after the defines"
    for line in (mark + text).splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        original = (ROOT / name).read_text().split("\n")[number - 1]
        assert line == original or (line == "" and original.strip() == "#pragma once")
        number += 1
        checked += 1
    assert checked > 100


def write(folder, **files):
    for stem, text in files.items():
        name = f"{stem}.metal" if stem == "main" else f"{stem}.h"
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "main.metal"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"main": "x\n// caf\u00e9\n"}, "shaders/main.metal:2: a character that is not ASCII"),
        (
            {"main": '#include "a.h"\n', "a": "#pragma once\n\u00b5\n"},
            "shaders/a.h:2: a character that is not ASCII",
        ),
        ({"main": '\n#include "absent.h"\n'}, 'shaders/main.metal:2: no file "absent.h"'),
        ({"main": '#include "../setup.py"\n'}, 'main.metal:1: no file "../setup.py"'),
        ({"main": '#include "a.h"\n', "a": "x\n"}, "shaders/a.h:1: a header without #pragma once"),
        (
            {"main": '#ifdef X\n# include "a.h"\n#endif\n', "a": "#pragma once\n"},
            'shaders/main.metal:2: include of "a.h" in a conditional block',
        ),
    ],
)
def test_flatten_refuses(tmp_path, files, message):
    with pytest.raises(shaders.ShaderError, match=re.escape(message)):
        shaders.flatten(write(tmp_path, **files))


def test_package_data_wins_over_a_checkout(tmp_path, monkeypatch):
    """An installed package reads what was flattened into it."""
    (tmp_path / "built.metal").write_text("kernel void built() {}\n")
    monkeypatch.setattr(shaders, "_PACKAGE_DATA", tmp_path)
    assert shaders.families() == ["built"]
    assert shaders.source("built") == "kernel void built() {}\n"
