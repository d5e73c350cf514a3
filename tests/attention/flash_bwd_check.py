"""The judge of the gradient kernels: torch's own gradients in the same dtype, against float64."""

import math
from functools import partial
from itertools import pairwise

import torch

from tests.attention.flash_fwd_check import hold, operand_rounding, unpacked
from torch_metal_attn.reference import attention, rotate, varlen_attention
from torch_metal_attn.testing.judge import ROUNDING, largest, near, on, worst_of
from torch_metal_attn.testing.oracle import largest_terms, torch_gradient_errors, visible_keys
from torch_metal_attn.testing.tf32 import as_multiplied

NAMES = ("dq", "dk", "dv")


def run(name, device, *arguments, **options):
    """The op `name` on `device`, given tensors of any device."""
    moved = (value.to(device) if torch.is_tensor(value) else value for value in arguments)
    return getattr(torch.ops.metal_attn, name)(*moved, **on(device, options))


def make_gradients(q, v, lse_shape, *, dlse=True, seed=7):
    """dout of out's shape in q's dtype, and dlse or None."""
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
    return dout, torch.randn(lse_shape, generator=generator) if dlse else None


def rotated(q, k, options, dtype, packing=()):
    """q and k in `dtype`, rotated where the options say so, and the options without the tables.

    Below float64 the rotation is that of the kernels: in float32, rounded to the inputs' dtype. Of
    packed sequences row i of a table is row i of every sequence.
    """
    sides = []
    interleaved = options.get("rotary_interleaved", False)
    for i, (side, tensor) in enumerate(zip("qk", (q, k), strict=True)):
        exact = tensor.double() if dtype == torch.float64 else tensor.float()
        cos, sin = (options.get(f"{side}_rotary_{name}") for name in ("cos", "sin"))
        if cos is not None and not packing:
            exact = rotate(exact, cos, sin, interleaved)
        elif cos is not None:
            exact = exact.clone()
            ends = packing[i].tolist()
            for b, (start, end) in enumerate(pairwise(ends)):
                own = (b if len(cos) > 1 else 0) if cos.dim() == 3 else ...
                rows = exact[None, start:end].transpose(1, 2)
                rows = rotate(rows, cos[own], sin[own], interleaved)
                exact[start:end] = rows[0].transpose(0, 1)
        sides.append(exact.to(dtype))
    return *sides, {name: value for name, value in options.items() if "rotary" not in name}


def differentiate(attend, q, k, v, dout, dlse):
    """dq, dk and dv of <attend(q, k, v), (dout, dlse)>; a row without an lse has none to weigh."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    out, lse = attend(*leaves)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * dlse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def reference_gradients(q, k, v, dout, dlse, options, dtype=torch.float64, packing=()):
    """In `dtype`, with respect to what the product sees: the rotated q and k.

    Below float64 they are those of torch's operations on float32, for the inputs' dtype.
    """
    q, k, options = rotated(q, k, options, dtype, packing)
    attend = partial(varlen_attention if packing else attention, **options)
    compute_dtype = dtype if dtype == torch.float64 else None
    with as_multiplied():
        return differentiate(
            lambda *qkv: attend(*qkv, *packing, compute_dtype=compute_dtype),
            *(q, k, v.to(dtype), dout, dlse),
        )


def torch_errors(q, k, v, dout, options):
    """Of torch's own attention in the inputs' dtype.

    It has visibility and scale only: biases, caps, sinks and the log-sum-exp's gradient are left
    out of its problem, which is otherwise the same.
    """
    if not q.numel() or not k.numel():
        return [0.0] * 3
    q, k, options = rotated(q, k, options, q.dtype)
    return torch_gradient_errors(q, k, v.nan_to_num(), dout, options)


def judge(q, k, v, dout, dlse, options, packing=()):
    """The oracle's gradients and the larger of torch's errors for each.

    Of packed sequences torch's own errors are those of each sequence alone, seen whole.
    """
    given = (q, k, v, dout, dlse, options)
    oracle = reference_gradients(*given, packing=packing)
    composed = reference_gradients(*given, q.dtype, packing)
    errors = [worst_of([pair]) for pair in zip(composed, oracle, strict=True)]
    if packing:
        scale = {"softmax_scale": options.get("softmax_scale")}
        alone = [
            torch_errors(q, k, v, dout, scale)
            for q, dout, k, v in unpacked([q, dout], k, v, packing)
        ]
    else:
        alone = [torch_errors(q, k, v, dout, options)]
    return oracle, [max(of_one) for of_one in zip(errors, *alone, strict=True)]


def assert_gradients(found, oracle, errors, inputs, dout, options):
    """Each gradient of its input's shape and dtype, within twice torch's error of the oracle."""
    scale = options.get("softmax_scale")
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    terms = largest_terms(*(x.nan_to_num() for x in inputs), dout, scale)
    for name, gradient, exact, error, term, tensor in zip(
        NAMES, found, oracle, errors, terms, inputs, strict=True
    ):
        assert gradient.dtype == tensor.dtype
        # A term is rounded in float32 once at least, and the sum of all may cancel.
        hold([near(name, gradient, exact, error, ROUNDING[torch.float32] * term)])


def assert_delta(delta, dlse, dout, out, v):
    """delta = rowsum(dout * out) - dlse, to the rounding of out and of sums over the keys."""
    products = dout.double() * out.double()
    # Summed over the keys, dout . v may cancel.
    terms = dout.double().abs().sum(-1) * largest(v)
    exact, size, terms = (
        x.t() if out.dim() == 3 else x for x in (products.sum(-1), products.abs().sum(-1), terms)
    )
    if dlse is not None:
        exact, size = exact - dlse.double(), size + dlse.double().abs()
    assert delta.dtype == torch.float32
    assert delta.shape == exact.shape
    # Rotated q and k are rounded before out is.
    rounding = 2**-20 + 2 * operand_rounding(out.dtype)
    of_terms = max(2**-23, 2 * operand_rounding(out.dtype, rounded=False))
    assert ((delta.double() - exact).abs() <= rounding * size + of_terms * terms).all()


def assert_zero_where_unseen(found, visible, kv_heads):
    """Queries that see no key, and keys that no query sees: zero, not merely small."""
    dq, dk, dv = found
    assert (dq[~visible.any(-1)] == 0).all()
    if kv_heads:
        unseen = ~visible.any(2).unflatten(1, (kv_heads, -1)).any(2)
        assert (dk[unseen] == 0).all()
        assert (dv[unseen] == 0).all()


def exact_forward(q, k, v, options, packing=()):
    """out and lse of float64's attention, rounded to their dtypes: no forward kernel is compiled.

    Of rows that are rotated and rounded as the kernels' are. Of scores so large that their rounding
    shows, a backward takes only what the forward kernel made of them: tests pass `own_forward`.
    """
    q, k, options = rotated(q, k, options, q.dtype, packing)
    attend = varlen_attention if packing else attention
    out, lse = attend(q, k, v, *packing, **options, compute_dtype=torch.float64)
    return out.to(q.dtype), lse.float().contiguous()


def backward(q, k, v, dout, dlse, device, options, exact_delta=True, own_forward=False, packing=()):
    """out, dq, dk, dv and delta, on the CPU."""
    name = "flash_varlen" if packing else "flash"
    if own_forward:
        out, lse = run(f"{name}_fwd", device, q, k, v, *packing, **options)
    else:
        out, lse = exact_forward(q, k, v, options, packing)
    arguments = (dout, dlse, q, k, v, out, lse, *packing)
    *results, _ = run(f"{name}_bwd", device, *arguments, exact_delta=exact_delta, **options)
    return [tensor.cpu() for tensor in (out, *results)]


def check_flash_bwd(q, k, v, *, device, dlse=True, exact_delta=True, own_forward=False, **options):
    """Runs the backward on `device` and holds dq, dk and dv to twice torch's error."""
    dout, lse_gradient = make_gradients(q, v, q.shape[:3], dlse=dlse)
    out, *found, delta = backward(
        q, k, v, dout, lse_gradient, device, options, exact_delta, own_forward
    )
    oracle, errors = judge(q, k, v, dout, lse_gradient, options)
    assert_gradients(found, oracle, errors, (q, k, v), dout, options)
    assert_delta(delta, lse_gradient, dout, out, v)
    assert_zero_where_unseen(found, visible_keys(q, k, options), k.shape[1])
    return *found, delta


def check_flash_varlen_bwd(q, k, v, *packing, device, dlse=True, own_forward=False, **options):
    """`check_flash_bwd` for packed sequences, and zeros behind the last of them."""
    dout, lse_gradient = make_gradients(q, v, (q.shape[1], q.shape[0]), dlse=dlse)
    given = (dout, lse_gradient, device, options, True, own_forward, packing)
    out, *found, delta = backward(q, k, v, *given)
    ends = [packing[i][-1] for i in (0, 1, 1)]
    # What lies in rows of no sequence is nobody's.
    owned = [
        x.masked_fill((torch.arange(len(x)) >= end)[:, None, None], 0.0)
        for x, end in zip((q, k, v), ends, strict=True)
    ]
    oracle, errors = judge(*owned, dout, lse_gradient, options, packing)
    assert_gradients(found, oracle, errors, (q, k, v), dout, options)
    rows = ends[0]
    of_rows = None if lse_gradient is None else lse_gradient[:, :rows]
    assert_delta(delta[:, :rows], of_rows, dout[:rows], out[:rows], v)
    assert (delta[:, rows:] == 0).all()
    for gradient, end in zip(found, ends, strict=True):
        assert (gradient[end:] == 0).all()
    return *found, delta
