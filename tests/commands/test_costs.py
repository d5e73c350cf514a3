"""The estimates of FLOPs and bytes, against brute force and the simulator's counters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.bench_flash_decode import HEAD_DIMS, count, operands
from bench.bench_inner_loops import run as run_kernel
from tests.attention.flash_fwd_check import make_packed, make_qkv, visible_keys
from torch_metal_attn import simulate
from torch_metal_attn.quantisation import quantise
from torch_metal_attn.testing.judge import ints
from torch_metal_attn.tools import costs

MATRIX_FLOPS = 2 * 8 * 8 * 8  # of one simdgroup_multiply_accumulate


@given(data=st.data())
def test_visible_pairs_equal_brute_force(data):
    draw = data.draw
    q_length, kv_length = draw(st.integers(0, 40)), draw(st.integers(0, 60))
    options = {
        "causal": draw(st.booleans()),
        "window_size_left": draw(st.integers(-1, 30)),
        "window_size_right": draw(st.integers(-1, 30)),
        "attention_chunk": draw(st.sampled_from([0, 1, 7, 16])),
        "q_offset": draw(st.none() | st.integers(-50, 70)),
    }
    if options["causal"]:
        options["window_size_right"] = -1
    lengths = {
        "seqused_k": draw(st.none() | st.integers(0, kv_length)),
        "leftpad_k": draw(st.integers(0, kv_length)),
    }
    tensors = {name: ints(n) for name, n in lengths.items() if n is not None}
    q, k = torch.empty(1, 1, q_length, 1), torch.empty(1, 1, kv_length, 1)
    visible = visible_keys(q, k, options | tensors)[0, 0]
    cost = costs.seen(q_length, kv_length, **options, **lengths)
    assert cost.pairs == visible.sum().item()
    keys = visible.any(0).nonzero()
    assert cost.keys == (keys.max() - keys.min() + 1 if len(keys) else 0)


def test_visible_pairs_of_long_sequences_are_exact():
    n = 10**9
    for triangle in ({"causal": True}, {"window_size_right": 0}):
        assert costs.seen(n, n, **triangle).pairs == n * (n + 1) // 2


def test_flops_of_whole_tiles_match_the_counters():
    q, k, v = make_qkv(heads=4, kv_heads=2, q_length=64, kv_length=128, head_dim=64)
    with simulate(count=True) as run:
        torch.ops.metal_attn.flash_fwd(q, k, v)
    done = run.counters["flash_fwd"].matrix_operations * MATRIX_FLOPS
    assert costs.cost("flash_fwd", {"q": q, "k": k, "v": v}).flops == done


def test_flops_of_the_gradient_kernels_match_the_counters():
    """dq takes three matrix products; dk and dv together take four."""
    for kernel, products in (("flash_bwd_dq", 3), ("flash_bwd_dkv", 4)):
        # All tiles and blocks divide the length.
        counters, _ = run_kernel(kernel, 192, 192, 64, torch.float16)
        assert counters.matrix_operations * MATRIX_FLOPS == 2 * 192 * 192 * 64 * products
    assert costs.gradient_flops(1, 1, 0) == 2 * 4
    assert costs.gradient_flops(1, 0, 1) == 2 * 3


@pytest.mark.parametrize("kv_heads, head_dims", [(2, HEAD_DIMS[3]), (4, HEAD_DIMS[0])])
def test_bytes_of_a_decode_match_the_counters(kv_heads, head_dims):
    q, k, v = operands(kv_heads, head_dims, 1024)
    counters = count(kv_heads, head_dims, 1024)
    moved = counters.load_bytes["device"] + counters.store_bytes["device"]
    estimate = costs.cost("flash_decode", {"q": q, "k": k, "v": v}).bytes
    assert 1 <= moved / estimate <= 1.05


@pytest.mark.parametrize("format", [None, "q8_0", "q4_0", "fp8_e4m3"])
def test_only_the_window_of_a_cache_is_counted(format):
    torch.manual_seed(0)
    q, cache = torch.randn(1, 4, 1, 64).half(), torch.randn(1, 2, 1024, 64).half()
    scales = {}
    if format is not None:
        fixed_scale = torch.ones(2) if format == "fp8_e4m3" else None
        cache, scale = quantise(cache, format, fixed_scale)
        scales = {"k_scale": scale, "v_scale": scale}
    options = {"seqused_k": ints(700), "window_size_left": 99, "causal": True, **scales}
    row_bytes = {None: 128, "q8_0": 64 + 4, "q4_0": 32 + 4, "fp8_e4m3": 64}[format]
    # Keys and values are the same tensor, which is read once.
    by_head = 2 * 2 * 4 if format == "fp8_e4m3" else 0
    expected = 2 * 100 * row_bytes + by_head + 2 * q.nbytes + 4 * 4 + 4
    cost = costs.cost("flash_decode", {"q": q, "k": cache, "v": cache, **options})
    assert cost.bytes == expected
    assert cost.flops == 2 * 4 * 100 * 128


def test_latent_rows_are_counted_once():
    k, cache = torch.zeros(2, 1, 5, 96).half(), torch.zeros(2, 1, 16, 96).half()
    seqlens = torch.tensor([0, 3]).int()
    latent = {"k": k, "v": k[..., :64], "k_cache": cache, "v_cache": cache[..., :64]}
    assert costs.cost("append_kv", latent | {"cache_seqlens": seqlens}).bytes == 2 * k.nbytes


@pytest.mark.parametrize("in_place", [False, True])
def test_bytes_of_a_partial_rotation_match_the_counters(in_place):
    q, k = torch.randn(2, 2, 4, 8, 64)
    cos, sin = torch.randn(2, 8, 16)
    op = "rope_" if in_place else "rope"
    with simulate(count=True) as run:
        getattr(torch.ops.metal_attn, op)(q, k, cos, sin)
    counters = run.counters["rope"]
    stored_bytes = counters.store_bytes["device"]
    assert stored_bytes == (q.nbytes + k.nbytes) // (2 if in_place else 1)
    least = costs.cost(op, {"q": q, "k": k, "cos": cos, "sin": sin}).bytes
    assert least == 2 * stored_bytes + cos.nbytes + sin.nbytes


def test_costs_of_packed_sequences_add_up():
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packed = dict(zip(names, make_packed([5, 0, 9], [7, 3, 9], heads=4, kv_heads=2), strict=True))
    alone = [
        costs.cost("flash_fwd", dict(zip("qkv", make_qkv(heads=4, kv_heads=2, **s), strict=True)))
        for s in ({"q_length": 5, "kv_length": 7}, {"q_length": 9, "kv_length": 9})
    ]
    together = costs.cost("flash_varlen_fwd", packed)
    assert together.flops == alone[0].flops + alone[1].flops
    assert together.bytes == alone[0].bytes + alone[1].bytes + 2 * 4 * 4
    # Without data each sequence counts as if it had the largest length.
    meta = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in packed.items()}
    assert costs.cost("flash_varlen_fwd", meta).flops == 3 * 4 * 2 * 9 * 9 * 64


def test_flops_of_trees_count_the_visible_nodes():
    q, (k, v) = torch.empty(7, 4, 8), torch.empty(2, 2, 2, 40, 8)
    packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 4, 7), "max_seqlen_q": 4}
    packed |= {"seqused_k": ints(30, 20)}
    tree = {"parents": ints(-1, 0, 0, 1, -1, -1, 1)}
    cost = costs.cost("flash_decode", packed | tree)
    # 4 queries see 26 keys before the tree, 3 see 17. Each node also sees itself and its ancestors.
    assert cost.flops == 2 * 16 * 4 * (4 * 26 + 1 + 2 + 2 + 3 + 3 * 17 + 1 + 1 + 2)
    chain = costs.cost("flash_decode", packed | {"causal": True})
    assert cost.bytes == chain.bytes + 7 * 4
    shown = torch.stack([torch.arange(4) == i for i in (0, 1, 2, 3, 0, 1, 2)])
    shown[[1, 2, 3, 3, 6], [0, 0, 0, 1, 1]] = True
    assert costs.cost("flash_decode", packed | {"tree_mask": shown}).flops == cost.flops
    windowed = costs.cost("flash_decode", packed | tree | {"window_size_left": 1})
    assert windowed.flops == 2 * 16 * 4 * 7 * 2


def test_a_key_that_is_listed_twice_is_read_once():
    q, (k, v) = torch.empty(5, 4, 8), torch.empty(2, 2, 2, 40, 8)
    packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 3, 5), "max_seqlen_q": 3}
    entries = torch.tensor([[1, 2], [2, -1], [3, 1], [1, 2], [5, 5]]).int()[None, None]
    cost = costs.cost("flash_decode", packed | {"indices": entries})
    assert cost.flops == 2 * 16 * 4 * 9
    other = q.nbytes * 2 + 5 * 4 * 4 + entries.nbytes + 3 * 4
    assert cost.bytes == (3 + 3) * 2 * 2 * 8 * 4 + other


def test_the_page_table_gives_the_number_of_keys():
    q, pages = torch.empty(2, 4, 3, 8), torch.empty(7, 2, 16, 8)
    table = torch.zeros(2, 5, dtype=torch.int32)
    cost = costs.cost("flash_fwd", {"q": q, "k": pages, "v": pages, "block_table": table})
    assert cost.flops == 2 * 4 * 3 * 80 * 2 * 16


def test_bytes_of_options_equal_hand_counts():
    q, k, v = make_qkv(heads=4, kv_heads=2, q_length=5, kv_length=100)
    qkv = {"q": q, "k": k, "v": v}
    cos, sin = torch.zeros(2, 64, 16)
    append = {"k": k[..., :5, :], "v": v[..., :5, :], "k_cache": k, "v_cache": v}
    bias, state = torch.zeros(5, 100), {"out_a": q, "lse_a": q[..., 0]}
    row_sums = 5 * 4 * 4
    for op, call, more, difference in (
        ("flash_decode", qkv, {"leftpad_k": ints(60)}, 4 - 60 * 2 * 2 * 32 * 4),
        ("flash_bwd", qkv, {"dlse": q[..., 0]}, row_sums),
        ("flash_bwd_bias", qkv, {"attn_bias": bias}, 2 * bias.nbytes),
        ("flash_bwd_slopes", qkv, {"alibi_slopes": ints(1, 2, 3, 4)}, 2 * 16),
        ("append_kv", append, {"rotary_cos": cos, "rotary_sin": sin}, 2 * 5 * 16 * 4),
    ):
        plain, cost = costs.cost(op, call).bytes, costs.cost(op, call | more).bytes
        assert cost - plain == difference, op
    assert costs.cost("merge_state", state).bytes == 3 * (q.nbytes + row_sums)


def test_a_broadcast_mask_is_counted_once():
    q, k, v = make_qkv(q_length=16, kv_length=32)
    mask = torch.ones(32, dtype=torch.bool).expand(1, 2, 16, 32)
    qkv = {"q": q, "k": k, "v": v}
    plain, masked = (costs.cost("flash_fwd", qkv | {"attn_mask": m}) for m in (None, mask))
    assert masked.bytes - plain.bytes == 32
    assert masked.flops == plain.flops
