"""Messages between the processes of a group: their arguments, and tensors along a ring.

Only public functions of torch.distributed are used. Tensors are sent from the host's memory, so
that gloo works for tensors on mps too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from torch_metal_attn.wording import type_text


@dataclass(frozen=True)
class Ring:
    group: Any  # torch.distributed.ProcessGroup
    rank: int
    processes: int

    def previous(self, steps: int) -> int:
        return (self.rank - steps) % self.processes

    def pass_on(self, sent: Tensor, elements: int, tag: int) -> Callable[[], Tensor]:
        """Send `sent` to the next process. The returned function receives from the previous one.

        sent: one-dimensional, on the host. elements: size of the received tensor, which has sent's
        dtype. tag: must differ between messages that are in flight at the same time.
        """
        if self.processes == 1:
            return lambda: sent
        received = sent.new_empty(elements)
        after, before = self.previous(-1), self.previous(1)
        works = (
            distributed.irecv(received, group=self.group, group_src=before, tag=tag),
            distributed.isend(sent, group=self.group, group_dst=after, tag=tag),
        )

        def wait() -> Tensor:
            for work in works:
                if work is not None:
                    work.wait()
            return received

        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have the same shape and are on the host."""
        gathered = [torch.empty_like(tensor) for _ in range(self.processes)]
        distributed.all_gather(gathered, tensor, group=self.group)
        return gathered


class Agreement:
    """A `with` block in which a process checks its arguments. At its end they are compared.

    If a process raises in its block, or the arguments differ, all processes raise at the end. So no
    process waits for another one that has raised. Set `same` and `number` in the block.
    """

    def __init__(self, ring: Ring, function: str) -> None:
        self.same: dict[str, Any] = {}  # values, by name, that must be equal on every process
        self.number = 0  # a number, such as a length, that this process sends to all others
        self.numbers: list[int] = []  # after the block: `number` of each process
        self._ring, self._function = ring, function

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt does not wait for other processes
        if error is None:
            same = {"the function called": self._function}
            same |= {name: str(value) for name, value in self.same.items()}
            message: dict[str, Any] = {"same": same, "number": self.number}
        else:
            message = {"error": str(error)}
        messages: list[Any] = [None] * self._ring.processes
        with torch._C._DisableFuncTorch():  # transforms of torch.func would wrap the message
            distributed.all_gather_object(messages, message, group=self._ring.group)
        if error is None:
            self._compare(messages)

    def _compare(self, messages: list[dict[str, Any]]) -> None:
        for rank, each in enumerate(messages):
            if "error" in each:
                raise ValueError(f"{self._function} was refused on rank {rank}: {each['error']}")
        first = messages[0]["same"]
        for rank, each in enumerate(messages):
            for name, value in each["same"].items():
                if value != first[name]:
                    raise ValueError(
                        f"{name} is {value} on rank {rank} and {first[name]} on rank 0; "
                        f"{self._function} needs the same on every process"
                    )
        self.numbers = [each["number"] for each in messages]


def ring(group: Any) -> Ring:
    """The ring of a ProcessGroup, of a DeviceMesh with one dimension, or of all processes (None).

    Raises:
        TypeError: another object.
        ValueError: there is no process group, or this process is not in it.
    """
    if not distributed.is_available():
        raise ValueError("this build of torch has no torch.distributed")
    if not distributed.is_initialized():
        raise ValueError(
            "torch.distributed has no process group; call "
            'torch.distributed.init_process_group("gloo") first'
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh with {group.ndim} dimensions; it must have 1: pass "
                'mesh["name of the dimension"]'
            )
        group = group.get_group()
    if group is None:
        group = distributed.group.WORLD
    elif group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not contain this process; only its members may call this")
    elif not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group is {type_text(group)}; it must be a ProcessGroup, a DeviceMesh or None"
        )
    return Ring(group, distributed.get_rank(group), distributed.get_world_size(group))
