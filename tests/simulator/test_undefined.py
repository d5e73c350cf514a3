"""Undefined arithmetic, out-of-bounds private arrays and endless code are faults."""

import os
import signal
import threading

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, engine, simulate

from .planted import Planted, arguments, compiled

# Constructs that the rewriter changes. Line numbers must stay the same.
FUNCTIONS = """
template <typename T> [[kernel,
  max_total_threads_per_threadgroup(64)]] void other(
    device T* a [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  threadgroup float x[
      4], y;
  x[i & 3] = y = float4(1.0h,
    2, 3, 4).x;
  a[i] = x[i & 3];
}
template [[host_name("other")]]
  [[kernel]] decltype(other<float>)
  other<float>;
struct Qualified { int x; void f() threadgroup {
  } };
void put(thread float* p, int at) {
  p[at] = 1;  //! put
}
float sign_of(float x) {
  if (x >= 0) return 1;  //! sign_of
}
float deep(float x, float lowest) {
  volatile float kept[100];  //! deep
  kept[0] = x;
  return x < lowest ? x : deep(x - 1, lowest) + kept[0];
}
template <typename T, typename Amount>
T shifted(T x, Amount by) {
  return x << by;  //! shifted
}
constant constexpr int TWO = 2;
enum { EIGHT = TWO << TWO };
constant uint MASK = (EIGHT << 9) - 1;
template <int n> struct Sized { int all[n >> TWO]; };
uint constants(int x) {
  constexpr int2 pair = int2(1, 2) << 9;
  switch (x) { case TWO << 9: return 0; }
  return sizeof(Sized<EIGHT << TWO>) + pair.y + (MASK >> x);  //! constants
}
constant float TABLE[4] = {1, 2, 3, 4};
struct Pair { float first[4], second[4]; };
#define PAIR \\
  threadgroup Pair p; if (i < 4) { p.first[i] = i; p.second[i] = 5; } BARRIER(threadgroup)
#define ARRAYS threadgroup float x[32], y[32]; x[i] = i; y[i] = i; BARRIER(threadgroup)
#define LOCAL float l[5] = {0, 0, 0, 0, 0}; for (int k = 0; k < n[5]; ++k) l[k] = k;
"""
CASES = """
null_pointer: out_of_bounds, unchecked too: read of 4 bytes at byte 0 of a null pointer
  const device float* p = n[{~1 => 0~}] ? nullptr : a; o[i] = p[i];
field_of_a_null_pointer: out_of_bounds, unchecked too: write of 4 bytes at byte 28 of a null pointer
  device Pair* p = nullptr; if (n[{~0 => 1~}]) p = (device Pair*)o; p->second[n[3]] = 1;
array_in_a_threadgroup_struct: threadgroup_out_of_bounds: index 4 of threadgroup float[4]
  PAIR o[i] = p.first[n[{~4 => 3~}]];
array_in_a_device_struct: out_of_bounds: index 4 of const device float[4]
  o[i] = ((const device Pair*)a)->first[n[{~4 => 3~}]];
row_of_a_threadgroup_array: threadgroup_out_of_bounds
  threadgroup float t[4][8]; t[i >> 3][i & 7] = i; BARRIER(threadgroup)
  o[i] = t[0][n[{~9 => 7~}]];  //!
below_a_threadgroup_array: threadgroup_out_of_bounds: index -1 of threadgroup variable y
  ARRAYS o[i] = y[n[i] {~- 1 =>~}] + x[0];
unsigned_index_below_a_buffer: out_of_bounds: at byte 17179869180 of buffer(1), which has 256
  uint at = n[i]; o[i] = a[at {~- => +~} 1];
division_by_zero: integer_division, unchecked too: int 5 divided by 0
  o[i] = 5 / n[i {~=> + 1~}];
smallest_by_minus_one: integer_division, unchecked too
  int x = n[1] - 2; o[i] = (x * 2147483647 {~- 1 =>~}) / x;
vector_division_by_zero: integer_division
  int4 v = int4(8) / int4(n[1], n[2], {~n[0] => n[5]~}, n[3]); o[i] = v.x + v.z;
too_large_for_int: float_to_integer: float 3e+09 converted to int
  o[i] = int(a[i] * {~1e9f => 1e7f~});
nan_to_int: float_to_integer
  o[i] = int({~a[0] / a[0] => a[1] / a[1]~});
half_to_char: float_to_integer: half 130 converted to char
  o[i] = char(half(a[i]) * half({~5 => 4~}));
vector_to_int: float_to_integer
  int4 v = int4(float4({~1e20f => 1e7f~} * a[i])); o[i] = v.x;
shift_by_the_width: shift: shift of int by 32 bits
  o[i] = {~1 << (n[i] + 1) => 1u << n[i]~};
shift_by_a_negative_amount: shift: shift of int by -1 bits
  o[i] = 8 >> {~(n[i] - 1) => n[i]~};
vector_by_the_width: shift
  int4 v = int4(i) << int4(n[{~32 => 31~}]); o[i] = v.y;
one_lane_of_a_vector: shift: shift of a vector of 32-bit elements by 32 bits
  uint4 v = uint4(90) >> uint4(n[1], n[2], n[{~32 => 31~}], n[3]);  //!
  o[i] = v.x;
one_thread_of_a_vector: shift
  uint2 v = uint2(1, 2) << {~(i + 1) => i~}; o[i] = v.x;
char_vector_by_more_than_a_char: shift
  uchar4 v = uchar4(n[3]) << {~256 => 7~}; o[i] = v.x;
vector_that_is_changed: shift
  ulong3 v = ulong3(n[5]);
  v <<= ulong3(n[1], n[60], n[60] + {~4 => 3~});  //!
  o[i] = v.x;
swizzle_that_is_changed: shift
  uint4 v = uint4(n[9]); v.zx >>= uint2(n[1], n[{~32 => 2~}]); o[i] = v.x;
vector_in_device_memory: shift
  ((device packed_int2*)(o + 2 * i))[0] <<= n[30] + n[{~2 => 1~}];
rotation_by_zero: shift
  uint4 v = uint4(i, 1, 2, 3);
  o[i] = (v << n[{~0 => 5~}] | v >> (32 - n[{~0 => 5~}])).x;  //!
vector_in_a_template: shift
  o[i] = shifted(ushort2(n[2]), ushort2(n[2], n[{~16 => 15~}])).x {~=> + shifted(n[1], n[16])~};
constants: shift
  o[i] = constants(n[{~32 => 3~}]);
array_write: private_out_of_bounds
  float l[{~5 => 6~}] = {0};
  for (int k = 0; k < n[6]; ++k) l[k] = 1;  //!
  o[i] = l[n[3]];
array_read: private_out_of_bounds: index 5 of float[5]
  LOCAL o[i] = l[n[{~5 => 4~}]];  //!
before_an_array: private_out_of_bounds
  LOCAL l[n[2] - {~3 => 2~}] = 1;  //!
  o[i] = l[n[2]];
vector_element: private_out_of_bounds
  float4 v = 1; v[n[{~4 => 3~}]] = 2; o[i] = v.x;
by_a_pointer: private_out_of_bounds
  LOCAL thread float* p = l;
  p[n[1] * {~7 => 4~}] = 1;  //!
  o[i] = l[n[1]];
the_other_of_two_arrays: private_out_of_bounds
  LOCAL float m[9] = {0}, sum = 0; thread float* p = m;
  for (int k = 0; k < n[{~9 => 8~}]; ++k) {
  sum += *p++;  //!
  if (k == n[2]) p = l;
  }
  o[i] = sum;
far_away_in_a_function: private_out_of_bounds, unchecked too
  LOCAL put(l, n[1] {~* 10000000 =>~}); o[i] = l[0];
wild_address: out_of_bounds, unchecked too
  o[i] = *(const device float*){~ulong(n[8]) => (ulong(a) + n[8])~};
a_table: out_of_bounds
  o[i] = TABLE[n[{~4 => 3~}]];
a_function_without_its_return: missing_return, unchecked too
  o[i] = sign_of({~-a[i] - 1 => a[i]~});
recursion_without_end: stack_overflow, unchecked too
  o[i] = deep({~a[i], -1e30f => a[1], -1~});
a_clamp_with_its_minimum_above_its_maximum: clamp: clamp with a minimum above the maximum
  o[i] = clamp(n[i], 3, n[{~2 => 4~}]);
a_clamp_of_a_vector_with_its_minimum_above_its_maximum: clamp
  o[i] = clamp(float2(a[i]), float2(1, a[{~3 => 2~}]), float2(2)).y;
lane_past_the_last: simd_lane: read of lane 32; the last lane is 31
  o[i] = simd_shuffle(a[i], ushort(i + 1) {~=> % 32~});
broadcasts_of_two_lanes: simd_lane: lane 31 reads lane 1 and lane 0 reads lane 0
  o[i] = simd_broadcast(a[i], ushort({~i / 16 => n[31]~}));
quad_broadcasts_of_two_lanes: simd_lane
  o[i] = quad_broadcast(a[i], ushort(i {~% 2 => / 4 % 4~}));
an_empty_loop: endless_loop
  {~while (true) => for (int k = 0; k < n[50]; ++k)~} {  //!
  }
  o[i] = 1;
a_loop_that_computes: endless_loop
  float x = 1;
  while (x {~> 0 => < 100~}) x = x * 1.5f;  //!
  o[i] = x;
a_loop_of_barriers: endless_loop
  for (int k = 0; k < 2; {~k = 1 - k => ++k~}) BARRIER(none)  //!
  o[i] = 1;
a_loop_that_polls: endless_loop
  device atomic_uint* flag = (device atomic_uint*)(o + 40);
  while (atomic_load_explicit(flag, memory_order_relaxed) {~== => !=~} 0) {  //!
  }
  o[i] = 1;
"""
PLANTED = Planted(CASES, FUNCTIONS)

test_fault_is_reported, test_clean_twin_has_no_fault = PLANTED.tests()


def test_shifts_in_constant_expressions_have_their_value():
    assert PLANTED.run("constants", True)[0] == 8 * 4 + (2 << 9) + (8 << 9 >> 3) - 1


def test_a_fault_of_a_shift_names_the_thread():
    assert PLANTED.fault("one_thread_of_a_vector").thread == (31, 0, 0)


def test_checks_of_shifts_are_not_counted():
    body = (
        "int4 v = int4(n[1]) << int4(n[2], n[3], n[4], n[5]); v >>= n[2]; o[i] = dot(float4(v), 1);"
    )
    counters = []
    for check in (True, False):
        library = compiled(body, check=check, count=True)
        library.k(*arguments(), 0, threads=1, arg_casts="int32")
        counters.append(library.last_counters)
    assert counters[0] == counters[1]


@pytest.fixture(scope="module")
def unchecked_write():
    """Writes past an array of 20 bytes, which is padded to 32."""
    library = compiled(
        "float x[5] = {1, 1, 1, 1, 1}, y[5] = {2, 2, 2, 2, 2}; float c = n[0], d = n[0];"
        "x[which] = 7; y[which] = 8; o[0] = x[n[0]] + y[n[0]] + c + d;"
    )

    def run(index):
        out, *rest = arguments()
        library.k(out, *rest, index, threads=1, arg_casts="int32")
        return out[0].item()

    return run


@pytest.mark.parametrize("index", [8, 9, 100, 100_000, 2**30, -1, -4, -1000])
def test_an_unchecked_write_outside_of_a_private_variable_is_a_fault(index, unchecked_write):
    with pytest.raises(SimulatorFault, match="access outside of a private variable") as caught:
        unchecked_write(index)
    assert caught.value.kind == "private_out_of_bounds"


@pytest.mark.parametrize("index", [1, 4, 5, 6, 7])
def test_an_unchecked_write_to_padding_changes_no_variable(index, unchecked_write):
    assert unchecked_write(index) == 3


def test_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGFPE)
    seen = []
    signal.signal(signal.SIGURG, lambda *_: seen.append(1))
    try:
        PLANTED.fault("division_by_zero", check=False)
        os.kill(os.getpid(), signal.SIGURG)
        assert seen == [1]
        assert signal.getsignal(signal.SIGFPE) == before
    finally:
        signal.signal(signal.SIGURG, signal.SIG_DFL)


def test_a_call_stops_at_its_step_limit():
    body = "volatile float x = 0;\nfor (int k = 0; k < which; ++k) x += 1;\no[0] = x;"
    library, (out, *rest) = compiled(body, check=True), arguments()
    library.k(out, *rest, 100, threads=3, step_limit=300, arg_casts="int32")
    assert out[0] == 100
    with pytest.raises(SimulatorFault, match=r"run 296 rounds.*\(step_limit\)") as caught:
        library.k(out, *rest, 100, threads=3, step_limit=296, arg_casts="int32")
    assert caught.value.thread == (2, 0, 0)
    library.k(out, *rest, 1_000_000, threads=1, arg_casts="int32")
    assert out[0] == 1_000_000
    for limit in (-1, 1.5, 2**63):
        with pytest.raises(ValueError, match="step_limit is"):
            library.k(out, *rest, 1, step_limit=limit)


def test_an_op_stops_at_the_step_limit_of_the_block():
    q = torch.randn(1, 1, 40, 32)
    with simulate(check=True, step_limit=20), pytest.raises(SimulatorFault) as caught:
        torch.ops.metal_attn.flash_fwd(q, q, q)
    assert caught.value.kind == "endless_loop"


@pytest.mark.parametrize("check", (False, True))
@pytest.mark.parametrize("name", ["an_empty_loop", "a_loop_that_computes", "a_loop_of_barriers"])
def test_an_endless_loop_is_interrupted(name, check, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    engine_run, interpreter = engine._interruptible()

    def run(*request):
        timer.start()  # Python would lose an earlier interrupt in a finaliser or its collector
        return engine_run(*request)

    try:
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(engine, "_interruptible", lambda: (run, interpreter))
            PLANTED.run(name, False, check, step_limit=2**62)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    PLANTED.run(name, True, check)
