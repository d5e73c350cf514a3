"""Races in device memory: planted faults, each with its clean twin."""

import re

import pytest
import torch

from .planted import Planted, compiled

FUNCTIONS = """
#define FENCE atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
#define LOCAL_FENCE \\
  atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_threadgroup);
#define ADD atomic_fetch_add_explicit(n, 1u, memory_order_relaxed)
#define LOAD atomic_load_explicit(n, memory_order_relaxed)
// The last threadgroup to arrive sums what all have written.
#define LAST(before, after)                                             \\
  threadgroup bool last; o[64 * group + i] = i; BARRIER(device)         \\
  if (i == 0) { before last = ADD == groups - 1; after }                \\
  BARRIER(device | mem_flags::mem_threadgroup)                          \\
  if (last) { float x = 0; for (uint g = 0; g < groups; g++) x += o[64 * g + i]; p[i] = x; }
"""
PARAMETERS = """device float* o [[buffer(0)]], device float* p [[buffer(1)]],
  device float* same [[buffer(2)]], device atomic_uint* n [[buffer(3)]],
  constant uint& which [[buffer(4)]], uint i [[thread_index_in_threadgroup]],
  uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]]"""
WITHIN = """
no_barrier: race
  o[i] = i; {~=> BARRIER(device)~} float x = o[63 - i]; BARRIER(device) o[i] = x;
a_barrier_with_mem_threadgroup: race
  o[i] = i; BARRIER({~threadgroup => device~}) float x = o[63 - i]; BARRIER(device) o[i] = x;
a_simdgroup_barrier_with_mem_threadgroup: race
  o[i] = i; SIMD_BARRIER({~threadgroup => device~}) float x = o[i ^ 1]; BARRIER(device) o[i] = x;
two_values: race
  o[0] = {~i => 5~};
two_values_from_two_simdgroups: race
  o[{~0 => i / 32~}] = i / 32;
a_vector_over_an_element: race
  if (i < 4) ((device float4*)o)[i] = i; BARRIER(threadgroup) o[i + {~15 => 16~}] = 1;
bytes_of_a_word: race
  device uchar* b = (device uchar*)o; b[i] = i; p[i] = b[i {~^ 1 =>~}];
halves_across_pages: race
  device half* h = (device half*)o; h[2 * i + 448] = 1; h[2 * i + {~450 => 449~}] = 2;
two_arguments_of_one_storage: race
  same[i] = i; BARRIER({~threadgroup => device~}) p[i] = o[63 - i];
atomic_against_plain: race
  ADD; BARRIER({~threadgroup => device~}) if (i == 0) p[0] = *(device uint*)n;
plain_then_atomic_against_atomic: race
  if (i == 0) *(device uint*)n = 7; {~=> BARRIER(device)~} ADD;
a_simdgroups_fence_and_the_others_barrier: race
  if (i < 32) { FENCE } o[i] = i; BARRIER({~none => device~}) float x = o[63 - i]; BARRIER(device)
  o[i] = x;
"""
BETWEEN = """
two_threadgroups_write: race
  o[{~=> 64 * group +~} i] = group;
two_threadgroups_write_the_same: race
  o[{~=> 64 * group +~} i] = 1;
one_writes_and_one_reads: race
  o[64 * group + i] = 1; p[64 * group + i] = o[64 * {~(group ^ 1) => group~} + i];
one_reads_and_one_writes: race
  float x = o[64 * {~(group ^ 1) => group~} + i]; o[64 * group + i] = x;
the_last_reader_writes: race
  p[64 * group + i] = o[{~0 => group~}]; BARRIER(device)
  if (group == 3 && i == 0) o[{~0 => 3~}] = 1;
a_barrier_is_no_order: race
  if (group == 0) o[i] = 1; BARRIER(device) if (group == {~3 => 0~}) p[i] = o[i];
neighbouring_bytes: race
  device uchar* b = (device uchar*)o + {~=> 2 *~} group; if (i == 0) { b[0] = 1; b[1] = 2; }
plain_before_atomics_of_all: race
  if (group == 0 && i == 0) *(device uint*){~n => o~} = 0; BARRIER(device) ADD;
one_plain_read_among_atomic_loads: race
  if (group == 3 && i == 0) atomic_store_explicit(n, 1u, memory_order_relaxed);
  p[64 * group + i] = {~group == 1 ? *(device uint*)n : =>~} LOAD;
the_last_without_fences: race
  LAST({~=> FENCE~}, {~=> FENCE~})
the_last_without_its_second_fence: race
  LAST(FENCE, {~=> FENCE~})
the_last_with_a_first_fence_of_the_threadgroup: race
  LAST({~LOCAL_FENCE => FENCE~}, FENCE)
the_last_with_a_second_fence_of_the_threadgroup: race
  LAST(FENCE, {~LOCAL_FENCE => FENCE~})
the_fence_before_the_write: race
  if (i == 0) {
    {~FENCE =>~} o[group] = 1; {~=> FENCE~} uint before = ADD; FENCE
    if (before == groups - 1) for (uint g = 0; g < groups; g++) p[0] += o[g];
  }
"""
# Threadgroups wait for other threadgroups, so all must run at once.
WAITING = """
all_wait_for_all: race
  o[64 * group + i] = i; {~=> FENCE~} BARRIER(device)
  if (i == 0) { ADD; while (LOAD < groups) {} }
  BARRIER(device) FENCE p[64 * group + i] = o[64 * (group ^ 1) + i];
passed_on_by_each: race
  if (i == 0) {
    if (group == 0) o[0] = 5; else while (LOAD < group) {}
    FENCE ADD; p[group] = o[{~group ? 1 : 0 => 0~}];
  }
  {~if (group == 0 && i == 0) o[1] = 1; =>~}
"""
# Threadgroups wait forever.
STUCK = """
nobody_counts_to_five: no_progress: no other thread has made progress
  if (i == 0) { ADD; while (LOAD < {~5 => 4~}) {} }  //!
the_fault_of_another_is_the_reason: out_of_bounds
  if (i == 0) { if (group) while (LOAD < group) {}
    if (group == 1) o[{~9999 => 0~}] = 1;  //!
    ADD; }
"""
SEEDS = [{"seed": seed} for seed in (0, 1, 2)]
ORDERS = [*SEEDS, {"workers": 3}]


def arguments():
    o, p = torch.zeros(64 * 4 + 512), torch.zeros(64 * 4)
    return o, p, o, torch.zeros(1, dtype=torch.int32)


def planted(table, **options):
    options |= {"language": "3.2", "group_size": 64}
    return Planted(table, FUNCTIONS, PARAMETERS, arguments, **options)


WITHIN = planted(WITHIN, threads=64)
BETWEEN = planted(BETWEEN, threads=256)
WAITING = planted(WAITING, threads=256, workers=4, step_limit=2**40)
STUCK = planted(STUCK, threads=256, workers=4, step_limit=2**40)

test_fault_within_a_threadgroup_is_reported, test_twin_within_a_threadgroup = WITHIN.tests(ORDERS)
test_fault_between_threadgroups_is_reported, test_twin_between_threadgroups = BETWEEN.tests(ORDERS)
ALONE = [*SEEDS, {"workers": 1}, {"workers": 1, "seed": 1}]
test_fault_where_threadgroups_wait_is_reported, test_twin_where_they_wait = WAITING.tests(ALONE)
# The seed starts the threadgroups as 3, 2, 0, 1.
test_fault_where_all_are_stuck_is_reported, test_twin_where_none_is = STUCK.tests(SEEDS[1:2])


@pytest.mark.parametrize("table", [WITHIN, BETWEEN, WAITING], ids=["within", "between", "waiting"])
def test_a_race_names_both_places(table):
    for name in table.names:
        fault = table.fault(name, seed=0)
        assert fault.other_site[0].line in table.lines(name), fault
        other = re.search(r"which thread \d+ of threadgroup \(\d, 0, 0\) (read|write)s", str(fault))
        assert bool(other) == (table is not WITHIN), fault


COUNT = """
uint seen = LOAD;
if (which == 0) atomic_store_explicit(n, seen + 1, memory_order_relaxed);
if (which == 1 && i == 0) for (uint k = 0; k < 64; ++k) { seen = LOAD; CAS; }
if (which == 2) while (!CAS) {}
"""
CAS = """#define CAS atomic_compare_exchange_weak_explicit( \\
  n, &seen, seen + 1, memory_order_relaxed, memory_order_relaxed)
"""


def test_seeds_switch_threads_at_atomics_and_let_weak_exchanges_fail():
    parameters = "device atomic_uint* n, constant int& which, "
    parameters += "uint i [[thread_index_in_threadgroup]]"
    library = compiled(COUNT, parameters, FUNCTIONS + CAS, check=True)

    def counted(which, seed):
        count = torch.zeros(1, dtype=torch.int32)
        library.k(count, which, threads=64, group_size=64, arg_casts="int32", seed=seed)
        return count.item()

    for which, is_right in enumerate((False, False, True)):
        assert counted(which, None) == 64
        assert all(counted(which, seed) == 64 for seed in (1, 2, 3)) is is_right, which
