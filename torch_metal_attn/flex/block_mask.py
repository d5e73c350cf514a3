"""torch's BlockMask as the op's arguments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_tensor, integers
from torch_metal_attn.ops.flex import LISTS
from torch_metal_attn.wording import count_text, type_text

# The block size of torch's default BlockMask, whose only block contains all scores.
NO_BLOCKS = 1 << 30
SMALLEST, LARGEST = 8, 1024


@dataclass(frozen=True)
class Blocks:
    """The lists of a BlockMask, by the op's option. group: query heads per KV head."""

    lists: dict[str, Tensor]
    q_size: int
    kv_size: int
    group: int = 1
    orders: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def options(self, transposed: bool) -> dict[str, Any]:
        """The op's options; transposed: with the lists that only a backward reads."""
        lists = {n: x for n, x in self.lists.items() if transposed or not n.startswith(_TRANSPOSED)}
        return lists | {"q_block_size": self.q_size, "kv_block_size": self.kv_size}

    def ordered(self, over_keys: bool, over_queries: bool) -> dict[str, Tensor]:
        """The order in which rows of blocks run, computed once. Changed lists only cost speed."""
        results = {}
        if over_keys:
            results["kv_order"] = self._order("kv", 1)
        if over_queries:
            results["q_order"] = self._order("q", self.group)
        return {name: order for name, order in results.items() if order is not None}

    def _order(self, side: str, group: int) -> Tensor | None:
        names = (f"{side}_num_blocks", f"full_{side}_num_blocks")
        counts = [self.lists[name] for name in names if name in self.lists]
        shape = _order_shape(counts, group)
        if shape is None or math.prod(shape) <= 1:
            return None
        # A symbolic size has no hash, so its order was not stored.
        known = self.orders.get((side, group)) if isinstance(group, int) else None
        if known is not None and known.shape[1:] == shape and known.device == counts[0].device:
            return known
        # Tensors that are created in inference mode cannot be saved for a backward.
        with torch.inference_mode(False), torch.no_grad():
            order = longest_first(counts, group)
        if type(order) is Tensor:  # a traced tensor must not be stored
            self.orders[side, group] = order
        return order

    def dense(self, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """Bool masks of partial and of full blocks, (B or 1, H or 1, Lq, Lk)."""
        results = []
        for full in ("", "full_"):
            counts = self.lists.get(f"{full}kv_num_blocks")
            if counts is None:
                results.append(torch.zeros((1, 1, queries, keys), dtype=torch.bool, device="cpu"))
                continue
            indices = self.lists[f"{full}kv_indices"].long()
            entry = torch.arange(indices.shape[-1], device=indices.device)
            # Entries after the count become the index of an extra column, which is dropped below.
            last = -(-keys // self.kv_size)
            listed = torch.where(entry < counts[..., None], indices, last)
            listed = listed.broadcast_to(torch.broadcast_shapes(listed.shape, (1, 1, 1, 1)))
            blocks = listed.new_zeros((*listed.shape[:3], last + 1), dtype=torch.bool)
            blocks.scatter_(3, listed, True)
            rows = blocks[..., :last].repeat_interleave(self.q_size, 2)[:, :, :queries]
            results.append(rows.repeat_interleave(self.kv_size, 3)[..., :keys])
        return results[0], results[1]


_TRANSPOSED = ("q_num", "q_ind", "full_q_")


def mask_mod_of(block_mask: Any) -> Any:
    """The mask_mod of a BlockMask. Slices of a BlockMask have no mask_mod and are refused."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            f"block_mask is {type_text(block_mask)}; it must be a BlockMask: make one with "
            "torch's create_block_mask, or from a bool mask with torch_metal_attn.block_mask"
        )
    mask_mod = block_mask.mask_mod
    if getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError(
            "block_mask is a slice, which has no mask_mod: set its mask_mod to that of the whole "
            "BlockMask, with the offset of the slice added to q_idx"
        )
    return mask_mod


def blocks_of(block_mask: Any, query: Tensor, key: Tensor) -> Blocks | None:
    """The lists of a BlockMask, which must fit these lengths; None for a single block."""
    sizes = integers("block_mask.BLOCK_SIZE", block_mask.BLOCK_SIZE)
    mask_lengths = integers("block_mask.seq_lengths", block_mask.seq_lengths)
    if len(sizes) != 2 or len(mask_lengths) != 2:
        raise ValueError(
            f"block_mask has a BLOCK_SIZE of {sizes} and seq_lengths of {mask_lengths}; both must "
            "be (queries, keys)"
        )
    if sizes == [NO_BLOCKS, NO_BLOCKS]:
        return None
    for name, size in zip(("Q_BLOCK_SIZE", "KV_BLOCK_SIZE"), sizes, strict=True):
        if not SMALLEST <= size <= LARGEST or size % 8 != 0:
            raise ValueError(
                f"block_mask has a {name} of {size}; it must be a multiple of 8 in "
                f"{SMALLEST}..{LARGEST}"
            )
    lengths = [query.shape[2], key.shape[2]]
    if mask_lengths != lengths:
        raise ValueError(
            f"block_mask was made for {count_text(mask_lengths[0], 'query')} and "
            f"{count_text(mask_lengths[1], 'key')}, and query has {lengths[0]} and key "
            f"{lengths[1]}: make one for these lengths"
        )
    attributes = {name: getattr(block_mask, name) for name in LISTS}
    lists = {name: tensor for name, tensor in attributes.items() if tensor is not None}
    for name, x in lists.items():
        check_tensor(f"block_mask.{name}", x)
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"block_mask.{name} has dtype {x.dtype}; it must be int32 or int64")
        if x.device != query.device:
            raise ValueError(
                f"block_mask is on {x.device} and query on {query.device}; call "
                f"block_mask.to({str(query.device)!r})"
            )
        if x.dim() != (4 if name.endswith("indices") else 3):
            raise ValueError(
                f"block_mask.{name} has shape {tuple(x.shape)}; it must have the dimensions "
                "(batch, heads, blocks of queries" + (", blocks)" if x.dim() == 3 else ")")
            )
    group = query.shape[1] // max(key.shape[1], 1)
    orders = block_mask.__dict__.setdefault("_metal_attn_orders", {})
    return Blocks(lists, q_size=sizes[0], kv_size=sizes[1], group=group, orders=orders)


def longest_first(counts: Sequence[Tensor], group: int = 1) -> Tensor:
    """Row indices, longest list first, and their inverse: (2, B or 1, H / group or 1, rows)."""
    total = sum(counts[1:], counts[0])
    if total.shape[1] > 1:
        total = total.unflatten(1, (-1, group)).sum(2)
    order = total.flatten().argsort(descending=True, stable=True).int()
    return torch.stack((order, order.argsort().int())).view(2, *total.shape)


def _order_shape(counts: Sequence[Tensor], group: int) -> tuple[int, int, int] | None:
    """The shape of an order; None for counts that the op refuses."""
    try:
        batch, heads, rows = torch.broadcast_shapes(*(x.shape for x in counts))
    except RuntimeError:
        return None
    if heads > 1 and heads % group != 0:
        return None
    return batch, heads if heads == 1 else heads // group, rows
