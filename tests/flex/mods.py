"""Runs the texts of many score_mods in one small kernel, so that all of them cost one compile."""

from dataclasses import dataclass

import torch

from torch_metal_attn.flex import text as text_of
from torch_metal_attn.flex.captured import Captured, loaded_dtype
from torch_metal_attn.flex.derivative import slope
from torch_metal_attn.flex.graph import Graph
from torch_metal_attn.flex.text import body
from torch_metal_attn.flex.tracing import trace
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import compile_shader

# shaders/flex.h needs those of a kernel.
_DEFINES = {"ELEMENT": "half", "HEAD_DIM_QK": 16, "HEAD_DIM_V": 16, "FLEX": 1}
_TEXT = """
[[kernel]] void run(
    const device half* q [[buffer(0)]], const device half* k [[buffer(1)]],
    const device half* v [[buffer(2)]], constant FlexParams& params [[buffer(3)]],
    FLEX_CAPTURES(FLASH_KERNEL_PARAMETER)
    const device float* scores [[buffer(16)]], const device int* queries [[buffer(17)]],
    const device int* keys [[buffer(18)]], device float* values [[buffer(19)]],
    device float* slopes [[buffer(20)]], uint i [[thread_position_in_grid]],
    uint count [[threads_per_grid]]) {
  FlashInputs inputs;
  FLASH_SET_INPUTS
  const float score = scores[i];
  const int query = queries[i];
  const int key = keys[i];
"""
_CALL = """
  {{
    bool impossible = false;
    const float value = value_{0}(score, inputs, params, 0, 1, query, key, impossible);
    values[{0} * count + i] = impossible ? NAN : value;
    slopes[{0} * count + i] = slope_{0}(score, inputs, params, 0, 1, query, key, impossible);
  }}
"""


@dataclass
class Values:
    """The results of each mod, (mods, positions)."""

    values: torch.Tensor
    slopes: torch.Tensor


def run(mods, scores, q_idx, kv_idx):
    """The results of the kernel; all mods see head 1 of batch 0."""
    graph, captured = Graph(), Captured()
    device = torch.device("cpu")
    results = [trace("score_mod", mod, graph, captured, device) for mod in mods]
    captured = [x.to(loaded_dtype(x)) for x in captured.tensors]
    ranks = [x.dim() for x in captured]
    names = text_of.TYPES | {torch.bool: "uchar"}
    declared = " ".join(
        f"X(const device {names[x.dtype]}*, capture_{i}, {4 + i})" for i, x in enumerate(captured)
    )
    # As FlexParams.
    params = torch.zeros(104, dtype=torch.int32)
    strides = [n for x in captured for n in x.stride()]
    sizes = [n for x in captured for n in x.shape]
    params[: 2 * len(strides)] = torch.tensor(strides, dtype=torch.int64).view(torch.int32)
    params[80 : 80 + len(sizes)] = torch.tensor(sizes, dtype=torch.int32)

    defines = "".join(f"#define {name} {value}\n" for name, value in _DEFINES.items())
    text = f"{defines}#define FLEX_CAPTURES(X) {declared}\n{shaders.flatten(_flex_header())}"
    calls = ""
    for i, result in enumerate(results):
        for name, node in (("value", result), ("slope", slope(graph, result))):
            function = f"METAL_FUNC float {name}_{i}(float score, FLEX_ARGUMENTS)"
            text += f"{function} {{ {body(node, ranks)} }}\n"
        calls += _CALL.format(i)
    text += f"{_TEXT}{calls}}}\n"
    kernel = compile_shader(text, check=True).run
    results = [torch.empty(len(mods), len(scores)) for _ in range(2)]
    nothing = torch.zeros(1, dtype=torch.float16)
    captures = [*captured, *([None] * (12 - len(captured)))]
    kernel(
        *(nothing, nothing, nothing, params, *captures),
        *(scores, q_idx.int(), kv_idx.int(), *results),
        threads=len(scores),
    )
    return Values(*results)


def _flex_header():
    return shaders._CHECKOUT / "flex.h"
