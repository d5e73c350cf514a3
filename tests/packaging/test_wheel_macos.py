"""The cross-build for macOS and its checker, on a library of a few lines with planted faults."""

import subprocess
import sys
from unittest import mock

import pytest

pytest.importorskip("ziglang", reason="the cross-build needs ziglang, which pip has for Linux")
lief = pytest.importorskip("lief")
macho = pytest.importorskip("macho", reason="no .ci folder")
import check_library  # noqa: E402
import macos_cc  # noqa: E402
import torches  # noqa: E402

THERE = "_aoti_torch_there"
SOURCE = """
#include <stdexcept>
#include <string>
extern "C" int aoti_torch_there();
namespace metal_attn {
int simulator_backend() { return 0; }
int mps_backend() { return 1; }
template <int (*backend)()>
struct Op {
  __attribute__((used)) static int boxed_fn() { return backend(); }
};
template struct Op<simulator_backend>;
template struct Op<mps_backend>;
__attribute__((used)) int STABLE_TORCH_LIBRARY_IMPL_static_init_metal_attn_MPS_0;
}
extern "C" __attribute__((visibility("default"))) long metal_attn_call(const char* text) {
  if (aoti_torch_there() == 0) throw std::runtime_error(text);
  return static_cast<long>(std::hash<std::string_view>()(text));
}
// As in csrc/runtime/params_text.cpp, the symbol for debuggers has no section.
asm(".section __TEXT,__const\\n.globl _metal_attn_text\\n_metal_attn_text:\\n.byte 0\\n.text\\n");
"""
# The symbols that SOURCE imports: exceptions, but not std::__hash_memory, which macOS 14 lacks.
LIBCXX = [
    *("___cxa_allocate_exception", "___cxa_free_exception", "___cxa_throw", "___cxa_begin_catch"),
    *("___gxx_personality_v0", "__ZTISt13runtime_error", "__ZSt9terminatev"),
    *("__ZNSt13runtime_errorC1EPKc", "__ZNSt13runtime_errorD1Ev"),
]
LIBSYSTEM = ["__Unwind_Resume", "_strlen", "dyld_stub_binder"]


def torch_with(*symbols, version="2.10.0"):
    taken = {torches.LIBCXX: LIBCXX, torches.LIBSYSTEM: LIBSYSTEM}
    return torches.Torch(version, {torches.TORCH_CPU: [*symbols, *check_library.COMMITS]}, taken)


def built(folder, source=SOURCE):
    """The library, compiled and linked with setuptools' arguments; None if that fails."""
    macos_cc.write_stub(folder, torches.TORCH_CPU, [THERE])
    macos_cc.write_stub(folder, torches.LIBCXX, LIBCXX)
    (folder / "lib.cpp").write_text(source)
    # Options for this machine's compiler, which the compiler for a Mac must not get.
    here = ["-march=native", "-specs=/no/such/file", "-L/no/such/folder", "-ltorch_cpu", "-shared"]
    options = [*here, "-std=c++20", "-fvisibility=hidden"]
    compiled, library = str(folder / "lib.o"), folder / "_C.abi3.so"
    for arguments in (["-c", str(folder / "lib.cpp"), "-o", compiled], [compiled, "-o", library]):
        if macos_cc.run([*map(str, arguments), *options], folder) != 0:
            return None
    return library


def faults(library, *known):
    binary = macho.read(library.read_bytes(), library.name)
    return check_library.faults(binary, known or [torch_with(THERE)])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built(tmp_path_factory.mktemp("macos"))


def test_a_good_library_has_no_fault(library):
    assert faults(library) == []


def test_a_symbol_that_a_later_torch_lacks_is_reported(library):
    later = torch_with(version="2.11.0")
    assert faults(library, torch_with(THERE), later) == [f"torch 2.11.0 lacks {THERE}"]


def test_a_missing_symbol_that_commits_streams_is_reported(library, monkeypatch):
    known = torch_with(THERE)
    monkeypatch.setattr(check_library, "COMMITS", {"_commit"})
    assert faults(library, known) == ["torch 2.10.0 lacks _commit, needed to commit"]


def test_the_linker_refuses_what_the_oldest_torch_lacks(tmp_path, capfd):
    assert built(tmp_path, SOURCE.replace("aoti_torch_there", "aoti_torch_new")) is None
    assert "undefined symbol: _aoti_torch_new" in capfd.readouterr().err


OWN_DESTRUCTOR = """void own() __asm__("__ZNSt13runtime_errorD1Ev");
__attribute__((used)) void own() {}
namespace metal_attn {"""
LEAKED = '__attribute__((visibility("default"))) int leaked;\nextern "C" __attribute__'
BOXED = "__ZN10metal_attn2OpIXadL_ZNS_17simulator_backendEvEEE8boxed_fnEv"
OTHER = "/opt/lib/libother.dylib"
# Changes of the text and their faults, in two libraries, because compiling takes seconds.
PLANTED = [
    [
        ("text);", 'text + getenv("HOME")[0]);', "macOS libSystem lacks _getenv"),
        ("namespace metal_attn {", OWN_DESTRUCTOR, "the extension defines __ZNSt13runtime_error"),
        ('extern "C" __attribute__', LEAKED, "the extension exports _leaked, which is no"),
        ("template struct Op<mps_backend>;", "", f"not registered for mps: {BOXED}"),
    ],
    [
        ("metal_attn_MPS_0", "metal_attn_CPU_0", "no op is registered for mps"),
        ("template struct Op<simulator_backend>;", "", "no op is registered for the simulator"),
        ("there();\n", "there(), other();\n", f"the extension depends on {OTHER}"),
        ("torch_there() == 0", "torch_there() + other() == 0", f"_other is imported from {OTHER}"),
    ],
]


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_faults_are_found(tmp_path, planted):
    source = SOURCE
    for old, new, _ in planted:
        assert SOURCE.count(old) == 1
        source = source.replace(old, new)
    macos_cc.write_stub(tmp_path, OTHER, ["_other"])
    problems = faults(built(tmp_path, source))
    for *_, fault in planted:
        assert [line for line in problems if line.startswith(fault)]


def for_macos_13(binary):
    binary.build_version.minos = [13, 0, 0]


def for_intel(binary):
    binary.header.cpu_type = lief.MachO.Header.CPU_TYPE.X86_64


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (for_macos_13, "the extension's oldest macOS is (13, 0, 0); it must be (14, 0, 0)"),
        (for_intel, "the extension is for X86_64; it must be for ARM64"),
        (lambda binary: binary.remove_signature(), "the extension is not signed"),
    ],
)
def test_a_wrong_header_is_reported(library, tmp_path, edit, fault):
    binary = lief.MachO.parse(str(library)).at(0)
    edit(binary)
    binary.write(str(tmp_path / "edited.so"))
    problems = faults(tmp_path / "edited.so")
    assert [line for line in problems if line.startswith(fault)]


def test_a_library_of_linux_is_refused():
    with pytest.raises(ValueError, match="python is not a macOS library"):
        macho.read(b"\x7fELF" + bytes(100), "python")


def test_versions_are_the_last_patch_of_each_minor(monkeypatch):
    listed = "Available versions: 2.11.1, 2.11.0, 2.10.10, 2.10.9, 2.10.2+cpu, 2.9.1, 2.8.0\n"
    done = subprocess.CompletedProcess([], 0, f"torch (2.11.1)\n{listed}", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert torches.versions() == ["2.10.10", "2.11.1"]


def test_an_error_of_the_index_is_raised(monkeypatch):
    monkeypatch.setattr(torches, "WHEELS_FOR", ["--no-such-option"])
    with pytest.raises(RuntimeError, match=r"no torch 2\.10 or later .*\n(.*\n)*.*no such option"):
        torches.versions()


def test_a_wheel_is_read_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = mock.Mock(return_value=torch_with(THERE))
    monkeypatch.setattr(torches, "_read_wheel", read)
    assert torches.load("2.10.0") == torches.load("2.10.0") == torch_with(THERE)
    read.assert_called_once_with("2.10.0")
    assert sys.platform == "darwin" or [*tmp_path.rglob("*.json.gz")]
