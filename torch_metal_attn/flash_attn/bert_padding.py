"""`flash_attn.bert_padding`: padded batches to packed tokens and back."""

import torch
from torch import Tensor
from torch.nn import functional

from torch_metal_attn.call.arguments import (
    as_int_at_least,
    check_indices,
    check_one_device,
    check_rank,
    check_shape,
    check_values,
)
from torch_metal_attn.wording import count_text


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n,) of `input` (N, ...): (n, ...). Differentiable in input.

    Raises: ValueError: indices that are not int32 or int64, or not in 0..N - 1. On mps
        the values are not checked.
    """
    check_rank("input", input, "(N, ...)")
    check_one_device(input=input, indices=indices)
    check_indices("indices", indices, "(n)", input.shape[0], "the rows of input")
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Put `values` (n, ...) into rows `indices` (n,) of zeros (first_axis_dim, ...).

    Each index may occur once. Differentiable in values. Raises as `index_first_axis`.
    """
    return _put("values", values, indices, as_int_at_least("first_axis_dim", first_axis_dim))


def _put(name: str, values: Tensor, indices: Tensor, count: int) -> Tensor:
    check_rank(name, values, "(N, ...)")
    check_one_device(**{name: values, "indices": indices})
    check_indices("indices", indices, "(n)", count, "the rows of the result")
    if len(indices) != len(values):
        raise ValueError(
            f"indices has {count_text(len(indices), 'number')} and {name} "
            f"{count_text(len(values), 'row')}; the two must be equal"
        )
    return values.new_zeros(count, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, concatenated as the varlen functions take them.

    Args: hidden_states: (B, L, ...). attention_mask: (B, L), bool or numbers, 0 for padding.
        unused_mask: the same; not 0 for tokens that are packed but not counted in seqused.

    Returns: (hidden, indices, cu_seqlens, max_seqlen_in_batch, seqused): hidden (T, ...), with T
        the number of tokens; indices (T,), int64, the tokens' rows in (B * L, ...); cu_seqlens (B +
        1,), int32; the longest sequence; seqused (B,), int32: the number of tokens in
        attention_mask. The host waits for the device, as T depends on the values of the masks.

    Raises:
        ValueError: a mask whose shape is not (B, L).
    """
    check_rank("hidden_states", hidden_states, "(B, L, ...)")
    shape = hidden_states.shape[:2]
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    for name, mask in masks.items():
        check_values(name, mask)
        check_shape(name, mask, shape)
    check_one_device(hidden_states=hidden_states, **masks)
    used = attention_mask != 0
    packed = used if unused_mask is None else used | (unused_mask != 0)
    lengths = packed.sum(dim=1, dtype=torch.int32)
    indices = packed.flatten().nonzero().squeeze(1)
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()) if len(lengths) else 0,
        used.sum(dim=1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that hold several sequences each, concatenated.

    Args: hidden_states: (B, L, ...). attention_mask_in_length: (B, L), integers: the lengths of the
        sequences in a row, followed by 0. Tokens after the last sequence are padding.

    Returns: (hidden, indices, cu_seqlens, max_seqlen_in_batch): as from `unpad_input`, with one
        sequence for each length that is not 0.

    Raises:
        ValueError: wrong shape; lengths that are not integers, negative, or longer than the row.
    """
    lengths = attention_mask_in_length
    check_rank("hidden_states", hidden_states, "(B, L, ...)")
    check_values("attention_mask_in_length", lengths)
    check_one_device(hidden_states=hidden_states, attention_mask_in_length=lengths)
    shape = hidden_states.shape[:2]
    check_shape("attention_mask_in_length", lengths, shape)
    if lengths.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"attention_mask_in_length has dtype {lengths.dtype}; it must be integers")
    tokens = lengths.sum(dim=1)
    if lengths.numel() and (int(lengths.min()) < 0 or int(tokens.max()) > shape[1]):
        raise ValueError(
            "attention_mask_in_length has a negative length, or a row whose sum exceeds "
            f"{shape[1]}, the length of hidden_states"
        )
    is_token = torch.arange(shape[1], device=tokens.device) < tokens[:, None]
    hidden, indices, *_ = unpad_input(hidden_states, is_token)
    used = lengths[lengths != 0]
    cu_seqlens = functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden, indices, cu_seqlens, int(used.max()) if len(used) else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo `unpad_input`: (T, ...) and `indices` (T,) to (batch, seqlen, ...), padded with 0."""
    batch, seqlen = as_int_at_least("batch", batch), as_int_at_least("seqlen", seqlen)
    count = as_int_at_least("batch * seqlen", batch * seqlen)
    padded = _put("hidden_states", hidden_states, indices, count)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])
