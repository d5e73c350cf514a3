"""Offsets of more than 2**32 elements. Tensors are sparse mappings, which need little memory."""

import sys

import pytest
import torch

from tests.attention.flash_fwd_check import make_packed, make_qkv, random_mask, rotary_tables
from tests.helpers import shader_params
from tests.helpers.mutants import plant
from tests.helpers.sparse import sparse
from torch_metal_attn import SimulatorFault, simulate
from torch_metal_attn.simulator import engine

FAR = 2**32  # elements; such an offset does not fit 32 bits

pytestmark = pytest.mark.skipif(sys.maxsize < 2**40, reason="needs 64-bit addresses")


def spread(tensor, dim, reach=FAR):
    """A copy whose last element along `dim` is at least `reach` elements away."""
    size = tensor.shape[dim]
    if size < 2:
        return tensor
    inner = tensor.new_empty(tensor.shape).stride()
    stride = (reach // (size - 1) + tensor.numel() + 64) // 64 * 64
    strides = [stride if i == dim else step for i, step in enumerate(inner)]
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)) + 1
    far = sparse(extent, tensor.dtype).as_strided(tensor.shape, strides)
    far.copy_(tensor)
    assert (size - 1) * stride >= reach
    return far


DIMS = {"batch": 0, "head": 1, "row": 2}


@pytest.mark.parametrize("dim", [*DIMS, "column of a mask"])
def test_every_operand_may_be_far(dim):
    q, k, v = make_qkv(2, 4, 2, 5, 34, 16, dtype=torch.float16)
    options = {
        "attn_mask": random_mask(2, 4, 5, 34),
        "attn_bias": random_mask(2, 4, 5, 34, dtype=torch.float16, hidden=0),
    }
    for seed, (side, length) in enumerate((("q", 5), ("k", 34))):
        cos, sin = rotary_tables(length, 4, batch=2, dtype=torch.float16, seed=seed)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}

    def far(name, tensor):
        if dim not in DIMS:
            return spread(tensor, 3) if name in ("attn_mask", "attn_bias") else tensor
        if "rotary" in name:  # (batch, row, pair)
            return spread(tensor, {"batch": 0, "head": 1, "row": 1}[dim])
        return spread(tensor, DIMS[dim])

    with simulate():
        expected = torch.ops.metal_attn.flash_fwd(q, k, v, **options)
        out, lse = torch.ops.metal_attn.flash_fwd(
            *(far(name, tensor) for name, tensor in zip("qkv", (q, k, v), strict=True)),
            **{name: far(name, tensor) for name, tensor in options.items()},
        )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_packed_rows_may_be_far():
    q, k, v, *packing = make_packed([3, 0, 4], [20, 5, 9], head_dim=16, dtype=torch.float16)
    with simulate():
        expected = torch.ops.metal_attn.flash_varlen_fwd(q, k, v, *packing, causal=True)
        far = [spread(tensor, 0, 2 * FAR) for tensor in (q, k, v)]
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(*far, *packing, causal=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("dim", DIMS)
def test_results_may_be_far(dim, monkeypatch):
    """Before the kernel runs, sparse results replace the dense ones that the op allocated."""
    q, k, v = make_qkv(2, 4, 2, 34, 34, 16, dtype=torch.float16)
    params_type = shader_params.struct("FlashFwdParams")
    slots = shader_params.slots("FlashBuffer", "FLASH_")
    slots |= shader_params.slots("FlashFwdBuffer", "FLASH_FWD_")
    far = {}
    run = engine.run

    def run_with_far_results(image, kernel, buffers, **arguments):
        by_slot = {buffer.index: buffer for buffer in buffers}
        at = by_slot[slots["params"]]
        params = params_type.from_address(at.storage + at.offset)
        for name, result in far.items():
            strides = getattr(params, f"{name}_strides")
            strides.batch, strides.head, strides.row = result.stride()[:3]
            assert name == "out" or strides.row == 1, "rows of softmax_lse are contiguous"
            buffer = by_slot[slots[name]]
            buffer.storage, buffer.offset = result.data_ptr(), 0
            buffer.bytes = result.untyped_storage().nbytes()
        return run(image, kernel, list(by_slot.values()), **arguments)

    plant(monkeypatch, "flash_fwd", "<LONG_OFFSETS, int64_t", "<true, int64_t")
    with simulate():
        out, lse = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True)
        far |= {"out": spread(torch.zeros_like(out), DIMS[dim])}
        far |= {"lse": spread(torch.zeros_like(lse)[..., None], min(DIMS[dim], 1))}
        monkeypatch.setattr(engine, "run", run_with_far_results)
        torch.ops.metal_attn.flash_fwd(q, k, v, causal=True)
    assert torch.equal(far["out"], out)
    assert torch.equal(far["lse"][..., 0], lse)


@pytest.mark.parametrize("wide", ["int64_t", "int"])
def test_offsets_of_32_bits_are_out_of_bounds(wide, monkeypatch):
    """The checks of the simulator find 32-bit offsets, and accept 64-bit ones, in a far tensor."""
    q, k, v = make_qkv(1, 1, 1, 34, 34, 16, dtype=torch.float16)
    row = "return first + Offset(row) * row_stride"
    of_width = f"return first + {wide}(row) * {wide}(row_stride)"
    with simulate(check=True):
        expected, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
        far = spread(k, 2)
        plant(monkeypatch, "flash_fwd", row, of_width)
        if wide == "int64_t":
            assert torch.equal(torch.ops.metal_attn.flash_fwd(q, far, v)[0], expected)
        else:
            with pytest.raises(SimulatorFault, match="out_of_bounds"):
                torch.ops.metal_attn.flash_fwd(q, far, v)
