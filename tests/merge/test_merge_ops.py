"""What PyTorch itself expects of merge_state and merge_splits, and what they refuse."""

import math

import pytest
import torch

import torch_metal_attn
from tests.helpers.cases import each_case
from tests.helpers.refused import without_data
from tests.merge.test_merge import some_partials, some_states, union
from torch_metal_attn.runtime.device import best_device

NAMESPACES = [torch.ops.metal_attn, torch.ops.metal_attn_simulator]
merge_state = torch.ops.metal_attn.merge_state
merge_splits = torch.ops.metal_attn.merge_splits


def torch_merge_state(out_a, lse_a, out_b, lse_b):
    rows = (lambda t: t.transpose(0, 1)) if out_a.dim() == 3 else (lambda t: t)
    out, lse = union(
        torch.stack([out_a, out_b], -2).float(), torch.stack([rows(lse_a), rows(lse_b)], -1)
    )
    return out.to(out_a.dtype), rows(lse)


@pytest.mark.parametrize("packed, gradient", [(False, True), (True, False)])
def test_opcheck(packed, gradient, device):
    shape = (5, 3, 16) if packed else (2, 3, 5, 16)
    states = [
        t.to(device).requires_grad_(gradient)
        for t in some_states(*shape, dtype=torch.bfloat16, packed=packed)
    ]
    torch.library.opcheck(merge_state, states)
    if not gradient:
        torch.library.opcheck(torch.ops.metal_attn.merge_state_, states)
        partials = [t.to(device) for t in some_partials(2, 3, 5, 7, 16)]
        torch.library.opcheck(merge_splits, partials, {"out_dtype": torch.float16})


def test_opcheck_on_the_cpu_without_the_simulator():
    torch.library.opcheck(merge_state, [t.requires_grad_() for t in some_states(2, 3, 5, 16)])
    options = {"learnable_sink": torch.zeros(3)}
    torch.library.opcheck(merge_splits, some_partials(2, 3, 5, 7, 16), options)


@pytest.mark.parametrize("packed", [False, True])
def test_cpu_without_the_simulator(packed):
    shape = (5, 3, 16) if packed else (2, 3, 5, 16)
    states = list(some_states(*shape, dtype=torch.float16, packed=packed))
    states[1][0] = states[3][1] = -math.inf
    states[2][..., 0] = -0.0
    with torch_metal_attn.simulate(check=True):
        simulated = merge_state(*states)
    for ours, theirs in zip(merge_state(*states), simulated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=1e-6)
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.signbit(), theirs.signbit())


def test_strides_agree():
    states = list(some_states(2, 5, 3, 16))
    states[0] = states[0].transpose(1, 2).contiguous().transpose(1, 2)
    expected = merge_state(*states)
    with best_device(check=True) as device:
        results = merge_state(*(t.to(device) for t in states))
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = merge_state(*(mode.from_tensor(t) for t in states))
    for ours, reference, fake in zip(results, expected, fakes, strict=True):
        assert ours.stride() == reference.stride() == fake.stride()
    assert merge_state(*(t.to("meta") for t in states))[0].shape == states[0].shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, device):
    def step(out_a, lse_a, out_b, lse_b):
        out, lse = merge_state(out_a * 2, lse_a, out_b, lse_b + 1)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (5, 6):
        found = []
        for function in (compiled, step):
            states = [t.to(device).requires_grad_() for t in some_states(2, 3, length, 16)]
            function(*states).backward()
            found.append([t.grad for t in states])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("outputs", ["out", "lse", "both"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype, packed, outputs, device):
    """For all four arguments, through out, lse and both; a state without keys has none."""
    shape = (7, 3, 16) if packed else (2, 3, 7, 16)

    def gradients(op, where):
        states = list(some_states(*shape, dtype=dtype, packed=packed))
        states[1].flatten()[:2] = -math.inf
        states[3].flatten()[1:3] = -math.inf
        states = [t.to(where).requires_grad_() for t in states]
        loss = 0.0
        for name, result in zip(("out", "lse"), op(*states), strict=True):
            weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(
                where
            )
            if name == outputs or outputs == "both":
                finite = result.float().masked_fill(result == -math.inf, 0.0)
                loss = loss + (finite * weights).sum()
        found = torch.autograd.grad(loss, states, allow_unused=True)
        return [torch.zeros(()) if t is None else t.cpu() for t in found]

    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    for ours, expected in zip(
        gradients(merge_state, device), gradients(torch_merge_state, "cpu"), strict=True
    ):
        expected = expected.nan_to_num(0.0).to(ours.dtype).broadcast_to(ours.shape)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_nan_in_a_state_without_keys_has_no_gradient(device):
    states = list(some_states(1, 2, 5, 16))
    states[0][:], states[1][:] = math.nan, -math.inf
    states = [t.to(device).requires_grad_() for t in states]
    out, lse = merge_state(*states)
    (out.sum() + lse.sum()).backward()
    assert (states[0].grad == 0).all()
    assert (states[1].grad == 0).all()
    assert (states[2].grad == 1).all()
    assert (states[3].grad == 1).all()


def test_second_derivatives(device):
    def second(op, where):
        states = [t.to(where).requires_grad_() for t in some_states(1, 2, 3, 8)]
        out, lse = op(*states)
        first = torch.autograd.grad(out.square().sum() + lse.exp().sum(), states, create_graph=True)
        total = sum((g.square()).sum() for g in first)
        return [t.cpu() for t in torch.autograd.grad(total, states)]

    torch.testing.assert_close(
        second(merge_state, device), second(torch_merge_state, "cpu"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_torch_func(namespace):
    states = tuple(some_states(2, 3, 5, 8))
    expected = merge_state(*states)
    batched = [t[None].repeat(3, *[1] * t.dim()) for t in states]
    for one, whole in zip(torch.vmap(namespace.merge_state)(*batched), expected, strict=True):
        torch.testing.assert_close(one, whole[None].expand_as(one))
    gradient = torch.func.grad(lambda out: namespace.merge_state(out, *states[1:])[0].sum())
    own = states[0].clone().requires_grad_()
    merge_state(own, *states[1:])[0].sum().backward()
    torch.testing.assert_close(gradient(states[0]), own.grad)
    with pytest.raises(NotImplementedError, match=r"merge_state has no forward-mode .* out_a"):
        torch.func.jvp(lambda t: namespace.merge_state(t, *states[1:]), states[:1], states[:1])
    partials = some_partials(1, 1, 1, 3, 4)
    with pytest.raises(
        NotImplementedError, match=r"merge_splits has no forward-mode .* partial_lse"
    ):
        torch.func.jvp(lambda t: namespace.merge_splits(partials[0], t), partials[1:], partials[1:])
    merged, _ = namespace.merge_splits(partials[0].requires_grad_(), partials[1])
    with pytest.raises(NotImplementedError, match="merge_splits has no gradient"):
        merged.sum().backward()


def states_but(**changes):
    names = ("out_a", "lse_a", "out_b", "lse_b")
    states = dict(zip(names, some_states(2, 3, 5, 16), strict=True))
    return {name: changes.get(name, lambda t: t)(t) for name, t in states.items()}


def partials_but(**changes):
    names = ("partial_out", "partial_lse")
    partials = dict(zip(names, some_partials(2, 3, 5, 4, 16), strict=True))
    given = {name: changes.pop(name, lambda t: t)(t) for name, t in partials.items()}
    return given | changes


# Arguments and the message, in which dtypes are torch's where there is no data.
REFUSED = {
    "dtype": (
        merge_state,
        lambda: states_but(out_a=lambda t: t.double()),
        r"out_a has dtype float64; it must be float32, float16 or bfloat16",
    ),
    "dtypes": (
        merge_state,
        lambda: states_but(out_b=lambda t: t.half()),
        r"out_b has dtype float16",
    ),
    "rank": (merge_state, lambda: states_but(out_a=lambda t: t[0, 0]), "out_a has 2 dimensions"),
    "shape": (
        merge_state,
        lambda: states_but(out_b=lambda t: t[:, :2]),
        r"out_b has shape \(2, 2, 5, 16\); it must be \(2, 3, 5, 16\)",
    ),
    "lse shape": (
        merge_state,
        lambda: states_but(lse_a=lambda t: t.transpose(1, 2)),
        r"lse_a has shape \(2, 5, 3\); it must be \(2, 3, 5\)",
    ),
    "lse dtype": (
        merge_state,
        lambda: states_but(lse_b=lambda t: t.half()),
        r"lse_b has dtype float16; it must be float32",
    ),
    "stride": (
        merge_state,
        lambda: states_but(out_b=lambda t: t.repeat(1, 1, 1, 2)[..., ::2]),
        r"out_b has strides .*; the last must be 1: call out_b\.contiguous\(\) first",
    ),
    "head dim": (
        merge_state,
        lambda: states_but(out_a=lambda t: t.repeat(1, 1, 1, 33)),
        r"out_a has a head dim of 528; it must be in 1\.\.512",
    ),
    "partials' rank": (
        merge_splits,
        lambda: partials_but(partial_out=lambda t: t[0]),
        r"partial_out has 4 dimensions, shape \(3, 5, 4, 16\); it must have 5",
    ),
    "partials in half": (
        merge_splits,
        lambda: partials_but(partial_out=lambda t: t.half()),
        r"partial_out has dtype float16; it must be float32",
    ),
    "partials' order": (
        merge_splits,
        lambda: partials_but(partial_out=lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
        r"partial_out has strides .*; it must be contiguous",
    ),
    "no splits": (
        merge_splits,
        lambda: partials_but(
            partial_out=lambda t: t[..., :0, :].contiguous(), partial_lse=lambda t: t[..., :0]
        ),
        "partial_out has 0 splits; there must be 1 to 1024",
    ),
    "partial_lse": (
        merge_splits,
        lambda: partials_but(partial_lse=lambda t: t[..., :3]),
        r"partial_lse has shape \(2, 3, 5, 3\); it must be \(2, 3, 5, 4\)",
    ),
    "out_dtype": (
        merge_splits,
        lambda: partials_but(out_dtype=torch.float64),
        r"out_dtype is float64; it must be float32, float16 or bfloat16",
    ),
    "sink": (
        merge_splits,
        lambda: partials_but(learnable_sink=torch.zeros(4)),
        r"learnable_sink has shape \(4,\); it must be \(3,\)",
    ),
    "sink dtype": (
        merge_splits,
        lambda: partials_but(learnable_sink=torch.zeros(3).long()),
        r"learnable_sink has dtype int64",
    ),
}


@pytest.mark.parametrize("where", ["reference", "simulator", "meta"])
@each_case("name", REFUSED)
def test_refused(name, where):
    op, arguments, message = REFUSED[name]
    given = arguments()
    if where == "meta":
        given = without_data(given)
    with pytest.raises(ValueError, match=message):
        if where == "simulator":
            with torch_metal_attn.simulate(check=True):
                op(**given)
        else:
            op(**given)


@pytest.mark.parametrize("name", ["merge_state", "merge_splits"])
def test_device_without_a_kernel_is_named(name):
    arguments = states_but() if name == "merge_state" else partials_but()
    elsewhere = torch._C.DispatchKey.CompositeExplicitAutograd
    with pytest.raises(RuntimeError, match=f"metal_attn::{name} has no kernel for cpu: import"):
        getattr(torch.ops.metal_attn, name).default._op_dk(elsewhere, **arguments)
