"""Planted faults and their clean twins, all cases in one kernel, which is compiled once."""

import functools
import re
from collections.abc import Mapping

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
# What a case may use besides: `which`, and n[i] = i, a[i] = i, o, each of 64 elements.
KERNEL = """kernel void k(device float* o [[buffer(0)]], const device float* a [[buffer(1)]],
  const device int* n [[buffer(2)]], constant int& which [[buffer(3)]],
  uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
switch (which) {
"""

# name: (kind, faulty statements, clean statements). The line of the fault has the mark /*!*/.
Cases = Mapping[str, tuple[str, str, str]]


class Planted:
    """The cases, compiled when the first of them runs."""

    def __init__(self, cases: Cases, functions: str = "") -> None:
        self.cases = cases
        self.names = list(cases)
        body = "".join(
            f"case {2 * position + twin}: {{\n{case[1 + twin]}\n}} break;\n"
            for position, case in enumerate(cases.values())
            for twin in (0, 1)
        )
        self.source = f"{HEAD}{functions}{KERNEL}{body}}}\n}}\n"

    @functools.cache  # noqa: B019 - lives as long as the module
    def library(self, check: bool):
        return compile_shader(self.source, check=check)

    def run(self, name: str, twin: int, check: bool = True, **options) -> torch.Tensor:
        out, numbers = torch.zeros(64), torch.arange(64)
        which = 2 * self.names.index(name) + twin
        options = {"threads": 32, "group_size": 32, "workers": 1, "step_limit": 10_000} | options
        self.library(check).k(
            out, numbers.float(), numbers.int(), which, arg_casts="int32", **options
        )
        return out

    def fault(self, name: str, check: bool = True, **options) -> SimulatorFault:
        """The fault of the faulty statements."""
        with pytest.raises(SimulatorFault) as caught:
            self.run(name, 0, check, **options)
        return caught.value

    def line(self, name: str) -> int:
        """The marked line of the faulty statements, or of the function that they call."""
        text = self.cases[name][1]
        if "/*!*/" not in text:
            called = re.search(r"(\w+)\(", text).group(1)
            before = self.source.index(f" {called}(")
        else:
            before = self.source.index(text)
        return self.source[: self.source.index("/*!*/", before)].count("\n") + 1

    def check_fault(self, name: str) -> None:
        """The faulty statements are reported with kind and place."""
        fault = self.fault(name, step_limit=100_000)
        assert (fault.kind, fault.file) == (self.cases[name][0], "program_source"), fault
        assert fault.line == self.line(name), fault
        assert (fault.kernel, fault.threadgroup) == ("k", (0, 0, 0))
