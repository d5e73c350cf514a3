"""flash_fwd and flash_varlen_fwd refuse an invalid cache. The ValueError says what is wrong."""

import pytest
import torch

from tests.common.test_bad_options import call, ints, split, strided, tables
from tests.helpers.cases import each_case
from tests.helpers.refused import refused, without_data

Q8, BYTE, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn


def half(*shape):
    return torch.randn(shape).half()


def pages(*numbers):
    return {"block_table": ints(*numbers).view(2, 3)}


TABLE = pages(0, 1, 2, 3, 4, 0)


def paged():
    """Two sequences of 16 queries. A page has 8 keys. A sequence has up to 3 of the 5 pages."""
    operands = {"q": half(2, 4, 16, 32), "k": half(5, 2, 8, 32), "v": half(5, 2, 8, 64)}
    return operands | TABLE


def indexed():
    operands = {"q": half(2, 4, 16, 32), "k": half(3, 2, 24, 32), "v": half(3, 2, 24, 64)}
    return operands | {"cache_batch_idx": ints(2, 0)}


def half_precision():
    return indexed() | {"q": torch.randn(2, 4, 16, 32)}


def packed():
    """A sequence of 16 queries and 10 keys, and one of 4 queries and 24 keys. Keys are in pages."""
    ends = {"cu_seqlens_q": ints(0, 16, 20), "cu_seqlens_k": ints(0, 10, 34)}
    return paged() | {"q": half(20, 4, 32)} | ends | {"max_seqlen_q": 16, "max_seqlen_k": 24}


def quantised(k_dtype=Q8, scale_dtype=torch.float16, k_scale=(2, 2, 24, 1), v_scale=(2, 2, 24, 2)):
    columns = (16, 32) if (k_dtype, scale_dtype) == (BYTE, torch.float16) else (32, 64)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return {
        "q": half(2, 4, 16, 32),
        "k": torch.zeros(2, 2, 24, columns[0], dtype=BYTE).view(k_dtype),
        "v": torch.zeros(2, 2, 24, columns[1], dtype=BYTE).view(k_dtype),
        **{n: None if s is None else torch.ones(s, dtype=scale_dtype) for n, s in scales.items()},
    }


def q8_0():
    return quantised()


def q4_g32():
    data, scale = torch.zeros(2, 2, 24, 4).int(), torch.ones(2, 2, 24, 2).half()
    return quantised() | {"k": data, "v": data, "k_scale": scale, "v_scale": scale}


def q4_0():
    return quantised(BYTE)


def fp8():
    return quantised(BYTE, torch.float32, (2,), (2, 2))


def float8():
    return quantised(FP8, torch.float32, None, None)


OPERANDS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
GOOD = (paged, indexed, half_precision, packed, q8_0, q4_0, q4_g32, fp8, float8)

OUTSIDE = pages(0, 1, 7, 9, 4, 0)
INVALID = [
    (paged, {"block_table": torch.zeros(2, 3)}, r"block_table has dtype .*float32; .* int32"),
    (paged, {"block_table": ints(0, 1, 2)}, r"block_table has shape \(3,\); it must be \(2, max_b"),
    (
        paged,
        {"block_table": strided(TABLE["block_table"])},
        r"block_table has strides \(6, 2\); .*\.contiguous",
    ),
    (
        paged,
        {"k": half(5, 2, 0, 32), "v": half(5, 2, 0, 64)},
        "k has a page size of 0; with block_table it must be at least 1",
    ),
    (paged, {"cache_batch_idx": ints(0, 1)}, "cache_batch_idx is given with block_table, .*one of"),
    (paged, {"k": half(5, 8, 32)}, r"k has 3 dimensions, .* \(pages, kv_heads, page,"),
    (paged, {"v": half(5, 2, 16, 64)}, r"v has a length of 16 and k of 8; "),
    (paged, {"k": torch.zeros(5, 2, 8, 32)}, r"k has dtype .*float32 and q .*float16; .*same"),
    (indexed, {"cache_batch_idx": ints(0, 1, 2)}, r"cache_batch_idx has shape \(3,\); .* \(2,\)"),
    (
        half_precision,
        {"q": half(2, 4, 16, 32).bfloat16()},
        r"k has dtype .*float16 and q .*bfloat16; they must be the same",
    ),
    (
        half_precision,
        {"k": half(3, 2, 24, 32).double()},
        r"k has dtype .*float64 and q .*float32; it must be float32, float16 or bfloat16, or int8",
    ),
    (half_precision, tables(k=(24, 8)), "k_rotary_cos is given and k .*float16 .*; rotate keys"),
    (q8_0, {"k_scale": None}, r"k has dtype .*int8 and k_scale is None; .*float16 \(q8_0\)"),
    (q8_0, {"k_scale": torch.ones(2)}, r"k has .*int8 and k_scale is .*float32; .*float16 \(q8_0"),
    (paged, {"k_scale": half(2)}, "k_scale is given and k .*float16; only int8, uint8"),
    (
        q8_0,
        {"v": half(2, 2, 24, 64), "v_scale": None},
        "v is not quantised and k is q8_0; both or neither must be",
    ),
    (q8_0, {"k": torch.zeros(2, 2, 24, 4).short()}, r"k has a head dim of 32; q2_g64 needs"),
    (q4_0, {"k": torch.zeros(2, 2, 24, 32, dtype=BYTE)}, "k has a head dim of 64 and q of 32; "),
    (
        q8_0,
        {"v_scale": strided(half(2, 2, 24, 2))},
        r"v_scale has strides \(192, 96, 4, 2\); the last must be 1: call v_scale\.contiguous",
    ),
    (fp8, {"k_scale": torch.ones(3)}, r"k_scale has shape \(3,\); it must be \(2,\) or \(2, 2\)"),
    (fp8, tables(k=(24, 8)), "k_rotary_cos is given and k is quantised; rotate keys before they"),
    (paged, pages(0, 1, -1, 3, 4, 0), r"block_table\[0, 2\] is -1; "),
    (
        packed,
        pages(0, 1, 7, 3, 4, 9),
        r"block_table\[1, 2\] is 9; it must be in 0\.\.4, because k has 5 pages",
    ),
    (paged, OUTSIDE | {"window_size_left": 0, "q_offset": 8}, r"block_table\[0, 2\] is 7; "),
    (paged, OUTSIDE | {"causal": True, "q_offset": -8}, r"block_table\[1, 0\] is 9; "),
    (paged, {"seqused_k": ints(24, 25)}, r"seqused_k\[1\] is 25; .* 0\.\.24, .* hold 24 keys"),
    (
        indexed,
        {"cache_batch_idx": ints(0, 3)},
        r"cache_batch_idx\[1\] is 3; .*0\.\.2: the batch of k is 3",
    ),
    (indexed, {"cache_batch_idx": ints(-1, 0)}, r"cache_batch_idx\[0\] is -1; "),
    (packed, {"cu_seqlens_k": ints(0, 10, 35)}, "cu_seqlens_k has .* 25 rows and max_seqlen_k is"),
    (
        packed,
        {"cu_seqlens_k": ints(0, 10, 35), "max_seqlen_k": 30},
        r"cu_seqlens_k has a sequence of 25 rows and the length of block_table's pages is 24; ",
    ),
]


def arguments(make, changes):
    options = make()
    tensors = {name: options.pop(name) for name in OPERANDS if name in options}
    tensors, options = split(lambda: tensors, options | changes)
    return tensors, options


@each_case("make, changes, message", INVALID)
def test_invalid_caches_are_refused(make, changes, message):
    with refused(rf"^{message}"):
        call("op", *arguments(make, changes))


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("make", GOOD)
def test_valid_caches_are_accepted(make):
    """The base of each case in INVALID is valid, so the change of the case causes the error."""
    tensors, options = arguments(make, {})
    results = call("op", tensors, options)
    fake = call("op", without_data(tensors), without_data(options))
    assert [x.shape for x in fake] == [x.shape for x in results]


def test_unread_pages_are_not_checked():
    """No query sees the keys of these pages, or the pages are after the keys of their sequence."""
    anything = ints(0, 77, -5, 1, 2, 3).view(2, 3)
    call("op", *arguments(paged, {"block_table": anything, "seqused_k": ints(8, 24)}))
    call("op", *arguments(paged, {"block_table": anything - 100, "seqused_k": ints(0, 0)}))
    first_page = {"causal": True, "q_offset": -8, "block_table": anything}
    call("op", *arguments(paged, first_page))
    ends = {"cu_seqlens_q": ints(0, 0, 16), "block_table": anything}
    call("op", *arguments(packed, ends))
    few_keys = {"cu_seqlens_q": ints(0, 8, 16), "causal": True, "q_offset": 0}
    call("op", *arguments(packed, few_keys | {"block_table": anything.flip(0)}))
