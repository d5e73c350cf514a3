"""flex_attention in torch.compile: numbers that change between calls, and graph breaks."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask

from tests.flex.flex_check import BLOCK, block_mask, rand
from torch_metal_attn import flex_attention, simulate
from torch_metal_attn.testing.judge import normal

TABLE, OTHER = normal(2, 200), normal(2, 200, seed=1)  # one shape and dtype
ON = torch.tensor([True])


@pytest.fixture(autouse=True)
def reset():
    yield
    torch.compiler.reset()


def attend_with_numbers(q, k, v, count, factor):
    length = q.shape[2]

    def mod(score, b, h, q_idx, kv_idx):
        near = q_idx - kv_idx < count
        score = torch.where(near, score * factor, torch.clamp(score, max=factor))
        score = score + TABLE[h, q_idx - kv_idx + length] + OTHER[h, 0 * h + count] - factor
        score = torch.nn.functional.softplus(score)  # composed of other ops
        return score + torch.full_like(q_idx, count) * (q_idx * count % 7) / length

    def mask(b, h, q_idx, kv_idx):
        return kv_idx - q_idx < length // 4

    counts = torch.full((1, 1, length // BLOCK[0]), 3, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(
        counts,
        torch.arange(3, dtype=torch.int32).expand(*counts.shape, 3),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask,
        seq_lengths=(length, 96),
        compute_q_blocks=False,
    )
    return flex_attention(q, k, v, mod, blocks)


def test_changing_numbers_compile_once():
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend_with_numbers, backend=backend, fullgraph=True, dynamic=True)
    texts = set()
    for length, count, factor in ((80, 7, 0.5), (48, 9, 3.0)):
        arguments = *rand(q_length=length), count, factor
        with simulate() as run:
            out = compiled(*arguments)
        texts |= {launch.defines["FLEX_SCORE"] for launch in run.launches}
        torch.testing.assert_close(out, attend_with_numbers(*arguments), rtol=2e-3, atol=2e-3)
    assert backend.frame_count == 1
    assert len(texts) == 1


def test_changing_heads_compile_once():
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex_attention, backend=backend, fullgraph=True, dynamic=True)
    for heads, length in ((4, 80), (6, 48)):
        q, k, v = (x.requires_grad_() for x in rand(heads=heads, q_length=length, kv_length=length))
        arguments = q, k[:, ::2], v[:, ::2], None, block_mask(heads=heads, sizes=(length, length))
        with simulate():
            outs = [f(*arguments, enable_gqa=True) for f in (compiled, flex_attention)]
            losses = [out.float().square().sum() for out in outs]
            gradients = [torch.autograd.grad(loss, (q, k, v)) for loss in losses]
        assert all(map(torch.equal, *gradients))
    assert backend.frame_count == 1


def test_inductor_gives_the_same_bits():
    leaves = [x.requires_grad_() for x in rand()]

    def results(function):
        with simulate():
            out = function(*leaves, None, block_mask())
            return out, *torch.autograd.grad(out.float().sin().sum(), leaves)

    compiled = torch.compile(flex_attention, fullgraph=True)
    assert all(map(torch.equal, results(compiled), results(flex_attention)))


def attend_with_a_value(q, k, v, factor):
    """Reads a value of a tensor, which breaks the graph. A new factor causes a new compilation."""

    def mod(score, b, h, q_idx, kv_idx):
        return score * (factor if ON[0].item() else 1.0) + TABLE[h, q_idx]

    return flex_attention(q, k, v, mod)


def test_a_call_that_breaks_the_graph_runs_eagerly():
    """The call runs outside of graphs, and torch.compile does not trace this library."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend_with_a_value, backend=backend)
    for factor in (1.0, 2.0):
        arguments = *rand(), factor
        with simulate():
            assert torch.equal(compiled(*arguments), attend_with_a_value(*arguments))
    assert {node.op for graph in backend.graphs for node in graph.graph.nodes} <= {"output"}
