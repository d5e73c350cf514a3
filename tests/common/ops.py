"""Calls of the ops as data. Tests over this table check what PyTorch expects of every op."""

import math
from dataclasses import dataclass

import torch

from tests.helpers.judged import arguments
from tests.helpers.memory import same_memory
from tests.helpers.steps import step
from tests.rope.rope_check import LAYOUTS, make_problem, oracle
from torch_metal_attn.rope import default
from torch_metal_attn.testing.judge import ints, normal
from torch_metal_attn.testing.merges import union


@dataclass(frozen=True)
class Example:
    """Calls of one op.

    make: returns arguments by name. written: those that are written in place. differentiable:
    those that have gradients. definition: the results, or what `written` holds, in plain torch.
    """

    op: str
    make: object
    written: tuple = ()
    differentiable: tuple = ()
    definition: object = None

    @property
    def returns_what_it_writes(self):
        """True also if nothing is written. vmap and negative views need such ops."""
        returns = getattr(torch.ops.metal_attn, self.op).default._schema.returns
        return len(returns) > 0 and (not self.written or returns[0].alias_info is not None)


def call(arguments, example):
    results = getattr(torch.ops.metal_attn, example.op)(**arguments)
    written = tuple(arguments[name] for name in example.written)
    if isinstance(results, tuple):
        return *results, *written
    return written or (results,)


def on(device, arguments):
    """The arguments with copies of their tensors on the device, of the same strides."""

    def there(x):
        if not torch.is_tensor(x):
            return x
        return same_memory(x) if x.device == device else x.to(device)

    return {name: there(x) for name, x in arguments.items()}


def _rope(layout="contiguous", without_k=False, **options):
    def make(length=9, dtype=torch.float32):
        q, k, cos, sin = make_problem(length=length, head_dim=20, rotary_dim=16, dtype=dtype)
        q, k = LAYOUTS[layout](q), LAYOUTS[layout](k)
        arguments = {"q": q, "k": None if without_k else k, "cos": cos, "sin": sin} | options
        if "positions" in arguments:
            arguments["positions"] = arguments["positions"][..., :length]
        return arguments

    return make


def _rotated(q, k, cos, sin, **options):
    return tuple(oracle(x, cos, sin, **options) for x in (q, k) if x is not None)


_OFFSET = {"seqlen_offset": 3, "interleaved": True}
_POSITIONS = {"positions": torch.arange(24).view(2, 12) % 13, "conjugate": True}
_ROPE = {"differentiable": ("q", "k"), "definition": _rotated}
_ROPE_ = _ROPE | {"written": ("q", "k")}


def _tables(length=9, dtype=torch.float32):
    positions = torch.arange(2 * length).view(2, length)
    return {"inv_freq": default(16)[0], "positions": positions, "dtype": dtype}


def _states(packed=False, transposed=False, **options):
    """Some rows have no keys in one state or in both; their out is NaN."""

    def make(length=5, dtype=torch.float32):
        rows = (length, 3) if packed else (2, 3, length)
        arguments = {}
        for seed, part in enumerate("ab"):
            out, lse = normal(*rows, 16, seed=seed, dtype=dtype), 3 * normal(*rows, seed=seed + 2)
            lse.flatten()[seed : seed + 2] = -math.inf
            out[lse == -math.inf] = math.nan
            if transposed:
                out = out.transpose(0, 1).contiguous().transpose(0, 1)
            lse = lse.t().contiguous() if packed else lse
            arguments |= {f"out_{part}": out, f"lse_{part}": lse}
        if "mask" in options:
            options["mask"] = torch.arange(2 * length).view(2, length) % 3 > 0
        return arguments | options

    return make


def _merged(out_a, lse_a, out_b, lse_b):
    packed = lse_a.dim() == 2
    lses = torch.stack([lse.t() if packed else lse for lse in (lse_a, lse_b)], -1)
    out, lse = union(torch.stack([out_a, out_b], -2), lses, None)
    return out, lse.t() if packed else lse


_STATES = ("out_a", "lse_a", "out_b", "lse_b")
_MERGE = {"differentiable": _STATES, "definition": _merged}


def _partials(sink=False):
    def make(length=5, dtype=torch.float32):
        outs, lses = normal(2, 3, length, 7, 16), 3 * normal(2, 3, length, 7, seed=1)
        lses[..., ::3] = -math.inf
        sinks = {"learnable_sink": torch.zeros(3)} if sink else {}
        return {"partial_out": outs, "partial_lse": lses, "out_dtype": dtype} | sinks

    return make


def _scores(name="x", layout=lambda x: x, **options):
    def make(length=5, dtype=torch.float32):
        x = normal(2, length, 7, dtype=dtype)
        x[0, 0] = -math.inf
        return {name: layout(x)} | options

    return make


def _weights(x, dim=-1):
    return (torch._safe_softmax(x, dim),)


def _masked(scores, q_offset=0):
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return (scores.masked_fill(~visible.tril(q_offset), -math.inf),)


_MASK_ = {"written": ("scores",), "differentiable": ("scores",), "definition": _masked}
_SOFTMAX = {"differentiable": ("x",), "definition": _weights}


def _append(call="append_kv", options=(), **fields):
    def make(length=5, dtype=torch.float16):
        sizes = {"call": call, "length": length, "lengths": (13, 12), "capacity": 32}
        operands = arguments(step(dtype=str(dtype).split(".")[1], **sizes | fields))
        # Zeros, because opcheck compares the caches, and NaN would hide differences.
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            if name in operands and operands[name].is_floating_point():
                operands[name] = operands[name].clone().zero_()
        return {n: x for n, x in operands.items() if torch.is_tensor(x)} | dict(options)

    return make


_CACHES = ("k_cache", "v_cache")
_ROTATED = {"lengths": (3, 4), "rotary_columns": 64, "leftpad_k": (1, 2)}
_PAGED = {"format": "q8_0", "cache": "paged", "lengths": (0, 0)}
_STEP = _append("decode_step", {"causal": True, "num_splits": 1}, rotary_columns=32)


def _attention(layout=lambda q: q, **options):
    def make(length=8, dtype=torch.float32):
        q = normal(2, length, 4, 16, dtype=dtype).transpose(1, 2)
        k, v = normal(2, 2, 13, 16, seed=1, dtype=dtype), normal(2, 2, 13, 8, seed=2, dtype=dtype)
        return {"q": layout(q), "k": k, "v": v} | options

    return make


def _packed_queries(length=8, dtype=torch.float32):
    arguments = _attention(causal=True, num_splits=1)(length, dtype)
    q = arguments.pop("q")[0].transpose(0, 1)
    ends = torch.tensor([0, length // 2, length]).int()
    return {"q": q, "cu_seqlens_q": ends, "max_seqlen_q": length} | arguments


def _packed_step(length=5, dtype=torch.float16):
    arguments = _STEP(length, dtype)
    for name in "qkv":
        arguments[name] = arguments[name].transpose(1, 2).flatten(0, 1)
    ends = torch.tensor([0, length, 2 * length]).int()
    return arguments | {"cu_seqlens_q": ends, "max_seqlen_q": length}


def _tree(make, form):
    """The first token of each sequence is the root; the other tokens are its children."""

    def with_tree(*arguments, **options):
        call_arguments = make(*arguments, **options)
        packed = "cu_seqlens_q" in call_arguments
        sizes = (
            call_arguments["cu_seqlens_q"].diff().tolist()
            if packed
            else [call_arguments["q"].shape[2]]
        )
        parents = torch.cat([(torch.arange(n) > 0).int() - 1 for n in sizes])
        columns = torch.arange(call_arguments.get("max_seqlen_q", sizes[0]))
        places = torch.cat([torch.arange(n) for n in sizes])[:, None]
        shown = (columns == places) | (columns == 0)
        return call_arguments | {form: parents if form == "parents" else shown}

    return with_tree


def _listed(length=8, dtype=torch.float32):
    entries = (torch.arange(2 * length * 6) * 5 % 14 - 1).int().view(1, 2, length, 6)
    return _attention(causal=True, indices=entries)(length, dtype)


_CAUSAL = {"causal": True, "q_offset": 4, "softmax_scale": 0.3}
_FLASH = {"differentiable": ("q", "k", "v")}


def _indexed(length=8, dtype=torch.float32):
    q, k = normal(2, 3, length, 16, dtype=dtype), normal(2, 13, 16, seed=1, dtype=dtype)
    weights = normal(2, length, 3, seed=2, dtype=dtype).transpose(1, 2)
    return {"q": q, "k": k, "weights": weights, "causal": True}


def _pages(length=8, dtype=torch.float32):
    pages = {"src": torch.tensor([0, 1]), "dst": torch.tensor([4, 5])}
    return {"cache": normal(6, 2, length, dtype=dtype), **pages}


EXAMPLES = {
    "flash_fwd": Example("flash_fwd", _attention(), **_FLASH),
    "flash_fwd causal": Example("flash_fwd", _attention(**_CAUSAL), **_FLASH),
    "flash_decode": Example("flash_decode", _attention(causal=True, num_splits=1)),
    "flash_decode packed": Example("flash_decode", _packed_queries),
    "flash_decode of trees": Example("flash_decode", _tree(_attention(num_splits=1), "parents")),
    "flash_decode packed, of trees": Example("flash_decode", _tree(_packed_queries, "tree_mask")),
    "flash_decode by lists": Example("flash_decode", _listed, **_FLASH),
    "index_scores": Example("index_scores", _indexed),
    "rope": Example("rope", _rope(), **_ROPE),
    "rope at an offset": Example("rope", _rope(**_OFFSET), **_ROPE),
    "rope by positions": Example("rope", _rope(**_POSITIONS), **_ROPE),
    "rope by offsets": Example("rope", _rope(seqlen_offsets=ints(4, 0)), **_ROPE),
    "rope without k": Example("rope", _rope(without_k=True), (), ("q",), _rotated),
    "rope_": Example("rope_", _rope(), **_ROPE_),
    "rope_ at an offset": Example("rope_", _rope(**_OFFSET), **_ROPE_),
    "rope_ by positions": Example("rope_", _rope(**_POSITIONS), **_ROPE_),
    "rope_tables": Example("rope_tables", _tables),
    "merge_state": Example("merge_state", _states(), **_MERGE),
    "merge_state packed": Example("merge_state", _states(packed=True), **_MERGE),
    "merge_state_": Example("merge_state_", _states(), ("out_a", "lse_a")),
    "merge_state_ masked": Example("merge_state_", _states(mask=None), ("out_a", "lse_a")),
    "merge_splits": Example("merge_splits", _partials()),
    "merge_splits and a sink": Example("merge_splits", _partials(sink=True)),
    "softmax": Example("softmax", _scores(dim=1), **_SOFTMAX),
    "softmax_": Example("softmax_", _scores(dim=1), ("x",), **_SOFTMAX),
    "apply_causal_mask_": Example("apply_causal_mask_", _scores("scores", q_offset=1), **_MASK_),
    "append_kv": Example("append_kv", _append(lengths=(0, 0)), _CACHES),
    "append_kv rotated": Example("append_kv", _append(**_ROTATED), (*_CACHES, "q")),
    "append_kv in pages": Example("append_kv", _append(**_PAGED), (*_CACHES, "k_scale", "v_scale")),
    "append_kv of fp8": Example("append_kv", _append(format="fp8_e4m3", cache="indexed"), _CACHES),
    "decode_step": Example("decode_step", _STEP, _CACHES),
    "decode_step packed": Example("decode_step", _packed_step, _CACHES),
    "decode_step packed, of trees": Example("decode_step", _tree(_packed_step, "parents"), _CACHES),
    "copy_pages": Example("copy_pages", _pages, ("cache",)),
}

_QUERIES = {
    "contiguous": lambda q: q.contiguous(),
    "length batch head": lambda q: q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "expanded batch": lambda q: q[:1].expand(2, -1, -1, -1),
    "expanded head": lambda q: q[:, :1].expand(-1, 4, -1, -1),
    "one head": lambda q: q[:, :2][:, ::2].expand(-1, 2, -1, -1),
    "slice of a wider tensor": lambda q: torch.cat([q, q], 3)[..., :16],
    "empty": lambda q: q[:, :, :0],
}
# Operands of other strides. Results must have the same strides on every device.
STRIDED = {
    **{f"flash_fwd: {n}": Example("flash_fwd", _attention(x)) for n, x in _QUERIES.items()},
    **{f"rope: {name}": Example("rope", _rope(name)) for name in LAYOUTS if name != "contiguous"},
    "merge_state: transposed": Example("merge_state", _states(transposed=True)),
    "softmax: permuted": Example("softmax", _scores(layout=lambda x: x.permute(2, 0, 1))),
    "softmax: expanded": Example("softmax", _scores(layout=lambda x: x[:, :1].expand(2, 5, 7))),
    "softmax: sliced": Example("softmax", _scores(layout=lambda x: x[:, ::2, 1:])),
}


def _of_blocks():
    lists = {}
    for side, rows, others in (("kv", 1, 2), ("q", 2, 1)):
        for full in ("", "full_"):
            lists[f"{full}{side}_num_blocks"] = torch.ones(1, 1, rows).int()
            lists[f"{full}{side}_indices"] = torch.zeros(1, 1, rows, others).int()
        lists[f"{side}_order"] = torch.zeros(2, 1, 1, rows).int()
    return _attention()() | lists | {"captures": [], "q_block_size": 8, "kv_block_size": 8}


def _of_blocks_backward():
    arguments, dout, lse = _of_blocks(), normal(2, 4, 8, 8), normal(2, 4, 8)
    return arguments | {"dout": dout, "dlse": lse, "out": dout, "softmax_lse": lse}


def _of_captures():
    lse = normal(2, 4, 8)
    statistics = {"softmax_lse": lse, "delta": lse, "normalisers": lse}
    return _of_blocks() | statistics | {"dout": normal(2, 4, 8, 8)}


# Calls with a BlockMask. tests/flex checks their results.
FLEX = {
    "flex_fwd": Example("flex_fwd", _of_blocks),
    "flex_bwd": Example("flex_bwd", _of_blocks_backward),
    "flex_bwd_captures": Example("flex_bwd_captures", _of_captures),
}


def _with_tensors(length=8, dtype=torch.float32):
    options = {"attn_mask": normal(2, 1, length, 13, seed=3), "learnable_sink": normal(4, seed=4)}
    for i, (side, rows) in enumerate((("q", length), ("k", 13))):
        angles = normal(rows, 4, seed=5 + i)
        options |= {f"{side}_rotary_cos": angles.cos(), f"{side}_rotary_sin": angles.sin()}
    return _attention(alibi_slopes=normal(4, seed=7), **options)(length, dtype)


def _packed(length=8, dtype=torch.float32):
    arguments = _packed_queries(length, dtype)
    del arguments["num_splits"]
    arguments |= {name: arguments[name][0].transpose(0, 1) for name in "kv"}
    return arguments | {"cu_seqlens_k": torch.tensor([0, 6, 13]).int(), "max_seqlen_k": 7}


# Calls whose backward gets more saved tensors than the calls in EXAMPLES.
SAVING = {
    "flash_fwd with tensors": Example(
        "flash_fwd", _with_tensors, (), (*"qkv", "attn_mask", "alibi_slopes", "learnable_sink")
    ),
    "flash_varlen_fwd": Example("flash_varlen_fwd", _packed, **_FLASH),
    "flex_fwd": Example("flex_fwd", _of_blocks, **_FLASH),
}
