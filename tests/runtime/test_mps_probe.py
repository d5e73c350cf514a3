"""The check that mps is usable, once per process, on the fake of torch's shims (fake_mps/)."""

import json
import re

import pytest

from tests.helpers.cases import each_case
from tests.helpers.forks import run_alone

# Runs each case in a new child process, and prints the results.
PROGRAM = """
import contextlib, ctypes, io, json, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch

from tests.helpers.forks import in_child
from tests.runtime import fake_mac

fake = fake_mac.fake_mac("Apple M1", 8, sys.argv[1])

import torch_metal_attn
from torch_metal_attn import mps
from torch_metal_attn.runtime import shaders
from torch_metal_attn.__main__ import main
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.simulator import compile_shader

q = torch.randn(1, 2, 40, 16)

def memory(address):
    return torch.frombuffer((ctypes.c_float * 96).from_address(address), dtype=torch.float32)

def simulated(text, address):
    compile_shader(text, check=True).probe(memory(address), threads=32, group_size=32)

right = torch.ones(96)  # computed before the forks, so that gives_right is quick
compile_shader(shaders.source("probe"), check=True).probe(right, threads=32, group_size=32)

def only_the_probe(text, address):
    if "void probe(" in text:
        simulated(text, address)

def zeros(text, address):
    memory(address).zero_()

def one_wrong(text, address):
    simulated(text, address)
    memory(address)[70] += 1

def attend():
    return fake_mac.outcome(fake.ops.flash_fwd, q, q, q)

def kernels():
    return fake_mac.kernels(fake)

def both(gpu=None, then=lambda: None, limit=None, queue_limit=None, copy=None):
    '''Why mps is not used, before and after an op; the op's outcome; and what ran.'''
    if gpu:
        fake.set_gpu(gpu)
    if limit:
        fake.library.fake_mps_set_probe_limit(limit)
    if queue_limit:
        fake.library.fake_mps_set_queue_limit(queue_limit)
    if copy:
        library = torch.library.Library("aten", "IMPL")
        library.impl("copy_", copy, "CPU", allow_override=True)
    then()
    return [mps.problem(), attend(), mps.problem(), kernels()]

def op_first():
    fake.set_gpu(only_the_probe)
    return [attend(), kernels()]

def without_memory():  # torch on Linux has no memory of mps
    fake.library.fake_mps_set_device_type(fake.library.aoti_torch_device_type_mps())

def gives_right(text, address):
    if "void probe(" in text:
        memory(address).copy_(right)

def hangs(*arguments, **options):
    time.sleep(600)

def busy(limit):
    '''`both` if earlier work is queued for twice the probe's limit, which is `limit` ms.'''
    waits = [2 * limit / 1000]
    def copy(to, source, non_blocking=False):  # the first copy waits for the queued work
        if waits:
            time.sleep(waits.pop())
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
        return to
    return both(gives_right, limit=limit, copy=copy)

def busy_before():
    '''`busy` with the first limit that is long enough for the probe on this machine.'''
    for limit in (500, 5000, 50000):
        result = in_child(busy, limit)
        if result[0] == "":
            break
    return result

def named(name):
    fake.set_gpu(only_the_probe)
    fake.library.metal_attn_set_gpu_name(name.encode())
    return [mps.problem(), kernels()]

def backend_forced_by_env():
    os.environ["TORCH_METAL_ATTN_BACKEND"] = "mps"
    with best_device() as device:
        return [*both(zeros), str(device)]

def virtual():
    fake.library.metal_attn_set_gpu_name(b"Apple Paravirtual device")

def best(then):
    '''The best device, twice; what is printed on stderr; and the backend in two reports.'''
    then()
    devices = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            with best_device() as device:
                devices.append([str(device), torch_metal_attn.runtime.session.active()])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["info"])
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("backend")]
    described = torch_metal_attn.runtime.machine.describe(torch.device("cpu"))["backend"]
    return [devices, said.getvalue(), lines, described]

def forked_after_a_good_trial():
    fake.set_gpu(only_the_probe)
    before = mps.problem()
    def asked():
        with contextlib.redirect_stderr(io.StringIO()) as said, best_device() as device:
            return [mps.problem(), attend(), str(device), said.getvalue()]
    return [before, in_child(asked), mps.problem(), attend()]

def forked_after_a_launch_without_trial():
    os.environ["TORCH_METAL_ATTN_BACKEND"] = "mps"
    return [attend(), in_child(attend), attend()]

def forked_after_a_bad_trial():
    virtual()
    before = mps.problem()
    return [before, in_child(mps.problem), in_child(attend)]

def forked_during_a_trial():
    begun, go_on = threading.Event(), threading.Event()
    def waits(text, address):
        begun.set()
        go_on.wait()
        only_the_probe(text, address)
    fake.set_gpu(waits)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mps.problem)
        begun.wait()
        inside = in_child(mps.problem)
        go_on.set()
        return [inside, answer.result()]

def eight_threads():
    fake.set_gpu(only_the_probe)
    start = threading.Barrier(8)
    def work(ask):
        start.wait()
        return ask()
    with ThreadPoolExecutor(8) as pool:
        answers = sorted(pool.map(work, (mps.problem, attend) * 4))
    return [answers, kernels().count("probe"), kernels().count("flash_fwd")]

calls = json.loads(sys.argv[2])
print(json.dumps({call: in_child(eval, call, globals()) for call in calls}))
"""
WORKS = ["", "launched", "", ["probe", "flash_fwd"]]
GOOD, OLD = ["", ["probe"]], "its GPU is '{}', which is not an Apple chip from M1 or A14 on"
OLD_GPUS = ("Apple Paravirtual device", "AMD Radeon Pro 5500M", "Apple A12Z GPU")
CASES = {
    "both(only_the_probe)": WORKS,
    "op_first()": WORKS[1::2],
    # The probe's time starts when the GPU has finished its queued work.
    "busy_before()": WORKS,
    "backend_forced_by_env()": ["", "launched", "", ["flash_fwd"], "mps"],
    "eight_threads()": [[""] * 4 + ["launched"] * 4, 1, 4],
    # Nothing is launched on chips before M1 and A14, which lack SIMD-group functions.
    **{f"named({name!r})": GOOD for name in ("Apple M1", "Apple M4 Max", "Apple A18 Pro", "")},
    **{f"named({name!r})": [OLD.format(name), []] for name in OLD_GPUS},
}
FAILURES = {
    "both(then=without_memory)": (r"the first allocation on it failed: .*'MPS' backend.*", []),
    "both(zeros)": ("a small kernel on it gave zeros", ["probe"]),
    "both()": ("a small kernel on it gave 1 instead of 141", ["probe"]),
    "both(one_wrong)": ("a small kernel on it gave 10425 instead of 10424", ["probe"]),
    r'both(then=lambda: fake.fail("create_shader_library", "unlowered air.simd_sum\nmore"))': (
        r"a small kernel on it failed: compiling probe failed: unlowered air\.simd_sum",
        [],
    ),
    'both(then=lambda: fake.fail("dispatch", "the device refuses"))': (
        "a small kernel on it failed: dispatching 'probe' failed: the device refuses",
        ["probe"],
    ),
    "both(hangs, limit=100)": ("a small kernel on it did not end within 100 ms", ["probe"]),
    "both(copy=hangs, queue_limit=200)": ("the GPU's earlier work did not end within 200 ms", []),
}
VIRTUAL, BEST = "best(virtual)", "best(lambda: fake.set_gpu(only_the_probe))"
FORKS = [f"forked_{when}()" for when in ("after_a_good_trial", "after_a_launch_without_trial")]
FORKS += ["forked_after_a_bad_trial()", "forked_during_a_trial()"]


@pytest.fixture(scope="module")
def cases(libraries):
    calls = [*FAILURES, *CASES, VIRTUAL, BEST, *FORKS]
    return json.loads(run_alone(PROGRAM, libraries["bytes"], json.dumps(calls)))


@each_case("call", CASES)
def test_mps_is_used_unless_its_gpu_is_too_old(cases, call):
    assert cases[call] == CASES[call]


@each_case("call", FAILURES)
def test_each_failure_has_a_reason(cases, call):
    problem, raised, again, started = cases[call]
    why, kernels = FAILURES[call]
    assert re.fullmatch(why, problem)  # `.` matches no line break
    assert again == problem
    assert started == kernels
    assert raised.startswith(f"metal_attn: mps cannot be used: {problem}. ")
    assert "torch_metal_attn.simulate()" in raised
    assert "TORCH_METAL_ATTN_BACKEND=mps" in raised


def test_the_simulator_replaces_mps_that_does_not_work(cases):
    devices, said, backend, described = cases[VIRTUAL]
    assert devices == [["cpu", True]] * 2
    (line,) = said.splitlines()  # two calls print one line
    assert line.startswith("torch_metal_attn: the kernels run in the simulator; mps cannot be used")
    for text in (line, *backend, described):
        assert "its GPU is 'Apple Paravirtual device'" in text
    assert "simulator" in backend[0]
    assert "simulator" in described


def test_mps_that_works_is_the_best_device(cases):
    devices, said, backend, _ = cases[BEST]
    assert devices == [["mps", False]] * 2
    assert said == ""
    assert backend[0].split() == ["backend", "mps"]


def test_forked_children_say_why_they_cannot_use_mps(cases):
    good, without_trial, bad, during = (cases[call] for call in FORKS)
    before, (problem, raised, device, said), after, launched = good
    assert before == after == ""
    assert launched == "launched"
    assert device == "cpu"
    for text in (problem, raised, said):
        assert "this process was forked after its parent had used the GPU" in text
        assert "TORCH_METAL_ATTN_BACKEND" not in text
        assert 'set_start_method("spawn")' in text
    launched, raised, again = without_trial
    assert launched == again == "launched"
    assert "Metal does not work in such a child" in raised
    before, problem, raised = bad
    assert problem == before
    assert problem in raised
    inside, parent = during
    assert "was forked" in inside
    assert parent == ""
