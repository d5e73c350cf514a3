"""`windows` of `PagedKVCache`: layers with equal windows share pages; older pages are freed."""

from collections.abc import Sequence
from typing import Any

from torch_metal_attn.call.arguments import as_int, as_int_at_least, window


def first_seen(length: int, window: int) -> int:
    """The first row that the queries after `length` rows see. window: -1 for no limit."""
    return max(length - window, 0) if window >= 0 else 0


class WindowGroups:
    """Groups of layers with equal windows, which share pages (vLLM's hybrid KV cache groups).

    A page has the rows of an entire group, so all groups have as many layers as the rarest window.

    Attributes: windows: of each layer, -1 for no limit. by_group: the window of each group. groups,
        places: for each layer its group and its place in the group.
    """

    def __init__(self, windows: Any, num_layers: int) -> None:
        self.windows = _checked(windows, num_layers)
        layers: dict[int, list[int]] = {}
        for layer, limit in enumerate(self.windows):
            layers.setdefault(limit, []).append(layer)
        size = min(map(len, layers.values()))
        self.by_group: list[int] = []
        self.groups, self.places = [0] * num_layers, [0] * num_layers
        for limit, members in layers.items():
            for i, layer in enumerate(members):
                self.groups[layer] = len(self.by_group) + i // size
                self.places[layer] = i % size
            self.by_group += [limit] * -(-len(members) // size)

    def first_pages(self, length: int, page_size: int) -> list[int]:
        """For each group, the first page that the queries after `length` rows see."""
        return [first_seen(length, limit) // page_size for limit in self.by_group]

    def check_pages(self, id: int, pages: list[list[int]], length: int, page_size: int) -> None:
        """Raise ValueError if a page that queries after `length` rows see was freed (-1)."""
        end = -(-length // page_size)
        firsts = self.first_pages(length, page_size)
        for limit, first, group_pages in zip(self.by_group, firsts, pages, strict=True):
            if any(page < 0 for page in group_pages[first:end]):
                minimum = group_pages.count(-1) * page_size + limit
                raise ValueError(
                    f"sequence {id} cannot go back to {length} rows: pages outside of the window "
                    f"of {limit} were freed; it must keep at least {minimum} rows, or 0"
                )

    def step_options(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        """Options of a `decode_step` with the layer's window, or the caller's smaller window."""
        if (limit := self.windows[layer]) < 0:
            return options
        left = options.get("window_size_left", limit)
        if not 0 <= as_int("window_size_left", left) <= limit:
            raise ValueError(
                f"window_size_left is {left}; layer {layer} keeps the rows of a window, so it must "
                f"be in 0..{limit}"
            )
        return {"window_size_left": limit, **options}

    def cascade_options(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        if (limit := self.windows[layer]) < 0:
            return options
        size = options.get("window_size", (limit, -1))
        if not 0 <= window(size)[0] <= limit:
            raise ValueError(
                f"window_size is {size}; layer {layer} keeps the rows of a window, so "
                f"window_size[0] must be in 0..{limit}"
            )
        return {"window_size": size, **options}


def _checked(windows: Any, layers: int) -> list[int]:
    if windows is None:
        return [-1] * layers
    if isinstance(windows, str) or not isinstance(windows, Sequence):
        raise TypeError(f"windows is {windows!r}; it must be a sequence of ints, one per layer")
    if len(windows) != layers:
        raise ValueError(f"windows has {len(windows)} ints; it must have {layers}, one per layer")
    return [as_int_at_least(f"windows[{i}]", limit, -1) for i, limit in enumerate(windows)]
