"""What PyTorch itself expects of softmax, softmax_ and apply_causal_mask_, and what they refuse."""

import math

import pytest
import torch

import torch_metal_attn
from tests.helpers.cases import each_case
from torch_metal_attn.runtime.device import best_device

NAMESPACES = [torch.ops.metal_attn, torch.ops.metal_attn_simulator]
softmax = torch.ops.metal_attn.softmax
softmax_ = torch.ops.metal_attn.softmax_
apply_causal_mask_ = torch.ops.metal_attn.apply_causal_mask_


def make_x(*shape):
    return torch.randn(shape or (2, 5, 7), generator=torch.Generator().manual_seed(0))


def torch_softmax_(x, dim=-1):
    return x.copy_(torch.softmax(x, dim))


def torch_mask_(scores, q_offset=0):
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return scores.masked_fill_(~visible.tril(q_offset), -math.inf)


INPLACE = {
    "softmax_": (softmax_, torch_softmax_),
    "apply_causal_mask_": (apply_causal_mask_, torch_mask_),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, gradient, device):
    x = make_x().to(device, dtype).requires_grad_(gradient)
    torch.library.opcheck(softmax, (x, 1))
    torch.library.opcheck(softmax_, (x.detach().clone(),), {"dim": 1})
    torch.library.opcheck(apply_causal_mask_, (x.detach().clone(),), {"q_offset": 1})


def test_opcheck_on_the_cpu_without_the_simulator():
    torch.library.opcheck(softmax, (make_x().requires_grad_(), 1))
    torch.library.opcheck(softmax_, (make_x(), 1))
    torch.library.opcheck(apply_causal_mask_, (make_x(), 1))


def test_cpu_without_the_simulator():
    x = make_x()
    x[0, 0] = -math.inf
    expected = torch._safe_softmax(x, 1)
    assert torch.equal(softmax(x, 1), expected)
    assert (softmax(x)[0, 0] == 0).all()
    assert torch.equal(apply_causal_mask_(x.clone(), 1), torch_mask_(x.clone(), 1))
    assert torch.equal(softmax_(x, 1), expected)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "expanded", "sliced"])
def test_strides_agree(layout):
    x = {
        "contiguous": make_x(),
        "permuted": make_x().permute(2, 0, 1),
        "expanded": make_x(1, 5, 1).expand(3, 5, 4),
        "sliced": make_x()[:, ::2, 1:],
    }[layout]
    expected = softmax(x, 1)
    with best_device(check=True) as device:
        y = softmax(x.to(device), 1)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = softmax(mode.from_tensor(x), 1)
    assert y.stride() == expected.stride() == fake.stride()
    assert softmax(x.to("meta")).shape == x.shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, device):
    def step(x, n):
        scores = x * 2
        apply_causal_mask_(scores, n)
        y = softmax_(scores, 1)
        return y + softmax(x, 0), scores

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (5, 6):
        x = make_x(n, 8).to(device)
        torch.testing.assert_close(compiled(x, n - 4), step(x, n - 4))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", INPLACE)
def test_gradient_in_place(name, compiled, device):
    """Through what an op writes over: an intermediate, a graph's own input, and a view of one."""
    ours, expected = INPLACE[name]
    # atan takes -inf, and its gradient there is 0: only the op's own would show.
    weights = make_x(5, 7).to(device)

    def loss(op, x, part):
        def step(y):
            op(y[1] if part else y, 1)
            return (y.atan() * weights).sum()

        if compiled:
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        y = x * 3
        total = step(y) + (y.atan() * weights).square().sum()
        total.backward()
        return x.grad

    for part in (False, True):
        gradients = [
            loss(op, make_x().to(device).requires_grad_(), part) for op in (ours, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
        assert gradients[0].count_nonzero() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradient_of_softmax(dtype, device):
    def gradients(op):
        x = make_x().to(device, dtype).requires_grad_()
        weights = make_x(2, 5, 7).flip(0).to(device, dtype)
        (first,) = torch.autograd.grad((op(x, 1) * weights).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        gradients(softmax), gradients(torch.softmax), rtol=tolerance, atol=tolerance
    )


def test_gradient_of_a_hidden_row_is_zero(device):
    x = torch.full((2, 5), -math.inf, device=device)
    x[1] = make_x(5).to(device)
    x.requires_grad_()
    (softmax(x) * make_x(2, 5).to(device)).sum().backward()
    assert (x.grad[0] == 0).all()
    assert x.grad[1].isfinite().all()
    assert x.grad[1].any()


def test_masked_gradient_is_zero_even_of_nan(device):
    x = make_x(3, 5).to(device).requires_grad_()
    y = apply_causal_mask_(x * 1)
    y.backward(torch.full_like(x, math.nan))
    visible = torch.ones(3, 5, dtype=torch.bool).tril()
    assert x.grad.cpu()[visible].isnan().all()
    assert (x.grad.cpu()[~visible] == 0).all()


@pytest.mark.parametrize("name", INPLACE)
def test_what_backward_saved_is_not_written_silently(name, device):
    x = make_x().to(device).requires_grad_()
    saved = x.exp()
    with torch.no_grad():
        INPLACE[name][0](saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", INPLACE)
def test_leaf_is_not_written(name, namespace, part):
    leaf = make_x().requires_grad_()
    with pytest.raises(ValueError, match=r"(x|scores) is a leaf that requires grad"):
        getattr(namespace, name)(leaf[0] if part else leaf)
    assert torch.equal(leaf, make_x())
    with torch.no_grad():
        getattr(namespace, name)(leaf)
    assert not torch.equal(leaf, make_x())


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", ["softmax", *INPLACE])
def test_no_forward_mode(name, namespace):
    op, x = getattr(namespace, name), make_x()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(op, (x,), (x,))
    # In place also because torch.func.grad's argument is a leaf.
    with pytest.raises((NotImplementedError, ValueError)):
        torch.func.grad(lambda x: op(x).sum())(x)


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", ["softmax", *INPLACE])
def test_vmap(name, namespace):
    op = getattr(namespace, name)
    expected = torch.stack([op(part.clone()) for part in make_x()])
    assert torch.equal(torch.vmap(op)(make_x()), expected)


def test_autocast_and_negated_views(device):
    x = make_x().to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert softmax(x).dtype == torch.float32
    torch.testing.assert_close(softmax(torch._neg_view(x)), softmax(-x))
    negated = torch._neg_view(x.clone())
    torch.testing.assert_close(softmax_(negated), softmax(-x))


def test_inference_mode():
    with torch.inference_mode(), torch_metal_attn.simulate(check=True):
        x = make_x()
        torch.testing.assert_close(softmax_(x), torch.softmax(make_x(), -1))


def shrunk():
    x = make_x(4, 4)
    x.untyped_storage().resize_(32)
    return x


def too_many_rows():
    return make_x(1, 1, 3).expand(2**20, 2**12, 3)


# For an op its arguments, and what the message must say.
REFUSED = {
    "None": (softmax, lambda: (None,), "x is None; it must be a tensor"),
    "None in place": (softmax_, lambda: (None,), "x is None; it must be a tensor"),
    "dtype": (softmax, lambda: (make_x().double(),), "x has dtype float64; it must be float32"),
    "integers": (softmax_, lambda: (make_x().int(),), "x has dtype int32; it must be float32"),
    "dim": (softmax, lambda: (make_x(), 3), r"dim is 3; x has 3 dimensions, .* -3\.\.2"),
    "dim below": (softmax_, lambda: (make_x(), -4), r"dim is -4; x has 3 dimensions"),
    "dim of a number": (softmax, lambda: (torch.tensor(1.0), 1), r"dim is 1; x has 0 .* -1\.\.0"),
    "sparse": (softmax, lambda: (make_x(3, 3).to_sparse(),), r"x is sparse .* x\.to_dense\(\)"),
    "shrunk storage": (softmax, lambda: (shrunk(),), "storage of 32 bytes"),
    "length": (
        softmax,
        lambda: (make_x(1).expand(2**31),),
        r"x has a length along dim of 2147483648; it must be in 0\.\.2147482624",
    ),
    "rows": (softmax, lambda: (too_many_rows(),), "more than 2147482624 rows of 3 values"),
    "expanded in place": (
        softmax_,
        lambda: (make_x(1, 3).expand(2, 3),),
        r"x has shape \(2, 3\) and strides \(0, 1\): .* call x\.clone\(\) first",
    ),
    "overlap in place": (
        softmax_,
        lambda: (make_x(9).as_strided((3, 3), (2, 1)),),
        "elements may share memory",
    ),
    "scores None": (apply_causal_mask_, lambda: (None,), "scores is None"),
    "scores dtype": (apply_causal_mask_, lambda: (make_x().long(),), "scores has dtype int64"),
    "rank": (apply_causal_mask_, lambda: (make_x(3),), r"scores has 1 dimensions, shape \(3,\)"),
    "q_offset": (apply_causal_mask_, lambda: (make_x(), 2**31), r"q_offset is 2147483648; it"),
    "q_offset below": (apply_causal_mask_, lambda: (make_x(), -(2**40)), "q_offset is -10995"),
    "scores overlap": (
        apply_causal_mask_,
        lambda: (make_x(1, 3, 3).expand(2, 3, 3),),
        r"scores has shape .* share memory.*: call scores\.clone\(\) first",
    ),
}


@pytest.mark.parametrize("simulated", [False, True])
@each_case("name", REFUSED)
def test_refused(name, simulated):
    op, arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        if simulated:
            with torch_metal_attn.simulate():
                op(*arguments())
        else:
            op(*arguments())


WITH_DATA = ("None", "None in place", "sparse", "shrunk storage", "scores None")


@each_case("name", [name for name in REFUSED if name not in WITH_DATA])
def test_refused_without_data(name):
    op, arguments, message = REFUSED[name]
    x, *rest = arguments()
    x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    with pytest.raises(ValueError, match=message):
        op(x, *rest)


@pytest.mark.parametrize("name", ["softmax", *INPLACE])
def test_device_without_a_kernel_is_named(name):
    op = getattr(torch.ops.metal_attn, name).default
    elsewhere = torch._C.DispatchKey.CompositeExplicitAutograd
    with pytest.raises(RuntimeError, match=f"metal_attn::{name} has no kernel for cpu: import"):
        op._op_dk(elsewhere, make_x())
