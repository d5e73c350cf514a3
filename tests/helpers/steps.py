"""Cases of steps: results are compared with float64, and caches bit by bit."""

import pytest
import torch

from tests.helpers.judged import arguments, judge
from torch_metal_attn.testing import Step, steps, tensors

DEFAULTS = {"call": "decode_step", "dtype": "float16", "heads": 4, "kv_heads": 2}
DEFAULTS |= {"head_dim": 64, "v_head_dim": 64, "capacity": 64, "lengths": (13, 20)}


def step(**fields):
    """A step with one query for each new row."""
    arguments = DEFAULTS | fields
    if "length" in fields and (arguments["call"] != "append_kv" or "rotary_columns" in fields):
        arguments.setdefault("q_length", fields["length"])
    return Step(**arguments)


def append(**fields):
    return step(call="append_kv", **fields)


def check_step(**fields):
    judge(step(**fields))


def tensors_of(**fields):
    return {n: x for n, x in arguments(step(**fields)).items() if torch.is_tensor(x)}


def special(x):
    """A copy with rows that are hard to quantise: extremes, ties, equal values, signed zeros."""
    x = x.clone()
    if x.shape[2] < 16:
        return x
    x[:, :, 0] = x[:, :, 1, ::2] = 0
    x[:, :, 0, 1::2] = -0.0
    x[:, :, 1, 5] = torch.nan
    x[:, :, 2, -24] = -torch.inf
    x[:, :, 3, -1] = 3e38
    x[:, :, 4, ::2] *= 1e-6
    x[:, :, 4, 1::2] *= 4e-6  # q8_0's scale is then about 1.3 times the smallest float16
    x[:, :, 5] *= 1e6
    x[:, :, 6, -31], x[:, :, 6, -4] = 50, -50
    x[:, :, 7, -31], x[:, :, 7, -4] = -50, 50
    x[:, :, 8] = (x[:, :, 8] * 8).round() / 64
    x[:, :, 9] = 0.02 * ((x[:, :, 9] * 64).round() / 64)  # a head's scale in fp8
    x[:, :, 10] = -0.3
    x[:, :, 11] = x[:, :, 11].abs()
    x[:, :, 11, ::2] = -0.0
    x[:, :, 12] = 1.01 * x[:, :, 12] - 4e3  # float16 has steps of 2 there
    x[:, :, 13] = -1e5
    x[:, :, 14] *= 1e-3
    x[:, :, 15] = 1.0 + torch.arange(x.shape[3]) * 2.0**-11
    return x


def check_special(**fields):
    """The new rows and the first rows of the cache are `special`."""

    def numbers(*shape, **options):
        x = special(tensors.numbers(*shape, **options))
        # In half precision a NaN may have any bits, so the rows have no NaN.
        return x.masked_fill(x.isnan(), 0.5) if "cache_dtype" in fields else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "numbers", numbers)
        judge(append(length=16, lengths=(3, 11), **fields))
