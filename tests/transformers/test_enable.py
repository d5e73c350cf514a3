"""Models and arguments that are supported or refused, with the reasons."""

import builtins
import importlib
import inspect
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

import torch_metal_attn  # noqa: E402
from tests.helpers.cases import each_case  # noqa: E402
from tests.transformers import census  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import bounds  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    continuous_batching,
    enable,
    metal_attention,
    metal_attention_mask,
    record_routes,
    refusals,
)
from torch_metal_attn.reference import attention  # noqa: E402
from torch_metal_attn.simulator import simulate  # noqa: E402
from torch_metal_attn.testing.judge import normal  # noqa: E402
from torch_metal_attn.with_kvcache import DECODE_QUERIES  # noqa: E402

PACKAGE = "torch_metal_attn.integrations.transformers"

LORA = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
WRAPPERS = {
    "PEFT": lambda model: get_peft_model(model, LORA).eval(),
    "compiled": torch.compile,
    "compiled PEFT": lambda model: torch.compile(WRAPPERS["PEFT"](model), backend="eager"),
    "DataParallel": torch.nn.DataParallel,
}
Q = normal(1, 2, 13, 8)
VALID = {"query": Q, "key": Q, "value": Q, "attention_mask": None, "module": torch.nn.Module()}
ENDS = bounds(0, 6, 13)
LEFT = metal_attention_mask(1, 13, 13, attention_mask=torch.arange(13)[None] > 0, device="cpu")
NUMBER = torch.tensor(0.5, requires_grad=True)
REFUSED = {
    NotImplementedError: {
        "sliding_window=8": {"sliding_window": 8},
        "scaling requires grad": {"scaling": NUMBER},
        "softcap requires grad": {"softcap": NUMBER},
        "novelty=3 in Module: metal_attn does not know novelty": {"novelty": 3},
        r"indices=an int64 tensor of shape": {"indices": torch.zeros(2, dtype=torch.int64)},
        r"sinks=.*\(2,\) in Module: it must be": {"sinks": torch.zeros(2)},
        "sinks together with cu_seq_lens_q": {"sinks": torch.zeros(1, 2, 13, 1)} | ENDS,
        r"cu_seq_lens_q=an int32 tensor of shape \(3,\) in Module without cu_seq_lens_k": {
            "cu_seq_lens_q": ENDS["cu_seq_lens_q"]
        },
        "with a batch of 2": dict.fromkeys(list(VALID)[:3], Q.expand(2, -1, -1, -1)) | ENDS,
        "together with a mask": {"attention_mask": torch.ones(13, 13, dtype=torch.bool)} | ENDS,
        r"together with a mask \(causal padded\)": {"attention_mask": LEFT} | ENDS,
        "position_bias together": {"position_bias": torch.zeros(1, 2, 13, 13)} | ENDS,
        "sliding_window=5": {"sliding_window": 5} | ENDS,
    },
    TypeError: {
        "sliding_window is nan; it must be an int": {"sliding_window": float("nan")},
        **{f"{name} is an int; it must be a tensor": {name: 3} for name in list(VALID)[:3]},
        **{f"{name} is a list": {name: [1]} for name in ("attention_mask", "sinks", "s_aux")},
        **{f"{name} is a bool": {name: True} for name in ("position_bias", "indices")},
        "module is None; it must be an nn.Module": {"module": None},
    },
    ValueError: {r"query has shape \(2, 13, 8\); it must be \(B, H, S, D\)": {"query": Q[0]}},
}


@each_case("error, message", [(error, message) for error in REFUSED for message in REFUSED[error]])
def test_unsupported_arguments_are_refused(error, message):
    with pytest.raises(error, match=message):
        metal_attention(**VALID | REFUSED[error][message])


def test_harmless_arguments_are_ignored():
    ignored = {"novelty": None, "position_ids": 3, "max_new_tokens": 3, "do_sample": False}
    out, weights = metal_attention(**VALID, sliding_window=13, **ignored)
    assert weights is None
    torch.testing.assert_close(out.transpose(1, 2), attention(Q, Q, Q)[0])


class TestAttentionFunction:
    def test_is_causal_of_the_module_is_ignored(self):
        q, (k, v), module = torch.randn(1, 2, 4, 8), torch.randn(2, 1, 2, 6, 8), torch.nn.Module()
        causal = attention(q, k, v, causal=True, q_offset=0)[0].transpose(1, 2)
        full = attention(q, k, v)[0].transpose(1, 2)
        mask = metal_attention_mask(1, 4, 6)
        for module.is_causal in (True, False):
            assert torch.equal(metal_attention(module, q, k, v, None)[0], full)
            for masked, argument in ((None, True), (mask, None), (mask, False)):
                out, _ = metal_attention(module, q, k, v, masked, is_causal=argument)
                assert torch.equal(out, causal)

    @pytest.mark.parametrize(
        ("queries", "options"),
        [(DECODE_QUERIES, {}), (DECODE_QUERIES + 1, {}), (1, {"dropout": 0.5}), (1, None)],
    )
    def test_few_queries_without_gradients_decode(self, queries, options):
        q = torch.randn(1, 2, queries, 8, requires_grad=options is None)
        k = torch.randn(1, 1, 20, 8)
        with simulate(record=True) as run:
            metal_attention(torch.nn.Module(), q, k, k, None, **options or {})
        decodes = not options and queries <= DECODE_QUERIES
        kernel = "flash_decode" if decodes else "flash_fwd"
        assert [launch.kernel for launch in run.recorded] == [kernel]

    def test_rows_that_are_not_contiguous_are_copied(self):
        class Attention(torch.nn.Module):
            def forward(self, q, k):
                return metal_attention(self, q, k, q, None)[0]

        q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 8, 20).transpose(2, 3)
        expected = attention(q, k.contiguous(), q)[0].transpose(1, 2)
        torch.testing.assert_close(Attention()(q, k), expected)
        copied = torch_metal_attn.explain(Attention(), q, k)
        plain = torch_metal_attn.explain(Attention(), q, k.contiguous())
        assert copied.rows[0].copied == ("k, whose strides were (320, 160, 1, 20)",)
        assert "copied first: k, whose strides were (320, 160, 1, 20)" in str(copied)
        assert plain.rows[0].copied == ()
        assert copied.cost.bytes - plain.cost.bytes == 2 * k.numel() * 4

    def test_queries_are_shared_by_the_batch(self):
        q, (k, v) = torch.randn(1, 2, 4, 8), torch.randn(2, 3, 2, 6, 8)
        out, _ = metal_attention(torch.nn.Module(), q, k, v, None, is_causal=False)
        expected = attention(q.expand(3, -1, -1, -1), k, v)[0]
        assert torch.equal(out.transpose(1, 2), expected)

    @pytest.mark.parametrize("form", ["none", "causal", "bool", "float", "descriptor"])
    def test_position_bias_is_added_next_to_every_mask(self, form):
        q, k, v = torch.randn(3, 2, 3, 13, 8)
        bias = torch.randn(1, 13, 13, 3).permute(0, 3, 1, 2)
        padded = torch.arange(13) >= torch.tensor([[0], [4]])
        visible = torch.ones(13, 13, dtype=torch.bool).tril() & padded[:, None, None]
        mask = {
            "none": None,
            "causal": metal_attention_mask(2, 13, 13),
            "bool": visible,
            "float": torch.where(visible, torch.randn(13, 13), -torch.inf),
            "descriptor": metal_attention_mask(2, 13, 13, attention_mask=padded, device="cpu"),
        }[form]
        out, _ = metal_attention(torch.nn.Module(), q, k, v, mask, position_bias=bias)
        scores = q @ k.transpose(-1, -2) * 8**-0.5 + bias
        if form == "float":
            scores = scores + mask
        elif form != "none":
            shown = visible[0] if form == "causal" else visible
            scores = scores.masked_fill(~shown, -torch.inf)
        expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v
        torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sink_per_query_equals_eager(self, dtype):
        generator = torch.Generator().manual_seed(0)
        exact = [torch.randn(2, 3, 13, 8, generator=generator) for _ in range(3)]
        exact.append(3 * torch.randn(2, 3, 13, 1, generator=generator))
        visible = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, 13, 13).clone()
        visible[1, :, :4] = False

        def eager(q, k, v, sinks):
            scores = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(~visible, -torch.inf)
            return torch.softmax(torch.cat([scores, sinks], 3), 3)[..., :-1] @ v

        def ours(q, k, v, sinks):
            out, _ = metal_attention(torch.nn.Module(), q, k, v, visible, sinks=sinks)
            return out.transpose(1, 2)

        def results(attend, to):
            leaves = [one.to(dtype).to(to).requires_grad_() for one in exact]
            out = attend(*leaves)
            weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(to)
            return [out, *torch.autograd.grad((out * weights).sum(), leaves)]

        expected = results(eager, torch.float64)
        actual = results(ours, dtype)
        for one, other, truth in zip(actual, results(eager, dtype), expected, strict=True):
            bound = 2 * (other.double() - truth).abs().max()
            assert (one.double() - truth).abs().max() <= bound + 2**-21 * truth.abs().max()
        assert not actual[0][1, :, :4].any()


@pytest.mark.parametrize("dtype, causal", [("int32", True), ("int64", True), ("int32", False)])
def test_packed_sequences_on_device(dtype, causal, device):
    q, k, v = torch.randn(3, 1, 2, 31, 16)
    ends = bounds(0, 17, 18, 31, dtype=getattr(torch, dtype))
    ends |= {name: ends[name].to(device) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    mask = metal_attention_mask(1, 31, 31, device=device) if causal else None
    tensors = (tensor.to(device) for tensor in (q, k, v))
    out, _ = metal_attention(torch.nn.Module(), *tensors, mask, **ends)
    parts = zip(*(tensor.split((17, 1, 13), 2) for tensor in (q, k, v)), strict=True)
    expected = torch.cat([attention(*part, causal=causal)[0] for part in parts], 2)
    torch.testing.assert_close(out.cpu(), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


class TestEnable:
    def test_other_implementations_are_not_refused(self):
        model = tiny.build("Llama")
        model.set_attn_implementation("sdpa")
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(ValueError, match="nonsense") as refused:
            model.set_attn_implementation("nonsense")
        assert "Did you mean" not in str(refused.value)

    @pytest.mark.parametrize("name", ["metal_atn", "metal-attn", "metal_attention"])
    def test_misspelled_names_get_a_suggestion(self, name):
        with pytest.raises(ValueError, match=rf'{name}.* Did you mean "metal_attn"\?$'):
            tiny.build("Llama").set_attn_implementation(name)

    def test_source_of_a_class_is_its_text(self):
        class Local:
            class Inner:
                pass

        module = sys.modules[LlamaAttention.__module__]
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
        for kind in (Local, Local.Inner, *(k for k in kinds if k.__module__ == module.__name__)):
            assert refusals.source(kind).rstrip() == inspect.getsource(kind).rstrip()
        assert refusals.source(int) == ""

    def test_output_attentions_in_the_config_is_refused(self):
        model = tiny.build("Llama", output_attentions=True)
        with pytest.raises(NotImplementedError, match=r"output_attentions=True in the config of"):
            enable(model)
        assert model.config._attn_implementation == "eager"
        with pytest.raises(ValueError, match="output_attentions"):
            enable(tiny.build("Llama")).config.output_attentions = True

    def test_output_attentions_of_a_model_that_ignores_it_is_refused(self):
        """BridgeTower returns the weights of its attention modules, which would be None."""
        model, inputs, _ = census.eager("bridgetower", "BridgeTowerModel")
        assert model(**inputs, output_attentions=True).attentions[0][0].dim() == 4
        for _ in range(2):
            enable(model)(**inputs)
        assert len(model._forward_pre_hooks) == 1
        with pytest.raises(NotImplementedError, match=r"output_attentions=True in BridgeTowerMod"):
            model(**inputs, output_attentions=True)
        model.set_attn_implementation("eager")
        assert model(**inputs, output_attentions=True).attentions[0][0].dim() == 4
        loaded = type(model)._from_config(model.config, attn_implementation="metal_attn")
        with pytest.raises(NotImplementedError, match=r"output_attentions=True in BridgeTowerMod"):
            loaded(**inputs, output_attentions=True)

    def test_an_unsupported_part_is_refused(self):
        model = tiny.build("Llama")
        with torch.device("meta"):
            model.draft = transformers.BloomModel(transformers.BloomConfig(n_layer=1))
        with pytest.raises(NotImplementedError, match=r"BloomModel at 'draft'.*would ignore"):
            enable(model)
        assert model.config._attn_implementation == "eager"

    def test_every_part_is_switched(self):
        model = enable(tiny.build("CLIP"))
        for part in (model.text_model, model.vision_model):
            assert part.config._attn_implementation == "metal_attn"

    @pytest.mark.parametrize("wrapped", WRAPPERS)
    def test_wrapped_models_are_switched(self, wrapped):
        model = WRAPPERS[wrapped](tiny.build("Llama"))
        inputs = {"input_ids": tiny.tokens()}
        with torch.compiler.set_stance("force_eager"):
            expected = model(**inputs).logits
        assert enable(model, fuse_rope=True) is model
        inner = refusals.unwrapped(model)
        assert inner.config._attn_implementation == "metal_attn"
        assert LlamaAttention not in map(type, inner.modules())
        with torch.compiler.set_stance("force_eager"), record_routes() as routes:
            actual = model(**inputs).logits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        assert routes.plain
        with continuous_batching(model) as same:
            assert same is model
            assert inner.config._attn_implementation == "metal_flash_attn"
        assert inner.config._attn_implementation == "metal_attn"

    def test_other_objects_and_options_are_refused(self):
        linear = torch.nn.Linear(2, 2)
        for model in (linear, torch.compile(linear)):
            with pytest.raises(TypeError, match=r"model is an? \w+; it must be a transformers Pre"):
                enable(model)
        for option in ("fuse_rope", "absorb"):
            with pytest.raises(TypeError, match=f"{option} is 'yes'; it must be a bool"):
                enable(linear, **{option: "yes"})

    def test_a_missing_or_old_transformers_is_named(self, monkeypatch):
        original = builtins.__import__

        def absent(name, *arguments, **options):
            if name.split(".")[0] == "transformers":
                raise ModuleNotFoundError("No module named 'transformers'")
            return original(name, *arguments, **options)

        def sdpa_mask(batch_size, cache_position, kv_length):
            pass

        for owner, other in ((transformers.masking_utils, sdpa_mask), (builtins, absent)):
            monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
            monkeypatch.setattr(owner, "__import__" if other is absent else "sdpa_mask", other)
            with pytest.raises(ImportError, match=r"5\.4 or later.*'transformers>=5\.4'"):
                importlib.import_module(PACKAGE)


def test_nested_records_count_separately():
    q = torch.randn(1, 2, 4, 8)
    with record_routes() as outer:
        with record_routes() as inner:
            metal_attention(torch.nn.Module(), q, q, q, None)
        metal_attention(torch.nn.Module(), q, q, q, None)
    assert sum(inner.kernel.values()) == 1
    assert sum(outer.kernel.values()) == 2
