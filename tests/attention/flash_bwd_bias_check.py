"""The judge of flash_bwd_bias and flash_bwd_slopes: torch's error against float64's autograd."""

import torch

from tests.attention.flash_fwd_check import (
    ACCUMULATION,
    ROUNDING,
    on,
    per_sequence,
    torch_sdpa,
    visible_keys,
)
from torch_metal_attn.reference import attention, rotate, varlen_attention

ADDED = ("attn_bias", "attn_mask", "alibi_slopes")


def differentiated(options):
    """The floating options that are added to the scores."""
    return [n for n in ADDED if n in options and options[n].is_floating_point()]


def leaves_of(options, dtype):
    return {
        name: options[name].detach().to(dtype, copy=True).requires_grad_()
        for name in differentiated(options)
    }


def make_gradients(q, v, lse_shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
    return dout, torch.randn(lse_shape, generator=generator)


def reference_gradients(oracle, dout, dlse, q, k, v, packing, options, dtype):
    """By torch's autograd, with everything in `dtype`."""
    leaves = leaves_of(options, dtype)
    operands = [tensor.to(dtype) for tensor in (q, k, v)]
    out, lse = oracle(*operands, *packing, **(options | leaves), compute_dtype=dtype)
    hidden = lse == -torch.inf
    gradients = torch.autograd.grad(
        (out, lse),
        list(leaves.values()),
        (dout.to(dtype), dlse.to(dtype).masked_fill(hidden, 0.0)),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, gradients, strict=True))


def torch_errors(dout, q, k, v, options):
    """Largest error of torch's own attention with its mask's gradient, in the inputs' dtype.

    Of visibility, scale and bias only: the problem is otherwise the same.
    """
    name = next((n for n in differentiated(options) if n != "alibi_slopes"), None)
    if name is None or options[name].dtype != q.dtype:  # which torch refuses
        return {}
    bias = options[name]
    visible = visible_keys(q, k, options)
    # Rows that see nothing would be NaN in some of torch's kernels.
    sees_any = visible.any(-1, keepdim=True)
    visible, dout = visible | ~sees_any, dout * sees_any
    scale = options.get("softmax_scale")
    results = []
    for dtype in (q.dtype, torch.float64):
        leaf = bias.detach().to(dtype, copy=True).requires_grad_()
        mask = leaf.nan_to_num(neginf=-1e4).broadcast_to(visible.shape)
        mask = mask.masked_fill(~visible, -torch.inf)
        operands = [tensor.nan_to_num().to(dtype) for tensor in (q, k, v)]
        out = torch_sdpa(*operands, attn_mask=mask, scale=scale, enable_gqa=True)
        (gradient,) = torch.autograd.grad(out, leaf, dout.to(dtype))
        results.append(gradient.double())
    error = (results[0] - results[1]).nan_to_num().abs()
    return {name: error.max().item() if error.numel() else 0.0}


def rounding_of_slopes(dout, dlse, q, k, v, options):
    """What the rounding of every P * (dP - delta) * distance adds up to in the slopes' gradients.

    Each is rounded four times at most in float32, relative to P * (|dP| + |delta|), and the errors
    add up as a random walk. The terms cancel, so the sum's own size does not bound them.
    """
    slopes = options.get("alibi_slopes")
    if slopes is None:
        return {}
    whole = (*q.shape[:3], k.shape[2])
    names = [name for name in differentiated(options) if name != "alibi_slopes"]
    zero = torch.zeros(whole, dtype=torch.float64, requires_grad=True)
    bias = sum((options[name] for name in names), zero)
    options = {name: x for name, x in options.items() if name not in names}
    operands = [tensor.double().nan_to_num() for tensor in (q, k, v)]
    out, lse = attention(*operands, **options, attn_bias=bias, compute_dtype=torch.float64)
    (weights,) = torch.autograd.grad(lse.masked_fill(lse == -torch.inf, 0.0).sum(), zero)
    dout = dout.double().abs()
    v = operands[2].abs().repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    delta = (dout * out.detach().abs()).sum(-1, keepdim=True) + dlse.abs().unsqueeze(-1)
    (batch, _, q_length, _), kv_length = q.shape, k.shape[2]
    ends = per_sequence(options.get("seqused_k"), batch, kv_length)
    offset = options.get("q_offset")
    offsets = torch.tensor([end - q_length if offset is None else offset for end in ends])
    position = torch.arange(q_length)[:, None] + offsets[:, None, None, None]
    terms = weights * (dout @ v.mT + delta) * (position - torch.arange(kv_length))
    squares = terms.square().sum((2, 3))
    return {"alibi_slopes": 2**-22 * squares.sum_to_size(slopes.shape).sqrt()}


def assert_close(gradients, oracle, composed, errors, options, rounding):
    for name, gradient in gradients.items():
        value, exact = options[name], oracle[name]
        assert gradient.dtype == value.dtype
        assert gradient.shape == value.shape
        assert gradient.is_contiguous()
        if gradient.numel() == 0:
            continue
        error = max(errors.get(name, 0.0), (composed[name].double() - exact).abs().max().item())
        slack = ROUNDING[value.dtype] * exact.abs() + ACCUMULATION * exact.abs().max()
        slack = slack + rounding.get(name, 0.0)
        worst = ((gradient.double() - exact).abs() - 2 * error - slack).max().item()
        assert worst <= 0, (name, worst, error, exact.abs().max().item())


def row_statistics(dout, dlse, q, k, v, packing, options):
    """The log-sum-exp, delta and normalisers, which autograd's ops give nearly as exactly.

    The log-sum-exp is off by up to 2^-9, so that what ignores the normalisers shows.
    """
    (q, k), options = rotated(q, k, options)
    oracle = varlen_attention if packing else attention
    operands = [tensor.double() for tensor in (q, k, v)]
    out, exact_lse = oracle(*operands, *packing, **options, compute_dtype=torch.float64)
    sums = (dout.double() * out).sum(-1)
    delta = (sums.T if packing else sums) - dlse
    lse = (exact_lse + 2**-9 * dlse.cos()).float()
    normalisers = (lse.double() - exact_lse).exp().masked_fill(lse == -torch.inf, 1.0)
    return [rows.float().contiguous() for rows in (lse, delta, normalisers)]


def run_ops(dout, dlse, q, k, v, packing, device, options):
    """The op's gradients, by name."""
    ops, prefix = torch.ops.metal_attn, "flash_varlen" if packing else "flash"
    statistics = row_statistics(dout, dlse, q, k, v, packing, options)
    lse, delta, normalisers = (rows.to(device) for rows in statistics)
    packing = [x.to(device) if torch.is_tensor(x) else x for x in packing]
    operands = [tensor.to(device) for tensor in (q, k, v)]
    dout, options = dout.to(device), on(device, options)
    results = {}
    for name in differentiated(options):
        op = "slopes" if name == "alibi_slopes" else "bias"
        op = getattr(ops, f"{prefix}_bwd_{op}")
        rows = (lse, delta, *packing)
        results[name] = op(dout, *operands, *rows, normalisers=normalisers, **options).cpu()
    return results


def check_bias(q, k, v, *, device, dlse=True, **options):
    """Runs the ops on `device` and holds them to twice torch's error against float64."""
    dout, lse_gradient = make_gradients(q, v, q.shape[:3])
    lse_gradient = lse_gradient * dlse
    gradients = run_ops(dout, lse_gradient, q, k, v, [], device, options)
    call = (attention, dout, lse_gradient, q, k, v, [], options)
    oracle = reference_gradients(*call, torch.float64)
    composed = composed_gradients(*call)
    errors = torch_errors(dout, q, k, v, options)
    rounding = rounding_of_slopes(dout, lse_gradient, q, k, v, options)
    assert_close(gradients, oracle, composed, errors, options, rounding)
    return gradients


def rotated(q, k, options):
    """q and k rotated and rounded to their dtype, as the kernels do; options without tables."""
    rotated, options = [], dict(options)
    interleaved = options.pop("rotary_interleaved", False)
    for side, x in (("q", q), ("k", k)):
        cos, sin = (options.pop(f"{side}_rotary_{table}", None) for table in ("cos", "sin"))
        rotated.append(x if cos is None else rotate(x.float(), cos, sin, interleaved).to(x.dtype))
    return rotated, options


def composed_gradients(oracle, dout, dlse, q, k, v, packing, options):
    """As torch's operations on float32 compose."""
    (q, k), options = rotated(q, k, options)
    leaves = leaves_of(options, torch.float32)
    out, lse = oracle(q, k, v, *packing, **(options | leaves))
    dlse = dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
    gradients = torch.autograd.grad(
        (out, lse), list(leaves.values()), (dout, dlse), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients, strict=True))


def check_varlen_bias(q, k, v, *packing, device, **options):
    """`check_bias` for packed sequences."""
    dout, dlse = make_gradients(q, v, (q.shape[1], q.shape[0]))
    gradients = run_ops(dout, dlse, q, k, v, packing, device, options)
    call = (varlen_attention, dout, dlse, q, k, v, packing, options)
    oracle = reference_gradients(*call, torch.float64)
    assert_close(gradients, oracle, composed_gradients(*call), {}, options, {})
    return gradients
