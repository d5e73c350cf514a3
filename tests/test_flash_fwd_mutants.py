"""Planted faults in the text of flash_fwd: the tests' own check must see every one of them."""

import pytest
import torch
from flash_fwd_check import check_flash_fwd, make_qkv

from torch_metal_attn import SimulatorFault, shaders, simulate

# What a fault changes in the shader's text, and the fault that the simulator then reports; None
# where only the numbers can show it.
MUTANTS = {
    "scale by 0.98": (
        "scores.scale(params.scale_log2)",
        "scores.scale(0.98f * params.scale_log2)",
        None,
    ),
    "diagonal hidden": ("key - query <= offset", "key - query < offset", None),
    "one key past the diagonal": ("key - query <= offset", "key - query <= offset + 1", None),
    "offset ignored": ("key - query <= offset", "key <= query", None),
    "key past the length": ("return key < kv_length &&", "return key <= kv_length &&", None),
    "mask never applied": ("if (!mask.block_visible(", "if (false && !mask.block_visible(", None),
    "last visible keys skipped": (
        "kv_block >= simdgroup_kv_end",
        "kv_block + 8 >= simdgroup_kv_end",
        None,
    ),
    "tile ends a query early": ("q_block * BLOCK_Q + BLOCK_Q - 1", "q_block * BLOCK_Q", None),
    "output not rescaled": ("o.fragments[i][d] * corrections[i] +", "o.fragments[i][d] +", None),
    "sum not rescaled": ("lane_sum *= correction;", "", None),
    "maximum of one lane": ("fragment_row_max(block_max)", "block_max", None),
    "sum of one lane": ("return fragment_row_sum(lane_sum)", "return lane_sum", None),
    "maximum not carried": (
        "max(row_max, fragment_row_max",
        "max(MASKED_ROW_MAX, fragment_row_max",
        None,
    ),
    "logarithm in base 2": ("log2(row_sum)) * M_LN2_F", "log2(row_sum))", None),
    "wrong KV head": ("head / params.queries_per_kv", "head % params.queries_per_kv", None),
    "keys of a pair swapped": (
        "interleave<T>(even_key, odd_key, low, high)",
        "interleave<T>(odd_key, even_key, low, high)",
        None,
    ),
    "no barrier before staging": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n    stage_k",
        "stage_k",
        "race",
    ),
    "no barrier after staging": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (kv_block",
        "if (kv_block",
        "uninitialised",
    ),
    "barrier orders nothing": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (kv_block",
        "threadgroup_barrier(mem_flags::mem_none);\n    if (kv_block",
        "race",
    ),
    "key past the end read": (
        "min(first_key + 2 * pair + 1, last)",
        "(first_key + 2 * pair + 1)",
        "out_of_bounds",
    ),
    "value past the end read": (
        "kv.v_row(min(key, kv.length - 1))",
        "kv.v_row(key)",
        "out_of_bounds",
    ),
    "query past the end read": (
        "min(query + i * FRAGMENT, last_query)",
        "(query + i * FRAGMENT)",
        "out_of_bounds",
    ),
    "query past the end stored": ("if (query > last_query)", "if (false)", "out_of_bounds"),
    "half a tile staged": (
        "i < (UNITS + THREADS - 1) / THREADS",
        "i < UNITS / THREADS / 2",
        "uninitialised",
    ),
    "tile rows not padded": (
        "constexpr int padded(int columns) { return columns | 8; }",
        "constexpr int padded(int columns) { return columns - 8; }",
        "threadgroup_out_of_bounds",
    ),
}


def two_blocks_of_everything(device):
    """GQA, two query tiles, a partial key block, a diagonal off the corner."""
    q, k, v = make_qkv(
        heads=4, kv_heads=2, q_length=77, kv_length=101, head_dim=64, dtype=torch.float16
    )
    check_flash_fwd(q, k, v, causal=True, q_offset=30, device=device)


def plant(monkeypatch, old, new):
    text = shaders.source("flash_fwd")
    assert old in text, f"the shader no longer holds {old!r}: update the mutant"
    monkeypatch.setattr(shaders, "source", lambda family: text.replace(old, new))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    old, new, fault = MUTANTS[name]
    plant(monkeypatch, old, new)
    with simulate(check=True):
        if fault is None:
            with pytest.raises(AssertionError):
                two_blocks_of_everything("cpu")
        else:
            with pytest.raises(SimulatorFault) as raised:
                two_blocks_of_everything("cpu")
            assert raised.value.kind == fault
            assert raised.value.kernel == "flash_fwd"
            assert raised.value.file.startswith("shaders/")
            assert raised.value.line > 0


def test_zeroed_tail_of_v_matters(monkeypatch):
    """Without it, weights of 0 meet what the last key's row holds, and 0 * inf is NaN."""
    q, k, v = make_qkv(q_length=8, kv_length=33, head_dim=8)
    v[:, :, 32] = torch.inf
    plant(monkeypatch, "key < kv.length ? values : uint4(0)", "values")
    with simulate(check=True):
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
    assert out.isnan().any()


def test_the_unchanged_kernel_passes():
    with simulate(check=True):
        two_blocks_of_everything("cpu")
