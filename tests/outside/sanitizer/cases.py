"""Small problems of every kernel and feature: the small cases of `verify --full`."""

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

# Calls of kernels that other cases cover, calls that need gigabytes or launch nothing, and calls in
# which torch computes between the launches.
LEFT_OUT = (
    "two runs|threads|offsets|NaN|lengths and|: lengths|8x8|TF32|lists of|trees of|0x5|recent"
)
# A tile that does not stage K and V. Only `tune` can choose it.
UNSTAGED = "V_SLICE=64 BLOCK_K=16 SIMDGROUPS=4 COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=0"
HALF = partial(attention, dtype="float16")
FEW_HEADS = HALF(batch=1, heads=4, kv_heads=1, q_length=100, kv_length=520, backward=True)
LONG = partial(HALF, batch=1, heads=2, kv_heads=1, q_length=300, kv_length=1800, head_dim=16)
# {name: (call, a tile of flash_fwd, or "" for the default tile)}.
EXTRA_CASES = {
    "not staged": (HALF("causal"), UNSTAGED),
    "not staged, paged": (HALF("causal", "paged"), UNSTAGED),
    "threadgroups that share a KV head": (FEW_HEADS, ""),
    "blocks of a mask": (LONG(attn_mask="bool qk"), ""),
}


@dataclass
class Case:
    """A call that returns its results or writes to its tensors."""

    name: str
    dtype: str
    call: Callable[..., list[Tensor]]
    tensors: dict[str, Tensor]


def results(returned: Any) -> list[Tensor]:
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, dict):
        returned = returned.values()
    return [x for part in returned or () for x in results(part)]


def case(name: str, verify_case: Call, tile: str = "") -> Case:
    prepared = FAMILIES[type(verify_case)].prepare(verify_case, torch.device("cpu"))
    arguments = prepared.arguments
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}

    def call(**copies: Tensor) -> list[Tensor]:
        replaced = {n: copies.get(n, x) for n, x in arguments.items()}
        with tiles.forced({"flash_fwd": tile} if tile else {}):
            return results(prepared.function(**replaced))

    return Case(name, verify_case.dtype, call, prepared.memory.placed() | tensors)


def cases(only: str = "") -> Iterator[Case]:
    """The cases whose names match the regular expression, with dtypes in rotation."""
    by_name: dict[str, dict[str, Call]] = {}
    for row in listed.full():
        if not re.search(LEFT_OUT, str(row)):
            by_name.setdefault(str(row), {})[row.dtype] = row.case
    for number, (name, by_dtype) in enumerate(by_name.items()):
        if re.search(only, name):
            dtypes = list(by_dtype)
            yield case(name, by_dtype[dtypes[number % len(dtypes)]])
    for name, (verify_case, tile) in EXTRA_CASES.items():
        if re.search(only, name):
            yield case(name, verify_case, tile)
