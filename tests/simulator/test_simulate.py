"""simulate(): what it turns on, records and refuses, by the op and by threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_metal_attn import flash_attn_func
from torch_metal_attn.runtime import session, shaders
from torch_metal_attn.simulator import SimulatorFault, compile_shader, simulate
from torch_metal_attn.simulator.runs import BACKEND


@pytest.fixture(autouse=True)
def backend_unset(monkeypatch):
    monkeypatch.delenv(BACKEND, raising=False)


def attend():
    q, k, v = torch.randn(3, 1, 9, 2, 8)
    return flash_attn_func(q, k, v)


def test_off_unless_asked():
    assert not session.active()
    with pytest.raises(KeyError), simulate():
        assert session.active()
        raise KeyError
    assert not session.active()


def test_environment_turns_it_on(monkeypatch):
    for value, on in (("simulator", True), ("reference", False), ("mps", False), ("", False)):
        monkeypatch.setenv(BACKEND, value)
        assert session.active() == on
    monkeypatch.setenv(BACKEND, "cuda")
    with pytest.raises(ValueError, match="TORCH_METAL_ATTN_BACKEND is 'cuda'"):
        session.active()


@pytest.mark.parametrize("options", [{"check": True}, {"count": True}])
def test_counters(options):
    with simulate(**options) as run:
        attend()
        once = run.counters["flash_fwd"]
        attend()
    twice = run.counters["flash_fwd"]
    assert once.launches == 1
    assert once.loads["device"] > 0
    assert once.matrix_operations > 0
    assert twice.matrix_operations == 2 * once.matrix_operations


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, r"use simulate\(count=True\) or check=True"),
        ({"record": True}, "with record=True no kernel runs"),
    ],
)
def test_counters_need_a_counting_run(options, words):
    with simulate(**options) as run:
        attend()
    assert len(run.launches) == (not options)
    with pytest.raises(RuntimeError, match=words):
        run.counters  # noqa: B018


def test_innermost_run_decides_and_records():
    with simulate(check=True) as outer:
        with simulate() as inner:
            attend()
        assert len(inner.launches) == 1
        assert outer.launches == []
        attend()
    assert list(outer.counters) == ["flash_fwd"]


def test_own_kernels_are_recorded_too():
    library = compile_shader("kernel void k(device int* x) { x[0] = 1; }", check=True)
    with simulate(count=True) as run:
        library.k(torch.zeros(1, dtype=torch.int32))
    assert run.counters["k"].stores["device"] == 1
    assert [launch.kernel for launch in run.launches] == ["k"]


def test_fault_of_an_op_comes_out_as_itself(monkeypatch):
    text = shaders.source("flash_fwd")
    broken = text.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
    assert broken != text
    monkeypatch.setattr(shaders, "source", lambda family: broken)
    with simulate(check=True), pytest.raises(SimulatorFault) as raised:
        attend()
    assert raised.value.file.startswith("shaders/")


@pytest.mark.parametrize(
    "text, error, words",
    [
        ("void flash_fwd(device int* x) { oops; }", SyntaxError, r"shaders/x\.h:4"),
        ("void other(device int* x) { }", ValueError, "no kernel flash_fwd; it has other"),
    ],
)
def test_error_of_an_ops_text_comes_out_of_it(text, error, words, monkeypatch):
    text = f'#line 4 "shaders/x.h"\nkernel {text}'
    monkeypatch.setattr(shaders, "source", lambda family: text)
    with simulate(), pytest.raises(error, match=words):
        attend()


def test_another_thread_has_its_own():
    with simulate() as run, ThreadPoolExecutor(1) as other:
        assert not other.submit(session.active).result()
        other.submit(attend).result()
        assert run.launches == []


def test_threads_side_by_side():
    def launches(seed):
        with simulate(seed=seed) as run:
            for _ in range(3):
                attend()
        return len(run.launches)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(launches, range(3))) == [3, 3, 3]
