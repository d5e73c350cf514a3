"""rope, rope_ and rope_tables as PyTorch ops: autograd, compiling, fakes, and what they refuse."""

import pytest
import torch

from tests.helpers.cases import each_case
from tests.helpers.refused import refused
from tests.rope.rope_check import LAYOUTS, check_close, make_problem, make_tables, normal, oracle
from torch_metal_attn import simulate
from torch_metal_attn.rope import default
from torch_metal_attn.runtime import extension
from torch_metal_attn.runtime.device import best_device

rope, rope_ = torch.ops.metal_attn.rope, torch.ops.metal_attn.rope_
rope_tables = torch.ops.metal_attn.rope_tables

OPTIONS = [
    {},
    {"seqlen_offset": 3, "interleaved": True},
    {"positions": torch.arange(18).view(2, 9) % 13, "conjugate": True},
    {"seqlen_offsets": torch.tensor([4, 0], dtype=torch.int32)},
]


@pytest.mark.parametrize(
    "options, dtype", zip(OPTIONS, [torch.float32, torch.bfloat16] * 2, strict=True), ids=str
)
def test_opcheck_reference(options, dtype):
    q, k, cos, sin = make_problem(dtype=dtype, head_dim=20, rotary_dim=16)
    torch.library.opcheck(rope, (q, k, cos, sin), options)
    torch.library.opcheck(rope_, (q, k, cos, sin), options)


def test_opcheck_without_k():
    q, _, cos, sin = make_problem(head_dim=20, rotary_dim=16)
    torch.library.opcheck(rope, (q, None, cos, sin))
    torch.library.opcheck(rope_, (q, None, cos, sin))


def test_opcheck_of_gradients():
    q, k, cos, sin = make_problem()
    q.requires_grad_()
    torch.library.opcheck(rope, (q, k, cos, sin))
    torch.library.opcheck(rope, (q, None, cos, sin))
    torch.library.opcheck(rope, (q, k.requires_grad_(), cos, sin))


def test_opcheck_on_device(device):
    q, k, cos, sin = (x.to(device) for x in make_problem(dtype=torch.float16))
    torch.library.opcheck(rope, (q, k, cos, sin))
    torch.library.opcheck(rope_, (q, k, cos, sin))
    inv_freq = default(16)[0].to(device)
    positions = torch.arange(6, device=device)
    torch.library.opcheck(rope_tables, (inv_freq, positions), {"dtype": torch.float16})


def test_opcheck_tables():
    torch.library.opcheck(rope_tables, (default(16)[0], torch.arange(12).view(1, 3, 4)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_agree(layout):
    """The fake, the reference and the device's kernel lay their results out in the same way."""
    q, k, cos, sin = make_problem()
    q, k = LAYOUTS[layout](q), LAYOUTS[layout](k)
    expected = rope(q, k, cos, sin)
    with best_device(check=True) as device:
        out = rope(*(x.to(device) for x in (q, k, cos, sin)))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = rope(*(mode.from_tensor(x) for x in (q, k, cos, sin)))
    for one, two, three in zip(expected, out, fake, strict=True):
        assert one.stride() == two.stride() == three.stride()
        torch.testing.assert_close(two.cpu(), one, rtol=1e-5, atol=1e-5)


def test_cpu_runs_the_reference_without_the_simulator():
    q, k, cos, sin = make_problem(dtype=torch.bfloat16)
    inv_freq = default(16)[0]
    reference = [*rope(q, k, cos, sin), *rope_tables(inv_freq, torch.arange(8))]
    with simulate() as run:
        kernels = [*rope(q, k, cos, sin), *rope_tables(inv_freq, torch.arange(8))]
    assert [launch.kernel for launch in run.launches] == ["rope", "rope_tables"]
    for one, other in zip(reference, kernels, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-5)
    check_close(reference[0], q, cos, sin)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "none")
@pytest.mark.parametrize("needs", ["q", "k", "q k"])
def test_gradients(needs, options, device):
    """Against autograd through the definition, in float64."""
    q, k, cos, sin = make_problem(head_dim=20, rotary_dim=16)
    weights = [normal(*x.shape, seed=5) for x in (q, k)]
    leaves = {"q": q.double().requires_grad_(), "k": k.double().requires_grad_()}
    loss = sum(
        (oracle(x, cos, sin, **options) * w).sum()
        for x, w in zip(leaves.values(), weights, strict=True)
    )
    expected = dict(zip("qk", torch.autograd.grad(loss, [*leaves.values()]), strict=True))
    inputs = {"q": q, "k": k}
    ours = {name: x.to(device).detach().requires_grad_(name in needs) for name, x in inputs.items()}
    on_device = {n: v.to(device) if torch.is_tensor(v) else v for n, v in options.items()}
    outs = rope(*ours.values(), cos.to(device), sin.to(device), **on_device)
    sum((out * w.to(device)).sum() for out, w in zip(outs, weights, strict=True)).backward()
    for name, x in ours.items():
        if name in needs:
            torch.testing.assert_close(x.grad.cpu().double(), expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert x.grad is None


class TestAutograd:
    def test_without_k(self):
        q, _, cos, sin = make_problem()
        q.requires_grad_()
        out, nothing = rope(q, None, cos, sin)
        assert not nothing.requires_grad
        out.sum().backward()
        ones = torch.ones_like(q).detach()
        torch.testing.assert_close(q.grad, rope(ones, None, cos, sin, conjugate=True)[0])

    def test_of_an_expanded_gradient_in_half(self):
        q, k, cos, sin = make_problem(dtype=torch.float16)
        q.requires_grad_()
        rope(q, k, cos, sin)[0].sum().backward()
        assert q.grad.dtype == torch.float16

    def test_second_derivative(self):
        q, k, cos, sin = make_problem()
        q.requires_grad_()
        (grad,) = torch.autograd.grad(rope(q, k, cos, sin)[0].pow(3).sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(grad.pow(2).sum(), q)

        def loss(x):
            return oracle(x, cos, sin).pow(3).sum()

        q64 = q.detach().double().requires_grad_()
        (grad64,) = torch.autograd.grad(loss(q64), q64, create_graph=True)
        (second64,) = torch.autograd.grad(grad64.pow(2).sum(), q64)
        torch.testing.assert_close(second.double(), second64, rtol=1e-4, atol=1e-3)

    def test_func_grad_and_vmap(self):
        q, k, cos, sin = make_problem()
        grad = torch.func.grad(lambda x: rope(x, k, cos, sin)[0].pow(2).sum())(q)
        torch.testing.assert_close(grad, 2 * q, rtol=1e-5, atol=1e-5)
        stacked = torch.stack([q, 2 * q])
        out = torch.vmap(lambda x: rope(x, None, cos, sin)[0])(stacked)
        torch.testing.assert_close(out[1], rope(2 * q, None, cos, sin)[0])

    @pytest.mark.parametrize("name", ["cos", "sin"])
    @pytest.mark.parametrize("op", [rope, rope_])
    def test_tables_have_no_gradient(self, name, op):
        q, k, cos, sin = make_problem()
        arguments = {"q": q, "k": k, "cos": cos, "sin": sin}
        arguments[name].requires_grad_()
        with pytest.raises(NotImplementedError, match=f"no gradient for {name}.*detach"):
            op(**arguments)
        with torch.no_grad():
            op(**arguments)
        with pytest.raises(NotImplementedError, match="no gradient for inv_freq"):
            rope_tables(default(8)[0].requires_grad_(), torch.arange(3))
        with pytest.raises(NotImplementedError, match="no gradient for positions"):
            rope_tables(default(8)[0], torch.arange(3.0).requires_grad_())

    @pytest.mark.parametrize("position", range(4))
    def test_no_forward_mode(self, position):
        arguments = list(make_problem())

        def rotated(x):
            return rope(*arguments[:position], x, *arguments[position + 1 :])[0]

        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(rotated, (arguments[position],), (arguments[position],))

    @pytest.mark.parametrize("views", [False, True])
    def test_in_place(self, views, device):
        """q and k are results of other operations, or views of one, as a joint projection's are."""
        _, _, cos, sin = make_problem(head_dim=8)
        cos, sin = cos.to(device), sin.to(device)
        packed = normal(2, 9, 6, 8).to(device).requires_grad_()
        weight = normal(2, 9, 6, 8, seed=1).to(device)

        def loss(rotate):
            if views:
                joint = packed * 2
                q, k = joint[:, :, :4].transpose(1, 2), joint[:, :, 4:].transpose(1, 2)
                results = rotate(q, k)
            else:
                q, k = packed[:, :, :4].transpose(1, 2) * 2, packed[:, :, 4:].transpose(1, 2) * 2
                results = rotate(q, k)
            return (torch.cat([x.transpose(1, 2) for x in results], 2) * weight).sum()

        def in_place(q, k):
            rope_(q, k, cos, sin, seqlen_offset=2)
            return q, k

        expected = loss(lambda q, k: rope(q, k, cos, sin, seqlen_offset=2))
        (expected_grad,) = torch.autograd.grad(expected, packed)
        ours = loss(in_place)
        torch.testing.assert_close(ours, expected)
        (grad,) = torch.autograd.grad(ours, packed)
        torch.testing.assert_close(grad, expected_grad)

    def test_in_place_on_a_leaf_changes_nothing(self):
        q, k, cos, sin = make_problem()
        k.requires_grad_()
        before = q.clone(), k.detach().clone()
        with pytest.raises(RuntimeError, match="k is a leaf that requires grad"):
            rope_(q, k, cos, sin)
        assert torch.equal(q, before[0])
        assert torch.equal(k, before[1])

    @pytest.mark.parametrize("grad", [False, True])
    def test_in_place_is_seen_by_the_graph(self, grad):
        """What autograd has saved and rope_ has overwritten is no longer good for a gradient."""
        q, k, cos, sin = make_problem()
        x = (q if not grad else q.requires_grad_()) * 1
        weight = torch.ones(16, requires_grad=True)
        product = x * weight
        version = x._version
        rope_(x, k, cos, sin)
        assert x._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compile(grad, dynamic, device):
    inv_freq = default(16)[0].to(device)

    def step(q, k, positions):
        cos, sin = rope_tables(inv_freq, positions)
        rotated, k_rotated = rope(q * 2, k, cos, sin, seqlen_offset=1, interleaved=True)
        return rotated + 1, k_rotated

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (9, 11):
        q, k, _, _ = (x.to(device) for x in make_problem(length=length))
        q.requires_grad_(grad)
        positions = torch.arange(length + 3, device=device)
        results, expected = compiled(q, k, positions), step(q, k, positions)
        torch.testing.assert_close(results, expected)
        if grad:
            (ours,) = torch.autograd.grad(results[0].pow(2).sum(), q)
            (theirs,) = torch.autograd.grad(expected[0].pow(2).sum(), q)
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic, grad", [(False, False), (True, True)])
def test_compile_in_place(dynamic, grad, device):
    def step(x, cos, sin):
        packed = x * 2
        q, k = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:].transpose(1, 2)
        rope_(q, k, cos, sin)
        rope_(q, None, cos, sin, seqlen_offset=2)
        return packed, q + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (9, 11):
        _, _, cos, sin = (x.to(device) for x in make_problem(length=length))
        x = normal(2, length, 6, 16).to(device).requires_grad_(grad)
        results, expected = compiled(x, cos, sin), step(x, cos, sin)
        torch.testing.assert_close(results, expected)
        if grad:
            (ours,) = torch.autograd.grad(results[1].pow(2).sum(), x)
            (theirs,) = torch.autograd.grad(expected[1].pow(2).sum(), x)
            torch.testing.assert_close(ours, theirs)


def test_compile_in_place_on_an_input(device):
    q, k, cos, sin = (x.to(device) for x in make_problem())
    expected = rope(q, k, cos, sin)
    torch.compile(rope_, fullgraph=True, backend="aot_eager")(q, k, cos, sin)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_autocast_changes_nothing():
    q, k, cos, sin = make_problem()
    expected = rope(q, k, cos, sin)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rope(q, k, cos, sin)[0], expected)


def test_inference_mode():
    q, k, cos, sin = make_problem()
    expected = rope(q, k, cos, sin)[0]
    with torch.inference_mode():
        mine = q.clone()
        rope_(mine, k, cos, sin)
    assert torch.equal(mine, expected)


def test_meta_tensors_have_shapes():
    q, k, cos, sin = (x.to("meta") for x in make_problem())
    outs = rope(q, k, cos, sin)
    assert [out.shape for out in outs] == [q.shape, k.shape]
    rope_(q, k, cos, sin)
    tables = rope_tables(torch.empty(8, device="meta"), torch.empty(3, 4, device="meta"))
    assert [t.shape for t in tables] == [(3, 4, 8)] * 2


def without_data(op):
    """The op's checks while compiling: on fake tensors."""

    def call(*arguments, **options):
        mode = torch._subclasses.FakeTensorMode()

        def fake(x):
            return mode.from_tensor(x) if torch.is_tensor(x) else x

        arguments = [fake(x) for x in arguments]
        with mode:
            return op(*arguments, **{name: fake(x) for name, x in options.items()})

    return call


OPS = {
    "rope": rope,
    "rope_": rope_,
    "explain": torch.ops.metal_attn_explain.rope,
    "simulator": torch.ops.metal_attn_simulator.rope,
    "simulator in place": torch.ops.metal_attn_simulator.rope_,
    "fake": without_data(rope),
    "fake in place": without_data(rope_),
}

INT32 = {"dtype": torch.int32}
BAD = {
    "q rank": ({"q": torch.zeros(4, 9, 16)}, r"q has 3 dimensions, shape \(4, 9, 16\); .* have 4"),
    "k rank": ({"k": torch.zeros(4, 9, 16)}, r"k has 3 dimensions, shape \(4, 9, 16\); .* have 4"),
    "q dtype": (
        {"q": torch.zeros(2, 4, 9, 16).double(), "k": None},
        r"q has dtype .*float64; .*be",
    ),
    "k dtype": ({"k": torch.zeros(2, 2, 9, 16).half()}, r"k has dtype .*float16 and q .*alike"),
    "k batch": ({"k": torch.zeros(1, 2, 9, 16)}, r"k has a batch of 1 and q of 2; .*equal"),
    "k length": ({"k": torch.zeros(2, 2, 8, 16)}, r"k has a length of 8 and q of 9; .*equal"),
    "k head dim": ({"k": torch.zeros(2, 2, 9, 8)}, r"k has a head dim of 8 and q of 16; .*equal"),
    "no columns": (
        {"q": torch.zeros(2, 4, 9, 0), "k": None},
        "q has a head dim of 0; it must be at least 1",
    ),
    "cos dtype": (
        {"cos": torch.zeros(13, 8).double(), "sin": torch.zeros(13, 8).double()},
        r"cos has dtype .*float64; it must be float32, float16 or bfloat16",
    ),
    "sin dtype": ({"sin": torch.zeros(13, 8).half()}, r"sin has dtype .*float16 and cos .*alike"),
    "cos rank": (
        {"cos": torch.zeros(8), "sin": torch.zeros(8)},
        r"cos has 1 dimensions, shape \(8,\); it must have 2 or 3",
    ),
    "cos batch": (
        {"cos": torch.zeros(3, 13, 8), "sin": torch.zeros(3, 13, 8)},
        r"cos has a batch of 3 and q of 2; it must be 1 or equal",
    ),
    "cos columns": (
        {"cos": torch.zeros(13, 9), "sin": torch.zeros(13, 9)},
        r"cos has 9 columns and q a head dim of 16; they must be at most half",
    ),
    "sin shape": (
        {"sin": torch.zeros(12, 8)},
        r"sin has shape \(12, 8\) and cos \(13, 8\); they must be equal",
    ),
    "sin rank": ({"sin": torch.zeros(1, 13, 8)}, r"sin has shape \(1, 13, 8\) and cos"),
    "positions dtype": (
        {"positions": torch.arange(9).short()},
        r"positions has dtype .*(int16|Short); it must be int32 or int64",
    ),
    "positions shape": (
        {"positions": torch.arange(8)},
        r"positions has shape \(8,\); it must be \(9,\), \(1, 9\) or \(2, 9\)",
    ),
    "positions batch": ({"positions": torch.zeros(3, 9, **INT32)}, r"positions has shape \(3, 9\)"),
    "positions rank": ({"positions": torch.zeros(1, 1, 9, **INT32)}, r"positions has shape"),
    "positions and offset": (
        {"positions": torch.arange(9), "seqlen_offset": 1},
        "seqlen_offset is 1 and positions is given",
    ),
    "positions and offsets": (
        {"positions": torch.arange(9), "seqlen_offsets": torch.zeros(2, **INT32)},
        "seqlen_offsets is given and so is positions",
    ),
    "offsets dtype": (
        {"seqlen_offsets": torch.zeros(2, dtype=torch.int64)},
        r"seqlen_offsets has dtype .*int64; it must be int32",
    ),
    "offsets shape": (
        {"seqlen_offsets": torch.zeros(3, **INT32)},
        r"seqlen_offsets has shape \(3,\); it must be \(2,\)",
    ),
    "offset of offsets": (
        {"seqlen_offset": 2**40, "seqlen_offsets": torch.zeros(2, **INT32)},
        "seqlen_offset is 1099511627776; it must be in -2147482624..2147482624",
    ),
    "offset beyond": (
        {"seqlen_offset": 5},
        "seqlen_offset is 5 and q has a length of 9; .* the 13 rows of cos",
    ),
    "offset before": ({"seqlen_offset": -1}, "seqlen_offset is -1 and q has a length of 9"),
    "offset overflows": ({"seqlen_offset": 2**63 - 1}, "seqlen_offset is 9223372036854775807 and"),
}


@pytest.mark.parametrize("op", OPS)
@each_case("name", BAD)
def test_refusals(name, op):
    q, k, cos, sin = make_problem()
    change, message = BAD[name]
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin} | change
    tensors = [arguments.pop(tensor) for tensor in ("q", "k", "cos", "sin")]
    with refused(message):
        OPS[op](*tensors, **arguments)


@pytest.mark.parametrize("op", ["rope_", "simulator in place", "fake in place"])
def test_expanded_in_place(op):
    cos, sin = make_tables(9, 16)
    with refused(r"k has .* elements may share memory"):
        OPS[op](torch.zeros(2, 4, 9, 16), torch.zeros(2, 1, 9, 16).expand(2, 3, 9, 16), cos, sin)


@pytest.mark.parametrize("name", ["q", "k", "cos", "sin"])
def test_sparse_or_elsewhere(name):
    arguments = dict(zip(("q", "k", "cos", "sin"), make_problem(), strict=True))
    with refused(rf"{name} is sparse"):
        rope(**arguments | {name: arguments[name].to_sparse()})
    with pytest.raises((ValueError, RuntimeError), match=r"device|meta"):
        rope(**arguments | {name: arguments[name].to("meta")})


BAD_TABLES = {
    "inv_freq dtype": (
        (torch.zeros(8).half(), torch.arange(3)),
        {},
        "inv_freq has dtype .*float16",
    ),
    "inv_freq rank": ((torch.zeros(1, 8), torch.arange(3)), {}, "inv_freq has 2 dimensions"),
    "positions dtype": (
        (torch.zeros(8), torch.arange(3).double()),
        {},
        "positions has dtype .*float64; it must be int32, int64 or float32",
    ),
    "positions scalar": ((torch.zeros(8), torch.tensor(3)), {}, "positions has 0 dimensions"),
    "positions rank": (
        (torch.zeros(8), torch.zeros(1, 1, 1, 1)),
        {},
        r"positions has 4 dimensions, shape \(1, 1, 1, 1\)",
    ),
    "factor": (
        (torch.zeros(8), torch.arange(3)),
        {"attention_factor": float("nan")},
        "attention_factor is nan; it must be finite",
    ),
    "factor beyond float32": (
        (torch.zeros(8), torch.arange(3)),
        {"attention_factor": 1e39},
        "attention_factor is 1e.39; it must be finite",
    ),
    "dtype": (
        (torch.zeros(8), torch.arange(3)),
        {"dtype": torch.float64},
        "dtype is .*(Double|float64); it must be float32, float16 or bfloat16",
    ),
}
TABLES_OPS = {
    "rope_tables": rope_tables,
    "simulator": torch.ops.metal_attn_simulator.rope_tables,
    "explain": torch.ops.metal_attn_explain.rope_tables,
    "fake": without_data(rope_tables),
}


@pytest.mark.parametrize("op", TABLES_OPS)
@each_case("name", BAD_TABLES)
def test_refusals_of_tables(name, op):
    arguments, options, message = BAD_TABLES[name]
    with refused(message):
        TABLES_OPS[op](*arguments, **options)


def test_explain_says_what_ran():
    q, k, cos, sin = make_problem(dtype=torch.float16)
    (explained,) = extension.launches(torch.ops.metal_attn_explain.rope_(q, k, cos, sin))
    with simulate(record=True) as run:
        rope_(q, k, cos, sin)
    (launch,) = run.recorded
    assert launch.defines == explained["defines"]
    assert explained["defines"]["IN_PLACE"] == "1"
    assert launch.group_size == tuple(explained["threads"])
