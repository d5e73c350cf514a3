"""Refusals of the small ops: a ValueError says what is wrong, and nothing is written."""

import math
from contextlib import nullcontext
from functools import partial

import torch

from tests.attention import test_bad_bwd_input as backward
from tests.cache import test_bad_cache_options as cached
from tests.common import test_bad_options as forward
from tests.common.ops import EXAMPLES, FLEX, Example, call
from tests.helpers.cases import each_case
from tests.helpers.judged import arguments
from tests.helpers.memory import memory_of
from tests.helpers.refused import refused, refused_alike, without_data
from tests.helpers.steps import append
from torch_metal_attn import simulate
from torch_metal_attn.testing.invalidation import invalidate
from torch_metal_attn.testing.judge import ints

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def halves(*shape):
    return torch.zeros(shape, dtype=F16)


def calls(example, arguments):
    for namespace in (torch.ops.metal_attn, torch.ops.metal_attn_explain):
        yield partial(getattr(namespace, example.op), **arguments)


def check(message, example, arguments, meta=True):
    passed = {name: x for name, x in arguments.items() if x is not None or name == "k"}
    written = [memory_of(passed[n]) for n in example.written if passed.get(n) is not None]
    before = [x.clone() for x in written]
    everywhere = [*calls(example, passed)]
    if meta:
        nothing = without_data(passed)
        everywhere.append(lambda: getattr(torch.ops.metal_attn, example.op)(**nothing))
    refused_alike(message, *everywhere)
    assert all(map(torch.equal, written, before))


def _with_options(make):
    return lambda: make() | forward.good_options()


NORMALISERS = {"normalisers": torch.randn(2, 4, 16)}
# Calls of attention. The modules that make their arguments test the other refusals.
ATTENTION = [
    Example("flash_fwd", _with_options(forward.dense)),
    Example("flash_varlen_fwd", _with_options(forward.packed)),
    *(Example("flash_fwd", make) for make in cached.GOOD if make is not cached.packed),
    Example("flash_varlen_fwd", cached.packed),
    Example("flash_bwd", _with_options(backward.dense)),
    Example("flash_varlen_bwd", backward.packed),
    Example("flash_bwd_bias", _with_options(lambda: backward.bias() | NORMALISERS)),
    Example("flash_bwd_slopes", _with_options(backward.slopes)),
]
# Tensors that may have any dtype, number of dimensions or device.
FREE = {f"{way} of {name}" for way in ("dimensions", "device") for name in ("x", "scores")}
FREE |= {"dtype of cache", "dimensions of cache"}
# Tensors that may have any strides.
STRIDED = {"x", "scores", "weights", "cache", "src", "dst", "positions", "seqlen_offsets"}
STRIDED |= {"mask", "attn_mask", "attn_bias", "dlse", "lse_a", "lse_b", "inv_freq"}
STRIDED |= {"indices", "block_table", "k_scale", "v_scale"}
FREE |= {f"strides of {name}" for name in STRIDED}
ROTATED = {f"strides of {name}" for name in ("q", "k", "cos", "sin")}


def _free(example, way, name):
    if example.op in ("rope", "rope_") and f"{way} of {name}" in ROTATED:
        return True
    if example.op.startswith("flex") and name.endswith(("_blocks", "_indices")):
        # The forward saves the lists of queries for the backward, which checks them.
        unread = name.startswith(("q_", "full_q_")) and example.op != "flex_bwd"
        return unread or way == "strides"
    unread = {"flex_fwd": ("q_order",), "flex_bwd_captures": ("kv_order", "q_order")}
    return name in unread.get(example.op, ()) or f"{way} of {name}" in FREE


NAMELESS = ("bits8", "float8_e8m0fnu")  # dtypes that the stable ABI has no names for
WAYS = ("dtype", "dimensions", "device", "strides", "storage")


def each_invalidated():
    """Every way to invalidate each tensor of each op; in attention also dtypes without names."""
    for example in (*EXAMPLES.values(), *ATTENTION, *FLEX.values()):
        for name, x in example.make().items():
            for way in (*WAYS, *(NAMELESS if example in ATTENTION else ())):
                if torch.is_tensor(x) and not _free(example, way, name):
                    yield example, way, name


@each_case("example, way, name", each_invalidated())
def test_an_invalidated_tensor_is_named(example, way, name):
    message = rf"^(\w+ (has dtype \w+|is on \w+) and )?{name} (has|is) .*(it|they|the last) must "
    if way == "device":
        message += rf"|^{name} is on |^\w+ is on cpu and {name} on meta"
    elif way == "storage":
        message = f"^{name} .*storage of"
    invalidated = invalidate(example.make(), f"{way} of {name}")
    # Without the simulator flex_attention on the CPU has no op.
    with simulate(record=True) if example.op.startswith("flex") else nullcontext():
        if way in ("device", "storage"):
            for call in calls(example, invalidated):
                with refused(message):
                    call()
        else:
            check(message, example, invalidated)


ZEROS = ints(0, 0)
MANY_HEADS = zeros(2, 1, 9, 20).expand(2, 2147482624, 9, 20)
STATES = {
    f"{part}_{state}": zeros(*(1,) * len(shape)).expand(shape)
    for part, shape in (("out", (2**30, 3, 16)), ("lse", (3, 2**30)))
    for state in "ab"
}
NO_SPLITS = {"partial_out": zeros(2, 3, 5, 0, 16), "partial_lse": zeros(2, 3, 5, 0)}
VAST = torch.zeros(1, 1).long().expand(2**30, 2**30)
TABLES, ROTARY, CACHES = ("cos", "sin"), ("rotary_cos", "rotary_sin"), ("k_cache", "v_cache")
NO_ROWS = dict.fromkeys(CACHES, halves(4, 2, 0, 64)) | {"block_table": ints(1, 0)[:, None]}
REFUSED = {
    "rope": [
        ({"k": zeros(1, 2, 9, 20)}, r"k has a batch of 1 and q of \d+; .*equal"),
        ({"k": zeros(2, 2, 8, 20)}, r"k has a length of 8 and q of \d+; .*equal"),
        ({"k": zeros(2, 2, 9, 8)}, r"k has a head dim of 8 and q of \d+; .*equal"),
        ({"q": zeros(2, 4, 9, 0), "k": None}, "q has a head dim of 0; it must be at least 1"),
        (dict.fromkeys(TABLES, zeros(3, 13, 8)), "cos has a batch of 3 and q of 2; .* 1 or 2"),
        (
            dict.fromkeys(TABLES, zeros(13, 11)),
            "cos has 11 columns and q has a head dim of 20; cos may have at most 10",
        ),
        ({"sin": zeros(12, 8)}, r"sin has shape \(12, 8\) and cos \(13, 8\); they must be equal"),
        ({"positions": torch.arange(8)}, r"positions has .*; it must be \(9,\), \(1, 9\) or \(2"),
        ({"positions": torch.arange(9), "seqlen_offset": 1}, "seqlen_offset is .* positions"),
        (
            {"positions": torch.arange(9), "seqlen_offsets": ZEROS},
            "seqlen_offsets and positions are",
        ),
        ({"seqlen_offsets": ints(0, 0, 0)}, r"seqlen_offsets has shape \(3,\); it must be \(2,\)"),
        ({"seqlen_offset": 2**40, "seqlen_offsets": ZEROS}, f"seqlen_offset is {2**40}; .*in -214"),
        ({"seqlen_offset": 5}, "seqlen_offset is 5 and q has a length of 9; .* 13, the number"),
        *(({"seqlen_offset": n}, f"seqlen_offset is {n} and q has") for n in (-1, 2**63 - 1)),
    ],
    "rope without k": [
        ({"k": MANY_HEADS}, "q and k have 2147482628 heads together; it must be at most 2147482624")
    ],
    "rope_tables": [
        (
            {"positions": VAST},
            r"positions has shape .*; the tables must have fewer than 2\^63 bytes",
        ),
        ({"attention_factor": 1e39}, "attention_factor is 1e.39; it must be finite"),
        ({"dtype": F64}, "dtype is (Double|float64); it must be float32, float16 or bfloat16"),
    ],
    "merge_state": [
        ({"out_b": zeros(2, 2, 5, 16)}, r"out_b has shape .* 16\); it must be \(2, 3, 5, 16\)"),
        ({"lse_a": zeros(2, 5, 3)}, r"lse_a has shape \(2, 5, 3\); it must be \(2, 3, 5\)"),
        ({"out_a": zeros(2, 3, 5, 528)}, r"out_a has a head dim of 528; it must be in 1\.\.512"),
    ],
    "merge_state packed": [(STATES, "out_a has shape .* may have at most 2147482624 rows")],
    "merge_state_ masked": [
        ({"mask": zeros(2, 3).bool()}, r"mask has shape \(2, 3\); it must be \(2, 5\)")
    ],
    "merge_splits and a sink": [
        (NO_SPLITS, "partial_out has 0 splits; there must be 1 to 1024"),
        (
            {"partial_lse": zeros(2, 3, 5, 3)},
            r"partial_lse has shape \(2, 3, 5, 3\); it must be \(2, 3, 5, 7\)",
        ),
        ({"out_dtype": F64}, r"out_dtype is float64; it must be float32, float16 or bfloat16"),
        ({"learnable_sink": zeros(4)}, r"learnable_sink has shape \(4,\); it must be \(3,\)"),
    ],
    "softmax": [
        *(({"dim": dim}, rf"dim is {dim}; x has 3 dimensions, .* -3\.\.2") for dim in (3, -4)),
        ({"x": torch.tensor(1.0)}, r"dim is 1; x has 0 .* -1\.\.0"),
        (
            {"x": zeros(1).expand(2**31), "dim": 0},
            r"x has a length along dim of 2147483648; it must be in 0\.\.2147482624",
        ),
        (
            {"x": zeros(1, 1, 3).expand(2**20, 2**12, 3), "dim": 2},
            "x has .*; it may have at most 2147482624 rows of 3 values",
        ),
    ],
    "apply_causal_mask_": [
        ({"scores": zeros(3)}, r"scores has 1 dimension, shape \(3,\)"),
        ({"q_offset": 2**31}, r"q_offset is 2147483648; it"),
    ],
    "append_kv": [
        ({"v": halves(2, 2, 4, 64)}, "v has shape"),
        ({"k_cache": halves(2, 3, 32, 64)}, "k has a number of heads of 2 and k_cache of 3; they"),
        ({"v_cache": halves(2, 3, 32, 64)}, "v has a number of heads of 2 and v_cache of 3; they"),
        *(({"v_cache": halves(2, 2, *size)}, "v_cache has shape") for size in ((32, 63), (31, 64))),
        (dict.fromkeys(CACHES, halves(3, 2, 32, 64)), "k_cache has a batch of 3 and k of 2"),
        (
            {"k_cache": zeros(2, 2, 32, 64)},
            "k_cache has dtype .*float32 and k .*float16; they must be the same",
        ),
        ({"k_scale": halves(2, 2, 32, 2), "v_scale": halves(2, 2, 32, 2)}, "k_scale is given"),
        (
            {"k": halves(2, 2, 33, 64), "v": halves(2, 2, 33, 64)},
            "k has a length of 33; .* at most 32",
        ),
        *(({name: ints(1)}, f"{name} has shape") for name in ("cache_seqlens", "leftpad_k")),
        (NO_ROWS, "k_cache has a page size of 0; with block_table it must be at least 1"),
        ({"q": halves(2, 3, 5, 64)}, "q is given and rotary_cos is not"),
        (dict.fromkeys(ROTARY, zeros(0, 4)), "rotary_cos has no rows"),
        (dict.fromkeys(ROTARY, zeros(9, 33)), "rotary_cos has 33 columns"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
    ],
    "append_kv rotated": [
        ({"rotary_sin": None}, "only one of rotary_cos and rotary_sin"),
        ({"rotary_sin": zeros(9, 4)}, "rotary_sin has shape"),
        ({"q": halves(2, 3, 5, 32)}, "q has shape"),
    ],
    "append_kv in pages": [
        ({"v_cache": halves(7, 2, 16, 64)}, "v_scale is given and v_cache has dtype float16"),
        ({"k_scale": None, "v_scale": None}, "k_cache has dtype int8 and k_scale is None"),
        ({"k_scale": halves(7, 2, 16, 1)}, "k_scale has shape"),
        ({"cache_batch_idx": ints(1, 0)}, "cache_batch_idx is given with block_table"),
    ],
    "index_scores": [
        ({"k": zeros(2, 13, 8)}, r"k has shape \(2, 13, 8\)"),
        ({"k": halves(2, 13, 16)}, "k has dtype float16 and q float32"),
        ({"weights": zeros(2, 3, 4)}, r"weights has shape \(2, 3, 4\)"),
        ({"q_offset": 3, "causal": False}, "q_offset is 3 and causal is False"),
        ({"softmax_scale": math.inf}, "softmax_scale is inf"),
    ],
    "flash_decode": [({"max_seqlen_q": 3}, "max_seqlen_q is 3 and cu_seqlens_q is not given")],
    "decode_step packed": [
        (
            {"q": halves(10, 0, 64)},
            "q has shape .*, so there are no queries; with packed rows decode_step needs",
        )
    ],
    "copy_pages": [
        ({"cache": torch.tensor(1.0)}, "cache has no dimensions"),
        ({"dst": ints(4, 5)}, "dst has dtype .* and src"),
        ({"dst": torch.tensor([4])}, "dst has shape"),
    ],
}
REFUSED |= {f"{name}_": REFUSED[name] for name in ("rope", "merge_state", "softmax")}


@each_case("name, row", [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_invalid_arguments_are_refused(name, row):
    changes, message = row
    check(f"^{message}", EXAMPLES[name], EXAMPLES[name].make() | changes)


def test_caches_of_different_dtypes_are_refused():
    message = "v_cache has dtype .*bfloat16 and k_cache .*float32; they must be the same"
    passed = arguments(append(dtype="float32")) | {"v_cache": zeros(2, 2, 64, 64, dtype=BF16)}
    check(message, EXAMPLES["append_kv"], passed)


OVERLAPPING = zeros(9).as_strided((3, 3), (2, 1))
IN_MEMORY = r".* elements may share memory"
# Wrong values of tensors, and memory that an op cannot write.
REFUSED_DATA = {
    "rope_": [
        ({"q": zeros(2, 4, 1, 20).expand(2, 4, 9, 20)}, rf"q has{IN_MEMORY}.*q\.clone\(\)"),
        ({"q": zeros(999).as_strided((2, 4, 9, 20), (400, 99, 11, 1))}, rf"q has{IN_MEMORY}"),
        ({"q": zeros(999).as_strided((2, 4, 9, 20), (1, 200, 20, 1))}, rf"q has{IN_MEMORY}"),
        ({"k": zeros(2, 1, 9, 20).expand(2, 3, 9, 20)}, rf"k has{IN_MEMORY}"),
    ],
    "merge_state_": [({"lse_a": zeros(1, 3, 5).expand(2, 3, 5)}, rf"lse_a has{IN_MEMORY}")],
    "softmax_": [({"x": OVERLAPPING}, rf"x has{IN_MEMORY}")],
    "apply_causal_mask_": [({"scores": OVERLAPPING}, rf"scores has{IN_MEMORY}.*scores\.clone")],
    "append_kv": [
        ({"cache_seqlens": ints(0, 28)}, r"cache_seqlens\[1\] is 28 .* at most 32"),
        ({"cache_seqlens": ints(-1, 0)}, r"cache_seqlens\[0\] is -1"),
        ({"cache_batch_idx": ints(0, 2)}, r"cache_batch_idx\[1\] is 2"),
        ({"cache_batch_idx": ints(1, 1)}, "sequences 0 and 1 both write row 0 of batch 1"),
        ({"leftpad_k": ints(0, -1)}, r"leftpad_k\[1\] is -1"),
        ({"k_cache": halves(1, 2, 32, 64).expand(2, 2, 32, 64)}, "k_cache has .* may share memory"),
    ],
    "append_kv in pages": [
        ({"block_table": ints(0, 99)[:, None].repeat(1, 2)}, r"block_table\[1, 0\] is 99"),
        ({"block_table": ints(3, 3, 3, 3).view(2, 2)}, "sequences 0 and 1 both .* row 0 of page 3"),
    ],
    "append_kv rotated": [
        ({"leftpad_k": ints(0, 5)}, "sequence 1 needs rows -1 to 3 of rotary_cos"),
        ({"q": halves(2, 1, 36, 64)}, "sequence 0 needs rows 2 to 37"),
    ],
    "copy_pages": [
        ({"cache": zeros(1, 4).expand(6, 4)}, "cache has .* may share memory"),
        ({"src": torch.tensor([0, 6])}, r"src\[1\] is 6; it must be in 0..5"),
        ({"dst": torch.tensor([4, 4])}, r"dst\[0\] and dst\[1\] are both 4"),
        ({"dst": torch.tensor([4, 1])}, r"src\[1\] and dst\[1\] are both 1"),
    ],
}


@each_case("name, row", [(name, row) for name, rows in REFUSED_DATA.items() for row in rows])
def test_invalid_values_of_tensors_are_refused(name, row):
    changes, message = row
    check(message, EXAMPLES[name], EXAMPLES[name].make() | changes, meta=False)


def inside(memory, x):
    return memory_of(memory)[: x.nbytes].view(x.dtype).view(x.shape).zero_()


# {example: (the written argument, the arguments that may not share its memory)}
SHARING = {
    "rope_": ("q", ["k", "cos", "sin"]),
    "rope_ by positions": ("q", ["positions"]),
    "merge_state_": ("out_a", ["out_b"]),
    "merge_state_ masked": ("lse_a", ["lse_b", "mask"]),
    "append_kv rotated": ("q", ["k", "v"]),
    "append_kv in pages": ("k_cache", ["v_cache", "k_scale", "block_table"]),
    "copy_pages": ("cache", ["src"]),
}


@each_case(
    "name, written, other",
    [(name, written, other) for name, (written, others) in SHARING.items() for other in others],
)
def test_shared_memory_is_refused(name, written, other):
    arguments = EXAMPLES[name].make()
    arguments[other] = inside(arguments[written], arguments[other])
    with refused(rf"{other} (may share elements with|overlaps the memory of) {written}"):
        getattr(torch.ops.metal_attn, EXAMPLES[name].op)(**arguments)


@each_case("example", EXAMPLES.values())
def test_sparse_tensors_are_refused(example):
    for name in example.differentiable or example.written:
        arguments = example.make()
        if arguments[name] is not None:
            arguments[name] = arguments[name].to_sparse()
            with refused(rf"{name} is sparse.*{name}\.to_dense\(\)"):
                getattr(torch.ops.metal_attn, example.op)(**arguments)


@each_case("example", EXAMPLES.values())
def test_negative_views_are_read_or_refused(example):
    """torch negates some views lazily, such as the imaginary part of a conjugate tensor."""
    op = getattr(torch.ops.metal_attn, example.op)
    for argument in op.default._schema.arguments:
        x = example.make().get(name := argument.name)
        if not torch.is_tensor(x) or not x.is_floating_point():
            continue
        arguments = example.make() | {name: torch._neg_view(-x)}
        if argument.alias_info is None or example.returns_what_it_writes:
            actual, expected = call(arguments, example), call(example.make(), example)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        else:
            with refused(f"^{name} is a view with its negative bit set"):
                op(**arguments)
            assert torch.equal(arguments[name].nan_to_num(), x.nan_to_num())


@each_case("example", EXAMPLES.values())
def test_none_is_refused(example):
    op = getattr(torch.ops.metal_attn, example.op)
    for argument in op.default._schema.arguments:
        if argument.type.kind() == "TensorType":
            with refused(f"{argument.name} is None; it must be a tensor"):
                op(**example.make() | {argument.name: None})
