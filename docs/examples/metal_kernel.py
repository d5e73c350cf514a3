"""A Metal kernel of your own: RMSNorm, run on the GPU or in the simulator, and tested there.

    python docs/examples/metal_kernel.py
    python docs/examples/metal_kernel.py --plant barrier    # what the simulator finds in a mistake

The test compares the kernel with float64. Then it plants a mistake that would often go unnoticed on
a GPU: the simulator checks every access, and names the line.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn import SimulatorFault, mps
from torch_metal_attn.simulator import compile_shader

THREADS = 128
SOURCE = """\
#include <metal_stdlib>
using namespace metal;

// One threadgroup per row: out = x * weight / sqrt(mean(x * x) + epsilon).
kernel void rms_norm(device float* out [[buffer(0)]],
                     const device float* x [[buffer(1)]],
                     const device float* weight [[buffer(2)]],
                     constant uint& columns [[buffer(3)]],
                     constant float& epsilon [[buffer(4)]],
                     uint row [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_position_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[4];
  float sum = 0.0f;
  for (uint column = thread_index; column < columns; column += 128) {
    float value = x[row * columns + column];
    sum += value * value;
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    partial[simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = partial[0] + partial[1] + partial[2] + partial[3];
  float scale = rsqrt(total / float(columns) + epsilon);
  for (uint column = thread_index; column < columns; column += 128) {
    out[row * columns + column] = x[row * columns + column] * scale * weight[column];
  }
}
"""
# A mistake: what it is in the text, and what it should be.
MISTAKES = {
    "barrier": ("  threadgroup_barrier(mem_flags::mem_threadgroup);\n", ""),
    "bounds": ("weight[column]", "weight[column + 1]"),
    "uninitialised": ("if (lane == 0)", "if (lane == 0 && simdgroup < 3)"),
}


def rms_norm(library: Any, x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x (rows, columns), contiguous float32; weight (columns,)."""
    out = torch.empty_like(x)
    rows, columns = x.shape
    library.rms_norm(
        out,
        x,
        weight,
        columns,
        epsilon,
        threads=rows * THREADS,
        group_size=THREADS,
        arg_casts={3: "int32"},
    )
    return out


def problem(rows: int, columns: int, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, columns, device=device), torch.randn(columns, device=device)


def error(library: Any, rows: int, columns: int, device: str) -> float:
    """The largest difference from float64."""
    x, weight = problem(rows, columns, device)
    wide = x.cpu().double()
    exact = wide * weight.cpu() / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return (rms_norm(library, x, weight).cpu() - exact).abs().max().item()


def main(arguments: list[str] | None = None) -> str:
    """Returns what the simulator found, "" without --plant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plant", choices=list(MISTAKES), help="a mistake for the simulator")
    options = parser.parse_args(arguments)
    if options.plant is None:
        device = "mps" if mps.usable() else "cpu"
        if device == "mps":
            library = torch.mps.compile_shader(SOURCE)
        else:
            library = compile_shader(SOURCE, check=True)
        for rows, columns in ((1, 1), (3, 128), (5, 333)):
            found = error(library, rows, columns, device)
            print(f"{rows} x {columns} on {device}: {found:.1e} from float64")
            assert found < 1e-5
        return ""
    right, wrong = MISTAKES[options.plant]
    broken = compile_shader(SOURCE.replace(right, wrong), check=True)
    try:
        rms_norm(broken, *problem(3, 128, "cpu"))
    except SimulatorFault as fault:
        print(f"the simulator found:\n{fault}")
        return str(fault)
    raise AssertionError(f"the simulator did not find the mistake {options.plant!r}")


if __name__ == "__main__":
    main()
