"""Counts of operations in the inner loops of the gradient kernels."""

import pytest
import torch

from bench.bench_inner_loops import FEATURES, GRADIENTS, ours, tile
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime import extension
from torch_metal_attn.tuned import tiles


@pytest.mark.parametrize(
    "kernel, head_dim, dtype, loads",
    [
        ("flash_bwd_dq", 64, torch.float16, 114),  # the tile's rows are in threadgroup memory
        ("flash_bwd_dq", 128, torch.bfloat16, 200),
        ("flash_bwd_dkv", 64, torch.float16, 152.5),
        ("flash_bwd_dkv", 128, torch.bfloat16, 385),
    ],
)
def test_inner_loop(kernel, head_dim, dtype, loads):
    loop = ours(kernel, head_dim, dtype)
    _, block, slices = tile(kernel, head_dim, dtype)
    assert slices == 1
    # Products that give the scores, the weights' gradients, and dq, or dk and dv.
    products = 3 if kernel == "flash_bwd_dq" else 4
    assert loop["MMA"] == products * 32 / 8 * head_dim / 8
    assert loop["converts"] == 0
    assert loop["exps"] == 8, "one for each of a thread's scores"
    assert loop["shuffles"] == 0
    # SIMD groups of dk and dv exchange weights after a third barrier.
    assert loop["barriers"] * block / 32 <= 2 + (kernel == "flash_bwd_dkv"), "two a block"
    assert loop["tg loads"] + loop["device loads"] <= loads


# A feature that changes counts is tested alone. Features that change no count share a test.
TOGETHER = [
    *(("none",), ("chunk", "causal", "window", "seqused_k", "softcap", "ALiBi", "sink")),
    *(("bool mask", "bias"), ("rotary of q and k",)),
]


def test_every_feature_is_counted():
    assert {feature for features in TOGETHER for feature in features} == FEATURES.keys()


def plain_tiles():
    q = torch.zeros(1, 1, 64, 64, dtype=torch.float16)
    packed = torch.ops.metal_attn_explain.flash_bwd(q, None, q, q, q, q, torch.zeros(1, 1, 64))
    kernels = {launch["kernel"]: launch for launch in extension.launches(packed)}
    return {kernel: kernels[kernel]["tuning"]["candidates"][0] for kernel in GRADIENTS}


@pytest.mark.parametrize("features", TOGETHER, ids=" and ".join)
@pytest.mark.parametrize("kernel", GRADIENTS)
def test_features(kernel, features):
    """No feature adds a product, an exponential or a barrier to a block."""

    def options(*problem):
        return {n: x for name in features for n, x in FEATURES[name](*problem).items()}

    # Another tile would change all counts. The tiles of both kernels are forced, so that the cases
    # of dq and of dkv compile the same code.
    with tiles.forced(plain_tiles()):
        plain = ours(kernel, 64, torch.float16)
        loop = ours(kernel, 64, torch.float16, options)
    assert loop["MMA"] == plain["MMA"]
    assert loop["exps"] == plain["exps"]
    assert loop["shuffles"] == 0
    # A position is converted once for all rows or columns of one or more fragments.
    converts = {"bias": 8, "rotary of q and k": 160, "ALiBi": 1}
    assert loop["converts"] <= sum(converts.get(feature, 0) for feature in features)
    assert loop["barriers"] == plain["barriers"]
    if not {"bool mask", "bias", "rotary of q and k"}.intersection(features):
        assert loop["tg loads"] + loop["device loads"] == plain["tg loads"] + plain["device loads"]


def exact_and_rounded(offset, causal):
    q, k, v, dout = (torch.randn(1, 1, 256, 64) for _ in range(4))
    q, k, v, dout = (x.half() for x in (q, k, v + offset, dout))
    out, lse = attention(q, k, v, causal=causal)
    results = []
    for exact_delta in (True, False):
        with simulate(count=True) as run:
            torch.ops.metal_attn_simulator.flash_bwd(
                *(dout, None, q, k, v, out, lse), exact_delta=exact_delta, causal=causal
            )
        results.append(run.counters["flash_bwd_dq"])
    return results


@pytest.mark.parametrize("causal", [False, True])
def test_an_exact_delta_costs_little_where_its_rounding_is_small(causal):
    """An exact delta adds four shuffles per row fragment, and barriers. Some rows walk twice."""
    exact, rounded = exact_and_rounded(0.0, causal)
    assert exact.matrix_operations <= 1.03 * rounded.matrix_operations
    assert exact.threadgroup_barriers <= rounded.threadgroup_barriers + 4 * 3
    assert exact.shuffles == 4 * 256 / 8


def test_a_second_walk_has_two_products():
    exact, rounded = exact_and_rounded(30.0, False)
    assert exact.matrix_operations == 5 / 3 * rounded.matrix_operations


def counters(q_length, kv_length, **options):
    q, dout, out = (torch.randn(1, 1, q_length, 64).half() for _ in range(3))
    k, v = (torch.randn(1, 1, kv_length, 64).half() for _ in range(2))
    with simulate(count=True) as run:
        torch.ops.metal_attn_simulator.flash_bwd(
            dout, None, q, k, v, out, torch.zeros(1, 1, q_length), **options
        )
    return [run.counters[kernel] for kernel in GRADIENTS]


def test_causal_work_is_that_of_the_keys_seen(cores):
    """Blocks that no query sees are skipped: little more than half of full attention's products."""
    cores(1)  # the rows keep one core busy without splits
    full = counters(512, 512)
    causal = counters(512, 512, causal=True)
    for some, all_ in zip(causal, full, strict=True):
        assert some.matrix_operations <= 0.56 * all_.matrix_operations
        # The rows of a tile are stored once, even if they see few keys.
        assert some.stores["threadgroup"] <= 0.65 * all_.stores["threadgroup"]


@pytest.mark.parametrize("side", [0, 1])
def test_windows_make_work_linear(side, cores):
    cores(1)  # so that long and short problems have the same tiles
    window = {"window_size_left": 40, "window_size_right": 20}
    short, long = (counters(n, n, **window)[side] for n in (256, 512))
    # More than 2, because windows are cut off at the ends.
    assert long.matrix_operations <= 2.2 * short.matrix_operations
    assert long.load_bytes["device"] <= 2.2 * short.load_bytes["device"]


def test_queries_that_see_no_key_cost_nothing():
    for kernel in counters(64, 512, window_size_left=5, q_offset=5000):
        assert kernel.matrix_operations == 0
        assert kernel.threadgroup_barriers == 0
