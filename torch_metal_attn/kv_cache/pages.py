"""Which pages are free, how many sequences use each, and which can be found by their tokens."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


class CacheFull(RuntimeError):
    """The cache has no space for the new rows. Nothing was changed."""


@dataclass(eq=False)
class Prefix:
    """A full page of tokens that continues `parent`; its keys and values depend on both."""

    page: int
    key: int
    tokens: tuple[int, ...]
    parent: "Prefix | None"
    children: "set[Prefix]" = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        # `PagePool` pickles the links: followed from page to page they are too deep for Python.
        return self.__dict__ | {"parent": None, "children": set()}


def chained_hash(parent: Prefix | None, tokens: tuple[int, ...]) -> int:
    """The hash of all tokens up to and including these, the same in every process."""
    return hash((0 if parent is None else parent.key, tokens))


class PagePool:
    """Pages 0 to num_pages - 1.

    A page is free, used by sequences, or idle: used by none, but found by its tokens. When no page
    is free, the least recently used idle page is evicted. If a prefix can be found, so can its
    parent.
    """

    def __init__(self, num_pages: int) -> None:
        self.references = [0] * num_pages
        self._free = list(reversed(range(num_pages)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._prefixes: dict[int, Prefix] = {}  # by key
        self._prefix_of: dict[int, Prefix] = {}  # by page

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"links": [(x, x.parent) for x in self._prefixes.values()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        links = state.pop("links")
        self.__dict__.update(state)
        for prefix, parent in links:
            prefix.parent = parent
            if parent is not None:
                parent.children.add(prefix)

    @property
    def available(self) -> int:
        """The number of pages that `take` can return."""
        return len(self._free) + len(self._idle)

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

    def find(self, parent: Prefix | None, tokens: tuple[int, ...]) -> Prefix | None:
        """The prefix of these tokens after parent's. Hashes may collide, so both are compared."""
        found = self._prefixes.get(chained_hash(parent, tokens))
        if found is None or found.tokens != tokens or found.parent is not parent:
            return None
        return found

    def publish(self, page: int, parent: Prefix | None, tokens: tuple[int, ...]) -> Prefix | None:
        """Let a full page be found; returns its prefix, or that of an equal page found already.

        Returns None if its parent can no longer be found, or if another prefix has its hash.
        """
        found = self.find(parent, tokens)
        if found is not None:
            return found
        key = chained_hash(parent, tokens)
        if key in self._prefixes or (parent is not None and not self._is_found(parent)):
            return None
        prefix = Prefix(page, key, tokens, parent)
        self._prefixes[key] = self._prefix_of[page] = prefix
        if parent is not None:
            parent.children.add(prefix)
        return prefix

    def forget(self, page: int) -> None:
        """Stop finding a page that is about to change, and all prefixes that continue it."""
        prefix = self._prefix_of.get(page)
        if prefix is None:
            return
        if prefix.parent is not None:
            prefix.parent.children.discard(prefix)
        pending = [prefix]
        while pending:
            prefix = pending.pop()
            pending += prefix.children
            del self._prefixes[prefix.key], self._prefix_of[prefix.page]
            if prefix.page in self._idle:
                del self._idle[prefix.page]
                self._free.append(prefix.page)

    def compact(self) -> dict[int, int]:
        """Renumber pages so that free ones come last; returns the new number of each one moved."""
        kept = [p for p, n in enumerate(self.references) if n > 0 or p in self._idle]
        holes = sorted(set(range(len(kept))).difference(kept))
        renamed = dict(zip((p for p in kept if p >= len(kept)), holes, strict=True))
        for old, new in renamed.items():
            self.references[new], self.references[old] = self.references[old], 0
            if old in self._prefix_of:
                prefix = self._prefix_of[new] = self._prefix_of.pop(old)
                prefix.page = new
        self._idle = OrderedDict((renamed.get(page, page), None) for page in self._idle)
        self._free = list(reversed(range(len(kept), len(self.references))))
        return renamed

    def _is_found(self, prefix: Prefix) -> bool:
        return self._prefixes.get(prefix.key) is prefix
