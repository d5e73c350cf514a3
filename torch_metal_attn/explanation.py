"""What a call of `metal_attn::flash_fwd` would run, or why it would refuse, without running it."""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.simulator import session


@dataclass(frozen=True)
class Explanation:
    """One launch in plain data, or the reason why there is none.

    Attributes: backend: "mps" or "simulator", which run the kernel; "reference" for CPU tensors
        while the simulator is off, which has the same result but runs no kernel; "" if the call is
        refused. kernel: the Metal function. specialisation: the defines that the source is compiled
        with. grid: threadgroups in x, y and z. threads: threads of a threadgroup in x, y and z.
        threadgroup_bytes: threadgroup memory of one threadgroup. reason: why this specialisation
        was chosen. refusal: the error that the call would raise; None if it would run.
    """

    backend: str = ""
    kernel: str = ""
    specialisation: dict[str, str] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    threadgroup_bytes: int = 0
    reason: str = ""
    refusal: str | None = None

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
        if self.backend == "reference":
            lines.append("  note            CPU tensors run the kernel only inside simulate()")
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, *packing: Any, **options: Any) -> Explanation:
    """Say what `torch.ops.metal_attn.flash_fwd` would do with these arguments; launch nothing.

    Args: those of the op: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), on the CPU or on
        mps, and its options. With cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k after
        v, those of `flash_varlen_fwd`.

    Arguments that the op would refuse raise nothing here: the refusal is in the result.
    """
    op = (
        torch.ops.metal_attn.flash_varlen_fwd_explain
        if packing
        else torch.ops.metal_attn.flash_fwd_explain
    )
    try:
        text = op(q, k, v, *packing, **options)
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
    )
