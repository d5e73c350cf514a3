"""Attention over a sequence that is split over processes (Liu et al. 2023, Ring Attention).

Keys and values are passed around the ring. Each process attends to them with `flash_fwd` and merges
the results with `merge_state_`. In the backward `flash_bwd` gets the log-sum-exp of all keys, and
the gradients of keys and values are passed on with them until they return to their process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.distributed.calls import Call, Visible, calls
from torch_metal_attn.distributed.group import Ring
from torch_metal_attn.distributed.layout import Spans, rows
from torch_metal_attn.ops.differentiation import save, saved, without_gradient
from torch_metal_attn.ops.flash_bwd import gradient_of, sink_gradient

_KEYS, _GRADIENTS = 0, 1  # tags of messages


@dataclass(frozen=True)
class Problem:
    """A checked call of `ring_attention`. Tensors are (B, H, L, D), packed ones (1, H, T, D)."""

    ring: Ring
    spans: list[Spans]  # of each process
    visible: Visible
    packed: bool
    options: dict[str, Any]
    alibi_slopes: Tensor | None = None  # (Hq,), or (sequences of the batch, Hq)

    def calls(self, owner: int, device: torch.device) -> list[Call]:
        rank = self.ring.rank
        return calls(
            self.spans[rank],
            self.spans[owner],
            self.visible,
            is_local=owner == rank,
            earlier=owner < rank,
            packed=self.packed,
            device=device,
        )

    def options_of(self, call: Call) -> dict[str, Any]:
        options = self.options | call.options
        slopes = self.alibi_slopes
        if slopes is not None:
            of_sequence = self.packed and slopes.dim() == 2
            options["alibi_slopes"] = slopes[call.sequence] if of_sequence else slopes
        return options


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # The sink is in the softmax once, as a state before the first key.
        state = None if sink is None else _nothing_seen(q, v, sink)
        for owner, (visiting_k, visiting_v) in _visits(problem, k, v):
            for call in problem.calls(owner, q.device):
                part = _forward(problem, call, q, visiting_k, visiting_v)
                if state is None and part[0].shape[2] == q.shape[2]:
                    state = part[0].float(), part[1]
                    continue
                if state is None:
                    state = _nothing_seen(q, v)
                out, lse = (x[:, :, call.q] for x in state)
                # In float32, so that the number of processes adds no rounding.
                torch.ops.metal_attn.merge_state_(out, lse, part[0].float(), part[1])
        exact_out, lse = _nothing_seen(q, v) if state is None else state
        out = exact_out.to(q.dtype)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        # Save the unrounded out too, because the sink's gradient is a sum over all rows.
        with_sink = (sink, exact_out) if ctx.needs_input_grad[4] else ()
        save(ctx, q, k, v, out, lse, *with_sink)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *with_sink = saved(ctx)
        with torch.no_grad():
            whole = gradient_of(out, dout)
            gradients = [*_gradients(ctx.problem, [whole, dlse, q, out, lse], k, v)]
            if with_sink:
                gradients.append(_sink_gradient(whole, dlse, lse, *with_sink))
        if torch.is_grad_enabled():  # with create_graph
            # once_differentiable would omit the derivative without an error if dout requires no
            # grad, or if autograd.grad is called for some of the inputs.
            message = "ring_attention has no second derivative (double backward)"
            inputs = [x for x in (dout, dlse, q, k, v, *with_sink[:1]) if x is not None]
            gradients = without_gradient(message, inputs, lambda: tuple(gradients))
        dq, dk, dv, *dsink = gradients
        return None, dq, dk, dv, dsink[0] if dsink else None


def _visits(problem: Problem, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields (owner, [k, v]), first those of this process, while the next ones are received."""
    ring, flat = problem.ring, _flattened(k, v)
    for step in range(ring.processes):
        owner, last = ring.previous(step), step + 1 == ring.processes
        if not last:
            elements = _elements(problem, ring.previous(step + 1), k, v)
            coming = ring.pass_on(flat, elements, _KEYS)
        yield owner, [k, v] if step == 0 else _unflattened(problem, owner, flat, k, v)
        if not last:
            flat = coming()


def _gradients(
    problem: Problem, of_queries: list[Tensor | None], k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, added in float32 in the order of the ring, so that the bits are the same."""
    ring, q = problem.ring, of_queries[2]
    assert q is not None
    dq = torch.zeros_like(q, dtype=torch.float32)
    coming = None
    for owner, (visiting_k, visiting_v) in _visits(problem, k, v):
        dk_dv = [torch.zeros_like(x, dtype=torch.float32) for x in (visiting_k, visiting_v)]
        for call in problem.calls(owner, q.device):
            part = _backward(problem, call, of_queries, visiting_k, visiting_v)
            dq[:, :, call.q] += part[0]
            for total, each in zip(dk_dv, part[1:], strict=True):
                total[:, :, call.k] += each
        if coming is not None:
            before = _unflattened(problem, owner, coming(), k, v)
            dk_dv = [a + b for a, b in zip(before, dk_dv, strict=True)]
        elements = _elements(problem, (owner - 1) % ring.processes, k, v)
        coming = ring.pass_on(_flattened(*dk_dv), elements, _GRADIENTS)
    assert coming is not None
    dk, dv = _unflattened(problem, ring.rank, coming(), k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _nothing_seen(q: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The float32 state of queries that have seen no key, only the sink of their head, if any."""
    rows_of = q.shape[:3]
    out = q.new_zeros(*rows_of, v.shape[-1], dtype=torch.float32)
    lse = q.new_full(rows_of, -torch.inf, dtype=torch.float32)
    return out, lse if sink is None else lse.copy_(sink[:, None])


def _sink_gradient(
    dout: Tensor, dlse: Tensor | None, lse: Tensor, sink: Tensor, out: Tensor
) -> Tensor:
    delta = (dout.float() * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    return sink_gradient(sink, lse, delta, lse.new_ones(()), packed=False)


def _forward(
    problem: Problem, call: Call, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    options = problem.options_of(call)
    if call.packing is not None:
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(*packed, *call.packing, **options)
        return out.transpose(0, 1)[None], lse[None]
    part: tuple[Tensor, Tensor] = torch.ops.metal_attn.flash_fwd(
        q[:, :, call.q], k[:, :, call.k], v[:, :, call.k], **options
    )
    return part


def _backward(
    problem: Problem, call: Call, of_queries: list[Tensor | None], k: Tensor, v: Tensor
) -> list[Tensor]:
    options = problem.options_of(call)
    dout, dlse, q, out, lse = (x if x is None else x[:, :, call.q] for x in of_queries)
    k, v = k[:, :, call.k], v[:, :, call.k]
    assert lse is not None
    if call.packing is None:
        operands = dout, dlse, q, k, v, out, lse.contiguous()
        return list(torch.ops.metal_attn.flash_bwd(*operands, **options)[:3])
    dout, q, k, v, out = (x[0].transpose(0, 1) for x in (dout, q, k, v, out) if x is not None)
    statistics = dlse if dlse is None else dlse[0]
    gradients = torch.ops.metal_attn.flash_varlen_bwd(
        *(dout, statistics, q, k, v, out, lse[0], *call.packing), **options
    )
    return [x.transpose(0, 1)[None] for x in gradients[:3]]


def _flattened(k: Tensor, v: Tensor) -> Tensor:
    """k and v, or their gradients, as one vector on the host."""
    return torch.cat([k.reshape(-1), v.reshape(-1)]).cpu()


def _sizes(problem: Problem, owner: int, k: Tensor, v: Tensor) -> list[torch.Size]:
    length = rows(problem.spans[owner])
    return [torch.Size((*x.shape[:2], length, x.shape[3])) for x in (k, v)]


def _elements(problem: Problem, owner: int, k: Tensor, v: Tensor) -> int:
    return sum(size.numel() for size in _sizes(problem, owner, k, v))


def _unflattened(problem: Problem, owner: int, flat: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The owner's tensors that `_flattened` joined, on this process' device."""
    sizes = _sizes(problem, owner, k, v)
    parts = flat.split([size.numel() for size in sizes])
    return [part.view(size).to(k.device) for part, size in zip(parts, sizes, strict=True)]
