"""Wrong uses of tensor operations are faults or compile errors."""

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

from .planted import TENSORS, Planted, check_refused

FUNCTIONS = """
constant constexpr auto ACCUMULATE = matmul2d_descriptor::mode::multiply_accumulate;
#define PRODUCT                                                                                \\
  constexpr auto shape = matmul2d_descriptor(16, 32, 16, false, false, true, ACCUMULATE);      \\
  matmul2d<shape, execution_simdgroup> op;                                                     \\
  auto left = op.get_left_input_cooperative_tensor<float, half, float>();                      \\
  auto right = op.get_right_input_cooperative_tensor<float, half, float>();                    \\
  auto out = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
#define FILLED                                                                                 \\
  PRODUCT                                                                                      \\
  for (ushort i = 0; i < left.get_capacity(); ++i) left[i] = 1.0f;                             \\
  for (ushort i = 0; i < right.get_capacity(); ++i) right[i] = 1.0h;                           \\
  for (ushort i = 0; i < out.get_capacity(); ++i) out[i] = 0.0f;
// A product of operands that T threads have staged. STAGE: each thread writes left's elements.
#define STAGED(T, Scope)                                                                       \\
  constexpr auto shape = matmul2d_descriptor(16, 32, 32, false, false, false);                 \\
  matmul2d<shape, Scope> op;                                                                   \\
  threadgroup half shared[512 + 1024];                                                         \\
  auto left = tensor(shared, dextents<int, 2>(32, 16));                                        \\
  auto right = tensor(shared + 512, dextents<int, 2>(32, 32));                                 \\
  auto out = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();  \\
  uint t = thread_index;                                                                       \\
  for (uint i = t; i < 1536; i += T) shared[i] = 1.0h;                                         \\
  BARRIER(threadgroup)
#define STAGE(T, element) for (uint i = 0; i < 512 / T; ++i) shared[element] = 2.0h;
"""
PARAMETERS = """device float* a [[buffer(0)]], const device int* n [[buffer(1)]],
  constant int& which [[buffer(2)]], uint thread_index [[thread_index_in_threadgroup]],
  uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]"""
CASES = """
some_lanes: partial_simd: tensor operation reached by lanes 0-15, but SIMD group
  FILLED
  {~if (lane < 16) =>~} op.run(left, right, out);  //!
  if (thread_index == 0) a[0] = out[0];
slot_left_out: uninitialised: use of a part of a private variable
  PRODUCT
  for (ushort i = 0; i < left.get_capacity(); ++i) left[i] = 1.0f;
  for (ushort i = n[{~1 => 0~}]; i < right.get_capacity(); ++i) right.set(i, 1.0h);
  for (ushort i = 0; i < out.get_capacity(); ++i) out[i] = 0.0f;
  op.run(left, right, out);  //!
accumulator_left_out: uninitialised: use of a part of a private variable
  PRODUCT
  for (ushort i = 0; i < left.get_capacity(); ++i) left[i] = 1.0f;
  for (ushort i = 0; i < right.get_capacity(); ++i) right[i] = 1.0h;
  for (ushort i = n[{~1 => 0~}]; i < out.get_capacity(); ++i) out[i] = 0.0f;
  op.run(left, right, out);  //!
slot_past_the_last: private_out_of_bounds: byte 32 of 32
  FILLED
  left.set(8, left.get(8) + 1.0f);  // checked, unlike the next one
  left[n[{~8 => 7~}]] = 1.0f;  //!
  op.run(left, right, out);
outside_of_extents: uninitialised: use of a part of a private variable
  FILLED
  left.load(tensor(a, dextents<int, 2>(16, n[{~15 => 16~}])));
  op.run(left, right, out);  //!
no_barrier: uninitialised: threadgroup variable shared
  threadgroup float shared[16 * 32];
  FILLED
  out.store(tensor(shared, dextents<int, 2>(32, 16)));
  {~=> SIMD_BARRIER(threadgroup)~}
  if (thread_index == 0) a[0] = shared[1] + shared[9] + shared[17];  //!
staged_by_rows_without_a_barrier: race
  STAGED(32, execution_simdgroup) STAGE(32, t % 16 * 32 + t / 16 + i * 2)
  {~=> BARRIER(threadgroup)~} op.run(left, right, out);
  if (t == 0) a[0] = out[0];
overwritten_without_a_barrier: race
  STAGED(32, execution_simdgroup) op.run(left, right, out);
  {~=> BARRIER(threadgroup)~} STAGE(32, t + i * 32)
  if (t == 0) a[0] = out[0];
"""
TWO_GROUPS = """
group_that_leaves: divergent_barrier: tensor operation reached by 32 of the threadgroup's 64
  constexpr auto shape = matmul2d_descriptor(16, 32, 16, false, false, false);
  matmul2d<shape, execution_simdgroups<2>> op;
  auto left = tensor(a, dextents<int, 2>(16, 16));
  auto right = tensor(a, dextents<int, 2>(32, 16));
  auto out = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  {~if (simdgroup == 1) return; =>~}
  op.run(left, right, out);  //!
  if (thread_index == 1000) a[0] = out[0];
staged_by_columns_without_a_barrier: race
  STAGED(64, execution_simdgroups<2>) STAGE(64, (i + t / 32 * 8) * 32 + t % 32)
  {~=> BARRIER(threadgroup)~} op.run(left, right, out);
  if (t == 0) a[0] = out[0];
overwritten_by_four_without_a_barrier: race
  STAGED(64, execution_simdgroups<2>) op.run(left, right, out);
  {~=> BARRIER(threadgroup)~} STAGE(64, 4 * (t + i / 4 * 64) + i % 4)
  if (t == 0) a[0] = out[0];
"""


def planted(table, **options):
    def arguments():
        return torch.ones(512), torch.arange(64).int()

    return Planted(table, TENSORS + FUNCTIONS, PARAMETERS, arguments, language="4.0", **options)


PLANTED = planted(CASES)
test_fault_is_reported, test_clean_twin_has_no_fault = PLANTED.tests()
test_fault_of_two_groups_is_reported, test_twin_of_two_groups = planted(
    TWO_GROUPS, threads=64, group_size=64
).tests()


def test_a_tensor_operation_needs_all_32_lanes():
    with pytest.raises(SimulatorFault, match="SIMD group 0, which has only lanes 0-23"):
        PLANTED.run("some_lanes", True, threads=24, group_size=24)


REFUSED = {
    "auto l = product<16, 16, 16>().LEFT(half, half); auto r = product<16, 16, 16>()."
    "RIGHT(half, half); product<16, 16, 16>().OUT(decltype(l), decltype(r));": (
        "and at least one 32"
    ),
    "product<16, 32, 16>().LEFT(bfloat, half);": "not support this combination of element types",
    "product<16, 32, 16>().LEFT(half, int8_t);": "multiplies half, bfloat and float only",
    "product<16, 32, -1>().LEFT(half, half);": "a constant K, not dynamic_extent",
    "product<16, 32, 16, execution_simdgroups<2>>().LEFT(half, half);": "need execution_simdgroup",
    "product<16, 32, 16>().OUT(half, half);": "the types of both operands (decltype",
    "product<16, 32, 16>().OUT(decltype(c), decltype(a));": "not accept tensors of const elements",
    "product<16, 12, 16>().OUT(decltype(a), decltype(a));": "16, and the other a multiple of 8",
    "product<8, 8, 16>().OUT(decltype(a), decltype(a));": "16, and the other a multiple of 8",
    "product<16, 32, 24>().OUT(decltype(a), decltype(a));": "dynamic_extent or a multiple of 16",
    "product<16, 32, 16>().run(c, a, f);": "not accept tensors of const elements",
    "product<16, 32, 16>().run(a, a, f);": "not known whether multiply overwrites",
    "auto o = product<16, 32, 16>().OUT(decltype(a), decltype(a)); "
    "product<32, 16, 16>().run(a, a, o);": "the destination belongs to another product",
    "auto l = product<16, 32, 16>().LEFT(half, half); "
    "product<16, 16, 32>().run(l, a, f);": "the left operand belongs to another product",
    "auto o = product<16, 32, 16>().OUT(decltype(a), decltype(a)); o.store(a);": (
        "elements of the same type"
    ),
    "auto o = product<16, 32, 16>().OUT(decltype(a), decltype(a)); o.load(a);": (
        "does not convert elements"
    ),
    "tensor<device half, dextents<int, 2>> handle;": "tensor_inline only",
}


def test_wrong_uses_are_errors_at_their_line():
    above = """
#define LEFT(L, R) get_left_input_cooperative_tensor<L, R, float>()
#define RIGHT(L, R) get_right_input_cooperative_tensor<L, R, float>()
#define OUT(L, R) get_destination_cooperative_tensor<L, R, float>()
template <int Rows, int Columns, int Inner, class Scope = execution_simdgroup>
matmul2d<matmul2d_descriptor(Rows, Columns, Inner), Scope> product() {
  return {};
}
kernel void refused(device half* p, const device half* q, device float* r) {
  auto a = tensor(p, dextents<int, 2>(32, 32));
  auto c = tensor(q, dextents<int, 2>(32, 32));
  auto f = tensor(r, dextents<int, 2>(32, 32));
"""
    lines = {f"{{ {statement} }}": words for statement, words in REFUSED.items()}
    check_refused(lines, TENSORS + above, "}", check=True, language="4.0")


@pytest.mark.parametrize("language", ["3.1", "3.2", "4.0"])
def test_only_metal_4_has_the_headers(language):
    text = """
#if __has_include(<MetalPerformancePrimitives/MetalPerformancePrimitives.h>) && \\
    __has_include(<metal_tensor>) && __has_include(<metal_cooperative_tensor>) && \\
    defined(__HAVE_TENSOR__) && __METAL_VERSION__ >= 400
#define FOUND 1
#elif !__has_include(<MetalPerformancePrimitives/MetalPerformancePrimitives.h>) && \\
    !__has_include(<metal_tensor>) && !__has_include(<metal_cooperative_tensor>) && \\
    !defined(__HAVE_TENSOR__)
#define FOUND 0
#endif
kernel void k(device int* out) { out[0] = FOUND; }
"""
    out = torch.tensor([7], dtype=torch.int32)
    compile_shader(text, language=language).k(out, threads=1, group_size=1)
    assert out.item() == (language == "4.0")
