"""Planted faults and their clean twins. All cases of a table are in one kernel, compiled once.

A case has a name, the kind of fault and statements. `{~faulty => clean~}` is the planted fault:

    division_by_zero: integer_division, unchecked too: int 5 divided by 0
      o[i] = 5 / n[{~i => i + 1~}];

`unchecked too`: a run without checks reports this fault as well, but without a line. A part of the
message follows the second colon. The fault is at a line of the case: at one that ends in `//!`, if
there is any. A line of a function at which a fault may be ends in `//!` and the function's name.
"""

import functools
import re

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import SimulatorFault, compile_shader
from torch_metal_attn.simulator.build import ShaderCompileError

HEAD = """#include <metal_stdlib>
using namespace metal;
#define BARRIER(memory) threadgroup_barrier(mem_flags::mem_##memory);
#define SIMD_BARRIER(memory) simdgroup_barrier(mem_flags::mem_##memory);
"""
TENSORS = f"""{HEAD}#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;
"""
# Statements may use n[i] = i, a[i] = i and o, with 64 elements each.
PARAMETERS = """device float* o [[buffer(0)]], const device float* a [[buffer(1)]],
  const device int* n [[buffer(2)]], constant int& which [[buffer(3)]],
  uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]"""


def arguments():
    return torch.zeros(64), torch.arange(64.0), torch.arange(64).int()


class Planted:
    """A table of cases, compiled when the first case runs."""

    def __init__(self, table, functions="", parameters=PARAMETERS, arguments=arguments, **options):
        """arguments: returns the values for all `parameters` but the last, `which`."""
        self.arguments = arguments
        self.build = {n: options.pop(n) for n in ("language", "strict_simd") if n in options}
        self.options = {"threads": 32, "group_size": 32, "workers": 1, "step_limit": 100_000}
        self.options |= options
        self.cases = {name: case for name, *case in read(table)}
        self.names = list(self.cases)
        self.source = f"{HEAD}{functions}kernel void k({parameters}) {{\nswitch (which) {{\n"
        for number, (*_, text) in enumerate(self.cases.values()):
            for which, side in ((2 * number, 1), (2 * number + 1, 2)):
                self.source += f"case {which}: {{\n{twin(text, side)}}} break;\n"
        self.source += "}\n}\n"

    @functools.cache  # noqa: B019 - lives as long as the module
    def library(self, check):
        return compile_shader(self.source, check=check, **self.build)

    def run(self, name, clean, check=True, **options):
        """The kernel's first argument after a run."""
        values = self.arguments()
        which = 2 * self.names.index(name) + clean
        self.library(check).k(*values, which, arg_casts="int32", **self.options | options)
        return values[0]

    def fault(self, name, check=True, **options):
        with pytest.raises(SimulatorFault) as caught:
            self.run(name, False, check, **options)
        assert (caught.value.kind, caught.value.kernel) == (self.cases[name][0], "k"), caught.value
        return caught.value

    def lines(self, name):
        """The lines at which the fault may be."""
        faulty = twin(self.cases[name][-1], 1)
        marks = [f"//! {called}\n" for called in re.findall(r"(\w+)\(", faulty)]
        in_functions = [self.source.index(mark) for mark in marks if mark in self.source]
        if in_functions:
            return {self.source.count("\n", 0, place) + 1 for place in in_functions}
        case = self.source.index(f"case {2 * self.names.index(name)}: {{\n")
        first = self.source.count("\n", 0, case) + 2
        texts = faulty.splitlines()
        marked = {first + n for n, text in enumerate(texts) if text.endswith("//!")}
        return marked or set(range(first, first + len(texts)))

    def tests(self, orders=({},)):
        """Two tests that run every case with each of these options."""

        @each_case("name", self.names)
        def fault_is_reported(name):
            _, unchecked_too, words, _ = self.cases[name]
            for order in orders:
                fault = self.fault(name, **order)
                assert fault.file == "program_source", fault
                assert fault.line in self.lines(name), fault
                assert words in str(fault)
                if unchecked_too:
                    self.fault(name, check=False, **order)

        @each_case("name", self.names)
        def clean_twin_has_no_fault(name):
            for order in orders:
                checked = self.run(name, True, **order)
                plain = self.run(name, True, check=False, **order)
                assert torch.equal(checked.view(torch.int32), plain.view(torch.int32))

        return fault_is_reported, clean_twin_has_no_fault


def read(table):
    """Each case as (name, kind, ", unchecked too" or "", words of the message, statements)."""
    actual = re.findall(r"^(\S+): (\S+)(, unchecked too)?(?:: (.+))?\n((?:  .*\n)+)", table, re.M)
    assert len(actual) == len(re.findall(r"^[^\s#]", table, re.M)), "a case has a wrong form"
    return actual


def twin(text, side):
    """The faulty statements (1) or the clean ones (2)."""
    return re.sub(r"\{~ ?(.*?) ?=> ?(.*?) ?~\}", lambda match: match[side], text)


def compiled(body, parameters=PARAMETERS, above="", **options):
    return compile_shader(f"{HEAD}{above}kernel void k({parameters}) {{\n{body}\n}}\n", **options)


def choice(statements):
    """A body in which `which` chooses a statement, so that one kernel has all statements."""
    cases = [f"case {which}: {text} break;" for which, text in enumerate(statements)]
    return f"switch (which) {{ {' '.join(cases)} }}"


def result(body, *values, size=64, parameters=PARAMETERS, above="", check=True, **options):
    """The first argument after a run of a kernel with this body. `values`: the other arguments."""
    out, *rest = arguments()
    out = torch.zeros(size) if isinstance(size, int) else size
    library = compiled(body, parameters, above, check=check)
    options = {"threads": 64, "group_size": 64, "arg_casts": "int32"} | options
    library.k(out, *(values or (*rest, 0)), **options)
    return out


def check_refused(lines, above="", below="", **options):
    """lines: the lines of a text after `above`, each with a part of the error at this line."""
    above = HEAD + above
    with pytest.raises(ShaderCompileError) as caught:
        compile_shader("\n".join([above.rstrip(), *lines, below]), **options)
    messages = {}
    for message in str(caught.value).splitlines()[1:]:
        place = re.match(r"program_source:(\d+):", message)
        messages[int(place[1])] = messages.get(int(place[1]), "") + message
    for line, (text, words) in enumerate(lines.items(), above.rstrip().count("\n") + 2):
        assert words in messages.get(line, ""), (text, caught.value)
    return str(caught.value)
