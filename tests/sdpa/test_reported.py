"""Calls from public reports about attention on Apple GPUs.

docs/mps-issues.md describes each report and what happens here. The number of a report is in the
name of its test, or in the id of its case. Sizes, layouts and options are the report's.
"""

import contextlib
import math
import struct

import pytest
import torch
from torch.nn.functional import linear

from tests.helpers import shader_params
from tests.sdpa.sdpa_check import check, normal
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn import sdpa_replaced, simulate


def qkv(q_shape, kv_shape=None, v_shape=None, dtype=torch.float32):
    """Normal query, key and value. A missing shape is that of the previous tensor."""
    kv_shape = kv_shape or q_shape
    shapes = [q_shape, kv_shape, v_shape or kv_shape]
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def reported(**problems):
    """Parametrises a test with reports. `problem` makes the call of a report."""
    return pytest.mark.parametrize("problem", problems.values(), ids=problems)


def from_rows(batch, length, heads, head_dim):
    """Transposed tensors of shape (batch, length, heads, head_dim), as models make them."""
    return [t.transpose(1, 2) for t in qkv((batch, length, heads, head_dim))]


@reported(
    pytorch_163597=lambda: from_rows(1, 8, 4, 64),
    pytorch_181133=lambda: from_rows(84, 3, 3, 64),
    pytorch_189631=lambda: [normal(1, 1, 64), *[normal(2, 1, 1, 64, seed=1)] * 2],
    pytorch_147443=lambda: qkv((3, 2, 4, 49, 32)),  # 2 of the report's 592 windows
    pytorch_176767=lambda: qkv((1, 1, 16, 32), v_shape=(1, 1, 16, 24)),
)
def test_layouts(problem, device):
    check(*problem(), device=device)


def test_batched_170837_170874(device):
    alone = from_rows(1, 7, 12, 64)
    twice = [torch.cat([t.transpose(1, 2)] * 2).transpose(1, 2) for t in alone]
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    out = check(*twice, mask, device=device)
    expected = sdpa(*(t.to(device) for t in alone), mask[:1].to(device)).cpu()
    assert torch.equal(out, torch.cat([expected] * 2))


@pytest.mark.parametrize("length", [38, 39, 70])
def test_ends_within_a_block_169222(length, device):
    q, *key_value = qkv((1, 4, 1, 64), (1, 4, length, 64))
    beyond = torch.full((1, 4, 64, 64), math.nan)
    k, v = (torch.cat([t, beyond], 2)[:, :, :length] for t in key_value)
    check(q, k, v, device=device)


def in_four_parts(q, k, v, attn_mask=None, *, enable_gqa):
    return torch.ops.metal_attn.flash_decode(q, k, v, num_splits=4)[0]


def test_two_passes_174861_174945(device):
    tensors = qkv((1, 32, 1, 128), (1, 2, 1024, 128), dtype=torch.bfloat16)
    q, k, v = (t.to(device) for t in tensors)
    for attend in (sdpa, in_four_parts):
        out = check(*tensors, device=device, attend=attend, enable_gqa=True)
        assert torch.equal(attend(q, k, v, enable_gqa=True).cpu(), out)


def test_long_bfloat16_190791(device):
    check(*qkv((1, 1, 8, 128), (1, 1, 14_000, 128), dtype=torch.bfloat16), device=device)


def empty(*shape, kv_length=None, dtype=torch.float32):
    batch, heads, length, head_dim = shape
    lengths = [length, *[kv_length or length] * 2]
    return [torch.empty(batch, heads, rows, head_dim, dtype=dtype) for rows in lengths]


@reported(
    pytorch_149261=lambda: empty(1, 12, 29_640, 128),
    pytorch_179592_179352=lambda: empty(1, 8, 16_384, 64, kv_length=65_536),
    pytorch_197636=lambda: empty(65_552, 1, 256, 64),
    ComfyUI_14837=lambda: empty(1, 56, 20_981, 128, dtype=torch.bfloat16),  # from a comment
)
class TestManyScores:
    @pytest.fixture(autouse=True)
    def untouched_memory(self, monkeypatch):
        """Without a fill, pages are not touched and cost no memory."""
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def test_launch(self, problem):
        q, k, v = problem()
        with simulate(record=True) as run:
            out = sdpa(q, k, v)
        launch, *others = run.recorded  # the other launches continue it, about a second each
        assert q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > 2**31
        # The kernel gets the inputs, the output and a log-sum-exp for each row, and nothing else.
        nbytes = sum(buffer.storage.numel() for buffer in launch.buffers)
        assert nbytes == sum(t.nbytes for t in (q, k, v, out)) + out.numel() // out.shape[-1] * 4
        # The grid covers all rows of every batch and head, and each threadgroup all keys.
        params = shader_params.struct("FlashFwdParams").from_buffer_copy(launch.params)
        sizes = params.problem
        grid = struct.unpack("3I", launch.params[-12:]) if others else launch.threadgroups
        assert sum(math.prod(one.threadgroups) for one in run.recorded) == math.prod(grid)
        tiles, heads, batch = grid
        rows = 8 * int(launch.defines["ROW_FRAGMENTS"]) * int(launch.defines["SIMDGROUPS"])
        rows //= int(launch.defines.get("COLUMN_SIMDGROUPS", 1))
        assert tiles * rows >= q.shape[2] > (tiles - 1) * rows
        assert (heads, batch) == (q.shape[1], q.shape[0])
        assert (sizes.q_length, sizes.kv_length) == (q.shape[2], k.shape[2])
        # By the strides, the last row of each operand ends at its last element.
        strides = (sizes.q_strides, sizes.k_strides, sizes.v_strides, params.out_strides)
        for tensor, stride in zip((q, k, v, out), strides, strict=True):
            last = [size - 1 for size in tensor.shape[:3]]
            begin = last[0] * stride.batch + last[1] * stride.head + last[2] * stride.row
            assert begin == tensor.numel() - tensor.shape[3]

    def test_last_rows(self, problem):
        """Values of the last batch and head. The simulator's checks would take seconds here."""
        q, k, v = (tensor[-1:, -1:] for tensor in problem())
        q = q[:, :, -8:]
        for tensor, numbers in zip((q, k, v), qkv(q.shape, k.shape), strict=True):
            tensor.copy_(numbers)
        with simulate():
            check(q, k, v)


def test_many_lengths_152550():
    kernels = set()
    for length in range(128, 256, 9):
        with simulate(record=True) as run:
            out = sdpa(*[normal(4, 8, length, 64)] * 3)
        kernels |= {(launch.kernel, *launch.defines.items()) for launch in run.recorded}
        written = {b.storage.numel() for launch in run.recorded for b in launch.buffers}
        assert written == {out.nbytes, out.numel() // 64 * 4}
    assert len(kernels) == 1


def broadcast_over_heads():
    mask = torch.zeros(2, 1, 8, 8)
    mask[0, 0, 4:, :4] = -math.inf
    return [normal(2, 4, 8, 64)] * 3, {"attn_mask": mask}


def grouped_queries():
    tensors = qkv((2, 4, 3, 8), (2, 2, 3, 8))
    return tensors, {"attn_mask": torch.ones(3, 3), "enable_gqa": True}


def last_keys_of_many():
    """Only the last of over 2**15 keys are visible. The report has more queries and heads."""
    keys, visible = 2**15 + 256, 512
    mask = torch.full((1, 1, 1, keys), -1e4, dtype=torch.bfloat16)
    mask[..., keys - visible :] = 0.0
    tensors = qkv((1, 2, 8, 64), (1, 1, keys, 64), dtype=torch.bfloat16)
    return tensors, {"attn_mask": mask, "enable_gqa": True, "scale": 64**-0.5}


@reported(
    pytorch_184180=broadcast_over_heads, pytorch_149132=grouped_queries, mlx_3361=last_keys_of_many
)
def test_masks(problem, device):
    tensors, options = problem()
    check(*tensors, device=device, **options)


def one_row_hidden():
    return qkv((1, 1, 2, 4)), torch.tensor([[[[False, False], [True, True]]]])


def one_sequence_padded():
    return qkv((2, 4, 8, 64)), torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 8, 8)


@reported(pytorch_156707=one_row_hidden, mlx_2608=one_sequence_padded)
def test_hidden_rows(problem, device):
    tensors, mask = problem()
    out = check(*tensors, mask, device=device)
    hidden = ~mask.any(-1, keepdim=True)
    assert (out.masked_select(hidden) == 0).all()
    assert out.masked_select(~hidden).ne(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_later_keys_195910(dtype, device):
    q, k, v = (tensor.to(dtype) for tensor in qkv((1, 4, 64, 64)))
    out = check(q, k, v, device=device, is_causal=True)
    for seen in (33, 34, 35):  # the report has groups of four rows, such as 32 to 35
        later = (torch.cat([t[:, :, :seen], t[:, :, seen:] + 1], 2).to(device) for t in (k, v))
        changed = sdpa(q.to(device), *later, is_causal=True).cpu()
        assert torch.equal(changed[:, :, :seen], out[:, :, :seen])
        assert not torch.equal(changed[:, :, seen:], out[:, :, seen:])


@pytest.mark.filterwarnings("ignore:sdpa_replaced")
def test_causal_with_a_mask_181856(device):
    tensors = qkv((1, 2, 4, 64), (1, 2, 16, 64))
    mask = torch.zeros(1, 2, 4, 16, dtype=torch.bool)
    refusal = "Explicit attn_mask should not be set when is_causal=True"
    with pytest.raises(RuntimeError, match=refusal):
        sdpa(*(t.to(device) for t in tensors), mask.to(device), is_causal=True)
    with simulate(), sdpa_replaced() as calls, contextlib.suppress(RuntimeError):
        torch.nn.functional.scaled_dot_product_attention(*tensors, mask, is_causal=True)
    assert (calls.replaced, calls.left_alone) == (0, {refusal: 1})


@pytest.mark.parametrize("dropout_p", [0.5, 0.9])
def test_dropout_184126(dropout_p, device):
    q = normal(1, 2, 4, 8).to(device)
    each_key = torch.eye(4, 8, device=device).expand(1, 2, 4, 8)
    weights = sdpa(q, q, each_key)[..., :4]
    torch.manual_seed(0)
    kept = sdpa(q, q, each_key, dropout_p=dropout_p)[..., :4]
    dropped = kept == 0
    assert 0 < dropped.sum() < dropped.numel()
    torch.testing.assert_close(kept, (weights / (1 - dropout_p)).masked_fill(dropped, 0.0))
    torch.manual_seed(0)
    torch.testing.assert_close(sdpa(q, q, q, dropout_p=dropout_p), kept @ q)


def test_scale_184122(device):
    q = normal(1, 2, 4, 8)
    default = check(q, q, q, device=device)
    assert not torch.allclose(check(q, q, q, device=device, scale=2.0), default)


@torch.no_grad()
def test_layer_181725(device):
    torch.manual_seed(0)
    x, memory = normal(1, 32, 512), normal(1, 256, 512, seed=1)
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
    low = layer(x, memory, memory, need_weights=False)[0]
    projections = zip((x, memory, memory), layer.in_proj_weight.chunk(3), strict=True)
    heads = [linear(t, weight).unflatten(-1, (8, 64)).transpose(1, 2) for t, weight in projections]
    layer.to(device)
    with simulate(check=True) as run, sdpa_replaced() as calls:
        arguments = [t.to(device) for t in (x, memory, memory)]
        out = layer(*arguments, need_weights=False)[0].cpu()
        sdpa(*(head.to(device) for head in heads))
    assert (calls.replaced, calls.left_alone) == (1, {})
    if device.type == "cpu":
        launches = [(launch.kernel, launch.defines, launch.grid) for launch in run.launches]
        assert launches[0][0] == "flash_decode"
        assert launches[: len(launches) // 2] == launches[len(launches) // 2 :]
    layer.cpu().double()
    exact = layer(*(t.double() for t in (x, memory, memory)), need_weights=False)[0]
    error, torchs = ((result - exact).abs().max() for result in (out, low))
    assert error <= 2 * torchs


class TestBackward179294:
    def test_gradients(self, device):
        def gradients(attend, dtype, device="cpu"):
            leaves = [t.to(device, dtype).requires_grad_() for t in qkv((2, 4, 33, 8))]
            dout = normal(2, 4, 33, 8, seed=3).to(device, dtype)
            return [g.cpu() for g in torch.autograd.grad(attend(*leaves), leaves, dout)]

        torch_sdpa = torch.nn.functional.scaled_dot_product_attention
        exact = gradients(torch_sdpa, torch.float64)
        low = gradients(torch_sdpa, torch.float32)
        ours = gradients(sdpa, torch.float32, device)
        for gradient, torchs, oracle in zip(ours, low, exact, strict=True):
            assert (gradient - oracle).abs().max() <= 2 * (torchs - oracle).abs().max()

    def test_nothing_holds_the_scores(self):
        leaves = [t.requires_grad_() for t in qkv((2, 4, 256, 8))]
        with simulate(record=True) as run:
            out = sdpa(*leaves)
            out.backward(torch.ones_like(out))
        kernels = [launch.kernel for launch in run.recorded]
        assert kernels == ["flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]
        sizes = {b.storage.numel() for launch in run.recorded for b in launch.buffers}
        assert max(sizes) == out.nbytes
