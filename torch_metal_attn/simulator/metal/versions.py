"""Versions of the Metal language, and the constructs that each introduced."""

from pathlib import Path

from ..wording import type_text, value_text
from .lexer import TokenList

# Each version's value of __METAL_VERSION__.
NUMBERS = {"3.1": 310, "3.2": 320, "4.0": 400}
DEFAULT = "3.1"
LATEST = "4.0"
METAL_4 = Path(__file__).parents[1] / "shim" / "metal4"  # headers that only Metal 4 has

# Names that headers declare, and names of headers, that Metal 3.1 lacks: the first version.
DECLARED = {
    **dict.fromkeys("os_log atomic_thread_fence".split(), "3.2"),
    **dict.fromkeys(
        """tensor dextents extents tensor_inline dynamic_extent cooperative_tensor mpp
        MetalPerformancePrimitives""".split(),
        "4.0",
    ),
}
# Words that begin a construct, with the version that introduced the construct.
WORDS = {"coherent": "3.2", "tensor_handle": "4.0", "cooperative_tensor": "4.0"}
# Tokens that may precede the brackets of a lambda, but never a subscript or an attribute.
BEFORE_LAMBDA = frozenset("( , = return { ; } ? : && || !".split())


def checked(language: object) -> str:
    """The language version. Raises TypeError or ValueError if there is no such version."""
    if not isinstance(language, str):
        raise TypeError(f'language is {type_text(language)}; it must be a str such as "{DEFAULT}"')
    if language not in NUMBERS:
        known = ", ".join(f'"{version}"' for version in NUMBERS)
        raise ValueError(f"language is {value_text(language)}; it must be one of {known}")
    return language


def flags(language: str) -> list[str]:
    """The preprocessor's arguments for a version."""
    result = [f"-D__METAL_VERSION__={NUMBERS[language]}"]
    if NUMBERS[language] >= NUMBERS["4.0"]:
        result += ["-D__HAVE_TENSOR__=1", "-isystem", str(METAL_4)]
    return result


def refuse_newer(tokens: TokenList, language: str) -> None:
    """Raise MetalSourceError for syntax that `language` does not have."""
    number = NUMBERS[language]
    for index in tokens.where({"[", *WORDS}):
        text = tokens.text(index)
        if text == "[":
            used = tokens.text(index - 1) in BEFORE_LAMBDA and tokens.text(index + 1) != "["
            used = used and tokens.text(tokens.close(index) + 1) in ("(", "{")
            introduced = "3.2"
        else:
            introduced, used = WORDS[text], tokens.text(index + 1) in ("(", "<")
        if used and number < NUMBERS[introduced]:
            what = "a lambda" if text == "[" else f"`{text}`"
            raise tokens.error(
                index,
                f"{what} needs Metal {introduced}, but the language is {language}: "
                + advice(introduced),
            )


def advice(version: str) -> str:
    return f'pass language="{version}" to compile_shader'
