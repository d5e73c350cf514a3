"""Races in device memory: planted faults, each with its clean twin."""

import re
from functools import cache

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

DEVICE = "threadgroup_barrier(mem_flags::mem_device);"
THREADGROUP = "threadgroup_barrier(mem_flags::mem_threadgroup);"
NONE = "threadgroup_barrier(mem_flags::mem_none);"
SIMD_DEVICE = "simdgroup_barrier(mem_flags::mem_device);"
SIMD_THREADGROUP = "simdgroup_barrier(mem_flags::mem_threadgroup);"
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"
LOCAL_FENCE = FENCE.replace("thread_scope_device", "thread_scope_threadgroup")
ADD = "atomic_fetch_add_explicit(n, 1u, memory_order_relaxed)"


def exchange(partner: str, barrier: str) -> str:
    return f"o[i] = i; {barrier} float x = o[{partner}]; {DEVICE} o[i] = x;"


def last_of_all(before: str, after: str) -> str:
    """The threadgroup that ends last adds up what all have written."""
    return (
        f"o[64 * group + i] = i; {DEVICE}"
        f" if (i == 0) {{ {before} last = {ADD} == groups - 1; {after} }}"
        " threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
        " if (last) { float x = 0; for (uint g = 0; g < groups; g++) x += o[64 * g + i];"
        " p[i] = x; }"
    )


# name: (faulty statements, clean statements) of a kernel with 64 threads a threadgroup.
WITHIN = {
    "no_barrier": (exchange("63 - i", ""), exchange("63 - i", DEVICE)),
    "a_barrier_with_mem_none": (exchange("63 - i", NONE), exchange("63 - i", DEVICE)),
    "a_barrier_with_mem_threadgroup": (exchange("63 - i", THREADGROUP), exchange("63 - i", DEVICE)),
    "a_barrier_with_mem_threadgroup_within_a_simdgroup": (
        exchange("i ^ 1", THREADGROUP),
        exchange("i ^ 1", "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_texture);"),
    ),
    "a_simdgroup_barrier_with_mem_threadgroup": (
        exchange("i ^ 1", SIMD_THREADGROUP),
        exchange("i ^ 1", SIMD_DEVICE),
    ),
    "a_simdgroup_barrier_orders_only_its_own": (
        exchange("63 - i", SIMD_DEVICE),
        exchange("i ^ 31", SIMD_DEVICE),
    ),
    "read_then_overwritten": (
        f"o[i] = i; {DEVICE} float x = o[63 - i]; {THREADGROUP} o[i] = x;",
        f"o[i] = i; {DEVICE} float x = o[63 - i]; {DEVICE} o[i] = x;",
    ),
    "read_by_two_lanes_then_overwritten": (
        "if (i < 32) { p[i] = o[0]; if (i == 31) o[0] = 2; }",
        "if (i == 31) { p[i] = o[0]; o[0] = 2; }",
    ),
    "read_by_two_simdgroups_then_overwritten": (
        f"p[i] = o[0]; {SIMD_DEVICE} if (i == 63) o[0] = 2;",
        f"p[i] = o[0]; {DEVICE} if (i == 63) o[0] = 2;",
    ),
    "two_values": ("o[0] = i;", "o[0] = 5;"),
    "two_values_from_two_simdgroups": ("o[0] = i / 32;", "o[i / 32] = i / 32;"),
    "a_vector_over_an_element": (
        f"if (i < 4) ((device float4*)o)[i] = i; {THREADGROUP} o[i + 15] = 1;",
        f"if (i < 4) ((device float4*)o)[i] = i; {THREADGROUP} o[i + 16] = 1;",
    ),
    "bytes_of_a_word": (
        "device uchar* b = (device uchar*)o; b[i] = i; p[i] = b[i ^ 1];",
        "device uchar* b = (device uchar*)o; b[i] = i; p[i] = b[i];",
    ),
    "a_byte_of_anothers_word": (
        "o[i] = i; ((device uchar*)o)[4 * i + 4] = 255;",
        "o[i] = i; ((device uchar*)o)[4 * i + 3] = 255;",
    ),
    "halves_across_pages": (
        "device half* h = (device half*)o; h[2 * i + 448] = 1; h[2 * i + 450] = 2;",
        "device half* h = (device half*)o; h[2 * i + 448] = 1; h[2 * i + 449] = 2;",
    ),
    "two_arguments_of_one_storage": (
        f"same[i] = i; {THREADGROUP} p[i] = o[63 - i];",
        f"same[i] = i; {DEVICE} p[i] = o[63 - i];",
    ),
    "atomic_against_plain": (
        f"{ADD}; {THREADGROUP} if (i == 0) p[0] = *(device uint*)n;",
        f"{ADD}; {DEVICE} if (i == 0) p[0] = *(device uint*)n;",
    ),
    "plain_then_atomic_against_atomic": (
        f"if (i == 0) *(device uint*)n = 7; {ADD};",
        f"if (i == 0) *(device uint*)n = 7; {DEVICE} {ADD};",
    ),
    "a_simdgroups_fence_and_the_others_barrier": (
        f"if (i < 32) {{ {FENCE} }} {exchange('63 - i', NONE)}",
        f"if (i < 32) {{ {FENCE} }} {exchange('63 - i', DEVICE)}",
    ),
}
BETWEEN = {
    "two_threadgroups_write": ("o[i] = group;", "o[64 * group + i] = group;"),
    "two_threadgroups_write_the_same": ("o[i] = 1;", "o[64 * group + i] = 1;"),
    "one_writes_and_one_reads": (
        "o[64 * group + i] = 1; p[64 * group + i] = o[64 * (group ^ 1) + i];",
        "o[64 * group + i] = 1; p[64 * group + i] = o[64 * group + i];",
    ),
    "one_reads_and_one_writes": (
        "float x = o[64 * (group ^ 1) + i]; o[64 * group + i] = x;",
        "float x = o[64 * group + i]; o[64 * group + i] = x;",
    ),
    "the_last_reader_writes": (
        f"p[64 * group + i] = o[0]; {DEVICE} if (group == 3 && i == 0) o[0] = 1;",
        f"p[64 * group + i] = o[group]; {DEVICE} if (group == 3 && i == 0) o[3] = 1;",
    ),
    "a_barrier_is_no_order": (
        f"if (group == 0) o[i] = 1; {DEVICE} if (group == 3) p[i] = o[i];",
        f"if (group == 0) o[i] = 1; {DEVICE} if (group == 0) p[i] = o[i];",
    ),
    "neighbouring_bytes": (
        "device uchar* b = (device uchar*)o + group; if (i == 0) { b[0] = 1; b[1] = 2; }",
        "device uchar* b = (device uchar*)o + 2 * group; if (i == 0) { b[0] = 1; b[1] = 2; }",
    ),
    "atomics_against_plain": (
        f"if (group == 2) p[i] = *(device uint*)n; else {ADD};",
        f"if (group == 2) p[i] = *(device uint*)o; else {ADD};",
    ),
    "plain_before_atomics_of_all": (
        f"if (group == 0 && i == 0) *(device uint*)n = 0; {DEVICE} {ADD};",
        f"if (group == 0 && i == 0) *(device uint*)o = 0; {DEVICE} {ADD};",
    ),
    "one_plain_read_among_atomic_loads": (
        "if (group == 3 && i == 0) atomic_store_explicit(n, 1u, memory_order_relaxed);"
        " p[64 * group + i] = group == 1 ? *(device uint*)n"
        " : atomic_load_explicit(n, memory_order_relaxed);",
        "if (group == 3 && i == 0) atomic_store_explicit(n, 1u, memory_order_relaxed);"
        " p[64 * group + i] = atomic_load_explicit(n, memory_order_relaxed);",
    ),
    "the_last_without_fences": (last_of_all("", ""), last_of_all(FENCE, FENCE)),
    "the_last_without_its_second_fence": (last_of_all(FENCE, ""), last_of_all(FENCE, FENCE)),
    "the_last_with_a_first_fence_of_the_threadgroup": (
        last_of_all(LOCAL_FENCE, FENCE),
        last_of_all(FENCE, FENCE),
    ),
    "the_last_with_a_second_fence_of_the_threadgroup": (
        last_of_all(FENCE, LOCAL_FENCE),
        last_of_all(FENCE, FENCE),
    ),
    "the_fence_before_the_write": (
        f"if (i == 0) {{ {FENCE} o[group] = 1; uint before = {ADD}; {FENCE}"
        " if (before == groups - 1) for (uint g = 0; g < groups; g++) p[0] += o[g]; }",
        f"if (i == 0) {{ o[group] = 1; {FENCE} uint before = {ADD}; {FENCE}"
        " if (before == groups - 1) for (uint g = 0; g < groups; g++) p[0] += o[g]; }",
    ),
    "all_wait_for_all": (
        f"o[64 * group + i] = i; {DEVICE} if (i == 0) {{ {ADD};"
        " while (atomic_load_explicit(n, memory_order_relaxed) < groups) {} }"
        f" {DEVICE} {FENCE} p[64 * group + i] = o[64 * (group ^ 1) + i];",
        f"o[64 * group + i] = i; {FENCE} {DEVICE} if (i == 0) {{ {ADD};"
        " while (atomic_load_explicit(n, memory_order_relaxed) < groups) {} }"
        f" {DEVICE} {FENCE} p[64 * group + i] = o[64 * (group ^ 1) + i];",
    ),
    "passed_on_by_each": (
        # Each threadgroup waits for the one before it, and reads what the first has written.
        "if (i == 0) { if (group == 0) o[0] = 5; else while (atomic_load_explicit(n,"
        f" memory_order_relaxed) < group) {{}} {FENCE} {ADD}; p[group] = o[group ? 1 : 0]; }}"
        " if (group == 0 && i == 0) o[1] = 1;",
        "if (i == 0) { if (group == 0) o[0] = 5; else while (atomic_load_explicit(n,"
        f" memory_order_relaxed) < group) {{}} {FENCE} {ADD}; p[group] = o[0]; }}",
    ),
}
# They wait for other threadgroups, so all must run at once.
WAITING = ("all_wait_for_all", "passed_on_by_each")


ARGUMENTS = "o, p, same, n, i, group, groups, last"
FUNCTION = """
__attribute__((noinline)) void {}(device float* o, device float* p, device float* same,
  device atomic_uint* n, uint i, uint group, uint groups, threadgroup bool& last) {{
{}
}}"""
KERNEL = """
kernel void k(device float* o [[buffer(0)]], device float* p [[buffer(1)]],
  device float* same [[buffer(2)]], device atomic_uint* n [[buffer(3)]],
  constant uint& which [[buffer(4)]], uint i [[thread_index_in_threadgroup]],
  uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]]) {{
  threadgroup bool last;
  switch (which) {{ {} }}
}}"""
CASES = {**WITHIN, **BETWEEN}
ORDERS = [{"workers": 1}, {"workers": 1, "seed": 1}, {"workers": 1, "seed": 2}, {"workers": 3}]


@cache
def compiled():
    """One kernel of all cases, which is told which one to run, and the line of each."""
    text = "#include <metal_stdlib>\nusing namespace metal;"
    switch, lines = "", {}
    for name, case in CASES.items():
        for kind, statements in zip(("faulty", "clean"), case, strict=True):
            text += FUNCTION.format(f"{name}_{kind}", statements)
            switch += f"case {len(lines)}: {name}_{kind}({ARGUMENTS}); break; "
            lines[name, kind] = text.count("\n")
    return compile_shader(text + KERNEL.format(switch), check=True, language="3.2"), lines


def run(name, kind, options):
    library, lines = compiled()
    groups = 4 if name in BETWEEN else 1
    o, p = torch.zeros(64 * 4 + 512), torch.zeros(64 * 4)
    n = torch.zeros(1, dtype=torch.int32)
    which = list(lines).index((name, kind))
    if name in WAITING:
        options = options | {"workers": groups}
    library.k(o, p, o, n, which, arg_casts="int32", threads=64 * groups, group_size=64, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_race_is_caught_in_any_order(name):
    for options in ORDERS:
        with pytest.raises(SimulatorFault) as caught:
            run(name, "faulty", options)
        fault = caught.value
        assert (fault.kind, fault.kernel) == ("race", "k"), fault
        line = compiled()[1][name, "faulty"]
        assert fault.line == fault.other_site[0].line == line, fault
        between = re.search(
            r"which thread \d+ of threadgroup \(\d, 0, 0\) (read|write)s", str(fault)
        )
        assert bool(between) == (name in BETWEEN), fault


@pytest.mark.parametrize("name", CASES)
def test_a_clean_twin_is_not_reported(name):
    for options in ORDERS:
        run(name, "clean", options)
