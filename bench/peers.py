"""MLX's and PyTorch's attention kernels, unmodified, in the simulator.

Their text comes from the headers in the macOS wheels on PyPI, which pip downloads once.
"""

import fcntl
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.simulator import Counters, cache, compile_shader

MLX = "mlx-metal==0.32.4"
TORCH = "torch==2.15.0"
# The headers that kernels include, in each wheel.
HEADERS = {
    MLX: ("mlx/include/mlx/backend/metal/kernels/",),
    TORCH: ("torch/include/ATen/native/mps/kernels/", "torch/include/c10/metal/"),
}
DOWNLOAD_SECONDS = 900

METAL_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
TORCH_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Both kernels have four SIMD groups of 8 queries each.
BLOCK_Q = 32

STEEL = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"
using Kernel = decltype(attention<ELEMENT, 32, BLOCK_K, HEAD_DIM, HEAD_DIM, 4, 1, MASK, float>);
template [[host_name("steel")]] [[kernel]] Kernel
attention<ELEMENT, 32, BLOCK_K, HEAD_DIM, HEAD_DIM, 4, 1, MASK, float>;
"""
PREFILL = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
#include <c10/metal/utils.h>
#include <ATen/native/mps/kernels/PrefillAttention.h>
"""


class PeerUnavailable(RuntimeError):
    """pip cannot get the wheel."""


def include_dir(requirement: str) -> Path:
    """The include directory of a wheel, downloaded once into the user's cache.

    Raises PeerUnavailable if pip cannot get it.
    """
    folder = cache.default_dir() / "peers" / requirement.replace("==", "-")
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _download(requirement, folder)
            done.touch()
    return folder / requirement.split("==")[0].split("-")[0] / "include"


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
    command += ["--python-version", "3.11", "--implementation", "cp"]
    command += ["--abi", "cp311", "--abi", "none", "--disable-pip-version-check"]
    command += ["--dest", str(folder), requirement]
    try:
        # What is only read is under no constraint of what may be installed here.
        pip = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            env=os.environ | {"PIP_CONSTRAINT": os.devnull},
        )
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"pip took over {DOWNLOAD_SECONDS} s for {requirement}") from None
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = pip.stderr.strip().split("\n")[-1]
        raise PeerUnavailable(f"pip cannot get {requirement} for macOS: {reason}")
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in archive.namelist():
            if member.startswith(HEADERS[requirement]) and member.endswith(".h"):
                archive.extract(member, folder)
    for wheel in wheels:
        wheel.unlink()


def params(*fields: tuple[str, Any]) -> Tensor:
    """A parameter struct as the kernel reads it, from struct formats and their values."""
    data = b"".join(struct.pack(form, *values) for form, values in fields)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def outer_strides(*tensors: Tensor) -> list[int]:
    """Batch, head and row strides, one tensor after the other."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def block_k(head_dim: int) -> int:
    """Keys per block, as both MLX and PyTorch choose it."""
    return 32 if head_dim < 128 else 16


def mlx_steel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    check: bool = False,
    count: bool = False,
) -> tuple[Tensor, Counters]:
    """MLX's full attention: q (B, H, Lq, D), k and v (B, Hkv, Lk, D), bottom-right causal.

    mask: (B, H, Lq, Lk), bool or of q's dtype. Returns out and what the kernel did.
    """
    batch, heads, q_length, head_dim = q.shape
    kv_length, step = k.shape[2], block_k(head_dim)
    is_bool = mask is not None and mask.dtype == torch.bool
    library = compile_shader(
        STEEL,
        include_dirs=[include_dir(MLX)],
        defines={
            "ELEMENT": METAL_TYPES[q.dtype],
            "HEAD_DIM": head_dim,
            "BLOCK_K": step,
            "MASK": "bool" if is_bool else METAL_TYPES[q.dtype],
        },
        constants={
            "align_Q": q_length % BLOCK_Q == 0,
            "align_K": kv_length % step == 0,
            "has_mask": mask is not None,
            "do_causal": causal,
            302: False,
            303: False,
        },
        check=check,
        count=count,
    )
    out = torch.full_like(q, torch.nan)
    blocks = -(-q_length // BLOCK_Q), -(-kv_length // step)
    full_blocks = q_length // BLOCK_Q, kv_length // step
    remainders = q_length % BLOCK_Q, kv_length % step
    shape = (batch, heads, head_dim, q_length, kv_length, heads // k.shape[1])
    arguments = [q, k, v, out]
    arguments.append(
        params(
            ("6if", (*shape, head_dim**-0.5)),
            ("7i", (*blocks, *full_blocks, *remainders, kv_length - q_length)),
            ("12q", outer_strides(q, k, v, out)),
        )
    )
    if mask is not None:
        arguments += [params(("3q", outer_strides(mask))), mask]
    library.steel(*arguments, threads=(blocks[0] * 32, heads * 4, batch), group_size=(32, 4, 1))
    assert library.last_counters is not None
    return out, library.last_counters


def torch_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    check: bool = False,
    count: bool = False,
) -> tuple[Tensor, Counters]:
    """PyTorch 2.15's prefill attention: as above, but top-left causal."""
    batch, heads, q_length, head_dim = q.shape
    library = compile_shader(PREFILL, include_dirs=[include_dir(TORCH)], check=check, count=count)
    out = torch.full_like(q, torch.nan)
    is_bool = mask is not None and mask.dtype == torch.bool
    name = (
        f"prefill_attention_{TORCH_TYPES[q.dtype]}_bq{BLOCK_Q}_bk{block_k(head_dim)}_bd{head_dim}"
        f"_wm4_wn1_hm{int(mask is not None)}_dc{int(causal)}"
        f"_mask{'bool_' if is_bool else TORCH_TYPES[q.dtype]}"
    )
    shape = (batch, heads, head_dim, q_length, k.shape[2], heads // k.shape[1])
    attention_params = params(
        ("6i2f", (*shape, head_dim**-0.5, 1.0)), ("12q", outer_strides(q, k, v, out))
    )
    any_mask = torch.zeros(1, 1, 1, 1, dtype=q.dtype) if mask is None else mask
    getattr(library, name)(
        *(q, k, v, out, attention_params, params(("4q", any_mask.stride())), any_mask),
        threads=(-(-q_length // BLOCK_Q) * 128, heads, batch),
        group_size=(128, 1, 1),
    )
    assert library.last_counters is not None
    return out, library.last_counters
