"""Whether attention uses tensor tiles on mps: each way to decide, on the fake of torch's shims."""

import json
import re

import pytest

from tests.helpers.cases import each_case
from tests.helpers.forks import run_alone

# Runs the cases that it is given, each in a child in which nothing has been decided yet, and prints
# what they return.
PROGRAM = """
import contextlib, ctypes, functools, io, json, os, sys, tempfile, threading, time
import torch

from tests.helpers.forks import in_child
from tests.runtime import fake_mac

fake = fake_mac.fake_mac("Apple M5", 10, sys.argv[1])

from torch_metal_attn.runtime import extension, shaders, tensor_tiles
from torch_metal_attn.__main__ import main
from torch_metal_attn.simulator import compile_shader

folder = tempfile.TemporaryDirectory()
os.mkdir(folder.name + "/hung")
record = os.path.join(folder.name, "new", "record")
q = torch.randn(1, 2, 8, 16).half()

def memory(address, size):
    return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)

@functools.cache
def probed(text, kernel, language, lane_map):
    '''What the simulator's GPU makes of a probe's buffer.'''
    values = torch.ones(96) if kernel == "probe" else torch.full((3332,), -1.0)
    run = getattr(compile_shader(text, check=True, language=language), kernel)
    run(values, threads=32, group_size=32, lane_map=lane_map)
    return values

# Before the forks, for all of them.
for text in ("", "#define FLOAT32 0\\n", "#define FLOAT32 1\\n"):
    kernel = "probe_tensor" if text else "probe"
    probed(text + shaders.source(kernel), kernel, "4.0" if text else "3.1", "apple10")

class Gpu:
    '''A GPU whose tensor operations have a lane map, and whose kinds of tile give two numbers.

    exchanged: what a kernel gives where its SIMD groups share rows, by its name. float32: what it
        gives in that.
    '''

    def __init__(self, lane_map="apple10", language="4.0", numbers=(1.0, 1.0), change=("", ""),
                 gradients=(1.0, 1.0), exchanged={}, float32={}):
        self.lane_map, self.language, self.change = lane_map, language, change
        self.numbers = dict(zip(("flash_fwd_tensor", "flash_fwd"), numbers))
        for name in ("flash_bwd_dq", "flash_bwd_dkv"):
            self.numbers |= dict(zip((name + "_tensor", name), gradients))
        self.exchanged, self.float32 = exchanged, float32
        fake.set_gpu_of_all(self.run)

    def run(self, text, addresses):
        kernel = next(name for name in ("probe_tensor", "probe", "flash_bwd_delta", *self.numbers)
                      if f" void {name}(" in text)
        if kernel == "probe_tensor":
            values = probed(text.replace(*self.change), kernel, self.language, self.lane_map)
            memory(addresses[0], 3332).copy_(values)
        elif kernel == "probe":
            memory(addresses[0], 96).copy_(probed(text, kernel, "3.1", "apple10"))
        elif "HEAD_DIM_V 16" not in text and kernel in self.numbers:  # the small problem
            dtype = next(x for name, x in DTYPES.items() if f" ELEMENT {name}" in text)
            head_dim = 192 if "HEAD_DIM_V 192" in text else 64
            queries, keys = 2 * 70 * head_dim, 100 * head_dim
            number = self.numbers[kernel]
            if "COLUMN_SIMDGROUPS 2" in text:
                number = self.exchanged.get(kernel, number)
            if dtype == torch.float32:
                number = self.float32.get(kernel, number)
            if "dkv" in kernel:
                results = {22: keys, 23: keys}
            else:
                results = {21 if "dq" in kernel else 16: queries}
            for slot, size in results.items():
                out = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(addresses[slot])
                torch.frombuffer(out, dtype=dtype).fill_(number)

DTYPES = {"half": torch.float16, "bfloat": torch.bfloat16, "float": torch.float32}

def attend(x=q):
    return fake_mac.outcome(fake.ops.flash_fwd, x, x, x)

def score(text):
    return fake_mac.outcome(fake.ops.flex_fwd, q, q, q, captures=[], score=f"return {text};")

def differentiate(x=q):
    fake.ops.flash_bwd(x, None, x, x, x, x, torch.zeros(1, 2, 8))

def kernels():
    return fake_mac.kernels(fake)

def case(*, name="Apple M5", macos=1, setting=None, then=lambda: None, note=record, **gpu):
    '''What the kernel was tried with and why it is not used, what ran, and what was said.'''
    def asked():
        Gpu(**gpu)
        fake.library.metal_attn_set_gpu_name(name.encode())
        fake.library.metal_attn_set_tensor_record(macos, note.encode())
        if setting is not None:
            os.environ["TORCH_METAL_ATTN_TENSOR_TILES"] = setting
        then()
        with tempfile.TemporaryFile("w+") as said:
            os.dup2(said.fileno(), 2)
            results = [attend(), attend(), tensor_tiles.problem(), kernels()]
            said.seek(0)
            return [*results, said.read()]
    return in_child(asked)

def backward(then=lambda: None, **gpu):
    '''Why a backward has no tensor tiles, what two of them ran, and what was said.'''
    def asked():
        Gpu(**gpu)
        fake.library.metal_attn_set_tensor_record(1, record.encode())
        then()
        with tempfile.TemporaryFile("w+") as said:
            os.dup2(said.fileno(), 2)
            differentiate()
            differentiate()
            forward = tensor_tiles.problem()
            said.seek(0)
            return [forward, tensor_tiles.problem(backward=True), kernels(), said.read()]
    return in_child(asked)

def flex():
    '''One text that does not compile on tensor tiles, one on no tile, and others.'''
    Gpu()
    fake.library.metal_attn_set_tensor_record(1, record.encode())
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 2)
        results = [attend()]
        fake.refuse("void flash_fwd_tensor(")
        results.append(score("score + 1.0"))
        fake.refuse("")
        results += [score("score + 1.0"), score("score + 2.0"), attend()]
        fake.refuse("score + 3.0")
        results += [score("score + 3.0"), score("score + 4.0"), tensor_tiles.problem(), kernels()]
        explained = fake.ops.flex_fwd_explain(q, q, q, captures=[], score="return score + 1.0;")
        results.append(extension.launches(explained)[-1]["reason"])
        said.seek(0)
        return [*results, said.read()]

def float32():
    Gpu()
    fake.library.metal_attn_set_tensor_record(1, record.encode())
    return [attend(q.float()), kernels()]

def tf32(then=lambda: None, **gpu):
    '''What ran, and why float32 and its gradients have no tensor tiles; half precision does.'''
    def asked():
        Gpu(**gpu)
        fake.library.metal_attn_set_tensor_record(1, record.encode())
        assert fake.library.metal_attn_allow_tf32(1) == -1
        then()
        with tempfile.TemporaryFile("w+") as said:
            os.dup2(said.fileno(), 2)
            results = [attend(q.float()), attend(q.float())]
            differentiate(q.float())
            ran = kernels()
            results += [tensor_tiles.problem(backward=b, float32=True) for b in (False, True)]
            said.seek(0)
            return [*results, ran, tensor_tiles.problem(), said.read()]
    return in_child(asked)

def hang(kernel, ends=None):
    '''Metal compiles this kernel until `ends` is set, and the time for a trial is short.'''
    assert fake.problem() == ""
    fake.library.fake_mps_set_probe_limit(400)
    ends = ends or threading.Event()
    fake.set_compiler(lambda text: f" void {kernel}(" in text and ends.wait() and None)

def begun():
    return sorted(name for name in os.listdir(folder.name + "/hung") if "begun" in name)

def hangs(kernel):
    '''What the process finds, the next, one of another version, one that insists, and the last.'''
    note = os.path.join(folder.name, "hung", kernel)
    found = [case(note=note, then=lambda: hang(kernel)), begun()]
    found += [case(note=note), case(note=note + " of another version")]
    found += [case(note=note, setting="on"), begun(), case(note=note)]
    return found

def late():
    '''Of a trial that ends after its time: what was launched, and the notes before and after.'''
    Gpu()
    fake.library.metal_attn_set_tensor_record(1, (folder.name + "/hung/late").encode())
    ends = threading.Event()
    hang("flash_fwd_tensor", ends)
    results = [attend(), begun()]
    ends.set()
    until = time.monotonic() + 60
    while begun() and time.monotonic() < until:
        time.sleep(0.01)
    return [*results, begun()]

def side_by_side():
    '''What a process runs that begins while another one's trial compiles.'''
    note = folder.name + "/hung/side_by_side"
    compiles, go_on = os.pipe(), os.pipe()
    def compiler(text):
        if " void flash_fwd_tensor(" in text and not os.path.exists(note):
            os.write(compiles[1], b" ")
            os.read(go_on[0], 1)
    if os.fork() == 0:
        case(note=note, then=lambda: fake.set_compiler(compiler))
        os._exit(0)
    os.read(compiles[0], 1)
    threading.Timer(0.2, lambda: os.write(go_on[1], b" " * 9)).start()
    second = case(note=note)
    os.wait()
    return second

def told():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(["info"])
    return [line for line in text.getvalue().splitlines() if line.startswith("tensor tiles")]

def info():
    Gpu()
    fake.library.metal_attn_set_tensor_record(1, record.encode())
    first = told()
    os.environ["TORCH_METAL_ATTN_TENSOR_TILES"] = "off"
    return first + told()

multiply = ("mode::multiply_accumulate", "mode::multiply")
short = ("products + SIZE, true,", "products + SIZE, false,")
print(json.dumps({call: eval(call) for call in json.loads(sys.argv[2])}))
"""

PROBES = ["probe", "probe_tensor"]
FLOAT32_PROBES = [*PROBES, "probe_tensor"]
MATRIX = ["flash_fwd"] * 2
TENSOR = ["flash_fwd_tensor"] * 2
BOTH = ["flash_fwd_tensor", "flash_fwd"]
GRADIENTS = ["flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]
TENSOR_GRADIENTS = ["flash_bwd_delta", "flash_bwd_dq_tensor", "flash_bwd_dkv_tensor"]
COMPARED = ["flash_fwd", *TENSOR_GRADIENTS, *GRADIENTS]


def compares(what, more=""):
    """The line that tells the user what the call waits for."""
    return (
        f"torch_metal_attn: {what} now compiles several kernels, once for each version of macOS, "
        "torch and this package: it compares tensor tiles with 8x8 tiles in a few small problems"
        f"{more}\n"
    )


COMPARES = compares("attention", "; `python -m torch_metal_attn verify --full` compares many more")
NEW = ["launched", "launched", "", [*PROBES, *BOTH * 3, *TENSOR], COMPARES]
REMEMBERED = ["launched", "launched", "", [*PROBES, *TENSOR], ""]
REFUSED = ".*told to be refused"

# Cases in their order, as each finds what those before it left in the record; of those that find
# why tensor tiles are not used: why, and what is tried before 8x8 tiles are used.
DIFFER = "case(numbers=(1.0, 1.01))"
BROKEN = {
    DIFFER: (
        r"a small problem, float16, gave 1 with tensor tiles and 1\.0\d* with 8x8 tiles",
        [*PROBES, *BOTH],
    ),
    'case(numbers=(float("nan"), 1.0))': (
        "a small problem, float16, gave nan with tensor tiles and 1 with 8x8 tiles",
        [*PROBES, *BOTH],
    ),
    'case(name="Apple M4", setting="on", lane_map="apple9")': (
        "slot 2 of lane 0 of the left operand of a tensor operation is at row 0, column 8, "
        "where row 0, column 2 was expected",
        PROBES,
    ),
    "case(lane_map=5)": (
        "slot .* of lane .* of the left operand of a tensor operation is at .*",
        PROBES,
    ),
    "case(change=multiply)": ("a tensor operation gave .* where .* is right", PROBES),
    'case(then=lambda: fake.refuse("void probe_tensor("))': (
        f"a small kernel on it failed: compiling probe_tensor FLOAT32=0 failed: {REFUSED}",
        ["probe"],
    ),
    'case(then=lambda: fake.refuse("void flash_fwd_tensor("))': (
        f"compiling flash_fwd_tensor .* failed: {REFUSED}",
        PROBES,
    ),
    'case(then=lambda: fake.fail("get_kernel_function", "no pipeline", after=2))': (
        "finding the kernel 'flash_fwd_tensor' in flash_fwd_tensor failed: no pipeline",
        None,  # 8x8 tiles get no pipeline either
    ),
}
NOT_TRIED = {
    'case(name="Apple M4")': "M5 is the first GPU with matrix units, and this is an Apple M4",
    'case(name="")': "M5 is the first GPU with matrix units, and this is none that torch names",
    'case(setting="off")': "TORCH_METAL_ATTN_TENSOR_TILES is off",
    "case(macos=0)": "they need macOS 26.2",
}
BROKEN_BACKWARDS = {
    "backward(gradients=(1.0, 1.1))": (
        "a small problem, the dq of float16, gave 1 with tensor tiles and 1\\.\\d* with 8x8 tiles",
        COMPARED,
    ),
    'backward(exchanged={"flash_bwd_dq_tensor": 1.1})': (
        "a small problem, the dq of float16 with a head dim of 192, "
        r"gave 1\.\d* with tensor tiles and 1 with 8x8 tiles",
        COMPARED * 3,
    ),
    'backward(exchanged={"flash_bwd_dkv_tensor": 1.1})': (
        "a small problem, the dk of float16 with a head dim of 192, "
        r"gave 1\.\d* with tensor tiles and 1 with 8x8 tiles",
        COMPARED * 3,
    ),
}
LATER_BACKWARD = {
    'backward(then=lambda: fake.refuse("void flash_bwd_dkv_tensor("))': (
        f"compiling flash_bwd_dkv_tensor .* failed: {REFUSED}",
        TENSOR_GRADIENTS[:2],
    )
}
BROKEN_FLOAT32 = {
    'tf32(float32={"flash_fwd": 1.01})': (
        r"a small problem, float32, gave 1 with tensor tiles and 1\.01 with 8x8 tiles",
        [*FLOAT32_PROBES, *BOTH],
    ),
    'tf32(then=lambda: fake.refuse("void flash_fwd_tensor("))': (
        f"compiling flash_fwd_tensor .* failed: {REFUSED}",
        FLOAT32_PROBES,
    ),
    'tf32(then=lambda: fake.refuse("#define FLOAT32 1"))': (
        "a small kernel on it failed: compiling probe_tensor FLOAT32=1 failed: .*refused",
        PROBES,
    ),
    "tf32(change=short)": ("a tensor operation gave .* where .* is right", FLOAT32_PROBES),
}
NO_RECORD, NEW_BACKWARD, TF32 = "os.path.exists(record)", "backward()", "tf32()"
REMEMBERED_BACKWARD = "backward(gradients=(1.0, 2.0))"
NO_FORWARD = "backward(lane_map=5)"
TF32_BACKWARD = 'tf32(float32={"flash_bwd_dkv": 1.01})'
REMEMBERED_TF32 = 'tf32(float32={"flash_fwd": 2.0, "flash_bwd_dq": 2.0})'
NO_HALF = "tf32(lane_map=5)"
SETTINGS = ["case(numbers=(1.0, 2.0))", 'case(setting="")']
WRONG, METAL_3_2 = 'case(setting="yes")', 'case(language="3.2")'
NO_PLACE = 'case(note=os.path.join(record, "under a file"))'
HANGS = ['hangs("probe_tensor")', 'hangs("flash_fwd_tensor")']
CALLS = [
    *(*list(BROKEN)[:2], NO_RECORD, "case()", *SETTINGS, *NOT_TRIED, WRONG, METAL_3_2),
    *(*list(BROKEN)[2:], *BROKEN_BACKWARDS, NEW_BACKWARD, REMEMBERED_BACKWARD, *HANGS),
    *("in_child(late)", "side_by_side()", NO_PLACE, "in_child(flex)", *LATER_BACKWARD, NO_FORWARD),
    *("in_child(float32)", *list(BROKEN_FLOAT32)[:1], TF32_BACKWARD, *list(BROKEN_FLOAT32)[1:]),
    *(TF32, REMEMBERED_TF32, NO_HALF),
    "in_child(info)",
]


@pytest.fixture(scope="module")
def cases(libraries):
    return json.loads(run_alone(PROGRAM, libraries["bytes"], json.dumps(CALLS)))


def test_both_kinds_of_tile_are_compared_once(cases):
    """In three problems; a later process finds the record of that, and only probes."""
    assert cases[NO_RECORD] is False
    assert cases["case()"] == NEW
    assert [cases[call] for call in SETTINGS] == [REMEMBERED] * 2


def not_used(why):
    return f"torch_metal_attn: attention uses 8x8 tiles, not tensor tiles: {why}\n"


@pytest.mark.parametrize(
    "number, why, tried, said",
    [
        (0, "a small kernel on it did not end within 400 ms", ["probe"], ""),
        (1, "the comparison of both kinds of tile did not end within 1200 ms", PROBES, COMPARES),
    ],
)
def test_a_trial_that_hangs(cases, number, why, tried, said):
    """8x8 tiles are used while it does, and in later processes without a trial."""
    first, noted, second, other_version, insisting, left, last = cases[HANGS[number]]
    assert first[:4] == ["launched", "launched", why, [*tried, *MATRIX]]
    assert first[4].startswith(said + not_used(why))
    assert noted == [f"{('probe_tensor', 'flash_fwd_tensor')[number]}_begun"]
    why = (
        "an earlier process began to try them and did not get to the end; "
        "TORCH_METAL_ATTN_TENSOR_TILES=on tries them again, and =off silences this line"
    )
    assert second == ["launched"] * 2 + [why, ["probe", *MATRIX], not_used(why)]
    assert other_version == insisting == NEW
    assert left == []
    assert last == REMEMBERED


def test_other_processes(cases):
    """A trial that ends late is repeated by the next process, and one that runs is waited for.

    Without a place for notes each process tries them.
    """
    assert cases["in_child(late)"] == ["launched", ["late_begun"], []]
    assert cases["side_by_side()"] == REMEMBERED
    assert cases[NO_PLACE] == NEW


@each_case("call", NOT_TRIED)
def test_nothing_is_tried(cases, call):
    assert cases[call] == ["launched", "launched", NOT_TRIED[call], ["probe", *MATRIX], ""]


def test_an_old_language_is_no_fault(cases):
    why = "torch compiles a version of Metal before 4.0, which has no tensor operations"
    assert cases[METAL_3_2] == ["launched"] * 2 + [why, [*PROBES, *MATRIX], ""]


@each_case("call", BROKEN)
def test_what_does_not_work_is_said_once(cases, call):
    """And 8x8 tiles are used for the rest of the process."""
    first, second, problem, ran, said = cases[call]
    why, tried = BROKEN[call]
    if tried is not None:
        assert first == second == "launched"
        assert ran == [*tried, *MATRIX]
    assert re.fullmatch(why, problem)
    assert said.count("attention uses 8x8 tiles, not tensor tiles") == 1
    assert problem in said
    assert "please report this" in said
    if "compil" in why:
        assert "The shader's text is in" in said


def test_backwards_are_compared_once(cases):
    """After the forward, which earlier cases have compared, and with a record of their own."""
    ran = [*PROBES, *COMPARED * 3, *TENSOR_GRADIENTS * 2]
    assert cases[NEW_BACKWARD] == ["", "", ran, compares("attention's backward")]
    ran = [*PROBES, *TENSOR_GRADIENTS * 2]
    assert cases[REMEMBERED_BACKWARD] == ["", "", ran, ""]


@each_case("call, expected", [*BROKEN_BACKWARDS.items(), *LATER_BACKWARD.items()])
def test_a_backward_that_does_not_work(cases, call, expected):
    """The forward keeps its tensor tiles."""
    forward, problem, ran, said = cases[call]
    why, tried = expected
    assert forward == ""
    assert re.fullmatch(why, problem)
    assert ran == [*PROBES, *tried, *GRADIENTS * 2]
    assert said.count("attention's backward uses 8x8 tiles, not tensor tiles") == 1
    assert problem in said


def test_a_backward_needs_the_forwards_tensor_tiles(cases):
    forward, problem, ran, said = cases[NO_FORWARD]
    assert forward == problem != ""
    assert ran == [*PROBES, *GRADIENTS * 2]
    assert said.count("8x8 tiles, not tensor tiles") == 1


def test_a_score_mod_that_does_not_compile(cases):
    """Gives up tensor tiles for itself, and for none if it compiles on no tile."""
    *results, bad, good, problem, ran, reason, said = cases["in_child(flex)"]
    assert results == ["launched"] * 5
    assert re.match("metal_attn: compiling flash_fwd .*score [+] 3.0.* failed: ", bad)
    assert (good, problem) == ("launched", "")
    tensor, matrix = "flash_fwd_tensor", "flash_fwd"
    assert ran == [*PROBES, tensor, matrix, matrix, *[tensor] * 3]
    assert reason.endswith(
        "no tensor tiles, as their kernel with this score_mod and mask_mod did not compile"
    )
    words = "flex_attention with this score_mod and mask_mod uses 8x8 tiles, not tensor tiles: "
    assert said.count("8x8 tiles, not tensor tiles") == 1
    assert re.search(re.escape(words) + "compiling flash_fwd_tensor .*score [+] 1.0.* failed", said)


def test_a_setting_that_is_none(cases):
    text = "TORCH_METAL_ATTN_TENSOR_TILES is 'yes'; it must be off, auto or on"
    assert cases[WRONG] == f'ValueError("{text}")'


def test_float32_needs_no_trial(cases):
    assert cases["in_child(float32)"] == ["launched", ["probe", "flash_fwd"]]


def test_float32_is_compared_once_where_tf32_is_allowed(cases):
    """In two problems, and its gradients in two; the records of half precision do not count."""
    *_, ran, _, said = cases[TF32_BACKWARD]
    assert ran[: len(FLOAT32_PROBES) + 6] == [*FLOAT32_PROBES, *BOTH * 2, *TENSOR]
    assert said.startswith(compares("attention in float32"))
    ran = [*FLOAT32_PROBES, *TENSOR, *COMPARED * 2, *TENSOR_GRADIENTS]
    said = compares("attention's backward in float32")
    assert cases[TF32] == ["launched", "launched", "", "", ran, "", said]
    ran = [*FLOAT32_PROBES, *TENSOR, *TENSOR_GRADIENTS]
    assert cases[REMEMBERED_TF32] == ["launched", "launched", "", "", ran, "", ""]


@each_case("call", BROKEN_FLOAT32)
def test_float32_that_does_not_work(cases, call):
    """Half precision keeps its tensor tiles; the gradients of float32 need its forward's."""
    *_, forward, backward, found, half, said = cases[call]
    why, tried = BROKEN_FLOAT32[call]
    assert re.fullmatch(why, forward)
    assert backward == forward
    assert found == [*tried, *MATRIX, *GRADIENTS]
    assert half == ""
    assert said.count("attention in float32 uses 8x8 tiles, not tensor tiles") == 1


def test_gradients_of_float32_that_do_not_work(cases):
    _, _, forward, backward, ran, half, said = cases[TF32_BACKWARD]
    assert forward == half == ""
    assert "the dk of float32, gave 1 with tensor tiles and 1.01 with 8x8 tiles" in backward
    assert ran[-3:] == GRADIENTS
    assert said.count("attention's backward in float32 uses 8x8 tiles, not tensor tiles") == 1


def test_float32_needs_half_precisions_tensor_tiles(cases):
    _, _, forward, backward, ran, half, said = cases[NO_HALF]
    assert forward == backward == half != ""
    assert ran == [*PROBES, *MATRIX, *GRADIENTS]
    assert said.count("8x8 tiles, not tensor tiles") == 1


def test_info(cases):
    used, off = (line.split(maxsplit=2)[2] for line in cases["in_child(info)"])
    why = "tensor operations cut float32 to 11 bits, and TF32 is not allowed"
    assert used == f"used in float16 and bfloat16; not in float32: {why}"
    assert off == "not used: TORCH_METAL_ATTN_TENSOR_TILES is off"
