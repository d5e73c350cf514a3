"""Gradients of attention as autograd asks for them; other ways are in test_autograd_ways.py.

How near they are to float64 is in test_values.py; here it is that each argument gets its own, and
that none is dropped.
"""

import math

import pytest
import torch

from tests.attention.autograd_check import (
    LENGTHS,
    PACKED,
    ROTARY,
    check,
    expected_gradients,
    loss_of,
    make_leaves,
    make_packed,
    make_qkv,
    normal,
    rotary,
    tables,
)
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention

flash_fwd = torch.ops.metal_attn.flash_fwd
flash_varlen_fwd = torch.ops.metal_attn.flash_varlen_fwd
flash_bwd = torch.ops.metal_attn.flash_bwd
flash_varlen_bwd = torch.ops.metal_attn.flash_varlen_bwd


class TestValues:
    """Of the CPU without the simulator, and with it."""

    def test_sink_that_is_off(self, backend):
        """A sink of -inf, and rows that see no key: no NaN."""
        sink = torch.full((4,), -math.inf, dtype=torch.bfloat16, requires_grad=True)
        results = flash_fwd(*make_qkv(), learnable_sink=sink, **LENGTHS)
        (gradient,) = torch.autograd.grad(loss_of(*results), sink)
        assert (gradient == 0).all()

    @pytest.mark.parametrize(
        "loss",
        [
            lambda out, lse: (out * normal(2, 4, 9, 8, seed=4)).sum(),
            lambda out, lse: (lse * normal(2, 4, 9, seed=4)).sum(),
            lambda out, lse: out.sum(),  # whose gradient has no stride of 1
        ],
        ids=["out", "lse", "sum"],
    )
    def test_of_one_result(self, loss, backend):
        found, expected = (
            torch.autograd.grad(loss(*attend(*leaves)), leaves, materialize_grads=True)
            for attend, leaves in (
                (flash_fwd, make_leaves(make_qkv())),
                (attention, make_leaves(make_qkv(), torch.float64)),
            )
        )
        check(found, expected)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
    def test_some_only(self, wanted, backend):
        tensors = list(make_qkv())
        options = ROTARY | {"causal": True}
        expected = expected_gradients(tensors, **options)
        for index in wanted:
            tensors[index].requires_grad_()
        loss_of(*flash_fwd(*tensors, **options)).backward()
        check([tensors[i].grad for i in wanted], [expected[i] for i in wanted])
        assert all(tensors[i].grad is None for i in range(3) if i not in wanted)


class TestOps:
    def arguments(self, **options):
        q, k, v = make_qkv()
        out, lse = flash_fwd(q, k, v, **options)
        return normal(*out.shape, seed=3), normal(*lse.shape, seed=4), q, k, v, out, lse

    def test_opcheck(self, backend):
        """Without a gradient of the log-sum-exp; with one in the next test."""
        dout, _, *rest = self.arguments()
        torch.library.opcheck(flash_bwd, (dout, None, *rest))

    def test_opcheck_packed(self, backend):
        qkv, packing = make_packed()
        out, lse = flash_varlen_fwd(*qkv, *packing, **PACKED)
        gradients = normal(*out.shape), normal(*lse.shape)
        arguments = (*gradients, *qkv, out, lse, *packing)
        torch.library.opcheck(flash_varlen_bwd, arguments, {"exact_delta": True} | PACKED)

    def test_delta(self, backend):
        dout, dlse, *rest = self.arguments()
        delta = flash_bwd(dout, dlse, *rest)[3]
        check((delta,), ((dout * rest[3]).sum(-1) - dlse,))
        check((flash_bwd(dout, None, *rest)[3],), ((dout * rest[3]).sum(-1),))

    def test_lse_of_more_keys(self, backend):
        """Half of the keys, with out and lse of all: the gradients of all, as in ring attention."""
        dout, dlse, q, k, v, out, lse = self.arguments()
        dq, dk, dv, delta, _ = flash_bwd(dout, dlse, q, k, v, out, lse)
        halves = [slice(None, 6), slice(6, None)]
        parts = [
            flash_bwd(dout, dlse, q, k[:, :, half], v[:, :, half], out, lse) for half in halves
        ]
        check((parts[0][0] + parts[1][0],), (dq,))
        check((torch.cat([p[1] for p in parts], 2), torch.cat([p[2] for p in parts], 2)), (dk, dv))
        check((parts[0][3],), (delta,))


def test_rows_of_nothing_but_the_lowest_float_have_no_gradient():
    """Their log-sum-exp cannot hold how many keys share the weight; a mask means to hide them."""
    qkv = make_qkv(v_head_dim=16)
    mask = torch.zeros(qkv[0].shape[2], qkv[1].shape[2])
    mask[5] = torch.finfo(torch.float32).min
    mask[6, 4:] = torch.finfo(torch.float32).min

    def gradients(attend, dtype):
        q, k, v = make_leaves(qkv, dtype)
        out, _ = attend(q, k, v, attn_mask=mask)
        masked = torch.ones_like(out).index_fill(2, torch.tensor([5]), 0)
        loss = (out if attend is flash_fwd else out * masked).square().sum()
        return torch.autograd.grad(loss, (q, k, v))

    with simulate(check=True):
        actual = gradients(flash_fwd, torch.float32)
    expected = gradients(attention, torch.float64)
    assert (actual[0][:, :, 5] == 0).all()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0, atol=2e-5)


class TestRefusals:
    @pytest.mark.parametrize("name", ["q_rotary_cos", "k_rotary_sin"])
    def test_no_gradient(self, name):
        options = dict(ROTARY)
        options[name] = options[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"flash_fwd has no gradient for {name}"):
            flash_fwd(*make_qkv(), **options)
        with torch.no_grad():
            flash_fwd(*make_qkv(), **options)

    @pytest.mark.parametrize("options", [{}, ROTARY], ids=["plain", "rotary"])
    @pytest.mark.parametrize("loss", [loss_of, lambda out, lse: out.sum()])
    def test_second_derivative(self, loss, options):
        """Of every leaf, also where the gradient that comes in has none of its own."""
        leaves = make_leaves((*make_qkv(), normal(4)))
        out = flash_fwd(*leaves[:3], learnable_sink=leaves[3], **options)
        first = torch.autograd.grad(loss(*out), leaves, create_graph=True)
        check(first, torch.autograd.grad(loss(*out), leaves), tolerance=1e-6)
        for gradient in first:
            for leaf in leaves:
                with pytest.raises(NotImplementedError, match="no second derivative"):
                    torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)

    def test_forward_mode(self):
        dout, dlse, q, k, v, out, lse = TestOps().arguments()
        with pytest.raises(NotImplementedError, match="flash_bwd has no forward-mode"):
            torch.func.jvp(lambda x: flash_bwd(x, dlse, q, k, v, out, lse), (dout,), (dout,))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.hessian(lambda x: loss_of(*flash_fwd(x, k, v)))(q)

    def test_results_changed_in_place(self):
        leaves = make_leaves(make_qkv())
        out, _ = flash_fwd(*leaves)
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


FOR_GRADCHECK = {
    "causal": {"causal": True, "q_offset": -1},  # query 0 sees nothing
    "softcap and ALiBi": {"softcap": 2.0, "alibi_slopes": normal(2).abs().double()},
    "lengths": {
        "seqused_k": torch.tensor([3], dtype=torch.int32),
        "leftpad_k": torch.tensor([1], dtype=torch.int32),
    },
    "rotary": rotary([x.double() for x in tables(3, 2)], [x.double() for x in tables(4, 2)], True),
}


class TestOracle:
    """`reference.attention` itself, by finite differences in float64."""

    @pytest.mark.parametrize("case", FOR_GRADCHECK)
    def test_gradcheck(self, case):
        tensors = make_qkv(1, 2, 1, 3, 4, 4, 3)
        leaves = make_leaves((*tensors, normal(2)), torch.float64)

        def outputs(q, k, v, sink):
            plain = attention(q, k, v, **FOR_GRADCHECK[case])
            with_sink = attention(q, k, v, learnable_sink=sink, **FOR_GRADCHECK[case])
            lse = plain[1].masked_fill(plain[1] == -math.inf, 0.0)
            return plain[0], lse, *with_sink

        assert torch.autograd.gradcheck(outputs, leaves)

    def test_gradcheck_of_a_bias(self):
        q, k, v = make_leaves(make_qkv(1, 2, 1, 3, 4, 4, 3), torch.float64)
        bias = normal(2, 1, 4).double()
        bias[0, 0, 2] = -math.inf
        finite = bias.clone().masked_fill(bias == -math.inf, 0.0).requires_grad_()
        hidden = (bias == -math.inf).double() * -math.inf
        hidden = hidden.nan_to_num(nan=0.0, neginf=-math.inf)
        assert torch.autograd.gradcheck(
            lambda *x: attention(*x[:3], attn_bias=x[3] + hidden), (q, k, v, finite)
        )
