"""Ring attention over processes: each holds a share of q, k and v, and blocks of k and v travel.

Liu et al., "Ring Attention with Blockwise Transformers" (2023), from flash_fwd and merge_state
alone: the gradients, through the log-sum-exps too, are autograd's.
"""

from contextlib import nullcontext

import pytest
import torch

from tests.helpers.processes import run_in_processes
from torch_metal_attn import reference, simulate

LENGTH = 12  # of the whole sequence, a multiple of each number of processes
CASES = {
    f"{'simulator' if simulated else 'reference'} {'causal' if causal else 'whole'}": (
        simulated,
        causal,
    )
    for simulated in (False, True)
    for causal in (False, True)
}


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem():
    """q, k and v, and the weights of out and lse in the loss."""
    heads, kv_heads, head_dim = 4, 2, 16
    shapes = [(2, heads, LENGTH, head_dim), *[(2, kv_heads, LENGTH, head_dim)] * 2]
    shapes += [(2, heads, LENGTH, head_dim), (2, heads, LENGTH)]
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


class Pass(torch.autograd.Function):
    """Sends a tensor to the next process and gives the previous one's; gradients go back."""

    @staticmethod
    def forward(ctx, tensor):
        return exchange(tensor, 1)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, -1)


def exchange(tensor, step):
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    sending = torch.distributed.isend(tensor.contiguous(), (rank + step) % processes)
    torch.distributed.recv(received, (rank - step) % processes)
    sending.wait()
    return received


def ring_attention(q, k, v, causal):
    """out and lse of a process' queries over the keys of all."""
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    length = q.shape[2]
    kv = torch.stack([k, v])
    state = None
    for step in range(processes):
        owner = (rank - step) % processes
        # Where the first query stands, counted from the block's first key: blocks of later
        # processes are hidden whole.
        own = torch.ops.metal_attn.flash_fwd(
            q, *kv.unbind(), causal=causal, q_offset=(rank - owner) * length
        )
        state = own if state is None else torch.ops.metal_attn.merge_state(*state, *own)
        if step + 1 < processes:
            kv = Pass.apply(kv)
    return state


def results_and_gradients(run, tensors):
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    out, lse = run(q, k, v)
    ((out * tensors[3]).sum() + (lse * tensors[4]).sum()).backward()
    return [t.detach() for t in (out, lse, q.grad, k.grad, v.grad)]


def every_case(rank):
    processes = torch.distributed.get_world_size()
    length = LENGTH // processes
    own = [t[:, :, rank * length : (rank + 1) * length] for t in problem()]
    results = {}
    for name, (simulated, causal) in CASES.items():
        with simulate(check=True) if simulated else nullcontext():
            results[name] = results_and_gradients(
                lambda *qkv, c=causal: ring_attention(*qkv, causal=c), own
            )
    return results


@pytest.mark.parametrize("processes", [2, 3])
def test_ring_is_attention(processes, tmp_path):
    shares = run_in_processes(every_case, processes, tmp_path)
    for name, (_, causal) in CASES.items():
        expected = results_and_gradients(
            lambda *qkv, c=causal: reference.attention(*qkv, causal=c),
            [t.double() for t in problem()],
        )
        for part, whole in zip(zip(*(s[name] for s in shares), strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(part, 2), whole.float(), rtol=1e-5, atol=1e-5)
