"""Make an image with torch's attention and with metal_attn, and compare pixels and memory.

    python docs/examples/image_pipeline.py --model some/stable-diffusion --prompt "a lighthouse"

Without --model the pipeline is tiny and random. The memory is computed from the shapes that
`explain` reports for the largest attention. It is not measured.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_dispatch import attention_backend
from tiny_pipeline import embedded, pipeline_of

from torch_metal_attn import explain
from torch_metal_attn.runtime.device import best_device

BACKENDS = ("native", "metal_attn")


@dataclass(frozen=True)
class Comparison:
    """difference: of pixels in 0..1. scores, statistics: bytes, for the largest attention."""

    difference: float
    scores: int
    statistics: int
    calls: int


def images(pipeline: Any, prompt: torch.Tensor, size: int, steps: int) -> dict[str, Any]:
    """The same image, made with each backend."""
    made = {}
    for backend in BACKENDS:
        print(f"{steps} steps with {backend}", flush=True)
        with attention_backend(backend):
            made[backend] = pipeline(
                prompt_embeds=prompt,
                negative_prompt_embeds=torch.zeros_like(prompt),
                height=size,
                width=size,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(0),
                output_type="np",
            ).images[0]
    return made


def largest(pipeline: Any, prompt: torch.Tensor, size: int) -> tuple[int, int, int]:
    """Bytes of scores and of log-sum-exps of the UNet's largest attention, and its attentions."""
    side = size // pipeline.vae_scale_factor
    latents = torch.zeros(1, 4, side, side, device=prompt.device, dtype=prompt.dtype)
    with attention_backend("metal_attn"):
        rows = explain(pipeline.unet, latents, 500, prompt).rows
    scores, statistics = 0, 0
    for (batch, heads, queries, _), (_, _, keys, _) in (row.shapes for row in rows):
        scores = max(scores, batch * heads * queries * keys * prompt.itemsize)
        statistics = max(statistics, batch * heads * queries * torch.float32.itemsize)
    return scores, statistics, len(rows)


def compare(pipeline: Any, text: str, size: int, steps: int, out: Path | None) -> Comparison:
    with best_device() as device:
        pipeline.to(device)
        prompt = embedded(pipeline, text, device)
        made = images(pipeline, prompt, size, steps)
        scores, statistics, calls = largest(pipeline, prompt, size)
    difference = float(np.abs(made["native"] - made["metal_attn"]).max())
    print(f"{calls} attentions a step on {device}, largest difference of pixels {difference:.1e}")
    print(f"largest attention: scores {scores / 1e6:.3f} MB, log-sum-exp {statistics / 1e6:.3f} MB")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, pixels in made.items():
            pipeline.numpy_to_pil(pixels)[0].save(out / f"{name}.png")
    return Comparison(difference, scores, statistics, calls)


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a Stable Diffusion 1 or 2 (default: a tiny random one)")
    parser.add_argument("--prompt", default="a lighthouse at night")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side (default: 32)")
    parser.add_argument("--steps", type=int, default=2, help="default: 2")
    parser.add_argument("--out", type=Path, help="a folder for both images")
    options = parser.parse_args(arguments)
    pipeline = pipeline_of(options.model)
    return compare(pipeline, options.prompt, options.size, options.steps, options.out)


if __name__ == "__main__":
    main()
