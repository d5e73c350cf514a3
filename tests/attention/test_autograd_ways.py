"""Compiling, transforms: every way to ask for attention's gradients gives the same."""

import pytest
import torch

import torch_metal_attn
from tests.attention.autograd_check import (
    LENGTHS,
    PACKED,
    ROTARY,
    check,
    gradients,
    loss_of,
    make_leaves,
    make_packed,
    make_qkv,
    normal,
    rotary,
    tables,
)
from torch_metal_attn import reference, simulate

flash_fwd = torch.ops.metal_attn.flash_fwd
flash_varlen_fwd = torch.ops.metal_attn.flash_varlen_fwd

KERNELS = ["flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]


class TestWays:
    """The same gradients, by every way of asking."""

    OPTIONS = ROTARY | {"causal": True}

    def loss(self, q, k, v):
        return loss_of(*flash_fwd(q, k, v, **self.OPTIONS))

    def expected(self):
        return gradients(flash_fwd, make_qkv(), **self.OPTIONS)

    @pytest.mark.parametrize(
        "case, backend", [("sink", "simulator"), ("packed", "reference")], indirect=["backend"]
    )
    def test_compile(self, case, backend):
        """Through out and lse; for a static length and a new one, or any."""

        def step(q, k, v, sink=None, packing=(), **options):
            if packing:
                out, lse = flash_varlen_fwd(q * 1, k, v, *packing, **options)
                return out * 2, lse.detach()
            out, lse = flash_fwd(q * 1, k, v, learnable_sink=sink, **options)
            return out * 2, lse + 1

        compiled = torch.compile(
            step, fullgraph=True, dynamic=case == "packed", backend="aot_eager"
        )
        for length in (9, 11):
            if case == "packed":
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
        """vmap of the gradient, and the gradient of vmap."""
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
        half_v = leaves[2].to(dtype)  # as from a linear layer, with float32 q and k from a rotation
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

    def test_autocast_of_another_device(self):
        q = normal(1, 9, 2, 8)
        torch.set_autocast_enabled("mps", True)
        try:
            assert torch_metal_attn.flash_attn_func(q, q, q).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("mps", False)

    def test_backward_where_the_simulator_is_off(self):
        """And the other way: each pass runs where it is called."""
        leaves, expected = make_leaves(make_qkv()), self.expected()
        with simulate(check=True) as run:
            loss = self.loss(*leaves)
        check(torch.autograd.grad(loss, leaves), expected, tolerance=1e-5)
        assert [launch.kernel for launch in run.launches] == ["flash_fwd"]
        loss = self.loss(*leaves)
        with simulate(check=True) as run:
            check(torch.autograd.grad(loss, leaves), expected, tolerance=1e-5)
        assert [launch.kernel for launch in run.launches] == [*KERNELS[1:], "rope", "rope"]


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
        with simulate(check=True):
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
