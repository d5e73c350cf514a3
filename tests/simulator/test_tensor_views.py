"""Tensor operations on views of device and threadgroup memory, in each scope."""

import pytest
import torch

from torch_metal_attn.simulator import SimulatorFault, compile_shader

from .planted import TENSORS

# Views of 16 x 32 products have 13 rows, 29 columns and K = 40; rows are 56 elements apart.
VIEWS = """
constant constexpr int ROWS = 13, COLUMNS = 29, INNER = 40, STRIDE = 56;
constant constexpr auto MULTIPLY = matmul2d_descriptor::mode::multiply;
constant constexpr auto ACCUMULATE = matmul2d_descriptor::mode::multiply_accumulate;
#define VIEW(data, columns, rows) \\
  tensor(data, dextents<int, 2>(columns, rows), array<int, 2>{1, STRIDE})
// Views, and a cooperative destination. K comes from the views.
#define PRODUCT(Scope, mode, left_view, right_view)                                         \\
  constexpr auto descriptor =                                                               \\
      matmul2d_descriptor(16, 32, (int)dynamic_extent, false, true, false, mode);           \\
  matmul2d<descriptor, Scope> op;                                                           \\
  auto left = left_view;                                                                    \\
  auto right = right_view;                                                                  \\
  auto out =                                                                                \\
      op.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();

template <class Scope>
void into_registers(device half* a, device half* b, device float* c) {
  PRODUCT(Scope, MULTIPLY, VIEW(a, INNER, ROWS), VIEW(b, INNER, COLUMNS))
  op.run(left, right, out);
  out.store(VIEW(c, COLUMNS, ROWS));
}
kernel void cooperative(device half* a, device half* b, device float* c) {
  into_registers<execution_simdgroup>(a, b, c);
}
kernel void of_three_groups(device half* a, device half* b, device float* c) {
  into_registers<execution_simdgroups<3>>(a, b, c);
}

// 2 (1 + A B), by set and get of each slot and of a slot past the last. Some slots have no element.
// sums: for each thread, the sum of the elements that it gets.
kernel void by_get_and_set(device half* a, device half* b, device float* c, device float* sums,
                           uint thread_index [[thread_index_in_threadgroup]]) {
  PRODUCT(execution_simdgroups<3>, ACCUMULATE, VIEW(a, INNER, ROWS), VIEW(b, INNER, COLUMNS))
  for (ushort i = 0; i <= out.get_capacity(); ++i) out.set(i, 1.0f);
  op.run(left, right, out);
  float sum = 0.0f;
  for (ushort i = 0; i <= out.get_capacity(); ++i) {
    sum += out.get(i);
    out.set(i, 2.0f * out.get(i));
  }
  sums[thread_index] = sum;
  out.store(VIEW(c, COLUMNS, ROWS));
}

// Slices of larger views, without the first row and without k < 8.
kernel void sliced(device half* a, device half* b, device float* c) {
  PRODUCT(execution_simdgroup, ACCUMULATE, VIEW(a, INNER, ROWS).slice(8, 1),
          (VIEW(b, INNER, COLUMNS).slice<16, 32>(8, 0)))
  for (ushort i = 0; i < out.get_capacity(); ++i) out[i] = 1.0f;
  op.run(left, right, out);
  out.store(VIEW(c, COLUMNS, ROWS - 1));
}

// One thread or four SIMD groups, with the result in memory. The right operand is in threadgroup
// memory, and the left operand is transposed.
template <class Scope, bool ALONE>
void into_memory(device half* a, device half* b, device float* c, threadgroup half* shared,
                 uint thread_index) {
  for (uint i = thread_index; i < INNER * STRIDE; i += 128) shared[i] = b[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  constexpr auto descriptor =
      matmul2d_descriptor(16, 32, (int)dynamic_extent, true, false, false, ACCUMULATE);
  matmul2d<descriptor, Scope> op;
  tensor<device half, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(ROWS, INNER),
                                                            array<int, 2>{1, STRIDE});
  auto right = VIEW(shared, COLUMNS, INNER);
  auto out = VIEW(c, COLUMNS, ROWS);
  if (!ALONE || thread_index == 0) op.run(left, right, out);
}
#define INTO(name, Scope, alone)                                                              \\
  kernel void name(device half* a, device half* b, device float* c,                           \\
                   uint thread_index [[thread_index_in_threadgroup]]) {                       \\
    threadgroup half shared[INNER * STRIDE];                                                  \\
    into_memory<Scope, alone>(a, b, c, shared, thread_index);                                 \\
  }
INTO(by_thread, execution_thread, true)
INTO(by_simdgroups, execution_simdgroups<4>, false)
"""


@pytest.fixture(scope="module")
def views():
    return compile_shader(TENSORS + VIEWS, check=True, language="4.0")


def memory(rows, columns, dtype):
    """A matrix, and its memory: rows of 56 elements, NaN after the matrix's last column."""
    whole = torch.full((rows, 56), torch.nan, dtype=dtype)
    whole[:, :columns] = torch.randn(rows, columns)
    return whole[:, :columns], whole


@pytest.fixture(scope="module")
def matrices():
    torch.manual_seed(0)
    return {
        "a": memory(13, 40, torch.float16),
        "b": memory(29, 40, torch.float16),
        "a transposed": memory(40, 13, torch.float16),
        "b plain": memory(40, 29, torch.float16),
        "c": memory(13, 29, torch.float32),
    }


RIGHT_TRANSPOSED, LEFT_TRANSPOSED = ("a", "b"), ("a transposed", "b plain")
PRODUCTS = {
    "cooperative": (32, RIGHT_TRANSPOSED, lambda a, b, c: a @ b.T),
    # Some slots of three groups have no element.
    "of_three_groups": (96, RIGHT_TRANSPOSED, lambda a, b, c: a @ b.T),
    "sliced": (32, RIGHT_TRANSPOSED, lambda a, b, c: 1 + a[1:, 8:24] @ b[:, 8:24].T),
    "by_thread": (128, LEFT_TRANSPOSED, lambda a, b, c: c + a.T @ b),
    "by_simdgroups": (128, LEFT_TRANSPOSED, lambda a, b, c: c + a.T @ b),
}


@pytest.mark.parametrize("lane_map", ["apple10", "apple9", 0])
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_extents_bound_a_product_and_its_store(views, matrices, kernel, lane_map):
    threads, operands, model = PRODUCTS[kernel]
    (a, a_memory), (b, b_memory) = (matrices[name] for name in operands)
    out = matrices["c"][1].nan_to_num(5.0)
    expected = out.clone()
    result = model(a.float(), b.float(), out[:, :29])
    expected[: len(result), :29] = result
    options = {"threads": threads, "group_size": threads, "lane_map": lane_map}
    getattr(views, kernel)(a_memory, b_memory, out, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    counters = views.last_counters
    if kernel in ("cooperative", "of_three_groups"):
        operations = (counters.tensor_operations, counters.tensor_multiplications)
        assert (*operations, counters.threadgroup_barriers) == (1, 2 * 16 * 32 * 32, 0)
    if kernel == "cooperative":
        assert counters.loads["device"] == 40 * (13 + 29)


def test_get_and_set_are_checked(views, matrices):
    (a, a_memory), (b, b_memory) = matrices["a"], matrices["b"]
    out, sums = torch.zeros(13, 56), torch.zeros(96)
    views.by_get_and_set(a_memory, b_memory, out, sums, threads=96, group_size=96)
    expected = torch.ones(16, 32)  # elements outside of the views are 1 + 0
    expected[:13, :29] += a.float() @ b.float().T
    torch.testing.assert_close(out[:, :29], 2 * expected[:13, :29], atol=1e-5, rtol=0)
    torch.testing.assert_close(sums.sum(), expected.sum(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("scope", "negative"), [("by_thread", True), ("by_simdgroups", False)])
def test_zeros_that_pad_k_make_a_sum_of_zero_positive(views, scope, negative):
    """K is 40. SIMD groups process 32 at a time with padding. A single thread needs no padding."""
    a, b = torch.full((40, 56), -0.0).half(), torch.ones(40, 56).half()
    out = torch.full((13, 56), -0.0)
    getattr(views, scope)(a, b, out, threads=128, group_size=128)
    assert not out.any()
    assert torch.equal(out[:, :29].signbit(), torch.full((13, 29), negative))


def test_extents_larger_than_the_buffer_are_a_fault(views, matrices):
    arguments = matrices["a"][1][:12].clone(), matrices["b"][1], torch.zeros(13, 56)
    with pytest.raises(SimulatorFault, match=r"buffer\(0\), which has 1344") as caught:
        views.cooperative(*arguments, threads=32, group_size=32)
    line = (TENSORS + VIEWS[: VIEWS.index("op.run")]).count("\n") + 1
    assert (caught.value.kind, caught.value.line) == ("out_of_bounds", line)


def test_all_simd_groups_of_a_threadgroup_are_needed(views, matrices):
    arguments = matrices["a transposed"][1], matrices["b plain"][1], torch.zeros(13, 56)
    with pytest.raises(SimulatorFault, match=r"execution_simdgroups<4> in a threadgroup of 2"):
        views.by_simdgroups(*arguments, threads=64, group_size=64)
