"""Fake kernels: the shapes of an op's results, after the checks of csrc/ on tensors without data.

torch.compile and meta tensors use these kernels. The checks and errors are those of real calls. If
a size is symbolic, the checks run only in the real call.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_metal_attn.ops.differentiation import by_name
from torch_metal_attn.ops.view_offsets import with_offset_lowering
from torch_metal_attn.runtime.refusals import as_value_errors, invalid

_Fake = TypeVar("_Fake", bound=Callable[..., Any])
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def register_fake(*names: str) -> Callable[[_Fake], _Fake]:
    """Make a function the fake kernel of these ops, after their checks."""

    def register(results: _Fake) -> _Fake:
        for name in names:
            torch.library.register_fake(f"metal_attn::{name}")(_checked(name, results))
        return results

    return register


def _checked(name: str, results: Callable[..., Any]) -> Callable[..., Any]:
    def fake(*arguments: Any, **options: Any) -> Any:
        check(name, arguments, options)
        return results(*arguments, **options)

    mutates = getattr(torch.ops.metal_attn, name).default._schema.is_mutable
    return with_offset_lowering(fake) if mutates else fake


def check(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run op `name`'s checks that need no data."""
    tensors = dict(_tensors(name, arguments, options))
    if any(map(_symbolic, (*arguments, *options.values(), *tensors.values()))):
        return
    _check_one_device(tensors)
    # With dispatch on, the meta tensors would become FakeTensors and call this fake kernel again.
    with as_value_errors(), torch._C._DisableTorchDispatch():
        getattr(torch.ops.metal_attn_explain, name)(
            *map(_without_data, arguments),
            **{option: _without_data(value) for option, value in options.items()},
        )


def _tensors(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The op's tensors by the names of its arguments."""
    op = getattr(torch.ops.metal_attn, name).default
    for argument, value in by_name(op, arguments, options).items():
        if isinstance(value, Tensor):
            yield argument, value
        elif isinstance(value, list | tuple):
            yield from ((f"{argument}[{i}]", x) for i, x in enumerate(value) if torch.is_tensor(x))


def _symbolic(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, _SYMBOLS) for size in sizes)


def _check_one_device(tensors: dict[str, Tensor]) -> None:
    """A check of csrc/ that must run here: csrc/ gets all of these tensors on meta."""
    first = "q" if "q" in tensors else next(iter(tensors))
    device = tensors[first].device
    for name, x in tensors.items():
        if x.device != device:
            raise invalid(
                f"`{name}` is on {x.device} and `{first}` on {device}; they must be on one device"
            )


def _without_data(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_data(x) for x in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# Ops that return nothing.
register_fake("append_kv", "copy_pages", "merge_state_", "rope_")(lambda *_, **options: None)
