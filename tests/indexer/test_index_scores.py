"""index_scores: the sums over heads by which an indexer chooses each query's keys."""

import math

import pytest
import torch

from tests.helpers.cases import each_case
from tests.helpers.mutants import mutant_tests
from tests.helpers.refused import refused_alike
from torch_metal_attn.ops.index_scores import index_scores
from torch_metal_attn.testing.judge import ROUNDING, normal, on

scores = torch.ops.metal_attn.index_scores


def make(
    batch=2, heads=3, q_length=5, kv_length=37, head_dim=16, dtype=torch.float16, weights=None
):
    q = normal(batch, heads, q_length, head_dim, dtype=dtype)
    k = normal(batch, kv_length, head_dim, seed=1, dtype=dtype)
    shares = normal(batch, q_length, heads, seed=2, dtype=weights or torch.float32)
    return q, k, shares.transpose(1, 2)


def hold(q, k, weights, device, **options):
    """Within float32's rounding of the largest terms, in float64; the same keys are hidden."""
    found = scores(*(x.to(device) for x in (q, k, weights)), **options).cpu()
    exact = index_scores(q.double(), k.double(), weights.double(), **options)
    assert found.dtype == torch.float32
    assert torch.equal(found == -math.inf, exact == -math.inf)
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    norms = [x.double().norm(dim=-1) for x in (q, k)]
    terms = torch.einsum("bhq,bhq,bk->bqk", weights.double().abs(), norms[0], norms[1])
    seen = exact > -math.inf
    apart = (found.double() - exact)[seen].abs()
    assert (apart <= 4 * ROUNDING[torch.float32] * abs(scale) * terms[seen]).all()


def sizes(device="cpu"):
    """One query, two and more than a threadgroup has; heads and keys that fill no fragment."""
    for q_length, heads, kv_length in ((1, 8, 65), (2, 3, 31), (7, 17, 33)):
        hold(*make(q_length=q_length, heads=heads, kv_length=kv_length), device, causal=True)


@pytest.mark.parametrize(
    ("dtype", "weights", "head_dim"),
    [
        (torch.float32, torch.float32, 33),
        (torch.bfloat16, torch.float32, 128),
        (torch.bfloat16, torch.bfloat16, 64),
        (torch.float16, torch.float32, 1),
        (torch.float32, torch.float16, 256),
    ],
)
def test_dtypes(dtype, weights, head_dim, device):
    hold(*make(dtype=dtype, weights=weights, head_dim=head_dim), device)


def test_sizes(device):
    sizes(device)


@pytest.mark.parametrize("q_offset", [None, 0, -3, 40])
def test_offsets(q_offset, device):
    hold(*make(), device, causal=True, q_offset=q_offset, softmax_scale=0.3)


def test_strides(device):
    """Heads inside rows, a broadcast key, rows that are not aligned."""
    q, k, weights = make()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.nn.functional.pad(k, (1, 2))[..., 1:17]
    hold(q, k[:, :1].expand(-1, 37, -1), weights[:1].expand(2, -1, -1), device)
    hold(q, k, weights, device)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"heads": 0}, {"q_length": 0}, {"kv_length": 0}])
def test_empty(sizes, device):
    q, k, weights = make(**sizes)
    found = scores(*(x.to(device) for x in (q, k, weights)))
    assert found.shape == (q.shape[0], q.shape[2], k.shape[1])
    assert (found == 0).all()


def nan(device="cpu"):
    """Of a head, of a key, and of a weight; what is hidden shows none."""
    q, k, weights = make()
    k[:, 30] = math.nan
    found = scores(*(x.to(device) for x in (q, k, weights)), causal=True, q_offset=20).cpu()
    assert (found[:, :, 30] == -math.inf).all()
    assert not found[:, :, :20].isnan().any()
    q[0, 2, 1] = math.nan
    found = scores(*(x.to(device) for x in (q, k, weights)), causal=True, q_offset=20).cpu()
    assert found[0, 1, :20].isnan().all()
    assert not found[0, 0, :20].isnan().any()


def test_nan(device):
    nan(device)


def test_it_has_no_gradient(device):
    q, k, weights = (x.to(device).requires_grad_() for x in make())
    with pytest.raises(NotImplementedError, match="index_scores"):
        scores(q, k, weights).sum().backward()


@each_case(
    "options, message",
    [
        ({"k": torch.zeros(2, 37, 8).half()}, r"k has shape \(2, 37, 8\)"),
        ({"k": torch.zeros(2, 37, 16)}, "k has dtype float32 and q float16"),
        ({"weights": torch.zeros(2, 3, 4)}, r"weights has shape \(2, 3, 4\)"),
        ({"weights": torch.zeros(2, 3, 5).int()}, "weights has dtype int32"),
        ({"q_offset": 3}, "q_offset is 3 and causal is False"),
        ({"softmax_scale": math.inf}, "softmax_scale is inf"),
        ({"q_offset": 2**33, "causal": True}, "q_offset is 8589934592"),
    ],
)
def test_refused(options, message, device):
    """The error is the same with data and without."""
    given = dict(zip(("q", "k", "weights"), make(), strict=True)) | options

    def call(place):
        return lambda: scores(**on(place, given))

    refused_alike(message, call(device), call("meta"))


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
        queries behind the last [race or out_of_bounds]: if ({~query > last_query => false~}) {
        keys behind the last [wrong or out_of_bounds or race]:
            row == 0 {~&& key < params.kv_length =>~}
    """,
    nan: """
        NaN as 0: score {~< 0.0f ? 0.0f : score => > 0.0f ? score : 0.0f~}
    """,
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "index_scores")
