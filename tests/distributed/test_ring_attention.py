"""Ring attention over processes is attention in one, gradients included."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

from tests.attention import flash_fwd_check
from tests.distributed import ring_cases
from torch_metal_attn import flash_attn_func
from torch_metal_attn.distributed import ring_attention

FORWARD = ["flash_fwd"]
MERGED = [*FORWARD, "merge_state"]
BACKWARD = ["flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]


@pytest.mark.parametrize("name", ring_cases.CASES)
def test_ring_is_attention(name, processes):
    """Put together again on each process."""
    case = ring_cases.CASES[name]
    whole = processes[0]["ring"][name][0]
    ring_cases.check(case, whole)
    for found in processes[1 : case.processes]:
        assert all(map(torch.equal, found["ring"][name][0], whole))


@pytest.mark.parametrize("name", [n for n, case in ring_cases.CASES.items() if case.simulated])
def test_kernels(name, processes):
    """One call of each for the keys of a process, none for hidden ones; the same bits again."""
    case = ring_cases.CASES[name]
    for rank, found in enumerate(processes[: case.processes]):
        visits = rank + 1 if case.layout == "contiguous" else case.processes
        _, launched, first, second = found["ring"][name]
        assert launched == 2 * (FORWARD + (visits - 1) * MERGED + visits * BACKWARD)
        assert all(map(torch.equal, first, second))


@pytest.fixture
def alone():
    """A group of this process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_compile_and_checkpoint(alone):
    """A compiled function breaks its graph at the call; checkpointing runs it again."""
    q, k, v = flash_fwd_check.make_qkv(q_length=7, kv_length=7)

    def attend(x):
        return ring_attention(x * 2, k, v, causal=True).square().sum()

    def gradient(function):
        return torch.autograd.grad(function(leaf), leaf)[0]

    leaf = q.requires_grad_()
    expected = gradient(attend)
    assert torch.equal(gradient(torch.compile(attend, backend="eager")), expected)
    assert torch.equal(gradient(lambda x: checkpoint(attend, x, use_reentrant=False)), expected)


def test_sharded_tensors(alone):
    """They are refused with the advice, which works."""
    mesh, heads = init_device_mesh("cpu", (1,)), Shard(2)
    qkv = flash_fwd_check.make_qkv(q_length=7, kv_length=7)
    sharded = [distribute_tensor(x, mesh, [heads]) for x in qkv]
    with pytest.raises(NotImplementedError, match=r"q is a DTensor.*q\.to_local\(\).*local_map"):
        flash_attn_func(*sharded)
    places = {"out_placements": [heads], "in_placements": ([heads],) * 3, "device_mesh": mesh}
    out = local_map(flash_attn_func, **places)(*sharded)
    assert torch.equal(out.full_tensor(), flash_attn_func(*qkv))


def test_second_derivatives(alone):
    """They raise also where the rest of the loss has one, and dout requires no grad."""
    q = flash_fwd_check.make_qkv(q_length=7, kv_length=7)[0].requires_grad_()
    sink = torch.zeros(q.shape[2], requires_grad=True)
    for scale in (1.0, q):
        out = ring_attention(q, q, q, learnable_sink=sink)
        loss = (out * scale).sum() + q.pow(3).sum()
        (first,) = torch.autograd.grad(loss, q, create_graph=True)
        for wanted in (q, sink):
            with pytest.raises(NotImplementedError, match="ring_attention has no second deriv"):
                torch.autograd.grad(first.sum(), wanted, retain_graph=True)


def test_slopes_of_no_sequences(alone):
    q, bounds = torch.zeros(0, 2, 16), torch.zeros(1, dtype=torch.int32)
    out = ring_attention(q, q, q, cu_seqlens=bounds, alibi_slopes=torch.zeros(0, 2))
    assert out.shape == q.shape
    with pytest.raises(ValueError, match=r"alibi_slopes has shape .* it must be"):
        ring_attention(q, q, q, cu_seqlens=bounds, alibi_slopes=torch.zeros(0, 3))
