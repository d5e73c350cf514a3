"""`metal_attn::flash_decode` in Python: its CPU kernel, and autograd of lists of keys alone."""

from functools import partial
from typing import Any

from torch import Tensor

from torch_metal_attn.ops import plain
from torch_metal_attn.ops.differentiation import undifferentiated
from torch_metal_attn.ops.fake import NAMESPACES
from torch_metal_attn.ops.flash_fwd import FlashFwdResult, register_cpu
from torch_metal_attn.ops.flash_fwd_autograd import differentiable
from torch_metal_attn.ops.refusals import python_kernel
from torch_metal_attn.reference import attention


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_splits: int = 0, **options: Any
) -> FlashFwdResult:
    """The reference, which does not depend on the number of splits."""
    return attention(q, k, v, **options)


def _register(namespace: str) -> None:
    own = partial(plain.instead, plain.flash_decode) if namespace == "metal_attn" else None
    advice = "use flash_fwd, or call it under torch.no_grad()"
    refused = undifferentiated(namespace, "flash_decode", advice, lambda _: {}, own)
    listed = differentiable(namespace, "flash_decode")

    def flash_decode(*arguments: Any, **options: Any) -> FlashFwdResult:
        kernel = refused if options.get("indices") is None else listed
        result: FlashFwdResult = kernel(*arguments, **options)
        return result

    python_kernel(f"{namespace}::flash_decode", "Autograd")(flash_decode)


register_cpu("flash_decode", _attention)
for _namespace in NAMESPACES:
    _register(_namespace)
