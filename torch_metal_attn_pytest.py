"""The pytest plugin: Metal kernels in tests run on the Apple GPU, or in the checked simulator.

It is outside of the package, which imports torch, because pytest imports it in every run.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "simulate_metal",
        "without a usable Apple GPU, torch.mps.compile_shader compiles for the checked simulator "
        "of torch_metal_attn, in the whole run",
        type="bool",
        default=False,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Runs before conftest.py, because modules may compile kernels when they are imported."""
    if not early_config.getini("simulate_metal"):
        return
    from torch_metal_attn import mps
    from torch_metal_attn.simulator import replacing_compile_shader

    if not mps.usable():
        run = ExitStack()
        run.enter_context(replacing_compile_shader(process_wide=True))
        early_config.add_cleanup(run.close)


@pytest.fixture(scope="session")
def shader_device() -> torch.device:
    """The device of tensors for `compile_shader`'s kernels: mps if it is usable, else cpu."""
    import torch

    from torch_metal_attn import mps

    return torch.device("mps" if mps.usable() else "cpu")


@pytest.fixture(scope="session")
def compile_shader(shader_device: torch.device) -> Callable[[str], Any]:
    """`torch.mps.compile_shader`, or its replacement by the checked simulator.

    The replacement also refuses sources that clang accepts and Apple's compiler rejects, and
    attributes that torch's libraries and kernels do not have.
    """
    import torch

    from torch_metal_attn.simulator import lint
    from torch_metal_attn.simulator.library import compile_for_torch

    def compile_checked(source: str) -> Any:
        __tracebackhide__ = True
        library = compile_for_torch(source, check=True)
        lint.refuse(source)
        return library

    return torch.mps.compile_shader if shader_device.type == "mps" else compile_checked
