"""sdpa_replaced(): the calls that it replaces, the calls that it leaves to torch, and why."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.jit import _builtins
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.overrides import TorchFunctionMode

from tests.sdpa.sdpa_check import (
    BUILTIN,
    LEFT_TO_TORCH,
    NO_CALL,
    SCALE,
    Graphs,
    close,
    normal,
    nothing_said,  # noqa: F401
    qkv,
    simulate,
)
from torch_metal_attn import sdpa_replaced
from torch_metal_attn.integrations import sdpa_replacement as replacement

BUILTIN_OP = "aten::scaled_dot_product_attention"

pytestmark = pytest.mark.filterwarnings(f"ignore:.*{NO_CALL}")


def by_attribute(x: torch.Tensor):
    return F.scaled_dot_product_attention(x, x, x)


def by_name(x: torch.Tensor):
    return imported_before(x, x, x)


class TestReplaces:
    @pytest.mark.parametrize(
        "call",
        [
            lambda *a, **kw: F.scaled_dot_product_attention(*a, **kw),
            lambda *a, **kw: imported_before(*a, **kw),
            lambda *a, **kw: torch._C._nn.scaled_dot_product_attention(*a, **kw),
        ],
    )
    def test_every_name_is_replaced(self, device, call):
        q, k, v = (t.to(device) for t in qkv())
        mask = normal(9, 11, seed=3) > -0.5
        options = {"attn_mask": mask.to(device), "scale": 0.2}
        expected = imported_before(*qkv(), mask, scale=0.2)
        with simulate() as run, sdpa_replaced() as calls:
            close(call(q, k, v, **options), expected)
            close(call(q, k, v, mask.to(device), 0.0, False, scale=0.2), expected)
            close(call(query=q, key=k, value=v, **options), expected)
        assert (calls.replaced, calls.left_alone) == (3, {})
        assert device.type == "mps" or len(run.launches) == 3
        call(q, k, v)
        assert calls.replaced == 3

    @pytest.mark.parametrize(
        "training, mode", [(False, torch.inference_mode), (True, torch.no_grad)]
    )
    def test_calls_of_torchs_layers_are_replaced(self, device, training, mode):
        x = normal(2, 5, 32).to(device)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
        future = torch.nn.Transformer.generate_square_subsequent_mask(5, device=device)
        layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
        attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        decoder = torch.nn.TransformerDecoderLayer(32, 4, dropout=0.0, batch_first=True)
        for module in (layer, attention, encoder, decoder):
            module.to(device).train(training)
        cases = [
            (lambda: attention(x, x, x, need_weights=False)[0], 1),
            (lambda: attention(x, x, x, key_padding_mask=padding, need_weights=False)[0], 1),
            (
                lambda: attention(x, x, x)[0],
                0,
            ),  # returns weights, so torch's function is not called
            (lambda: layer(x), 1),
            (lambda: layer(x, src_mask=future, is_causal=True), 1),
            (lambda: layer(x, src_key_padding_mask=padding), 1),
            (lambda: encoder(x, src_key_padding_mask=padding), 2),
            (lambda: decoder(x, x, future, tgt_is_causal=True), 2),
        ]
        for number, (call, count) in enumerate(cases):
            with mode():
                expected = call()
                with simulate(), sdpa_replaced() as calls:
                    out = call()
            close(out, expected)
            assert (number, calls.replaced, calls.left_alone) == (number, count, {})

    def test_calls_with_fake_tensors_are_replaced(self):
        with FakeTensorMode(), simulate(), sdpa_replaced() as calls:
            q = torch.empty(2, 4, 9, 8)
            assert F.scaled_dot_product_attention(q, q, q[..., :5]).shape == (2, 4, 9, 5)
        assert calls.replaced == 1

    @pytest.mark.parametrize("process_wide", [False, True])
    def test_torchscript_calls_torchs_own(self, process_wide):
        """torch.jit.script works in a block. Scripts call torch's function, also in the block."""
        x = normal(1, 2, 5, 8)
        expected = by_name(x)

        def entries():
            return list(_builtins._get_builtin_table().values()).count(BUILTIN_OP)

        before = entries()
        for _ in range(3):
            with simulate() as run, sdpa_replaced(process_wide=process_wide) as calls:
                scripts = [torch.jit.script(f) for f in (by_attribute, by_name)]
                layer = torch.jit.script(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
                layer(x[0])
                for script in scripts:
                    assert BUILTIN_OP in {node.kind() for node in script.graph.nodes()}
                    close(script(x), expected)
                assert calls.replaced == 0
                assert not run.launches
                close(by_attribute(x), expected)
                assert calls.replaced == 1
        for script in scripts:
            close(script(x), expected)
        gc.collect()
        assert entries() <= before + 1  # the function of the last block is kept

    def test_gradient_of_the_mask(self):
        """A learnt relative-position bias, as in BEiT, with a batch of 1."""
        q, k, v = qkv()

        def gradients(dtype):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, normal(1, 4, 9, 11, seed=3))]
            out = F.scaled_dot_product_attention(*leaves)
            return torch.autograd.grad((out * normal(*out.shape, seed=4)).sum(), leaves)

        with simulate() as run, sdpa_replaced() as calls:
            actual = gradients(torch.float32)
        assert (calls.replaced, calls.left_alone) == (1, {})
        assert "flash_bwd_bias" in {launch.kernel for launch in run.launches}
        for one, other in zip(actual, gradients(torch.float64), strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=1e-5)


class Subclass(torch.Tensor):
    pass


def left_alone_cases():
    q, k, v = qkv()
    swapped = normal(3, 2, 4, 5, 8).transpose(0, 1)
    nested = torch.nested.nested_tensor([normal(4, 5, 8), normal(4, 3, 8)])
    return {
        "float64": ((q.double(), k.double(), v.double()), {}, "query has dtype torch.float64"),
        "strides": ((q, k.mT.contiguous().mT, v), {}, "key of shape (2, 4, 11, 8) has strides"),
        "merging": ((swapped,) * 3, {}, "query of shape (2, 3, 4, 5, 8) and strides"),
        "head dim": ((normal(1, 1, 3, 580),) * 3, {}, "query has a head dim of 580; it must be in"),
        "scale": ((q, k, v), {"scale": 1e39}, "scale is "),
        "subclass": ((q.as_subclass(Subclass), k, v), {}, "an argument is a tensor subclass"),
        "meta": ((q.to("meta"),) * 3, {"is_causal": True}, "there are no kernels for tensors on"),
        "nested": ((nested,) * 3, {}, "an argument is a nested tensor"),
    }


class TestLeavesAlone:
    @pytest.mark.filterwarnings("ignore:.*nested tensors")
    @pytest.mark.parametrize("case", left_alone_cases())
    def test_unsupported_calls_are_left_to_torch(self, case):
        arguments, options, reason = left_alone_cases()[case]
        expected = imported_before(*arguments, **options)
        with simulate() as run, sdpa_replaced() as calls:
            with pytest.warns(UserWarning, match=LEFT_TO_TORCH) as said:
                out = F.scaled_dot_product_attention(*arguments, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                imported_before(*arguments, **options)  # the warning appears once
        assert not run.launches
        assert [warning.filename for warning in said] == [__file__]
        ((kind, count),) = calls.left_alone.items()
        assert (calls.replaced, count) == (0, 2)
        assert kind.startswith(reason)
        assert type(out) is type(expected)
        assert out.requires_grad == expected.requires_grad
        if case not in ("meta", "nested"):
            torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0, equal_nan=True)

    def test_errors_are_torchs(self):
        q, _, _ = qkv()
        cases = [((q, q.half(), q), RuntimeError), ((q, q, [1]), TypeError), ((q,), TypeError)]
        for arguments, error in cases:
            with pytest.raises(error) as theirs:
                imported_before(*arguments)
            with simulate(), sdpa_replaced(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(error) as ours:
                    imported_before(*arguments)
            assert str(ours.value) == str(theirs.value)

    @pytest.mark.filterwarnings("ignore")
    def test_torch_func_is_left_to_torch(self):
        q, k, v = qkv()
        expected = torch.vmap(imported_before)(q, k, v)
        with simulate(), sdpa_replaced() as calls:
            close(torch.vmap(imported_before)(q, k, v), expected)
            torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
            with sdpa_kernel(SDPBackend.MATH):
                torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (q,))
        assert calls.replaced == 0
        assert calls.left_alone == {"transforms of torch.func are not implemented": 3}

    def test_reasons_do_not_depend_on_sizes(self):
        with simulate(), sdpa_replaced() as calls:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for length in range(3, 9):
                    q = normal(1, 2, 8, length).mT
                    F.scaled_dot_product_attention(q, q, q)
        assert list(calls.left_alone.values()) == [6]
        assert len(said) == 1

    def test_errors_of_the_kernels_are_raised(self, monkeypatch):
        def broken(*arguments, **options):
            raise ValueError("no kernel of that name")

        monkeypatch.setattr(replacement.Problem, "run", broken)
        with simulate(), sdpa_replaced() as calls:
            with pytest.raises(ValueError, match="no kernel of that name"):
                F.scaled_dot_product_attention(*qkv())
        assert (calls.replaced, calls.left_alone) == (0, {})


class TestContext:
    def test_calls_count_in_nested_blocks(self):
        q, k, v = qkv()
        outer = sdpa_replaced()
        with simulate(), outer:
            F.scaled_dot_product_attention(q, k, v)
            with sdpa_replaced() as inner, outer:
                F.scaled_dot_product_attention(q, k, v)
                imported_before(q, k, v)
            with pytest.warns(UserWarning, match=LEFT_TO_TORCH):
                F.scaled_dot_product_attention(q, k, v, scale=1e39)
        assert (inner.replaced, inner.left_alone) == (2, {})
        assert (outer.replaced, outer.left_alone) == (3, {SCALE: 1})
        with simulate(), outer:
            F.scaled_dot_product_attention(q, k, v)
        assert outer.replaced == 4
        assert repr(outer).startswith("SdpaReplaced(replaced=4, left_alone={'scale is 1e+39;")

    def test_an_earlier_patch_is_restored(self, monkeypatch):
        """A function that replaced torch's earlier gets the calls left alone, and is restored."""
        seen = []

        def theirs(*arguments, **options):
            seen.append(options)
            return imported_before(*arguments, **options)

        q, k, v = qkv()
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", theirs)
            with simulate(), sdpa_replaced() as calls:
                F.scaled_dot_product_attention(q, k, v)
                with pytest.warns(UserWarning, match=LEFT_TO_TORCH):
                    F.scaled_dot_product_attention(q, k, v, scale=1e39)
            assert F.scaled_dot_product_attention is theirs
        assert seen == [{"scale": 1e39}]
        assert (calls.replaced, calls.left_alone) == (1, {SCALE: 1})

    def test_a_patch_inside_the_block_stays(self):
        """A function that replaces ours inside the block stays, and may go on calling ours."""
        q, k, v = qkv()
        try:
            with simulate(), sdpa_replaced():
                ours = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = lambda *a, **kw: ours(*a, **kw)
            close(F.scaled_dot_product_attention(q, k, v), imported_before(q, k, v))
            with simulate(), sdpa_replaced() as calls:
                F.scaled_dot_product_attention(q, k, v)
                with pytest.warns(UserWarning, match=LEFT_TO_TORCH):
                    F.scaled_dot_product_attention(q, k, v, scale=1e39)
            assert (calls.replaced, calls.left_alone) == (1, {SCALE: 1})
        finally:
            F.scaled_dot_product_attention = BUILTIN[0]

    def test_other_modes_see_calls_left_alone(self):
        seen = []

        class Watch(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        q, k, v = qkv()
        with Watch(), simulate(), sdpa_replaced():
            F.scaled_dot_product_attention(q, k, v)
            assert BUILTIN[0] not in seen
            with pytest.warns(UserWarning, match=LEFT_TO_TORCH):
                F.scaled_dot_product_attention(q, k, v, scale=1e39)
        assert BUILTIN[0] in seen
        with simulate(), sdpa_replaced() as calls, Watch():
            imported_before(q, k, v)
        assert calls.replaced == 1


class TestCompile:
    @pytest.fixture(autouse=True)
    def reset_dynamo_and_thread(self, monkeypatch):
        torch._dynamo.reset()
        # As in a thread whose first call of attention is compiled.
        monkeypatch.setattr(replacement._blocks, "this_thread", replacement._Thread())

    @pytest.mark.parametrize("dynamic", [True, False])
    def test_one_graph_inside_and_one_outside_of_blocks(self, dynamic):
        def call(q, k, v):
            if dynamic:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True) + 0
            return imported_before(q, k, v, is_causal=True) + 0

        graphs = Graphs()
        compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=graphs)
        expected = call(*qkv())
        close(compiled(*qkv()), expected)
        for number in range(12):  # more contexts than dynamo's limit of recompilations
            with simulate() as run, sdpa_replaced() as calls:
                close(compiled(*qkv()), expected)
            assert len(run.launches) == 1
            assert number or calls.replaced >= 1
        with simulate() as run:
            close(compiled(*qkv()), expected)
        assert not run.launches
        assert graphs.calls == [0, 1]

    def test_compiled_calls_that_are_left_to_torch_warn(self):
        options = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
        compiled = torch.compile(lambda *a: F.scaled_dot_product_attention(*a) + 0, **options)
        q, k, v = qkv()
        strided, expected = k.mT.contiguous().mT, imported_before(q, k, v)
        with simulate() as run, sdpa_replaced() as calls:
            with pytest.warns(UserWarning, match="the arguments are refused"):
                close(compiled(q, strided, v), expected)
        assert not run.launches
        assert calls.replaced == 0

    def test_gradients_of_compiled_calls(self):
        options = {"fullgraph": True, "backend": "aot_eager"}
        compiled = torch.compile(lambda *a: F.scaled_dot_product_attention(*a) + 0, **options)
        leaves = [x.requires_grad_() for x in qkv()]
        weight = normal(2, 4, 9, 8, seed=5)
        out = imported_before(*leaves)
        expected = torch.autograd.grad((out * weight).sum(), leaves)
        with simulate() as run, sdpa_replaced() as calls:
            actual = torch.autograd.grad((compiled(*leaves) * weight).sum(), leaves)
        for one, other in zip(actual, expected, strict=True):
            close(one, other)
        assert calls.left_alone == {}
        assert [launch.kernel for launch in run.launches][-2:] == ["flash_bwd_dq", "flash_bwd_dkv"]

    def test_compiled_layers_are_replaced(self):
        x = normal(2, 5, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True).eval()
        with torch.no_grad():
            expected = layer(x)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            close(compiled(x), expected)
            for _ in range(2):
                with simulate() as run, sdpa_replaced() as calls:
                    close(compiled(x), expected)
                assert len(run.launches) == 1
                assert calls.left_alone == {}
            with simulate() as run:
                close(compiled(x), expected)
            assert not run.launches

    def test_a_block_inside_a_compiled_function(self):
        def call(q, k, v):
            with sdpa_replaced():
                return F.scaled_dot_product_attention(q, k, v)

        with simulate() as run:
            close(torch.compile(call, backend="aot_eager")(*qkv()), imported_before(*qkv()))
        assert len(run.launches) == 1
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, fullgraph=True, backend="aot_eager")(*qkv())
