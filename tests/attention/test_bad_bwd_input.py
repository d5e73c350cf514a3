"""Errors of the backward ops: the ValueError names the argument, its value and the rule.

tests/common/test_bad_options.py has the errors that the forward ops raise too.
"""

from functools import partial

import pytest
import torch

from tests.attention.held_cases import HOME
from tests.common.test_bad_options import NAMESPACES, ints, strided
from tests.helpers.cases import each_case
from tests.helpers.refused import refused, refused_alike, without_data
from torch_metal_attn import simulate


def arguments(q, k, v, out, lse):
    """Random tensors of these shapes."""
    halves = {"dout": out, "q": q, "k": k, "v": v, "out": out}
    statistics = {name: torch.randn(lse) for name in ("dlse", "softmax_lse")}
    return {name: torch.randn(shape).half() for name, shape in halves.items()} | statistics


def dense():
    shapes = (2, 4, 16, 32), (2, 2, 24, 32), (2, 2, 24, 48), (2, 4, 16, 48), (2, 4, 16)
    return arguments(*shapes)


def packed():
    tensors = arguments((20, 4, 32), (34, 2, 32), (34, 2, 48), (20, 4, 48), (4, 20))
    ends = {"cu_seqlens_q": ints(0, 16, 20), "cu_seqlens_k": ints(0, 10, 34)}
    return tensors | ends | {"max_seqlen_q": 16, "max_seqlen_k": 24}


def with_delta(name, value):
    arguments = dense()
    arguments["delta"] = arguments.pop("dlse")
    del arguments["out"]
    return arguments | {name: value}


bias = partial(with_delta, "attn_bias", torch.zeros(16, 24))
slopes = partial(with_delta, "alibi_slopes", torch.zeros(4))


def call(where, arguments):
    name = "flash_varlen_bwd" if "cu_seqlens_q" in arguments else "flash_bwd"
    if "delta" in arguments:
        name += "_slopes" if "alibi_slopes" in arguments else "_bias"
    return getattr(NAMESPACES[where], name)(**arguments)


# An argument, the function that makes it invalid, and the error message after the argument's name.
# Other wrong dtypes, ranks and strides are in tests/common/test_small_ops_refused.py.
FLOAT32 = torch.Tensor.float, " has dtype float32 and q float16; .*same"
BOTH = [
    *(("dout", *FLOAT32), ("out", *FLOAT32)),
    *(
        (name, lambda x: x[..., :15].clone(), r" has shape \(.*, 15\); it must be ")
        for name in ("dout", "out", "softmax_lse", "dlse")
    ),
    ("softcap", lambda _: -1.0, r" is -1; "),
]
DENSE = [
    ("dout", lambda x: x[:, :, :15], r" has shape \(2, 4, 15, 48\); it must be \(2, 4, 16, 48\)"),
    ("out", lambda x: x[:, :2], r" has shape \(2, 2, 16, 48\); it must be \(2, 4, 16, 48\)"),
    ("v", lambda x: x[:, :, :9], r" has a length of 9 and k of 24; .*equal"),
]
BIAS = [
    ("attn_bias", lambda _: None, " is None"),
    ("attn_bias", lambda _: torch.ones(16, 24, dtype=torch.bool), " has dtype bool"),
    ("dout", lambda x: x[..., :32].clone(), " has shape"),
    ("softmax_lse", lambda x: x[..., :9], " has shape"),
    ("normalisers", lambda _: torch.zeros(0), " has shape"),
]
CASES = [
    *((make, *row) for make in (dense, packed) for row in BOTH),
    *((dense, *row) for row in DENSE),
    (packed, "softmax_lse", lambda x: x.mT.clone(), r" has shape \(20, 4\); it must be \(4, 20\)"),
    *((bias, *row) for row in BIAS),
    (slopes, "softmax_lse", lambda x: x[..., :9], " has shape"),
]


@each_case("make, name, invalidate, message", CASES)
def test_invalid_arguments_are_refused(make, name, invalidate, message):
    arguments = make()
    arguments[name] = invalidate(arguments.get(name))
    meta = without_data(arguments)
    with simulate(check=True) as run:
        calls = [partial(call, "op", x) for x in (arguments, meta)]
        refused_alike(f"^{name}{message}", *calls)
    assert not run.launches


@pytest.mark.parametrize("where", NAMESPACES)
def test_invalid_arguments_are_refused_in_every_namespace(where):
    required = ("dout", "out", "softmax_lse", "q")
    nothing = [(name, lambda _: None, " is None; it must") for name in required]
    for name, invalidate, message in (*nothing, *BOTH[::3]):
        arguments = dense()
        arguments[name] = invalidate(arguments.get(name))
        with refused(f"^{name}{message}"):
            call(where, arguments)
    with refused(r"^cu_seqlens_k\[2\] is 10 and cu_seqlens_k\[1\] is 24; .*decrease"):
        call(where, packed() | {"cu_seqlens_k": ints(0, 24, 10)})


@pytest.mark.parametrize("make", [dense, packed])
def test_strides_of_gradients_do_not_change_results(make):
    # With HOME columns, other tests compile the same kernels.
    arguments = {
        name: value[..., :HOME].contiguous() if name in ("dout", "q", "k", "v", "out") else value
        for name, value in make().items()
    }
    arguments["exact_delta"] = True
    views = {n: arguments[n].repeat_interleave(2, -2)[..., ::2, :] for n in ("dout", "out")}
    with simulate(check=True):
        expected = call("op", arguments)
        actual = call("op", arguments | views | {"dlse": strided(arguments["dlse"])})
    assert all(map(torch.equal, actual, expected))
