"""flash-attn's S_dmask, which flash-attn's functions can return with dropout, for tests.

torch computes it after the call, as the kernels do not store weights. It is as large as the scores.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_metal_attn.call import philox
from torch_metal_attn.reference import cached, scores


def block_size(head_dim: int, dropout: bool) -> int:
    """Keys per block of flash-attn 2.8's forward on an A100, on which S_dmask depends."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if dropout else 128
    if 96 < head_dim <= 128:
        return 32 if dropout else 64
    return 64


def dense_weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor | None:
    """S_dmask of q (B, Lq, Hq, D) and k (B, Lk, Hkv, D): (B, Hq, Lq, Lk); None without dropout.

    options: those of `metal_attn::flash_fwd`. As in flash-attn, blocks of keys are visited from the
    last to the first. A weight is exp(score - m), where m is the row's maximum over the key's block
    and all later blocks. The sign is + for a kept weight and - for a dropped one, even if it is 0.
    """
    if "rng_state" not in options:
        return None
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    kept = philox.dropout_mask(options["rng_state"], options["dropout_p"], *sizes)
    return _weights(q.transpose(1, 2), k.transpose(1, 2), kept, options)


def varlen_weights(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: dict[str, Any],
) -> Tensor | None:
    """`dense_weights` of packed sequences: (B, Hq, max_seqlen_q, max_seqlen_k), padded with 0."""
    if "rng_state" not in options:
        return None
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    batch = len(q_ends) - 1
    sizes = (batch, q.shape[1], max_seqlen_q, max_seqlen_k)
    kept = philox.dropout_mask(options["rng_state"], options["dropout_p"], *sizes)
    used, table, slopes = map(options.get, ("seqused_k", "block_table", "alibi_slopes"))
    result = q.new_zeros(sizes)
    for b in range(batch):
        queries, keys = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
        length = keys.stop - keys.start if used is None else int(used[b])
        if table is None:
            k_rows = k[None, keys].transpose(1, 2)
        else:
            k_rows = cached(k, table[b : b + 1], None)
        if slopes is not None and slopes.dim() == 2:
            options = options | {"alibi_slopes": slopes[b]}
        q_rows, rows = q[None, queries].transpose(1, 2), queries.stop - queries.start
        kept_rows = kept[b : b + 1, :, :rows, :length]
        weights = _weights(q_rows, k_rows[:, :, :length], kept_rows, options)
        result[b, :, :rows, :length] = weights[0]
    return result


def _weights(q: Tensor, k: Tensor, kept: Tensor, options: dict[str, Any]) -> Tensor:
    """S_dmask (B, Hq, Lq, Lk) of q (B, Hq, Lq, D), k (B, Hkv, Lk, D) and kept (B, Hq, Lq, Lk)."""
    logits = scores(q, k, **options)
    length, block = logits.shape[-1], block_size(q.shape[-1], True)
    if length == 0:
        return logits.to(q.dtype)
    # The maximum over a block and all later blocks is a cumulative maximum from the end.
    padded = functional.pad(logits, (0, -length % block), value=-torch.inf)
    block_max = padded.unflatten(-1, (-1, block)).amax(-1)
    running = block_max.flip(-1).cummax(-1).values.flip(-1)
    running = running.masked_fill(running == -torch.inf, 0.0)
    maximum = running.repeat_interleave(block, -1)[..., :length]
    weights = (logits - maximum).exp().to(q.dtype)
    return torch.where(kept, weights, -weights)
