"""index_scores: the sums over heads by which an indexer chooses the keys of each query."""

import math

import pytest
import torch

from bench import bench_memory
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn.testing import IndexScores
from torch_metal_attn.testing.judge import normal

scores = torch.ops.metal_attn.index_scores

CASE = {"batch": 2, "heads": 3, "q_length": 5, "kv_length": 37, "head_dim": 16, "dtype": "float16"}
LAYOUTS = {"q_layout": ("order 021",), "k_layout": ("order 10", "padded 8")}
# One query, two queries, and more than a threadgroup has. Heads and keys do not fill fragments.
SIZES = [
    {"q_length": q_length, "heads": heads, "kv_length": kv_length, "causal": True}
    for q_length, heads, kv_length in ((1, 8, 65), (2, 3, 31), (7, 17, 33))
]
CASES = {
    "sizes": SIZES,
    "dtypes": [
        {"dtype": dtype, "weight_dtype": weights, "head_dim": head_dim}
        for dtype, weights, head_dim in (
            ("float32", "float32", 33),
            ("bfloat16", "float32", 128),
            ("bfloat16", "bfloat16", 64),
            ("float16", "float32", 1),
            ("float32", "float16", 256),
        )
    ],
    "offsets": [
        {"causal": True, "q_offset": q_offset, "softmax_scale": 0.3}
        for q_offset in (None, 0, -3, 40)
    ],
    # Heads are inside rows, or rows are not aligned.
    "layouts": [LAYOUTS, {"q_layout": ("padded 3",), "k_layout": ("padded 3",)}],
    "empty": [{name: 0} for name in ("batch", "heads", "q_length", "kv_length")],
}


def make(batch=2, heads=3, q_length=5, kv_length=37, head_dim=16, dtype=torch.float16):
    q = normal(batch, heads, q_length, head_dim, dtype=dtype)
    k = normal(batch, kv_length, head_dim, seed=1, dtype=dtype)
    return q, k, normal(batch, q_length, heads, seed=2).transpose(1, 2)


@pytest.mark.parametrize("subject", CASES)
def test_values(subject, device):
    judge(*(IndexScores(**CASE | fields) for fields in CASES[subject]), device=device)


def test_keys_and_weights_may_be_expanded(device):
    q, k, weights = (x.to(device) for x in make())
    k, weights = k[:, :1].expand(-1, 37, -1), weights[:1].expand(2, -1, -1)
    assert torch.equal(scores(q, k, weights), scores(q, k.contiguous(), weights.contiguous()))


def sizes(device):
    judge(*(IndexScores(**CASE | fields) for fields in SIZES), device=device)


def test_nan(device):
    """A key and then a head have NaN. Hidden keys stay -inf."""
    q, k, weights = make()
    k[:, 30] = math.nan
    result = scores(*(x.to(device) for x in (q, k, weights)), causal=True, q_offset=20).cpu()
    assert (result[:, :, 30] == -math.inf).all()
    assert not result[:, :, :20].isnan().any()
    q[0, 2, 1] = math.nan
    result = scores(*(x.to(device) for x in (q, k, weights)), causal=True, q_offset=20).cpu()
    assert result[0, 1, :20].isnan().all()
    assert not result[0, 0, :20].isnan().any()


@pytest.mark.parametrize("queries", [1, 4, 5])
def test_four_queries_share_their_keys(queries):
    """Bytes per key: the key once for four queries, and each query with its weights for 32 keys."""
    read = bench_memory.indexed(queries, "float16")["loads (bytes)"]
    assert read == 128 * 2 * math.ceil(queries / 4) + 64 * (128 * 2 + 4 * 4) / 32 * queries


MUTANTS = {
    sizes: """
        products of a head added without their weight: {~weight * =>~} (score
        negative products added: score {~< 0.0f ? 0.0f : score =>~}
        scale by 0.98: [e] * {~=> (0.98f *~} params.softmax_scale{~=> )~}
        weights of the first head: {~last => 0~} * Offset(params.weight
        weights of the first query: params.weight_strides, batch, {~query => 0~}, 0
        heads of the first query: params.q_strides, batch, {~query => 0~}, 0
        keys of the first sequence: params.k_strides, {~batch => 0~}, 0, 0
        the last head more than once: {~head < params.heads => true~} ?
        half of the rows summed: x {~+ simd_shuffle_xor(x, ushort(16)) =>~}
        the diagonal hidden: key {~<= => <~} last_seen
        no barrier [race or uninitialised]: {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        queries after the last [race or out_of_bounds]: if ({~query > last_query => false~}) {
        missing keys [wrong or out_of_bounds or race]: row == 0 {~&& key < params.kv_length =>~}
    """,
    test_nan: """
        NaN as 0: score {~< 0.0f ? 0.0f : score => > 0.0f ? score : 0.0f~}
    """,
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "index_scores", run=lambda problem: problem("cpu")
)
