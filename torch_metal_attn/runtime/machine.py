"""A description of the machine for reports, without paths or data about its user."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from torch_metal_attn.runtime import macos, mps, tensor_tiles
from torch_metal_attn.runtime.device import memory_of
from torch_metal_attn.runtime.version import VERSION

_PACKAGE = str(Path(__file__).parents[1])


def describe(device: torch.device) -> dict[str, str]:
    """Chip, system, memory and versions, by name, for a report about `device`."""
    on_mps = device.type == "mps"
    rows = {"chip": _chip(), "system": system()}
    if on_mps and hasattr(torch.backends.mps, "get_core_count"):
        rows["GPU cores"] = str(torch.backends.mps.get_core_count())
    memory = memory_of(device)
    if memory:
        rows["GPU memory" if on_mps else "memory"] = f"{memory / 2**30:.0f} GiB"
    return rows | {
        "backend": "mps" if on_mps else f"the simulator, on the CPU ({mps.problem()})",
        "tensor tiles": tensor_tiles.description(),
        "torch_metal_attn": VERSION,
        "torch": torch.__version__,
        "transformers": _transformers(),
        "python": platform.python_version(),
    }


def without_paths(text: str) -> str:
    """An error's text without the paths of the package and of the user's files."""
    text = text.replace(_PACKAGE, "torch_metal_attn")
    home = os.path.expanduser("~")  # "~" for a user without a home
    return text if home == "/" else text.replace(home, "~")


def _transformers() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "not installed"


def system() -> str:
    mac = macos.version()
    name = f"macOS {mac}" if mac else platform.system()
    return f"{name} {platform.machine()}"


def _chip() -> str:
    on_macos = platform.system() == "Darwin"
    return (on_macos and macos.sysctl("machdep.cpu.brand_string")) or platform.machine()
