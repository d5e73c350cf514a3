"""The default tiles, rows of csrc/tiles/table.inc, seen through metal_attn_explain."""

import math
import re
from contextlib import suppress

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.agx import candidates, table
from tests.helpers.cases import each_case
from torch_metal_attn.runtime import extension
from torch_metal_attn.tools.explain.ops import backward_launches
from torch_metal_attn.tools.tune import tiles

DTYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
F32, F16, BF16 = DTYPES
FURTHEST = 2**31 - 1024
ops = torch.ops.metal_attn_explain


def operands(dtype, head_dim_qk, head_dim_v=None, q_length=100, kv_length=100, heads=(2, 2)):
    q = torch.empty(1, heads[0], q_length, head_dim_qk, dtype=dtype)
    k = torch.empty(1, heads[1], kv_length, head_dim_qk, dtype=dtype)
    return q, k, k.new_empty(1, heads[1], kv_length, head_dim_v or head_dim_qk)


def choose(dtype, *sizes, q_length=100, kv_length=100, **options):
    q, k, v = operands(dtype, *sizes, q_length=q_length, kv_length=kv_length)
    return extension.launches(ops.flash_fwd(q, k, v, **options))[-1]


def numbers(explanation):
    """The defines but for names of types and texts."""
    defines = explanation["defines"].items()
    return {name: int(value) for name, value in defines if re.fullmatch(r"\d+", value)}


def block_rows(defines):
    shares = defines.get("COLUMN_SIMDGROUPS", 1)
    return 8 * defines["ROW_FRAGMENTS"] * defines["SIMDGROUPS"] // shares


LENGTH = 120
FEATURES = [
    {},
    {"causal": True},
    {"attn_bias": torch.empty(LENGTH, LENGTH)},
    {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])},
]


def block_lists(q_block, kv_block):
    """Of a BlockMask that shows everything."""
    rows, columns = -(-LENGTH // q_block), -(-LENGTH // kv_block)
    lists = {"q_block_size": q_block, "kv_block_size": kv_block}
    for name, size, others in (("kv", rows, columns), ("q", columns, rows)):
        lists[f"{name}_num_blocks"] = torch.zeros(1, 1, size).int()
        lists[f"{name}_indices"] = torch.zeros(1, 1, size, others).int()
    return lists


def gradients(call, given):
    """Launches of a backward; none if there is too little threadgroup memory."""
    if given["q"].shape[-1] + given["v"].shape[-1] > 500:
        with suppress(ValueError):
            return backward_launches(call, given)
        return []
    return backward_launches(call, given)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    head_dim_qk=st.integers(1, 576),
    head_dim_v=st.integers(1, 512),
    options=st.sampled_from(FEATURES),
    heads=st.sampled_from([(1, 1), (2, 1), (5, 1), (24, 2), (40, 1)]),
)
def test_the_table_covers_every_problem(dtype, head_dim_qk, head_dim_v, options, heads):
    q, k, v = operands(dtype, head_dim_qk, head_dim_v, LENGTH, LENGTH, heads)
    launches = extension.launches(ops.flash_fwd(q, k, v, **options))
    launches += gradients("flash_fwd", {"q": q, "k": k, "v": v} | options)
    if "dropout_p" not in options:
        row = {name: x[:1] if name == "attn_bias" else x for name, x in options.items()}
        launches += extension.launches(ops.flash_decode(q[:, :, :1], k, v, num_splits=1, **row))
    for launch in launches:
        assert launch.get("threadgroup_bytes", 0) <= 32768
        assert math.prod(launch["threads"]) <= 1024


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    head_dim=st.integers(1, 256),
    q_block=st.integers(1, 17).map(lambda n: 8 * n),
    kv_block=st.integers(1, 17).map(lambda n: 8 * n),
)
def test_tiles_lie_within_the_blocks_of_a_block_mask(dtype, head_dim, q_block, kv_block):
    q, k, v = operands(dtype, head_dim, None, LENGTH, LENGTH)
    given = {"q": q, "k": k, "v": v, "captures": [], **block_lists(q_block, kv_block)}
    launches = extension.launches(ops.flex_fwd(**given)) + gradients("flex_fwd", given)
    kernels = {launch["kernel"]: numbers(launch) for launch in launches}
    for kernel in ("flash_fwd", "flash_bwd_dq"):
        assert q_block % block_rows(kernels[kernel]) == 0
        assert kv_block % kernels[kernel]["BLOCK_K"] == 0
    assert kv_block % block_rows(kernels["flash_bwd_dkv"]) == 0
    assert q_block % kernels["flash_bwd_dkv"]["BLOCK_Q"] == 0


def test_the_table_is_what_the_generator_wrote():
    """Each row has its kernel's numbers, within their limits, and nobody changed one."""
    text = table.TABLE.read_text()
    _, lists = text.split("default tile.\n\n")
    assert f"Their checksum: {table.checksum(lists)}\n" in text
    rows = table.read_rows(text)
    assert table.table(rows) == text
    assert rows.keys() == candidates.NAMES.keys() | table.tensor_rows().keys()
    for kernel, own in rows.items():
        assert len(own) == len(set(own)) > 4
        limits = candidates.knobs(kernel).values()
        for row in own:
            assert all(n in limit for n, limit in zip(row[-1], limits, strict=True))


# Options of 100 queries and 100 keys, and whether they hide a key.
BANDS = [
    ({}, 0),
    ({"causal": True, "q_offset": 98}, 1),
    ({"causal": True, "q_offset": 99}, 0),  # the first query sees the last key
    ({"window_size_left": 98, "q_offset": 0}, 1),
    ({"window_size_left": 99, "q_offset": 0}, 0),  # the last query sees the first key
    ({"window_size_left": 99, "q_offset": 1}, 1),
    ({"window_size_left": 2**63 - 1, "window_size_right": 2**63 - 1, "q_offset": FURTHEST}, 0),
    ({"window_size_left": 99, "q_offset": 0, "seqused_k": torch.tensor([100]).int()}, 1),
]


@each_case("options, band", BANDS)
def test_a_band_only_where_something_is_hidden(options, band):
    assert numbers(choose(F16, 64, **options)).get("BAND", 0) == band


def test_what_is_off_is_not_compiled_in():
    off = {"window_size_left": -5, "attention_chunk": 0, "softcap": 0.0, "dropout_p": 0.0}
    assert choose(F16, 64, causal=True, q_offset=99, **off) == choose(F16, 64)


def test_packed_grid_has_a_row_for_queries_of_no_sequence():
    explain_packed = ops.flash_varlen_fwd
    q = torch.empty(50, 6, 64, dtype=F16)
    ends = torch.tensor([0, 20, 20, 45], dtype=torch.int32)
    (explanation,) = extension.launches(explain_packed(q, q, q, ends, ends, 40, 25))
    assert explanation["grid"] == [-(-40 // block_rows(numbers(explanation))), 6, 3 + 1]
    (nothing,) = extension.launches(explain_packed(q, q, q, ends[:1], ends[:1], 0, 0))
    assert nothing["grid"] == [1, 6, 1], "rows of no sequence are written too"


def test_reason_gives_the_row():
    reason = choose(F16, 128)["reason"]
    assert re.search(
        r"at most \d+ registers a thread, of which M1 has 128, by the row for 16 bits, "
        "head dims up to 128",
        reason,
    )
    assert "of 32768 bytes of threadgroup memory" in reason
    assert "8 queries a SIMD group and Q in registers" in reason
    assert "two SIMD groups, half the columns each" in choose(BF16, 256)["reason"]
    with tiles.forced({"flash_fwd": choose(F16, 128)["tuning"]["candidates"][1]}):
        assert "a tile of a tuned table" in choose(F16, 128)["reason"]


def test_m3_and_later_may_read_keys_and_values_unstaged(gpu):
    """Only `tune` tries it. What nobody knows is taken for the oldest GPU."""
    for name in ("Apple M1 Ultra", "Apple M2", "", "Apple Mx", "apple m3", "Apple A17 Pro"):
        gpu(name)
        assert not any("KV_STAGED=0" in tile for tile in choose(F16, 128)["tuning"]["candidates"])
    for name in ("Apple M3 Pro", "Apple M4 Max"):
        gpu(name)
        default, *others = choose(F16, 128)["tuning"]["candidates"]
        assert "KV_STAGED=1" in default
        assert any("KV_STAGED=0" in tile for tile in others)
