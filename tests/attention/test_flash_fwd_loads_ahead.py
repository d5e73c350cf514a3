"""flash_fwd where the loads of a block begin early: tiles of tables only."""

import pytest
import torch

from bench.bench_flash_fwd import ours
from tests.attention.flash_fwd_check import (
    check_flash_fwd,
    check_flash_varlen_fwd,
    make_packed,
    make_qkv,
)
from tests.attention.flash_fwd_options import ints, rotary_tables
from tests.cache.kv_caches import in_pages, quantised, with_nan_tails
from tests.helpers.mutants import expect_caught, plant_among
from torch_metal_attn import extension
from torch_metal_attn.tuning import tiles

BEFORE_BARRIER, BEFORE_PRODUCTS = 1, 2
FORMS = pytest.mark.parametrize("form", [BEFORE_BARRIER, BEFORE_PRODUCTS])
SAID = {
    BEFORE_BARRIER: "begun before the barrier",
    BEFORE_PRODUCTS: "begun before the products of the block before",
}


def early(form, v_slice, block_k=16, row_fragments=1, columns=1):
    tile = f"V_SLICE={v_slice} BLOCK_K={block_k} ROW_FRAGMENTS={row_fragments} SIMDGROUPS=4"
    places = f"COLUMN_SIMDGROUPS={columns} Q_IN_REGISTERS=1 Q_IN_THREADGROUP=0 KV_STAGED=1"
    return tiles.forced({"flash_fwd": f"{tile} {places} LOADS_AHEAD={form}"})


def told(q, k, v, **options):
    return extension.told(torch.ops.metal_attn.flash_fwd_explain(q, k, v, **options))


@FORMS
def test_is_what_runs(form):
    q, k, v = make_qkv(head_dim=64, dtype=torch.float16)
    with early(form, 64):
        found = told(q, k, v)
    assert (found["choice"], found["defines"]["LOADS_AHEAD"]) == ("forced", str(form))
    assert found["reason"].endswith(f"16-byte loads of k and v, {SAID[form]}")
    usual = told(q, k, v)
    assert "LOADS_AHEAD" not in usual["defines"], "the chooser loads late"
    assert "begun" not in usual["reason"]


def test_tune_times_both_forms_of_the_reckoned_tile():
    q, k, v = make_qkv(q_length=40, kv_length=40, head_dim=64, dtype=torch.float16)
    first, *others = told(q, k, v)["tuning"]["candidates"]
    assert first.endswith("LOADS_AHEAD=0")
    found = {tile for tile in others if not tile.endswith("LOADS_AHEAD=0")}
    assert found == {first[:-1] + str(form) for form in SAID}


def test_registers_of_a_block_are_counted():
    """16 registers of a thread hold its chunks of 32 keys while products run."""
    q, k, v = make_qkv(head_dim=64, dtype=torch.float16)
    registers = {}
    for form in (0, BEFORE_BARRIER, BEFORE_PRODUCTS):
        with early(form, 64, block_k=32, row_fragments=2):
            registers[form] = told(q, k, v)["registers"]
    assert registers[0] == registers[BEFORE_BARRIER] <= registers[BEFORE_PRODUCTS] - 16


@FORMS
def test_two_simdgroups_that_share_rows_load_late(form, capfd):
    q, k, v = make_qkv(head_dim=128, dtype=torch.float16)
    with early(form, 128, columns=2):
        assert told(q, k, v)["choice"] == "default"
    assert "cannot run: it is ignored" in capfd.readouterr().err


def masked():
    """Enough rows for a pre-pass, which lists the blocks that are not hidden."""
    q, k, v = make_qkv(q_length=264, kv_length=2048, head_dim=16, dtype=torch.float16)
    mask = torch.rand(264, 2048, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[:, 64:1700] = False
    mask[40:90, :64] = False
    return q, k, v, {"attn_mask": mask}


def test_a_list_does_not_say_the_next_block(capfd):
    q, k, v, listed = masked()
    assert told(q, k, v, **listed)["defines"]["MASK_BLOCKS"] == "1"
    with early(BEFORE_BARRIER, 16):
        assert told(q, k, v, **listed)["choice"] == "forced"
    with early(BEFORE_PRODUCTS, 16):
        assert told(q, k, v, **listed)["choice"] == "default"
    assert "cannot run: it is ignored" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@FORMS
def test_counts(form, dtype):
    """No load, barrier or product is added; a matter of order alone. 32 keys divide evenly."""
    with early(0, 64, block_k=32):
        late = ours(64, dtype)
    with early(form, 64, block_k=32):
        found = ours(64, dtype)
    for count in ("loads", "converts", "barriers", "matrix_operations", "shuffles", "exps"):
        assert getattr(found, count) == getattr(late, count), count


def odd(form, device):
    """Blocks of chunks that do not divide evenly among threads; the last block ends early.

    Keys before the first are NaN, and no query tile begins at the first block.
    """
    q, k, v = make_qkv(kv_heads=1, q_length=40, kv_length=83, head_dim=56, v_head_dim=24)
    k[:, :, :19], v[:, :, :19] = torch.nan, torch.nan
    options = {"causal": True, "window_size_left": 30, "leftpad_k": ints(19)}
    with early(form, 24, block_k=24):
        check_flash_fwd(q, k, v, device=device, **options)


@FORMS
def test_odd(form, device):
    odd(form, device)


@FORMS
def test_no_keys(form, device):
    """A tile that sees nothing loads nothing."""
    q, k, v = make_qkv(q_length=70, kv_length=20, dtype=torch.float16)
    with early(form, 32):
        check_flash_fwd(q, k, v, device=device, causal=True)
        check_flash_fwd(q, k[:, :, :0], v[:, :, :0], device=device)


@FORMS
def test_one_block(form, device):
    q, k, v = make_qkv(kv_length=7, dtype=torch.bfloat16)
    with early(form, 32, block_k=32, row_fragments=2):
        check_flash_fwd(q, k, v, device=device)


@FORMS
def test_slices_of_unaligned_rows(form, device):
    """The last of two slices passes the end of a row, and rows are loaded element by element."""
    q, k, v = make_qkv(q_length=20, head_dim=36, v_head_dim=42)
    with early(form, 24):
        assert told(q, k, v)["choice"] == "forced"
        check_flash_fwd(q, k, v, device=device, softcap=3.0)


def paged(form, device):
    """The lanes look each block's pages up in what they have shuffled for it."""
    lengths = [0, 1, 31, 65]
    q, k, v = make_qkv(batch=4, heads=4, kv_heads=2, kv_length=65, head_dim=64, dtype=torch.float16)
    k, v = (with_nan_tails(x, lengths) for x in (k, v))
    k, v, cache = quantised(k, v, "q8_0")
    cache = in_pages(cache, lengths, 5)
    with early(form, 64):
        check_flash_fwd(q, k, v, cache=cache, seqused_k=ints(*lengths), causal=True, device=device)


@FORMS
def test_quantised_pages(form, device):
    paged(form, device)


@FORMS
def test_packed_and_rotated(form, device):
    packed = make_packed([7, 0, 33], [31, 5, 40], head_dim=64, dtype=torch.bfloat16)
    cos, sin = rotary_tables(40, 32)
    tables = {
        f"{side}_rotary_{name}": x for side in "qk" for name, x in (("cos", cos), ("sin", sin))
    }
    with early(form, 64):
        check_flash_varlen_fwd(*packed, device=device, **tables)


def test_listed_blocks(device):
    """What was begun is the block that is staged, not the one after the last."""
    q, k, v, listed = masked()
    with early(BEFORE_BARRIER, 16):
        check_flash_fwd(q, k, v, device=device, **listed)


@FORMS
def test_bits_do_not_change(form, device):
    q, k, v = (x.to(device) for x in make_qkv(q_length=50, kv_length=99, head_dim=80))
    found = []
    for one in (0, form):
        with early(one, 80):
            found.append(torch.ops.metal_attn.flash_fwd(q, k, v, causal=True))
    for late, soon in zip(*found, strict=True):
        assert torch.equal(late, soon)


READ = "// Every SIMD group has read the tiles of the block before.\n    "
WHOLE = "// The tiles are whole.\n    "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MORE = "if (kv_block + BLOCK_K < kv_end) {\n      ahead.load"
NEXT = "ahead.load(keys, values, sequence, kv_block + BLOCK_K,"
FIRST = "ahead.load(keys, values, sequence, kv_begin,"
THIS = "ahead.load(keys, values, sequence, kv_block,"
MUTANTS = {
    "no barrier before the tiles are written": (odd, READ + BARRIER, "", "race"),
    "no barrier after": (odd, WHOLE + BARRIER, "", ("uninitialised", "race")),
    "key past the end": (
        odd,
        "source.find(min(row + 1, end - 1))",
        "source.find(row + 1)",
        "out_of_bounds",
    ),
    "value past the end": (
        odd,
        "place = source.find(min(row, end - 1))",
        "place = source.find(row)",
        "out_of_bounds",
    ),
    "every thread stores": (
        odd,
        "if (ValueDeal::owns(unit))",
        "if (true)",
        ("race", "threadgroup_out_of_bounds"),
    ),
    "one round of values stored": (
        odd,
        "if (ValueDeal::owns(unit))",
        "if (i == 0)",
        "uninitialised",
    ),
    "values before the first": (odd, "row >= begin && row < end ? values", "row < end ? values"),
    "a thread's first round again": (
        odd,
        "KeyDeal::existing(thread_index + i * THREADS)",
        "KeyDeal::existing(thread_index)",
    ),
}
OF_FORM = {
    BEFORE_BARRIER: {
        "the block after": (odd, THIS, THIS.replace("kv_block", "kv_block + BLOCK_K")),
        "the first block": (odd, THIS, THIS.replace("kv_block", "kv_begin")),
        "pages of another block": (
            paged,
            "move_to(keys, values, first, BLOCK",
            "move_to(keys, values, first + BLOCK, BLOCK",
            "simd_lane",
        ),
    },
    BEFORE_PRODUCTS: {
        "the same block": (odd, NEXT, NEXT.replace(" + BLOCK_K", "")),
        "two blocks on": (odd, NEXT, NEXT.replace("BLOCK_K", "2 * BLOCK_K")),
        "not the last": (odd, MORE, MORE.replace("kv_end", "kv_end - BLOCK_K")),
        "from the first key": (odd, FIRST, FIRST.replace("kv_begin", "0")),
        "pages of another block": (
            paged,
            "move_to(keys, values, first, BLOCK",
            "move_to(keys, values, first + BLOCK, BLOCK",
            "simd_lane",
        ),
    },
}
ALL = {
    (form, name): mutant for form in OF_FORM for name, mutant in (MUTANTS | OF_FORM[form]).items()
}
TEXTS = {
    form: [m[1:3] for (of, _), m in ALL.items() if of == form and m[0] is odd] for form in OF_FORM
}


@pytest.mark.parametrize("form, name", ALL)
def test_mutant_is_caught(form, name, monkeypatch):
    problem, old, new, fault = (*ALL[form, name], None)[:4]
    plant_among(monkeypatch, "flash_fwd", old, new, TEXTS[form])
    expect_caught(lambda: problem(form, "cpu"), fault=fault, kernel="flash_fwd")
