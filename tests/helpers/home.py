"""Sizes for tests in which the sizes do not matter, so that they share specialisations."""

import torch

HOME = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
PAGE = 16
UNKNOWN_CORES = 40  # the default of csrc/runtime/callbacks.cpp
