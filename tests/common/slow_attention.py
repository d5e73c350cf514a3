"""Attention computed one number at a time in Python floats, to test the reference itself."""

import math
from types import SimpleNamespace

import torch

NUMBERS = {"softmax_scale": None, "softcap": 0.0, "attention_chunk": 0, "q_offset": None}
NUMBERS |= {"causal": False, "window_size_left": -1, "window_size_right": -1}
NUMBERS |= {"rotary_interleaved": False}
TENSORS = ("seqused_k", "leftpad_k", "attn_mask", "attn_bias", "alibi_slopes", "learnable_sink")
TENSORS += ("q_rotary_cos", "q_rotary_sin", "k_rotary_cos", "k_rotary_sin")


def slow_attention(q, k, v, **options):
    """`reference.attention` in float64, for a few tokens."""
    assert options.keys() <= {*NUMBERS, *TENSORS}
    o = SimpleNamespace(**dict.fromkeys(TENSORS) | NUMBERS | options)
    batch, heads, q_length, head_dim = q.shape
    kv_length = k.shape[2]
    group = heads // max(k.shape[1], 1)
    scale = 1 / math.sqrt(head_dim) if o.softmax_scale is None else o.softmax_scale
    whole = (batch, heads, q_length, kv_length)
    added = (o.attn_mask, o.attn_bias)
    mask, bias = (x if x is None else x.broadcast_to(whole).tolist() for x in added)
    q_rows, k_rows, v_rows = (tensor.double().tolist() for tensor in (q, k, v))
    out = torch.zeros(batch, heads, q_length, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, q_length), -math.inf, dtype=torch.float64)

    def end_of(b):
        return kv_length if o.seqused_k is None else int(o.seqused_k[b])

    def position_of(b, i):
        return i + (end_of(b) - q_length if o.q_offset is None else o.q_offset)

    def sees(b, h, i, j):
        first = 0 if o.leftpad_k is None else int(o.leftpad_k[b])
        position, chunk = position_of(b, i), o.attention_chunk
        return (
            first <= j < end_of(b)
            and (not o.causal or j <= position)
            and (o.window_size_left < 0 or position - j <= o.window_size_left)
            and (o.window_size_right < 0 or j - position <= o.window_size_right)
            and (not chunk or (j - first) // chunk == (position - first) // chunk)
            and (mask is None or mask[b][h][i][j] is not False)
        )

    def score(b, h, i, j):
        query = _rotated(q_rows[b][h][i], b, i, o, "q")
        key = _rotated(k_rows[b][h // group][j], b, j, o, "k")
        value = scale * math.fsum(x * y for x, y in zip(query, key, strict=True))
        if o.softcap:
            value = o.softcap * math.tanh(value / o.softcap)
        if o.alibi_slopes is not None:
            slopes = o.alibi_slopes if o.alibi_slopes.dim() == 1 else o.alibi_slopes[b]
            value -= float(slopes[h]) * abs(position_of(b, i) - j)
        for added in (mask, bias):
            if added is not None and not isinstance(added[b][h][i][j], bool):
                value += added[b][h][i][j]
        return value

    for b in range(batch):
        for h in range(heads):
            for i in range(q_length):
                seen = [j for j in range(kv_length) if sees(b, h, i, j)]
                weights = {j: math.exp(score(b, h, i, j)) for j in seen}
                terms = list(weights.values())
                if o.learnable_sink is not None:
                    terms.append(math.exp(float(o.learnable_sink[h])))
                total = math.fsum(terms)
                if total == 0:
                    continue
                lse[b, h, i] = math.log(total)
                for column in range(v.shape[3]):
                    out[b, h, i, column] = math.fsum(
                        weight / total * v_rows[b][h // group][j][column]
                        for j, weight in weights.items()
                    )
    return out, lse


def _rotated(row, b, position, options, side):
    cos, sin = (getattr(options, f"{side}_rotary_{name}") for name in ("cos", "sin"))
    if cos is None:
        return row
    cos, sin = (t if t.dim() == 2 else t[b if t.shape[0] > 1 else 0] for t in (cos, sin))
    pairs = cos.shape[1]
    rotated = list(row)
    for c in range(pairs):
        x, y = (2 * c, 2 * c + 1) if options.rotary_interleaved else (c, c + pairs)
        angle = complex(float(cos[position, c]), float(sin[position, c]))
        product = complex(row[x], row[y]) * angle
        rotated[x], rotated[y] = product.real, product.imag
    return rotated


def slow_varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **options):
    """`reference.varlen_attention` in float64, by `slow_attention` of each sequence."""
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    batch, heads = len(q_ends) - 1, q.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full((heads, q.shape[0]), -math.inf, dtype=torch.float64)
    for b in range(batch):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        q_length, kv_length = rows.stop - rows.start, keys.stop - keys.start
        alone = {n: x for n, x in options.items() if x is not None}
        for name, x in alone.items():
            if name in ("seqused_k", "leftpad_k"):
                alone[name] = x[b : b + 1]
            elif name in ("attn_mask", "attn_bias"):
                whole = x.broadcast_to(batch, heads, max_q, max_k)
                alone[name] = whole[b : b + 1, :, :q_length, :kv_length]
            elif name[2:] in ("rotary_cos", "rotary_sin") and x.dim() == 3:
                alone[name] = x[b if x.shape[0] > 1 else 0]
            elif name == "alibi_slopes" and x.dim() == 2:
                alone[name] = x[b]
        operands = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        part, part_lse = slow_attention(*operands, **alone)
        out[rows] = part[0].transpose(0, 1)
        lse[:, rows] = part_lse[0]
    return out, lse
