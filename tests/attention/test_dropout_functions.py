"""Dropout in the functions of flash-attn, torch and transformers, eager and compiled."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.attention.flash_fwd_check import make_packed
from tests.helpers.cases import each_case
from tests.sdpa.sdpa_check import close
from torch_metal_attn import (
    dropout_mask,
    flash_attn_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
    sdpa_replaced,
    simulate,
)
from torch_metal_attn.call import philox
from torch_metal_attn.flash_attn.flash_attn_interface import _get_block_size_n
from torch_metal_attn.integrations.transformers import metal_attention
from torch_metal_attn.reference import attention, varlen_attention
from torch_metal_attn.testing.judge import normal

SEED = 7
P = 0.4


def seed_and_predict_rng_state():
    """Seeds torch, and returns the rng_state of the next call with dropout."""
    torch.manual_seed(SEED)
    state = philox.draw_rng_state(P, torch.device("cpu"))
    torch.manual_seed(SEED)
    return state


class TestFlashAttn:
    @pytest.mark.parametrize(
        "options",
        [
            {"softcap": 0.5, "alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 0.2]), "causal": True},
            {"window_size": (20, 2), "softmax_scale": 3.0},
        ],
        ids=str,
    )
    def test_s_dmask_has_flash_attns_weights(self, options):
        """As in flash-attn, dropped weights are negative. A weight is exp(score - maximum).

        The maximum is that of the row's scores in the block of the weight and in all later blocks.
        """
        q, k = normal(1, 5, 4, 112), normal(1, 70, 2, 112, seed=1)
        kept = dropout_mask(seed_and_predict_rng_state(), P, 1, 4, 5, 70)
        *_, weights = flash_attn_func(q, k, k, P, return_attn_probs=True, **options)
        assert torch.equal(weights.signbit(), ~kept)
        assert weights.dtype == q.dtype
        block = _get_block_size_n(q.device, 112, True, False)
        heads_first = (x[0].transpose(0, 1).double() for x in (q, k))
        queries, keys = (x.repeat_interleave(4 // len(x), 0) for x in heads_first)
        s = options.get("softmax_scale", 112**-0.5) * queries @ keys.mT
        if "softcap" in options:
            s = options["softcap"] * torch.tanh(s / options["softcap"])
        distance = torch.arange(5)[:, None] + 65.0 - torch.arange(70)
        if "alibi_slopes" in options:
            s = s - options["alibi_slopes"][:, None, None].double() * distance.abs()
        left, right = options.get("window_size", (70, 0 if "causal" in options else 70))
        s = s.masked_fill((distance > left) | (-distance > right), -torch.inf)
        maximum = torch.full((4, 5, 1), -torch.inf, dtype=torch.float64)
        for start in reversed(range(0, 70, block)):
            part = s[..., start : start + block]
            maximum = torch.maximum(maximum, part.amax(-1, keepdim=True))
            subtracted = maximum.masked_fill(maximum.isinf(), 0.0)
            actual = weights[0, :, :, start : start + block].abs().double()
            close(actual, (part - subtracted).exp())

    @pytest.mark.parametrize("pages", [False, True])
    def test_s_dmask_of_packed_sequences(self, pages):
        """The weights of a packed sequence equal those of a call with only this sequence."""
        q, k, v, *packing = make_packed([9, 0, 4], [13, 3, 6], heads=4, kv_heads=2, head_dim=16)
        options = {"causal": True, "alibi_slopes": normal(3, 4, seed=5).abs()}
        arguments = k, v
        if pages:
            places = torch.tensor([[2, 0], [1, 5], [4, 3]]).int()
            arguments = [torch.full((6, 8, 2, 16), torch.nan) for _ in "kv"]
            for cache, x in zip(arguments, (k, v), strict=True):
                for b, (begin, end) in enumerate(((0, 13), (13, 16), (16, 22))):
                    rows = torch.full((16, 2, 16), torch.nan)
                    rows[: end - begin] = x[begin:end]
                    cache[places[b].long()] = rows.unflatten(0, (2, 8))
            options["block_table"] = places
        kept = dropout_mask(seed_and_predict_rng_state(), P, 3, 4, 9, 13)
        *_, weights = flash_attn_varlen_func(
            q, *arguments, *packing, P, return_attn_probs=True, **options
        )
        for b, queries, keys in ((0, slice(0, 9), slice(0, 13)), (2, slice(9, 13), slice(16, 22))):
            torch.manual_seed(SEED)
            *_, alone = flash_attn_func(
                *(q[None, queries], k[None, keys], v[None, keys], P),
                causal=True,
                alibi_slopes=options["alibi_slopes"][b],
                return_attn_probs=True,
            )
            rows, columns = alone.shape[2:]
            actual = weights[b, :, :rows, :columns]
            close(actual.abs(), alone[0].abs())
            assert torch.equal(actual.signbit(), ~kept[b, :, :rows, :columns])
            assert not weights[b, :, rows:].any()
            assert not weights[b, :, :, columns:].any()
        assert not weights[1].any()

    def test_without_dropout_nothing_is_drawn(self):
        q = normal(1, 9, 4, 16)
        torch.manual_seed(SEED)
        state = torch.get_rng_state()
        *_, pattern = flash_attn_func(q, q, q, 0.0, return_attn_probs=True)
        scaled_dot_product_attention(q, q, q, dropout_p=0)
        assert torch.equal(torch.get_rng_state(), state)
        assert pattern is None

    @each_case(
        "changes, error, message",
        [
            ({"rng_state": None}, TypeError, "rng_state is None; it must be a tensor"),
            ({"rng_state": torch.ones(2)}, ValueError, "rng_state has .*torch.float32; it must be"),
            ({"dropout_p": 1.5}, ValueError, r"dropout_p is 1\.5; it must be in 0\.\.1"),
            ({"heads": None}, TypeError, "heads is None; it must be an int"),
            ({"q_length": -1}, ValueError, "q_length is -1; it must be at least 0"),
            ({"batch": 2**63}, ValueError, "batch is 9223372036854775808; it must fit int64"),
        ],
    )
    def test_dropout_mask_refuses_invalid_arguments(self, changes, error, message):
        valid = {"rng_state": torch.tensor([1, 2]), "dropout_p": P, "batch": 1, "heads": 2}
        with pytest.raises(error, match=message):
            dropout_mask(**(valid | {"q_length": 3, "kv_length": 3} | changes))


@pytest.mark.filterwarnings("ignore")
def test_calls_left_to_torch_draw_torchs_mask():
    q = normal(2, 4, 9, 16).double()
    torch.manual_seed(SEED)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=P)
    torch.manual_seed(SEED)
    with simulate(), sdpa_replaced() as calls:
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=P)
    assert calls.replaced == 0
    assert torch.equal(out, expected)


def test_a_compiled_graph_draws_at_each_call():
    torch._dynamo.reset()
    attend = scaled_dot_product_attention
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q = normal(1, 9, 4, 16)
    torch.manual_seed(SEED)
    expected = attend(q, q, q, dropout_p=P)
    torch.manual_seed(SEED)
    close(compiled(q, q, q, dropout_p=P), expected)
    assert not torch.equal(compiled(q, q, q, dropout_p=P), expected)


class TestTransformers:
    def test_drops_in_training_only(self):
        module = torch.nn.Module()
        q, k = normal(2, 4, 9, 16), normal(2, 2, 9, 16, seed=1)
        state = seed_and_predict_rng_state()
        out, _ = metal_attention(module.train(), q, k, k, None, dropout=P)
        expected, _ = attention(q, k, k, dropout_p=P, rng_state=state)
        close(out, expected.transpose(1, 2))
        out, _ = metal_attention(module.eval(), q, k, k, None, dropout=P)
        close(out, attention(q, k, k)[0].transpose(1, 2))
        with pytest.raises(ValueError, match=r"dropout_p is 1\.5; it must be in 0\.\.1"):
            metal_attention(module.train(), q, k, k, None, dropout=1.5)

    def test_packed_sequences_equal_the_reference(self):
        ends = torch.tensor([0, 5, 9]).int()
        bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        bounds |= {"max_length_q": 5, "max_length_k": 5}
        q = normal(1, 4, 9, 16)
        state = seed_and_predict_rng_state()
        out, _ = metal_attention(torch.nn.Module().train(), q, q, q, None, dropout=P, **bounds)
        operands = *[q[0].transpose(0, 1)] * 3, ends, ends, 5, 5
        expected, _ = varlen_attention(*operands, dropout_p=P, rng_state=state)
        close(out[0], expected)


compiled = partial(torch.compile, backend="aot_eager")


def checkpointed(function, use_reentrant=False):
    """The recomputed forward uses the mask of the first forward."""
    return lambda *qkv: checkpoint(function, *qkv, use_reentrant=use_reentrant)


@pytest.mark.parametrize(
    "transform",
    [
        checkpointed,
        partial(checkpointed, use_reentrant=True),
        partial(compiled, fullgraph=True),
        lambda function: compiled(checkpointed(function)),
    ],
    ids=["checkpoint", "reentrant", "compiled", "both"],
)
def test_gradients_use_the_mask_of_the_forward(transform):
    torch._dynamo.reset()
    options = {"causal": True, "dropout_p": P, "rng_state": seed_and_predict_rng_state()}

    def attend(q, k, v):
        return flash_attn_func(q, k, v, P, causal=True)

    def reference(*qkv):
        return attention(*(x.transpose(1, 2) for x in qkv), **options)[0].transpose(1, 2)

    def gradients(function):
        leaves = [normal(2, 9, 4, 16, seed=i).requires_grad_() for i in range(3)]
        torch.manual_seed(SEED)
        (function(*leaves) * normal(2, 9, 4, 16, seed=5)).sum().backward()
        return [leaf.grad for leaf in leaves]

    for gradient, exact in zip(gradients(transform(attend)), gradients(reference), strict=True):
        close(gradient, exact)
