"""replacing_compile_shader: inside a block, torch's function compiles for the CPU."""

import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import SimulatorFault, replacing_compile_shader

SOURCE = """
kernel void add(device float* x, constant float& y, uint i [[thread_position_in_grid]]) {
  x[i] += y;
}
"""
ORIGINAL = torch.mps.compile_shader
TORCHS_ERROR = "MPS is not available"


@pytest.fixture(autouse=True)
def original_is_restored():
    yield
    assert torch.mps.compile_shader is ORIGINAL


def checks():
    """True if torch.mps.compile_shader builds with checks."""
    try:
        torch.mps.compile_shader(SOURCE).add(torch.zeros(2), 1.0, threads=3)
    except SimulatorFault:
        return True
    return False


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(function)
        return done.exception() or done.result()


def test_kernels_run_on_the_cpu_also_after_the_block():
    with replacing_compile_shader():
        assert torch.mps.compile_shader.__name__ == "compile_shader"
        library = torch.mps.compile_shader(SOURCE)
    x = torch.ones(3)
    library.add(x, 2.0)
    assert x.tolist() == [3, 3, 3]


def test_blocks_nest_and_end_with_exceptions():
    with replacing_compile_shader():
        assert checks()
        with pytest.raises(ZeroDivisionError), replacing_compile_shader(check=False):
            assert not checks()
            raise ZeroDivisionError
        assert checks()


def test_only_torchs_arguments_are_accepted():
    with replacing_compile_shader():
        with pytest.raises(TypeError, match="check"):
            torch.mps.compile_shader(SOURCE, check=True)
        with pytest.raises(SyntaxError, match="program_source:1:"):
            torch.mps.compile_shader("kernel void k(device float* x) { x[0] = y; }")


DYNAMIC = "kernel void k(device float* x, threadgroup float* t [[threadgroup(0)]]) { x[0] = 1; }"
CONSTANT = "constant int N [[function_constant(0)]]; kernel void k(device float* x) { x[0] = N; }"


@each_case(
    "source, options, words",
    [
        (SOURCE.replace("add", "k"), {"seed": 1}, "k: torch's kernels take no seed; compile with"),
        (DYNAMIC, {"threadgroup_bytes": {0: 64}}, "torch's kernels take no threadgroup_bytes"),
        (DYNAMIC, {}, "t is [[threadgroup(0)]], whose length torch.mps.compile_shader cannot set"),
        (CONSTANT, {}, "function constants N: torch.mps.compile_shader sets none; make them"),
    ],
)
def test_options_that_torch_lacks_are_refused(source, options, words):
    with replacing_compile_shader():
        library = torch.mps.compile_shader(source)
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        library.k(torch.zeros(1), **options)
    with pytest.raises(AttributeError, match="torch's libraries have no last_counters"):
        library.last_counters  # noqa: B018


def test_checks_refuse_texts_that_a_mac_would_refuse():
    source = SOURCE.replace("x[i] += y;", "\ndouble z = y; x[i] += z;")
    with replacing_compile_shader():
        with pytest.raises(SyntaxError, match="program_source:4: double: `double` is not in Metal"):
            torch.mps.compile_shader(source)
    with replacing_compile_shader(check=False):
        torch.mps.compile_shader(source)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="torch's own function compiles")
def test_only_process_wide_blocks_apply_to_other_threads():
    with replacing_compile_shader():
        assert str(in_thread(checks)) == TORCHS_ERROR
        with replacing_compile_shader(check=False, process_wide=True):
            assert in_thread(checks) is False
            assert checks(), "the thread's own block decides"
        assert str(in_thread(checks)) == TORCHS_ERROR
    with replacing_compile_shader(process_wide=True):
        assert in_thread(checks)
        assert checks()


def test_process_wide_blocks_may_end_in_any_order():
    first, second = (replacing_compile_shader(process_wide=True) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert checks()
    second.__exit__(None, None, None)


def test_the_function_is_replaced_in_modules_that_imported_it(monkeypatch):
    module = types.ModuleType("kernels_of_a_user")
    module.compile_shader, module.other = ORIGINAL, 1
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with replacing_compile_shader():
        inside = module.compile_shader
        assert dir(inside(SOURCE)) == ["add"]
    assert module.compile_shader is ORIGINAL
    with replacing_compile_shader():
        module.compile_shader = len  # rebound, so not restored
    assert module.compile_shader is len
    if not torch.backends.mps.is_available():
        with pytest.raises(RuntimeError, match=TORCHS_ERROR):
            inside(SOURCE)
