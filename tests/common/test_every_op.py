"""PyTorch's expectations of an op: the same tests for all rows of `ops.EXAMPLES`."""

import random
from operator import attrgetter

import pytest
import torch

import torch_metal_attn
from tests.attention.held_cases import hold
from tests.common.ops import EXAMPLES, SAVING, STRIDED, call, on
from tests.helpers.refused import without_data
from torch_metal_attn.runtime import extension
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.testing.families import FAMILIES, draw_of
from torch_metal_attn.testing.judge import normal

CPU, F32 = torch.device("cpu"), torch.float32


def examples(condition=lambda example: True, rows=EXAMPLES):
    chosen = {name: example for name, example in rows.items() if condition(example)}
    return pytest.mark.parametrize("example", chosen.values(), ids=chosen)


differentiable, in_place = attrgetter("differentiable"), attrgetter("written")


@pytest.fixture(params=["reference", "device"])
def where(request):
    """The CPU's kernel in torch, and the shader."""
    if request.param == "reference":
        yield CPU
        return
    with best_device(check=True) as device:
        yield device


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@examples()
def test_opcheck_passes(example, where):
    """Fake kernels and autograd registrations do not depend on the device."""
    op = getattr(torch.ops.metal_attn, example.op)
    checks = ["test_schema"]
    if where == CPU:
        checks += ["test_autograd_registration", "test_faketensor"]
        if example is EXAMPLES[example.op]:  # takes as long as all other checks
            checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (), on(where, example.make()), test_utils=checks)
    if example.differentiable and not example.written:
        arguments = on(where, example.make())
        arguments[example.differentiable[0]].requires_grad_()
        torch.library.opcheck(op, (), arguments, test_utils=checks)


@examples(rows=EXAMPLES | STRIDED)
def test_fake_reference_and_shader_agree(example):
    """They agree in shape, dtype and strides; the reference and the shader also in values."""
    arguments = example.make()
    expected = call(on(CPU, arguments), example)
    with best_device(check=True) as device:
        actual = call(on(device, arguments), example)
    mode = torch._subclasses.FakeTensorMode()
    fakes = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in arguments.items()}
    with mode:
        fake = call(fakes, example)
    meta = call(without_data(arguments), example)
    for ours, reference, *others in zip(actual, expected, fake, meta, strict=True):
        for other in others:
            assert (ours.shape, ours.dtype) == (other.shape, other.dtype)
            assert ours.stride() == reference.stride() == other.stride()
        bound = 2**-7 if reference.dtype.itemsize < 4 else 1e-5
        torch.testing.assert_close(ours.cpu(), reference, rtol=bound, atol=bound, equal_nan=True)


@examples()
def test_explanation_matches_the_launch(example):
    arguments = example.make()
    packed = getattr(torch.ops.metal_attn_explain, example.op)(**arguments)
    (explained,) = extension.launches(packed)
    with torch_metal_attn.simulate(record=True) as run:
        call(arguments, example)
    (launch,) = run.recorded
    assert (launch.kernel, launch.defines) == (explained["kernel"], explained["defines"])
    assert launch.group_size == tuple(explained["threads"])
    sizes = zip(explained["grid"], explained["threads"], strict=True)
    assert launch.grid == tuple(n * size for n, size in sizes)


@examples()
def test_two_runs_give_the_same_bits(example, device):
    first, second = (call(on(device, example.make()), example) for _ in range(2))
    equal(first, second)


@examples()
def test_modes_change_nothing(example, where):
    """The modes are autocast, inference mode, and views with torch's negative bit."""
    arguments = example.make()
    expected = call(on(where, arguments), example)
    with torch.autocast(where.type, dtype=torch.bfloat16):
        equal(call(on(where, arguments), example), expected)
    with torch.inference_mode():
        equal(call(on(where, arguments), example), expected)
    if not example.returns_what_it_writes:
        return  # torch cannot negate tensors that an op without results writes
    for name in {*example.differentiable, *example.written}:
        negated = on(where, arguments)
        if negated[name] is not None and negated[name].is_floating_point():
            negated[name] = torch._neg_view(-negated[name])
            equal(call(negated, example), expected)


def cases_of_compile():
    """The first and the last row of each op; opcheck traces all of them."""
    first = {example.op: name for name, example in reversed(EXAMPLES.items())}
    last = {example.op: name for name, example in EXAMPLES.items()}
    for name in dict.fromkeys([*first.values(), *last.values()]):
        example = EXAMPLES[name]
        if not example.differentiable or name == "flash_fwd":
            yield pytest.param(example, False, id=name)
        if example.differentiable:
            yield pytest.param(example, True, id=f"{name}, with gradients")


@pytest.mark.parametrize("example, grad", [*cases_of_compile()])
def test_compiled_ops_equal_eager_ops(example, grad, device):
    """Ops get graph inputs or intermediate tensors, of a static and then of a dynamic length."""
    torch._dynamo.reset()
    leaves = [n for n in example.differentiable if grad]

    def step(arguments):
        made = arguments | {n: arguments[n] * 1 for n in leaves}
        results = call(made, example)
        return [x * 2 for x in results] if grad else [x.view(torch.uint8).sum() for x in results]

    def run(function, length):
        arguments = on(device, example.make(length))
        inputs = [arguments[n].requires_grad_() for n in leaves]
        results = function(arguments)
        finite = [x.masked_fill(~x.isfinite(), 0).square().sum() for x in results if grad]
        grads = torch.autograd.grad(sum(finite), inputs) if grad else ()
        return *results, *grads, *(arguments[n] for n in example.written)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in (9, 11, 12):
        torch.testing.assert_close(run(compiled, length), run(step, length), equal_nan=True)


def derivatives(example, function, device, dtype, order):
    """First or second derivatives of a sum over results. Written tensors are views."""
    arguments = on(device, example.make(dtype=torch.float32 if dtype == torch.float64 else dtype))
    if dtype == torch.float64:
        floating = {n for n, x in arguments.items() if torch.is_tensor(x) and x.is_floating_point()}
        arguments |= {n: arguments[n].double() for n in floating}
    leaves = [arguments[n].requires_grad_() for n in example.differentiable]
    passed = dict(arguments)
    if example.written:
        joint = torch.cat([arguments[n].flatten() for n in example.written]) * 1
        for name in example.written:
            size = arguments[name].numel()
            passed[name], joint = joint[:size].view(arguments[name].shape), joint[size:]
    loss = 0
    for i, result in enumerate(function(passed)):
        weights = normal(*result.shape, seed=3 + i)
        curved = result.masked_fill(result.isinf(), 0).atan()
        loss = loss + (curved * weights.to(device)).sum()
    actual = torch.autograd.grad(loss, leaves, create_graph=order == 2)
    if order == 2:
        total = sum(grad.square().sum() for grad in actual)
        actual = torch.autograd.grad(total, leaves)
    return [x.detach().cpu().double() for x in actual]


@pytest.mark.parametrize("dtype, order", [(F32, 1), (F32, 2), (torch.bfloat16, 1)], ids=str)
@examples(attrgetter("definition"))
def test_gradients_equal_those_of_the_definition(example, dtype, order, device):
    exact = derivatives(example, lambda x: example.definition(**x), CPU, torch.float64, order)
    actual = derivatives(example, lambda x: call(x, example), device, dtype, order)
    bound = 1e-4 if dtype == torch.float32 else 2**-5
    for ours, right in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours, right.nan_to_num(0.0), rtol=bound, atol=bound)
        assert ours.any()


@examples(differentiable, EXAMPLES | SAVING)
def test_saved_tensors_may_change_their_strides(example, device):
    """Hooks may change the strides of saved tensors to strides that the op refuses."""

    def restrided(x):
        return torch.stack([x, x], -1)[..., 0] if x.dim() == 1 else x.mT.contiguous().mT

    def gradients(unpack):
        arguments = on(device, example.make())
        leaves = [arguments[n].requires_grad_() for n in example.differentiable]
        arguments |= {n: arguments[n] * 1 for n in example.differentiable}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            results = call(arguments, example)
        loss = sum(x.masked_fill(~x.isfinite(), 0).square().sum() for x in results)
        return torch.autograd.grad(loss, leaves)

    equal(gradients(restrided), gradients(lambda x: x))


def floats(example):
    return [n for n, x in example.make().items() if torch.is_tensor(x) and x.is_floating_point()]


@examples()
def test_forward_mode_is_refused(example, backend):
    for name in floats(example):
        arguments = example.make()

        def function(x, name=name, arguments=arguments):
            return call(arguments | {name: x}, example)

        with pytest.raises(NotImplementedError, match=f"{example.op} has no forward-mode"):
            torch.func.jvp(function, (arguments[name],), (arguments[name],))


@examples(attrgetter("returns_what_it_writes"))
def test_vmap_equals_separate_calls(example, backend):
    batch = [example.make() for _ in range(3)]
    tensors = [n for n, x in batch[0].items() if torch.is_tensor(x)]
    batch[1] |= {n: batch[1][n] * 2 for n in example.differentiable}
    stacked = [torch.stack([arguments[n] for arguments in batch]) for n in tensors]
    expected = [call(arguments, example) for arguments in batch]

    def called_alone(*parts):
        return call(batch[0] | dict(zip(tensors, parts, strict=True)), example)

    equal(torch.vmap(called_alone)(*stacked), tuple(map(torch.stack, zip(*expected, strict=True))))


@examples(differentiable)
def test_torch_func_gives_the_same_gradients_or_raises(example, backend):
    """Gradients equal those of autograd. softmax, and in-place ops on a leaf, raise."""
    for name in example.differentiable:
        arguments = example.make()

        def loss(x, arguments=arguments, name=name):
            return call(arguments | {name: x}, example)[0].nan_to_num(0, 0, 0).sum()

        if example.written or example.op == "softmax":
            with pytest.raises((RuntimeError, ValueError)):
                torch.func.grad(loss)(arguments[name])
            continue
        actual = torch.func.grad(loss)(arguments[name])
        leaf = arguments[name].requires_grad_()
        equal(actual, torch.autograd.grad(loss(leaf), leaf, materialize_grads=True)[0])


@examples(in_place)
def test_writing_a_leaf_raises(example, backend):
    for name in set(example.written) & set(floats(example)):
        arguments, before = example.make(), example.make()
        leaf = arguments[name].requires_grad_()
        for options in (leaf, leaf[:]):
            with pytest.raises(RuntimeError, match=r"is a leaf that requires grad, or a view"):
                call(arguments | {name: options}, example)
            equal([arguments[n] for n in example.written], [before[n] for n in example.written])
        with torch.no_grad():
            call(arguments, example)
        assert not torch.equal(leaf, before[name])


@examples(in_place)
def test_writing_a_saved_tensor_raises(example, where):
    for name in set(example.written) & set(floats(example)):
        arguments = on(where, example.make())
        weight = torch.ones_like(arguments[name], requires_grad=True)
        product = arguments[name] * weight
        call(arguments, example)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@examples()
def test_an_argument_without_a_gradient_is_named(example):
    """The error names the argument: in the call, or in the backward of a written tensor."""
    if example.written and not set(example.written) & set(floats(example)):
        return  # tensors of bytes have no backward
    for name in set(floats(example)) - {*example.differentiable, *example.written}:
        arguments = example.make()
        arguments[name].requires_grad_()
        message = rf"no gradient.* {name}|{name} requires grad"
        with pytest.raises(NotImplementedError, match=message):
            sum(x.nan_to_num(0, 0, 0).sum() for x in call(arguments, example)).backward()


@examples()
def test_a_device_without_a_kernel_is_named(example):
    op = getattr(torch.ops.metal_attn, example.op).default
    elsewhere = torch._C.DispatchKey.CompositeExplicitAutograd
    message = f"metal_attn::{example.op} has no kernel for cpu: import"
    with pytest.raises(RuntimeError, match=message):
        op._op_dk(elsewhere, **example.make())


COUNTS = {"Merge": 30, "Softmax": 30, "Rotation": 8, "Copy": 20, "Quantised": 40}


@pytest.mark.parametrize("name, count", COUNTS.items())
def test_drawn_cases_pass(name, count, device):
    (family,) = (family for family in FAMILIES if family.__name__ == name)
    hold([draw_of(family, random.Random(seed)) for seed in range(count)], device)
