"""What flash_fwd itself refuses: the ValueError names the argument, its value and the rule."""

import re
from functools import partial

import pytest
import torch

import torch_metal_attn
from tests.helpers.cases import each_case
from tests.helpers.refused import refused, refused_alike, without_data

SHAPES = {"q": (2, 4, 16, 32), "k": (2, 2, 24, 32), "v": (2, 2, 24, 48)}

# flash_fwd on the CPU is the reference here: it must refuse what the shaders would.
flash_fwd = torch.ops.metal_attn.flash_fwd
explain = torch.ops.metal_attn.flash_fwd_explain
simulator = torch.ops.metal_attn_simulator.flash_fwd
OPS = {"flash_fwd": flash_fwd, "explain": explain, "simulator": simulator}


def good():
    return {name: torch.randn(shape, dtype=torch.float16) for name, shape in SHAPES.items()}


def huge(*shape):
    """A tensor of any size: one element, seen everywhere."""
    return torch.zeros(1, dtype=torch.float16).expand(*shape[:-1], 1).expand(shape)


def last_stride_2(tensor):
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def replaced(name, change):
    return lambda arguments: {name: change(arguments[name])}


def of_length(length):
    """q, k or v whose lengths are far beyond memory: 8 elements, seen everywhere."""
    return torch.zeros(8, dtype=torch.float16).expand(1, 1, length, 8)


def of_heads(heads):
    return torch.zeros(8, dtype=torch.float16).expand(1, heads, 1, 8)


def of_batch(batch):
    return torch.zeros(8, dtype=torch.float16).expand(batch, 1, 1, 8)


def all_three(make, size):
    return lambda arguments: {name: make(size) for name in "qkv"}


BAD = {
    # Rank
    "q rank 3": (replaced("q", lambda t: t[0]), r"q has 3 dimensions, shape \(4, 16, 32\); .* 4"),
    "q rank 5": (
        replaced("q", lambda t: t[None]),
        r"q has 5 dimensions, shape \(1, 2, 4, 16, 32\)",
    ),
    "q scalar": (replaced("q", lambda t: t.sum()), r"q has 0 dimensions"),
    "k rank 3": (replaced("k", lambda t: t[0]), r"k has 3 dimensions, .* 4: \(batch, kv_heads"),
    "v rank 3": (replaced("v", lambda t: t[0]), r"v has 3 dimensions, .* 4: \(batch, kv_heads"),
    # Device and layout
    "q sparse": (replaced("q", lambda t: t.to_sparse()), r"q is sparse .* q\.to_dense\(\)"),
    "k sparse": (replaced("k", lambda t: t.to_sparse()), r"k is sparse .* k\.to_dense\(\)"),
    # Dtype
    "q float64": (replaced("q", lambda t: t.double()), r"q has dtype float64; .*float32, float16"),
    "all int32": (
        lambda a: {name: tensor.int() for name, tensor in a.items()},
        r"q has dtype int32; it must be float32, float16 or bfloat16",
    ),
    "all complex": (
        lambda a: {name: tensor.to(torch.complex64) for name, tensor in a.items()},
        r"q has dtype ComplexFloat; it must be",
    ),
    "k float32": (
        replaced("k", lambda t: t.float()),
        r"k has dtype float32 and q float16; .*alike",
    ),
    "v bfloat16": (
        replaced("v", lambda t: t.bfloat16()),
        r"v has dtype bfloat16 and q float16; .*alike",
    ),
    # Batch and heads
    "k batch": (replaced("k", lambda t: t[:1]), r"k has a batch of 1 and q of 2; .*equal"),
    "v batch": (replaced("v", lambda t: t[:1]), r"v has a batch of 1 and q of 2; .*equal"),
    "v heads": (
        replaced("v", lambda t: t[:, :1]),
        r"v has a number of heads of 1 and k of 2; .*equal",
    ),
    "heads do not divide": (
        replaced("q", lambda t: t[:, :3]),
        r"q has 3 heads and k 2; k's must divide q's",
    ),
    "more kv heads": (replaced("q", lambda t: t[:, :1]), r"q has 1 heads and k 2; k's must divide"),
    "no kv heads": (
        lambda a: {"k": a["k"][:, :0], "v": a["v"][:, :0]},
        r"q has 4 heads and k 0; k's must divide q's",
    ),
    # Lengths
    "v length": (
        replaced("v", lambda t: t[:, :, :23]),
        r"v has a length of 23 and k of 24; .*equal",
    ),
    # Head dims
    "k head dim": (
        replaced("k", lambda t: t[..., :24]),
        r"k has a head dim of 24 and q of 32; .*equal",
    ),
    "head dim 0": (
        lambda a: {"q": a["q"][..., :0], "k": a["k"][..., :0]},
        r"q has a head dim of 0; it must be in 1..576",
    ),
    "head dim 577": (
        lambda a: {name: torch.zeros(*a[name].shape[:-1], 577).half() for name in "qk"},
        r"q has a head dim of 577; it must be in 1..576",
    ),
    "v head dim 0": (
        replaced("v", lambda t: t[..., :0]),
        r"v has a head dim of 0; it must be in 1..512",
    ),
    "v head dim 513": (
        replaced("v", lambda t: torch.zeros(*t.shape[:-1], 513).half()),
        r"v has a head dim of 513; it must be in 1..512",
    ),
    # Strides
    "q last stride": (
        replaced("q", last_stride_2),
        r"q has strides \(4096, 1024, 64, 2\); the last must be 1: call q\.contiguous\(\) first",
    ),
    "k last stride": (replaced("k", last_stride_2), r"k has strides .* k\.contiguous\(\)"),
    "v last stride": (
        replaced("v", lambda t: t[..., :1].expand(*t.shape)),
        r"v has strides \(2304, 1152, 48, 0\); the last must be 1: call v\.contiguous\(\) first",
    ),
    # Scale
    "scale nan": (lambda a: {"softmax_scale": float("nan")}, r"softmax_scale is nan; .*finite"),
    "scale inf": (lambda a: {"softmax_scale": float("-inf")}, r"softmax_scale is -inf; .*finite"),
    "scale beyond float32": (
        lambda a: {"softmax_scale": 1e39},
        r"softmax_scale is 1e\+39; .*finite",
    ),
    # Sizes beyond 32 bits, and grids beyond Metal's
    "q length": (
        lambda a: {"q": of_length(2**31 - 1023), "k": of_length(1), "v": of_length(1)},
        r"q has a length of 2147482625; it must be in 0..2147482624",
    ),
    "k length": (
        lambda a: {"q": of_length(1), "k": of_length(2**31), "v": of_length(2**31)},
        r"k has a length of 2147483648; it must be in 0..2147482624",
    ),
    "heads 2**31": (
        all_three(of_heads, 2**31),
        r"q has a number of heads of 2147483648; it must be",
    ),
    "batch 2**31": (all_three(of_batch, 2**31), r"q has a batch of 2147483648; it must be in 0.."),
    "grid": (
        lambda a: {
            "q": torch.zeros(256).half().expand(1, 1, 2**30, 256),
            "k": torch.zeros(1, 1, 1, 256).half(),
            "v": torch.zeros(1, 1, 1, 256).half(),
        },
        r"q has a length of 1073741824; with head dims 256 and 256 it must be at most 1073741792",
    ),
    "out of 2**63 bytes": (
        lambda a: {
            "q": torch.zeros(8, dtype=torch.float16).expand(2**19, 2**20, 2**20, 8),
            "k": torch.zeros(8, dtype=torch.float16).expand(2**19, 1, 1, 8),
            "v": torch.zeros(8, dtype=torch.float16).expand(2**19, 1, 1, 8),
        },
        r"q has 5.76461e\+17 rows; out would be over 2\^63 bytes",
    ),
}


@each_case("name", BAD)
def test_refused_by_the_op(name):
    change, message = BAD[name]
    arguments = good()
    arguments |= change(arguments)
    with refused(message) as caught:
        flash_fwd(**arguments)
    named = re.match(r"(q|k|v|softmax_scale) (has|is) ", str(caught.value))
    assert named, "the message does not begin with the argument"


def test_good_is_good():
    """So that each test above fails for the one thing it changes."""
    out, lse = torch.ops.metal_attn.flash_fwd(**good())
    assert out.shape == (2, 4, 16, 48)
    assert lse.shape == (2, 4, 16)


@each_case("name", BAD)
def test_refused_before_anything_runs(name):
    arguments = good()
    arguments |= BAD[name][0](arguments)
    tensors = [arguments.pop(name) for name in "qkv"]
    with (
        torch_metal_attn.simulate(check=True) as run,
        refused(BAD[name][1]),
    ):
        torch.ops.metal_attn.flash_fwd(*tensors, **arguments)
    assert not run.counters


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("op", OPS)
def test_none(name, op):
    with refused(rf"{name} is None; it must be a tensor"):
        OPS[op](**good() | {name: None})


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bytes_left", [0, 100])
def test_storage_that_was_resized(name, op, bytes_left):
    """Nothing is read beyond a storage that no longer holds the tensor."""
    arguments = good()
    arguments[name].untyped_storage().resize_(bytes_left)
    with refused(rf"{name} has shape .* a storage of {bytes_left} bytes"):
        OPS[op](**arguments)


@pytest.mark.parametrize("op", ["flash_fwd", "explain"])
def test_dtypes_without_a_name(op):
    for dtype in (torch.bits8, torch.float8_e8m0fnu):
        tensors = [tensor.to(torch.uint8).view(dtype) for tensor in good().values()]
        with refused(r"q has a dtype without .*float32, float16"):
            OPS[op](*tensors)
        with refused(r"k has a dtype without .*float32, float16"):
            OPS[op](good()["q"], *tensors[1:])


@each_case("name", [name for name in BAD if "sparse" not in name])
def test_refused_on_meta(name):
    """In the same words as of tensors with data."""
    arguments = good()
    arguments |= BAD[name][0](arguments)
    given = without_data(arguments)
    refused_alike(BAD[name][1], *(partial(op, **given) for op in (flash_fwd, simulator, explain)))


@pytest.mark.parametrize("name", "qkv")
def test_devices_that_differ(name):
    arguments = good()
    arguments[name] = arguments[name].to("meta")
    words = r" is on (meta and q on cpu|cpu and q on meta); they must be on one device"
    refused_alike(words, *(partial(op, **arguments) for op in OPS.values()))


@pytest.mark.parametrize("name", "qkv")
def test_not_a_tensor(name):
    arguments = good()
    arguments[name] = arguments[name].tolist()
    for op in OPS.values():
        with pytest.raises(RuntimeError, match=rf"'{name}'"):
            op(**arguments)
