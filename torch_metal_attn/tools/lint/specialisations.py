"""Specialisations of each kernel family that together give every define each of its values."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from torch_metal_attn.flex.attention import flex_attention
from torch_metal_attn.flex.dense_mask import block_mask
from torch_metal_attn.runtime import shaders
from torch_metal_attn.runtime.tensor_tiles import on_m5
from torch_metal_attn.simulator import simulate
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.features import ALL_OPTIONS, attention
from torch_metal_attn.testing.steps import Step
from torch_metal_attn.tools.verify.cases import full
from torch_metal_attn.tuned import tiles

Defines = dict[str, str]

_CPU = torch.device("cpu")
_EVERYTHING = attention(
    call="flash_varlen_fwd",
    packed=((33, 70), (5, 9)),
    backward=True,
    seqused_k=(60, 9),
    leftpad_k=(3, 0),
    attention_chunk=16,
    window_size_left=40,
    attn_mask="bool qk",
    attn_bias="float32 hqk",
    alibi_slopes="h",
    **ALL_OPTIONS,
    learnable_sink="float32",
    rotary="qk",
    rotary_columns=32,
    dropout_p=0.3,
)
# With other defines, and without the options that gradients on tensor tiles do not support.
_ODD_KEYS = replace(
    _EVERYTHING, dtype="bfloat16", packed=((33, 71), (5, 9)), rotary_interleaved=True
)
_WITHOUT_BIAS = replace(_EVERYTHING, attn_bias="", alibi_slopes="", learnable_sink="")
_LONG_MASK = attention(
    call="flash_fwd",
    feature="mask of keys",
    attn_bias="float32 k",
    backward=True,
    through_lse=True,
    batch=1,
    q_length=2048,
    kv_length=2048,
)
_FAR_HALVES = attention(
    call="flash_fwd", cache_dtype="float16", k_layout=("far 1",), batch=1, q_length=9
)
# Formats with several options, each of which other cases have alone.
_QUANTISED = [
    attention(
        call="flash_fwd",
        cache=cache,
        format=format,
        dtype=dtype,
        attn_mask="bool bhqk",
        attn_bias="float32 hqk",
        rotary="q",
        rotary_columns=32,
        rotary_interleaved=cache == "paged",
    )
    for format, cache, dtype in (
        ("q8_0", "indexed", "float16"),
        ("q4_0", "paged", "bfloat16"),
        ("fp8_e4m3", "indexed", "float32"),
        ("q2_g32", "indexed", "bfloat16"),
        ("q3_g64", "paged", "float16"),
    )
]
_DECODE = partial(attention, call="flash_decode", kv_length=257, num_splits=2)
_LISTED = partial(_DECODE, q_length=3, heads=8, listed=70, list_dims="bh")
# Cases with more defines than those of `verify`, or with the defines of several of them.
_MORE: tuple[Case, ...] = (
    _EVERYTHING,
    _ODD_KEYS,
    _WITHOUT_BIAS,
    replace(_ODD_KEYS, attn_bias="", alibi_slopes=""),
    _LONG_MASK,
    _FAR_HALVES,
    *_QUANTISED,
    _DECODE(
        q_length=3,
        format="fp8_e4m3",
        cache="indexed",
        attention_chunk=16,
        causal=True,
        attn_mask="bool bhqk",
        dtype="bfloat16",
    ),
    _DECODE(q_length=9, format="q2_g32", tree="tree_mask", tree_by_sequence=True),
    _LISTED(format="q3_g64"),
    _LISTED(cache_dtype="bfloat16", kv_block_size=16),
    Step(rotary_columns=8, leftpad_k=(0,), cache="indexed", cache_dtype="float16"),
)
_UNSTAGED = "V_SLICE=64 BLOCK_K=32 SIMDGROUPS=4 COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=0"
# No case launches these: probes, and a sum for GPUs with more cores than threadgroups.
_ALONE: dict[str, list[Defines]] = {
    "probe": [{}],
    "probe_tensor": [{"FLOAT32": "0"}, {"FLOAT32": "1"}],
    "flash_bwd_sum": [{"ELEMENT": "half", "HEAD_DIM": "64", "SIMDGROUPS": "4"}],
}


@cache
def specialisations() -> dict[str, list[Defines]]:
    """Defines by family: a few launches in which each define has each value or is missing."""
    recorded: dict[str, list[Defines]] = {}
    with simulate(record=True) as run:
        for _ in _calls():
            for one in run.recorded:
                recorded.setdefault(one.family, []).append(one.defines)
            run.recorded.clear()
    return _ALONE | {
        family: _with_piece(family, _cover(launches)) for family, launches in recorded.items()
    }


def _with_piece(family: str, launches: list[Defines]) -> list[Defines]:
    """Adds the first launch in pieces, if the family's grids may be divided."""
    divided = "GRID_PIECE" in shaders.source(family)
    return launches + [launches[0] | {"GRID_PIECE": "1"}] * divided


def _cover(launches: list[Defines]) -> list[Defines]:
    """A greedy cover: each chosen launch has the most kinds of values that are still missing."""
    names = {name for defines in launches for name in defines}
    empty = frozenset[tuple[str, str]]()

    def kinds(defines: Defines) -> frozenset[tuple[str, str]]:
        return frozenset((name, _kind(name, defines.get(name, ""))) for name in names)

    # A float32 launch counts only for kinds of values that no 16-bit launch has.
    in_16_bits = empty.union(*(kinds(defines) for defines in launches if _is_16_bit(defines)))
    values = {
        kinds(defines) - (empty if _is_16_bit(defines) else in_16_bits): defines
        for defines in launches
    }
    chosen, missing = [], empty.union(*values)
    while missing:
        best = max(values, key=lambda kinds: len(kinds & missing))
        chosen.append(values[best])
        missing -= best
    return chosen


def _is_16_bit(defines: Defines) -> bool:
    return defines.get("ELEMENT") != "float"


def _kind(name: str, value: str) -> str:
    if not value.isdigit() or int(value) < 2:
        return value
    if name.endswith("FORMAT"):  # groups of 32 and of 64 are one kind
        return value if len(value) == 1 else f"{int(value) // 256} bits in groups"
    return "a size"


def _calls() -> Iterator[None]:
    cases = [one.case for one in full() if not one.case.threads]
    for case in (*_MORE, *cases):
        _call(case)
        yield
    for queries in (1, 256):
        _flex(queries)
        yield
    with tiles.forced({"flash_fwd": _UNSTAGED}):
        _call(attention(call="flash_fwd", feature="causal"))
        yield
    with on_m5():
        for case in (*_MORE, *cases[1::2]):  # one or two dtypes of each problem
            if isinstance(case, Attention) and "fwd" in case.call:
                _call(case)
                yield
        _flex(256)
        yield


def _call(case: Case) -> None:
    prepared = FAMILIES[type(case)].prepare(case, _CPU)
    prepared.function(**prepared.arguments)


def _flex(queries: int) -> None:
    q, k, v = (torch.zeros(1, 2, n, 64, requires_grad=queries > 1) for n in (queries, 256, 256))
    table = torch.zeros(4, requires_grad=queries > 1)
    numbers = torch.arange(4)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        whole = score.long() // 7 + numbers[k % 4] % 3 + torch.fmod(score.int(), 2)
        whole = whole + torch.div(score.int(), 7, rounding_mode="trunc")
        bounded = torch.maximum(torch.minimum(score, whole.float()), score.sign())
        parts = bounded % 2.0 + torch.fmod(score, 3.0) + score // 0.5
        return parts + torch.div(score, 0.25, rounding_mode="trunc") + table[k % 4] * table[q % 4]

    seen = torch.ones(queries, 256, dtype=torch.bool).tril(256 - queries)
    out = flex_attention(q, k, v, score_mod, block_mask(seen))
    if queries > 1:
        out.sum().backward()
