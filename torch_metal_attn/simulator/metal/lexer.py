"""Tokens of preprocessed Metal text, with file and line. Text between tokens is kept as trivia."""

import re
import string
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

MARKER = re.compile(r'^#(?: |line )[ \t]*(\d+)(?: "((?:[^"\\\n]|\\.)*)")?([ \d]*)$', re.M)

# The marker between the shim and the Metal text in a preprocessed text. The tokens follow it.
END_OF_SHIM = '\n# 1 "<stdin>" 2\n'

# The space before a token, then the token or a directive. Names are first: they are most frequent.
TOKEN = re.compile(
    r"""(\s*)(
        [A-Za-z_]\w*
      | \.?\d(?:[eEpP][+-]|[\w.'])*
      | "(?:\\.|[^"\\\n])*"
      | '(?:\\.|[^'\\\n])*'
      | [;,(){}[\]]
      | ::|->|\.\.\.|<<=|<<|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=
      | (?m:^)\#[^\n]*
      | .
      | \Z)""",
    re.X | re.S,
)
# A token's kind by its first character. Any other character begins a mark, or a number as in `.5`.
KINDS = (
    dict.fromkeys(string.ascii_letters + "_", "name")
    | dict.fromkeys(string.digits, "number")
    | {'"': "string", "'": "char"}
)

OPENERS = {"(": ")", "[": "]", "{": "}"}
CLOSERS = {closer: opener for opener, closer in OPENERS.items()}
BRACKETS = frozenset({*OPENERS, *CLOSERS})


class MetalSourceError(ValueError):
    """Metal text that cannot be parsed. The message has the file and line of the Metal source."""

    def __init__(self, message: str, file: str = "", line: int = 0) -> None:
        super().__init__(f"{file}:{line}: error: {message}" if file else message)
        self.file = file
        self.line = line


@dataclass(slots=True)
class Token:
    """One token, with the white space, pragmas and line markers before it."""

    kind: str  # name, number, string, char, mark, raw (text made by a rewrite), end
    text: str
    space: str
    file: str
    line: int


def segments(text: str) -> Iterator[tuple[str, str, int, bool, str]]:
    """The parts between line markers: (marker line, file, first line, is a system header, text)."""
    marker, file, line, system, start = "", "", 1, False, 0
    for match in MARKER.finditer(text):
        yield marker, file, line, system, text[start : match.start()]
        marker = match.group() + "\n"
        file = match.group(2) if match.group(2) is not None else file
        line = int(match.group(1))
        system = "3" in match.group(3).split()
        start = min(match.end() + 1, len(text))
    yield marker, file, line, system, text[start:]


def lex(text: str) -> list[Token]:
    """Tokens of `clang -E` output, with system headers as trivia. The last has the kind "end"."""
    tokens: list[Token] = []
    begin = text.find(END_OF_SHIM) + 1
    space, file, line = text[:begin], "", 1
    for marker, file, line, system, body in segments(text[begin:]):
        space += marker
        if system:
            space += body
            continue
        pieces, end, lines = _pieces(body)
        at = len(tokens)
        tokens += [Token(kind, word, before, file, line + n) for kind, word, before, n in pieces]
        if pieces:
            tokens[at].space = space + tokens[at].space
            space = end
        else:
            space += end
        line += lines
    tokens.append(Token("end", "", space, file, line))
    return tokens


# Cached, because specialisations of a kernel share most of their text.
@lru_cache(maxsize=1024)
def _pieces(body: str) -> tuple[list[tuple[str, str, str, int]], str, int]:
    """(kind, text, space before, line from 0) of each token, the last trivia, and its line."""
    result: list[tuple[str, str, str, int]] = []
    kinds: dict[str, str] = {}
    space, line = "", 0
    for before, token in TOKEN.findall(body):
        if before:
            space += before
            line += before.count("\n")
        kind = kinds.get(token) or kinds.setdefault(token, _kind(token))
        if kind == "trivia":
            space += token
        else:
            result.append((kind, token, space, line))
            space = ""
    return result, space, line


def _kind(token: str) -> str:
    if not token or (token.startswith("#") and len(token) > 1):
        return "trivia"
    return KINDS.get(token[0]) or ("number" if token[1:2].isdigit() else "mark")


def join(tokens: list[Token]) -> str:
    return "".join([token.space + token.text for token in tokens])


class TokenList:
    """Tokens to search and rewrite. The trivia stays, so line numbers do not change."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        # A word that is not in this set needs no search: no rewrite adds a word that is searched.
        self.words = {token.text for token in tokens}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Token:
        return self.tokens[index]

    def text(self, index: int) -> str:
        """The token's text; empty beyond either end."""
        try:
            return self.tokens[index].text if index >= 0 else ""
        except IndexError:
            return ""

    def next(self, index: int, words: Collection[str]) -> int:
        """The first index from `index` on whose token is one of `words`, or the length."""
        tokens = self.tokens
        if not self.words.isdisjoint(words):
            for at in range(index, len(tokens)):
                if tokens[at].text in words:
                    return at
        return len(tokens)

    def where(self, words: Collection[str]) -> list[int]:
        """Indices of the tokens that are one of `words` now."""
        if not (present := self.words.intersection(words)):
            return []
        return [at for at, token in enumerate(self.tokens) if token.text in present]

    def find(self, *words: str) -> Iterator[int]:
        """Indices of names that are one of `words`. The caller may change tokens meanwhile."""
        index = -1
        while (index := self.next(index + 1, words)) < len(self.tokens):
            if self.tokens[index].kind == "name":
                yield index

    def error(self, index: int, message: str) -> MetalSourceError:
        token = self.tokens[min(index, len(self.tokens) - 1)]
        return MetalSourceError(message, token.file, token.line)

    def close(self, index: int) -> int:
        """The index of the bracket that closes the bracket at `index`."""
        depth: list[str] = []
        tokens = self.tokens
        for at in range(index, len(tokens)):
            text = tokens[at].text
            if text not in BRACKETS:
                continue
            if text in OPENERS:
                depth.append(OPENERS[text])
            else:
                if depth.pop() != text:
                    raise self.error(at, f"`{text}` closes no bracket")
                if not depth:
                    return at
        raise self.error(index, f"`{self.text(index)}` is never closed")

    def open(self, index: int) -> int:
        depth = 0
        tokens = self.tokens
        for at in range(index, -1, -1):
            text = tokens[at].text
            if text in BRACKETS:
                depth += 1 if text in CLOSERS else -1
                if depth == 0:
                    return at
        raise self.error(index, f"`{self.text(index)}` closes no bracket")

    def after(self, index: int) -> int:
        """The index after the token, or after the brackets that it opens."""
        return (self.close(index) if self.text(index) in OPENERS else index) + 1

    def before(self, index: int) -> int:
        return (self.open(index) if self.text(index) in CLOSERS else index) - 1

    def seek(self, index: int, words: Collection[str]) -> int:
        """Like `next`, but skips brackets and what they contain."""
        while index < len(self) and self.text(index) not in words:
            index = self.after(index)
        return index

    def seek_back(self, index: int, words: Collection[str]) -> int:
        """Like `seek`, but backwards; -1 if there is no such token."""
        while index >= 0 and self.text(index) not in words:
            index = self.before(index)
        return index

    def skip(self, index: int, words: Collection[str], step: int = 1) -> int:
        """The first index from `index` on, in steps of `step`, whose token is none of `words`."""
        while self.text(index) in words:
            index += step
        return index

    def qualified_start(self, index: int) -> int:
        """The first token of a qualified name, such as `a::b`, that ends at `index`."""
        while self.text(index - 1) == "::":
            index -= 2 if self.tokens[index - 2].kind == "name" else 1
        return index

    def close_angle(self, index: int) -> int:
        """The index of the `>` of a template argument list that begins at `index`."""
        return self._other_angle(index, lambda at: self.seek(at + 1, ("<", ">", ";", "}")))

    def open_angle(self, index: int) -> int:
        """The index of the `<` of a template argument list that ends at `index`."""
        return self._other_angle(index, lambda at: self.seek_back(at - 1, ("<", ">")))

    def _other_angle(self, index: int, next_angle: Callable[[int], int]) -> int:
        depth, at, first = 0, index, self.text(index)
        while (text := self.text(at)) in ("<", ">"):
            # A `<` after any other token is a comparison, as in `A<sizeof(T) < 8>`.
            if text == ">" or self.tokens[at - 1].kind in ("name", "raw"):
                depth += 1 if text == first else -1
            if depth == 0:
                return at
            at = next_angle(at)
        raise self.error(index, "a template argument list is not complete")

    def scope_end(self, index: int) -> int:
        """The end of the function, block or struct that a declaration at `index` is in."""
        at = self.seek(index, (")", "}"))
        if self.text(at) == ")":
            at = self.next(at, ("{", ";"))
            at = self.close(at) if self.text(at) == "{" else at
        return at

    def split(self, start: int, end: int) -> list[tuple[int, int]]:
        """The spans of [start, end) between top-level commas. An empty range has no span."""
        spans: list[tuple[int, int]] = []
        at = begin = start
        while at < end:
            text, kind = self.tokens[at].text, self.tokens[at].kind
            if kind == "mark":
                if text in OPENERS:
                    at = self.close(at)
                elif text == "<" and self.tokens[at - 1].kind == "name":
                    at = self.maybe_angle(at, end)
                elif text == ",":
                    spans.append((begin, at))
                    begin = at + 1
            at += 1
        if begin < end or spans:
            spans.append((begin, end))
        return spans

    def maybe_angle(self, index: int, end: int) -> int:
        """The end of the template argument list at `index`, or `index` if it is a comparison."""
        try:
            close = self.close_angle(index)
        except MetalSourceError:
            return index
        return close if close < end else index

    def source(self, start: int, end: int) -> str:
        """The text of [start, end) on one line, with single spaces."""
        return " ".join(token.text for token in self.tokens[start:end])

    def remove(self, start: int, end: int) -> None:
        """Remove [start, end). Trivia with line breaks moves to the token at `end`."""
        if start >= end:
            return
        kept = "".join(t.space for t in self.tokens[start:end] if "\n" in t.space)
        self.tokens[end].space = kept + self.tokens[end].space
        del self.tokens[start:end]

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace [start, end) by `text`, as one token of kind "raw"."""
        first = self.tokens[start]
        self.remove(start + 1, end)
        self.tokens[start] = Token("raw", text, first.space, first.file, first.line)
