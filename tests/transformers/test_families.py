"""Compares families of models with eager attention in ways that census.py does not test."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")

from transformers import DynamicCache  # noqa: E402

from tests.transformers import model_check as check  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.tiny_families import CORE, FAMILIES, PROMPT  # noqa: E402
from tests.transformers.tiny_inputs import padding  # noqa: E402
from torch_metal_attn.integrations.transformers import attention as attention_module  # noqa: E402
from torch_metal_attn.integrations.transformers import enable, record_routes  # noqa: E402
from torch_metal_attn.simulator import runs, simulate  # noqa: E402

PADDABLE = [name for name in FAMILIES if FAMILIES[name].takes != "pixels"]
GENERATORS = [name for name in FAMILIES if FAMILIES[name].generates]
DECODERS = [name for name in GENERATORS if FAMILIES[name].takes == "ids"]
# One family for each form of masks. test_fuse_rope.py compiles gpt-oss.
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
COMPILED = {"Gemma2": {}, "Gemma4": TWO_KINDS | {"num_kv_shared_layers": 0}, "ModernBERT": {}}

# Families that refuse packed batches, with their messages.
REFUSED_PACKED = {
    "DeepSeek-V3.2": "indices together with cu_seq_lens_q",
    "GLM-MoE-DSA": "indices together with cu_seq_lens_q",
    "Gemma4": "together with a mask",
    "Llama4": "together with a mask .causal chunk 10",
}
# StableLM's model does not pass cu_seq_lens on to attention.
POSITIONS_ONLY = "StableLM"
PACKED = [name for name in DECODERS if name not in {*REFUSED_PACKED, POSITIONS_ONLY}]


def assert_routes(name, side, routes):
    assert routes.kernel
    assert bool(routes.dense) == (name in check.DENSE)
    assert side == "none" or routes.compact or name in check.DENSE


class TestForward:
    @pytest.mark.parametrize(
        ("name", "side"),
        [(n, side) for n in CORE for side in ("none", "right") if side == "none" or n in PADDABLE],
    )
    def test_routes_and_results(self, name, side):
        apart, routes = check.compare(name, side)
        assert apart <= check.TOLERANCE
        assert_routes(name, side, routes)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_on_device(self, name, device):
        before = check.launches()
        apart, routes = check.compare(name, "left", device)
        assert apart <= check.TOLERANCE
        if name in CORE:
            assert_routes(name, "left" if name in PADDABLE else "none", routes)
        if runs.current() is not None:
            assert check.launches() - before == sum(routes.kernel.values())

    @pytest.mark.parametrize("name", ["Llama", "CLIP", "T5", "PaliGemma"])
    def test_attention_weights_are_refused(self, name):
        model, inputs = enable(tiny.build(name)), tiny.inputs(name)
        with pytest.raises(NotImplementedError, match=r"output_attentions=True in .*'eager'"):
            tiny.answer(model, **inputs, output_attentions=True)
        tiny.answer(model, **inputs, output_attentions=False)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_custom_four_dimensional_mask(self, dtype):
        model, ids = tiny.build("Llama"), tiny.tokens()
        visible = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
        visible[7:, 2:5] = False
        visible = visible.expand(2, 1, -1, -1)
        additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        expected = tiny.answer(model, input_ids=ids, attention_mask=additive)
        mask = additive if dtype == torch.float32 else visible
        actual = tiny.answer(enable(model), input_ids=ids, attention_mask=mask)
        assert check.difference(actual, expected) <= check.TOLERANCE

    @pytest.mark.parametrize("name", ["Gemma3", "Llama4"])
    def test_prompt_in_three_parts_equals_one_forward(self, name):
        model = tiny.build(name)
        ids, mask = tiny.tokens(length=30), padding("left", 30)
        expected = tiny.answer(model, input_ids=ids, attention_mask=mask)
        enable(model)
        cache = transformers.DynamicCache(config=model.config)
        parts = []
        for start, end in ((0, 11), (11, 19), (19, 30)):
            part = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
            parts.append(tiny.answer(model, **part, past_key_values=cache))
        assert check.difference(torch.cat(parts, 1), expected, mask.bool()) <= check.TOLERANCE


class TestPacked:
    @pytest.mark.parametrize("name", PACKED)
    def test_bounds_separate_sequences(self, name):
        model = tiny.build(name)
        batch, expected = check.packed_batch(model)
        enable(model)
        for use_cache in (True, False):
            with record_routes() as routes:
                actual = tiny.answer(model, **batch, use_cache=use_cache)
            assert check.difference(actual, expected) <= check.TOLERANCE
            assert routes.packed == routes.kernel
            assert "in 3 sequences" in next(iter(routes.packed))

    @pytest.mark.parametrize("name", [POSITIONS_ONLY, "Gemma4", "Llama4"])
    def test_positions_separate_sequences(self, name):
        model = tiny.build(name)
        batch, expected = check.packed_batch(model)
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        actual = tiny.answer(enable(model), **inputs, use_cache=False)
        assert check.difference(actual, expected) <= check.TOLERANCE

    @pytest.mark.parametrize("name", REFUSED_PACKED)
    def test_unsupported_families_are_refused(self, name):
        model = tiny.build(name)
        batch, _ = check.packed_batch(model)
        with pytest.raises(NotImplementedError, match=REFUSED_PACKED[name]):
            tiny.answer(enable(model), **batch)


class TestGeneration:
    @pytest.mark.parametrize("name", [name for name in GENERATORS if name in CORE])
    def test_left_padding(self, name):
        assert check.compare_generated(name, cache_implementation="dynamic") <= check.TOLERANCE

    @pytest.mark.parametrize(
        "name", ["Llama", "Gemma3", "gpt-oss", "Phi3", "Llama4", "Whisper", "T5", "PaliGemma"]
    )
    def test_static_cache(self, name):
        apart = check.compare_generated(
            name, "none", cache_implementation="static", max_new_tokens=12
        )
        assert apart <= check.TOLERANCE

    @pytest.mark.parametrize(
        "name", ["Mistral", "Gemma2", "Gemma3", "Gemma4", "gpt-oss", "Llama4", "Cohere2"]
    )
    def test_sliding_cache(self, name):
        model, inputs = tiny.build(name), tiny.inputs(name, "left")
        results = []
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            results.append(tiny.generate(model, inputs, past_key_values=cache))
            sliding = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
            assert 0 < max(layer.keys.shape[2] for layer in sliding) <= 10
            enable(model)
        (expected, expected_scores), (actual, scores) = results
        assert actual.tolist() == expected.tolist()
        assert check.difference(scores, expected_scores) <= check.TOLERANCE


@pytest.mark.parametrize(
    "cache, name",
    [
        *(("dynamic", name) for name in ("Gemma2", "gpt-oss", "Llama4")),
        *(("static", name) for name in ("Mistral", "Llama4")),
    ],
)
def test_generation_on_device(name, cache, device):
    before, options = check.launches(), {"cache_implementation": cache, "max_new_tokens": 4}
    with record_routes() as routes:
        assert check.compare_generated(name, device=device, **options) <= check.TOLERANCE
    assert not routes.dense
    if runs.current() is not None:
        layers = tiny.build(name).config.num_hidden_layers
        kernels = ["flash_fwd"] * layers + ["flash_decode"] * 3 * layers
        assert [launch.kernel for launch in runs.current().launches[before:]] == kernels


def test_compiled_descriptor_from_outside_the_graph():
    """`generate` with a static cache makes masks outside of the compiled forward."""
    model, inputs = tiny.build("Gemma2"), tiny.inputs("Gemma2", "left")
    options = {"cache_implementation": "static", "max_new_tokens": 4}
    expected, expected_scores = tiny.generate(model, inputs, disable_compile=True, **options)
    config = transformers.CompileConfig(fullgraph=True, backend="eager")
    config._compile_all_devices = True
    with simulate() as run:
        actual, scores = tiny.generate(enable(model), inputs, compile_config=config, **options)
    assert actual.tolist() == expected.tolist()
    assert check.difference(scores, expected_scores) <= check.TOLERANCE
    decoded = [launch for launch in run.launches if launch.kernel == "flash_decode"]
    assert len(decoded) == 3 * 2
    assert all("MASK" not in launch.defines for launch in decoded)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    assert check.compare_compiled(name, **COMPILED[name]) <= check.TOLERANCE


@pytest.mark.parametrize("name", CORE)
def test_gradients(name):
    inputs = tiny.inputs(name, "right")
    expected = check.gradients(tiny.build(name), inputs)
    check.assert_same_gradients(check.gradients(enable(tiny.build(name)), inputs), expected)
    assert any(n.endswith("sinks") for n in expected) == (name == "gpt-oss")


def change(name, function):
    return lambda options: options | {n: function(options[n]) for n in options if n == name}


FAULTS = {
    "softcap dropped": ("Gemma2", "none", change("softcap", lambda cap: 0.0)),
    "sinks dropped": ("gpt-oss", "none", change("learnable_sink", lambda sink: None)),
    "bias dropped": ("T5", "none", change("attn_bias", lambda bias: None)),
    "prefix dropped": ("PaliGemma", "none", change("attn_mask", lambda mask: None)),
    "window one larger": ("Mistral", "none", change("window_size_left", lambda size: size + 1)),
    "window one smaller": ("Mistral", "none", change("window_size_left", lambda size: size - 1)),
    "window one larger on the right": (
        *("ModernBERT", "none"),
        change("window_size_right", lambda size: size + 1 if size > 0 else size),
    ),
    "chunk one larger": ("Llama4", "none", change("attention_chunk", lambda size: size + 1)),
    "chunks from key 0": ("Llama4", "left", change("leftpad_k", torch.zeros_like)),
    "left padding ignored": ("Llama", "left", change("leftpad_k", lambda lengths: None)),
    "right padding ignored": ("BERT", "right", change("seqused_k", lambda lengths: None)),
    "one key past the length": (
        "BERT",
        "right",
        change("seqused_k", lambda n: (n + 1).clamp(max=PROMPT)),
    ),
}


class TestPlantedFaults:
    def plant(self, monkeypatch, fault):
        flash = attention_module._flash

        def faulty(query, key, value, **options):
            return flash(query, key, value, **fault(options))

        monkeypatch.setattr(attention_module, "_flash", faulty)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_changed_option_is_noticed(self, fault, monkeypatch):
        name, side, fault = FAULTS[fault]
        self.plant(monkeypatch, fault)
        assert check.compare(name, side)[0] > 10 * check.TOLERANCE

    @pytest.mark.parametrize("name", ["Llama", "Gemma2", "Llama4", "gpt-oss", "Whisper"])
    def test_an_ignored_offset_is_noticed(self, name, monkeypatch):
        """Decode steps with a static cache have one; dense masks and full windows have none."""
        self.plant(monkeypatch, change("q_offset", lambda offset: 0))
        model, inputs = tiny.build(name), tiny.inputs(name)
        options = {"cache_implementation": "static", "disable_compile": True}
        _, expected = tiny.generate(model, inputs, **options)
        _, scores = tiny.generate(enable(model), inputs, **options)
        assert check.difference(scores, expected) > 10 * check.TOLERANCE
