"""Runs a case of attention and compares the errors with the bounds of docs/numerics.md."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.reference import attention, option_of_sequence, varlen_attention
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.attention_calls import call_of
from torch_metal_attn.testing.attention_problem import Problem, build
from torch_metal_attn.testing.case import Prepared
from torch_metal_attn.testing.judge import (
    ACCUMULATION,
    ROUNDING,
    Measure,
    largest,
    near,
    near_statistic,
    worst_of,
)
from torch_metal_attn.testing.oracle import (
    largest_terms,
    rounding_attention,
    torch_error,
    torch_gradient_errors,
)
from torch_metal_attn.testing.rounding import merge_errors, out_errors, score_errors, summing
from torch_metal_attn.testing.tensors import Memory
from torch_metal_attn.testing.tf32 import as_multiplied, tf32_rounding

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
    if case.causal:  # flash-attn's functions ignore window_size_right
        problem.options["window_size_right"] = -1
    if not case.backward:
        return Prepared(function, arguments, partial(judge, case, problem), memory)
    gradients = {
        name: memory.place(name, x)
        for name, x in (("dout", problem.dout), ("dlse", problem.dlse))
        if x is not None
    }
    differentiate = _directly if "bwd" in case.call and case.differentiable else _by_autograd
    run = partial(differentiate, case, function, gradients)
    return Prepared(run, arguments, partial(judge, case, problem), memory)


def _leaves(case: Attention, arguments: dict[str, Any]) -> dict[str, Tensor]:
    names = ["q", "k", "v", "kv", "qkv", "query", "key", "value", "k_cache", "v_cache", *_ADDED]
    if case.causal_bias:
        names.remove("attn_mask")
    return {n: arguments[n] for n in names if n in arguments and arguments[n].is_floating_point()}


def _by_autograd(
    case: Attention, function: Callable[..., Any], gradients: dict[str, Tensor], **arguments: Any
) -> Any:
    """out, lse and the gradients by name. If the call has no gradients, `backward` must raise."""
    leaves = {n: x.detach().requires_grad_() for n, x in _leaves(case, arguments).items()}
    out, lse = function(**(arguments | leaves))
    detached = out.detach(), None if lse is None else lse.detach()
    results, wanted = [out], [gradients["dout"]]
    if "dlse" in gradients:
        results.append(lse)
        wanted.append(gradients["dlse"])
    try:
        grads = torch.autograd.grad(results, list(leaves.values()), wanted)
    except NotImplementedError:
        if case.differentiable:
            raise
        return detached
    if not case.differentiable:
        raise AssertionError("a call that has no gradient returned one")
    named = dict(zip(leaves, grads, strict=True))
    for together in ("qkv", "kv"):
        if together in named:
            named |= dict(zip(together, named.pop(together).unbind(-3), strict=True))
    named = {_OPS_NAMES.get(n, n): x for n, x in named.items()}
    if "flash_attn" in case.call and not case.packs_queries:
        named |= {n: named[n].transpose(1, 2) for n in "qkv"}
    return *detached, named


def _directly(
    case: Attention, function: Callable[..., Any], gradients: dict[str, Tensor], **arguments: Any
) -> Any:
    """The results of `_by_autograd`, by direct calls of the ops that autograd calls."""
    ops = torch.ops.metal_attn
    out, lse = function(**arguments)
    common = {"dout": gradients["dout"], "softmax_lse": lse, **arguments}
    *grads, delta, normalisers = getattr(ops, case.call)(
        dlse=gradients.get("dlse"), out=out, exact_delta=case.exact_delta, **common
    )
    named = dict(zip("qkv", grads, strict=True))
    common["delta"] = delta
    if case.exact_delta:
        common["normalisers"] = normalisers
    for option, suffix in (
        ("attn_bias", "bias"),
        ("attn_mask", "bias"),
        ("alibi_slopes", "slopes"),
    ):
        if option in arguments and arguments[option].is_floating_point():
            named[option] = getattr(ops, f"{case.call}_{suffix}")(**common)
    return out, lse, named


def judge(
    case: Attention, problem: Problem, results: Any, parts: list[Tensor] | None = None
) -> list[Measure]:
    """The measures of out, lse and gradients. parts: the merged parts, as for `merge_errors`."""
    actual, actual_lse = results[:2]
    exact, exact_lse = _attend(problem, torch.float64)
    with as_multiplied():
        composed, _ = _attend(problem, None)
    if problem.poisoned_v is not None:
        exact, composed = _with_poison(problem, actual.cpu(), exact, composed)
    if actual.dtype != problem.q.dtype:
        raise AssertionError(f"out has dtype {actual.dtype} and not {problem.q.dtype}")
    sequences = _torch_calls(case, problem)
    errors = [torch_error(*operands, options) for operands, _, options in sequences]
    error = max([*errors, worst_of([(composed, exact)])])
    errors_of_scores = _score_errors(case, problem)

    slack: float | Tensor = 0.0
    if not case.strict:
        attend = partial(_attend_to, problem)
        slack = _out_slack(case, problem, attend, errors_of_scores)
        if parts is not None:
            slack = slack + merge_errors(attend, problem.v, parts, exact_lse, problem.q.dtype)
    measures = [near("out", actual, exact, error, slack)]
    if actual_lse is not None:
        rows = errors_of_scores.t() if problem.packing else errors_of_scores
        measures.append(near_statistic("softmax_lse", actual_lse, exact_lse, 1e-5, rows))
    if case.backward and case.differentiable:
        measures += _judge_gradients(case, problem, sequences, results[2])
    return measures


def _attend_to(problem: Problem, v: Tensor) -> Tensor:
    operands = (problem.q.nan_to_num(0, 0, 0), problem.k.nan_to_num(0, 0, 0), v)
    return _attend(problem, torch.float64, operands)[0].nan_to_num(0, 0, 0)


def _out_slack(
    case: Attention, problem: Problem, attend: Callable[[Tensor], Tensor], errors_of_scores: Tensor
) -> Tensor:
    slack = out_errors(attend, problem.v, errors_of_scores, case.longest[1], case.dropout_p)
    if case.format:
        sizes = problem.v.abs().nan_to_num(0, 0, 0)
        if case.hadamard:  # the rotation mixes the errors of the columns of a block
            blocks = sizes.unflatten(-1, (-1, case.hadamard))
            sizes = blocks.norm(dim=-1, keepdim=True).expand_as(blocks).flatten(-2)
        slack = slack + ROUNDING[problem.q.dtype] * attend(sizes)
    return slack


def _scale(problem: Problem) -> float:
    scale = problem.options["softmax_scale"]
    return float(problem.q.shape[-1] ** -0.5 if scale is None else scale)


def _score_errors(case: Attention, problem: Problem) -> Tensor:
    """Bounds of the errors of each row's scores: (B, Hq, Lq), or (T, Hq) for packed sequences."""
    options = problem.options
    added = [largest(options[n]) for n in _ADDED[:2] if _adds(options.get(n))]
    if "alibi_slopes" in options:
        added.append(
            largest(options["alibi_slopes"]) * (sum(case.longest) + abs(case.q_offset or 0))
        )
    # Rotated and dequantised rows are rounded to q's dtype.
    rounded = len(case.rotary) + (case.format != "") + (case.hadamard > 0)
    operands = rounded * ROUNDING[problem.q.dtype] + 2 * tf32_rounding(problem.q.dtype)
    return score_errors(
        problem.q, problem.k, _scale(problem), operands, sum(added) + options["softcap"]
    )


def _attend(
    problem: Problem,
    compute_dtype: torch.dtype | None,
    operands: tuple[Tensor, Tensor, Tensor] | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = operands or (problem.q, problem.k, problem.v)
    if problem.poisoned_v is not None and operands is None:
        v = v.clone()
        v[problem.poisoned_v] = 0.0
    function = varlen_attention if problem.packing else attention
    options = problem.options if options is None else options
    return function(q, k, v, *problem.packing, **options, compute_dtype=compute_dtype)


def _with_poison(
    problem: Problem, actual: Tensor, exact: Tensor, composed: Tensor
) -> tuple[Tensor, Tensor]:
    """The results with v's NaN or infinity, whose column may be NaN for all other queries too."""
    place = problem.poisoned_v
    assert place is not None
    v = problem.v.clone()
    # Weights are positive, so their product with infinity is infinity.
    poison, v[place] = float(v[place]), 1.0
    other, _ = _attend(problem, torch.float64, (problem.q, problem.k, v))
    seen = (other - exact).abs() > 1e-30
    in_column = torch.zeros_like(seen)
    in_column[..., place[-1]] = True
    allowed = in_column & actual.isnan() & ~seen
    exact, composed = (
        x.masked_fill(allowed, math.nan).masked_fill(seen, poison) for x in (exact, composed)
    )
    return exact, composed


def _torch_calls(
    case: Attention, problem: Problem
) -> list[tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]]]:
    """Operands, dout and options for torch's attention, with one call for each packed sequence."""
    if not problem.packing:
        return [((problem.q, problem.k, problem.v), problem.dout, problem.options)]
    kept = {n: x for n, x in problem.options.items() if n not in ("dropout_p", "rng_state")}
    ends_q, ends_k = (None if x is None else x.tolist() for x in problem.packing[:2])
    assert ends_q is not None
    calls = []
    for b, (q_length, kv_length) in enumerate(case.sequences):
        if q_length and kv_length:
            rows = slice(ends_q[b], ends_q[b + 1])
            q = problem.q[None, rows].transpose(1, 2)
            dout = None if problem.dout is None else problem.dout[None, rows].transpose(1, 2)
            k, v = (
                x[b : b + 1]
                if ends_k is None
                else x[None, ends_k[b] : ends_k[b + 1]].transpose(1, 2)
                for x in (problem.k, problem.v)
            )
            options = {n: option_of_sequence(n, x, b, rows, k.shape[2]) for n, x in kept.items()}
            calls.append(((q, k, v), dout, options))
    return calls


def _judge_gradients(
    case: Attention, problem: Problem, sequences: Any, actual: dict[str, Tensor]
) -> list[Measure]:
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    assert dout is not None
    added = [n for n in _ADDED if n in actual]
    operands = (q, k, v)

    def gradients(
        attend: Callable[..., Any], dtype: torch.dtype, options: dict[str, Any]
    ) -> dict[str, Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in operands]
        scores = {n: options[n].clone().requires_grad_() for n in added}
        out, lse = attend(*leaves, **(options | scores))
        loss = (out * dout.to(out.dtype)).sum()
        if problem.dlse is not None:
            hidden = lse == -math.inf
            loss = loss + (lse.masked_fill(hidden, 0) * problem.dlse.to(lse.dtype)).sum()
        grads = torch.autograd.grad(loss, [*leaves, *scores.values()], allow_unused=True)
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
    with as_multiplied():
        composed = gradients(attend, q.dtype, options)
    errors = [
        torch_gradient_errors(q_rows, k_rows, v_rows, gradient, options)
        for (q_rows, k_rows, v_rows), gradient, options in sequences
    ]
    slacks = (_policy_slacks if case.strict else _gradient_slacks)(case, problem)
    narrow = {n: x.to(q.dtype) if n in added else x for n, x in options.items()}
    # The calls of torch's attention above have no dropout. With dropout, even equal values give
    # gradients of scores that differ.
    rough = {}
    if added or case.dropout_p:
        with as_multiplied():
            rough = gradients(reference(q.dtype), q.dtype, narrow)
    measures = []
    for i, name in enumerate("qkv"):
        torchs = [composed[name], *([rough[name]] if case.dropout_p else [])]
        composed_error = worst_of((x, exact[name]) for x in torchs)
        error = max([composed_error, *(each[i] for each in errors)])
        measures.append(near(f"d{name}", actual[name], exact[name], error, slacks[name]))
    for name in added:
        error = worst_of([(rough[name], exact[name])])
        measures.append(near(f"d{name}", actual[name], exact[name], error, slacks[name]))
    return measures


def _policy_slacks(case: Attention, problem: Problem) -> dict[str, float | Tensor]:
    assert problem.dout is not None
    terms = largest_terms(problem.q, problem.k, problem.v, problem.dout, _scale(problem))
    slacks: dict[str, float | Tensor] = dict.fromkeys(_ADDED, 0.0)
    slacks |= {n: ROUNDING[torch.float32] * term for n, term in zip("qkv", terms, strict=True)}
    if "learnable_sink" in problem.options:
        weight, sizes = _sink_terms(problem)
        slacks["learnable_sink"] = ACCUMULATION * (weight * sizes).flatten(0, -2).sum(0)
    return slacks


def _sink_terms(problem: Problem) -> tuple[Tensor, Tensor]:
    """The sink's weight in each row, heads last, and the magnitudes that it multiplies."""
    assert problem.dout is not None
    out, lse = _attend(problem, torch.float64)
    sizes = (out * problem.dout).abs().sum(-1)
    if not problem.packing:
        sizes = sizes.transpose(1, 2)
    if problem.dlse is not None:
        sizes = sizes + problem.dlse.transpose(-2, -1).abs()
    lse = lse.transpose(-2, -1)
    # The log-sum-exp of rows outside of all sequences is -inf.
    logits = problem.options["learnable_sink"].double() - lse
    return logits.masked_fill(lse == -math.inf, -math.inf).exp(), sizes.nan_to_num(0, 0, 0)


def _gradient_slacks(case: Attention, problem: Problem) -> dict[str, float | Tensor]:
    """Bounds of the rounding errors of the gradients (docs/design/numerics.md), by name."""
    q, k, v, dout, options = problem.q, problem.k, problem.v, problem.dout, problem.options
    assert dout is not None
    if not q.numel():
        return dict.fromkeys(("q", "k", "v", *_ADDED), 0.0)
    weights, score_gradients = _weights_and_score_gradients(case, problem)
    out, lse = _attend(problem, torch.float64)
    longest_q, longest_k = case.longest
    group = case.heads // case.kv_heads
    relative = (
        2 * largest(_score_errors(case, problem))
        + 2**-22 * largest(lse)
        + summing(max(longest_q * group, longest_k))
        + len(case.rotary) * ROUNDING[q.dtype]
    )
    kept = 1 / (1 - case.dropout_p) if case.dropout_p < 1 else 0.0
    norms = [largest(x.double().nan_to_num(0, 0, 0).norm(dim=-1)) for x in (v, dout)]
    delta_error = 2 * kept * summing(v.shape[-1]) * norms[0] * norms[1]
    if "bwd" in case.call and not case.exact_delta:
        delta_error += ROUNDING[q.dtype] * largest((out * dout).abs().sum(-1))
    tolerated = max(ROUNDING[q.dtype], ACCUMULATION)
    # (B, Hq, Lq, Lk)
    errors = relative * score_gradients.abs() + delta_error * weights

    def largest_of_keys(x: Tensor) -> float:
        """The largest sum over the queries that share a key."""
        return largest(x.sum(2).unflatten(1, (case.kv_heads, group)).sum(2))

    scale = abs(_scale(problem))
    slacks: dict[str, float | Tensor] = {
        # dq is computed again only if delta errs by more than a rounding of the row's gradients.
        "q": scale * largest((errors + tolerated * score_gradients.abs()).sum(-1)) * largest(k),
        "k": scale * largest_of_keys(errors) * largest(q),
        "v": relative * kept * largest_of_keys(weights) * largest(dout),
    }
    for name in ("attn_mask", "attn_bias"):
        if _adds(options.get(name)):
            shape = options[name].shape
            whole = errors.sum_to_size((1,) * (4 - len(shape)) + tuple(shape))
            slacks[name] = whole.view(shape)
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        keys = case.seqused_k or [n for _, n in case.sequences]
        firsts = [
            n - queries if case.q_offset is None else case.q_offset
            for (queries, _), n in zip(case.sequences, keys, strict=True)
        ]
        # (B, 1, Lq, Lk)
        positions = torch.tensor(firsts)[:, None, None, None] + torch.arange(longest_q)[:, None]
        distances = (positions - torch.arange(errors.shape[-1])).abs()
        dims = (0, 2, 3) if slopes.dim() == 1 else (2, 3)
        slacks["alibi_slopes"] = (distances * errors).sum(dims)
    if "learnable_sink" in options:
        weight, sizes = _sink_terms(problem)
        slacks["learnable_sink"] = (weight * (relative * sizes + delta_error)).flatten(0, -2).sum(0)
    return slacks


def _weights_and_score_gradients(case: Attention, problem: Problem) -> tuple[Tensor, Tensor]:
    """The softmax and the gradient of the scores in float64, (B, Hq, Lq, Lk)."""
    options = dict(problem.options)
    name = next((n for n in ("attn_mask", "attn_bias") if _adds(options.get(n))), "attn_bias")
    bias = options.get(name, torch.zeros(())).double()
    whole = (len(case.sequences), case.heads, *case.longest)
    bias = bias.expand(whole).clone().requires_grad_()
    operands = (problem.q.double(), problem.k.double(), problem.v.double())
    out, lse = _attend(problem, torch.float64, operands, options | {name: bias})
    lse = lse.masked_fill(lse == -math.inf, 0)
    assert problem.dout is not None
    loss = (out * problem.dout).sum()
    if problem.dlse is not None:
        loss = loss + (lse * problem.dlse).sum()
    (weights,) = torch.autograd.grad(lse.sum(), bias, retain_graph=True)
    return weights, torch.autograd.grad(loss, bias)[0]


def _adds(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()
