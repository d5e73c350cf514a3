"""Gradients of attention through autograd, torch.compile, torch.func and autocast."""

import math

import pytest
import torch

import torch_metal_attn
from tests.attention.autograd_check import loss_of, make_leaves, make_qkv
from torch_metal_attn import reference, simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import ints, normal

flash_fwd = torch.ops.metal_attn.flash_fwd
flash_varlen_fwd = torch.ops.metal_attn.flash_varlen_fwd
flash_bwd = torch.ops.metal_attn.flash_bwd
flash_varlen_bwd = torch.ops.metal_attn.flash_varlen_bwd


def make_packed():
    """q, k, v of 20 and 25 tokens and their packing. The last tokens belong to no sequence."""
    lengths = (5, 0, 9, 3), (7, 4, 0, 12)
    bounds = [torch.tensor([0, *each]).cumsum(0).int() for each in lengths]
    qkv = normal(20, 4, 16), normal(25, 2, 16, seed=1), normal(25, 2, 8, seed=2)
    return qkv, (*bounds, 9, 12)


def gradients(function, tensors, **options):
    leaves = make_leaves(tensors)
    return torch.autograd.grad(loss_of(*function(*leaves, **options)), leaves)


def check(actual, expected, tolerance=2e-5):
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        bound = tolerance * max(other.abs().max().item(), 1e-3)
        torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=bound)


def tables(*shape, seed=7):
    """cos and sin of random angles, times a factor, as in YaRN."""
    angles = normal(*shape, seed=seed)
    return 1.3 * angles.cos(), 1.3 * angles.sin()


def rotary(q_tables, k_tables, interleaved=False):
    names = [f"{side}_rotary_{table}" for side in "qk" for table in ("cos", "sin")]
    named = dict(zip(names, (*q_tables, *k_tables), strict=True))
    return {"rotary_interleaved": interleaved} | named


ROTARY = rotary(tables(11, 6), tables(13, 6, seed=8))
# The second sequence has no keys.
LENGTHS = {"seqused_k": ints(13, 4), "leftpad_k": ints(2, 4), "causal": True}
# Options for make_packed's sequences. Only k's sin table is shared by all sequences.
PACKED = {"seqused_k": ints(3, 0, 0, 12), "causal": True} | rotary(
    tables(4, 10, 8), (tables(4, 12, 8)[0], tables(13, 8)[1]), interleaved=True
)


class TestValues:
    @pytest.mark.parametrize(
        "loss",
        [
            lambda out, lse: (lse * normal(2, 4, 9, seed=4)).sum(),
            lambda out, lse: out.sum(),  # its gradient is expanded, with strides of 0
        ],
        ids=["lse", "sum"],
    )
    def test_loss_of_only_out_or_only_lse(self, loss, backend):
        actual, expected = (
            torch.autograd.grad(loss(*attend(*leaves)), leaves, materialize_grads=True)
            for attend, leaves in (
                (flash_fwd, make_leaves(make_qkv())),
                (attention, make_leaves(make_qkv(), torch.float64)),
            )
        )
        check(actual, expected)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
    def test_some_operands_require_grad(self, wanted, backend):
        tensors = list(make_qkv())
        options = ROTARY | {"causal": True}
        with_float64 = {"compute_dtype": torch.float64} | options
        expected = gradients(attention, [x.double() for x in tensors], **with_float64)
        for index in wanted:
            tensors[index].requires_grad_()
        loss_of(*flash_fwd(*tensors, **options)).backward()
        check([tensors[i].grad for i in wanted], [expected[i] for i in wanted])
        assert all(tensors[i].grad is None for i in range(3) if i not in wanted)


class TestOps:
    def arguments(self):
        q, k, v = make_qkv()
        out, lse = flash_fwd(q, k, v)
        return normal(*out.shape, seed=3), normal(*lse.shape, seed=4), q, k, v, out, lse

    def test_opcheck(self, backend):
        dout, _, *rest = self.arguments()
        torch.library.opcheck(flash_bwd, (dout, None, *rest))

    def test_opcheck_packed(self, backend):
        qkv, packing = make_packed()
        out, lse = flash_varlen_fwd(*qkv, *packing, **PACKED)
        gradients = normal(*out.shape), normal(*lse.shape)
        arguments = (*gradients, *qkv, out, lse, *packing)
        torch.library.opcheck(flash_varlen_bwd, arguments, {"exact_delta": True} | PACKED)


def test_rows_masked_by_the_lowest_float_have_no_gradient():
    """The lowest float plus log(keys) is the lowest float, so the log-sum-exp gives no weights."""
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


class TestErrors:
    @pytest.mark.parametrize("name", ["q_rotary_cos", "k_rotary_sin"])
    def test_rotary_tables_have_no_gradient(self, name):
        options = dict(ROTARY)
        options[name] = options[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"flash_fwd has no gradient for {name}"):
            flash_fwd(*make_qkv(), **options)
        with torch.no_grad():
            flash_fwd(*make_qkv(), **options)

    @pytest.mark.parametrize("options", [{}, ROTARY], ids=["plain", "rotary"])
    @pytest.mark.parametrize("loss", [loss_of, lambda out, lse: out.sum()])
    def test_second_derivatives_are_refused(self, loss, options):
        leaves = make_leaves((*make_qkv(), normal(4)))
        out = flash_fwd(*leaves[:3], learnable_sink=leaves[3], **options)
        first = torch.autograd.grad(loss(*out), leaves, create_graph=True)
        check(first, torch.autograd.grad(loss(*out), leaves), tolerance=1e-6)
        for gradient in first:
            for leaf in leaves:
                with pytest.raises(NotImplementedError, match="no second derivative"):
                    torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)

    def test_forward_mode_is_refused(self):
        dout, dlse, q, k, v, out, lse = TestOps().arguments()
        with pytest.raises(NotImplementedError, match="flash_bwd has no forward-mode"):
            torch.func.jvp(lambda x: flash_bwd(x, dlse, q, k, v, out, lse), (dout,), (dout,))

    def test_out_must_not_be_changed_in_place(self):
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


@pytest.mark.parametrize("case", FOR_GRADCHECK)
def test_gradcheck_of_the_reference(case):
    """By finite differences in float64, with a sink and a bias that hides one key from one head."""
    tensors = make_qkv(1, 2, 1, 3, 4, 4, 3)
    leaves = make_leaves((*tensors, normal(2), normal(2, 1, 4)), torch.float64)
    hidden = torch.zeros(2, 1, 4).index_fill(2, torch.tensor([2]), -math.inf)
    hidden[1] = 0.0

    def outputs(q, k, v, sink, bias):
        plain = attention(q, k, v, **FOR_GRADCHECK[case])
        options = {"learnable_sink": sink, "attn_bias": bias + hidden}
        lse = plain[1].masked_fill(plain[1] == -math.inf, 0.0)
        return plain[0], lse, *attention(q, k, v, **options, **FOR_GRADCHECK[case])

    assert torch.autograd.gradcheck(outputs, leaves)


class TestCallers:
    OPTIONS = ROTARY | {"causal": True}

    def loss(self, q, k, v):
        return loss_of(*flash_fwd(q, k, v, **self.OPTIONS))

    def expected(self):
        return gradients(flash_fwd, make_qkv(), **self.OPTIONS)

    @pytest.mark.parametrize(
        "case, backend", [("sink", "simulator"), ("packed", "reference")], indirect=["backend"]
    )
    def test_compile(self, case, backend):
        def step(q, k, v, sink=None, packing=(), **options):
            if packing:
                out, lse = flash_varlen_fwd(q * 1, k, v, *packing, **options)
                return out * 2, lse.detach()
            out, lse = flash_fwd(q * 1, k, v, learnable_sink=sink, **options)
            return out * 2, lse + 1

        packed = case == "packed"
        compiled = torch.compile(step, fullgraph=True, dynamic=packed, backend="aot_eager")
        for length in (9, 11):
            if packed:
                tensors, packing = make_packed()
                options = {"packing": packing} | PACKED
            else:
                tensors, options = (*make_qkv(q_length=length), normal(4).bfloat16()), LENGTHS
            results = []
            for function in (compiled, step):
                leaves = make_leaves(tensors)
                results.append(torch.autograd.grad(loss_of(*function(*leaves, **options)), leaves))
            check(*results, tolerance=1e-6)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_vmap(self):
        stacked = [torch.stack([x, 2 * x]) for x in make_qkv()]
        each = torch.func.vmap(torch.func.grad(self.loss, argnums=(0, 1, 2)))(*stacked)
        for i, scale in enumerate((1, 2)):
            expected = gradients(flash_fwd, [scale * x for x in make_qkv()], **self.OPTIONS)
            check([x[i] for x in each], expected, tolerance=1e-6)
        leaves = make_leaves(stacked)
        outs = torch.vmap(self.loss)(*leaves)
        options = {"is_grads_batched": True, "retain_graph": True}
        batched = torch.autograd.grad(outs, leaves, torch.eye(2), **options)
        check([x.sum(0) for x in batched], each, tolerance=1e-6)
        check(torch.autograd.grad(outs.sum(), leaves), each, tolerance=1e-6)

    def test_nested_transforms(self):
        q, k, v = make_qkv()
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.func.grad(lambda q: torch.func.grad(self.loss)(q, k, v).sum())(q)
        # scale does not pass through attention, so the outer derivative exists.
        nested = torch.func.grad(
            lambda scale: scale.square() * torch.func.grad(self.loss)(q, k, v).sum().detach()
        )(torch.tensor(3.0))
        check((nested,), (6 * self.expected()[0].sum(),), tolerance=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        "function", ["flash_attn_func", "scaled_dot_product_attention", "flash_attn_varlen_func"]
    )
    def test_autocast(self, function, dtype):
        q, k, v = (x.transpose(1, 2) for x in make_qkv(heads=2))
        attend = getattr(torch_metal_attn, function)
        packing = ()
        if function == "scaled_dot_product_attention":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        elif function == "flash_attn_varlen_func":
            q, k, v = q[0], k[0], v[0]
            packing = (torch.tensor([0, 9]).int(), torch.tensor([0, 13]).int(), 9, 13)
        leaves = make_leaves((q, k, v))
        half_v = leaves[2].to(dtype)  # as from a linear layer; rotated q and k are float32
        weight = normal(*q.shape[:-1], 8, seed=5)
        with torch.autocast("cpu", dtype=dtype):
            out = attend(leaves[0], leaves[1], half_v, *packing)
            loss = (out * weight).sum()
            (inside,) = torch.autograd.grad(loss, leaves[0], retain_graph=True)
        assert out.dtype == dtype
        actual = torch.autograd.grad(loss, leaves)
        assert {x.dtype for x in actual} == {torch.float32}
        assert torch.equal(inside, actual[0])
        halves = [x.detach().to(dtype).requires_grad_() for x in leaves]
        expected = torch.autograd.grad((attend(*halves, *packing) * weight).sum(), halves)
        check(actual, expected, tolerance=1e-6)

    def test_autocast_for_mps_does_not_affect_cpu_calls(self):
        q = normal(1, 9, 2, 8)
        torch.set_autocast_enabled("mps", True)
        try:
            assert torch_metal_attn.flash_attn_func(q, q, q).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("mps", False)

    def test_forward_and_backward_run_in_the_simulator_independently(self):
        leaves, expected = make_leaves(make_qkv()), self.expected()
        with simulate(check=True) as run:
            loss = self.loss(*leaves)
        check(torch.autograd.grad(loss, leaves), expected, tolerance=1e-5)
        assert [launch.kernel for launch in run.launches] == ["flash_fwd"]
        loss = self.loss(*leaves)
        with simulate(check=True) as run:
            check(torch.autograd.grad(loss, leaves), expected, tolerance=1e-5)
        kernels = [launch.kernel.removeprefix("flash_bwd_") for launch in run.launches]
        assert kernels == ["delta", "dq", "dkv", "rope", "rope"]


class TestMemory:
    def test_only_expanded_gradients_are_copied(self, monkeypatch):
        copies = []
        contiguous = torch.Tensor.contiguous

        def counted(x, **options):
            copies.append(x)
            return contiguous(x, **options)

        monkeypatch.setattr(torch.Tensor, "contiguous", counted)
        leaves = make_leaves(make_qkv())
        out, lse = flash_fwd(*leaves)
        with simulate(check=True):
            torch.autograd.grad(out, leaves, normal(*out.shape), True)
            torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
            assert not copies
            torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        assert len(copies) == 1

    def test_long_sequences_need_little_memory(self, monkeypatch):
        qkv = make_qkv(q_length=97)
        expected = gradients(flash_fwd, qkv, causal=True)
        shapes = []
        block = reference._query_block
        monkeypatch.setattr(
            reference, "_query_block", lambda q, *rest: shapes.append(q.shape[2]) or block(q, *rest)
        )
        monkeypatch.setattr(reference, "_SCORES_PER_BLOCK", 2 * 4 * 13 * 10)
        leaves = make_leaves(qkv)
        out, lse = flash_fwd(*leaves, causal=True)
        assert len(shapes) == 10
        check(torch.autograd.grad(loss_of(out, lse), leaves), expected)
        assert len(shapes) == 30  # the backward computes each block twice
        assert max(shapes) == 10
