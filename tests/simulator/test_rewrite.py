"""The passes over Metal text: the C++ that they produce, and the lines of their errors."""

import re

import pytest

from tests.helpers.cases import each_case
from torch_metal_attn.simulator.metal.lexer import MetalSourceError, join, lex
from torch_metal_attn.simulator.metal.rewrite import rewrite


def rewritten(text, **options):
    """The C++ of a text, with single spaces."""
    return re.sub(r"\s+", " ", rewrite(text, **options).text).strip()


def kernel_of(text, **options):
    (kernel,) = rewrite(text, **options).kernels
    return kernel


def test_lexing_loses_nothing():
    text = '# 1 "a.metal"\nint x = 0x1fu >> 2;\n#pragma unroll\n"s//" \'c\' a->b\n'
    text += '# 7 "sys.h" 1 3\nstruct { weird @ ` };\n# 3 "a.metal" 2\n  y ;\n'
    assert join(lex(text)) == text


def test_slot_may_be_an_enumerator_or_a_sum():
    for enums, slot in (
        ("enum Slot { FIRST, NEXT = 5 }", 5),
        ("enum A { OTHER = 4, NEXT }", 5),
        ("enum B { END = 16 }; enum C { FIRST = END, NEXT = FIRST + 1u }", 17),
    ):
        kernel = kernel_of(f"{enums}; kernel void k(device int* a [[buffer(NEXT + 1)]]) {{ }}")
        assert kernel.parameters[0].index == slot + 1


@each_case(
    "head",
    [
        "kernel void",
        "[[kernel]] void",
        "[[kernel, max_total_threads_per_threadgroup(64)]] void",
        "[[max_total_threads_per_threadgroup(64)]] kernel void",
        "kernel [[max_total_threads_per_threadgroup(64)]] void",
    ],
)
def test_each_spelling_of_a_kernel_is_recognised(head):
    text = f"{head} k(device int* a [[buffer(0)]]) {{ }}"
    assert kernel_of(text).callee == "::k"
    limit = "constant constexpr unsigned __msl_most_threads_0 = 64; " if "64" in head else ""
    assert rewritten(text) == f"{limit}static void k(device int* a) {{ }}"


def test_a_kernel_in_a_namespace_has_a_qualified_name():
    text = "namespace a { namespace b { kernel void k(device int* x) { } } } void other() { }"
    assert kernel_of(text).callee == "::a::b::k"


OVERLOADS = """
template <class T, class M, int N> kernel void k(device T* a, device M* b [[buffer(N1)]]) { }
template <class T, int N, bool B = true> kernel void k(device T* a, device T* b [[buffer(5)]]) { }
template [[host_name("x")]] kernel decltype(k<int, half, 4>) k<int, half, 4>;
template [[host_name("y")]] kernel decltype(k<int, 4, false>) k<int, 4, false>;
"""


def test_an_instantiation_finds_its_overload():
    """As in MLX's block_masked_gemm. An instantiation has the slots of its overload."""
    kernels = rewrite(OVERLOADS.replace("N1", "3")).kernels
    assert [kernel.parameters[1].index for kernel in kernels] == [3, 5]
    with pytest.raises(MetalSourceError, match="cannot tell which `k<int,4>` is: rename all"):
        rewrite(OVERLOADS.replace("N1", "3").replace("class M, ", "").replace("half, ", "")
                .replace("k<int, 4, false>", "k<int, 4>"))  # fmt: skip


CONSTANTS = """
constant bool flag [[function_constant(1)]];
enum { FIRST = 1 << 1 };
constant float by [[function_constant(FIRST + 0)]];
constant int maybe [[function_constant(3)]];
constant int count = is_function_constant_defined(maybe) ? maybe : 7;
float helper() { return by; }
kernel void uses(device float* x) { x[0] = helper(); }
kernel void free(device float* x) { x[0] = count; }
kernel void shadows(device float* x, constant float& by) { x[0] = by; }
template <int V = 1> void has_a_default(device float* x) { x[0] = by; }
kernel void has_a_local(device float* x) { int V = 2; x[0] = V; }
"""


def test_each_kernel_lists_its_missing_function_constants():
    missing = {kernel.name: kernel.missing for kernel in rewrite(CONSTANTS).kernels}
    assert missing == {"uses": ["by"], "free": [], "shadows": [], "has_a_local": []}


@each_case(
    "constants, error, words",
    [
        ({9: 1}, ValueError, "no function constant 9; it has flag (1), by (2), maybe (3)"),
        ({"nope": 1}, ValueError, "no function constant 'nope'"),
        ({1: 2}, ValueError, "constants['flag'] is 2"),
        ({"maybe": 2**31}, ValueError, "int accepts -2147483648 to 2147483647"),
        ({"maybe": 0.5}, TypeError, "is a float; the source declares it as int"),
        ({"by": "x"}, TypeError, "is a str"),
        ({"by": float("inf")}, ValueError, "must be finite"),
        ({"by": 1e300}, ValueError, "float accepts up to 3.40282e"),
        ({1: True, "flag": True}, ValueError, "by name and as index 1"),
    ],
)
def test_wrong_function_constants_are_errors(constants, error, words):
    with pytest.raises(error, match=re.escape(words)):
        rewrite(CONSTANTS, constants)


@each_case(
    "text, line, words",
    [
        ("\n\nkernel int k(device int* a) { }", 3, "must return void"),
        ("\nkernel void k(device int* a,\n uint b) { }", 3, "parameter b: it needs an attribute"),
        ("kernel void k(device int a [[buffer(0)]]) { }", 1, "must be a pointer or a reference"),
        (
            "\nkernel void k(device int* x, device int* y [[buffer(1)]],\n"
            "  device half* z [[buffer(1)]]) { }",
            2,
            "kernel k: y and z are both buffer(1)",
        ),
        ("kernel void k(device int* a [[buffer(31)]]) { }", 1, "buffers 0 to 30"),
        (
            "enum A { N = f(2) }; kernel void k(device int* a [[buffer(N)]]) { }",
            1,
            "neither a number nor an earlier enumerator",
        ),
        ("void f(int a,\n device int x[4) { }", 2, "`)` closes no bracket"),
        ("template [[kernel]] void f<int>();", 1, "needs [[host_name"),
    ],
)
def test_errors_name_the_line(text, line, words):
    with pytest.raises(MetalSourceError, match=re.escape(words)) as caught:
        rewrite(f'# 1 "some.metal"\n{text}\n')
    assert str(caught.value).startswith(f"some.metal:{line}: error: ")


@each_case(
    "text",
    [
        "int x = 1u << n, y = n >> 7, z = n <<= 1;",
        "template <class T, class U = A<T>> struct S { };",
        "template < class T, class U = A<B<T>>> struct S { };",
        "const M<T, A<(1 > 0)>> x; N<A<T>, B<C<T>>>(x);",
        "using U = enable_if_t<A<T> && (n > 1) || B<T>>;",
        "struct S { uint low : 3, high : 5; }; uint f(S s) { return s.low << n | s.high >> n; }",
        "struct S { S operator<<(int n); }; S f(S s) { return s << n; }",
    ],
)
def test_other_uses_of_shift_tokens_are_unchanged(text):
    assert rewritten(text, check=True) == text
