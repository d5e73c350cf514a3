"""The default tiles (csrc/tiles/table.inc), as metal_attn_explain shows them."""

import math
import re

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench import specialisations
from bench.agx import candidates, table
from tests.helpers.cases import each_case
from tests.tuning.explained import DTYPES, explained, launch_of, operands
from torch_metal_attn.simulator import simulate
from torch_metal_attn.tools.explain.ops import backward_launches
from torch_metal_attn.tuned import tiles

LENGTH = 120
FURTHEST = 2**31 - 1024
OLD = ("Apple M1 Ultra", "Apple M2", "", "Apple Mx", "apple m3", "Apple A17 Pro")
NEW = ("Apple M3 Pro", "Apple M4 Max")
FEATURES = [
    {},
    {"causal": True},
    {"attn_bias": torch.empty(LENGTH, LENGTH)},
    {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])},
]
some = settings(max_examples=60, deadline=None)


def numbers(launch):
    """The defines that are numbers, and the rows of a threadgroup."""
    chosen = {name: int(n) for name, n in launch["defines"].items() if re.fullmatch(r"\d+", n)}
    groups = chosen.get("SIMDGROUPS", 1) // chosen.get("COLUMN_SIMDGROUPS", 1)
    return chosen | {"rows": 8 * chosen.get("ROW_FRAGMENTS", 1) * groups}


@some
@given(
    dtype=st.sampled_from(DTYPES),
    head_dims=st.tuples(st.integers(1, 576), st.integers(1, 512)),
    options=st.sampled_from(FEATURES),
    heads=st.sampled_from([(1, 1), (2, 1), (5, 1), (24, 2), (40, 1)]),
)
def test_the_table_covers_every_problem(dtype, head_dims, options, heads):
    q, k, v = operands(*head_dims, (LENGTH, LENGTH), dtype, heads)
    launches = explained("flash_fwd", q, k, v, **options)
    launches += backward_launches("flash_fwd", {"q": q, "k": k, "v": v} | options)
    if "dropout_p" not in options:
        row = {name: x[:1] if name == "attn_bias" else x for name, x in options.items()}
        launches += explained("flash_decode", q[:, :, :1], k, v, num_splits=1, **row)
    for launch in launches:
        assert launch.get("threadgroup_bytes", 0) <= 32768
        assert math.prod(launch["threads"]) <= 1024


@each_case("q_length, options", [(70, {}), (1, {"num_splits": 1}), (3, {"num_splits": 2})])
def test_explained_threadgroup_memory_equals_that_of_a_run(q_length, options):
    """Each array begins at a multiple of 16 bytes."""
    op = "flash_decode" if options else "flash_fwd"
    q, k, v = operands(64, lengths=(q_length, 70), heads=(4, 2))
    q, k, v = (torch.randn_like(x).requires_grad_(not options) for x in (q, k, v))
    launches = explained(op, q, k, v, **options)
    with simulate(check=True) as run:
        out = getattr(torch.ops.metal_attn, op)(q, k, v, **options)
        if not options:
            out[0].sum().backward()
            launches += backward_launches(op, {"q": q, "k": k, "v": v})
    for launch in launches:
        if "threadgroup_bytes" in launch:
            taken = run.counters[launch["kernel"]].threadgroup_bytes
            assert launch["threadgroup_bytes"] == (taken + 15) // 16 * 16, launch["kernel"]


@some
@example(dtype=torch.float16, head_dim=576, kv_heads=2, feature="rotated q8_0 cache")
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from((64, 192, 512, specialisations.LATENT)),
    kv_heads=st.sampled_from((32, 16, 4, 2, 1)),
    feature=st.sampled_from(specialisations.DECODED_FEATURES),
)
def test_the_table_covers_every_decode(dtype, head_dim, kv_heads, feature):
    options = specialisations.ALL_FEATURES[feature]
    chosen = specialisations.decoding(dtype, head_dim, kv_heads, feature, options)
    assert chosen.threads <= 1024


@some
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.integers(1, 256),
    blocks=st.tuples(*2 * [st.integers(1, 17).map(lambda n: 8 * n)]),
)
def test_tiles_lie_within_the_blocks_of_a_block_mask(dtype, head_dim, blocks):
    q, k, v = operands(head_dim, None, (LENGTH, LENGTH), dtype)
    call = {"q": q, "k": k, "v": v, "captures": []}
    rows, columns = (-(-LENGTH // size) for size in blocks)
    sides = (("q", blocks[0], columns, rows), ("kv", blocks[1], rows, columns))
    for name, size, block, others in sides:
        call[f"{name}_block_size"] = size
        call[f"{name}_num_blocks"] = torch.zeros(1, 1, block).int()
        call[f"{name}_indices"] = torch.zeros(1, 1, block, others).int()
    launches = explained("flex_fwd", **call)
    launches += backward_launches("flex_fwd", call)
    assert {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"} <= {x["kernel"] for x in launches}
    for launch in launches:
        chosen, sizes = numbers(launch), blocks[::-1] if "dkv" in launch["kernel"] else blocks
        if block := chosen.get("BLOCK_K", chosen.get("BLOCK_Q")):
            assert (sizes[0] % chosen["rows"], sizes[1] % block) == (0, 0)


def test_the_table_equals_the_generators_text():
    text = table.TABLE.read_text()
    _, lists = text.split("default tile.\n\n")
    assert f"Their checksum: {table.checksum(lists)}\n" in text
    rows = table.read_rows(text)
    assert table.table(rows) == text
    assert rows.keys() == candidates.NAMES.keys() | table.tensor_rows().keys()
    for kernel, block in rows.items():
        assert len(block) == len(set(block)) > 4
        limits = candidates.knobs(kernel).values()
        assert all(n in limit for row in block for n, limit in zip(row[-1], limits, strict=True))


# Options for 100 queries and 100 keys, and True if they hide a key.
OFF = {"window_size_left": -5, "attention_chunk": 0, "softcap": 0.0, "dropout_p": 0.0}
BANDS = [
    (OFF | {"causal": True, "q_offset": 99}, False),  # the first query sees the last key
    ({"causal": True, "q_offset": 98}, True),
    ({"window_size_left": 98, "q_offset": 0}, True),
    ({"window_size_left": 99, "q_offset": 0}, False),  # the last query sees the first key
    ({"window_size_left": 99, "q_offset": 1}, True),
    ({"window_size_left": 2**63 - 1, "window_size_right": 2**63 - 1, "q_offset": FURTHEST}, False),
    ({"window_size_left": 99, "q_offset": 0, "seqused_k": torch.tensor([100]).int()}, True),
]


@each_case("options, band", BANDS)
def test_a_band_is_compiled_in_only_if_it_hides_a_key(options, band):
    plain, chosen = (launch_of("flash_fwd", *operands(), **o) for o in ({}, options))
    assert chosen["defines"].get("BAND") == ("1" if band else None)
    assert band or chosen == plain


@each_case("name", OLD + NEW)
def test_m3_and_later_may_read_keys_and_values_unstaged(name, gpu):
    """Unstaged tiles are candidates for `tune`, not the default. Unknown GPUs have no such tile."""
    gpu(name)
    chosen = launch_of("flash_fwd", *operands(128))
    default, *others = chosen["tuning"]["candidates"]
    assert "KV_STAGED=1" in default
    assert any("KV_STAGED=0" in tile for tile in others) == (name in NEW)
    row = r"^tile chosen by the table row for 16-bit dtypes, head dims up to 128.*: at most \d+ of "
    assert re.search(row, chosen["reason"])
    with tiles.forced({"flash_fwd": others[0]}):
        assert "a tile of a tuned table" in launch_of("flash_fwd", *operands(128))["reason"]
