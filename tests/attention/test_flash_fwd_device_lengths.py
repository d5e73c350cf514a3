"""Invalid lengths and indices that only the device sees give NaN. Nothing is read out of bounds.

On mps the host does not read lengths. These tests make them invalid after the op's checks.
"""

from functools import partial

import pytest
import torch

from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.held_cases import HOME
from tests.cache.kv_caches import paged
from torch_metal_attn import simulate
from torch_metal_attn.simulator import engine
from torch_metal_attn.testing.judge import ints

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def after_the_checks(monkeypatch, tensor, values):
    """Sets `tensor` to `values` just before the kernel runs."""
    run = engine.run

    def run_with_bad_values(*arguments, **options):
        tensor.copy_(torch.tensor(values))
        return run(*arguments, **options)

    monkeypatch.setattr(engine, "run", run_with_bad_values)


def results_of(run, tensor, values):
    """The results of `run()` with `tensor` set to `values` just before the kernel runs."""
    before = tensor.clone()
    with pytest.MonkeyPatch.context() as patch:
        after_the_checks(patch, tensor, values)
        results = run()
    tensor.copy_(before)
    return results


# Valid values, the smallest invalid value above them, and the other options.
NUMBERS = {
    "seqused_k": ([60, 30, 65], 66, {"leftpad_k": ints(0, 0, 0)}),
    "leftpad_k": ([60, 30, 65], 66, {"seqused_k": ints(65, 65, 65)}),
    "cache_batch_idx": ([2, 0, 1], 3, {}),
}


@pytest.mark.parametrize("bad", [-1, None, INT_MIN, INT_MAX])
@pytest.mark.parametrize("name", NUMBERS)
def test_an_invalid_number_makes_its_sequence_nan(name, bad):
    qkv = make_qkv(batch=3, head_dim=HOME, dtype=torch.float16)
    valid, first_invalid, others = NUMBERS[name]
    numbers = ints(*valid)
    run = partial(torch.ops.metal_attn.flash_fwd, *qkv, **others | {name: numbers})
    with simulate(check=True):
        expected = run()
        bad = first_invalid if bad is None else bad
        actual = results_of(run, numbers, [valid[0], bad, valid[2]])
    for result, valid_result in zip(actual, expected, strict=True):
        assert result[1].isnan().all()
        assert torch.equal(result[::2], valid_result[::2])


@pytest.mark.parametrize("bad", [-1, 9, INT_MIN, INT_MAX])
def test_an_invalid_page_number_makes_its_readers_nan(bad):
    q, k, v = make_qkv(batch=2, q_length=40, kv_length=40, head_dim=32, dtype=torch.float16)
    keys, values, where = paged(k, v, [40, 40], 16)
    table = where["block_table"]
    broken = table.clone()
    broken[0, 1] = bad  # keys 16..31
    options = {"causal": True, "seqused_k": ints(40, 40), "block_table": table}
    run = partial(torch.ops.metal_attn.flash_fwd, q, keys, values, **options)
    with simulate(check=True):
        expected, actual = run(), results_of(run, table, broken.tolist())
    for result, valid_result in zip(actual, expected, strict=True):
        assert result[0, :, 16:].isnan().all()
        assert torch.equal(result[0, :, :16], valid_result[0, :, :16])
        assert torch.equal(result[1], valid_result[1])


# There are sequences of 20, 40 and 10 queries, and of 30, 5 and 60 keys. Each case has an argument,
# its invalid values, and the first and the end of the rows that must be NaN.
PACKED = {
    "queries past the end": ("cu_seqlens_q", [0, 20, 60, 71], 60, 70),
    "queries far past the end": ("cu_seqlens_q", [0, 20, 60, INT_MAX], 60, 70),
    "more queries than the longest": ("cu_seqlens_q", [0, 20, 20, 70], 20, 70),
    "queries before the start": ("cu_seqlens_q", [INT_MIN, 20, 60, 70], 0, 20),
    "first queries skipped": ("cu_seqlens_q", [3, 20, 60, 70], 0, 20),
    "keys past the end": ("cu_seqlens_k", [0, 30, 35, 96], 60, 70),
    "keys far past the end": ("cu_seqlens_k", [0, 30, 35, INT_MAX], 60, 70),
    "keys before the start": ("cu_seqlens_k", [-1, 30, 35, 95], 0, 20),
    "more keys than the longest": ("cu_seqlens_k", [0, 30, 30, 95], 60, 70),
    "keys go back": ("cu_seqlens_k", [0, 30, 25, 60], 20, 60),
}


@pytest.mark.parametrize("case", PACKED)
def test_invalid_cu_seqlens_make_their_sequences_nan(case, monkeypatch):
    name, values, start, end = PACKED[case]
    q, k, v, *packing = make_packed([20, 40, 10], [30, 5, 60], head_dim=HOME, dtype=torch.float16)
    after_the_checks(monkeypatch, packing[name == "cu_seqlens_k"], values)
    with simulate(check=True):
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(q, k, v, *packing, causal=True)
    assert out[start:end].isnan().all()
    assert lse[:, start:end].isnan().all()
    assert not out.isnan().all()
