"""Gradients of tensors that score_mod captures, against torch's own in float64."""

import pytest
import torch

from tests.flex.flex_check import (
    assert_within_twice,
    block_mask,
    check_flex_gradients,
    gradients,
    rand,
    torch_flex,
)
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import flex_attention, scores, simulate
from torch_metal_attn.flex import reference
from torch_metal_attn.testing.judge import normal

TOKENS = torch.arange(96) * 7 % 5


def everything(scales, table, bias, offsets):
    """Loads are indexed by head, by bucket, by the score's position and by the token of a key."""

    def mod(score, b, h, q_idx, kv_idx):
        bucket = (kv_idx - q_idx).clamp(-6, 6) + 6
        score = score * scales[h] + table[bucket, h] + scales[h].exp()
        return 3 * torch.tanh((score + bias[b, h, q_idx, kv_idx]) / 3) + offsets[TOKENS[kv_idx]]

    return mod


def of_queries(positions):
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score + positions[q_idx], -float("inf"))

    return mod


def several_loads(table):
    def mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx, 0] * table[kv_idx, 1] + table[-1, h]

    return mod


def folded(slopes, sink):
    """Values that depend only on captured tensors are computed outside of the kernel."""

    def mod(score, b, h, q_idx, kv_idx):
        score = score + torch.nn.functional.softplus(slopes * 2)[h] * (q_idx - kv_idx)
        return torch.where(kv_idx == 0, sink, score)

    return mod


def whole_rows(of_queries, of_keys, weights):
    """Sums and products of rows. The weights are in float64, which Metal lacks."""

    def mod(score, b, h, q_idx, kv_idx):
        both = (of_queries[q_idx] * of_keys[kv_idx, h] * weights).sum()
        score = score * of_keys[kv_idx, h].mean(-1) + both.to(score.dtype)
        return score + torch.dot(of_queries[h], of_keys[kv_idx, h])

    return mod


def element_by_element(of_queries, of_keys, weights):
    """The function of `whole_rows` without rows, because torch has no gradients of rows."""

    def mod(score, b, h, q_idx, kv_idx):
        rows = [(of_keys[kv_idx, h, i], of_queries[q_idx, i], of_queries[h, i]) for i in range(3)]
        both = sum(q * k * weights[i] for i, (k, q, _) in enumerate(rows))
        score = score * (sum(k for k, *_ in rows) / 3) + both.to(score.dtype)
        return score + sum(k * q for k, _, q in rows)

    return mod


def composed(bias):
    def mod(score, b, h, q_idx, kv_idx):
        near = torch.nn.functional.softplus(score * bias[h])
        return torch.logaddexp(score, bias[kv_idx]).masked_fill(q_idx < kv_idx, -3.0) + near

    return mod


def odd_indices(table, flipped, by_token):
    def mod(score, b, h, q_idx, kv_idx):
        score = score + table[h, b, 0] * table[b, h, -1] + flipped[kv_idx, q_idx].half().float()
        return score + torch.where(kv_idx < 10, by_token[TOKENS[q_idx]], by_token[0] * 0.1)

    return mod


def views(table, bias, slopes):
    """Views of rows, index_select and embedding."""

    def mod(score, b, h, q_idx, kv_idx):
        row = (
            bias[q_idx].view(12, 8)[kv_idx // 8, kv_idx % 8]
            + bias[q_idx][3:].split(4)[1].unsqueeze(0)[0, 1]
        )
        flipped = table[h].t()[kv_idx % 5, b] + bias.index_select(1, kv_idx)[q_idx, 0]
        near = torch.nn.functional.embedding(q_idx, bias)[kv_idx]
        first = bias.index_select(0, q_idx).view(-1)[kv_idx] + slopes[h].view(1).sum()
        return score * slopes.index_select(0, h.view(1)).view(()) + row + flipped + near * first

    return mod


def without_views(table, bias, slopes):
    def mod(score, b, h, q_idx, kv_idx):
        one = bias[q_idx, kv_idx]
        row, flipped = one + bias[q_idx, 8], table[h, b, kv_idx % 5] + one
        return score * slopes[h] + row + flipped + one * (one + slopes[h])

    return mod


CAPTURED = {
    odd_indices: (normal(2, 2, 3), normal(96, 80), normal(5)),
    everything: (
        normal(2).half(), normal(13, 2), normal(2, 2, 80, 96).bfloat16(), normal(5, seed=1)
    ),
    of_queries: (normal(80),),
    several_loads: (normal(96, 2),),
    folded: (normal(2), torch.tensor(0.5)),
    composed: (normal(96),),
    scores.alibi: (normal(2).abs(),),
    scores.relative_bias: (normal(2, 11),),
    scores.t5_buckets: (normal(8, 2),),
}  # fmt: skip


def test_gradients_of_the_kernels():
    qkv, captured = rand(batch=2, kv_heads=1), CAPTURED[everything]
    actual = check_flex_gradients(*qkv, everything, block_mask(), captured=captured)
    # Another order of threadgroups gives the same bits.
    arguments = qkv, everything, block_mask(), torch.float16, captured
    with simulate(check=True, seed=5):
        again = gradients(flex_attention, *arguments, return_lse=True, enable_gqa=True)[2:]
    assert all(map(torch.equal, actual, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_without_blocks(dtype):
    """Tensors in float64 are passed as float32. Two tiles of wide rows share threadgroup memory."""
    captured = [x.to(dtype) for x in CAPTURED[of_queries]]
    arguments = rand(dtype=torch.float32, head_dim=512 if dtype == torch.float64 else 16)
    check_flex_gradients(*arguments, of_queries, captured=captured)


@pytest.mark.parametrize("make", CAPTURED, ids=lambda make: make.__name__)
def test_gradients_of_the_reference(make):
    arguments = *rand(batch=2), make, block_mask()
    check_flex_gradients(*arguments, simulated=False, captured=CAPTURED[make])


def test_whole_rows():
    captured = normal(80, 3), normal(96, 2, 3, seed=1), normal(3).double()
    arguments = *rand(batch=2), element_by_element, block_mask()
    ours = whole_rows, block_mask()
    check_flex_gradients(*arguments, simulated=False, ours=ours, captured=captured)


def test_views():
    captured = normal(2, 2, 5), normal(80, 96), normal(2)
    arguments = *rand(batch=2), without_views, block_mask()
    check_flex_gradients(*arguments, simulated=False, ours=(views, block_mask()), captured=captured)
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    with simulate(record=True) as run:
        compiled(*rand(), views(*captured))
    torch.compiler.reset()
    assert "capture_7" in run.recorded[0].defines["FLEX_SCORE"]


def test_only_tensors_that_require_grad_have_gradients():
    q, k, v = rand()
    bias, hidden = (normal(96).requires_grad_() for _ in range(2))

    def mask_mod(b, h, q_idx, kv_idx):
        return hidden[kv_idx] > 0

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    mask = block_mask(mask_mod)
    flex_attention(q, k, v, mod, mask).sin().sum().backward()
    assert bias.grad is not None
    assert hidden.grad is None
    with torch.no_grad():
        assert not flex_attention(q, k, v, mod, mask).requires_grad


def test_a_tensor_whose_sums_are_too_large_is_refused():
    table = torch.zeros(1).expand(1 << 27).requires_grad_()

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx * 7]

    refusal = r"captures\[0\] has 134217728 elements.*need 2048 MiB and may have at most 1024"
    with simulate(record=True), pytest.raises(ValueError, match=refusal):
        flex_attention(*rand(q_length=8, kv_length=8), mod).sum().backward()


def indices_out_of_range():
    """On mps only the kernel checks indices. It skips indices that are out of range."""
    rows = 70
    results = []
    for size in (rows, 80):
        bias = normal(80, 96)[:size].requires_grad_()

        def mod(score, b, h, q_idx, kv_idx, bias=bias):
            return score + bias[q_idx, kv_idx]

        with simulate(check=True), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(reference, "check_indices", lambda *_: None)
            out = flex_attention(*rand(), mod)
            results += torch.autograd.grad(out[:, :, :rows].float().sin().sum(), [bias])
    assert torch.equal(results[0], results[1][:rows])


def gradient_of_the_table():
    scales, table, bias, offsets = CAPTURED[everything]

    def make(table):
        return everything(scales, table, bias, offsets)

    qkv, mask = rand(batch=2, kv_heads=1, q_length=77), block_mask(sizes=(77, 96))
    check_flex_gradients(*qkv, make, mask, captured=[table])


QUERIES, KEYS = 77, 91  # not multiples of the sizes of tiles
SEEN = torch.arange(KEYS) // 20 != 2


def roots(factors):
    """The derivatives with respect to the score and to a factor are infinite at 0."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.sqrt((score * factors[kv_idx]).abs())

    return mod


def shown(b, h, q_idx, kv_idx):
    return SEEN[kv_idx]


def test_infinite_slopes_of_masked_keys_are_ignored():
    """Masked keys are 0, like padding, and add no NaN to a gradient."""
    q, k, v = rand(q_length=QUERIES, kv_length=KEYS)
    k, factors = k * SEEN[:, None], normal(KEYS)
    mask = block_mask(shown, sizes=(QUERIES, KEYS))
    arguments = (q, k, v), roots, mask, q.dtype, [factors]
    dq, dk, dv, dfactors = gradients(flex_attention, *arguments, return_lse=True)[2:]
    few, seen_factors = ((q, k[:, :, SEEN], v[:, :, SEEN]), roots, None), [factors[SEEN]]
    exact = gradients(torch_flex, *few, torch.float64, seen_factors, torch.float64)[2:]
    rounded = gradients(torch_flex, *few, q.dtype, seen_factors)[2:]
    hidden = ~SEEN
    assert_within_twice(dq, exact[0], rounded[0])
    for i, gradient in ((1, dk), (2, dv)):
        assert_within_twice(gradient[:, :, SEEN], exact[i], rounded[i])
        assert (gradient[:, :, hidden] == 0).all()
    assert_within_twice(dfactors[SEEN], exact[3], rounded[3])
    assert (dfactors[hidden] == 0).all()


MUTANTS = {
    indices_out_of_range: """
        flash_bwd_captures: indices are clamped [wrong or race]: return {~outside || =>~} element
    """,
    gradient_of_the_table: """
        flash_bwd_captures: another copy [wrong or race]: {~split * SIMDGROUPS + =>~} simdgroup
        flash_bwd_captures: no last flush: {~sums.flush(lane); =>~} }
        flash_bwd_captures: no early flush: if ({~simd_max(leaves ? 1.0f : 0.0f) > 0.0f => false~})
        flash_bwd_captures: rows past the last: {~exists && =>~} score.y
        flash_bwd_captures: no share: gradient.x {~* share =>~}
        flash_bwd_captures: place of the next key: flex.place(product.y, i, key {~+ 1 =>~}
    """,
    test_infinite_slopes_of_masked_keys_are_ignored: """
        flash_bwd_dq: keys that do not exist:
            {~visible.apply<false>(slopes, first_query, block + column, 0.0f); =>~}
        flash_bwd_dkv: queries that do not exist:
            {~visible.apply<true>(slopes, lane_key, lane_query, 0.0f); =>~}
        flash_bwd_dq, flash_bwd_dkv: masked keys: {~slope = 0.0f; =>~}
        flash_bwd_captures: captured tensors: exists {~&& score.y != -INFINITY =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
