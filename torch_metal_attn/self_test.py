"""`python -m torch_metal_attn verify`: the kernels against a float64 reference."""

import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from torch_metal_attn.device import best_device
from torch_metal_attn.reference import attention
from torch_metal_attn.simulator import cache, toolchain

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One attention problem; a q_offset of None means no mask."""

    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    q_offset: int | None

    @property
    def diagonal(self) -> dict[str, Any]:
        """The op's options."""
        return {} if self.q_offset is None else {"causal": True, "q_offset": self.q_offset}

    def __str__(self) -> str:
        diagonal = "full" if self.q_offset is None else f"causal {self.q_offset:+d}"
        return (
            f"heads {self.heads}/{self.kv_heads}  q {self.q_length:<3d} k {self.kv_length:<3d} "
            f"D {self.head_dim:<3d} {diagonal}"
        )


_CASES = (
    Case(heads=2, kv_heads=2, q_length=64, kv_length=64, head_dim=64, q_offset=None),
    Case(heads=2, kv_heads=2, q_length=65, kv_length=65, head_dim=64, q_offset=0),
    Case(heads=4, kv_heads=2, q_length=33, kv_length=97, head_dim=32, q_offset=64),
    Case(heads=4, kv_heads=1, q_length=1, kv_length=129, head_dim=128, q_offset=None),
    Case(heads=1, kv_heads=1, q_length=31, kv_length=40, head_dim=256, q_offset=9),
    Case(heads=1, kv_heads=1, q_length=16, kv_length=7, head_dim=80, q_offset=-9),
)


@dataclass(frozen=True)
class Outcome:
    """Largest errors against float64: the kernel's, torch's own, and the kernel's bound."""

    error: float
    torch_error: float
    lse_error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound and self.lse_error <= 1e-5


def _largest(difference: torch.Tensor) -> float:
    """The largest magnitude; infinite where something is NaN, so that no bound holds."""
    return difference.abs().nan_to_num(nan=torch.inf).max().item() if difference.numel() else 0.0


def run_case(case: Case, dtype: torch.dtype, device: torch.device) -> Outcome:
    """Run one problem on `device` with normal random data."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, case.head_dim, generator=generator).to(dtype)

    q = normal(case.heads, case.q_length)
    k, v = normal(case.kv_heads, case.kv_length), normal(case.kv_heads, case.kv_length)
    out, lse = torch.ops.metal_attn.flash_fwd(
        q.to(device),
        k.to(device),
        v.to(device),
        causal=case.q_offset is not None,
        q_offset=case.q_offset,
    )
    exact, exact_lse = attention(
        q,
        k,
        v,
        causal=case.q_offset is not None,
        q_offset=case.q_offset,
        compute_dtype=torch.float64,
    )
    visible = torch.ones(case.q_length, case.kv_length, dtype=torch.bool)
    if case.q_offset is not None:
        visible = visible.tril(case.q_offset)
    torch_out = torch_attention(q, k, v, attn_mask=visible, enable_gqa=case.heads != case.kv_heads)
    sees = visible.any(-1)
    torch_error = _largest((torch_out.double() - exact)[:, :, sees])
    lse_error = _largest((lse.cpu().double() - exact_lse)[:, :, sees])
    if not bool((lse.cpu()[:, :, ~sees] == -torch.inf).all()):
        lse_error = torch.inf
    rounding = torch.finfo(dtype).eps * max(exact.abs().max().item(), 1e-3)
    return Outcome(
        error=_largest(out.cpu().double() - exact),
        torch_error=torch_error,
        lse_error=lse_error,
        bound=2 * torch_error + rounding,
    )


def verify() -> bool:
    """Run every case in every dtype, print a line for each, and say whether all are within bounds.

    The bound is twice the error that torch's own attention makes in the same dtype, plus one
    rounding of the output. Raises ToolchainError or CacheError if nothing can be compiled.
    """
    start = time.perf_counter()
    failed = 0
    with best_device(check=True) as device:
        where = "mps" if device.type == "mps" else "the simulator, every access checked"
        print(f"metal_attn::flash_fwd on {where}; largest errors against float64\n")
        print(f"{'problem':<42} {'dtype':<9} {'error':>9} {'torch':>9} {'bound':>9} {'lse':>9}")
        for case, dtype in itertools.product(_CASES, _DTYPES):
            name = str(dtype).removeprefix("torch.")
            try:
                outcome = run_case(case, dtype, device)
            except (toolchain.ToolchainError, cache.CacheError):
                raise  # no kernel can be compiled
            except Exception as error:  # one broken kernel must not hide the state of the others
                failed += 1
                print(f"{case!s:<42} {name:<9} FAILED  {type(error).__name__}: {error}", flush=True)
                continue
            failed += not outcome.ok
            print(
                f"{case!s:<42} {name:<9} {outcome.error:9.1e} {outcome.torch_error:9.1e} "
                f"{outcome.bound:9.1e} {outcome.lse_error:9.1e}  "
                f"{'ok' if outcome.ok else 'FAILED'}",
                flush=True,
            )
    total = len(_CASES) * len(_DTYPES)
    print(f"\n{total - failed} of {total} ok, {time.perf_counter() - start:.1f} s")
    return failed == 0
