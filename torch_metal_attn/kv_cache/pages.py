"""Which pages are free, how many sequences use each, and which can be found by their tokens."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

from torch_metal_attn.call.arguments import as_int_at_least


class CacheFull(RuntimeError):
    """The cache has no space for the new rows. Nothing was changed."""


@dataclass(eq=False)
class Prefix:
    """As many tokens as a page has, after those of `parent`.

    Keys and values depend on both. The root of a namespace has no parent, and the namespace in
    place of tokens.
    """

    parent: "Prefix | None"
    tokens: Hashable
    pages: dict[int, int] = field(default_factory=dict)  # those that can be found, by group

    def __getstate__(self) -> dict[str, Any]:
        # `PagePool` pickles the links: followed from page to page they are too deep for Python.
        return self.__dict__ | {"parent": None}


class PagePool:
    """Pages 0 to num_pages - 1.

    A page is free, used by sequences, or idle: used by none, but found by its tokens. When no page
    is free, the least recently used idle page is evicted. A prefix lives as long as a page, a
    sequence or a longer prefix needs it.
    """

    def __init__(self, num_pages: int) -> None:
        self.references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._prefix_of: dict[int, tuple[int, Prefix]] = {}  # by page: its group, and its prefix
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
        """The number of pages that `take` can return."""
        return len(self._free) + len(self._idle)

    def next_pages(self) -> Iterator[int]:
        """The pages that `take` will return."""
        return chain(reversed(self._free), self._idle)

    def take(self) -> int:
        """Take a free or idle page for one user; its contents are lost."""
        if not self._free:
            self.forget(next(iter(self._idle)))
        page = self._free.pop()
        self.references[page] = 1
        return page

    def is_shared_or_found(self, page: int) -> bool:
        """Whether a write must copy the page, or stop it from being found."""
        return self.references[page] > 1 or page in self._prefix_of

    def share(self, page: int) -> None:
        """Add a user."""
        self._idle.pop(page, None)
        self.references[page] += 1

    def release(self, page: int) -> None:
        """Remove a user."""
        self.references[page] -= 1
        if self.references[page] == 0:
            if page in self._prefix_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def prefix(self, parent: Prefix | None, tokens: Hashable) -> Prefix:
        """The prefix of these tokens after parent's. The tokens are compared, not their hash."""
        return self._prefixes.setdefault((parent, tokens), Prefix(parent, tokens))

    def match(
        self, root: Prefix, tokens: list[int], page_size: int, windows: Sequence[int]
    ) -> list[Prefix]:
        """The root, and the longest chain whose pages each group has as far as its window sees."""
        known, matched = [root], 0
        runs = [0] * len(windows)  # pages that each group has, up to the last one known
        for start in range(0, len(tokens) - page_size + 1, page_size):
            end = start + page_size
            prefix = self._prefixes.get((known[-1], tuple(tokens[start:end])))
            if prefix is None:
                break
            known.append(prefix)
            runs = [run + 1 if g in prefix.pages else 0 for g, run in enumerate(runs)]
            seen = [(end - first_seen(end, window) - 1) // page_size + 1 for window in windows]
            if all(run >= pages for run, pages in zip(runs, seen, strict=True)):
                matched = len(known) - 1
        return known[: matched + 1]

    def publish(self, page: int, group: int, prefix: Prefix) -> None:
        """Let a full page be found, unless an equal page is."""
        if group not in prefix.pages and page not in self._prefix_of:
            prefix.pages[group] = page
            self._prefix_of[page] = group, prefix

    def forget(self, page: int) -> None:
        """Stop finding a page that is about to change."""
        if page not in self._prefix_of:
            return
        group, prefix = self._prefix_of.pop(page)
        del prefix.pages[group]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def compact(self) -> dict[int, int]:
        """Renumber pages so that free ones come last; returns the new number of each one moved."""
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


def first_seen(length: int, window: int) -> int:
    """The first row that the queries after `length` rows see. window: -1 if it has no limit."""
    return max(length - window, 0) if window >= 0 else 0


def grouped(windows: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Groups of layers with one window, which share pages (vLLM's hybrid KV cache groups).

    A page has the rows of a whole group, so all groups are as large as the rarest window's.
    Returns the window of each group, and of each layer its group and its place in it.
    """
    layers: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    size = min(map(len, layers.values()))
    of_groups: list[int] = []
    groups, places = [0] * len(windows), [0] * len(windows)
    for window, alike in layers.items():
        for i, layer in enumerate(alike):
            groups[layer], places[layer] = len(of_groups) + i // size, i % size
        of_groups += [window] * -(-len(alike) // size)
    return of_groups, groups, places


def checked_windows(windows: Any, num_layers: int) -> list[int]:
    """The argument `windows`: a number for each layer."""
    if windows is None:
        return [-1] * num_layers
    if isinstance(windows, str) or not isinstance(windows, Sequence):
        raise TypeError(f"windows is {windows!r}; it must be a sequence of ints, one a layer")
    if len(windows) != num_layers:
        raise ValueError(
            f"windows has {len(windows)} numbers; it must have {num_layers}, one a layer"
        )
    return [as_int_at_least(f"windows[{i}]", window, -1) for i, window in enumerate(windows)]


def checked_namespace(namespace: Any) -> Hashable:
    """The argument `namespace`. Types are compared, as 1 equals True."""
    for part in namespace if type(namespace) is tuple else (namespace,):
        if part is not None and type(part) not in (str, int, bytes):
            raise TypeError(
                f"namespace is {namespace!r}; it must be None, a str, an int, bytes, or a tuple of "
                "these"
            )
    found: Hashable = namespace
    return found
