"""Describes the keys that a query sees by numbers and lengths that the ops of `metal_attn` take.

transformers calls the mask function once per forward and the attention function once per layer, and
passes one tensor from the first to the second. A `Band` is passed as a descriptor: an int32 tensor
(B, Sq, 1, 8) with one row per sequence, expanded over the queries. The shape contains Sq because
a compiled graph cannot read values. If every query sees the same keys, the descriptor is
(B, 1, 1, 5), for any number of queries. The band is also attached as an attribute, so a layer does
not wait for the device. If the attribute is lost (`.to()`, slicing, checkpoints), the values give
the same band.

A causal mask whose diagonal begins at the first key, as in most forwards, is an int32 tensor
(B, 1, Sq, 0), a mask without columns. So None keeps the meaning that it has in transformers' eager
attention: every query sees every key. Models that pass no mask get no causal mask.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Key 0 is the first key of the call, which in a sliding cache is not token 0.
COLUMNS = (
    "q_offset",  # the key at the position of the first query
    "q_length",
    "kv_length",
    "start",  # the first key; chunks count from it
    "end",  # the index after the last key
    "window_size_left",  # -1: no limit
    "window_size_right",
    "attention_chunk",  # 0: none
)
# The number of columns if all queries see the same keys, and the values of the missing columns.
_SHARED = 5
_NO_LIMITS = (-1, -1, 0)

_ATTRIBUTE = "_metal_attn_band"


@dataclass(frozen=True)
class Band:
    """The options of one call. seqused_k, leftpad_k: int32 (B,), or None without padding."""

    q_offset: int
    q_length: int
    kv_length: int
    window_size_left: int = -1
    window_size_right: int = -1
    attention_chunk: int = 0
    leftpad_k: Tensor | None = None
    seqused_k: Tensor | None = None

    @property
    def is_everything(self) -> bool:
        return self.window_size_right < 0 and self._has_no_other_limit

    @property
    def is_causal(self) -> bool:
        """True for several queries of which query i sees the keys up to i."""
        on_diagonal = self.window_size_right == 0 and self.q_offset == 0
        return on_diagonal and self.q_length > 1 and self._has_no_other_limit

    @property
    def is_same_for_all_queries(self) -> bool:
        limits = (self.window_size_left, self.window_size_right)
        return max(limits) < 0 and self.attention_chunk == 0

    @property
    def _has_no_other_limit(self) -> bool:
        return self.window_size_left < 0 and self.attention_chunk == 0 and not self.is_padded

    @property
    def is_padded(self) -> bool:
        return self.leftpad_k is not None or self.seqused_k is not None

    def options(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("q_length", "kv_length")}

    def __str__(self) -> str:
        parts = []
        if self.window_size_right == 0:
            parts.append("causal")
        if self.window_size_left >= 0:
            right = self.window_size_right if self.window_size_right > 0 else 0
            parts.append(f"window -{self.window_size_left}+{right}")
        if self.attention_chunk:
            parts.append(f"chunk {self.attention_chunk}")
        if self.q_offset:
            parts.append(f"offset {self.q_offset}")
        if self.is_padded:
            parts.append("padded")
        return " ".join(parts) or "full"


def pack(band: Band, batch: int, device: torch.device | str) -> Tensor:
    """The descriptor of `band`, int32 (B, Sq, 1, 8) or (B, 1, 1, 5)."""
    rows = table(band, batch, device)[:, None, None]
    shared = band.is_same_for_all_queries
    descriptor = rows[..., :_SHARED] if shared else rows.expand(-1, band.q_length, -1, -1)
    setattr(descriptor, _ATTRIBUTE, band)
    return descriptor


def table(band: Band, batch: int, device: torch.device | str) -> Tensor:
    """A row per sequence, int32 (B, 8)."""
    row = [
        *(band.q_offset, band.q_length, band.kv_length, 0, band.kv_length),
        *(band.window_size_left, band.window_size_right, band.attention_chunk),
    ]
    rows = torch.tensor(row, dtype=torch.int32, device=device).repeat(batch, 1)
    if band.leftpad_k is not None:
        rows[:, COLUMNS.index("start")] = band.leftpad_k
    if band.seqused_k is not None:
        rows[:, COLUMNS.index("end")] = band.seqused_k
    return rows


def causal(batch: int, q_length: int, device: torch.device | str) -> Tensor:
    """The diagonal from the first key, int32 (B, 1, Sq, 0)."""
    return torch.empty(batch, 1, q_length, 0, dtype=torch.int32, device=device)


def is_causal(mask: Tensor) -> bool:
    """True if `mask` was made by `causal`, for any number of queries."""
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[3] == 0


def is_descriptor(mask: Tensor, kv_length: int) -> bool:
    """True for an uncut descriptor. Calls with up to 8 keys have none: dense masks look alike."""
    return (
        mask.dtype == torch.int32
        and mask.dim() == 4
        and mask.shape[2] == 1
        and mask.shape[3] in (_SHARED, len(COLUMNS))
        and kv_length > len(COLUMNS)
    )


def is_for(descriptor: Tensor, q_length: int) -> bool:
    """True if the shape of a descriptor is that for this number of queries."""
    return descriptor.shape[3] == _SHARED or descriptor.shape[1] == q_length


def unpack(descriptor: Tensor) -> Band:
    """A descriptor's band, from its attribute or from the device. Raises ValueError."""
    band = getattr(descriptor, _ATTRIBUTE, None)
    if isinstance(band, Band):
        return band
    table = descriptor[:, 0, 0]
    names = COLUMNS[: table.shape[1]]
    rows = [dict(zip(names, row, strict=True)) for row in table.tolist()]
    # The sequences of a batch may differ in start and end only.
    shared = [{**row, "start": 0, "end": 0} for row in rows]
    if not rows or any(row != shared[0] for row in shared):
        raise foreign(descriptor)
    first = rows[0]
    if not is_for(descriptor, first["q_length"]):
        raise foreign(descriptor)

    def lengths(name: str, none: int) -> Tensor | None:
        column = table[:, COLUMNS.index(name)].contiguous()
        return column if any(row[name] != none for row in rows) else None

    return Band(
        leftpad_k=lengths("start", 0),
        seqused_k=lengths("end", first["kv_length"]),
        **{name: first[name] for name in names if name not in ("start", "end")},
    )


def foreign(mask: Tensor) -> ValueError:
    return ValueError(
        f"attention_mask is an int32 tensor {tuple(mask.shape)}, but its values are not those of "
        "a mask from metal_attention_mask: pass a bool mask"
    )


def expand(descriptor: Tensor, q_length: int, kv_length: int) -> Tensor:
    """The bool mask (B, 1, Sq, Sk) of a descriptor, made without reading values on the host."""
    columns = _columns(descriptor[:, 0, :, None])
    position, _, _, start, end, left, right, chunk = columns  # (B, 1 or Sq, 1) each
    query = torch.arange(q_length, device=descriptor.device)[:, None] + position
    key = torch.arange(kv_length, device=descriptor.device)
    visible = (key >= start) & (key < end)
    visible = visible & ((left < 0) | (key >= query - left))
    visible = visible & ((right < 0) | (key <= query + right))
    size = chunk.clamp(min=1)
    same = (key - start) // size == (query - start) // size
    return (visible & ((chunk == 0) | same))[:, None]


def lengths(descriptor: Tensor) -> dict[str, Tensor]:
    """The range of a single query's keys: leftpad_k and seqused_k, int32 (B,); equal if empty."""
    position, _, _, start, end, left, right, chunk = _columns(descriptor[:, 0, 0])  # (B,) each
    # The first key of the chunk, or of all keys.
    first = start + (position - start) // chunk.clamp(min=1) * chunk
    last = torch.where(chunk > 0, torch.minimum(end, first + chunk), end)
    first = torch.where(left < 0, first, torch.maximum(first, position - left))
    last = torch.where(right < 0, last, torch.minimum(last, position + right + 1))
    last = last.clamp(min=0)
    return {"leftpad_k": torch.minimum(torch.maximum(first, start), last), "seqused_k": last}


def _columns(rows: Tensor) -> list[Tensor]:
    """The last dimension's columns in the order of COLUMNS, without limits if they are missing."""
    columns = list(rows.unbind(-1))
    missing = _NO_LIMITS[len(columns) - _SHARED :]
    return [*columns, *(torch.full_like(columns[0], number) for number in missing)]
