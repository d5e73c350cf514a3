"""Explains a call of an op and its backward without running them, or why it would be refused."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import as_python_number, refuse_layout
from torch_metal_attn.ops import flash_bwd
from torch_metal_attn.ops.differentiation import refuse_dtensors
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.runtime import extension, session
from torch_metal_attn.runtime.refusals import as_value_errors
from torch_metal_attn.tools import costs
from torch_metal_attn.tools.costs import Cost, scaled

_NOTHING = "nothing to compute, so no kernel is launched"


@dataclass(frozen=True)
class Kernel:
    """One kernel that an op runs.

    Attributes: specialisation: the defines that the source is compiled with. threads: threads of a
        threadgroup in x, y and z. threadgroup_bytes: threadgroup memory of one threadgroup. grid:
        threadgroups in x, y and z. pieces: the number of dispatches, each in a separate command
        buffer; above 1 if a single one would run for over a second by a cautious estimate.
        choice: how its tile was chosen: "default", "tuned on this machine", "table of
        TORCH_METAL_ATTN_TUNED"; "" if its tile cannot be chosen. reason: for a kernel of a
        backward, why it has no tensor tiles on a GPU that has them, and whether it skips blocks
        that a bool mask hides; otherwise "". key: the key of its row in a table of tiles.
        candidates: tiles that `tune` measures, the chosen one first.
    """

    specialisation: dict[str, str]
    threads: tuple[int, ...]
    threadgroup_bytes: int
    grid: tuple[int, ...] = ()
    pieces: int = 1
    choice: str = ""
    reason: str = ""
    key: str = ""
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """The kernels and the memory of a forward and its backward, in plain data.

    Attributes: kernels: the backward's kernels that compute gradients, by their names. inputs:
        bytes of q, k, v, dout and of the options that are tensors, by name; broadcast tensors count
        in full. allocated: bytes of everything that the two ops allocate, by name: out,
        softmax_lse, delta, dq, dk and dv; rounded_delta, while the backward runs; normalisers, if
        q is float32 or there is an additive mask, a bias, slopes or a sink; dk_parts and dv_parts,
        while the backward runs, if the query heads of a KV head are split to use more cores; copies
        of flex_attention's captured tensors that have gradients; mask_blocks, the larger of the
        lists of blocks that a bool mask shows. Only mask_blocks grows with the product of two
        lengths. All of it is allocated at once only while the backward runs. cost: the fewest FLOPs
        and bytes of the backward.
    """

    kernels: dict[str, Kernel]
    inputs: dict[str, int]
    allocated: dict[str, int]
    cost: Cost

    @property
    def total(self) -> int:
        """Bytes of the inputs and of all allocations: the peak of a step."""
        return sum(self.inputs.values()) + sum(self.allocated.values())


@dataclass(frozen=True)
class Explanation:
    """The kernels of one call of an op, in plain data, or why it would be refused.

    Attributes: op: its name in `torch.ops.metal_attn`. backend: "mps" or "simulator", which run the
        kernels; "reference" for CPU tensors while the simulator is off, which has the same result
        but runs no kernel; "" if the call is refused. kernels: the kernels that run, in order, by
        the names of the Metal functions; for `flash_bwd` only those that compute gradients. reason:
        why this specialisation was chosen. cost: the fewest FLOPs and bytes that the call needs,
        see `torch_metal_attn.tools.costs`; None if it is refused. refusal: the error that the call
        would raise; None if it would run. training: the backward, if backward=True.

    The properties kernel, specialisation, grid, threads and threadgroup_bytes describe the first
    kernel, ignoring `mask_blocks`, which lists the blocks that a bool mask shows.
    """

    op: str = "flash_fwd"
    backend: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    reason: str = ""
    cost: Cost | None = None
    refusal: str | None = None
    training: Training | None = None

    @property
    def kernel(self) -> str:
        return next((name for name in self.kernels if name != "mask_blocks"), "")

    @property
    def specialisation(self) -> dict[str, str]:
        return self._first.specialisation

    @property
    def grid(self) -> tuple[int, ...]:
        return self._first.grid

    @property
    def threads(self) -> tuple[int, ...]:
        return self._first.threads

    @property
    def threadgroup_bytes(self) -> int:
        return self._first.threadgroup_bytes

    @property
    def _first(self) -> Kernel:
        return self.kernels.get(self.kernel, Kernel({}, (), 0))

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        lines = []
        for name, kernel in self.kernels.items():
            lines += [f"{name} on {self.backend}", *_kernel_lines(kernel)]
        if self.cost is not None:
            lines.append(f"  estimate        {cost_text(self.cost)}")
        if self.reason:
            lines.append(f"  reason          {self.reason}")
        if self.training is not None:
            lines += _training_lines(self.training)
        if self.backend == "reference":
            lines.append("  note            CPU tensors run the kernel only inside simulate()")
        return "\n".join(lines)


def shown(defines: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in defines.items())


def cost_text(cost: Cost) -> str:
    return f"at least {scaled(cost.flops)} FLOP of matrix products, {scaled(cost.bytes)} bytes"


def _kernel_lines(kernel: Kernel) -> list[str]:
    grid = " x ".join(map(str, kernel.grid))
    divided = f", in {kernel.pieces} command buffers" if kernel.pieces > 1 else ""
    return [
        f"  specialisation  {shown(kernel.specialisation)}",
        *([f"  grid            {grid} threadgroups{divided}"] if grid else []),
        "  threads         " + " x ".join(map(str, kernel.threads)) + " per threadgroup",
        f"  memory          {kernel.threadgroup_bytes} bytes per threadgroup",
        *([f"  tile            {kernel.choice}"] if kernel.choice else []),
        *([f"  reason          {kernel.reason}"] if kernel.reason else []),
    ]


def short_name(op: Any) -> str | None:
    """The name of an op of ours, given as a packet or an overload; None for other objects."""
    if isinstance(op, torch._ops.OpOverload):
        op = op.overloadpacket
    if not isinstance(op, torch._ops.OpOverloadPacket):
        return None
    namespace, _, name = op._qualified_op_name.partition("::")
    return name if namespace == "metal_attn" else None


def bound(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, with numbers converted to Python numbers."""
    schema = getattr(torch.ops.metal_attn, name).default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    numbers = {one.name for one in schema.arguments if "Tensor" not in str(one.type)}
    by_name = dict(zip(names, arguments, strict=False)) | options
    return {
        one: as_python_number(one, value) if one in numbers else value
        for one, value in by_name.items()
    }


def explained_name(op: Any) -> str | None:
    """The name of an op of ours that launches kernels itself; None for other objects."""
    name = short_name(op)
    return name if name is not None and recording_op(name) is not None else None


def recording_op(name: str) -> Any:
    """The op that returns the launches of `name`; None if `name` launches no kernels itself."""
    return getattr(torch.ops.metal_attn_explain, name, None)


def explain_op(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], *, backward: bool = False
) -> Explanation:
    """Explain `torch.ops.metal_attn.<name>`; see `torch_metal_attn.explain`."""
    op = recording_op(name)
    if op is None:
        raise TypeError(f"metal_attn::{name} cannot be explained: it runs no kernel of its own")
    by_name = bound(name, arguments, options)
    try:
        with as_value_errors():
            try:
                recorded = op(*arguments, **options)
            except (RuntimeError, ValueError) as error:
                refuse_dtensors(op, arguments, options)
                if isinstance(error, ValueError):
                    raise
                _check_names(name, by_name)
                for argument, value in by_name.items():
                    if isinstance(value, Tensor):
                        refuse_layout(argument, value)
                ArgumentNames().check_types(op, arguments, options)
                raise
            launches = extension.launches(recorded)
            gradients = backward_launches(name, by_name) if backward else []
    except (TypeError, ValueError, NotImplementedError) as error:
        return Explanation(op=name, refusal=str(error))
    reasons = [one["reason"] for one in launches if one.get("reason") and "bwd" not in name]
    return Explanation(
        op=name,
        backend=_backend(by_name),
        kernels=_kernels(launches, of_gradients="bwd" in name),
        reason=reasons[0] if reasons else "" if launches else _NOTHING,
        cost=costs.cost(name, by_name),
        training=_training(gradients, name, by_name) if backward else None,
    )


def _check_names(name: str, by_name: dict[str, Any]) -> None:
    schema = getattr(torch.ops.metal_attn, name).default._schema.arguments
    unknown = [one for one in by_name if one not in {argument.name for argument in schema}]
    missing = [
        one.name for one in schema if not one.has_default_value() and one.name not in by_name
    ]
    for names, problem in ((unknown, "has no argument"), (missing, "needs an argument")):
        if names:
            raise TypeError(f"metal_attn::{name} {problem} {', '.join(names)}")


def backward_launches(name: str, by_name: dict[str, Any]) -> list[dict[str, Any]]:
    """The launches of a forward op's backward, by the forward's arguments."""
    q, v = by_name["q"], by_name["v"]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), device="meta")
    rows = q.shape[:-1][::-1] if q.dim() == 3 else q.shape[:-1]
    lse = out.new_empty(rows, dtype=torch.float32)
    backward = name.removesuffix("fwd") + "bwd"
    forward = {"dout": out, "softmax_lse": lse} | by_name
    exact = {"exact_delta": True} if backward != "flex_bwd" else {}
    op = recording_op(backward)
    with extension.meta_passes():
        launches = extension.launches(op(**forward, out=out, dlse=None, **exact))
        if by_name.get("shares"):
            normalisers = lse if flash_bwd.normalised(q, by_name) else None
            op = recording_op("flex_bwd_captures")
            launches += extension.launches(op(**forward, delta=lse, normalisers=normalisers))
    return launches


def _backend(by_name: dict[str, Any]) -> str:
    device = next(value.device for value in by_name.values() if isinstance(value, Tensor))
    if device.type != "cpu":
        return "mps"
    return "simulator" if session.active() else "reference"


def _kernels(launches: list[dict[str, Any]], *, of_gradients: bool) -> dict[str, Kernel]:
    return {
        one["kernel"] + (f"[{one['share']}]" if "share" in one else ""): Kernel(
            specialisation=one["defines"],
            threads=tuple(one["threads"]),
            threadgroup_bytes=one.get("threadgroup_bytes", 0),
            grid=tuple(one["grid"]),
            pieces=one["pieces"],
            choice=one.get("choice", ""),
            reason=one.get("reason", "") if of_gradients else "",
            key=one.get("tuning", {}).get("key", ""),
            candidates=tuple(one.get("tuning", {}).get("candidates", ())),
        )
        for one in launches
        if not of_gradients or "registers" in one
    }


def _training(launches: list[dict[str, Any]], name: str, by_name: dict[str, Any]) -> Training:
    q, v = by_name["q"], by_name["v"]
    rows = q.shape[:-1].numel()
    out = rows * v.shape[-1] * q.itemsize
    inputs = {name: value.nbytes for name, value in by_name.items() if isinstance(value, Tensor)}
    inputs |= {f"captures[{i}]": x.nbytes for i, x in enumerate(by_name.get("captures", ()))}
    statistics = ["softmax_lse", "delta", "rounded_delta"]  # one float32 per row
    statistics += ["normalisers"] if flash_bwd.normalised(q, by_name) else []
    allocated = dict.fromkeys(statistics, rows * torch.float32.itemsize) | {"out": out}
    allocated |= {f"d{name}": by_name[name].nbytes for name in ("q", "k", "v")}
    splits = max((one.get("head_splits", 1) for one in launches), default=1)
    if splits > 1:
        part = splits * torch.float32.itemsize
        allocated |= {f"d{name}_parts": by_name[name].numel() * part for name in "kv"}
    copies = sum(one["written_bytes"] for one in launches if "share" in one)
    lists = [one["written_bytes"] for one in launches if one["kernel"] == "mask_blocks"]
    more = {"copies": copies, "mask_blocks": max(lists, default=0)}
    allocated |= {name: size for name, size in more.items() if size}
    cost = costs.cost(f"{name.removesuffix('fwd')}bwd", by_name)
    if "shares" in by_name:
        cost += costs.cost("flex_bwd_captures", by_name)
    kernels = _kernels(launches, of_gradients=True)
    return Training(kernels, inputs | {"dout": out}, allocated, cost)


def _training_lines(training: Training) -> list[str]:
    lines = []
    for name, kernel in training.kernels.items():
        bytes_text = f"{kernel.threadgroup_bytes} bytes per threadgroup"
        parts = [shown(kernel.specialisation), bytes_text, f"tile {kernel.choice}"]
        parts += [f"in {kernel.pieces} command buffers"] * (kernel.pieces > 1)
        lines.append(f"  {name:<15} " + "; ".join(parts + [kernel.reason] * bool(kernel.reason)))
    for title, tensors in (("inputs", training.inputs), ("allocated", training.allocated)):
        listed = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in tensors.items())
        lines.append(f"  {title:<15} {listed} MB")
    lines.append(f"  {'backward':<15} {cost_text(training.cost)}")
    lines.append(f"  {'training':<15} {training.total / 1e6:.2f} MB in all")
    return lines
