"""`explain` of ops and of models: what would run, where, and what it would take."""

import copy
import functools
import json

import pytest
import torch
import torch._dynamo.testing

from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.cache.sequences import Sequences
from tests.common.ops import EXAMPLES
from tests.helpers.cases import each_case
from torch_metal_attn import explain, flash_attn_func, sdpa_replaced, simulate
from torch_metal_attn.testing.judge import ints

ops = torch.ops.metal_attn


def attention():
    return make_qkv(batch=2, heads=4, kv_heads=2, q_length=9, kv_length=40)


def packed():
    return make_packed([5, 9], [7, 9])


def gradient(operands=attention, whole=False, **options):
    """A call of a gradient op. whole: with flash_bwd's arguments, else with those of a bias."""

    def call():
        q, k, v, *packing = operands()
        lse = torch.zeros(q.shape[1::-1] if packing else q.shape[:3])
        arguments = (q, None, q, k, v, q, lse) if whole else (q, q, k, v, lse, lse)
        return (*arguments, *packing), options

    return call


# One captured tensor, from which each head loads one element.
CAPTURES = {
    "normalisers": None,
    "captures": [torch.ones(4)],
    "shares": ["return 1.0f;"],
    "places": ["return flex_index(head, params.capture_sizes[0], impossible);"],
    "share_captures": [0],
    "share_owners": [2],
}


def example(name, *kernels, **more):
    """The call of tests/common/ops.py, and its kernels (by default one named like the op)."""
    return lambda: ((), EXAMPLES[name].make() | more), list(kernels or (name,))


WHOLE, BIAS = ["flash_bwd_dq", "flash_bwd_dkv"], ["flash_bwd_bias"]
CALLS = {
    "flash_fwd": example("flash_fwd", "flash_decode"),
    "flash_varlen_fwd": (lambda: (packed(), {}), ["flash_fwd"]),
    "flash_decode": example("flash_decode", "flash_decode", "merge_splits", num_splits=2),
    "decode_step": example("decode_step", "flash_decode", "merge_splits", num_splits=3),
    "flash_bwd": (gradient(whole=True), WHOLE),
    "flash_varlen_bwd": (gradient(packed, whole=True), WHOLE),
    "flash_bwd_bias": (gradient(attn_bias=torch.zeros(9, 40)), BIAS),
    "flash_varlen_bwd_bias": (gradient(packed, attn_bias=torch.zeros(9, 9)), BIAS),
    "flash_bwd_slopes": (gradient(alibi_slopes=torch.ones(4)), BIAS),
    "flash_varlen_bwd_slopes": (gradient(packed, alibi_slopes=torch.ones(2)), BIAS),
    "flex_fwd": (lambda: (tuple(attention()), {"captures": []}), ["flash_decode"]),
    "flex_bwd": (gradient(whole=True, captures=[]), WHOLE),
    "flex_bwd_captures": (gradient(**CAPTURES), ["flash_bwd_captures[0]"]),
    **{
        name: example(name, name.removesuffix("_"))
        for name in """rope rope_tables rope_ merge_state merge_state_ merge_splits index_scores
        softmax softmax_ apply_causal_mask_ append_kv copy_pages""".split()
    },
}


def test_every_explained_op_has_a_call():
    library = torch._C._dispatch_get_all_op_names()
    explained = [name for name in library if name.startswith("metal_attn_explain::")]
    assert set(explained) == {f"metal_attn_explain::{name}" for name in CALLS}


@each_case("name", CALLS)
def test_each_op_is_explained(name):
    arguments, options = CALLS[name][0]()
    explanation = explain(getattr(ops, name), *arguments, **options)
    assert explanation.refusal is None
    assert explanation.op == name
    assert explanation.backend == "reference"
    assert list(explanation.kernels) == CALLS[name][1]
    assert explanation.cost.bytes > 0
    products = name.startswith(("flash", "flex")) or name in ("decode_step", "index_scores")
    assert (explanation.cost.flops > 0) == products
    for kernel in explanation.kernels:
        assert f"{kernel} on reference" in str(explanation)
    assert json.loads(json.dumps(explanation.as_dict()))["op"] == name


@each_case("name", [name for name in CALLS if "bwd" not in name])
def test_the_explained_kernels_run(name):
    arguments, options = CALLS[name][0]()
    with simulate(record=True) as run:
        explanation = explain(getattr(ops, name), *arguments, **options)
        assert not run.recorded
        getattr(ops, name)(*arguments, **options)
    assert explanation.backend == "simulator"
    for launch, (kernel, explained) in zip(run.recorded, explanation.kernels.items(), strict=True):
        assert launch.kernel == kernel
        assert launch.defines == explained.specialisation
        assert launch.group_size == explained.threads
        groups = zip(explained.grid, explained.threads, strict=True)
        assert launch.grid == tuple(n * size for n, size in groups)


def test_overloads_and_named_arguments_give_the_same_explanation():
    q, k, v = attention()
    assert explain(ops.flash_decode.default, q, k, v) == explain(ops.flash_decode, q, k, v)
    assert explain(q=q, k=k, v=v) == explain(q, k, v) == explain(ops.flash_fwd, q, k, v)


def test_refusals_are_explained():
    q, k, v = attention()
    explanation = explain(ops.flash_decode, q, k, v, num_splits=-1)
    assert "num_splits" in explanation.refusal
    assert explanation.cost is None
    assert str(explanation).startswith("refused: ")
    assert explain(q, "k", v).refusal == "k is a str; it must be a tensor"
    assert explain(q, k, v, causal="yes").refusal == "causal is 'yes'; it must be a bool"
    assert explain(q, k).refusal == "metal_attn::flash_fwd needs an argument v"
    explanation = explain(q, k, v, windows=3, foo=1)
    assert explanation.refusal == "metal_attn::flash_fwd has no argument windows, foo"


def test_tensors_of_one_element_are_taken_as_numbers():
    window, offset = torch.tensor(3), torch.tensor([2])
    explanation = explain(*attention(), window_size_left=window, q_offset=offset)
    assert explanation == explain(*attention(), window_size_left=3, q_offset=2)


def test_an_empty_call_has_no_kernel():
    q, k, v = make_qkv(q_length=0)
    explanation = explain(ops.flash_decode, q, k, v)
    assert explanation.refusal is None
    assert explanation.kernel == ""
    assert "nothing to compute" in str(explanation)


@pytest.mark.parametrize("wrong", [3, torch.add, torch.nn.Linear, "flash_fwd"])
def test_objects_that_cannot_be_explained_are_refused(wrong):
    with pytest.raises(TypeError, match="it must be the tensor q, an op of"):
        explain(wrong, 1)


def test_backward_of_an_op_is_refused():
    with pytest.raises(TypeError, match="explain the op flash_bwd"):
        explain(ops.flash_fwd, *attention(), backward=True)


class Attention(torch.nn.Module):
    """q, k and v of one head dim each, through `flash_attn_func` or torch's function."""

    def __init__(self, ours=True):
        super().__init__()
        self.ours = ours
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).unbind(2)
        if self.ours:
            return flash_attn_func(q, k, v, causal=True).flatten(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def module(forward):
    result = torch.nn.Identity()
    result.forward = forward
    return result


def stack(count):
    return torch.nn.Sequential(*(Attention() for _ in range(count))).eval()


X = torch.randn(1, 7, 16)


class TestModel:
    def test_identical_layers_share_a_line(self):
        explanation = explain(stack(32), X)
        assert [row.layer for row in explanation.rows] == [str(n) for n in range(32)]
        lines = [line for line in str(explanation).splitlines() if line.startswith("{0-31}")]
        assert len(lines) == 1
        assert lines[0].split() == [
            *("{0-31}", "32", "flash_decode", "7", "x", "7", "1x2x1"),
            *(str(explanation.rows[0].explanation.threadgroup_bytes), "57.3", "k", "59.1", "k"),
        ]

    def test_no_kernel_runs_but_other_modules_do(self):
        model = stack(2)
        seen = []
        model[1].project.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        with simulate() as run:
            explanation = explain(model, X)
        assert not run.launches
        assert {row.explanation.backend for row in explanation.rows} == {"simulator"}
        assert (seen[0] == 0).all()
        assert seen[0].shape == X.shape

    def test_hooks_are_removed(self):
        model = stack(2)
        explain(model, X)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            explain(model, X[..., :3])
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks

    def test_attention_of_torch_is_shown(self):
        explanation = explain(torch.nn.Sequential(Attention(), Attention(ours=False)).eval(), X)
        ours, torchs = explanation.rows
        assert (ours.elsewhere, torchs.explanation) == ("", None)
        assert "scaled_dot_product_attention" in torchs.elsewhere
        assert torchs.cost == ours.cost
        assert "not metal_attn: torch's scaled_dot_product_attention" in str(explanation)
        assert "1 call of metal_attn" in str(explanation)
        assert "1 attentions elsewhere" in str(explanation)
        data = json.loads(json.dumps(explanation.as_dict()))
        assert data["model"] == "Sequential"
        assert data["rows"][0]["cost"] == {"flops": ours.cost.flops, "bytes": 1848}
        assert data["rows"][1]["explanation"] is None

    @pytest.mark.parametrize("training", [False, True])
    def test_attention_layers_of_torch_are_shown(self, training):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2).train(training)
        explanation = explain(model, X)
        assert [row.layer for row in explanation.rows] == [f"layers.{n}.self_attn" for n in (0, 1)]
        assert all("torch's" in row.elsewhere for row in explanation.rows)
        with simulate(), sdpa_replaced() as calls:
            explanation = explain(model, X)
        assert calls.replaced == 2
        assert [row.op for row in explanation.rows] == ["flash_fwd"] * 2

    def test_eager_attention_is_shown(self):
        eager = module(lambda q: (q @ q.mT).softmax(-1) @ q)
        explanation = explain(eager, torch.randn(1, 2, 7, 8))
        assert "as in eager attention" in str(explanation)
        assert explanation.rows[0].shapes == ((1, 2, 7, 7),)

    def test_attention_that_returns_its_weights_is_shown(self):
        """nn.MultiheadAttention merges heads and batch into one dimension."""
        layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        layer.forward = functools.partial(layer.forward, need_weights=True)
        with torch.no_grad():
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                explanation = explain(layer, X, X, X)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
        assert [row.shapes for row in explanation.rows] == [((2, 7, 7),)]

    def test_other_softmaxes_are_not_shown(self):
        router = module(lambda x: x.softmax(-1).topk(2).values @ torch.ones(2, 3))
        assert explain(router, X).rows == ()

    def test_layers_after_a_refused_one_are_shown(self):
        refused = module(lambda x: flash_attn_func(x[None], x[None, ..., :3], x[None])[0])
        explanation = explain(torch.nn.Sequential(refused, Attention()).eval(), X)
        first, second = explanation.rows
        assert "head dim of 3" in first.refusal
        assert second.refusal is None
        assert f"refused: {first.refusal}" in " ".join(str(explanation).split())
        assert "1 of them refused" in str(explanation)

    def test_a_refusal_by_python_code_ends_the_explanation(self):
        refused = module(lambda x: flash_attn_func(x[0], x, x))
        explanation = explain(torch.nn.Sequential(torch.nn.Identity(), refused), X)
        assert explanation.rows == ()
        assert explanation.stopped.startswith("1: q has shape (7, 16)")
        assert str(explanation).endswith(explanation.stopped)

    def test_writes_are_left_out(self):
        cache = torch.zeros(2, 1, 2, 16, 8)

        def forward(q):
            ops.append_kv(q, q, *cache, ints(3))
            out, _ = ops.flash_decode(q, *cache, seqused_k=ints(5))
            assert ops.softmax_(out) is out
            return out

        explanation = explain(module(forward), torch.ones(1, 2, 2, 8))
        assert [row.op for row in explanation.rows] == ["append_kv", "flash_decode", "softmax_"]
        assert (cache == 0).all()

    def test_compiled_models_run_uncompiled(self):
        """Compiled code has no names of layers, so `explain` runs the model uncompiled."""
        counter = torch._dynamo.testing.CompileCounter()
        model = torch.compile(stack(2), backend=counter)
        for _ in range(2):
            rows = explain(model, X).rows
            layers = [(row.layer, row.op) for row in rows]
            assert layers == [(f"_orig_mod.{n}", "flash_fwd") for n in (0, 1)]
            with torch.no_grad():
                model(X)
            assert counter.frame_count == 1


def test_generation_of_transformers_is_explained():
    pytest.importorskip("transformers")
    from tests.transformers import tiny_models
    from torch_metal_attn.integrations.transformers import enable

    llama, ids = tiny_models.build("Llama"), torch.arange(3, 36)[None]
    enable(llama)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    explanation = explain(llama.generate, ids, attention_mask=torch.ones_like(ids), **options)
    kernels = [row.explanation.kernel for row in explanation.rows]
    assert kernels == ["flash_fwd"] * 2 + ["flash_decode"] * 6
    assert "1 x 34-36" in str(explanation)
    assert str(explanation).count("model.layers.{0-1}.self_attn") == 2


@each_case(
    "kind, options",
    [("paged", {"format": "q8_0"}), ("paged", {"format": "q8_0", "recent": 4}), ("static", {})],
)
def test_explaining_a_method_of_a_cache_changes_nothing(kind, options):
    held = Sequences(kind, "cpu", dtype=torch.float32, **options)
    held.append(14, 0)
    before = copy.deepcopy(held.cache)
    arguments = held.operands(torch.randn(2, 2, 3, 96), *held.new(3, 1))
    explanation = explain(held.cache.decode_step, *arguments, causal=True)
    assert explanation.stopped is None
    assert "decode_step" in [row.op for row in explanation.rows]
    assert explain(held.cache.append, *arguments[:-3], *arguments[-2:]).rows[0].op == "append_kv"
    assert held.lengths() == held.cache.seqlens(*held.ids_or_none()).tolist()
    assert torch.equal(held.cache.layers[0].k_cache, before.layers[0].k_cache)
    held.step(3, 1)
