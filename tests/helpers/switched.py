"""Several faults in one text, chosen at run time, so that many mutants share a compilation.

These are "mutant schemata" (Untch, Offutt and Harrold, 1993). An expression becomes
`(mutant(3) ? (changed) : (original))`, and statements become
`if (mutant(3)) { changed } else { original }`. Other changes, such as of a constant expression, a
type or a declaration, are compiled alone.
"""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

SWITCH = "mutant_in_use"
PRELUDE = (
    f'__attribute__((visibility("default"), used)) int {SWITCH} = 0; '
    "__attribute__((noinline, disable_sanitizer_instrumentation)) "
    f"static bool mutant(int number) {{ return {SWITCH} == number; }}"
)
TOKEN = re.compile(
    r"(?P<blank>\s+|//[^\n]*|/\*.*?\*/)|(?P<directive>(?m:^)[ \t]*\#(?:[^\n]*\\\n)*[^\n]*)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eE][+-]|[\w.])*)"
    r"|(?P<mark><<=|>>=|->|::|<<|>>|[-+*/%&|^<>=!]=|&&|\|\||\+\+|--|.)",
    re.DOTALL,
)
OPENERS = frozenset("([{")
CLOSERS = frozenset(")]}")
ASSIGNMENTS = frozenset({"=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>="})
SEPARATORS = frozenset({",", "return", ";"})
STATEMENT_ENDS = frozenset({";", "{", "}"})
HEADS = frozenset({"if", "for", "while", "switch"})


@dataclass(slots=True)
class Token:
    kind: str
    text: str
    begin: int
    end: int


@dataclass
class Place:
    """A part of the text, and its replacements by the numbers of their mutants."""

    begin: int
    end: int
    statement: bool
    changed: dict[int, str] = field(default_factory=dict)


def tokens_of(text):
    matches = TOKEN.finditer(text)
    tokens = [Token(m.lastgroup, m.group(), m.start(), m.end()) for m in matches]
    return [token for token in tokens if token.kind != "blank"]


def _is_value(tokens):
    """True if these tokens can be one operand of `?:`."""
    if not tokens or any(a.kind == b.kind == "name" for a, b in pairwise(tokens)):
        return False  # two names: a declaration
    depth, actual = 0, set()
    for token in tokens:
        depth += (token.text in OPENERS) - (token.text in CLOSERS)
        if depth < 0:
            return False
        if depth == 0:
            actual.add(token.text)
    return depth == 0 and not actual & {",", ";", *ASSIGNMENTS}


def _declares(tokens):
    """True if one of these statements declares a name, which would be local to its branch."""
    for index, (before, name) in enumerate(pairwise(tokens)):
        after = tokens[index + 2].text if index + 2 < len(tokens) else ""
        if name.kind != "name" or before.text in ("return", "else") or before.kind == "number":
            continue
        if before.kind == "name" and after in ("=", "(", ";", "[", ","):
            return True
        if before.text in (">", "*", "&") and after == "=" and index > 0:
            return True
        if before.text == ">" and after in (";", "["):
            return True
    return False


class Text:
    """A shader's text as tokens, with the innermost open bracket around each token."""

    def __init__(self, text):
        self.text = text
        self.tokens = tokens_of(text)
        self.ends = [token.end for token in self.tokens]
        self.around = []  # for each token the index of the innermost open bracket, or -1
        self.closing = {}
        opened = [-1]
        for index, token in enumerate(self.tokens):
            if token.text in CLOSERS and len(opened) > 1:
                self.closing[opened.pop()] = index
            self.around.append(opened[-1])
            if token.text in OPENERS and token.kind == "mark":
                opened.append(index)

    def at(self, index):
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def place(self, begin, end, new):
        """(place, new text) of a choice between text[begin:end] and `new`, or None."""
        first = bisect_right(self.ends, begin)
        last = bisect_left(self.ends, end)
        # The old text may end within a token, so whole tokens are compared.
        new = self.text[self.tokens[first].begin : begin] + new
        new += self.text[end : self.tokens[last].end]
        olds, news = self.tokens[first : last + 1], tokens_of(new)
        while olds and news and olds[0].text == news[0].text:
            olds, news, first = olds[1:], news[1:], first + 1
        while olds and news and olds[-1].text == news[-1].text:
            olds, news, last = olds[:-1], news[:-1], last - 1
        changed = " ".join(token.text for token in news)
        return self._statements(first, last, changed) or self._expression(first, last, changed)

    def _expression(self, first, last, changed):
        """The largest expression around tokens first to last.

        In a smaller one the common type of both operands of `?:` could change the original.
        """
        actual = None
        level = self._level(first, last)
        while True:
            begin, end = first, last + 1
            while begin > 0 and not self._delimits(begin - 1, level, SEPARATORS | ASSIGNMENTS):
                begin -= 1
            while end < len(self.tokens) and not self._delimits(end, level, SEPARATORS):
                end += 1
            new = self._changed(begin, first, changed, last, end)
            can_be_chosen = self._runs(begin, end) and not self._in_template(begin, end)
            if can_be_chosen and all(map(_is_value, (self.tokens[begin:end], tokens_of(new)))):
                actual = self._found(begin, end, new, statement=False)
            if self.at(level) not in ("(", "[") or self.at(level - 1) in HEADS:
                return actual
            # Arguments change together: choose between two calls.
            end = self.closing[level]
            changed = self._changed(level, first, changed, last, end + 1)
            first, last, level = level, end, self.around[level]

    def _level(self, first, last):
        """The bracket around all of tokens first to last; -1 for none."""
        if first > last:
            return last if self.at(last) in OPENERS else self.around[last]
        outer = {-1, around := self.around[last]}
        while around >= 0:
            outer.add(around := self.around[around])
        level = self.around[first]
        while level not in outer:
            level = self.around[level]
        return level

    def _statements(self, first, last, changed):
        """The whole statements around tokens first to last, unless they declare something."""
        level = self._level(first, last)
        while self.at(level) in ("(", "["):
            level = self.around[level]
        begin, end = first, max(first, last)
        while begin > 0 and not self._ends_before(begin, level):
            begin -= 1
        while end < len(self.tokens) and not self._delimits(end, level, {";"}):
            if self.at(end) == "{" and self.around[end] == level:
                return None
            end += 1
        end += 1
        statement = self.tokens[begin:end]
        if self.at(level - 1) in ("return", "=", ",", "("):
            return None  # an initialiser's braces
        if self.at(level) != "{" or _declares(statement) or not self._runs(begin, end):
            return None
        new = self._changed(begin, first, changed, last, end)
        return self._found(begin, end, new, statement=True)

    def _ends_before(self, index, around):
        """True if a statement ends before the token and its preceding directives."""
        index -= 1
        while index > 0 and self.tokens[index].kind == "directive":
            index -= 1
        return self._delimits(index, around, STATEMENT_ENDS)

    def _delimits(self, index, around, marks):
        """True if the token is the bracket `around`, its closing one, or one of `marks` in it."""
        if index == around or self.closing.get(around) == index:
            return True
        return self.around[index] == around and self.at(index) in marks

    def _in_template(self, begin, end):
        """True if a comma beside these tokens separates a template's arguments."""
        texts = [token.text for token in self.tokens[begin:end]]
        more = texts.count("<") - texts.count(">")
        return (self.at(begin - 1) == "," and more < 0) or (self.at(end) == "," and more > 0)

    def _runs(self, begin, end):
        """True if the tokens are in a function that is not constexpr, without directives."""
        if any(token.kind == "directive" for token in self.tokens[begin:end]):
            return False
        brace = begin
        while (brace := self.around[brace]) >= 0:
            if self.at(brace) != "{":
                continue
            head = brace
            while head > 0 and not self._delimits(head - 1, self.around[brace], STATEMENT_ENDS):
                head -= 1
            words = {token.text for token in self.tokens[head:brace]}
            if "constexpr" in words:
                return False
            if "(" in words:
                return not self._constant(begin)
        return False

    def _constant(self, begin):
        """True if the enclosing statement is constexpr or a static_assert."""
        head = begin
        around = self.around[begin]
        while self.at(around) not in ("{", ""):
            head, around = around, self.around[around]
        while head > 0 and not self._delimits(head - 1, around, STATEMENT_ENDS):
            head -= 1
        return self.at(head) in ("constexpr", "static_assert")

    def _changed(self, begin, first, changed, last, end):
        """Tokens [begin, end) on one line, with `changed` in place of tokens first to last."""
        before, after = (
            " ".join(token.text for token in self.tokens[part])
            for part in (slice(begin, first), slice(last + 1, end))
        )
        return " ".join(filter(None, (before, changed, after)))

    def _found(self, begin, end, new, statement):
        return Place(self.tokens[begin].begin, self.tokens[end - 1].end, statement), new


parsed_text = lru_cache(maxsize=8)(Text)  # each problem of a file has mutants of the same texts


def switched(text, mutants):
    """(the text with a switch, {(old, new): number}) of the mutants that can be chosen in it."""
    parsed = parsed_text(text)
    places, numbers = {}, {}
    for mutant in mutants:
        actual = _places(parsed, *mutant)
        if actual is None:
            continue
        numbers[mutant] = len(numbers) + 1
        for place, changed in actual:
            at = places.setdefault((place.begin, place.end), place)
            at.changed[numbers[mutant]] = changed
    return _with_switch(text, places) if numbers else text, numbers


def _places(parsed, old, new):
    """The places of one mutant, as [(place, new text)]; None if one cannot be chosen."""
    results = []
    begin = parsed.text.find(old)
    while begin >= 0:
        place, changed = parsed.place(begin, begin + len(old), new) or (None, "")
        if place is None:
            return None
        whole = parsed.text[place.begin : place.end]
        if old in whole:  # perhaps more than once
            changed = " ".join(token.text for token in tokens_of(whole.replace(old, new)))
        results.append((place, changed))
        begin = parsed.text.find(old, begin + len(old))
    return results


def _with_switch(text, places):
    following = len(text)
    for begin, end in sorted(places, reverse=True):
        assert end <= following, f"mutants overlap in {text[begin:end]!r}"
        following = begin
        place = places[begin, end]
        choice = text[begin:end]
        for number, new in place.changed.items():
            if place.statement:
                choice = f"if (mutant({number})) {{ {new} }} else {{ {choice} }}"
            else:
                choice = f"(mutant({number}) ? ({new}) : ({choice}))"
        text = text[:begin] + choice + text[end:]
    return PRELUDE + "\n" + text
