"""Each feature of attention's gradients in a small problem: what to check and to mutate.

In float16 unless told otherwise, so that tests and mutants share a feature's kernels.
"""

import math
from contextlib import contextmanager, nullcontext

import torch

from tests.attention.flash_bwd_check import check_flash_bwd
from tests.attention.flash_fwd_check import make_qkv
from tests.attention.flash_fwd_options import ints, random_mask, rotary_tables
from tests.attention.head_dims import HOME
from torch_metal_attn import simulate
from torch_metal_attn.tools.tune import tiles

# GQA, two tiles or more of queries and of keys, partial blocks of both, no square.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": HOME}


def normal(*shape, seed=3, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(pairs=4, interleaved=False, dtype=torch.float32, **lengths):
    """Rotary options, with a table for each sequence."""
    options = {"rotary_interleaved": interleaved}
    lengths = {"q": 77, "k": 101} | lengths
    for seed, side in enumerate("qk"):
        cos, sin = rotary_tables(lengths[side], pairs, batch=2, dtype=dtype, seed=seed)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    return options


# Options, and what differs from SHAPE. Features that do not interact share a case, unless a mutant
# needs one alone.
FEATURES = {
    "plain": {"dlse": False},
    "dlse": {},
    "scale": {"softmax_scale": 0.6},
    "causal": {"causal": True},
    "causal, top left": {"causal": True, "q_offset": 0},
    "causal, rows without a key": {"causal": True, "q_offset": -20},
    "window": {"window_size_left": 20, "window_size_right": 13},
    "window, causal": {"window_size_left": 9, "causal": True},
    "window at an offset": {"window_size_left": 30, "window_size_right": 5, "q_offset": 50},
    "window past the keys": {"window_size_left": 20, "q_offset": 60},
    "chunk": {"attention_chunk": 21},
    "chunk, causal, padded": {
        "attention_chunk": 21,
        "causal": True,
        "q_offset": 0,
        "leftpad_k": ints(7, 40),
    },
    "seqused_k": {"seqused_k": ints(90, 33)},
    "both lengths, causal, rotary, interleaved": {
        "seqused_k": ints(90, 0),
        "leftpad_k": ints(5, 0),
        "causal": True,
        **tables(8, interleaved=True, dtype=torch.bfloat16),
    },
    "both lengths": {"seqused_k": ints(90, 50), "leftpad_k": ints(35, 49)},
    "mask": {"attn_mask": random_mask(2, 4, 77, 101)},
    "mask, transposed": {"attn_mask": random_mask(101, 2, 77, 4).permute(1, 3, 2, 0)},
    "mask, whole rows": {"attn_mask": random_mask(2, 4, 77, 1, hidden=0.3).expand(2, 4, 77, 101)},
    "bias": {"attn_bias": 2 * normal(2, 4, 77, 101)},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.5},
    "softcap, all, rotary, odd": {
        "softcap": 5.0,
        "causal": True,
        "attn_bias": normal(77, 101),
        "alibi_slopes": normal(4).abs() / 20,
        **tables(7),
    },
    "alibi": {"alibi_slopes": normal(2, 4).abs() / 10},
    "alibi at an offset": {"alibi_slopes": normal(4).abs() / 4, "q_offset": 24},
    "sink": {"learnable_sink": torch.tensor([3.0, 1.0, -math.inf, 5.0]).half()},
    "sink, no key, bias, half": {
        "learnable_sink": torch.tensor([3.0, 1.0, -1.0, 0.0], dtype=torch.bfloat16),
        "attn_bias": normal(4, 1, 101, dtype=torch.float16),
        "causal": True,
        "q_offset": -9,
    },
    "rotary": tables(),
    "odd head dim": {"head_dim": 11, "v_head_dim": 13},
    "slices": {
        "head_dim": 520,
        "v_head_dim": 40,
        "q_length": 29,
        "kv_length": 37,
        "batch": 1,
        "heads": 2,
        "kv_heads": 1,
    },
    "MQA": {"kv_heads": 1, "causal": True},
}


def problem(feature, dtype=torch.float16, seed=0):
    """q, k and v of a feature, and its options for `check_flash_bwd`."""
    options = dict(FEATURES[feature])
    shape = {
        name: options.pop(name) if name in options else SHAPE.get(name)
        for name in (*SHAPE, "v_head_dim")
    }
    return make_qkv(**shape, dtype=dtype, seed=seed), options


# Slices of the columns of dq, dk and dv that do not end where the columns do.
AGAIN = "ROWS_IN_REGISTERS=0 ROWS_IN_THREADGROUP=0"
SLICED = {
    "flash_bwd_dq": f"SLICE=176 BLOCK=8 ROW_FRAGMENTS=1 SIMDGROUPS=4 COLUMN_SIMDGROUPS=1 {AGAIN}",
    "flash_bwd_dkv": f"SLICE=176 BLOCK=8 ROW_FRAGMENTS=2 SIMDGROUPS=4 COLUMN_SIMDGROUPS=2 {AGAIN}",
}


def check(feature, device):
    qkv, options = problem(feature)
    sliced = feature == "slices" and device.type == "cpu"
    with tiles.forced(SLICED) if sliced else nullcontext():
        return check_flash_bwd(*qkv, **options, device=device)


@contextmanager
def exchanging(*, block=16, row_fragments=2, simdgroups=4, shared=2, columns=576):
    """A context where so many SIMD groups of dk and dv share keys, and exchange weights.

    The chooser takes such tiles for larger head dims than those of most tests.
    """
    tile = f"SLICE={columns} BLOCK={block} ROW_FRAGMENTS={row_fragments} SIMDGROUPS={simdgroups}"
    tile += f" COLUMN_SIMDGROUPS={shared} ROWS_IN_REGISTERS=0 ROWS_IN_THREADGROUP=1"
    with tiles.forced({"flash_bwd_dkv": tile}), simulate(check=True) as session:
        yield
    for launch in session.launches:
        if launch.kernel == "flash_bwd_dkv":
            found = launch.defines["COLUMN_SIMDGROUPS"], launch.defines["BLOCK_Q"]
            assert found == (str(shared), str(block)), "the tile was refused"
