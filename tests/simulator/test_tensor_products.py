"""matmul2d between cooperative tensors, under each lane map."""

import pytest
import torch

from torch_metal_attn.simulator import compile_shader, simulate
from torch_metal_attn.simulator.lint import lint_source

from .planted import TENSORS

LANE_MAPS = ["apple10", "apple9", 0, 1]
SHAPES = [(16, 32, 16), (32, 16, 16), (16, 16, 32)]

HEAD = (
    TENSORS
    + """
#define EACH(tensor, statement)                        \\
  for (ushort i = 0; i < tensor.get_capacity(); ++i) { \\
    auto at = tensor.get_multidimensional_index(i);    \\
    statement;                                         \\
  }
"""
)
PRODUCT = (
    HEAD
    + """
kernel void product(const device LEFT* a [[buffer(0)]], const device RIGHT* b [[buffer(1)]],
                    device float* c [[buffer(2)]]) {
  constexpr auto descriptor = matmul2d_descriptor(
      ROWS, COLUMNS, INNER, false, false, RELAXED, matmul2d_descriptor::mode::MODE);
  constexpr bool ACCUMULATES =
      descriptor.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
  matmul2d<descriptor, execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<LEFT, RIGHT, float>();
  auto right = op.get_right_input_cooperative_tensor<LEFT, RIGHT, float>();
  auto out = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  EACH(left, if (left.is_valid_element(i)) left[i] = a[at[1] * INNER + at[0]])
  EACH(right, if (right.is_valid_element(i)) right[i] = b[at[1] * COLUMNS + at[0]])
  EACH(out, if (ACCUMULATES) out[i] = c[at[1] * COLUMNS + at[0]])
  op.run(left, right, out);
  EACH(out, c[at[1] * COLUMNS + at[0]] = out[i])
}
"""
)


def defines(shape=SHAPES[0], left="half", right="half", relaxed=False, mode="multiply_accumulate"):
    sizes = dict(zip(("ROWS", "COLUMNS", "INNER"), shape, strict=True))
    return sizes | {"LEFT": left, "RIGHT": right, "RELAXED": relaxed, "MODE": mode}


def product(*shape, **options):
    macros = defines(*shape, **options)
    return compile_shader(PRODUCT, defines=macros, check=True, language="4.0").product


def operands(shape, dtype=torch.float16):
    torch.manual_seed(0)
    rows, columns, inner = shape
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    return a, b, torch.randn(rows, columns)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_that_use_indices_are_correct_with_every_lane_map(shape):
    kernel = product(shape)
    for lane_map in LANE_MAPS:
        a, b, c = operands(shape)
        expected = a.double() @ b.double() + c.double()
        kernel(a, b, c, threads=32, group_size=32, lane_map=lane_map)
        torch.testing.assert_close(c.double(), expected, atol=1e-5, rtol=0)


def test_multiplication_overwrites_the_destination():
    a, b, c = operands(SHAPES[0])
    product(mode="multiply")(a, b, c, threads=32, group_size=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=1e-5, rtol=0)


# The lane maps of 16x32x16 as MLX 0.32 and PyTorch 2.15 use them: (row, column) as stored.
def published(operand, lane_map, lane, slot):
    if lane_map == "apple10":
        row = ((lane >> 2 & 4) | (lane >> 1 & 3)) + 8 * (slot % 8 // 4)
        column = ((lane >> 2 & 2) | (lane & 1)) * 4 + slot % 4
        shift = 16 * (slot // 8)
        return (row + shift, column) if operand == "transposed" else (row, column + shift)
    row = (lane >> 4 & 1) * 4 + (lane >> 1 & 3)
    column = (lane >> 3 & 1) * 4 + (lane & 1) * 2
    across = 2 if operand == "left" else 4  # tiles of 8x8
    row += slot // 2 // across * 8
    column += slot % 2 + slot // 2 % across * 8
    return (column, row) if operand == "transposed" else (row, column)


INDICES = (
    HEAD
    + """
template <class Tensor>
void indices(Tensor t, device int2* out, uint lane) {
  EACH(t, out[lane * t.get_capacity() + i] = int2(at[1], at[0]))
}
kernel void probe(device int2* left, device int2* right, device int2* transposed,
                  device int2* out, uint lane [[thread_index_in_simdgroup]]) {
  constexpr auto plain = matmul2d_descriptor(16, 32, 16);
  constexpr auto with_transposed = matmul2d_descriptor(16, 32, 16, false, true);
  matmul2d<plain, execution_simdgroup> op;
  matmul2d<with_transposed, execution_simdgroup> of_transposed;
  auto a = op.get_left_input_cooperative_tensor<half, half, float>();
  auto b = op.get_right_input_cooperative_tensor<half, half, float>();
  auto c = of_transposed.get_right_input_cooperative_tensor<half, half, float>();
  indices(a, left, lane);
  indices(b, right, lane);
  indices(c, transposed, lane);
  indices(op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>(), out, lane);
}
"""
)
MATRICES = {"left": (16, 16), "right": (16, 32), "transposed": (32, 16), "destination": (16, 32)}


@pytest.fixture(scope="module")
def probe():
    kernel = compile_shader(INDICES, language="4.0").probe

    def probed(lane_map):
        actual = [torch.zeros(32, n, 2, dtype=torch.int32) for n in (8, 16, 16, 16)]
        kernel(*actual, threads=32, group_size=32, lane_map=lane_map)
        return dict(zip(MATRICES, actual, strict=True))

    return probed


@pytest.mark.parametrize("lane_map", ["apple10", "apple9"])
def test_the_lane_maps_of_families_are_those_of_published_kernels(probe, lane_map):
    for operand, actual in probe(lane_map).items():
        _, slots, _ = actual.shape
        expected = [
            [published(operand, lane_map, lane, slot) for slot in range(slots)]
            for lane in range(32)
        ]
        assert actual.tolist() == [[list(place) for place in row] for row in expected], operand


def test_random_lane_maps_have_each_element_once_and_differ(probe):
    maps = [probe(seed) for seed in (0, 2, 4)]
    for operand, shape in MATRICES.items():
        # The lowest bit of a seed makes the indices of a transposed operand logical.
        actual = [one[operand].reshape(-1, 2).tolist() for one in maps]
        elements = sorted([row, column] for row in range(shape[0]) for column in range(shape[1]))
        assert all(sorted(one) == elements for one in actual)
        assert actual[0] != actual[1] != actual[2] != actual[0]
    logical = probe(1)["transposed"].reshape(-1, 2)
    assert logical.amax(0).tolist() == [15, 31]


def cut(x, rounds):
    """x with 11 significant bits."""
    mantissa, exponent = torch.frexp(x.double())
    scaled = mantissa * 2**11
    return torch.ldexp(scaled.round() if rounds else scaled.trunc(), exponent - 11)


@pytest.mark.parametrize("relaxed_precision", ["truncate", "round", None])
def test_relaxed_precision_cuts_float_operands_to_11_bits(relaxed_precision):
    relaxed = relaxed_precision is not None
    kernel = product(left="float", right="float", relaxed=relaxed)
    a, b, c = operands(SHAPES[0], torch.float32)
    x, y = (cut(m, relaxed_precision == "round") if relaxed else m.double() for m in (a, b))
    # Each element is a sum in the order of k, rounded once per step.
    expected = c.double()
    for k in range(16):
        expected = (expected + x[:, k, None] * y[None, k]).float().double()
    kernel(a, b, c, threads=32, group_size=32, relaxed_precision=relaxed_precision)
    assert torch.equal(c.double(), expected)


def test_options_of_a_simulate_block_apply_to_kernels(probe):
    with simulate(lane_map="apple9"):
        inside = probe(None)
    assert torch.equal(inside["left"], probe("apple9")["left"])
    assert not torch.equal(inside["left"], probe(None)["left"])


def test_the_lint_knows_tensor_operations():
    assert lint_source(PRODUCT, defines=defines(), language="4.0") == []
    findings = lint_source(PRODUCT, defines=defines(), language="3.2")
    assert [finding.rule for finding in findings] == ["compile"]
