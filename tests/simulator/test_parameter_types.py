"""compile_shader: a tensor or number must have the type that the kernel declares."""

import re

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import compile_shader

SOURCE = """
#include <metal_stdlib>
using namespace metal;

struct Shape { int rows; int columns; float scale; };
typedef uint index_t;

kernel void of(device float* x, constant float& by, device index_t* indices,
               device packed_half3* halves, device atomic_int* total, device const bool* mask,
               device const char* bytes, device const Shape* any, device const float2* pairs) {
  x[0] = by;
}
kernel void count(device float* out, constant uint& n, constant bool& flag) {
  out[0] = flag ? float(n) : -1.0f;
}
kernel void vectors(device float* out, constant uint3& three, constant float4& four) {
  out[0] = three.z + four.w;
}
kernel void many(constant ushort* n [[buffer(1)]], device float* out) { out[0] = n[0] + 10 * n[1]; }
kernel void shape(device float* out, constant Shape& s) { out[0] = s.rows * s.columns * s.scale; }
kernel void nothing() {}
template <typename T>
kernel void typed(device T* out [[buffer(0)]], constant T& value [[buffer(1)]]) { out[0] = value; }
template [[host_name("typed_bfloat")]] kernel void typed<bfloat>(device bfloat*, constant bfloat&);
"""
TENSORS = {
    "x": torch.float32,
    "by": torch.float32,
    "indices": torch.int32,
    "halves": torch.float16,
    "total": torch.int32,
    "mask": torch.bool,
    "bytes": torch.float32,
    "any": torch.int64,
    "pairs": torch.complex64,
}


@pytest.fixture(scope="module")
def library():
    return compile_shader(SOURCE)


def call(library, **dtypes):
    library.of(*(torch.zeros(8, dtype=d) for d in (TENSORS | dtypes).values()), threads=1)


@each_case(
    "dtypes",
    [
        {},
        {"indices": torch.uint32, "total": torch.uint32, "mask": torch.int8},
        {"bytes": torch.int16, "any": torch.float16, "pairs": torch.float32},
        dict.fromkeys(TENSORS, torch.uint8),
    ],
)
def test_tensors_of_a_compatible_type_are_accepted(library, dtypes):
    call(library, **dtypes)


@each_case(
    "name, dtype, declared",
    [
        ("x", torch.float64, "buffer(0) `device float * x` needs float32"),
        ("by", torch.float16, "buffer(1) `constant float & by` needs float32"),
        ("indices", torch.int64, "buffer(2) `device index_t * indices` needs uint32"),
        ("halves", torch.bfloat16, "buffer(3) `device packed_half3 * halves` needs float16"),
        ("mask", torch.float32, "buffer(5) `device const bool * mask` needs bool"),
        ("pairs", torch.complex128, "buffer(8) `device const float2 * pairs` needs float32"),
    ],
)
def test_tensors_of_another_type_are_refused(library, name, dtype, declared):
    index = list(TENSORS).index(name)
    words = f"of: argument {index} is a tensor of {str(dtype)[6:]}; {declared}. Convert it with "
    with pytest.raises(TypeError, match=re.escape(words)):
        call(library, **{name: dtype})


def test_uint8_views_reinterpret_bytes(library):
    out = torch.zeros(2, dtype=torch.bfloat16)
    library.typed_bfloat(out.view(torch.uint8), torch.ones(1, dtype=torch.bfloat16), threads=1)
    assert out[0] == 1
    with pytest.raises(TypeError, match=re.escape("`device T * out` needs bfloat16")):
        library.typed_bfloat(torch.zeros(1), torch.ones(1, dtype=torch.bfloat16))


def value(library, kernel, *args, **options):
    out = torch.zeros(1)
    getattr(library, kernel)(out, *args, **options)
    return out.item()


def test_numbers_of_the_right_type_are_passed(library):
    assert value(library, "count", 2**24 - 1, True) == 2**24 - 1
    assert value(library, "count", 5, 1, arg_casts={1: "int32"}) == 5
    assert value(library, "count", -1, 1) == 2**32
    three, four = [1, 2, 3], (0.0, 0.0, 0.0, 4)
    assert value(library, "vectors", three, four, arg_casts={1: "int32"}) == 7
    assert value(library, "vectors", [*three, 0], four, arg_casts={1: "int32"}) == 7
    assert value(library, "many", [3, 4], arg_casts="int16") == 43
    assert value(library, "shape", torch.tensor([2, 3, 0x3F000000], dtype=torch.int32)) == 3
    library.nothing(threads=1)


FOUR = [0.0] * 4


@each_case(
    "kernel, args, casts, error, words",
    [
        (
            "count",
            (1.0, 1),
            None,
            TypeError,
            "count: argument 1 is 1.0, passed as float32; buffer(1) `constant uint & n` needs "
            "uint32: pass arg_casts={1: 'int32'}",
        ),
        ("count", (1, 1), {1: "int16"}, TypeError, "argument 1 is 1, passed as int16; "),
        ("count", (1, 1.0), None, TypeError, "`constant bool & flag` needs bool: pass arg_casts="),
        ("count", (2**32, 1), None, ValueError, "argument 1 is 4294967296; buffer(1) `constant"),
        ("count", (1, 2), None, ValueError, "argument 2 is 2; buffer(2) `constant bool & flag`"),
        ("count", ([1, 2], 1), {1: "int32"}, ValueError, "[1, 2], which has 8 bytes; buffer(1) "),
        ("vectors", ([1, 2, 3], FOUR), None, TypeError, "passed as int64; buffer(1) `constant ui"),
        ("vectors", ([1, 2], FOUR), {1: "int32"}, ValueError, "`constant uint3 & three` needs"),
        ("many", ([3, 4],), None, TypeError, "pass arg_casts={1: 'int16'}"),
        ("shape", ([1, 2, 3],), None, ValueError, "24 bytes; buffer(1) `constant Shape & s` needs"),
        ("typed_bfloat", (1.0,), None, TypeError, "pass arg_casts={1: 'bf16'}"),
    ],
)
def test_numbers_of_another_type_are_refused(library, kernel, args, casts, error, words):
    out = torch.zeros(1, dtype=torch.uint8 if kernel == "typed_bfloat" else torch.float32)
    with pytest.raises(error, match=re.escape(words)):
        getattr(library, kernel)(out, *args, arg_casts=casts)


def test_an_int_for_a_float_is_refused(library):
    args = [torch.zeros(8, dtype=dtype) for dtype in TENSORS.values()]
    args[1] = 2
    words = "argument 1 is 2, passed as int64; buffer(1) `constant float & by` needs float32: pass"
    with pytest.raises(TypeError, match=re.escape(words)):
        library.of(*args)
