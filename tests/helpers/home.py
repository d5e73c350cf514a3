"""The problem of tests whose subject is no size: alike, so that they share specialisations."""

import torch

HEADS = {"heads": 4, "kv_heads": 2}
HOME = HEADS | {"head_dim": 64, "dtype": torch.float16}
PAGE = 16
