"""The gradients of attn_bias, a floating attn_mask and alibi_slopes, against float64's autograd."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_metal_attn  # noqa: F401
from tests.attention.flash_bwd_bias_check import (
    check_bias,
    check_varlen_bias,
    make_gradients,
    reference_gradients,
    run_ops,
)
from tests.attention.flash_fwd_check import (
    DTYPES,
    PAIRS_OF_DTYPES,
    make_packed,
    make_qkv,
    visible_keys,
)
from tests.attention.flash_fwd_options import (
    DRAWN_HEAD_DIMS,
    any_options,
    few_examples,
    ints,
    random_mask,
    rotary_tables,
)
from tests.attention.head_dims import HOME
from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime import extension

# GQA, two query tiles or more, partial blocks of keys.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": HOME}
WHOLE = (2, 4, 77, 101)
SLOPES = torch.tensor([0.3, 0.1, 0.02, 0.5])


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(dtype=torch.float32, **shape):
    return make_qkv(**SHAPE | shape, dtype=dtype)


@pytest.mark.parametrize("shared", list(itertools.product([False, True], repeat=4)))
def test_every_broadcast(shared, device):
    """Of batch, head, query and key, each its own or shared."""
    sizes = [1 if one else size for one, size in zip(shared, WHOLE, strict=True)]
    check_bias(*problem(), attn_bias=normal(*sizes), causal=True, device=device)


@pytest.mark.parametrize("sizes", [(101,), (1,), (77, 1), (4, 1, 101), (4, 77, 101)])
def test_fewer_dimensions(sizes, device):
    check_bias(*problem(), attn_bias=normal(*sizes), causal=True, device=device)


@pytest.mark.parametrize("dtype, bias_dtype", PAIRS_OF_DTYPES)
def test_dtypes(dtype, bias_dtype, device):
    bias = normal(1, 4, 77, 100, dtype=bias_dtype)
    check_bias(*problem(dtype, kv_length=100, head_dim=64), attn_mask=bias, device=device)


def test_without_a_gradient_of_the_log_sum_exp(device):
    """As torch's own attention, which returns none."""
    options = {"attn_bias": normal(4, 77, 101), "causal": True, "dlse": False}
    check_bias(*problem(), **options, device=device)


def test_strides(device):
    """The result is of the bias' shape, contiguous, whatever the bias' strides."""
    for bias in (
        normal(101, 4, 77).permute(1, 2, 0),
        normal(77, 101).expand(WHOLE),
        normal(2, 1, 77, 1).expand(2, 4, 77, 101),
        normal(2, 4, 80, 110)[:, :, 2:79, 9:],
        normal(2, 4, 154, 101)[:, :, ::2],
    ):
        check_bias(*problem(), attn_bias=bias, causal=True, device=device)


@pytest.mark.parametrize("q_length, kv_length", [(1, 1), (1, 65), (7, 31), (33, 1), (65, 33)])
@pytest.mark.parametrize("shared", [(), (2,), (3,), (0, 1, 2, 3)])
def test_odd_lengths(q_length, kv_length, shared, device):
    whole = [2, 4, q_length, kv_length]
    sizes = [1 if dim in shared else size for dim, size in enumerate(whole)]
    shape = {"q_length": q_length, "kv_length": kv_length}
    offset = kv_length // 2 - (q_length > 1)  # hides a key, where there are two rows or keys
    options = {"attn_bias": normal(*sizes), "causal": True, "q_offset": offset}
    check_bias(*problem(**shape), **options, device=device)


@pytest.mark.parametrize(
    "head_dim, v_head_dim, dtype",
    [
        (1, 1, torch.float32),
        (129, 40, torch.bfloat16),
        (256, 200, torch.float32),
    ],
)
def test_head_dims(head_dim, v_head_dim, dtype, device):
    shape = {"head_dim": head_dim, "v_head_dim": v_head_dim, "q_length": 20, "kv_length": 40}
    check_bias(*problem(dtype, **shape), attn_bias=normal(4, 1, 40), device=device)


@pytest.mark.parametrize(
    "dtype, sizes", list(zip(DTYPES, (WHOLE, (1, 4, 1, 101), (2, 1, 77, 1)), strict=True))
)
def test_everything_together(dtype, sizes, device):
    """GQA, every rule of visibility, a cap, a sink, rotation, and in one dtype ALiBi."""
    options = {
        "causal": True,
        "window_size_left": 50,
        "q_offset": 20,
        "attention_chunk": 60,
        "seqused_k": ints(90, 101),
        "leftpad_k": ints(0, 20),
        "softcap": 2.0,
        "attn_mask": random_mask(2, 1, 77, 101),
        "learnable_sink": torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=dtype),
        "softmax_scale": 0.4,
        "rotary_interleaved": dtype == torch.float16,
    }
    if dtype == torch.float32:
        options["alibi_slopes"] = SLOPES
    for side, length in (("q", 77), ("k", 101)):
        cos, sin = rotary_tables(length, 4, dtype=dtype)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    check_bias(*problem(dtype), **options, attn_bias=normal(*sizes), device=device)


def test_lengths_with_nan_outside(device):
    q, k, v = problem(torch.float16)
    for b, (first, end) in enumerate([(5, 90), (35, 50)]):
        for tensor in (k, v):
            tensor[b, :, :first] = math.nan
            tensor[b, :, end:] = math.nan
    options = {"seqused_k": ints(90, 50), "leftpad_k": ints(5, 35)}
    for sizes in (WHOLE, (1, 77, 1)):
        found = check_bias(q, k, v, **options, attn_bias=normal(*sizes), device=device)
        assert found["attn_bias"].isfinite().all()


def test_what_no_query_sees_is_zero(device):
    q, k, v = problem()
    options = {"window_size_left": 9, "window_size_right": 4, "q_offset": -5}
    found = check_bias(q, k, v, **options, attn_bias=normal(*WHOLE), device=device)["attn_bias"]
    hidden = ~visible_keys(q, k, options)
    assert hidden.any()
    assert (found[hidden] == 0).all()
    found = check_bias(q, k, v, **options, attn_bias=normal(101), device=device)["attn_bias"]
    assert (found[hidden.all(dim=0).all(dim=0).all(dim=0)] == 0).all()


def test_lowest_and_infinite_biases(device):
    bias = normal(4, 77, 101)
    bias[:, :, 10:20] = -math.inf
    bias[:, 30:40, :30] = torch.finfo(torch.float32).min
    bias[:, 50] = -math.inf
    q, k, v = problem()
    dout, dlse = make_gradients(q, v, q.shape[:3])
    options = {"attn_bias": bias, "causal": True}
    found = run_ops(dout, dlse, q, k, v, [], device, options)["attn_bias"]
    oracle = reference_gradients(attention, dout, dlse, q, k, v, [], options, torch.float64)
    oracle = oracle["attn_bias"]
    torch.testing.assert_close(found.double(), oracle, rtol=1e-4, atol=1e-5)
    assert (found[:, 50] == 0).all()
    assert (found[:, :, 10:20] == 0).all()


# --- splits ---


def explain(op, q, k, v, **options):
    lse = torch.zeros(q.shape[:3])
    dout = v.new_empty(1, 1, 1, v.shape[3]).expand(*q.shape[:3], v.shape[3])
    op = getattr(torch.ops.metal_attn_explain, op)
    return extension.launches(op(dout, q, k, v, lse, lse, **options))[0]


def test_a_long_walk_is_split(device):
    """One row of keys for 2 * 8 * 1023 queries; and one element for all."""
    shape = {"heads": 8, "q_length": 1023, "kv_length": 33}
    q, k, v = problem(**shape)
    for bias in (normal(33), normal(1), normal(8, 1, 1)):
        assert explain("flash_bwd_bias", q, k, v, attn_bias=bias)["splits"] > 1
        check_bias(q, k, v, attn_bias=bias, causal=True, q_offset=0, device=device)


@pytest.mark.parametrize("length, dtype", [(1, torch.float32), (300, torch.float16)])
def test_partial_results_are_linear_in_the_bias(length, dtype):
    """Parts keep the GPU busy; a large bias has none."""
    q = torch.empty(64, 16, 1, 64, dtype=dtype).expand(64, 16, 4096, 64)
    k = torch.empty(64, 16, 1, 64, dtype=dtype).expand(64, 16, 4096, 64)
    for sizes in ((4096, 4096), (4096,), (16, 4096, 1), (1,), (64, 1, 1, 1)):
        found = explain("flash_bwd_bias", q, k, k, attn_bias=torch.zeros(sizes))
        columns, rows, depth = found["grid"]
        assert found["splits"] == 1 or columns * rows * depth < 2 * 240
        assert columns * rows * depth >= min(240, 64 * 16)


def test_two_runs_have_the_same_bits(device):
    q, k, v = problem(q_length=200)
    dout, dlse = make_gradients(q, v, q.shape[:3])
    for options in ({"attn_bias": normal(101), "causal": True}, {"alibi_slopes": SLOPES}):
        runs = [run_ops(dout, dlse, q, k, v, [], device, options) for _ in range(2)]
        for first, second in zip(*(each.values() for each in runs), strict=True):
            assert torch.equal(first, second)


# --- slopes ---


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.bfloat16, {"q_offset": 60, "window_size_left": 30}),
    ],
)
@pytest.mark.parametrize("per_batch", [False, True])
def test_slopes(dtype, options, per_batch, device):
    slopes = torch.stack([SLOPES, 2 * SLOPES]) if per_batch else SLOPES
    check_bias(*problem(dtype), alibi_slopes=slopes, **options, device=device)


def test_slopes_of_strided_rows(device):
    slopes = torch.stack([SLOPES, 2 * SLOPES, SLOPES])[::2]
    check_bias(*problem(), alibi_slopes=slopes, device=device)


# --- packed ---


PACKED = ([40, 0, 77, 1], [50, 3, 64, 1])


@pytest.mark.parametrize("sizes", [(4, 4, 80, 71), (1, 4, 80, 71), (4, 1, 1)])
def test_packed(sizes, device):
    """With rows of no sequence; parts of the bias beyond a sequence's lengths."""
    q, k, v, *packing = make_packed(
        *PACKED, heads=4, kv_heads=2, head_dim=HOME, dtype=torch.float16
    )
    q = torch.cat([q, torch.full_like(q[:9], math.nan)])
    packing[2:] = [80, 71]
    options = {"causal": True, "alibi_slopes": SLOPES, "attn_bias": normal(*sizes)}
    found = check_varlen_bias(q, k, v, *packing, **options, device=device)["attn_bias"]
    if len(sizes) == 4 and sizes[0] == 4 and sizes[3] == 71:
        for b, (rows, keys) in enumerate(zip(*PACKED, strict=True)):
            assert (found[b, :, rows:] == 0).all()
            assert (found[b, :, :, keys:] == 0).all()


@pytest.mark.parametrize("op", ["bias", "slopes"])
def test_impossible_lengths_are_nan(op, monkeypatch):
    """On mps nobody else sees them: nothing is read outside, and what they touch is NaN."""
    q, k, v = make_qkv(batch=3, dtype=torch.float16)
    lengths = torch.tensor([60, 30, 65]).int()
    dout, dlse = make_gradients(q, v, q.shape[:3])
    added = {"attn_bias": normal(3, 1, 33, 65), "alibi_slopes": normal(3, 2)}
    options = {"seqused_k": lengths} | added
    _, lse = attention(q, k, v, **options)
    with simulate(check=True):
        after_the_checks(monkeypatch, lengths, [60, 66, 65])
        run = getattr(torch.ops.metal_attn, f"flash_bwd_{op}")
        found = run(dout, q, k, v, lse, dlse, **options)
    assert found[1].isnan().all()
    assert found[::2].isfinite().all()


# --- arguments ---


def test_no_rows(device):
    """Nothing is launched, and every element is 0."""
    for shape in ({"q_length": 0}, {"kv_length": 0}, {"batch": 0}):
        q, k, v = problem(**shape)
        sizes = [q.shape[0], 4, q.shape[2], k.shape[2]]
        for bias in (normal(*sizes), normal(*(min(size, 1) for size in sizes)), normal(1)):
            options = {"attn_bias": bias, "alibi_slopes": SLOPES}
            dout, dlse = make_gradients(q, v, q.shape[:3])
            found = run_ops(dout, dlse, q, k, v, [], device, options)
            for name, gradient in found.items():
                assert gradient.shape == options[name].shape
                assert (gradient == 0).all()


def arguments(**changes):
    q, k, v = problem()
    dout, dlse = make_gradients(q, v, q.shape[:3])
    given = {"dout": dout, "q": q, "k": k, "v": v, "softmax_lse": dlse, "delta": dlse}
    return given | changes


def call(op, given):
    names = ("dout", "q", "k", "v", "softmax_lse", "delta")
    options = {name: value for name, value in given.items() if name not in names}
    return getattr(torch.ops.metal_attn, f"flash_bwd_{op}")(*(given[n] for n in names), **options)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(
    "op, option, changes, message",
    [
        ("bias", None, {}, "attn_bias is None"),
        ("bias", None, {"attn_mask": random_mask(77, 101)}, "attn_bias is None"),
        ("slopes", None, {}, "alibi_slopes is None"),
        ("bias", "attn_bias", {"dout": normal(2, 4, 77, 15)}, "dout has shape"),
        ("bias", "attn_bias", {"dout": normal(2, 4, 77, 16).half()}, "dout has dtype"),
        ("bias", "attn_bias", {"dout": normal(2, 4, 16, 77).mT}, "dout has strides"),
        ("slopes", "alibi_slopes", {"softmax_lse": normal(2, 4, 76)}, "softmax_lse has shape"),
        ("bias", "attn_bias", {"delta": normal(2, 4, 77).double()}, "delta has dtype"),
        ("bias", "attn_bias", {"delta": normal(2, 77, 4).mT}, "delta has strides"),
        ("bias", "attn_bias", {"normalisers": normal(0)}, "normalisers has shape"),
        ("bias", "attn_bias", {"k": normal(2, 3, 101, 16)}, "must divide|number of heads"),
    ],
)
def test_bad_arguments(op, option, changes, message, where):
    options = {"attn_bias": normal(77, 101), "alibi_slopes": SLOPES}
    given = arguments(**changes)
    if option is not None:
        given[option] = options[option]
    given = {name: value.to(where) for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        call(op, given)


def test_derivatives_of_the_ops_raise():
    given = arguments(attn_bias=normal(77, 101).requires_grad_())
    gradient = call("bias", given)
    with pytest.raises(NotImplementedError, match="flash_bwd_bias has no derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("op", ["bias", "slopes"])
def test_registration(op):
    given = arguments(attn_bias=normal(1, 77, 101).half(), alibi_slopes=SLOPES)
    tensors = tuple(given.pop(n) for n in ("dout", "q", "k", "v", "softmax_lse", "delta"))
    torch.library.opcheck(getattr(torch.ops.metal_attn, f"flash_bwd_{op}").default, tensors, given)


@pytest.mark.parametrize("sizes", [WHOLE, (101,), (1, 77, 1)])
def test_the_cpu_without_the_simulator(sizes):
    check_bias(*problem(torch.float16), attn_bias=normal(*sizes), alibi_slopes=SLOPES, device="cpu")
    q, k, v, *packing = make_packed(*PACKED, heads=4, kv_heads=2, head_dim=HOME)
    options = {"attn_bias": normal(77, 64), "alibi_slopes": SLOPES}
    check_varlen_bias(q, k, v, *packing, **options, device="cpu")


# --- any of it at once ---


@few_examples
@given(data=st.data())
def test_any_options(data, device):
    draw = data.draw
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    q_length, kv_length = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    head_dim, v_head_dim = draw(st.sampled_from(DRAWN_HEAD_DIMS))
    heads = kv_heads * group
    options = any_options(draw, batch, heads, q_length, kv_length, head_dim)
    if "attn_bias" not in options and "alibi_slopes" not in options:
        options["attn_bias"] = normal(q_length, 1)
    dtype = draw(st.sampled_from(DTYPES))
    q, k, v = make_qkv(batch, heads, kv_heads, q_length, kv_length, head_dim, v_head_dim, dtype)
    check_bias(q, k, v, **options, device=device)


def test_dropout(device):
    """The bias' gradient sums over the heads, that of the slopes over all else."""
    dropout = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 7])}
    added = {"attn_bias": normal(2, 1, 77, 101), "alibi_slopes": SLOPES}
    found = check_bias(*problem(torch.float16), **dropout, **added, device=device)
    assert found["attn_bias"].abs().max() > 0


@pytest.mark.parametrize("bias_name", ["attn_bias", "attn_mask"])
def test_autograd(bias_name, device):
    """Through flash_fwd, with the gradients of both results."""
    q, k, v = (tensor.to(device) for tensor in problem())
    added = {bias_name: normal(4, 1, 101), "alibi_slopes": SLOPES.clone()}
    dout, dlse = normal(2, 4, 77, 16, seed=9), normal(2, 4, 77, seed=10)
    leaves = {name: x.to(device).requires_grad_() for name, x in added.items()}
    results = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True, **leaves)
    seen = [x.to(device) for x in (dout, dlse)]
    found = torch.autograd.grad(results, list(leaves.values()), seen)
    exact = {name: x.double().requires_grad_() for name, x in added.items()}
    operands = [tensor.cpu().double() for tensor in (q, k, v)]
    results = attention(*operands, causal=True, **exact, compute_dtype=torch.float64)
    oracle = torch.autograd.grad(results, list(exact.values()), (dout.double(), dlse.double()))
    for gradient, expected in zip(found, oracle, strict=True):
        torch.testing.assert_close(gradient.cpu().double(), expected, rtol=1e-4, atol=1e-4)
