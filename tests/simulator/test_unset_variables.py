"""Reads of private variables that were not written are faults where they decide something."""

import pytest

from .planted import Planted

FUNCTIONS = """
struct Pair { float first; int second; float rest[3]; };
struct Row { float values[16]; };
struct Mixed { float x; half values[24]; int count[4]; };
struct Made { float values[16]; Made() {} };
struct Padded { char tag; float value; };
struct Halves { float first[8]; float second[8]; };
__attribute__((noinline)) void put_if(thread float& x, float limit) {
  if (limit > 3) x = limit;
}
__attribute__((noinline)) void put_after(thread float* p, int first, int end) {
  for (int k = first; k < end; ++k) p[k] = k;
}
float half_of(float x) {
  float y;
  if (x > 3) y = x;
  return y * 0.5f;
}
void fill(thread float* p, int count) {
  for (int k = 0; k < count; ++k) p[k] = k;
}
"""
CASES = {
    "after a threadgroup variable": (
        "threadgroup float t[2]; float x;\no[i] = x - 7 * a[i]; /*!*/",
        "threadgroup float t[2]; float x; x = 1;\no[i] = x - 7 * a[i];",
    ),
    "after one that is written": (
        "float w; float x;\nw = 1; o[i] = w + x; /*!*/",
        "float w; float x;\nw = 1; x = 2; o[i] = w + x;",
    ),
    "in a block after one": (
        "float w; if (n[1] < 5) { float x; w = 1;\no[i] = w + x; /*!*/ }",
        "float w; if (n[1] < 5) { float x; w = 1; x = 2;\no[i] = w + x; }",
    ),
    "scalar": ("float x;\no[i] = x + a[i]; /*!*/", "float x; x = 1;\no[i] = x + a[i];"),
    "integer": ("int x;\no[i] = x + n[i]; /*!*/", "int x; x = 2;\no[i] = x + n[i];"),
    "half": (
        "half x; if (n[1] > 3) x = 1;\no[i] = float(x); /*!*/",
        "half x; if (n[1] < 3) x = 1;\no[i] = float(x);",
    ),
    "flag": (
        "bool x; if (n[1] > 3) x = true;\no[i] = x ? 1 : 2; /*!*/",
        "bool x; if (n[1] < 3) x = true;\no[i] = x ? 1 : 2;",
    ),
    "in_one_branch": (
        "float x; if (n[1] > 5) x = a[i];\no[i] = x; /*!*/",
        "float x; if (n[1] > 5) x = a[i];\nelse x = 2; o[i] = x;",
    ),
    "used_only_where_written": (
        "float x; if (i < 16) x = a[i];\nif (i < 17) o[i] = x * 2; /*!*/",
        "float x; if (i < 16) x = a[i];\nif (i < 16) o[i] = x * 2;",
    ),
    "decides_a_branch": (
        "int x; if (n[1] > 5) x = 3;\nif (x == 3) o[i] = 1; /*!*/",
        "int x; bool known = n[2] == 2; if (known) x = n[3];\nif (known && x == 3) o[i] = 1;",
    ),
    "is_an_index": (
        "int x; if (n[1] > 5) x = 3;\no[x & 1] = 1; /*!*/",
        "int x; if (n[1] < 5) x = 3;\no[x & 1] = 1;",
    ),
    "array_partly_filled": (
        "float l[4]; for (int k = 0; k < n[3]; ++k) l[k] = 1;\nfloat s = 0;\n"
        "for (int k = 0; k < n[4]; ++k) s += l[k];\no[i] = s; /*!*/",
        "float l[4]; for (int k = 0; k < n[4]; ++k) l[k] = 1;\nfloat s = 0;\n"
        "for (int k = 0; k < n[4]; ++k) s += l[k];\no[i] = s;",
    ),
    "array_of_constant_indices": (
        "float l[4]; l[0] = 1; l[1] = a[i]; l[3] = 2;\no[i] = l[0] + l[2]; /*!*/",
        "float l[4]; l[0] = 1; l[1] = a[i]; l[3] = 2;\no[i] = l[0] + l[3];",
    ),
    "long_array": (
        "float l[64]; l[n[3]] = 1;\no[i] = l[n[4]]; /*!*/",
        "float l[64]; l[n[3]] = 1;\no[i] = l[n[3]];",
    ),
    "array_read_in_vain": (
        "float l[4]; l[n[1]] = 2;\no[i] = n[1] == 2 ? l[1] : l[0]; /*!*/",
        "float l[4]; l[n[1]] = 2;\no[i] = n[1] == 1 ? l[1] : l[0];",
    ),
    "long_array_begun": (
        "float l[64]; l[0] = 1; l[1] = a[i];\no[i] = l[n[2]]; /*!*/",
        "float l[64]; l[0] = 1; l[1] = a[i];\no[i] = l[n[1]];",
    ),
    "array_written_somewhere": (
        "float l[2]; l[n[3] & 1] = 1; l[1] = 2;\no[i] = l[n[0]]; /*!*/",
        "float l[2]; l[n[2] & 1] = 1; l[1] = 2;\no[i] = l[n[0]];",
    ),
    "array_written_in_one_branch": (
        "float l[2]; if (n[1] > 5) { l[0] = a[i]; l[1] = 2; }\no[i] = l[n[1]]; /*!*/",
        "float l[2]; if (n[1] < 5) { l[0] = a[i]; l[1] = 2; }\no[i] = l[n[1]];",
    ),
    "flags": (  # their bytes without a value are equal: one fill
        "bool f[4]; for (int k = 0; k < n[3]; ++k) f[k] = k < n[1];\no[i] = f[n[3]] ? 1 : 2; /*!*/",
        "bool f[4]; for (int k = 0; k < n[3]; ++k) f[k] = k < n[1];\no[i] = f[n[2]] ? 1 : 2;",
    ),
    "array_read_and_then_written": (
        "float l[2]; float x = l[n[1]]; l[0] = 1; l[1] = 2;\no[i] = x + l[n[1]]; /*!*/",
        "float l[2]; l[0] = 1; l[1] = 2; float x = l[n[1]];\no[i] = x + l[n[1]];",
    ),
    "array_written_with_a_variable": (
        "float l[2], x; if (n[1] > 5) x = 1;\nl[0] = 1; l[1] = x; o[i] = l[n[1]]; /*!*/",
        "float l[2], x; if (n[1] < 5) x = 1;\nl[0] = 1; l[1] = x; o[i] = l[n[1]];",
    ),
    "member": (
        "Pair p; p.first = 1;\no[i] = p.first + p.second; /*!*/",
        "Pair p; p.first = 1; Pair q = p;\no[i] = q.first;",
    ),
    "long_array_of_constant_indices": (
        "float l[16]; l[0] = 1; l[3] = 2;\no[i] = l[0] + l[2]; /*!*/",
        "float l[16]; l[0] = 1; l[3] = 2;\no[i] = l[0] + l[3];",
    ),
    "long_struct": (
        "Row r; r.values[n[1]] = 1;\no[i] = r.values[n[2]]; /*!*/",
        "Row r; r.values[n[1]] = 1;\nRow s = r; o[i] = s.values[n[1]];",
    ),
    "long_struct_of_several_types": (
        "Mixed m; m.x = 1; m.values[n[3]] = 1;\no[i] = m.x + m.values[n[2]]; /*!*/",
        "Mixed m; m.x = 1; m.values[n[3]] = 1;\no[i] = m.x + m.values[n[3]];",
    ),
    "integers_of_a_long_struct": (
        "Mixed m; m.values[n[3]] = 1; m.count[n[1]] = 2;\no[i] = m.count[n[2]]; /*!*/",
        "Mixed m; m.values[n[3]] = 1; m.count[n[1]] = 2;\no[i] = m.count[n[1]];",
    ),
    "array_of_structs": (
        "Mixed m[4]; m[n[1]].x = 1;\no[i] = m[n[2]].x; /*!*/",
        "Mixed m[4]; m[n[1]].x = 1;\no[i] = m[n[1]].x;",
    ),
    "struct_with_a_constructor": (
        "Made m; m.values[n[1]] = 1;\no[i] = m.values[n[2]]; /*!*/",
        "Made m; m.values[n[1]] = 1;\no[i] = m.values[n[1]];",
    ),
    "column": (
        "float4x4 m; m[n[1]] = 1;\no[i] = m[n[2]].x; /*!*/",
        "float4x4 m; m[n[1]] = 1;\no[i] = m[n[1]].x;",
    ),
    "short_columns": (
        "float2x2 m; m[0] = 1;\no[i] = m[0].x + m[1].y; /*!*/",
        "float2x2 m; m[0] = 1;\no[i] = m[0].x + m[0].y;",
    ),
    "array_copied_in": (
        "float t[4]; for (int k = 0; k < 3; ++k) t[k] = a[k];\no[i] = t[n[3]]; /*!*/",
        "float t[4]; for (int k = 0; k < 3; ++k) t[k] = a[k];\no[i] = t[n[2]];",
    ),
    "array_copied_in_as_far_as_needed": (
        "float t[8]; for (int k = 0; k < n[5]; ++k) t[k] = a[k];\no[i] = t[n[5]]; /*!*/",
        "float t[8]; for (int k = 0; k < n[6]; ++k) t[k] = a[k];\no[i] = t[n[5]];",
    ),
    "array_copied_and_copied_again": (
        "float t[8], u[8]; for (int k = 0; k < 7; ++k) t[k] = a[k];\n"
        "for (int k = 0; k < 8; ++k) u[k] = t[k];\no[i] = u[n[7]]; /*!*/",
        "float t[8], u[8]; for (int k = 0; k < 7; ++k) t[k] = a[k];\n"
        "for (int k = 0; k < 8; ++k) u[k] = t[k];\no[i] = u[n[6]];",
    ),
    "array_copied_out": (
        "float t[8]; for (int k = 0; k < n[7]; ++k) t[k] = k;\n"
        "for (int k = 0; k < 8; ++k) o[k] = t[k]; /*!*/",
        "float t[8]; for (int k = 0; k < n[8]; ++k) t[k] = k;\n"
        "for (int k = 0; k < 8; ++k) o[k] = t[k];",
    ),
    "half_of_a_struct": (
        "Halves s; for (int k = 0; k < 8; ++k) s.first[k] = a[k];\n"
        "Halves t = s; o[i] = t.second[n[1]]; /*!*/",
        "Halves s; for (int k = 0; k < 8; ++k) s.first[k] = a[k];\n"
        "Halves t = s; o[i] = t.first[n[1]];",
    ),
    "padded_structs": (
        "Padded p[4]; for (int k = 0; k < n[3]; ++k) { p[k].tag = 1; p[k].value = a[k]; }\n"
        "Padded q[4]; for (int k = 0; k < 4; ++k) q[k] = p[k];\no[i] = q[n[3]].value; /*!*/",
        "Padded p[4]; for (int k = 0; k < n[4]; ++k) { p[k].tag = 1; p[k].value = a[k]; }\n"
        "Padded q[4]; for (int k = 0; k < 4; ++k) q[k] = p[k];\n"
        "if (i == 0) { ((device Padded*)o)[31] = q[n[3]]; o[62] = 1; }",
    ),
    "left_by_a_function": (
        "float x; put_if(x, n[3]);\no[i] = x; /*!*/",
        "float x; put_if(x, n[4]);\no[i] = x;",
    ),
    "array_left_by_a_function": (
        "float l[4]; put_after(l, n[1], n[4]);\no[i] = l[n[0]]; /*!*/",
        "float l[4]; put_after(l, n[1], n[4]);\no[i] = l[n[1]];",
    ),
    "vector_element": (
        "float4 v; v.x = 1; v.y = 2; v.z = a[i];\no[i] = v.x + v.w; /*!*/",
        "float4 v; v.x = 1; v.y = 2; v.z = a[i];\no[i] = v.x + v.z;",
    ),
    "vector_in_a_loop": (
        "float4 v; for (int k = 0; k < n[3]; ++k) v[k] = k;\nv *= 2; o[i] = v.x + v.w; /*!*/",
        "float4 v; for (int k = 0; k < n[3]; ++k) v[k] = k;\nv *= 2; o[i] = v.x + v.z;",
    ),
    "carried_by_a_loop": (
        "float x, s = 0;\nfor (int k = 0; k < n[3]; ++k) {\nif (k == 1) x = 1;\ns += x;\n}\n"
        "o[i] = s; /*!*/",
        "float x, s = 0;\nfor (int k = 0; k < n[3]; ++k) {\nif (k == 0) x = 1;\ns += x;\n}\n"
        "o[i] = s;",
    ),
    "in_some_lanes": (
        "float x; if (lane < 16) x = 1;\no[i] = simd_sum(x); /*!*/",
        "float x; if (lane < 32) x = 1;\no[i] = simd_sum(x);",
    ),
    "matrix": (
        "simdgroup_float8x8 m, z(0.0f);\nsimdgroup_multiply_accumulate(z, m, z, z); /*!*/\n"
        "simdgroup_store(z, o);",
        "simdgroup_float8x8 m, z(0.0f); simdgroup_load(m, a);\n"
        "simdgroup_multiply_accumulate(z, m, z, z);\nsimdgroup_store(z, o);",
    ),
    "matrix_element": (
        "simdgroup_float8x8 m, z(0.0f); m.thread_elements()[0] = 1;\n"
        "simdgroup_multiply_accumulate(z, m, z, z); /*!*/\nsimdgroup_store(z, o);",
        "simdgroup_float8x8 m, z(0.0f); m.thread_elements()[0] = m.thread_elements()[1] = 1;\n"
        "simdgroup_multiply_accumulate(z, m, z, z);\nsimdgroup_store(z, o);",
    ),
    "in_a_function": ("o[i] = half_of(a[i]); /*!*/", "o[i] = half_of(a[i] + 4);"),
    "filled_by_a_function": (
        "float l[8], x; fill(l, n[8]);\no[i] = l[n[6]] + x; /*!*/",
        "float l[8], x; fill(l, n[8]); x = 1;\no[i] = l[n[6]] + x;",
    ),
    "among_cases": (
        "float x; switch (n[3]) { case 1: x = 1; break; case 2: float y; y = 3; x = y; }\n"
        "o[i] = x; /*!*/",
        "float x; switch (n[2]) { case 1: x = 1; break; case 2: float y; y = 3; x = y; }\n"
        "o[i] = x;",
    ),
}
PLANTED = Planted({name: ("uninitialised", *case) for name, case in CASES.items()}, FUNCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_read_is_caught_with_its_line(name):
    PLANTED.check_fault(name)


@pytest.mark.parametrize("name", CASES)
def test_the_clean_twin_is_not_reported(name):
    assert PLANTED.run(name, 1).isfinite().all()


def test_the_message_names_the_variable():
    assert "use of x, which has not been written" in str(PLANTED.fault("in_one_branch"))
    assert "use of a simdgroup_matrix" in str(PLANTED.fault("matrix"))
