"""Checks of flash_fwd, flash_varlen_fwd, flash_decode and their gradients against float64.

Each check takes a device and the parameters that a report shows, runs on the device, and compares
on the CPU.
"""

import contextvars
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.reference import attention, varlen_attention
from torch_metal_attn.runtime import tensor_tiles
from torch_metal_attn.runtime.device import memory_of
from torch_metal_attn.runtime.tensor_tiles import allow_tf32
from torch_metal_attn.testing.judge import (
    ROUNDING,
    Measure,
    Skipped,
    near,
    near_statistic,
    normal,
    on,
    same_bits,
    worst_of,
)
from torch_metal_attn.testing.oracle import (
    largest_terms,
    rounding_attention,
    sink_rounding,
    torch_error,
    torch_gradient_errors,
)
from torch_metal_attn.testing.tf32 import as_multiplied, tf32_rounding
from torch_metal_attn.tools.verify.problems import FEATURES, Sizes, cached, laid_out

_ADDED = ("attn_bias", "attn_mask", "alibi_slopes", "learnable_sink")


def check_forward(
    device: torch.device,
    *,
    dtype: torch.dtype,
    op: str = "flash_fwd",
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_length: int = 33,
    kv_length: int = 65,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    feature: str = "plain",
    layout: str = "contiguous",
    cache: str = "",
    values_in_keys: bool = False,
    poison: str = "",
    num_splits: int | None = None,
) -> list[Measure]:
    """`flash_fwd`, or `flash_decode` if num_splits is given.

    values_in_keys: v is the first columns of k, as in MLA. poison: where NaN is: "seen" by the
    queries of one KV head, or "behind" the lengths of the feature.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = Sizes(batch, heads, kv_heads, q_length, kv_length, head_dim, v_head_dim)
    q, k, v = sizes.operands(dtype)
    if values_in_keys:
        v = k[..., :v_head_dim]
    options = FEATURES[feature](sizes)
    if poison == "seen":
        k[0, 0, kv_length // 2, 0] = math.nan
    elif poison:
        for b, used in enumerate(options["seqused_k"].tolist()):
            k[b, :, used:], v[b, :, used:] = math.nan, math.nan
    held = cached(k, v, cache)
    given = options if num_splits is None else options | {"num_splits": num_splits}
    place = {n: x for n, x in held.options.items() if n not in options}
    found, found_lse = _op(op)(
        laid_out(q.to(device), layout),
        *_on(device, held.k, held.v, layout if not cache else "contiguous", values_in_keys),
        **on(device, given | place),
    )
    exact, exact_lse = attention(
        q, held.exact_k, held.exact_v, **options, compute_dtype=torch.float64
    )
    with as_multiplied():
        composed, _ = attention(q, held.exact_k, held.exact_v, **options)
    error = max(torch_error(q, held.exact_k, held.exact_v, options), worst_of([(composed, exact)]))
    # Rows that were rotated or dequantised are rounded before the product.
    rounded = bool(cache) or "rotary" in feature
    rounding = max(1e-5, 4 * ROUNDING[dtype] if rounded else 0.0, 4 * tf32_rounding(dtype))
    return [
        near("out", found, exact, error),
        near_statistic("softmax_lse", found_lse, exact_lse, rounding),
    ]


def check_matrix_tiles(
    device: torch.device, *, dtype: torch.dtype, feature: str = "plain", head_dim: int = 64
) -> list[Measure]:
    """`check_forward` on 8x8 tiles, where the GPU has tensor tiles too."""
    with tensor_tiles.off():
        return check_forward(device, dtype=dtype, feature=feature, head_dim=head_dim)


def check_matrix_gradients(
    device: torch.device, *, dtype: torch.dtype, feature: str = "plain"
) -> list[Measure]:
    """`check_backward` on 8x8 tiles, where the GPU has tensor tiles too."""
    with tensor_tiles.off():
        return check_backward(device, dtype=dtype, feature=feature)


def check_tf32(
    device: torch.device, *, dtype: torch.dtype, feature: str = "plain", head_dim: int = 64
) -> list[Measure]:
    """`check_forward` where TF32 is allowed."""
    with allow_tf32():
        return check_forward(device, dtype=dtype, feature=feature, head_dim=head_dim)


def check_tf32_gradients(
    device: torch.device, *, dtype: torch.dtype, feature: str = "plain", head_dim: int = 64
) -> list[Measure]:
    """`check_backward` where TF32 is allowed."""
    with allow_tf32():
        return check_backward(device, dtype=dtype, feature=feature, head_dim=head_dim)


def check_packed(
    device: torch.device,
    *,
    dtype: torch.dtype,
    q_lengths: tuple[int, ...],
    kv_lengths: tuple[int, ...],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    causal: bool = False,
    window: int = -1,
    backward: bool = False,
) -> list[Measure]:
    """`flash_varlen_fwd` of sequences with these lengths; with backward also its gradients."""
    options: dict[str, Any] = {"causal": causal, "window_size_left": window}
    q = normal(sum(q_lengths), heads, head_dim, seed=1, dtype=dtype)
    k, v = (normal(sum(kv_lengths), kv_heads, head_dim, seed=s, dtype=dtype) for s in (2, 3))
    bounds = [torch.tensor([0, *n]).cumsum(0).int() for n in (q_lengths, kv_lengths)]
    packing = (*bounds, max(q_lengths), max(kv_lengths))
    dout = normal(*q.shape, seed=4, dtype=dtype)

    def run(
        attend: Callable[..., Any], *operands: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        where = operands[0].device
        moved = [x.to(where) if isinstance(x, Tensor) else x for x in packing]
        leaves = [x.detach().clone().requires_grad_(backward) for x in operands]
        out, lse = attend(*leaves, *moved, **options, **more)
        grads: list[Tensor] = []
        if backward:
            grads = list(torch.autograd.grad(out, leaves, dout.to(where, out.dtype)))
        return out.detach(), lse.detach(), grads

    found = run(torch.ops.metal_attn.flash_varlen_fwd, *(x.to(device) for x in (q, k, v)))
    exact = run(varlen_attention, *(x.double() for x in (q, k, v)), compute_dtype=torch.float64)
    composed = run(varlen_attention, q, k, v)
    rows = (bounds[0].tolist(), bounds[1].tolist())
    sequences = [
        (_sequence(q, rows[0], b), _sequence(k, rows[1], b), _sequence(v, rows[1], b))
        for b in range(len(q_lengths))
        if q_lengths[b] and kv_lengths[b]
    ]
    douts = [_sequence(dout, rows[0], b) for b, n in enumerate(q_lengths) if n and kv_lengths[b]]
    alone = [torch_error(*operands, options) for operands in sequences]
    measures = [
        near("out", found[0], exact[0], max([*alone, worst_of([(composed[0], exact[0])])])),
        near_statistic("softmax_lse", found[1], exact[1], 1e-5),
    ]
    if backward:
        errors = [
            torch_gradient_errors(*operands, own, options)
            for operands, own in zip(sequences, douts, strict=True)
        ]
        errors.append([worst_of([pair]) for pair in zip(composed[2], exact[2], strict=True)])
        torchs = [max(each) for each in zip(*errors, strict=True)]
        terms = largest_terms(q, k, v, dout, head_dim**-0.5)
        measures += _gradient_measures(found[2], exact[2], torchs, terms)
    return measures


def _sequence(x: Tensor, ends: list[int], b: int) -> Tensor:
    """The rows of sequence b in packed rows (T, H, D), as (1, H, L, D)."""
    return x[None, ends[b] : ends[b + 1]].transpose(1, 2)


def _gradient_measures(
    found: Sequence[Tensor],
    exact: Sequence[Tensor],
    torchs: Sequence[float],
    terms: Sequence[float],
) -> list[Measure]:
    """Measures of dq, dk and dv, which are sums of terms that may cancel."""
    each = zip(("dq", "dk", "dv"), found, exact, torchs, terms, strict=False)
    return [
        near(name, gradient, truth, error, ROUNDING[torch.float32] * term)
        for name, gradient, truth, error, term in each
    ]


def check_backward(
    device: torch.device,
    *,
    dtype: torch.dtype,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_length: int = 33,
    kv_length: int = 65,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    feature: str = "plain",
    layout: str = "contiguous",
    through_lse: bool = False,
) -> list[Measure]:
    """The gradients of q, k, v and of what the feature adds to the scores.

    through_lse: the loss also depends on softmax_lse.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = Sizes(batch, heads, kv_heads, q_length, kv_length, head_dim, v_head_dim)
    q, k, v = sizes.operands(dtype)
    options = FEATURES[feature](sizes)
    dout = normal(*q.shape[:3], v_head_dim, seed=8, dtype=dtype)
    dlse = normal(*q.shape[:3], seed=9) if through_lse else None
    added = [n for n in _ADDED if n in options and options[n].is_floating_point()]

    def gradients(attend: Callable[..., Any], dtype: torch.dtype, where: torch.device) -> Any:
        leaves = [x.to(where, dtype).requires_grad_() for x in (q, k, v)]
        leaves = [laid_out(x.detach(), layout).requires_grad_() for x in leaves]
        # What is added to the scores is only cast for float64.
        wide = {n: options[n].double() if dtype == torch.float64 else options[n] for n in added}
        mine = {n: x.to(where, copy=True).requires_grad_() for n, x in wide.items()}
        out, lse = attend(*leaves, **(on(where, options) | mine))
        loss = (out * dout.to(where, out.dtype)).sum()
        if dlse is not None:
            loss = loss + (lse.masked_fill(lse == -math.inf, 0) * dlse.to(where, lse.dtype)).sum()
        return torch.autograd.grad(loss, [*leaves, *mine.values()])

    def exactly(*operands: Tensor, **given: Any) -> Any:
        return attention(*operands, **given, compute_dtype=torch.float64)

    cpu = torch.device("cpu")
    found = gradients(torch.ops.metal_attn.flash_fwd, dtype, device)
    exact = gradients(exactly, torch.float64, cpu)
    with as_multiplied():
        composed = gradients(rounding_attention, dtype, cpu)
    torchs = torch_gradient_errors(q, k, v, dout, options)
    scale = options.get("softmax_scale", head_dim**-0.5)
    terms = largest_terms(q, k, v, dout, scale)
    own = [worst_of([pair]) for pair in zip(composed, exact, strict=True)]
    errors = [max(pair) for pair in zip(torchs, own, strict=False)]
    measures = _gradient_measures(found, exact, errors, terms)
    if added:

        def all_in_dtype(*operands: Tensor, **given: Any) -> Any:
            narrow = {n: x.to(dtype) if n in added else x for n, x in given.items()}
            return attention(*operands, **narrow, compute_dtype=dtype)

        with as_multiplied():
            rough = gradients(all_in_dtype, dtype, cpu)
        for i, name in enumerate(added, 3):
            error = worst_of([(rough[i], exact[i])])
            sinks = name == "learnable_sink"
            slack = sink_rounding(q, k, v, dout, options) if sinks else torch.zeros(())
            measures.append(near(f"d{name}", found[i], exact[i], error, slack))
    return measures


def check_same_bits(
    device: torch.device,
    *,
    dtype: torch.dtype,
    threads: int = 1,
    head_dim: int = 64,
    feature: str = "causal",
) -> list[Measure]:
    """Forward, backward and a split decode, repeated, or run in several threads at once."""
    sizes = Sizes(2, 4, 2, 70, 130, head_dim, head_dim)
    operands = [x.to(device) for x in sizes.operands(dtype)]
    options = on(device, FEATURES[feature](sizes))

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in operands]
        out, lse = torch.ops.metal_attn.flash_fwd(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        q, k, v = operands
        decoded, _ = torch.ops.metal_attn.flash_decode(q[:, :, :3], k, v, num_splits=3)
        return [x.detach().cpu() for x in (out, lse, *grads, decoded)]

    first = run()
    results: list[list[Tensor]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:  # re-raised by the thread that started this one
            errors.append(error)

    if threads == 1:
        work()
    else:
        # simulate() holds in the context that it was entered in.
        contexts = [contextvars.copy_context() for _ in range(threads)]
        workers = [threading.Thread(target=context.run, args=(work,)) for context in contexts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    names = ("out", "softmax_lse", "dq", "dk", "dv", "decoded")
    return [
        same_bits(name, again[i], first[i]) for again in results for i, name in enumerate(names)
    ]


_FAR = 2**31  # elements
_MEMORY_FOR_FAR = 16e9  # bytes; the tensor has 4.3e9


def check_far(device: torch.device, *, dtype: torch.dtype) -> list[Measure]:
    """Keys of a second head that begins 2**31 elements after the first."""
    memory = memory_of(device)
    if memory < _MEMORY_FOR_FAR:
        raise Skipped(
            f"the machine has {memory / 1e9:.0f} GB, and this takes {_MEMORY_FOR_FAR / 1e9:.0f}"
        )
    sizes = Sizes(1, 2, 2, 9, 40, 64, 64)
    q, k, v = sizes.operands(dtype)
    try:
        count = k[0, 0].numel()
        whole = torch.empty(_FAR + count, dtype=dtype, device=device)
        # Each head by itself, which torch copies without an index.
        for head, first in enumerate((0, _FAR)):
            whole[first : first + count].copy_(k[0, head].flatten())
            if not torch.equal(whole[first : first + count].cpu(), k[0, head].flatten()):
                raise RuntimeError("what was written is not what is read")
        far = whole.as_strided(k.shape, (0, _FAR, sizes.head_dim, 1))
    except RuntimeError as error:
        raise Skipped(f"torch itself cannot prepare the tensor: {error}") from None
    found, _ = torch.ops.metal_attn.flash_fwd(q.to(device), far, v.to(device))
    exact, _ = attention(q, k, v, compute_dtype=torch.float64)
    return [near("out", found, exact, torch_error(q, k, v, {}))]


def _op(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    op: Callable[..., tuple[Tensor, Tensor]] = getattr(torch.ops.metal_attn, name)
    return op


def _on(
    device: torch.device, k: Tensor, v: Tensor, layout: str, values_in_keys: bool
) -> tuple[Tensor, Tensor]:
    """Copy to the device, laid out there, because a copy has strides of its own."""
    k_there = laid_out(k.to(device), layout)
    if values_in_keys:
        return k_there, k_there[..., : v.shape[-1]]
    return k_there, laid_out(v.to(device), layout)
