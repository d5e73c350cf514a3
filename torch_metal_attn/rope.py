"""Rotary position embeddings: the frequencies of each kind of scaling, and tables of cos and sin.

Each scaling is a function that returns `(inv_freq, attention_factor)`: the inverse frequencies,
float32 (dim / 2), and the factor of cos and sin that goes with them.

    inv_freq, factor = rope.yarn(128, 10000.0, factor=4.0, original_max_position_embeddings=4096)
    cos, sin = rope.tables(inv_freq, 8192, attention_factor=factor)
    q, k = torch.ops.metal_attn.rope(q, k, cos, sin, seqlen_offset=cached_length)

`from_config` picks the function that a Hugging Face config asks for. The frequencies are rounded as
transformers' `ROPE_INIT_FUNCTIONS` round them, because models were trained with those.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_tensor, integers, natural, number, whole

__all__ = [
    "default",
    "dynamic_ntk",
    "from_config",
    "linear",
    "llama3",
    "longrope",
    "mrope",
    "mrope_tables",
    "ntk_aware",
    "proportional",
    "tables",
    "yarn",
]

Frequencies = tuple[Tensor, float]


def _inv_freq(dim: int, base: float, device: Any = None) -> Tensor:
    return 1.0 / _wavelengths(dim, base, device)


def _wavelengths(dim: int, base: float, device: Any) -> Tensor:
    """base ** (2 i / dim): wavelengths in tokens, divided by 2 pi."""
    if not isinstance(dim, int) or dim < 2 or dim % 2 != 0:
        raise ValueError(f"dim is {dim!r}; it must be an even int of at least 2")
    _positive("base", base)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    powers: Tensor = base**exponents
    return powers


def _positive(name: str, value: float) -> None:
    if not isinstance(value, (int, float, Tensor)) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a positive, finite number")


def _seq_len(value: int | None) -> int:
    """The longest sequence, 0 if none is given."""
    length: int = 0 if value is None else natural("seq_len", value)
    return length


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
    _positive("factor", factor)
    return _inv_freq(dim, base, device) / factor, 1.0


def ntk_aware(dim: int, base: float = 10000.0, *, factor: float, device: Any = None) -> Frequencies:
    """NTK-aware scaling: the base becomes base * factor ** (dim / (dim - 2)).

    This divides the lowest frequency by `factor` and keeps the highest. bloc97, "NTK-Aware
    Scaled RoPE" (Reddit, 2023); Peng et al., "YaRN" (2023), equation 16.
    """
    _positive("factor", factor)
    return _inv_freq(dim, base * factor ** _ntk_exponent(dim), device), 1.0


def _ntk_exponent(dim: int) -> float:
    if not isinstance(dim, int) or dim <= 2:
        raise ValueError(f"dim is {dim!r}; a scaled base needs more than 2")
    return dim / (dim - 2)


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
    "YaRN" (2023), appendix B.2. `seq_len` None stands for m.
    """
    _positive("factor", factor)
    _positive("max_position_embeddings", max_position_embeddings)
    length = max(_seq_len(seq_len), max_position_embeddings)
    stretch = (factor * length / max_position_embeddings) - (factor - 1)
    return _inv_freq(dim, base * stretch ** _ntk_exponent(dim), device), 1.0


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
    """YaRN: keeps high frequencies, divides low ones by `factor`, and interpolates between them.

    The ramp is linear over the index of the pair. It begins at the pair that rotates `beta_fast`
    times within `original_max_position_embeddings`, and ends at the pair that rotates `beta_slow`
    times. Pair d rotates L / (2 pi base ** (2 d / dim)) times within L. With `truncate` the ramp's
    ends are rounded outwards to whole indices. The attention factor is 0.1 ln(factor) + 1 unless
    given; with both `mscale` and `mscale_all_dim` (DeepSeek), the ratio of 0.1 mscale ln(factor) +
    1 to that of `mscale_all_dim`.

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023),
    equations 17 to 22, whose code has the ramp over the index, as here.
    """
    _positive("factor", factor)
    _positive("original_max_position_embeddings", original_max_position_embeddings)
    _positive("beta_fast", beta_fast)
    _positive("beta_slow", beta_slow)
    wavelengths = _wavelengths(dim, base, device)
    if beta_fast < beta_slow:
        raise ValueError(f"beta_fast is {beta_fast} and beta_slow {beta_slow}; it must be greater")
    if base <= 1:
        raise ValueError(f"base is {base}; with yarn it must be greater than 1")

    def pair_that_rotates(times: float) -> float:
        cycle = original_max_position_embeddings / (times * 2 * math.pi)
        return (dim * math.log(cycle)) / (2 * math.log(base))

    low, high = pair_that_rotates(beta_fast), pair_that_rotates(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, where a ramp would divide by 0

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


def longrope(
    dim: int,
    base: float = 10000.0,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    factor: float,
    seq_len: int | None = None,
    attention_factor: float | None = None,
    device: Any = None,
) -> Frequencies:
    """LongRoPE: one divisor per pair, `long_factor` above the original length, else short.

    `factor` is the extended length divided by the original one; the attention factor is sqrt(1 +
    ln(factor) / ln(original_max_position_embeddings)) unless given, and 1 for factors up to 1. Ding
    et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024), equation 3; the
    attention factor is that of Phi-3's code.
    """
    _positive("factor", factor)
    _positive("original_max_position_embeddings", original_max_position_embeddings)
    wavelengths = _wavelengths(dim, base, device)
    is_long = _seq_len(seq_len) > original_max_position_embeddings
    factors: Any
    name, factors = ("long_factor", long_factor) if is_long else ("short_factor", short_factor)
    if not isinstance(factors, Sequence) or isinstance(factors, str):
        raise TypeError(f"{name} is {factors!r}; it must be a sequence of numbers")
    if len(factors) != dim // 2:
        raise ValueError(f"{name} has {len(factors)} numbers; it must have dim / 2, {dim // 2}")
    divisors = torch.tensor(factors, dtype=torch.float32, device=device)
    if attention_factor is None:
        attention_factor = 1.0
        if factor > 1:
            if original_max_position_embeddings <= 1:
                raise ValueError(
                    f"original_max_position_embeddings is {original_max_position_embeddings}; "
                    "without attention_factor it must be greater than 1"
                )
            growth = math.log(factor) / math.log(original_max_position_embeddings)
            attention_factor = math.sqrt(1 + growth)
    return 1.0 / (divisors * wavelengths), float(attention_factor)


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
    """Llama 3's scaling: long wavelengths are multiplied by `factor`, and short ones are kept.

    Long is above L / low_freq_factor, and short below L / high_freq_factor. Between the two the
    frequency is s / wavelength + (1 - s) / (factor wavelength) with s = (L / wavelength -
    low_freq_factor) / (high_freq_factor - low_freq_factor) and L =
    `original_max_position_embeddings`. Grattafiori et al., "The Llama 3 Herd of Models" (2024), in
    Meta's code of Llama 3.1 (`apply_scaling`).
    """
    _positive("factor", factor)
    _positive("low_freq_factor", low_freq_factor)
    _positive("high_freq_factor", high_freq_factor)
    _positive("original_max_position_embeddings", original_max_position_embeddings)
    if not high_freq_factor > low_freq_factor:
        raise ValueError(
            f"high_freq_factor is {high_freq_factor} and low_freq_factor {low_freq_factor}; it "
            "must be greater"
        )
    inv_freq = _inv_freq(dim, base, device)
    wavelength = 2 * math.pi / inv_freq
    longest = original_max_position_embeddings / low_freq_factor
    shortest = original_max_position_embeddings / high_freq_factor
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / factor, between)
    return torch.where(wavelength < shortest, inv_freq, scaled), 1.0


def proportional(
    head_dim: int,
    base: float = 10000.0,
    *,
    partial_rotary_factor: float = 1.0,
    factor: float = 1.0,
    device: Any = None,
) -> Frequencies:
    """Partial rotation over all columns: pairs above `partial_rotary_factor` have frequency 0.

    Pair i of the first int(partial_rotary_factor * head_dim / 2) has base ** (-2 i / head_dim) /
    factor; inv_freq is (head_dim / 2). As in Gemma 4's full attention layers.
    """
    _positive("factor", factor)
    if not 0 <= number("partial_rotary_factor", partial_rotary_factor) <= 1:
        raise ValueError(
            f"partial_rotary_factor is {partial_rotary_factor}; it must be in 0.0..1.0"
        )
    inv_freq = _inv_freq(head_dim, base, device)
    inv_freq[int(partial_rotary_factor * head_dim // 2) :] = 0.0
    return inv_freq / factor, 1.0


def from_config(
    config: Any,
    seq_len: int | None = None,
    *,
    layer_type: str | None = None,
    device: Any = None,
) -> Frequencies:
    """The frequencies that a Hugging Face config asks for; the config is not changed.

    Reads `rope_parameters` (or, in older configs, `rope_scaling`, `rope_theta` and
    `partial_rotary_factor`), `head_dim` or `hidden_size` and `num_attention_heads`, and
    `max_position_embeddings`. seq_len: the longest sequence, for the scalings that depend on it
    (dynamic, longrope). layer_type: selects one of several nested parameters, as in Gemma 3. The
    type "ntk" is this package's own name for `ntk_aware`. Raises ValueError for unknown types and
    for missing parameters.
    """
    p = _parameters(config, layer_type)
    kind = p.get("rope_type") or p.get("type") or "default"
    base = p["rope_theta"]
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    partial = p.get("partial_rotary_factor")
    partial = 1.0 if partial is None else partial
    dim = int(head_dim * partial)

    def needed(name: str) -> Any:
        if p.get(name) is None:
            raise ValueError(f"rope_parameters has no {name}, which rope_type {kind!r} needs")
        return p[name]

    def original_length() -> int:
        # transformers gives priority to the config's own, where its parameters are not nested.
        own = getattr(config, "original_max_position_embeddings", None)
        if own is not None and layer_type is None:
            return int(own)
        value = p.get("original_max_position_embeddings")
        return int(config.max_position_embeddings if value is None else value)

    def stretch() -> float:
        if p.get("factor") is not None:
            return float(p["factor"])
        return float(config.max_position_embeddings / original_length())

    if kind in ("default", "mrope"):
        return default(dim, base, device=device)
    if kind == "linear":
        return linear(dim, base, factor=needed("factor"), device=device)
    if kind == "ntk":
        return ntk_aware(dim, base, factor=needed("factor"), device=device)
    if kind == "dynamic":
        return dynamic_ntk(
            dim,
            base,
            factor=needed("factor"),
            max_position_embeddings=config.max_position_embeddings,
            seq_len=seq_len,
            device=device,
        )
    if kind == "yarn":
        return yarn(
            dim,
            base,
            factor=stretch(),
            original_max_position_embeddings=original_length(),
            beta_fast=p.get("beta_fast") or 32.0,
            beta_slow=p.get("beta_slow") or 1.0,
            attention_factor=p.get("attention_factor"),
            mscale=p.get("mscale"),
            mscale_all_dim=p.get("mscale_all_dim"),
            truncate=p.get("truncate", True),
            device=device,
        )
    if kind == "longrope":
        return longrope(
            dim,
            base,
            short_factor=needed("short_factor"),
            long_factor=needed("long_factor"),
            original_max_position_embeddings=original_length(),
            factor=stretch(),
            seq_len=seq_len,
            attention_factor=p.get("attention_factor"),
            device=device,
        )
    if kind == "llama3":
        return llama3(
            dim,
            base,
            factor=needed("factor"),
            low_freq_factor=needed("low_freq_factor"),
            high_freq_factor=needed("high_freq_factor"),
            original_max_position_embeddings=original_length(),
            device=device,
        )
    if kind == "proportional":
        factor = p.get("factor")
        factor = 1.0 if factor is None else factor
        return proportional(
            head_dim, base, partial_rotary_factor=partial, factor=factor, device=device
        )
    raise ValueError(
        f"rope_type is {kind!r}; it must be default, linear, dynamic, ntk, yarn, longrope, llama3, "
        "proportional or mrope"
    )


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type is not None:
        if given.get(layer_type) is None:
            raise ValueError(
                f"layer_type is {layer_type!r}; rope_parameters has {', '.join(given) or 'nothing'}"
            )
        given = given[layer_type]
    elif given and all(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"layer_type is None; it must be one of {', '.join(given)}")
    parameters = dict(given)
    for name in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(name) is None:
            parameters[name] = getattr(config, name, None)
    if parameters["rope_theta"] is None:
        parameters["rope_theta"] = getattr(config, "default_theta", 10000.0)
    return parameters


def tables(
    inv_freq: Tensor,
    positions: Tensor | int,
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of each position times each inverse frequency, by `metal_attn::rope_tables`.

    Args: inv_freq: (R / 2) float32. positions: a length L, for 0..L-1, or (L), (B, L) or (S, B, L)
        of int32, int64 or float32. attention_factor: multiplies both. dtype: float32 if None,
        else float16 or bfloat16.

    Returns: cos and sin, (*positions.shape, R / 2).
    """
    check_tensor("inv_freq", inv_freq)
    if not isinstance(positions, Tensor):
        whole("positions", positions, "an int or a tensor")
        positions = torch.arange(natural("positions", positions), device=inv_freq.device)
    cos, sin = torch.ops.metal_attn.rope_tables(
        inv_freq, positions, attention_factor=attention_factor, dtype=dtype
    )
    return cos, sin


def mrope(table: Tensor, mrope_section: Sequence[int], *, interleaved: bool = False) -> Tensor:
    """Combine the three tables of (temporal, height, width) positions into one.

    Args: table: cos or sin, (3, B, L, R / 2). mrope_section: the number of columns for time,
        height and width, R / 2 in total. interleaved: the three alternate column by column
        (Qwen3-VL), and time has the columns left at the end; else each has one block of columns
        (Qwen2-VL).

    Returns: (B, L, R / 2).

    Wang et al., "Qwen2-VL" (2024), section 2.1; Bai et al., "Qwen3-VL Technical Report" (2025).
    """
    check_tensor("table", table)
    if table.dim() != 4 or table.shape[0] != 3:
        raise ValueError(f"table has shape {tuple(table.shape)}; it must be (3, B, L, R / 2)")
    columns = table.shape[-1]
    sections = integers("mrope_section", mrope_section)
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != columns:
        raise ValueError(
            f"mrope_section is {sections}; it must be 3 numbers of columns, {columns} together"
        )
    source = torch.zeros(columns, dtype=torch.int64, device=table.device)
    if interleaved:
        for axis in (1, 2):
            end = axis + 3 * (sections[axis] - 1)
            if sections[axis] > 0 and end >= columns:
                raise ValueError(
                    f"mrope_section is {sections}; interleaved, axis {axis} would reach column "
                    f"{end} of {columns}"
                )
            source[axis : 3 * sections[axis] : 3] = axis
    else:
        source[sections[0] : sections[0] + sections[1]] = 1
        source[sections[0] + sections[1] :] = 2
    index = source.expand(1, *table.shape[1:])
    return table.gather(0, index)[0]


def mrope_tables(
    inv_freq: Tensor,
    positions: Tensor,
    mrope_section: Sequence[int],
    *,
    interleaved: bool = False,
    attention_factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions (3, B, L), time, height and width: (B, L, R / 2) each. See `mrope`.

    Row i of batch b belongs to token i, so `metal_attn::rope` takes the tables without positions.
    """
    check_tensor("positions", positions)
    if positions.dim() != 3 or positions.shape[0] != 3:
        raise ValueError(f"positions has shape {tuple(positions.shape)}; it must be (3, B, L)")
    cos, sin = tables(inv_freq, positions, attention_factor=attention_factor, dtype=dtype)
    return (
        mrope(cos, mrope_section, interleaved=interleaved),
        mrope(sin, mrope_section, interleaved=interleaved),
    )
