"""Words of Metal that a text may not use as names, and rules that recognise a use as a name.

Sources: the Metal Shading Language specification, the reserved words of naga (wgpu) and of
SPIRV-Cross, and the working draft N4431 of C++. clang would accept many of these words.
"""

import re
from collections.abc import Collection, Iterator

from .lexer import MetalSourceError, TokenList, segments
from .vectors import STATEMENT_ENDS, VECTORS

FUNCTIONS = frozenset({"kernel", "vertex", "fragment"})
SPACES = frozenset(
    "device constant thread threadgroup threadgroup_imageblock ray_data object_data".split()
)
_SIZES = [str(n) for n in (2, 3, 4)]
TYPES = frozenset(
    """half bfloat uchar ushort uint ulong size_t ptrdiff_t int8_t int16_t int32_t int64_t uint8_t
    uint16_t uint32_t uint64_t atomic_int atomic_uint atomic_bool atomic_ulong
    atomic_float""".split()
)
TYPES |= VECTORS | {f"packed_{vector}" for vector in VECTORS}
TYPES |= {f"{t}{c}x{r}" for t in ("half", "bfloat", "float") for c in _SIZES for r in _SIZES}
# Keywords of C++ that Metal does not have are reserved too.
KEYWORDS = frozenset(
    """alignas alignof asm auto bool break case catch char char16_t char32_t class const const_cast
    constexpr continue decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept nullptr
    operator private protected public register reinterpret_cast return short signed sizeof static
    static_assert static_cast struct switch template this thread_local throw true try typedef typeid
    typename union unsigned using virtual void volatile wchar_t while
    and and_eq bitand bitor compl not not_eq or or_eq xor xor_eq""".split()
)
MATH_CONSTANTS = """M_E M_LOG2E M_LOG10E M_LN2 M_LN10 M_PI M_PI_2 M_PI_4 M_1_PI M_2_PI M_2_SQRTPI
    M_SQRT2 M_SQRT1_2""".split()
_FLOATS = "DIG MANT_DIG MAX_10_EXP MAX_EXP MIN_10_EXP MIN_EXP RADIX MAX MIN EPSILON".split()
MACROS = frozenset(
    """assert CHAR_BIT SCHAR_MAX SCHAR_MIN UCHAR_MAX CHAR_MAX CHAR_MIN USHRT_MAX SHRT_MAX SHRT_MIN
    UINT_MAX INT_MAX INT_MIN ULONG_MAX LONG_MAX LONG_MIN FP_ILOGB0 FP_ILOGBNAN MAXFLOAT MAXHALF
    MAXBFLOAT HUGE_VALF HUGE_VALH HUGE_VALBF INFINITY NAN METAL_FUNC""".split()
)
MACROS |= {f"{name}_{suffix}" for name in MATH_CONSTANTS for suffix in ("F", "H", "BF")}
MACROS |= {f"{kind}_{name}" for name in _FLOATS for kind in ("FLT", "HALF")}

KINDS = {
    **dict.fromkeys(MACROS, "a macro of Metal's headers"),
    **dict.fromkeys(KEYWORDS, "a keyword of C++"),
    **dict.fromkeys(TYPES, "a type of Metal"),
    **dict.fromkeys(SPACES, "an address space of Metal"),
    **dict.fromkeys(FUNCTIONS, "a function qualifier of Metal"),
}

NO_MACROS = KINDS.keys() - MACROS

# Words that may precede a name but are not its type.
_NOT_TYPES = frozenset(
    """return case else do goto throw new delete sizeof alignof operator typename typedef using
    template public private protected friend inline static extern constexpr const volatile mutable
    explicit virtual register if while for switch catch noexcept co_return and or xor not compl
    bitand bitor and_eq or_eq xor_eq not_eq""".split()
)
_DECLARERS = frozenset({"namespace", "struct", "class", "union", "enum"})
_SPECIFIERS = frozenset("static inline extern constexpr template friend virtual".split())
_METHOD_ENDS = frozenset(") const volatile mutable noexcept override final".split())
_BEFORE_FUNCTIONS = frozenset({"", ";", "{", "}", ")", "]", ">", ":"})
_AFTER_NAMES = frozenset("= ; , ) [".split())
_AFTER_DECLARERS = frozenset({"class", "struct", "alignas"})
_NEVER_DECLARED = frozenset({"const", "volatile", "operator"})
_SCALARS = frozenset("unsigned signed char short int long double float".split())

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
# A macro of Metal's headers after a word that may be a type.
_PERHAPS_NAMED = re.compile(rf"(\w+)[ \t]+(?:{'|'.join(sorted(MACROS))})[ \t]*[=;,)\[({{]")
# Definitions to put before a text, which keep the macros of Metal's headers defined but unexpanded.
UNEXPANDED = "".join(f"#undef {word}\n#define {word} {word}\n" for word in sorted(MACROS))


class ReservedNameError(MetalSourceError):
    def __init__(self, word: str, file: str, line: int) -> None:
        super().__init__(message(word), file, line)


def message(word: str) -> str:
    return f"`{word}` is {KINDS[word]} and cannot be a name: rename it, for example to `{word}_`"


def errors(tokens: TokenList, words: Collection[str] = KINDS) -> Iterator[ReservedNameError]:
    """An error for each of `words` that is used as a name."""
    for index in tokens.where(words):
        token = tokens[index]
        if token.kind == "name" and _is_name(tokens, index, token.text):
            yield ReservedNameError(token.text, token.file, token.line)


def refuse_names(tokens: TokenList, words: Collection[str] = KINDS) -> None:
    """Raise ReservedNameError for the first of `words` that is used as a name."""
    for error in errors(tokens, words):
        raise error


def may_define(source: str) -> bool:
    """True if a text, before preprocessing, defines a reserved word as a macro."""
    return not NO_MACROS.isdisjoint(_DIRECTIVE.findall(source))


def check_directives(preprocessed: str) -> None:
    """Raise if the output of `clang -E -dD` defines a keyword, qualifier or type as a macro."""
    for directive in _DIRECTIVE.finditer(preprocessed):
        if directive[1] in NO_MACROS:
            *_, (_, file, line, _, body) = segments(preprocessed[: directive.start()])
            raise ReservedNameError(directive[1], file, line + body.count("\n"))


def may_name_a_macro(source: str) -> bool:
    """True if a text, before preprocessing, may use a macro of Metal's headers as a name."""
    return any(result[1] not in _NOT_TYPES for result in _PERHAPS_NAMED.finditer(source))


def _is_name(tokens: TokenList, index: int, word: str) -> bool:
    before, after = tokens.text(index - 1), tokens.text(index + 1)
    if word in FUNCTIONS:
        return not (_is_attribute(tokens, index) or _qualifies_function(tokens, index))
    if word in SPACES:
        return not _qualifies_memory(tokens, index)
    if before in _DECLARERS:
        return word not in _AFTER_DECLARERS
    if before == "typename" and word in TYPES:
        return after in ("=", ",", ">")
    ends = _AFTER_NAMES | ({"(", "{", ">", ":"} if word in TYPES or word == "assert" else set())
    if index == 0 or after not in ends or word in _NEVER_DECLARED:
        return False
    if word in TYPES:
        if tokens.text(tokens.seek_back(index, STATEMENT_ENDS) + 1) == "typedef":
            return False  # at file scope, clang refuses a typedef to a different type
        if before in ("*", "&", "&&", ">"):
            return after in _AFTER_NAMES  # a type does not end an expression
        if before == ",":
            return after in ("=", ";")  # a second declarator
        if before == "const" and after == "=":
            return True
    if word in _SCALARS and before in _SCALARS:
        return False
    return tokens[index - 1].kind == "name" and before not in _NOT_TYPES | SPACES | FUNCTIONS


def _is_attribute(tokens: TokenList, index: int) -> bool:
    if tokens.text(index - 1) not in ("[", ","):
        return False
    opening = tokens.seek_back(index, ("[", "(", "{"))
    return tokens.text(opening) == "[" == tokens.text(opening - 1)


def _qualifies_function(tokens: TokenList, index: int) -> bool:
    before, after = tokens.text(index - 1), tokens[index + 1]
    if after.kind == "name" and tokens.text(index + 2) == "(" and before != ".":
        return True  # the qualifier may also follow the return type
    begins = before in _BEFORE_FUNCTIONS | _SPECIFIERS or tokens[index - 1].kind == "string"
    return begins and (after.kind == "name" or after.text in ("[", "::"))


def _qualifies_memory(tokens: TokenList, index: int) -> bool:
    before, after = tokens.text(index - 1), tokens[index + 1]
    if before in (".", "namespace", "struct", "goto"):
        return False
    if before == "->":
        return after.kind == "name"  # in a return type
    if before in _METHOD_ENDS or after.kind == "name" or after.text in ("*", "&", "&&", "::"):
        return True
    second = tokens.text(index + 2)
    if after.text == "(" and second in ("*", "&"):
        return True  # a pointer or reference to an array
    if after.text == "[" == second and before in _BEFORE_FUNCTIONS:
        return True  # before an attribute
    if after.text == ";" and tokens.text(tokens.seek_back(index, STATEMENT_ENDS) + 1) == "using":
        return True  # at the end of an alias
    return _is_attribute(tokens, index) or (before == "(" and tokens.text(index - 2) == "coherent")
