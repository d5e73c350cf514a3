"""The choice of tensor tiles on mps, on the fake of torch's shims."""

import json
import re

import pytest

from tests.helpers.cases import each_case
from tests.helpers.forks import run_alone

# Runs each case in a new child process, and prints the results.
PROGRAM = """
import contextlib, ctypes, functools, io, json, os, sys, tempfile, threading, time
import torch

from tests.helpers.forks import in_child
from tests.helpers.patience import HANG_SECONDS
from tests.runtime import fake_mac

fake = fake_mac.fake_mac("Apple M5", 10, sys.argv[1])

from torch_metal_attn.runtime import extension, shaders, tensor_tiles
from torch_metal_attn.__main__ import main
from torch_metal_attn.simulator import compile_shader

folder = tempfile.TemporaryDirectory()
os.mkdir(folder.name + "/hung")
record = os.path.join(folder.name, "new", "record")
q = torch.randn(1, 2, 40, 16).half()

def memory(address, size):
    return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)

@functools.cache
def probed(text, kernel, language, lane_map):
    '''What the simulator's GPU makes of a probe's buffer.'''
    values = torch.ones(96) if kernel == "probe" else torch.full((3332,), -1.0)
    run = getattr(compile_shader(text, check=True, language=language), kernel)
    run(values, threads=32, group_size=32, lane_map=lane_map)
    return values

for text in ("", "#define FLOAT32 0\\n", "#define FLOAT32 1\\n"):
    kernel = "probe_tensor" if text else "probe"
    probed(text + shaders.source(kernel), kernel, "4.0" if text else "3.1", "apple10")

class Gpu:
    '''A GPU with a lane map; kernels write one number, by kind of tile, or by name and problem.'''

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
    lse = torch.zeros(1, 2, 40)
    return fake_mac.outcome(fake.ops.flash_bwd, x, None, x, x, x, x, lse)

def call(run, *problems, name="Apple M5", macos=1, setting=None, then=lambda: None, note=record,
         allow_tf32=False, **gpu):
    '''What `run` returns, what was started, why tensor tiles are not used, and what was said.'''
    def asked():
        Gpu(**gpu)
        fake.library.metal_attn_set_gpu_name(name.encode())
        fake.library.metal_attn_set_tensor_record(macos, note.encode())
        if setting is not None:
            os.environ["TORCH_METAL_ATTN_TENSOR_TILES"] = setting
        assert not allow_tf32 or fake.library.metal_attn_allow_tf32(1) == -1
        then()
        with tempfile.TemporaryFile("w+") as said:
            os.dup2(said.fileno(), 2)
            results = [run(), fake_mac.kernels(fake)]
            results.append([tensor_tiles.problem(**of) for of in problems])
            said.seek(0)
            return [*results, said.read()]
    return in_child(asked)

def case(**how):
    return call(lambda: [attend(), attend()], {}, **how)

def backward(**how):
    return call(lambda: [differentiate(), differentiate()], {}, {"backward": True}, **how)

def tf32(**how):
    x, of = q.float(), {"float32": True}
    run = lambda: [attend(x), attend(x), differentiate(x)]
    return call(run, of, of | {"backward": True}, {}, allow_tf32=True, **how)

def flex():
    '''A text that does not compile on tensor tiles, one that compiles on no tile, and others.'''
    results = [attend()]
    fake.refuse("void flash_fwd_tensor(")
    results.append(score("score + 1.0"))
    fake.refuse("")
    results += [score("score + 1.0"), score("score + 2.0"), attend()]
    fake.refuse("score + 3.0")
    results += [score("score + 4.0"), score("score + 3.0")]
    explained = fake.ops.flex_fwd_explain(q, q, q, captures=[], score="return score + 1.0;")
    return [*results, extension.launches(explained)[-1]["reason"]]

def hang(kernel, ends=None):
    '''Metal compiles this kernel until `ends` is set, and the time for its trial is short.'''
    assert fake.problem() == ""
    ends = ends or threading.Event()
    def short():
        fake.library.fake_mps_set_probe_limit(400)
    def compiler(text):
        if f" void {kernel}(" in text:
            ends.wait()
        elif " void probe_tensor(" in text:
            short()  # for the trial after this one
    if kernel == "probe_tensor":
        short()
    fake.set_compiler(compiler)

def begun():
    return sorted(name for name in os.listdir(folder.name + "/hung") if "begun" in name)

def hangs(kernel):
    '''What this process, the next, one of another version, one that insists and the last find.'''
    note = os.path.join(folder.name, "hung", kernel)
    found = [case(note=note, then=lambda: hang(kernel)), begun()]
    found += [case(note=note), case(note=note + " of another version")]
    found += [case(note=note, setting="on"), begun(), case(note=note)]
    return found

def late():
    '''A trial ends after its time: what was launched, and the notes before and after.'''
    ends = threading.Event()
    hang("flash_fwd_tensor", ends)
    results = [attend(), begun()]
    ends.set()
    until = time.monotonic() + HANG_SECONDS
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
    first = os.fork()
    if first == 0:
        case(note=note, then=lambda: fake.set_compiler(compiler))
        os._exit(0)
    os.read(compiles[0], 1)
    threading.Timer(0.2, lambda: os.write(go_on[1], b" " * 9)).start()
    second = case(note=note)
    os.waitpid(first, 0)
    return second

def info():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(["info"])
        os.environ["TORCH_METAL_ATTN_TENSOR_TILES"] = "off"
        main(["info"])
    lines = [line.split(maxsplit=2) for line in text.getvalue().splitlines()]
    return [line[2] for line in lines if line[:2] == ["tensor", "tiles"]]

multiply = ("mode::multiply_accumulate", "mode::multiply")
short = ("products + SIZE, true,", "products + SIZE, false,")
print(json.dumps({text: eval(text) for text in json.loads(sys.argv[2])}))
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
    """The line that explains why the call takes long."""
    return (
        f"torch_metal_attn: {what} now compiles several kernels, once for each version of macOS, "
        "torch and this package: it compares tensor tiles with 8x8 tiles in a few small problems"
        f"{more}\n"
    )


def works(ran, *problems, said="", launched=2):
    """The result of `call` if tensor tiles are used, or are not tried for these reasons."""
    return [["launched"] * launched, ran, [*problems], said]


def fault(ran, *problems, said="attention"):
    """A failing trial: patterns of the problems, and the attention that falls back to 8x8 tiles."""
    return {"ran": ran, "problems": problems, "said": said}


COMPARES = compares("attention", "; `python -m torch_metal_attn verify --full` compares many more")
COMPARISON = "the comparison of both kinds of tile"
NEW = works([*PROBES, *BOTH * 3, *TENSOR], "", said=COMPARES)
REMEMBERED = works([*PROBES, *TENSOR], "")
NOT_TRIED = ["probe", *MATRIX]
OF_BACKWARD, OF_FLOAT32 = "attention's backward", "attention in float32"
REFUSED = ".*told to be refused"
WRONG_SLOT = "in the left operand of a tensor operation, slot .* of lane .* is at .*"
WRONG_PRODUCT = "a tensor operation gave .* instead of .*"


def differs(problem, what, tensor=1, matrix=1):
    text = f"in a small problem in {problem}, {what} was {tensor} with tensor tiles and {matrix}"
    return f"{text} with 8x8 tiles"


# The order matters, because each case reads the record of the previous cases.
CASES = {
    "case(numbers=(1.0, 1.01))": fault(
        [*PROBES, *BOTH, *MATRIX], differs("float16", "out", 1, r"1\.0.*")
    ),
    "os.path.exists(record)": False,
    # Both kinds of tile are compared once, in three problems. The result is recorded.
    "case()": NEW,
    "case(numbers=(1.0, 2.0))": REMEMBERED,
    'case(name="Apple M4")': works(
        NOT_TRIED, "no Apple GPU with matrix units (M5 or later) was found: this is an Apple M4"
    ),
    'case(setting="off")': works(NOT_TRIED, "TORCH_METAL_ATTN_TENSOR_TILES is off"),
    "case(macos=0)": works(NOT_TRIED, "tensor tiles need macOS 26.2 or later"),
    'case(setting="yes")': (
        """ValueError("TORCH_METAL_ATTN_TENSOR_TILES is 'yes'; it must be off, auto or on")"""
    ),
    'case(language="3.2")': works(
        [*PROBES, *MATRIX],
        "torch compiles a version of Metal before 4.0, which has no tensor operations",
    ),
    'case(name="Apple M4", setting="on", lane_map="apple9")': fault(
        [*PROBES, *MATRIX],
        "in the left operand of a tensor operation, slot 2 of lane 0 is at row 0, column 8, "
        "where row 0, column 2 was expected",
    ),
    "case(lane_map=5)": fault([*PROBES, *MATRIX], WRONG_SLOT),
    "case(change=multiply)": fault([*PROBES, *MATRIX], WRONG_PRODUCT),
    'case(then=lambda: fake.refuse("void probe_tensor("))': fault(
        NOT_TRIED,
        f"a small kernel on it failed: compiling probe_tensor FLOAT32=0 failed: {REFUSED}",
    ),
    # A tile that passed before and is refused now is refused for this problem only.
    'case(then=lambda: fake.refuse("void flash_fwd_tensor("))': fault(
        [*PROBES, *MATRIX], "", said="attention of such tensors"
    ),
    'case(then=lambda: fake.refuse("void flash_fwd_tensor(", "dispatch"))': fault(
        [*PROBES, *TENSOR, *MATRIX], "", said="attention of such tensors"
    ),
    # The next tensor tile replaces the refused tile.
    'case(then=lambda: fake.refuse("#define Q_IN_REGISTERS 1", "pipeline"))': fault(
        [*PROBES, *TENSOR], "", said=""
    ),
    "backward(gradients=(1.0, 1.1))": fault(
        [*PROBES, *COMPARED, *GRADIENTS * 2],
        *("", differs("float16", "dq", 1, r"1\.\d*")),
        said=OF_BACKWARD,
    ),
    'backward(exchanged={"flash_bwd_dq_tensor": 1.1})': fault(
        [*PROBES, *COMPARED * 3, *GRADIENTS * 2],
        *("", differs("float16 with a head dim of 192", "dq", r"1\.\d*")),
        said=OF_BACKWARD,
    ),
    "backward()": works(
        [*PROBES, *COMPARED * 3, *TENSOR_GRADIENTS * 2], "", "", said=compares(OF_BACKWARD)
    ),
    "backward(gradients=(1.0, 2.0))": works([*PROBES, *TENSOR_GRADIENTS * 2], "", ""),
    'hangs("probe_tensor")': None,  # see test_a_trial_that_hangs_is_not_repeated
    'hangs("flash_fwd_tensor")': None,
    # The next process repeats a trial that ends late, and waits for one that runs.
    'call(late, note=folder.name + "/hung/late")[0]': ["launched", ["late_begun"], []],
    "side_by_side()": REMEMBERED,
    # If notes cannot be written, each process compares the tiles.
    'case(note=os.path.join(record, "under a file"))': NEW,
    "call(flex, {})": None,  # see test_score_mods_that_do_not_compile_use_other_tiles_or_raise
    'backward(then=lambda: fake.refuse("void flash_bwd_dkv_tensor("))': fault(
        [*PROBES, *TENSOR_GRADIENTS[:2] * 3, *GRADIENTS * 2],
        *("", ""),
        said=f"{OF_BACKWARD} of such tensors",
    ),
    "backward(lane_map=5)": fault([*PROBES, *GRADIENTS * 2], *[WRONG_SLOT] * 2),
    "call(lambda: [attend(q.float())])": works(["probe", "flash_fwd"], launched=1),
    # If TF32 is allowed, float32 is compared in two problems, and its gradients in two.
    'tf32(float32={"flash_fwd": 1.01})': fault(
        [*FLOAT32_PROBES, *BOTH, *MATRIX, *GRADIENTS],
        *[differs("float32", "out", 1, r"1\.01")] * 2,
        said=OF_FLOAT32,
    ),
    'tf32(float32={"flash_bwd_dkv": 1.01})': fault(
        [*FLOAT32_PROBES, *BOTH * 2, *TENSOR, *COMPARED, *GRADIENTS],
        *("", differs("float32", "dk", 1, r"1\.01")),
        said=f"{OF_BACKWARD} in float32",
    ),
    'tf32(then=lambda: fake.refuse("#define FLOAT32 1"))': fault(
        [*PROBES, *MATRIX, *GRADIENTS],
        *["a small kernel on it failed: compiling probe_tensor FLOAT32=1 failed: .*refused"] * 2,
        said=OF_FLOAT32,
    ),
    "tf32(change=short)": fault(
        [*FLOAT32_PROBES, *MATRIX, *GRADIENTS], *[WRONG_PRODUCT] * 2, said=OF_FLOAT32
    ),
    "tf32()": works(
        [*FLOAT32_PROBES, *TENSOR, *COMPARED * 2, *TENSOR_GRADIENTS],
        *("", "", ""),
        said=compares(f"{OF_BACKWARD} in float32"),
        launched=3,
    ),
    'tf32(then=lambda: fake.refuse("void flash_fwd_tensor("))': fault(
        [*FLOAT32_PROBES, *MATRIX, *TENSOR_GRADIENTS],
        *("", "", ""),
        said="attention of such tensors",
    ),
    "tf32(lane_map=5)": fault([*PROBES, *MATRIX, *GRADIENTS], *[WRONG_SLOT] * 3),
    "call(info)[0]": [
        "used in float16 and bfloat16; not in float32: "
        "tensor operations reduce float32 to 11 bits, and TF32 is not allowed",
        "not used: TORCH_METAL_ATTN_TENSOR_TILES is off",
    ],
}


@pytest.fixture(scope="module")
def actual(libraries):
    return json.loads(run_alone(PROGRAM, libraries["bytes"], json.dumps([*CASES])))


@each_case("call", [call for call, expected in CASES.items() if expected is not None])
def test_tensor_tiles_are_used_only_if_they_pass(actual, call):
    expected = CASES[call]
    if not isinstance(expected, dict):
        assert actual[call] == expected
        return
    outcomes, ran, problems, said = actual[call]
    if expected["ran"] is not None:
        assert set(outcomes) == {"launched"}
        assert ran == expected["ran"]
    # If only float32 fails, half precision keeps its tensor tiles.
    patterns = [*expected["problems"], ""][: len(problems)]
    for problem, pattern in zip(problems, patterns, strict=True):
        assert re.fullmatch(pattern, problem)
        assert problem in said
    assert said.count("8x8 tiles, not tensor tiles") == (1 if expected["said"] else 0)
    assert f"{expected['said']} uses 8x8 tiles, not tensor tiles" in said or not expected["said"]
    assert "lease report this" in said
    in_front_end = 'refuse("' in call and not re.search("pipeline|dispatch", call)
    assert in_front_end == ("The shader's text is in" in said)


@pytest.mark.parametrize(
    "kernel, why, tried, said",
    [
        ("probe_tensor", "a small kernel on it did not end within 400 ms", ["probe"], ""),
        ("flash_fwd_tensor", f"{COMPARISON} did not end within 1200 ms", PROBES, COMPARES),
    ],
)
def test_a_trial_that_hangs_is_not_repeated(actual, kernel, why, tried, said):
    def not_used(why):
        return f"torch_metal_attn: attention uses 8x8 tiles, not tensor tiles: {why}\n"

    first, noted, second, other_version, insisting, left, last = actual[f'hangs("{kernel}")']
    assert first[:3] == works([*tried, *MATRIX], why)[:3]
    assert first[3].startswith(said + not_used(why))
    assert noted == [f"{kernel}_begun"]
    why = (
        "an earlier process began to try tensor tiles and did not finish; "
        "TORCH_METAL_ATTN_TENSOR_TILES=on tries tensor tiles again, and =off silences this line"
    )
    assert second == works(NOT_TRIED, why, said=not_used(why))
    assert other_version == insisting == NEW
    assert left == []
    assert last == REMEMBERED


def test_score_mods_that_do_not_compile_use_other_tiles_or_raise(actual):
    (*launched, bad, reason), ran, problems, said = actual["call(flex, {})"]
    assert launched == ["launched"] * 6
    assert re.match("metal_attn: compiling flash_fwd .*score [+] 3.0.* failed: ", bad)
    assert problems == [""]
    tensor, matrix = "flash_fwd_tensor", "flash_fwd"
    assert ran == [*PROBES, tensor, matrix, matrix, *[tensor] * 3]
    assert reason.endswith("as this GPU refused every tensor tile for this problem")
    words = "flex_attention with this score_mod and mask_mod uses 8x8 tiles, not tensor tiles: "
    assert said.count("8x8 tiles, not tensor tiles") == 1
    assert re.search(re.escape(words) + "compiling flash_fwd_tensor .*score [+] 1.0.* failed", said)
