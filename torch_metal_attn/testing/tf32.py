"""torch's products with operands rounded to TF32. If TF32 is allowed, they judge float32."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from torch_metal_attn.runtime.tensor_tiles import tf32_allowed

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
_LOST = 13  # bits of a float32's significand that TF32 drops
UNIT_ROUNDOFF = 2**-11


def rounded_to_tf32(x: Tensor) -> Tensor:
    """float32 rounded to the nearest number of 11 significant bits, ties to even."""
    bits = x.contiguous().view(torch.int32)
    half_minus_one = (1 << (_LOST - 1)) - 1
    up = bits + half_minus_one + ((bits >> _LOST) & 1)
    finite = (up & -(1 << _LOST)).view(torch.float32)
    return torch.where(x.isfinite(), finite, x)


class _Tf32Products(TorchDispatchMode):
    """A block in which torch rounds the operands of float32 products and their gradients."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS and args[0].dtype == torch.float32:
            args = tuple(map(rounded_to_tf32, args))
        return func(*args, **(kwargs or {}))


def tf32_rounding(dtype: torch.dtype) -> float:
    """The unit roundoff of operands of `dtype` in products; 0 if they are not rounded."""
    return UNIT_ROUNDOFF if dtype == torch.float32 and tf32_allowed() else 0.0


@contextmanager
def as_multiplied() -> Iterator[None]:
    """A block in which torch multiplies float32 as the kernels do: in TF32 if it is allowed."""
    if tf32_allowed():
        # The mode does not see products inside fused kernels.
        with sdpa_kernel(SDPBackend.MATH), _Tf32Products():
            yield
    else:
        yield
