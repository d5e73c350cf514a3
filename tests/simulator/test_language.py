"""Constructs of Metal compile and run. Those of later versions and unknown ones are refused."""

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import compile_shader, replacing_compile_shader
from torch_metal_attn.simulator.build import build

from .planted import HEAD, check_refused

# MLX, PyTorch, llama.cpp or WebKit ship each of these constructs.
CONSTRUCTS = (
    HEAD
    + """
#include <metal_logging>
#include <metal_uniform>
#define COUNT 4
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#ifndef M_PI_F
#error M_PI_F is a macro in Metal
#endif
constant bool forward [[function_constant(0)]];
constant os_log logger("test", "constructs");
struct Named { int n; constexpr Named(constant char* name, int n) constant : n(n) {} };
constant Named named("constructs", 3);

template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T r, T i) thread : real(r), imag(i) {}
  constexpr complex_t(T r, T i) constant : real(r), imag(i) {}
  template <typename U>
  constexpr complex_t(U r) device : real(r), imag(0) {}
  constexpr operator T() const thread { return real; }
  constexpr operator T() const device { return real; }
  T norm() const { return real * real + imag * imag; }
  auto first() const device -> T { return real; }
};
typedef complex_t<float> complex64;
constant complex64 ORIGIN = complex64(3, 4);

struct Pair { float x, y; };
struct Table { static constexpr constant float values[2] = {5, 6}; };
constant constexpr const float Table::values[2];
constant Pair PAIRS[2] = {{7, 8}, {9, 10}};
union Flags { bool4 flags; uint bits; };

template <typename T>
float same(const thread T& a, thread T& b) { b = a; return is_same_v<T, float> ? 1 : 0; }
template <typename V, void (*read)(const device float*, thread V&)>
float first(const device float* x) { V v; read(x, v); return v[1]; }
template <typename V>
void two(const device float* x, thread V& v) { v = V(x[0], x[1]); }
template <typename T>
T pick(bool chosen, const device T* in, T other) { return chosen ? in[1] : other; }
template <typename V>
float dot(V a, V b) { return -1; }
float erf(float x) { return x + 0.25f; }
float sum3(uint3 v) { return v.x + v.y + v.z; }
template <typename T, int N>
struct Fragment {
  typedef vec<T, N> type;
  type value;
  thread type& at() { return value; }
};
struct Based { int b; Based(int a) : b(a) {} };
template <typename B>
struct Derived : B { int x; Derived(int a) : B(a), x(a) {} };
float second(const threadgroup float x[32], device const float y[2][3]) { return x[1] + y[0][1]; }
float third(const threadgroup vec<float, 2> x[3]) { return x[2].y; }
template <typename T>
float literal(vec<T, 2> v) { return float((0.5 * v).y) + 1.0 / 3.0; }

kernel void constructs(device float* out [[buffer(0)]], device complex64* c [[buffer(1)]],
                       const device float* x [[buffer(2)]], constant Pair& given [[buffer(3)]],
                       uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[32] = {0, 1}, other[32];
  shared[lane] = other[lane] = 11;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 filled = make_filled_simdgroup_matrix<float, 8>(2.0f);
  if (lane != 0) return;
  int n = 0;
  threadgroup Pair pairs[2];
  pairs[1] = given;
  *pairs = PAIRS[0];
  Pair moved = pairs[1];
  out[n++] = moved.x + pairs[0].y;
  half4 halves = half4(1, 2, 3, 4) * 2.0f;
  ushort4 bits = ushort4(257) & 0xff;
  out[n++] = halves.w + bits.x;
  out[n++] = dot(float3(1), float3(2)) + erf(0.5f);
  out[n++] = shared[3];
  out[n++] = filled.thread_elements()[1];
  float3x2 wide(1, 2, 3, 4, 5, 6);
  float2 product = wide * float3(1, 10, 100);
  out[n++] = product.y;
  float4x4 square = float4x4(2.0f) * float4x4(float4(1), float4(2), float4(3), float4(4));
  out[n++] = square[3][0];
  out[n++] = determinant(float3x3(float3(2, 0, 1), float3(0, 3, 0), float3(1, 0, 2)));
  out[n++] = transpose(wide)[1][2];
  out[n++] = float(half4x4(square)[2].x);
  if (forward) out[n] = 12;
  n++;
  constexpr const uniform<int> step = make_uniform(3);
  const uniform<int> twice = step * make_uniform(2);
  out[n++] = twice;
  float total = 0;
#pragma unroll (COUNT)
  for (int i = 0; i < COUNT; ++i) total += i;
#pragma unroll COUNT
  for (int i = 0; i < COUNT; ++i) total -= i;
#pragma unroll(LEAST(COUNT, 8))
  for (int i = 0; i < COUNT; ++i) total += i;
#pragma clang loop unroll_count(COUNT)
  for (int i = 0; i < COUNT; ++i) total += 0;
  out[n++] = total;
  out[n++] = float(bfloat4(half4(1.5h)).w) + float(bfloat(2.5h)) + float(half(bfloat(4.0f)));
  complex64 value = c[0];
  c[1] = complex64(1, 2);
  c[2] = ORIGIN;
  value = c[2];
  out[n++] = value.norm();
  out[n++] = float(c[1]);
  out[n++] = pick(true, c, value).imag + pick(false, c, value).imag;
  Pair pair = given, listed = PAIRS[1];
  out[n++] = pair.y + listed.x;
  out[n++] = Table::values[1];
  Flags flags;
  flags.flags = {true, false, true, false};
  flags.flags[3] = true;
  out[n++] = flags.bits == 0x01010001u;
  logger.log_debug("value %f", pair.x);
  int exponent;
  out[n++] = frexp(12.0f, &exponent) + exponent;
  assert(exponent == 4);
  out[n++] = HUGE_VALBF > bfloat(MAXBFLOAT) && MAXHALF < HUGE_VALH;
  out[n++] = vec_elements<half3>::value + vec_elements<float>::value + is_vector_v<int2>;
  float copied;
  out[n++] = same(1.0f, copied) + same(copied, total);
  out[n++] = first<float2, two>(x);
  out[n++] = sum3({lane + 1u, 2u, 3u});
  float4 rest = {1.0f};
  out[n++] = rest.x + rest.w;
  Fragment<bool, 2> mask;
  mask.at()[0] = true;
  out[n++] = mask.value[0];
  out[n++] = literal(half2(4.0h)) == 2.0f + 1.0f / 3.0f;
  auto add = [=](float by) { return total + by; };
  out[n++] = add(1.0f);
  out[n++] = metal::nextafter(1.0h, 2.0h) == half(1.0009765625);
  const float4 left((1.0f + 1.0f) * 2, 2, 3, 4), right(halves), both = left + right;
  float2 unset, pair2(both.xw), same2 = pair2;
  out[n++] = same2.x + same2.y;
  out[n++] = second(shared, (const device float(*)[3])x);
  threadgroup vec<float, 2> shared_pairs[3];
  shared_pairs[2] = float2(1, 2);
  out[n++] = third(shared_pairs) + named.n;
  out[n++] = Derived<Based>(3).x + Derived<Based>(4).b;
  float4 four[2] = {left, static_cast<float4>(halves)};
  thread float4 (&rows)[2] = four;
  out[n++] = rows[1].w + metal::half2(2h, 1.5h).x + 5e-1bf;
  out[n++] = __metal_ldexp(3.0f, 1, true) + __metal_pow(2.0f, 3.0f, 0);
  out[n++] = __metal_fract(2.5f) + __metal_frexp(5.0f, &exponent) + exponent;
  out[n++] = M_PI_H == 3.140625h && M_PI_BF == bfloat(M_PI_H) && numeric_limits<half>::digits == 11;
  *((threadgroup Fragment<float, 2>*)(shared)) = *((const device Fragment<float, 2>*)(x));
  out[n++] = shared[0] + shared[1];
  Pair whole = ((const device Pair*)x)[0];
  whole = *((const device Pair*)x);
  ((device Pair*)(c + 1))[1] = whole;
}
"""
)
EXPECTED = [
    *(27, 9, 6.75),  # structs to the text's own functions
    *(11, 2, 642, 8, 9, 6, 6, 12, 6, 6),  # shared memory to the pragma
    *(8, 25, 1, 6, 20 + 9, 6, 1),  # conversions to the union
    *(4 + 0.75, 1, 4, 2, 21, 6, 1, 1, 1, 2, 1),
    4 + 2 + 4 + 8,  # vectors that a declaration constructs
    *(11 + 21, 2 + 3, 7, 8 + 2 + 0.5),  # arrays as parameters, base classes, casts
    *(6 + 8, 0.5 + 0.625 + 3, 1, 20 + 21),  # Apple's own names, constants, a copy by casts
]


@pytest.mark.parametrize("check", [False, True])
def test_constructs_that_public_projects_ship(check):
    library = compile_shader(CONSTRUCTS, constants={0: True}, language="3.2", check=check)
    out = torch.full((len(EXPECTED),), torch.nan)
    c = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    pair = torch.tensor([19.0, 20.0])
    x = torch.tensor([20.0, 21.0])
    library.constructs(out, c, x, pair, threads=32, group_size=32)
    assert out.tolist() == EXPECTED
    assert c.tolist() == [[1, 2], [1, 2], [20, 21]]


# These are not in chapter 6 of Metal's specification. MLX and PyTorch define some themselves.
ABSENT = ["erf", "erfc", "expm1", "log1p", "cbrt", "hypot", "remainder", "lgamma", "nearbyint"]


def test_functions_that_metal_does_not_have_are_refused():
    lines = {f"float f_{f}(float x) {{ return {f}(x); }}": f"{f} is not in Metal" for f in ABSENT}
    check_refused(lines, below="kernel void k() {}")


LOGGING = "#include <metal_logging>\n"
NEWER = [
    'constant os_log a("b", "c"); kernel void k0() { a.log("d"); }',
    "kernel void k1() { atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); }",
    "kernel void k2(device int* p) { auto f = [=](int x) { return x; }; p[0] = f(1); }",
    "kernel void k3(volatile coherent(device) device int* p) { p[0] = 1; }",
]


@each_case("newer", NEWER)
def test_constructs_of_a_later_version_are_refused(newer):
    check_refused({newer: "error: "}, LOGGING)


def test_headers_of_a_later_version_are_refused():
    include = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>"
    check_refused({include: "needs Metal 4.0"}, below="kernel void k() {}")


def test_constructs_of_a_later_version_compile_in_it():
    build(HEAD + LOGGING + "\n".join(NEWER), language="3.2").image()


@each_case("language, number", [(None, 310), ("3.1", 310), ("3.2", 320), ("4.0", 400)])
def test_the_language_sets_metal_version(language, number):
    arguments = {} if language is None else {"language": language}
    body = "kernel void k(device int* out) { out[0] = __METAL_VERSION__; }"
    with replacing_compile_shader(**arguments):
        libraries = compile_shader(body, **arguments), torch.mps.compile_shader(body)
    for library in libraries:
        out = torch.zeros(1, dtype=torch.int32)
        library.k(out, threads=1)
        assert out.item() == number


# Each text stops the compilation.
REFUSED = {
    "(texture2d<float> t [[texture(0)]]) {}": "textures are not supported",
    "(sampler s [[sampler(0)]]) {}": "samplers are not supported",
    "(visible_function_table<float(float)> t [[buffer(1)]]) {}": "function tables",
    "(tensor<device int, dextents<int, 1>> t [[buffer(0)]]) {}": "needs Metal 4.0",
    "() {} constant int c [[function_constant(FIRST)]];": "neither a number nor",
    "() {} struct V { float4 p; }; kernel void l(V in [[stage_in]]) {}": "vertex functions are not",
    "() {} [[vertex]] float4 v(uint i [[vertex_id]]) { return 0; }": "vertex functions are not",
    "() {} struct A { device int* x; }; kernel void l(constant A& a) { }": "argument buffer",
    "() {} struct A { int x [[id(0)]]; }; kernel void l(device A* a) { }": "argument buffer",
    "(device atomic_ulong* a) { atomic_fetch_add_explicit(a, 1ul, memory_order_relaxed); }": (
        "64-bit atomics"
    ),
    "() {} struct S { int a; operator int() const { return a; }"
    " operator int() const device { return -a; } };": "differ by address space",
    "() {} struct S { float x; void set() { x = 1; } }; kernel void l(device S* s) { s->set(); }": (
        "error: "
    ),
    "(device float* x); void f(thread float* x) {} kernel void l(device float* x) { f(x); }": (
        "address space"
    ),
}


@each_case("text", REFUSED)
def test_unsupported_constructs_are_refused_at_their_line(text):
    check_refused({f"kernel void k{text}": REFUSED[text]})


# Lines of one text, each with a name that clang does not know.
UNKNOWN = {
    "constexpr sampler s(coord::pixel, filter::nearest);": "samplers are not supported",
    "float4 f(depth2d<float> t) { return 0; }": "textures are not supported by the simulator",
    "vertex float4 v() { return 0; }": "vertex functions are not supported by the simulator",
    "fragment float4 g() { return 0; }": "fragment functions are not supported",
    "void h() { simdgroup_event e; }": "asynchronous copies are not supported",
    "float r(raytracing::intersector<> s) { return 0; }": "ray tracing is not supported",
    "void a() { atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); }": (
        '`atomic_thread_fence` needs Metal 3.2: pass language="3.2" to compile_shader'
    ),
    "void b() { metal::atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); }": (
        "`atomic_thread_fence` needs Metal 3.2"
    ),
    "float m(const device S* s) { return s->get(); }": "methods of objects in device, ",
    "float n(const device S* s) { return s[0].other(); }": "copy the object to a variable",
    "float t(threadgroup S* s) { return s->other(); }": "copy the object to a variable",
}


def test_unknown_names_are_reported_as_unsupported_features():
    above = "struct S { float get() const device { return 0; } float other() { return 1; } };\n"
    check_refused(UNKNOWN, above, "kernel void k() {}")


WORDS = {
    "device float* p = c;": "type 'device float *' with an lvalue of type 'constant float *'",
    "threadgroup half h[4]; threadgroup float* p = h;": "of type 'threadgroup half[4]'",
    "half h = half4(1);": "type 'half' with an rvalue of type 'half4'",
    "ushort2 u = d[0];": "type 'ushort2' with an lvalue of type 'device half4'",
    "half4x4 m = float2x3(1);": "conversion from 'float2x3' to 'half4x4'",
    "bool2 v = float2(1); long2 l = v;": "conversion from 'bool2' to 'long2'",
    "bfloat b = float4(2);": "type 'bfloat' with an rvalue of type 'float4'",
    "f(d);": "no matching function",
}


def test_messages_use_metals_spellings():
    above = "void f(thread half4* x) {}\nkernel void k(device half4* d, constant float* c) {\n"
    messages = check_refused({f"{{ {text} }}": words for text, words in WORDS.items()}, above, "}")
    assert "address space 'device' as a pointer to address space 'thread'" in messages
    hosts = "__global __local __constant _Float16 __bf16 ext_vector_type aka __tg_ __".split()
    assert not [word for word in hosts if word in messages], messages
