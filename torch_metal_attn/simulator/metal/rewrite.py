"""Rewrite preprocessed Metal as C++17 that clang compiles for the host.

The shim's headers (system headers of the preprocessed text) are not changed. The result uses:

- macros: `device`, `threadgroup` and `constant` are clang's address spaces, `thread` is empty;
- `::metal::__mk<V>(...)` for a vector V, `__construct<T>(...)` for any T, `__cast<T>() ->* x`;
- `__msl_threadgroup_memory`, which returns threadgroup memory;
- `::metal::__read`, `__target` and `__elements`, which read, store and subscript a whole struct;
- `::metal::__signature` and the functions of `__msl_launch.h`, in the entries.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import versions
from .constants import ConstantValue, FunctionConstant, specialise, used_constants
from .kernels import Kernel, extract_kernels, refuse_argument_buffers
from .lexer import TokenList, join, lex
from .objects import ADDRESS_SPACES, rewrite_objects, sole_constructors
from .reserved import refuse_names
from .shifts import check_shifts, find_shifts
from .unset_variables import unset_variables
from .unsupported import METHOD, refuse_stages
from .vectors import name_bool_vectors, rewrite_vectors, type_names

UNSUFFIXED = re.compile(r"(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+")
ALIGNMENTS = ("alignas", "aligned")
METHOD_QUALIFIERS = ("const", "volatile", "noexcept")


@dataclass
class Rewritten:
    """C++ text without the kernels' entries; the kernels; the function constants."""

    text: str
    kernels: list[Kernel]
    constants: list[FunctionConstant]


def rewrite(
    preprocessed: str,
    constants: Mapping[int | str, ConstantValue] | None = None,
    language: str = versions.DEFAULT,
    check: bool = False,
) -> Rewritten:
    """Rewrite the output of `clang -E`. Raises MetalSourceError with the Metal file and line."""
    tokens = TokenList(lex(preprocessed))
    versions.refuse_newer(tokens, language)
    refuse_names(tokens)
    refuse_stages(tokens)
    declared, missing = specialise(tokens, constants or {})
    reach = used_constants(tokens, missing)
    kernels = extract_kernels(tokens)
    optional = {constant.name for constant in declared if constant.optional}
    for kernel in kernels:
        words = {word for p in kernel.parameters for word in p.condition.split()} & missing
        shadowed = {parameter.name for parameter in kernel.parameters}
        reached = reach.get(kernel.function, set()) - shadowed
        kernel.missing = sorted((reached | words) - optional)
    refuse_argument_buffers(tokens, kernels)
    strip_attributes(tokens)
    # The search for unwritten values works only if functions are inlined.
    for index in tokens.where(("noinline", "__noinline__")) if check else ():
        tokens[index].text = ""
    literals(tokens)
    sole_constructors(tokens)
    drop_qualified_methods(tokens)
    name_bool_vectors(tokens)
    types = type_names(tokens)
    rewrite_objects(tokens, types)
    threadgroup_variables(tokens)
    array_parameters(tokens)
    unset_variables(tokens)
    shifts = find_shifts(tokens) if check else []
    rewrite_vectors(tokens, types)
    check_shifts(tokens, shifts)
    return Rewritten(join(tokens.tokens), kernels, declared)


def strip_attributes(tokens: TokenList) -> None:
    """Remove every remaining `[[...]]`. The host does not use such hints and limits."""
    for index in reversed(tokens.where(("[",))):
        if tokens.text(index + 1) == "[":
            tokens.remove(index, tokens.close(index) + 1)


def literals(tokens: TokenList) -> None:
    """`1.0h` and `1.0bf` become casts of float literals, and `1.0` becomes `1.0f`."""
    for token in tokens.tokens:
        if token.kind != "number" or token.text[:2] in ("0x", "0X"):
            continue
        lower = token.text.lower()
        if lower.endswith("bf"):
            token.text = f"((bfloat){_float(token.text[:-2])})"
        elif lower.endswith("h"):
            token.text = f"((half){_float(token.text[:-1])})"
        elif UNSUFFIXED.fullmatch(token.text):
            token.text += "f"


def _float(digits: str) -> str:
    return f"{digits}f" if "." in digits or "e" in digits.lower() else f"{digits}.0f"


def threadgroup_variables(tokens: TokenList) -> None:
    """`threadgroup T x[N];` in a function becomes a reference into the threadgroup's memory."""
    for index in tokens.find("threadgroup"):
        start = _statement_start(tokens, index)
        end = declarator_end(tokens, index)
        if start is not None and end is not None and tokens.text(end) != "{":
            _threadgroup_variable(tokens, start, index)


def _statement_start(tokens: TokenList, index: int) -> int | None:
    start = index
    while True:
        before = tokens.text(start - 1)
        if before in ("static", "const", "volatile"):
            start -= 1
        elif before == ")" and tokens.text(tokens.open(start - 1) - 1) == "alignas":
            start = tokens.open(start - 1) - 1
        else:
            follows = start > 0 and tokens[start - 1].kind == "raw"  # a rewritten variable
            return start if follows or before in (";", "{", "}", ":", "") else None


def declarator_end(tokens: TokenList, index: int) -> int | None:
    """The token after the first declarator of a `threadgroup` variable; None if it is not one."""
    end = index + 1
    while tokens.text(end) not in (";", ",", "=", "{"):
        text = tokens.text(end)
        if text == "<" and tokens[end - 1].kind == "name":
            end = tokens.close_angle(end)
        elif text == "[":
            end = tokens.close(end)
        elif text == "(" and tokens.text(end - 1) in ("alignas", "decltype", "__attribute__"):
            end = tokens.close(end)
        elif text in ("*", "&", "&&", "(", ")", "}", ""):
            return None
        end += 1
    return end if end > index + 1 else None


def _threadgroup_variable(tokens: TokenList, start: int, index: int) -> None:
    end = tokens.seek(index, (";",))
    # Threads start at any time, so an initialiser would not run before all of them. It is removed,
    # and the checks treat the memory as uninitialised.
    for first, last in reversed(tokens.split(index + 1, end)):
        equals = tokens.seek(first, ("=",))
        if equals < last:
            tokens.remove(equals, last)
            end -= last - equals
    align = _take_alignment(tokens, start, end)
    end = next(i for i in range(start, len(tokens)) if tokens.text(i) == ";")
    index = next(i for i in range(start, end) if tokens.text(i) == "threadgroup")
    spans = tokens.split(index + 1, end)
    first = _declarator(tokens, *spans[0])
    type_text = " ".join(
        t.text for t in tokens.tokens[start:first] if t.text not in ("static", "threadgroup")
    )
    if not type_text:
        raise tokens.error(index, "a threadgroup variable has no type")
    declarations: list[str] = []
    for span in [(first, spans[0][1]), *spans[1:]]:
        name = tokens.text(span[0])
        extents = tokens.source(span[0] + 1, span[1])
        declarations.append(
            f"typedef {type_text} __tg_{name}{extents}; threadgroup __tg_{name}& {name} = "
            f'*(threadgroup __tg_{name}*)__msl_threadgroup_memory("{name}", '
            f"sizeof(__tg_{name}), {align});"
        )
    tokens.replace(start, end + 1, " ".join(declarations))


def _declarator(tokens: TokenList, start: int, end: int) -> int:
    at = end - 1
    while tokens.text(at) == "]":
        at = tokens.open(at) - 1
    if at <= start or tokens[at].kind != "name":
        raise tokens.error(start, "a threadgroup variable has no name")
    return at


def _take_alignment(tokens: TokenList, start: int, end: int) -> str:
    """Remove alignas(N) or __attribute__((aligned(N))) and return N, or 16 if none has a number."""
    align = "16"
    index = start
    while index < end:
        if tokens.text(index) not in ("alignas", "__attribute__"):
            index += 1
            continue
        close = tokens.close(index + 1)
        for name in range(index, close):
            if tokens.text(name).strip("_") in ALIGNMENTS and tokens.text(name + 1) == "(":
                first, last = name + 2, tokens.close(name + 1)
                align = tokens.source(first, last) or align
                if tokens[first].kind == "name" and last - first == 1:
                    align = f"alignof({align})"
                break
        tokens.remove(index, close + 1)
        end -= close + 1 - index
    return align


def array_parameters(tokens: TokenList) -> None:
    """A parameter `threadgroup T x[N]` of a function becomes a pointer, as in C++."""
    for index in tokens.find(*ADDRESS_SPACES):
        _array_parameter(tokens, index)


def _array_parameter(tokens: TokenList, index: int) -> None:
    start = tokens.skip(index - 1, ("const",), -1)
    if tokens.text(start) not in ("(", ","):
        return
    at = index + 1
    while tokens.text(at) != "[":
        if tokens.text(at) == "<":
            at = tokens.close_angle(at)
        elif tokens[at].kind != "name" and tokens.text(at) != "::":
            return
        at += 1
    end = tokens.close(at)
    after = tokens.text(end + 1)
    if after not in (",", ")", "["):
        return
    name = tokens[at - 1]
    name.text = f"*{name.text}" if after != "[" else f"(*{name.text})"
    tokens.remove(at, end + 1)


def drop_qualified_methods(tokens: TokenList) -> None:
    """Remove methods for objects in other address spaces: C++ cannot overload by address space."""
    index = 0
    while (index := tokens.next(index, ADDRESS_SPACES)) < len(tokens):
        index = _drop_method(tokens, index) + 1


def _drop_method(tokens: TokenList, index: int) -> int:
    before = tokens.skip(index - 1, METHOD_QUALIFIERS, -1)
    after = tokens.skip(index + 1, METHOD_QUALIFIERS)
    if tokens.text(before) != ")" or tokens.text(after) not in ("{", ":", "=", ";", "->"):
        return index
    start = tokens.seek_back(before, (";", "{", "}", ":")) + 1
    end = tokens.seek(after, ("{", ";"))
    if tokens.text(end) == "{":
        end = tokens.close(end)
        if tokens.text(end + 1) == ";":
            end += 1
    opening = tokens.open(before)
    _check_conversion(tokens, start, opening, after, end)
    if _is_sole_method(tokens, start, opening):
        tokens.replace(before + 1, end + 1, f' __attribute__((unavailable("{METHOD}")));')
        return before + 1
    tokens.remove(start, end + 1)
    return start - 1


def _is_sole_method(tokens: TokenList, start: int, opening: int) -> bool:
    """True if no other member has the method's name. Then calls of the method get a message."""
    name = tokens.text(opening - 1)
    before = tokens.text(opening - 2)
    if tokens[opening - 1].kind != "name" or before in ("operator", "::", "~", "{", ";", "}", ":"):
        return False
    first = tokens.seek_back(start - 1, ("{",)) + 1
    span = range(first, tokens.close(first - 1)) if first else range(0)
    called = (at for at in span if tokens.text(at) == name and tokens.text(at + 1) == "(")
    return list(called) == [opening - 1]


def _check_conversion(tokens: TokenList, start: int, opening: int, body: int, end: int) -> None:
    """Refuse a conversion that differs from the conversion for thread memory, which replaces it."""
    if "operator" not in (tokens.text(opening - 2), tokens.text(opening - 3)):
        return
    head = tokens.source(opening - 2, opening)
    first = tokens.seek_back(start - 1, ("{",)) + 1
    for index in range(first, tokens.close(first - 1)):
        if index == opening or tokens.text(index) != "(":
            continue
        other = tokens.skip(tokens.close(index) + 1, {*METHOD_QUALIFIERS, "thread"})
        if tokens.text(other) == "{" and tokens.source(index - 2, index) == head:
            if tokens.source(other, tokens.close(other) + 1) != tokens.source(body, end + 1):
                message = f"conversions `{head}` differ by address space: only one is supported"
                raise tokens.error(opening, message)
