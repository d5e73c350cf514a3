"""Tiny Hugging Face models with attn_implementation="metal_attn" against their own eager attention.

Weights are multiplied by 4: at their initial size attention is so uniform that a dropped softcap or
a scale that is 10 % off passes (measured on transformers' own tests).
"""

import builtins
import importlib
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch_metal_attn.integrations import transformers as integration  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    enable,
    metal_attention,
    record_routes,
)
from torch_metal_attn.reference import attention  # noqa: E402

TOLERANCE = 1e-5

TEXT = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}

# name -> (model class, config class, config)
DECODERS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": None}),
    "mistral sliding": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 32}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GROUPED | {"head_dim": 16, "sliding_window": 8} | ALTERNATING,
    ),
}
ENCODERS = {
    "bert": ("BertModel", "BertConfig", TEXT),
    "vit": ("ViTModel", "ViTConfig", VISION),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT | {"eos_token_id": 2}, "vision_config": VISION, "projection_dim": 32},
    ),
}


def build(family):
    """The tiny model, eager, in evaluation mode."""
    model_name, config_name, options = {**DECODERS, **ENCODERS}[family]
    return build_from(getattr(transformers, config_name)(**options), model_name)


def build_from(config, model_name):
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    model.set_attn_implementation("eager")
    return model


def tokens(length=13, batch=2):
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(0))


def inputs_of(family):
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    if family == "vit":
        return {"pixel_values": images}
    if family == "clip":
        ids = torch.cat([tokens(), torch.full((2, 1), 2)], 1)
        return {"input_ids": ids, "pixel_values": images}
    return {"input_ids": tokens()}


@torch.no_grad()
def answer(model, **inputs):
    """The model's scores or last hidden state, on the CPU."""
    inputs = {
        name: value.to(model.device) if torch.is_tensor(value) else value
        for name, value in inputs.items()
    }
    result = model(**inputs)
    return (result.logits if "logits" in result else result[0]).cpu()


def assert_same(actual, expected, where=None):
    difference = (actual - expected).abs()
    assert (difference if where is None else difference[where]).max() <= TOLERANCE


class TestMatchesEager:
    @pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
    def test_full_batches(self, family):
        model, inputs = build(family), inputs_of(family)
        expected = answer(model, **inputs)
        with record_routes() as routes:
            assert_same(answer(enable(model), **inputs), expected)
        if family in ("mistral sliding", "gemma3"):
            assert routes.reference
        else:
            assert not routes.reference
        assert routes.kernel or family == "mistral sliding"

    @pytest.mark.parametrize("family", ["llama", "bert", "vit"])
    def test_on_device(self, family, device):
        """The same layer shapes, in the kernel."""
        model, inputs = build(family), inputs_of(family)
        expected = answer(model, **inputs)
        with record_routes() as routes:
            assert_same(answer(enable(model).to(device), **inputs), expected)
        assert sum(routes.kernel.values()) == 2
        assert not routes.reference

    @pytest.mark.parametrize("family", [*DECODERS, "bert"])
    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_padding(self, family, padding):
        ids = tokens()
        mask = torch.ones_like(ids)
        hidden = slice(None, 4) if padding == "left" else slice(-4, None)
        mask[1, hidden] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        model = build(family)
        expected = answer(model, **inputs)
        with record_routes() as routes:
            assert_same(answer(enable(model), **inputs), expected, mask.bool())
        assert sum(routes.reference.values()) == 2

    def test_mask_without_padding_takes_the_kernel(self):
        for family in ("llama", "bert"):
            model = enable(build(family))
            with record_routes() as routes:
                answer(model, input_ids=tokens(), attention_mask=torch.ones(2, 13))
            assert not routes.reference
            assert sum(routes.kernel.values()) == 2

    def test_packed_sequences(self):
        """Positions that start again: each sequence sees only itself."""
        model = build("llama")
        ids = tokens(length=10, batch=1)
        positions = torch.tensor([[*range(6), *range(4)]])
        expected = torch.cat([answer(model, input_ids=part) for part in ids.split([6, 4], 1)], 1)
        packed = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        assert_same(answer(enable(model), **packed), expected)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_custom_four_dimensional_mask(self, dtype):
        model = build("llama")
        visible = torch.ones(13, 13, dtype=torch.bool).tril()
        visible[7:, 2:5] = False
        additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min).expand(2, 1, 13, 13)
        expected = answer(model, input_ids=tokens(), attention_mask=additive)
        mask = additive if dtype == torch.float32 else visible.expand(2, 1, 13, 13)
        assert_same(answer(enable(model), input_ids=tokens(), attention_mask=mask), expected)

    def test_prompt_in_two_parts(self):
        """The second part meets keys of the first: causal, bottom-right."""
        model = build("llama")
        ids = tokens()
        expected = answer(model, input_ids=ids)
        enable(model)
        cache = transformers.DynamicCache(config=model.config)
        first = answer(model, input_ids=ids[:, :6], past_key_values=cache)
        second = answer(model, input_ids=ids[:, 6:], past_key_values=cache)
        assert_same(torch.cat([first, second], 1), expected)

    def test_compiled(self):
        model = build("llama")
        expected = answer(model, input_ids=tokens(), use_cache=False)
        enable(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            logits = compiled(input_ids=tokens(), use_cache=False).logits
        assert_same(logits, expected)


class TestGeneration:
    def generate(self, model, ids, mask, **options):
        """Greedy tokens and the scores behind each of them."""
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
        result = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        return result.sequences.cpu(), torch.stack(result.logits).cpu()

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("family", ["llama", "mistral sliding", "qwen3"])
    def test_same_tokens(self, family, padded, cache):
        model = build(family)
        ids, mask = tokens(), torch.ones(2, 13, dtype=torch.long)
        if padded:
            mask[0, :5] = 0
        options = {"cache_implementation": cache, "disable_compile": True}
        expected, expected_scores = self.generate(model, ids, mask, **options)
        actual, scores = self.generate(enable(model), ids, mask, **options)
        assert actual.tolist() == expected.tolist()
        assert_same(scores, expected_scores)

    def test_dynamic_cache_on_device(self, device):
        model = build("llama")
        ids, mask = tokens(batch=1), torch.ones(1, 13, dtype=torch.long)
        expected, expected_scores = self.generate(model, ids, mask, max_new_tokens=6)
        with record_routes() as routes:
            actual, scores = self.generate(enable(model).to(device), ids, mask, max_new_tokens=6)
        assert actual.tolist() == expected.tolist()
        assert_same(scores, expected_scores)
        assert not routes.reference
        assert sum(routes.kernel.values()) == 2 * 6

    def test_static_prefill_takes_the_kernel(self):
        """More keys than queries and no mask: top-left causal over slots that are still empty."""
        model = build("llama")
        expected = answer(model, input_ids=tokens())
        enable(model)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        with record_routes() as routes:
            assert_same(answer(model, input_ids=tokens(), past_key_values=cache), expected)
        assert not routes.reference
        assert any("k (2, 2, 40, 16) causal" in call for call in routes.kernel)

    def test_first_token_of_a_static_cache(self):
        model = build("llama")
        ids = tokens(length=1)
        expected = answer(model, input_ids=ids)
        enable(model)
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        assert_same(answer(model, input_ids=ids, past_key_values=cache), expected)


class TestMaskFunction:
    def mask(self, **changes):
        options = {"batch_size": 1, "q_length": 1, "kv_length": 8, "device": "cpu"}
        return integration.metal_attention_mask(**options | changes)

    def test_none_where_the_kernel_suffices(self):
        assert self.mask(q_length=8) is None
        assert self.mask(q_length=4) is None, "a static cache's prefill, top-left"
        assert self.mask(q_offset=7) is None, "a dynamic cache's decoding"
        assert self.mask(q_offset=torch.tensor(7)) is None

    @pytest.mark.parametrize("q_offset", [0, 3, torch.tensor(3)])
    def test_one_query_never_sees_empty_slots(self, q_offset):
        seen = self.mask(q_offset=q_offset).sum()
        assert seen == q_offset + 1


class TestRefusals:
    def test_softcap(self):
        config = transformers.Gemma2Config(
            **GROUPED, head_dim=16, sliding_window=8, attn_logit_softcapping=5.0
        )
        model = enable(build_from(config, "Gemma2ForCausalLM"))
        with pytest.raises(NotImplementedError, match=r"softcap=5\.0 in Gemma2Attention"):
            answer(model, input_ids=tokens())

    def test_sinks(self):
        config = transformers.GptOssConfig(
            **GROUPED,
            **ALTERNATING,
            head_dim=16,
            sliding_window=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
        model = enable(build_from(config, "GptOssForCausalLM"))
        with pytest.raises(NotImplementedError, match=r"s_aux=a torch\.float32 tensor"):
            answer(model, input_ids=tokens())

    def test_position_bias(self):
        q, bias = torch.randn(1, 2, 9, 8), torch.zeros(1, 2, 9, 9)
        with pytest.raises(NotImplementedError, match=r"position_bias=a torch\.float32 tensor"):
            metal_attention(torch.nn.Module(), q, q, q, None, position_bias=bias)

    def test_dropout_in_training(self):
        model = enable(build("bert")).train()
        with pytest.raises(NotImplementedError, match=r"dropout=0\.1 in BertSelfAttention"):
            answer(model, input_ids=tokens())

    def test_attention_weights(self):
        model = enable(build("llama"))
        with pytest.raises(NotImplementedError, match="output_attentions=True"):
            answer(model, input_ids=tokens(), output_attentions=True)
        answer(model, input_ids=tokens(), output_attentions=False)

    def test_packed_lengths(self):
        model = enable(build("llama"))
        lengths = torch.tensor([0, 6, 13])
        with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q=a torch\.int64 tensor"):
            answer(model, input_ids=tokens(), cu_seq_lens_q=lengths)

    def test_gradients(self):
        model = enable(build("llama"))
        loss = model(input_ids=tokens(), labels=tokens()).loss
        with pytest.raises(NotImplementedError, match="metal_attn::flash_fwd"):
            loss.backward()

    def test_window_without_a_mask(self):
        module = torch.nn.Module()
        q = torch.randn(1, 2, 9, 8)
        with pytest.raises(NotImplementedError, match="sliding_window=8"):
            metal_attention(module, q, q, q, None, sliding_window=8)
        out, weights = metal_attention(module, q, q, q, None, sliding_window=9)
        assert weights is None
        torch.testing.assert_close(
            out.transpose(1, 2), attention(q, q, q, causal=True, q_offset=0)[0]
        )

    def test_unknown_arguments(self):
        q = torch.randn(1, 2, 9, 8)
        with pytest.raises(NotImplementedError, match="novelty=3 in Module"):
            metal_attention(torch.nn.Module(), q, q, q, None, novelty=3)
        metal_attention(torch.nn.Module(), q, q, q, None, novelty=None, position_ids=3)


class TestAttentionFunction:
    def test_causality_of_argument_and_module(self):
        q, (k, v) = torch.randn(1, 2, 4, 8), torch.randn(2, 1, 2, 6, 8)
        module = torch.nn.Module()
        causal = attention(q, k, v, causal=True, q_offset=0)[0].transpose(1, 2)
        full = attention(q, k, v)[0].transpose(1, 2)
        assert torch.equal(metal_attention(module, q, k, v, None)[0], causal)
        assert torch.equal(metal_attention(module, q, k, v, None, is_causal=False)[0], full)
        module.is_causal = False
        assert torch.equal(metal_attention(module, q, k, v, None)[0], full)
        assert torch.equal(metal_attention(module, q, k, v, None, is_causal=True)[0], causal)

    def test_scaling(self):
        q = torch.randn(1, 2, 4, 8)
        for mask in (None, torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()):
            out, _ = metal_attention(torch.nn.Module(), q, q, q, mask, scaling=1.0)
            expected = attention(q, q, q, softmax_scale=1.0, causal=True, q_offset=0)[0]
            torch.testing.assert_close(out.transpose(1, 2), expected)

    def test_queries_shared_by_the_batch(self):
        q, (k, v) = torch.randn(1, 2, 4, 8), torch.randn(2, 3, 2, 6, 8)
        out, _ = metal_attention(torch.nn.Module(), q, k, v, None, is_causal=False)
        expected = attention(q.expand(3, -1, -1, -1), k, v)[0]
        assert torch.equal(out.transpose(1, 2), expected)


class TestEnable:
    @pytest.mark.parametrize(
        ("config", "model"),
        [
            ("BloomConfig", "BloomForCausalLM"),
            ("MptConfig", "MptForCausalLM"),
            ("FalconConfig", "FalconForCausalLM"),
            ("GPTJConfig", "GPTJForCausalLM"),
            ("GPTNeoConfig", "GPTNeoForCausalLM"),
            ("CodeGenConfig", "CodeGenForCausalLM"),
            ("XGLMConfig", "XGLMForCausalLM"),
            ("Gemma4TextConfig", "Gemma4ForCausalLM"),
            ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
        ],
    )
    def test_refuses_families(self, config, model):
        """On the meta device: their weights do not matter."""
        if not hasattr(transformers, model):
            pytest.skip(f"this transformers has no {model}")
        with torch.device("meta"):
            model = getattr(transformers, model)(getattr(transformers, config)())
        before = model.config._attn_implementation
        reasons = "would ignore attn_implementation|attn_implementation=.* would answer wrongly"
        with pytest.raises(NotImplementedError, match=reasons) as refused:
            enable(model)
        assert type(model).__name__ in str(refused.value)
        assert model.config._attn_implementation == before

    def test_refuses_a_part(self):
        model = build("llama")
        with torch.device("meta"):
            model.draft = transformers.BloomModel(transformers.BloomConfig(n_layer=1))
        with pytest.raises(NotImplementedError, match=r"BloomModel at 'draft'.*would ignore"):
            enable(model)
        assert model.config._attn_implementation == "eager"

    def test_reaches_every_part(self):
        model = enable(build("clip"))
        assert model.text_model.config._attn_implementation == "metal_attn"
        assert model.vision_model.config._attn_implementation == "metal_attn"

    def test_refuses_other_objects(self):
        with pytest.raises(TypeError, match="Linear"):
            enable(torch.nn.Linear(2, 2))

    def test_without_transformers(self, monkeypatch):
        original = builtins.__import__

        def absent(name, *arguments, **options):
            if name.split(".")[0] == "transformers":
                raise ModuleNotFoundError("No module named 'transformers'")
            return original(name, *arguments, **options)

        name = "torch_metal_attn.integrations.transformers"
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(ImportError, match=r"pip install 'transformers>=5\.4'"):
            importlib.import_module(name)

    def test_with_a_transformers_that_is_too_old(self, monkeypatch):
        def sdpa_mask(batch_size, cache_position, kv_length):
            """As in 5.3."""

        monkeypatch.delitem(sys.modules, "torch_metal_attn.integrations.transformers")
        monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", sdpa_mask)
        with pytest.raises(ImportError, match=r"5\.4 or later"):
            importlib.import_module("torch_metal_attn.integrations.transformers")
