"""The Metal text and the derivative of each op of the table, compared with torch's."""

import functools
import math
import re

import pytest
import torch

from tests.helpers.mutants import expect_caught, use_fault
from tests.helpers.switched import switched
from torch_metal_attn.flex import derivative, table, text
from torch_metal_attn.flex.captured import Captured, loaded_dtype
from torch_metal_attn.flex.derivative import slope
from torch_metal_attn.flex.graph import Graph, ordered
from torch_metal_attn.flex.program import Program, compiled
from torch_metal_attn.flex.reference import evaluate
from torch_metal_attn.flex.tracing import trace
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import compile_shader

N = 96
GENERATOR = torch.Generator().manual_seed(17)
SCORES = 3 * torch.randn(N, generator=GENERATOR)
SCORES[:6] = torch.tensor([0.0, 1.0, -1.0, 2.5, -2.5, 0.5])
Q = torch.randint(0, 90, (N,), generator=GENERATOR)
KV = torch.randint(0, 90, (N,), generator=GENERATOR)
FLOATS = torch.randn(90, generator=GENERATOR)
FLOATS[:4] = torch.tensor([0.0, 1.0, -1.0, 2.5])
HALVES = torch.randn(2, 90, generator=GENERATOR).half().T  # not contiguous
BFLOATS = torch.randn(3, 2, 90, generator=GENERATOR).bfloat16()
FLAGS = torch.rand(90, generator=GENERATOR) > 0.5
INTS = torch.randint(-9, 9, (90,), generator=GENERATOR).int()
# Different integers. float32 rounds neighbours to the same number.
LONGS = 2**24 + torch.arange(90)
FACTOR = torch.tensor(0.75)
DOUBLES = FLOATS.double() / 3

# At least one function for each row of the table.
MODS = {
    "add": lambda s, b, h, q, kv: s + FLOATS[kv],
    "add alpha": lambda s, b, h, q, kv: torch.add(s, FLOATS[kv], alpha=3),
    "sub": lambda s, b, h, q, kv: 1 - s - (q - kv),
    "rsub": lambda s, b, h, q, kv: torch.rsub(s, FLOATS[kv]),
    "mul": lambda s, b, h, q, kv: s * FLOATS[kv] * s,
    "div": lambda s, b, h, q, kv: FLOATS[q] / (s * s + 1) + s / 3,
    "floor_divide": lambda s, b, h, q, kv: (
        torch.div(s, 0.7, rounding_mode="floor") + (q - kv) // 7 + (q - kv) // -7 + s
    ),
    "truncating_divide": lambda s, b, h, q, kv: (
        torch.div(s, 0.7, rounding_mode="trunc") + torch.div(q - kv, 7, rounding_mode="trunc")
    ),
    "remainder": lambda s, b, h, q, kv: s % 0.75 + s % -1.25 + (q - kv) % 7 + (q - kv) % -5,
    "remainder by score": lambda s, b, h, q, kv: (FLOATS[q] * 9) % (s.abs() + 1),
    "fmod": lambda s, b, h, q, kv: (
        torch.fmod(s, 0.75) + torch.fmod(q - kv, 7) + torch.fmod(FLOATS[q] * 9, s.abs() + 1)
    ),
    "neg": lambda s, b, h, q, kv: -s + -(q - kv),
    "abs": lambda s, b, h, q, kv: abs(s) * abs(q - kv),
    "sign": lambda s, b, h, q, kv: torch.sign(s) * s + torch.sign(q - kv),
    "maximum": lambda s, b, h, q, kv: torch.maximum(s, FLOATS[kv]) + torch.maximum(q, kv),
    "maximum of equals": lambda s, b, h, q, kv: torch.max(s, s * 1.0) * 2,
    "minimum": lambda s, b, h, q, kv: torch.minimum(FLOATS[kv], s) + torch.minimum(q, kv),
    "clamp": lambda s, b, h, q, kv: s.clamp(-1, 2.5) + (q - kv).clamp(min=-5, max=5),
    "clamp_min": lambda s, b, h, q, kv: s.clamp_min(0.5),
    "clamp_max": lambda s, b, h, q, kv: s.clamp(max=-0.5),
    "where": lambda s, b, h, q, kv: torch.where(q >= kv, s * 2, -s) + torch.where(s > 0, q, kv),
    "comparisons": lambda s, b, h, q, kv: (
        (s < 0.5).float() + 2 * (s <= 0.5) + 4 * (q == kv) + 8 * (q != kv) + s * (s >= 1)
    ),
    "integers against a fraction": lambda s, b, h, q, kv: s * (q >= 30.5),
    "logic": lambda s, b, h, q, kv: (
        s * (torch.logical_and(q > 3, FLAGS[kv]) | ~FLAGS[q])
        + torch.logical_or(q > 60, kv > 60).float()
        + 2.0 * torch.logical_xor(q > 30, kv > 30)
        + 4.0 * torch.logical_not(q > 30)
        + 8.0 * (FLAGS[q] & FLAGS[kv])
        + 16.0 * (FLAGS[q] ^ FLAGS[kv])
    ),
    "detach": lambda s, b, h, q, kv: s * (s.detach() // 0.7),
    "bits": lambda s, b, h, q, kv: s + (q & 6) + (kv | 9) + (q ^ kv) + ~q,
    "isnan": lambda s, b, h, q, kv: torch.where(torch.isnan(s / s), 7.0, s),
    "exp": lambda s, b, h, q, kv: torch.exp(s),
    "exp2": lambda s, b, h, q, kv: torch.exp2(-s),
    "log": lambda s, b, h, q, kv: torch.log(s * s + 1),
    "log2": lambda s, b, h, q, kv: torch.log2(s * s + 1),
    "log10": lambda s, b, h, q, kv: torch.log10(s * s + 1),
    "tanh": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "sigmoid": lambda s, b, h, q, kv: torch.sigmoid(s),
    "sin": lambda s, b, h, q, kv: torch.sin(s),
    "cos": lambda s, b, h, q, kv: torch.cos(s) + torch.cos(q),
    "tan": lambda s, b, h, q, kv: torch.tan(s / 3) + torch.tan(q),
    "silu": lambda s, b, h, q, kv: torch.nn.functional.silu(s),
    "sqrt": lambda s, b, h, q, kv: torch.sqrt(s * s + 0.5),
    "rsqrt": lambda s, b, h, q, kv: torch.rsqrt(s * s + 0.5),
    "reciprocal": lambda s, b, h, q, kv: 1 / (s * s + 0.5),
    "pow": lambda s, b, h, q, kv: s**2 + s**3 + (s * s + 1) ** 0.7 + 1.5**s + (q - kv) ** 2,
    "pow of two scores": lambda s, b, h, q, kv: torch.pow(s.abs() + 0.5, s),
    "relu": lambda s, b, h, q, kv: torch.relu(s) + torch.relu(q - kv),
    "roundings": lambda s, b, h, q, kv: (
        torch.floor(s) + 2 * torch.ceil(s) + 4 * torch.trunc(s) + 8 * torch.round(s) + s
    ),
    "half": lambda s, b, h, q, kv: (s.half() * HALVES[kv, 1] + 0.1).float(),
    "bfloat16": lambda s, b, h, q, kv: s + BFLOATS[2][h, q] * BFLOATS[1, h, kv],
    "casts": lambda s, b, h, q, kv: s.int() + s.long() * 2 + s.bool() * 4 + q.half() + kv.to(s) + s,
    "int32": lambda s, b, h, q, kv: s + INTS[kv] * INTS[q],
    "int64": lambda s, b, h, q, kv: s * (LONGS[q] >= LONGS[kv]) + (LONGS[q] - LONGS[kv]),
    "int64 that float32 cannot hold": lambda s, b, h, q, kv: (LONGS[q] == LONGS[kv] + 1) + s,
    "negative index": lambda s, b, h, q, kv: s + FLOATS[-1 - kv] + FLOATS[-1],
    "indexed index": lambda s, b, h, q, kv: s * FLOATS[INTS[q]],
    "captured scalar": lambda s, b, h, q, kv: s * FACTOR,
    "in place": lambda s, b, h, q, kv: (s * 1).add_(1).mul_(2),
    "numbers beyond int32": lambda s, b, h, q, kv: (
        s * (q < 2**40)
        + (q + 2**40 > kv + 2**32)
        + 2 * ((q - kv) * 2**33 > 2**35)
        + 4 * (torch.clamp(q, max=-(2**40)) < -(2**33))
        + (-q) // 2**33
    ),
    "wrapping": lambda s, b, h, q, kv: s + ((q * 1103515245 + kv * 12345) & 7),
    "infinity": lambda s, b, h, q, kv: torch.where(s > 9, s, -float("inf")),
}  # fmt: skip

# Functions of the score: rows of the table, and functions that PyTorch composes of rows.
OF_SCORE = {
    name: getattr(module, name)
    for module, names in (
        (torch, "log1p expm1 erf asin acos atan sinh cosh asinh acosh atanh frac square"),
        (torch.nn.functional, "gelu softplus leaky_relu hardtanh softshrink hardshrink elu selu"),
        (torch.nn.functional, "mish hardswish hardsigmoid logsigmoid relu6 softsign"),
    )
    for name in names.split()
} | {
    "gelu by tanh": lambda s: torch.nn.functional.gelu(s, approximate="tanh"),
    "softplus of beta": lambda s: torch.nn.functional.softplus(s, beta=2.0, threshold=5.0),
    "isinf": lambda s: torch.where(torch.isinf(s), 1.0, s),
    "isfinite": lambda s: torch.where(torch.isfinite(s), s, 2.0),
    "round to decimals": lambda s: torch.round(s, decimals=1) + s,
}  # fmt: skip
MODS |= {name: lambda s, b, h, q, kv, f=f: f(s) for name, f in OF_SCORE.items()}
BYTES, SHORTS = (INTS * 31).to(torch.uint8), (INTS * 3001).short()
MODS |= {
    "masked_fill": lambda s, b, h, q, kv: s.masked_fill(q < kv, -1.5),
    "composed in place": lambda s, b, h, q, kv: (
        torch.nn.functional.leaky_relu((s * 1).masked_fill_(q < kv, -1.5), inplace=True)
    ),
    "atan2": lambda s, b, h, q, kv: torch.atan2(s, FLOATS[kv]) + torch.atan2(FLOATS[q], s + 0.1),
    "hypot": lambda s, b, h, q, kv: torch.hypot(s, FLOATS[kv]) + torch.hypot(s * 1e30, q * 1e30),
    "logaddexp": lambda s, b, h, q, kv: torch.logaddexp(s, FLOATS[kv]),
    "lerp": lambda s, b, h, q, kv: (
        torch.lerp(s, FLOATS[kv], 0.3) + torch.lerp(FLOATS[q], s, torch.sigmoid(s))
    ),
    "addcmul": lambda s, b, h, q, kv: torch.addcmul(s, s, FLOATS[kv], value=2),
    "composed in half": lambda s, b, h, q, kv: torch.erf(s.half()).float().detach() + s,
    "shifts": lambda s, b, h, q, kv: (
        s + (q >> 2) + ((q - kv) >> 3) + ((q - kv) << 4) + (LONGS[q] >> 40) + ((kv - q) >> q)
        + (BYTES[q] >> 3) + (BYTES[kv] << 6) + (SHORTS[q] >> 9) + (INTS[q] << 33) + (INTS[q] >> 33)
    ),
    "uint8": lambda s, b, h, q, kv: (
        s + (BYTES[q] + BYTES[kv]) - BYTES[q] * 3 + BYTES[q] // 7 + BYTES[q] % (kv + 3)
        + torch.maximum(BYTES[q], BYTES[kv]) + BYTES[kv].clamp(5, 77) + (-BYTES[q]) + abs(BYTES[q])
        + (BYTES[q] < BYTES[kv]) + (BYTES[q] ^ 21) + (~BYTES[kv]) + q.to(torch.uint8) + s.bool()
    ),
    "int16": lambda s, b, h, q, kv: (
        s + (SHORTS[q] * 3) + (SHORTS[q] - SHORTS[kv]) // 7 + SHORTS[q] % -5 + torch.sign(SHORTS[q])
        + (q * 999).short() + (BYTES[q] - SHORTS[kv]) + (BYTES[q] + q.to(torch.int8)) + s.short()
    ),
    "float64": lambda s, b, h, q, kv: s * DOUBLES[q].to(s.dtype),
}  # fmt: skip

# shaders/flex.h needs the defines of a kernel.
_DEFINES = "#define ELEMENT half\n#define HEAD_DIM_QK 16\n#define HEAD_DIM_V 16\n#define FLEX 1\n"
HEADER = shaders._CHECKOUT / "flex.h"
_TEXT = """
[[kernel]] void run(
    const device half* q [[buffer(0)]], const device half* k [[buffer(1)]],
    const device half* v [[buffer(2)]], constant FlexParams& params [[buffer(3)]],
    FLEX_CAPTURES(FLASH_KERNEL_PARAMETER)
    const device float* scores [[buffer(16)]], const device int* queries [[buffer(17)]],
    const device int* keys [[buffer(18)]], device float* values [[buffer(19)]],
    device float* slopes [[buffer(20)]], uint i [[thread_position_in_grid]],
    uint count [[threads_per_grid]]) {
  FlashInputs inputs;
  FLASH_SET_INPUTS
  const float score = scores[i];
  const int query = queries[i];
  const int key = keys[i];
"""
_CALL = """
  {{
    bool impossible = false;
    const float value = value_{0}(score, inputs, params, 0, 1, query, key, impossible);
    values[{0} * count + i] = impossible ? NAN : value;
    slopes[{0} * count + i] = slope_{0}(score, inputs, params, 0, 1, query, key, impossible);
  }}
"""


def run(mods, scores, q_idx, kv_idx):
    """Returns values and slopes for head 1 of batch 0, each of shape (mods, positions)."""
    graph, captured = Graph(), Captured()
    device = torch.device("cpu")
    results = [trace("score_mod", mod, graph, captured, device) for mod in mods]
    captured = [x.to(loaded_dtype(x)) for x in captured.tensors]
    ranks = [x.dim() for x in captured]
    names = text.TYPES | {torch.bool: "uchar"}
    declared = " ".join(
        f"X(const device {names[x.dtype]}*, capture_{i}, {4 + i})" for i, x in enumerate(captured)
    )
    # The layout of FlexParams.
    params = torch.zeros(104, dtype=torch.int32)
    strides = [n for x in captured for n in x.stride()]
    sizes = [n for x in captured for n in x.shape]
    params[: 2 * len(strides)] = torch.tensor(strides, dtype=torch.int64).view(torch.int32)
    params[80 : 80 + len(sizes)] = torch.tensor(sizes, dtype=torch.int32)

    source = f"{_DEFINES}#define FLEX_CAPTURES(X) {declared}\n{shaders.flatten(HEADER)}"
    calls = ""
    for i, result in enumerate(results):
        for name, node in (("value", result), ("slope", slope(graph, result))):
            function = f"METAL_FUNC float {name}_{i}(float score, FLEX_ARGUMENTS)"
            source += f"{function} {{ {text.body(node, ranks)} }}\n"
        calls += _CALL.format(i)
    source += f"{_TEXT}{calls}}}\n"
    kernel = compile_shader(source, check=True).run
    results = [torch.empty(len(mods), len(scores)) for _ in range(2)]
    nothing = torch.zeros(1, dtype=torch.float16)
    captures = [*captured, *([None] * (12 - len(captured)))]
    kernel(
        *(nothing, nothing, nothing, params, *captures),
        *(scores, q_idx.int(), kv_idx.int(), *results),
        threads=len(scores),
    )
    return results


def torch_values(mod):
    """Values and slopes by autograd, with scores in float32 and positions in int64, as in torch."""
    scores = SCORES.clone().requires_grad_()
    values = mod(scores, torch.zeros_like(Q), torch.ones_like(Q), Q.long(), KV.long())
    (slopes,) = torch.autograd.grad(values.sum(), scores, allow_unused=True, materialize_grads=True)
    return values.detach(), slopes


def differing(names):
    close = functools.partial(torch.allclose, rtol=2e-5, atol=2e-5, equal_nan=True)
    actual = run([MODS[name] for name in names], SCORES, Q, KV)
    return [
        name
        for name, *results in zip(names, *actual, strict=True)
        if not all(map(close, results, torch_values(MODS[name])))
    ]


def test_values_and_derivatives_equal_torchs():
    assert differing(MODS) == []


# Scores near 0, far from 0, and infinite.
SCORES_FAR = torch.tensor([1.0, 0.5, 1e-3, 1e-20, 89.0, 1e30, float("inf"), float("nan")])
SCORES_FAR = torch.cat((SCORES_FAR, -SCORES_FAR, torch.linspace(-9, 9, N - 16)))


def inexact(names, actual):
    """The names of functions of the score whose error exceeds the bound."""
    wrong = []
    for i, name in enumerate(names):
        exact = OF_SCORE[name](SCORES_FAR.double())
        of_torch = (OF_SCORE[name](SCORES_FAR) - exact).abs().nan_to_num(0, 0, 0)
        exact = torch.where(exact.abs() < 2.0**128, exact, exact.float().double())
        # Three units in the last place of the value, or of the score if terms cancel.
        cancel = exact.abs().maximum(SCORES_FAR.abs().clamp(max=9))
        size = exact.abs() if name in table.OPS else cancel
        slack = 3 * 2.0**-23 * size + 2 * of_torch + 1e-38
        value = actual[i].double()
        same = (value == exact) | (value.isnan() & exact.isnan())
        if not (same | ((value - exact).abs() <= slack)).all():
            wrong.append(name)
    return wrong


def test_errors_are_within_the_bound():
    actual, _ = run(MODS.values(), SCORES_FAR, Q, KV)
    first = list(MODS).index("log1p")
    assert list(MODS)[first : first + len(OF_SCORE)] == list(OF_SCORE)
    assert inexact(OF_SCORE, actual[first:]) == []


FAULTS = {
    "log1p": ("short n = 13", "short n = 7"),
    "expm1": ("short n = 12", "short n = 8"),
    "erf": ("-1.08585414e-2f", "-1.08e-2f"),
    "shifts": ("T(a < 0 ? -1 : 0)", "T(0)"),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_functions_of_flex_h_are_caught(name, monkeypatch):
    old, new = FAULTS[name]
    flatten = shaders.flatten
    assert old in flatten(HEADER)
    monkeypatch.setattr(shaders, "flatten", lambda path: flatten(path).replace(old, new))
    if name in OF_SCORE:
        assert inexact([name], run([MODS[name]], SCORES_FAR, Q, KV)[0]) == [name]
    else:
        assert differing([name]) == [name]


# Integer divisions that trap on CPUs, and floats outside the range of integers.
SMALLEST = -(2**31)
DIVIDENDS = torch.tensor([7, -7, SMALLEST, 7, SMALLEST]).int()
DIVISORS = torch.tensor([-1, -1, -1, 0, 0]).int()
OUTSIDE = torch.tensor([2.0**31, -(2.0**31), math.inf, -math.inf, math.nan])
SATURATED = [2.0**31, SMALLEST, 2.0**31, SMALLEST, 0]
REMAINDERS = [0, 0, 0, math.nan, math.nan]
QUOTIENTS = [-7, 7, SMALLEST, math.nan, math.nan]
EDGES = {
    "floor_divide": (lambda s, b, h, q, kv: (DIVIDENDS[q] // DIVISORS[q]).float(), QUOTIENTS),
    "truncating_divide": (
        lambda s, b, h, q, kv: torch.div(DIVIDENDS[q], DIVISORS[q], rounding_mode="trunc").float(),
        QUOTIENTS,
    ),
    "remainder": (lambda s, b, h, q, kv: (DIVIDENDS[q] % DIVISORS[q]).float(), REMAINDERS),
    "fmod": (lambda s, b, h, q, kv: torch.fmod(DIVIDENDS[q], DIVISORS[q]).float(), REMAINDERS),
    "int": (lambda s, b, h, q, kv: s.int().float(), SATURATED),
    "long": (lambda s, b, h, q, kv: (s * 2.0**32).long().float(), [x * 2.0**32 for x in SATURATED]),
}
SETS_IMPOSSIBLE = "impossible = impossible || b == 0;"
TEXTS = {
    "floor_divide": f"{SETS_IMPOSSIBLE}\n  if (b == 0 || b == -1) {{ return T(0) - a",
    "truncating_divide": f"{SETS_IMPOSSIBLE}\n  return b == 0 || b == -1 ? T(0) - a",
    "remainder": f"{SETS_IMPOSSIBLE}\n  const T rest = b == 0 || b == -1 ? T(0)",
    "fmod": f"{SETS_IMPOSSIBLE}\n  return b == 0 || b == -1 ? T(0) :",
    "int": "isnan(x) ? 0 : x >= 2147483648.0f ? INT_MAX : x <= -2147483648.0f ? INT_MIN : int(x)",
    "long": "isnan(x) ? 0 : x >= limit ? highest : x <= -limit ? -highest - 1 : int64_t(x)",
}
EDGE_FAULTS = [
    (op, old, new)
    for ops, old, new in (
        ("floor_divide truncating_divide remainder fmod", SETS_IMPOSSIBLE, ""),
        ("floor_divide truncating_divide remainder fmod", "b == 0 || b == -1", "b == -1"),
        ("floor_divide truncating_divide remainder fmod", "b == 0 || b == -1", "b == 0"),
        ("floor_divide truncating_divide", "T(0) - a", "a"),
        ("int long", "isnan(x) ? 0 : ", ""),
        ("int long", "x >=", "x >"),
        ("int", "x >= 2147483648.0f ? INT_MAX : ", ""),
        ("int", "x <= -2147483648.0f ? INT_MIN : ", ""),
        ("long", "x >= limit ? highest : ", ""),
        ("long", "x <= -limit ? -highest - 1 : ", ""),
    )
    for op in ops.split()
]


@pytest.mark.parametrize(
    "fault", [None, *(pytest.param(x, marks=pytest.mark.mutant) for x in EDGE_FAULTS)], ids=str
)
def test_invalid_divisions_and_casts(fault, monkeypatch):
    """If PyTorch has no value: a division by 0 gives NaN, and a cast gives the nearest integer."""
    planted = [(TEXTS[op], TEXTS[op].replace(old, new)) for op, old, new in EDGE_FAULTS]
    text = shaders.flatten(HEADER)
    assert all(old in text for old, _ in planted)
    text, numbers = switched(text, planted)
    monkeypatch.setattr(shaders, "flatten", lambda path: text)
    use_fault(monkeypatch, numbers[planted[EDGE_FAULTS.index(fault)]] if fault else 0)
    functions, expected = zip(*EDGES.values(), strict=True)
    positions = torch.arange(len(OUTSIDE))

    def check():
        actual, _ = run(functions, OUTSIDE, positions, positions)
        assert torch.equal(actual.nan_to_num(0.5), torch.tensor(expected).nan_to_num(0.5))

    if fault is None:
        check()
    else:
        expect_caught(check, fault=(None, "integer_division", "float_to_integer"), kernel="run")


def test_every_op_is_tested():
    used = set()
    for mod in MODS.values():
        program = compiled(mod, None, torch.device("cpu"))
        used |= {node.op for node in ordered(program.score, bodies=True)}
    assert set(table.OPS) <= used


@pytest.mark.parametrize("name", ["rsub", "div", "tanh", "where", "remainder", "rsqrt", "clamp"])
def test_a_wrong_sign_of_a_derivative_is_caught(name, monkeypatch):
    row = {"clamp": "clamp_min", "rsub": "sub"}.get(name, name)
    parts_of = derivative.parts_of

    def negated(graph, node, gradient):
        sign = "neg" if node.op == row else "detach"
        parts = parts_of(graph, node, gradient)
        return tuple(x if x is None else graph.node(sign, [x], torch.float32) for x in parts)

    monkeypatch.setattr(derivative, "parts_of", negated)
    graph, captured = Graph(), Captured()
    result = trace("score_mod", MODS[name], graph, captured, torch.device("cpu"))
    traced = Program(result, None, {}, captured)
    inputs = {"score": SCORES, "b": 0 * Q, "h": 0 * Q + 1, "q_idx": Q, "kv_idx": KV}
    actual = evaluate(slope(graph, result), inputs, traced).expand(N)
    assert not torch.allclose(actual, torch_values(MODS[name])[1], rtol=0.1)


def test_an_index_truncated_to_float_is_caught(monkeypatch):
    load = text._load
    monkeypatch.setattr(text, "_load", lambda *arguments: f"float({load(*arguments)})")
    name = "int64 that float32 cannot hold"
    assert differing([name]) == [name]


def test_texts_are_words_of_a_fixed_vocabulary():
    """Names and strings of the user's code never reach the kernels."""
    injection = {"} void other() {": torch.ones(3), "__name__": "#include"}

    def malicious(score, b, h, q_idx, kv_idx):
        return score + injection["} void other() {"][h] * len(injection["__name__"])

    words = set()
    for mod in (*MODS.values(), malicious):
        for source in compiled(mod, None, torch.device("cpu")).texts.values():
            words |= set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\b\d[\w.]*(e-\d+f)?", "", source)))
    rows = (row for op in table.OPS.values() for row in (op.floating, op.integer, op.boolean))
    known = {word for row in rows for word in re.findall(r"[A-Za-z_]\w*", row or "")}
    known |= {*text.TYPES.values(), *text._INPUTS.values(), "ushort", "uint", "uint64_t"}
    known |= {"const", "return", "true", "false", "inputs", "params", "capture_sizes", "INFINITY"}
    known |= {"capture_strides", "flex_index", "flex_int", "flex_long", "impossible"}
    assert {word for word in words - known if not re.fullmatch(r"t\d+|capture_\d+", word)} == set()
