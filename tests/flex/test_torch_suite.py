"""What PyTorch's test suite of flex attention tries on functions, by its tests' names.

With gradients of q, k, v and of learned biases; in the reference, as their ops run in the kernels
in test_mods.py.
"""

import pytest
import torch

from tests.attention.autograd_check import normal
from tests.flex.flex_check import home
from tests.flex.test_captured_gradients import check

TOKENS = torch.arange(96) * 5 % 7
COUNTS = torch.tensor([9, 40])


def skip_odd_keys(score, b, h, q, kv):
    return torch.where(kv % 2 == 0, score, float("-inf"))


def function_composition(score, b, h, q, kv):
    def causal(score):
        return torch.where(q >= kv, score, float("-inf"))

    return causal(score + (q - kv) * 2 ** -(h + 1.0))


def trig(score, b, h, q, kv):
    return torch.sin(torch.cos(score)) + torch.tan(b)


def trig2(score, b, h, q, kv):
    return torch.cos(score) * torch.sin(score) + torch.tan(b)


def silu_on_score(score, b, h, q, kv):
    return torch.nn.functional.silu(score)


def seq_masking(score, b, h, q, kv):
    return torch.where(TOKENS[q] == TOKENS[kv], score, float("-inf"))


def dependent_causal_bidirectional(score, b, h, q, kv):
    both = (q < COUNTS[b]) & (kv < COUNTS[b])
    return torch.where(both | (q >= kv), score, float("-inf"))


MODS = [
    *(skip_odd_keys, function_composition, trig, trig2, silu_on_score, seq_masking),
    dependent_causal_bidirectional,
]


@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
def test_score_mods(mod):
    check(home(batch=2), lambda: mod, (), simulated=False)


# Each with the shapes of what it learns.
LEARNED = {
    "head_offset": ([2], lambda s, b, h, q, kv, x: s * x[h]),
    "captured_buffers_all_dims": (
        [2, 2, 80, 96],
        lambda s, b, h, q, kv, x, y, z, w: s + x[h] + y[b] + z[q] + w[kv],
    ),
    "captured_scale": ([()], lambda s, b, h, q, kv, x: s * x),
    "load_from_bias_seq_only": ([(80, 96)], lambda s, b, h, q, kv, x: s + x[q, kv]),
    "load_from_bias_seq_batch": ([(2, 80, 96)], lambda s, b, h, q, kv, x: s + x[b, q, kv]),
    "load_from_bias_head_seq": ([(2, 80, 96)], lambda s, b, h, q, kv, x: s + x[h, q, kv]),
    "load_rel_bias": ([(2, 176)], lambda s, b, h, q, kv, x: s + x[h, q - kv + 96]),
    "index_weird": ([(2, 2, 3)], lambda s, b, h, q, kv, x: s + x[h, b, 0] + x[b, h, -1]),
    "relative_1d_bias": ([176], lambda s, b, h, q, kv, x: s + x[torch.abs(q - kv)]),
    "symmetric_bias": ([96], lambda s, b, h, q, kv, x: s + x[q] + x[kv]),
    "flipped_indexed_bias": ([(96, 80)], lambda s, b, h, q, kv, x: s + x[kv, q]),
    "indirect_bias": ([7], lambda s, b, h, q, kv, x: s + x[TOKENS[q]]),
    "weird_bias": ([(2, 2, 4, 80)], lambda s, b, h, q, kv, x: s + x[b, h, q % 4, kv // 2]),
    "local_window_bias": ([17], lambda s, b, h, q, kv, x: s + x[(q - kv).clamp(-8, 8) + 8]),
    "global_tokens_bias": (
        [96],
        lambda s, b, h, q, kv, x: s + torch.where(kv < 10, x[kv], x[0] * 0.1),
    ),
    "multiplicative_bias": ([80], lambda s, b, h, q, kv, x: s * x[q]),
    "head_specific_gate": ([2], lambda s, b, h, q, kv, x: s * torch.sigmoid(x[h])),
    "learnable_bias_in_half": (
        [80],
        lambda s, b, h, q, kv, x: s + x[q].half().float(),
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned(name):
    shapes, mod = LEARNED[name]

    def make(*learned):
        return lambda *position: mod(*position, *learned)

    learned = [normal(*((x,) if isinstance(x, int) else x), seed=i) for i, x in enumerate(shapes)]
    check(home(batch=2), make, learned, simulated=False)
