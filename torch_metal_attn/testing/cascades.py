"""Cases of `CascadePlan`: sequences that share pages of their prefixes."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.kv_cache import CascadePlan
from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing import attention_run
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.attention_problem import Problem, options_of, store, within_keys
from torch_metal_attn.testing.case import (
    Case,
    Prepared,
    call,
    chance,
    field,
    kinds,
    one_of,
    value_formats,
)
from torch_metal_attn.testing.tensors import (
    Memory,
    dtype_of,
    impossible_heads,
    numbers,
    rotated_blocks,
    wrong_rotation,
)

_SHARED = (
    *("dtype", "seed", "strict", "heads", "kv_heads", "head_dim", "v_head_dim", "values_in_keys"),
    *("q_length", "causal", "window_size_left", "window_size_right", "softcap", "learnable_sink"),
    *("format", "v_format", "hadamard"),
)


def _own(r: random.Random, case: "Cascade") -> tuple[int, ...]:
    return tuple(r.choice((0, 1, 5, 9, 20)) for _ in range(r.choice((1, 2, 4, 5))))


@dataclass(frozen=True)
class Cascade(Case):
    """Attributes: shared: number of pages that all sequences share. branched: number of pages that
    every second sequence shares. own: number of further rows of each sequence.
    """

    call: str = call("CascadePlan.attend")
    kv_heads: int = field(1, one_of(1, 1, 2))
    heads: int = field(1, lambda r, case: r.choice((1, 2, 8)) * case.kv_heads)
    values_in_keys: bool = field(False, chance(0.15))
    head_dim: int = field(
        8, lambda r, case: r.choice((64, 96, 160) if case.values_in_keys else (8, 64, 64, 96, 128))
    )
    v_head_dim: int = field(
        8,
        lambda r, case: (
            case.head_dim - 32
            if case.values_in_keys
            else r.choice((case.head_dim, case.head_dim, 32))
        ),
    )
    page: int = field(8, one_of(1, 5, 8, 16))
    shared: int = field(1, one_of(0, 1, 3, 6), varied=True)
    branched: int = field(0, one_of(0, 1, 3), varied=True)
    own: tuple[int, ...] = field((1, 1), _own, varied=True)
    q_length: int = field(1, one_of(1, 1, 2, 9))
    format: str = field("", one_of(*FORMATS), share=0.4)
    v_format: str = value_formats()
    hadamard: int = field(0, rotated_blocks, share=0.3)
    causal: bool = field(False, chance(0.7))
    window_size_left: int = field(-1, one_of(-1, -1, 30), varied=True)
    window_size_right: int = field(
        -1, one_of(-1, -1, 1), when=lambda case: not case.causal, varied=True
    )
    softcap: float = field(0.0, one_of(0.0, 0.0, 20.0))
    learnable_sink: str = field("", one_of("", "", "float32"))
    num_splits: int = field(0, one_of(0, 1, 2))
    values: str = kinds()

    cache: ClassVar[str] = "paged"  # read by `store`
    OF_SEQUENCES: ClassVar[tuple[str, ...]] = ("own",)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple((self.shared + self.branched) * self.page + own for own in self.own)

    def conflicts(self) -> dict[str, Any]:
        return {
            **impossible_heads(self),
            "at least one sequence must have keys": not self.own or max(self.lengths) < 1,
            "page must be at least 1": self.page < 1,
        }

    def illegal(self) -> dict[str, Any]:
        return wrong_rotation(self)

    def wrong(self) -> list[dict[str, Any]]:
        return [{"hadamard": 48}]

    @property
    def attention(self) -> Attention:
        return Attention(
            call="flash_decode",
            batch=len(self.own),
            kv_length=max(self.lengths),
            seqused_k=self.lengths,
            **{name: getattr(self, name) for name in _SHARED},
        )


def prepare(case: Cascade, device: torch.device) -> Prepared:
    """A plan and its call. Unused rows are NaN."""
    memory, attention, dtype = Memory(device), case.attention, dtype_of(case.dtype)
    batch, blocks = len(case.own), -(-max(case.lengths) // case.page)

    def make(seed: int, *shape: int, values: bool = False) -> Tensor:
        seed += case.seed
        return numbers(batch, *shape, kind=case.values, seed=seed, dtype=dtype, values=values)

    q = make(1, case.heads, case.q_length, case.head_dim)
    rows = case.kv_heads, blocks * case.page
    k, v = make(2, *rows, case.head_dim), make(3, *rows, case.v_head_dim, values=True)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    levels = [case.shared * case.page, (case.shared + case.branched) * case.page]
    for b in range(batch):
        # The shared rows are those of sequence 0, the branches' rows those of sequences 0 and 1.
        for first, end, origin in ((0, levels[0], 0), (*levels, b % 2)):
            pages = slice(first // case.page, end // case.page)
            table[b, pages] = table[origin, pages]
            for x in (k, v):
                x[b, :, first:end] = x[origin, :, first:end]
        k[b, :, case.lengths[b] :] = v[b, :, case.lengths[b] :] = torch.nan
    if case.values_in_keys:
        v = k[..., : case.v_head_dim]
    options = options_of(attention, batch, blocks * case.page)
    exact, kept, where = store(case, k, v, table)
    arguments = {"q": q, **dict(zip(("k_cache", "v_cache"), kept, strict=True))}
    arguments |= {name: x for name, x in where.items() if name in ("k_scale", "v_scale")}
    if "learnable_sink" in options:
        arguments["learnable_sink"] = options["learnable_sink"]
    placed = within_keys(case, {n: memory.place(n, x) for n, x in arguments.items()}, "_cache")
    plan = CascadePlan(
        table,
        case.lengths,
        case.page,
        case.q_length,
        causal=case.causal,
        window_size=(case.window_size_left, case.window_size_right),
        device=device,
    )

    def attend(**tensors: Any) -> tuple[Tensor, None]:
        by_row = {n: x.transpose(1, 2) if x.dim() == 4 else x for n, x in tensors.items()}
        out = plan.attend(
            **by_row, softcap=case.softcap, hadamard=case.hadamard, num_splits=case.num_splits
        )
        return out.transpose(1, 2), None

    k, v = (x.to(dtype) for x in exact)
    problem = Problem(q, k, v, (), options, kept, where, None, None, None)
    judge = partial(attention_run.judge, attention, problem, parts=_parts(plan, k.shape[2]))
    return Prepared(attend, placed, judge, memory)


def _parts(plan: CascadePlan, keys: int) -> list[Tensor]:
    """The keys that are not shared, and the keys of each level, bool (B, keys) each."""
    parts = [torch.ones(plan.batch_size, keys, dtype=torch.bool)]
    for level in plan.levels:
        part = torch.zeros_like(parts[0])
        for shared in level:
            rows = slice(shared.first * plan.page_size, shared.end * plan.page_size)
            part[list(shared.sequences), rows] = True
        parts[0] &= ~part
        parts.append(part)
    return parts
