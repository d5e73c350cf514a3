"""flash_decode reads each key and value that is seen once per KV head, and reads no others."""

from itertools import product

import pytest
import torch

from bench.bench_flash_decode import HEADS, queries_row, read_share, row
from tests.helpers.home import UNKNOWN_CORES
from torch_metal_attn import simulate
from torch_metal_attn.quantisation import quantise
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing.judge import ints


@pytest.mark.parametrize(
    "kv_heads, head_dims",
    [(1, (64, 64)), (1, (256, 256)), (2, (576, 512)), (8, (128, 128)), (32, (64, 64))],
)
def test_keys_and_values_are_read_once(kv_heads, head_dims):
    """There are 32 query heads. In one case, MLA's values are inside the keys."""
    assert 1 < read_share(kv_heads, head_dims, 1024) <= 1.05


@pytest.mark.parametrize("queries, heads, head_dim", [(64, 1, 128), (12, 16, 64)])
def test_keys_and_values_of_several_rows_are_read_once(queries, heads, head_dim):
    *_, read, read_a_key = queries_row(queries, heads, (head_dim, head_dim))
    assert read == pytest.approx(1 + queries * heads / 2 / 1024, abs=0.01)
    assert read_a_key == 1


def test_more_rows_do_not_read_more_codes_and_scales():
    """96 rows have three SIMD groups, which share the keys. 32 rows have one SIMD group."""
    read = {}
    for rows, length in product((32, 96), (64, 192)):
        data, scale = quantise(torch.randn(1, 1, length, 128), "q4_g32")
        q, scales = torch.randn(1, rows, 1, 128).half(), {"k_scale": scale, "v_scale": scale}
        with simulate(count=True) as run:
            torch.ops.metal_attn.flash_decode(q, data, data.clone(), num_splits=1, **scales)
        read[rows, length] = run.counters["flash_decode"].load_bytes["device"]
    assert read[96, 192] - read[96, 64] == read[32, 192] - read[32, 64]


@pytest.mark.parametrize("rows, head_dim", [(1, 64), (2, 64)])
def test_values_of_few_rows_need_no_products(rows, head_dim):
    """Only 4 fragments of 32 keys need products. Values are converted once for all rows."""
    counts = row(HEADS // rows, (head_dim, head_dim))
    assert counts["MMA"] == 4 * head_dim / 8
    assert counts["device loads"] == 2 * 32 * head_dim * 2 / 16 / 32, "16 bytes each"
    assert counts["converts"] == head_dim
    assert counts["barriers"] == 0


def counters(kv_length, num_splits=1, dtype=torch.float16, cache=torch.float16, **options):
    q = torch.randn(1, 4, 1, 64).to(dtype)
    k = torch.randn(1, 1, kv_length, 64).to(cache)
    with simulate(count=True) as run:
        torch.ops.metal_attn.flash_decode(q, k, k.clone(), num_splits=num_splits, **options)
    return run.counters["flash_decode"]


def test_keys_under_float32_queries_are_converted_once():
    """Keys are read in half precision and converted. Values are not converted."""
    short, long = (counters(n, dtype=torch.float32) for n in (1024, 2048))
    half_short, half_long = (counters(n) for n in (1024, 2048))
    assert long.converts - short.converts == 1024 * 64
    assert half_long.converts == half_short.converts
    read = long.load_bytes["device"] - short.load_bytes["device"]
    assert read == half_long.load_bytes["device"] - half_short.load_bytes["device"] == 1024 * 256
    assert long.matrix_operations == half_long.matrix_operations


def test_codes_are_not_converted_one_by_one():
    """Only scales are converted: each lane with a unit of 32 columns converts their scale."""
    short, long = (
        counters(
            n,
            **{name: torch.ones(1, 1, n, 2).half() for name in ("k_scale", "v_scale")},
            dtype=torch.float16,
            cache=torch.int8,
        )
        for n in (256, 512)
    )
    assert long.converts - short.converts == 256 * 2 * 2 * 4


# Options, the first key that is seen, and the end of these keys.
SEEN = {
    "window": ({"window_size_left": 99, "causal": True, "q_offset": 799}, 700, 800),
    "chunk": ({"attention_chunk": 256, "q_offset": 600}, 512, 768),
    "leftpad_k": ({"leftpad_k": ints(700), "seqused_k": ints(1000)}, 700, 1000),
    "no key": ({"causal": True, "q_offset": -1}, 0, 0),
}


@pytest.mark.parametrize("case, num_splits", [*((case, 1) for case in SEEN), ("window", 2)])
def test_only_keys_that_are_seen_are_read(case, num_splits):
    options, first, end = SEEN[case]
    short, long = (counters(n, num_splits=num_splits, **options) for n in (1024, 4096))
    assert short == long
    step = 128  # keys that a threadgroup reads at a time
    keys = -(-(end - first // 8 * 8) // step) * step
    queries = num_splits * 4 * 8 * 64 * 2 + 64 * 128 * num_splits
    assert short.load_bytes["device"] <= keys * 2 * 64 * 2 + queries


def test_splits_read_no_more_keys_than_one_split():
    one, four = (counters(2048, num_splits=n).load_bytes["device"] for n in (1, 4))
    assert four - one <= 3 * 4 * 8 * 64 * 2 * 1.1


def launch_of(batch=1, heads=32, kv_heads=8, q_length=1, kv_length=32768, head_dim=128, **options):
    q, k, v = (
        torch.empty(1, 1, 1, head_dim, dtype=torch.float16).expand(batch, *size, head_dim)
        for size in ((heads, q_length), (kv_heads, kv_length), (kv_heads, kv_length))
    )
    return extension.launches(torch.ops.metal_attn_explain.flash_decode(q, k, v, **options))[0]


def splits(**options):
    return launch_of(**options)["splits"]


def test_splits_make_whole_waves(cores):
    """A wave has 4 threadgroups of a core, or 3 if a KV head has one row, whose tile is larger."""
    cores(8)
    assert splits() == 4
    assert splits(kv_heads=32) == 3, "4 waves of 24, where 1 split takes 2 and the last has 8"
    assert splits(kv_heads=24, heads=24) == 1
    assert splits(batch=8) == 1, "2 waves of 32"
    assert splits(batch=9) == 4, "9 waves of a quarter of the keys, where 1 split takes 3"
    assert splits(kv_heads=1, heads=4) == 32
    assert splits(kv_length=64) == 1
    assert splits(window_size_left=100, causal=True) == 4, "101 keys are 4 steps of 32"
    assert splits(causal=True, q_offset=50) == 1
    assert splits(num_splits=7) == 7
    cores(80)
    assert splits() == 40, "a wave"
    assert 230 <= splits(kv_heads=1, kv_length=2**18) <= 240, "no core is idle"


def test_splits_move_no_more_bytes_than_the_keys(cores):
    """The bytes of a split are queries and results in float32, which are written and read."""
    cores(80)
    for kv_length in (512, 4096, 2**15):
        row_bytes, keys = 32 * (256 + 2 * 512), kv_length * 512
        chosen = splits(kv_heads=1, kv_length=kv_length)
        assert chosen * row_bytes <= keys < 2 * chosen * row_bytes or chosen >= 80 * 3


def test_each_tile_of_rows_has_its_threadgroup(cores):
    """512 rows of a KV head are 6 tiles of 96, which fill cores before keys are split."""
    cores(8)
    shape = {"kv_heads": 1, "q_length": 16, "kv_length": 4096}
    assert launch_of(**shape, num_splits=1)["grid"] == [1, 6, 1]
    assert splits(**shape) == 4, "24 threadgroups are three waves of 8"
    assert "6 passes over its keys, each by threadgroups of its own" in launch_of(**shape)["reason"]
    assert launch_of(**shape | {"q_length": 1})["grid"][1] == 1
    many = {"heads": 2**24, "kv_heads": 2**24, "q_length": 2**13, "head_dim": 1}
    assert launch_of(**many, kv_length=1)["grid"] == [1, 2**24, 1], "2**32 would wrap to 0"


def test_tiles_of_rows_after_new_keys_share_a_threadgroup(cores):
    """Only this threadgroup sees the new keys. The cost of splits counts a read per tile."""
    cores(8)
    q, cache = torch.zeros(1, 32, 16, 128).half(), torch.zeros(1, 1, 4096, 128).half()
    new = torch.zeros(1, 1, 16, 128).half()
    packed = torch.ops.metal_attn_explain.decode_step(q, new, new, cache, cache.clone(), ints(4080))
    assert extension.launches(packed)[0]["grid"] == [8, 1, 1]


def test_splits_on_an_unknown_gpu():
    assert splits() == UNKNOWN_CORES * 4 // 8
