"""The judge of flash_bwd_bias and flash_bwd_slopes: torch's error against float64's autograd."""

import torch

from tests.attention.flash_bwd_check import make_gradients, rotated
from tests.attention.flash_fwd_check import hold
from torch_metal_attn.reference import attention, varlen_attention
from torch_metal_attn.testing.judge import near, on, worst_of

ADDED = ("attn_bias", "attn_mask", "alibi_slopes")


def differentiated(options):
    """The floating options that are added to the scores."""
    return [n for n in ADDED if n in options and options[n].is_floating_point()]


def added_gradients(dout, dlse, q, k, v, packing, options, dtype, compute_dtype):
    """By torch's autograd, of what is added in `dtype`; q and k rotated as the kernels round."""
    q, k, plain = rotated(q, k, options, dtype if dtype == torch.float64 else q.dtype, packing)
    leaves = {n: options[n].detach().to(dtype, copy=True) for n in differentiated(options)}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    attend = varlen_attention if packing else attention
    v = v.to(q.dtype)
    out, lse = attend(q, k, v, *packing, **(plain | leaves), compute_dtype=compute_dtype)
    dlse = dlse.to(lse.dtype).masked_fill(lse.detach() == -torch.inf, 0.0)
    gradients = torch.autograd.grad(
        *((out, lse), list(leaves.values()), (dout.to(out.dtype), dlse)),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, gradients, strict=True))


def reference_gradients(*problem):
    """Of dout, dlse, q, k, v, packing and options, in float64."""
    return added_gradients(*problem, torch.float64, torch.float64)


def rounding_of_slopes(dout, dlse, q, k, v, options):
    """What the rounding of every P * (dP - delta) * distance adds up to in the slopes' gradients.

    Each is rounded four times at most in float32, relative to P * (|dP| + |delta|), and the errors
    add up as a random walk. The terms cancel, so the sum's own size does not bound them.
    """
    slopes = options.get("alibi_slopes")
    if slopes is None:
        return {}
    names = [name for name in differentiated(options) if name != "alibi_slopes"]
    zero = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64, requires_grad=True)
    bias = sum((options[name] for name in names), zero)
    plain = {name: x for name, x in options.items() if name not in names}
    operands = [tensor.double().nan_to_num() for tensor in (q, k, v)]
    out, lse = attention(*operands, **plain, attn_bias=bias, compute_dtype=torch.float64)
    (weights,) = torch.autograd.grad(lse.masked_fill(lse == -torch.inf, 0.0).sum(), zero)
    dout = dout.double().abs()
    v = operands[2].abs().repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    delta = (dout * out.detach().abs()).sum(-1, keepdim=True) + dlse.abs().unsqueeze(-1)
    (batch, _, q_length, _), kv_length = q.shape, k.shape[2]
    offsets = options.get("seqused_k", torch.tensor([kv_length] * batch)) - q_length
    if options.get("q_offset") is not None:
        offsets = torch.full_like(offsets, options["q_offset"])
    position = torch.arange(q_length)[:, None] + offsets[:, None, None, None]
    terms = weights * (dout @ v.mT + delta) * (position - torch.arange(kv_length))
    squares = terms.square().sum((2, 3))
    return {"alibi_slopes": 2**-22 * squares.sum_to_size(slopes.shape).sqrt()}


def row_statistics(dout, dlse, q, k, v, packing, options):
    """The log-sum-exp, delta and normalisers, which autograd's ops give nearly as exactly.

    The log-sum-exp is off by up to 2^-9, so that what ignores the normalisers shows.
    """
    q, k, options = rotated(q, k, options, q.dtype, packing)
    attend = varlen_attention if packing else attention
    operands = [tensor.double() for tensor in (q, k, v)]
    out, exact_lse = attend(*operands, *packing, **options, compute_dtype=torch.float64)
    sums = (dout.double() * out).sum(-1)
    delta = (sums.T if packing else sums) - dlse
    lse = (exact_lse + 2**-9 * dlse.cos()).float()
    normalisers = (lse.double() - exact_lse).exp().masked_fill(lse == -torch.inf, 1.0)
    return [rows.float().contiguous() for rows in (lse, delta, normalisers)]


def run_ops(dout, dlse, q, k, v, packing, device, options):
    """The op's gradients, by name."""
    prefix = "flash_varlen" if packing else "flash"
    lse, delta, normalisers = row_statistics(dout, dlse, q, k, v, packing, options)
    given = on(device, dict(enumerate((dout, q, k, v, lse, delta, *packing)))).values()
    options = on(device, options | {"normalisers": normalisers})
    results = {}
    for name in differentiated(options):
        op = "slopes" if name == "alibi_slopes" else "bias"
        results[name] = getattr(torch.ops.metal_attn, f"{prefix}_bwd_{op}")(*given, **options).cpu()
    return results


def check_bias(q, k, v, *packing, device, dlse=True, **options):
    """Runs the ops on `device` and holds them to twice torch's error against float64.

    Torch's error is that of its operations on float32, for the inputs' dtype.
    """
    dout, lse_gradient = make_gradients(
        q, v, (*q.shape[1::-1],) if packing else q.shape[:3], seed=5
    )
    problem = (dout, lse_gradient * dlse, q, k, v)
    found = run_ops(*problem, packing, device, options)
    exact = reference_gradients(*problem, packing, options)
    composed = added_gradients(*problem, packing, options, torch.float32, None)
    slacks = {} if packing else rounding_of_slopes(*problem, options)
    for name, gradient in found.items():
        assert gradient.dtype == options[name].dtype
        assert gradient.is_contiguous()
        error = worst_of([(composed[name], exact[name])])
        hold([near(name, gradient, exact[name], error, slacks.get(name, 0.0))])
    return found
