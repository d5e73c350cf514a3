"""CPU kernels run an op's shader if the simulator is on, else plain torch after the same checks."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from torch_metal_attn.runtime import session
from torch_metal_attn.runtime.refusals import python_kernel

_Plain = TypeVar("_Plain", bound=Callable[..., Any])


def cpu_kernel(name: str, check: Callable[..., None] | None = None) -> Callable[[_Plain], _Plain]:
    """Make a function the CPU kernel of op `name`. check: raises for values that shaders ignore."""

    def register(plain: _Plain) -> _Plain:
        def kernel(*arguments: Any, **options: Any) -> Any:
            check_values = partial(check, *arguments, **options) if check is not None else None
            if session.active():
                with session.raising(check_values):
                    return getattr(torch.ops.metal_attn_simulator, name)(*arguments, **options)
            getattr(torch.ops.metal_attn_explain, name)(*arguments, **options)
            if check_values is not None:
                check_values()
            return plain(*arguments, **options)

        python_kernel(f"metal_attn::{name}", "CPU")(kernel)
        return plain

    return register
