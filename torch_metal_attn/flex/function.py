"""The score_mod or mask_mod that is traced, and errors that show the user's line."""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.flex.captured import name_in
from torch_metal_attn.flex.graph import DTYPE_NAMES, DTYPES
from torch_metal_attn.flex.table import OPS

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class Traced:
    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.name = name
        self.function = function

    def check_dtype(self, what: str, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise NotImplementedError(
                f"{self.name}: {what} has dtype {dtype}; it must be {DTYPE_NAMES}{self.place()}"
            )

    def unsupported(self, op: str, why: str = "") -> NotImplementedError:
        known = f"; use these ops and what PyTorch composes of them: {', '.join(sorted(OPS))}"
        reason = f": {why}" if why else known
        return NotImplementedError(
            f"{self.name} uses {op}, which has no Metal text{reason}{self.place()}"
        )

    def control_flow(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} asks for the value of a score or a position, which has no value in a "
            f"trace: use torch.where in place of if, and tensor ops{self.place()}"
        )

    def name_of(self, tensor: Tensor) -> str:
        return name_in(self.function, tensor)

    def place(self) -> str:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith((_HERE, _TORCH)):
                line = linecache.getline(path, frame.f_lineno).strip()
                return f"\n  {path}:{frame.f_lineno}: {line}"
            frame = frame.f_back
        return ""
