"""`python -m torch_metal_attn info`: machine, versions, backend, compiler and cache."""

import argparse
import os
from contextlib import suppress
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine, mps, session
from torch_metal_attn.simulator import cache, toolchain
from torch_metal_attn.tuned import loading


def _cpu_tensors() -> str:
    try:
        return "the simulator" if session.active() else "the reference (simulator in simulate())"
    except ValueError as error:
        return f"error: {error}"


def _cache() -> str:
    try:
        directory: Path = cache.cache_dir()
    except cache.CacheError as error:
        return f"error: {error}"
    if directory.exists() and not directory.is_dir():
        return f"error: {directory} is not a directory"
    sizes = []
    for folder, _, names in os.walk(directory):  # os.walk ignores deleted folders
        for name in names:
            with suppress(FileNotFoundError):  # another process has evicted the file
                sizes.append(os.path.getsize(os.path.join(folder, name)))
    try:
        used, most = (size / 2**20 for size in (sum(sizes), cache.limit()))
    except cache.CacheError as error:
        return f"error: {error}"
    return f"{directory} ({used:.1f} of {most:.0f} MiB in {len(sizes)} files)"


def info(_: argparse.Namespace) -> bool:
    rows = machine.describe(torch.device("mps" if mps.usable() else "cpu")) | {
        "tiles": loading.loaded().words,
        "cpu tensors": _cpu_tensors(),
        "compiler": toolchain.describe(),
        "cache": _cache(),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    return True
