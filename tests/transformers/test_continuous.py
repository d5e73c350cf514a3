"""Continuous batching: `generate_batch` through the kernels gives the tokens of `generate`."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.tiny_families import BATCHED  # noqa: E402
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    continuous,
    continuous_batching,
    enable,
    metal_flash_attention,
    record_routes,
)
from torch_metal_attn.simulator import runs  # noqa: E402

PROMPTS = tiny.prompts()


@functools.cache
def expected_tokens(name):
    return tiny.generate_each(tiny.build(name), PROMPTS)


def assert_same(actual, expected):
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, weights), (_, expected_weights) in zip(actual, expected, strict=True):
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-5)


def generated_in_batches(name, device="cpu", prompts=PROMPTS, **options):
    model, steps = tiny.build(name).to(device), []
    model.register_forward_hook(lambda *_: steps.append(1))
    with continuous_batching(model), record_routes() as routes:
        results = tiny.generate_batch(model, prompts, **options)
    return results, routes, len(steps)


def queries(routes):
    """The tokens of all calls, from texts such as "... q (1, heads, tokens, head dim) k ..."."""
    tokens = {call: int(call.split(" q (")[1].split(",")[2]) for call in routes.kernel}
    return sum(tokens[call] * times for call, times in routes.kernel.items())


class TestMatchesGenerate:
    @pytest.mark.parametrize("name", BATCHED)
    def test_prompts_of_several_lengths_share_steps(self, name):
        results, routes, steps = generated_in_batches(name)
        assert_same(results, expected_tokens(name))
        assert sum(routes.packed.values()) == 2 * steps
        assert routes.packed == routes.kernel
        assert queries(routes) == 2 * sum(len(prompt) + 5 for prompt in PROMPTS)

    @pytest.mark.parametrize("name", ["Gemma2", "gpt-oss"])
    def test_on_device(self, name, device):
        results, _, steps = generated_in_batches(name, device)
        assert_same(results, expected_tokens(name))
        if (run := runs.current()) is not None:
            assert [launch.kernel for launch in run.launches] == ["flash_fwd"] * (2 * steps)

    @pytest.mark.parametrize("name", ["Llama", "Gemma3"])
    def test_evicted_requests_are_computed_again(self, name):
        prompts = [PROMPTS[1], PROMPTS[1][::-1], PROMPTS[0]]
        results, routes, _ = generated_in_batches(name, prompts=prompts, new_tokens=12, blocks=5)
        assert_same(results, tiny.generate_each(tiny.build(name), prompts, new_tokens=12))
        assert queries(routes) > 2 * sum(len(prompt) + 11 for prompt in prompts)


class TestContext:
    def test_an_error_restores_the_model(self):
        model = tiny.build("Gemma3")
        with pytest.raises(RuntimeError, match="planted"), continuous_batching(model):
            assert model.config._attn_implementation == "metal_flash_attn"
            raise RuntimeError("planted")
        assert model.config._attn_implementation == "eager"
        assert not continuous._contexts

    def test_blocks_can_be_nested(self):
        first, second = enable(tiny.build("Llama")), tiny.build("Mistral")
        with continuous_batching(first), continuous_batching(second):
            with continuous_batching(first):
                assert_same(tiny.generate_batch(second, PROMPTS), expected_tokens("Mistral"))
            assert_same(tiny.generate_batch(first, PROMPTS), expected_tokens("Llama"))
        assert first.config._attn_implementation == "metal_attn"
        assert second.config._attn_implementation == "eager"
        assert_same(tiny.generate_each(first, PROMPTS), expected_tokens("Llama"))

    def test_persistent_managers_are_not_shared_with_the_block(self):
        model = tiny.build("Llama")
        sizes = {"num_blocks": 16, "page_size": 8, "max_batch_tokens": 16}
        config = transformers.ContinuousBatchingConfig(**sizes)
        options = {"continuous_batching_config": config, "persistent_manager": True}

        def generate():
            results = model.generate_batch(PROMPTS, **options, max_new_tokens=6)
            return [result.generated_tokens for result in results.values()]

        tokens = [tokens for tokens, _ in expected_tokens("Llama")]
        with continuous_batching(model):
            assert generate() == tokens
        assert not hasattr(model, "_cached_continuous_batching_manager")
        assert generate() == tokens
        kept = model._cached_continuous_batching_manager
        with continuous_batching(model), record_routes() as routes:
            assert generate() == tokens
        assert routes.packed
        assert model._cached_continuous_batching_manager is kept
        model.destroy_cached_continuous_batching_manager()

    def test_unsupported_models_are_refused(self):
        with pytest.raises(TypeError, match="Linear"), continuous_batching(torch.nn.Linear(2, 2)):
            pass
        for name, reason in (
            ("Llama4", r"Llama4.* does not support flash attention"),
            ("DeepSeek-V3", "DeepseekV3ForCausalLM caches latent ro"),
        ):
            model = tiny.build(name)
            with pytest.raises(NotImplementedError, match=reason), continuous_batching(model):
                pass
            assert model.config._attn_implementation == "eager"

    def test_an_older_transformers_is_refused(self, monkeypatch):
        def update(self, key_states, value_states, layer_idx, read_index, write_index):
            """The signature in transformers 5.17."""

        monkeypatch.setattr(continuous.PagedAttentionCache, "update", update)
        with pytest.raises(ImportError, match=r"5\.20"), continuous_batching(tiny.build("Llama")):
            pass


class TestAttentionFunction:
    def test_forward_is_refused(self):
        model = tiny.build("Llama")
        with (
            continuous_batching(model),
            pytest.raises(NotImplementedError, match=r"without a paged cache.* generate_batch"),
        ):
            tiny.answer(model, input_ids=tiny.tokens())

    def refuses(self, match, window=None, **arguments):
        module = tiny.build("Llama").model.layers[0].self_attn
        cache = type("Cache", (), {"layer_to_allocator": [type("Group", (), {})]})()
        cache.layer_to_allocator[0].sliding_window = window
        q = torch.randn(1, 4, 5, 16)
        mask = arguments.pop("attention_mask", None)
        with pytest.raises(NotImplementedError, match=match):
            metal_flash_attention(module, q, q, q, mask, cache=cache, **arguments)

    def test_unsupported_arguments_are_refused(self, monkeypatch):
        self.refuses(r"outside of continuous_batching\(model\)")
        anywhere = type("Anywhere", (), {"get": lambda *_: continuous.copy_context()})()
        monkeypatch.setattr(continuous, "_contexts", anywhere)
        self.refuses("an attention_mask or is_causal", attention_mask=torch.ones(1, 1, 5, 5))
        self.refuses("an attention_mask or is_causal", is_causal=False)
        self.refuses("sliding_window=4 in LlamaAttention, layer 0.*every token", sliding_window=4)
        self.refuses("sliding_window=4 .* a window of 5", window=5, sliding_window=4)
        self.refuses("novelty=3 in LlamaAttention", novelty=3)
        self.refuses("block_table=an int32 tensor", block_table=torch.zeros(1, dtype=torch.int32))
        q, lengths = torch.randn(1, 4, 5, 16), torch.tensor([0, 5], dtype=torch.int32)
        valid = {"module": tiny.build("Llama").model.layers[0].self_attn, "attention_mask": None}
        valid |= {"query": q, "key": q, "value": q, "read_index": [], "max_length_q": 5}
        valid |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_k": 5}
        metal_flash_attention(**valid)
        for name, value in (
            *(("module", None), ("query", "a"), ("key", None), ("value", 3), ("cache", "a")),
            *(("cu_seq_lens_q", None), ("cu_seq_lens_k", lengths[None]), ("max_length_q", "a")),
            *(("max_length_k", 1.5), ("sliding_window", float("nan")), ("scaling", "a")),
        ):
            with pytest.raises((TypeError, ValueError), match=f"{name} (is|has)"):
                metal_flash_attention(**valid | {name: value})
