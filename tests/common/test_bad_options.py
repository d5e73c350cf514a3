"""Refusals of flash_fwd and flash_varlen_fwd: the ValueError names argument, value and rule.

The checks are in C++, so the simulator, the fake kernels and torch.compile run a few rows only.
"""

import math
from functools import partial

import pytest
import torch

from tests.helpers.cases import each_case
from tests.helpers.refused import refused, refused_alike, without_data
from torch_metal_attn import simulate
from torch_metal_attn.testing.judge import ints

NAMESPACES = {"op": torch.ops.metal_attn, "explain": torch.ops.metal_attn_explain}
LENGTHS = ("seqused_k", "leftpad_k")
LONGEST = 2**31 - 1024


def call(where, tensors, options):
    """Calls the packed op if cu_seqlens_q is among the tensors, else the dense op."""
    name = "flash_varlen_fwd" if "cu_seqlens_q" in tensors else "flash_fwd"
    return getattr(NAMESPACES[where], name)(*tensors.values(), **options)


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def dense():
    """Two sequences of 4 query heads and 2 KV heads, 16 queries and 24 keys."""
    return {"q": half(2, 4, 16, 32), "k": half(2, 2, 24, 32), "v": half(2, 2, 24, 48)}


def packed():
    """Two sequences of 16 and 4 queries, and of 10 and 24 keys."""
    tensors = {"q": half(20, 4, 32), "k": half(34, 2, 32), "v": half(34, 2, 48)}
    ends = {"cu_seqlens_q": ints(0, 16, 20), "cu_seqlens_k": ints(0, 10, 34)}
    return tensors | ends | {"max_seqlen_q": 16, "max_seqlen_k": 24}


def tables(q=None, k=None, dtype=torch.float32):
    """cos and sin of these shapes for q and for k."""
    return {
        f"{side}_rotary_{name}": torch.ones(shape, dtype=dtype)
        for side, shape in (("q", q), ("k", k))
        if shape is not None
        for name in ("cos", "sin")
    }


def strided(tensor):
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def resized(tensor, size):
    tensor.untyped_storage().resize_(size)
    return tensor


def state(rng_state=None, dropout_p=0.1):
    rng_state = torch.tensor([1, 2]) if rng_state is None else rng_state
    return {"dropout_p": dropout_p, "rng_state": rng_state}


def wide(q=1, k=1, heads=1, batch=1, columns=8):
    """q, k and v that are larger than memory: one expanded row."""
    row = half(columns)
    sizes = {"q": (batch, heads, q), "k": (batch, heads, k), "v": (batch, heads, k)}
    return {name: row.expand(*size, columns) for name, size in sizes.items()}


# Rows of (changes of valid arguments, the beginning of the error).
OPERANDS = [
    # A wrong rank, stride or storage is in test_small_ops_refused.py.
    ({"k": half(2, 2, 24, 32).float()}, r"k has dtype float32 and q float16; .*same"),
    ({"v": half(2, 2, 24, 48).bfloat16()}, r"v has dtype bfloat16 and q float16; .*same"),
    ({"k": half(1, 2, 24, 32)}, r"k has a batch of 1 and q of 2; .*equal"),
    ({"v": half(1, 2, 24, 48)}, r"v has a batch of 1 and q of 2; .*equal"),
    ({"v": half(2, 1, 24, 48)}, r"v has a number of heads of 1 and k of 2; .*equal"),
    ({"v": half(2, 2, 23, 48)}, r"v has a length of 23 and k of 24; .*equal"),
    ({"k": half(2, 2, 24, 24)}, r"k has a head dim of 24 and q of 32; .*equal"),
    ({"q": half(2, 3, 16, 32)}, r"q has 3 heads and k 2; .* k must divide that of q"),
    ({"q": half(2, 1, 16, 32)}, r"q has 1 head and k 2; .* k must divide"),
    ({"k": half(2, 0, 24, 32), "v": half(2, 0, 24, 48)}, r"q has 4 heads and k 0; .* must divide"),
    ({"q": half(2, 4, 16, 0), "k": half(2, 2, 24, 0)}, r"q has a head dim of 0; .*1\.\.576"),
    ({"q": half(2, 4, 16, 577), "k": half(2, 2, 24, 577)}, r"q has a head dim of 577; .*1\.\.576"),
    *(({"v": half(2, 2, 24, n)}, rf"v has a head dim of {n}; .*1\.\.512") for n in (0, 513)),
    # Sizes beyond 32 bits, and grids beyond Metal's
    (wide(q=2**31 - 1023), r"q has a length of 2147482625; it must be in 0\.\.2147482624"),
    (wide(k=2**31), r"k has a length of 2147483648; it must be in 0\.\.2147482624"),
    (wide(heads=2**31), r"q has a number of heads of 2147483648; it must be"),
    (wide(batch=2**31), r"q has a batch of 2147483648; it must be in 0\.\."),
    (
        wide(q=2**30, columns=256),
        "q has a length of 1073741824; with head dims 256 and 256 it must be at most 536870880",
    ),
    (wide(2**20, 1, 2**20, 2**19), r"q has 5.76461e\+17 rows; .* fewer than 2\^63 bytes"),
]
# Rows for dense and for packed sequences.
OPTIONS = [
    ({"softmax_scale": math.nan}, r"softmax_scale is nan; .*finite"),
    ({"softmax_scale": 1e39}, r"softmax_scale is 1e\+39; .*finite in float32"),
    ({"softcap": math.nan}, r"softcap is nan; it must be 0 \(off\) or positive"),
    ({"softcap": -1.0}, r"softcap is -1; it must be 0 \(off\)"),
    ({"softcap": 1e39}, r"softcap is 1e\+39; .*finite in float32"),
    ({"softcap": 1e-60}, r"softcap is 1e-60; .*positive .*in float32"),
    ({"causal": True, "window_size_right": 3}, "window_size_right is 3 .*; leave it at -1"),
    ({"attention_chunk": -1}, r"attention_chunk is -1; .*0 \(off\) or in 1\.\."),
    ({"attention_chunk": LONGEST + 1}, rf"attention_chunk is {LONGEST + 1}; .*in 1\.\.{LONGEST}"),
    ({"q_offset": LONGEST + 1}, rf"q_offset is {LONGEST + 1}; .*in -{LONGEST}\.\.{LONGEST}"),
    ({"q_offset": -(2**63)}, r"q_offset is -9223372036854775808; .*in -"),
    *(({n: ints(3, 3, 3)}, rf"{n} has shape \(3,\); it must be \(2,\)") for n in LENGTHS),
    ({"attn_bias": bools(16, 24)}, r"attn_bias has dtype bool; .*float32"),
    (dict.fromkeys(("attn_mask", "attn_bias"), half(16, 24)), ".* is floating .*; pass their sum"),
    ({"attn_mask": bools(16, 25)}, r"attn_mask has shape \(16, 25\); .*broadcast"),
    ({"attn_mask": bools(2, 2, 16, 24)}, r"attn_mask has shape .*\(2, 4, 16"),  # a mask by KV heads
    ({"attn_mask": bools(2, 24)}, r"attn_mask has shape \(2, 24\); "),  # a padding mask
    ({"attn_mask": bools(16, 0)}, r"attn_mask has shape \(16, 0\); .*broadcast"),
    ({"attn_bias": half(3, 1, 1, 1)}, r"attn_bias has shape \(3, 1, 1, 1\); it must broadcast to"),
    ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes has shape \(2,\); .*\(4,\) or \(2, 4\)"),
    ({"alibi_slopes": torch.zeros(1, 4)}, r"alibi_slopes has shape \(1, 4\)"),
    ({"learnable_sink": half(2)}, r"learnable_sink has shape \(2,\); it must be \(4,\)"),
    ({"q_rotary_cos": torch.ones(24, 8)}, "only one of q_rotary_cos and q_rotary_sin"),
    ({"k_rotary_sin": torch.ones(24, 8)}, "only one of k_rotary_cos and k_rotary_sin"),
    ({"rotary_interleaved": True}, r"rotary_interleaved is True and no rotary table is given"),
    (tables((16, 8)) | {"q_rotary_sin": half(16, 8)}, "q_rotary_sin is float16 .* float32 with 8"),
    (tables((16, 8), (24, 4)), "k_rotary_cos is float32 with 4 columns .* float32 with 8; .*same"),
    (tables((15, 8)), r"q_rotary_cos has shape \(15, 8\); .* at least 16 and R in 2\.\.32"),
    (tables(None, (23, 8)), r"k_rotary_cos has shape \(23, 8\); .* length of at least 24"),
    (tables((16, 8)) | {"q_rotary_sin": torch.ones(15, 8)}, r"q_rotary_sin has shape \(15, 8\); "),
    (tables((16, 17)), r"q_rotary_cos has shape \(16, 17\); .*R in 2\.\.32"),
    (tables((16, 0)), r"q_rotary_cos has shape \(16, 0\); "),
    (tables((3, 16, 8)), r"q_rotary_cos has shape \(3, 16, 8\); .*\(2, length, R / 2"),
    *((state(dropout_p=p), rf"dropout_p is {p}; it must be in 0\.\.1") for p in (-0.1, math.nan)),
    (
        {"dropout_p": 0.1},
        r"dropout_p is 0\.1 and rng_state is None; pass rng_state if dropout_p > 0",
    ),
    (
        state(dropout_p=0.0),
        r"dropout_p is 0 and rng_state is given; pass rng_state if dropout_p > 0, and only then",
    ),
    (state(torch.tensor([1, 2, 3])), r"rng_state has shape \(3,\); it must be \(2,\)"),
]
PACKED = [
    (dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ints()), "cu_seqlens_q is empty; .*contain 0"),
    ({"cu_seqlens_k": ints(0, 34)}, "cu_seqlens_k has a length of 2 and cu_seqlens_q of 3; .*equa"),
    ({"max_seqlen_q": -1}, r"max_seqlen_q is -1; it must be in 0\.\."),
    ({"max_seqlen_k": 2**31}, rf"max_seqlen_k is 2147483648; it must be in 0\.\.{LONGEST}"),
    ({"v": half(33, 2, 48)}, r"v has a length of 33 and k of 34; they must be equal"),
    ({"k": half(34, 3, 32), "v": half(34, 3, 48)}, r"q has 4 heads and k 3; .* must divide"),
    ({"attn_mask": bools(20, 34)}, r"attn_mask has shape \(20, 34\); .*to \(2, 4, 16, 24\)"),
]
# Values of tensors.
DATA = [
    ({name: ints(0, value)}, rf"{name}\[1\] is {value}; .*in 0\.\.24, because")
    for name in LENGTHS
    for value in (-1, 25)
]
PACKED_DATA = [
    ({"cu_seqlens_q": ints(1, 16, 20)}, r"cu_seqlens_q\[0\] is 1; it must be 0"),
    ({"cu_seqlens_q": ints(0, 16, 15)}, r"cu_seqlens_q\[2\] is 15 and .* 16; .*not decrease"),
    ({"cu_seqlens_k": ints(0, 11, 35)}, r"the last .* cu_seqlens_k is 35 .* 34 rows; .* 34"),
    ({"cu_seqlens_k": ints(0, 2**31 - 1, -(2**31))}, r"cu_seqlens_k .*(decrease|longer)"),
    ({"max_seqlen_q": 15}, r"cu_seqlens_q has a sequence of 16 rows and max_seqlen_q is 15; no"),
    *(
        ({n: ints(11, 24)}, rf"{n}\[0\] is 11; .*in 0\.\.10, because sequence 0 has 10 keys")
        for n in LENGTHS
    ),
]
SHAPES = [(dense, *row) for row in OPERANDS + OPTIONS]
SHAPES += [(packed, *row) for row in PACKED + OPTIONS]
VALUES = [(dense, *row) for row in DATA] + [(packed, *row) for row in DATA + PACKED_DATA]


def split(make, changes):
    tensors = make()
    options = {name: value for name, value in changes.items() if name not in tensors}
    return tensors | {name: changes[name] for name in tensors if name in changes}, options


@each_case("make, changes, message", SHAPES + VALUES)
def test_invalid_arguments_are_refused(make, changes, message):
    with refused(f"^{message}"):
        call("op", *split(make, changes))


@each_case("make, changes, message", SHAPES[::9] + VALUES[::9])
def test_refused_in_the_simulator_before_anything_runs(make, changes, message):
    tensors, options = split(make, changes)
    with simulate(check=True) as run, refused(f"^{message}"):
        call("op", tensors, options)
    assert not run.launches


@each_case("make, changes, message", SHAPES[::9])
def test_invalid_meta_tensors_are_refused_alike(make, changes, message):
    arguments = split(make, changes)
    fake = partial(call, "op", *map(without_data, arguments))
    refused_alike(f"^{message}", partial(call, "explain", *arguments), fake)


@each_case("make, changes, message", SHAPES[::60])
def test_invalid_arguments_are_refused_while_compiling(make, changes, message):
    tensors, options = split(make, changes)
    compiled = torch.compile(lambda: call("op", tensors, options), backend="eager")
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
        compiled()


@pytest.mark.parametrize("make", [dense, packed])
def test_symbolic_sizes_are_checked_at_run_time(make):
    tensors = make()

    @torch.compile(backend="eager", dynamic=True)
    def compiled(*values):
        return call("op", dict(zip(tensors, values, strict=True)), {})

    torch.compiler.reset()
    compiled(*tensors.values())
    tensors["v"] = tensors["v"][:, :1]
    with refused("v has a number of heads of 1 and k of 2; they must be equal"):
        compiled(*tensors.values())


def good_options():
    return {
        "seqused_k": ints(3, 4),
        "leftpad_k": ints(0, 1),
        "attn_mask": bools(2, 4, 16, 24),
        "attn_bias": torch.zeros(2, 4, 16, 24),
        "alibi_slopes": torch.zeros(2, 4),
        "learnable_sink": torch.zeros(4),
        **state(),
        **tables((16, 8), (24, 8)),
    }


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("make", [dense, packed])
def test_valid_arguments_are_accepted(make):
    """This shows that each refusal above is caused only by the changed argument."""
    tensors, options = make(), good_options()
    for where in NAMESPACES:
        call(where, tensors, options)
    out, lse = call("op", without_data(tensors), without_data(options))
    assert (out.shape, lse.shape) == tuple(tensor.shape for tensor in call("op", tensors, options))


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias", "learnable_sink"])
def test_sparse_tensors_are_refused(name):
    good = dense() | good_options()
    with refused(rf"{name} is sparse .* {name}\.to_dense\(\)"):
        call("explain", *split(dense, good_options() | {name: good[name].to_sparse()}))


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("make", [dense, packed])
def test_numbers_at_their_limits_are_accepted(make):
    for options in (
        {"q_offset": LONGEST},
        {"q_offset": -LONGEST},
        {"attention_chunk": LONGEST},
        {"window_size_left": 2**63 - 1, "window_size_right": 2**63 - 1},
        {"window_size_left": -(2**63), "window_size_right": -(2**63)},
        {"causal": True, "window_size_right": 0},
        {"causal": True, "window_size_right": -7},
        {"softcap": 1e30},
        {"softmax_scale": -1e30},
    ):
        for where in NAMESPACES:
            call(where, make(), options)
