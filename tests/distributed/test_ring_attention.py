"""Ring attention over processes equals attention in one process, including gradients."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

import torch_metal_attn as metal_attn
from tests.attention import flash_fwd_check
from tests.common.ops import EXAMPLES
from tests.distributed import refusals, ring_cases, training
from torch_metal_attn.distributed import ring_attention
from torch_metal_attn.integrations.transformers.attention import metal_attention

BACKWARD = ["flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]


@pytest.mark.parametrize("name", ring_cases.CASES)
def test_ring_equals_attention_in_one_process(name, processes):
    case = ring_cases.CASES[name]
    whole = processes[0]["ring"][name][0]
    ring_cases.check(case, whole)
    for results in processes[1 : case.processes]:
        assert all(map(torch.equal, results["ring"][name][0], whole))


@pytest.mark.parametrize("name", [n for n, case in ring_cases.CASES.items() if case.simulated])
def test_each_process_launches_the_kernels_of_its_visits(name, processes):
    case = ring_cases.CASES[name]
    for rank, results in enumerate(processes[: case.processes]):
        visits = rank + 1 if case.layout == "contiguous" else case.processes
        _, launched, first, second = results["ring"][name]
        forward = "flash_fwd" if case.packed else "flash_decode"
        forwards = [forward, *(visits - 1) * [forward, "merge_state"]]
        assert launched == 2 * (forwards + visits * BACKWARD)
        assert all(map(torch.equal, first, second))


@pytest.fixture
def alone():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_compile_and_checkpoint_give_the_same_gradient(alone):
    q, k, v = flash_fwd_check.make_qkv(q_length=7, kv_length=7)

    def attend(x):
        return ring_attention(x * 2, k, v, causal=True).square().sum()

    def gradient(function):
        return torch.autograd.grad(function(leaf), leaf)[0]

    leaf = q.requires_grad_()
    expected = gradient(attend)
    assert torch.equal(gradient(torch.compile(attend, backend="eager")), expected)
    assert torch.equal(gradient(lambda x: checkpoint(attend, x, use_reentrant=False)), expected)


SHARDED = r"{0} is a DTensor, .* pass {0}\.to_local\(\), .*local_map"


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize(
    "function, names",
    [
        (metal_attn.flash_attn_func, "qkv"),
        (ring_attention, "qkv"),
        (metal_attn.scaled_dot_product_attention, ("query", "key", "value")),
        (metal_attn.flex_attention, ("query", "key", "value")),
        (metal_attn.flash_attn_with_kvcache, ("q", "k_cache", "v_cache")),
        (lambda *qkv: metal_attention(torch.nn.Identity().eval(), *qkv, None), "qkv"),
    ],
)
def test_functions_refuse_sharded_tensors(function, names, mode, alone):
    q = torch.zeros(1, 4, 8, 16)
    with mode():
        sharded = distribute_tensor(q, init_device_mesh("cpu", (1,)), [Shard(1)])
        cases = {name: [q] * i + [sharded] + [q] * (2 - i) for i, name in enumerate(names)}
        for name, tensors in [(names[0], [sharded] * 3), *cases.items()]:
            with pytest.raises(NotImplementedError, match=SHARDED.format(name)):
                function(*tensors)


def test_ops_and_masks_refuse_sharded_tensors(alone):
    """Every op, masks and captured tensors. sdpa_replaced() leaves such calls to torch."""
    mesh = init_device_mesh("cpu", (1,))
    for example in EXAMPLES.values():
        arguments = example.make()
        for name in [n for n, x in arguments.items() if torch.is_tensor(x)]:
            sharded = {name: distribute_tensor(arguments[name], mesh, [Replicate()])}
            with pytest.raises(NotImplementedError, match=SHARDED.format(name)):
                getattr(torch.ops.metal_attn, example.op)(**arguments | sharded)
    q, bias = torch.zeros(1, 4, 8, 16), distribute_tensor(torch.zeros(8, 8), mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match=SHARDED.format("attn_mask")):
        metal_attn.scaled_dot_product_attention(q, q, q, bias)
    with pytest.raises(NotImplementedError, match=SHARDED.format("bias")):
        metal_attn.flex_attention(q, q, q, lambda score, b, h, i, j: score + bias[i, j])
    sharded = distribute_tensor(q, mesh, [Replicate()])  # which torch's function runs at once
    assert re.match(SHARDED.format("k"), metal_attn.explain(q, sharded, q).refusal)
    with pytest.warns(UserWarning, match=r"to torch: an argument is a DTensor: .*local_map"):
        with metal_attn.sdpa_replaced():
            torch.nn.functional.scaled_dot_product_attention(sharded, sharded, sharded)


def test_local_map_equals_attention_in_one_process(alone):
    mesh, heads = init_device_mesh("cpu", (1,)), Shard(2)
    qkv = flash_fwd_check.make_qkv(q_length=7, kv_length=7)
    sharded = [distribute_tensor(x, mesh, [heads]) for x in qkv]
    places = {"out_placements": [heads], "in_placements": ([heads],) * 3, "device_mesh": mesh}
    out = local_map(metal_attn.flash_attn_func, **places)(*sharded)
    assert torch.equal(out.full_tensor(), metal_attn.flash_attn_func(*qkv))


def test_second_derivatives_raise(alone):
    """They raise even if dout requires no grad and the loss has another second derivative."""
    q = flash_fwd_check.make_qkv(q_length=7, kv_length=7)[0].requires_grad_()
    sink = torch.zeros(q.shape[2], requires_grad=True)
    for scale in (1.0, q):
        out = ring_attention(q, q, q, learnable_sink=sink)
        loss = (out * scale).sum() + q.pow(3).sum()
        (first,) = torch.autograd.grad(loss, q, create_graph=True)
        for wanted in (q, sink):
            with pytest.raises(NotImplementedError, match="ring_attention has no second deriv"):
                torch.autograd.grad(first.sum(), wanted, retain_graph=True)


def test_empty_slopes_fit_a_batch_without_sequences(alone):
    q, bounds = torch.zeros(0, 2, 16), torch.zeros(1, dtype=torch.int32)
    out = ring_attention(q, q, q, cu_seqlens=bounds, alibi_slopes=torch.zeros(0, 2))
    assert out.shape == q.shape
    with pytest.raises(ValueError, match=r"alibi_slopes has shape .* it must be"):
        ring_attention(q, q, q, cu_seqlens=bounds, alibi_slopes=torch.zeros(0, 3))


@pytest.fixture(scope="module")
def expected():
    model = training.Model()
    start = [x.detach().clone() for x in model.parameters()]
    trained = training.train(model, training.batch(), model.parameters)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(start, trained, strict=True))
    return trained


@pytest.mark.parametrize("way", training.WAYS)
def test_training_matches_one_process(way, processes, expected):
    for results in processes:
        torch.testing.assert_close(results["trained"][way], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("message", refusals.REFUSED)
def test_every_process_raises(message, processes):
    for rank, results in enumerate(processes):
        text = results["refused"][message]
        assert re.search(message, text)
        if rank != 1 and message in refusals.ON_RANK_1:
            assert f"{refusals.ON_RANK_1[message]} was refused on rank 1: " in text


def test_meshes_and_foreign_groups_are_refused(processes):
    for rank, results in enumerate(processes):
        errors, out = results["groups"]
        assert "mesh with 2 dimensions" in errors["mesh"]
        assert ("pair" in errors) == (rank > 1)
        assert torch.equal(out, torch.ones(1, 2, 2, 16))  # the result for a mesh of one dimension
        if rank > 1:
            assert "group does not contain this process" in errors["pair"]


def test_without_a_process_group_it_raises():
    with pytest.raises(ValueError, match=r"torch\.distributed has no process group"):
        ring_attention(*refusals.qkv())
