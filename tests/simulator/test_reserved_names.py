"""Reserved words as names are refused at their line. Other uses of the words compile."""

import re

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import ShaderCompileError, compile_shader, lint
from torch_metal_attn.simulator import __main__ as command
from torch_metal_attn.simulator.build import PREDEFINED, SHIM
from torch_metal_attn.simulator.metal import reserved
from torch_metal_attn_pytest import compile_shader as fixture

KERNEL = """#include <metal_stdlib>
using namespace metal;
{above}
kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {{
  {body}
}}
"""
LINES = {"above": 3, "body": 5}

# A word, and a line that uses it as a name.
BODY = """
fragment: short fragment = 1; out[i] = fragment;
vertex: struct S { float vertex; }; S s; s.vertex = 1; out[i] = s.vertex;
kernel: kernel: out[i] = 1;
thread: uint thread = 1; out[i] = thread;
device: float x[2], device[2]; out[i] = 1;
constant: for (int constant = 0; constant < 2; constant++) { out[i] = 1; }
half: float half = 1; out[i] = half;
float4: float4 float4 = 1; out[i] = float4.x;
packed_half4: auto packed_half4 = 1; out[i] = packed_half4;
half3: thread float* half3 = nullptr; out[i] = 1;
uint3: int a[2], uint3 = 1; out[i] = a[0];
bfloat: float* bfloat = nullptr; out[i] = 1;
ushort2: float const ushort2 = 1; out[i] = 1;
and: int and = 1; out[i] = 1;
class: int class = 1; out[i] = 1;
assert: int assert = 1; out[i] = assert;
INFINITY: float INFINITY = 1; out[i] = 1;
SCHAR_MAX: float SCHAR_MAX[2]; out[i] = 1;
"""
ABOVE = """
fragment: METAL_FUNC float fragment(float x) { return x; }
fragment: namespace fragment { constant int x = 1; }
fragment: template <int fragment> int f() { return fragment; }
vertex: int f(int vertex) { return vertex; }
kernel: struct S { METAL_FUNC float kernel() const thread { return 1; } };
device: enum E { device, host };
half2: template <typename half2> int f() { return 1; }
ushort: template <uint ushort> int f() { return 1; }
uint2: void uint2(int x) {}
assert: float assert(float x) { return x; }
M_PI_F: constant float M_PI_F = 3.0f;
bfloat: #define bfloat half
fragment: #define fragment 1
half: #define half float
"""
CASES = [
    (place, *line.split(": ", 1))
    for place, table in (("body", BODY), ("above", ABOVE))
    for line in table.strip().splitlines()
]
OTHER_USES = """
static inline float4 f(float x) { return half(x) > half(2) ? float4(1) : x * float4(2); }
struct S { auto f() const thread -> float4 { return float4(1); } uint : 3; };
struct T { float x; operator half() const thread { return half(x); } };
struct U { float x; float operator[](int) const thread { return x; } };
typedef unsigned int uint; using half_t = half; constant unsigned long big = 1;
enum class Kind : uint { one, two }; namespace inner { template <typename T, int N> struct vec; }
// #define half float
inline float g(float kernel_size, float fragments, bool a, bool b) { return a and not(b) ? 1 : 2; }
#define METAL_FUNC inline
#undef M_PI_F
#define M_PI_F 3.0f
#ifndef assert
#define assert(x)
#endif
#ifndef NAN
constant float NAN = 1; /* float FLT_MAX = 1 */
#endif
auto at(device float* p, int i) -> device float& { return p[i]; }
struct V { float x; auto get() const thread -> thread const float& { return x; } uint : 32 - 3; };
using Far = float device; constant [[maybe_unused]] float one = 1;
inline float sum(float constant (&w)[4]) { return w[0]; }
inline float load(device float* p) { return ((device float*)p)[0] * M_PI_F; }
inline bool most(device float* p) { return *(device float*)p > FLT_MAX || load(p) > INFINITY; }
inline int count(device atomic_int* p) {
  return atomic_load_explicit((device atomic_int*)p, memory_order_relaxed) & INT_MAX;
}
"""


def text(place: str, line: str) -> str:
    return KERNEL.format(**{"above": "", "body": "out[i] = 1;", place: line})


@each_case("place, word, line", CASES)
def test_reserved_words_as_names_are_refused(place, word, line):
    source = text(place, line)
    words = f"program_source:{LINES[place]}: error: `{word}` is a"
    with pytest.raises(ShaderCompileError, match=re.escape(words)) as caught:
        compile_shader(source)
    assert f"rename it, for example to `{word}_`" in str(caught.value)
    actual = lint.lint_source(source)
    assert {(f.rule, f.line) for f in actual} >= {("reserved-name", LINES[place])}
    assert all(f"`{word}`" in f.message for f in actual if f.rule == "reserved-name")


def test_the_command_and_the_fixture_refuse_reserved_names(tmp_path, capsys) -> None:
    source = text("body", "short fragment = 1; out[i] = fragment;")
    path = tmp_path / "kernel.metal"
    path.write_text(source)
    assert command.main(["check", str(path)]) == 1
    assert "kernel.metal:5: error: `fragment` is a function qualifier" in capsys.readouterr().err
    compile_checked = fixture.__wrapped__(torch.device("cpu"))
    with pytest.raises(ShaderCompileError, match="`fragment` is a function qualifier"):
        compile_checked(source)
    with pytest.raises(ValueError, match="defines: `half` is a type of Metal"):
        compile_shader(text("body", "out[i] = 1;"), defines={"half(x)": "float(x)"})
    # A text may redefine this macro too.
    compile_shader(text("body", "out[i] = M_PI_F;"), defines={"M_PI_F": "3"})


def test_other_uses_of_reserved_words_compile() -> None:
    source = KERNEL.format(above=OTHER_USES, body="out[i] = f(1).x;")
    compile_shader(source.replace("kernel void", "[[kernel]] void"), check=True)
    assert lint.lint_source(source, strict=False) == []


def test_the_shim_defines_every_macro_of_metal() -> None:
    """If the shim lacked a macro of the table, `#ifndef` in a text would define the macro."""
    shim = "".join(path.read_text() for path in SHIM.rglob("*") if path.is_file())
    defined = set(re.findall(r"#define (\w+)", shim))
    defined |= {name[2:].partition("=")[0] for name in PREDEFINED if "=" in name}
    assert reserved.MACROS <= defined
    private = re.compile("__|MSL_|METAL_CONST|ATOMIC_VAR_INIT")
    assert not {name for name in defined - reserved.MACROS if not private.match(name)}


def test_qualifiers_as_names_do_not_compile_without_the_table(monkeypatch) -> None:
    monkeypatch.setattr(reserved, "_is_name", lambda *_: False)
    source = shaders.source("index_scores").replace("fragment_at", "fragment")
    sizes = {"HEAD_DIM": 128, "BLOCK_K": 32, "SIMDGROUPS": 4}
    defines = {"ELEMENT": "half", "WEIGHT_ELEMENT": "float", **sizes}
    places = {f"{f.file}:{f.rule}" for f in lint.lint_source(source, defines=defines)}
    assert {"shaders/operand.h:compile", "shaders/products.h:compile"} <= places
