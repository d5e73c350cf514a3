"""Lengths: odd ones, long ones, and more scores than 32 bits count."""

import math
import struct

import pytest
import torch

from tests.helpers import shader_params
from tests.sdpa.reports import Report, normal, qkv, reported
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
        "2 passes over 1,024 keys: reads out of bounds.",
        "Right in 4 parts too; runs have equal bits.",
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


def empty(*shape, kv_length=None, dtype=torch.float32):
    """Query, key and value whose memory nothing has written."""
    batch, heads, length, head_dim = shape
    lengths = [length, *[kv_length or length] * 2]
    return [torch.empty(batch, heads, rows, head_dim, dtype=dtype) for rows in lengths]


@reported(
    Report(
        "pytorch#149261",
        "Stops the process: an array of over 2^32 bytes.",
        "No array of scores.",
        lambda: empty(1, 12, 29_640, 128),
    ),
    Report(
        "pytorch#179592 pytorch#179352",
        "More than 2^32 scores: silently wrong.",
        "No array of scores, so no index of one.",
        lambda: empty(1, 8, 16_384, 64, kv_length=65_536),
    ),
    Report(
        "pytorch#197636",
        "bmm of transposed keys, over 2^32 scores: silently wrong.",
        "No bmm, and no array of scores.",
        lambda: empty(65_552, 1, 256, 64),
    ),
    Report(
        "ComfyUI#14837",
        "From about 2^31 scores on, output is silently corrupted.",
        "No array of scores.",
        lambda: empty(1, 56, 20_981, 128, dtype=torch.bfloat16),  # of a comment
    ),
)
class TestManyScores:
    @pytest.fixture(autouse=True)
    def untouched_memory(self, monkeypatch):
        """Pages that nothing touches cost no memory."""
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def test_launch(self, report):
        q, k, v = report.problem()
        with simulate(record=True) as run:
            out = sdpa(q, k, v)
        launch, *others = run.recorded  # pieces of about a second each
        assert q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > 2**31
        # The inputs, the output and a log-sum-exp for each row are all that the kernel gets.
        given = sum(buffer.storage.numel() for buffer in launch.buffers)
        assert given == sum(t.nbytes for t in (q, k, v, out)) + out.numel() // out.shape[-1] * 4
        # The grid has a threadgroup for all rows of every batch and head, and its loop all keys.
        params = shader_params.struct("FlashFwdParams").from_buffer_copy(launch.params)
        problem = params.problem
        grid = struct.unpack("3I", launch.params[-12:]) if others else launch.threadgroups
        assert sum(math.prod(one.threadgroups) for one in run.recorded) == math.prod(grid)
        tiles, heads, batch = grid
        rows = 8 * int(launch.defines["ROW_FRAGMENTS"]) * int(launch.defines["SIMDGROUPS"])
        rows //= int(launch.defines.get("COLUMN_SIMDGROUPS", 1))
        assert tiles * rows >= q.shape[2] > (tiles - 1) * rows
        assert (heads, batch) == (q.shape[1], q.shape[0])
        assert (problem.q_length, problem.kv_length) == (q.shape[2], k.shape[2])
        # The last row of each operand begins where its strides say.
        strides = (problem.q_strides, problem.k_strides, problem.v_strides, params.out_strides)
        for tensor, stride in zip((q, k, v, out), strides, strict=True):
            last = [size - 1 for size in tensor.shape[:3]]
            begin = last[0] * stride.batch + last[1] * stride.head + last[2] * stride.row
            assert begin == tensor.numel() - tensor.shape[3]

    def test_last_rows(self, report):
        """Of the last batch and head, at their place in memory that is not there otherwise.

        Without the checks, which take seconds for so much memory: other numbers would show.
        """
        q, k, v = (tensor[-1:, -1:] for tensor in report.problem())
        q = q[:, :, -8:]
        for tensor, numbers in zip((q, k, v), qkv(q.shape, k.shape), strict=True):
            tensor.copy_(numbers)
        with simulate():
            check(q, k, v)


@reported(
    Report(
        "pytorch#152550",
        "Memory grows as the length varies (128 to 255).",
        "One compiled kernel for all, and no scratch memory.",
        lambda length: [normal(4, 8, length, 64)] * 3,
    ),
)
def test_many_lengths(report):
    kernels = set()
    for length in range(128, 256, 9):
        with simulate(record=True) as run:
            out = sdpa(*report.problem(length))
        kernels |= {(launch.kernel, *launch.defines.items()) for launch in run.recorded}
        written = {b.storage.numel() for launch in run.recorded for b in launch.buffers}
        assert written == {out.nbytes, out.numel() // 64 * 4}
    assert len(kernels) == 1
