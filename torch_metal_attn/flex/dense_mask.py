"""`block_mask`, which makes a BlockMask from a bool mask."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_tensor
from torch_metal_attn.flex.block_mask import LARGEST, SMALLEST
from torch_metal_attn.wording import value_text


def block_mask(
    attn_mask: Tensor,
    block: int | tuple[int, int] = 128,
    lengths: tuple[int, int] | None = None,
) -> Any:
    """Make a BlockMask from a bool mask, with which `flex_attention` skips fully hidden blocks.

    Args:
        attn_mask: bool, False where the key is masked out; with up to 4 dimensions, broadcastable
            to (B, Hq, Lq, Lk), and any strides. Partial blocks read it; no copy is made.
        block: rows and columns of a block, or one number for both; multiples of 8 from 8 to 1024.
        lengths: (Lq, Lk); None for those of attn_mask. Pass it if attn_mask broadcasts over queries
            or keys.

    Returns:
        torch's BlockMask on attn_mask's device. Blocks whose keys are all visible are full. The
        host does not wait for the device.

    Raises:
        TypeError: attn_mask is not a tensor; block or lengths are not integers.
        ValueError: the wrong dtype, more than 4 dimensions, sizes that do not broadcast to lengths,
            invalid block sizes or lengths.
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_tensor("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool:
        raise ValueError(
            f"attn_mask has dtype {attn_mask.dtype}; it must be torch.bool, True for visible keys"
        )
    q_block, kv_block = _pair("block", (block, block) if type(block) is int else block)
    for size in (q_block, kv_block):
        if not SMALLEST <= size <= LARGEST or size % 8 != 0:
            raise ValueError(
                f"block is {block}; it must be multiples of 8 in {SMALLEST}..{LARGEST}"
            )
    q_length, kv_length = _lengths(attn_mask, lengths)
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    rows, columns = -(-q_length // q_block), -(-kv_length // kv_block)
    padding = (0, columns * kv_block - kv_length, 0, rows * q_block - q_length)
    padded = torch.nn.functional.pad(mask.expand(-1, -1, q_length, kv_length), padding)
    seen = padded.unflatten(3, (columns, kv_block)).unflatten(2, (rows, q_block)).sum((3, 5))
    # Blocks over the edge of the mask are partial, as in create_block_mask.
    full = seen == q_block * kv_block

    return BlockMask.from_kv_blocks(
        *_listed((seen > 0) & ~full),
        *_listed(full),
        BLOCK_SIZE=(q_block, kv_block),
        mask_mod=partial(_look_up, mask),
        seq_lengths=(q_length, kv_length),
    )


def _look_up(mask: Tensor, *indices: Tensor) -> Tensor:
    """The mask_mod, at module level so that it can be pickled. indices: b, h, q_idx and kv_idx."""
    return mask[tuple(i if n > 1 else 0 * i for i, n in zip(indices, mask.shape, strict=True))]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of True blocks in the last dimension, and block indices, those of True first."""
    flags = blocks.int()
    indices = flags.argsort(dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), indices.int()


def _pair(name: str, pair: Any) -> tuple[int, int]:
    numbers = tuple(pair) if isinstance(pair, tuple | list) else ()
    if len(numbers) != 2 or any(type(n) is not int for n in numbers):
        raise TypeError(f"{name} is {value_text(pair)}; it must be two integers")
    return numbers


def _lengths(attn_mask: Tensor, lengths: tuple[int, int] | None) -> tuple[int, int]:
    shape = tuple(attn_mask.shape)
    if not 1 <= len(shape) <= 4:
        raise ValueError(f"attn_mask has shape {shape}; it must have 1 to 4 dimensions")
    if lengths is None:
        if len(shape) == 1:
            raise ValueError(
                f"attn_mask has shape {shape}, which has no queries; give lengths=(Lq, {shape[0]})"
            )
        lengths = (shape[-2], shape[-1])
    sizes = _pair("lengths", lengths)
    if min(sizes) < 1 or 0 in shape:
        raise ValueError(
            f"attn_mask has shape {shape} and lengths are {sizes}; there must be a query and a key"
        )
    if any(n not in (1, size) for n, size in zip(shape[-2:], sizes[-len(shape) :], strict=True)):
        raise ValueError(
            f"attn_mask has shape {shape}, which does not broadcast to lengths {sizes}"
        )
    return sizes
