"""Says which calls torch's attention runs faster than ours, according to the table in use."""

from typing import Any

import torch

from torch_metal_attn.runtime import tensor_tiles
from torch_metal_attn.sdpa import Problem
from torch_metal_attn.tuned import loading

_MOST_KEYS = 1024

# Cached by the layout of a call's tensors, because an explanation takes as long as a short call.
_keys: dict[tuple[Any, ...], str] = {}


def faster_in_torch(problem: Problem) -> str | None:
    """Why torch should run a call. None if ours is faster, or if no such call was measured."""
    loaded = loading.loaded()
    if not loaded.rows:
        return None
    tensors = (problem.query, problem.key, problem.value, problem.attn_mask)
    needs_grad = any(x is not None and x.requires_grad for x in tensors)
    kind = "training" if needs_grad and torch.is_grad_enabled() else "forward"
    row = loaded.rows.get(_key(problem, tensors))
    times = {} if row is None else row.torch
    # Only rows of flash_decode have times for decoding, and forwards with few queries run it too.
    ratio = times.get(kind, times.get("decode") if kind == "forward" else None)
    if ratio is None or ratio > 1 - loading.LEAST_GAIN:
        return None
    return f"torch takes {ratio:.2f} of our time for such calls ({loaded.source})"


def _key(problem: Problem, tensors: tuple[torch.Tensor | None, ...]) -> str:
    layouts = tuple(
        x if x is None else (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device)
        for x in tensors
    )
    tf32 = problem.query.dtype == torch.float32 and tensor_tiles.tf32_allowed()
    signature = (layouts, problem.is_causal, problem.q_offset, problem.dropout_p > 0, tf32)
    if signature not in _keys:
        if len(_keys) >= _MOST_KEYS:
            _keys.clear()
        try:
            launches = problem.launches()
        except ValueError:
            launches = []
        _keys[signature] = "".join(one["tuning"]["key"] for one in launches if "tuning" in one)
    return _keys[signature]
