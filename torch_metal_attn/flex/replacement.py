"""`flex_replaced()`: run torch's own `flex_attention` on our kernels inside a `with` block.

Code refers to torch's function by many names and inside `torch.compile`, so while a block is open
the code object of torch's function is replaced by a call of ours.
"""

import threading
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from torch_metal_attn.flex.attention import flex_attention
from torch_metal_attn.integrations.sdpa_replacement import simulating
from torch_metal_attn.wording import type_text

_TORCH = torch_flex.flex_attention
_TORCH_CODE = _TORCH.__code__
# torch's original function, also while its code is replaced.
_original = types.FunctionType(
    _TORCH_CODE, _TORCH.__globals__, _TORCH.__name__, _TORCH.__defaults__, _TORCH.__closure__
)
_original.__kwdefaults__ = _TORCH.__kwdefaults__

_lock = threading.Lock()  # guards the open blocks and their counts
_open: list["FlexReplaced"] = []


class FlexReplaced:
    """The context of `flex_replaced()`.

    Attributes: replaced: number of calls inside it that ran on the kernels. left_alone: number of
        calls that torch ran, as their tensors are neither on mps nor on a simulated CPU.
    """

    def __init__(self) -> None:
        self.replaced = 0
        self.left_alone = 0

    def __enter__(self) -> "FlexReplaced":
        with _lock:
            _open.append(self)
            _TORCH.__code__ = _body.__code__
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                _TORCH.__code__ = _TORCH_CODE


def flex_replaced() -> FlexReplaced:
    """Return a context in which torch's `flex_attention` runs on our kernels, in every thread.

    This includes calls under any name, and `torch.compile(flex_attention)`. A model that was
    compiled before keeps its compiled code: call torch.compiler.reset() first. A call that our
    function refuses raises an error; nothing falls back to torch.
    """
    return FlexReplaced()


def dispatch(query: Any, *arguments: Any, **options: Any) -> Any:
    if not isinstance(query, Tensor):
        raise TypeError(f"query is {type_text(query)}; it must be a tensor")
    device = query.device.type
    ours = device == "mps" or (device == "cpu" and simulating())
    if not torch.compiler.is_dynamo_compiling():
        with _lock:
            for each in _open:
                each.replaced += ours
                each.left_alone += not ours
    function = flex_attention if ours else _original
    return function(query, *arguments, **options)


def _body(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """The new code of torch's function. It runs with torch's globals, so it imports `dispatch`."""
    from torch_metal_attn.flex.replacement import dispatch

    return dispatch(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )
