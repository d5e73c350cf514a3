"""Launches that fail: the message says what to do, and later launches work."""

import re
import threading
from pathlib import Path

import pytest
import torch

from tests.helpers.forks import run_alone
from tests.helpers.patience import HANG_SECONDS
from tests.runtime.fake_mps.build import run_counted
from tests.runtime.test_launch import TEXT, launch
from torch_metal_attn import simulate

COUNT = """
import ctypes, json, sys, torch, torch_metal_attn
from tests.runtime.fake_mps.build import FakeMps
from torch_metal_attn.runtime import shaders
from torch_metal_attn.tuned import tiles
fake = FakeMps("bytes", sys.argv[1])
shaders.serve(fake.library)
ops = fake.ops
q = torch.randn(1, 4, 40, 32)
bias = torch.zeros(4, 40, 40)
lse, delta = torch.zeros(1, 4, 40), torch.zeros(1, 4, 40)
table = torch.zeros(40, 16)
cache = torch.zeros(2, 1, 4, 64, 32)
new = torch.zeros(1, 4, 1, 32)
length = torch.tensor([3], dtype=torch.int32)
launches = {
    "flash_fwd": lambda: ops.flash_fwd(
        q, q, q, causal=True, attn_bias=bias, learnable_sink=torch.zeros(4), softcap=30.0,
        q_rotary_cos=table, q_rotary_sin=table),
    "flash_decode": lambda: ops.flash_decode(new, q, q, num_splits=2),
    "decode_step": lambda: ops.decode_step(new, new, new, *cache, length),
    "flash_bwd": lambda: ops.flash_bwd(q, lse, q, q, q, q, lse),
    "flash_bwd_bias": lambda: ops.flash_bwd_bias(q, q, q, q, lse, delta, attn_bias=bias),
    "append_kv": lambda: ops.append_kv(new, new, *cache, length),
    "rope": lambda: ops.rope(q, None, table, table),
    "rope_tables": lambda: ops.rope_tables(torch.ones(4), torch.arange(8)),
    "copy_pages": lambda: ops.copy_pages(
        torch.zeros(4, 8), torch.tensor([0]), torch.tensor([1])),
}
counts = {}
for name, run in launches.items():
    fake.clear()
    run()
    first = fake.allocations()
    fake.clear()
    run()
    counts[name] = first, fake.allocations()

def whole(run):
    # Allocations of the whole op; Python sometimes allocates too.
    counted = ctypes.CDLL(None).counted_allocations
    found = []
    for _ in range(6):
        before = counted()
        run()
        found.append(counted() - before)
    return min(found)

rows = {
    "flash_fwd": "V_SLICE=32 BLOCK_K=8 SIMDGROUPS=8 COLUMN_SIMDGROUPS=1 "
    "Q_IN_REGISTERS=0 KV_STAGED=1",
    "flash_decode": "ROW_FRAGMENTS=1 KEY_FRAGMENTS=1 SPANS=4 VECTOR_ROWS=0",
    "flash_bwd_dq": "SLICE=16 BLOCK=8 ROW_FRAGMENTS=1 SIMDGROUPS=8 COLUMN_SIMDGROUPS=1 "
    "ROWS_IN_REGISTERS=0 ROWS_IN_THREADGROUP=0",
    "flash_bwd_dkv": "SLICE=16 BLOCK=8 ROW_FRAGMENTS=1 SIMDGROUPS=8 COLUMN_SIMDGROUPS=1 "
    "ROWS_IN_REGISTERS=0 ROWS_IN_THREADGROUP=0",
}
tables = {}
for kind, found in {"none": {}, "others": {"other key": "X=1"}, "own": rows}.items():
    made = tiles.make([(key, tile, "a table") for key, tile in found.items()], fake.library)
    fake.library.metal_attn_use_tiles(made)
    tables[kind] = {}
    for name in ("flash_fwd", "flash_decode", "flash_bwd"):
        launches[name]()  # compiles what it needs
        tables[kind][name] = whole(launches[name]), " SIMDGROUPS 8" in fake.last_text()
print(json.dumps([counts, tables]))
"""


@pytest.fixture(scope="module")
def counted(libraries):
    return run_counted(COUNT, libraries["bytes"])


def test_the_lookup_of_a_specialisation_allocates_nothing(counted):
    counts, _ = counted
    for name, (first, second) in counts.items():
        assert second == [0] * {"flash_decode": 2, "flash_bwd": 3}.get(name, 1), name
        assert min(first) > 0, f"{name}: the counter did not see a library being made"


def test_the_lookup_of_a_tile_allocates_nothing(counted):
    _, tables = counted
    for name, (without, _) in tables["none"].items():
        assert tables["others"][name][0] == tables["own"][name][0] == without > 0, name
    assert tables["own"]["flash_fwd"][1]
    assert tables["own"]["flash_bwd"][1]
    assert not any(
        has_simdgroups
        for table in ("none", "others")
        for _, has_simdgroups in tables[table].values()
    )


LOG = "program_source:4:12: error: expected expression\nint eleven(;\n           ^\n"
BROKEN = """\
kernel void scale(device float* x [[buffer(0)]]) {}
int eleven(;
"""


def test_a_shader_that_does_not_compile_is_reported(any_fake, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    any_fake.add_family("broken", BROKEN)
    any_fake.fail("create_shader_library", LOG)
    with pytest.raises(RuntimeError) as raised:
        launch(any_fake, family="broken", defines="ELEMENT=haf\nBLOCK_K=32")
    message = str(raised.value)
    assert "compiling broken ELEMENT=haf BLOCK_K=32 failed: " + LOG in message
    path = Path(re.search(r"The shader's text is in (\S+)", message)[1])
    assert path.parent == tmp_path
    assert path.read_text() == "#define ELEMENT haf\n#define BLOCK_K 32\n" + BROKEN
    assert "python -m torch_metal_attn verify --full" in message
    any_fake.fail("")
    launch(any_fake, family="broken", defines="ELEMENT=half\nBLOCK_K=32")
    assert any_fake.log()[-1] == "end"


def test_a_text_that_does_not_compile_is_compiled_once(any_fake, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compiled = []
    any_fake.set_compiler(compiled.append)
    any_fake.refuse("int eleven")
    errors = []
    for family, defines in [("twice", "N=1"), ("twice", "N=1"), ("twice", "N=2")]:
        any_fake.add_family(family, BROKEN)
        with pytest.raises(RuntimeError) as raised:
            launch(any_fake, family=family, defines=defines)
        errors.append(str(raised.value))
    assert errors[0] == errors[1] != errors[2]
    assert compiled == [f"#define N {n}\n{BROKEN}" for n in (1, 2)]
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == compiled
    # Another library with the same text, as another process would have, reports the same file.
    path = re.search(r"The shader's text is in (\S+)", errors[0])[1]
    any_fake.add_family("twice", "#define N 1\n" + BROKEN)
    with pytest.raises(RuntimeError, match=re.escape(path)):
        launch(any_fake, family="twice")
    assert len(list(tmp_path.iterdir())) == 2
    any_fake.refuse("")


def test_a_compile_error_without_a_writable_folder_has_the_text(any_fake, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    any_fake.add_family("broken_too", BROKEN)
    any_fake.fail("create_shader_library", LOG)
    with pytest.raises(RuntimeError, match="could not be written to a file") as raised:
        launch(any_fake, family="broken_too")
    assert BROKEN in str(raised.value)


def test_errors_of_an_older_torch_say_where_the_reason_is(fakes):
    """Before 2.13 torch prints the reason to stderr."""
    silent = fakes["tensor"]  # the variant of the oldest torch
    silent.clear()
    silent.add_family("silent", TEXT)
    silent.fail("create_shader_library")
    with pytest.raises(RuntimeError, match=r"torch before 2\.13 prints the reason only on stderr"):
        launch(silent, family="silent")


def test_out_of_memory_names_shape_and_bytes(any_fake):
    any_fake.add_family("flash_decode", "kernel void flash_decode() {}")
    q = torch.randn(1, 1, 1, 64)
    many = q.expand(2**20, 2**10, 2**10, 64)
    key = q.expand(2**20, 2**10, 1, 64)
    for attempt in (
        lambda: any_fake.ops.flash_fwd(many, key, key),
        lambda: any_fake.ops.flash_decode(many, key, key, num_splits=1),
        lambda: simulated(many, key, key),
    ):
        with pytest.raises(RuntimeError, match=r"(?s)allocating a tensor of shape .*on cpu") as e:
            attempt()
        assert str(2**40 * 64 * 4) in str(e.value), "the bytes that torch could not get"
    assert any_fake.log() == []
    any_fake.ops.flash_fwd(q, q, q)
    assert any_fake.log()[-1] == "end"


def simulated(*operands):
    with simulate():
        return torch.ops.metal_attn.flash_fwd(*operands)


def test_out_of_memory_between_two_dispatches_is_reported(any_fake):
    any_fake.add_family("flash_decode", "kernel void flash_decode() {}")
    any_fake.add_family("merge", "kernel void merge_splits() {}")
    q, k = torch.randn(1, 2, 1, 40), torch.randn(1, 2, 90, 40)
    any_fake.fail("dispatch", "out of memory: tried to allocate 1.00 GB", after=1)
    words = "dispatching 'merge_splits' failed: out of memory: tried to.* 1.00 GB"
    with pytest.raises(RuntimeError, match=words):
        any_fake.ops.flash_decode(q, k, k, num_splits=3)
    assert any_fake.log().count("end") == 2
    any_fake.clear()
    any_fake.ops.flash_decode(q, k, k, num_splits=3)
    assert [line.split()[0] for line in any_fake.log()].count("dispatch") == 2
    assert any_fake.log().count("library") == 0, "both libraries were kept"


def test_other_kernels_run_while_one_compiles(any_fake):
    any_fake.add_family("slow", TEXT + "// slow\n")
    any_fake.add_family("quick", TEXT)
    begun, go_on = threading.Event(), threading.Event()
    in_time = []

    def compiler(text):
        if "// slow" in text:
            begun.set()
            in_time.append(go_on.wait(HANG_SECONDS))

    any_fake.set_compiler(compiler)
    slow = threading.Thread(target=lambda: launch(any_fake, family="slow"))
    slow.start()
    assert begun.wait(HANG_SECONDS)
    launch(any_fake, family="quick")
    go_on.set()
    slow.join()
    assert in_time == [True], "the other kernel waited for this one"
    assert any_fake.log().count("end") == 2


def test_every_launch_asks_for_the_stream_anew(any_fake):
    """A cached stream or encoder would be wrong after the current stream changes."""
    any_fake.add_family("streams", TEXT)
    launch(any_fake, family="streams")
    any_fake.set_stream(7)
    launch(any_fake, family="streams")
    blocks = [line for line in any_fake.log() if line.startswith(("block", "start", "end"))]
    assert blocks == ["block", "start scale", "end", "block on 7", "start scale", "end"]


SIMULATOR_FORK = """
import os, threading, torch, torch_metal_attn
from torch_metal_attn.simulator import build
torch.manual_seed(0)
q = torch.randn(1, 2, 8, 16)
with torch_metal_attn.simulate():
    expected = torch.ops.metal_attn.flash_fwd(q, q, q)[0]
    held, go_on = threading.Event(), threading.Event()
    def compiling():  # in a thread that the child does not have
        with build._lock:
            held.set()
            go_on.wait()
    thread = threading.Thread(target=compiling)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        same = torch.ops.metal_attn.flash_fwd(q, q, q)[0]
        os._exit(0 if torch.equal(same, expected) else 1)
    go_on.set()
    thread.join()
    print(os.waitpid(child, 0)[1])
"""


def test_the_simulator_works_in_a_forked_child():
    assert run_alone(SIMULATOR_FORK).strip() == "0"


STRESS = """
import signal, sys, threading, time, torch, torch_metal_attn
from tests.runtime.fake_mps.build import FakeMps
from torch_metal_attn.runtime import shaders
q = torch.randn(1, 2, 40, 16)
if sys.argv[1] == "simulator":
    on = torch_metal_attn.simulate(workers=1)
    on.__enter__()
    ops = torch.ops.metal_attn
else:
    fake = FakeMps("bytes", sys.argv[1])
    fake.add_family("flash_fwd", "kernel void flash_fwd() {}")
    ops = fake.ops
ops.flash_fwd(q, q, q)
armed, sent = threading.Event(), 0
def interrupt():
    global sent
    for i in range(ROUNDS):
        armed.wait()
        armed.clear()
        time.sleep(0.0001 * (i % 40))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sent += 1
ROUNDS = 60
threading.Thread(target=interrupt, daemon=True).start()
seen = []
for number in range(1, ROUNDS + 1):
    after = 0
    try:
        armed.set()
        while after < 20:
            ops.flash_fwd(q, q, q)
            if sent >= number:
                after += 1
                time.sleep(0)  # lets the system deliver the signal
        seen.append("lost")
    except BaseException as error:
        seen.append(type(error).__name__)
ops.flash_fwd(q, q, q)
print(*set(seen))
"""


@pytest.mark.parametrize("where", ["simulator", "mps"])
def test_interrupts_at_any_time_are_keyboard_interrupts(libraries, where):
    library = libraries["bytes"] if where == "mps" else where
    assert run_alone(STRESS, library).split() == ["KeyboardInterrupt"]
