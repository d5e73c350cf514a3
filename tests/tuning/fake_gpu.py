"""A GPU whose launches take the seconds that a test sets, and its clock."""

import torch

from torch_metal_attn.tools.bench import timing
from torch_metal_attn.tools.bench.versus import OURS, TORCHS
from torch_metal_attn.tuned import tiles
from torch_metal_attn.tuned.loading import Machine

CPU = torch.device("cpu")
M2_MAX = Machine("Apple M2 Max", "38 cores", "macOS 15.1", "torch 2.13", "torch_metal_attn 0.1.0")


class FakeClock:
    """A device that is busy for set times, and a clock that moves when the host waits for it."""

    def __init__(self):
        self.shown = self.device = 0.0
        self.waits = 0

    def work(self, seconds):
        return lambda: self.ask(seconds)

    def ask(self, seconds):
        self.device += seconds

    def synchronise(self):
        self.shown, self.waits = self.device, self.waits + 1

    @property
    def timer(self):
        return timing.Timer(lambda: self.shown, self.synchronise)


class FakeGpu(FakeClock):
    """A launch takes `seconds` of a word in the forced tile, else 1 s; torch takes `torch` s."""

    def __init__(self):
        super().__init__()
        self.seconds = {}  # numbers, or functions of the number of earlier launches of the tile
        self.torch = 2.0
        self.calls = []  # the forced tiles of each launch
        self._forced = {}

    def launch(self):
        forced = self._forced.get(tiles._in_use and tiles._in_use.value, "")
        before = self.calls.count(forced)
        self.calls.append(forced)
        seconds = next((s for word, s in self.seconds.items() if word in forced), 1.0)
        self.ask(seconds(before) if callable(seconds) else seconds)

    def remember(self, make):
        """Wrap `tiles.make`: `launch` must know the tiles of each table."""

        def making(rows, *arguments):
            rows = list(rows)
            table = make(rows, *arguments)
            if table is not None:
                self._forced[table.value] = "; ".join(f"{key} {tile}" for key, tile, _ in rows)
            return table

        return making

    def calls_of(self, shape, device):
        calls = {OURS: self.launch, TORCHS: lambda: self.ask(self.torch)}
        return calls, calls
