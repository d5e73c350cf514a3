"""Tiny models of each family with metal_attn, compared with their own eager attention.

The table has the largest difference of their float32 scores (last hidden states for encoders), and
how the masks reached the kernel, which runs on mps or in the simulator. Then follow
`enable(model, fuse_rope=True)` and what it saves, and continuous batching compared with `generate`.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.transformers import tiny_models as tiny
from tests.transformers.tiny_families import BATCHED, FAMILIES
from torch_metal_attn.integrations.transformers import (
    Routes,
    continuous_batching,
    enable,
    record_routes,
)
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.simulator import simulate


def differ(
    name: str, run: Callable[[Any], torch.Tensor], device: torch.device, where: Any = None
) -> tuple[float, Routes]:
    """The largest difference between results of `run(model)`, and the routes of its calls."""
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
    """Generate 16 tokens from left-padded prompts; infinity if a token differs."""
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
    """Whether the tokens are equal, how far their log-probabilities differ, and the calls."""
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


class Traffic(TorchDispatchMode):
    """Bytes of all tensors that ops read and write, and of q. Views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.query = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = (
            [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
            for given in ((args, kwargs), result)
        )
        if not func.is_view:
            self.moved += sum(one.nbytes for one in [*read, *written])
        if func is torch.ops.metal_attn.flash_fwd.default:
            self.query += args[0].nbytes
        return result


def fused(name: str, device: torch.device) -> tuple[float, list[float]]:
    """The difference with fused rotation, and how often a layer moves q without and with it.

    The difference of the two is exact; both include everything else that a layer does.
    """
    given = tiny.inputs(name)
    model = tiny.build(name)
    expected = tiny.answer(model, **given)
    moved = []
    for fuse_rope in (False, True):
        enable(model, fuse_rope=fuse_rope).to(device)
        with Traffic() as traffic:
            actual = tiny.answer(model, **given)
        moved.append(traffic.moved / traffic.query)
    return (actual - expected).abs().max().item(), moved


def device_memory(in_kernel: bool) -> tuple[float, float]:
    """KiB that an attention's kernels load and store, with q rotated inside or by `rope` before."""
    q, k = torch.randn(1, 8, 256, 64).half(), torch.randn(1, 2, 256, 64).half()
    cos, sin = torch.randn(2, 1, 256, 32).half()
    ops = torch.ops.metal_attn
    with simulate(count=True) as run:
        if in_kernel:
            rotated, _ = ops.rope(k, None, cos, sin)
            ops.flash_fwd(q, rotated, k, causal=True, q_rotary_cos=cos, q_rotary_sin=sin)
        else:
            ops.flash_fwd(*ops.rope(q, k, cos, sin), k, causal=True)
    counters = run.counters.values()
    loaded = sum(one.load_bytes["device"] for one in counters)
    return loaded / 1024, sum(one.store_bytes["device"] for one in counters) / 1024


def fused_families() -> list[str]:
    """The families whose rotation `enable` fuses."""
    taken = []
    for name in FAMILIES:
        with contextlib.suppress(NotImplementedError):
            enable(tiny.build(name), fuse_rope=True)
            taken.append(name)
    return taken


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
            sides = ["none"] if family.takes in ("pixels", "wave") else ["none", "left", "right"]
            caches = ["dynamic", "static"] if family.generates else []
            results = [
                *[forward(name, side, device) for side in sides],
                *[None] * (3 - len(sides)),
                *[generate(name, cache, device) for cache in caches],
                *[None] * (2 - len(caches)),
            ]
            print(f"| {name} | {' | '.join(map(cell, results))} |", flush=True)
        print(
            "\nWith `enable(model, fuse_rope=True)`, without padding: the difference, and the bytes"
        )
        print(
            "that all ops of a layer read and write, in sizes of q, without it and with it. Other"
        )
        print("families are refused.\n")
        print("| family | difference | without | with | spared |")
        print("| --- | --- | --- | --- | --- |")
        for name in fused_families():
            apart, (without, with_) = fused(name, device)
            numbers = f"{apart:.1e} | {without:.1f} | {with_:.1f} | {without - with_:.1f}"
            print(f"| {name} | {numbers} |", flush=True)
        print(
            "\nThe kernels' device memory, in the simulator, for 256 tokens, 8 heads of 64 and 2 KV"
        )
        print("heads in float16, where q has 256 KiB:\n")
        print("| | KiB loaded | KiB stored |")
        print("| --- | --- | --- |")
        for words, in_kernel in (("`rope` rotates q and k", False), ("fused: k alone", True)):
            loaded, stored = device_memory(in_kernel)
            print(f"| {words} | {loaded:.0f} | {stored:.0f} |")
        print(
            "\nContinuous batching (`generate_batch`) of 3 prompts of 5, 13 and 30 tokens in steps"
        )
        print(
            "of at most 16, 6 new tokens each, compared with `generate` of each prompt alone: the"
        )
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
