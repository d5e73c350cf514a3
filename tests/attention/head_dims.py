"""Head dims with the dtype that each is tested in: every kind of tile and slice, once.

float16 and bfloat16 have the same tiles; rows of 12 float32 are aligned, and no multiple of 8.
They differ in the loads of their rows, the row fragments, the sizes of blocks, the slices of
results, and in what stays in registers: two that differ in none of it are one too many. Some have a
feature too, which needs no kernels of its own then; "everything" and "pages" of test_values.py have
the others.
"""

# For tests with another subject, so that they share kernels.
HOME = 16

INTERLEAVED = {"rotary": "qk", "rotary_interleaved": True}
ALIKE = [
    *((1, "bfloat16", {}), (64, "float16", {}), (128, "bfloat16", {})),
    (256, "bfloat16", {"learnable_sink": "bfloat16"}),
]
# Head dims of q and k, and of v. The last slice of gradients is narrower, or many are empty.
DIFFERENT = [
    *((576, 512, "float16", {}), (192, 128, "bfloat16", {}), (40, 385, "bfloat16", {})),
    (575, 3, "float16", INTERLEAVED | {"rotary": "k", "rotary_columns": 6}),
    (448, 448, "float32", {}),  # float32 has the smallest blocks
]
# More for the forward, which has fewer kernels.
ALIKE_FORWARD = [
    *((192, "float32", {}), (257, "float32", {})),
    (65, "float16", {"rotary": "qk", "rotary_columns": 64}),
    (129, "bfloat16", INTERLEAVED | {"rotary_columns": 128}),
]
DIFFERENT_FORWARD = [(64, 512, "bfloat16"), (8, 256, "float32"), (511, 511, "float16")]
