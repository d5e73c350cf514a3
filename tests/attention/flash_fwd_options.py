"""Options of flash_fwd, drawn by hypothesis: any features at once."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tests.attention.head_dims import HOME

ELEMENTS = [torch.float32, torch.float16, torch.bfloat16]


def rotary_tables(length, pairs, *, batch=None, dtype=torch.float32, seed=0):
    """cos and sin of random angles: (length, pairs), or (batch, length, pairs)."""
    shape = (length, pairs) if batch is None else (batch, length, pairs)
    angles = 6.3 * torch.rand(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def random_mask(*shape, dtype=torch.bool, seed=3, hidden=0.4):
    """Bool, or additive with -inf where the bool one would be False."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(shape, generator=generator) >= hidden
    if dtype == torch.bool:
        return visible
    return torch.randn(shape, generator=generator).to(dtype).masked_fill(~visible, -math.inf)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# For tests that draw features, where each example compiles kernels of its own: few examples, each
# of many features. The thorough profile draws any.
THOROUGH = settings.default.max_examples >= 100
few_examples = settings(max_examples=settings.default.max_examples // (3 if THOROUGH else 7))
DRAWN_HEAD_DIMS = [(HOME, HOME), (12, 5), *([(8, 8), (40, 24), (33, 65), (4, 4)] * THOROUGH)]
DRAWN_DTYPES = ELEMENTS if THOROUGH else ELEMENTS[:1]


def any_options(draw, batch, heads, q_length, kv_length, head_dim, kv_lengths=None):
    """Options for these sizes. `kv_lengths`: the keys of each sequence, if fewer."""
    kv_lengths = [kv_length] * batch if kv_lengths is None else kv_lengths
    seed = draw(st.integers(0, 2**31))
    features = ("mask", "bias", "alibi", "sink", "seqused_k", "leftpad_k", "q", "k", "causal")
    some = draw(st.sets(st.sampled_from(features), min_size=0 if THOROUGH else 4))
    on = {name: name in some for name in features}
    element = st.sampled_from(ELEMENTS)
    options = {
        "causal": on["causal"],
        "window_size_left": draw(st.integers(-1, 60)),
        "window_size_right": -1 if on["causal"] else draw(st.integers(-1, 60)),
        "attention_chunk": draw(st.sampled_from([0, 0, 1, 7, 32, 50])),
        "q_offset": draw(st.none() | st.integers(-60, 80)),
        "softcap": draw(st.sampled_from([0.0, 1.5, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
    }
    whole = (batch, heads, q_length, kv_length)
    sizes = [draw(st.sampled_from([1, size])) for size in whole]
    if on["mask"]:
        options["attn_mask"] = random_mask(*sizes, seed=seed, hidden=0.2)
    if on["bias"]:
        bias = random_mask(*sizes, dtype=draw(element), seed=seed + 1, hidden=0.1)
        options["attn_bias"] = bias[(0,) * draw(st.integers(0, 3))] if 1 not in sizes else bias
    if on["alibi"]:
        shape = draw(st.sampled_from([(heads,), (batch, heads)]))
        slopes = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 2))
        options["alibi_slopes"] = slopes / 10
    if on["sink"]:
        sink = torch.randn(heads, generator=torch.Generator().manual_seed(seed + 3))
        options["learnable_sink"] = sink.to(draw(element))
    for name in ("seqused_k", "leftpad_k"):
        if on[name]:
            options[name] = ints(*(draw(st.integers(0, length)) for length in kv_lengths))
    dtype, pairs = draw(element), draw(st.sampled_from([head_dim // 2, head_dim // 4, 1]))
    for i, (side, length) in enumerate((("q", q_length), ("k", kv_length))):
        if on[side]:
            leading = draw(st.sampled_from([None, 1, batch]))
            spare = draw(st.integers(0, 2))
            cos, sin = rotary_tables(
                length + spare, pairs, batch=leading, dtype=dtype, seed=seed + 4 + i
            )
            options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    options["rotary_interleaved"] = (on["q"] or on["k"]) and draw(st.booleans())
    return options
