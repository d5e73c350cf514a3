"""In checked builds, shifts become operators of the shim, which check the amounts for vectors.

`a << b` becomes `a << ::metal::__checked << b`, which keeps precedence and order (`__msl_shift.h`).
The operators do not check shifts of scalars, because clang's sanitizer does.
"""

import re

from .lexer import CLOSERS, OPENERS, TokenList

# The lexer makes two tokens of `>>`, because it also closes template arguments.
FIRST = frozenset({"<<", "<<=", ">"})
TIGHTER = frozenset("+ - * / %".split())  # operators that bind tighter than a shift
STATEMENTS = frozenset({"else", "do", "return"})
LINKS = frozenset({".", "->", "::"})
ENDS = frozenset({";", "}", *OPENERS})
NUMBER = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)[uUlL]*")
ALWAYS_VALID = re.compile(r"[0-7][uUlL]*")  # amounts in range: elements have at least 8 bits


def find_shifts(tokens: TokenList) -> list[tuple[int, int]]:
    """(first, last token) of each shift to check. Empty if the text declares a shift operator."""
    result: list[tuple[int, int]] = []
    for index in tokens.where(FIRST):
        last = index
        if tokens.text(index) == ">":
            last += 1
            if tokens.text(last) not in (">", ">=") or tokens[last].space:
                continue
            if _closes_arguments(tokens, index):
                continue
        if tokens.text(index - 1) == "operator":
            return []
        if not _is_number(tokens, last, ALWAYS_VALID) and not _shifts_number(tokens, index):
            result.append((index, last))
    fields = _bit_fields(tokens) if result else set()
    return [shift for shift in result if tokens.text(shift[0] - 1) not in fields]


def check_shifts(tokens: TokenList, shifts: list[tuple[int, int]]) -> None:
    for first, last in shifts:
        operator, amount = tokens[last], tokens[last + 1]
        if operator.text.endswith("="):
            start = tokens.skip(object_start(tokens, first) - 1, {"*"}, -1) + 1
            changed = tokens.source(start, first)
            operator.text += f" decltype(::metal::__amount_of({changed})){{}} ="
        elif _is_number(tokens, last, NUMBER):
            amount.text = f"::metal::__by<{amount.text}>()"
        else:
            operator.text += f" ::metal::__checked {'<<' if operator.text == '<<' else '>>'}"


def _closes_arguments(tokens: TokenList, index: int) -> bool:
    """True if the two `>` at `index` close template argument lists."""
    at, lists = index - 1, 2
    while lists and at > 0 and tokens.text(at) not in ENDS:
        text = tokens.text(at)
        if text in CLOSERS:
            at = tokens.open(at)
        elif text == ">":
            lists += 1
        elif text == "<" and tokens[at - 1].kind == "name":
            is_comparison = tokens[at].space and tokens[at + 1].space
            lists -= not is_comparison or tokens.text(at - 1) == "template"
        at -= 1
    return not lists


def _is_number(tokens: TokenList, last: int, pattern: re.Pattern[str]) -> bool:
    """True if the whole amount after an operator is one number that matches `pattern`."""
    if not pattern.fullmatch(tokens.text(last + 1)):
        return False
    after = tokens.text(last + 2)
    return after in (";", ",", ")") if tokens.text(last).endswith("=") else after not in TIGHTER


def _shifts_number(tokens: TokenList, first: int) -> bool:
    """True if a literal is shifted, which is a scalar. After `)` it may be cast to a vector."""
    if tokens[first - 1].kind != "number":
        return False
    return tokens.text(first - 2) not in TIGHTER | FIRST | {")"}


def _bit_fields(tokens: TokenList) -> set[str]:
    """The names of bit-fields, which the shim's operators would not promote to int."""
    return {
        tokens.text(index - 1)
        for index in tokens.where((":",))
        if tokens[index + 1].kind == "number"
        and (tokens[index - 2].kind == "name" or tokens.text(index - 2) == ",")
        and tokens.text(index + 2) in (";", ",")
    }


def object_start(tokens: TokenList, end: int) -> int:
    """The first token of the object expression, such as `p[i].v`, that ends before `end`."""
    at = end - 1
    while True:
        text = tokens.text(at)
        if text in CLOSERS:
            at = tokens.open(at)
            before = tokens[at - 1]
            if before.text == ">":  # a function's template arguments
                at = tokens.open_angle(at - 1) - 1
            elif before.kind == "name" and before.text not in STATEMENTS:
                at -= 1
            elif text == "]" and before.text in CLOSERS:
                at -= 1
            else:
                break
        elif text in ("++", "--"):
            at -= 1
        elif tokens.text(at - 1) in LINKS:
            at -= 2
        else:
            break
    return at
