"""The stable-ABI extension and the flattened shaders."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from tests.helpers.cases import each_case
from tests.helpers.forks import run_program
from tests.packaging.built_wheels import IS_CHECKOUT, ROOT
from torch_metal_attn.runtime import extension, shaders, version

repository = pytest.importorskip("repository", reason="no .ci folder")
needs_checkout = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")


def symbols(on_macos="-u", elsewhere="--undefined-only"):
    options = [on_macos] if sys.platform == "darwin" else ["-D", elsewhere]
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    listing = subprocess.run([nm, *options, extension.PATH], capture_output=True, text=True)
    assert listing.returncode == 0, listing.stderr
    names = [line.split()[-1].split("@")[0] for line in listing.stdout.splitlines() if line.strip()]
    return [name.removeprefix("_") for name in names] if sys.platform == "darwin" else names


@needs_checkout
def test_setuptools_that_is_too_old_is_refused(tmp_path):
    old = tmp_path / "setuptools" / "command"
    old.mkdir(parents=True)
    (old.parent / "__init__.py").write_text('__version__ = "65.5.0"\nExtension = setup = None\n')
    (old / "build_py.py").write_text("build_py = object\n")
    command = [sys.executable, ROOT / "setup.py", "--version"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == (
        "error: the build needs setuptools 77 or later, and found 65.5.0: "
        "pip install 'setuptools>=77'\n"
    )


@needs_checkout
@pytest.mark.parametrize("url", ["", "https://example.org/someone/torch_metal_attn"])
def test_the_url_in_pyproject_is_used_everywhere(url, tmp_path, monkeypatch, capsys):
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(
        re.sub('^repository = ".*"$', f'repository = "{url}"', project, flags=re.MULTILINE)
    )
    links = f"[a](x.md) [![b](c.svg)](d#e) [f](#g) [h]({repository.PLACEHOLDER}/issues)\n"
    (tmp_path / "README.md").write_text(links)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    message = f"wrote {url} into README.md" if url else repository.EMPTY
    assert repository.write(tmp_path) == message
    shutil.copy(ROOT / "setup.py", tmp_path)
    monkeypatch.setenv("MAX_JOBS", "1")
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(tmp_path / "setup.py"))
    options = setup.call_args.kwargs
    assert ("has no URL" in capsys.readouterr().err) == (not url)
    if url:
        assert options["project_urls"]["Issues"] == f"{url}/issues"
        assert options["long_description"] == (
            f"[a]({url}/blob/main/x.md) [![b]({url}/raw/main/c.svg)]({url}/blob/main/d#e) [f](#g) "
            f"[h]({url}/issues)\n"
        )
    else:
        assert (options["project_urls"], options["long_description"]) == ({}, links)


def test_messages_name_the_issues_of_the_package(monkeypatch):
    urls = ["Repository, https://example.org/x", "Issues, https://example.org/x/issues"]
    for known, where in ((urls, " (https://example.org/x/issues)"), (None, "")):
        message = mock.Mock(get_all=mock.Mock(return_value=known))
        monkeypatch.setattr(version, "metadata", mock.Mock(return_value=message))
        assert version.open_an_issue() == f"open an issue{where}"


# A Mac with python.org's Python, which is built for macOS 10.13 and also for Intel. The compilers
# log their arguments and write empty outputs.
ON_A_MAC = """
import os, platform, stat, subprocess, sys, sysconfig
from pathlib import Path

tools = Path(sys.argv.pop(1)).absolute()
log = tools / "log"
for name in ("clang", "clang++", "c++"):
    (tools / name).write_text(
        '#!/bin/sh\\necho "$MACOSX_DEPLOYMENT_TARGET $*" >> ' + str(log) + "\\n"
        'while [ $# -gt 1 ]; do case $1 in -o|-MF) : > "$2";; esac; shift; done\\n'
    )
    (tools / name).chmod(0o755)
os.environ["PATH"] = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.defpath])
sys.platform = "darwin"
platform.machine = lambda: "arm64"
platform.system = lambda: "Darwin"
os.uname = lambda: ("Darwin", "mac", "24.1.0", "", "arm64")
os.cpu_count = lambda: 10
del os.sched_getaffinity  # macOS has none
os.sysconf = {"SC_PHYS_PAGES": 2**21, "SC_PAGE_SIZE": 2**12}.get
import _osx_support
_osx_support._SYSTEM_VERSION, _osx_support._SYSTEM_VERSION_TUPLE = "15.1", (15, 1)
both = "-arch arm64 -arch x86_64"
bundle = f"-bundle -undefined dynamic_lookup {both}"
sysconfig.get_config_vars().update(
    CC="clang", CXX="clang++", CFLAGS=f"-g {both}", LDFLAGS=both, CCSHARED="", SHLIB_SUFFIX=".so",
    LDSHARED=f"clang {bundle}", LDCXXSHARED=f"clang++ {bundle}", MACOSX_DEPLOYMENT_TARGET="10.13",
)
from torch.utils import cpp_extension
cpp_extension.IS_MACOS, cpp_extension.IS_LINUX = True, False
import runpy
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
print("jobs:", os.environ["MAX_JOBS"], "platform:", sysconfig.get_platform())
"""


@needs_checkout
@pytest.mark.parametrize("jobs", [6, 3])
def test_on_a_mac_only_arm64_is_built(jobs, tmp_path):
    """The case of 3 jobs sets MAX_JOBS, and has no ninja."""
    environment = {} if jobs == 6 else {"MAX_JOBS": "3"}
    if environment:
        (tmp_path / "ninja").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "ninja").chmod(0o755)
    folders = ["--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    done = run_program(ON_A_MAC, tmp_path, "build_ext", *folders, folder=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "log").read_text().splitlines()
    kinds = {kind: [c for c in commands if kind in c.split()] for kind in ("-c", "-bundle")}
    assert len(kinds["-c"]) == len(list(ROOT.glob("csrc/**/*.cpp")))
    assert len(kinds["-bundle"]) == 1
    for command in [*kinds["-c"], *kinds["-bundle"]]:
        assert set(re.findall(r"-arch (\S+)", command)) == {"arm64"}, command
        assert command.startswith("14.0 "), command
    assert f"jobs: {jobs} platform: macosx-14.0-arm64" in done.stdout


def test_extension_needs_no_python():
    """So one file serves every version of Python."""
    assert extension.PATH.name == "_C.abi3.so"
    assert [name for name in symbols() if re.match(r"_?Py", name)] == []


def test_only_stable_c_functions_of_torch_are_used():
    names = symbols()
    torch_names = [name for name in names if "torch" in name or "c10" in name]
    assert len(torch_names) > 20, "nm found nothing: this test cannot tell"
    assert [name for name in torch_names if not re.match(r"(aoti_torch|torch)_\w+$", name)] == []
    # C++ symbols of namespaces at, c10 and torch: N2at..., N3c10..., N5torch...
    assert [name for name in names if re.match(r"_Z.*N?K?(2at|3c10|5torch)\d", name)] == []


def test_exported_symbols_are_those_of_this_list():
    exported = symbols("-gU", "--defined-only")
    mine = {name for name in exported if name.startswith(("metal_attn", "Py"))}
    names = """allow_tf32 hold_tensor let_meta_pass make_tiles params_text refusal
        limit_pieces release_tensor set_gpu_cores set_gpu_name set_shader_text set_simulator
        set_tensor_record simulator_run tensor_tiles_problem tf32_allowed tf32_reason
        track_fresh use_tiles""".split()
    only_on_macos = {"metal_attn_mps_problem", "metal_attn_compile_recorded"}
    assert mine - only_on_macos == {f"metal_attn_{name}" for name in names}


@needs_checkout
def test_the_same_source_serves_every_torch_from_2_10():
    """The headers hide functions that are newer than TORCH_TARGET_VERSION, which is 2.10."""
    assert 'TORCH_2_10 = "0x020a000000000000"' in (ROOT / "setup.py").read_text()
    later = {"torch_exception_get_what", "torch_mps_set_arg_bytes", "torch_library_def_with_tags"}
    assert later.isdisjoint(symbols())


@each_case("family", shaders.families())
def test_source_is_ascii_and_self_contained(family):
    text = shaders.source(family)
    assert text.isascii()
    assert not re.search(r'#\s*include\s*"', text)
    assert not re.search(r"#\s*pragma\s+once", text)
    assert re.search(rf"\bkernel\b[^;{{]*\bvoid {family}\w*\(", text)
    for define in ("SIMDGROUPS", "HEAD_DIM_QK"):
        assert f"#define {define}" not in text, "the host defines it"


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match=r"family is 'flash'; it must be one of .*flash_fwd"):
        shaders.source("flash")


@needs_checkout
@each_case("family", shaders.families())
def test_line_directives_name_the_original(family):
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


@pytest.mark.parametrize(
    ("shader", "header", "message"),
    [
        ("x\n// caf\u00e9\n", "", "shaders/main.metal:2: a character that is not ASCII"),
        ('#include "a.h"\n', "#pragma once\n\u00b5\n", "shaders/a.h:2: a character that is not"),
        ('\n#include "absent.h"\n', "", 'shaders/main.metal:2: no file "absent.h"'),
        ('#include "../setup.py"\n', "", 'main.metal:1: no file "../setup.py"'),
        ('#include "a.h"\n', "x\n", "shaders/a.h:1: a header without #pragma once"),
        (
            *('#ifdef X\n# include "a.h"\n#endif\n', "#pragma once\n"),
            'shaders/main.metal:2: include of "a.h" in a conditional block',
        ),
    ],
)
def test_flatten_refuses_invalid_sources(tmp_path, shader, header, message):
    (tmp_path / "main.metal").write_text(shader, encoding="utf-8")
    (tmp_path / "a.h").write_text(header, encoding="utf-8")
    with pytest.raises(shaders.ShaderError, match=re.escape(message)):
        shaders.flatten(tmp_path / "main.metal")


def test_package_data_wins_over_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "built.metal").write_text("kernel void built() {}\n")
    monkeypatch.setattr(shaders, "_PACKAGE_DATA", tmp_path)
    assert shaders.families() == ["built"]
    assert shaders.source("built") == "kernel void built() {}\n"
