"""torch's `scaled_dot_product_attention` on `metal_attn::flash_fwd`.

Arguments of any shape that torch supports become views (B, H, L, D) for the op, or raise.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Never

from torch_metal_attn.call import philox
from torch_metal_attn.call.arguments import (
    as_op_number,
    as_python_number,
    refuse_gradient,
    refuse_layout,
)
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.call.keywords import check_keywords, without_unknown
from torch_metal_attn.ops import fast_path
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.quantisation import ELEMENTS
from torch_metal_attn.runtime import extension
from torch_metal_attn.runtime.refusals import as_value_errors
from torch_metal_attn.wording import count_text, type_text, value_text

# The names of the op's arguments here, for errors.
NAMES = ArgumentNames({"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"})


class Arguments(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@without_unknown
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Never,
) -> Tensor:
    """Attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (..., Hq, Lq, D) with any number of leading dimensions, or none; float32, float16 or
            bfloat16; D up to 576.
        key: (..., Hkv, Lk, D); leading dimensions broadcast against those of query and value.
        value: (..., Hkv, Lk, Dv); Dv up to 512.
        attn_mask: broadcastable to (..., Hq, Lq, Lk), with any strides. Bool: False masks the key
            out. Floating, in float32 or query's dtype: added to the scores. Or
            torch.nn.attention.bias.causal_upper_left(Lq, Lk) or causal_lower_right(Lq, Lk), which
            the kernel computes without a mask.
        dropout_p: probability to drop a weight, in 0..1. The random numbers come from torch's
            default generator of query's device, but other weights are dropped than by torch.
        is_causal: query i sees key j only if j <= i (the diagonal is aligned top-left).
        scale: factor of the scores; D ** -0.5 if None.
        enable_gqa: let Hkv be a divisor of Hq. Without it the head dimension broadcasts like any
            other.

    Returns:
        (..., Hq, Lq, Dv). As in torch, autocast casts inputs and result to its dtype.

    Rows in which every key is masked out give the same as torch 2.13 on the CPU (its fused and its
    math backend, all three dtypes): 0 if masked by False or -inf, NaN if masked by NaN or +inf. The
    dtype's lowest finite number does not mask: it is added to the scores. In float32 and bfloat16
    every sum is that number, so a row of this number alone gives the mean of the values. In float16
    (-65504) the sums still differ, and such a row gives roughly the unmasked result.

    Leading dimensions are merged into the batch or the heads as views. Nothing is copied, except
    by autocast.

    In long calls, blocks of keys that a bool attn_mask hides from a tile of queries are skipped.
    Lists of the other blocks take about 1/512 of the mask's bytes while the call runs.

    Gradients of query, key, value and an additive attn_mask are computed in linear memory and have
    the same bits every time. If the incoming gradient is not contiguous in its last dimension (as
    after `sum()`), it is copied first.

    Raises:
        RuntimeError: where torch raises: attn_mask together with is_causal (which torch's
            documentation forbids, and its CPU kernel accepts), fewer than two dimensions, dtypes
            that differ, a mask of the wrong dtype or shape, a CausalBias for other lengths, a
            dropout_p outside 0..1, heads or leading dimensions that do not broadcast.
        NotImplementedError: enable_gqa with different numbers of key and value heads; nested
            tensors.
        TypeError: an argument has the wrong type.
        ValueError: a CausalBias together with is_causal; strides, dtypes and sizes without a
            kernel; leading dimensions that cannot be merged as a view. The message says what to
            call.
    """
    if unknown:
        check_keywords("scaled_dot_product_attention", unknown)
    if attn_mask is None and enable_gqa is False and type(dropout_p) is float and dropout_p == 0.0:
        out = _run_without_plan(query, key, value, is_causal, scale)
        if out is not None:
            return out
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return plan(Arguments(*arguments)).run()


def _run_without_plan(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Tensor | None:
    """Run a plain call without `plan`, which takes time; None if the op refuses the call."""
    if not (
        type(is_causal) is bool
        and (scale is None or type(scale) is float)
        and fast_path.is_usable(query, key, value)
        and query.dim() == 4
    ):
        return None
    try:
        out: Tensor = (
            fast_path.sdpa(query, key, value)
            if scale is None and is_causal is False
            else fast_path.sdpa(query, key, value, scale, is_causal)
        )
        return out
    except Exception as error:
        if fast_path.refused(error):
            return None
        raise


@dataclass(frozen=True)
class Problem:
    """A call that the op supports: operands (B, H, L, D), mask broadcastable to (B, H, Lq, Lk)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    q_offset: int | None  # the key on query 0's diagonal, 0 for top-left; None: bottom-right
    scale: float | None
    dropout_p: float
    leading: tuple[int, ...]  # the result's shape without the last two dimensions

    def run(self) -> Tensor:
        """Run the op, with torch's names of arguments in errors."""
        op = torch.ops.metal_attn.flash_fwd
        operands, options = self._arguments(
            philox.draw_rng_state(self.dropout_p, self.query.device)
        )
        if torch.compiler.is_compiling():
            out = op(*operands, **options)[0]
        else:
            out = NAMES.run(op, operands, options)[0]
        whole: Tensor = out.view(*self.leading, *out.shape[-2:])
        return whole

    def run_or_refusal(self) -> tuple[Tensor, None] | tuple[None, str]:
        try:
            return self.run(), None
        except ValueError:
            reason = self.refusal()
            if reason is None:
                raise
            return None, reason

    def refusal(self) -> str | None:
        """The message of the ValueError that `run` would raise, or None."""
        try:
            self.launches()
        except ValueError as error:
            return NAMES.text(str(error))
        return None

    def launches(self) -> list[dict[str, Any]]:
        """The launches of the op. Raises ValueError with the op's names of arguments."""
        # Any state gives the same launches, and drawing one would advance the generator.
        rng_state = self.query.new_zeros(2, dtype=torch.int64) if self.dropout_p else None
        operands, options = self._arguments(rng_state)
        with as_value_errors():
            recorded = torch.ops.metal_attn_explain.flash_fwd(*operands, **options)
            return extension.launches(recorded)

    def _arguments(self, rng_state: Tensor | None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        options = {
            "softmax_scale": self.scale,
            "causal": self.is_causal,
            "q_offset": self.q_offset,
            "attn_mask": self.attn_mask,
            "dropout_p": self.dropout_p,
            "rng_state": rng_state,
        }
        return (self.query, self.key, self.value), options


def plan(arguments: Arguments) -> Problem:
    """The op's arguments for a call, or its error. The op checks large sizes and numbers."""
    for name in ("dropout_p", "scale"):
        value = getattr(arguments, name)
        refuse_gradient(name, value)
        number: Any = as_python_number(name, value)
        number = int(number) if isinstance(number, bool) else number  # like torch
        arguments = arguments._replace(**{name: as_op_number(number)})
    _check_types(arguments)
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    query, key, value = autocast(query, key, value)
    q_offset = 0 if is_causal else None
    causal_bias: Any = attn_mask if is_causal_bias(attn_mask) else None
    if causal_bias is not None:
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        attn_mask, is_causal = None, True
        q_offset = 0 if causal_bias.variant.name == "UPPER_LEFT" else None
    if attn_mask is not None:
        (attn_mask,) = autocast(attn_mask)
    _check_as_torch(query, key, value, attn_mask, dropout_p, is_causal)
    _check_limits(query, key, value, attn_mask)
    if causal_bias is not None:
        q_length, k_length = query.shape[-2], key.shape[-2]
        if (causal_bias.seq_len_q, causal_bias.seq_len_kv) != (q_length, k_length):
            raise RuntimeError(
                f"attn_mask is a CausalBias of {count_text(causal_bias.seq_len_q, 'query')} and "
                f"{count_text(causal_bias.seq_len_kv, 'key')}; query has a length of {q_length} "
                f"and key of {k_length}"
            )

    batch, heads = _leading_shape(query, key, value, enable_gqa)
    has_heads = max(query.dim(), key.dim(), value.dim()) > 2
    leading = (*batch, heads[0]) if has_heads else ()
    if attn_mask is not None:
        _check_mask_shape(attn_mask, (*leading, query.shape[-2], key.shape[-2]))
    q, k, v, mask = _fold(query, key, value, attn_mask, batch, heads)
    return Problem(q, k, v, mask, is_causal, q_offset, scale, dropout_p, leading)


def is_causal_bias(attn_mask: object) -> bool:
    """True for torch's CausalBias; does not import its module, which takes seconds."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


# The types of each argument, and their name in errors. torch.compile of torch 2.10 cannot trace
# unions of types.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("query", "key", "value"), ((Tensor,), "a tensor")),
    "attn_mask": ((Tensor, type(None)), "a tensor or None"),
    "dropout_p": ((int, float), "a number"),
    "is_causal": ((bool,), "a bool"),
    "scale": ((int, float, torch.SymInt, torch.SymFloat, type(None)), "a number or None"),
    "enable_gqa": ((bool,), "a bool"),
}


def _check_types(arguments: Arguments) -> None:
    named: dict[str, object] = arguments._asdict()
    for name, value in named.items():
        allowed, wanted = _TYPES[name]
        if not isinstance(value, allowed):
            actual = type_text(value) if "tensor" in wanted else value_text(value)
            if name == "is_causal" and isinstance(value, Tensor):
                wanted += ": pass a mask as attn_mask"
            raise TypeError(f"{name} is {actual}; it must be {wanted}")


def _check_as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> None:
    if attn_mask is not None and is_causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, but got "
            f"query.dim: {query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    for attribute, what in (("dtype", "dtype"), ("device", "device type")):
        of_q, of_k, of_v = (getattr(x, attribute) for x in (query, key, value))
        if not (of_q == of_k == of_v):
            raise RuntimeError(
                f"Expected query, key, and value to have the same {what}, but got "
                f"query.{attribute}: {of_q} key.{attribute}: {of_k} and value.{attribute}: {of_v} "
                "instead."
            )
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise RuntimeError(
                "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                f"attn_mask.dtype: {attn_mask.dtype} and query.dtype: {query.dtype} instead."
            )
        if attn_mask.device != query.device:
            raise RuntimeError(
                f"Expected attn_mask on query's device, but got attn_mask.device: "
                f"{attn_mask.device} and query.device: {query.device} instead."
            )
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")


def _check_limits(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    """Some of the op's checks, so that errors show the user's shapes, also in torch.compile."""
    tensors = [("query", query), ("key", key), ("value", value)]
    for name, tensor in [*tensors, ("attn_mask", attn_mask)]:
        if tensor is not None:
            refuse_layout(name, tensor)
    if query.dtype not in ELEMENTS:
        raise ValueError(f"query has dtype {query.dtype}; it must be float32, float16 or bfloat16")
    for name, tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; the last "
                f"stride must be 1: call {name}.contiguous() first"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key has a head dim of {key.shape[-1]} and query of {query.shape[-1]}; they must be "
            "equal"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"value has a length of {value.shape[-2]} and key of {key.shape[-2]}; they must be "
            "equal"
        )


def _check_mask_shape(mask: Tensor, scores: tuple[int, ...]) -> None:
    if mask.dim() > len(scores) or any(
        size not in (1, whole)
        for size, whole in zip(reversed(mask.shape), reversed(scores), strict=False)
    ):
        raise RuntimeError(
            f"attn_mask has shape {tuple(mask.shape)}; it must broadcast to {scores}, the shape "
            "of the scores"
        )


def _leading_shape(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """The dimensions before the heads, broadcast, and the heads of query, key and value."""
    operands = (query, key, value)
    query_heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in operands)
    try:
        batch = tuple(torch.broadcast_shapes(*[tensor.shape[:-3] for tensor in operands]))
        if not enable_gqa:
            (heads,) = torch.broadcast_shapes((query_heads,), (key_heads,), (value_heads,))
            return batch, (heads, heads, heads)
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in operands)
        grouped = key_heads > 0 and query_heads % key_heads == 0 and key_heads == value_heads
        advice = "" if enable_gqa or not grouped else "; for grouped heads pass enable_gqa=True"
        raise RuntimeError(
            f"query, key and value have shapes {shapes}; all but their last two dimensions must "
            f"broadcast{advice}"
        ) from None
    if min(tensor.dim() for tensor in operands) < 3:
        raise RuntimeError("enable_gqa needs query, key and value of at least 3 dimensions")
    if not all(count > 0 and query_heads % count == 0 for count in (key_heads, value_heads)):
        raise RuntimeError(
            "Number of heads in key and value must divide the number of heads in query, "
            f"but got query: {query_heads} key: {key_heads} and value: {value_heads}."
        )
    if key_heads != value_heads and 1 not in (key_heads, value_heads):
        raise NotImplementedError(
            f"enable_gqa with {key_heads} key heads and {value_heads} value heads: the numbers "
            "must be equal; repeat the heads of key or value with repeat_interleave"
        )
    kv_heads = max(key_heads, value_heads)
    return batch, (query_heads, kv_heads, kv_heads)


def _fold(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    batch: tuple[int, ...],
    heads: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views (B, H, L, D). B merges as many leading dimensions as possible, and H the rest."""
    named = {"query": query, "key": key, "value": value}
    views = {
        name: x.expand((*batch, count, *x.shape[-2:]))
        for (name, x), count in zip(named.items(), heads, strict=True)
    }
    leading = (*batch, heads[0])

    def folded_at(split: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        for name, view in views.items():
            yield name, view, _folded(view, split)
        if attn_mask is not None:
            mask = attn_mask[(None,) * (len(leading) + 2 - attn_mask.dim())]
            mask = _repeated(mask, split, leading)
            yield "attn_mask", mask, _folded(mask, split)

    for split in reversed(range(len(batch) + 1)):
        parts = [x for _, _, x in folded_at(split) if x is not None]
        if len(parts) == len(views) + (attn_mask is not None):
            q, k, v, *mask = parts
            return q, k, v, mask[0] if mask else None
    for name, view, folded in folded_at(len(batch)):
        if folded is None:
            x = named.get(name, attn_mask)
            assert x is not None
            raise ValueError(_unfoldable(name, x, tuple(view.shape), batch))
    raise ValueError(
        f"query, key, value and attn_mask cannot all have their leading dimensions {batch} merged "
        "in the same way without a copy: call .contiguous() on each first"
    )


def _repeated(mask: Tensor, split: int, leading: tuple[int, ...]) -> Tensor:
    """Expand a mask to `leading` before `split` and after it, unless all sizes there are 1."""
    shape = list(mask.shape)
    for dims in (range(split), range(split, len(leading))):
        if any(mask.shape[dim] != 1 for dim in dims):
            for dim in dims:
                shape[dim] = leading[dim]
    return mask.expand(shape)


def _folded(tensor: Tensor, split: int) -> Tensor | None:
    """A view that merges the dimensions before `split`, and those after it; None if impossible."""
    rows = tensor.dim() - 2
    if tensor.numel() > 0 and not (
        _merges(tensor, range(split)) and _merges(tensor, range(split, rows))
    ):
        return None
    shape = tensor.shape
    return tensor.view(math.prod(shape[:split]), math.prod(shape[split:rows]), *shape[rows:])


def _merges(tensor: Tensor, dims: range) -> bool:
    """True if a view of `tensor` can merge `dims` into one."""
    inner: int | None = None  # the next inner dimension, whose stride must agree
    for dim in reversed(dims):
        if tensor.shape[dim] == 1:
            continue
        if inner is not None and tensor.stride(dim) != tensor.shape[inner] * tensor.stride(inner):
            return False
        inner = dim
    return True


def _unfoldable(name: str, tensor: Tensor, shape: tuple[int, ...], batch: tuple[int, ...]) -> str:
    what = f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot "
    if tensor.shape == shape:
        return (
            f"{what}have its leading dimensions {batch} merged into one without a copy: call "
            f"{name}.contiguous() first"
        )
    return (
        f"{what}be viewed as {shape} with its leading dimensions {batch} merged into one without a "
        f"copy: call {name}.expand({', '.join(map(str, shape))}).contiguous() first"
    )
