"""A small problem for each feature of attention's gradients, for tests and for mutants.

The dtype is float16 by default, so that tests and mutants share a feature's kernels.
"""

from contextlib import contextmanager, nullcontext

import torch

from tests.attention.flash_bwd_check import backward, check_flash_bwd, make_gradients
from tests.attention.held_cases import PACKED, SIZES, case, rotated
from tests.helpers.judged import judge
from torch_metal_attn import simulate
from torch_metal_attn.testing.attention_calls import call_of
from torch_metal_attn.testing.attention_problem import build
from torch_metal_attn.testing.tensors import Memory
from torch_metal_attn.tuned import tiles

CPU = torch.device("cpu")
FEW = {"batch": 1, "heads": 2, "kv_heads": 1, "q_length": 40, "kv_length": 50}
# The fields of each case, on top of SIZES. Features that do not interact share a case, unless
# the faults of a feature need a case with this feature only.
FEATURES = {
    "plain": {"through_lse": False},
    "causal": {"causal": True},
    "causal, top left": {"causal": True, "q_offset": 0},
    "causal, rows without a key": {"causal": True, "q_offset": -20},
    "window": {"window_size_left": 20, "window_size_right": 13},
    "window, causal": {"window_size_left": 9, "causal": True},
    "window at an offset": {"window_size_left": 30, "window_size_right": 5, "q_offset": 50},
    "window past the keys": {"window_size_left": 20, "q_offset": 60},
    "chunk": {"attention_chunk": 21},
    "chunk, causal, padded": {"attention_chunk": 21, "causal": True, "q_offset": 0}
    | {"leftpad_k": (7, 40)},
    "seqused_k": {"seqused_k": (90, 33)},
    "both lengths, causal, rotary, interleaved": rotated(16, interleaved=True)
    | {"seqused_k": (90, 0), "leftpad_k": (5, 0), "causal": True},
    "both lengths": {"seqused_k": (90, 50), "leftpad_k": (35, 49)},
    "mask": {"attn_mask": "bool bhqk"},
    "mask, transposed": {"attn_mask": "bool bhqk", "mask_layout": ("order 3210",)},
    "mask, whole rows": {"attn_mask": "bool bhq"},
    "bias": {"attn_bias": "float32 bhqk"},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.5},
    "softcap, all, rotary, odd": rotated(14)
    | {"softcap": 5.0, "causal": True, "attn_bias": "float32 qk", "alibi_slopes": "h"},
    "alibi": {"alibi_slopes": "bh"},
    "alibi at an offset": {"alibi_slopes": "h", "q_offset": 24},
    "sink, no key, bias, half": {"learnable_sink": "bfloat16", "attn_bias": "float16 hk"}
    | {"causal": True, "q_offset": -9},
    "rotary": rotated(8),
    "odd head dim": {"head_dim": 11, "v_head_dim": 13},
    "slices": FEW | {"head_dim": 520, "v_head_dim": 40, "q_length": 29, "kv_length": 37},
    # Two tiles share threadgroup memory. Of some blocks, only a part of the SIMD groups sees keys.
    "wide rows": FEW
    | {"head_dim": 512, "v_head_dim": 500, "dtype": "float32", "window_size_left": 9}
    | {"causal": True, "attn_bias": "float32 qk"},
    "MQA": {"kv_heads": 1, "causal": True},
    "nan outside": {"seqused_k": (90, 50), "leftpad_k": (5, 35)},
    # In dq, two SIMD groups share rows, and each group computes half of the columns.
    "shared rows": FEW | {"heads": 1, "kv_heads": 1, "head_dim": 192, "causal": True},
    # Without exact_delta, the loop over the keys does not correct delta.
    "plain, unrefined": {"call": "flash_bwd", "through_lse": False},
    "dlse, unrefined": {"call": "flash_bwd"},
}


def featured(*names, **fields):
    """A case with all these features. The first one has priority."""
    combined = {"backward": True, "through_lse": True} | SIZES
    for name in reversed(names):
        combined |= FEATURES[name]
    return case(**combined | fields)


def problem(*names, **fields):
    """The case of `featured` as (q, k, v) and the options of `check_flash_bwd`."""
    attention_case = featured(*names, **fields)
    _, arguments = call_of(attention_case, build(attention_case), Memory(CPU))
    return [arguments.pop(name) for name in "qkv"], arguments


# Tiles that reload rows, and whose last slice of the columns of dq, dk and dv is partial.
RELOAD = "ROWS_IN_REGISTERS=0 ROWS_IN_THREADGROUP=0"
SLICED = {
    "flash_bwd_dq": f"SLICE=176 BLOCK=8 ROW_FRAGMENTS=1 SIMDGROUPS=4 COLUMN_SIMDGROUPS=1 {RELOAD}",
    "flash_bwd_dkv": f"SLICE=176 BLOCK=8 ROW_FRAGMENTS=2 SIMDGROUPS=4 COLUMN_SIMDGROUPS=2 {RELOAD}",
}


def check(feature, device="cpu"):
    sliced = feature == "slices" and str(device) == "cpu"
    with tiles.forced(SLICED) if sliced else nullcontext():
        judge(featured(feature), device=device)


def check_the_same_bits(qkv, options):
    """Checks that the gradients have the same bits in any order of threadgroups and SIMD groups."""
    arguments = make_gradients(qkv[0], qkv[2], qkv[0].shape[:3])
    runs = []
    for order in ({}, {"seed": 1, "workers": 1}, {"seed": 2, "workers": 2}):
        with simulate(check=True, **order):
            runs.append(backward(*qkv, *arguments, CPU, options))
    for other in runs[1:]:
        assert all(map(torch.equal, other, runs[0]))


def packed():
    built = build(case(**PACKED | {"spare_rows": 120}, window_size_left=40))
    operands = built.q, built.k, built.v, *built.packing
    *_, delta = check_flash_bwd(*operands, **built.options, device="cpu")
    # The last 120 rows belong to no sequence.
    assert (delta[:, -120:] == 0).all()


def run(problem):
    check(problem) if problem in FEATURES else problem()


@contextmanager
def exchanging(*, block=16, row_fragments=2, simdgroups=4, shared=2, columns=576):
    """In dk and dv, `shared` SIMD groups share keys and exchange weights, as for wide heads."""
    tile = f"SLICE={columns} BLOCK={block} ROW_FRAGMENTS={row_fragments} SIMDGROUPS={simdgroups}"
    tile += f" COLUMN_SIMDGROUPS={shared} ROWS_IN_REGISTERS=0 ROWS_IN_THREADGROUP=1"
    with tiles.forced({"flash_bwd_dkv": tile}), simulate(check=True) as session:
        yield
    for launch in session.launches:
        if launch.kernel == "flash_bwd_dkv":
            actual = launch.defines["COLUMN_SIMDGROUPS"], launch.defines["BLOCK_Q"]
            assert actual == (str(shared), str(block)), "the forced tile was not used"
