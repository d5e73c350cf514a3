"""`doctor` records each attention of a process, and does not change the results."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sdpa.sdpa_check import normal
from torch_metal_attn import flash_attn_func, flex_attention, sdpa_replaced, simulate
from torch_metal_attn.tools.doctor import attention as description
from torch_metal_attn.tools.doctor.attention import BY_HAND, OURS, TORCHS
from torch_metal_attn.tools.doctor.watch import Watch

WATCHED = [
    (F, "scaled_dot_product_attention"),
    (torch, "compile"),
    (torch, "softmax"),
    (torch.Tensor, "softmax"),
    (torch, "_native_multi_head_attention"),
    (torch, "_transformer_encoder_layer_fwd"),
    (torch._ops.OpOverload, "__call__"),
    (torch._ops.OpOverloadPacket, "__call__"),
]
X = normal(2, 4, 9, 64)


@pytest.fixture(autouse=True)
def functions_are_restored():
    before = [(getattr(owner, name), name in vars(owner)) for owner, name in WATCHED]
    yield
    assert before == [(getattr(owner, name), name in vars(owner)) for owner, name in WATCHED]


def watched(function):
    """The attentions that `Watch` records in a call, without changing the result."""
    expected = function()
    with Watch() as watch:
        actual = function()
    assert torch.equal(actual, expected)
    return watch.seen


def only(function):
    (attention,) = watched(function)
    return attention


def by_operators(q=X):
    return (q @ q.mT).softmax(-1) @ q


def by_functions(q=X):
    weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, q), dim=-1)
    return torch.matmul(weights, q)


def of_three_dimensions(q=X):
    q = q.flatten(0, 1)
    scores = torch.baddbmm(torch.zeros(8, 9, 9), q, q.mT)
    return torch.bmm(nn.Softmax(dim=2)(scores), q)


class TestWrittenOutByHand:
    @pytest.mark.parametrize("function", [by_operators, by_functions, of_three_dimensions])
    def test_attention_by_hand_is_recorded(self, function):
        attention = only(function)
        assert attention.goes_to == BY_HAND
        assert attention.scores_bytes == 2 * 4 * 9 * 9 * 4
        assert f"in {function.__name__}, call" in attention.change
        assert attention.place.startswith("tests/doctor/test_watch.py:")

    def test_other_softmaxes_are_not_recorded(self):
        experts = X.flatten(1, 2)
        assert not watched(lambda: F.softmax(experts, dim=-1))
        assert not watched(lambda: (X @ X.mT).softmax(1))  # a softmax over heads
        assert not watched(lambda: (X[0, 0] @ X[0, 0].mT).softmax(-1))  # a softmax of a matrix

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_layer_that_returns_its_weights_is_recorded(self, fused):
        layer = nn.MultiheadAttention(256, 4, batch_first=True).train(not fused)
        x = X.transpose(1, 2).flatten(2)
        with torch.set_grad_enabled(not fused):
            attention = only(lambda: layer(x, x, x)[0])
        assert (attention.goes_to, attention.scores_bytes) == (BY_HAND, 2 * 4 * 9 * 9 * 4)
        assert fused or "need_weights=False" in attention.change


class TestTorchsFunctions:
    def test_a_call_is_described(self):
        attention = only(lambda: F.scaled_dot_product_attention(X, X, X, is_causal=True))
        assert (attention.goes_to, attention.scores_bytes) == (TORCHS, 2 * 4 * 9 * 9 * 4)
        assert attention.shapes == ((2, 4, 9, 64), (2, 4, 9, 64))
        assert attention.options == "is_causal"
        assert "sdpa_replaced():" in attention.change

    def test_a_call_with_gradients_is_described(self):
        x = X.half().requires_grad_()
        attention = only(lambda: F.scaled_dot_product_attention(x, x, x))
        assert (attention.options, attention.scores_bytes) == ("gradients", 2 * 4 * 9 * 9 * 4)
        with torch.no_grad():
            attention = only(lambda: F.scaled_dot_product_attention(x, x, x))
        assert (attention.options, attention.scores_bytes) == ("", 2 * 4 * 9 * 9 * 2)

    def test_a_call_that_our_kernels_refuse_gets_no_advice(self):
        x = X.double()
        attention = only(lambda: F.scaled_dot_product_attention(x, x, x))
        assert "metal_attn refuses it: query has dtype torch.float64" in attention.why
        assert attention.change == ""

    def test_autocast_decides_the_dtype(self):
        mask = torch.zeros(9, 9)

        def calls():
            F.scaled_dot_product_attention(X, X, X, mask)
            with torch.autocast("cpu", torch.bfloat16):
                return F.scaled_dot_product_attention(X, X, X, mask)

        dtypes = {attention.dtype: attention.goes_to for attention in watched(calls)}
        assert dtypes == {torch.bfloat16: TORCHS, torch.float32: TORCHS}

    def test_a_causal_bias_is_described_as_causal(self):
        bias = causal_lower_right(9, 9)
        attention = only(lambda: F.scaled_dot_product_attention(X, X, X, bias))
        assert (attention.goes_to, attention.options) == (TORCHS, "is_causal")
        attention = only(lambda: F.scaled_dot_product_attention(X, X, X, torch.ones(9, 9).bool()))
        assert attention.options == "attn_mask (9, 9) bool"

    @pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
    def test_fused_layers_are_recorded(self, kind):
        layer = kind(256, 4, batch_first=True).eval()
        x = X.transpose(1, 2).flatten(2)
        options = {"need_weights": False} if kind is nn.MultiheadAttention else {}
        operands = (x, x, x) if options else (x,)
        with torch.no_grad():
            attention = only(lambda: layer(*operands, **options)[0])
        assert attention.shapes == ((2, 4, 9, 64), (2, 4, 9, 64))
        assert attention.goes_to == TORCHS
        assert attention.why.startswith("one op on the CPU")


class TestOurFunctions:
    def test_an_op_counts_once(self):
        x = X.clone().requires_grad_()  # the autograd kernel calls the op again
        attention = only(lambda: flash_attn_func(x, x, x))
        assert (attention.goes_to, attention.options) == (OURS, "flash_fwd")
        assert attention.shapes[0] == (2, 9, 4, 64)

    def test_flex_attention_is_recorded(self, device):
        x = X.to(device)
        assert only(lambda: flex_attention(x, x, x)).options == "flex_fwd"

    def test_a_replaced_call_is_ours(self, device):
        x = X.to(device)

        def call():
            with sdpa_replaced():
                return F.scaled_dot_product_attention(x, x, x)

        assert only(call).goes_to == OURS

    @pytest.mark.filterwarnings("ignore:sdpa_replaced")
    def test_a_replaced_call_on_the_cpu_says_that_torch_ran_it(self):
        def call():
            with sdpa_replaced():
                return F.scaled_dot_product_attention(X, X, X)

        attention = only(call)
        assert (attention.goes_to, attention.why) == (OURS, "torch ran it on the CPU")

    def test_a_function_that_was_stored_before_the_block_is_recorded(self):
        with Watch() as watch:
            stored_function = F.scaled_dot_product_attention
            with simulate(), sdpa_replaced():
                stored_function(X, X, X)
        assert [attention.goes_to for attention in watch.seen.elements()] == [OURS]
        stored_function(X, X, X)  # still works, but is not recorded
        assert watch.seen.total() == 1

    @pytest.mark.filterwarnings("ignore:sdpa_replaced")
    def test_calls_of_other_threads_get_advice(self):
        def call():
            with sdpa_replaced():
                thread = threading.Thread(target=F.scaled_dot_product_attention, args=(X, X, X))
                thread.start()
                thread.join()
            return X

        assert "process_wide=True" in only(call).change


class TestLibraries:
    def test_modes_see_no_other_ops(self):
        ops = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                ops.append(function)
                return function(*args, **(kwargs or {}))

        def call():
            ops.clear()
            with Mode(), torch.autocast("cpu", torch.bfloat16):
                return F.scaled_dot_product_attention(X, X, X)

        expected = call().shape, len(ops)
        with Watch() as watch:
            assert (call().shape, len(ops)) == expected
        assert watch.seen.total() == 1

    def test_torchscript_compiles_the_functions(self):
        def scripted():  # a new function each time, because torch caches scripted ones
            def function(x):
                scores = torch.softmax(x, -1) + x.softmax(-1)
                return scores + F.scaled_dot_product_attention(x, x, x)

            return torch.jit.script(function)(X)

        watched(scripted)

    def test_torch_compile_compiles_nothing(self):
        def forbidden(graph, inputs):
            raise AssertionError("compiled")

        with Watch() as watch:
            compiled = torch.compile(by_operators, backend=forbidden)
            assert torch.equal(compiled(), by_operators())
        assert watch.compiled
        assert len({attention.shapes for attention in watch.seen}) == 1
        with pytest.raises(Exception, match="compiled"):
            compiled()

    def test_models_of_transformers_are_recorded(self):
        tiny = pytest.importorskip("tests.transformers.tiny_models")
        model = tiny.build("Llama")
        ways = {"eager": BY_HAND, "sdpa": TORCHS, "metal_attn": OURS}
        for implementation, goes_to in ways.items():
            model.set_attn_implementation(implementation)
            with Watch() as watch, torch.no_grad():
                model(tiny.tokens())
            (attention,) = watch.seen
            assert (attention.goes_to, watch.seen[attention]) == (goes_to, 2), implementation
            assert ('attn_implementation="metal_attn"' in attention.change) == (goes_to != OURS)

    def test_a_library_that_is_too_old_gets_no_switch(self, monkeypatch):
        def older(name):
            raise ImportError(f"{name} needs a later one")

        monkeypatch.setattr(description.importlib, "import_module", older)
        assert description._switch("diffusers/models/attention.py:3").endswith("needs a later one")
