"""Lengths: odd ones, long ones, and more scores than 32 bits count."""

import math

import pytest
import torch

from tests.helpers import shader_params
from tests.mps_issues.reports import Report, normal, qkv, reported
from tests.sdpa.sdpa_check import check
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn import simulate


@reported(
    Report(
        "pytorch#169222",
        "Up to 8 queries: reads beyond keys that are no multiple of 32.",
        "Reads no key beyond the last.",
        lambda length: qkv((1, 4, 1, 64), (1, 4, length, 64)),
    ),
)
@pytest.mark.parametrize("length", [38, 39, 70])
def test_ends_within_a_block(report, length, device):
    q, *key_value = report.problem(length)
    beyond = torch.full((1, 4, 64, 64), math.nan)
    k, v = (torch.cat([t, beyond], 2)[:, :, :length] for t in key_value)
    check(q, k, v, device=device)


def in_four_parts(q, k, v, attn_mask=None, *, enable_gqa):
    assert attn_mask is None
    assert enable_gqa
    return torch.ops.metal_attn.flash_decode(q, k, v, num_splits=4)[0]


@reported(
    Report(
        "pytorch#174861 pytorch#174945",
        "2 passes over 1,024 keys: out of bounds, runs differ.",
        "In 4 parts too: right, and every run has the same bits.",
        lambda: qkv((1, 32, 1, 128), (1, 2, 1024, 128), dtype=torch.bfloat16),
    ),
)
def test_two_passes(report, device):
    tensors = report.problem()
    q, k, v = (t.to(device) for t in tensors)
    for attend in (sdpa, in_four_parts):
        out = check(*tensors, device=device, attend=attend, enable_gqa=True)
        assert torch.equal(attend(q, k, v, enable_gqa=True).cpu(), out)


@reported(
    Report(
        "pytorch#190791",
        "bfloat16, 14,000 tokens: 2.4% off float32.",
        "At most twice the error of torch on the CPU.",
        lambda: qkv((1, 1, 8, 128), (1, 1, 14_000, 128), dtype=torch.bfloat16),
    ),
)
def test_long_bfloat16(report, device):
    check(*report.problem(), device=device)


@pytest.fixture
def untouched_memory(monkeypatch):
    """Tensors without memory behind them, as nothing is written to a recorded launch's."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@reported(
    Report(
        "pytorch#149261",
        "Stops the process: an array of over 2^32 bytes.",
        "No array of scores.",
        lambda: [torch.empty(1, 12, 29_640, 128)] * 3,
    ),
    Report(
        "pytorch#179592 pytorch#179352",
        "More than 2^32 scores: silently wrong.",
        "No array of scores, so no index of one.",
        lambda: [torch.empty(1, 8, 16_384, 64), *[torch.empty(1, 8, 65_536, 64)] * 2],
    ),
    Report(
        "pytorch#197636",
        "bmm of transposed keys, over 2^32 scores: silently wrong.",
        "No bmm, and no array of scores.",
        lambda: [torch.empty(65_552, 1, 256, 64)] * 3,
    ),
    Report(
        "ComfyUI#14837",
        "From about 2^31 scores on, output is silently corrupted.",
        "No array of scores.",
        lambda: [torch.empty(1, 56, 20_981, 128, dtype=torch.bfloat16)] * 3,  # in a comment
    ),
)
def test_more_scores_than_32_bits_count(report, untouched_memory):
    q, k, v = report.problem()
    with simulate(record=True) as run:
        out = sdpa(q, k, v)
    (launch,) = run.recorded
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    assert scores > 2**31
    # The inputs, the output and a log-sum-exp for each row are all that the kernel gets.
    bytes_of_slot = {buffer.slot: buffer.storage.numel() for buffer in launch.buffers}
    log_sum_exp = out.numel() // out.shape[-1] * 4
    assert sum(bytes_of_slot.values()) == sum(t.nbytes for t in (q, k, v, out)) + log_sum_exp
    # The grid has a threadgroup for all rows of every batch and head, and its loop all keys.
    params = shader_params.struct("FlashFwdParams").from_buffer_copy(launch.params)
    problem = params.problem
    tiles, heads, batch = launch.threadgroups
    rows = 8 * int(launch.defines["ROW_FRAGMENTS"]) * int(launch.defines["SIMDGROUPS"])
    assert tiles * rows >= q.shape[2] > (tiles - 1) * rows
    assert (heads, batch) == (q.shape[1], q.shape[0])
    assert (problem.q_length, problem.kv_length) == (q.shape[2], k.shape[2])
    # And the last row of each operand is where its strides say, counted in 64 bits.
    strides = {"q": problem.q_strides, "k": problem.k_strides, "v": problem.v_strides}
    for tensor, stride in zip((q, k, v, out), (*strides.values(), params.out_strides), strict=True):
        last = [size - 1 for size in tensor.shape[:3]]
        begin = last[0] * stride.batch + last[1] * stride.head + last[2] * stride.row
        assert begin == tensor.numel() - tensor.shape[3]


@reported(
    Report(
        "pytorch#152550",
        "Memory grows as the length varies (batch 4, 128 to 255).",
        "One compiled kernel for all, and no scratch memory.",
        lambda length: [normal(4, 8, length, 64)] * 3,
    ),
)
def test_many_lengths_are_one_kernel(report):
    kernels = set()
    for length in range(128, 256, 9):
        with simulate(record=True) as run:
            out = sdpa(*report.problem(length))
        kernels |= {(launch.kernel, *launch.defines.items()) for launch in run.recorded}
        written = {b.storage.numel() for launch in run.recorded for b in launch.buffers}
        assert written == {out.nbytes, out.numel() // 64 * 4}
    assert len(kernels) == 1
