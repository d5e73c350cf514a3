"""Random kernels, most of them wrong: each ends as a fault, or as it does unchecked."""

import random
from textwrap import indent

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault

from .planted import Planted

KERNELS = 12
KINDS = """uninitialised private_out_of_bounds out_of_bounds integer_division float_to_integer shift
    simd_lane endless_loop partial_simd divergent_barrier""".split()


class Generator:
    """Statements over ints x0 to x2, floats f0 to f2 and arrays l and m."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loops = 0

    def integer(self, depth: int = 2) -> str:
        leaves = ["x0", "x1", "x2", "n[i]", "n[3]", "int(i)", str(self.random.randint(-3, 40))]
        if not depth or self.random.random() < 0.3:
            return self.random.choice(leaves)
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        operation = self.random.choice("+ + - - * / % << >> & | ^".split())
        if operation in "+-*":  # of unsigned numbers, as overflow is not checked
            return f"int(uint({a}) {operation} uint({b}))"
        if self.random.random() < 0.1:
            return f"int({self.floating(depth - 1)})"
        return f"({a} {operation} {b})"

    def floating(self, depth: int = 2) -> str:
        leaves = [
            "f0",
            "f1",
            "f2",
            "a[i]",
            f"l[{self.integer(0)} & 7]",
            f"m[{self.integer(0)} & 3]",
            "1.5f",
        ]
        if not depth or self.random.random() < 0.3:
            return self.random.choice(leaves)
        a, b = self.floating(depth - 1), self.floating(depth - 1)
        shapes = [
            f"({a} + {b})",
            f"({a} * {b})",
            f"l[{self.integer(1)}]",
            f"float({self.integer(1)})",
        ]
        shapes += [
            f"({self.integer(1)} > 3 ? {a} : {b})",
            f"simd_shuffle({a}, ushort({self.integer(0)}))",
        ]
        return self.random.choice(shapes)

    def statement(self, depth: int = 2) -> str:
        shapes = [
            lambda: f"x{self.random.randrange(3)} = {self.integer()};",
            lambda: f"f{self.random.randrange(3)} = {self.floating()};",
            lambda: f"l[{self.integer(1)} & 7] = {self.floating()};",
            lambda: f"l[{self.integer(1)}] = {self.floating(1)};",
            lambda: f"p[{self.integer(0)} & 7] = {self.floating(1)};",
            lambda: f"o[i] = {self.floating()};",
        ]
        if depth:
            shapes += [
                lambda: f"if ({self.integer(1)} > 2) {{ {self.statements(depth - 1)} }}",
                lambda: f"while ({self.integer(1)} > 30) {{ {self.statements(depth - 1)} }}",
                lambda: self.loop(depth - 1),
            ]
        return self.random.choice(shapes)()

    def loop(self, depth: int) -> str:
        self.loops += 1
        k = f"k{self.loops}"
        rounds = self.random.randint(1, 9)
        return f"for (int {k} = 0; {k} < {rounds}; ++{k}) {{ {self.statements(depth)} }}"

    def statements(self, depth: int = 2) -> str:
        return " ".join(self.statement(depth) for _ in range(self.random.randint(1, 4)))

    def kernel(self) -> str:
        given = "int x0 = n[i], x1 = 5; float f0 = a[i], f1 = 2; float m[4] = {1, 2, 3, 4};"
        fill = "for (int k = 0; k < 8; ++k) l[k] = a[k];" if self.random.random() < 0.7 else ""
        rest = "int x2 = 1; float f2 = 0;" if self.random.random() < 0.7 else "int x2; float f2;"
        end = "o[i] += f0 + f1 + l[n[2]];"
        return (
            f"{given}\nfloat l[8]; {fill} {rest} thread float* p = l;\n{self.statements()}\n{end}"
        )


def planted(seed: int) -> Planted:
    kernels = [Generator(seed * KERNELS + n).kernel() for n in range(KERNELS)]
    cases = (indent(f"{text}\n", "  ") for text in kernels)
    return Planted("".join(f"{n}: any\n{case}" for n, case in enumerate(cases)))


@pytest.mark.parametrize("seed", [0])
def test_a_random_kernel_ends_as_a_fault_or_as_it_does_unchecked(seed):
    kernels, faults = planted(seed), []
    for name in kernels.names:
        fault = None
        try:
            out = kernels.run(name, False)
        except SimulatorFault as caught:
            fault = caught
        if fault:
            assert fault.kind in KINDS, fault
            assert fault.file == "program_source", fault
            assert fault.line, fault
            faults.append(fault.kind)
        else:
            plain = kernels.run(name, False, check=False)
            equal = torch.equal(out.view(torch.int32), plain.view(torch.int32))
            assert equal, kernels.faulty[name]
    assert 4 <= len(faults) <= KERNELS - 4
    assert len(set(faults)) >= 3
