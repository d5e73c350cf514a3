"""`metal_attn::flash_bwd_bias` and `flash_bwd_slopes` in Python: fake and CPU kernels.

The gradients of terms that attention adds to its scores (see `reference.attention`). With P the
weights and dP = dout v^T, the gradient of a bias is dS = P * (dP - delta), Dao, "FlashAttention-2"
(2023), algorithm 2, summed over the dimensions that the bias broadcasts over. The gradient of a
head's ALiBi slope is -sum dS * |p - j| over its queries and keys. `delta` = rowsum(dout * out) -
dlse and `normalisers` come from `flash_bwd`. Without normalisers, P has the error of softmax_lse.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.flash_bwd import differentiating, refuse_second_derivative, weighted_loss
from torch_metal_attn.reference import attention, varlen_attention

_Reference = Callable[..., tuple[Tensor, Tensor]]


def _bias_name(options: dict[str, Any]) -> str:
    mask = options.get("attn_mask")
    return "attn_mask" if mask is not None and mask.is_floating_point() else "attn_bias"


def _register(name: str, oracle: _Reference, option_of: Callable[[dict[str, Any]], str]) -> None:
    @register_fake(name)
    def fake(*_: Any, **options: Any) -> Tensor:
        value: Tensor = options[option_of(options)]
        return value.new_empty(value.shape)

    @cpu_kernel(name)
    def cpu(*arguments: Any, **options: Any) -> Tensor:
        return _reference_gradient(oracle, option_of(options), arguments, options)

    refuse_second_derivative(name)


def _reference_gradient(
    oracle: _Reference, option: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Tensor:
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    dout, q, k, v, softmax_lse, delta, *packing = arguments
    options = {n: x.detach() if isinstance(x, Tensor) else x for n, x in options.items()}
    normalisers = options.pop("normalisers", None)
    value = options[option]
    with differentiating():
        # A float32 leaf: torch would sum over blocks of queries in the option's dtype.
        leaf = value.to(torch.float32, copy=True).requires_grad_()
        results = oracle(q.float(), k.float(), v.float(), *packing, **(options | {option: leaf}))
        scale = 1.0 if normalisers is None else normalisers
        loss = weighted_loss(dout, results, softmax_lse, delta, scale, bool(packing))
        if not loss.requires_grad:  # packed, without any sequence
            return torch.zeros_like(value, memory_format=torch.contiguous_format)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient.to(value.dtype).contiguous()


for _prefix, _oracle in (
    ("flash_", attention),
    ("flash_varlen_", varlen_attention),
):
    _register(f"{_prefix}bwd_bias", _oracle, _bias_name)
    _register(f"{_prefix}bwd_slopes", _oracle, lambda options: "alibi_slopes")
