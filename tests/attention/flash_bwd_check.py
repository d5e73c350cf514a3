"""The judge of the gradient kernels: torch's own gradients in the same dtype, against float64."""

import math

import torch

from tests.attention.flash_fwd_check import (
    ACCUMULATION,
    ROUNDING,
    on,
    operand_rounding,
    torch_sdpa,
    visible_keys,
)
from torch_metal_attn.reference import attention, rotate, varlen_attention
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


def rotated(q, k, options, dtype):
    """q and k in `dtype`, rotated where the options say so, and the options without the tables.

    Below float64 the rotation is that of the kernels: in float32, rounded to the inputs' dtype.
    """
    sides = []
    for side, tensor in zip("qk", (q, k), strict=True):
        exact = tensor.double() if dtype == torch.float64 else tensor.float()
        if options.get(f"{side}_rotary_cos") is not None:
            tables = options[f"{side}_rotary_cos"], options[f"{side}_rotary_sin"]
            exact = rotate(exact, *tables, options.get("rotary_interleaved", False))
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


def oracle_gradients(q, k, v, dout, dlse, options):
    """In float64, with respect to what the product sees: the rotated q and k."""
    q, k, options = rotated(q, k, options, torch.float64)
    return differentiate(
        lambda *qkv: attention(*qkv, **options, compute_dtype=torch.float64),
        *(q, k, v.double(), dout, dlse),
    )


def composed_errors(q, k, v, dout, dlse, options, oracle):
    """Of attention composed of torch's operations on float32, for the inputs' dtype."""
    q, k, options = rotated(q, k, options, q.dtype)
    with as_multiplied():
        composed = differentiate(lambda *qkv: attention(*qkv, **options), q, k, v, dout, dlse)
    return [largest(a.double() - b) for a, b in zip(composed, oracle, strict=True)]


def torch_errors(q, k, v, dout, options):
    """Of torch's own attention in the inputs' dtype.

    It has visibility and scale only: biases, caps, sinks and the log-sum-exp's gradient are left
    out of its problem, which is otherwise the same. A query that sees nothing sees all, for no
    gradient.
    """
    visible = visible_keys(q, k, options)
    hidden = ~visible.any(-1, keepdim=True)
    problem = {"attn_mask": visible | hidden, "softmax_scale": options.get("softmax_scale")}
    dout = dout.masked_fill(hidden, 0.0)
    if 0 in visible.shape:
        return [0.0] * 3
    exact_q, exact_k, _ = rotated(q, k, options, torch.float64)
    oracle = oracle_gradients(exact_q, exact_k, v, dout, None, problem)
    rounded_q, rounded_k, _ = rotated(q, k, options, q.dtype)
    with as_multiplied():
        found = differentiate(
            lambda *qkv: (
                torch_sdpa(
                    *qkv,
                    attn_mask=problem["attn_mask"],
                    scale=problem["softmax_scale"],
                    enable_gqa=True,
                ),
                None,
            ),
            *(rounded_q, rounded_k, v, dout, None),
        )
    return [largest(a.double() - b) for a, b in zip(found, oracle, strict=True)]


def largest(tensor):
    return tensor.abs().max().item() if tensor.numel() else 0.0


def largest_terms(q, k, v, dout, options):
    """Bounds of one term of dq, dk and dv; of those of dq and dk, every sum may cancel to 0."""
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    q, k, v, dout = (
        largest(tensor.double().nan_to_num().norm(dim=-1)) for tensor in (q, k, v, dout)
    )
    return scale * dout * v * k, scale * dout * v * q, dout


def assert_gradients(found, oracle, errors, inputs, dout, options):
    """Each gradient of its input's shape and dtype, within twice torch's error of the oracle."""
    terms = largest_terms(*inputs, dout, options)
    for name, gradient, exact, error, term, tensor in zip(
        NAMES, found, oracle, errors, terms, inputs, strict=True
    ):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape
        if tensor.numel() == 0:
            continue
        slack = ROUNDING[tensor.dtype] * exact.abs() + ACCUMULATION * exact.abs().max()
        # A term is rounded in float32 once at least, and the sum of all may cancel.
        slack = slack + ROUNDING[torch.float32] * term
        excess = (gradient.double() - exact).abs() - slack
        assert (excess <= 2 * error).all(), (
            f"{name}: error {excess.max().item():.2e} beyond rounding, torch's {error:.2e}"
        )


def assert_delta(delta, dlse, dout, out, v):
    """delta = rowsum(dout * out) - dlse, to the rounding of out and of sums over the keys."""
    products = dout.double() * out.double()
    exact, size = products.sum(-1), products.abs().sum(-1)
    if out.dim() == 3:
        exact, size = exact.t(), size.t()
    if dlse is not None:
        exact, size = exact - dlse.double(), size + dlse.double().abs()
    # Rotated q and k are rounded before out is.
    rounding = 2 * operand_rounding(out.dtype)
    assert delta.dtype == torch.float32
    assert delta.shape == exact.shape
    # Summed over the keys, dout . v may cancel.
    terms = dout.double().abs().sum(-1) * largest(v.nan_to_num())
    terms = terms.t() if out.dim() == 3 else terms
    of_terms = max(2**-23, 2 * operand_rounding(out.dtype, rounded=False))
    assert ((delta.double() - exact).abs() <= (2**-20 + rounding) * size + of_terms * terms).all()


def assert_zero_where_unseen(found, visible, kv_heads):
    """Queries that see no key, and keys that no query sees: zero, not merely small."""
    dq, dk, dv = found
    assert (dq[~visible.any(-1)] == 0).all()
    batch, heads, _, kv_length = visible.shape
    if kv_heads:
        members = visible.any(2).view(batch, kv_heads, heads // kv_heads, kv_length)
        unseen = ~members.any(2)
        assert (dk[unseen] == 0).all()
        assert (dv[unseen] == 0).all()


def exact_forward(q, k, v, options, packing=()):
    """out and lse of float64's attention, rounded to their dtypes: no forward kernel is compiled.

    Of rows that are rotated and rounded as the kernels' are. Of scores so large that their rounding
    shows, a backward takes only what the forward kernel made of them: tests pass `own_forward`.
    """
    if packing:
        ends = [packing[0].tolist(), packing[1].tolist()]
        q, k, options = rotated_packed(q, k, ends, options, q.dtype)
    else:
        q, k, options = rotated(q, k, options, q.dtype)
    attend = varlen_attention if packing else attention
    out, lse = attend(q, k, v, *packing, **options, compute_dtype=torch.float64)
    return out.to(q.dtype), lse.float().contiguous()


def backward(q, k, v, dout, dlse, device, options, exact_delta=True, own_forward=False):
    """out, dq, dk, dv and delta, on the CPU."""
    if own_forward:
        out, lse = run("flash_fwd", device, q, k, v, **options)
    else:
        out, lse = exact_forward(q, k, v, options)
    statistics = (q, k, v, out, lse)
    *results, _ = run(
        "flash_bwd", device, dout, dlse, *statistics, exact_delta=exact_delta, **options
    )
    return [tensor.cpu() for tensor in (out, *results)]


def judge(q, k, v, dout, dlse, options):
    """The oracle's gradients and the larger of torch's errors for each."""
    oracle = oracle_gradients(q, k, v, dout, dlse, options)
    errors = zip(
        composed_errors(q, k, v, dout, dlse, options, oracle),
        torch_errors(q, k, v, dout, options),
        strict=True,
    )
    return oracle, [max(pair) for pair in errors]


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


def packed_rows(tensor, ends, b):
    """Rows of packed sequence b as (1, H, L, D)."""
    return tensor[None, ends[b] : ends[b + 1]].transpose(1, 2)


def rotated_packed(q, k, ends, options, dtype):
    """`rotated` for packed sequences: row i of a table is row i of every sequence."""
    sides = []
    for side, tensor, rows in zip("qk", (q, k), ends, strict=True):
        exact = tensor.double() if dtype == torch.float64 else tensor.float()
        if options.get(f"{side}_rotary_cos") is not None:
            cos, sin = options[f"{side}_rotary_cos"], options[f"{side}_rotary_sin"]
            exact = exact.clone()
            for b in range(len(rows) - 1):
                own = (b if cos.dim() == 3 and len(cos) > 1 else 0,) if cos.dim() == 3 else ...
                sequence = rotate(
                    packed_rows(exact, rows, b),
                    cos[own],
                    sin[own],
                    options.get("rotary_interleaved", False),
                )
                exact[rows[b] : rows[b + 1]] = sequence[0].transpose(0, 1)
        sides.append(exact.to(dtype))
    return *sides, {name: value for name, value in options.items() if "rotary" not in name}


def judge_packed(q, k, v, packing, dout, dlse, options):
    """The oracle's gradients; torch's errors are of each sequence alone, seen whole, and composed.

    What lies in rows of no sequence is nobody's.
    """
    ends = [packing[0].tolist(), packing[1].tolist()]
    q, k, v = (
        tensor.masked_fill((torch.arange(len(tensor)) >= rows[-1])[:, None, None], 0.0)
        for tensor, rows in zip((q, k, v), (ends[0], ends[1], ends[1]), strict=True)
    )

    def gradients(dtype, compute_dtype):
        rotated_q, rotated_k, plain = rotated_packed(q, k, ends, options, dtype)
        return differentiate(
            lambda *qkv: varlen_attention(*qkv, *packing, **plain, compute_dtype=compute_dtype),
            *(rotated_q, rotated_k, v.to(dtype), dout, dlse),
        )

    oracle = gradients(torch.float64, torch.float64)
    with as_multiplied():
        composed = gradients(q.dtype, None)
    errors = [largest(a.double() - b) for a, b in zip(composed, oracle, strict=True)]
    scale = {"softmax_scale": options.get("softmax_scale")}
    for b in range(len(ends[0]) - 1):
        sequence = [
            packed_rows(tensor, rows, b)
            for tensor, rows in zip((q, k, v), (ends[0], ends[1], ends[1]), strict=True)
        ]
        alone = torch_errors(*sequence, packed_rows(dout, ends[0], b), scale)
        errors = [max(pair) for pair in zip(errors, alone, strict=True)]
    return oracle, errors


def check_flash_varlen_bwd(q, k, v, *packing, device, dlse=True, own_forward=False, **options):
    """`check_flash_bwd` for packed sequences, and zeros behind the last of them."""
    dout, lse_gradient = make_gradients(q, v, (q.shape[1], q.shape[0]), dlse=dlse)
    if own_forward:
        out, lse = run("flash_varlen_fwd", device, q, k, v, *packing, **options)
    else:
        out, lse = exact_forward(q, k, v, options, packing)
    arguments = (dout, lse_gradient, q, k, v, out, lse, *packing)
    results = run("flash_varlen_bwd", device, *arguments, exact_delta=True, **options)
    *found, delta, _ = (tensor.cpu() for tensor in results)
    oracle, errors = judge_packed(q, k, v, packing, dout, lse_gradient, options)
    assert_gradients(found, oracle, errors, (q, k, v), dout, options)
    rows = packing[0][-1]
    of_rows = None if lse_gradient is None else lse_gradient[:, :rows]
    assert_delta(delta[:, :rows], of_rows, dout[:rows], out.cpu()[:rows], v)
    assert (delta[:, rows:] == 0).all()
    for gradient, ends in zip(found, (packing[0], packing[1], packing[1]), strict=True):
        assert (gradient[ends[-1] :] == 0).all()
    return *found, delta
