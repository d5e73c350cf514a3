"""The arguments of each attention feature, for the scripts that count or compile kernels."""

from collections.abc import Callable
from typing import Any

import torch

# Makes a feature's arguments from the numbers of queries and keys, the head dim and the dtype.
OfLengths = Callable[[int, int, int, torch.dtype], dict[str, Any]]


def rotary(*sides: str, interleaved: bool = False) -> OfLengths:
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


# At most one query does not see every key, so that whole blocks are counted.
OF_LENGTHS: dict[str, OfLengths] = {
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
