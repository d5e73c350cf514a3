"""Errors of flex_attention quote the argument, its value and the line of the user's function."""

import contextlib

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest

from tests.common.ops import FLEX
from tests.common.test_bad_options import resized
from tests.flex.flex_check import block_mask, rand
from tests.helpers.cases import each_case
from torch_metal_attn import flex_attention, flex_replaced, simulate
from torch_metal_attn.flex import call
from torch_metal_attn.flex.program import compiled

BIAS = torch.randn(96)
COMPLEX = torch.ones(4, dtype=torch.complex64)
META = torch.empty(4, device="meta")
EMPTY = torch.empty(0)
SQUARE = torch.ones(2, 4, 4)
MANY = [torch.randn(3) for _ in range(13)]


def branches(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return score
    return score + 1


def takes_item(score, b, h, q_idx, kv_idx):
    return score * q_idx.item()


def unknown_op(score, b, h, q_idx, kv_idx):
    return torch.erfinv(score)


# By type of error: messages and functions. Messages about the functions above quote a line of them.
INVALID = {
    RuntimeError: {
        r"asks for the value.*torch.where(?s:.*)if q_idx > kv_idx:": branches,
        r"asks for the value(?s:.*)q_idx.item()": takes_item,
    },
    NotImplementedError: {
        r"uses erfinv(?s:.*)test_bad_flex.py:\d+: return": unknown_op,
        "derivative for aten::heaviside": lambda s, b, h, q, kv: torch.heaviside(s, BIAS[kv]),
        "sum, .* only sums over all": lambda s, b, h, q, kv: s + SQUARE[h].sum(0)[kv],
        "view, .* as another dtype": lambda s, b, h, q, kv: s + SQUARE[q].view(torch.int32)[0],
        "sum, .* has no elements": lambda s, b, h, q, kv: s + SQUARE[h][:0].sum(),
        "mean, .* not in torch.int64": lambda s, b, h, q, kv: s + SQUARE.long()[h].mean(),
        "only scalars can be made of scalars": lambda s, b, h, q, kv: s + s.new_zeros(3)[0],
        "score_mod uses max,": lambda s, b, h, q, kv: s.max(),
        "same random number": lambda s, b, h, q, kv: s + torch.rand(()),
        "has dtype torch.float64": lambda s, b, h, q, kv: s.double(),
        "COMPLEX, which has dtype torch.complex64": lambda s, b, h, q, kv: s + COMPLEX[h].real,
        "scalars index the leading dimensions": lambda s, b, h, q, kv: s + BIAS[None, q],
        "write into a captured tensor": lambda s, b, h, q, kv: s * (BIAS.add_(1) is None),
        "pow.*not in torch.int32": lambda s, b, h, q, kv: s + q**kv,
    },
    ValueError: {
        "13 tensors.*Metal has buffers for 12": lambda s, b, h, q, kv: sum(x[h] for x in MANY),
        "int32 with 1099511627776, which": lambda s, b, h, q, kv: s + torch.full_like(q, 2**40),
        r"BIAS, which has shape \(96,\): index it until a scalar or a row of up to 32 elements": (
            lambda s, b, h, q, kv: s + BIAS
        ),
        "captures META, which is on meta, and query is on cpu": lambda s, b, h, q, kv: s + META[h],
        "indexes EMPTY, which is empty": lambda s, b, h, q, kv: s + EMPTY[h],
    },
    IndexError: {
        "has 2 indices for BIAS, which has 1 dimension": lambda s, b, h, q, kv: s + BIAS[h, q]
    },
    TypeError: {
        "indexes BIAS with torch.float32": lambda s, b, h, q, kv: s + BIAS[q / 2],
        "score_mod returns torch.bool; it must be torch.float32": lambda s, b, h, q, kv: s > 0,
        r"score_mod returns torch.float16.*\.to\(score.dtype\)": lambda s, b, h, q, kv: s.half(),
        "score_mod returns a float; it must be a tensor": lambda s, b, h, q, kv: 1.0,
        "must be a function of": lambda s, b, h, q: s,
        r"must be a function of \(score, b": lambda b, h, q, kv: q > kv,
    },
}


@each_case("error, message", [(error, message) for error in INVALID for message in INVALID[error]])
def test_invalid_score_mods_are_refused(error, message):
    before = BIAS.clone()
    with pytest.raises(error, match=message), simulate():
        flex_attention(*rand(), INVALID[error][message])
    assert torch.equal(BIAS, before)


def test_invalid_mask_mods_are_refused():
    for mod, message in (
        (lambda b, h, q, kv: q - kv, "mask_mod returns torch.int32; it must be torch.bool"),
        (lambda b, h, q: q > 0, r"mask_mod must be a function of \(b, h, q_idx, kv_idx\)"),
    ):
        with pytest.raises(TypeError, match=message):
            compiled(None, mod, torch.device("cpu"))


Q, K, V = rand()


def with_list(name, value):
    mask = block_mask()
    setattr(mask, name, value)
    return mask


INVALID_CALLS = [
    ({"query": Q[0]}, ValueError, r"query has shape \(2, 80, 16\)"),
    ({"key": K.float()}, ValueError, "key has dtype float32"),
    ({"key": K[:, :1], "value": V[:, :1]}, ValueError, "query has 2 heads and key 1"),
    ({"value": V[:, :, :9]}, ValueError, "value has a length of 9 and key of 96"),
    ({"query": "q"}, TypeError, "query is a str"),
    ({"scale": 10**400}, ValueError, "scale is inf"),
    *(
        (
            {"block_mask": block_mask(sizes=(queries, keys))},
            ValueError,
            f"made for {queries} queries and {keys} keys, and query has 80",
        )
        for queries, keys in ((64, 96), (80, 128))
    ),
    ({"block_mask": block_mask(block=20)}, ValueError, "Q_BLOCK_SIZE of 20; .* multiple of 8"),
    ({"block_mask": block_mask(block=1032)}, ValueError, "Q_BLOCK_SIZE of 1032"),
    ({"block_mask": block_mask(block=(16, 4))}, ValueError, "KV_BLOCK_SIZE of 4"),
    *(
        ({"block_mask": with_list(name, value)}, error, rf"block_mask\.{name}{message}")
        for name, value, error, message in (
            ("kv_num_blocks", "a", TypeError, " is a str; it must be a tensor"),
            ("kv_num_blocks", torch.ones(1, 1, 1), ValueError, " has dtype torch.float32; .*int32"),
            ("kv_num_blocks", resized(torch.ones(1, 1, 1).int(), 0), ValueError, ".*of 0 bytes"),
            ("q_num_blocks", resized(torch.ones(1, 1, 1).int(), 0), ValueError, ".*of 0 bytes"),
            ("BLOCK_SIZE", None, TypeError, " is None; it must be a sequence of ints"),
            ("seq_lengths", ["a"], TypeError, r"\[0\] is 'a'; it must be an int"),
        )
    ),
    ({"block_mask": with_list("seq_lengths", [80])}, ValueError, r"seq_lengths of \[80\]; both"),
    (
        {"block_mask": block_mask().to("meta")},
        ValueError,
        r"block_mask is on meta and query on cpu; call .*to\('cpu'",
    ),
    ({"block_mask": torch.ones(8, 8).bool()}, TypeError, "mask is a bool tensor .*; .*BlockMask"),
    ({"scale": "a"}, TypeError, "scale is 'a'; it must be a number"),
    ({"scale": torch.ones((), requires_grad=True)}, NotImplementedError, "scale requires grad"),
    ({"enable_gqa": "a"}, TypeError, "enable_gqa is 'a'; it must be a bool"),
    ({"return_lse": None}, TypeError, "return_lse is None; it must be a bool"),
    ({"return_aux": True}, TypeError, "return_aux is True; it must be torch's AuxRequest"),
    ({"kernel_options": [1]}, TypeError, r"kernel_options is \[1\]; it must be a dict"),
    ({"kernel_options": {"BLOCK_K": 64}}, ValueError, "BLOCK_K=64; its keys are torch's"),
    ({"kernel_options": {"BACKEND": "CUDA"}}, ValueError, "BACKEND='CUDA'; it must be one of"),
    ({"return_lse": True, "return_aux": AuxRequest()}, ValueError, "both given"),
    ({"return_aux": AuxRequest(max_scores=True)}, NotImplementedError, "max_scores"),
]


@each_case("options, error, message", INVALID_CALLS)
def test_invalid_calls_are_refused(backend, options, error, message):
    with pytest.raises(error, match=message):
        flex_attention(**{"query": Q, "key": K, "value": V} | options)


def test_options_that_change_no_result():
    kept = {"ROWS_GUARANTEED_SAFE": True, "bwd_WRITE_DQ": False, "BACKEND": "AUTO"}
    plain = flex_attention(*rand(), block_mask=block_mask())
    out, aux = flex_attention(
        *rand(), block_mask=block_mask(), kernel_options=kept, return_aux=AuxRequest(lse=True)
    )
    assert torch.equal(out, plain)
    assert aux.lse.shape == (1, 2, 80)


def test_options_of_other_gpus_warn_once(monkeypatch):
    """Such options change no result. One warning names the options that are not defaults."""
    monkeypatch.setattr(call, "_warned", [])
    default = {"USE_TMA": False, "BACKEND": "AUTO", "PRESCALE_QK": False, "BLOCK_M": None}
    tuned = {"fwd_BLOCK_M": 64, "num_warps": 4, "PRESCALE_QK": True, "USE_TMA": True}
    plain = flex_attention(*rand(), kernel_options=default)
    with pytest.warns(UserWarning, match="fwd_BLOCK_M=64, num_warps=4, PRESCALE_QK=True") as seen:
        out = [flex_attention(*rand(), kernel_options=tuned) for _ in range(2)]
    assert all(torch.equal(one, plain) for one in out)
    assert [warning.filename for warning in seen] == [__file__]
    call._warned.clear()
    with simulate(), flex_replaced(), pytest.warns(UserWarning, match="is ignored here") as seen:
        torch_flex.flex_attention(*rand(), kernel_options=tuned)
    assert [warning.filename for warning in seen] == [__file__]
    known = call._ALLOWED_OPTIONS | call._IGNORED_OPTIONS
    assert torch_flex.FlexKernelOptions.__annotations__.keys() <= known


@pytest.mark.parametrize("simulated", [True, False])
def test_indices_out_of_range_raise(simulated):
    """On the CPU such an index raises if a listed block uses it, and only then."""

    def past_the_end(score, b, h, q_idx, kv_idx):
        return score + BIAS[q_idx + kv_idx]

    def attend(mask):
        with simulate(check=True) if simulated else contextlib.nullcontext():
            return flex_attention(*rand(), past_the_end, mask)

    with pytest.raises(IndexError, match=r"BIAS, of shape \(96,\): index 96 is out of bounds"):
        attend(block_mask())
    if simulated:
        mask = block_mask()
        first = torch.arange(5) < 2  # only these rows of blocks keep their lists
        for name in ("kv_num_blocks", "full_kv_num_blocks"):
            setattr(mask, name, getattr(mask, name) * first.int())
        assert attend(mask).isfinite().all()


@pytest.mark.parametrize("part", ["places", "share_captures", "share_owners"])
def test_incomplete_shares_are_refused(part):
    q, k, v = rand()
    statistics = torch.zeros(q.shape[:3])
    arguments = {part: ["return 0;"] if part == "places" else [0]}
    with simulate(), pytest.raises(ValueError, match="they must have the same length"):
        torch.ops.metal_attn.flex_bwd_captures(
            q, q, k, v, statistics, statistics, None, captures=[BIAS], **arguments
        )


@pytest.mark.parametrize(
    "order, message",
    [
        (torch.zeros(2, 1, 1, 4), "has dtype float32; it must be int32"),
        (torch.zeros(2, 1, 1, 4).int(), r"\(2, 1 or 1, 1 or 2, 5\)"),
        (torch.zeros(2, 1, 3, 5).int(), r"\(2, 1 or 1, 1 or 2, 5\)"),
        (torch.zeros(5, 1, 1, 2).int().transpose(0, 3), "it must be contiguous"),
    ],
)
def test_invalid_orders_are_refused(order, message):
    """The dtype, shape and strides are checked. Values are not checked: see test_order.py."""
    mask = block_mask(block=16)
    arguments = {name: getattr(mask, name) for name in ("kv_num_blocks", "kv_indices")}
    arguments |= {"kv_order": order, "q_block_size": 16, "kv_block_size": 16}
    with simulate(), pytest.raises(ValueError, match=message):
        torch.ops.metal_attn.flex_fwd(*rand(), captures=[], **arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"q_num_blocks": None, "q_indices": None},
            "full_q_num_blocks is given and q_num_blocks is not; lists of full blocks need",
        ),
        (
            {"kv_indices": torch.zeros(1, 1, 1, 1).int().expand(1, 1, 1, 2**31)},
            r"kv_indices has shape .*; lists must be shorter than 2\^31",
        ),
        ({"captures": [BIAS[:1].expand(2**31)]}, r"has shape \(2147483648,\); each size must be"),
    ],
)
def test_invalid_lists_and_captures_are_refused(changes, message):
    with simulate(), pytest.raises(ValueError, match=message):
        torch.ops.metal_attn.flex_bwd(**FLEX["flex_bwd"].make() | changes)


def test_incomplete_block_masks_are_refused():
    parts = FLEX["flex_fwd"].make()
    attention = {name: parts.pop(name) for name in ("q", "k", "v", "captures")}
    del parts["kv_num_blocks"]
    for name, value in parts.items():
        if name.startswith(("q_num", "q_ind", "q_ord", "full_q")):
            continue
        message = "lists or an order are given and kv_num_blocks is not"
        with simulate(), pytest.raises(ValueError, match=message):
            torch.ops.metal_attn.flex_fwd(**attention, **{name: value})


# An invalid text, and the part of the text that the error quotes.
INVALID_TEXTS = {
    "return score; } void other() {": " }",
    "return score;\n#include <x>": "\n",
    'return "a";': '"',
    "return other;": "other",
    "return t0 = score;": "=",
    "score; return score;": "score",
    "return score": "'",
    "return inputs.q[0];": "inputs.q",
    "return inputs.capture_1[0];": "1[0]",
    "return inputs.capture_0[key];": "key",
    "return params.capture_strides[0];": "params.capture_strides",
    "return params.capture_sizes[24];": "24",
    "return precise::other(score);": "other",
    "return 0x1;": "x1",
    "return (score;": ";",
    "const device t0 = score; return t0;": "device",
    "return *(&key + 99999);": "*",
    "return (int64_t&)key;": "int64_t&",
    "const int t0 = key": "'",
    "const int* t0 = 0; return t0;": "* t0",
    "return head &*key;": "*",
}
LOAD = "return inputs.capture_0[flex_index({}, params.capture_sizes[{}], impossible){}];"
STRIDE = " * params.capture_strides[0]"
INNER = LOAD.format("key", 0, STRIDE).removeprefix("return ").removesuffix(";")
INVALID_TEXTS |= {
    LOAD.format("key", 1, STRIDE): ") *",
    LOAD.format("key", 0, ""): "]",
    LOAD.format("key", 0, STRIDE + " + 99999999"): " + 99999999",
    LOAD.format(INNER, 0, STRIDE): "0[flex_index(key",
}


def test_texts_that_flex_attention_never_writes_are_refused():
    q, k, v = rand()
    for text, part in INVALID_TEXTS.items():
        with simulate(record=True), pytest.raises(ValueError, match=r"score has '") as error:
            torch.ops.metal_attn.flex_fwd(q, k, v, captures=[BIAS], score=text)
        assert f"has '{part}" in str(error.value), text
    with simulate(record=True):
        valid = LOAD.format("key", 0, STRIDE)
        torch.ops.metal_attn.flex_fwd(q, k, v, captures=[BIAS], score=valid)
