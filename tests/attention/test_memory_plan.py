"""`explain(backward=True)` lists the memory of a training step, and the ops allocate no more."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.attention.flash_bwd_check import make_gradients, run
from tests.attention.flash_bwd_features import problem
from tests.attention.flash_fwd_check import make_packed
from tests.attention.held_cases import HOME
from torch_metal_attn import explain, simulate

CPU = torch.device("cpu")


def shapes(length, head_dim=64, dtype=torch.bfloat16, heads=16):
    return [torch.empty(1, heads, length, head_dim, dtype=dtype) for _ in range(3)]


@pytest.fixture(autouse=True)
def unfilled(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def allocations(call):
    """The result of `call`, and the sizes of its allocations in order. Frees are negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()
    events = [x for x in profiled.profiler.kineto_results.events() if x.name() == "[memory]"]
    return result, [event.nbytes() for event in sorted(events, key=lambda x: x.start_ns())]


def test_explain_lists_the_memory_of_4096_tokens():
    training = explain(*shapes(4096), causal=True, backward=True).training
    tensor, statistics = 16 * 4096 * 64 * 2, 16 * 4096 * 4
    assert training.inputs == dict.fromkeys(("q", "k", "v", "dout"), tensor)
    allocated = dict.fromkeys(("softmax_lse", "delta", "rounded_delta"), statistics)
    allocated |= dict.fromkeys(("out", "dq", "dk", "dv"), tensor)
    assert training.allocated == allocated
    assert training.total == 8 * tensor + 3 * statistics == 67_895_296
    text = str(explain(*shapes(4096), backward=True))
    for words in ("dq 8.39", "softmax_lse 0.26", "67.90 MB in all", "flash_bwd_dkv"):
        assert words in text


def test_explain_allocates_nothing():
    qkv = shapes(4096)
    explain(*qkv, backward=True)
    _, changes = allocations(lambda: explain(*qkv, causal=True, backward=True))
    assert not changes


def step(q, k, v, *packing, dlse=True, **options):
    name = "flash_varlen" if packing else "flash"
    lse_shape = (q.shape[1], q.shape[0]) if packing else q.shape[:3]
    arguments = make_gradients(q, v, lse_shape, dlse=dlse)

    def call():
        out, lse = run(f"{name}_fwd", CPU, q, k, v, *packing, **options)
        statistics = (q, k, v, out, lse, *packing)
        gradients = run(f"{name}_bwd", CPU, *arguments, *statistics, exact_delta=True, **options)
        return out, lse, *gradients

    with simulate(check=True) as session:
        call()  # compiles
        launches = {launch.kernel: launch for launch in session.launches}
        return *allocations(call), launches


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize(
    "feature",
    ["both lengths, causal, rotary, interleaved", "softcap, all, rotary, odd", "slices", "MQA"],
)
def test_the_ops_allocate_what_is_listed(feature):
    qkv, options = problem(feature)
    results, changes, _ = step(*qkv, dlse=options.pop("dlse", True), **options)
    listed = explain(*qkv, **options, backward=True).training.allocated
    names = ("out", "softmax_lse", "dq", "dk", "dv", "delta", "normalisers")
    returned = {n: t.nbytes for n, t in zip(names, results, strict=True) if t.numel()}
    assert returned | {"rounded_delta": returned["delta"]} == listed
    allocated = [change for change in changes if change > 0]
    assert sorted(allocated) == sorted(listed.values())
    assert max(accumulate(changes)) == sum(listed.values())


def test_autograd_allocates_no_more():
    qkv, options = problem("rotary", through_lse=False)
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    listed = explain(q, k, v, **options, backward=True).training.allocated
    dout, _ = make_gradients(q, v, q.shape[:3], dlse=False)

    def call():
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v, **options)
        return torch.autograd.grad(out, (q, k, v), dout)

    with simulate(check=True):
        call()
        _, changes = allocations(call)
    assert max(accumulate(changes)) == sum(listed.values())


def test_packed_ops_allocate_what_is_listed():
    shape = {"heads": 4, "kv_heads": 2, "head_dim": HOME, "dtype": torch.float16}
    arguments = make_packed([40, 0, 77], [50, 3, 64], **shape)
    results, changes, launches = step(*arguments, dlse=False, causal=True)
    training = explain(*arguments, causal=True, backward=True).training
    assert list(training.kernels) == ["flash_bwd_dq", "flash_bwd_dkv"]
    for name, kernel in training.kernels.items():
        assert kernel.specialisation == launches[name].defines
        assert kernel.threads == launches[name].group_size
    assert max(accumulate(changes)) == sum(training.allocated.values())
    returned = {n: size for n, size in training.allocated.items() if n != "rounded_delta"}
    assert sum(t.nbytes for t in results) == sum(returned.values())
    assert training.inputs["cu_seqlens_q"] == 16
