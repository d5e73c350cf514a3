"""Calls a case of attention, and compares its results with the bounds of docs/numerics.md."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.fuzz.attention import Attention
from torch_metal_attn.fuzz.attention_calls import call_of
from torch_metal_attn.fuzz.attention_problem import Problem, build
from torch_metal_attn.fuzz.case import Prepared
from torch_metal_attn.fuzz.tensors import Memory
from torch_metal_attn.reference import attention, varlen_attention
from torch_metal_attn.self_test.attention import (
    largest_terms,
    rounding_attention,
    sink_rounding,
    torch_error,
    torch_gradient_errors,
)
from torch_metal_attn.self_test.measure import (
    ACCUMULATION,
    ROUNDING,
    Measure,
    largest,
    near,
    near_statistic,
    worst_of,
)

_OPS_NAMES = {"query": "q", "key": "k", "value": "v"}
_ADDED = ("attn_bias", "attn_mask", "alibi_slopes", "learnable_sink")


def prepare(case: Attention, device: torch.device) -> Prepared:
    """The call of the forward, or of the forward and the gradients of a loss."""
    problem = build(case)
    memory = Memory(device)
    function, arguments = call_of(case, problem, memory)
    if case.call == "scaled_dot_product_attention":
        problem.options["q_offset"] = None if case.causal_bias == "lower_right" else 0
        problem.options["causal"] |= bool(case.causal_bias)
    if case.causal:  # flash-attn's functions let it win
        problem.options["window_size_right"] = -1
    if not case.backward:
        return Prepared(function, arguments, partial(_judge, case, problem), memory)
    gradients = {
        name: memory.place(name, x)
        for name, x in (("dout", problem.dout), ("dlse", problem.dlse))
        if x is not None
    }
    differentiate = _directly if "bwd" in case.call else _by_autograd
    if not case.differentiable:
        differentiate = _without_gradient
    run = partial(differentiate, case, function, gradients)
    return Prepared(run, arguments, partial(_judge, case, problem), memory)


def _leaves(case: Attention, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The arguments that have a gradient."""
    names = ["q", "k", "v", "kv", "qkv", "query", "key", "value", "k_cache", "v_cache", *_ADDED]
    if case.causal_bias:
        names.remove("attn_mask")
    return {n: arguments[n] for n in names if n in arguments and arguments[n].is_floating_point()}


def _by_autograd(
    case: Attention, function: Callable[..., Any], given: dict[str, Tensor], **arguments: Any
) -> Any:
    """out, lse, and the gradients by name, including those of q, k and v in one tensor."""
    leaves = {n: x.detach().requires_grad_() for n, x in _leaves(case, arguments).items()}
    out, lse = function(**(arguments | leaves))
    results, wanted = [out], [given["dout"]]
    if "dlse" in given:
        results.append(lse)
        wanted.append(given["dlse"])
    grads = torch.autograd.grad(results, list(leaves.values()), wanted)
    named = dict(zip(leaves, grads, strict=True))
    transposed = "flash_attn" in case.call and not case.is_packed
    for together in ("qkv", "kv"):
        if together in named:
            named |= dict(zip(together, named.pop(together).unbind(-3), strict=True))
    named = {_OPS_NAMES.get(n, n): x for n, x in named.items()}
    if transposed:
        named |= {n: named[n].transpose(1, 2) for n in "qkv"}
    return out.detach(), None if lse is None else lse.detach(), named


def _without_gradient(
    case: Attention, function: Callable[..., Any], given: dict[str, Tensor], **arguments: Any
) -> Any:
    """out and lse for arguments that require grad, where `backward` must raise."""
    leaves = {n: x.detach().requires_grad_() for n, x in _leaves(case, arguments).items()}
    out, lse = function(**(arguments | leaves))
    try:
        torch.autograd.grad(out, list(leaves.values()), given["dout"])
    except NotImplementedError:
        return out.detach(), lse.detach()
    raise AssertionError("a call without a gradient returned one")


def _directly(
    case: Attention, function: Callable[..., Any], given: dict[str, Tensor], **arguments: Any
) -> Any:
    """The same by the ops that autograd calls."""
    ops = torch.ops.metal_attn
    out, lse = function(**arguments)
    dlse = given.get("dlse")
    name = case.call
    *grads, delta, normalisers = getattr(ops, name)(
        dout=given["dout"],
        dlse=dlse,
        out=out,
        softmax_lse=lse,
        exact_delta=case.exact_delta,
        **arguments,
    )
    named = dict(zip("qkv", grads, strict=True))
    for option, op in (
        ("attn_bias", f"{name}_bias"),
        ("attn_mask", f"{name}_bias"),
        ("alibi_slopes", f"{name}_slopes"),
    ):
        if option in arguments and arguments[option].is_floating_point():
            more = {"dout": given["dout"], "softmax_lse": lse, "delta": delta}
            if case.exact_delta:
                more["normalisers"] = normalisers
            named[option] = getattr(ops, op)(**more, **arguments)
    return out, lse, named


def _judge(case: Attention, problem: Problem, results: Any) -> list[Measure]:
    found, found_lse = results[:2]
    exact, exact_lse = _attend(problem, torch.float64)
    composed, _ = _attend(problem, None)
    if problem.poisoned_v is not None:
        exact = _with_nan_where_seen(problem, found.cpu(), exact)
    if found.dtype != problem.q.dtype:
        raise AssertionError(f"out has dtype {found.dtype} and not {problem.q.dtype}")
    sequences = _alone(case, problem)
    errors = [torch_error(*operands, options) for operands, _, options in sequences]
    error = max([*errors, worst_of([(composed, exact)])])
    # A score is rounded relative to its size, which the log-sum-exp has too. On a few rows torch's
    # own error can be close to zero.
    sizes = exact_lse.t() if problem.packing else exact_lse
    scores = ROUNDING[torch.float32] * sizes[..., None].abs().nan_to_num(0, 0, 0)
    measures = [near("out", found, exact, error, scores * largest(exact))]
    if found_lse is not None:
        rounded = bool(case.rotary or case.format)
        rounding = max(1e-5, 4 * ROUNDING[problem.q.dtype] if rounded else 0.0)
        # Keys that are dequantised are rounded, and the terms of a score may cancel.
        slack = ROUNDING[problem.q.dtype] * _largest_score(problem) if case.format else 0.0
        measures.append(near_statistic("softmax_lse", found_lse, exact_lse, rounding, slack))
    if case.backward and case.differentiable:
        measures += _judge_gradients(case, problem, sequences, results[2])
    return measures


def _largest_score(problem: Problem) -> float:
    """A bound of the terms of any score, by magnitude."""
    scale = problem.options["softmax_scale"]
    scale = problem.q.shape[-1] ** -0.5 if scale is None else scale
    norms = [largest(x.double().nan_to_num(0, 0, 0).norm(dim=-1)) for x in (problem.q, problem.k)]
    return abs(scale) * norms[0] * norms[1]


def _attend(
    problem: Problem,
    compute_dtype: torch.dtype | None,
    operands: tuple[Tensor, Tensor, Tensor] | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference, with the problem's own operands and options unless others are given."""
    q, k, v = operands or (problem.q, problem.k, problem.v)
    if problem.poisoned_v is not None and operands is None:
        v = v.clone()
        v[problem.poisoned_v] = 0.0
    function = varlen_attention if problem.packing else attention
    options = problem.options if options is None else options
    return function(q, k, v, *problem.packing, **options, compute_dtype=compute_dtype)


def _with_nan_where_seen(problem: Problem, found: Tensor, exact: Tensor) -> Tensor:
    """NaN in the column of v's NaN: for queries that see it, and for others if they have it."""
    place = problem.poisoned_v
    assert place is not None
    v = problem.v.clone()
    v[place] = 1.0
    other, _ = _attend(problem, torch.float64, (problem.q, problem.k, v))
    may_be = torch.zeros_like(exact, dtype=torch.bool)
    may_be[..., place[-1]] = True
    seen = (other - exact).abs() > 1e-30
    return exact.masked_fill(seen | (may_be & found.isnan()), math.nan)


def _alone(
    case: Attention, problem: Problem
) -> list[tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]]]:
    """The arguments for torch's own attention: operands (B, H, L, D), gradient and options.

    Packed sequences give one call each, without options that are tensors, except rotations.
    """
    if not problem.packing:
        return [((problem.q, problem.k, problem.v), problem.dout, problem.options)]
    numbers = {n: x for n, x in problem.options.items() if not isinstance(x, Tensor)}
    numbers = {n: x for n, x in numbers.items() if n != "dropout_p"}
    asked = []
    ends_q, ends_k = (x.tolist() for x in problem.packing[:2])
    for b, (q_length, kv_length) in enumerate(case.sequences):
        if q_length and kv_length:
            options = dict(numbers)
            for name, table in problem.options.items():
                if "rotary" in name and isinstance(table, Tensor):
                    options[name] = table[b] if table.dim() == 3 else table
            q, dout = (
                None if x is None else x[None, ends_q[b] : ends_q[b + 1]].transpose(1, 2)
                for x in (problem.q, problem.dout)
            )
            k, v = (
                x[None, ends_k[b] : ends_k[b + 1]].transpose(1, 2) for x in (problem.k, problem.v)
            )
            assert q is not None
            asked.append(((q, k, v), dout, options))
    return asked


def _judge_gradients(
    case: Attention, problem: Problem, sequences: Any, found: dict[str, Tensor]
) -> list[Measure]:
    """Measures of the gradients of q, k, v and of what is added to the scores."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    assert dout is not None
    added = [n for n in _ADDED if n in found]
    operands = (q, k, v)

    def gradients(
        attend: Callable[..., Any],
        dtype: torch.dtype,
        options: dict[str, Any],
        added: Sequence[str] = added,
    ) -> dict[str, Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in operands]
        mine = {n: options[n].clone().requires_grad_() for n in added}
        out, lse = attend(*leaves, **(options | mine))
        loss = (out * dout.to(out.dtype)).sum()
        if problem.dlse is not None:
            hidden = lse == -math.inf
            loss = loss + (lse.masked_fill(hidden, 0) * problem.dlse.to(lse.dtype)).sum()
        grads = torch.autograd.grad(loss, [*leaves, *mine.values()], allow_unused=True)
        names = ("q", "k", "v", *added)
        return {n: g for n, g in zip(names, grads, strict=True) if g is not None}

    def reference(compute_dtype: torch.dtype | None) -> Callable[..., Any]:
        return lambda *leaves, **options: _attend(problem, compute_dtype, leaves, options)

    options = problem.options
    exact = gradients(
        reference(torch.float64),
        torch.float64,
        {n: x.double() if n in added else x for n, x in options.items()},
    )
    attend = reference(None) if problem.packing else rounding_attention
    composed = gradients(attend, q.dtype, options)
    errors = [
        torch_gradient_errors(asked[0], asked[1], asked[2], gradient, given)
        for asked, gradient, given in sequences
    ]
    scale = options["softmax_scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    finite = [x.nan_to_num(0, 0, 0) for x in (q, k, v, dout)]
    terms = largest_terms(finite[0], finite[1], finite[2], finite[3], scale)
    delta_errors = _delta_errors(case, problem)
    narrow = {n: x.to(q.dtype) if n in added else x for n, x in options.items()}
    # Torch's own attention above is without dropout, which leaves differences between scores'
    # gradients where equal values have none.
    rough = gradients(reference(q.dtype), q.dtype, narrow) if added or case.dropout_p else {}
    measures = []
    for i, (name, term) in enumerate(zip("qkv", terms, strict=True)):
        torchs = [composed[name], *([rough[name]] if case.dropout_p else [])]
        own = worst_of((x, exact[name]) for x in torchs)
        error = max([own, *(each[i] for each in errors)])
        slack = ROUNDING[torch.float32] * term + delta_errors.get(name, 0.0)
        measures.append(near(f"d{name}", found[name], exact[name], error, slack))
    if added:
        sums = _sums_of_magnitudes(case, problem, gradients, reference(torch.float64))
        for name in added:
            error = worst_of([(rough[name], exact[name])])
            more: Tensor | float = delta_errors.get(name, 0.0)
            if name in sums:
                # Weights err by the rounding of scores, relative to their size.
                scores = ROUNDING[torch.float32] * _largest_score(problem)
                more = more + (ACCUMULATION + scores) * sums[name]
            elif name == "learnable_sink" and not problem.packing:
                more = more + sink_rounding(q, k, v, dout, options)
            measures.append(near(f"d{name}", found[name], exact[name], error, more))
    return measures


def _delta_errors(case: Attention, problem: Problem) -> dict[str, float]:
    """Bounds for the errors of the backward ops' gradients without exact_delta, by name.

    delta errs by the rounding of out, and the gradient of a score by that times its weight. The
    weights of a row sum to at most 1.
    """
    if "bwd" not in case.call or case.exact_delta or not problem.q.numel():
        return {}
    assert problem.dout is not None
    out, _ = _attend(problem, torch.float64)
    of_row = ROUNDING[problem.q.dtype] * largest((out * problem.dout).abs().sum(-1))
    scale = problem.options["softmax_scale"]
    scale = abs(problem.q.shape[-1] ** -0.5 if scale is None else scale)
    longest_q, longest_k, rows = case.q_length, case.kv_length, sum(q for q, _ in case.sequences)
    if case.is_packed:
        longest_q, longest_k = (max(lengths) for lengths in zip(*case.packed, strict=True))
    far = longest_q + longest_k + abs(case.q_offset or 0)
    rows_of_key = longest_q * case.heads // max(case.kv_heads, 1)
    return {
        "q": of_row * scale * largest(problem.k),
        "k": of_row * scale * rows_of_key * largest(problem.q),
        "attn_mask": of_row * rows * case.heads,
        "attn_bias": of_row * rows * case.heads,
        "alibi_slopes": of_row * rows * far,
        "learnable_sink": of_row * rows,
    }


def _sums_of_magnitudes(
    case: Attention,
    problem: Problem,
    gradients: Callable[..., dict[str, Tensor]],
    attend: Callable[..., Any],
) -> dict[str, Tensor]:
    """The sums of the terms' magnitudes, for gradients that are sums over scores and may cancel."""
    options, sums = dict(problem.options), {}
    longest_q, longest_k = case.q_length, case.kv_length
    if case.is_packed:
        longest_q, longest_k = (max(lengths) for lengths in zip(*case.packed, strict=True))
    whole = (len(case.sequences), case.heads, longest_q, longest_k)
    bias = next((n for n in ("attn_mask", "attn_bias") if _added(options.get(n))), "attn_bias")
    given = options.get(bias, torch.zeros(())).double()
    options[bias] = given.expand(whole).clone()
    terms = gradients(attend, torch.float64, options, (bias,))[bias].abs()
    if _added(problem.options.get(bias)):
        sums[bias] = terms.sum_to_size((1,) * (4 - given.dim()) + given.shape).view(given.shape)
    slopes = problem.options.get("alibi_slopes")
    if slopes is not None:
        keys = case.seqused_k or [k for _, k in case.sequences]
        firsts = [
            k - q if case.q_offset is None else case.q_offset
            for (q, _), k in zip(case.sequences, keys, strict=True)
        ]
        # (B, 1, Lq, Lk)
        positions = torch.tensor(firsts)[:, None, None, None] + torch.arange(longest_q)[:, None]
        far = (positions - torch.arange(longest_k)).abs()
        sums["alibi_slopes"] = (far * terms).sum((0, 2, 3) if slopes.dim() == 1 else (2, 3))
    return sums


def _added(x: Tensor | None) -> bool:
    """Whether it is added to the scores."""
    return x is not None and x.is_floating_point()
