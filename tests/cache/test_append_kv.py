"""`metal_attn::append_kv` in the simulator, every access checked, and as its reference in torch."""

import pytest
import torch

from tests.cache.append_check import append_kv, check, check_equal, expected, make
from tests.cache.kv_caches import FORMATS
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing.judge import DTYPES

pytestmark = pytest.mark.usefixtures("backend")


BOTH = ("heads", "rows")  # layouts
ROUNDED = [
    {"dtype": torch.float32, "cache_dtype": dtype, "seqlens": [3, 11]}
    for dtype in (torch.float16, torch.bfloat16)
]
PADDED = {"seqlens": [3, 11], "leftpad": [2, 11], "rotary_dim": 64, "q_heads": 4}
ROTARY = [
    {"rotary_dim": 32, "rotary_first_column": 32, "table_dtype": torch.bfloat16}
    | {"dtype": torch.bfloat16},
    {"rotary_dim": 18, "rotary_first_column": 13, "rotary_interleaved": True}
    | {"dtype": torch.float32},
]
# Formats have the other dtypes in pages, off their alignment and rotated.
STORED = [
    *((None, dtype) for dtype in DTYPES),
    *((format, torch.float32) for format in FORMATS),
]
# Options of `make`.
PROBLEMS = {
    **{
        f"{format} of {dtype}": [
            {"format": format, "dtype": dtype, "layout": layout, "length": length, "seed": seed}
            | {"seqlens": [0, 1]}
            for layout in BOTH
            for seed, length in enumerate((1, 5, 31))
        ]
        for format, dtype in STORED
    },
    "fp8 without scales": [{"format": "fp8_e4m3", "scale": False}],
    "head dims": [
        {"head_dim": 1, "head_dim_v": 7, "seqlens": [3, 20]},
        {"head_dim": 33, "head_dim_v": 7, "format": "fp8_e4m3"},
    ],
    # test_grouped.py has those of codes.
    "rows off their alignment": [{"layout": "gaps", "head_dim_v": 32}],
    # Rows that cross none, one and many borders of pages.
    "pages": [
        {"page": page, "length": length, "seqlens": lengths, "capacity": 96, "layout": layout}
        for page in (1, 3, 100)
        for layout in BOTH
        for length, lengths in ((1, [7, 0]), (13, [5, 23]), (65, [0, 31]))
    ],
    "quantised pages": [
        {"page": 5, "length": 21, "seqlens": [3, 11], "format": "fp8_e4m3", "layout": layout}
        for layout in BOTH
    ],
    # Rounded once, after rotation.
    "half-precision caches": [
        ROUNDED[1] | {"page": 5, "rotary_dim": 64, "rotary_interleaved": True, "q_heads": 3}
    ],
    "lengths": [
        options | {"length": length}
        for length in (1, 7, 31, 32)
        for options in ({}, {"batch": 3, "seqlens": [0, 32 - length, 0]})
    ],
    # More rows than a threadgroup takes, in more pages than a SIMD group holds.
    "many blocks": [{"batch": 1, "length": 301, "seqlens": [3], "page": 3, "capacity": 321}],
    # One batch of the cache for two sequences, which do not write the same rows.
    "indices": [
        {"batch": 3, "cache_batch_idx": [4, 0, 2], "seqlens": [1, 2, 3]},
        {"cache_batch_idx": [1, 1], "seqlens": [3, 8]},
    ],
    # Equal to rope and then append, to the bit.
    "rotary": [
        *({"seqlens": [3, 0], "q_heads": 3} | r for r in ROTARY),
        {"rotary_dim": 0, "q_heads": 2},
        # Rows not counted from the padding, and the same for each token of q.
        PADDED | {"rotate_q_by_token": False, "rotary_from_leftpad": False},
        PADDED | {"format": "q8_0", "page": 16},
    ],
    "queries of another length": [
        {"seqlens": [3, 0], "rotary_dim": 64, "q_heads": 3, "q_length": n} for n in (0, 1, 9)
    ],
    "nothing to write": [
        empty | options
        for empty in ({"batch": 0}, {"kv_heads": 0}, {"length": 0})
        for options in ({}, {"page": 8}, {"rotary_dim": 64, "q_heads": 2, "q_length": 3})
    ],
    "no room": [{"length": 0, "capacity": 0, "rotary_dim": 64, "q_heads": 2, "q_length": 3}],
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_values(name):
    for options in PROBLEMS[name]:
        check(make(**options))


@pytest.mark.parametrize("format", FORMATS)
def test_values_that_are_special(format):
    """Zeros, blocks with NaN and infinity, and what no scale holds."""
    problem = make(format=format, dtype=torch.float32, length=9, seqlens=[0, 1])
    for name in ("k", "v"):
        x = problem.tensors[name]
        x[:, :, 0] = 0
        x[:, :, 1, 5] = torch.nan
        x[:, :, 2, 40] = -torch.inf
        x[:, :, 3, 63] = 3e38
        x[:, :, 4] *= 1e-6
        x[:, :, 5] *= 1e6
        x[:, :, 6, 33], x[:, :, 6, 60] = 50, -50
        x[:, :, 7, 33], x[:, :, 7, 60] = -50, 50
        x[:, :, 8] = (x[:, :, 8] * 4).round() / 4
    check(problem)


def test_fp8_as_bytes():
    problem = make(format="fp8_e4m3", dtype=torch.float32, seqlens=[0, 1])
    for name in ("k_cache", "v_cache"):
        problem.tensors[name] = problem.tensors[name].view(torch.uint8)
    check(problem)


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
def test_half_precision_caches_of_special_values(rounded):
    """What passes float16 is infinite there."""
    problem = make(**rounded, head_dim_v=33, layout="gaps")
    for name in ("k", "v"):
        x = problem.tensors[name]
        x[:, :, 0] *= 1e5
        x[:, :, 1] *= 1e-6
        x[:, :, 2, 7], x[:, :, 2, 8] = torch.inf, -torch.inf
        x[:, :, 3] = 1.0 + torch.arange(x.shape[3]) * 2.0**-11
    check(problem)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_strides_of_new_rows(layout):
    problem = make(batch=3)
    for name in ("k", "v"):
        x = problem.tensors[name]
        problem.tensors[name] = {
            "transposed": lambda x=x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "expanded": lambda x=x: x[:, :1].expand(x.shape),
            "sliced": lambda x=x: torch.cat((x, x), -1)[..., 8:72],
        }[layout]()
    check(problem)


def test_a_page_of_two_sequences():
    problem = make(page=100, seqlens=[1, 6], length=5)
    problem.tensors["block_table"][1, 0] = problem.tensors["block_table"][0, 0]
    check(problem)


def test_entries_that_are_not_written_are_not_looked_at():
    problem = make(page=100, seqlens=[101, 102], length=5, capacity=400)
    problem.tensors["block_table"][:, 0] = -1
    problem.tensors["block_table"][:, 2:] = 10**9
    check(problem)


def test_queries_in_a_packed_projection():
    """q, k and v in one tensor, q rotated in place."""
    problem = make(rotary_dim=64, q_heads=4, seqlens=[1, 2])
    packed = torch.cat([problem.tensors[n] for n in ("q", "k", "v")], 1).contiguous()
    problem.tensors |= {"q": packed[:, :4], "k": packed[:, 4:6], "v": packed[:, 6:]}
    after = expected(problem)
    problem.run()
    check_equal(problem.tensors, after, ["q", "k_cache", "v_cache"])


def test_many_queries():
    """So many that a thread rotates several heads."""
    problem = make(batch=1, length=1, rotary_dim=64, q_heads=17, q_length=1500, capacity=1500)
    (explained,) = extension.launches(torch.ops.metal_attn_explain.append_kv(**problem.tensors))
    assert explained["defines"]["HEADS"] == "3"
    check(problem)


def test_nothing_launches_nothing():
    with simulate() as run:
        make(length=0).run()
    assert run.launches == []


def test_all_arguments_by_place():
    """In the order of the schema."""
    problem, other = make(seqlens=[3, 4]), make(seqlens=[3, 4])
    names = ("k", "v", "k_cache", "v_cache", "cache_seqlens")
    append_kv(*(problem.tensors[name] for name in names))
    check_equal(problem.tensors, expected(other))
