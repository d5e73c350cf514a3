"""Structs in device, threadgroup and constant memory, where C++ and Metal differ.

C++ has no constructors, assignments or methods for objects in an address space. So a call reads or
stores a whole struct, and a struct with constructors gets a constructor for each address space.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from .lexer import OPENERS, TokenList
from .shifts import LINKS, object_start
from .vectors import ELEMENTS, VECTORS, in_conditional

ADDRESS_SPACES = frozenset({"threadgroup", "device", "constant"})
STRUCT_KEYS = frozenset({"struct", "class", "union"})
QUALIFIERS = frozenset("const constexpr static inline volatile".split())
SCALARS = frozenset(ELEMENTS)
BOOLS = frozenset({"bool2", "bool3", "bool4"})
# Types of Metal that the shim defines as structs with constructors.
MATRICES = frozenset(f"{t}{c}x{r}" for t in ("half", "float") for c in (2, 3, 4) for r in (2, 3, 4))
CONSTRUCTED = BOOLS | MATRICES | {"matrix", "uniform", "os_log"}
CONSTRUCTED |= {f"packed_{vector}" for vector in VECTORS - BOOLS if vector.endswith("3")}

NO_FIELDS = frozenset("using typedef static public private protected friend struct enum".split())
BEFORE_FIELD = (";", "{", "}", ":")
CASTS = ("reinterpret_cast", "static_cast")
NOT_CALLED = ("return", "if", "while", "for", "switch", "decltype", "case")
BEFORE_STATEMENT = (";", "{", "}", ")", "else")
# A template, because with a copy constructor the compiler would treat the struct differently.
CONSTRUCTOR = (
    "public: template <class __msl_U, class = ::metal::enable_if_t<__is_same(__msl_U, @)>> "
    "constexpr @(const # __msl_U& o) : @(::metal::__copied(&o)) {} "
)


@dataclass
class _Declared:
    """Names of the text, in any scope."""

    constructed: set[str]  # types with constructors
    aliases: set[str]  # template parameters and aliases
    types: set[str]  # constructed, aliases, and structs without constructors
    casts: set[str]  # T in casts of the form `T(x)`
    fields: dict[str, set[int]]  # the result of `_field_types`
    by_reference: set[str]  # the result of `_by_reference`
    # Names of pointers, arrays and references to `types`: the index of the declaration, the number
    # of subscripts that give an object, and the address space.
    objects: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)


def rewrite_objects(tokens: TokenList, types: set[str]) -> None:
    """Make whole reads and stores of structs in any address space valid."""
    declared = _Declared(
        set(CONSTRUCTED),
        types,
        {*CONSTRUCTED, *types},
        {*SCALARS, *types},
        _field_types(tokens),
        _by_reference(tokens),
    )
    for name, body, end in structs(tokens):
        declared.types.add(name)
        if constructors := _constructors(tokens, name, body, end):
            declared.constructed.add(name)
            is_aggregate = all(tokens.text(at + 1) == "default" for at in constructors)
            added = _aggregate_constructor(tokens, name, body, end) if is_aggregate else ""
            added += "".join(
                CONSTRUCTOR.replace("@", name).replace("#", space)
                for space in sorted(ADDRESS_SPACES)
            )
            # The line marker makes this the simulator's text, so no fault or finding points to it.
            last = tokens[end]
            last.space += f'\n# 1 "<copies>" 3\n{added}\n# {last.line} "{last.file}"\n'
    for index in tokens.where(ADDRESS_SPACES):
        _note_object(tokens, index, declared)
        _object_by_cast(tokens, index, declared)
        if tokens.text(index) == "constant":
            _constant_object(tokens, index, declared)
    for index in tokens.where(declared.objects.keys() | declared.fields.keys()):
        _rewrite_use(tokens, index, declared)


def structs(tokens: TokenList) -> Iterator[tuple[str, int, int]]:
    """(name, opening brace, closing brace) of each struct of the text."""
    for index in tokens.where(STRUCT_KEYS):
        name_at = index + 1
        while tokens.text(name_at) in ("alignas", "__attribute__"):
            name_at = tokens.close(name_at + 1) + 1
        if tokens.text(name_at) == "{" and tokens.text(index - 1) == "typedef":
            end = tokens.close(name_at)
            yield tokens.text(end + 1), name_at, end
        if tokens[name_at].kind != "name" or tokens.text(index - 1) in ("enum", "<", ","):
            continue
        body = name_at + 1
        while tokens.text(body) not in ("{", ";", ")", ">", ",", "=", "(", ""):
            body = tokens.close_angle(body) + 1 if tokens.text(body) == "<" else body + 1
        if tokens.text(body) == "{":
            yield tokens.text(name_at), body, tokens.close(body)


def _constructors(tokens: TokenList, name: str, body: int, end: int) -> list[int]:
    """The index after the parameters of each constructor of a struct, `S()` or `S<T>()`."""
    result: list[int] = []
    at = body + 1
    while (at := tokens.seek(at, (name, "}"))) < end:
        opening = at + 1
        if tokens.text(opening) == "<":
            opening = tokens.maybe_angle(opening, end) + 1
        if tokens.text(opening) == "(" and tokens.text(at - 1) != "~":
            result.append(tokens.close(opening) + 1)
        at += 1
    return result


def _aggregate_constructor(tokens: TokenList, name: str, body: int, end: int) -> str:
    """A constructor from the fields, for a struct that is no aggregate with added constructors."""
    fields: list[tuple[str, str]] = []
    at = body + 1
    while (last := tokens.seek(at, (";", "{", "}"))) < end:
        words = [token.text for token in tokens.tokens[at:last]]
        if words and "(" not in words and words[0] not in NO_FIELDS:
            if tokens[last - 1].kind != "name" or "," in words:
                return ""
            fields.append((" ".join(words[:-1]), words[-1]))
        at = (tokens.close(last) if tokens.text(last) == "{" else last) + 1
    if not fields:
        return ""
    parameters = ", ".join(f"{kind} {field}" for kind, field in fields)
    stored = ", ".join(f"{field}({field})" for _, field in fields)
    return f"public: constexpr {name}({parameters}) : {stored} {{}} "


def sole_constructors(tokens: TokenList) -> None:
    """Remove the address spaces of a struct's constructors, if every constructor has one."""
    for name, body, end in list(structs(tokens))[::-1]:
        spaces = [tokens.skip(at, QUALIFIERS) for at in _constructors(tokens, name, body, end)]
        if not spaces or not all(tokens.text(at) in ADDRESS_SPACES for at in spaces):
            continue
        for index in range(end, body, -1):
            if index in spaces:
                tokens.remove(index, index + 1)
            elif [tokens.text(index + i) for i in range(3)] == ["constant", "char", "*"]:
                tokens.replace(index, index + 3, "::metal::__text")


def _note_object(tokens: TokenList, index: int, declared: _Declared) -> None:
    """Record a declaration that begins at `index`, if it is of a pointer, array or reference."""
    at = index + 1
    words = []
    while tokens[at].kind == "name" or tokens.text(at) in ("::", "<", "*", "&"):
        if tokens.text(at) == "<":
            at = tokens.maybe_angle(at, len(tokens))
        words.append(tokens.text(at))
        at += 1
    if [tokens.text(at), tokens.text(at + 1), tokens.text(at + 3)] == ["(", "&", ")"]:
        words, at = [*words, tokens.text(at + 2)], at + 3  # a reference to an array
    name = words[-1] if words else ""
    if tokens[at - 1].kind == "name" and not declared.types.isdisjoint(words[:-1]):
        declaration = at - 1
        subscripts = words.count("*")
        at += tokens.text(at) == ")"
        while tokens.text(at) == "[":
            at, subscripts = tokens.close(at) + 1, subscripts + 1
        if subscripts or "&" in words:
            space = tokens.text(index)
            declared.objects.setdefault(name, []).append((declaration, subscripts, space))


def _constant_object(tokens: TokenList, index: int, declared: _Declared) -> None:
    """`constant T x = T(1);` gets the type `__in_constant<T>` if T may have constructors."""
    start = at = tokens.skip(index + 1, QUALIFIERS)
    while tokens.text(at + 1) == "::":
        at += 2
    kind = tokens.text(at)
    end = tokens.close_angle(at + 1) if tokens.text(at + 1) == "<" else at
    if tokens[end + 1].kind != "name":
        return
    after = tokens.text(end + 2)
    if after == "<":
        after = tokens.text(tokens.maybe_angle(end + 2, len(tokens)) + 1)
    if after == "::":
        _drop_repeated(tokens, index, end + 1)
        return
    constructed = kind in declared.constructed and after in ("=", "(", "{", ";", "[")
    if constructed or (kind in declared.aliases and after == "="):
        tokens[index].text = ""
        _wrap(tokens, start, end, "typename ::metal::__in_constant<", ">::type")


def _drop_repeated(tokens: TokenList, start: int, name: int) -> None:
    """Remove `constant T S::x;`. In C++17 the initialiser in the struct defines the variable."""
    end = tokens.next(name, (";", "=", "{", "("))
    if tokens.text(end) == ";" and tokens.text(start - 1) in (";", "}", ""):
        for token in tokens.tokens[start:end]:
            token.text = ""


def _by_reference(tokens: TokenList) -> set[str]:
    """The address spaces of parameters by reference, and "" for one to a type with constructors."""
    result: set[str] = set()
    for index in tokens.where(("&",)):
        if tokens.text(index + 2) in (",", ")"):
            start = tokens.seek_back(index - 1, ("(", ",", ";", "{")) + 1
            words = {tokens.text(at) for at in range(start, index)}
            result |= words & ADDRESS_SPACES | ({""} if words & CONSTRUCTED else set())
    return result


def _field_types(tokens: TokenList) -> dict[str, set[int]]:
    """Fields of types in CONSTRUCTED, by name, with the number of their array dimensions."""
    result: dict[str, set[int]] = {}
    for _, body, end in structs(tokens):
        for index in range(body + 1, end):
            before = tokens.skip(index - 1, QUALIFIERS, -1)
            if tokens.text(index) not in CONSTRUCTED or tokens.text(before) not in BEFORE_FIELD:
                continue
            at = index + 1
            at = tokens.close_angle(at) + 1 if tokens.text(at) == "<" else at
            last = tokens.seek(at, (";", "(", "}"))
            for first, after in tokens.split(at, last) if tokens.text(last) == ";" else ():
                extents = [at for at in range(first, after) if tokens.text(at) == "["]
                result.setdefault(tokens.text(first), set()).add(len(extents))
    return result


def _path(tokens: TokenList, index: int) -> tuple[int, list[int]]:
    """The first token of `name[i][j]`, and the last tokens of `name`, `name[i]`, `name[i][j]`."""
    ends = [index]
    while tokens.text(ends[-1] + 1) == "[":
        ends.append(tokens.close(ends[-1] + 1))
    return object_start(tokens, index + 1) if tokens.text(index - 1) in LINKS else index, ends


def _object_by_cast(tokens: TokenList, index: int, declared: _Declared) -> None:
    """`((device S*)p)[i]`, `*((device S*)p + i)` and `*(device S*)p`, with any C++ cast."""
    cast = index - 1 if tokens.text(index - 1) in ("(", "<") else index - 2
    is_named = tokens.text(cast) == "<" and tokens.text(cast - 1) in CASTS
    if tokens.text(cast) != "(" and not is_named:
        return
    pointer = (tokens.close_angle(cast) if is_named else tokens.close(cast)) - 1
    kind = tokens.skip(pointer - 1, QUALIFIERS, -1)
    kind = tokens.open_angle(kind) - 1 if tokens.text(kind) == ">" else kind
    is_dependent = "typename" in (tokens.text(at) for at in range(cast, kind))
    if tokens.text(pointer) != "*" or not (is_dependent or tokens.text(kind) in declared.types):
        return
    space = tokens.text(index)
    start, end = cast - 1 - is_named, pointer + 2
    if tokens.text(start) == "=" and tokens.text(start - 2) == "auto":
        declared.objects.setdefault(tokens.text(start - 1), []).append((start - 1, 1, space))
        return
    if tokens.text(start) == "*":
        end = tokens.after(end) - 1
        while tokens.text(end + 1) in ("[", "(", *LINKS):
            end = tokens.after(end + 1) - 1 if tokens.text(end + 1) in OPENERS else end + 2
    elif is_named and tokens.text(tokens.close(end) + 1) == "[":
        start, end = start + 1, tokens.close(tokens.close(end) + 1)
    elif tokens.text(start) == "(" and tokens.text(tokens.close(start) + 1) == "[":
        end = tokens.close(tokens.close(start) + 1)
    else:
        opening = tokens.skip(start, {"("}, -1) + 1  # as in `*((device S*)p + i)`
        if opening > start or tokens.text(opening - 1) != "*":
            return
        start, end = opening - 1, tokens.close(opening)
    _wrap(tokens, start, end, *_around(tokens, start, end, declared, space))


def _rewrite_use(tokens: TokenList, index: int, declared: _Declared) -> None:
    """Wrap the object `name[i]`, `*name`, `*(name + i)` or `.name[i]` with its name at `index`."""
    name = tokens.text(index)
    start, ends = _path(tokens, index)
    if tokens.text(index - 1) in (".", "->") and name in declared.fields:
        for needed in declared.fields[name]:
            if len(ends) > needed:
                end = ends[needed]
                _wrap(tokens, start, end, *_around(tokens, start, end, declared, ""))
        return
    for declaration, needed, space in declared.objects.get(name, ()):
        if declaration >= index:
            continue
        if len(ends) > needed:
            first, last = start, ends[needed]
        elif needed == len(ends) == 1 and tokens.text(start - 1) == "*":
            first, last = start - 1, index
        elif needed == len(ends) == 1 and tokens.text(start - 2) == "*":  # *(p + i)
            first, last = start - 2, tokens.after(start - 1) - 1
        else:
            continue
        around = _around(tokens, first, last, declared, space)
        if around and index <= tokens.scope_end(declaration):
            _wrap(tokens, first, last, *around)
            return


def _around(
    tokens: TokenList, start: int, end: int, declared: _Declared, space: str
) -> tuple[str, ...]:
    """The text before and after [start, end], an object in `space`; empty if it needs no change."""
    before, after = tokens.text(start - 1), tokens.text(end + 1)
    if after == "=" and before in BEFORE_STATEMENT:
        return "::metal::__target(", ")"
    is_grouped = tokens.text(start) == "*" and before == "(" and after == ")"
    if is_grouped and not _is_call(tokens, start - 1):
        after = tokens.text(end + 2)
    if after == "[":
        return "::metal::__elements(", ")"
    if _is_value(tokens, start, end, declared.casts):
        return "::metal::__read(", ", 0)"
    by_value = space not in declared.by_reference and _is_argument(tokens, start, end)
    return ("::metal::__passed(::metal::__read(", ", 0))") if by_value else ()


def _is_call(tokens: TokenList, opening: int) -> bool:
    before = tokens[opening - 1]
    return (before.kind == "name" and before.text not in NOT_CALLED) or before.text in (">", "]")


def _is_argument(tokens: TokenList, start: int, end: int) -> bool:
    if tokens.text(start - 1) not in ("(", ",") or tokens.text(end + 1) not in (",", ")"):
        return False
    opening = tokens.seek_back(start - 1, ("(", "{", "[", ";"))
    return tokens.text(opening) == "(" and _is_call(tokens, opening)


def _is_value(tokens: TokenList, start: int, end: int, casts: AbstractSet[str]) -> bool:
    """True if [start, end] initialises, is assigned, returned or cast, or is an operand of `?:`."""
    before, after = tokens.text(start - 1), tokens.text(end + 1)
    if before == "return":
        return after == ";" and not _returns_reference(tokens, start)
    if before == "=":
        # A reference must bind to the object.
        return after in (";", ",") and tokens.text(start - 3) not in ("&", "&&")
    if before == "(":
        return after == ")" and tokens.text(start - 2) in casts
    if before == "?":
        return after == ":"
    return before == ":" and after in (";", ",", ")") and in_conditional(tokens, start - 1)


def _returns_reference(tokens: TokenList, index: int) -> bool:
    at = head = index
    while at > 0:
        at = tokens.seek_back(tokens.before(at), ("{",))
        head = tokens.skip(at - 1, QUALIFIERS | {"thread"}, -1)
        if tokens.text(head) == ")":
            head = tokens.open(head) - 1
            if tokens.text(head) not in ("if", "for", "while", "switch"):
                break
    while tokens.text(head) not in (";", "{", "}", ":", "&", ""):
        head -= 1
    return tokens.text(head) == "&"


def _wrap(tokens: TokenList, first: int, last: int, before: str = "", after: str = "") -> None:
    tokens[first].space += before
    tokens[last + 1].space = after + tokens[last + 1].space
