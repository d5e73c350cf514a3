"""Runs each kernel of the source documents, by its name, as calls of our ops.

If a source kernel departs from its paper, our op follows the paper, and a comment says so. The
tests of softmax, rope and merge have the names of the kernels that they cover.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.attention.flash_fwd_check import DTYPES, check_flash_fwd, make_qkv
from tests.attention.held_cases import FORWARD, case, hold
from tests.merge import test_merge as merge
from tests.rope import test_rope_op as rope_op
from tests.softmax import test_softmax as softmax
from torch_metal_attn import explain, rope, simulate

PAGE = Path(__file__).parents[2] / "docs/design/source-kernels.md"
NAMES = """
flash_attention_v2 flash_attention_f16 flash_attention flash_attention_simd flash_attn_train_fwd
rope_then_attention yarn_attention fused_attention fused_attention_f16 fused_attention_batched
paged_attention flash_attn_vec flash_attn_vec_f16kv_dk256 flash_attn_vec_f16kv_dk512 softmax
apply_causal_mask flash_attn_vec_reduce apply_rope_qk_inplace precompute_rope_tables
""".split()

SQUARE = {"heads": 4, "q_length": 128, "kv_length": 128, "head_dim": 64} | FORWARD
SHORT = SQUARE | {"q_length": 64, "kv_length": 64}
SHORT32 = SHORT | {"dtype": "float32", "causal": True}
GROUPED = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 64, "kv_length": 96} | FORWARD
TRAINED = GROUPED | {"dtype": "bfloat16", "head_dim": 256}
FEW_QUERIES = {"call": "flash_decode", "heads": 4, "kv_heads": 2, "q_length": 2, "kv_length": 77}
ONE_QUERY = FEW_QUERIES | {"batch": 4, "heads": 8, "q_length": 1, "kv_length": 100, "head_dim": 64}
F16_CACHE = FEW_QUERIES | {"dtype": "float32", "cache_dtype": "float16", "causal": True}
GEMMA = {"window_size_left": 20, "softcap": 50.0, "softmax_scale": 1.0, "num_splits": 2}
KERNELS = {
    "flash_attention_v2": [case(**SQUARE, dtype="float32", causal=True)],
    "flash_attention_f16": [case(**SQUARE, causal=True)],
    # Lengths need not divide: the source kernel leaves query registers past the end uninitialised.
    "flash_attention": [case(**FORWARD, dtype="float32", q_length=70, kv_length=70, head_dim=64)],
    "flash_attn_train_fwd": [
        *(case(**TRAINED, causal=True, q_offset=offset) for offset in (0, 32, 40)),
        case(**TRAINED, attn_mask="bool bqk"),
        # A source kernel turns the mask's values into booleans; here they are added.
        case(**TRAINED, attn_mask="bfloat16 bqk"),
    ],
    "rope_then_attention": [case(**SHORT32, rotary="qk", rotary_columns=64)],
    # The source kernel adds the slope with the wrong sign; the paper penalises distance.
    "fused_attention": [case(**SHORT32, alibi_slopes="h")],
    "fused_attention_f16": [case(**SHORT, causal=True, alibi_slopes="h")],
    "fused_attention_batched": [case(**SHORT32, batch=4, alibi_slopes="bh")],
    # Each sequence has one query. Pages are in any order, and lengths end inside a page.
    "paged_attention": [case(**ONE_QUERY, seqused_k=(100, 1, 33, 64), cache="paged", page=16)],
    # nwg is num_splits here. The source's two-pass form reads past the last block, and its partial
    # results are in half. Here they are float32, and the simulator checks every read.
    "flash_attn_vec": [
        case(**FEW_QUERIES, head_dim=512, dtype="float32", causal=True, num_splits=4),
        # softcap=50 caps the scores at 50, in natural units.
        case(**FEW_QUERIES, head_dim=256, causal=True, **GEMMA),
    ],
    # Float32 queries on a float16 cache, as in llama.cpp: queries are not rounded.
    "flash_attn_vec_f16kv_dk256": [case(**F16_CACHE, head_dim=256, num_splits=1)],
    "flash_attn_vec_f16kv_dk512": [case(**F16_CACHE, head_dim=512, num_splits=4)],
}


@pytest.mark.parametrize("name", KERNELS)
def test_source_kernel(name, device):
    hold(KERNELS[name], device)


def test_every_source_kernel_has_a_test():
    row = re.compile(r"^\| (\w+)(?: \(.*?\))? \| .*`(?:[\w/.]+::)?([^`]+)` \|$", re.M)
    rows = row.findall(PAGE.read_text())
    assert [name for name, _ in rows] == NAMES
    tests = {f"test_source_kernel[{name}]" for name in KERNELS} | {*globals(), *vars(rope_op)}
    for module in (merge, rope_op, softmax):
        tests |= {f"test_values[{subject}]" for subject in module.CASES}
    assert [test for name, test in rows if name not in test or test not in tests] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_flash_attention_simd(dtype):
    """The source kernel takes 33,792 bytes of threadgroup memory, and needs lanes in lockstep.

    Ours stays within 32 KiB, and runs right with the lanes in any order.
    """
    q, k, v = make_qkv(q_length=64, kv_length=96, head_dim=128, dtype=dtype)
    if dtype == torch.bfloat16:
        with simulate(check=True, seed=7):
            check_flash_fwd(q, k, v, causal=True, device="cpu")
    assert explain(q, k, v, causal=True).threadgroup_bytes <= 32768


def test_yarn_attention(device):
    """A source kernel takes YaRN's ramp over wavelengths; here it runs over dimension indices.

    tests/rope/test_rope.py checks that the frequencies have the bits of transformers' frequencies.
    """
    options = {"factor": 4.0, "original_max_position_embeddings": 2048}
    inv_freq, attention_factor = rope.yarn(64, 10000.0, **options)
    q, k, v = make_qkv(heads=4, kv_heads=2, q_length=64, kv_length=64, head_dim=64)
    cos, sin = rope.tables(inv_freq, 64, attention_factor=attention_factor)
    tables = {f"{side}_rotary_{n}": t for side in "qk" for n, t in (("cos", cos), ("sin", sin))}
    check_flash_fwd(q, k, v, causal=True, **tables, device=device)
