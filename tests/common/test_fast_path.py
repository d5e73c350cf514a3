"""When our functions call the ops of few arguments (torch_metal_attn/ops/fast_path.py)."""

import contextlib
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_metal_attn as metal_attn
from torch_metal_attn.ops import fast_path
from torch_metal_attn.testing.judge import normal

Q = normal(1, 3, 2, 16)
AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


class Subclass(torch.Tensor):
    pass


class Watched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.add(str(op))
        return op(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def bhld(q, function=lambda *qkv: torch.ops.metal_attn.flash_fwd(*qkv)[0]):
    return function(*[q.transpose(1, 2)] * 3).transpose(1, 2)


CALLS = {
    "flash_attn": lambda q: metal_attn.flash_attn_func(q, q, q),
    "flash_attn_cached": lambda q: metal_attn.flash_attn_with_kvcache(q, q, q),
    "sdpa": lambda q: bhld(q, metal_attn.scaled_dot_product_attention),
    "flash_fwd": lambda q: bhld(q),
}


@pytest.fixture
def used(monkeypatch):
    names = []
    for name in fast_path._NAMES:
        attribute = f"_{name}" if name == "flash_attn_step" else name

        def op(op, name, *values, **options):
            names.append(name)
            return op(*values, **options)

        monkeypatch.setattr(fast_path, attribute, partial(op, getattr(fast_path, attribute), name))
    return names


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_fast_path_is_used_without_gradients(name, mode, used):
    with mode():
        out = CALLS[name](Q)
    assert used == ([] if (name, mode) == ("flash_fwd", torch.inference_mode) else [name])
    expected = bhld(Q)
    torch.testing.assert_close(out, expected)
    assert (out.shape, out.stride()) == (expected.shape, expected.stride())
    assert out.is_inference() == (mode is torch.inference_mode)


@pytest.mark.parametrize(
    "context",
    [contextlib.nullcontext, AUTOCAST, Watched, Functions, forward_ad.dual_level],
    ids=["requires grad", "autocast", "dispatch mode", "function mode", "forward mode"],
)
@pytest.mark.parametrize("name", CALLS)
def test_fast_path_is_not_used_with_gradients_or_modes(name, context, used):
    q = Q.bfloat16().requires_grad_(context is contextlib.nullcontext)
    with context() as entered:
        out = CALLS[name](q)
    # The mode handles the call before the op runs.
    seen = context is Functions and name == "flash_fwd"
    assert used == (["flash_fwd"] if seen else [])
    assert out.requires_grad == q.requires_grad
    if isinstance(entered, Watched):
        assert any(op.startswith("metal_attn.flash_") for op in entered.seen)


@pytest.mark.parametrize("name", CALLS)
def test_traced_graphs_keep_the_differentiable_op(name, used):
    traced = torch.jit.trace(CALLS[name], Q, check_trace=False)
    graphs = [make_fx(CALLS[name])(Q).code, str(traced.graph)]
    torch.compile(CALLS[name], backend=lambda g, _: graphs.append(g.code) or g, fullgraph=True)(Q)
    for graph in graphs:
        assert "metal_attn.flash_" in graph.replace("::", ".")
        assert "metal_attn_fast" not in graph
    torch.func.vmap(CALLS[name])(Q[None])
    assert type(CALLS[name](Q.as_subclass(Subclass))) is Subclass
    assert set(used) <= {"flash_fwd", "flash_decode"}, "while a traced op runs"


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_appended_keys_change_the_version(mode, used):
    """Any write in place increments the version. Inference tensors have no version."""
    caches = [torch.zeros(1, 8, 2, 16) for _ in range(2)]
    versions = [cache._version for cache in caches]
    lengths = torch.tensor([2], dtype=torch.int32)
    with mode():
        metal_attn.flash_attn_with_kvcache(Q, *caches, Q, Q, cache_seqlens=lengths)
        inner = [torch.zeros(1, 8, 2, 16) for _ in range(2)]
        metal_attn.flash_attn_with_kvcache(Q, *inner, Q, Q, cache_seqlens=2)
    assert used == ["flash_attn_step"] * 2
    assert [cache._version for cache in caches] == [version + 1 for version in versions]
    for cache in (*caches, *inner):
        torch.testing.assert_close(cache[:, 2:5], Q)
        assert cache[:, :2].abs().sum() == cache[:, 5:].abs().sum() == 0


@pytest.mark.parametrize(
    "function, tensors, message",
    [
        (metal_attn.flash_attn_func, (Q, Q[:, :, :0], Q), "v has a number of heads of 2"),
        (metal_attn.flash_attn_func, (Q, Q.double(), Q), "k has dtype float64"),
        (metal_attn.flash_attn_with_kvcache, (Q, Q, Q[:, :2]), "v_cache has a length of 2"),
    ],
)
def test_refusals_use_names_of_the_public_function(function, tensors, message, used):
    with pytest.raises(ValueError, match=message):
        function(*tensors)
    assert len(used) == 1
