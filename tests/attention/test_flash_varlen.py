"""The results of packed sequences are bit for bit those of each sequence alone, also backward."""

import math
from functools import partial
from itertools import pairwise

import torch

from tests.attention.flash_bwd_check import backward, exact_forward, make_gradients, run
from tests.attention.flash_fwd_check import make_packed
from tests.attention.held_cases import HOME
from tests.attention.test_flash_bwd import assert_same
from torch_metal_attn.testing.judge import ints

LENGTHS = ([33, 0, 7, 70], [65, 0, 31, 40])
CAUSAL = {"causal": True}


def packed(q_lengths=LENGTHS[0], kv_lengths=LENGTHS[1], kv_heads=2):
    shape = {"heads": 4, "kv_heads": kv_heads, "head_dim": HOME, "dtype": torch.float16}
    return make_packed(q_lengths, kv_lengths, **shape)


def gradients(q, k, v, packing, device, options):
    arguments = make_gradients(q, v, (4, len(q)))
    return backward(q, k, v, *arguments, device, options, packing=packing)[2:]


def test_zero_sequences(device):
    q, k, v = (torch.full((length, 2, 16), math.nan).half() for length in (9, 5, 5))
    nothing = (ints(0), ints(0), 0, 0)
    out, lse = run("flash_varlen_fwd", device, q, k, v, *nothing)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    zeros = torch.zeros(9, 2, 16).half()
    arguments = (zeros, torch.zeros(2, 9), q, k, v, zeros, lse, *nothing)
    *actual, _ = run("flash_varlen_bwd", device, *arguments, exact_delta=True)
    assert all((gradient == 0).all() for gradient in actual)
    out, lse = run("flash_varlen_fwd", device, q[:0], k, v, *nothing)
    assert (out.shape, lse.shape) == ((0, 2, 16), (2, 0))


def test_results_equal_those_of_each_sequence_alone(device):
    """Each sequence has so many queries that flash_fwd also computes it if it is alone."""
    q, k, v, *packing = packed([33, 0, 37, 70])
    out, lse = run("flash_varlen_fwd", device, q, k, v, *packing, **CAUSAL)
    dq, dk, dv, delta = gradients(q, k, v, packing, device, CAUSAL)
    dout, dlse = make_gradients(q, v, (4, len(q)))
    exact_out, exact_lse = exact_forward(q, k, v, CAUSAL, packing)
    bounds = (pairwise(ends.tolist()) for ends in packing[:2])
    for q_bounds, kv_bounds in zip(*bounds, strict=True):

        def rows(*tensors, part=slice(*q_bounds)):
            return [x[None, part].transpose(1, 2) for x in tensors]

        def statistics(*tensors, part=slice(*q_bounds)):
            return [x[None, :, part].contiguous() for x in tensors]

        keys = partial(rows, part=slice(*kv_bounds))
        qkv = *rows(q), *keys(k, v)
        alone = run("flash_fwd", device, *qkv, **CAUSAL)
        assert_same(alone, (*rows(out), *statistics(lse)))
        results = *rows(exact_out), *statistics(exact_lse)
        arguments = *rows(dout), *statistics(dlse), *qkv, *results
        *actual, _ = run("flash_bwd", device, *arguments, exact_delta=True, **CAUSAL)
        assert_same(actual, (*rows(dq), *keys(dk, dv), *statistics(delta)))


def test_strides_do_not_change_results(device):
    q, k, v, *packing = packed([33, 20], [33, 20], kv_heads=4)
    expected = run("flash_varlen_fwd", device, q, k, v, *packing)
    expected_gradients = gradients(q, k, v, packing, device, {})
    projection = torch.stack([q, k, v], 1).unbind(1)
    outermost = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    for views in (projection, outermost):
        actual = run("flash_varlen_fwd", device, *views, *packing)
        assert_same(actual, expected)
        assert actual[0].transpose(0, 1).is_contiguous() == (views is outermost)
        assert_same(gradients(*views, packing, device, {}), expected_gradients)
