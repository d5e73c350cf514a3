"""Small problems of every kernel and feature: the cases of `verify --full` that are small.

They are for compute-sanitizer, which makes kernels a hundred times slower. What must come out is
what the op's reference computes on the CPU.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.testing.case import Case as Call
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.features import attention
from torch_metal_attn.tools.verify import cases as listed
from torch_metal_attn.tuned import tiles

# Further calls of the same kernels, one that takes gigabytes, one that launches nothing, and steps
# in which torch computes between the launches.
LEFT_OUT = re.compile(
    "two runs|threads|offsets|NaN|lengths and|: lengths|8x8|TF32|lists of|trees of|0x5|recent"
)
# K and V read without staging, as only `tune` chooses.
UNSTAGED = "V_SLICE=64 BLOCK_K=16 SIMDGROUPS=4 COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=0"
HALF = partial(attention, dtype="float16")
_FEW_HEADS: dict[str, Any] = {
    "batch": 1,
    "heads": 4,
    "kv_heads": 1,
    "q_length": 100,
    "kv_length": 520,
}
_LONG: dict[str, Any] = {
    "batch": 1,
    "heads": 2,
    "kv_heads": 1,
    "q_length": 300,
    "kv_length": 1800,
    "head_dim": 16,
}
# Cases, and another tile of flash_fwd than the chooser's.
MORE = {
    "not staged": (HALF("causal"), UNSTAGED),
    "not staged, paged": (HALF("causal", "paged"), UNSTAGED),
    "threadgroups that share a KV head": (HALF(**_FEW_HEADS, backward=True), ""),
    "blocks of a mask": (HALF(**_LONG, attn_mask="bool qk"), ""),
}


@dataclass
class Case:
    """A call with its tensors. It returns its results, and writes to tensors in place."""

    name: str
    dtype: str
    call: Callable[..., list[Tensor]]
    tensors: dict[str, Tensor]


def results(returned: Any) -> list[Tensor]:
    """The tensors of what a call has returned, as a list."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, dict):
        returned = returned.values()
    return [x for part in returned or () for x in results(part)]


def case(name: str, made: Call, tile: str = "") -> Case:
    """A case of `testing`, perhaps with another tile of flash_fwd than the chooser's."""
    prepared = FAMILIES[type(made)].prepare(made, torch.device("cpu"))
    arguments = prepared.arguments
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}

    def call(**given: Tensor) -> list[Tensor]:
        with tiles.forced({"flash_fwd": tile} if tile else {}):
            own = {n: x for n, x in given.items() if n in arguments}
            return results(prepared.function(**arguments | own))

    return Case(name, made.dtype, call, prepared.memory.placed() | tensors)


def cases(only: str = "") -> Iterator[Case]:
    """Those whose name the regular expression finds, each of another dtype than the one before."""
    by_name: dict[str, dict[str, Call]] = {}
    for one in listed.full():
        if not LEFT_OUT.search(str(one)):
            by_name.setdefault(str(one), {})[one.dtype] = one.case
    for number, (name, by_dtype) in enumerate(by_name.items()):
        if re.search(only, name):
            dtypes = list(by_dtype)
            yield case(name, by_dtype[dtypes[number % len(dtypes)]])
    for name, (made, tile) in MORE.items():
        if re.search(only, name):
            yield case(name, made, tile)
