"""`python -m torch_metal_attn explain`: shows which kernels would run for a shape. Runs none."""

import argparse

import torch

from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tools.bench.shapes import DTYPES, Shape, chosen
from torch_metal_attn.tools.explain import Explanation, explain


def explain_shapes(options: argparse.Namespace) -> bool:
    """Print the kernels of each shape. False if one is refused. Raises BadShape."""
    refused = 0
    with best_device() as device:
        for shape in chosen(options) or [Shape()]:
            explanation = explained(shape, device)
            refused += explanation.refusal is not None
            print(f"{shape}\n{explanation}\n")
    return refused == 0


def explained(shape: Shape, device: torch.device) -> Explanation:
    # Each tensor is one expanded row, so that large shapes take no memory. If k and v shared a
    # row, they would be a cache with its values in its keys, which has another kernel.
    q, k, v = (
        torch.empty(size[-1], dtype=DTYPES[shape.dtype], device=device).expand(size)
        for size in shape.sizes
    )
    if shape.kind == "decode":
        return explain(torch.ops.metal_attn.flash_decode, q, k, v, **shape.options)
    return explain(q, k, v, backward=shape.kind == "training", **shape.options)
