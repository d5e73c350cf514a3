"""append_kv in the simulator, with every access checked, and by the CPU kernel."""

import pytest
import torch

from tests.cache.kv_caches import FORMATS
from tests.helpers.judged import arguments, judge
from tests.helpers.steps import append, check_special
from torch_metal_attn import simulate
from torch_metal_attn.quantisation import quantise
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing.judge import ints
from torch_metal_attn.testing.tensors import DTYPES

pytestmark = pytest.mark.usefixtures("backend")
append_kv = torch.ops.metal_attn.append_kv

LAYOUTS = ((), ("order 021",))
ROUNDED = [{"dtype": "float32", "cache_dtype": dtype} for dtype in DTYPES[1:]]
HALVES = {"length": 5, "lengths": (3, 11), "rotary_columns": 64}
LAST = {"length": 5, "lengths": (3, 0), "heads": 6, "rotary_last": True}
# Other tests check formats with other dtypes, in pages, unaligned and rotated.
STORED = [*(("", dtype) for dtype in DTYPES), *((format, "float32") for format in FORMATS)]
CASES = {
    **{
        f"{format or 'rows'} of {dtype}": [
            {"format": format, "dtype": dtype, "cache_layout": layout, "length": length}
            | {"lengths": (0, 1)}
            for layout in LAYOUTS
            for length in (1, 5, 31)
        ]
        for format, dtype in STORED
    },
    "head dims": [
        {"head_dim": 1, "v_head_dim": 7, "length": 5},
        {"head_dim": 33, "v_head_dim": 7, "length": 5, "format": "fp8_e4m3"},
    ],
    # test_grouped.py checks unaligned codes.
    "unaligned rows": [{"cache_layout": ("padded 3",), "v_head_dim": 32, "length": 5}],
    "strides of new rows": [
        {"layout": layout, "length": 5} for layout in (("order 021",), ("padded 8",))
    ],
    # New rows in one page, in two and in many.
    "pages": [
        {"cache": "paged", "page": page, "capacity": -(-96 // page) * page, "length": length}
        | {"lengths": lengths, "cache_layout": layout}
        for page in (1, 3, 100)
        for layout in LAYOUTS
        for length, lengths in ((1, (7, 0)), (13, (5, 23)), (65, (0, 31)))
    ],
    "quantised pages": [
        {"cache": "paged", "page": 5, "capacity": 65, "length": 21, "format": "fp8_e4m3"}
        | {"cache_layout": layout}
        for layout in LAYOUTS
    ],
    # Rows are rounded once, after the rotation.
    "half-precision caches": [
        ROUNDED[1] | HALVES | {"cache": "paged", "page": 16, "rotary_interleaved": True}
    ],
    "lengths": [{"length": n, "capacity": 32, "lengths": (0, 32 - n, 0)} for n in (1, 7, 31, 32)],
    # There are more new rows than a threadgroup writes, in more pages than a SIMD group holds.
    "many blocks": [{"length": 301, "lengths": (3,), "cache": "paged", "page": 3, "capacity": 321}],
    "indices": [{"cache": "indexed", "length": 5, "lengths": (1, 2, 3)}],
    # Results are bit for bit those of rope and then append.
    "rotary": [
        LAST | {"dtype": "bfloat16", "rotary_columns": 32},
        LAST | {"dtype": "float32", "rotary_columns": 18, "rotary_interleaved": True},
        # Positions include the padding, and all tokens of q have the same position.
        HALVES | {"leftpad_k": (2, 11), "by_token": False, "rotary_from_leftpad": False},
        HALVES | {"leftpad_k": (2, 11), "format": "q8_0", "cache": "paged"},
    ],
    "queries of another length": [HALVES | {"q_length": n, "by_token": n < 9} for n in (0, 1, 9)],
    "nothing to write": [
        {"length": 0} | more for more in ({}, {"cache": "paged"}, HALVES | {"q_length": 3})
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    judge(*(append(**fields) for fields in CASES[name]))


@pytest.mark.parametrize(
    "fields", [*({"format": format, "dtype": "float32"} for format in FORMATS), *ROUNDED], ids=str
)
def test_special_values(fields):
    check_special(**fields)


ROWS, CODES = {"lengths": (0, 0), "capacity": 32}, {"format": "fp8_e4m3"}
OPERANDS = ("k", "v", "k_cache", "v_cache", "cache_seqlens")


@pytest.mark.parametrize("dim", [0, 1])
def test_zero_sequences_or_heads_are_accepted(dim):
    call = arguments(append(length=5, **ROWS))
    for x in OPERANDS[: 5 if dim == 0 else 4]:
        call[x] = call[x].narrow(dim, 0, 0)
    append_kv(**call)


@pytest.mark.parametrize("scales", [None, torch.tensor([[0.25, 0.5], [1.0, 2.0]])])
def test_scales_of_fp8(scales):
    call = arguments(append(length=5, **ROWS | CODES))
    call |= {"k_scale": scales, "v_scale": scales, "cache_seqlens": None}
    if scales is None:
        call |= {n: call[n].view(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
    append_kv(**call)
    for name in "kv":
        data, _ = quantise(call[name], "fp8_e4m3", scales)
        written = call[f"{name}_cache"][:, :, :5]
        assert torch.equal(written.view(torch.uint8), data.view(torch.uint8))


@pytest.mark.parametrize(
    "where",
    # Entries of pages that are not written are not checked.
    [{"cache_batch_idx": ints(1, 1)}, {"block_table": ints(1, -1, 1, 10**9).view(2, 2)}],
)
def test_sequences_may_share_a_batch_or_a_page(where):
    """Two sequences may share a batch or a page if they write different rows."""
    call = arguments(append(length=5, **ROWS)) | {"cache_seqlens": ints(3, 8)} | where
    append_kv(**call)
    for b, first in enumerate((3, 8)):
        assert torch.equal(call["k_cache"][1, :, first : first + 5], call["k"][b])


def in_one_tensor(call):
    parts = torch.cat([call[n] for n in "qkv"], 1).split([4, 2, 2], 1)
    return dict(zip("qkv", parts, strict=True))


def with_tables_in_half_precision(call):
    return {n: call[n].bfloat16() for n in ("rotary_cos", "rotary_sin")}


@pytest.mark.parametrize("change", [in_one_tensor, with_tables_in_half_precision])
def test_forms_of_operands_do_not_change_results(change):
    """Operands by position, and operands of another form by name, give the same results."""
    by_position, by_name = (arguments(append(**HALVES)) for _ in range(2))
    for call in (by_position, by_name):
        call |= {n: x.float() for n, x in with_tables_in_half_precision(call).items()}
    by_name |= change(by_name)
    options = {n: x for n, x in by_position.items() if n not in OPERANDS}
    append_kv(*(by_position[n] for n in OPERANDS), **options)
    append_kv(**by_name)
    for written in ("q", "k_cache", "v_cache"):
        assert torch.equal(by_position[written].nan_to_num(), by_name[written].nan_to_num())


def test_many_queries():
    fields = {"heads": 18, "length": 1, "q_length": 1500, "lengths": (0,), "by_token": False}
    case = append(**fields, rotary_columns=64)
    (explained,) = extension.launches(torch.ops.metal_attn_explain.append_kv(**arguments(case)))
    assert explained["defines"]["HEADS"] == "3"
    judge(case)


def test_zero_rows_launch_no_kernel():
    with simulate() as run:
        append_kv(**arguments(append(length=0)))
    assert run.launches == []
