"""Ops that inductor compiles for dynamic sizes write into views where the views begin.

Without torch_metal_attn/ops/view_offsets.py each op would write to the start of the buffer.
"""

import torch
import torch._inductor.config

ops = torch.ops.metal_attn


def step(packed, caches, outs, lses, lengths, cos, sin):
    """Every op that writes in place, into views whose offsets depend on dynamic sizes."""
    q, k, v = packed.unbind(1)
    ops.rope_(k, None, cos, sin)
    ops.rope_(q, k, cos, sin, seqlen_offset=1)
    keys, values = caches[:, 1], caches[:, 2]
    ops.append_kv(k, v, keys, values, lengths)
    out, _ = ops.decode_step(q, k, v, keys, values, lengths)
    ops.copy_pages(caches[:, 3], lengths[:1], lengths[1:])
    ops.merge_state_(outs[1], lses[1], outs[2], lses[2])
    return out


@torch._inductor.config.patch(force_disable_caches=True)
def test_inductor_writes_into_views():
    torch._dynamo.reset()
    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    lengths = torch.tensor([1, 0], dtype=torch.int32)
    for heads, length in ((2, 3), (4, 5)):
        torch.manual_seed(0)
        tensors = [torch.randn(2, 3, heads, length, 16), torch.randn(2, 4, heads, 20, 16)]
        tensors += [torch.randn(3, 2, heads, length, 16), torch.randn(3, 2, heads, length)]
        mine, tables = [x.clone() for x in tensors], torch.randn(2, 12, 8).unbind()
        out, expected = (f(*x, lengths, *tables) for f, x in ((compiled, mine), (step, tensors)))
        torch.testing.assert_close(out, expected)
        for result, right in zip(mine, tensors, strict=True):
            torch.testing.assert_close(result, right)
