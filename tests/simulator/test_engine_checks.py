"""One planted fault for each checker of the engine, and its clean twin."""

import re
from pathlib import Path

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, engine

from .planted import PARAMETERS, Planted, arguments, result

CASES = """
device_read_past_the_end: out_of_bounds: 4 bytes at byte 256 of buffer(1), which has 256
  o[i] = a[i {~+ 1 =>~}];
device_write_far_away: out_of_bounds
  o[i {~+ (i == 63 ? 100000000 : 0) =>~}] = 1;
threadgroup_index_past_the_end: threadgroup_out_of_bounds
  threadgroup float s[{~64 => 65~}]; s[i + 1] = i; BARRIER(threadgroup) o[i] = s[i ? i : 1];
threadgroup_neighbour_overrun: threadgroup_out_of_bounds
  threadgroup float s[64]; threadgroup float t[64]; s[i] = i; t[i] = i; BARRIER(threadgroup)
  o[i] = s[i {~+ 64 =>~}] + t[i];
uninitialised_threadgroup_read: uninitialised
  threadgroup float s[65]; s[i] = i{~=> ; if (i == 0) s[64] = 0~}; BARRIER(threadgroup)
  o[i] = s[i + 1];
an_initialiser_does_not_run_for_other_threads: uninitialised
  threadgroup float s[64] = {1}; {~=> s[i] = 1; BARRIER(threadgroup)~}
  o[i] = s[63 - i];
write_then_read_by_another_simdgroup: race
  threadgroup float s[64]; s[i] = 0; BARRIER(threadgroup) s[i] = i;
  {~=> BARRIER(threadgroup)~} o[i] = s[63 - i];
write_then_read_by_another_lane: race
  threadgroup float s[64]; s[i] = 0; BARRIER(threadgroup) s[i] = i;
  {~=> SIMD_BARRIER(threadgroup)~} o[i] = s[i ^ 1];
a_shuffle_is_no_barrier: race
  threadgroup float s[64]; s[i] = 0; BARRIER(threadgroup) s[i] = i; float t = simd_sum(1.0f);
  {~=> SIMD_BARRIER(threadgroup)~} o[i] = s[i ^ 1] + t;
simdgroup_barrier_orders_only_its_own: race
  threadgroup float s[64]; s[i] = 0; BARRIER(threadgroup) s[i] = i; SIMD_BARRIER(threadgroup)
  o[i] = s[{~63 - i => i ^ 31~}];
a_barrier_without_mem_threadgroup: race
  threadgroup float s[64]; s[i] = 0; BARRIER(threadgroup) s[i] = i;
  BARRIER({~none => device | mem_flags::mem_threadgroup~})
  o[i] = s[63 - i];
read_then_overwritten: race
  threadgroup float s[64]; s[i] = i; BARRIER(threadgroup) float x = s[63 - i];
  {~=> BARRIER(threadgroup)~} s[i] = 0; o[i] = x;
read_by_two_simdgroups_then_overwritten: race
  threadgroup float s[1]; if (i == 0) s[0] = 1; BARRIER(threadgroup) o[i] = s[0];
  {~SIMD_BARRIER => BARRIER~}(threadgroup) if (i == 63) s[0] = 2;
read_by_two_lanes_then_overwritten: race
  threadgroup float s[1]; if (i == 0) s[0] = 1; BARRIER(threadgroup)
  if (i {~< 32 => == 31~}) { o[i] = s[0]; {~if (i == 31) =>~} s[0] = 2; }
two_writers: race
  threadgroup float s[1]; {~=> if (i == 0)~} s[0] = i; BARRIER(threadgroup) o[i] = s[0];
two_values_of_a_simdgroup: race
  threadgroup float s[2]; s[i / 32] = {~lane / 31 => simd_max(i)~}; BARRIER(threadgroup)
  o[i] = s[i / 32];
one_value_of_two_simdgroups: race
  threadgroup float2 s[2]; s[{~0 => i / 32~}] = float2(a[1], 2); BARRIER(threadgroup)
  o[i] = s[{~0 => i / 32~}].{~x => y~};
barrier_in_both_branches: divergent_barrier, unchecked too
  threadgroup float s[64]; s[i] = i; {~=> BARRIER(threadgroup)~}
  if (i < 40) { {~BARRIER(threadgroup) =>~} o[i] = s[i ^ 1]; }
  else { {~BARRIER(threadgroup) =>~} o[i] = s[i]; }
barrier_after_an_early_return: divergent_barrier, unchecked too
  {~=> BARRIER(threadgroup)~} if (i >= 40) return; {~BARRIER(threadgroup) =>~} o[i] = 1;
divergent_simdgroup_barrier: divergent_barrier, unchecked too
  {~if (lane < 8) =>~} SIMD_BARRIER(threadgroup) o[i] = 1;
partial_reduction: partial_simd
  float x = {~i => simd_sum(float(i))~}; if (lane < 8) {~x = simd_sum(x); =>~} o[i] = x;
too_much_threadgroup_memory: threadgroup_memory, unchecked too
  threadgroup float s[{~8192 => 8188~}]; threadgroup float t[1]; s[i] = i; if (i == 0) t[0] = 1;
  BARRIER(threadgroup) o[i] = s[i] + t[0];
write_through_a_cast_of_constant: constant_write
  {~((device float*)(ulong)&which)[0] = i => o[i] = which - which~};
misaligned_vector: misaligned
  if (i < 8) ((device float4*)(o + {~1 => 4~}))[i] = 1;
atomic_against_plain: race
  threadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
  BARRIER(threadgroup) atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);
  {~=> BARRIER(threadgroup)~} o[i] = *(threadgroup uint*)&n;
atomic_update_of_an_unwritten_value: uninitialised
  threadgroup atomic_uint n;
  {~=> if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed); BARRIER(threadgroup)~}
  o[i] = atomic_fetch_add_explicit(&n, 0u, memory_order_relaxed);
index_of_a_small_array: threadgroup_out_of_bounds: index 10 of threadgroup variable t, a float[10
  threadgroup float t[10]; if (i == {~10 => 9~}) t[i] = 1;
before_an_array: threadgroup_out_of_bounds: at byte -4 of threadgroup variable t, which has 256
  threadgroup float s[64], t[64]; s[i] = 0; *(t + i {~- 1 =>~}) = 1;
lanes_at_a_barrier_and_lanes_at_a_simd_operation: partial_simd
  {~if (lane < 8) =>~} { BARRIER(threadgroup) } {~else =>~} { o[i] = simd_sum(1.0f); } o[i] += 1;
simdgroup_barrier_against_threadgroup_barrier: divergent_barrier, unchecked too
  if (lane < {~16 => 32~}) { BARRIER(threadgroup) } else SIMD_BARRIER(none)
"""
PLANTED = Planted(CASES, threads=64, group_size=64, strict_simd=True)

SEEDS = [{"seed": seed} for seed in range(5)]
test_fault_is_reported, test_clean_twin_has_no_fault = PLANTED.tests(SEEDS)

GROUP = PARAMETERS.replace("uint lane", "uint group [[threadgroup_position_in_grid]], uint lane")


def fault(body, *values, **options):
    with pytest.raises(SimulatorFault) as caught:
        result(body, *values, **options)
    return caught.value


def test_fault_kinds_are_those_of_the_engine():
    header = (Path(__file__).parents[2] / "csrc/simulator/engine.h").read_text()
    body = re.search(r"enum SimulatorFaultKind[^{]*\{(.*?)\};", header, re.S).group(1)
    assert tuple(name.lower() for name in re.findall(r"FAULT_(\w+),", body)) == engine.FAULT_KINDS


def test_a_race_names_both_places():
    race = PLANTED.fault("write_then_read_by_another_simdgroup")
    assert abs(race.line - race.other_site[0].line) == 1


@pytest.mark.parametrize("seed", (0, 7))
def test_unchecked_lanes_that_wait_for_lanes_that_have_ended(seed):
    with pytest.raises(SimulatorFault, match=r"^divergent_barrier"):
        PLANTED.run("lanes_at_a_barrier_and_lanes_at_a_simd_operation", False, False, seed=seed)


def test_nothing_is_written_after_a_fault():
    out = torch.zeros(64)
    fault("o[i] = 5; o[i + 1] = 5;", size=out)
    assert torch.equal(out, torch.zeros(64))


def test_the_storage_is_the_bound_of_a_view():
    whole, (_, _, n) = torch.arange(100.0), arguments()
    assert torch.equal(result("o[i] = a[i + 6];", whole[30:94], n, 0), whole[36:100])
    fault("o[i] = a[i + 6];", whole[31:95], n, 0)


def test_arguments_that_share_a_storage_share_it_in_checked_runs():
    whole, (_, _, n) = torch.arange(128.0), arguments()
    result("o[i] = a[i] + 1;", whole[64:], n, 0, size=whole[:64])
    assert torch.equal(whole[:64], torch.arange(65.0, 129.0))
    assert torch.equal(whole[64:], torch.arange(64.0, 128.0))


def test_one_buffers_overrun_is_not_another_buffer():
    data, other, n = torch.zeros(64), torch.arange(64.0), torch.zeros(1)
    steps = (other.data_ptr() - data.data_ptr()) // 4
    values = "o[i] = a[i + steps];", data, n.int(), steps
    options = {"parameters": PARAMETERS.replace("int& which", "long& steps"), "arg_casts": None}
    assert torch.equal(result(*values, check=False, **options), other), "it reads the other tensor"
    fault(*values, **options)


def test_threadgroup_memory_is_fresh_for_each_threadgroup():
    body = "threadgroup float s[64]; if (group == 0) s[i] = 1; BARRIER(threadgroup) o[i] = s[i];"
    actual = fault(body, parameters=GROUP, threads=128, workers=1)
    assert (actual.kind, actual.threadgroup) == ("uninitialised", (1, 0, 0))


def test_unchecked_threadgroup_memory_starts_as_nan():
    assert PLANTED.run("uninitialised_threadgroup_read", False, check=False)[63].isnan()


@pytest.mark.parametrize("slow", (0, 1))
def test_the_first_of_several_faults_is_reported(slow):
    # Two host threads run threadgroups 0 and 1 at once. Threadgroup `slow` takes longer.
    body = f"""float x = 1; uint turns = group == {slow} ? 3000000 : 600000;
        for (uint k = 0; k < turns; ++k) x += a[k % 64]; o[i] = a[i + 64] + x;"""
    for _ in range(3):
        actual = fault(body, parameters=GROUP, threads=2, group_size=1, workers=2)
        assert actual.threadgroup == (0, 0, 0)
