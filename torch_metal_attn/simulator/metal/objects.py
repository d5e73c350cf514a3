"""Structs in device, threadgroup and constant memory, where C++ and Metal differ.

C++ has no constructors, assignments and methods for objects in an address space. So a whole struct
is read and stored by a call, and a struct that has constructors gets one for each memory.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from .lexer import TokenList
from .vectors import ELEMENTS, VECTORS, in_conditional

ADDRESS_SPACES = frozenset({"threadgroup", "device", "constant"})
STRUCT_KEYS = frozenset({"struct", "class", "union"})
QUALIFIERS = frozenset("const constexpr static inline volatile".split())
SCALARS = frozenset(ELEMENTS)
BOOLS = frozenset({"bool2", "bool3", "bool4"})
# Metal's types that are structs with constructors in the shim.
MATRICES = frozenset(f"{t}{c}x{r}" for t in ("half", "float") for c in (2, 3, 4) for r in (2, 3, 4))
CONSTRUCTED = BOOLS | MATRICES | {"matrix", "uniform", "os_log"}
CONSTRUCTED |= {f"packed_{vector}" for vector in VECTORS - BOOLS if vector.endswith("3")}

BEFORE_STATEMENT = (";", "{", "}", ")", "else")
# A template, because a copy constructor would make the struct another one for the compiler.
CONSTRUCTOR = (
    "public: template <class __msl_U, class = ::metal::enable_if_t<__is_same(__msl_U, @)>> "
    "constexpr @(const # __msl_U& o) : @(::metal::__copied(&o)) {} "
)


@dataclass
class _Declared:
    """Names of the text, in any scope."""

    constructed: set[str]  # types with constructors
    perhaps: set[str]  # template parameters and aliases
    types: set[str]  # these, and structs without constructors
    # Pointers, arrays and references to the above: where they are declared, and how many
    # subscripts it takes to an object.
    objects: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def rewrite_objects(tokens: TokenList, types: set[str]) -> None:
    """Make whole reads and stores of structs in any address space valid.

    types: the text's template parameters and aliases.
    """
    declared = _Declared(set(CONSTRUCTED), types, {*CONSTRUCTED, *types})
    for name, body, end in structs(tokens):
        declared.types.add(name)
        if _has_constructor(tokens, name, body, end):
            declared.constructed.add(name)
            _add_constructors(tokens, name, end)
    casts = SCALARS | types
    for index in tokens.where(ADDRESS_SPACES):
        _note_object(tokens, index, declared)
        _object_by_cast(tokens, index, declared, casts)
        if tokens.text(index) == "constant":
            _constant_object(tokens, index, declared)
    objects = declared.objects
    for index in tokens.where(objects):
        _rewrite_use(tokens, index, objects[tokens.text(index)], casts)


def structs(tokens: TokenList) -> Iterator[tuple[str, int, int]]:
    """(name, opening brace, closing brace) of the structs that the text defines."""
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


def _has_constructor(tokens: TokenList, name: str, body: int, end: int) -> bool:
    at = body + 1
    while (at := tokens.seek(at, (name, "}"))) < end:
        if tokens.text(at + 1) == "(" and tokens.text(at - 1) != "~":
            return True
        at += 1
    return False


def _add_constructors(tokens: TokenList, name: str, end: int) -> None:
    """They are marked as the simulator's own text, so that no fault or finding points to them."""
    last = tokens[end]
    made = "".join(
        CONSTRUCTOR.replace("@", name).replace("#", space) for space in sorted(ADDRESS_SPACES)
    )
    last.space += f'\n# 1 "<copies>" 3\n{made}\n# {last.line} "{last.file}"\n'


def sole_constructors(tokens: TokenList) -> None:
    """Drop the address spaces of a struct's constructors, if every constructor has one.

    Their parameters of type `constant char*` take string literals, which C++ keeps in no address
    space.
    """
    for name, body, end in list(structs(tokens))[::-1]:
        spaces = []
        for index in range(body + 1, end):
            if tokens.tokens[index].text == name and tokens.text(index + 1) == "(":
                spaces.append(tokens.skip(tokens.close(index + 1) + 1, QUALIFIERS))
        if not spaces or not all(tokens.text(at) in ADDRESS_SPACES for at in spaces):
            continue
        for index in range(end, body, -1):
            if index in spaces:
                tokens.remove(index, index + 1)
            elif [tokens.text(index + i) for i in range(3)] == ["constant", "char", "*"]:
                tokens.replace(index, index + 3, "::metal::__text")


def _note_object(tokens: TokenList, index: int, declared: _Declared) -> None:
    """Note what the declaration with an address space at `index` declares, if it is of structs."""
    at = index + 1
    words = []
    while tokens[at].kind == "name" or tokens.text(at) in ("::", "<", "*", "&"):
        if tokens.text(at) == "<":
            at = tokens.maybe_angle(at, len(tokens))
        words.append(tokens.text(at))
        at += 1
    name = tokens.text(at - 1)
    if tokens[at - 1].kind == "name" and not declared.types.isdisjoint(words[:-1]):
        declaration = at - 1
        subscripts = words.count("*")
        while tokens.text(at) == "[":
            at, subscripts = tokens.close(at) + 1, subscripts + 1
        if subscripts or "&" in words:
            declared.objects.setdefault(name, []).append((declaration, subscripts))


def _constant_object(tokens: TokenList, index: int, declared: _Declared) -> None:
    """`constant T x = T(1);` where T has constructors, or is a template's and may have some.

    C++ constructs no object in an address space, so x becomes a plain constant.
    """
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
    if constructed or (kind in declared.perhaps and after == "="):
        tokens[index].text = ""
        _wrap(tokens, start, end, "typename ::metal::__in_constant<", ">::type")


def _drop_repeated(tokens: TokenList, start: int, name: int) -> None:
    """Drop `constant T S::x;`: in C++17 the struct's own initialiser defines it."""
    end = tokens.next(name, (";", "=", "{", "("))
    if tokens.text(end) == ";" and tokens.text(start - 1) in (";", "}", ""):
        for token in tokens.tokens[start:end]:
            token.text = ""


def _path(tokens: TokenList, index: int) -> tuple[int, int, int]:
    """The first and last token of `name[i][j]` or `*name`, and the number of subscripts.

    What selects the name, as in `this->name`, belongs to it.
    """
    start, end, subscripts = index, index, 0
    while tokens.text(end + 1) == "[":
        end, subscripts = tokens.close(end + 1), subscripts + 1
    while tokens.text(start - 1) in (".", "->") and tokens[start - 2].kind == "name":
        start -= 2
    if tokens.text(start - 1) == "*" and end == index:
        start, subscripts = start - 1, 1
    return start, end, subscripts


def _object_by_cast(
    tokens: TokenList, index: int, declared: _Declared, casts: AbstractSet[str]
) -> None:
    """`((device S*)p)[i]` and `*((device S*)p)`, as if p were declared so."""
    cast = index - 1 if tokens.text(index - 1) == "(" else index - 2
    if tokens.text(cast) != "(" or tokens.text(cast - 1) != "(":
        return
    pointer = tokens.close(cast) - 1
    kind = tokens.skip(pointer - 1, QUALIFIERS, -1)
    kind = tokens.open_angle(kind) - 1 if tokens.text(kind) == ">" else kind
    is_dependent = "typename" in (tokens.text(at) for at in range(cast, kind))
    if tokens.text(pointer) != "*" or not (is_dependent or tokens.text(kind) in declared.types):
        return
    start, end = cast - 1, tokens.close(cast - 1)
    if tokens.text(end + 1) == "[":
        end = tokens.close(end + 1)
    elif tokens.text(start - 1) == "*":
        start -= 1
    else:
        return
    if around := _around(tokens, start, end, casts):
        _wrap(tokens, start, end, *around)


def _rewrite_use(
    tokens: TokenList, index: int, declarations: list[tuple[int, int]], casts: AbstractSet[str]
) -> None:
    """`p[i] = v;` becomes `::metal::__target(p[i]) = v;`; a value becomes a call of `__read`."""
    start, end, subscripts = _path(tokens, index)
    around = _around(tokens, start, end, casts)
    for declaration, needed in declarations if around else ():
        if subscripts == needed and declaration < index <= _scope_end(tokens, declaration):
            _wrap(tokens, start, end, *around)
            return


def _around(tokens: TokenList, start: int, end: int, casts: AbstractSet[str]) -> tuple[str, ...]:
    """The text around an object that is stored or read as a whole; nothing if it is neither."""
    if tokens.text(end + 1) == "=" and tokens.text(start - 1) in BEFORE_STATEMENT:
        return "::metal::__target(", ")"
    return ("::metal::__read(", ", 0)") if _is_value(tokens, start, end, casts) else ()


def _scope_end(tokens: TokenList, index: int) -> int:
    """The end of the scope of a declaration at `index`: that of its function, block or struct."""
    at = tokens.seek(index, (")", "}"))
    if tokens.text(at) == ")":
        at = tokens.next(at, ("{", ";"))
        at = tokens.close(at) if tokens.text(at) == "{" else at
    return at


def _is_value(tokens: TokenList, start: int, end: int, casts: AbstractSet[str]) -> bool:
    """Whether [start, end] initialises, is assigned, returned or cast, or is an arm of `?:`."""
    before, after = tokens.text(start - 1), tokens.text(end + 1)
    if before == "return":
        return after == ";" and not _returns_reference(tokens, start)
    if before == "=":
        # A reference binds to the object itself.
        return after in (";", ",") and tokens.text(start - 3) not in ("&", "&&")
    if before == "(":
        return after == ")" and tokens.text(start - 2) in casts
    if before == "?":
        return after == ":"
    return before == ":" and after in (";", ",", ")") and in_conditional(tokens, start - 1)


def _returns_reference(tokens: TokenList, index: int) -> bool:
    """Whether the function around `index` has a `&` before its parameters."""
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


def _wrap(tokens: TokenList, first: int, last: int, before: str, after: str) -> None:
    """Put text around [first, last]. As trivia, so that its tokens stay what they are."""
    tokens[first].space += before
    tokens[last + 1].space = after + tokens[last + 1].space
