"""Trees of new tokens that speculative decoding verifies, and the paths that it accepts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import as_int, as_int_at_least, integers, on_host
from torch_metal_attn.wording import count_text, value_text

Rows = Tensor | Sequence[Sequence[int]]


def rows_of_ints(name: str, rows: Any, count: int) -> list[list[int]]:
    """A list of ints for each of `count` sequences."""
    sequence = on_host(name, rows)
    if isinstance(sequence, str) or not isinstance(sequence, Sequence):
        raise TypeError(f"{name} is {value_text(rows)}; it must be a row of ints for each sequence")
    lists = [integers(f"{name}[{b}]", row) for b, row in enumerate(sequence)]
    if len(lists) != count:
        raise ValueError(
            f"{name} has {count_text(len(lists), 'row')}; it must have {count}, one per sequence"
        )
    return lists


def per_sequence(length: Any, count: int) -> list[int]:
    """The number of rows of each sequence. length: one number for all, or one per sequence."""
    if not isinstance(length, Sequence) and getattr(length, "ndim", 0) == 0:
        return [as_int_at_least("length", length)] * count
    lengths = integers("length", length)
    if len(lengths) != count:
        raise ValueError(
            f"length has {count_text(len(lengths), 'int')}; it must have {count}, one per sequence"
        )
    return [as_int_at_least("length", one) for one in lengths]


def check_layers_agree(id: int, lengths: Sequence[int], method: str) -> None:
    """Raise ValueError in the middle of a step. lengths: the sequence's rows in each layer."""
    if min(lengths) < max(lengths):
        raise ValueError(
            f"sequence {id} has layers of {min(lengths)} and of {max(lengths)} rows; append to all "
            f"layers before {method}"
        )


def length_within(id: int, length: int, longest: int) -> int:
    length = as_int("length", length)
    if not 0 <= length <= longest:
        raise ValueError(
            f"length is {length}; sequence {id} has {count_text(longest, 'row')}, so it must be in "
            f"0..{longest}"
        )
    return length


def checked_paths(
    paths: Rows, parents: Rows, lengths: Sequence[int], accepted: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The paths, and the row where each tree begins. Raises ValueError if they are invalid.

    accepted: the rows of each sequence that cannot be part of its tree.
    """
    chosen = rows_of_ints("paths", paths, len(lengths))
    trees = rows_of_ints("parents", parents, len(lengths))
    for b, (path, tree, length) in enumerate(zip(chosen, trees, lengths, strict=True)):
        if len(tree) > length - accepted[b]:
            since = " since the last accept" if accepted[b] else ""
            raise ValueError(
                f"parents[{b}] has {count_text(len(tree), 'token')}, and the sequence "
                f"{count_text(length - accepted[b], 'row')}{since}; its last rows must be those of "
                "the tree"
            )
        for i, parent in enumerate(tree):
            if not -1 <= parent < i:
                raise ValueError(
                    f"parents[{b}][{i}] is {parent}; it must be -1, for a root, or an earlier "
                    f"token, so it must be in -1..{i - 1}"
                )
        before = -1
        for step, token in enumerate(path):
            if not 0 <= token < len(tree):
                raise ValueError(
                    f"paths[{b}][{step}] is {token}; it must be in 0..{len(tree) - 1}, the tokens "
                    "of the tree"
                )
            if tree[token] != before:
                must = "a root" if step == 0 else f"a child of token {before}"
                raise ValueError(
                    f"paths[{b}] is {path}, and the parent of token {token} is {tree[token]}; "
                    f"paths[{b}][{step}] must be {must}"
                )
            before = token
    return chosen, [n - len(tree) for n, tree in zip(lengths, trees, strict=True)]


def moves(path: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds of copies (from, to) that move the rows of a path to the front of its tree.

    The copies of a round may run in any order, as no copy writes a row that another copy reads.
    The tokens of a path increase, so later rounds write only rows that earlier rounds have read.
    """
    rounds: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    for to, origin in enumerate(path):
        if origin == to:
            continue
        if not rounds or to in read:
            rounds.append([])
            read = set()
        rounds[-1].append((origin, to))
        read.add(origin)
    return rounds
