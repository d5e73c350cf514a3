"""Problems of ring attention. Each process runs them, and one process checks the results."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from tests.attention import flash_bwd_check, flash_fwd_check
from tests.helpers.home import HOME
from torch_metal_attn import simulate
from torch_metal_attn.distributed import ring_attention, shard_sequence, unshard_sequence
from torch_metal_attn.reference import attention

BOUNDS = [0, 9, 9, 21, 24]  # one sequence is empty, and one has fewer rows than chunks
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 8}


@dataclass(frozen=True)
class Case:
    """processes: how many of the four take part. lengths: each process' number of rows."""

    processes: int = 4
    layout: str = "contiguous"
    length: int = 24
    packed: bool = False
    simulated: bool = False
    lengths: tuple[int, ...] | None = None
    options: dict = field(default_factory=dict)


CAUSAL = {"causal": True}
SINK = torch.tensor([0.5, 2.0, -torch.inf, -1.0])
SLOPES = torch.tensor([[0.1, 0.5, 0.0, 1.0], [0.3, 0.7, -0.2, 0.4]]).repeat(2, 1)  # (batch, H)
ALIBI = {"alibi_slopes": SLOPES[:2]}
_BOTH_LAYOUTS = {
    "causal": {"options": CAUSAL},
    "odd": {"length": 19, "options": CAUSAL | {"softcap": 1.5, "softmax_scale": 0.3}},
    "window": {"length": 21, "options": {"window_size": (5, 3)}},
    "packed causal": {"packed": True, "options": CAUSAL},
    "simulated": {"processes": 2, "simulated": True, "options": CAUSAL},
    "simulated packed": {"processes": 2, "simulated": True, "packed": True, "options": CAUSAL},
    "ALiBi and sink": {"length": 19, "options": CAUSAL | ALIBI | {"learnable_sink": SINK}},
    "packed ALiBi": {"packed": True, "options": {"alibi_slopes": SLOPES}},
}
CASES = {
    f"{layout} {name}": Case(layout=layout, **case)
    for layout in ("contiguous", "zigzag")
    for name, case in _BOTH_LAYOUTS.items()
} | {
    "whole": Case(),
    "other lengths": Case(lengths=(7, 0, 12, 5), options=CAUSAL),
    "short": Case(layout="zigzag", length=3, options=CAUSAL),
    "empty": Case(length=0, options=CAUSAL),
    "three": Case(3, "zigzag", options=CAUSAL),
    "one": Case(1, "zigzag", options=CAUSAL),
}


def problem(case):
    """q, k, v, dout and dlse of the whole sequence, (B, H, L, D). B is 1 if packed."""
    sizes = HOME if case.simulated else SMALL
    length = BOUNDS[-1] if case.packed else case.length
    q, k, v = flash_fwd_check.make_qkv(
        batch=1 if case.packed or case.simulated else 2, q_length=length, kv_length=length, **sizes
    )
    return q, k, v, *flash_bwd_check.make_gradients(q, v, q.shape[:3])


def run(case, group):
    """Unsharded out, log-sum-exp and gradients; launches; this process' results of both runs."""
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32) if case.packed else None
    sharing = {"layout": case.layout, "cu_seqlens": cu_seqlens}
    rank = torch.distributed.get_rank(group)

    def share(x, dim):
        if case.lengths is not None:
            return x.split(case.lengths, dim)[rank]
        return shard_sequence(x, group, dim=dim, **sharing)

    q, k, v, dout, dlse = problem(case)
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    if case.packed:
        q, k, v, dout, dlse = (x[0] for x in (q, k, v, dout, dlse))
    along, along_lse = (0, 1) if case.packed else (1, 2)
    results = []
    # Saved tensors of other strides have equal values, so the second run must give the same bits.
    hooks = (lambda x: x, lambda x: x.mT.contiguous().mT)
    other_strides = torch.autograd.graph.saved_tensors_hooks(*hooks)
    with simulate(check=True) if case.simulated else nullcontext() as simulation:
        for again in range(2 if case.simulated else 1):
            leaves = [share(x, along).detach().requires_grad_() for x in (q, k, v)]
            options = dict(case.options)
            if "learnable_sink" in options:
                options["learnable_sink"] = options["learnable_sink"].clone().requires_grad_()
                leaves.append(options["learnable_sink"])
            with other_strides if again else nullcontext():
                out, lse = ring_attention(*leaves[:3], group, return_lse=True, **sharing, **options)
            loss = (out * share(dout, along)).sum() + (lse * share(dlse, along_lse)).sum()
            gradients = torch.autograd.grad(loss, leaves)
            results.append([out.detach(), lse.detach(), *gradients])
    launched = [launch.kernel for launch in simulation.launches] if case.simulated else []
    dims = [along, along_lse, *[along] * 3]
    pairs = zip(results[0], dims, strict=False)
    whole = [unshard_sequence(x, group, dim=dim, **sharing) for x, dim in pairs]
    for sink_gradient in results[0][len(dims) :]:
        whole.append(sink_gradient.clone())
        torch.distributed.all_reduce(whole[-1], group=group)
    return whole, launched, results[0], results[-1]


def visible(case):
    bounds = BOUNDS if case.packed else [0, case.length]
    left, right = case.options.get("window_size", (-1, -1))
    right = 0 if case.options.get("causal") else right
    place = torch.arange(bounds[-1])
    sequence = torch.bucketize(place, torch.tensor(bounds[1:]), right=True)
    apart = place - place[:, None]  # key - query
    within = (apart >= -left) | torch.tensor(left < 0)
    within &= (apart <= right) | torch.tensor(right < 0)
    return within & (sequence == sequence[:, None])


def alibi(case):
    slopes = case.options["alibi_slopes"]
    place = torch.arange(BOUNDS[-1] if case.packed else case.length)
    apart = (place[:, None] - place).abs()
    if not case.packed:
        return -slopes[:, :, None, None] * apart
    of_token = slopes.repeat_interleave(torch.tensor(BOUNDS).diff(), dim=0)
    return -of_token.t()[None, :, :, None] * apart


def check(case, whole):
    q, k, v, dout, dlse = problem(case)
    same = ("softcap", "softmax_scale", "learnable_sink")
    options = {name: case.options[name] for name in case.options if name in same}
    options["attn_mask"] = visible(case)
    if "alibi_slopes" in case.options:
        options["attn_bias"] = alibi(case)
    if "learnable_sink" in options:
        *whole, sink_gradient = whole
        check_sink(sink_gradient, q, k, v, dout, dlse, options)
    out, lse, *gradients = (x[None] for x in whole) if case.packed else whole
    out, *gradients = (x.transpose(1, 2) for x in (out, *gradients))
    flash_bwd_check.hold_gradients(q, k, v, dout, dlse, (out, lse, *gradients), options)


def check_sink(actual, q, k, v, dout, dlse, options):
    def gradient(dtype):
        leaf = SINK.double().requires_grad_()
        with_leaf = options | {"learnable_sink": leaf}
        out, lse = attention(q, k, v, **with_leaf, compute_dtype=dtype)
        return torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaf)[0]

    exact = gradient(torch.float64)
    error = (gradient(torch.float32) - exact).abs().max()
    assert (actual.double() - exact).abs().max() <= 2 * error + 2**-21 * exact.abs().max()
