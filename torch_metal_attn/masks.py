"""Ready-made mask_mods for `flex_attention` and torch's `create_block_mask`.

Masks combine with `&`, `|` and `~`. Kernels read the tensors that you pass, so these must be on the
device of the attention. Masks can be pickled, as DataLoader's workers need. An argument of the
wrong type, dtype or shape, or out of range, raises a TypeError or ValueError that names it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import (
    INT32_MAX,
    as_int,
    as_int_at_least,
    check_integers,
    on_host,
)
from torch_metal_attn.wording import value_text

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mask:
    """A mask_mod (b, h, q_idx, kv_idx), True where the query sees the key."""

    def __init__(self, mask_mod: MaskMod) -> None:
        _check_function("mask_mod", mask_mod)
        self.mask_mod = mask_mod

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask_mod(b, h, q_idx, kv_idx)

    def __and__(self, other: MaskMod) -> "Mask":
        _check_function("the operand of &", other)
        return Mask(partial(_both, self, other))

    __rand__ = __and__

    def __or__(self, other: MaskMod) -> "Mask":
        _check_function("the operand of |", other)
        return Mask(partial(_either, self, other))

    __ror__ = __or__

    def __invert__(self) -> "Mask":
        return Mask(partial(_not, self))


def causal(q_offset: int = 0) -> Mask:
    """Query i has the position i + q_offset, and sees keys up to that position."""
    return Mask(partial(_causal, as_int("q_offset", q_offset)))


def sliding_window(left: int, right: int = 0) -> Mask:
    """Queries see keys from `left` before their position to `right` after it."""
    left, right = as_int_at_least("left", left), as_int_at_least("right", right)
    return Mask(partial(_sliding_window, left, right))


def prefix_lm(lengths: Tensor) -> Mask:
    """Causal, and every query sees the first lengths[b] keys. lengths: (B,), integers."""
    check_integers("lengths", lengths, "(B)")
    return Mask(partial(_prefix_lm, lengths))


def document(cu_seqlens: Tensor, length: int | None = None) -> Mask:
    """Queries see the keys of their document. Reads cu_seqlens once, on the host.

    cu_seqlens: (documents + 1,), the start of each document and the end of the last. length: the
    length of the packed sequence, if padding follows the last document. Padding sees no key.
    """
    check_integers("cu_seqlens", cu_seqlens, "(documents + 1)")
    bounds = on_host("cu_seqlens", cu_seqlens) or [0]
    if bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens is {bounds}; it must begin with 0 and never decrease")
    ends, last = cu_seqlens[1:].long(), bounds[-1]
    total = last if length is None else as_int_at_least("length", length, last, INT32_MAX)
    token = torch.arange(total, device=cu_seqlens.device)
    documents = torch.searchsorted(ends, token, right=True).int()
    return Mask(partial(_document, documents, last))


def chunked(size: int) -> Mask:
    """Queries see the keys of their chunk of `size`. With `& causal()` it is Llama 4's mask."""
    return Mask(partial(_chunked, as_int_at_least("size", size, 1)))


def dilated(steps: int, dilation: int) -> Mask:
    """Queries see keys at distances 0, 1, ..., `steps` times `dilation`, on both sides."""
    steps, dilation = as_int_at_least("steps", steps), as_int_at_least("dilation", dilation, 1)
    return Mask(partial(_dilated, steps, dilation))


def neighbourhood(
    shape: Sequence[int], window: Sequence[int], dilation: Sequence[int] | None = None
) -> Mask:
    """natten's neighbourhood attention on a grid of 1 to 3 dimensions, flattened row-major.

    A token sees the `window` of tokens around it. At a border the window moves inwards and keeps
    its size. dilation: the distance between neighbours, 1 if None.
    """
    shape, window = _sizes("shape", shape), _sizes("window", window)
    dilation = [1] * len(shape) if dilation is None else _sizes("dilation", dilation)
    if not 1 <= len(shape) <= 3 or not len(shape) == len(window) == len(dilation):
        raise ValueError(
            f"shape is {tuple(shape)}, window {tuple(window)} and dilation {tuple(dilation)}; all "
            "must have the same length, 1 to 3"
        )
    for size, width, step in zip(shape, window, dilation, strict=True):
        if width * step > size:
            raise ValueError(
                f"window times dilation is {width * step} along a dimension of {size}; it may be "
                f"at most {size}"
            )
    return Mask(partial(_neighbourhood, tuple(zip(shape, window, dilation, strict=True))))


def tree(parents: Tensor, context: int = 0) -> Mask:
    """Nodes of a tree see themselves, their ancestors, and `context` keys before the tree.

    For speculative decoding. parents: (nodes,): the index of each node's parent, which must be an
    earlier node, or -1 for a root. The host reads it once.
    """
    check_integers("parents", parents, "(nodes)")
    context = as_int_at_least("context", context)
    parent_of = on_host("parents", parents)
    ancestors = torch.eye(len(parent_of), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parent_of):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] is {parent}; it must be -1 or an earlier node")
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return Mask(partial(_tree, ancestors.to(parents.device), context))


def _both(first: MaskMod, second: MaskMod, *position: Tensor) -> Tensor:
    return first(*position) & second(*position)


def _either(first: MaskMod, second: MaskMod, *position: Tensor) -> Tensor:
    return first(*position) | second(*position)


def _not(mask_mod: MaskMod, *position: Tensor) -> Tensor:
    return ~mask_mod(*position)


def _causal(q_offset: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + q_offset >= kv


def _sliding_window(left: int, right: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv <= left) & (kv - q <= right)


def _prefix_lm(lengths: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) | (kv < lengths[b])


def _document(documents: Tensor, last: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (documents[q] == documents[kv]) & (q < last)


def _chunked(size: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q // size == kv // size


def _dilated(steps: int, dilation: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    distance = (q - kv).abs()
    return (distance <= steps * dilation) & (distance % dilation == 0)


def _neighbourhood(
    axes: tuple[tuple[int, int, int], ...], b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    """axes: the size, the window and the dilation of each dimension of the grid."""
    seen = None
    for size, width, step in reversed(axes):
        q_group, q_place = q % size % step, q % size // step
        kv_group, kv_place = kv % size % step, kv % size // step
        # The query's group has the `count` tokens whose index modulo the dilation is q_group.
        count = (size - q_group + step - 1) // step
        first = torch.minimum((q_place - width // 2).clamp(min=0), count - width)
        inside = (kv_place >= first) & (kv_place < first + width) & (q_group == kv_group)
        seen = inside if seen is None else seen & inside
        q, kv = q // size, kv // size
    assert seen is not None
    return seen


def _tree(ancestors: Tensor, context: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < context) | ancestors[q, (kv - context).clamp(min=0)]


def _sizes(name: str, values: object) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} is {value_text(values)}; it must be a sequence of ints")
    return [as_int_at_least(name, value, 1) for value in values]


def _check_function(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} is {value_text(value)}; it must be a mask_mod, a function")
