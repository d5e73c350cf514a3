"""Batches of matrix products in plain builds: the pass over the IR, and results."""

import re

import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import compile_shader
from torch_metal_attn.simulator.llvm.batches import MOST, batch_products


def products(calls, between="", call="call double"):
    """IR of a function with products (result, a, b, c). `between` is before the last product."""
    lines = [
        f"  %{result} = tail {call} @__msl_matrix(ptr noundef nonnull @f, "
        f"double noundef {a}, double noundef {b}, double noundef {c}) #8"
        for result, a, b, c in calls
    ]
    body = "\n".join([*lines[:-1], between, lines[-1]] if between else lines)
    return f"define void @k(double %a, double %b) #0 {{\nentry:\n{body}\n  ret void\n}}\n"


TWO = (("x", "%a", "%b", "0.0"), ("y", "%a", "%b", "0.0"))
CHAIN = [(f"x{i}", "%a", "%b", f"%x{i - 1}" if i else "0.0") for i in range(MOST + 2)]


@each_case(
    "calls, between, batches",
    [
        ((*TWO, ("z", "%a", "%b", "%x")), "", [[-1, -1, 0]]),
        ((TWO[0], ("y", "%x", "%b", "0.0")), "", [[-1], [-1]]),  # a factor is a result
        # A line that only computes with results is delayed. A store or a meeting ends the batch.
        (TWO, "  %n = fneg double %x", [[-1, -1]]),
        (TWO, "  store double %a, ptr %p, align 8", [[-1, -1]]),
        (TWO, "  call void @__msl_simdgroup_barrier(i32 2)", [[-1], [-1]]),
        (TWO, "  store double %x, ptr %p, align 8", [[-1], [-1]]),
        (TWO, "  %n = call double @other(double %a)", [[-1], [-1]]),
        (TWO, "  br label %next\nnext:", [[-1], [-1]]),
        (CHAIN, "", [[*range(-1, MOST - 1)], [-1, 0]]),  # long batches are cut
    ],
)
def test_a_batch_ends_where_a_result_is_needed(calls, between, batches):
    out = batch_products(products(calls, between))
    tables = re.findall(r"@msl\.products\.\d+ = private constant \[.*", out)
    assert [[int(n) for n in re.findall(r"ptr @f, i32 (-?\d+)", t)] for t in tables] == batches
    assert batch_products(products(calls, between, "call noundef double")) == out
    if "fneg" in between:
        assert out.index("%n = fneg") > out.index("%x = load")


@each_case("label", ["", "entry:", '"f(int).exit":'])
def test_blocks_keep_their_name_or_get_one(label):
    """LLVM numbers a block without a name."""
    call = "call double @__msl_matrix(ptr @f, double %0, double %0, double 0.0)"
    body = [label, f"  %r = {call}"] if label else [f"  %2 = {call}"]
    text = "\n".join(["define void @k(double %0) {", *body, "  br label %5", "5:", "}"])
    out = batch_products(text)
    assert re.findall("^\\S*:$", out, re.M) == [label or "msl.v1:", "msl.v5:"]
    assert "br label %msl.v5" in out


KERNEL = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

kernel void k(device float* out [[buffer(0)]], const device half* x [[buffer(1)]],
              constant uint& n [[buffer(2)]]) {
  simdgroup_half8x8 a, b, c;
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x + 64, 8);
  simdgroup_float8x8 sums[20], total(0.0f);
  #pragma unroll
  for (int i = 0; i < 20; ++i) {
    simdgroup_multiply(sums[i], a, b);
    simdgroup_multiply_accumulate(sums[i], b, a, sums[i]);
  }
  sums[0].thread_elements() *= 2.0f;
  simdgroup_multiply_accumulate(c, a, b, a);     // half accumulators
  simdgroup_multiply_accumulate(c, c, b, c);     // a factor that is a result
  if (n > 1) simdgroup_multiply_accumulate(total, sums[0], c, total);
  for (uint i = 0; i < n; ++i) simdgroup_multiply_accumulate(total, a, a, total);
  #pragma unroll
  for (int i = 0; i < 20; ++i) {
    simdgroup_store(sums[i], out + 64 * i, 8);
    total.thread_elements() += sums[i].thread_elements().yx;
  }
  simdgroup_store(total, out + 64 * 20, 8);
}
"""


def test_bits_and_counts_equal_those_of_single_products():
    x = torch.randn(128, generator=torch.manual_seed(0)).half()
    results, counts = [], []
    for check in (False, True):
        library = compile_shader(KERNEL, check=check)
        out = torch.full((64 * 21,), torch.nan)
        library.k(out, x, 3, threads=32, group_size=32, arg_casts="int32")
        results.append(out)
        counts.append(library.last_counters.matrix_operations)
    assert torch.equal(*results)
    assert counts == [46, 46]
    a, b = x.double().view(2, 8, 8)
    expected = a @ b + b @ a
    torch.testing.assert_close(results[0][64:128].view(8, 8).double(), expected, atol=1e-5, rtol=0)
