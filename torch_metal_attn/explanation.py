"""What a call of `metal_attn::flash_fwd` would run, or why it would refuse, without running it.

And for training what its backward would run, and the memory that a step would take.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.simulator import session


@dataclass(frozen=True)
class Kernel:
    """One kernel of a backward.

    Attributes: specialisation: the defines that the source is compiled with. threads: threads of a
        threadgroup in x, y and z. threadgroup_bytes: threadgroup memory of one threadgroup.
    """

    specialisation: dict[str, str]
    threads: tuple[int, ...]
    threadgroup_bytes: int


@dataclass(frozen=True)
class Training:
    """What a forward and its backward run and hold, in plain data.

    Attributes: kernels: those of the backward that compute gradients, by their names. inputs: bytes
        of q, k, v, dout and of the options that are tensors, by name, broadcast ones whole.
        allocated: bytes of everything that the two ops allocate, by name: out, softmax_lse, delta,
        dq, dk and dv. Nothing in it grows with the product of two lengths, and all of it is there
        at once only while the backward runs.
    """

    kernels: dict[str, Kernel]
    inputs: dict[str, int]
    allocated: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of inputs and of what is allocated: the most that a step holds."""
        return sum(self.inputs.values()) + sum(self.allocated.values())


@dataclass(frozen=True)
class Explanation:
    """One launch in plain data, or the reason why there is none.

    Attributes: backend: "mps" or "simulator", which run the kernel; "reference" for CPU tensors
        while the simulator is off, which has the same result but runs no kernel; "" if the call is
        refused. kernel: the Metal function. specialisation: the defines that the source is compiled
        with. grid: threadgroups in x, y and z. threads: threads of a threadgroup in x, y and z.
        threadgroup_bytes: threadgroup memory of one threadgroup. reason: why this specialisation
        was chosen. refusal: the error that the call would raise; None if it would run. training:
        what a backward adds, if it was asked for.
    """

    backend: str = ""
    kernel: str = ""
    specialisation: dict[str, str] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    threadgroup_bytes: int = 0
    reason: str = ""
    refusal: str | None = None
    training: Training | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        lines = [
            f"{self.kernel} on {self.backend}",
            "  specialisation  "
            + " ".join(f"{name}={value}" for name, value in self.specialisation.items()),
            "  grid            " + " x ".join(map(str, self.grid)) + " threadgroups",
            "  threads         " + " x ".join(map(str, self.threads)) + " a threadgroup",
            f"  memory          {self.threadgroup_bytes} bytes a threadgroup",
        ]
        if self.reason:
            lines.append(f"  reason          {self.reason}")
        if self.training is not None:
            lines += _training_lines(self.training)
        if self.backend == "reference":
            lines.append("  note            CPU tensors run the kernel only inside simulate()")
        return "\n".join(lines)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *packing: Any, backward: bool = False, **options: Any
) -> Explanation:
    """Say what `torch.ops.metal_attn.flash_fwd` would do with these arguments; launch nothing.

    Args: those of the op: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), on the CPU or on
        mps, and its options. With cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k after
        v, those of `flash_varlen_fwd`. backward: also say what its gradients would run, and the
        memory of both: it is computed, nothing is allocated.

    Arguments that the op, or with `backward` its backward, would refuse raise nothing here: the
    refusal is in the result.
    """
    name = "flash_varlen" if packing else "flash"
    ops = torch.ops.metal_attn
    try:
        text = getattr(ops, f"{name}_fwd_explain")(q, k, v, *packing, **options)
        plan = getattr(ops, f"{name}_bwd_plan")(q, k, v, *packing, **options) if backward else None
    except (TypeError, ValueError) as error:
        return Explanation(refusal=str(error))
    launch = json.loads(text)
    backend = launch["backend"]
    if backend == "simulator" and not session.active():
        backend = "reference"
    return Explanation(
        backend=backend,
        kernel=launch["kernel"],
        specialisation={name: str(value) for name, value in launch["defines"].items()},
        grid=tuple(launch["grid"]),
        threads=tuple(launch["threads"]),
        threadgroup_bytes=launch["threadgroup_bytes"],
        reason=launch.get("reason") or "",
        training=None if plan is None else _training(json.loads(plan), q, k, v, packing, options),
    )


def _training(
    plan: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Any, ...],
    options: dict[str, Any],
) -> Training:
    rows = q.shape[:-1].numel()
    out = rows * v.shape[-1] * q.element_size()
    statistics = rows * torch.float32.itemsize
    tensors = {"q": q, "k": k, "v": v}
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packing, strict=False))
    others = {n: t for n, t in (packed | options).items() if isinstance(t, Tensor)}
    return Training(
        kernels={
            name: Kernel(
                specialisation=kernel["defines"],
                threads=tuple(kernel["threads"]),
                threadgroup_bytes=kernel["threadgroup_bytes"],
            )
            for name, kernel in plan.items()
        },
        inputs={name: t.nbytes for name, t in (tensors | others).items()} | {"dout": out},
        allocated={"out": out, "softmax_lse": statistics, "delta": statistics}
        | {f"d{name}": t.nbytes for name, t in tensors.items()},
    )


def _training_lines(training: Training) -> list[str]:
    lines = []
    for name, kernel in training.kernels.items():
        defines = " ".join(f"{define}={value}" for define, value in kernel.specialisation.items())
        lines.append(f"  {name:<15} {defines}; {kernel.threadgroup_bytes} bytes a threadgroup")
    for title, tensors in (("inputs", training.inputs), ("allocated", training.allocated)):
        listed = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in tensors.items())
        lines.append(f"  {title:<15} {listed} MB")
    lines.append(f"  {'training':<15} {training.total / 1e6:.2f} MB in all")
    return lines
