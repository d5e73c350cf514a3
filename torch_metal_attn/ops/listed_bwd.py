"""Gradients of attention to listed keys: `flash_bwd` of the keys of each list, gathered.

Some lists are gathered at a time, so memory is linear in the listed keys.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.visibility import visible_listed
from torch_metal_attn.ops.flash_bwd import Gradients, rotated_rows

# Elements of gathered keys and values at once, unless a single list has more.
GATHERED = 2**24

# The options that say which listed keys a query sees. They become a mask.
_VISIBILITY = {
    name
    for name, parameter in inspect.signature(visible_listed).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
# The other options of flash_bwd are passed on. flash_decode has more, which its checks refuse with
# lists unless they are off.
_PASSED_ON = {
    argument.name
    for argument in torch.ops.metal_attn.flash_bwd.default._schema.arguments
    if argument.kwarg_only
} - _VISIBILITY


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

    Each list is a sequence of `flash_bwd`. Its keys are the listed ones in the list's order; a key
    that is listed twice is there twice. A mask hides the keys that a query does not see. The sums
    are in float32, so that the gradient of a key in several lists is rounded once.
    """
    visibility = {name: x for name, x in options.items() if name in _VISIBILITY}
    options = {name: x for name, x in options.items() if name in _PASSED_ON}
    dout, rotated, out = (x.float() for x in (dout, q, out))
    batch, kv_heads, kv_length, _ = k.shape
    q_length, group = q.shape[2], q.shape[1] // max(kv_heads, 1)
    if kv_length == 0:
        indices = indices[..., :0]  # there is no row that -1 could stand for
    if q_rotary_cos is not None and q_rotary_sin is not None:
        tables = q_rotary_cos, q_rotary_sin
        rotated = rotated_rows(q, *tables, None, rotary_interleaved).to(q.dtype).float()
    lists = indices.shape[2]
    shape = (batch, kv_heads, lists, indices.shape[3] * kv_block_size)
    # The first row of each head in the matrix of all rows of k or v.
    firsts = torch.arange(batch * kv_heads, device=k.device).view(batch, 1, kv_heads, 1) * kv_length
    matrices = [x.reshape(-1, x.shape[-1]) for x in (k, v)]
    sums = [q.new_zeros(x.shape, dtype=torch.float32) for x in matrices]
    columns = k.shape[-1] + v.shape[-1]
    step = max(GATHERED // max(batch * kv_heads * shape[3] * columns, 1), 1)
    parts = []
    for start in range(0, max(lists, 1), step):
        some = slice(start, min(start + step, lists))
        # (batch, lists, kv_heads, keys of a list), and with queries of a list before keys.
        keys, seen = (
            x.transpose(1, 2)
            for x in visible_listed(
                indices.expand(*shape[:3], -1),
                some,
                kv_block_size,
                q_block_size,
                q_length,
                kv_length,
                **visibility,
            )
        )
        used = seen.any(3)  # other rows may be NaN
        places = (keys.where(used, 0) + firsts).flatten()
        gathered = [
            x[places]
            .float()
            .view(*used.shape, x.shape[-1])
            .masked_fill(~used[..., None], 0)
            .flatten(0, 1)
            for x in matrices
        ]
        rows = slice(start * q_block_size, some.stop * q_block_size)

        def of_lists(x: Tensor | None, fill: float = 0.0, rows: slice = rows) -> Tensor | None:
            """(B, H, L, ...) as (B * lists, H, q_block_size, ...)."""
            if x is None:
                return None
            some = x[:, :, rows]
            missing = rows.stop - rows.start - some.shape[2]
            if missing > 0:
                padding = some.new_full((*some.shape[:2], missing, *some.shape[3:]), fill)
                some = torch.cat([some, padding], 2)
            some = some.unflatten(2, (-1, q_block_size)).transpose(1, 2).flatten(0, 1)
            return some.contiguous() if x is softmax_lse else some

        dq, dk, dv, delta, normalisers = flash_bwd(
            of_lists(dout),
            of_lists(dlse),
            of_lists(rotated),
            *gathered,
            of_lists(out),
            of_lists(softmax_lse, -torch.inf),
            **options
            | {"exact_delta": True, "attn_mask": seen.flatten(0, 1).repeat_interleave(group, 1)},
        )
        parts.append(
            [
                x.unflatten(0, (batch, some.stop - start)) if x.dim() > 1 else x
                for x in (dq, delta, normalisers)
            ]
        )
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
