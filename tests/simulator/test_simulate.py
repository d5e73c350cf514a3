"""simulate(): runs ops in the simulator in its thread, counts, and records launches."""

import struct
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.forks import run_alone
from torch_metal_attn.runtime import session, shaders
from torch_metal_attn.simulator import SimulatorFault, compile_shader, simulate
from torch_metal_attn.simulator.runs import BACKEND

ops = torch.ops.metal_attn


@pytest.fixture(autouse=True)
def without_backend(monkeypatch):
    monkeypatch.delenv(BACKEND, raising=False)


def attend(**options):
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    return ops.flash_fwd(q, k, v, **options)


def test_a_launch_needs_few_python_calls():
    calls = []
    with simulate() as run:
        attend(), attend()
        sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
        attend()
        sys.setprofile(None)
    assert len(calls) < 50
    assert run.launches[0].defines is run.launches[2].defines


IMPORTED = """
import sys, torch_metal_attn
modules = {"build", "library", "replacing"}
print([name for name in modules if f"torch_metal_attn.simulator.{name}" in sys.modules])
torch_metal_attn.simulator.compile_shader
"""


def test_modules_that_compile_are_imported_at_the_first_use():
    assert run_alone(IMPORTED).strip() == "[]"


def test_the_simulator_is_off_by_default():
    assert not session.active()
    with pytest.raises(KeyError), simulate():
        assert session.active()
        raise KeyError
    assert not session.active()


def test_an_environment_variable_turns_the_simulator_on(monkeypatch):
    for value in ("simulator", "reference", "mps", ""):
        monkeypatch.setenv(BACKEND, value)
        assert session.active() == (value == "simulator")
    monkeypatch.setenv(BACKEND, "cuda")
    with pytest.raises(ValueError, match="TORCH_METAL_ATTN_BACKEND is 'cuda'"):
        session.active()


@pytest.mark.parametrize("options", [{"check": True}, {"count": True}])
def test_counters_are_summed_over_launches(options):
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
    assert len(run.launches) == (0 if options else 1)  # a recording runs nothing
    with pytest.raises(RuntimeError, match=words):
        run.counters  # noqa: B018


def test_the_innermost_block_has_effect_and_records():
    with simulate(check=True) as outer:
        with simulate() as inner:
            attend()
        assert len(inner.launches) == 1
        assert outer.launches == []
        attend()
    assert list(outer.counters) == ["flash_fwd"]


def test_kernels_of_compile_shader_run_unless_the_block_records():
    library = compile_shader("kernel void k(device int* x) { x[0] = 1; }", check=True)
    x = torch.zeros(1, dtype=torch.int32)
    with simulate(count=True) as run:
        library.k(x)
    assert run.counters["k"].stores["device"] == 1
    assert [launch.kernel for launch in run.launches] == ["k"]
    with simulate(record=True), pytest.raises(RuntimeError, match="kernel k of compile_shader"):
        library.k(x)


def test_fault_in_an_op_is_a_simulator_fault(monkeypatch):
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
def test_errors_of_an_ops_shader_are_raised(text, error, words, monkeypatch):
    text = f'#line 4 "shaders/x.h"\nkernel {text}'
    monkeypatch.setattr(shaders, "source", lambda family: text)
    with simulate(), pytest.raises(error, match=words):
        attend()


def test_other_threads_are_not_simulated():
    with simulate() as run, ThreadPoolExecutor(1) as other:
        assert not other.submit(session.active).result()
        other.submit(attend).result()
        assert run.launches == []


def record(call):
    with simulate(record=True) as run:
        result = call()
    return run.recorded, result


def test_recorded_launch_equals_the_one_that_runs():
    with simulate() as run:
        attend()
    (ran,) = run.launches
    (launch,), _ = record(attend)
    assert (launch.family, launch.kernel) == ("flash_fwd", "flash_fwd") == (ran.kernel,) * 2
    assert list(launch.defines.items()) == list(ran.defines.items())
    assert launch.grid == ran.grid
    assert launch.group_size == ran.group_size
    assert ran.seconds > 0
    assert all(launch.defines[name] for name in ("ELEMENT", "HEAD_DIM_QK"))
    assert f"void {launch.kernel}(" in shaders.source(launch.family)


def test_recorded_buffers_are_the_tensors():
    whole = torch.empty(1, 2, 20, 8)
    q, k = whole[:, :, 3:12], torch.empty(1, 2, 9, 8)
    (launch,), (out, lse) = record(lambda: ops.flash_fwd(q, k, k))
    of_q = launch.buffers[0]
    assert [b.slot for b in launch.buffers] == sorted({b.slot for b in launch.buffers})
    assert all(b.holds(x) for b, x in zip(launch.buffers, (q, k, k, out, lse), strict=True))
    assert of_q.holds(whole)
    assert not of_q.holds(k)
    assert of_q.offset == 3 * 8 * 4
    assert of_q.storage.numel() == whole.nbytes
    assert [b.writable for b in launch.buffers] == [False] * 3 + [True] * 2


def test_recorded_params_are_the_bytes_of_the_structure():
    (launch,), _ = record(lambda: attend(softmax_scale=0.375))
    assert launch.params_slot not in {b.slot for b in launch.buffers}
    assert struct.pack("i", 40) in launch.params  # the lengths
    (other,), _ = record(lambda: attend(softmax_scale=0.5))
    changed = [i for i in range(len(other.params)) if other.params[i] != launch.params[i]]
    assert 0 < len(changed) <= 4 * 2


def test_a_recording_compiles_and_runs_nothing(monkeypatch):
    """A run with half a billion keys would take hours."""
    monkeypatch.setattr(shaders, "source", lambda family: pytest.fail("the text is read"))
    q = torch.empty(1, 1, 1, 128)
    k = torch.empty(1, 1, 1, 128).expand(1, 1, 2**29, 128)
    launches, (out, _) = record(lambda: ops.flash_decode(q, k, k, num_splits=16))
    assert [launch.kernel for launch in launches] == ["flash_decode", "merge_splits"]
    assert out.shape == q.shape
    parts = {b.storage.data_ptr() for b in launches[0].buffers if b.writable}
    assert parts <= {b.storage.data_ptr() for b in launches[1].buffers}


def test_a_recording_keeps_its_tensors():
    """Otherwise two successive tensors could have the same address and look like one tensor."""

    def call():
        for _ in range(20):
            ops.softmax(torch.empty(3, 200_000), 1)

    launches, _ = record(call)
    addresses = {b.storage.data_ptr() for launch in launches for b in launch.buffers}
    assert len(addresses) == 40


def test_recorded_memory_is_freed_with_the_recording():
    (launch,), out = record(lambda: ops.softmax(torch.empty(3, 40), 1))
    storage = next(b.storage for b in launch.buffers if b.writable)
    out.fill_(3.0)
    tensor = weakref.ref(out)
    del out, launch
    assert storage.view(torch.float32).eq(3).all()  # the storage keeps the memory
    del storage
    assert tensor() is None


def test_recorded_empty_tensors_have_no_bytes():
    q = torch.empty(1, 2, 5, 8)
    k = torch.empty(1, 2, 0, 8)
    launches, _ = record(lambda: ops.flash_fwd(q, k, k))
    assert not any(b.storage.numel() for one in launches for b in one.buffers if b.holds(k))


def test_recording_blocks_cannot_be_nested():
    with simulate(), pytest.raises(RuntimeError, match=r"simulate\(record=True\) inside a block"):
        with simulate(record=True):
            pass
    with simulate(record=True), pytest.raises(RuntimeError, match=r"simulate\(\) inside a block"):
        with simulate():
            pass
    with simulate() as run:  # the refused blocks have no effect
        attend()
    assert len(run.launches) == 1
