"""What flash_bwd and flash_varlen_bwd refuse: the ValueError names the argument, its value, why."""

import re

import pytest
import torch

from tests.attention.flash_fwd_options import ints
from tests.attention.head_dims import HOME
from tests.helpers.cases import each_case
from tests.helpers.refused import refused, refused_alike, without_data
from torch_metal_attn import simulate

# On the CPU the op itself is the reference here: it must refuse what the shaders would.
OPS = {
    "op": (torch.ops.metal_attn, ""),
    "explain": (torch.ops.metal_attn, "_explain"),
    "simulator": (torch.ops.metal_attn_simulator, ""),
}


def dense():
    """Two sequences of 4 query heads and 2 KV heads, 16 queries and 24 keys."""
    q, k, v = torch.randn(2, 4, 16, 32), torch.randn(2, 2, 24, 32), torch.randn(2, 2, 24, 48)
    tensors = {"dout": torch.randn(2, 4, 16, 48), "q": q, "k": k, "v": v}
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    statistics = {"dlse": torch.randn(2, 4, 16), "softmax_lse": torch.randn(2, 4, 16)}
    return tensors | {"out": torch.randn(2, 4, 16, 48).half()} | statistics


def packed():
    """Two sequences of 16 and 4 queries, and of 10 and 24 keys."""
    shapes = {"dout": (20, 4, 48), "q": (20, 4, 32), "k": (34, 2, 32), "v": (34, 2, 48)}
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    statistics = {"dlse": torch.randn(4, 20), "softmax_lse": torch.randn(4, 20)}
    ends = {"cu_seqlens_q": ints(0, 16, 20), "cu_seqlens_k": ints(0, 10, 34)}
    longest = {"max_seqlen_q": 16, "max_seqlen_k": 24}
    return tensors | {"out": torch.randn(20, 4, 48).half()} | statistics | ends | longest


def call(where, arguments):
    namespace, suffix = OPS[where]
    name = "flash_varlen_bwd" if "cu_seqlens_q" in arguments else "flash_bwd"
    return getattr(namespace, name + suffix)(**arguments)


def change(name, how):
    return lambda arguments: {name: how(arguments[name])}


def last_stride_2(tensor):
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def rows_apart(tensor):
    return torch.stack([tensor, tensor], -2).flatten(-3, -2)[..., ::2, :]


# What makes good arguments bad, and the message.
BOTH = {
    "dout dtype": (
        change("dout", torch.Tensor.float),
        r"dout has dtype float32 and q float16; .*alike",
    ),
    "out dtype": (
        change("out", torch.Tensor.bfloat16),
        r"out has dtype bfloat16 and q float16; .*alike",
    ),
    "all but q": (change("q", torch.Tensor.float), r"k has dtype float16 and q float32; .*alike"),
    "dout last stride": (
        change("dout", last_stride_2),
        r"dout has .*last.*stride|dout has strides",
    ),
    "out last stride": (change("out", last_stride_2), r"out has .*last.*stride|out has strides"),
    "dout one number": (
        lambda a: {"dout": torch.ones(()).half().expand(a["dout"].shape)},
        r"dout has .*stride",
    ),
    "lse dtype": (
        change("softmax_lse", torch.Tensor.double),
        r"softmax_lse has dtype float64; it must be float32",
    ),
    "lse half": (
        change("softmax_lse", torch.Tensor.half),
        r"softmax_lse has dtype float16; it must be float32",
    ),
    "dlse dtype": (
        change("dlse", torch.Tensor.bfloat16),
        r"dlse has dtype bfloat16; it must be float32",
    ),
    "dout shape": (
        change("dout", lambda t: t[..., :32].contiguous()),
        r"dout has shape \(.*, 32\); it must be .*48\)",
    ),
    "out of q's head dim": (
        change("out", lambda t: t[..., :32].contiguous()),
        r"out has shape \(.*, 32\); it must be .*48\)",
    ),
    "dout rank": (change("dout", lambda t: t[0]), r"dout has shape .*; it must be"),
    "out rank": (change("out", lambda t: t[None]), r"out has shape .*; it must be"),
    "lse rank": (change("softmax_lse", lambda t: t[..., None]), r"softmax_lse has shape .*must be"),
    "dlse of a head": (change("dlse", lambda t: t[:1]), r"dlse has shape .*; it must be"),
    "lse strides": (
        change("softmax_lse", last_stride_2),
        r"softmax_lse has strides \(.*\); it must be contiguous: pass what",
    ),
    "lse expanded": (
        change("softmax_lse", lambda t: t[..., :1].expand(t.shape)),
        r"softmax_lse has strides \(.*\); it must be contiguous",
    ),
    "dout on meta": (
        change("dout", lambda t: t.to("meta")),
        r"dout is on meta and q on cpu; they must be on one device",
    ),
    "lse on meta": (
        change("softmax_lse", lambda t: t.to("meta")),
        r"softmax_lse is on meta and q on cpu; they must be on one device",
    ),
    "options too": (lambda a: {"softcap": -1.0}, r"softcap is -1; "),
}
DENSE = {
    "dout batch": (change("dout", lambda t: t[:1]), r"dout has shape \(1, 4, 16, 48\); it must be"),
    "dout length": (
        change("dout", lambda t: t[:, :, :15]),
        r"dout has shape \(2, 4, 15, 48\); it must be \(2, 4, 16, 48\)",
    ),
    "out of kv heads": (
        change("out", lambda t: t[:, :2]),
        r"out has shape \(2, 2, 16, 48\); it must be \(2, 4, 16, 48\)",
    ),
    "lse transposed": (
        change("softmax_lse", lambda t: t.transpose(1, 2)),
        r"softmax_lse has shape \(2, 16, 4\); it must be \(2, 4, 16\)",
    ),
    "k": (change("k", lambda t: t[:, :, :9]), r"v has a length of 24 and k of 9; .*equal"),
}
PACKED = {
    "dout rows": (change("dout", lambda t: t[:19]), r"dout has shape \(19, 4, 48\); it must be"),
    "lse of rows": (
        change("softmax_lse", lambda t: t.t().contiguous()),
        r"softmax_lse has shape \(20, 4\); it must be \(4, 20\)",
    ),
    "ends": (
        lambda a: {"cu_seqlens_k": ints(0, 24, 10)},
        r"cu_seqlens_k\[2\] is 10 and the one before 24; .*decrease",
    ),
}
CASES = [
    (make, *case)
    for make, cases in ((dense, BOTH | DENSE), (packed, BOTH | PACKED))
    for case in cases.values()
]


@each_case("make, bad, message", CASES)
def test_refused(make, bad, message):
    arguments = make()
    arguments |= bad(arguments)
    with simulate(check=True) as run, refused(message) as caught:
        call("op", arguments)
    named = re.match(r"(\w+)(\[2\])? (has|is) ", str(caught.value))
    assert named, f"the message does not begin with the argument: {caught.value}"
    assert named[1] in arguments
    assert not run.launches


@each_case("make, bad, message", CASES)
def test_refused_without_data(make, bad, message):
    arguments = make()
    arguments |= bad(arguments)
    if "cu_seqlens_k\\[" in message or " meta" in message or "storage" in message:
        return  # needs data
    meta = without_data(arguments)
    refused_alike(message, lambda: call("explain", arguments), lambda: call("op", meta))


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("make", [dense, packed])
@pytest.mark.parametrize("where", OPS)
def test_good_is_good(make, where):
    """So that each test above fails for the one thing it changes."""
    with simulate(check=True):
        call(where, make())
        call(where, make() | {"dlse": None})


@pytest.mark.parametrize("make", [dense, packed])
def test_strided_gradients_are_good(make):
    """Rows apart, and a log-sum-exp's gradient of any strides."""
    # Columns of HOME, whose kernels other tests compile.
    arguments = {
        name: value[..., :HOME].contiguous() if name in ("dout", "q", "k", "v", "out") else value
        for name, value in make().items()
    }
    arguments["dout"] = rows_apart(arguments["dout"])
    arguments["out"] = rows_apart(arguments["out"])
    arguments["dlse"] = last_stride_2(arguments["dlse"])
    with simulate(check=True):
        found = call("simulator", arguments)
        expected = call(
            "simulator",
            {
                name: value.contiguous() if torch.is_tensor(value) else value
                for name, value in arguments.items()
            },
        )
    for gradient, whole in zip(found, expected, strict=True):
        assert torch.equal(gradient, whole)


@pytest.mark.parametrize("name", ["dout", "out", "softmax_lse", "dlse", "q"])
@pytest.mark.parametrize("where", OPS)
@pytest.mark.parametrize("bytes_left", [0, 100])
def test_storage_that_was_resized(name, where, bytes_left):
    """Nothing is read beyond a storage that no longer holds the tensor."""
    arguments = dense()
    arguments[name].untyped_storage().resize_(bytes_left)
    with refused(rf"{name} has shape .* a storage of {bytes_left} bytes"):
        call(where, arguments)


@pytest.mark.parametrize("name", ["dout", "out", "softmax_lse", "q"])
@pytest.mark.parametrize("where", OPS)
def test_none(name, where):
    with refused(rf"{name} is None; it must be a tensor"):
        call(where, dense() | {name: None})
