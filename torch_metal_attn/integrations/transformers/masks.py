"""The mask function: a compact descriptor if the mask is a band, else `sdpa_mask`'s dense mask.

transformers describes a mask as a function of (batch, head, query, key), composed from a few parts.
The parts that are bands (causal, sliding, chunked) are recognised by their code objects. So
recognition is exact, and a function with any other part gets a dense mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

from torch_metal_attn.call.arguments import as_int, as_int_at_least, check_rank
from torch_metal_attn.integrations.transformers import band as bands
from torch_metal_attn.integrations.transformers import packing
from torch_metal_attn.integrations.transformers.band import Band
from torch_metal_attn.wording import count_text, value_text

# Models that compute with the mask: Gemma 4 cuts rows out of it if its last layers share keys, Doge
# compares its elements, DeepSeek-V4 and T5Gemma 2 concatenate it with another mask, NLLB-MoE's
# router reads it, Qwen4-Exp intersects it with the keys that its indexer selects, LASR's
# convolutions read the padding from it, SigLIP 2 pools by torch's attention with it, and the
# encoders of BigBird-Pegasus and Informer add it to their scores.
DENSE_MODELS = frozenset(
    {
        "bigbird_pegasus",
        "deepseek_v4",
        "doge",
        "gemma4_text",
        "informer",
        "lasr_encoder",
        "nllb-moe",
        "qwen4_exp_text",
        "siglip2_vision_model",
        "t5gemma2_decoder",
    }
)

# `refusals.check_part` fills both sets. Types of models that do not support sdpa in transformers:
# their dense masks are additive, as for eager attention.
additive_masks: set[str] = set()
# Types of models, such as DeepSeek-V3.2, whose indexers add the mask to their scores and pass the
# selected keys to attention.
indexed_models: set[str] = set()

_AND = and_masks().__code__
_SLIDING = sliding_window_overlay(1).__code__
_SLIDING_BOTH_SIDES = sliding_window_bidirectional_overlay(1).__code__
_CHUNKED = chunked_overlay(1, torch.zeros(1, dtype=torch.int64)).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1, dtype=torch.int64)).__code__


# For positions inside a packed sequence. Older versions of transformers do not have it.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _remap(causal_mask_function, torch.zeros(1, 1)).__code__ if _remap else None


@dataclass(frozen=True)
class _Pattern:
    """A band. chunk_start: (B,), where chunks begin. sequences: (B, L), each token's sequence."""

    left: int = -1
    right: int = -1
    chunk: int = 0
    chunk_start: Tensor | None = None
    sequences: Tensor | None = None


def metal_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """The mask of transformers' `sdpa_mask` in the smallest form for `metal_attention`.

    Args:
        q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: number of tokens before the first query and the first key.
        mask_function: tells from token numbers whether a query sees a key.
        attention_mask: bool (B, tokens), False for padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: False if the caller always needs a mask.
            If allow_is_causal_skip is False, a single query of a causal mask always gets a
            descriptor of the same form.
        config: the model's configuration.
        options: further options of `sdpa_mask`.

    Returns:
        None if every query sees all keys and a mask may be skipped, as in eager attention; a
        descriptor from `band` for a band, and from `packing` for packed sequences; otherwise a
        dense mask (B, 1, Sq, Sk), bool or, for `additive_masks`, floating.
    """
    model_type = getattr(config, "model_type", None)
    is_additive = model_type in additive_masks
    device = options.get("device", "cpu")
    forward = _Forward(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)

    def dense(causal_skip: bool = False, bidirectional_skip: bool = False) -> Tensor | None:
        mask: Tensor | None = sdpa_mask(
            **vars(forward),
            mask_function=mask_function,
            allow_is_causal_skip=causal_skip,
            allow_is_bidirectional_skip=bidirectional_skip,
            use_vmap=use_vmap,
            **options,
        )
        if mask is None or not is_additive:
            return mask
        dtype = options.get("dtype", torch.float32)
        shown = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, shown, torch.finfo(dtype).min)

    tensors = (value for value in (q_offset, attention_mask) if isinstance(value, Tensor))
    traces = is_tracing() or any(map(packing.hidden, tensors))
    if not traces:
        forward.check()
        if not callable(mask_function):
            raise TypeError(f"mask_function is {value_text(mask_function)}; it must be a function")
    pattern = None if traces or use_vmap else _recognise(mask_function)

    def mark_first(mask: Tensor | None, position: int | Tensor = q_offset) -> Tensor | None:
        """Mark the mask of a first forward: with a cache transformers detects no packing."""
        is_first = isinstance(position, int) and position == 0 == kv_offset and q_length > 1
        is_causal = pattern is not None and pattern.right == 0 and pattern.sequences is None
        if mask is None or attention_mask is not None or not (is_first and is_causal):
            return mask
        return packing.mark_unseparated(mask)

    if model_type in DENSE_MODELS or model_type in indexed_models:
        return mark_first(dense(bidirectional_skip=allow_is_bidirectional_skip and is_additive))
    if traces:
        # Without a mask a single query would see empty cache slots after it. Outside of graphs
        # transformers reads the values to decide if a mask can be left out.
        several = q_length > 1 and is_tracing()
        mask = dense(allow_is_causal_skip and several, allow_is_bidirectional_skip and several)
        is_causal = several and mask_function is not bidirectional_mask_function
        if mask is None and allow_is_causal_skip and is_causal:
            return bands.causal(batch_size, q_length, device)
        return mask

    if pattern is None:
        return dense()
    if pattern.sequences is not None:
        # Chunks begin at the row's or at each sequence's first token: versions differ.
        if attention_mask is not None or pattern.chunk:
            return dense()
        return packing.pack(pattern.sequences, pattern.left, pattern.right)
    # A decode with a static cache needs a mask, because it may be compiled. A descriptor suffices.
    allowed = (
        allow_is_causal_skip or q_length == 1 if pattern.right == 0 else allow_is_bidirectional_skip
    )
    # The step that fills the cache gets the form of other steps, so that they share one graph.
    keeps_diagonal = pattern.right == 0 and not allow_is_causal_skip
    band = _describe(pattern, forward, keeps_diagonal) if allowed else None
    if band is None:
        return mark_first(dense())
    if band.is_everything:
        return None
    if band.is_causal:
        return mark_first(bands.causal(batch_size, q_length, device), band.q_offset)
    if kv_length <= len(bands.COLUMNS):
        return mark_first(dense(), band.q_offset)
    return mark_first(bands.pack(band, batch_size, device), band.q_offset)


@dataclass(frozen=True)
class _Forward:
    """The sizes and the padding of one forward, with the names that `sdpa_mask` uses."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    attention_mask: Tensor | None

    def check(self) -> None:
        for name in ("batch_size", "q_length", "kv_length"):
            as_int_at_least(name, getattr(self, name))
        for name in ("q_offset", "kv_offset"):
            offset = getattr(self, name)
            if not isinstance(offset, Tensor):
                as_int(name, offset)
            elif offset.numel() != 1 or offset.is_floating_point():
                shape = tuple(offset.shape)
                raise ValueError(
                    f"{name} has shape {shape} and dtype {offset.dtype}; it must be one int"
                )
        if self.attention_mask is not None:
            check_rank("attention_mask", self.attention_mask, "(B, tokens)")
            rows = self.attention_mask.shape[0]
            if rows != self.batch_size:
                raise ValueError(
                    f"attention_mask has {count_text(rows, 'row')}; it must have "
                    f"batch_size={self.batch_size}"
                )


def _recognise(function: Callable[..., Any], packed: bool = False) -> _Pattern | None:
    """A mask function's band, or None. packed: another part of the mask separates sequences."""
    if function is causal_mask_function:
        return _Pattern(right=0)
    if function is bidirectional_mask_function:
        return _Pattern()
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(code, "co_freevars", ())
    bound = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if code is _SLIDING:
        return _windowed(bound.get("sliding_window"), both_sides=False)
    if code is _SLIDING_BOTH_SIDES:
        return _windowed(bound.get("sliding_window"), both_sides=True)
    if code is _CHUNKED:
        size, start = bound.get("chunk_size"), bound.get("left_padding")
        if isinstance(size, int) and size > 0 and _is_readable(start):
            return _Pattern(chunk=size, chunk_start=start)
        return None
    if code is _PACKED:
        sequences = bound.get("packed_sequence_mask")
        return _Pattern(sequences=sequences) if _is_readable(sequences) else None
    if code is _REMAPPED and packed and "mask_function" in bound:
        # Positions grow by 1 inside a sequence, so their distances are those of the tokens.
        return _recognise(bound["mask_function"])
    if code is _AND:
        parts = bound.get("mask_functions", ())
        packed = any(getattr(part, "__code__", None) is _PACKED for part in parts)
        return _intersection([_recognise(part, packed) for part in parts])
    return None


def _is_readable(value: Any) -> bool:
    return isinstance(value, Tensor) and not packing.hidden(value)


def _windowed(size: Any, both_sides: bool) -> _Pattern | None:
    """A query sees keys > query - size, or on both sides keys with |query - key| <= size."""
    if not isinstance(size, int) or size <= 0:
        return None
    return _Pattern(left=size, right=size) if both_sides else _Pattern(left=size - 1)


def _intersection(parts: list[_Pattern | None]) -> _Pattern | None:
    known = [part for part in parts if part is not None]
    chunked = [part for part in known if part.chunk]
    packed = [part for part in known if part.sequences is not None]
    if not known or len(known) < len(parts) or len(chunked) > 1 or len(packed) > 1:
        return None
    return _Pattern(
        left=min((part.left for part in known if part.left >= 0), default=-1),
        right=min((part.right for part in known if part.right >= 0), default=-1),
        chunk=chunked[0].chunk if chunked else 0,
        chunk_start=chunked[0].chunk_start if chunked else None,
        sequences=packed[0].sequences if packed else None,
    )


def _describe(pattern: _Pattern, forward: _Forward, keeps_diagonal: bool) -> Band | None:
    """The band of this forward; None if padding has holes or chunks are shifted. Waits once."""
    batch, q_length, kv_length = forward.batch_size, forward.q_length, forward.kv_length
    kv_offset, attention_mask = forward.kv_offset, forward.attention_mask
    if not batch or not q_length or not kv_length:
        return None
    position = forward.q_offset - kv_offset  # of the first query, among the keys
    start = end = right_padded = None
    refused: list[Tensor] = []
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool or attention_mask.shape[:-1] != (batch,):
            return None
        exists = attention_mask[:, kv_offset : kv_offset + kv_length]
        start, end = _bounds(exists)
        refused.append((end - start != exists.sum(1)).any())
        # Padding after the last key of causal queries is already hidden.
        reached = position + q_length if pattern.right == 0 else kv_length
        right_padded = ((end < kv_length) & (end < reached)).any()
    if pattern.chunk_start is not None:
        origin = pattern.chunk_start - kv_offset
        if origin.shape != (batch,):
            return None
        agree = origin.clamp(min=0) == (0 if start is None else start)
        if end is not None:
            agree = agree | (end == 0)
        # If a cache begins inside a chunk, the first chunk that begins in the cache is the origin.
        # Keys before the origin are then hidden, so no query may be among them.
        aligned = origin % pattern.chunk
        agree = agree & ((origin >= 0) | (aligned <= position))
        refused.append(agree.logical_not().any())
        start = torch.where(origin < 0, aligned, origin if start is None else start)
    left_padded = None if start is None else (start > 0).any()

    is_refused, has_end, has_start, position = _on_host(
        torch.stack(refused).any() if refused else None, right_padded, left_padded, position
    )
    if is_refused:
        return None
    return _simplified(
        Band(
            q_offset=position,
            q_length=q_length,
            kv_length=kv_length,
            window_size_left=pattern.left,
            window_size_right=pattern.right,
            attention_chunk=pattern.chunk,
            leftpad_k=start.to(torch.int32) if start is not None and has_start else None,
            seqused_k=end.to(torch.int32) if end is not None and has_end else None,
        ),
        keeps_diagonal,
    )


def _bounds(exists: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's first True in (B, L), and the index after its last; (0, 0) if it has none."""
    count = torch.arange(1, exists.shape[1] + 1, device=exists.device)
    end = torch.where(exists, count, 0).amax(1) if exists.shape[1] else exists.sum(1)
    first = torch.where(exists, count - 1, exists.shape[1]).amin(1) if exists.shape[1] else end
    return torch.minimum(first, end), end


def _on_host(*values: Tensor | int | None) -> list[int]:
    """The values as numbers, with None as 0; all tensors are read in one transfer."""
    tensors = [value.reshape(()).to(torch.int64) for value in values if isinstance(value, Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(fetched) if isinstance(value, Tensor) else value or 0 for value in values]


def _simplified(band: Band, keeps_diagonal: bool) -> Band:
    """Remove limits that mask out no key."""
    last = band.q_offset + band.q_length - 1
    left, right, chunk = band.window_size_left, band.window_size_right, band.attention_chunk
    if left >= last:
        left = -1
    if band.q_offset + right >= band.kv_length - 1 and not keeps_diagonal:
        right = -1
    # Queries before their sequence see no key, so only the first chunk matters.
    if band.window_size_right == 0 and 0 <= band.q_offset and last < chunk:
        chunk = 0
    return replace(band, window_size_left=left, window_size_right=right, attention_chunk=chunk)
