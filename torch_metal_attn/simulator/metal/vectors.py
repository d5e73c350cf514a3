"""Construction and conversion of vectors, for which C++ has another syntax or none."""

from collections.abc import Collection

from .lexer import TokenList

ELEMENTS = "char uchar short ushort int uint long ulong half bfloat float bool".split()
VECTORS = frozenset(f"{element}{count}" for element in ELEMENTS for count in (2, 3, 4))
# Packed vectors that are vectors in clang. Those of three elements are structs.
PACKED = frozenset(f"packed_{element}{count}" for element in ELEMENTS[:-1] for count in (2, 4))

# Tokens that may precede an expression. `T(x)` after one of them is not a declaration.
BEFORE_EXPRESSION = frozenset(
    "= ( , return + - * / % < > ? : && || ! ~ [ & | ^ << == != <= >= += -= *= /= { case".split()
)
STATEMENT_ENDS = (";", "{", "}")


def rewrite_vectors(tokens: TokenList, aliases: set[str]) -> None:
    """`T(...)` becomes `::metal::__mk<T>(...)`, for vector types and names that may be vectors."""
    _braced_arguments(tokens)
    constructed = VECTORS | PACKED
    # clang does not convert between half and bfloat.
    if {"half", "bfloat"} <= {token.text for token in tokens.tokens}:
        constructed |= {"half", "bfloat"}
    for index in reversed(tokens.where({*constructed, *aliases, "vec", "static_cast"})):
        token = tokens[index]
        if token.kind != "name":
            continue
        if token.text in constructed:
            _construct(tokens, index, index, aliases)
        elif token.text == "vec" and tokens.text(index + 1) == "<":
            _construct(tokens, index, tokens.close_angle(index + 1), aliases)
        elif token.text in aliases and tokens.text(index + 1) == ")":
            _cast(tokens, index, index, aliases)
        elif token.text in aliases and tokens.text(index + 1) in ("(", "<"):
            end = tokens.close_angle(index + 1) if tokens.text(index + 1) == "<" else index
            if tokens.text(end + 1) == "(" and _is_expression(tokens, index, end):
                token.text = f"::metal::__construct<{token.text}"
                tokens[end].text += ">"
        elif token.text == "static_cast" and tokens.text(index + 1) == "<":
            _static_cast(tokens, index, aliases, constructed)


def name_bool_vectors(tokens: TokenList) -> None:
    """`vec<bool, N>` becomes `boolN`, with one byte per element. clang packs elements into bits."""
    for index in reversed(tokens.where(("vec",))):
        if [tokens.text(index + i) for i in (1, 2, 3)] != ["<", "bool", ","]:
            continue
        end = tokens.close_angle(index + 1)
        if end == index + 5 and tokens.text(index + 4) in ("2", "3", "4"):
            tokens[index].text = f"bool{tokens.text(index + 4)}"
            tokens.remove(index + 1, end + 1)
        else:
            tokens[index].text = "__bools"
            tokens.remove(index + 2, index + 4)


def _braced_arguments(tokens: TokenList) -> None:
    """`f({a, b, c})` becomes `f(::metal::__braces(a, b, c))`."""
    for index in tokens.where(("{",)):
        token = tokens[index]
        if tokens.text(index - 1) not in ("(", ","):
            continue
        end = tokens.close(index)
        if tokens.text(end + 1) not in (",", ")") or not _is_argument(tokens, index):
            continue
        inside = {tokens.text(i) for i in range(index + 1, end)}
        if len(tokens.split(index + 1, end)) in (2, 3, 4) and not inside & {"{", ";", ""}:
            token.space += "::metal::__braces"
            token.text, tokens[end].text = "(", ")"


def _is_argument(tokens: TokenList, index: int) -> bool:
    at = tokens.seek_back(index - 1, ("(", "{", "[", ";"))
    is_call = tokens[at - 1].kind == "name" or tokens.text(at - 1) in (">", "]", ")")
    return tokens.text(at) == "(" and is_call


def type_names(tokens: TokenList) -> set[str]:
    """Template parameters and aliases of the text, which may be any type."""
    result: set[str] = set()
    for index in tokens.where(("typename", "class", "using", "typedef")):
        text = tokens.text(index)
        if text in ("typename", "class"):
            if tokens[index + 1].kind == "name" and tokens.text(index + 2) in (",", ">", "="):
                result.add(tokens.text(index + 1))
        elif text == "using" and tokens.text(index + 2) == "=":
            result.add(tokens.text(index + 1))
        elif text == "typedef":
            end = tokens.next(index, (";", "{", "("))
            if tokens.text(end) == ";" and tokens[end - 1].kind == "name":
                result.add(tokens.text(end - 1))
    return result - VECTORS - {"vec"}


def _construct(tokens: TokenList, index: int, end: int, aliases: Collection[str]) -> None:
    """Rewrite the construction or cast whose vector type is [index, end]."""
    start = tokens.qualified_start(index)
    before, after = tokens.text(start - 1), tokens.text(end + 1)
    if after == "(" and before != "operator":
        if tokens.text(end + 2) in ("*", "&") and tokens.text(end + 4) in (")", "["):
            return  # a declarator, T (*x) or T (&x)
        tokens[start].text = "::metal::__mk<" + tokens[start].text
        tokens[end].text += ">"
    elif after == ")":
        _cast(tokens, start, end, aliases)
    elif tokens[end + 1].kind == "name" and after != "operator":
        spelled = "".join(token.text for token in tokens.tokens[start : end + 1])
        for name in _directly_initialised(tokens, start, end):
            tokens[name].text += f" = ::metal::__mk<{spelled}>"


def _cast(tokens: TokenList, start: int, end: int, aliases: Collection[str]) -> None:
    """`(T)x`, where [start, end] is T, becomes a call and the operator `->*`."""
    before, last = tokens[start - 2], tokens.text(start - 2)
    if tokens.text(start - 1) != "(" or not _is_operand(tokens, end + 2):
        return
    if before.kind == "name" and last not in ("return", "case"):
        return  # a parameter, sizeof(T), ...
    if last in ("]", ">") or (last == ")" and not _is_cast(tokens, start - 2, aliases)):
        return
    if tokens.text(end + 2) == "-" and _is_variable(tokens, start):
        return
    tokens[start - 1].text = "::metal::__cast<"
    tokens[end + 1].text = ">() ->*"


def _is_cast(tokens: TokenList, close: int, aliases: Collection[str]) -> bool:
    begin = tokens.open(close) + 1
    while tokens.text(begin + 1) == "::":
        begin += 2
    end = tokens.maybe_angle(begin + 1, close) if tokens.text(begin + 1) == "<" else begin
    is_type = tokens.text(begin) in VECTORS | PACKED | {*ELEMENTS, *aliases, "vec"}
    return is_type and end + 1 == close


def _is_variable(tokens: TokenList, index: int) -> bool:
    """True if the name T at `index` is a variable in this scope, so that `(T)-x` subtracts."""
    return any(
        at < index <= tokens.scope_end(at)
        for at in tokens.where((tokens.text(index),))
        if tokens.text(at + 1) in ("=", ";", ",", ")", "[")
        and (tokens.text(at - 1) in ("&", "*") or tokens.text(at - 1) in ELEMENTS)
        and tokens.text(tokens.seek_back(at, STATEMENT_ENDS) + 1) != "typedef"
    )


def _directly_initialised(tokens: TokenList, start: int, end: int) -> list[int]:
    """The names in `T name(value, ...), other(value)`, where T is the vector type [start, end]."""
    result: list[int] = []
    at = end + 1
    while tokens[at].kind == "name":
        after = at + 1
        if tokens.text(after) == "(" and tokens.text(after + 1) != ")":
            result.append(at)
        after = tokens.seek(after, (",", ";", ")", "{", ":"))
        if tokens.text(after) != ",":
            break
        at = after + 1
    return result if result and _in_function(tokens, start) else []


def _in_function(tokens: TokenList, start: int) -> bool:
    before = start - 2 if tokens.text(start - 1) in ("const", "thread") else start - 1
    if tokens.text(before) not in (*STATEMENT_ENDS, "("):
        return False
    # In a class or a namespace, `T name(value)` declares a function. No `)` precedes their `{`.
    at = tokens.seek_back(before, ("{",))
    body = tokens.text(at - 1)
    return at > 0 and (body in (")", "const", "thread", "else", "do") or body in STATEMENT_ENDS)


def _is_operand(tokens: TokenList, index: int) -> bool:
    token = tokens[index]
    if token.kind in ("name", "number", "raw"):
        return token.text not in ("const", "thread", "device", "constant", "noexcept")
    return token.text in ("(", "-", "~", "!") or token.text.startswith("::metal::")


def _is_expression(tokens: TokenList, index: int, end: int) -> bool:
    start = tokens.qualified_start(index)
    if start != index or tokens.text(start - 1) not in BEFORE_EXPRESSION:
        return False
    close = tokens.close(end + 1)
    inside = tokens.text(end + 2)
    if inside in ("*", "&", "const", "thread", "device", "constant", "threadgroup"):
        return False
    if tokens.text(start - 1) == "{" and tokens.text(close + 1) not in (",", "}"):
        return False
    if tokens.text(close + 1) in ("{", ":") and tokens.text(start - 1) in (":", ","):
        return tokens.text(start - 1) == ":" and in_conditional(tokens, start - 1)
    if tokens.text(start - 1) == ":":
        return in_conditional(tokens, start - 1)
    return tokens.text(close + 1) != "{"


def in_conditional(tokens: TokenList, colon: int) -> bool:
    """True if the `:` belongs to `?:` and not to a constructor's initialisers."""
    at = tokens.seek_back(colon - 1, ("?", "(", "[", *STATEMENT_ENDS))
    return tokens.text(at) == "?"


def _static_cast(
    tokens: TokenList, index: int, aliases: set[str], constructed: frozenset[str]
) -> None:
    close = tokens.close_angle(index + 1)
    words = [t.text for t in tokens.tokens[index + 2 : close]]
    if "*" in words or "&" in words:
        return
    if words[0] in ("metal", "::") or "const" in words:
        words = [word for word in words if word not in ("metal", "::", "const")]
    is_alias = len(words) == 1 and words[0] in aliases
    if is_alias or words[0] in constructed or "vec" in words:
        tokens[index].text = "::metal::__construct"
