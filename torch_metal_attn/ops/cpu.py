"""CPU kernels: an op's shader if the simulator is on, else plain torch after the same checks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_metal_attn.runtime import session
from torch_metal_attn.runtime.refusals import python_kernel

_Plain = TypeVar("_Plain", bound=Callable[..., Any])


def cpu_kernel(
    name: str, checks: Callable[..., Any] = lambda *arguments, **options: None
) -> Callable[[_Plain], _Plain]:
    """Make a function what op `name` runs on CPU tensors while the simulator is off.

    checks: raises for values of tensors that the shader would only skip.
    """

    def register(plain: _Plain) -> _Plain:
        def kernel(*arguments: Any, **options: Any) -> Any:
            getattr(torch.ops.metal_attn_explain, name)(*arguments, **options)
            checks(*arguments, **options)
            if not session.active():
                return plain(*arguments, **options)
            with session.raising():
                return getattr(torch.ops.metal_attn_simulator, name)(*arguments, **options)

        python_kernel(f"metal_attn::{name}", "CPU")(kernel)
        return plain

    return register
