"""The weights that dropout keeps, bit for bit as in shaders/dropout.h.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a function of a
counter, so whether a weight is kept depends only on its position.
"""

import math

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import as_int_at_least, check_tensor
from torch_metal_attn.wording import value_text

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words, as int64 tensors, for each counter; the shapes broadcast."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_a, low_a = _product(_MULTIPLIERS[0], a)
        high_c, low_c = _product(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of factor * x, in two halves so that no int64 overflows."""
    low = factor * (x & 0xFFFF)
    high = factor * (x >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def draw_rng_state(dropout_p: float, device: torch.device) -> Tensor | None:
    """The op's rng_state, from the default generator of `device`; None without dropout."""
    if type(dropout_p) is float and dropout_p == 0.0:
        return None
    _check_probability(dropout_p)
    if dropout_p == 0.0:
        return None
    # mps draws signed 32-bit integers, whatever the dtype is.
    return torch.randint(2**31 - 1, (2,), dtype=torch.int64, device=device)


def _check_probability(dropout_p: float) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float | torch.SymFloat):
        raise TypeError(f"dropout_p is {value_text(dropout_p)}; it must be a number")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be in 0..1")


def dropout_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    q_length: int,
    kv_length: int,
) -> Tensor:
    """The weights that `metal_attn::flash_fwd` and `flash_bwd` keep for these arguments.

    Args: rng_state: (2,) int64, a seed and an offset. dropout_p: probability to drop a weight, in
        0..1.

    Returns: bool (batch, heads, q_length, kv_length), on rng_state's device: True where a weight is
        kept. In packed calls the queries and keys of each sequence count from 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: rng_state has the wrong shape or dtype, dropout_p is not in 0..1, a size < 0.
    """
    check_tensor("rng_state", rng_state)
    if rng_state.shape != (2,) or rng_state.dtype != torch.int64:
        raise ValueError(
            f"rng_state has shape {tuple(rng_state.shape)} and dtype {rng_state.dtype}; it must be "
            "(2,) and int64"
        )
    _check_probability(dropout_p)
    sizes = {"batch": batch, "heads": heads, "q_length": q_length, "kv_length": kv_length}
    batch, heads, q_length, kv_length = (as_int_at_least(name, n) for name, n in sizes.items())
    return keep_mask(rng_state, dropout_p, range(batch), heads, range(q_length), kv_length)


def keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: range,
    heads: int,
    queries: range,
    kv_length: int,
) -> Tensor:
    """`dropout_mask` for some sequences and queries: (len(batch), heads, len(queries), kv_length).

    Philox's key is the first two words of philox4x32((offset, 0, 0), seed), where a 64-bit number
    is two words, the low word first. For attention's key j the counter is (j // 4, query, head,
    sequence). The weight is kept if word j % 4 of the result is at least dropout_p * 2**32.
    """
    seed, offset = rng_state[0], rng_state[1]
    zero = torch.zeros_like(seed)
    mixed = philox4x32((*_words(offset), zero, zero), _words(seed))
    device = rng_state.device
    counter = (
        torch.arange((kv_length + 3) // 4, device=device),
        torch.arange(queries.start, queries.stop, device=device)[:, None],
        torch.arange(heads, device=device)[:, None, None],
        torch.arange(batch.start, batch.stop, device=device)[:, None, None, None],
    )
    words = torch.broadcast_tensors(*philox4x32(counter, mixed[:2]))
    kept = torch.stack(words, -1) >= math.ceil(dropout_p * 2**32)
    return kept.flatten(-2)[..., :kv_length]


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    return x & _WORD, (x >> 32) & _WORD
