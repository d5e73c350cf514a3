"""Gradients of attention to listed keys: `flash_bwd` on the gathered keys of each list.

Lists are gathered in chunks, so that the keys of all lists are never in memory at once.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.visibility import visible_listed
from torch_metal_attn.ops.flash_bwd import Gradients, rotated_rows

# The most elements of gathered keys and values in a chunk, unless a single list has more.
GATHERED = 2**24

# The options that determine which listed keys a query sees. They become a mask.
_PARAMETERS = inspect.signature(visible_listed).parameters.values()
_VISIBILITY = {p.name for p in _PARAMETERS if p.kind is p.KEYWORD_ONLY}
# The other options of flash_bwd. Options that only flash_decode has are refused with lists.
_ARGUMENTS = torch.ops.metal_attn.flash_bwd.default._schema.arguments
_PASSED_ON = {a.name for a in _ARGUMENTS if a.kwarg_only} - _VISIBILITY


def listed_gradients(
    flash_bwd: Callable[..., Gradients],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    /,
    *,
    indices: Tensor,
    kv_block_size: int = 1,
    q_block_size: int = 1,
    q_rotary_cos: Tensor | None = None,
    q_rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    **options: Any,
) -> Gradients:
    """The results of `flash_bwd` with exact_delta, for dense q, k and v.

    Each list becomes a sequence of `flash_bwd`, whose keys are the listed keys in order, with
    repetitions. A mask hides the keys that a query does not see. Sums are float32, so that the
    gradient of a key in several lists is rounded once.
    """
    visibility = {name: x for name, x in options.items() if name in _VISIBILITY}
    options = {name: x for name, x in options.items() if name in _PASSED_ON}
    dout, rotated, out = (x.float() for x in (dout, q, out))
    batch, kv_heads, kv_length, _ = k.shape
    q_length, group = q.shape[2], q.shape[1] // max(kv_heads, 1)
    if kv_length == 0:
        indices = indices[..., :0]  # an entry of -1 would gather row 0, which does not exist
    if q_rotary_cos is not None and q_rotary_sin is not None:
        tables = q_rotary_cos, q_rotary_sin
        rotated = rotated_rows(q, *tables, None, rotary_interleaved).to(q.dtype).float()
    lists = indices.shape[2]
    indices = indices.expand(batch, kv_heads, lists, -1)
    sizes = (kv_block_size, q_block_size, q_length, kv_length)
    # The first row of each head in the matrix of all rows of k or v.
    firsts = torch.arange(batch * kv_heads, device=k.device).view(batch, 1, kv_heads, 1) * kv_length
    matrices = [x.reshape(-1, x.shape[-1]) for x in (k, v)]
    sums = [q.new_zeros(x.shape, dtype=torch.float32) for x in matrices]
    columns = k.shape[-1] + v.shape[-1]
    rows_of_list = batch * kv_heads * indices.shape[3] * kv_block_size
    step = max(GATHERED // max(rows_of_list * columns, 1), 1)
    parts = []
    for start in range(0, max(lists, 1), step):
        chunk = slice(start, min(start + step, lists))
        # keys: (batch, lists, kv_heads, keys). seen: (batch, lists, kv_heads, queries, keys).
        listed = visible_listed(indices, chunk, *sizes, **visibility)
        keys, seen = (x.transpose(1, 2) for x in listed)
        used = seen.any(3)  # unused rows may be NaN
        places = (keys.where(used, 0) + firsts).flatten()
        read = (x[places].float().view(*used.shape, x.shape[-1]) for x in matrices)
        gathered = [x.masked_fill(~used[..., None], 0).flatten(0, 1) for x in read]
        rows = slice(start * q_block_size, chunk.stop * q_block_size)

        def by_list(x: Tensor | None, fill: float = 0.0, rows: slice = rows) -> Tensor | None:
            """(B, H, L, ...) as (B * lists, H, q_block_size, ...)."""
            if x is None:
                return None
            part = x[:, :, rows]
            missing = rows.stop - rows.start - part.shape[2]
            if missing > 0:
                padding = part.new_full((*part.shape[:2], missing, *part.shape[3:]), fill)
                part = torch.cat([part, padding], 2)
            part = part.unflatten(2, (-1, q_block_size)).transpose(1, 2).flatten(0, 1)
            return part.contiguous() if x is softmax_lse else part

        options |= {"attn_mask": seen.flatten(0, 1).repeat_interleave(group, 1)}
        queries = (by_list(dout), by_list(dlse), by_list(rotated))
        results = (by_list(out), by_list(softmax_lse, -torch.inf))
        dq, dk, dv, *rest = flash_bwd(*queries, *gathered, *results, exact_delta=True, **options)
        shape = (batch, chunk.stop - start)
        parts.append([x.unflatten(0, shape) if x.dim() > 1 else x for x in (dq, *rest)])
        for total, x in zip(sums, (dk, dv), strict=True):
            total.index_add_(0, places, x.reshape(-1, x.shape[-1]).float())
    dq, delta, normalisers = (
        torch.cat(each, 1).transpose(1, 2).flatten(2, 3)[:, :, :q_length]
        if each[0].dim() > 1
        else each[0]
        for each in zip(*parts, strict=True)
    )
    dk, dv = (total.view(x.shape).to(x.dtype) for total, x in zip(sums, (k, v), strict=True))
    return dq.to(q.dtype), dk, dv, delta, normalisers
