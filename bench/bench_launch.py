"""The host time of a call, from Python to the end of encoding, next to torch's own attention.

The ops run as on mps, but with a fake of torch's MPS functions (tests/runtime/fake_mps); compiling
it takes some minutes. Rounds alternate, and the best one counts.
"""

import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import torch_metal_attn as metal_attn
from torch_metal_attn.runtime import shaders

ROOT = Path(__file__).parent.parent
ROUNDS = 60
CALLS = 200  # per round
MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad mode": torch.enable_grad,
}
Call = Callable[[], Any]


def quiet_library() -> Path:
    """The library of the ops and the fake, built again if a source has changed."""
    digest = hashlib.sha256(torch.__version__.encode())
    for pattern in ("csrc/**/*", "tests/runtime/fake_mps/*", "shaders/params/*"):
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix in (".cpp", ".h", ".py"):
                digest.update(path.read_bytes())
    build = importlib.import_module("tests.runtime.fake_mps.build")  # untyped, so not for mypy
    library: Path = build.build_quiet(ROOT / "build/quiet_mps" / digest.hexdigest()[:16])
    return library


def best(calls: dict[str, Call]) -> dict[str, float]:
    """Microseconds of each call: the mean of its best round."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name] = min(times[name], (time.perf_counter() - started) / CALLS * 1e6)
    return times


def calls() -> tuple[dict[str, Call], dict[str, Call]]:
    """Calls in layout (B, H, L, D), and calls in (B, L, H, D). torch's own call comes first."""
    q = torch.randn(1, 1, 1, 8)
    k_cache, v_cache = torch.randn(1, 16, 1, 8), torch.randn(1, 16, 1, 8)
    length = torch.tensor([5], dtype=torch.int32)
    ops = torch.ops.metal_attn

    def transposed() -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2)
        )
        return out.transpose(1, 2)

    bhld: dict[str, Call] = {
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "torch.ops.metal_attn.flash_fwd": lambda: ops.flash_fwd(q, q, q),
        "torch.ops.metal_attn.flash_decode": lambda: ops.flash_decode(q, q, q),
        "scaled_dot_product_attention": lambda: metal_attn.scaled_dot_product_attention(q, q, q),
    }
    blhd: dict[str, Call] = {
        "F.scaled_dot_product_attention between transposes": transposed,
        "flash_attn_func": lambda: metal_attn.flash_attn_func(q, q, q),
        "flash_attn_with_kvcache": lambda: metal_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=length
        ),
        "flash_attn_with_kvcache, new keys": lambda: metal_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, q, q, cache_seqlens=length
        ),
    }
    return bhld, blhd


def main() -> None:
    """Print a table for each layout: microseconds, and the ratio to torch's call."""
    if sys.platform != "linux":
        print("This needs Linux, where a fake replaces torch's MPS functions.")
        return
    torch.set_num_threads(1)
    os.environ["TORCH_METAL_ATTN_BACKEND"] = "mps"  # the probe of mps would fail with the fake
    library = quiet_library()
    warnings.simplefilter("ignore")  # torch warns that CPU kernels are replaced
    torch.ops.load_library(library)
    shaders.serve(ctypes.CDLL(str(library)))
    commit = subprocess.check_output(
        ["git", "-C", ROOT, "log", "-1", "--format=%h of %cs"], text=True
    )
    where = f"torch {torch.__version__}, one thread, commit {commit.strip()}"
    print(f"Microseconds of host time per call, {where}.")
    for layout, group in zip(("(B, H, L, D)", "(B, L, H, D)"), calls(), strict=True):
        columns = {}
        for mode, context in MODES.items():
            with context():
                columns[mode] = best(group)
        print(f"\n| {layout} | " + " | ".join(f"{mode} | ratio" for mode in MODES) + " |")
        print("| --- |" + " ---: |" * (2 * len(MODES)))
        reference = next(iter(group))
        for name in group:
            cells = [f"{t[name]:.1f} | {t[name] / t[reference]:.2f}" for t in columns.values()]
            print(f"| `{name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
