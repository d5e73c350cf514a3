"""Draws a case of attention: first a call, then options that the call has."""

import dataclasses
import random
from typing import Any

from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing import tensors
from torch_metal_attn.testing.attention import HAS, Attention

# Head dims that are fast, that need a tail, and that take the widest tiles.
_HEAD_DIMS = (8, 16, 32, 40, 64, 64, 72, 80, 96, 128)
_RARE_HEAD_DIMS = (1, 3, 7, 33, 100, 192, 256, 320, 512, 576)
_LENGTHS = (0, 1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 100)
_LAYOUTS: tuple[tensors.Layout, ...] = (
    (),
    (),
    ("padded 3",),
    ("padded 8",),
    ("order 021",),
    ("order 021", "padded 8"),
    ("order 210", "padded 5"),
    ("order 120",),
    ("repeated 0",),
    ("repeated 1", "padded 8"),
)
_PACKED_LAYOUTS: tuple[tensors.Layout, ...] = (
    (),
    ("padded 3",),
    ("order 10",),
    ("order 10", "padded 8"),
    ("repeated 1",),
)
_MASK_LAYOUTS: tuple[tensors.Layout, ...] = (
    (),
    ("padded 3",),
    ("order 0132",),
    ("order 3210", "padded 1"),
)
_POISONS = ("nan in q", "nan in k", "nan in v", "inf in k", "nan in attn_bias", "inf in attn_bias")
# One illegal field each, for cases that must be refused.
_ILLEGAL: tuple[dict[str, Any], ...] = (
    {"heads": 5, "kv_heads": 2},
    {"dtype": "float64"},
    {"head_dim": 577},
    {"v_head_dim": 513},
    {"attention_chunk": -1},
    {"softcap": -2.0},
    {"dropout_p": 1.5},
    {"num_splits": 1025},
    {"num_splits": -1},
    {"rotary": "q", "rotary_columns": 0},
    {"rotary": "q", "rotary_columns": 400, "head_dim": 64},
    {"causal": True, "window_size_right": 3},
    {"attn_mask": "float32 qk", "attn_bias": "float32 qk"},
    {"causal": True, "attn_mask": "bool qk"},
    {"causal": True, "causal_bias": "upper_left"},
    {"cache_dtype": "float16", "rotary": "k"},
    {"rotary": "k"},
    {"seqused_k": -1},
    {"seqused_k": 100000},
    {"leftpad_k": -1},
    {"leftpad_k": 100000},
)


def draw(r: random.Random) -> Attention:
    """Any meaningful case. One of ten must be refused."""
    # The ops themselves twice as often as each function.
    ops = [call for call in HAS if call.startswith("flash_") and "attn" not in call]
    call = r.choice([*ops, *HAS])
    while True:
        case = Attention(call=call, **_fields(r, call, HAS[call]), seed=r.randrange(2**31))
        if case.meaningless() or case.refused():
            continue
        if r.random() < 0.1:
            case = _spoilt(r, case)
        elif r.random() < 0.1:
            inside = dataclasses.replace(case, values_in_keys=True)
            case = case if inside.meaningless() else inside
        return case


def vary(case: Attention, r: random.Random) -> Attention:
    """Other values, lengths and limits of the same kinds."""
    for _ in range(20):
        changes: dict[str, Any] = {"seed": r.randrange(2**31)}
        if not case.spoilt and not case.refused():
            changes |= _values(r, case.backward)
            changes |= _sizes(r, case.call, HAS[case.call], case.head_dim)
            for name in ("heads", "kv_heads", "head_dim", "v_head_dim", "page"):
                changes.pop(name, None)
            batch = len(changes.get("packed", ())) or changes.get("batch", case.batch)
            lengths = [k for _, k in changes.get("packed", ())] or [
                changes.get("kv_length", case.kv_length)
            ] * batch
            for name in ("seqused_k", "leftpad_k"):
                if getattr(case, name) is not None:
                    changes[name] = tuple(r.randint(0, n) for n in lengths)
            for name, value in _limits(r, max(lengths, default=0)).items():
                if getattr(case, name) not in (-1, 0, None):
                    changes[name] = value
        varied = dataclasses.replace(case, **changes)
        if not varied.meaningless() and bool(varied.refused()) == bool(case.refused()):
            return varied
    return dataclasses.replace(case, seed=r.randrange(2**31))


def _spoilt(r: random.Random, case: Attention) -> Attention:
    """The case with one wrong argument, or one illegal field."""
    ways = case.ways()
    for _ in range(20):
        if ways and r.random() < 0.5:
            bad = dataclasses.replace(case, spoilt=r.choice(ways))
        else:
            changes = dict(r.choice(_ILLEGAL))
            for name in ("seqused_k", "leftpad_k"):
                if name in changes:
                    changes[name] = (changes[name],) * len(case.sequences)
            bad = dataclasses.replace(case, **changes, poison="")
        if not bad.meaningless() and bad.refused():
            return bad
    return case


def _fields(r: random.Random, call: str, has: frozenset[str]) -> dict[str, Any]:
    fields = _sizes(r, call, has)
    lengths = [k for _, k in fields.get("packed", ())] or [fields["kv_length"]] * fields["batch"]
    longest = max(lengths, default=0)
    dtype = r.choice(tensors.DTYPES)
    fields["dtype"] = dtype
    drawn: dict[str, Any] = {
        "softmax_scale": r.choice((None, None, 0.3, 1.0, 0.0, -0.2)),
        "causal": r.random() < 0.5,
        "softcap": r.choice((0.0, 0.0, 0.0, 1.5, 30.0)),
        "seqused_k": _some(r, 0.3, tuple(r.randint(0, n) for n in lengths), None),
        "leftpad_k": _some(r, 0.2, tuple(r.randint(0, n) for n in lengths), None),
        "attn_mask": _some(r, 0.25, _mask(r, r.choice(("bool", "bool", *tensors.DTYPES))), ""),
        "attn_bias": _some(r, 0.2, _mask(r, r.choice(tensors.DTYPES)), ""),
        "mask_layout": r.choice(_MASK_LAYOUTS),
        "alibi_slopes": _some(r, 0.15, r.choice(("h", "bh")), ""),
        "learnable_sink": _some(r, 0.15, r.choice(tensors.DTYPES), ""),
        "dropout_p": r.choice((0.0,) * 6 + (0.1, 0.6, 1.0)),
        "num_splits": r.choice((0, 0, 1, 2, 3, 7, 40)),
        "backward": r.random() < 0.5 or "bwd" in call,
        "through_lse": r.random() < 0.4,
        "exact_delta": r.random() < 0.7,
        "causal_bias": _some(r, 0.2, r.choice(("upper_left", "lower_right")), ""),
        "spare_rows": r.choice((0, 0, 3)),
    }
    for name, value in _limits(r, longest).items():
        drawn[name] = _some(r, 0.25, value, {"q_offset": None, "attention_chunk": 0}.get(name, -1))
    if drawn["causal"] and r.random() < 0.9:
        drawn["window_size_right"] = -1
    if "rotary" in has and r.random() < 0.2:
        columns = r.choice((2, fields["head_dim"] // 4 * 2, fields["head_dim"] // 2 * 2))
        drawn |= {
            "rotary": r.choice(("q", "k", "qk")),
            "rotary_columns": max(columns, 2),
            "rotary_interleaved": r.random() < 0.5,
            "rotary_by_sequence": r.random() < 0.4,
        }
    if "cache" in has and r.random() < 0.5:
        drawn |= {
            "cache": r.choice(("paged", "paged", "indexed")),
            "page": r.choice((1, 3, 5, 8, 16, 24, 64)),
        }
    if "format" in has and r.random() < 0.5:
        drawn["format"] = r.choice(FORMATS)
    elif "cache_dtype" in has and dtype == "float32" and r.random() < 0.4:
        drawn["cache_dtype"] = r.choice(tensors.DTYPES[1:])
    if call == "scaled_dot_product_attention":
        if drawn["causal_bias"]:
            drawn["attn_mask"] = ""
        drawn["causal"] &= not (drawn["attn_mask"] or drawn["causal_bias"])
    without_gradient = {name: drawn.get(name, "") for name in ("cache", "format", "cache_dtype")}
    if not Attention(call=call, **without_gradient).differentiable:
        drawn["backward"] = r.random() < 0.1
    if not drawn["backward"]:
        drawn["through_lse"] = False
    fields |= {name: value for name, value in drawn.items() if name in has}
    fields |= _values(r, fields.get("backward", False))
    for side in "qkv":
        if "packed_func" not in call:
            packed = "packed" in has and (side == "q" or not fields.get("cache"))
            fields[f"{side}_layout"] = r.choice(_PACKED_LAYOUTS if packed else _LAYOUTS)
    return fields


def _sizes(
    r: random.Random, call: str, has: frozenset[str], head_dim: int | None = None
) -> dict[str, Any]:
    if head_dim is None:
        head_dim = r.choice(_RARE_HEAD_DIMS if r.random() < 0.15 else _HEAD_DIMS)
    kv_heads, group = r.choice(((1, 1), (1, 1), (2, 1), (1, 4), (2, 2), (1, 8), (2, 3)))
    sizes: dict[str, Any] = {"head_dim": head_dim, "v_head_dim": min(head_dim, 512)}
    if r.random() < 0.1:
        sizes["v_head_dim"] = r.choice(_HEAD_DIMS)
    sizes |= {"heads": kv_heads * group, "kv_heads": kv_heads}
    if "qkvpacked" in call:
        sizes["kv_heads"] = sizes["heads"]
    if "kvpacked" in call:
        sizes["v_head_dim"] = sizes["head_dim"] = min(head_dim, 512)
    few = call in ("flash_decode", "flash_attn_with_kvcache")
    pairs = []
    for _ in range(r.choice((1, 1, 2, 3))):
        q_length, kv_length = _length(r), _length(r)
        if few and r.random() < 0.8:
            q_length = r.choice((1, 1, 2, 5, 16))
        if few and r.random() < 0.5:
            kv_length = r.randint(1, 300)
        if "qkvpacked" in call:
            q_length = kv_length
        pairs.append((q_length, kv_length))
    if "packed" in has:
        sizes["packed"] = tuple(pairs)
    else:
        batch = 0 if r.random() < 0.02 else len(pairs)
        sizes |= {"batch": batch, "q_length": pairs[0][0], "kv_length": pairs[0][1]}
    return sizes


def _length(r: random.Random) -> int:
    return r.choice(_LENGTHS) if r.random() < 0.6 else r.randint(1, 90)


def _limits(r: random.Random, longest: int) -> dict[str, int]:
    return {
        "window_size_left": r.randint(0, max(longest, 4)),
        "window_size_right": r.randint(0, max(longest, 4)),
        "attention_chunk": r.randint(1, max(longest, 4)),
        "q_offset": r.randint(-longest // 2 - 2, longest + 2),
    }


def _values(r: random.Random, backward: bool) -> dict[str, Any]:
    return {
        "values": r.choice(tensors.KINDS) if r.random() < 0.4 else "normal",
        "poison": "" if backward or r.random() < 0.8 else r.choice(_POISONS),
    }


def _mask(r: random.Random, dtype: str) -> str:
    dims = "".join(letter for letter in "bhqk" if r.random() < 0.6)
    return f"{dtype} {dims}"


def _some(r: random.Random, share: float, value: Any, otherwise: Any) -> Any:
    return value if r.random() < share else otherwise
