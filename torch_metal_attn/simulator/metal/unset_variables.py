"""Adds a call of `::metal::__unset` after a private variable without a value, such as `float x;`.

With these calls, checked builds find reads of unwritten variables.
"""

from .lexer import TokenList

ENDS = frozenset({";", "{", "}"})
# The first words of statements that declare no private variable without a value.
NOT_TYPES = frozenset(
    """return goto break continue typedef using typename struct class union enum static constexpr
    extern const volatile else case default delete new throw template public private protected
    friend operator inline namespace if for while do switch threadgroup device constant
    auto""".split()
)
COMBINABLE = frozenset("unsigned signed long short int char".split())


def unset_variables(tokens: TokenList) -> None:
    kinds: list[bool] = []  # for each open brace, whether it is in a function
    calls_after: list[tuple[int, str]] = []  # index of the `;`, and the calls to add after it
    closes_type = False
    begins = False  # whether a statement begins at the token
    for index, token in enumerate(tokens.tokens):
        if begins and kinds and kinds[-1] and token.kind == "name":
            if names := _names(tokens, index) if closes_type else _declared(tokens, index):
                calls = "".join(f' ::metal::__unset({name}, "{name}");' for name in names)
                calls_after.append((tokens.next(index, (";",)), calls))
        # A raw token is a whole statement: the declaration of a threadgroup variable.
        begins = token.text in ENDS or token.kind == "raw"
        if token.text == "{":
            kinds.append(_in_function(tokens, index, kinds))
        elif token.text == "}" and kinds:
            if not kinds.pop():  # may end `union { ... } x;`
                start = tokens.seek_back(tokens.open(index) - 1, ENDS) + 1
                closes_type = tokens.text(start) in ("struct", "union")
                continue
        closes_type = False
    for index, calls in calls_after:
        tokens[index].text += calls


def _in_function(tokens: TokenList, index: int, kinds: list[bool]) -> bool:
    before = tokens.text(index - 1)
    if before in (")", "else", "do", "const", "noexcept"):
        return True
    declares = ("struct", "class", "union", "enum", "namespace", "=")
    if tokens.text(tokens.seek_back(index - 1, {*ENDS, *declares})) in declares:
        return False
    return before in ENDS | {":"} and bool(kinds) and kinds[-1]


def _declared(tokens: TokenList, index: int) -> list[str]:
    """The variables without a value that the statement at `index` declares."""
    if tokens.text(index) in NOT_TYPES:
        return []
    at = index + 1
    if tokens.text(index) == "thread":
        at += 1
    while tokens.text(at - 1) in COMBINABLE and tokens.text(at) in COMBINABLE:
        at += 1
    while tokens.text(at) == "::":
        at += 2
    if tokens.text(at) == "<":
        if tokens[at + 1].kind not in ("name", "number"):
            return []
        try:
            at = tokens.close_angle(at) + 1
        except ValueError:
            return []
    return _names(tokens, at)


def _names(tokens: TokenList, at: int) -> list[str]:
    names: list[str] = []
    while True:
        if tokens[at].kind != "name" or tokens.text(at) in NOT_TYPES:
            return []
        name = tokens.text(at)
        at += 1
        while tokens.text(at) == "[":
            at = tokens.close(at) + 1
        if tokens.text(at) == "=":
            at = tokens.seek(at, (",", ";"))
        else:
            names.append(name)
        if tokens.text(at) == ";":
            return names
        if tokens.text(at) != ",":
            return []
        at += 1
