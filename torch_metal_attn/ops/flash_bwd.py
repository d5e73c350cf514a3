"""`metal_attn::flash_bwd` and `flash_varlen_bwd` in Python: fake and CPU kernels.

Also `rotated_back`, the gradient of rotary embeddings, and `sink_gradient`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.reference import attention, rotate, varlen_attention

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, delta, normalisers


def normalised(q: Tensor, options: dict[str, Any]) -> bool:
    """True if `flash_bwd` with exact_delta returns normalisers."""
    mask = options.get("attn_mask")
    added = any(options.get(n) is not None for n in ("attn_bias", "alibi_slopes", "learnable_sink"))
    return q.dtype == torch.float32 or added or (mask is not None and mask.is_floating_point())


def empty_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    exact_delta: bool,
    options: dict[str, Any],
) -> Gradients:
    dq, dk, dv = map(empty_like_query, (q, k, v))
    delta = softmax_lse.new_empty(softmax_lse.shape)
    has_normalisers = exact_delta and normalised(q, options)
    return dq, dk, dv, delta, softmax_lse.new_empty(delta.shape if has_normalisers else (0,))


def gradient_of(out: Tensor, dout: Tensor | None) -> Tensor:
    """The gradient of out with contiguous rows, as kernels require. After sum() it has none."""
    if dout is None:
        return out.new_zeros(out.shape[-1]).expand(out.shape)
    return dout if dout.shape[-1] <= 1 or dout.stride(-1) == 1 else dout.contiguous()


@register_fake("flash_bwd", "flash_varlen_bwd")
def _flash_bwd_fake(*arguments: Any, exact_delta: bool = False, **options: Any) -> Gradients:
    _, _, q, k, v, _, softmax_lse, *_ = arguments
    return empty_gradients(q, k, v, softmax_lse, exact_delta, options)


def rotary_rows(
    x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tables and positions for `rope`, to rotate as flash_fwd; None if token i has row i."""
    rows = min(cos.shape[-2], sin.shape[-2])
    cos, sin = torch.broadcast_tensors(cos[..., :rows, :], sin[..., :rows, :])
    if cu_seqlens is None:
        return cos, sin, None
    token = torch.arange(x.shape[2], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    last = cu_seqlens.shape[0] - 2
    row = token - cu_seqlens[sequence.clamp(max=last)].long()
    if cos.dim() == 3:
        if cos.shape[0] > 1:
            row = row + sequence * rows
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
    # The gradient of tokens outside all sequences is 0, so they may use any row.
    return cos, sin, row.masked_fill(sequence > last, 0)


def rotated_back(
    gradient: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    rope: Callable[..., Any],
) -> Tensor:
    """The gradient of q or k from the gradient of its rotated form. rope: the op to use."""
    x = gradient if cu_seqlens is None else gradient.transpose(0, 1)[None]
    if cos.shape[-2] == 0 or (cu_seqlens is not None and cu_seqlens.shape[0] < 2):
        return gradient  # no sequence has a token
    cos, sin, positions = rotary_rows(x, cos, sin, cu_seqlens)
    rotated = rope(x, None, cos, sin, positions=positions, interleaved=interleaved, conjugate=True)
    if rotated is None:
        return gradient
    return rotated[0] if cu_seqlens is None else rotated[0][0].transpose(0, 1)


def sink_gradient(
    sink: Tensor, softmax_lse: Tensor, delta: Tensor, normalisers: Tensor, packed: bool
) -> Tensor:
    """The gradient of learnable_sink, (H,), from flash_bwd's delta and normalisers.

    A sink is a logit whose value is 0: with its weight p = exp(sink - lse) and delta =
    rowsum(dout * out) - dlse its gradient is -p * delta, as a key's is p * (dout . v - delta).
    """
    weight = (sink.float()[:, None] - softmax_lse).exp() * normalisers  # (H, T) or (B, H, L)
    # For tokens outside all sequences, and rows without keys whose sink is -inf.
    weight = weight.masked_fill(softmax_lse == -torch.inf, 0.0)
    return -(weight * delta).sum(1 if packed else (0, 2)).to(sink.dtype)


@contextmanager
def differentiating() -> Iterator[None]:
    """Turn autograd on inside a kernel; the dispatcher runs kernels with autograd off."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    keys = "AutogradFunctionality AutogradOther AutogradNestedTensor ADInplaceOrView"
    for key in keys.split():
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    guard = torch._C._ForceDispatchKeyGuard(include, exclude)
    # Under autocast the derivatives of products would be in half precision.
    with guard, torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


def rotated_rows(
    x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, interleaved: bool
) -> Tensor:
    """x in float32, rotated as flash_fwd does."""
    if cu_seqlens is None:
        return rotate(x.float(), cos, sin, interleaved)
    if cos.shape[-2] == 0 or cu_seqlens.shape[0] < 2:
        return x.float()
    bhld = x.transpose(0, 1)[None].float()
    cos, sin, rows = rotary_rows(bhld, cos, sin, cu_seqlens)
    return rotate(bhld, cos[rows], sin[rows], interleaved)[0].transpose(0, 1)


def weighted_loss(
    dout: Tensor,
    results: tuple[Tensor, Tensor],
    softmax_lse: Tensor,
    delta: Tensor,
    normalisers: Tensor | float,
    packed: bool,
) -> Tensor:
    """A loss with the kernels' gradients, whose P is exp(scores - softmax_lse).

    results: the reference's out and lse; lse may differ from softmax_lse. With w = exp(lse -
    softmax_lse), sum(w * (dout . out - delta)) has the gradient P * (dout . v - delta) for a score
    and P * dout for v. Each row is multiplied by its normaliser.
    """
    out, lse = results
    excess = (lse - softmax_lse).masked_fill(softmax_lse == -torch.inf, 0.0)
    return (excess.exp() * normalisers * (row_sums(dout, out, packed) - delta)).sum()


def row_sums(a: Tensor, b: Tensor, packed: bool) -> Tensor:
    """rowsum(a * b) in the layout of softmax_lse."""
    sums = (a.float() * b.float()).sum(-1)
    return sums.T if packed else sums


def _reference_gradients(
    oracle: Callable[..., tuple[Tensor, Tensor]],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *packing: Any,
    exact_delta: bool = False,
    **options: Any,
) -> Gradients:
    """The kernels' results. With exact_delta, `delta` is computed from a float32 out."""
    packed = bool(packing)
    options = {n: x.detach() if isinstance(x, Tensor) else x for n, x in options.items()}
    leaves = [x.detach().float() for x in (q, k, v)]
    interleaved = options.pop("rotary_interleaved", False)
    for i, side in enumerate("qk"):
        cos, sin = (options.pop(f"{side}_rotary_{table}", None) for table in ("cos", "sin"))
        if cos is not None:
            cu_seqlens = packing[i] if packing else None
            leaves[i] = rotated_rows(leaves[i], cos, sin, cu_seqlens, interleaved)
    with differentiating():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        ref_out, ref_lse = oracle(*leaves, *packing, **options)
        delta = row_sums(dout, ref_out.detach() if exact_delta else out, packed)
        if dlse is not None:
            delta = delta - dlse
        excess = (ref_lse.detach() - softmax_lse).masked_fill(softmax_lse == -torch.inf, 0.0)
        normalisers = 1 / excess.exp()
        scale = normalisers if exact_delta else 1.0
        loss = weighted_loss(dout, (ref_out, ref_lse), softmax_lse, delta, scale, packed)
        if loss.requires_grad:
            computed = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        else:  # packed, without any sequence
            computed = tuple(torch.zeros_like(leaf) for leaf in leaves)
    gradients = empty_gradients(q, k, v, softmax_lse, exact_delta, options)
    if gradients[-1].shape != delta.shape:
        normalisers = gradients[-1]
    for result, value in zip(gradients, (*computed, delta, normalisers), strict=True):
        result.copy_(value)
    return gradients


def refuse_second_derivative(*names: str) -> None:
    """Let derivatives of attention's backward ops raise NotImplementedError."""
    for name in names:
        refuse(name, "attention has no second derivative (double backward) here")


cpu_kernel("flash_bwd")(partial(_reference_gradients, attention))
cpu_kernel("flash_varlen_bwd")(partial(_reference_gradients, varlen_attention))
refuse_second_derivative("flash_bwd", "flash_varlen_bwd")
