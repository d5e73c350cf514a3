"""compile_shader: the calls of torch.mps.compile_shader, and the errors for wrong ones."""

import pickle
import re

import pytest
import torch

from tests.helpers.cases import each_case
from tests.helpers.mutants import plant
from torch_metal_attn import simulate
from torch_metal_attn.simulator import Counters, SimulatorFault, compile_shader
from torch_metal_attn.simulator.build import ShaderCompileError

SOURCE = """
#include <metal_stdlib>
using namespace metal;

kernel void scale(device float* x, constant float& by, uint i [[thread_position_in_grid]]) {
  x[i] *= by;
}
kernel void full(device long* out, constant long& value, uint i [[thread_position_in_grid]]) {
  out[i] = value;
}
kernel void pick(device float* out [[buffer(0)]], constant float* values [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = values[i];
}
kernel void reverse(device float* x, threadgroup float* scratch [[threadgroup(0)]],
                    uint i [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  scratch[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = scratch[n - 1 - i];
}
template <typename T>
kernel void widen(device float* out [[buffer(0)]], constant T& value [[buffer(1)]]) {
  out[0] = float(value);
}
template [[host_name("widen_" "half")]] kernel void widen<half>(device float*, constant half&);
template [[host_name("widen_char")]] kernel void widen<char>(device float*, constant char&);
"""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checked"])
def library(request):
    return compile_shader(SOURCE, check=request.param)


@each_case(
    "kernel, value, casts, expected",
    [
        ("full", -(2**62) - 1, None, [-(2**62) - 1] * 3),
        ("full", True, None, [1] * 3),
        ("pick", [1.0, -2.0, 0.5], None, [1.0, -2.0, 0.5]),
        ("widen_half", 0.1, "fp16", [0.0999755859375]),
        ("widen_char", 300, {1: "int8"}, [44]),
        ("widen_char", -3.7, "int8", [-3]),
    ],
)
def test_numbers_are_cast_as_in_torch(library, kernel, value, casts, expected):
    out = torch.zeros(len(expected), dtype=torch.int64 if kernel == "full" else torch.float32)
    getattr(library, kernel)(out, value, arg_casts=casts)
    assert out.tolist() == expected


def test_views_begin_at_their_offset(library):
    base = torch.arange(8.0)
    library.scale(base[3:], 10.0, threads=2)
    assert base.tolist() == [0, 1, 2, 30, 40, 5, 6, 7]
    transposed = torch.arange(6.0).view(2, 3).t()
    library.scale(transposed, 2.0)  # numel threads over the storage, as on mps
    assert transposed.flatten().sum() == 30


LIMITED = """
constant constexpr int SIMDGROUPS = 2;
#define KERNEL(T) (device T* out [[buffer(0)]], uint i [[thread_position_in_grid]], \\
                   uint size [[threads_per_threadgroup]]) { out[i] = size; }
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void plain KERNEL(int)
namespace inner {
template <typename T, int N, int M = (N > 2 ? 4 : 8)>
[[kernel, max_total_threads_per_threadgroup(N * M * (8 / 2))]] void of_template KERNEL(T)
}
template [[host_name("three")]] [[kernel]] decltype(inner::of_template<int, 3>)
    inner::of_template<int, 3>;
kernel void without KERNEL(int)
"""


@pytest.mark.parametrize("name,most", [("plain", 64), ("three", 48), ("without", 1024)])
def test_a_kernel_limits_the_threads_of_a_threadgroup(name, most):
    kernel = getattr(compile_shader(LIMITED), name)
    assert kernel.max_threads_per_threadgroup == most
    out = torch.zeros(1500, dtype=torch.int32)
    kernel(out)
    assert out[0] == most
    with pytest.raises(ValueError, match=f"is {most + 1} threads; 1 to {most} fit"):
        kernel(out, group_size=most + 1)


def test_launches_of_ops_keep_to_the_limit_of_their_kernel(monkeypatch):
    plant(monkeypatch, "softmax", "(THREADS)]] void softmax", "(THREADS - 1)]] void softmax")
    refused = re.escape("softmax: a threadgroup of ") + r"(\d+) threads; its max_.* is (\d+)$"
    with simulate(), pytest.raises(ValueError, match=refused):
        torch.ops.metal_attn.softmax(torch.ones(3, 7), -1)


def test_a_grid_of_no_threads_runs_nothing(library):
    x = torch.ones(3)
    library.scale(x, 5.0, threads=0)
    library.scale(torch.empty(0), 5.0)
    assert x.tolist() == [1, 1, 1]
    fresh = compile_shader(SOURCE)
    fresh.scale(x, 5.0, threads=0)
    assert fresh.last_counters is None


def test_library_lists_its_kernels(library):
    names = ["scale", "full", "pick", "reverse", "widen_half", "widen_char"]
    assert sorted(names) == dir(library)
    assert not hasattr(library, "nothing")
    with pytest.raises(AttributeError, match="no kernel 'nothing'; it has scale, full"):
        library.nothing  # noqa: B018
    assert repr(library.scale).startswith("<kernel scale(device float *")


ONE = torch.ones(1)


@each_case(
    "kernel, args, error, words",
    [
        ("scale", (ONE,), TypeError, "no argument for buffer(1) `constant float"),
        ("scale", (ONE, 1.0, 2.0), TypeError, "argument 2 has no parameter"),
        ("scale", (ONE, None), TypeError, "no argument for buffer(1)"),
        ("scale", (ONE, "a"), TypeError, "argument 1 is or holds a str"),
        ("scale", (1.0, 1.0), ValueError, "no argument is a tensor, so pass threads="),
        ("scale", (ONE.to("meta"), 1.0), ValueError, "a tensor on meta"),
        ("scale", (ONE.to_sparse(), 1.0), ValueError, "a tensor of layout torch.sparse_coo"),
        ("pick", (ONE, []), ValueError, "argument 1 is empty"),
        ("pick", (ONE, [ONE]), TypeError, "holds a float32 tensor of"),
        ("full", (ONE, 2**63), OverflowError, "argument 1 does not fit an int64"),
        ("reverse", (ONE,), TypeError, "length of threadgroup(0) scratch"),
    ],
)
def test_wrong_calls_are_refused(library, kernel, args, error, words):
    with pytest.raises(error, match=re.escape(words)):
        getattr(library, kernel)(*args)


def test_last_counters_are_those_of_the_last_kernel():
    library = compile_shader(SOURCE, check=True)
    assert library.last_counters is None
    library.scale(torch.ones(8), 2.0)
    counters = library.last_counters
    total = counters + counters + Counters()
    assert total.load_bytes == {"device": 64, "threadgroup": 0, "constant": 64, "thread": 0}
    assert total.launches == 2
    assert "loads=(device 16, constant 16)" in repr(total)
    assert total.as_dict()["store_bytes"]["device"] == 64


def test_a_fault_has_its_kind_place_and_thread():
    source = "struct S {\n  static int at(uint i) { return i + 1; }\n};\n"
    source += "void put(device float* x, uint i) {\n  x[S::at(i)] = 1;\n}\n"
    source += "kernel void k(device float* x, uint i [[thread_position_in_grid]])\n{ put(x, i); }"
    library = compile_shader(source, check=True)
    x = torch.zeros(70)
    with pytest.raises(SimulatorFault) as caught:
        library.k(x[:64], threads=70, group_size=32)
    fault = caught.value
    assert (fault.kind, fault.kernel) == ("out_of_bounds", "k")
    assert (fault.file, fault.line) == ("program_source", 5)
    assert (fault.threadgroup, fault.thread) == ((2, 0, 0), (5, 0, 0))
    assert "program_source:5 in put\n    inlined into program_source:8 in k" in str(fault)
    unpickled = pickle.loads(pickle.dumps(fault))  # as from a worker process
    assert (str(unpickled), vars(unpickled)) == (str(fault), vars(fault))


CONSTANTS = """
constant bool twice [[function_constant(0)]];
constant float added [[function_constant(1)]];
constant int spare [[function_constant(2)]];
constant int count = is_function_constant_defined(spare) ? spare : 7;
kernel void k(device float* x [[buffer(0)]],
              constant float& factor [[buffer(1), function_constant(twice)]],
              uint i [[thread_position_in_grid]]) {
  x[i] += added;
  if (twice) x[i] *= factor;
}
kernel void counts(device float* x [[buffer(0)]]) { x[0] = count; }
"""


def test_function_constants_are_set_by_index_or_name():
    x = torch.ones(2)
    compile_shader(CONSTANTS, constants={0: True, "added": 0.5}).k(x, 4.0)
    assert x.tolist() == [6, 6]
    compile_shader(CONSTANTS, constants={"twice": False, 1: 1.0}).k(x)
    assert x.tolist() == [7, 7]
    compile_shader(CONSTANTS).counts(x)
    assert x[0] == 7
    compile_shader(CONSTANTS, constants={"spare": -3}).counts(x)
    assert x[0] == -3


def test_missing_function_constants_are_errors():
    library = compile_shader(CONSTANTS, constants={"added": 1.0})
    with pytest.raises(ValueError, match="kernel k needs a value for function constants twice"):
        library.k(torch.ones(1))
    library = compile_shader(CONSTANTS, constants={"added": 1.0, "twice": True})
    with pytest.raises(TypeError, match=re.escape("buffer(1) `constant float & factor`")):
        library.k(torch.ones(1))


def test_defines_apply_to_headers_but_not_to_the_shim(tmp_path):
    """The shim has a name T, to which defines do not apply."""
    (tmp_path / "more.h").write_text("#pragma once\nconstant int PLUS = VALUE + 1;\n")
    source = '#include "more.h"\n'
    source += "kernel void k(device float* x) { x[0] = metal::max(TWICE(PLUS), float(T)); }"
    x = torch.zeros(1)
    for value, expected in ((41, 84), (True, 5)):
        defines = {"VALUE": value, "T": 5, "TWICE(n)": "float((n) + (n))"}
        compile_shader(source, include_dirs=[tmp_path], defines=defines).k(x)
        assert x.item() == expected


def test_headers_of_torch_are_found():
    source = "#include <c10/metal/utils.h>\n"
    source += "kernel void k(device float* x) { x[0] = c10::metal::max(x[0], NAN); }"
    x = torch.zeros(1)
    compile_shader(source).k(x)
    assert x.isnan().all()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("kernel void k(device float* x) {\n\n  x[0] = nothing;\n}", "program_source:3:"),
        ('#include "nowhere.h"\n', "program_source:1:"),
        ("kernel void k(device float* x) {\n float4 v = float4(1, 2, 3);\n}", "program_source:2:"),
        ("\nkernel void k(device float* x) {\n x[0] = 1;\n", "program_source:2:"),
    ],
)
def test_compile_errors_name_the_line(source, words):
    with pytest.raises(SyntaxError) as caught:
        compile_shader(source)
    assert isinstance(caught.value, RuntimeError)
    head, first = str(caught.value).split("\n")[:2]
    assert head == "the Metal source does not compile:"
    assert first.startswith(words)


def test_parameters_of_one_slot_may_exclude_each_other():
    source = """constant bool A [[function_constant(0)]];
    constant bool B [[function_constant(1)]];
    kernel void k(device float* x [[buffer(0), function_constant(A)]],
                  device int* y [[buffer(0), function_constant(B)]]) { if (A) x[0] = 1; }"""
    x = torch.zeros(1)
    compile_shader(source, constants={"A": True, "B": False}).k(x)
    assert x.item() == 1
    with pytest.raises(ValueError, match=re.escape("k: x and y are both buffer(0)")):
        compile_shader(source, constants={"A": True, "B": True}).k(x)


@each_case(
    "source, words",
    [
        ("", "the source is empty"),
        ("gemm.metal", "a path; it must be Metal text: pass Path('gemm.metal').read_text()"),
        ("/a b/x.metal", "the source has no kernel: declare"),
        ("float f(float x) { return x; }", "the source has no kernel: declare"),
        ("template <class T> kernel void k(device T* x) {}", "or instantiate a template"),
        ("__global__ void k(float* x) {}", "it is CUDA, whose __global__ is `kernel` in Metal"),
    ],
)
def test_a_source_without_kernels_is_refused(source, words):
    with pytest.raises(ShaderCompileError, match=re.escape(words)):
        compile_shader(source)


@each_case("name", ["air.f", "f"])
def test_a_function_without_a_definition_is_an_error(name):
    source = f'float f(float) __asm("{name}"); kernel void k(device float* x) {{ x[0] = f(1); }}'
    with pytest.raises(ShaderCompileError, match=f"`{re.escape(name)}`, which is only declared"):
        compile_shader(source)


def shrunk():
    x = torch.zeros(8)
    x.untyped_storage().resize_(4)
    return x


UNSUPPORTED = {
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)]),
    "negated by a flag": lambda: torch._neg_view(torch.ones(4)),
    "conjugated by a flag": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "without memory of its own": lambda: torch._efficientzerotensor(4),
    "a storage of 4 bytes, which is too small": shrunk,
}


@each_case("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensors_are_refused(library, kind):
    with pytest.raises(ValueError, match=f"scale: argument 0 .*{kind}"):
        library.scale(UNSUPPORTED[kind](), 2.0, threads=1)


def test_tensors_of_transforms_are_refused(library):
    def step(x):
        library.scale(x, 2.0)
        return x.sum()

    for transform in (torch.vmap(step), torch.func.grad(step)):
        with pytest.raises(ValueError, match="without memory of its own"):
            transform(torch.ones(3))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
        with pytest.raises(ValueError, match="without memory of its own"):
            library.scale(fake, 2.0)


def test_written_tensors_are_modified_for_autograd(library):
    x = torch.ones(4, requires_grad=True) * 1
    out = torch.zeros(4)
    loss = (x * x).sum()
    library.pick(out, x)
    assert (x._version, out._version) == (0, 1)
    library.scale(x, 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        library.scale(torch.ones(4), 2.0)
