"""float32 on tensor tiles, if TF32 is allowed, against torch's products in TF32."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.attention import held_cases
from tests.attention.flash_bwd_check import backward, exact_forward, hold_gradients, make_gradients
from tests.attention.flash_fwd_check import ACCUMULATION, check_either_precision, make_qkv
from tests.attention.held_cases import FORWARD, HOME, LENGTHS, PACKED, SCORES, SIZES, hold, rotated
from tests.attention.test_flash_bwd_sharp import check_sharp
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import allow_tf32, explain, simulate, tf32_allowed
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime import extension, tensor_tiles
from torch_metal_attn.testing.oracle import torch_gradient_errors
from torch_metal_attn.testing.tf32 import UNIT_ROUNDOFF, rounded_to_tf32

F32 = torch.float32
ops = torch.ops.metal_attn
CPU = torch.device("cpu")
FORWARD_KERNELS = {"flash_fwd_tensor"}
GRADIENTS = {"flash_bwd_dq_tensor", "flash_bwd_dkv_tensor"}


def nan_and_infinity():
    """NaN with any bits reaches the outputs of the queries that see it, and no other output."""
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1):
        q, k, v, _ = small_problem()
        v[:, :, -1, 3] = torch.inf
        k.view(torch.int32)[0, 1, 5, 2] = bits
        v.view(torch.int32)[0, 0, 6, 4] = bits
        out, _ = ops.flash_fwd(q, k, v)
        assert out[0, 1].isnan().all()
        assert out[0, 0, :, 4].isnan().all()
        assert (out[0, 0, :, 3] == torch.inf).all()
        assert out[0, 0, :, 5:].isfinite().all()


def equal_values():
    """Weights lose low bits in TF32, but the mean of equal values is exact."""
    q, k, v, _ = small_problem()
    out, _ = ops.flash_fwd(4 * q, k, torch.ones_like(v))
    assert ((out - 1).abs() <= ACCUMULATION).all()


def small_problem(q_length=45, kv_length=90):
    q, k, v = make_qkv(q_length=q_length, kv_length=kv_length, head_dim=HOME)
    return q, k, v, make_gradients(q, v, q.shape[:3], dlse=False)[0]


def either_precision():
    check_either_precision(lambda: backward(*small_problem(), None, CPU, {}, run_forward=True))


def one_key():
    """The only weight is 1, so the output is the value, rounded to 11 bits."""
    q, k, v, dout = small_problem(33, 1)
    dout[:, :, 1:] = 0
    out, *_, dv, _ = backward(q, k, v, dout, None, CPU, {}, run_forward=True)
    assert torch.equal(out, rounded_to_tf32(v).expand_as(out))
    assert torch.equal(dv, rounded_to_tf32(dout[:, :, :1]))


def other_statistics():
    """The log-sum-exp is that of a forward in another precision."""
    q, k, v, dout = small_problem()
    out, lse = exact_forward(q, k, v, {})
    lse += 0.25 * torch.arange(45.0).sin()
    results = ops.flash_bwd(dout, None, q, k, v, out, lse, exact_delta=True)[:3]
    hold_gradients(q, k, v, dout, None, (*exact_forward(q, k, v, {}), *results), {})


def second_pass():
    """Values of 11 bits have a large mean. Only dout is rounded, and delta lacks this error."""
    q, k, v, dout = small_problem(21, 70)
    v = rounded_to_tf32(v + 1000)
    _, _, dq, *_ = backward(q, k, v, dout, None, CPU, {})
    leaf = q.double().requires_grad_()
    out, _ = attention(leaf, k, v, compute_dtype=torch.float64)
    (exact,) = torch.autograd.grad(out, leaf, dout.double())
    assert (dq - exact).abs().max() <= 2 * torch_gradient_errors(q, k, v, dout, {})[0]


def case(**fields):
    return held_cases.case(tiles="TF32", dtype="float32", **fields)


# Gradients of a bias and of slopes are computed in float32.
ADDED = {"attn_mask": "bool bhqk", "attn_bias": "float16 qk", "alibi_slopes": "h"}
CHUNKED = {"attention_chunk": 21, "q_offset": 0, "causal": True}
FORWARDS = [
    case(**SIZES, **CHUNKED, **LENGTHS, cache="indexed", cache_dtype="bfloat16"),
    # Scores have two chains, Q is read twice, and the last slice of V is a span too long.
    case(
        **SIZES | SCORES | ADDED | FORWARD,
        causal=True,
        q_offset=-2,
        head_dim=136,
        v_head_dim=288,
    ),
    case(**SIZES | {"head_dim": 64}, cache="paged", format="q8_0"),
    case(**PACKED, cache="paged", page=24, cache_dtype="float16", window_size_left=30),
]
BACKWARDS = [
    # Two SIMD groups share rows, and gradients have slices.
    case(
        **SIZES | SCORES | LENGTHS | CHUNKED | rotated(14),
        head_dim=200,
        v_head_dim=40,
        attn_mask="bool bhqk",
    ),
    case(**PACKED, window_size_left=40, head_dim=11, v_head_dim=13, rotary="qk", rotary_columns=8),
]


@pytest.fixture(autouse=True)
def m5(gpu):
    gpu("Apple M5")
    with allow_tf32():
        yield


@pytest.mark.parametrize("kernels, cases", [(FORWARD_KERNELS, FORWARDS), (GRADIENTS, BACKWARDS)])
def test_values(kernels, cases):
    with simulate(check=True) as run:
        hold(cases, CPU)
    assert kernels <= set(run.counters)
    assert not {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"} & set(run.counters)


def test_gradients_of_a_bias_are_in_float32():
    with simulate(check=True) as run:
        check_sharp("torch's sample", F32, CPU)
    assert {"flash_bwd_dq", "flash_bwd_dkv"} <= set(run.counters)
    assert not GRADIENTS & set(run.counters)


def test_every_element_is_within_the_bound():
    """The bound is in docs/numerics.md. Rows are sharp, so that rounding matters."""
    q, k, v = (x.double() for x in make_qkv(heads=4, q_length=45, kv_length=90, head_dim=64))
    q *= 3
    scale = 64**-0.5
    exact, exact_lse = attention(q, k, v, softmax_scale=scale, compute_dtype=torch.float64)
    with simulate(check=True):
        operands = (x.float() for x in (q, k, v))
        out, lse = ops.flash_fwd(*operands, softmax_scale=scale)
    u = UNIT_ROUNDOFF
    score_error = scale * (2 * u + u * u) * (q.abs() @ k.abs().mT).amax(-1, keepdim=True)
    weights = (scale * q @ k.mT).softmax(-1)  # [B, H, Lq, Lk]
    spread = torch.einsum("bhij,bhijd->bhid", weights, (v[:, :, None] - exact[..., None, :]).abs())
    bound = (score_error.exp() - 1) * score_error.exp() * spread
    bound += u * (1 + 2**-9) * score_error.exp() ** 2 * (spread + bound)
    bound += u * (2 * score_error).exp() * (weights @ v.abs())
    # float32 rounds too.
    assert ((out.double() - exact).abs() <= bound + ACCUMULATION * exact.abs().max()).all()
    assert ((lse.double() - exact_lse).abs() <= score_error[..., 0] + 1e-5).all()
    # The bound is tight: the error reaches a hundredth of it.
    assert (out.double() - exact).abs().max() > bound.max() / 100


def results():
    with simulate(check=True) as run:
        actual = backward(*small_problem(), None, CPU, {}, run_forward=True)
    return actual, set(run.counters)


def same(actual, others):
    return all(map(torch.equal, actual, others))


def test_allow_tf32_alone_decides(gpu, monkeypatch):
    tf32, kernels = results()
    assert kernels >= FORWARD_KERNELS | GRADIENTS
    gpu("Apple M4")
    precise, kernels = results()
    assert not kernels & (FORWARD_KERNELS | GRADIENTS)
    gpu("Apple M5")
    assert not same(tf32[1:], precise[1:])
    monkeypatch.setenv("TORCH_METAL_ATTN_TF32", "on")
    torch.set_float32_matmul_precision("high")
    try:
        with allow_tf32(False):
            assert same(results()[0], precise)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert same(results()[0], tf32)


def test_the_environment_variable_is_the_default(monkeypatch):
    by_environment = -1  # the environment variable decides
    before = extension.load().metal_attn_allow_tf32(by_environment)
    try:
        assert not tf32_allowed()
        monkeypatch.setenv("TORCH_METAL_ATTN_TF32", "on")
        assert tf32_allowed()
        assert "float32 is rounded to 11 bits, as TORCH_METAL_ATTN_TF32 is on" in reason()
        monkeypatch.setenv("TORCH_METAL_ATTN_TF32", "yes")
        wrong = "TORCH_METAL_ATTN_TF32 is 'yes'; it must be off or on"
        for function in (tf32_allowed, reason, results):
            with pytest.raises(ValueError, match=wrong):
                function()
        assert wrong in tensor_tiles.description()
        with tensor_tiles.off():
            assert wrong in tensor_tiles.description()
        # allow_tf32 has priority over the environment variable.
        with allow_tf32(False):
            assert not tf32_allowed()
        for off in ("off", ""):
            monkeypatch.setenv("TORCH_METAL_ATTN_TF32", off)
            assert not tf32_allowed()
    finally:
        extension.load().metal_attn_allow_tf32(before)


def test_allow_tf32_blocks_nest():
    with allow_tf32(False):
        assert not tf32_allowed()
        with allow_tf32():
            assert tf32_allowed()
        assert not tf32_allowed()
        with pytest.raises(RuntimeError), allow_tf32():
            raise RuntimeError
        assert not tf32_allowed()
    assert tf32_allowed()
    with pytest.raises(TypeError, match="allowed is 'on'; it must be a bool"):
        allow_tf32("on")


def reason(**more):
    q, k, v = make_qkv(head_dim=64)
    packed = torch.ops.metal_attn_explain.flash_fwd(q, k, v, **more)
    return extension.launches(packed)[-1]["reason"]


def test_explain_says_why_float32_is_rounded():
    assert reason().startswith("tensor tiles: ")
    rounded = "float32 is rounded to 11 bits, as allow_tf32 allows TF32"
    assert rounded in reason()
    training = explain(*make_qkv(head_dim=64), backward=True).training
    assert {kernel.reason for kernel in training.kernels.values()} == {rounded}
    for added in ({"attn_bias": torch.zeros(33, 65)}, {"alibi_slopes": torch.ones(2)}):
        biased = explain(*make_qkv(head_dim=64), backward=True, **added)
        assert "gradients with attn_bias or alibi_slopes have 8x8 tiles only" in str(biased)
        assert not GRADIENTS & set(biased.training.kernels)
    used = "used in float16 and bfloat16; used in float32 (allow_tf32 allows TF32)"
    assert tensor_tiles.description() == used
    with allow_tf32(False):
        why = "tensor operations reduce float32 to 11 bits, and TF32 is not allowed"
        assert reason().endswith(f"no tensor tiles, as {why}")
        assert tensor_tiles.description().endswith(f"; not in float32: {why}")


def test_tuned_tables_have_rows_for_tf32():
    def keys():
        explained = explain(*make_qkv(head_dim=64), backward=True)
        kernels = explained.kernels | explained.training.kernels
        return {kernel.key for kernel in kernels.values() if kernel.key}

    tf32 = keys()
    with allow_tf32(False):
        assert not tf32 & keys()


def test_autograd_and_compiled_graphs_follow_allow_tf32(gpu):
    """Every thread reads the setting when it chooses a kernel, also in a compiled graph."""

    @torch.compile(backend="aot_eager")
    def attend(q, k, v):
        return ops.flash_fwd(q, k, v)[0].sum()

    def kernels():
        qkv = [x.requires_grad_() for x in small_problem()[:3]]
        with simulate(check=True) as run:
            attend(*qkv).backward()
        return set(run.counters)

    assert kernels() >= FORWARD_KERNELS | GRADIENTS
    with allow_tf32(False):
        assert not kernels() & (FORWARD_KERNELS | GRADIENTS)
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(tf32_allowed).result()
    assert kernels() >= FORWARD_KERNELS | GRADIENTS


MUTANTS = {
    one_key: """
        fwd, bwd_dkv: operands cut, not rounded: {~scale * unit_roundoff<half>() + =>~} x
        fwd: columns of one chunk: fragments[{~i => (1 - i)~} * PAIRS + j] = chunk_pair<T>(exists
    """,
    nan_and_infinity: """
        fwd: NaN made a number: {~=> fmax(~}scale * unit_roundoff<half>() + x{~=> , LOWEST_FLOAT)~}
    """,
    equal_values: """
        fwd: divided by the sum before the cut: {~softmax.weights[i].row_sum(keys_sum) => keys_sum~}
    """,
    either_precision: """
        fwd, bwd_dkv: not rounded: {~unit.fragments[j] = rounded_operand(unit.fragments[j]); =>~}
        fwd: operands of 12 bits: KEPT_BITS = {~0xffffe000u => 0xfffff000u~}
        bwd_dq: gradients left to the GPU: {~round_to_cut(gradients); =>~}
        bwd_dkv: weights left to the GPU: {~round_to_cut(weights); =>~}
    """,
    other_statistics: """
        bwd_dkv: weights of the log-sum-exp alone [everywhere]: [j] *= {~factor => 1.0f~};
        bwd_dkv: factors of another query:
            columns_of(own_weight_factor, {~column + column_offset(j) => (column +
            column_offset(j)) ^ 2~})
    """,
    second_pass: """
        bwd_dq: no second pass: if ({~!any_simdgroup(second_pass, votes, simdgroup, lane) => true~})
    """,
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_{}_tensor", together=True
)
