"""Tiny models of each family with metal_attn beside their own eager attention.

The largest difference of their float32 scores (last hidden states of encoders), and how the masks
came to the kernel, which runs on mps or in the simulator. Then continuous batching beside
`generate`.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench import tiny_models as tiny
from bench.tiny_families import BATCHED, FAMILIES
from torch_metal_attn.device import best_device
from torch_metal_attn.integrations.transformers import (
    Routes,
    continuous_batching,
    enable,
    record_routes,
)


def differ(
    name: str, run: Callable[[Any], torch.Tensor], device: torch.device, where: Any = None
) -> tuple[float, Routes]:
    """The largest difference of what `run(model)` gives, and the routes of the model's calls."""
    model = tiny.build(name)
    expected = run(model)
    enable(model).to(device)
    with record_routes() as routes:
        actual = run(model)
    apart = (actual - expected).abs()
    return (apart if where is None else apart[where]).max().item(), routes


def forward(name: str, side: str, device: torch.device) -> tuple[float, Routes]:
    given = tiny.inputs(name, side)
    return differ(name, lambda model: tiny.answer(model, **given), device, tiny.present(given))


def generate(name: str, cache: str, device: torch.device) -> tuple[float, Routes]:
    """Left-padded prompts, 16 tokens; infinity if a token differs."""
    given = tiny.inputs(name, "left")
    found: list[Any] = []
    options = {"cache_implementation": cache, "disable_compile": True}

    def run(model: Any) -> torch.Tensor:
        sequences, scores = tiny.generate(model, given, **options)
        found.append(sequences.tolist())
        return scores

    apart, routes = differ(name, run, device)
    return apart if found[0] == found[1] else float("inf"), routes


def batch(name: str, device: torch.device) -> tuple[bool, float, int]:
    """Whether the tokens are equal, how far their log-probabilities are apart, and the calls."""
    model = tiny.build(name)
    expected = tiny.generate_each(model, tiny.prompts())
    model.to(device)
    with continuous_batching(model), record_routes() as routes:
        actual = tiny.generate_batch(model, tiny.prompts())
    apart = [
        (found - given).abs().max().item()
        for (_, found), (_, given) in zip(actual, expected, strict=True)
    ]
    same = [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    return same, max(apart), sum(routes.packed.values())


def cell(result: tuple[float, Routes] | None) -> str:
    if result is None:
        return "-"
    apart, routes = result
    forms = [form for form in ("plain", "compact", "dense") if getattr(routes, form)]
    return f"{apart:.1e} {'+'.join(forms)}"


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with best_device() as device:
        backend = "mps" if device.type == "mps" else "the simulator"
        print(f"# transformers {transformers.__version__} (`make bench`)\n")
        print(
            "Largest difference from eager attention of tiny random models with enlarged weights,"
        )
        print(f"float32, the kernel running in {backend}; and the form of the masks: plain (none),")
        print("compact (numbers and lengths), dense. Both caches with left padding.\n")
        print("| family | prefill | left padding | right padding | dynamic cache | static cache |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, family in FAMILIES.items():
            sides = ["none", "left", "right"] if family.takes != "pixels" else ["none"]
            caches = ["dynamic", "static"] if family.generates else []
            results = [
                *[forward(name, side, device) for side in sides],
                *[None] * (3 - len(sides)),
                *[generate(name, cache, device) for cache in caches],
                *[None] * (2 - len(caches)),
            ]
            print(f"| {name} | {' | '.join(map(cell, results))} |", flush=True)
        print(
            "\nContinuous batching (`generate_batch`) of 3 prompts of 5, 13 and 30 tokens in steps"
        )
        print("of at most 16, 6 new tokens each, beside `generate` of each prompt by itself: the")
        print(
            "largest difference of the tokens' log-probabilities, and the launches of 2 layers.\n"
        )
        print("| family | tokens equal | difference | launches |")
        print("| --- | --- | --- | --- |")
        for name in BATCHED:
            same, apart, calls = batch(name, device)
            print(f"| {name} | {'yes' if same else 'no'} | {apart:.1e} | {calls} |", flush=True)


if __name__ == "__main__":
    main()
