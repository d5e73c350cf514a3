"""The inner loop of flash_fwd next to MLX's and PyTorch's, and the cost of each feature.

Each row is what a thread executes per 32 keys and 8 query rows, all of which are visible.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.inner_loop import COLUMNS, LENGTHS, slopes
from bench.tables import print_table
from tests.outside.peers import PeerUnavailable, mlx_steel_attention, torch_prefill_attention
from torch_metal_attn import simulate
from torch_metal_attn.simulator import Counters
from torch_metal_attn.tools.tune import tiles

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
Q_LENGTH = 64  # a multiple of every kernel's query tile
ROWS = 8  # whose counts are shown


def operands(kv_length: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v of one head."""
    lengths = (Q_LENGTH, kv_length, kv_length)
    return tuple(torch.randn(1, 1, length, head_dim).to(dtype) for length in lengths)


def ours(
    head_dim: int,
    dtype: torch.dtype,
    options: Callable[[int, int, torch.dtype], dict[str, Any]] = lambda *_: {},
    q_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Counts of the specialisation that the op chooses.

    options: a feature's arguments, from the number of keys, the head dim and the dtype. q_dtype:
    the dtype of q if it is not that of k and v.
    """

    def run(kv_length: int) -> Counters:
        q, k, v = operands(kv_length, head_dim, dtype)
        q = q.to(q_dtype or dtype)
        with simulate(count=True) as session:
            torch.ops.metal_attn.flash_fwd(q, k, v, **options(kv_length, head_dim, dtype))
        return session.counters["flash_fwd"]

    return slopes(map(run, LENGTHS), Q_LENGTH / ROWS)


def unstaged(head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """Counts of a tile whose SIMD groups read K and V themselves, with registers for M1 and M2."""
    tile = f"V_SLICE={head_dim} BLOCK_K=32 SIMDGROUPS=4"
    places = "COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=0"
    with tiles.forced({"flash_fwd": f"{tile} {places}"}):
        return ours(head_dim, dtype)


def peers(kernel: Callable[..., tuple[torch.Tensor, Counters]]) -> Callable[..., dict[str, float]]:
    """The same counts of another project's kernel."""

    def counts(head_dim: int, dtype: torch.dtype) -> dict[str, float]:
        problems = (operands(length, head_dim, dtype) for length in LENGTHS)
        return slopes((kernel(*qkv, count=True)[1] for qkv in problems), Q_LENGTH / ROWS)

    return counts


KERNELS = {
    "flash_fwd": ours,
    "flash_fwd, float32 queries": lambda head_dim, dtype: ours(
        head_dim, dtype, q_dtype=torch.float32
    ),
    "flash_fwd, nothing staged": unstaged,
    "MLX 0.32.4 steel_attention": peers(mlx_steel_attention),
    "torch 2.15.0 prefill_attention": peers(torch_prefill_attention),
}


Options = Callable[[int, int, int, torch.dtype], dict[str, Any]]


def rotary(*sides: str, interleaved: bool = False) -> Options:
    """Tables in q's dtype for q, k or both, over the whole head dim."""

    def options(q_length: int, kv_length: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
        lengths = {"q": q_length, "k": kv_length}
        tables = {
            f"{side}_rotary_{name}": torch.rand(lengths[side], head_dim // 2).to(dtype)
            for side in sides
            for name in ("cos", "sin")
        }
        return {**tables, "rotary_interleaved": interleaved}

    return options


# Arguments from the numbers of queries and keys, the head dim and the dtype. All but a row sees
# every key: these are the costs in blocks that are not cut.
OF_LENGTHS: dict[str, Options] = {
    "none": lambda *_: {},
    "causal": lambda q, kv, *_: {"causal": True, "q_offset": kv - 2},
    "window": lambda q, kv, *_: {"window_size_left": kv + q - 2},
    "chunk": lambda *_: {"attention_chunk": 4096, "q_offset": 0},
    "seqused_k": lambda q, kv, *_: {"seqused_k": torch.tensor([kv]).int()},
    "leftpad_k": lambda *_: {"leftpad_k": torch.tensor([0]).int()},
    "bool mask": lambda q, kv, *_: {"attn_mask": torch.rand(q, kv) > 0.5},
    "bool mask, odd stride": lambda q, kv, *_: {"attn_mask": (torch.rand(q, kv + 1) > 0.5)[:, :kv]},
    "bias": lambda q, kv, _, dtype: {"attn_bias": torch.rand(q, kv).to(dtype)},
    "float32 bias": lambda q, kv, *_: {"attn_bias": torch.rand(q, kv)},
    "softcap": lambda *_: {"softcap": 30.0},
    "ALiBi": lambda *_: {"alibi_slopes": torch.tensor([0.001])},
    "sink": lambda *_: {"learnable_sink": torch.tensor([0.5])},
    "rotary of q": rotary("q"),
    "rotary of q and k": rotary("q", "k"),
    "rotary, interleaved": rotary("q", "k", interleaved=True),
    "dropout": lambda *_: {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])},
}
# The same for Q_LENGTH queries.
FEATURES = {name: partial(options, Q_LENGTH) for name, options in OF_LENGTHS.items()}


HEADINGS = ("D", "dtype", *COLUMNS)


def kernel_rows() -> Iterator[list[Any]]:
    """Full attention, by every kernel."""
    for head_dim, dtype, name in product(HEAD_DIMS, DTYPES, KERNELS):
        try:
            cells: list[Any] = [*KERNELS[name](head_dim, dtype).values()]
        except PeerUnavailable as error:
            cells = [f"not counted: {error}"]
        yield [name, head_dim, dtype, *cells]


def feature_rows() -> Iterator[list[Any]]:
    """Each feature by itself."""
    for head_dim, name in product(HEAD_DIMS, FEATURES):
        loop = ours(head_dim, torch.float16, FEATURES[name])
        yield [name, head_dim, torch.float16, *loop.values()]


if __name__ == "__main__":
    print_table(["kernel", *HEADINGS], kernel_rows())
    print_table(["feature", *HEADINGS], feature_rows())
