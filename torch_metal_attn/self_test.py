"""`python -m torch_metal_attn verify`: the kernels against a float64 reference."""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from torch_metal_attn.device import best_device
from torch_metal_attn.reference import attention
from torch_metal_attn.simulator import cache, toolchain

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One attention problem: its sizes, and the options that it is called with."""

    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    name: str = "full"
    options: dict[str, Any] = field(default_factory=dict)
    num_splits: int | None = None  # flash_decode's, or flash_fwd runs

    def __str__(self) -> str:
        return (
            f"heads {self.heads}/{self.kv_heads}  q {self.q_length:<3d} k {self.kv_length:<3d} "
            f"D {self.head_dim:<3d} {self.name}"
        )


def _causal(offset: int) -> dict[str, Any]:
    return {"name": f"causal {offset:+d}", "options": {"causal": True, "q_offset": offset}}


def _angles(length: int, pairs: int) -> torch.Tensor:
    return torch.arange(length)[:, None] / 10000 ** (torch.arange(pairs) / pairs)


_CASES = (
    Case(2, 2, 64, 64, 64),
    Case(2, 2, 65, 65, 64, **_causal(0)),
    Case(4, 2, 33, 97, 32, **_causal(64)),
    Case(4, 1, 1, 129, 128),
    Case(1, 1, 31, 40, 256, **_causal(9)),
    Case(1, 1, 16, 7, 80, **_causal(-9)),
    Case(2, 1, 50, 90, 40, "window, softcap", {"window_size_left": 20, "softcap": 5.0}),
    Case(
        *(2, 2, 33, 33, 20),
        "ALiBi, sinks",
        {"alibi_slopes": torch.tensor([0.5, 0.25]), "learnable_sink": torch.tensor([1.0, -2.0])},
    ),
    Case(
        *(2, 2, 40, 50, 64),
        "mask, bias",
        {
            "attn_mask": torch.arange(2000).view(40, 50) % 3 > 0,
            "attn_bias": torch.linspace(-2, 2, 50),
        },
    ),
    Case(
        *(2, 1, 40, 40, 64),
        "chunks, rotary",
        {"attention_chunk": 16, "causal": True}
        | {
            f"{side}_rotary_{name}": function(_angles(40, 32))
            for side in "qk"
            for name, function in (("cos", torch.cos), ("sin", torch.sin))
        },
    ),
    Case(8, 2, 1, 300, 128, "decode, 3 splits", num_splits=3),
    Case(32, 1, 2, 70, 64, "decode", {"causal": True}, num_splits=1),
)
_VISIBILITY = {"causal", "q_offset", "window_size_left", "attention_chunk", "attn_mask"}


@dataclass(frozen=True)
class Outcome:
    """Largest errors against float64: the kernel's, torch's own, and the kernel's bounds."""

    error: float
    torch_error: float
    lse_error: float
    bound: float
    lse_bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound and self.lse_error <= self.lse_bound


def _largest(difference: torch.Tensor) -> float:
    """The largest magnitude; infinite where something is NaN, so that no bound holds."""
    return difference.abs().nan_to_num(nan=torch.inf).max().item() if difference.numel() else 0.0


def _visible(case: Case) -> torch.Tensor:
    """Bool (Lq, Lk), from the reference: the weights of equal scores."""
    q = torch.zeros(1, 1, case.q_length, 1)
    k, v = torch.zeros(1, 1, case.kv_length, 1), torch.eye(case.kv_length)[None, None]
    options = {name: case.options[name] for name in case.options.keys() & _VISIBILITY}
    return attention(q, k, v, **options)[0][0, 0] > 0


def run_case(case: Case, dtype: torch.dtype, device: torch.device) -> Outcome:
    """Run one problem on `device` with normal random data."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, case.head_dim, generator=generator).to(dtype)

    q = normal(case.heads, case.q_length)
    k, v = normal(case.kv_heads, case.kv_length), normal(case.kv_heads, case.kv_length)
    on_device = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in case.options.items()
    }
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.ops.metal_attn.flash_fwd
    if case.num_splits is not None:
        op = functools.partial(torch.ops.metal_attn.flash_decode, num_splits=case.num_splits)
    out, lse = op(q.to(device), k.to(device), v.to(device), **on_device)
    exact, exact_lse = attention(q, k, v, **case.options, compute_dtype=torch.float64)
    visible = _visible(case)
    plain, _ = attention(q, k, v, attn_mask=visible, compute_dtype=torch.float64)
    torch_out = torch_attention(q, k, v, attn_mask=visible, enable_gqa=case.heads != case.kv_heads)
    sees = visible.any(-1)
    torch_error = _largest((torch_out.double() - plain)[:, :, sees])
    lse_error = _largest((lse.cpu().double() - exact_lse)[:, :, sees])
    if not bool((lse.cpu()[:, :, ~sees] == -torch.inf).all()):
        lse_error = torch.inf
    rounding = torch.finfo(dtype).eps * max(exact.abs().max().item(), 1e-3)
    return Outcome(
        error=_largest(out.cpu().double() - exact),
        torch_error=torch_error,
        lse_error=lse_error,
        bound=2 * torch_error + rounding,
        # Rows that were rotated are rounded before the product.
        lse_bound=max(1e-5, torch.finfo(dtype).eps if "q_rotary_cos" in case.options else 0.0),
    )


def verify() -> bool:
    """Run every case in every dtype, print a line for each, and say whether all are within bounds.

    The bound is twice the error that torch's own attention makes in the same dtype on what it has
    of the problem, the visible keys, plus one rounding of the output. Raises ToolchainError or
    CacheError if nothing can be compiled.
    """
    start = time.perf_counter()
    failed = 0
    with best_device(check=True) as device:
        where = "mps" if device.type == "mps" else "the simulator, every access checked"
        print(f"The kernels on {where}; largest errors against float64\n")
        print(f"{'problem':<46} {'dtype':<9} {'error':>9} {'torch':>9} {'bound':>9} {'lse':>9}")
        for case, dtype in itertools.product(_CASES, _DTYPES):
            name = str(dtype).removeprefix("torch.")
            try:
                outcome = run_case(case, dtype, device)
            except (toolchain.ToolchainError, cache.CacheError):
                raise  # no kernel can be compiled
            except Exception as error:  # one broken kernel must not hide the state of the others
                failed += 1
                print(f"{case!s:<46} {name:<9} FAILED  {type(error).__name__}: {error}", flush=True)
                continue
            failed += not outcome.ok
            print(
                f"{case!s:<46} {name:<9} {outcome.error:9.1e} {outcome.torch_error:9.1e} "
                f"{outcome.bound:9.1e} {outcome.lse_error:9.1e}  "
                f"{'ok' if outcome.ok else 'FAILED'}",
                flush=True,
            )
    total = len(_CASES) * len(_DTYPES)
    print(f"\n{total - failed} of {total} ok, {time.perf_counter() - start:.1f} s")
    return failed == 0
