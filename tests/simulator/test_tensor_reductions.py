"""Reductions of cooperative tensors, iterators, and a product's result as another's input."""

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

from .planted import TENSORS

LANE_MAPS = ["apple10", "apple9", 0, 1]

KERNELS = """
constant constexpr int ROWS = 16, COLUMNS = 32;
constant constexpr auto MULTIPLY = matmul2d_descriptor::mode::multiply;

// exp(S - max) of each row, the maxima, and the sums of columns; S = A B is 16 x 32.
kernel void softmax(device half* a, device half* b, device float* p, device float* maxima,
                    device float* sums, constant float& identity) {
  constexpr auto descriptor =
      matmul2d_descriptor(ROWS, COLUMNS, 16, false, false, false, MULTIPLY);
  matmul2d<descriptor, execution_simdgroup> op;
  auto left = tensor(a, dextents<int, 2>(16, ROWS));
  auto right = tensor(b, extents<int, COLUMNS, 16>());
  auto s = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, s);
  auto largest = op.get_row_reduction_destination_cooperative_tensor<
      decltype(left), decltype(right), float>();
  if (isnan(identity))
    reduce_rows(s, largest, reduction_operation::max);
  else
    reduce_rows(s, largest, reduction_operation::max, identity);
  if (!is_iterator_compatible(s, largest)) return;
  for (auto it = s.begin(); it != s.end(); ++it)
    if (it.is_valid_element()) *it = exp(*it - *largest.map_iterator(it));
  s.store(tensor(p, extents<int, COLUMNS, ROWS>()));
  for (ushort i = 0; i < largest.get_capacity(); ++i)
    if (largest.is_valid_element(i)) largest[i] *= 1.0f;
  largest.store(tensor(maxima, dextents<int, 1>(ROWS)));
  auto sum = op.get_column_reduction_destination_cooperative_tensor<
      decltype(left), decltype(right), float>();
  reduce_columns(s, sum);
  for (auto it = sum.begin(); it != sum.end(); ++it)
    if (it.is_valid_element()) sums[it.get_multidimensional_index()[0]] = *it;
}

// (A B) C. If the lane maps allow it, A B is copied to the left input of the second product.
kernel void chained(device half* a, device half* b, device half* c, device float* out,
                    constant int& asks [[buffer(4)]], device int* could) {
  constexpr auto first = matmul2d_descriptor(ROWS, COLUMNS, 16, false, false, false, MULTIPLY);
  constexpr auto second =
      matmul2d_descriptor(ROWS, 16, COLUMNS, false, false, false, MULTIPLY);
  matmul2d<first, execution_simdgroup> op;
  matmul2d<second, execution_simdgroup> next;
  auto left = tensor(a, extents<int, 16, ROWS>());
  auto right = tensor(b, extents<int, COLUMNS, 16>());
  auto last = tensor(c, extents<int, 16, COLUMNS>());
  auto p = op.get_destination_cooperative_tensor<decltype(left), decltype(right), half>();
  op.run(left, right, p);
  could[0] = next.is_compatible_as_left_input<half, half, float>(p);
  could[1] = next.is_compatible_as_left_input<float, half, float>(p);
  if (asks && !could[0]) return;
  auto input = next.get_left_input_cooperative_tensor<half, half, float>(p);
  auto result = next.get_destination_cooperative_tensor<decltype(input), decltype(last), float>();
  next.run(input, last, result);
  result.store(tensor(out, extents<int, 16, ROWS>()));
}
"""


@pytest.fixture(scope="module")
def kernels():
    return compile_shader(TENSORS + KERNELS, check=True, language="4.0")


@pytest.fixture(scope="module")
def operands():
    torch.manual_seed(0)
    return torch.randn(16, 16).half(), torch.randn(16, 32).half(), torch.randn(32, 16).half()


@pytest.mark.parametrize("lane_map", LANE_MAPS)
@pytest.mark.parametrize("identity", [-1e30, -1.0, torch.nan], ids=["lowest", "-1", "default"])
def test_rows_and_columns_are_reduced(kernels, operands, lane_map, identity):
    a, b = -operands[0].abs() / 4, operands[1].abs()
    p, maxima, sums = torch.zeros(16, 32), torch.zeros(16), torch.zeros(32)
    kernels.softmax(a, b, p, maxima, sums, identity, threads=32, group_size=32, lane_map=lane_map)
    s = a.float() @ b.float()
    # All elements are negative, and the default identity is 0 for maxima too.
    largest = s.amax(1).clamp(min=0.0 if identity != identity else identity)
    assert (largest != s.amax(1)).any() == (identity != -1e30)
    expected = (s - largest[:, None]).exp()
    torch.testing.assert_close(maxima, largest, atol=1e-5, rtol=0)
    torch.testing.assert_close(p, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected.sum(0), atol=1e-5, rtol=1e-5)
    counters = kernels.last_counters
    assert (counters.tensor_operations, counters.tensor_multiplications) == (3, 16 * 32 * 16)


@pytest.mark.parametrize("lane_map", LANE_MAPS)
def test_a_destination_is_an_input_where_the_lane_maps_are_the_same(kernels, operands, lane_map):
    out, could = torch.zeros(16, 16), torch.zeros(2, dtype=torch.int32)
    arguments = (*operands, out, 1, could)
    kernels.chained(*arguments, threads=32, group_size=32, arg_casts="int32", lane_map=lane_map)
    is_family = isinstance(lane_map, str)
    assert could.tolist() == [is_family, False]  # the element types differ in the second
    if is_family:
        a, b, c = operands
        expected = (a.float() @ b.float()).half().float() @ c.float()
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


def test_an_input_of_another_lane_map_is_a_fault(kernels, operands):
    arguments = (*operands, torch.zeros(16, 16), 0, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(SimulatorFault, match="a left input is copied from a tensor") as caught:
        kernels.chained(*arguments, threads=32, group_size=32, arg_casts="int32", lane_map=0)
    line = (TENSORS + KERNELS[: KERNELS.index("auto input =")]).count("\n") + 1
    assert (caught.value.kind, caught.value.line) == ("tensor", line)
