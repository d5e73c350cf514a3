"""The lookup of tiles in C++: keys, candidates, the effect of a table, and refused tiles."""

import re

import pytest
import torch

from tests.attention.flash_fwd_check import check_flash_fwd, make_qkv
from tests.helpers.cases import each_case
from tests.tuning.explained import DTYPES, Q_HELD, Q_READ_AGAIN, launch_of, operands
from torch_metal_attn import explain
from torch_metal_attn.tuned import tiles

ops = torch.ops.metal_attn


def key(kernel="flash_fwd", options=None, **sizes):
    return launch_of(kernel, *operands(**sizes), **(options or {}))["tuning"]["key"]


class TestKeys:
    def test_a_key_has_kernel_dtype_and_head_dims(self):
        assert key(lengths=(600, 3000)) == "flash_fwd half 64 64 plain q<=2048 k<=8192"
        assert key(v_head_dim=24, dtype=torch.float32).startswith("flash_fwd float 64 24 plain")
        assert key("flash_bwd_dq", dtype=torch.bfloat16).startswith("flash_bwd_dq bfloat 64 64")
        assert key("flash_bwd_dkv").startswith("flash_bwd_dkv half 64 64 plain q<=512 k<=512")

    @each_case(
        "length, words",
        [
            *((1, "<=8"), (8, "<=8"), (9, "<=16"), (32, "<=32"), (33, "<=512"), (512, "<=512")),
            *((2048, "<=2048"), (2049, "<=8192"), (8193, ">8192"), (2**24, ">8192")),
        ],
    )
    def test_a_key_has_the_classes_of_the_lengths(self, length, words):
        few = key("flash_bwd_dq", lengths=(length, 600))
        assert few.endswith(f"plain q{words} k<=2048")
        assert key(lengths=(600, length)).endswith(f"plain q<=2048 k{words}")

    def test_a_decode_counts_the_queries_of_a_kv_head_and_the_keys_that_they_read(self):
        sizes = {"lengths": (1, 5000), "heads": (24, 2)}
        assert key("flash_decode", **sizes) == "flash_decode half 64 64 plain q<=16 k<=8192"
        windowed = key("flash_decode", {"causal": True, "window_size_left": 100}, **sizes)
        assert windowed == "flash_decode half 64 64 band q<=16 k<=512"

    @each_case(
        "words, options",
        [
            ("band", {"causal": True}),
            ("band", {"window_size_left": 5}),
            ("band", {"attention_chunk": 7}),
            ("mask", {"attn_mask": torch.ones(100, 100, dtype=torch.bool)}),
            ("mask unpaired_keys", {"attn_mask": torch.ones(100, 101, dtype=torch.bool)[:, 1:]}),
            ("bias", {"attn_bias": torch.ones(100, 100)}),
            ("softcap", {"softcap": 3.0}),
            ("dropout", {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])}),
            (
                "band q_rotary k_rotary",
                {f"{x}_rotary_{f}": torch.ones(100, 16) for x in "qk" for f in ("cos", "sin")}
                | {"causal": True},
            ),
            ("plain", {"learnable_sink": torch.ones(2)}),
            ("plain", {"alibi_slopes": torch.ones(2)}),
            ("plain", {"seqused_k": torch.tensor([100]).int()}),
            ("plain", {"softmax_scale": 0.3}),
        ],
    )
    def test_a_key_has_the_features_that_change_the_choice(self, words, options):
        assert key(options=options) == f"flash_fwd half 64 64 {words} q<=512 k<=512"

    def test_a_key_has_the_format_of_the_cache(self):
        q, k, v = operands(dtype=torch.float32)
        half = launch_of("flash_fwd", q, k.half(), v.half())["tuning"]["key"]
        assert half == "flash_fwd float 64 64 half q<=512 k<=512"
        data, scale = (
            x.repeat(1, 2, 100, 1) for x in (torch.zeros(64).char(), torch.ones(2).half())
        )
        quantised = launch_of(
            "flash_fwd", q, data, data.clone(), k_scale=scale, v_scale=scale.clone()
        )
        assert quantised["tuning"]["key"] == "flash_fwd float 64 64 q8_0 q<=512 k<=512"

    def test_alignment_is_not_in_the_key(self):
        """Alignment must not change the bits of results."""
        q = torch.empty(1, 2, 100, 65, dtype=torch.float16)
        odd = launch_of("flash_fwd", q[..., 1:], q[..., 1:], q[..., :64])
        assert odd["defines"]["WIDE_LOADS"] == "0"
        assert odd["tuning"]["key"] == key()


KERNELS = ("flash_fwd", "flash_decode", "flash_bwd_dq", "flash_bwd_dkv")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["Apple M1", "Apple M4 Max"])
def test_candidates_begin_with_the_default_tile_and_can_all_run(kernel, name, gpu):
    gpu(name)
    lengths = (1 if kernel == "flash_decode" else 64, 64)
    for dtype in DTYPES:
        for head_dim in (1, 40, 64, 96, 128, 256, 320, 488):
            qkv = operands(head_dim, dtype=dtype, lengths=lengths)
            launch = launch_of(kernel, *qkv)
            candidates = launch["tuning"]["candidates"]
            assert (2 if head_dim <= 128 else 1) <= len(candidates) <= 8
            assert len(set(candidates)) == len(candidates)
            assert launch["choice"] == "default"
            for number, tile in enumerate(candidates):
                with tiles.forced({kernel: tile}):
                    forced = launch_of(kernel, *qkv)
                assert forced["choice"] == "forced"
                assert forced["threadgroup_bytes"] <= 32768
                assert (forced["defines"] == launch["defines"]) == (number == 0)


# Tiles that are in no row of the table for these head dims.
@pytest.mark.parametrize("tile", ["BLOCK_K=16 SIMDGROUPS=6", "BLOCK_K=8 SIMDGROUPS=2"])
def test_other_numbers_of_simd_groups_give_right_results(tile, device):
    qkv = make_qkv(q_length=150, kv_length=65)
    with tiles.forced({"flash_fwd": f"V_SLICE=32 {tile} {Q_READ_AGAIN}"}):
        assert launch_of("flash_fwd", *qkv)["choice"] == "forced"
        check_flash_fwd(*qkv, causal=True, q_offset=-9, device=device)


SHAPE = {"head_dim": 64, "lengths": (100, 100)}


def use_second_candidate(kernel="flash_fwd", **options):
    """Use a table with the second candidate for SHAPE. Returns that tile, and q, k and v."""
    qkv = operands(**SHAPE)
    launch = launch_of(kernel, *qkv, **options)["tuning"]
    tiles.use(tiles.make([(launch["key"], launch["candidates"][1], "tuned on this machine")]))
    return launch["candidates"][1], qkv


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_applies_to_its_key_only(kernel):
    tile, qkv = use_second_candidate(kernel)
    launch = launch_of(kernel, *qkv)
    assert launch["choice"] == "tuned on this machine"
    assert launch["tuning"]["candidates"][0] == tile
    for options in ({"softcap": 2.0}, {"attn_bias": torch.zeros(1, 1, 1, 100)}):
        assert launch_of(kernel, *qkv, **options)["choice"] == "default"
    assert launch_of(kernel, *operands(64, lengths=(600, 3000)))["choice"] == "default"
    assert launch_of(kernel, *operands(72))["choice"] == "default"
    assert launch_of(kernel, *operands(64, dtype=torch.bfloat16))["choice"] == "default"
    tiles.use(None)
    assert launch_of(kernel, *qkv)["choice"] == "default"


@pytest.mark.parametrize(
    "tile",
    [
        f"V_SLICE=64 BLOCK_K=64 SIMDGROUPS=4 {Q_HELD}",
        f"V_SLICE=20 BLOCK_K=32 SIMDGROUPS=4 {Q_HELD}",
        "BLOCK_K=32",
        f"V_SLICE=64 BLOCK_K=8y SIMDGROUPS=4 {Q_HELD}",
        "=",
        f"V_SLICE=64 BLOCK_K=32 SIMDGROUPS=4 {Q_HELD} NEW=1",
    ],
)
def test_a_tile_that_cannot_run_is_ignored_with_one_line(tile, capfd):
    qkv = operands(**SHAPE)
    before = launch_of("flash_fwd", *qkv)
    tiles.use(tiles.make([(before["tuning"]["key"], tile, "tuned on this machine")]))
    assert launch_of("flash_fwd", *qkv) == launch_of("flash_fwd", *qkv) == before
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        f"torch_metal_attn: a tuned table has the tile {tile} for flash_fwd half 64 64 plain "
        "q<=512 k<=512: this tile cannot run and is ignored"
    )


@pytest.mark.parametrize("row", [("a b", "X"), ("a b", "X=1", "s", "t"), ("a b", "X=1", "s\n\n")])
def test_malformed_rows_are_refused(row):
    with pytest.raises(ValueError, match="each row must be a key"):
        tiles.make([row])


def test_explain_shows_the_choice():
    use_second_candidate(causal=True)
    launch = explain(*operands(**SHAPE), causal=True)
    assert "  tile            tuned on this machine" in str(launch).splitlines()
    assert "  tile            default" in str(explain(*operands(**SHAPE))).splitlines()


def test_the_same_table_gives_the_same_bits(device):
    q, k, v = (x.to(device) for x in make_qkv(q_length=40, kv_length=200, head_dim=16))
    launch = launch_of("flash_fwd", q, k, v)["tuning"]
    results = []
    default = launch["candidates"][0]
    for tile in (default, re.sub(r"BLOCK_K=\d+", "BLOCK_K=8", default)):
        tiles.use(tiles.make([(launch["key"], tile, "tuned on this machine")]))
        results.append([ops.flash_fwd(q, k, v)[0] for _ in range(2)])
    assert all(torch.equal(first, second) for first, second in results)
    assert not torch.equal(results[0][0], results[1][0])
