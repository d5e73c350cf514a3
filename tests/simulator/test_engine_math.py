"""Metal's functions in the simulator's headers, compared with torch and Python."""

import math

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

from .planted import HEAD

X = torch.cat([torch.linspace(-3, 3, 41), torch.tensor([-0.0, 0.5, 1.5, 2.5, -2.5, 1e-3, 40.0])])


def evaluate(expressions, values, type_name, out_type=None, out_dtype=None):
    """A row for each expression of x, at all values. One kernel computes all."""
    stores = "".join(f"o[{n} * count + i] = {e};" for n, e in enumerate(expressions))
    library = compile_shader(
        f"{HEAD}kernel void k(device {out_type or type_name}* o [[buffer(0)]],"
        f" const device {type_name}* a [[buffer(1)]], constant long& count [[buffer(2)]],"
        f" uint i [[thread_position_in_grid]]) {{ {type_name} x = a[i]; {stores} }}"
    )
    count = len(values)
    out = torch.zeros(len(expressions), *values.shape, dtype=out_dtype or values.dtype)
    library.k(out, values, count, threads=count, group_size=32)
    return out


UNARY = {
    "exp(x)": torch.exp,
    "exp2(x)": torch.exp2,
    "exp10(x * 0.1)": lambda x: 10 ** (x * 0.1),
    "log(abs(x))": lambda x: x.abs().log(),
    "log2(abs(x))": lambda x: x.abs().log2(),
    "log10(abs(x))": lambda x: x.abs().log10(),
    "sqrt(abs(x))": lambda x: x.abs().sqrt(),
    "rsqrt(abs(x))": lambda x: x.abs().rsqrt(),
    "sin(x)": torch.sin,
    "cos(x)": torch.cos,
    "tan(x * 0.3)": lambda x: (x * 0.3).tan(),
    "asin(x * 0.02)": lambda x: (x * 0.02).asin(),
    "acos(x * 0.02)": lambda x: (x * 0.02).acos(),
    "atan(x)": torch.atan,
    "sinh(x * 0.1)": lambda x: (x * 0.1).sinh(),
    "cosh(x * 0.1)": lambda x: (x * 0.1).cosh(),
    "tanh(x)": torch.tanh,
    "asinh(x)": torch.asinh,
    "acosh(abs(x) + 1)": lambda x: (x.abs() + 1).acosh(),
    "atanh(x * 0.02)": lambda x: (x * 0.02).atanh(),
    "sinpi(x)": lambda x: torch.sin(x * math.pi),
    "cospi(x)": lambda x: torch.cos(x * math.pi),
    "floor(x)": torch.floor,
    "ceil(x)": torch.ceil,
    "trunc(x)": torch.trunc,
    "rint(x)": torch.round,
    "round(x)": lambda x: x.sign() * (x.abs() + 0.5).floor(),
    "fract(x)": lambda x: x - x.floor(),
    "sign(x)": torch.sign,
    "saturate(x)": lambda x: x.clamp(0, 1),
    "clamp(x, -1.0f, 2.0f)": lambda x: x.clamp(-1, 2),
    "abs(x)": torch.abs,
    "fabs(x)": torch.abs,
    "max(x, 0.5f)": lambda x: x.clamp(min=0.5),
    "fmin(x, 0.5f)": lambda x: x.clamp(max=0.5),
    "max3(x, 0.5f, 1.0f)": lambda x: x.clamp(min=1),
    "median3(x, 0.5f, 1.0f)": lambda x: x.clamp(0.5, 1),
    "pow(abs(x), 1.5f)": lambda x: x.abs() ** 1.5,
    "pow(x, 2)": lambda x: x**2,
    "powr(abs(x), 0.5f)": lambda x: x.abs() ** 0.5,
    "atan2(x, 2.0f)": lambda x: torch.atan2(x, torch.full_like(x, 2)),
    "fmod(x, 0.7f)": lambda x: torch.fmod(x, torch.full_like(x, 0.7)),
    "fma(x, 2.0f, 1.0f)": lambda x: 2 * x + 1,
    "copysign(2.0f, x)": lambda x: torch.copysign(torch.full_like(x, 2), x),
    "fdim(x, 1.0f)": lambda x: (x - 1).clamp(min=0),
    "mix(1.0f, x, 0.25f)": lambda x: 0.75 + 0.25 * x,
    "step(0.5f, x)": lambda x: (x >= 0.5).to(x.dtype),
    "smoothstep(0.0f, 2.0f, x)": lambda x: (x / 2).clamp(0, 1) ** 2 * (3 - 2 * (x / 2).clamp(0, 1)),
    "ldexp(x, 3)": lambda x: x * 8,
    "fast::exp2(x)": torch.exp2,
    "precise::tanh(x)": torch.tanh,
    "fast::divide(x, 3.0f)": lambda x: x / 3,
    "select(x, -x, x < 0)": torch.abs,
}


def test_float_functions_match_torch():
    out = evaluate(list(UNARY), X, "float")
    for row, (name, model) in zip(out, UNARY.items(), strict=True):
        expected = model(X.double()).float()
        torch.testing.assert_close(row, expected, rtol=3e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize("type_name,dtype", [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_16_bit_functions_are_rounded_from_float32(type_name, dtype):
    names = ["exp(x)", "tanh(x)", "sqrt(abs(x))", "floor(x)", "abs(x)", "rsqrt(abs(x))", "sin(x)"]
    exact = ["max(x, -x)", "min(x, -x)", f"clamp(x, {type_name}(-1), {type_name}(2))"]
    values = X[:41].to(dtype)
    actual = evaluate(names + exact, values, type_name)
    for row, name in zip(actual, names, strict=False):
        expected = UNARY[name](values.float()).to(dtype)
        torch.testing.assert_close(row, expected, rtol=0.01, atol=0, equal_nan=True, msg=name)
    models = [values.abs(), -values.abs(), values.clamp(-1, 2)]
    assert torch.equal(actual[len(names) :], torch.stack(models))


@pytest.mark.parametrize("dtype,type_name", [(torch.bfloat16, "bfloat"), (torch.float16, "half")])
def test_conversions_round_to_nearest_even_and_keep_nan(dtype, type_name):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(1000, generator=generator) * 10
    special = torch.tensor([math.inf, -math.inf, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 3e38, 0.0])
    values = torch.cat([values, special])
    out = evaluate([f"float({type_name}(x))"], values, "float")[0]
    assert torch.equal(out, values.to(dtype).float())
    nan = torch.tensor([math.nan] * 32)
    assert evaluate([f"float({type_name}(x))"], nan, "float").isnan().all()


def test_relational_functions_of_special_values():
    values = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-40])
    names = ["isnan(x)", "isinf(x)", "isfinite(x)", "isnormal(x)", "signbit(x)"]
    out = evaluate(names, values, "float", "int", torch.int32)
    assert out.tolist() == [
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 1, 0, 0],
    ]


def wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


INTEGER = {
    "clz(x)": lambda x: 32 - (x % 2**32).bit_length(),
    "ctz(x)": lambda x: 32 if x == 0 else ((x & -x).bit_length() - 1),
    "popcount(x)": lambda x: (x % 2**32).bit_count(),
    "reverse_bits(x)": lambda x: wrap(int(f"{x % 2**32:032b}"[::-1], 2)),
    "rotate(x, 5)": lambda x: wrap((x % 2**32) << 5 | (x % 2**32) >> 27),
    "mulhi(x, 1000003)": lambda x: (x * 1000003) >> 32,
    "absdiff(x, 17)": lambda x: wrap(abs(x - 17)),
    "addsat(x, 2000000000)": lambda x: min(x + 2000000000, 2**31 - 1),
    "subsat(x, 2000000000)": lambda x: max(x - 2000000000, -(2**31)),
    "hadd(x, 3)": lambda x: (x + 3) >> 1,
    "rhadd(x, 3)": lambda x: (x + 4) >> 1,
    "extract_bits(x, 4, 6)": lambda x: ((x >> 4 & 63) ^ 32) - 32,
    "int(extract_bits(uint(x), 4, 6))": lambda x: x >> 4 & 63,
    "insert_bits(x, 21, 3, 5)": lambda x: wrap((x % 2**32 & ~(31 << 3)) | 21 << 3),
    "abs(x)": abs,
    "max(x, 5)": lambda x: max(x, 5),
    "clamp(x, -3, 9)": lambda x: min(max(x, -3), 9),
    "int(mulhi(ulong(x) << 32, 12345ul))": lambda x: wrap(((x % 2**32 << 32) * 12345) >> 64),
    "as_type<int>(as_type<float>(x))": lambda x: x,
    "select(x, 3, x > 4)": lambda x: 3 if x > 4 else x,
}


def test_integer_functions_match_python():
    numbers = [0, 1, 2, 5, 17, -1, -2, -17, 12345, -98765, 0x12345678]
    numbers += [2**30, 2**31 - 1, -(2**31) + 1]
    out = evaluate(list(INTEGER), torch.tensor(numbers, dtype=torch.int32), "int")
    for row, (name, model) in zip(out.tolist(), INTEGER.items(), strict=True):
        assert row == [model(n) for n in numbers], name


VECTORS = {  # x is float4(1, -2, 3, -4)
    "float4(x.xy, x.zw)": [1, -2, 3, -4],
    "float4(x.x, x.yzw)": [1, -2, 3, -4],
    "float4(2.5f)": [2.5] * 4,
    "float4(half4(x))": [1, -2, 3, -4],
    "float4(int4(x) * 2)": [2, -4, 6, -8],
    "(float4)half4(x)": [1, -2, 3, -4],
    "(float4)(int4)(half4)-x * 2": [-2, 4, -6, 8],
    "fma(2.0f, x, x) + fma(x, -x, 1.0f)": [3, -9, 1, -27],
    "float4(vec<bool, 8>(true)[7], sizeof(vec<bool, 8>), max(x.x > 0, false), 0)": [1, 8, 1, 0],
    "float4(dot(x, x))": [30] * 4,
    "float4(dot(x.xyz, float3(1, 1, 1)))": [2] * 4,
    "float4(length(x.zw))": [5] * 4,
    "float4(normalize(x.zw), cross(float3(1, 0, 0), float3(0, 1, 0)).yz)": [0.6, -0.8, 0, 1],
    "abs(x)": [1, 2, 3, 4],
    "max(x, 0.0f)": [1, 0, 3, 0],
    "clamp(x, -1.0f, 2.0f)": [1, -1, 2, -1],
    "fma(x, x, x)": [2, 2, 12, 12],
    "select(x, -x, x < 0)": [1, 2, 3, 4],
    "float4(any(x > 2), all(x > 2), any(x > 5), all(x < 5))": [1, 0, 0, 1],
    "float4(isnan(x)) + mix(x, x + 1, 0.5f)": [1.5, -1.5, 3.5, -3.5],
    "as_type<float4>(as_type<uint4>(x))": [1, -2, 3, -4],
    "vec<float, 4>(1, 2, 3, 4)": [1, 2, 3, 4],
    "float4(packed_float3(x.xyz), 9)": [1, -2, 3, 9],
    "float4(packed_half4(1, half(x.y), half2(x.zw)))": [1, -2, 3, -4],
    "float4(popcount(uint4(7, 3, 1, 0)))": [3, 2, 1, 0],
    "x.wzyx": [-4, 3, -2, 1],
    "ldexp(x, int4(1, 2, 3, -1))": [2, -8, 24, -2],
    "float4(absdiff(int4(x), int4(2)))": [1, 4, 1, 6],
    "nextafter(x, float4(0)) - x": [-(2**-24), 2**-23, -(2**-22), 2**-22],
}


def test_vector_expressions_have_the_expected_elements():
    values = torch.tensor([[1.0, -2.0, 3.0, -4.0]]).repeat(3, 1)
    out = evaluate(list(VECTORS), values, "float4")
    for row, (name, expected) in zip(out, VECTORS.items(), strict=True):
        torch.testing.assert_close(row[2], torch.tensor(expected).float(), msg=name)


HALF, BFLOAT, SINGLE = map(torch.finfo, (torch.float16, torch.bfloat16, torch.float32))
LIMITS = {
    "numeric_limits<float>::max()": SINGLE.max,
    "float(numeric_limits<half>::max())": HALF.max,
    "float(numeric_limits<bfloat>::lowest())": BFLOAT.min,
    "numeric_limits<float>::epsilon()": SINGLE.eps,
    "numeric_limits<float>::infinity()": math.inf,
    "numeric_limits<int>::min()": -(2.0**31),
    "is_same_v<half, float>": 0,
    "is_floating_point<bfloat>::value": 1,
    "is_same_v<conditional_t<true, int, float>, int>": 1,
    "sizeof(packed_float3) * 100 + sizeof(float3)": 1216,
    "(array<float, 3>{1, 2, 3}[2]) + array<float, 3>{}.size()": 6,
}


def test_limits_and_traits_have_the_values_of_torch():
    out = evaluate(list(LIMITS), torch.zeros(1), "float")
    assert dict(zip(LIMITS, out[:, 0].tolist(), strict=True)) == LIMITS


BOOLS = {  # m is bool2(true, false) = (1, 4) < (2, 3), and b is bool4(1, 0, 1, 1) from memory
    "m.x": 1,
    "m.y": 0,
    "(!m).y": 1,
    "any(m)": 1,
    "all(m)": 0,
    "all(m || !m)": 1,
    "any(m && x > y)": 0,
    "all((m == (x < y)) & (m != (x >= y)))": 1,
    "any(m ^ bool2(true, false))": 0,
    "int2(m).x + 2 * int2(m).y": 1,
    "int(select(x, y, m).x * 10 + select(x, y, m).y)": 24,
    "bool2(x).y": 1,
    "isnan(x).x": 0,
    "b.x * 8 + b.y * 4 + b.z * 2 + b.w": 11,
    "int(bool4(m, b[2], false)[2])": 1,
    "all(bool3(true)) && !any(bool3(false, m))": 0,
    "sizeof(bool2) * 100 + sizeof(bool3) * 10 + sizeof(bool4)": 244,
    "alignof(bool2) * 100 + alignof(bool3) * 10 + alignof(bool4)": 244,
}


@pytest.mark.parametrize("check", [False, True])
def test_bool_vectors_have_the_operators_and_sizes_of_metal(check):
    stores = "".join(f"o[{n}] = {e};" for n, e in enumerate(BOOLS))
    library = compile_shader(
        f"""{HEAD}kernel void k(device int* o [[buffer(0)]], device bool4* p [[buffer(1)]]) {{
            float2 x = float2(1, 4), y = float2(2, 3); bool2 m = x < y; bool4 b = p[1]; {stores}
            if (m.x) p[0].y = m.x; m[0] = false; if (any(m)) p[0].z = true; }}""",
        check=check,
    )
    out = torch.zeros(len(BOOLS), dtype=torch.int32)
    memory = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    library.k(out, memory, threads=1)
    assert dict(zip(BOOLS, out.tolist(), strict=True)) == BOOLS
    assert memory.tolist() == [[False, True, False, False], [True, False, True, True]]


# A template that deduces bool uses clang's vector of bool. Its IR needs a repair.
CHOSEN = """template <typename T> float4 {name}(T any, const device float* a) {{
  vec<{element}, 4> m; for (int j = 0; j < 4; ++j) m[j] = a[j] > 0;
  m[int(a[4])] = any; return select(float4(1.0f), float4(2.0f), m); }}"""


@pytest.mark.parametrize("check", [False, True])
def test_elements_of_a_bool_vector_are_written_at_any_index(check):
    functions = CHOSEN.format(name="named", element="bool")
    functions += CHOSEN.format(name="deduced", element="T")
    library = compile_shader(
        f"""{HEAD}{functions}
        kernel void k(device float4* o [[buffer(0)]], const device float* a [[buffer(1)]],
          const device vec<bool, 4>* b [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
          o[2 * i] = named(b[1].y, a + 5 * i); o[2 * i + 1] = deduced(b[1].y, a + 5 * i); }}""",
        check=check,
    )
    values = torch.tensor([[1, -1, -1, 1, 1], [-1, 1, -1, 1, 2], [1, 1, 1, 1, 3]]).float()
    memory = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    out = torch.zeros(3, 2, 4)
    library.k(out, values, memory, threads=3)
    expected = torch.tensor([[2, 2, 1, 2], [1, 2, 2, 2], [2, 2, 2, 2]]).float()
    assert torch.equal(out, expected[:, None].expand(3, 2, 4))


@pytest.mark.parametrize("check", [False, True])
def test_packed_and_bool_vectors_are_read_and_stored_in_memory(check):
    library = compile_shader(
        f"""{HEAD}kernel void k(device packed_float3* o [[buffer(0)]],
            device bool3* m [[buffer(1)]], const device packed_float3* a [[buffer(2)]],
            device packed_half4* h [[buffer(3)]], uint i [[thread_position_in_grid]]) {{
            threadgroup packed_half3 tile[4]; packed_float3 own[2]; packed_float3 p = a[i];
            float3 v = float3(i, 2, 3) + float3(a[i]) - float3(p);
            own[0] = v; own[1] = packed_float3(v * 2);
            tile[i] = packed_half3(half3(v)); simdgroup_barrier(mem_flags::mem_threadgroup);
            half3 t = half3(tile[3 - i]);
            if (i < 2) o[i] = own[i]; else {{ o[i] = float3(t); o[i].y = p.y; o[i].z = p[2]; }}
            h[i] = half4(1, 2, 3, 4) * half(i);
            device bool3* p_m = m + i; *p_m = v > 1; }}""",
        check=check,
    )
    out, mask, values = torch.zeros(4, 3), torch.zeros(4, 4, dtype=torch.bool), torch.arange(12.0)
    halves = torch.zeros(17, dtype=torch.float16)
    library.k(out, mask, values, halves[1:], threads=4)
    assert out.tolist() == [[0, 2, 3], [2, 4, 6], [1, 7, 8], [0, 10, 11]]
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert halves[1:9].tolist() == [0, 0, 0, 0, 1, 2, 3, 4]


# Constructs of ggml, candle and MLX.
OBJECTS = (
    HEAD
    + """
struct Point { packed_float3 at; float weight; packed_half3 more[2]; };
template <typename T>
struct Sized {
  uint n;
  T v;
  constexpr Sized<T>() = default;
  constexpr Sized<T>() threadgroup = default;
};
template <typename T>
struct metal::_numeric_limits_impl<Sized<T>> {
  static constexpr Sized<T> max() { return Sized<T>{ 1, numeric_limits<T>::max() }; }
};
float3 twice(float3 v) { return v * 2; }
float weight(Point p) { return p.weight; }
float weight_of(const threadgroup Point (&points)[1]) { return weight(points[0]); }
float3 place(const device Point* p) { return p->at; }
Sized<float> joined(Sized<float> a, Sized<float> b) { return { a.n + b.n, a.v + b.v }; }
template <typename M, typename V>
void converted(const device float4x4* from, thread M& to, thread V& column) {
  to = (M)(*from);
  column = (V)(*(from))[1];
}
kernel void k(device Point* p [[buffer(0)]], device packed_float3* q [[buffer(1)]],
              device float4x4* m [[buffer(2)]], device float* o [[buffer(3)]]) {
  threadgroup packed_float3 tile[2];
  threadgroup half4x4 halves[2];
  threadgroup Sized<float> sized[2];
  float3 before = p[1].at;
  p[1].at[1] += 1;
  p[1].at *= 2.0f;
  q[1] += before;
  q[1][2] = q[1].x + (*(q + 1))[0];
  float3 sum = p[1].at + q[1] * 0.5f - q[0] / 2;
  *o++ = sum.x * 100 + sum.y * 10 + sum.z;
  p[0].at = sum;
  p[0].more[1] = half3(sum);
  p[0].more[0][2] = p[0].more[1][0] * 2;
  *o++ = float(p[0].more[0].z) + place(p).x;
  *o++ = dot(p[1].at, q[1]) + dot(twice(q[0]), float3(1)) + max(q[0], p[1].at).x;
  tile[1] = q[1];
  tile[1] -= 1;
  *o++ = any(tile[1] == q[1]) ? 1 : tile[1][0] - (-tile[1]).y;
  Point copy = *reinterpret_cast<const device Point*>((device char*)p + 28);
  copy.at[0] = 3;
  copy.at += 1;
  *o++ = copy.at[0] + copy.at.z;
  threadgroup Point points[1];
  copy.weight = 7;
  points[0] = copy;
  *o++ = weight_of(points);
  half4x4 narrow; half4 column;
  converted(m, narrow, column);
  *(threadgroup half4x4*)(halves + 1) = narrow;
  halves[1][2] = half4(9);
  halves[1][2][3] += 1;
  auto out = (device float4x4*)((device char*)m + 64);
  out[0] = float4x4(halves[1]);
  *(((device float4x4*)((device char*)m + 64)) + 1) = (float4x4)halves[1];
  *o++ = out[1][2].w + m[1][2][0] + float(column.y);
  sized[0] = Sized<float>{ 2, 0.5f };
  sized[1] = numeric_limits<Sized<float>>::max();
  *o++ = joined(sized[0], sized[0]).v + sized[1].n + __is_valid_simdgroup_type<half>::value;
}"""
)


@pytest.mark.parametrize("check", [False, True])
def test_structs_are_read_and_stored_in_any_memory(check):
    points = torch.zeros(2, 28, dtype=torch.uint8)
    points.view(torch.float32)[1, :3] = torch.tensor([4.0, 5.0, 6.0])
    packed, matrices = torch.tensor([[1.0, 2, 3], [2, 2.5, 3]]), torch.zeros(3, 4, 4)
    matrices[0] = torch.arange(16.0).view(4, 4)
    out = torch.zeros(8)
    compile_shader(OBJECTS, check=check).k(points, packed, matrices, out, threads=1)
    assert packed[1].tolist() == [6, 7.5, 12]
    assert points.view(torch.float32)[:, :3].tolist() == [[10.5, 14.75, 16.5], [8, 12, 12]]
    assert matrices[1].tolist() == matrices[2].tolist()
    assert matrices[1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [9, 9, 9, 10], [12, 13, 14, 15]]
    assert out.tolist() == [1214.0, 31.5, 302.0, 11.5, 17.0, 7.0, 24.0, 3.0]


def test_index_past_a_packed_vector_is_a_fault():
    for where in ("p[0].at", "copy.at"):
        source = f"""{HEAD}struct P {{ packed_float3 at; float w; }};
            kernel void k(device P* p [[buffer(0)]], constant int& i [[buffer(1)]]) {{
              P copy = p[0]; {where}[i] = 1; p[0].w = copy.at.x + copy.w; }}"""
        library = compile_shader(source, check=True)
        library.k(torch.zeros(4), 2, threads=1, arg_casts="int32")
        with pytest.raises(SimulatorFault, match=r"^(private_)?out_of_bounds: index 3"):
            library.k(torch.zeros(4), 3, threads=1, arg_casts="int32")
