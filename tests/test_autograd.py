"""Gradients of attention as PyTorch asks for them: autograd, compiling, transforms, processes.

How near the kernels' gradients are to float64 is in test_flash_bwd*.py; here it is that each
argument gets its own, by every way there is to ask for it, and that none is dropped.
"""

import math

import pytest
import torch
from processes import run_in_processes
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torch_metal_attn
from torch_metal_attn import reference, simulate
from torch_metal_attn.reference import attention, varlen_attention

flash_fwd = torch.ops.metal_attn.flash_fwd
flash_varlen_fwd = torch.ops.metal_attn.flash_varlen_fwd
flash_bwd = torch.ops.metal_attn.flash_bwd
flash_varlen_bwd = torch.ops.metal_attn.flash_varlen_bwd

KERNELS = ["flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_qkv(batch=2, heads=4, kv_heads=2, q_length=9, kv_length=13, head_dim=16, v_head_dim=8):
    return (
        normal(batch, q_length, heads, head_dim).transpose(1, 2),
        normal(batch, kv_heads, kv_length, head_dim, seed=1),
        normal(batch, kv_heads, kv_length, v_head_dim, seed=2),
    )


def make_leaves(tensors, dtype=None, device=None):
    return [x.detach().to(device=device, dtype=dtype, copy=True).requires_grad_() for x in tensors]


def loss_of(out, lse):
    """Its gradients differ for each element; rows without keys or sink have no lse."""
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    weight = torch.arange(out.numel()).cos().view(out.shape).to(out)
    return (out * weight).sum() + lse.sin().sum()


def gradients(function, tensors, *arguments, **options):
    leaves = make_leaves(tensors)
    return torch.autograd.grad(loss_of(*function(*leaves, *arguments, **options)), leaves)


def expected_gradients(tensors, *arguments, function=attention, **options):
    """Through the oracle, in float64; the tensors' dtype does not round."""
    tensors = [x.double() for x in tensors]
    return gradients(function, tensors, *arguments, **options, compute_dtype=torch.float64)


def check(actual, expected, tolerance=2e-5):
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        scale = max(other.abs().max().item(), 1e-3) if other.numel() else 1.0
        torch.testing.assert_close(
            one.detach().cpu().double(),
            other.detach().cpu().double(),
            rtol=0.0,
            atol=tolerance * scale,
        )


def tables(rows, columns, batch=None, seed=7, factor=1.3):
    """Of no rotation by angles that are small; as YaRN's, they stretch too."""
    shape = (rows, columns) if batch is None else (batch, rows, columns)
    angles = normal(*shape, seed=seed)
    return factor * angles.cos(), factor * angles.sin()


def rotary(q_tables=None, k_tables=None, interleaved=False):
    options = {"rotary_interleaved": interleaved}
    for side, pair in (("q", q_tables), ("k", k_tables)):
        if pair is not None:
            options[f"{side}_rotary_cos"], options[f"{side}_rotary_sin"] = pair
    return options


VISIBLE = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "q_offset": 0},
    "window": {"window_size_left": 3, "window_size_right": 2},
    "chunk": {"causal": True, "attention_chunk": 4},
    "lengths": {
        "seqused_k": torch.tensor([13, 4], dtype=torch.int32),
        "leftpad_k": torch.tensor([2, 4], dtype=torch.int32),
        "causal": True,
    },
    "mask": {"attn_mask": normal(2, 1, 9, 13) > 0.3},
}
SCORES = {
    "scale": {"softmax_scale": 0.7},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": normal(2, 4).abs()},
    "bias": {"attn_bias": normal(1, 4, 9, 13)},
    "floating mask": {"attn_mask": normal(9, 13)},
    "dropout": {"dropout_p": 0.4, "rng_state": torch.tensor([3, 5])},
}
ROTARY = {
    "rotary": rotary(tables(11, 6), tables(13, 6, seed=8)),
    "rotary of q": rotary(tables(9, 8), interleaved=True),
    "rotary of k": rotary(None, tables(13, 8, batch=2)),
    "rotary of mixed tables": rotary(
        (tables(20, 3, batch=2)[0], tables(9, 3)[1]),
        (tables(13, 3, batch=1)[0], tables(14, 3, batch=2)[1]),
        interleaved=True,
    ),
}
OPTIONS = VISIBLE | SCORES | ROTARY


@pytest.fixture(params=["reference", "simulator"])
def backend(request):
    """CPU tensors without and with the simulator."""
    if request.param == "reference":
        yield request.param
        return
    with simulate(check=True):
        yield request.param


class TestValues:
    @pytest.mark.parametrize("case", OPTIONS)
    def test_options(self, case, backend):
        actual = gradients(flash_fwd, make_qkv(), **OPTIONS[case])
        check(actual, expected_gradients(make_qkv(), **OPTIONS[case]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half(self, dtype, backend):
        qkv = [x.to(dtype) for x in make_qkv()]
        options = OPTIONS["rotary"] | {"causal": True}
        actual = gradients(flash_fwd, qkv, **options)
        assert {x.dtype for x in actual} == {dtype}
        rounding = 2.0**-11 if dtype == torch.float16 else 2.0**-8
        check(actual, expected_gradients(qkv, **options), tolerance=8 * rounding)

    @pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("case", ["plain", "lengths", "mask"])
    def test_sink(self, case, sink_dtype, backend):
        sink = normal(4).to(sink_dtype)

        def with_sink(attend):
            return lambda *tensors, **options: attend(
                *tensors[:3], learnable_sink=tensors[3], **options
            )

        actual = gradients(with_sink(flash_fwd), (*make_qkv(), sink), **VISIBLE[case])
        expected = expected_gradients(
            (*make_qkv(), sink), function=with_sink(attention), **VISIBLE[case]
        )
        assert actual[3].dtype == sink_dtype
        check(actual[:3], expected[:3])
        check(actual[3:], expected[3:], 2e-5 if sink_dtype == torch.float32 else 2**-8)

    def test_sink_that_is_off(self, backend):
        """A sink of -inf, and rows that see no key: no NaN."""
        q, k, v = make_qkv()
        sink = torch.full((4,), -math.inf, requires_grad=True)
        options = {"causal": True, "q_offset": -4}
        out, _ = flash_fwd(q, k, v, learnable_sink=sink, **options)
        (gradient,) = torch.autograd.grad(out.square().sum(), sink)
        assert (gradient == 0).all()

    def test_fully_masked_rows(self, backend):
        q, k, v = make_qkv()
        options = {"causal": True, "q_offset": -4}
        leaves = make_leaves((q, k, v))
        out, _ = flash_fwd(*leaves, **options)
        dq, dk, dv = torch.autograd.grad((out * normal(*out.shape)).sum(), leaves)
        assert (dq[:, :, :4] == 0).all()
        assert (dk[:, :, 5:] == 0).all()
        assert (dv[:, :, 5:] == 0).all()
        check((dq, dk, dv), gradients_of_out(q, k, v, **options))

    @pytest.mark.parametrize("which", ["out", "lse"])
    def test_of_one_result(self, which, backend):
        leaves, exact = make_leaves(make_qkv()), make_leaves(make_qkv(), torch.float64)
        index = ("out", "lse").index(which)
        weight = normal(*(2, 4, 9, 8)[: 4 - index], seed=4)
        loss = (flash_fwd(*leaves)[index] * weight).sum()
        actual = torch.autograd.grad(loss, leaves, materialize_grads=True)
        loss = (attention(*exact)[index] * weight).sum()
        check(actual, torch.autograd.grad(loss, exact, materialize_grads=True))

    def test_of_a_sum(self, backend):
        """Its gradient is one number seen everywhere, with no stride of 1."""
        leaves, exact = make_leaves(make_qkv()), make_leaves(make_qkv(), torch.float64)
        actual = torch.autograd.grad(flash_fwd(*leaves)[0].sum(), leaves)
        check(actual, torch.autograd.grad(attention(*exact)[0].sum(), exact))

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
    def test_some_only(self, wanted, backend):
        tensors = list(make_qkv())
        expected = expected_gradients(tensors, **OPTIONS["rotary"])
        for index in wanted:
            tensors[index].requires_grad_()
        loss_of(*flash_fwd(*tensors, **OPTIONS["rotary"])).backward()
        check([tensors[i].grad for i in wanted], [expected[i] for i in wanted])
        assert all(tensors[i].grad is None for i in range(3) if i not in wanted)

    @pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
    def test_empty(self, empty, backend):
        sizes = {"batch": "batch", "queries": "q_length", "keys": "kv_length"}
        qkv = make_qkv(**{sizes[empty]: 0})
        check(gradients(flash_fwd, qkv), [torch.zeros_like(x) for x in qkv])

    def test_strides_of_results(self, backend):
        """A gradient lies in memory as its tensor does."""
        leaves = [make_qkv()[0], *(x.transpose(1, 2).contiguous() for x in make_qkv()[1:])]
        leaves = [leaves[0], *(x.transpose(1, 2) for x in leaves[1:])]
        for x in leaves:
            x.requires_grad_()
        for x, gradient in zip(
            leaves, torch.autograd.grad(flash_fwd(*leaves)[0].sum(), leaves), strict=True
        ):
            assert gradient.stride() == x.stride()

    def test_same_bits(self, backend):
        options = OPTIONS["rotary"] | {"causal": True}
        first, second = (gradients(flash_fwd, make_qkv(), **options) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def gradients_of_out(q, k, v, **options):
    leaves = make_leaves((q, k, v), torch.float64)
    out, _ = attention(*leaves, **options)
    return torch.autograd.grad((out * normal(*out.shape)).sum(), leaves)


PACKED = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"seqused_k": torch.tensor([3, 0, 0, 12], dtype=torch.int32)},
    "rotary": rotary(tables(9, 6), tables(15, 6, seed=8)),
    "rotary of each": rotary(
        tables(10, 8, batch=4), (tables(12, 8, batch=4)[0], tables(13, 8)[1]), interleaved=True
    ),
    "rotary of one batch": rotary(None, tables(12, 8, batch=1)),
}


class TestPacked:
    Q_LENGTHS, KV_LENGTHS = (5, 0, 9, 3), (7, 4, 0, 12)

    def problem(self):
        """20 and 25 tokens, the last of which belong to no sequence."""
        bounds = [
            torch.tensor([0, *lengths]).cumsum(0).int()
            for lengths in (self.Q_LENGTHS, self.KV_LENGTHS)
        ]
        qkv = normal(20, 4, 16), normal(25, 2, 16, seed=1), normal(25, 2, 8, seed=2)
        return qkv, (*bounds, 9, 12)

    @pytest.mark.parametrize("case", PACKED)
    def test_options(self, case, backend):
        qkv, packing = self.problem()
        options = PACKED[case]
        expected = expected_gradients(qkv, *packing, function=varlen_attention, **options)
        actual = gradients(flash_varlen_fwd, qkv, *packing, **options)
        check(actual, expected)
        assert (actual[0][17:] == 0).all()
        assert (actual[1][23:] == 0).all()

    def test_sink(self, backend):
        qkv, packing = self.problem()

        def with_sink(attend):
            return lambda *tensors, **options: attend(
                *tensors[:3], *packing, learnable_sink=tensors[3], causal=True, **options
            )

        tensors = (*qkv, normal(4))
        expected = expected_gradients(tensors, function=with_sink(varlen_attention))
        check(gradients(with_sink(flash_varlen_fwd), tensors), expected)

    def test_no_sequence(self, backend):
        qkv, _ = self.problem()
        nothing = torch.zeros(1, dtype=torch.int32)
        options = rotary(tables(1, 6), tables(1, 6))
        actual = gradients(flash_varlen_fwd, qkv, nothing, nothing, 0, 0, **options)
        assert all((gradient == 0).all() for gradient in actual)


BAD = {
    "dout": (0, lambda x: x[..., :4], "dout has shape"),
    "dout's strides": (0, lambda x: x[..., :1].expand(x.shape), "dout has strides"),
    "dout's dtype": (0, lambda x: x.half(), "dout has dtype"),
    "dlse": (1, lambda x: x[:1], "dlse has shape"),
    "dlse's dtype": (1, lambda x: x.half(), "dlse has dtype"),
    "out": (5, lambda x: x[:1], "out has shape"),
    "lse": (6, lambda x: x[..., :1], "softmax_lse has shape"),
    "lse's strides": (6, lambda x: x.mT.contiguous().mT, "softmax_lse has strides"),
    "k": (3, lambda x: x[..., :8], "k has a head dim of 8"),
}


class TestOps:
    def arguments(self, **options):
        q, k, v = make_qkv()
        out, lse = flash_fwd(q, k, v, **options)
        return normal(*out.shape, seed=3), normal(*lse.shape, seed=4), q, k, v, out, lse

    @pytest.mark.parametrize("with_dlse", [False, True])
    def test_opcheck(self, with_dlse, backend):
        dout, dlse, *rest = self.arguments(causal=True)
        torch.library.opcheck(
            flash_bwd, (dout, dlse if with_dlse else None, *rest), {"causal": True}
        )

    def test_opcheck_packed(self, backend):
        qkv, packing = TestPacked().problem()
        out, lse = flash_varlen_fwd(*qkv, *packing)
        torch.library.opcheck(
            flash_varlen_bwd, (normal(*out.shape), None, *qkv, out, lse, *packing)
        )

    def test_opcheck_of_gradients(self, backend):
        options = OPTIONS["rotary"] | {"causal": True}
        torch.library.opcheck(flash_fwd, make_leaves(make_qkv()), options)

    def test_delta(self, backend):
        dout, dlse, *rest = self.arguments()
        delta = flash_bwd(dout, dlse, *rest)[3]
        check((delta,), ((dout * rest[3]).sum(-1) - dlse,))
        check((flash_bwd(dout, None, *rest)[3],), ((dout * rest[3]).sum(-1),))

    def test_lse_of_more_keys(self, backend):
        """Half of the keys, with out and lse of all: the gradients of all, as in ring attention."""
        dout, dlse, q, k, v, out, lse = self.arguments()
        dq, dk, dv, delta = flash_bwd(dout, dlse, q, k, v, out, lse)
        halves = [slice(None, 6), slice(6, None)]
        parts = [
            flash_bwd(dout, dlse, q, k[:, :, half], v[:, :, half], out, lse) for half in halves
        ]
        check((parts[0][0] + parts[1][0],), (dq,))
        check((torch.cat([p[1] for p in parts], 2), torch.cat([p[2] for p in parts], 2)), (dk, dv))
        check((parts[0][3],), (delta,))

    @pytest.mark.parametrize("case", BAD)
    def test_bad_input(self, case, backend):
        """The kernels' checks, the reference's and the fakes' say the same."""
        arguments = list(self.arguments())
        index, spoil, message = BAD[case]
        arguments[index] = spoil(arguments[index])
        with pytest.raises(ValueError, match=message) as error:
            flash_bwd(*arguments)
        with pytest.raises(ValueError, match=message) as of_fake:
            with FakeTensorMode() as mode:
                flash_bwd(*(mode.from_tensor(x) for x in arguments))
        said, said_of_fake = (
            str(e.value).replace("torch.", "").split(";")[0] for e in (error, of_fake)
        )
        assert said.replace("[", "(").replace("]", ")") == said_of_fake


@pytest.mark.parametrize(
    "name, case",
    [("attn_bias", "bias"), ("attn_mask", "floating mask"), ("alibi_slopes", "alibi")],
)
def test_what_is_added_to_the_scores_has_a_gradient(name, case, device):
    def gradient(attend, device, dtype):
        options = dict(OPTIONS[case])
        options[name] = options[name].detach().clone().to(device, dtype).requires_grad_()
        q, k, v = (t.to(device, dtype) for t in make_qkv())
        out, lse = attend(q, k, v, **options)
        (out.square().sum() + lse.sum()).backward()
        return options[name].grad.cpu()

    actual = gradient(torch.ops.metal_attn.flash_fwd, device, torch.float32)
    expected = gradient(attention, "cpu", torch.float64)
    limit = 2e-5 * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=limit)


def test_rows_of_nothing_but_the_lowest_float_have_no_gradient():
    """Their log-sum-exp cannot hold how many keys share the weight; a mask means to hide them."""
    q, k, _ = make_qkv()
    mask = torch.zeros(q.shape[2], k.shape[2])
    mask[5] = torch.finfo(torch.float32).min
    mask[6, 4:] = torch.finfo(torch.float32).min

    def gradients(attend, dtype):
        q, k, v = (t.to(dtype).requires_grad_() for t in make_qkv())
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
        options = dict(OPTIONS["rotary"])
        options[name] = options[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"flash_fwd has no gradient for {name}"):
            flash_fwd(*make_qkv(), **options)
        with torch.no_grad():
            flash_fwd(*make_qkv(), **options)

    @pytest.mark.parametrize("case", ["plain", "rotary"])
    @pytest.mark.parametrize("loss", [loss_of, lambda out, lse: out.sum()])
    @pytest.mark.parametrize("wanted", [0, 1, 2])
    def test_second_derivative(self, wanted, loss, case):
        """Of every leaf, also where the gradient that comes in has none of its own."""
        leaves = make_leaves(make_qkv())
        out = flash_fwd(*leaves, **OPTIONS[case])
        first = torch.autograd.grad(loss(*out), leaves, create_graph=True)
        check(first, torch.autograd.grad(loss(*out), leaves), tolerance=1e-6)
        for gradient in first:
            with pytest.raises(NotImplementedError, match="no second derivative"):
                torch.autograd.grad(gradient.sum(), leaves[wanted], retain_graph=True)

    def test_second_derivative_of_a_sink(self):
        sink = normal(4).requires_grad_()
        out, _ = flash_fwd(*make_qkv(), learnable_sink=sink)
        (first,) = torch.autograd.grad(out.square().sum(), sink, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(first.sum(), sink)

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


class TestWays:
    """The same gradients, by every way of asking."""

    OPTIONS = OPTIONS["rotary"] | {"causal": True}

    def loss(self, q, k, v):
        return loss_of(*flash_fwd(q, k, v, **self.OPTIONS))

    def expected(self):
        return gradients(flash_fwd, make_qkv(), **self.OPTIONS)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, use_reentrant):
        leaves = make_leaves(make_qkv())
        with simulate() as run:
            checkpoint(self.loss, *leaves, use_reentrant=use_reentrant).backward()
        assert [launch.kernel for launch in run.launches if "rope" not in launch.kernel] == [
            "flash_fwd",
            *KERNELS,
        ]
        check([x.grad for x in leaves], self.expected(), tolerance=1e-5)

    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("case", ["dense", "sink and lse", "packed"])
    def test_compile(self, case, dynamic, backend):
        def step(q, k, v, sink, packing, options):
            if case == "packed":
                out, lse = flash_varlen_fwd(q * 1, k, v, *packing, **options)
            else:
                out, lse = flash_fwd(q * 1, k, v, learnable_sink=sink, **options)
            return out * 2, (lse + 1 if case == "sink and lse" else lse.detach())

        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for length in (9, 11):
            if case == "packed":
                tensors, packing = TestPacked().problem()
                options = PACKED["rotary of each"]
            else:
                tensors, packing = make_qkv(q_length=length), ()
                options = rotary(tables(length, 6), tables(13, 6, seed=8))
            sink = normal(4) if case == "sink and lse" else None
            results = []
            for function in (compiled, step):
                leaves = make_leaves(tensors if sink is None else (*tensors, sink))
                out = function(*leaves[:3], None if sink is None else leaves[3], packing, options)
                loss = loss_of(*(x for x in out))
                results.append(torch.autograd.grad(loss, leaves))
            check(*results, tolerance=1e-6)

    def test_func_grad(self):
        actual = torch.func.grad(self.loss, argnums=(0, 1, 2))(*make_qkv())
        check(actual, self.expected(), tolerance=1e-6)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_vmap(self):
        """Of the gradient, and the gradient of it."""
        stacked = [torch.stack([x, 2 * x]) for x in make_qkv()]
        each = torch.func.vmap(torch.func.grad(self.loss, argnums=(0, 1, 2)))(*stacked)
        for i, scale in enumerate((1, 2)):
            expected = gradients(flash_fwd, [scale * x for x in make_qkv()], **self.OPTIONS)
            check([x[i] for x in each], expected, tolerance=1e-6)
        leaves = make_leaves(stacked)
        torch.vmap(self.loss)(*leaves).sum().backward()
        check([x.grad for x in leaves], each, tolerance=1e-6)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_batched_gradients(self):
        leaves = make_leaves(make_qkv())
        out, _ = flash_fwd(*leaves, **self.OPTIONS)
        weights = normal(3, *out.shape)
        batched = torch.autograd.grad(
            out, leaves, weights, is_grads_batched=True, retain_graph=True
        )
        for i in range(3):
            one = torch.autograd.grad(out, leaves, weights[i], retain_graph=True)
            check([x[i] for x in batched], one, tolerance=1e-6)

    def test_nested_transforms(self):
        q, k, v = make_qkv()
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.func.grad(lambda q: torch.func.grad(self.loss)(q, k, v).sum())(q)
        # Of another function's argument there is one: attention is inside, and linear in this.
        nested = torch.func.grad(
            lambda scale: scale.square() * torch.func.grad(self.loss)(q, k, v).sum().detach()
        )(torch.tensor(3.0))
        check((nested,), (6 * self.expected()[0].sum(),), tolerance=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        "function", ["flash_attn_func", "scaled_dot_product_attention", "flash_attn_varlen_func"]
    )
    def test_autocast(self, function, dtype):
        """As torch's own attention: run in autocast's dtype, gradients in the leaves'."""
        q, k, v = (x.transpose(1, 2) for x in make_qkv(heads=2))
        attend = getattr(torch_metal_attn, function)
        packing = ()
        if function == "scaled_dot_product_attention":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        elif function == "flash_attn_varlen_func":
            q, k, v = q[0], k[0], v[0]
            packing = (torch.tensor([0, 9]).int(), torch.tensor([0, 13]).int(), 9, 13)
        leaves = make_leaves((q, k, v))
        half_v = leaves[2].to(dtype)  # as a linear layer's, beside a rotated float32 q and k
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

    def test_backward_where_the_simulator_is_off(self):
        """And the other way: each pass runs where it is called."""
        leaves, expected = make_leaves(make_qkv()), self.expected()
        with simulate() as run:
            loss = self.loss(*leaves)
        check(torch.autograd.grad(loss, leaves), expected, tolerance=1e-5)
        assert [launch.kernel for launch in run.launches] == ["flash_fwd"]
        loss = self.loss(*leaves)
        with simulate() as run:
            check(torch.autograd.grad(loss, leaves), expected, tolerance=1e-5)
        assert [launch.kernel for launch in run.launches] == [*KERNELS[1:], "rope", "rope"]

    def test_simulators_own_op(self):
        op = torch.ops.metal_attn_simulator.flash_fwd
        check(gradients(op, make_qkv(), **self.OPTIONS), self.expected(), tolerance=1e-5)

    @pytest.mark.parametrize("packed", ["kvpacked", "qkvpacked"])
    def test_packed_functions(self, packed):
        q, k, v = (x.transpose(1, 2) for x in make_qkv(heads=2, q_length=13, v_head_dim=16))
        stacked = torch.stack([k, v] if packed == "kvpacked" else [q, k, v], 2).requires_grad_()
        arguments = (q, stacked) if packed == "kvpacked" else (stacked,)
        attend = getattr(torch_metal_attn, f"flash_attn_{packed}_func")
        weight = normal(2, 13, 2, 16, seed=5)
        (attend(*arguments, causal=True) * weight).sum().backward()
        leaves = make_leaves((q, k, v))
        loss = (torch_metal_attn.flash_attn_func(*leaves, causal=True) * weight).sum()
        expected = torch.stack(torch.autograd.grad(loss, leaves)[-stacked.shape[2] :], 2)
        check((stacked.grad,), (expected,), tolerance=1e-6)


class TestMemory:
    def test_what_is_saved(self):
        """q, k, v, out, lse and the options' tensors, as they are: nothing of Lq * Lk."""
        saved = []
        leaves = make_leaves(make_qkv(q_length=64, kv_length=64))
        options = rotary(tables(64, 6), tables(64, 6))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            out, lse = flash_fwd(*leaves, causal=True, **options)
        tables_given = [x for x in options.values() if isinstance(x, torch.Tensor)]
        pointers = {x.data_ptr() for x in (*leaves, out, lse, *tables_given)}
        assert {x.data_ptr() for x in saved} == pointers
        assert len(saved) == len(pointers)

    def test_gradients_are_whole_rows_without_a_copy(self, monkeypatch):
        """Only a gradient without a last stride of 1 is copied."""
        copies = []
        contiguous = torch.Tensor.contiguous
        monkeypatch.setattr(
            torch.Tensor, "contiguous", lambda x, **kw: copies.append(x) or contiguous(x, **kw)
        )
        leaves = make_leaves(make_qkv())
        out, lse = flash_fwd(*leaves)
        with simulate():
            torch.autograd.grad(out, leaves, normal(*out.shape), True)
            torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
            assert not copies
            torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        assert len(copies) == 1

    def test_long_sequences_need_little_memory(self, monkeypatch):
        """The reference's backward goes block by block too, and is the same."""
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
        assert len(shapes) == 30  # forward, and for the backward once more and again
        assert max(shapes) == 10


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

    def test_no_nan_from_keys_that_do_not_exist(self):
        q, k, v = make_qkv()
        options = VISIBLE["lengths"]
        expected = expected_gradients((q, k, v), **options)
        spoilt = [q, k.clone(), v.clone()]
        for x in spoilt[1:]:
            x[1, :, 4:] = math.nan
            x[:, :, :2] = math.nan
        actual = expected_gradients(spoilt, **options)
        check(actual, expected)


class Block(torch.nn.Module):
    """A layer of attention, as small as one is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.project = torch.nn.Linear(16, 48)
        self.sinks = torch.nn.Parameter(torch.randn(2))

    def forward(self, x):
        qkv = self.project(x).unflatten(-1, (3, 2, 8))
        out = torch_metal_attn.flash_attn_qkvpacked_func(
            qkv, causal=True, learnable_sink=self.sinks
        )
        return out.flatten(-2)


def train_in_a_process(rank):
    model = torch.nn.parallel.DistributedDataParallel(Block())
    model(normal(4, 7, 16, seed=9)[2 * rank : 2 * rank + 2]).square().mean().backward()
    return [p.grad for p in model.module.parameters()]


def test_two_processes(tmp_path):
    """DistributedDataParallel: each of two has half of the batch, and both the mean gradient."""
    results = run_in_processes(train_in_a_process, 2, tmp_path)
    model = Block()
    model(normal(4, 7, 16, seed=9)).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    for gradients in results:
        check(gradients, expected)
