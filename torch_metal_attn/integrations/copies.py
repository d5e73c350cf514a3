"""Copies tensors whose layout the caller cannot change, such as those inside a model.

The ops refuse tensors whose rows are not contiguous. The adapters for transformers and diffusers
copy them, and `explain` shows the copies.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Called with a tensor's name and the tensor, before its copy; or with a remark and None.
listeners: list[Callable[[str, Tensor | None], None]] = []


def note(words: str) -> None:
    """Let `explain` show a remark below the next call."""
    if not torch.compiler.is_compiling():
        for listener in listeners:
            listener(words, None)


def with_contiguous_rows(name: str, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it if its rows are not contiguous."""
    if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return tensor
    if not torch.compiler.is_compiling():
        for listener in listeners:
            listener(name, tensor)
    return tensor.contiguous()
