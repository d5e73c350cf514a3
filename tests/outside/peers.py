"""MLX's and PyTorch's attention kernels, unmodified, in the simulator.

Their text, and ggml's, comes from the macOS wheels on PyPI, which pip downloads once.
"""

import fcntl
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.simulator import Counters, cache, compile_shader

MLX = "mlx-metal==0.32.4"
TORCH = "torch==2.15.0"
GGML = "pywhispercpp==1.5.1"  # bindings of whisper.cpp, with ggml 0.13.1
# The headers that kernels include, in each wheel, or the library that has the text of kernels.
HEADERS = {
    MLX: ("mlx/include/mlx/backend/metal/kernels/",),
    TORCH: ("torch/include/ATen/native/mps/kernels/", "torch/include/c10/metal/"),
    GGML: ("pywhispercpp/.dylibs/libggml-metal.",),
}
DOWNLOAD_SECONDS = 900

METAL_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
TORCH_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Both kernels have four SIMD groups of 8 queries each.
BLOCK_Q = 32

STEEL = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"
using Kernel = decltype(
    attention<ELEMENT, 32, BLOCK_K, HEAD_DIM, HEAD_DIM, 4, 1, MASK, float>);
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
DECODE = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
#include <c10/metal/utils.h>
#include <ATen/native/mps/kernels/DecodeAttention.h>
"""


class PeerUnavailable(RuntimeError):
    """pip cannot get the wheel."""


def include_dir(requirement: str) -> Path:
    """The include directory of a wheel; raises PeerUnavailable if pip cannot get it."""
    return _wheel(requirement) / requirement.split("==")[0].split("-")[0] / "include"


@lru_cache
def ggml_source() -> str:
    """ggml's kernels, as its Metal back end hands them to Apple's compiler; raises likewise."""
    [library] = _wheel(GGML).glob(f"{HEADERS[GGML][0]}*")
    text = library.read_bytes().partition(b"#define GGML_COMMON_DECL_METAL")
    return b"".join(text[1:]).partition(b"\0")[0].decode()


def _wheel(requirement: str) -> Path:
    """The folder with a wheel's files, downloaded once into the user's cache."""
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
            if member.startswith(HEADERS[requirement]) and member.endswith((".h", ".dylib")):
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


def steel_kernel(
    dtype: torch.dtype,
    head_dim: int,
    *,
    causal: bool = False,
    mask: torch.dtype | None = None,
    aligned: tuple[bool, bool] = (True, True),
) -> dict[str, Any]:
    """MLX's kernel, by the fields of bench's Source.

    aligned: whether blocks are whole, of q and k. mask: its dtype, if there is one.
    """
    return {
        "text": STEEL,
        "kernel": "steel",
        "threads": 32 * 4,
        "include_dirs": [include_dir(MLX)],
        "defines": {
            "ELEMENT": METAL_TYPES[dtype],
            "HEAD_DIM": head_dim,
            "BLOCK_K": block_k(head_dim),
            "MASK": "bool" if mask == torch.bool else METAL_TYPES[dtype],
        },
        "constants": steel_constants(aligned, causal, mask) | {302: False, 303: False},
    }


def steel_constants(
    aligned: tuple[bool, bool], causal: bool, mask: torch.dtype | None
) -> dict[str | int, bool]:
    """What STEEL and tensor_peers.py's NAX have in common; arguments as of `steel_kernel`."""
    return {
        "align_Q": aligned[0],
        "align_K": aligned[1],
        "has_mask": mask is not None,
        "do_causal": causal,
    }


def steel_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, step: int, block_q: int
) -> list[Tensor]:
    """What both are called with. step, block_q: the keys and the queries of a block."""
    batch, heads, q_length, head_dim = q.shape
    kv_length = k.shape[2]
    about = params(
        ("6if", (batch, heads, head_dim, q_length, kv_length, heads // k.shape[1], head_dim**-0.5)),
        ("2i", (-(-q_length // block_q), -(-kv_length // step))),
        ("2i", (q_length // block_q, kv_length // step)),
        ("3i", (q_length % block_q, kv_length % step, kv_length - q_length)),
        ("12q", outer_strides(q, k, v, out)),
    )
    masks = [] if mask is None else [params(("3q", outer_strides(mask))), mask]
    return [q, k, v, out, about, *masks]


def prefill_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None
) -> list[Tensor]:
    """What PREFILL and tests/outside/tensor_peers.py's MPP are called with."""
    batch, heads, q_length, head_dim = q.shape
    shape = (batch, heads, head_dim, q_length, k.shape[2], heads // k.shape[1])
    about = params(("6i2f", (*shape, head_dim**-0.5, 1.0)), ("12q", outer_strides(q, k, v, out)))
    any_mask = torch.zeros(1, 1, 1, 1, dtype=q.dtype) if mask is None else mask
    return [q, k, v, out, about, params(("4q", any_mask.stride())), any_mask]


def prefill_name(
    kind: str,
    dtype: torch.dtype,
    head_dim: int,
    blocks: tuple[int, int],
    simdgroups: int,
    *,
    causal: bool,
    mask: torch.dtype | None,
) -> str:
    """The kernel's name; blocks: of queries and of keys."""
    return (
        f"{kind}_{TORCH_TYPES[dtype]}_bq{blocks[0]}_bk{blocks[1]}_bd{head_dim}_wm{simdgroups}_wn1"
        f"_hm{int(mask is not None)}_dc{int(causal)}"
        f"_mask{'bool_' if mask == torch.bool else TORCH_TYPES[dtype]}"
    )


def prefill_kernel(
    dtype: torch.dtype, head_dim: int, *, causal: bool = False, mask: torch.dtype | None = None
) -> dict[str, Any]:
    """PyTorch's kernel, likewise."""
    block_q, step, simdgroups = (16, 8, 2) if head_dim == 256 else (BLOCK_Q, block_k(head_dim), 4)
    return {
        "text": PREFILL,
        "kernel": prefill_name(
            *("prefill_attention", dtype, head_dim, (block_q, step), simdgroups),
            causal=causal,
            mask=mask,
        ),
        "threads": 32 * simdgroups,
        "include_dirs": [include_dir(TORCH)],
    }


def attend(
    kernel: dict[str, Any],
    q: Tensor,
    arguments: Callable[[Tensor], list[Tensor]],
    group_size: tuple[int, int],
    block_q: int = BLOCK_Q,
    lane_map: str | int | None = None,
    **how: bool,
) -> tuple[Tensor, Counters]:
    """Runs a kernel, described as by `steel_kernel`; returns out and what the kernel did.

    arguments: those of a kernel that writes to `out`. how: `check` and `count` of compile_shader.
    Each threadgroup has a block of `block_q` queries of a head.
    """
    wanted = ("include_dirs", "defines", "constants", "language")
    about: dict[str, Any] = {name: kernel[name] for name in wanted if name in kernel}
    library = compile_shader(kernel["text"], **about | how)
    out = torch.full_like(q, torch.nan)
    batch, heads, q_length, _ = q.shape
    getattr(library, kernel["kernel"])(
        *arguments(out),
        threads=(-(-q_length // block_q) * group_size[0], heads * group_size[1], batch),
        group_size=(*group_size, 1),
        lane_map=lane_map,
    )
    assert library.last_counters is not None
    return out, library.last_counters


def mlx_steel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    **how: bool,
) -> tuple[Tensor, Counters]:
    """MLX's full attention: q (B, H, Lq, D), k and v (B, Hkv, Lk, D), bottom-right causal.

    mask: (B, H, Lq, Lk), bool or of q's dtype. how, and the result: as of `attend`.
    """
    step, dtype = block_k(q.shape[3]), None if mask is None else mask.dtype
    aligned = (q.shape[2] % BLOCK_Q == 0, k.shape[2] % step == 0)
    kernel = steel_kernel(q.dtype, q.shape[3], causal=causal, mask=dtype, aligned=aligned)
    return attend(
        kernel, q, lambda out: steel_arguments(q, k, v, out, mask, step, BLOCK_Q), (32, 4), **how
    )


def torch_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    **how: bool,
) -> tuple[Tensor, Counters]:
    """PyTorch 2.15's prefill attention: as above, but top-left causal."""
    dtype = None if mask is None else mask.dtype
    kernel = prefill_kernel(q.dtype, q.shape[3], causal=causal, mask=dtype)
    return attend(kernel, q, lambda out: prefill_arguments(q, k, v, out, mask), (128, 1), **how)
