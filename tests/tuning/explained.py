"""The launches of a call with their tiles, as metal_attn_explain records them."""

import torch

from torch_metal_attn.runtime import extension
from torch_metal_attn.tools.explain.ops import backward_launches

# The last knobs of a flash_fwd tile that holds Q in registers, and of a tile that reads Q again.
Q_HELD = "COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=1"
Q_READ_AGAIN = "COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=0 KV_STAGED=1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def operands(head_dim=64, v_head_dim=None, lengths=(100, 100), dtype=torch.float16, heads=(2, 2)):
    """q, k and v (B, H, L, D). Each is an expanded row, so that it takes no memory."""
    (q_length, kv_length), (q_heads, kv_heads) = lengths, heads
    q, v = (torch.empty(n, dtype=dtype) for n in (head_dim, v_head_dim or head_dim))
    q, k = q.expand(1, q_heads, q_length, -1), q.expand(1, kv_heads, kv_length, -1)
    return q, k, v.expand(1, kv_heads, kv_length, -1)


def explained(op, *arguments, **options):
    return extension.launches(getattr(torch.ops.metal_attn_explain, op)(*arguments, **options))


def launch_of(kernel, *qkv, **options):
    if kernel.startswith("flash_bwd"):
        launches = backward_launches("flash_fwd", dict(zip("qkv", qkv, strict=True)) | options)
    else:
        launches = explained(kernel, *qkv, **options)
    return next(launch for launch in launches if launch["kernel"] == kernel)
