"""The engine's C interface (csrc/simulator/engine.h): requests that it must refuse, by ctypes."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from torch_metal_attn.simulator import compile_shader, engine


def request(grid=(64, 1, 1), group=(64, 1, 1), arguments=(), count=1, **buffer):
    """Status, message and sum of the output of a request that would run, with some changes."""
    library = compile_shader(
        "kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]])"
        "{ o[i] = 1; }"
    )
    kernel, image = library._program.kernels["k"], library._program.image("k")
    out = torch.zeros(64)
    buffer = engine.Buffer(writable=1, storage=out.data_ptr(), bytes=256, **buffer)
    dispatch = engine.Dispatch(
        entry=image.address(kernel.symbol),
        bind=image.address("__msl_bind"),
        buffers=(engine.Buffer * 1)(buffer),
        buffer_count=count,
        workers=1,
    )
    dispatch.threads_per_threadgroup[:] = group
    dispatch.threads_per_grid[:] = grid
    for index, size in arguments:
        dispatch.threadgroup_argument_bytes[index] = size
    counters, fault = engine.CounterValues(), engine.FaultReport()
    run = engine.library().metal_attn_simulator_run
    status = run(ctypes.byref(dispatch), ctypes.byref(counters), ctypes.byref(fault))
    return status, fault.message.decode(), out.sum().item()


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"count": 32}, "32 buffers"),
        ({"index": 31}, "index 31"),
        ({"offset": 257}, "offset"),
        ({"group": (0, 1, 1)}, "1 to 1024"),
        ({"group": (32, 33, 1)}, "1 to 1024"),
        ({"group": (2**31, 2**31, 4)}, "1 to 1024"),
        ({"grid": (2**32, 1, 1)}, r"2\^32"),
        ({"grid": (2**32 - 1,) * 3, "group": (1, 1, 1)}, "too large"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(changes, words):
    status, message, total = request(**changes)
    assert (status, total) == (2, 0)
    assert re.search(words, message), message


@pytest.mark.parametrize("sizes", [[(0, 32769)], [(0, 2**64 - 1), (1, 2)], [(0, 32768), (30, 1)]])
def test_threadgroup_arguments_over_the_limit_are_a_fault(sizes):
    status, message, total = request(arguments=sizes)
    assert (status, total) == (1, 0)
    assert "32768" in message


def test_good_requests_and_empty_grids():
    assert request() == (0, "", 64.0)
    assert request(arguments=[(0, 32768)]) == (0, "", 64.0)
    assert request(offset=256, grid=(0, 1, 1)) == (0, "", 0.0)
    assert request(grid=(64, 0, 1)) == (0, "", 0.0)


def test_fault_kinds_are_those_of_the_engine():
    header = (Path(__file__).parents[2] / "csrc/simulator/engine.h").read_text()
    body = re.search(r"enum SimulatorFaultKind[^{]*\{(.*?)\};", header, re.S).group(1)
    assert tuple(name.lower() for name in re.findall(r"FAULT_(\w+),", body)) == engine.FAULT_KINDS
