"""The inner loop of flash_fwd beside MLX's and PyTorch's, counted in one run.

Each row is a kernel of full attention: what a thread executes per 32 keys and 8 query rows.
"""

from collections.abc import Callable

import torch

from bench.inner_loop import InnerLoop, measure
from bench.peers import PeerUnavailable, mlx_steel_attention, torch_prefill_attention
from torch_metal_attn import simulate
from torch_metal_attn.simulator import Counters

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
Q_LENGTH = 64  # a multiple of every kernel's query tile


def operands(kv_length: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v of one head."""
    lengths = (Q_LENGTH, kv_length, kv_length)
    return tuple(torch.randn(1, 1, length, head_dim).to(dtype) for length in lengths)


def ours(head_dim: int, dtype: torch.dtype) -> InnerLoop:
    """Counts of the specialisation that the op chooses for full attention."""

    def run(kv_length: int) -> Counters:
        with simulate(count=True) as session:
            torch.ops.metal_attn.flash_fwd(*operands(kv_length, head_dim, dtype))
        return session.counters["flash_fwd"]

    return measure(run, Q_LENGTH)


def peers(kernel: Callable[..., tuple[torch.Tensor, Counters]]) -> Callable[..., InnerLoop]:
    """The same counts of another project's kernel."""
    return lambda head_dim, dtype: measure(
        lambda kv_length: kernel(*operands(kv_length, head_dim, dtype), check=True)[1], Q_LENGTH
    )


KERNELS = {
    "flash_fwd": ours,
    "MLX 0.32.4 steel_attention": peers(mlx_steel_attention),
    "torch 2.15.0 prefill_attention": peers(torch_prefill_attention),
}


def main() -> None:
    """Print the table, in Markdown."""
    print("| kernel | D | dtype | " + " | ".join(InnerLoop.HEADINGS) + " |")
    print("| --- " * (3 + len(InnerLoop.HEADINGS)) + "|")
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            for name, count in KERNELS.items():
                row = [name, str(head_dim), str(dtype).removeprefix("torch.")]
                try:
                    row += count(head_dim, dtype).cells()
                except PeerUnavailable as error:
                    row.append(f"not counted: {error}")
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
