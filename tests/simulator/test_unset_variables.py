"""A read of an unwritten private variable is a fault if its value decides something."""

from .planted import Planted

FUNCTIONS = """
struct Pair { float first; int second; float rest[3]; };
struct Row { float values[16]; };
struct Mixed { float x; half values[24]; int count[4]; };
struct Made { float values[16]; Made() {} };
struct Padded { char tag; float value; char last; };
union Bits { float x; uint bits; uchar4 bytes; half2 halves; };
union Long { float x[12]; uint bits[12]; };
struct Bytes { uchar a, b, c, d; };
struct Halves { float first[8]; float second[8]; };
__attribute__((noinline)) void put_if(thread float& x, float limit) {
  if (limit > 3) x = limit;
}
struct Uneven { half most; float sum; bool set; };
__attribute__((noinline)) float sum_of(Uneven p) { return p.set ? p.most + p.sum : 0; }
float half_of(float x) {
  float y;
  if (x > 3) y = x;
  return y * 0.5f;
}
void fill(thread float* p, int count) {
  for (int k = 0; k < count; ++k) p[k] = k;
}
"""
CASES = """
after_a_threadgroup_variable: uninitialised
  threadgroup float t[2]; float x; {~=> x = 1;~}
  o[i] = x - 7 * a[i];  //!
after_one_that_is_written: uninitialised
  float w; float x;
  w = 1; {~=> x = 2;~} o[i] = w + x;  //!
scalar: uninitialised
  float x; {~=> x = 1;~}
  o[i] = x + a[i];  //!
half: uninitialised
  half x; if (n[1] {~> => <~} 3) x = 1;
  o[i] = float(x);  //!
flag: uninitialised
  bool x; if (n[1] {~> => <~} 3) x = true;
  o[i] = x ? 1 : 2;  //!
in_one_branch: uninitialised: use of x, which has not been written
  float x; if (n[1] > 5) x = a[i];
  {~=> else x = 2;~} o[i] = x;  //!
decides_a_branch: uninitialised
  int x; bool known = n[2] == 2; if ({~n[1] > 5 => known~}) x = n[3];
  if ({~=> known &&~} x == 3) o[i] = 1;  //!
not_needed_where_another_is_true: uninitialised
  int x; if (n[1] > 5) x = n[2];
  if ((n[1] {~> => <~} 5) | (x == 3)) o[i] = 1;  //!
of_a_template: uninitialised: use of v
  vec<float, 2> v; if (n[1] {~> => <~} 5) v = a[i];
  o[i] = v.x;  //!
is_an_index: uninitialised
  int x; if (n[1] {~> => <~} 5) x = 3;
  o[x & 1] = 1;  //!
array_partly_filled: uninitialised
  float l[4]; for (int k = 0; k < n[{~3 => 4~}]; ++k) l[k] = 1;
  float s = 0;
  for (int k = 0; k < n[4]; ++k) s += l[k];
  o[i] = s;  //!
array_of_constant_indices: uninitialised
  float l[4]; l[0] = 1; l[1] = a[i]; l[3] = 2;
  o[i] = l[0] + l[{~2 => 3~}];  //!
a_part_of_a_union: uninitialised
  Bits u; if (n[1] == 1) u.halves.x = 1; else u.bytes = 3; {~=> u.halves.y = 2;~}
  o[i] = u.bits;  //!
another_member_of_a_union: uninitialised
  Bits u; u.{~bytes.x => bits~} = i;
  o[i] = u.bytes.y;  //!
an_unnamed_union: uninitialised
  typedef struct { float x[2]; } Two; union { Two x; uint bits[2]; } u;
  u.x.x[0] = a[i]; {~=> u.x.x[1] = 1;~}
  o[i] = u.bits[n[1]] & 255;  //!
a_long_union: uninitialised
  Long u; for (int k = 0; k < n[{~6 => 7~}]; ++k) u.x[k] = k;
  o[i] = u.bits[n[6]] >> 20;  //!
bytes_read_as_a_word: uninitialised
  Bytes s; s.a = i; s.b = 2; if (n[1] {~> => <~} 5) s.c = 3; s.d = 1;
  uint word = *(thread uint*)&s; o[i] = word;  //!
after_its_scope: uninitialised: or the variable's scope has ended
  thread float* p; { float l[4]; for (int k = 0; k < n[4]; ++k) l[k] = k; p = l;
  {~=> o[i] = p[n[3]];~} }
  {~o[i] = p[n[3]]; =>~}  //!
long_array: uninitialised
  float l[64]; l[n[3]] = 1;
  o[i] = l[n[{~4 => 3~}]];  //!
array_written_in_one_branch: uninitialised
  float l[2]; if (n[1] {~> => <~} 5) { l[0] = a[i]; l[1] = 2; }
  o[i] = l[n[1]];  //!
flags: uninitialised
  bool f[4]; for (int k = 0; k < n[3]; ++k) f[k] = k < n[1];
  o[i] = f[n[{~3 => 2~}]] ? 1 : 2;  //!
array_read_and_then_written: uninitialised
  float l[2]; {~float x = l[n[1]]; =>~} l[0] = 1; l[1] = 2; {~=> float x = l[n[1]];~}
  o[i] = x + l[n[1]];  //!
array_written_with_a_variable: uninitialised
  float l[2], x; if (n[1] {~> => <~} 5) x = 1;
  l[0] = 1; l[1] = x; o[i] = l[n[1]];  //!
member: uninitialised
  Pair p; p.first = 1; {~=> Pair q = p;~}
  o[i] = {~p.first + p.second => q.first~};  //!
long_struct: uninitialised
  Row r; r.values[n[1]] = 1; {~=> Row s = r;~}
  o[i] = {~r.values[n[2]] => s.values[n[1]]~};  //!
long_struct_of_several_types: uninitialised
  Mixed m; m.x = 1; m.values[n[3]] = 1;
  o[i] = m.x + m.values[n[{~2 => 3~}]];  //!
struct_with_a_constructor: uninitialised
  Made m; m.values[n[1]] = 1;
  o[i] = m.values[n[{~2 => 1~}]];  //!
column: uninitialised
  float4x4 m; m[n[1]] = 1;
  o[i] = m[n[{~2 => 1~}]].x;  //!
array_copied_in_as_far_as_needed: uninitialised
  float t[8]; for (int k = 0; k < n[{~5 => 6~}]; ++k) t[k] = a[k];
  o[i] = t[n[5]];  //!
array_copied_out: uninitialised
  float t[8]; for (int k = 0; k < n[{~7 => 8~}]; ++k) t[k] = k;
  for (int k = 0; k < 8; ++k) o[k] = t[k];  //!
half_of_a_struct: uninitialised
  Halves s; for (int k = 0; k < 8; ++k) s.first[k] = a[k];
  Halves t = s; o[i] = t.{~second => first~}[n[1]];  //!
padded_structs: uninitialised
  Padded p[4], q[4];
  for (int k = 0; k < n[{~3 => 4~}]; ++k) { p[k].tag = p[k].last = 1; p[k].value = a[k]; }
  for (int k = 0; k < 4; ++k) q[k] = p[k];
  {~o[i] = q[n[3]].value; => if (i == 0) ((device Padded*)o)[20] = q[n[3]];~}  //!
  if (i == 0) o[60] = o[62] = 1;
padded_struct_passed_by_value: uninitialised
  Uneven p; p.most = half(a[i]); p.set = n[1] < 5; {~=> p.sum = 2;~}
  o[i] = sum_of(p);  //!
left_by_a_function: uninitialised
  float x; put_if(x, n[{~3 => 4~}]);
  o[i] = x;  //!
vector_element: uninitialised
  float4 v; v.x = 1; v.y = 2; v.z = a[i];
  o[i] = v.x + v.{~w => z~};  //!
carried_by_a_loop: uninitialised
  float x, s = 0;
  for (int k = 0; k < n[3]; ++k) {
  if (k == {~1 => 0~}) x = 1;
  s += x;
  }
  o[i] = s;  //!
in_some_lanes: uninitialised
  float x; if (lane < {~16 => 32~}) x = 1;
  o[i] = simd_sum(x);  //!
matrix: uninitialised: use of a simdgroup_matrix
  simdgroup_float8x8 m, z(0.0f); {~=> simdgroup_load(m, a);~}
  simdgroup_multiply_accumulate(z, m, z, z);  //!
  simdgroup_store(z, o);
matrix_element: uninitialised
  simdgroup_float8x8 m, z(0.0f); m.thread_elements()[0] = 1; {~=> m.thread_elements()[1] = 1;~}
  simdgroup_multiply_accumulate(z, m, z, z);  //!
  simdgroup_store(z, o);
in_a_function: uninitialised
  o[i] = half_of(a[i] {~=> + 4~});
filled_by_a_function: uninitialised
  float l[8], x; fill(l, n[8]); {~=> x = 1;~}
  o[i] = l[n[6]] + x;  //!
among_cases: uninitialised
  float x; switch (n[{~3 => 2~}]) { case 1: x = 1; break; case 2: float y; y = 3; x = y; }
  o[i] = x;  //!
"""
test_fault_is_reported, test_clean_twin_has_no_fault = Planted(CASES, FUNCTIONS).tests()
