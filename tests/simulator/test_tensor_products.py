"""matmul2d between cooperative tensors, under each lane map."""

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

LANE_MAPS = ["apple10", "apple9", 0, 1]
SHAPES = [(16, 32, 16), (32, 16, 16), (16, 16, 32)]

# Looks at no layout: every element by its own index.
PRODUCT = """
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

kernel void product(const device LEFT* a [[buffer(0)]], const device RIGHT* b [[buffer(1)]],
                    device float* c [[buffer(2)]]) {
  constexpr auto descriptor = matmul2d_descriptor(
      ROWS, COLUMNS, INNER, false, false, RELAXED, matmul2d_descriptor::mode::MODE);
  matmul2d<descriptor, execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<LEFT, RIGHT, float>();
  auto right = op.get_right_input_cooperative_tensor<LEFT, RIGHT, float>();
  auto out = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  for (ushort i = 0; i < left.get_capacity(); ++i) {
    auto at = left.get_multidimensional_index(i);
    if (left.is_valid_element(i)) left[i] = a[at[1] * INNER + at[0]];
  }
  for (ushort i = 0; i < right.get_capacity(); ++i) {
    auto at = right.get_multidimensional_index(i);
    if (right.is_valid_element(i)) right[i] = b[at[1] * COLUMNS + at[0]];
  }
#if LOADED
  for (ushort i = 0; i < out.get_capacity(); ++i) {
    auto at = out.get_multidimensional_index(i);
    out[i] = c[at[1] * COLUMNS + at[0]];
  }
#endif
  op.run(left, right, out);
  for (ushort i = 0; i < out.get_capacity(); ++i) {
    auto at = out.get_multidimensional_index(i);
    c[at[1] * COLUMNS + at[0]] = out[i];
  }
}
"""


def product(shape=SHAPES[0], left="half", right="half", relaxed=False, mode=True, loaded=True):
    rows, columns, inner = shape
    defines = {
        **{"ROWS": rows, "COLUMNS": columns, "INNER": inner, "LEFT": left, "RIGHT": right},
        **{"RELAXED": relaxed, "LOADED": loaded},
        "MODE": "multiply_accumulate" if mode else "multiply",
    }
    return compile_shader(PRODUCT, defines=defines, check=True, language="4.0").product


def operands(shape, left=torch.float16, right=torch.float16):
    torch.manual_seed(0)
    rows, columns, inner = shape
    a, b = torch.randn(rows, inner).to(left), torch.randn(inner, columns).to(right)
    return a, b, torch.randn(rows, columns)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_that_asks_for_indices_is_right_under_each_lane_map(shape):
    kernel = product(shape)
    for lane_map in LANE_MAPS:
        a, b, c = operands(shape)
        expected = a.double() @ b.double() + c.double()
        kernel(a, b, c, threads=32, group_size=32, lane_map=lane_map)
        torch.testing.assert_close(c.double(), expected, atol=1e-5, rtol=0)


def test_accumulation_reads_the_destination_which_must_have_been_written():
    a, b, c = operands(SHAPES[0])
    with pytest.raises(SimulatorFault) as caught:
        product(loaded=False)(a, b, c, threads=32, group_size=32)
    line = PRODUCT[: PRODUCT.index("op.run")].count("\n") + 1
    assert (caught.value.kind, caught.value.line) == ("uninitialised", line)


def test_multiplication_overwrites_the_destination():
    a, b, c = operands(SHAPES[0])
    product(mode=False, loaded=False)(a, b, c, threads=32, group_size=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=1e-5, rtol=0)
