"""Bookkeeping of pages: which are free, who uses each, and which can be found by tokens."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from weakref import WeakValueDictionary

from torch_metal_attn.kv_cache.windows import WindowGroups
from torch_metal_attn.wording import count_text


class CacheFull(RuntimeError):
    """The cache has no space for the new rows. Nothing was changed."""


@dataclass(eq=False)
class Prefix:
    """The tokens of one page, which follow those of `parent`.

    Keys and values depend on both. The root of a namespace has no parent, and its `tokens` is the
    namespace.
    """

    parent: "Prefix | None"
    tokens: Hashable
    pages: dict[int, int] = field(default_factory=dict)  # by group: the page with these tokens

    def __getstate__(self) -> dict[str, Any]:
        # `PagePool` pickles the links, as pickle would recurse too deeply along them.
        return self.__dict__ | {"parent": None}


@dataclass
class PagedSequence:
    pages: list[list[int]]  # by group of layers; -1 before the group's window
    lengths: list[int]  # by layer
    tokens: list[int]  # the known tokens, from the first token on
    prefixes: list[Prefix]  # the namespace's root, then one for each page of known tokens
    slot: int = -1  # the slot of its recent rows
    accepted: int = 0  # the length after the last accept

    @property
    def length(self) -> int:
        return max(self.lengths)


@dataclass
class NewRows:
    sequence: PagedSequence
    start: int
    length: int


class PagePool:
    """Pages 0 to num_pages - 1.

    A page is free, used by sequences, or idle: unused, but available to `match`. When no page is
    free, the least recently used idle page is evicted. A prefix lives as long as a page, a sequence
    or a longer prefix needs it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self.references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._prefix_of: dict[int, tuple[int, Prefix]] = {}  # by page: its group and prefix
        self._prefixes: WeakValueDictionary[Hashable, Prefix] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_prefixes": [(x, x.parent) for x in self._prefixes.values()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prefixes = WeakValueDictionary()
        for prefix, parent in state["_prefixes"]:
            prefix.parent = parent
            self._prefixes[parent, prefix.tokens] = prefix

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Take a free or idle page for one user; its contents are lost."""
        if not self._free:
            self.forget(next(iter(self._idle)))
        page = self._free.pop()
        self.references[page] = 1
        return page

    def share(self, page: int) -> None:
        self._idle.pop(page, None)
        self.references[page] += 1

    def release(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            if page in self._prefix_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def prefix(self, parent: Prefix | None, tokens: Hashable) -> Prefix:
        """The prefix of these tokens after those of parent. Compares tokens, not only hashes."""
        return self._prefixes.setdefault((parent, tokens), Prefix(parent, tokens))

    def match(self, root: Prefix, tokens: list[int], groups: WindowGroups) -> list[Prefix]:
        """The root and the longest chain of prefixes that has every page in the groups' windows."""
        known, matched, page_size = [root], 0, self._page_size
        runs = [0] * len(groups.by_group)  # by group: consecutive pages at the end of the chain
        for start in range(0, len(tokens) - page_size + 1, page_size):
            end = start + page_size
            prefix = self._prefixes.get((known[-1], tuple(tokens[start:end])))
            if prefix is None:
                break
            known.append(prefix)
            runs = [run + 1 if g in prefix.pages else 0 for g, run in enumerate(runs)]
            firsts = groups.first_pages(end, page_size)
            if all(run >= len(known) - 1 - i for run, i in zip(runs, firsts, strict=True)):
                matched = len(known) - 1
        return known[: matched + 1]

    def forget(self, page: int) -> None:
        """Remove a page from the prefixes, because it is about to change."""
        if page not in self._prefix_of:
            return
        group, prefix = self._prefix_of.pop(page)
        del prefix.pages[group]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def pages_of(self, length: int) -> int:
        return -(-length // self._page_size)

    def _changed(self, rows: NewRows) -> tuple[range, int]:
        """Per group: the indices of the pages that the rows change, and the number of new pages."""
        end, count = self.pages_of(rows.start + rows.length), len(rows.sequence.pages[0])
        first = rows.start // self._page_size if rows.length > 0 else end
        return range(first, min(end, count)), max(end - count, 0)

    def reserves(self, rows: NewRows) -> bool:
        """True if `unshare` has an effect: it takes, copies or forgets a page."""
        held, new = self._changed(rows)
        pages = (pages[i] for pages in rows.sequence.pages for i in held)
        return new > 0 or any(self.references[p] > 1 or p in self._prefix_of for p in pages)

    def missing(self, written: Sequence[NewRows]) -> int:
        """The number of pages that the rows must take. Raises CacheFull if fewer are free."""
        missing = 0
        users: Counter[int] = Counter()
        for rows in written:
            held, new = self._changed(rows)
            for pages in rows.sequence.pages:
                missing += new
                users.update(pages[i] for i in held)
        # One of a shared page's users keeps the page, the others take copies.
        missing += sum(min(n, self.references[p] - 1) for p, n in users.items())
        if missing > self.available:
            raise CacheFull(
                f"{count_text(sum(rows.length for rows in written), 'new row')} of "
                f"{count_text(len(written), 'sequence')} need {count_text(missing, 'more page')}, "
                f"and {self.available} of {len(self.references)} pages are free"
            )
        return missing

    def unshare(self, written: Sequence[NewRows]) -> dict[int, int]:
        """Give each sequence unshared pages for its rows; returns {copy: original page}."""
        copies: dict[int, int] = {}
        for rows in written:
            held, new = self._changed(rows)
            for pages in rows.sequence.pages:
                for i in held:
                    page = pages[i]
                    if self.references[page] > 1:
                        pages[i] = self.take()
                        copies[pages[i]] = page
                        self.release(page)
                    else:
                        self.forget(page)
                pages += [self.take() for _ in range(new)]
            del rows.sequence.prefixes[1 + held.start :]
        return copies

    def pages_after(self, written: Sequence[NewRows], group: int) -> list[list[int]]:
        """Pages of each sequence as after `unshare`, for the checks of an op before `unshare`."""
        unused, after = chain(reversed(self._free), self._idle), []
        copied: Counter[int] = Counter()
        self.missing(written)
        for rows in written:
            held, new = self._changed(rows)
            pages = [*rows.sequence.pages[group]]
            for i, page in ((i, pages[i]) for i in held):
                if self.references[page] - copied[page] > 1:
                    copied[page] += 1
                    pages[i] = next(unused)
            after.append([*pages, *islice(unused, new)])
        return after

    def share_all(self, pages: list[list[int]]) -> None:
        for page in (page for group_pages in pages for page in group_pages if page >= 0):
            self.share(page)

    def release_from(self, sequence: PagedSequence, first: int) -> None:
        """Release the sequence's pages from number `first` on."""
        for pages in sequence.pages:
            # In reverse, as a prefix must not be evicted before the pages that continue it.
            for page in reversed(pages[first:]):
                if page >= 0:
                    self.release(page)
            del pages[first:]

    def free_before(self, sequence: PagedSequence, firsts: list[int]) -> bool:
        """Release each group's pages before its first page in use; True if a page was released."""
        freed = False
        for first, pages in zip(firsts, sequence.pages, strict=True):
            for i in reversed(range(first)):
                if pages[i] < 0:
                    break
                self.release(pages[i])
                pages[i] = -1
                freed = True
        return freed

    def publish_full(self, sequence: PagedSequence) -> None:
        """Let `match` find pages that all layers have filled and whose tokens are known."""
        if _unwritten.get():
            return
        size = self._page_size
        full = min(len(sequence.tokens), *sequence.lengths) // size
        while (i := len(sequence.prefixes) - 1) < full:
            tokens = tuple(sequence.tokens[i * size : (i + 1) * size])
            prefix = self.prefix(sequence.prefixes[-1], tokens)
            for group, pages in enumerate(sequence.pages):
                page = pages[i]
                # The prefix may already have an equal page.
                if page >= 0 and group not in prefix.pages and page not in self._prefix_of:
                    prefix.pages[group] = page
                    self._prefix_of[page] = group, prefix
            sequence.prefixes.append(prefix)

    def compact(self) -> dict[int, int]:
        """Renumber pages so that free pages come last; returns {old number: new number}."""
        kept = [p for p, n in enumerate(self.references) if n > 0 or p in self._idle]
        holes = sorted(set(range(len(kept))).difference(kept))
        renamed = dict(zip((p for p in kept if p >= len(kept)), holes, strict=True))
        for old, new in renamed.items():
            self.references[new], self.references[old] = self.references[old], 0
            if old in self._prefix_of:
                group, prefix = self._prefix_of[new] = self._prefix_of.pop(old)
                prefix.pages[group] = new
        self._idle = OrderedDict((renamed.get(page, page), None) for page in self._idle)
        self._free = list(reversed(range(len(kept), len(self.references))))
        return renamed


_unwritten: ContextVar[bool] = ContextVar("torch_metal_attn_unwritten_pages", default=False)


@contextmanager
def unwritten() -> Iterator[None]:
    """A context in which ops write no page, so that no page is published as a prefix."""
    token = _unwritten.set(True)
    try:
        yield
    finally:
        _unwritten.reset(token)


def checked_namespace(namespace: Any) -> Hashable:
    """`namespace`, after a check of its exact types: 1 equals True and would match it."""
    for part in namespace if type(namespace) is tuple else (namespace,):
        if part is not None and type(part) not in (str, int, bytes):
            must = "it must be None, a str, an int, bytes, or a tuple of these"
            raise TypeError(f"namespace is {namespace!r}; {must}")
    return namespace
