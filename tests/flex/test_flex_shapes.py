"""dtypes, head dims, empty problems, autocast, compiling once, and explain(flex_attention, ...)."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from tests.attention.autograd_check import loss_of
from tests.flex.flex_check import block_mask, check_flex, check_flex_gradients, rand, tanh_softcap
from tests.flex.test_blocks import only_in_partial_blocks
from tests.helpers.cases import each_case
from torch_metal_attn import explain, flex_attention, simulate


def test_bfloat16():
    qkv = rand(dtype=torch.bfloat16, head_dim=128)
    expected, _ = check_flex(*qkv, tanh_softcap, block_mask())
    with simulate(check=True), torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(*(x.float() for x in qkv), tanh_softcap, block_mask())
    assert torch.equal(out, expected)


def test_last_dimensions_that_are_strided():
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in rand())
    check_flex(q, k, v, None, block_mask(), scale=0.3)
    check_flex_gradients(q, k, v, None, block_mask(), simulated=False)


@each_case("order", [(0, 1, 3, 2), (1, 2, 3, 0), (2, 3, 0, 1)])
def test_output_has_the_stride_order_of_query(order):
    """As in torch, the order of the strides is query's, with the last dimension innermost."""
    shape = (2, 3, 5, 8)
    memory = torch.randn([shape[dim] for dim in order])
    query = memory.permute([order.index(dim) for dim in range(4)])
    k, v = torch.randn(2, *shape)
    expected = torch_flex_attention(query, k, v)
    assert flex_attention(query, k, v).stride() == expected.stride()


@pytest.mark.parametrize("q_length", [80, 8])
def test_all_implementations_give_the_same_strides(q_length):
    q, k, v = rand(batch=2, q_length=q_length)
    for query in (q, q.transpose(1, 2).contiguous().transpose(1, 2), q[:1].expand_as(q)):
        out = flex_attention(query, k, v)
        with simulate(record=True):
            assert flex_attention(query, k, v).stride() == out.stride()
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake, _ = torch.ops.metal_attn.flex_fwd(query, k, v, captures=[])
        assert fake.stride() == out.stride()


def test_captured_tensors_of_every_dtype():
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    limits = {dtype: torch.iinfo(dtype).max for dtype in integers}
    limits |= dict.fromkeys((torch.bool, torch.float16, torch.bfloat16, torch.float32), 1)
    numbers = torch.linspace(-0.9, 0.9, 96, dtype=torch.float64)
    captured = []
    for i, (dtype, limit) in enumerate(limits.items()):
        signed = numbers.roll(11 * i) * limit
        captured.append(
            (signed.clamp(min=0) if dtype in (torch.bool, torch.uint8) else signed).to(dtype)
        )

    def add_each(s, b, h, q, kv):
        for x, limit in zip(captured, limits.values(), strict=True):
            s = s + x[kv].float() / limit
        return s

    check_flex(*rand(), add_each)


@pytest.mark.parametrize("sizes", [{"q_length": 0}, {"kv_length": 0}, {"batch": 0}, {"heads": 0}])
def test_empty_problems(sizes):
    qkv = [x.requires_grad_() for x in rand(**sizes)]
    lengths = qkv[0].shape[2], qkv[1].shape[2]
    mask = block_mask(sizes=lengths)
    mask.mask_mod = only_in_partial_blocks
    with simulate(check=True):
        out, lse = flex_attention(*qkv, block_mask=mask, return_lse=True)
        gradients = torch.autograd.grad(loss_of(out, lse), qkv)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((x == 0).all() for x in gradients)


@pytest.mark.parametrize("simulated", [True, False])
def test_float32_queries_on_half_keys(simulated):
    q, k, v = rand()
    query = q.float().requires_grad_()
    with simulate(check=True) if simulated else contextlib.nullcontext():
        out = flex_attention(query, k, v)
        torch.testing.assert_close(out, flex_attention(query, k.float(), v.float()))
        with pytest.raises(NotImplementedError, match="no gradient with key and value"):
            out.sum().backward()


def test_torch_func_grad_works_and_vmap_is_refused():
    """vmap is refused. grad gives the gradients of autograd, also for captured tensors."""
    q, k, v = rand(dtype=torch.float32)
    slopes = torch.tensor([0.5, 0.25])

    def attend(query, slopes, outside=0.0):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score) * slopes[h] + outside

        return flex_attention(query, k, v, mod).sin().sum()

    for arguments in ((q[None], slopes), (q, slopes[None])):
        dims = tuple(0 if x.dim() in (2, 5) else None for x in arguments)
        with pytest.raises(NotImplementedError, match="no batching rule for torch"):
            torch.vmap(attend, in_dims=dims)(*arguments)
    actual = torch.func.grad(attend, argnums=(0, 1))(q, slopes)
    leaves = q.clone().requires_grad_(), slopes.clone().requires_grad_()
    assert all(map(torch.equal, actual, torch.autograd.grad(attend(*leaves), leaves)))
    with pytest.raises(NotImplementedError, match=r"torch.func tensors support only indexing"):
        torch.func.grad(attend, argnums=2)(q, slopes, torch.tensor(1.0))


def test_calls_with_one_text_share_a_specialisation():
    def attend(slopes, factor, q_length):
        def mod(score, b, h, q_idx, kv_idx):
            return score * factor + slopes[h] * (q_idx - kv_idx)

        with simulate(record=True) as run:
            flex_attention(*rand(q_length=q_length), mod)
        return run.recorded[0].defines

    first = attend(torch.ones(2), 2.0, 80)
    assert attend(torch.zeros(7, 2).T[1], 2.0, 33) == first
    assert attend(torch.ones(2), 3.0, 80) != first


def test_second_derivatives_raise():
    q, k, v = (x.requires_grad_() for x in rand())
    with simulate(record=True):
        out = flex_attention(q, k, v, tanh_softcap)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            dq.sum().backward()


def test_explain_gives_texts_blocks_and_cost():
    mask = block_mask(block=16)
    shown = explain(flex_attention, *rand(), tanh_softcap, mask)
    assert shown.kernel == "flash_fwd"
    assert "precise::tanh(t0)" in shown.specialisation["FLEX_SCORE"]
    assert "query >= key" in shown.specialisation["FLEX_MASK"]
    # The mask hides 15 of the 5 x 6 blocks.
    assert shown.reason.startswith("50.0% of the blocks skipped; ")
    whole = explain(flex_attention, *rand())
    assert shown.cost.flops * 2 == whole.cost.flops
    refused = explain(flex_attention, *rand(), kernel_options={"BLOCK_K": 8})
    assert "BLOCK_K" in refused.refusal


def test_explain_counts_gradients_of_captured_tensors():
    """Each kernel for gradients of captured tensors computes the scores and dP: two products."""
    table, hidden = torch.zeros(2, 3, requires_grad=True), torch.zeros(96)

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[h, 0] + table[h, kv_idx % 3] + hidden[kv_idx]

    training = explain(flex_attention, *rand(), mod, backward=True).training
    assert list(training.kernels) == [
        *("flash_bwd_dq", "flash_bwd_dkv"),
        *("flash_bwd_captures[0]", "flash_bwd_captures[1]"),
    ]
    assert training.inputs["captures[0]"] == table.nbytes
    alone = explain(flex_attention, *rand(), backward=True).training
    assert "copies" not in alone.allocated
    assert 7 * training.cost.flops == (7 + 4) * alone.cost.flops
    leaves = [x.requires_grad_() for x in rand(q_length=64, kv_length=64)]
    with simulate(count=True) as run:
        out = flex_attention(*leaves, mod)
        torch.autograd.grad(out.sum(), [*leaves, table])
    kernels = run.counters
    assert kernels["flash_bwd_captures"].launches == 2
    walks = kernels["flash_bwd_dq"].matrix_operations + kernels["flash_bwd_dkv"].matrix_operations
    assert 7 * kernels["flash_bwd_captures"].matrix_operations == 4 * walks
