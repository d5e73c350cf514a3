"""flash_varlen_bwd, the gradients of packed sequences, against the oracle and the dense op."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_bwd_check import (
    check_flash_varlen_bwd,
    exact_forward,
    make_gradients,
    run,
)
from tests.attention.flash_fwd_check import DTYPES
from tests.attention.flash_fwd_options import DRAWN_HEAD_DIMS, any_options, few_examples, ints
from tests.attention.test_flash_varlen_fwd import (
    FEATURED,
    FEATURES,
    HEAD_DIMS,
    LENGTHS,
    packed,
)


class TestSequences:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("case", LENGTHS)
    def test_lengths(self, case, causal, device):
        check_flash_varlen_bwd(*packed(LENGTHS[case]), causal=causal, device=device)

    @pytest.mark.parametrize("dtype", DTYPES[:2])
    @pytest.mark.parametrize("case", ["three", "empty in the middle"])
    def test_dtypes(self, case, dtype, device):
        arguments = packed(LENGTHS[case], dtype=dtype)
        check_flash_varlen_bwd(*arguments, causal=True, device=device)

    @pytest.mark.parametrize("case", ["three", "no keys at the ends", "nothing", "only keys"])
    def test_rows_behind_the_last_sequence(self, case, device):
        """Every row of dq, dk and dv is written, with 0 for those of nobody, NaN in memory."""
        arguments = packed(LENGTHS[case], spare=(70, 90), longest=(5, 80))
        sink = torch.tensor([1.0, 2.0, 3.0, -math.inf])
        check_flash_varlen_bwd(*arguments, causal=True, device=device)
        check_flash_varlen_bwd(*arguments, learnable_sink=sink, device=device)

    def test_no_sequence(self, device):
        q, k, v = (torch.full((length, 2, 16), math.nan) for length in (9, 5, 5))
        ends, lse = ints(0), torch.full((2, 9), -math.inf)
        zeros = torch.zeros(9, 2, 16)
        arguments = (zeros, zeros[..., 0].t(), q, k, v, zeros, lse, ends, ends, 0, 0)
        *found, _ = run("flash_varlen_bwd", device, *arguments, exact_delta=True)
        assert all((gradient == 0).all() for gradient in found)

    @pytest.mark.parametrize("head_dim, v_head_dim, dtype", HEAD_DIMS)
    def test_head_dims(self, head_dim, v_head_dim, dtype, device):
        shape = {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype}
        arguments = packed(LENGTHS["three"], **shape)
        check_flash_varlen_bwd(*arguments, device=device)

    def test_equals_each_sequence_alone(self, device):
        """To the bit: where a sequence lies in the tensors changes nothing."""
        q, k, v, *packing = packed(LENGTHS["three"])
        found = check_flash_varlen_bwd(q, k, v, *packing, causal=True, device=device)
        dout, dlse = make_gradients(q, v, (4, len(q)))
        out, lse = exact_forward(q, k, v, {"causal": True}, packing)
        for b in range(3):
            rows, keys = (slice(*ends[b : b + 2]) for ends in packing[:2])
            alone = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])]
            forward = out[rows].transpose(0, 1)[None], lse[None, :, rows].contiguous()
            alone_gradients = dout[rows].transpose(0, 1)[None], dlse[None, :, rows].contiguous()
            gradients = run(
                *("flash_bwd", device, *alone_gradients, *alone, *forward),
                exact_delta=True,
                causal=True,
            )
            *parts, delta, _ = (gradient.cpu()[0] for gradient in gradients)
            for whole, part, own in zip(found, parts, (rows, keys, keys), strict=False):
                assert torch.equal(whole[own], part.transpose(0, 1))
            assert torch.equal(found[3][:, rows], delta)

    def test_strides(self, device):
        """q, k and v of one packed projection; heads outermost."""
        q, k, v, *packing = packed([(33, 33), (20, 20)], kv_heads=4)
        expected = check_flash_varlen_bwd(q, k, v, *packing, device=device)
        projection = torch.stack([q, k, v], 1).unbind(1)
        outermost = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
        for views in (projection, outermost):
            found = check_flash_varlen_bwd(*views, *packing, device=device)
            for gradient, whole in zip(found, expected, strict=True):
                assert torch.equal(gradient, whole)


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, device):
    options = FEATURES[feature]
    widths = [t.shape[-1] for name, t in options.items() if name in ("attn_mask", "attn_bias")]
    longest = (0, 1) if widths and widths[0] == 66 else (0, 0)
    arguments = packed(FEATURED, spare=(3, 3), longest=longest)
    check_flash_varlen_bwd(*arguments, **options, device=device)


def test_what_lies_outside_a_sequences_keys_never_shows(device):
    q, k, v, *packing = packed(FEATURED)
    first, end = (33, 0, 2, 5), (60, 0, 31, 30)
    options = {"seqused_k": ints(*end), "leftpad_k": ints(*first), "causal": True}
    *expected, _ = check_flash_varlen_bwd(q, k, v, *packing, **options, device=device)
    starts = packing[1].tolist()
    outside = torch.ones(len(k), dtype=torch.bool)
    for b, start in enumerate(starts[:-1]):
        outside[start + first[b] : start + end[b]] = False
    for tensor in (k, v):
        tensor[outside] = math.nan
    dout, dlse = make_gradients(q, v, (4, len(q)))
    forward = exact_forward(q, k, v, options, packing)
    arguments = (dout, dlse, q, k, v, *forward, *packing)
    found = run("flash_varlen_bwd", device, *arguments, exact_delta=True, **options)
    for gradient, clean in zip(found, expected, strict=False):
        assert torch.equal(gradient.cpu(), clean)
    assert (found[1].cpu()[outside] == 0).all()
    assert (found[2].cpu()[outside] == 0).all()


@few_examples
@given(data=st.data())
def test_every_feature_at_once(device, data):
    length = st.tuples(st.integers(0, 50), st.integers(0, 70))
    lengths = data.draw(st.lists(length, min_size=1, max_size=3))
    head_dim, v_head_dim = data.draw(st.sampled_from(DRAWN_HEAD_DIMS))
    spare = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    arguments = packed(
        lengths,
        spare=spare,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    options = any_options(
        data.draw,
        len(lengths),
        4,
        *arguments[5:],
        head_dim,
        kv_lengths=[kv_length for _, kv_length in lengths],
    )
    check_flash_varlen_bwd(*arguments, **options, dlse=data.draw(st.booleans()), device=device)
