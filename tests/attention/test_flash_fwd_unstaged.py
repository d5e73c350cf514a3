"""flash_fwd with tiles that do not stage K and V. Only tables of tuned tiles choose such tiles."""

import pytest
import torch

from tests.attention.flash_fwd_check import check_flash_fwd, make_qkv
from tests.attention.held_cases import FORWARD, case, hold, rotated
from tests.helpers.mutants import mutant_tests
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing.judge import ints
from torch_metal_attn.tuned import tiles

UNSTAGED = "COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=0"


def unstaged(v_slice, block_k=16):
    tile = f"V_SLICE={v_slice} BLOCK_K={block_k} SIMDGROUPS=4"
    return tiles.forced({"flash_fwd": f"{tile} {UNSTAGED}"})


def launch_of(q, k, v):
    return extension.launches(torch.ops.metal_attn_explain.flash_fwd(q, k, v))[-1]


def test_the_forced_tile_runs():
    q, k, v = make_qkv(head_dim=64, dtype=torch.float16)
    with unstaged(64):
        actual = launch_of(q, k, v)
    assert (actual["choice"], actual["defines"]["KV_STAGED"]) == ("forced", "0")
    assert actual["threadgroup_bytes"] == 0
    assert actual["defines"]["BLOCK_K"] == "16"
    assert "KV_STAGED" not in launch_of(q, k, v)["defines"], "the default tile stages K and V"


@pytest.mark.parametrize(
    "dtype, head_dim, v_head_dim, v_slice",
    [
        (torch.float16, 80, 64, 64),  # 80 is not a multiple of spans of 64 columns
        (torch.float32, 40, 64, 64),
        (torch.float16, 64, 40, 40),
    ],
)
def test_unstaged_tiles_of_other_head_dims_are_ignored(dtype, head_dim, v_head_dim, v_slice, capfd):
    q, k, v = make_qkv(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
    with unstaged(v_slice):
        assert launch_of(q, k, v)["choice"] == "default"
    assert "cannot run and is ignored" in capfd.readouterr().err


def test_leftpad_k(device):
    """The columns of k form two chains. Rows of k and v before the first key are NaN."""
    q, k, v = make_qkv(kv_heads=1, q_length=40, head_dim=160, v_head_dim=64)
    k[:, :, :3], v[:, :, :3] = torch.nan, torch.nan
    with unstaged(64):
        check_flash_fwd(q, k, v, causal=True, leftpad_k=ints(3), device=device)


# The columns of a slice, the keys of a block, and the fields of the case.
CASES = {
    # The last of six slices is half full. A query tile starts among hidden keys.
    "slices that pass the end of a row": (
        *(64, 32),
        {"q_length": 70, "head_dim": 64, "v_head_dim": 352, "window_size_left": 9}
        | {"attn_mask": "bool hqk"},
    ),
    "quantised": (
        *(64, 16),
        {"batch": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "seqused_k": (0, 1, 31, 65)}
        | {"format": "q8_0", "cache": "paged", "page": 5, "causal": True},
    ),
    "float32 queries of unaligned rows in half precision": (
        *(32, 16),
        {"q_length": 9, "head_dim": 64, "v_head_dim": 32, "dtype": "float32"}
        | {"cache_dtype": "float16", "k_layout": ("padded 1",), "v_layout": ("padded 1",)},
    ),
    # Four chunks of each key are rotated as they are read. q is rotated element by element.
    "packed and rotated": (
        *(128, 16),
        {"call": "flash_varlen_fwd", "packed": ((7, 31), (0, 5), (33, 40)), "head_dim": 128}
        | {"q_length": 1, "kv_length": 1, "dtype": "bfloat16", "softcap": 3.0}
        | rotated(64),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name, device, capfd):
    v_slice, block_k, fields = CASES[name]
    with unstaged(v_slice, block_k):
        hold([case(**FORWARD | fields)], device)
    assert "it is ignored" not in capfd.readouterr().err


def test_values_that_do_not_exist_count_as_zero(device):
    """A missing row is replaced by the last key's row, where 0 * inf would be NaN."""
    q, k, v = (x.to(device) for x in make_qkv(kv_heads=1, q_length=40, head_dim=160, v_head_dim=64))
    v[:, :, -1] = torch.inf
    with unstaged(64):
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True, leftpad_k=ints(0).to(device))
    assert not out[:, :, -1].isnan().any()


MUTANTS = {
    test_values_that_do_not_exist_count_as_zero: """
        missing values: exist[j] = key >= sequence.first_key {~&& key < sequence.kv_length =>~}
    """,
    test_leftpad_k: """
        values before the first:
            exist[j] = key {~>= sequence.first_key && key =>~} < sequence.kv_length
        key past the end read [out_of_bounds]:
            keys.find({~min(key + 1, sequence.kv_length - 1) => key + 1~})
        value past the end [out_of_bounds]: values.find({~min(key, sequence.kv_length - 1) => key~})
        a key twice: pair.zip(keys.chunk(even, key_column), keys.chunk({~odd => even~}, key_column))
        columns of q in order: source.element(position, first + {~KEY_CHUNK => 1~})
        one chain: begin < {~SPANS => CHAIN~}; begin += CHAIN
        first span of v: column) {~+ s * SPAN_COLUMNS =>~}
        out in order [race]: first_unit_column(column) + {~span_offset(d) => d * FRAGMENT~}
        not rescaled: part = part {~* corrections[i] =>~} +
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_fwd", run=lambda problem: problem("cpu"), together=True
)
