"""Attention one number at a time, in Python floats, to test the reference itself."""

import math

import torch


def slow_attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    q_offset=None,
    seqused_k=None,
    leftpad_k=None,
    attn_mask=None,
    attn_bias=None,
    softcap=0.0,
    alibi_slopes=None,
    learnable_sink=None,
    q_rotary_cos=None,
    q_rotary_sin=None,
    k_rotary_cos=None,
    k_rotary_sin=None,
    rotary_interleaved=False,
):
    """`reference.attention` in float64, for a few tokens."""
    batch, heads, q_length, head_dim = q.shape
    kv_length = k.shape[2]
    group = heads // max(k.shape[1], 1)
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    whole = (batch, heads, q_length, kv_length)
    mask = None if attn_mask is None else attn_mask.broadcast_to(whole).tolist()
    bias = None if attn_bias is None else attn_bias.broadcast_to(whole).tolist()
    q_rows, k_rows, v_rows = (tensor.double().tolist() for tensor in (q, k, v))
    out = torch.zeros(batch, heads, q_length, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, q_length), -math.inf, dtype=torch.float64)

    def sees(b, h, i, j):
        first = 0 if leftpad_k is None else int(leftpad_k[b])
        end = kv_length if seqused_k is None else int(seqused_k[b])
        position = i + (end - q_length if q_offset is None else q_offset)
        answers = [first <= j < end]
        if causal:
            answers.append(j <= position)
        if window_size_left >= 0:
            answers.append(position - j <= window_size_left)
        if window_size_right >= 0:
            answers.append(j - position <= window_size_right)
        if attention_chunk:
            answers.append(
                math.floor((j - first) / attention_chunk)
                == math.floor((position - first) / attention_chunk)
            )
        if mask is not None and isinstance(mask[b][h][i][j], bool):
            answers.append(mask[b][h][i][j])
        return all(answers)

    def score(b, h, i, j):
        query = _rotated(q_rows[b][h][i], b, i, q_rotary_cos, q_rotary_sin, rotary_interleaved)
        key = _rotated(
            k_rows[b][h // group][j], b, j, k_rotary_cos, k_rotary_sin, rotary_interleaved
        )
        value = scale * math.fsum(x * y for x, y in zip(query, key, strict=True))
        if softcap:
            value = softcap * math.tanh(value / softcap)
        if alibi_slopes is not None:
            end = kv_length if seqused_k is None else int(seqused_k[b])
            position = i + (end - q_length if q_offset is None else q_offset)
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            value -= float(slopes[h]) * abs(position - j)
        for added in (mask, bias):
            if added is not None and not isinstance(added[b][h][i][j], bool):
                value += added[b][h][i][j]
        return value

    for b in range(batch):
        for h in range(heads):
            for i in range(q_length):
                weights = {
                    j: math.exp(score(b, h, i, j)) for j in range(kv_length) if sees(b, h, i, j)
                }
                terms = list(weights.values())
                if learnable_sink is not None:
                    terms.append(math.exp(float(learnable_sink[h])))
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


def _rotated(row, b, position, cos, sin, interleaved):
    """The columns of one query or key, rotated by the angles of its row of the tables."""
    if cos is None:
        return row
    cos, sin = (t if t.dim() == 2 else t[b if t.shape[0] > 1 else 0] for t in (cos, sin))
    pairs = cos.shape[1]
    rotated = list(row)
    for c in range(pairs):
        x, y = (2 * c, 2 * c + 1) if interleaved else (c, c + pairs)
        angle = complex(float(cos[position, c]), float(sin[position, c]))
        product = complex(row[x], row[y]) * angle
        rotated[x], rotated[y] = product.real, product.imag
    return rotated


def slow_varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **options):
    """`reference.varlen_attention` in float64: each sequence cut out, with its own options."""
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    batch, heads = len(q_ends) - 1, q.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full((heads, q.shape[0]), -math.inf, dtype=torch.float64)
    for b in range(batch):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        q_length, kv_length = rows.stop - rows.start, keys.stop - keys.start
        own = dict(options)
        for name in ("seqused_k", "leftpad_k"):
            if own.get(name) is not None:
                own[name] = own[name][b : b + 1]
        for name in ("attn_mask", "attn_bias"):
            if own.get(name) is not None:
                whole = own[name].broadcast_to(batch, heads, max_q, max_k)
                own[name] = whole[b : b + 1, :, :q_length, :kv_length]
        for name in [name for name in own if "rotary_" in name and torch.is_tensor(own[name])]:
            table = own[name]
            if table.dim() == 3:
                own[name] = table[b if table.shape[0] > 1 else 0]
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[b]
        part, part_lse = slow_attention(
            q[rows].transpose(0, 1)[None],
            k[keys].transpose(0, 1)[None],
            v[keys].transpose(0, 1)[None],
            **own,
        )
        out[rows] = part[0].transpose(0, 1)
        lse[:, rows] = part_lse[0]
    return out, lse
