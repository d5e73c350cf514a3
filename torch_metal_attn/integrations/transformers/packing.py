"""Sequences packed in one row, which the mask function recognises by their `position_ids`.

Their mask is a descriptor (see `band`) with a row per query, int32 (B, 1, L, 8): `start` and `end`
are the bounds of the query's sequence. A `Packing` with the bounds of all sequences is attached.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_tracing

from torch_metal_attn.integrations.transformers import band as bands

_ATTRIBUTE = "_metal_attn_packing"
_UNSEPARATED = "_metal_attn_unpacked"
# Results of `separates`, by `sequence` and `other`. They are not attributes of the batch's tensors,
# because tensors with such attributes could not be pickled.
_separated = WeakTensorKeyDictionary()
# Other arguments that describe packed sequences: TRL and models with convolutions use the first,
# unsloth the second, linear attention the third. No attention of transformers reads them.
SEQUENCES = ("seq_idx", "packed_seq_lengths", "cu_seqlens")


def hidden(tensor: Tensor) -> bool:
    """True if the host cannot read the values: in a graph, on meta, or inside torch.func."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return bool(is_tracing(tensor) or tensor.is_meta or wrapped(tensor))


@dataclass
class Packing:
    """Bounds, int32 (sequences + 1,), in the concatenated rows, and the window of all sequences."""

    cu_seqlens: Tensor
    max_length: int
    window_size_left: int
    window_size_right: int

    def bounds(self) -> dict[str, Any]:
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def pack(sequences: Tensor, window_size_left: int, window_size_right: int) -> Tensor:
    """The descriptor of a batch of rows. sequences: (B, L), the number of each token's sequence."""
    batch, length = sequences.shape
    band = bands.Band(0, length, length, window_size_left, window_size_right)
    descriptor = bands.table(band, batch * length, sequences.device).view(batch, 1, length, -1)
    for column, right in (("start", False), ("end", True)):
        bound = torch.searchsorted(sequences, sequences, right=right)
        descriptor[:, 0, :, bands.COLUMNS.index(column)] = bound
    rows = torch.arange(batch, device=sequences.device)[:, None]
    lengths = (sequences + rows * length).flatten().unique_consecutive(return_counts=True)[1]
    packing = Packing(
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_length=int(lengths.max()),
        window_size_left=window_size_left,
        window_size_right=window_size_right,
    )
    setattr(descriptor, _ATTRIBUTE, packing)
    return descriptor


def packing_of(mask: Tensor | None, q_length: int, kv_length: int) -> Packing | None:
    """The packing of a descriptor with a row per query; None for other masks and in graphs."""
    if (
        mask is None
        or torch.compiler.is_compiling()
        or mask.dtype != torch.int32
        or mask.shape[1:] != (1, q_length, len(bands.COLUMNS))
        or not 1 < q_length == kv_length
    ):
        return None
    packing = getattr(mask, _ATTRIBUTE, None)
    if isinstance(packing, Packing):
        return packing
    start, left, right = (
        mask[:, 0, :, bands.COLUMNS.index(name)].contiguous()
        for name in ("start", "window_size_left", "window_size_right")
    )
    again = pack(start, int(left[0, 0]), int(right[0, 0]))
    if not torch.equal(again, mask):
        raise bands.foreign(mask)
    unpacked: Packing = getattr(again, _ATTRIBUTE)
    return unpacked


@dataclass
class _Checked:
    """The last position_ids that `positions_restart` got with a mask, and its result."""

    position_ids: Tensor | None = None
    positions_restart: bool = False


def mark_unseparated(mask: Tensor) -> Tensor:
    """Mark a mask that hides no earlier token of a row, so that `positions_restart` checks it."""
    setattr(mask, _UNSEPARATED, _Checked())
    return mask


def positions_restart(mask: Tensor | None, position_ids: Tensor | None) -> bool:
    """True if positions (B, L) begin at 0 and later return to 0, as for several sequences."""
    if torch.compiler.is_compiling():
        return False
    checked = getattr(mask, _UNSEPARATED, None)
    if not isinstance(checked, _Checked):
        return False
    # Positions for rotary embeddings with several axes have other shapes, and count no tokens.
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or hidden(position_ids):
        return False
    if checked.position_ids is not position_ids:
        step, restarts = position_ids.diff(dim=1), position_ids[:, 1:] == 0
        are_counts = ((step == 1) | restarts).all(1) & (position_ids[:, 0] == 0)
        checked.positions_restart = bool((are_counts & (restarts & (step < 0)).any(1)).any())
        checked.position_ids = position_ids
    return checked.positions_restart


def separates(
    name: str, sequence: Tensor, shape: tuple[int, int], bounds: Tensor | None, mask: Tensor | None
) -> bool:
    """True if attention separates the sequences of a batch of `shape` (B, L).

    Every layer calls this with the same tensors, so only the first one waits for the device. In a
    graph, which cannot read values, bounds and dense masks are trusted.

    Args:
        name, sequence: one of SEQUENCES: seq_idx (B, L), the number of each token's sequence;
            packed_seq_lengths (sequences,); cu_seqlens (sequences + 1,).
        bounds: cu_seq_lens in the concatenated rows, or None if each row is one sequence.
        mask: a dense mask, bool or additive, broadcastable to (B, heads, L, L), or None.
    """
    other = mask if mask is not None else sequence if bounds is None else bounds
    if hidden(sequence) or hidden(other):
        return other is not sequence
    versions = tuple(None if x.is_inference() else x._version for x in (sequence, other))
    agreed = _separated.setdefault(sequence, WeakTensorKeyDictionary())
    if agreed.get(other) == (versions, shape):
        return True
    ends = _bounds_of(name, sequence).unique_consecutive()
    tokens = torch.arange(shape[0] * shape[1] + 1, device=sequence.device)
    bounds = tokens[:: shape[1]] if bounds is None else bounds.unique_consecutive()
    # Tokens past the last sequence are padding.
    apart = torch.equal(ends, bounds[: len(ends)].to(ends))
    if mask is not None and mask.shape[-1] == shape[1] and not apart:
        numbers = torch.bucketize(tokens[:-1], ends[1:], right=True).view(shape[0], 1, shape[1])
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        apart = not bool((seen & (numbers.mT != numbers)[:, None]).any())
    if apart:
        agreed[other] = (versions, shape)
    return apart


def _bounds_of(name: str, sequence: Tensor) -> Tensor:
    """The bounds, int64 (sequences + 1,), in the concatenated rows."""
    if name == "cu_seqlens":
        return sequence.flatten().long()
    if name == "packed_seq_lengths":
        return torch.nn.functional.pad(sequence.flatten().cumsum(0), (1, 0))
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence.diff(dim=1) != 0
    return torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=sequence.numel())
