"""simulate(record=True): launches as data, through every op, and what it refuses."""

import struct
import weakref

import pytest
import torch

from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import compile_shader, simulate
from torch_metal_attn.simulator.runs import BACKEND

ops = torch.ops.metal_attn


@pytest.fixture(autouse=True)
def backend_unset(monkeypatch):
    monkeypatch.delenv(BACKEND, raising=False)


def record(call):
    with simulate(record=True) as run:
        result = call()
    return run.recorded, result


def attend(length=9, **options):
    q, k, v = torch.empty(3, 1, 2, length, 8)
    return ops.flash_fwd(q, k, v, **options)


def test_launch_is_the_one_that_runs():
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


def test_buffers_are_the_tensors():
    whole = torch.empty(1, 2, 20, 8)
    q, k = whole[:, :, 3:12], torch.empty(1, 2, 9, 8)
    (launch,), (out, lse) = record(lambda: ops.flash_fwd(q, k, k))
    of_q, of_k, of_v, of_out, of_lse = launch.buffers
    assert [b.slot for b in launch.buffers] == sorted({b.slot for b in launch.buffers})
    assert of_q.holds(q)
    assert of_q.holds(whole)
    assert not of_q.holds(k)
    assert of_q.offset == 3 * 8 * 4
    assert of_q.storage.numel() == whole.nbytes
    assert of_k.holds(k)
    assert of_v.holds(k)
    assert of_out.holds(out)
    assert of_lse.holds(lse)
    assert [b.writable for b in launch.buffers] == [False] * 3 + [True] * 2


def test_params_are_the_bytes():
    (launch,), _ = record(lambda: attend(softmax_scale=0.375))
    assert launch.params_slot not in {b.slot for b in launch.buffers}
    assert struct.pack("i", 9) in launch.params  # the lengths
    (other,), _ = record(lambda: attend(softmax_scale=0.5))
    changed = [i for i in range(len(other.params)) if other.params[i] != launch.params[i]]
    assert 0 < len(changed) <= 4 * 2


def test_nothing_runs():
    x = torch.full((3, 40), 2.0)
    launches, _ = record(lambda: ops.softmax(x, 1))
    assert [launch.kernel for launch in launches] == ["softmax"]
    assert x.eq(2).all()
    kept = torch.zeros(1, 2, 4, 8)
    launches, _ = record(lambda: ops.apply_causal_mask_(kept.view(8, 8)))
    assert len(launches) == 1
    assert kept.eq(0).all()


def test_no_text_is_compiled(monkeypatch):
    monkeypatch.setattr(shaders, "source", lambda family: pytest.fail("the text is read"))
    launches, _ = record(attend)
    assert len(launches) == 1


def test_any_length():
    """Half a billion keys, which would take hours."""
    q = torch.empty(1, 1, 1, 128)
    k = torch.empty(1, 1, 1, 128).expand(1, 1, 2**29, 128)
    launches, (out, _) = record(lambda: ops.flash_decode(q, k, k, num_splits=16))
    assert [launch.kernel for launch in launches] == ["flash_decode", "merge_splits"]
    assert out.shape == q.shape
    parts = {b.storage.data_ptr() for b in launches[0].buffers if b.writable}
    assert parts <= {b.storage.data_ptr() for b in launches[1].buffers}


def test_a_recording_keeps_what_it_names():
    """Or else two tensors, one after the other, have the same memory and look like one."""

    def call():
        for _ in range(20):
            ops.softmax(torch.empty(3, 200_000), 1)

    launches, _ = record(call)
    addresses = {b.storage.data_ptr() for launch in launches for b in launch.buffers}
    assert len(addresses) == 40


def test_memory_goes_with_the_recording():
    (launch,), out = record(lambda: ops.softmax(torch.empty(3, 40), 1))
    storage = next(b.storage for b in launch.buffers if b.writable)
    out.fill_(3.0)
    tensor = weakref.ref(out)
    del out, launch
    assert storage.view(torch.float32).eq(3).all()  # still there
    del storage
    assert tensor() is None


def test_empty_tensors_have_no_bytes():
    q = torch.empty(1, 2, 5, 8)
    k = torch.empty(1, 2, 0, 8)
    launches, _ = record(lambda: ops.flash_fwd(q, k, k))
    assert [b.storage.numel() for launch in launches for b in launch.buffers if b.holds(k)] in (
        [],
        [0, 0],
    )


def test_not_nested():
    with simulate(), pytest.raises(RuntimeError, match=r"simulate\(record=True\) inside a block"):
        with simulate(record=True):
            pass
    with simulate(record=True), pytest.raises(RuntimeError, match=r"simulate\(\) inside a block"):
        with simulate():
            pass
    with simulate() as run:  # and the refused blocks have left nothing behind
        attend()
    assert len(run.launches) == 1


def test_own_kernels_are_refused():
    library = compile_shader("kernel void k(device int* x) { x[0] = 1; }")
    with simulate(record=True), pytest.raises(RuntimeError, match="kernel k of compile_shader"):
        library.k(torch.zeros(1, dtype=torch.int32))
