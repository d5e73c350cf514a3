"""Whole stores to device and threadgroup memory of Metal vectors that are structs on the host."""

from .lexer import TokenList
from .vectors import VECTORS

# packed_float3 and the like, and vectors of bool (shim/__msl_packed.h, shim/__msl_bool.h).
BOOLS = frozenset({"bool2", "bool3", "bool4"})
STRUCTS = BOOLS | {f"packed_{vector}" for vector in VECTORS - BOOLS if vector.endswith("3")}
BEFORE_STATEMENT = (";", "{", "}", ")", "else")


def struct_stores(tokens: TokenList) -> None:
    """`p[i] = v;` becomes `::metal::__target(p[i]) = v;` where `p` is declared as such a vector.

    C++ has no assignment operators for objects in an address space.
    """
    names = _declared(tokens)
    if not names:
        return
    for index in range(len(tokens) - 1, 0, -1):
        if tokens[index].text not in names or tokens[index].kind != "name":
            continue
        start, end = index, index
        if tokens.text(index + 1) == "[":
            end = tokens.close(index + 1)
        elif tokens.text(index - 1) == "*":
            start = index - 1
        else:
            continue
        if tokens.text(end + 1) == "=" and tokens.text(start - 1) in BEFORE_STATEMENT:
            tokens[start].text = "::metal::__target(" + tokens[start].text
            tokens[end].text += ")"


def _declared(tokens: TokenList) -> set[str]:
    """Names of pointers to such vectors and of arrays of them, in any scope."""
    found: set[str] = set()
    for index, token in enumerate(tokens.tokens):
        if token.text not in STRUCTS:
            continue
        after = index + 1
        while tokens.text(after) in ("*", "const"):
            after += 1
        if tokens[after].kind == "name" and (after > index + 1 or tokens.text(after + 1) == "["):
            found.add(tokens.text(after))
    return found
