"""Counts of the host's work in a call; bench/bench_launch.py measures times."""

import pytest

from tests.runtime.fake_mps.build import check_quiet, run_counted

# The package's ops on the fake of torch's shims, which answers at once.
SETUP = """
import ctypes, json, sys, warnings, torch
import torch_metal_attn as metal_attn
from tests.runtime.fake_mps.build import FakeMps
from torch_metal_attn.runtime import shaders
from torch_metal_attn.ops import fast_path

warnings.simplefilter("ignore")  # kernels of the CPU are replaced
fake = FakeMps("bytes", sys.argv[1])
shaders.serve(fake.library)
fake.library.fake_mps_take_over()
"""

COUNT = """
from bench.bench_launch import MODES, calls

here = ctypes.CDLL(None)
sources = [here.counted_empty, here.counted_views]
for source in sources:
    source.restype = ctypes.c_uint64

def counted(run):
    run(), run()
    before = [source() for source in sources]
    run()
    counts = [source() - start for source, start in zip(sources, before)]
    frames = 0
    def see(frame, event, _):
        nonlocal frames
        frames += event == "call" and "torch_metal_attn" in frame.f_code.co_filename
    sys.setprofile(see)
    run()
    sys.setprofile(None)
    return *counts, frames

rows = {}
for group in calls():
    for name, run in list(group.items())[1:]:  # the first is torch's own
        for mode, context in MODES.items():
            with context():
                rows.setdefault(name, {})[mode] = counted(run)
"""

# New tensors, views of them, and the package's Python frames.
EXPECTED = {
    "torch.ops.metal_attn.flash_fwd": [2, 0, 3],
    "torch.ops.metal_attn.flash_decode": [2, 0, 3],
    "scaled_dot_product_attention": [2, 0, 3],
    "flash_attn_func": [2, 4, 3],
    "flash_attn_with_kvcache": [2, 4, 4],
    "flash_attn_with_kvcache, new keys": [3, 6, 5],
}


# Compares the launches of each call on the fast path and with the op of all options.
COMPARE = """
torch.manual_seed(0)
q, k, v = (torch.randn(2, length, 4, 32) for length in (3, 40, 40))
new_k, new_v = torch.randn(2, 2, 3, 4, 32)
pages = torch.randn(2, 6, 16, 4, 32)
table = torch.tensor([[0, 2, 4], [1, 3, 5]], dtype=torch.int32)
lengths = torch.tensor([5, 30], dtype=torch.int32)
cos, sin = torch.randn(2, 40, 8)
first = [
    {}, {"causal": True}, {"softmax_scale": 0.3}, {"window_size": (4, 2)},
    {"causal": True, "window_size": (7, 7), "softmax_scale": 0.5},
]
options = {
    "flash_attn": first,
    "flash_attn_cached": [{"cache_seqlens": n, **o} for n in (None, 7, lengths) for o in first],
    "flash_attn_step": [
        {"cache_seqlens": n, "rotary_cos": c, "rotary_sin": s, **o}
        for n in (7, lengths)
        for c, s in ((None, None), (cos, sin))
        for o in first
    ],
}
kvcache = metal_attn.flash_attn_with_kvcache
calls = {
    "flash_attn": lambda **o: metal_attn.flash_attn_func(q, k, v, **o),
    "flash_attn_cached": lambda **o: kvcache(q, k, v, **o),
    "flash_attn_step": lambda **o: kvcache(q, k, v, new_k, new_v, **o),
}
for name, new in (("flash_attn_cached", ()), ("flash_attn_step", (new_k, new_v))):
    calls[f"{name}, paged"] = lambda new=new, **o: kvcache(q, *pages, *new, block_table=table, **o)
    options[f"{name}, paged"] = options[name][-2:]
bhld = [x.transpose(1, 2) for x in (q, k, v)]
calls["sdpa"] = lambda **o: metal_attn.scaled_dot_product_attention(*bhld, **o)
options["sdpa"] = [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.3}]
for name in ("flash_fwd", "flash_decode"):
    calls[name] = lambda op=getattr(torch.ops.metal_attn, name), **o: op(*bhld, **o)
    options[name] = [
        {}, {"causal": True}, {"softmax_scale": 0.3},
        {"window_size_left": 3, "window_size_right": 1},
    ]
known = {x.data_ptr() for x in (q, k, v, new_k, new_v, *pages, table, lengths, cos, sin)}

def launched(call, arguments, used):
    # New tensors have another address each time.
    fake.clear()
    before = used[0]
    with torch.no_grad():
        out = call(**arguments)
    out = out[0] if isinstance(out, tuple) else out
    words = [line.split() for line in fake.log()]
    assert any(line[0] == "dispatch" for line in words)
    for line in words:
        if line[0] == "tensor" and int(line[2]) not in known:
            line[2] = "new"
    return words, out.shape, out.stride(), used[0] - before

used = [0]
for name in fast_path._NAMES:
    own = "_flash_attn_step" if name == "flash_attn_step" else name
    def through(*a, op=getattr(fast_path, own), **o):
        result = op(*a, **o)
        used[0] += 1
        return result
    setattr(fast_path, own, through)
is_usable = fast_path.is_usable
outcomes = []
for name, call in calls.items():
    for arguments in options[name]:
        for _ in range(2):  # the first time compiles
            fast_path.is_usable = is_usable
            short = launched(call, arguments, used)
            fast_path.is_usable = lambda *tensors: False
            whole = launched(call, arguments, used)
        same = short[:3] == whole[:3]
        count = 1 if name in ("flash_fwd", "flash_decode") else short[3]
        outcomes.append([name, repr(list(arguments)), same, count, whole[3]])
"""


@pytest.fixture(scope="module")
def outcome(libraries):
    program = SETUP + COUNT + COMPARE + "print(json.dumps([rows, outcomes]))"
    return run_counted(program, libraries["bytes"])


def test_each_call_has_the_expected_tensors_and_frames(outcome):
    for name, modes in outcome[0].items():
        for mode, counts in modes.items():
            frameless = name.startswith("torch.ops") and mode == "inference_mode"
            expected = [*EXPECTED[name][:2], 0] if frameless else EXPECTED[name]
            assert counts == expected, (name, mode)


def test_the_benchmark_source_compiles():
    check_quiet()


def test_the_fast_path_launches_the_same(outcome):
    actual = outcome[1]
    assert len(actual) > 50
    assert [row for row in actual if row[2:] != [True, 1, 0]] == []
