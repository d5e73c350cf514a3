"""Rotary position embeddings: the frequencies of each kind of scaling, and tables of cos and sin.

Each scaling is a function that returns `(inv_freq, attention_factor)`: the inverse frequencies,
float32 (dim / 2), and a factor for cos and sin.

    inv_freq, factor = rope.yarn(128, 10000.0, factor=4.0, original_max_position_embeddings=4096)
    cos, sin = rope.tables(inv_freq, 8192, attention_factor=factor)
    q, k = torch.ops.metal_attn.rope(q, k, cos, sin, seqlen_offset=cached_length)

The functions raise ValueError for a number out of range, and TypeError for other types.

Frequencies are rounded as in transformers' `ROPE_INIT_FUNCTIONS`, with which models were trained.
For other kinds of scaling, pass the results of `ROPE_INIT_FUNCTIONS` to `tables`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import (
    INT32_MAX,
    as_bool,
    as_int,
    as_int_at_least,
    as_number,
    as_positive,
    check_tensor,
    on_device,
)
from torch_metal_attn.wording import value_text

__all__ = [
    "default",
    "dynamic_ntk",
    "linear",
    "llama3",
    "ntk_aware",
    "tables",
    "yarn",
]

Frequencies = tuple[Tensor, float]


def _inv_freq(dim: int, base: float, device: Any = None) -> Tensor:
    return 1.0 / _wavelengths(dim, base, device)


def _wavelengths(dim: int, base: float, device: Any) -> Tensor:
    """base ** (2 i / dim): wavelengths in tokens, divided by 2 pi."""
    if type(dim) is not int or not 2 <= dim < 2**31 or dim % 2 != 0:
        raise ValueError(f"dim is {value_text(dim)}; it must be an even int in 2..{2**31 - 2}")
    base = as_positive("base", base)
    device = None if device is None else on_device(device)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    return base**exponents


def default(dim: int, base: float = 10000.0, *, device: Any = None) -> Frequencies:
    """Unscaled frequencies: base ** (-2 i / dim) for pair i of the `dim` rotated columns.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), section 3.3.
    """
    return _inv_freq(dim, base, device), 1.0


def linear(dim: int, base: float = 10000.0, *, factor: float, device: Any = None) -> Frequencies:
    """Position interpolation: every position is divided by `factor`.

    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation"
    (2023), equation 4.
    """
    factor = as_positive("factor", factor)
    return _inv_freq(dim, base, device) / factor, 1.0


def ntk_aware(dim: int, base: float = 10000.0, *, factor: float, device: Any = None) -> Frequencies:
    """NTK-aware scaling: the base becomes base * factor ** (dim / (dim - 2)).

    This divides the lowest frequency by `factor` and keeps the highest. bloc97, "NTK-Aware
    Scaled RoPE" (Reddit, 2023); Peng et al., "YaRN" (2023), equation 16.
    """
    factor = as_positive("factor", factor)
    return _inv_freq(dim, _scaled_base(dim, base, factor), device), 1.0


def _scaled_base(dim: int, base: float, factor: float) -> float:
    if not isinstance(dim, int) or dim <= 2:
        raise ValueError(f"dim is {value_text(dim)}; to scale the base it must be greater than 2")
    base = as_positive("base", base)
    return base * factor ** (dim / (dim - 2))


def dynamic_ntk(
    dim: int,
    base: float = 10000.0,
    *,
    factor: float,
    max_position_embeddings: int,
    seq_len: int | None = None,
    device: Any = None,
) -> Frequencies:
    """Dynamic NTK scaling: the base grows with `seq_len` above `max_position_embeddings`.

    base * (factor * s / m - (factor - 1)) ** (dim / (dim - 2)), with s = max(seq_len, m) and m =
    `max_position_embeddings`. emozilla, "Dynamically Scaled RoPE" (Reddit, 2023); Peng et al.,
    "YaRN" (2023), appendix B.2. `seq_len` None means m.
    """
    factor = as_positive("factor", factor)
    max_position_embeddings = as_positive("max_position_embeddings", max_position_embeddings)
    longest = 0 if seq_len is None else as_int_at_least("seq_len", seq_len, 0, INT32_MAX)
    length = max(longest, max_position_embeddings)
    stretch = (factor * length / max_position_embeddings) - (factor - 1)
    return _inv_freq(dim, _scaled_base(dim, base, stretch), device), 1.0


def yarn(
    dim: int,
    base: float = 10000.0,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
    device: Any = None,
) -> Frequencies:
    """YaRN: keeps high frequencies, divides low frequencies by `factor`, and interpolates between.

    The ramp is linear over the index of the pair. It begins at the pair that rotates `beta_fast`
    times within `original_max_position_embeddings`, and ends at the pair that rotates `beta_slow`
    times. Pair d rotates L / (2 pi base ** (2 d / dim)) times within L. With `truncate` the ramp's
    ends are rounded outwards to integers. The attention factor is 0.1 ln(factor) + 1 by default.
    With both `mscale` and `mscale_all_dim` (DeepSeek) it is
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023),
    equations 17 to 22. The ramp is over the index, as in the authors' code.
    """
    factor = as_positive("factor", factor)
    original_max_position_embeddings = as_positive(
        "original_max_position_embeddings", original_max_position_embeddings
    )
    beta_fast = as_positive("beta_fast", beta_fast)
    beta_slow = as_positive("beta_slow", beta_slow)
    factors = {
        "attention_factor": attention_factor,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
    for name, value in factors.items():
        if value is not None and not 0 <= as_number(name, value) < math.inf:
            raise ValueError(f"{name} is {value}; it must be None, or finite and at least 0")
    wavelengths = _wavelengths(dim, base, device)
    if beta_fast < beta_slow:
        raise ValueError(f"beta_fast is {beta_fast}; it must be at least beta_slow, {beta_slow}")
    if base <= 1:
        raise ValueError(f"base is {base}; for yarn it must be greater than 1")

    def pair_that_rotates(times: float) -> float:
        cycle = original_max_position_embeddings / (times * 2 * math.pi)
        return (dim * math.log(cycle)) / (2 * math.log(base))

    low, high = pair_that_rotates(beta_fast), pair_that_rotates(beta_slow)
    if as_bool("truncate", truncate):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of width 0 would divide by 0

    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    inv_freq = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return inv_freq, float(attention_factor)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def llama3(
    dim: int,
    base: float = 10000.0,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    device: Any = None,
) -> Frequencies:
    """Llama 3's scaling: long wavelengths are multiplied by `factor`; short wavelengths are kept.

    A wavelength is long above L / low_freq_factor, and short below L / high_freq_factor. Between
    these limits the frequency is s / wavelength + (1 - s) / (factor wavelength) with s = (L /
    wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor) and L =
    `original_max_position_embeddings`. Grattafiori et al., "The Llama 3 Herd of Models" (2024), in
    Meta's code of Llama 3.1 (`apply_scaling`).
    """
    factor = as_positive("factor", factor)
    low_freq_factor = as_positive("low_freq_factor", low_freq_factor)
    high_freq_factor = as_positive("high_freq_factor", high_freq_factor)
    original_max_position_embeddings = as_positive(
        "original_max_position_embeddings", original_max_position_embeddings
    )
    if not high_freq_factor > low_freq_factor:
        raise ValueError(
            f"high_freq_factor is {high_freq_factor}; it must be greater than low_freq_factor, "
            f"{low_freq_factor}"
        )
    inv_freq = _inv_freq(dim, base, device)
    wavelength = 2 * math.pi / inv_freq
    length = original_max_position_embeddings
    longest, shortest = length / low_freq_factor, length / high_freq_factor
    smooth = (length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / factor, between)
    return torch.where(wavelength < shortest, inv_freq, scaled), 1.0


def tables(
    inv_freq: Tensor,
    positions: Tensor | int,
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inverse frequency for all pairs, by `metal_attn::rope_tables`.

    Args: inv_freq: (R / 2) float32. positions: a length L, for the positions 0..L-1; or (L),
        (B, L) or (S, B, L) of int32, int64 or float32. attention_factor: multiplies both. dtype:
        float32 if None, else float16 or bfloat16.

    Returns: cos and sin, (*positions.shape, R / 2).

    Raises: TypeError: an argument has the wrong type. ValueError: the dtype or shape is not
        supported, or a number is out of range or not finite.
    """
    check_tensor("inv_freq", inv_freq)
    attention_factor = as_number("attention_factor", attention_factor)
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype is {value_text(dtype)}; it must be a torch.dtype or None")
    if not isinstance(positions, Tensor):
        as_int("positions", positions, "an int or a tensor")
        length = as_int_at_least("positions", positions, 0, INT32_MAX)
        positions = torch.arange(length, device=inv_freq.device)
    options = {"attention_factor": attention_factor, "dtype": dtype}
    return torch.ops.metal_attn.rope_tables(inv_freq, positions, **options)
