"""Values and gradients of attention, by subject, held to the policy of docs/numerics.md.

A row is a case of torch_metal_attn.testing: keys that do not exist are NaN, and no byte outside the
results may change. Gradients are those of q, k, v and of whatever is added to the scores, through
out and the log-sum-exp.
"""

from itertools import product

import pytest
import torch

from tests.attention.head_dims import ALIKE, ALIKE_FORWARD, DIFFERENT, DIFFERENT_FORWARD
from tests.attention.held_cases import DTYPES, FORWARD, case, hold
from tests.cache.kv_caches import FORMATS

FURTHEST = 2**31 - 1024
CAUSAL = (False, True)
# Lengths of queries and keys, of which none fills a tile.
ODD = [(1, 1), (1, 65), (7, 31), (31, 33), (33, 1), (33, 33), (31, 64), (65, 7), (65, 65)]


def of_head_dims():
    for dims in ALIKE:
        yield case(head_dim=dims[0], dtype=name(dims[1]), causal=True, q_offset=20)
    for dims in ALIKE_FORWARD:
        yield case(head_dim=dims[0], dtype=name(dims[1]), causal=True, q_offset=20, **FORWARD)
    for dims in DIFFERENT:
        yield case(head_dim=dims[0], v_head_dim=dims[1], dtype=name(dims[2]), causal=True)
    for dims in DIFFERENT_FORWARD:
        dims = {"head_dim": dims[0], "v_head_dim": dims[1], "dtype": name(dims[2])}
        yield case(heads=4, kv_heads=2, q_length=9, kv_length=35, causal=True, **dims, **FORWARD)


def name(dtype):
    return str(dtype).removeprefix("torch.")


BANDED = {"q_length": 65, "kv_length": 97}
# First keys and ends of four sequences of 97 keys.
LENGTHS = [
    ((0, 0, 0, 0), (97, 40, 0, 1)),
    ((0, 33, 97, 96), (97, 97, 97, 97)),
    ((0, 33, 5, 64), (96, 65, 6, 97)),
    ((50, 33, 97, 1), (40, 33, 0, 0)),  # padding behind the end
    ((32, 64, 31, 33), (64, 96, 65, 95)),
]
OFFSETS = [None, 0, -1, -64, -40, 1, 31, 32, 40, 96, 97, 140, FURTHEST, -FURTHEST]
WINDOWS = [(0, -1), (32, -1), (-1, 0), (-1, 33), (0, 0), (7, 9), (40, 33), (64, 64)]
GROUPED = {"batch": 2, "heads": 4, "kv_heads": 2}
SEEN_IN_PART = {"window_size_left": 9, "seqused_k": (40,), "leftpad_k": (3,)}
SCORES = {"causal": True, "softcap": 2.0, "alibi_slopes": "h", "learnable_sink": "float32"}
EVERYTHING = (
    GROUPED
    | {"q_length": 77, "kv_length": 101, "causal": True, "q_offset": 20, "window_size_left": 50}
    | {"attention_chunk": 60, "seqused_k": (90, 101), "leftpad_k": (0, 20), "softcap": 2.0}
    | {"attn_mask": "bool bqk", "learnable_sink": "float16", "softmax_scale": 0.4}
    | {"rotary": "qk", "rotary_columns": 8}
    # Rows and tensors with NaN between them.
    | {"q_layout": ("padded 3",), "k_layout": ("order 021", "padded 3"), "v_layout": ("padded 8",)}
)
DENSE = {
    "lengths": [
        *(case(q_length=q, kv_length=k, causal=c) for (q, k), c in product(ODD, CAUSAL)),
        case(q_length=1023, kv_length=129, heads=1, causal=True, q_offset=-894),
        *(
            case(q_length=129, kv_length=1023, head_dim=64, heads=1, causal=True, dtype=dtype)
            for dtype in DTYPES[:2]
        ),
    ],
    "head dims": [
        *of_head_dims(),
        # Each slice of v computes its own scores.
        case(head_dim=8, v_head_dim=264, kv_heads=1, **SCORES, attn_mask="bool qk"),
    ],
    "groups": [
        case(batch=2, heads=heads, kv_heads=kv_heads, causal=True)
        for heads, kv_heads in ((1, 1), (3, 1), (7, 7), (12, 4), (9, 3), (17, 1))
    ],
    "diagonals": [case(**BANDED, causal=True, q_offset=offset) for offset in OFFSETS],
    "windows": [
        case(**BANDED, window_size_left=left, window_size_right=right, q_offset=offset)
        for (left, right), offset in product(WINDOWS, OFFSETS[::2])
    ],
    "causal windows": [
        case(**BANDED, window_size_left=left, causal=True, q_offset=offset)
        for left, offset in product((0, 1, 31, 32, 33, 200), (None, -3, 70))
    ],
    "windows beyond 32 bits": [
        *(
            case(**BANDED, window_size_left=size, window_size_right=size, q_offset=offset)
            for size, offset in product((2**31, 2**63 - 1), (0, FURTHEST, -FURTHEST))
        ),
        # As far as the offset, they reach the first keys from there.
        *(
            case(**BANDED, **{f"window_size_{side}": FURTHEST + more}, q_offset=offset)
            for side, offset in (("left", FURTHEST), ("right", -FURTHEST))
            for more in (-1, 0, 1)
        ),
    ],
    "chunks": [
        *(
            case(**BANDED, attention_chunk=chunk, causal=causal, q_offset=offset)
            for chunk, causal, offset in product((1, 5, 32, 33, 97, 1000), CAUSAL, (None, -40, 90))
        ),
        case(**BANDED, attention_chunk=20, window_size_left=7, window_size_right=9),
        *(
            case(**BANDED, attention_chunk=chunk, q_offset=offset)
            for chunk, offset in product((FURTHEST, 2**30, 7), (FURTHEST - 90, -FURTHEST))
        ),
    ],
    "chunks behind padding": [
        case(batch=2, **BANDED, attention_chunk=chunk, causal=True, q_offset=offset, **lengths)
        for chunk, offset in product((5, 32, 50), (None, -40))
        for lengths in (
            {"leftpad_k": (3, 41), "seqused_k": (97, 97)},
            {"leftpad_k": (90, 0), "seqused_k": (60, 70)},
        )
    ],
    "keys that do not exist": [
        case(batch=4, q_length=35, kv_length=97, leftpad_k=first, seqused_k=end, **options)
        for first, end in LENGTHS
        for options in (
            {},
            {"causal": True},
            {"causal": True, "q_offset": 20, "dtype": "float32"},
            {"window_size_left": 9, "window_size_right": 14},
        )
    ],
    "scales and caps": [
        *(
            case(softmax_scale=scale, softcap=cap, causal=True)
            for scale, cap in product((0.0, 0.01, -0.7, 3.5), (0.0, 2.0))
        ),
        *(case(softcap=cap, causal=True) for cap in (1e-3, 0.3, 1.0, 50.0, 1e6)),
    ],
    "masks of every shape": [
        case(**GROUPED, q_length=35, kv_length=70, attn_mask=f"{dtype} {dims}")
        for dtype, dims in product(
            ("bool", "float32"), ("", "k", "q", "qk", "h", "hk", "bk", "bhk", "bhq", "hqk", "bqk")
        )
    ],
    "masks in memory": [
        case(**GROUPED, attn_mask=f"{dtype} bhqk", mask_layout=layout)
        for dtype, layout in product(
            ("bool", "float32"),
            (("padded 1",), ("padded 3",), ("order 0132",), ("order 3210",), ("order 0231",)),
        )
    ],
    "masks and caps": [
        case(softcap=0.5, causal=True, q_offset=-10),
        # Pairs of a mask's keys stay pairs where the keys end within one.
        case(
            **GROUPED | {"kv_length": 70, "attn_mask": "bool bqk", "attn_bias": "float32 bqk"},
            seqused_k=(69, 33),
            leftpad_k=(1, 31),
        ),
    ],
    "masks of odd lengths": [
        case(q_length=q, kv_length=k, attn_mask=f"{dtype} qk")
        for (q, k), dtype in product(((1, 1), (1, 2), (2, 1), (7, 31)), ("bool", "float32"))
    ],
    "biases": [
        *(
            case(**GROUPED, q_length=77, kv_length=101, attn_bias=f"float32 {dims}", causal=True)
            for dims in ("", "k", "q", "qk", "h", "hk", "hq", "hqk", "b", "bk", "bq", "bhq", "bhqk")
        ),
        *(
            case(q_length=q, kv_length=k, attn_bias=f"float32 {dims}", causal=True)
            for (q, k), dims in product(((1, 1), (1, 65), (33, 1), (65, 33)), ("hqk", "k", "q"))
        ),
        case(attn_bias="bfloat16 hqk", attn_mask="bool bk", head_dim=64),
        # One row of keys for very many queries, so that parts are summed up.
        case(heads=8, q_length=1023, kv_length=33, attn_bias="float32 k", causal=True, q_offset=0),
    ],
    "slopes": [
        case(**GROUPED, alibi_slopes=shape, q_offset=offset, causal=causal, dtype="float32")
        for shape, offset, causal in product(("h", "bh"), (None, 0, -20, 50), CAUSAL)
    ],
    "sinks": [
        case(**GROUPED | lengths, learnable_sink=of_sink, causal=True, q_offset=-5)
        for of_sink in ("bfloat16", "float32")
        for lengths in ({}, {"kv_length": 0}, {"kv_length": 1})
    ],
    "rotations": [
        case(**GROUPED, rotary="k", rotary_columns=16, rotary_interleaved=True),
        *(
            case(rotary="qk", rotary_columns=columns, head_dim=head_dim, **options)
            for head_dim, columns, options in (
                (16, 6, {"rotary_interleaved": True}),
                (16, 16, {"rotary_by_sequence": True, "batch": 2, "causal": True}),
                (16, 16, {"q_offset": -7, "window_size_left": 9}),
                (7, 6, FORWARD),
                (129, 128, {"rotary_interleaved": True, "causal": True} | FORWARD),
            )
        ),
        # Queries that are read again for each block.
        case(dtype="float32", head_dim=320, v_head_dim=256, rotary="qk", rotary_columns=80),
        *(
            case(q_length=q, kv_length=k, rotary="qk", rotary_columns=16, causal=True)
            for q, k in ((1, 1), (1, 70), (35, 1))
        ),
    ],
    "dropout": [
        *(
            case(**GROUPED, head_dim=head_dim, dtype=dtype, dropout_p=p)
            for (head_dim, dtype), p in product(((45, "float16"), (128, "bfloat16")), (0.1, 0.8))
        ),
        *(
            case(batch=2, q_length=q, kv_length=k, dropout_p=0.3, dtype="float32", head_dim=48)
            for q, k in ((1, 1), (7, 31), (65, 1), (31, 130))
        ),
        case(dropout_p=0.3, causal=True, softcap=2.0, attn_bias="float32 k", q_length=70),
        case(
            **SEEN_IN_PART | {"attn_mask": "bool k", "alibi_slopes": "h", "dropout_p": 0.3},
            learnable_sink="float32",
        ),
        case(dropout_p=1.0, head_dim=48, dtype="float32"),
    ],
    "equal values": [case(values="constant", causal=c) for c in CAUSAL] + [case(values="zeros")],
    "empty": [
        case(batch=batch, heads=2 * heads, kv_heads=heads, q_length=q, kv_length=k, **options)
        for batch, heads, q, k in ((0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0))
        for options in (
            {},
            {"causal": True, "alibi_slopes": "bh", "attn_bias": "float16 bhqk", "softcap": 3.0}
            | {"learnable_sink": "float16", "attn_mask": "bool bhqk", "attention_chunk": 50},
        )
    ],
    "everything": [
        case(**EVERYTHING, dtype=dtype, attn_bias=f"float32 {dims}", **more)
        for dtype, dims, more in (
            ("float32", "bhqk", {"alibi_slopes": "h"}),
            ("float16", "hk", {"rotary_interleaved": True}),
            ("bfloat16", "bq", {"alibi_slopes": "bh", "rotary_by_sequence": True}),
        )
    ],
}

# Queries and keys of each sequence.
SEQUENCES = [
    ((33, 65),),
    ((33, 65), (7, 31), (70, 40)),
    ((1, 1), (1, 2), (1, 33), (1, 64)),
    ((33, 40), (0, 0), (20, 33)),
    ((0, 0), (33, 40), (0, 0), (0, 0)),
    ((33, 40), (0, 20), (9, 9)),
    ((20, 0), (33, 40), (9, 0)),
    ((0, 0), (0, 0)),
    ((5, 0), (40, 0)),
    ((0, 5), (0, 40)),
    ((64, 64), (64, 32), (32, 64)),
    ((65, 7), (70, 33)),
]
FEATURED = ((33, 65), (0, 0), (7, 31), (70, 40))


def packed(sequences=FEATURED, **fields):
    sizes = {"heads": 4, "kv_heads": 2, "q_length": 1, "kv_length": 1, "packed": sequences}
    return case(call="flash_varlen_fwd", **sizes | fields)


PACKED = {
    "sequences": [
        packed(sequences, causal=causal, spare_rows=3 * causal)
        for sequences, causal in product(SEQUENCES, CAUSAL)
    ],
    "rows of no sequence": [
        packed(sequences, spare_rows=70)
        for sequences in (SEQUENCES[1], SEQUENCES[6], SEQUENCES[7], SEQUENCES[9])
    ],
    "dtypes": [
        packed(dtype="float32", causal=True),
        packed(SEQUENCES[1], head_dim=12, v_head_dim=300, dtype="bfloat16"),
    ],
    "features": [
        packed(**options, spare_rows=3)
        for options in (
            {"window_size_left": 9, "window_size_right": 20, "seqused_k": (60, 0, 31, 1)}
            | {"attn_mask": "float16 bhqk", "softcap": 1.5, "learnable_sink": "float32"},
            {"window_size_left": 9, "causal": True, "q_offset": 3, "attn_mask": "bool bhqk"}
            | {"alibi_slopes": "bh", "rotary": "qk", "rotary_columns": 16},
            {"attention_chunk": 16, "causal": True, "leftpad_k": (3, 0, 31, 17)}
            | {"attn_mask": "bool bqk", "attn_bias": "float32 hqk"}
            | {"rotary": "qk", "rotary_columns": 16, "rotary_interleaved": True},
            {"seqused_k": (60, 0, 31, 30), "leftpad_k": (33, 0, 2, 35), "attn_mask": "bool bq"}
            | {"alibi_slopes": "h", "rotary": "qk", "rotary_by_sequence": True},
            {"attn_bias": "float32 bhqk", "causal": True, "alibi_slopes": "h"}
            | {"dropout_p": 0.3, "head_dim": 48},
        )
    ],
}

# The last queries of sequences, over all their keys so far.
PREFILLED = ((16, 100), (1, 33), (0, 5), (70, 300), (9, 0))
USED_OF_PREFILLED = {"seqused_k": (90, 33, 2, 300, 0), "causal": True}
CACHED = {"heads": 4, "kv_heads": 2, "head_dim": 32, "batch": 3, "kv_length": 300, "causal": True}
USED = {"seqused_k": (300, 65, 0)}
ROWS_FIRST = {"k_layout": ("order 021",), "v_layout": ("order 021",)}
OF_CACHES = (
    {"window_size_left": 90, "softcap": 5.0, "alibi_slopes": "h", "learnable_sink": "float32"}
    | {"rotary": "q", "rotary_columns": 16},
    {"attn_mask": "bool bqk", "attn_bias": "float16 hqk", "leftpad_k": (3, 40, 0)}
    | {"attention_chunk": 50},
)


def stored(cache="paged", **fields):
    return case(cache=cache, **CACHED | USED | fields)


STORED = {
    "page sizes": [
        stored(page=page, **layout) for page, layout in product((1, 3, 256), ({}, ROWS_FIRST))
    ],
    "head dims in pages": [
        stored(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, q_length=70)
        for head_dim, v_head_dim, dtype in (
            *((32, 64, "float32"), (128, 128, "bfloat16")),
            (11, 5, "float16"),  # no wide loads, no whole fragments
            (20, 264, "float16"),  # values in slices; a tile that threads do not divide
        )
    ],
    "features in a cache": [
        *(stored(cache, **options) for cache in ("paged", "indexed") for options in OF_CACHES),
        stored(rotary="qk", rotary_columns=16),
        stored(seqused_k=None, q_length=65),
    ],
    "packed queries in a cache": [
        packed(PREFILLED, cache=cache, spare_rows=9, window_size_left=150, **USED_OF_PREFILLED)
        for cache in ("paged", "indexed")
    ],
    "formats": [
        *(
            stored("", format=kv_format, head_dim=64, v_head_dim=32, dtype=dtype)
            for kv_format, dtype in zip(FORMATS, DTYPES, strict=True)
        ),
        *(
            stored(format=kv_format, head_dim=64, v_head_dim=32, page=5, **layout)
            for kv_format, layout in product(FORMATS, ({}, ROWS_FIRST))
        ),
        *(
            stored(cache, format=kv_format, head_dim=64, **options)
            for kv_format, cache, options in zip(
                FORMATS, ("paged", "indexed", "paged"), (*OF_CACHES[::-1], {}), strict=True
            )
        ),
        stored("", format="fp8_e4m3", head_dim=11, v_head_dim=5),
    ],
    "half precision under float32": [
        stored(cache, cache_dtype=cache_dtype, dtype="float32", head_dim=head_dim, **options)
        for cache, cache_dtype, head_dim, options in (
            ("", "float16", 136, {"v_head_dim": 264}),
            ("paged", "float16", 64, {"v_head_dim": 32, "page": 5} | OF_CACHES[0]),
            ("indexed", "bfloat16", 11, {"v_head_dim": 5} | OF_CACHES[1]),
        )
    ],
}
SUBJECTS = DENSE | PACKED | STORED


@pytest.mark.parametrize("subject", SUBJECTS)
def test_values(subject, device):
    hold(SUBJECTS[subject], device)


@pytest.mark.parametrize(
    "subject",
    [
        *("keys that do not exist", "scales and caps", "masks in memory", "slopes", "sinks"),
        *("rotations", "dropout", "empty", "everything", "features", "page sizes"),
        *("features in a cache", "packed queries in a cache", "formats"),
    ],
)
def test_values_without_the_simulator(subject):
    """Of torch's operations on the CPU, whose gradients are formulas too."""
    hold(SUBJECTS[subject], torch.device("cpu"))
