"""flash_fwd: layouts of slopes and tables, sinks, NaN and infinity."""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import (
    DTYPES,
    PAIRS_OF_DTYPES,
    check_flash_fwd,
    make_qkv,
    random_mask,
    rotary_tables,
)
from tests.attention.held_cases import HOME
from tests.attention.test_flash_bwd import assert_same
from tests.helpers.cases import each_case
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import ROUNDING, ints, normal, on

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 35, "kv_length": 70, "head_dim": HOME}


def run(device, *qkv, **options):
    qkv = [x.to(device) for x in qkv]
    return [x.cpu() for x in torch.ops.metal_attn.flash_fwd(*qkv, **on(device, options))]


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_error_does_not_grow_with_the_keys(dtype, device):
    q, k, v = make_qkv(heads=1, q_length=64, kv_length=4096, head_dim=HOME, dtype=dtype)
    check_flash_fwd(q, k, v, device=device)


SLOPES = normal(2, 9).abs()


@each_case("slopes", [SLOPES[:, 3:7], SLOPES[:1, 3:7].expand(2, 4), SLOPES[0, 5:], -SLOPES[0, :4]])
def test_slopes_may_have_any_strides_and_signs(slopes, device):
    options = {"softcap": 2.0, "alibi_slopes": slopes / 8, "learnable_sink": normal(4)}
    qkv = make_qkv(**SHAPE, dtype=torch.float16)
    check_flash_fwd(*qkv, **options, causal=True, device=device)


def tables(pairs=8, dtype=torch.float32, **batch):
    options = {}
    for seed, (side, length) in enumerate((("q", 35), ("k", 70))):
        cos, sin = rotary_tables(length, pairs, seed=seed, dtype=dtype, **batch)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    return options


# All other tests have float32 tables.
@pytest.mark.parametrize("dtype, table_dtype", PAIRS_OF_DTYPES[:2])
def test_tables_may_have_any_dtype(dtype, table_dtype, device):
    qkv = make_qkv(**SHAPE, dtype=dtype)
    check_flash_fwd(*qkv, **tables(dtype=table_dtype), device=device)


@pytest.mark.parametrize("dtype, interleaved", [(torch.float16, False), (torch.float32, True)])
def test_alignment_and_strides_of_tables_do_not_change_results(dtype, interleaved, device):
    """Tables that are not 16-byte aligned, or have NaN around their rows, give the same bits."""
    qkv = make_qkv(**SHAPE, dtype=dtype)
    # With these options, test_values.py or the next test compiles the same kernels.
    options = tables() | {"rotary_interleaved": interleaved, "causal": not interleaved}
    expected = check_flash_fwd(*qkv, **options, device=device)
    for name in ("q_rotary_cos", "k_rotary_sin"):
        table = options[name]
        shifted = torch.cat([table.new_full((1,), math.nan), table.flatten()])[1:]
        assert_same(run(device, *qkv, **options | {name: shifted.view(table.shape)}), expected)
    cut = dict(options)
    for name in list(tables()):
        wide = torch.full((len(options[name]) + 3, 13), math.nan)
        wide[:-3, 2:10] = options[name]
        cut[name] = wide[:, 2:10]
    assert_same(run(device, *qkv, **cut), expected)


def test_tables_whose_batches_differ(device):
    options = tables() | dict(list(tables(batch=2).items())[:2]) | {"rotary_interleaved": True}
    check_flash_fwd(*make_qkv(**SHAPE), **options, device=device)
    options["q_rotary_cos"] = options["q_rotary_cos"][:, :1].expand(2, 35, 8)
    check_flash_fwd(*make_qkv(**SHAPE), **options, device=device)


def test_rows_outside_the_lengths_are_ignored(device):
    q, k, v = make_qkv(**SHAPE | {"head_dim": 12})
    options = tables(6, batch=2) | {"seqused_k": ints(61, 40), "leftpad_k": ints(3, 33)}
    expected = check_flash_fwd(q, k, v, **options, device=device)
    for b, (first, end) in enumerate([(3, 61), (33, 40)]):
        of_keys = [k, v, *(x[:, None] for n, x in options.items() if n.startswith("k_rotary"))]
        for tensor in of_keys:
            tensor[b, :, :first] = tensor[b, :, end:] = math.nan
    assert_same(run(device, q, k, v, **options), expected)


@pytest.mark.parametrize("dtype, mask_dtype", PAIRS_OF_DTYPES[:2])
def test_masks_of_the_lowest_float(dtype, mask_dtype, device):
    """Masks of Hugging Face hide keys by the lowest float. A row with no other value is uniform."""
    q, k, v = make_qkv(**SHAPE, dtype=dtype)
    lowest = torch.finfo(mask_dtype).min
    mask = torch.zeros(2, 1, 35, 70, dtype=mask_dtype)
    mask.masked_fill_(~random_mask(2, 1, 35, 70), lowest)
    out, lse = check_flash_fwd(q, k, v, attn_mask=mask, device=device)
    mask[:, :, 4:9] = lowest
    q[:, :, 4:9] = 0.0  # adding scores to the lowest float changes it in float64 only
    uniform, uniform_lse = run(device, q, k, v, attn_mask=mask)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 5, -1)
    close = dict.fromkeys(("atol", "rtol"), 2 * ROUNDING[dtype])
    torch.testing.assert_close(uniform[:, :, 4:9].double(), mean, **close)
    assert uniform_lse[:, :, 4:9].isfinite().all()
    assert (uniform_lse[:, :, 4:9] < lowest / 2).all()
    assert_same((uniform[:, :, 9:], uniform_lse[:, :, 9:]), (out[:, :, 9:], lse[:, :, 9:]))


@each_case(
    "sink", [(-math.inf, 0.5, 1e4, 9.0), (-1e30, 1e30, 80.0, -80.0), (3e5, -60.0, -1e12, 2e38)]
)
def test_sinks(sink, device):
    """If there are no keys, the output is 0 and the log-sum-exp is the sink."""
    qkv, sink = make_qkv(**SHAPE), torch.tensor(sink)
    check_flash_fwd(*qkv, learnable_sink=sink, device=device)
    no_keys = [x[:, :, :0] for x in qkv[1:]]
    _, lse = check_flash_fwd(qkv[0], *no_keys, learnable_sink=sink, device=device)
    torch.testing.assert_close(lse, sink[:, None].expand(2, 4, 35))


def test_sinks_that_overflow_in_base_2_or_are_infinite(device):
    qkv = make_qkv(**SHAPE)
    without_sink = run(device, *qkv)
    sink = torch.tensor([3e38, -3e38, 3e38, -3e38])
    out, _ = run(device, *qkv, learnable_sink=sink)
    assert (out[:, 0::2] == 0).all()
    assert torch.equal(out[:, 1::2], without_sink[0][:, 1::2])
    assert_same(run(device, *qkv, learnable_sink=torch.full((4,), -math.inf)), without_sink)


def test_hidden_values_are_ignored_in_rows_with_only_a_sink(device):
    q, k, v = make_qkv(**SHAPE)
    v[:, :, :20] = math.inf
    mask = torch.ones(35, 70, dtype=torch.bool)
    mask[:, :20] = mask[3:9] = False
    out, _ = run(device, q, k, v, attn_mask=mask, learnable_sink=torch.zeros(4), softcap=20.0)
    assert (out[:, :, 3:9] == 0).all()


def test_small_weights_next_to_a_large_sink(device):
    qkv = make_qkv(heads=1, q_length=3, kv_length=40, head_dim=HOME)
    sink = torch.tensor([30.0])
    out, _ = run(device, *qkv, learnable_sink=sink)
    expected, _ = attention(*qkv, learnable_sink=sink, compute_dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-18)


@each_case("softcap", [0.0, 0.3, 5.0, 30.0])
def test_large_scores(softcap, device):
    """With a softcap, tanh saturates, so every score is nearly softcap or -softcap."""
    q, k, v = make_qkv(**SHAPE)
    _, lse = check_flash_fwd(100 * q, 100 * k, v, softcap=softcap, device=device)
    assert not softcap or (lse <= softcap + math.log(70)).all()


def test_nan_reaches_only_queries_that_see_it(device):
    for name in ("q", "k", "bias"):
        q, k, v = make_qkv(q_length=65, kv_length=65, head_dim=HOME, dtype=torch.float16)
        bias = torch.zeros(65, 65)
        tensor_with_nan = {"q": q, "k": k, "bias": bias[None, None]}[name]
        tensor_with_nan[:, :, 40, 40 if name == "bias" else 0] = math.nan
        bias[5, 50] = math.inf  # after the diagonal
        out, lse = run(device, q, k, v, attn_bias=bias, causal=True)
        seen = slice(40, None) if name == "k" else slice(40, 41)
        for result in (out, lse):
            assert result[:, :, seen].isnan().all()
            result[:, :, seen] = 0
            assert result.isfinite().all()


def test_infinite_keys_and_values(device):
    """A score of inf gives NaN, as in softmax. A score of -inf gives a weight of 0."""
    q, k, v = make_qkv(q_length=8, kv_length=33, head_dim=HOME)
    q[:] = 1.0
    k[:, :, 3] = math.inf
    assert run(device, q, k, v)[0].isnan().all()
    k[:, :, 3] = -math.inf
    keep = [j for j in range(33) if j != 3]
    expected, _ = attention(q, k[:, :, keep], v[:, :, keep], compute_dtype=torch.float64)
    torch.testing.assert_close(run(device, q, k, v)[0].double(), expected, rtol=1e-5, atol=1e-6)
    v[:, :, 32] = math.inf  # in the last row of a partial block
    assert (run(device, q, k, v)[0] == math.inf).all()
