"""The report of `doctor`."""

from collections import Counter
from textwrap import wrap

import torch

from torch_metal_attn.integrations.sdpa_replacement import without_numbers
from torch_metal_attn.runtime import mps
from torch_metal_attn.tools.costs import scaled
from torch_metal_attn.tools.doctor.attention import OURS, PACKED, TORCHS, Attention
from torch_metal_attn.tools.doctor.watch import Watch
from torch_metal_attn.tools.text_table import WIDTH, aligned
from torch_metal_attn.with_kvcache import DECODE_QUERIES
from torch_metal_attn.wording import count_text

_NONE = (
    "No attention was seen. It may run in another process, in a C++ program or a TorchScript, or "
    "in operations that doctor does not know."
)


def text(name: str, watch: Watch) -> str:
    """Lines of at most 100 columns, unless names are longer."""
    seen = watch.seen
    lines = [f"doctor: attention of {name}, torch {torch.__version__}"]
    if any(attention.device == "cpu" for attention in seen):
        lines.append("Tensors were on the CPU: the list says what would run each call on mps.")
        if mps.available():
            lines.append('This machine has mps: move the model and its inputs there, .to("mps").')
    if watch.compiled:
        lines.append("torch.compile was off in this run, so that calls in compiled code are seen.")
    for problem, calls in watch.undescribed.items():
        lost = f"{count_text(calls, 'call')} could not be described; please report this: {problem}"
        lines += wrap(lost, WIDTH)
    if not seen:
        return "\n".join([*lines, *wrap(_NONE, WIDTH)])
    table: list[tuple[str, ...]] = [
        ("calls", "query and key, or scores", "dtype", "goes to", "scores")
    ]
    notes: list[list[str]] = [[]]
    for group in sorted(_groups(seen), key=_largest_first):
        attention = max(group, key=lambda one: one.scores_bytes)
        size = f"{scaled(attention.scores_bytes)}B" if attention.scores_bytes else "none held"
        calls = sum(seen[one] for one in group)
        dtype = str(attention.dtype).removeprefix("torch.")
        table.append((str(calls), _shapes(group), dtype, attention.goes_to, size))
        notes.append(_notes(attention))
    places = Counter(attention.goes_to for attention in seen.elements())
    total = "; ".join(f"{name}: {n}" for name, n in places.most_common())
    lines += ["", *aligned(table, notes, numbers=(0,), indent=7), ""]
    lines.append(f"{count_text(seen.total(), 'call')}: {total}")
    if places[TORCHS]:
        lines += wrap(
            "scores: the size of one array of all scores, computed from its shape. torch's "
            "function may hold several, or none if torch has a fused kernel for the call.",
            WIDTH,
        )
    return "\n".join(lines)


def _groups(seen: Counter[Attention]) -> list[list[Attention]]:
    groups: dict[tuple[object, ...], list[Attention]] = {}
    for one in seen:
        dim = -3 if one.options == PACKED else -2  # of the sequence length
        queries = one.shapes[0][dim]
        rest = tuple(shape[:dim] + shape[dim + 1 :] for shape in one.shapes)
        if len(rest) == 1:  # scores, which have two lengths and no head dim
            rest = (one.shapes[0][:-2],)
        few = queries if queries <= DECODE_QUERIES else None
        texts = (without_numbers(text) for text in (one.options, one.why))
        key = (rest, few, one.dtype, one.device, one.place, one.goes_to, one.change, *texts)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _shapes(group: list[Attention]) -> str:
    shown = []
    for shapes in zip(*(one.shapes for one in group), strict=True):
        ranges = [sorted({min(sizes), max(sizes)}) for sizes in zip(*shapes, strict=True)]
        shown.append(f"({', '.join('-'.join(map(str, sizes)) for sizes in ranges)})")
    return " x ".join(shown)


def _largest_first(group: list[Attention]) -> tuple[bool, int, str]:
    first = group[0]
    return first.goes_to == OURS, -max(one.scores_bytes for one in group), first.place


def _notes(attention: Attention) -> list[str]:
    called = f"called in {attention.place}"
    notes = [f"{attention.options}, {called}" if attention.options else called]
    notes += [f"why: {attention.why}"] if attention.why else []
    notes += [f"to run it on metal_attn: {attention.change}"] if attention.change else []
    return notes
