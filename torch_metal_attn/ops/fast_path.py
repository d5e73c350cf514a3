"""`metal_attn_fast`: the ops for plain calls, which are neither differentiated nor traced.

These ops have few arguments and no Autograd kernel, as both cost time in each call. They refuse all
other calls. The public functions then call the ops of `metal_attn`, whose errors give the reason.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from torch_metal_attn.runtime.refusals import python_kernel

_OPS = torch.ops.metal_attn
_NAMES = ("flash_fwd", "flash_decode", "sdpa", "flash_attn", "flash_attn_cached", "flash_attn_step")

# `_op` avoids OpOverload, whose Python frame costs time. These ops are neither traced nor wrapped.
flash_fwd, flash_decode, sdpa, flash_attn, flash_attn_cached, _flash_attn_step = (
    getattr(torch.ops.metal_attn_fast, name).default._op for name in _NAMES
)

# The keyword arguments that these ops share, in this order.
FIRST_OPTIONS = ("softmax_scale", "causal", "window_size_left", "window_size_right")

_FIRST = frozenset(FIRST_OPTIONS)

# Types of errors with which an op refuses a call. All other errors are failures.
_REFUSALS = frozenset((IndexError, NotImplementedError, RuntimeError, TypeError, ValueError))


def is_usable(*tensors: Tensor) -> bool:
    """True if a plain op may run a call with these tensors, which must be all of the call."""
    if (
        is_compiling()
        or _is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        # Transforms and modes must see the ops that have derivatives.
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _get_tracing_state() is not None
    ):
        return False
    differentiable = is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor or (differentiable and tensor.requires_grad):
            return False
    return True


def refused(error: Exception) -> bool:
    """True if an op refused a call. The ops of `metal_attn` then give the reason."""
    return type(error) in _REFUSALS


def flash_attn_step(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any
) -> Tensor:
    """Increment the caches' versions for autograd, and run the op, which writes the caches."""
    increment_version((k_cache, v_cache))
    out: Tensor = _flash_attn_step(q, k, v, k_cache, v_cache, *options)
    return out


def try_call(op: Any, values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a plain op with these arguments; None if the call is not plain."""
    if len(values) == 3 and _FIRST.issuperset(options) and is_usable(*values):
        try:
            return op(*values, **options)
        except Exception as error:
            if not refused(error):
                raise
    return None


def call_bhld(
    op: torch._ops.OpOverload, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """out, (B, L, H, D) or packed like the arguments, and the log-sum-exp."""
    out, lse = op(swapped(q), swapped(k), swapped(v), **options)
    return swapped(out), lse


def swapped(x: Tensor) -> Tensor:
    """(B, L, H, D) as (B, H, L, D) and vice versa; packed rows are unchanged."""
    return x.transpose(1, 2) if x.dim() == 4 else x


# The CPU kernels, which call the ops of `metal_attn`. The mps kernels are in
# csrc/ops/decode/fast_path.h.


def _first(*values: Any) -> dict[str, Any]:
    return dict(zip(FIRST_OPTIONS, values, strict=False))


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    torch._check_value(
        q.dim() == 4 and k.shape == v.shape and q.size(1) == k.size(1) and q.dtype == k.dtype
    )
    options = {"causal": True, "q_offset": 0} if causal else {}
    out: Tensor = _OPS.flash_fwd(q, k, v, softmax_scale=softmax_scale, **options)[0]
    return out


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, *first: Any) -> Tensor:
    torch._check_value(q.dtype == k.dtype == v.dtype)
    return call_bhld(_OPS.flash_fwd.default, q, k, v, **_first(*first))[0]


def _flash_attn_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *first: Any,
) -> Tensor:
    options = _first(*first) | {"seqused_k": seqused_k, "block_table": block_table}
    return call_bhld(_OPS.flash_decode.default, q, k, v, **options)[0]


def _step(*values: Any) -> Tensor:
    arguments = dict(zip(_STEP_NAMES, values, strict=False))
    rows = [arguments.pop(name).transpose(1, 2) for name in _STEP_NAMES[:5]]
    out: Tensor = _OPS.decode_step(*rows, **arguments)[0]
    return out.transpose(1, 2)


_STEP_NAMES = [a.name for a in torch.ops.metal_attn_fast.flash_attn_step.default._schema.arguments]

_CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "flash_fwd": lambda q, k, v, *first: _OPS.flash_fwd(q, k, v, **_first(*first)),
    "flash_decode": lambda q, k, v, *first: _OPS.flash_decode(q, k, v, **_first(*first)),
    "sdpa": _sdpa,
    "flash_attn": _flash_attn,
    "flash_attn_cached": _flash_attn_cached,
    "flash_attn_step": _step,
}


def _below(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def below(*values: Any) -> Any:
        # The caller has already incremented the versions of written tensors.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return kernel(*values)

    return below


for _name, _kernel in _CPU_KERNELS.items():
    python_kernel(f"metal_attn_fast::{_name}", "CPU")(_below(_kernel))
