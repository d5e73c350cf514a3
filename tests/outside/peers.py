"""Runs MLX's and PyTorch's unmodified attention kernels in the simulator.

Their text, and that of ggml's kernels, is in macOS wheels on PyPI, which pip downloads once.
"""

import fcntl
import os
import struct
import subprocess
import sys
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.simulator import Counters, cache, compile_shader
from torch_metal_attn.simulator.library import ShaderLibrary

MLX = "mlx-metal==0.32.4"
TORCH = "torch==2.15.0"
GGML = "pywhispercpp==1.5.1"  # bindings of whisper.cpp, with ggml 0.13.1
# {wheel: the folders of the headers that kernels include, or the library with the kernels' text}
HEADERS = {
    MLX: ("mlx/include/mlx/backend/metal/kernels/",),
    TORCH: ("torch/include/ATen/native/mps/kernels/", "torch/include/c10/metal/"),
    GGML: ("pywhispercpp/.dylibs/libggml-metal.",),
}

METAL_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}

MLX_ATTENTION = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_{kernel}.h"
template [[host_name("attend")]] [[kernel]] decltype({instance}) {instance};
"""
SDPA_VECTOR = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/sdpa_vector.h"
template [[host_name("one")]] [[kernel]] decltype(sdpa_vector<ELEMENT, HEAD_DIM>)
sdpa_vector<ELEMENT, HEAD_DIM>;
template [[host_name("first")]] [[kernel]] decltype(sdpa_vector_2pass_1<ELEMENT, HEAD_DIM>)
sdpa_vector_2pass_1<ELEMENT, HEAD_DIM>;
template [[host_name("second")]] [[kernel]] decltype(sdpa_vector_2pass_2<ELEMENT, HEAD_DIM>)
sdpa_vector_2pass_2<ELEMENT, HEAD_DIM>;
"""
ATEN = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
#include <c10/metal/utils.h>
"""
DECODE = f"{ATEN}#include <ATen/native/mps/kernels/DecodeAttention.h>\n"


class PeerUnavailable(RuntimeError):
    """pip cannot get the wheel."""


def include_dir(requirement: str) -> Path:
    return _wheel(requirement) / requirement.split("==")[0].split("-")[0] / "include"


@lru_cache
def ggml_source() -> str:
    [library] = _wheel(GGML).glob(f"{HEADERS[GGML][0]}*")
    text = library.read_bytes().partition(b"#define GGML_COMMON_DECL_METAL")
    return b"".join(text[1:]).partition(b"\0")[0].decode()


def _wheel(requirement: str) -> Path:
    folder = cache.default_dir() / "peers" / requirement.replace("==", "-")
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _download(requirement, folder)
            done.touch()
    return folder


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
    command += ["--python-version", "3.11", "--implementation", "cp"]
    command += ["--abi", "cp311", "--abi", "none", "--disable-pip-version-check"]
    command += ["--dest", str(folder), requirement]
    try:
        # The wheels are only read, so constraints on installed packages do not apply.
        settings = os.environ | {"PIP_CONSTRAINT": os.devnull}
        pip = subprocess.run(command, capture_output=True, text=True, timeout=900, env=settings)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"pip took over 900 s for {requirement}") from None
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = pip.stderr.strip().split("\n")[-1]
        raise PeerUnavailable(f"pip cannot get {requirement} for macOS: {reason}")
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in archive.namelist():
            if member.startswith(HEADERS[requirement]) and member.endswith((".h", ".dylib")):
                archive.extract(member, folder)
    for wheel in wheels:
        wheel.unlink()


def params(*fields: tuple[str, Any]) -> Tensor:
    """A parameter struct as the kernel reads it, from struct formats and their values."""
    data = b"".join(struct.pack(form, *values) for form, values in fields)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def outer_strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _attend(
    library: ShaderLibrary,
    kernel: str,
    operands: list[Tensor],
    parameters: list[Tensor],
    block_q: int,
    group_size: tuple[int, int],
    lane_map: str | int | None,
) -> tuple[Tensor, Counters]:
    out = operands[3]
    batch, heads, q_length, _ = out.shape
    getattr(library, kernel)(
        *operands,
        *parameters,
        threads=(-(-q_length // block_q) * group_size[0], heads * group_size[1], batch),
        group_size=(*group_size, 1),
        lane_map=lane_map,
    )
    assert library.last_counters is not None
    return out, library.last_counters


def _mlx(
    kernel: str,
    block_q: int,
    block_k: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    lane_map: str | int | None = None,
    **options: Any,
) -> tuple[Tensor, Counters]:
    """MLX's attention of q (B, H, Lq, D), k and v (B, Hkv, Lk, D); bottom-right causal."""
    batch, heads, q_length, head_dim = q.shape
    kv_length, element = k.shape[2], METAL_TYPES[q.dtype]
    mask_type = "bool" if mask is not None and mask.dtype == torch.bool else element
    shape = f"{block_q}, {block_k}, {head_dim}, {head_dim}, 4, 1"
    instance = f"{kernel}<{element}, {shape}, {mask_type}, float>"
    constants: dict[int | str, bool | int | float] = {
        "align_Q": q_length % block_q == 0,
        "align_K": kv_length % block_k == 0,
        "has_mask": mask is not None,
        "do_causal": causal,
        **dict.fromkeys((302, 303), False),
    }
    text = MLX_ATTENTION.format(kernel=kernel, instance=instance)
    folders = [include_dir(MLX)]
    library = compile_shader(text, include_dirs=folders, constants=constants, **options)
    operands = [q, k, v, torch.full_like(q, torch.nan)]
    sizes = (batch, heads, head_dim, q_length, kv_length, heads // k.shape[1], head_dim**-0.5)
    parameters = [
        params(
            ("6if", sizes),
            ("2i", (-(-q_length // block_q), -(-kv_length // block_k))),
            ("2i", (q_length // block_q, kv_length // block_k)),
            ("3i", (q_length % block_q, kv_length % block_k, kv_length - q_length)),
            ("12q", outer_strides(*operands)),
        )
    ]
    if mask is not None:
        parameters += [params(("3q", outer_strides(mask))), mask]
    return _attend(library, "attend", operands, parameters, block_q, (32, 4), lane_map)


def _torch(
    kernel: str,
    header: str,
    block_q: int,
    block_k: int,
    group_size: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    lane_map: str | int | None = None,
    **options: Any,
) -> tuple[Tensor, Counters]:
    """PyTorch 2.15's attention, with the arguments of `_mlx`, but top-left causal."""
    batch, heads, q_length, head_dim = q.shape
    element = str(q.dtype).removeprefix("torch.")
    mask_type = "bool_" if mask is not None and mask.dtype == torch.bool else element
    name = (
        f"{kernel}_{element}_bq{block_q}_bk{block_k}_bd{head_dim}_wm4_wn1"
        f"_hm{int(mask is not None)}_dc{int(causal)}_mask{mask_type}"
    )
    text = ATEN + f"#include <ATen/native/mps/kernels/{header}>\n"
    library = compile_shader(text, include_dirs=[include_dir(TORCH)], **options)
    operands = [q, k, v, torch.full_like(q, torch.nan)]
    shape = (batch, heads, head_dim, q_length, k.shape[2], heads // k.shape[1])
    bound_mask = torch.zeros(1, 1, 1, 1, dtype=q.dtype) if mask is None else mask
    parameters = [
        params(("6i2f", (*shape, head_dim**-0.5, 1.0)), ("12q", outer_strides(*operands))),
        params(("4q", bound_mask.stride())),
        bound_mask,
    ]
    return _attend(library, name, operands, parameters, block_q, group_size, lane_map)


def block_k(q: Tensor) -> int:
    return 32 if q.shape[3] < 128 else 16


def mlx_steel_attention(q: Tensor, *kv: Tensor, **options: Any) -> tuple[Tensor, Counters]:
    return _mlx("attention", 32, block_k(q), q, *kv, **options)


def mlx_nax_attention(
    *qkv: Tensor, lane_map: str | int = "apple10", **options: Any
) -> tuple[Tensor, Counters]:
    return _mlx("attention_nax", 64, 32, *qkv, lane_map=lane_map, language="4.0", **options)


def torch_prefill_attention(q: Tensor, *kv: Tensor, **options: Any) -> tuple[Tensor, Counters]:
    sizes = (32, block_k(q), (128, 1))
    return _torch("prefill_attention", "PrefillAttention.h", *sizes, q, *kv, **options)


def torch_mpp_attention(
    *qkv: Tensor, table: str = "apple10", lane_map: str | int | None = None, **options: Any
) -> tuple[Tensor, Counters]:
    """table: the lane map that the kernel is written for, and by default runs under."""
    kernel = f"prefill_attention_mpp_{table.replace('apple', 'a')}"
    options |= {"language": "4.0", "lane_map": table if lane_map is None else lane_map}
    return _torch(kernel, "MppAttention.h", 64, 32, (32, 4), *qkv, **options)
