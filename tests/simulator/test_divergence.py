"""SIMD operations that only some lanes of a SIMD group reach: the active lanes, and the faults."""

import random
import re

import pytest
import torch

from torch_metal_attn.simulator.llvm.batches import batch_products

from .planted import Planted, choice, compiled

CASES = """
shuffle_from_an_inactive_lane: partial_simd: reads lane 8, which is not active; the active lanes are
  if (lane < 8) o[i] = simd_shuffle_xor(a[i], {~8 => 4~});
broadcast_from_an_inactive_lane: partial_simd
  if (lane > 8) o[i] = simd_broadcast(a[i], {~8 => 9~});
fill_from_an_inactive_lane: partial_simd
  if (lane < 16) o[i] = simd_shuffle_and_fill_down(a[i], a[i], 2{~ => , 16~});
tree_past_the_lanes_that_are_left: partial_simd
  float x = a[i];
  if (lane < 20) for (ushort n = {~16 => 2~}; n; n /= 2) x += simd_shuffle_xor(x, n);
  o[i] = x;
matrix_operation_of_some_lanes: partial_simd
  simdgroup_float8x8 x(1.0f), y(2.0f), z(0.0f);
  {~if (lane != 3) =>~} simdgroup_multiply_accumulate(z, x, y, z);
  {~=> if (i < 32)~} simdgroup_store(z, o);
matrix_load_of_some_lanes: partial_simd: simdgroup_store reached by lanes 0-2, 4-31, but
  simdgroup_float8x8 x(1.0f); {~if (lane != 3) =>~} simdgroup_load(x, a); //!
  o[i] = x.thread_elements()[0];
matrix_store_by_one_lane: partial_simd
  simdgroup_float8x8 x(1.0f); if ({~i == 0 => i < 32~}) simdgroup_store(x, o); SIMD_BARRIER(device)
matrix_load_in_both_branches: partial_simd
  simdgroup_float8x8 x(1.0f);
  if (lane < {~8 => 32~}) simdgroup_load(x, a); else simdgroup_load(x, a);
  o[i] = x.thread_elements()[0];
matrix_loads_in_a_loop_of_unequal_length: partial_simd: it in another round of a loop
  simdgroup_float8x8 x(1.0f);
  for (uint k = 0; k < 2; ++k)
    for (uint m = 0; m < 70 + {~(lane == 5) => 1~}; ++m) simdgroup_load(x, a); //!
  o[i] = x.thread_elements()[0];
one_threadgroup_barrier_in_different_rounds: divergent_barrier, unchecked too: it in another round
  for (uint k = 0; k < 4; ++k) if ((lane + k) % {~2 => 1~} == 0) BARRIER(none)
"""
SEEDS = [{"seed": seed} for seed in range(3)]
PLANTED = Planted(CASES, threads=64, group_size=64)
test_fault_is_reported, test_clean_twin_has_no_fault = PLANTED.tests(SEEDS)

STRICT = """
reduction_in_different_rounds: partial_simd
  float s = 0; for (uint k = 0; k < 4; ++k) if ((lane + k) % {~2 => 1~} == 0) s += simd_sum(1.0f);
  o[i] = s;
vote_of_some_lanes: partial_simd
  o[i] = simd_any(i == 0); if (lane < {~8 => 32~}) o[i] = simd_all(i < 64);
"""
PLANTED_STRICT = Planted(STRICT, threads=64, group_size=64, strict_simd=True)
test_strict_fault_is_reported, test_strict_clean_twin_has_no_fault = PLANTED_STRICT.tests(SEEDS)

WRAP = 2**32 - 1


class Program:
    """Random statements in Metal, and a model of a GPU, where active lanes run in lockstep."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.s = list(range(32))  # each lane's variable
        self.rounds = []  # of the enclosing loops
        self.broken, self.continued = set(), set()  # lanes that left the innermost loop or round
        self.text, self.steps = self.block(3, 0)

    def block(self, depth, loops):
        statements = [self.statement(depth, loops) for _ in range(self.random.randint(1, 3))]
        return " ".join(text for text, _ in statements), [run for _, run in statements]

    def run(self, steps, lanes):
        """The lanes that are still active after the statements."""
        for step in steps:
            lanes = step(lanes) if lanes else lanes
        return lanes

    def condition(self, loops):
        offset, modulus = self.random.randint(0, 7), self.random.randint(2, 5)
        bit = self.random.randint(0, 3)
        if self.random.random() < 0.5:
            return f"(s >> {bit} & 1)", lambda lane: self.s[lane] >> bit & 1
        k = " + k0" if loops else ""
        return (
            f"(lane + {offset}{k}) % {modulus} < {modulus // 2}",
            lambda n: (n + offset + (self.rounds[0] if loops else 0)) % modulus < modulus // 2,
        )

    def statement(self, depth, loops):
        kinds = [self.operation, self.operation]
        kinds += [self.branch, self.branch, self.loop, self.loop] * (depth > 0)
        kinds += [self.leave] * (loops > 0)
        return self.random.choice(kinds)(depth, loops)

    def operation(self, *_):
        def model(lanes):
            old = {lane: self.s[lane] for lane in sorted(lanes)}
            for lane in lanes:
                self.s[lane] = (3 * old[lane] + of(lane, old)) & WRAP
            return lanes

        text, of = self.random.choice(
            (
                ("simd_sum(s)", lambda lane, s: sum(s.values())),
                ("simd_max(s & 63)", lambda lane, s: max(v & 63 for v in s.values())),
                ("simd_prefix_inclusive_sum(s)", lambda lane, s: sum(s[n] for n in s if n <= lane)),
                ("simd_broadcast_first(s)", lambda lane, s: s[min(s)]),
                ("popcount(uint(ulong(simd_active_threads_mask())))", lambda lane, s: len(s)),
                ("quad_sum(s)", lambda lane, s: sum(s[n] for n in s if n // 4 == lane // 4)),
            )
        )
        return f"s = 3 * s + {text};", model

    def branch(self, depth, loops):
        text, condition = self.condition(loops)
        (then, yes), (other, no) = self.block(depth - 1, loops), self.block(depth - 1, loops)

        def model(lanes):
            chosen = {lane for lane in lanes if condition(lane)}
            return self.run(yes, chosen) | self.run(no, lanes - chosen)

        return f"if ({text}) {{ {then} }} else {{ {other} }}", model

    def loop(self, depth, loops):
        offset, modulus, minimum = (self.random.randint(*ends) for ends in ((0, 7), (1, 4), (0, 1)))
        body, steps = self.block(depth - 1, loops + 1)

        def model(lanes):
            ended, outer = set(), (self.broken, self.continued)
            self.rounds.append(0)
            while live := {n for n in lanes if self.rounds[-1] < (n + offset) % modulus + minimum}:
                ended |= lanes - live
                self.broken, self.continued = set(), set()
                after = self.run(steps, live)
                lanes = after | self.continued
                ended |= self.broken
                self.rounds[-1] += 1
            self.rounds.pop()
            self.broken, self.continued = outer
            return ended | lanes

        k = f"k{loops}"
        head = f"for (uint {k} = 0; {k} < (lane + {offset}) % {modulus} + {minimum}; ++{k})"
        return f"{head} {{ {body} }}", model

    def leave(self, _, loops):
        text, condition = self.condition(loops)
        breaks = self.random.random() < 0.5

        def model(lanes):
            left = {lane for lane in lanes if condition(lane)}
            if breaks:
                self.broken = self.broken | left
            else:
                self.continued = self.continued | left
            return lanes - left

        return f"if ({text}) {'break' if breaks else 'continue'};", model


@pytest.mark.parametrize("options", ({"check": True}, {}, {"count": True}))
def test_lanes_meet_as_on_a_gpu(options):
    programs = [Program(seed) for seed in range(100, 112)]
    body = choice(f"{{ {program.text} }}" for program in programs)
    parameters = "device uint* o, constant int& which, uint lane [[thread_index_in_simdgroup]]"
    library = compiled(f"uint s = lane; {body} o[lane] = s;", parameters, **options)
    for which, program in enumerate(programs):
        for seed in (0, 1):
            out = torch.zeros(32, dtype=torch.int32)
            library.k(out, which, threads=32, group_size=32, arg_casts="int32", seed=seed)
            program.s = list(range(32))
            program.run(program.steps, set(range(32)))
            assert (out.long() & WRAP).tolist() == program.s, (seed, program.text)


LOOP = """define void @__msl_kernel_0_k(i1 %a, i1 %b) {{
  br label %head
head:
  br i1 %a, label %{}, label %{}
inside:
  call void @__msl_simdgroup_barrier(i32 0)
  br label %head
end:
  call void @__msl_simdgroup_barrier(i32 1)
  ret void
}}
"""


@pytest.mark.parametrize("order", [("inside", "end"), ("end", "inside")])
def test_meetings_in_a_loop_are_before_those_after_it(order):
    text = batch_products(LOOP.format(*order))
    assert re.findall(r"__msl_place\(i32 (\d), i32 (\d)\)", text) == [("0", "1"), ("1", "0")]
    assert "phi i32 [ 0, %0 ], [ 1, %inside ]" in text
