"""Checks the arguments of flash-attn's functions and converts them for the ops.

Numbers may also be NumPy numbers, or tensors of one element, for which the host waits.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.runtime.refusals import invalid, not_implemented
from torch_metal_attn.wording import count_text, type_text, value_text

# The limit on each side; a negative number or None (flash-attn 4) means no limit.
Window = tuple[int | None, int | None]

NO_WINDOW = (-1, -1)

INT32_MAX = 2**31 - 1  # kernels count rows, heads and columns in int32
MAX_HEAD_DIM, MAX_VALUE_HEAD_DIM = 576, 512

# Positive normal float32 numbers are in _FLOAT32_MIN <= x < _FLOAT32_END.
_FLOAT32_MIN, _FLOAT32_END = 2.0**-126, 2.0**128

# A Python list takes 8 bytes per number, even if the tensor is expanded and has few numbers.
_MAX_ON_HOST = 2**27


def refuse_layout(name: str, tensor: Tensor) -> None:
    """Raise NotImplementedError for a nested tensor, and ValueError for a sparse one."""
    if tensor.is_nested:
        raise not_implemented(
            f"`{name}` is a nested tensor: nested tensors are not implemented, use "
            "flash_attn_varlen_func"
        )
    if tensor.layout != torch.strided:
        raise invalid(
            f"`{name}` has layout {tensor.layout}; it must be strided: call "
            f"`{name}`.to_dense() first"
        )


def refuse_dtensor(name: str, value: object) -> None:
    if is_dtensor(value):
        raise not_implemented(
            f"`{name}` is a DTensor, which is not implemented: pass `{name}`.to_local(), or call "
            "the function through torch.distributed.tensor.experimental.local_map"
        ) from None


def is_dtensor(value: object) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def refuse_gradient(name: str, number: object) -> None:
    """Raise NotImplementedError for a number that is a tensor and would lose its gradient."""
    if isinstance(number, Tensor) and number.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} requires grad, but it has no gradient here: detach it, or apply it to a "
            "tensor, as in q * scale"
        )


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        convert = isinstance(value, list) or hasattr(value, "__array__")
        how = f": pass torch.as_tensor({name})" if convert else ""
        raise TypeError(f"{name} is {type_text(value)}; it must be a tensor{how}")
    refuse_layout(name, value)
    _check_storage(name, value)


def _check_storage(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that extends past its storage; csrc/ checks this and torch's ops do not."""
    count = tensor.numel()
    if torch.compiler.is_compiling() or not isinstance(count, int) or count == 0:
        return
    try:
        size = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # tensors of torch.func's transforms have no storage
        return
    elements = tensor.storage_offset() + count
    if not tensor.is_contiguous():  # the sum takes several microseconds
        last = ((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        elements = tensor.storage_offset() + 1 + sum(last)
    if elements * tensor.itemsize > size:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, and a storage "
            f"of {size} bytes, which must hold {count_text(elements, 'element')}: it has been "
            "resized"
        )


def check_tensors(**values: object) -> None:
    for name, value in values.items():
        check_tensor(name, value)


def check_one_device(**tensors: Any) -> None:
    check_tensors(**tensors)
    (first, like), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != like.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first} on {like.device}; they must be on one "
                "device"
            )


def check_values(name: str, tensor: Tensor) -> None:
    check_tensor(name, tensor)
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta, where tensors have no values")


def is_readable_on_host(tensor: Tensor) -> bool:
    """True if the host can read a tensor's numbers without waiting for a device."""
    fake = torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor)
    return tensor.device.type == "cpu" and not fake


def check_indices(name: str, tensor: Tensor, layout: str, count: int, what: str) -> None:
    """Check for integers, and on the host also that they are in 0..count - 1."""
    check_integers(name, tensor, layout)
    if is_readable_on_host(tensor):
        for index in tensor[(tensor < 0) | (tensor >= count)][:1].tolist():
            raise ValueError(f"{name} has {index}; it must be in 0..{count - 1}, {what}")


def check_rank(name: str, tensor: Tensor, layout: str) -> None:
    """layout: such as "(B, L)", or "(B, L, ...)" with any dimensions after these."""
    check_tensor(name, tensor)
    more = tensor.dim() - layout.count(",") - 1
    if more != 0 and (more < -1 or not layout.endswith("...)")):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {layout}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")


def check_integers(name: str, tensor: Tensor, layout: str) -> None:
    check_rank(name, tensor, layout)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be int32 or int64")


def check_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check for one dtype, as flash-attn requires. Caches may have another."""
    dtype = q.dtype
    if k.dtype is dtype and v.dtype is dtype:
        return
    name, tensor = ("k", k) if k.dtype is not dtype else ("v", v)
    actual, wanted = (str(x.dtype).removeprefix("torch.") for x in (tensor, q))
    raise invalid(f"`{name}` has dtype {actual} and `q` {wanted}; they must be the same")


def check_packed(name: str, tensor: Tensor, layout: str) -> None:
    check_rank(name, tensor, layout)
    if tensor.shape[-3] != len(name):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {layout}")


def as_python_number(name: str, value: Any) -> Any:
    """A NumPy number or a tensor of one element as a Python number; else `value` itself."""
    if isinstance(value, Tensor):
        check_tensor(name, value)
    elif type(value).__module__ != "numpy":
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):  # several elements
        return value


def as_int(name: str, value: Any, allowed: str = "an int") -> Any:
    number = value if type(value) is int else as_python_number(name, value)
    if isinstance(number, bool) or not isinstance(number, int | torch.SymInt):
        raise TypeError(f"{name} is {value_text(value)}; it must be {allowed}")
    if type(number) is int and not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} is {value_text(number)}; it must fit int64")
    return number


def as_int_at_least(name: str, value: Any, minimum: int = 0, maximum: int = 2**63 - 1) -> Any:
    number = as_int(name, value)
    if number < minimum:
        raise ValueError(f"{name} is {number}; it must be at least {minimum}")
    if number > maximum:
        raise ValueError(f"{name} is {number}; it must be in {minimum}..{maximum}")
    return number


def on_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"device is {value_text(device)}; it must be a torch device") from None


def on_host(name: str, values: Any) -> Any:
    """The numbers of a tensor or NumPy array, for which the host waits; else `values` itself."""
    if isinstance(values, Tensor):
        check_values(name, values)
    if (count := math.prod(getattr(values, "shape", ()))) > _MAX_ON_HOST:
        raise ValueError(f"{name} has {count} numbers; it may have up to {_MAX_ON_HOST}")
    return values.tolist() if hasattr(values, "tolist") else values


def integers(name: str, values: Any) -> list[int]:
    """A sequence, or a tensor or NumPy array of one dimension, as Python ints."""
    sequence = on_host(name, values)
    if isinstance(sequence, str) or not isinstance(sequence, Iterable):
        raise TypeError(f"{name} is {value_text(values)}; it must be a sequence of ints")
    numbers = list(sequence)
    if all(type(value) is int for value in numbers):  # the fast path for very many tokens
        return numbers
    return [as_int(f"{name}[{i}]", value) for i, value in enumerate(numbers)]


def as_number(name: str, value: Any) -> Any:
    refuse_gradient(name, value)
    number = as_python_number(name, value)
    allowed = (int, float, torch.SymInt, torch.SymFloat)
    if isinstance(number, bool) or not isinstance(number, allowed):
        must = f"it must be a number{_for_mask(name, value)}"
        raise TypeError(f"{name} is {value_text(value)}; {must}")
    return as_op_number(number)


def as_op_number(number: Any) -> Any:
    """`number`; an int that does not fit int64 becomes a float."""
    if type(number) is int and not -(2**63) <= number < 2**63:
        if abs(number) < 2**1023:
            return float(number)
        return math.inf if number > 0 else -math.inf
    return number


def as_positive(name: str, value: Any) -> Any:
    """A number whose float32 is positive, normal and finite."""
    number = as_python_number(name, value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not _FLOAT32_MIN <= number < _FLOAT32_END:
        raise ValueError(
            f"{name} is {value_text(value)}; it must be a positive, finite number, in float32 too"
        )
    return number


def as_bool(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    number = as_python_number(name, value)
    if not isinstance(number, int) or number not in (0, 1):
        raise TypeError(f"{name} is {value_text(value)}; it must be a bool{_for_mask(name, value)}")
    return bool(number)


def _for_mask(name: str, value: object) -> str:
    """Advice for a mask passed as one of flash-attn's positional arguments; else ""."""
    is_mask = isinstance(value, Tensor) and value.dim() > 1 and name in ("causal", "dropout_p")
    return ": for a mask call scaled_dot_product_attention" if is_mask else ""


def window(window_size: Any) -> tuple[int, int]:
    """(left, right); -1 means no limit."""
    if type(window_size) is tuple and window_size == NO_WINDOW:
        return NO_WINDOW
    limits = on_host("window_size", window_size)
    if isinstance(limits, tuple | list) and len(limits) == 2:
        numbers = [as_python_number("window_size", limit) for limit in limits]
        if all(
            n is None or (isinstance(n, int | torch.SymInt) and not isinstance(n, bool))
            for n in numbers
        ):
            # A limit above every length has no effect, and might not fit the op's int64.
            left, right = (-1 if n is None or n >= 2**31 else n for n in numbers)
            return max(left, -1), max(right, -1)
    raise TypeError(
        f"window_size is {value_text(window_size)}; it must be two ints (or None), (left, right)"
    )


def first_options(softmax_scale: object, causal: object, window_size: Any) -> tuple[Any, ...]:
    """These options for the fast path, () if all are defaults; TypeError if it cannot take them."""
    if softmax_scale is None and causal is False and window_size == NO_WINDOW:
        return ()
    if type(causal) is not bool or (softmax_scale is not None and type(softmax_scale) is not float):
        raise TypeError
    left, right = window(window_size)
    # The op refuses causal with a right limit. In flash-attn, causal overrides the right limit.
    return softmax_scale, causal, left, -1 if causal else right


def only_given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def lengths_tensor(value: int | Tensor | None, q: Tensor) -> Tensor | None:
    """cache_seqlens as the ops take it."""
    if value is None or (isinstance(value, Tensor) and value.dim() > 0):
        return value
    length = as_int("cache_seqlens", value, "an int or a tensor")
    if not -(2**31) <= length < 2**31:
        raise ValueError(f"cache_seqlens is {length}; it must fit int32")
    return q.new_full((q.shape[0],), length, dtype=torch.int32)


def to_bhld(name: str, scale: Tensor | None) -> Tensor | None:
    """Scales of blocks, with heads before rows as in the cache; scales per head are unchanged."""
    if scale is None:
        return None
    check_tensor(name, scale)
    return scale.transpose(1, 2) if scale.dim() == 4 else scale
