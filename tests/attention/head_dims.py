"""Head dims with the dtype that each is tested in: every kind of tile and slice, once.

float16 and bfloat16 have the same tiles; rows of 12 float32 are aligned, and no multiple of 8.
They differ in the loads of their rows, the row fragments, the sizes of blocks, the slices of
results, and in what stays in registers: two that differ in none of it are one too many.
"""

from torch import bfloat16 as BF16
from torch import float16 as F16
from torch import float32 as F32

# Of tests with another subject, which share its kernels.
HOME = 16

ALIKE = [
    *((1, BF16), (12, F32), (64, F32), (64, F16), (128, BF16), (256, BF16)),
]
# Of q and k, and of v; slices of gradients, of which the last is narrower, or many are empty.
# float32 has the smallest blocks.
DIFFERENT = [
    *((576, 512, F16), (192, 128, BF16), (575, 3, F16), (40, 385, BF16), (448, 448, F32)),
]
# Of them, rows that end before their tile's last column.
ODD = [(1, 1, BF16), (12, 12, F32), (40, 385, BF16)]
# What the forward has besides, whose kernels are fewer.
ALIKE_FORWARD = [
    *((64, BF16), (104, F32), (129, BF16), (192, F32), (257, F32), (65, F16), (128, F32)),
]
DIFFERENT_FORWARD = [
    *((512, 64, F32), (64, 512, BF16), (8, 256, F32), (8, 257, BF16), (511, 511, F16)),
]
