"""Values and gradients of attention, by subject, within the policy of docs/numerics.md.

A subject is a list of cases of torch_metal_attn.testing. Keys that do not exist are NaN, and no
byte outside the results may change. The gradients of q, k, v and of everything that is added to the
scores are checked. The loss depends on out and on the log-sum-exp.
"""

from itertools import product

import pytest
import torch

from tests.attention.held_cases import FORWARD, case, hold

FURTHEST = 2**31 - 1024
CAUSAL = (False, True)
# Lengths of queries and keys that do not fill tiles.
ODD = [(1, 1), (1, 65), (7, 31), (31, 33), (33, 1), (33, 33), (31, 64), (65, 7), (65, 65)]
BANDED = {"q_length": 65, "kv_length": 97}
# The first key of each of four sequences, and the end of its keys. The tensors have 97 keys.
LENGTHS = [
    ((0, 0, 0, 0), (97, 40, 0, 1)),
    ((0, 33, 97, 96), (97, 97, 97, 97)),
    ((0, 33, 5, 64), (96, 65, 6, 97)),
    ((50, 33, 97, 1), (40, 33, 0, 0)),  # padding beyond the end
    ((32, 64, 31, 33), (64, 96, 65, 95)),
]
NO_PADDING = {"leftpad_k": (0,), "seqused_k": (97,)}
OFFSETS = [None, 0, -1, -64, -40, 1, 31, 32, 40, 96, 97, 140, FURTHEST, -FURTHEST]
WINDOWS = [(0, -1), (32, -1), (-1, 0), (-1, 33), (0, 0), (7, 9), (40, 33), (64, 64)]
GROUPED = {"batch": 2, "heads": 4, "kv_heads": 2}
MASK_LAYOUTS = [
    *(("padded 1",), ("padded 2",), ("padded 3",)),
    *(("order 0132",), ("order 3210",), ("order 0231",)),
]
LAYOUTS = [
    *(("order 021",), ("order 10",), ("order 21",), ("order 201",), ("order 120",)),
    *(("padded 1",), ("padded 2",), ("padded 3",)),
]


def laid_out(q, k, v, *_):
    return {"q_layout": q, "k_layout": k, "v_layout": v}


# Options that change scores. Several subjects have all of them, so that they share kernels.
SCORES = {"softcap": 2.0, "alibi_slopes": "h", "learnable_sink": "float32"}
EVERYTHING = (
    GROUPED
    | {"q_length": 77, "kv_length": 101, "causal": True, "q_offset": 20, "window_size_left": 50}
    | {"attention_chunk": 60, "seqused_k": (90, 101), "leftpad_k": (0, 20), "softcap": 2.0}
    | {"attn_mask": "bool bqk", "learnable_sink": "float16", "softmax_scale": 0.4}
    # There is NaN between rows and between tensors.
    | {"q_layout": ("padded 3",), "k_layout": ("order 021", "padded 3"), "v_layout": ("padded 8",)}
)
FEW = FORWARD | {"heads": 4, "kv_heads": 2, "q_length": 9, "kv_length": 35}
INTERLEAVED = {"rotary": "qk", "rotary_interleaved": True}
DENSE = {
    "lengths": [
        *(case(q_length=q, kv_length=k, causal=c) for (q, k), c in product(ODD, CAUSAL)),
        case(q_length=1023, kv_length=129, heads=1, causal=True, q_offset=-894),
        case(q_length=129, kv_length=1023, head_dim=64, heads=1, causal=True),
    ],
    # Each kind of tile and slice occurs once. Kinds differ in loads of rows, row fragments, sizes
    # of blocks, slices of results, and in what stays in registers. float16 and bfloat16 share
    # tiles. "everything" and "pages" have the remaining kinds.
    "head dims": [
        *(
            case(head_dim=head_dim, dtype=dtype, causal=True, q_offset=20, **options)
            for head_dim, dtype, options in (
                *((1, "bfloat16", {}), (64, "float16", {}), (128, "bfloat16", {})),
                (256, "bfloat16", {"learnable_sink": "bfloat16"}),
                *((192, "float32", FORWARD), (257, "float32", FORWARD)),
                (65, "float16", FORWARD | {"rotary": "qk", "rotary_columns": 64}),
                (129, "bfloat16", FORWARD | INTERLEAVED | {"rotary_columns": 128}),
            )
        ),
        *(
            case(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, causal=True, **options)
            for head_dim, v_head_dim, dtype, options in (
                # The last slice of gradients is narrower, or many slices are empty.
                *((576, 512, "float16", {}), (192, 128, "bfloat16", {}), (40, 385, "bfloat16", {})),
                (575, 3, "float16", INTERLEAVED | {"rotary": "k", "rotary_columns": 6}),
                (448, 448, "float32", {}),  # float32 has the smallest blocks
                *((64, 512, "bfloat16", FEW), (8, 256, "float32", FEW), (511, 511, "float16", FEW)),
            )
        ),
    ],
    # Each copy has separate gradients, as autograd expects for an expanded input.
    "expanded": [
        case(batch=2, kv_heads=2, causal=True, q_layout=layout, k_layout=layout, v_layout=layout)
        for layout in (("repeated 0",), ("repeated 1",), ("repeated 2",))
    ],
    # Rows are in any order, unaligned, or surrounded by NaN.
    "memory": [
        *(
            case(**GROUPED, **laid_out(*LAYOUTS[i:], *LAYOUTS[:i]), causal=True)
            for i in range(len(LAYOUTS))
        ),
        *(
            case(**laid_out(*[("padded 3",)] * 3), causal=True, **dims)
            for dims in (
                {"head_dim": 1, "dtype": "bfloat16"},
                {"head_dim": 40, "v_head_dim": 385, "dtype": "bfloat16"},
                {"head_dim": 12, "dtype": "float32", "seqused_k": (60,), "leftpad_k": (7,)},
            )
        ),
    ],
    "groups": [
        case(batch=2, heads=heads, kv_heads=kv_heads, causal=True)
        for heads, kv_heads in ((1, 1), (3, 1), (7, 7), (12, 4), (9, 3), (17, 1), (0, 2))
    ],
    "diagonals": [case(**BANDED, causal=True, q_offset=offset) for offset in OFFSETS],
    "windows": [
        case(**BANDED, window_size_left=left, window_size_right=right, q_offset=offset)
        for i, (left, right) in enumerate(WINDOWS)
        for offset in OFFSETS[i % 4 :: 4]
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
        # Windows as wide as the offset reach the first keys.
        *(
            case(**BANDED, **{f"window_size_{side}": FURTHEST + more}, q_offset=offset)
            for side, offset in (("left", FURTHEST), ("right", -FURTHEST))
            for more in (-1, 0, 1)
        ),
    ],
    "chunks": [
        *(
            case(**BANDED, attention_chunk=chunk, q_offset=offset, **visible)
            for chunk, visible, offset in product(
                (1, 5, 32, 33, 97, 1000), ({}, {"causal": True} | NO_PADDING), (None, -40, 90)
            )
        ),
        case(**BANDED, **NO_PADDING, attention_chunk=20, window_size_left=7, window_size_right=9),
        *(
            case(**BANDED, attention_chunk=chunk, q_offset=offset)
            for chunk, offset in product((FURTHEST, 2**30, 7), (FURTHEST - 90, -FURTHEST))
        ),
    ],
    "chunks after padding": [
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
            {"causal": True, "q_offset": 20, "dtype": "float32", "head_dim": 12},
            {"window_size_left": 9, "window_size_right": 14, "dtype": "float32", "head_dim": 12},
        )
    ],
    "scales and caps": [
        *(
            case(**SCORES | {"softcap": cap}, softmax_scale=scale, causal=True)
            for scale, cap in product((0.0, 0.01, -0.7, 3.5), (0.3, 2.0))
        ),
        *(case(**SCORES | {"softcap": cap}, causal=True) for cap in (1e-3, 1.0, 50.0, 1e6)),
        *(case(softmax_scale=scale, causal=True) for scale in (0.0, 0.01, -0.7, 3.5)),
    ],
    "slopes": [
        case(**GROUPED, **SCORES | {"alibi_slopes": shape}, q_offset=offset, threads=1, **visible)
        for shape, offset in (("h", None), ("bh", 0), ("h", -20), ("bh", 50))
        for visible in ({"causal": True}, {"window_size_left": 9})
    ],
    "sinks": [
        case(**GROUPED | lengths, **SCORES, causal=True, q_offset=-5)
        for lengths in ({}, {"kv_length": 0}, {"kv_length": 1})
    ],
    # Masks of an even number of keys are read in pairs, even if a sequence ends within a pair.
    "masks of every shape": [
        case(
            **GROUPED | {"q_length": 35, "kv_length": 70} | lengths,
            attn_mask=f"bool {mask}",
            attn_bias=f"float32 {bias}",
            seed=2,  # with this seed a mask of one number hides nothing
        )
        for shapes, lengths in (
            (("", "q", "h", "bhq"), {}),
            (
                ("k", "qk", "hk", "bk", "bhk", "hqk", "bqk"),
                {"seqused_k": (69, 33), "leftpad_k": (1, 31)},
            ),
        )
        for mask, bias in zip(shapes, shapes[1:] + shapes[:1], strict=True)
    ],
    "masks in memory": [
        case(**GROUPED, kv_length=keys, attn_mask=f"{dtype} bhqk", mask_layout=layout, **options)
        for dtype, keys, options in (
            ("bool", 70, {"attn_bias": "float32 h"}),
            ("float32", 65, {"causal": True}),
        )
        for layout in MASK_LAYOUTS
    ],
    "masks of odd lengths": [
        case(q_length=q, kv_length=k, attn_mask="bool qk", attn_bias="float32 q")
        for q, k in ((1, 1), (2, 1), (1, 2), (7, 31))
    ],
    "biases": [
        *(
            case(**GROUPED, q_length=77, kv_length=101, attn_bias=f"float32 {dims}", causal=True)
            for dims in ("k", "q", "qk", "h", "hk", "hq", "hqk", "b", "bk", "bq", "bhq", "bhqk")
        ),
        # The bias is one number. With this seed it is not -inf.
        case(**GROUPED, attn_bias="float32 ", causal=True, seed=1),
        *(
            case(**GROUPED, attn_bias="float32 bhqk", causal=True, mask_layout=layout)
            for layout in MASK_LAYOUTS
        ),
        *(
            case(q_length=q, kv_length=k, attn_bias=f"float32 {dims}", causal=True)
            for (q, k), dims in product(((2, 1), (2, 65), (33, 1), (65, 33)), ("hqk", "k", "q"))
        ),
        # Many queries share one row of the bias. Its splits are always added in the same order.
        case(q_length=513, kv_length=33, attn_bias="float32 k", causal=True, q_offset=0, threads=1),
    ],
    "rotations": [
        case(rotary="qk", rotary_columns=16, rotary_by_sequence=True, batch=2, causal=True),
        *(
            case(q_length=q, kv_length=k, rotary="qk", rotary_columns=16, window_size_left=left)
            for q, k, left in ((33, 65, 9), (1, 2, 0), (1, 70, 50), (35, 3, 1))
        ),
    ],
    "dropout": [
        case(batch=2, q_length=q, kv_length=k, dropout_p=p, dtype="float32", head_dim=48)
        for q, k, p in ((1, 1, 0.3), (7, 31, 0.8), (65, 1, 0.1), (31, 130, 0.3), (33, 65, 1.0))
    ],
    "equal values": [case(values="constant", causal=c) for c in CAUSAL] + [case(values="zeros")],
    "empty": [
        case(batch=batch, heads=2 * heads, kv_heads=heads, q_length=q, kv_length=k, **options)
        for batch, heads, q, k in ((0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0))
        for options in (
            {},
            SCORES | {"alibi_slopes": "bh", "causal": True, "q_offset": -5},
            {"attn_mask": "bool bhqk", "attn_bias": "float32 bhqk"},
            {"attn_mask": "bool ", "attn_bias": "float32 ", "seed": 2},
        )
    ],
    "everything": [
        case(**EVERYTHING | options)
        for options in (
            # Queries are read again for each block.
            {"dtype": "float32", "head_dim": 320, "v_head_dim": 256, "attn_bias": "float32 bhqk"}
            | {"alibi_slopes": "h", "k_layout": ("order 021", "padded 8"), "q_layout": ()}
            | {"rotary": "qk", "rotary_columns": 80},
            {"dtype": "float16", "head_dim": 64, "attn_bias": "bfloat16 hk", "dropout_p": 0.3}
            | {"rotary": "qk", "rotary_columns": 8, "rotary_interleaved": True},
            # Each slice of v computes its own scores.
            {"dtype": "bfloat16", "head_dim": 8, "v_head_dim": 264, "attn_bias": "float32 bq"}
            | {"alibi_slopes": "bh", "dropout_p": 0.1}
            | {"rotary": "qk", "rotary_columns": 8, "rotary_by_sequence": True},
        )
    ],
}

# The numbers of queries and keys of each sequence.
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
# The options that flash-attn's functions have too.
EVERY_OPTION = SCORES | {"softmax_scale": 0.4, "window_size_left": 11, "attention_chunk": 16}
EVERY_OPTION |= {"causal": True, "dropout_p": 0.3}


def packed(sequences=FEATURED, call="flash_varlen_fwd", **fields):
    sizes = {"heads": 4, "kv_heads": 2, "q_length": 1, "kv_length": 1, "packed": sequences}
    return case(call=call, **sizes | fields)


PACKED = {
    "sequences": [
        packed(sequences, causal=causal, spare_rows=3 * causal)
        for sequences, causal in product(SEQUENCES, CAUSAL)
    ],
    "rows of no sequence": [
        packed(sequences, spare_rows=70)
        for sequences in (SEQUENCES[1], SEQUENCES[6], SEQUENCES[7], SEQUENCES[9])
    ],
    "features": [
        packed(**options, spare_rows=3)
        for options in (
            {"window_size_left": 9, "window_size_right": 20, "seqused_k": (60, 0, 31, 1)}
            | {"attn_mask": "float16 bhqk", "softcap": 1.5, "learnable_sink": "float32"}
            | {"head_dim": 12, "v_head_dim": 300, "dtype": "bfloat16"},
            {"window_size_left": 9, "causal": True, "q_offset": 3, "attn_mask": "bool bhqk"}
            | {"seqused_k": (60, 0, 31, 30), "leftpad_k": (33, 0, 2, 35), "alibi_slopes": "bh"}
            | {"rotary": "qk", "rotary_columns": 16, "rotary_by_sequence": True}
            | {"dtype": "float32"},
            {"attention_chunk": 16, "causal": True, "leftpad_k": (3, 0, 31, 17)}
            | {"attn_mask": "bool bq", "attn_bias": "float32 hqk", "dropout_p": 0.3}
            | {"rotary": "qk", "rotary_columns": 16, "rotary_interleaved": True},
            EVERY_OPTION | {"seqused_k": (60, 0, 31, 30)},
        )
    ],
}

# The numbers of queries and keys of sequences whose first tokens are already in the cache.
PREFILLED = ((16, 100), (1, 33), (0, 5), (70, 300), (9, 0))
USED_OF_PREFILLED = {"seqused_k": (90, 33, 2, 300, 0), "causal": True}
CACHED = {"heads": 4, "kv_heads": 2, "head_dim": 32, "batch": 3, "kv_length": 300, "causal": True}
USED = {"seqused_k": (300, 65, 0)}
ONE_BATCH = {"batch": 1, "seqused_k": (300,), "v_head_dim": 32}
UNALIGNED = {"k_layout": ("padded 1",), "v_layout": ("padded 1",)}
ROWS_FIRST = {"k_layout": ("order 021",), "v_layout": ("order 021",)}
CACHE_FEATURES = (
    {"window_size_left": 90, "softcap": 5.0, "alibi_slopes": "h", "learnable_sink": "float32"}
    | {"rotary": "q", "rotary_columns": 16},
    {"attn_mask": "bool bqk", "attn_bias": "float16 hqk", "leftpad_k": (3, 40, 0)}
    | {"attention_chunk": 50},
)


def in_cache(cache="paged", **fields):
    return case(cache=cache, **CACHED | USED | fields)


CACHED_CASES = {
    "pages": [
        in_cache(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, page=page, **options)
        for head_dim, v_head_dim, dtype, page, layouts in (
            (104, 104, "float32", 1, ({"seqused_k": None, "q_length": 65}, ROWS_FIRST)),
            (8, 257, "bfloat16", 256, ({"q_length": 70}, ROWS_FIRST)),
            (11, 5, "float16", 3, ({"q_length": 70}, ROWS_FIRST)),  # no wide loads
            # Values have slices, and the number of threads does not divide a tile.
            (20, 264, "float16", 16, ({"q_length": 70},)),
        )
        for options in layouts
    ],
    "features in a cache": [
        in_cache(**CACHE_FEATURES[0] | {"rotary": "qk"}),
        in_cache("indexed", **CACHE_FEATURES[1], seed=1),
    ],
    "packed queries in a cache": [
        packed(PREFILLED, cache=cache, spare_rows=9, window_size_left=150, **USED_OF_PREFILLED)
        for cache in ("paged", "indexed")
    ],
    "formats": [
        *(
            in_cache("", format=kv_format, head_dim=64, v_head_dim=32, dtype=dtype)
            for kv_format, dtype in (("q8_0", "float32"), ("fp8_e4m3", "bfloat16"))
        ),
        *(
            in_cache(format=kv_format, head_dim=head_dim, v_head_dim=v_head_dim, page=5, **layout)
            for (kv_format, head_dim, v_head_dim), layout in product(
                (("q4_0", 64, 32), ("fp8_e4m3", 11, 5)), ({}, ROWS_FIRST)
            )
        ),
        # A block of NaN reaches the queries that see it.
        in_cache("", format="q8_0", head_dim=64, dtype="float32", poison="inf in k", **ONE_BATCH),
        # Rows that are not aligned are read byte by byte.
        *(
            in_cache("", format=kv_format, head_dim=64, v_head_dim=32, dtype=dtype, **UNALIGNED)
            for kv_format, dtype in (("q8_0", "float16"), ("q4_0", "float32"))
        ),
        in_cache(format="q8_0", head_dim=64, page=5, **CACHE_FEATURES[1]),
        in_cache("indexed", format="q4_0", head_dim=64, **CACHE_FEATURES[0], seed=1),
    ],
    "packed keys in half precision": [
        packed(((33, 40), (7, 65)), cache_dtype="float16", dtype="float32", causal=True)
    ],
    "half precision under float32": [
        in_cache(cache, cache_dtype=cache_dtype, dtype="float32", head_dim=head_dim, **options)
        for cache, cache_dtype, head_dim, options in (
            ("", "float16", 136, {"v_head_dim": 264}),
            ("paged", "float16", 64, {"v_head_dim": 32, "page": 5} | CACHE_FEATURES[0]),
            ("indexed", "bfloat16", 11, {"v_head_dim": 5} | CACHE_FEATURES[1]),
        )
    ],
}
SUBJECTS = DENSE | PACKED | CACHED_CASES


@pytest.mark.parametrize("subject", SUBJECTS)
def test_values(subject, device):
    hold(SUBJECTS[subject], device)


@pytest.mark.parametrize(
    "subject",
    [
        *("keys that do not exist", "scales and caps", "masks in memory", "slopes", "sinks"),
        *("biases", "rotations", "dropout", "empty", "everything", "features", "pages"),
        *("features in a cache", "packed queries in a cache", "formats"),
    ],
)
def test_values_without_the_simulator(subject):
    """The CPU kernels use torch's operations and have their own gradients."""
    hold(SUBJECTS[subject], torch.device("cpu"))
