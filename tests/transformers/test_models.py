"""Masks and caches that few models have, and faults that must be noticed.

Every family in every common way is in test_families.py. The models are in
tests/transformers/tiny_models.py, which says why their weights are larger than usual.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import (  # noqa: E402
    TOLERANCE,
    compare,
    compare_generated,
    difference,
    launches,
)
from tests.transformers.tiny_families import PROMPT  # noqa: E402
from torch_metal_attn.integrations.transformers import attention as attention_module  # noqa: E402
from torch_metal_attn.integrations.transformers import enable, record_routes  # noqa: E402
from torch_metal_attn.simulator import runs, simulate  # noqa: E402


class TestMatchesEager:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_custom_four_dimensional_mask(self, dtype):
        model, ids = tiny.build("Llama"), tiny.tokens()
        visible = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
        visible[7:, 2:5] = False
        additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        additive = additive.expand(2, 1, -1, -1)
        expected = tiny.answer(model, input_ids=ids, attention_mask=additive)
        mask = additive if dtype == torch.float32 else visible.expand(2, 1, -1, -1)
        actual = tiny.answer(enable(model), input_ids=ids, attention_mask=mask)
        assert difference(actual, expected) <= TOLERANCE

    @pytest.mark.parametrize("name", ["Gemma3", "Llama4"])
    def test_prompt_in_three_parts(self, name):
        """Later parts meet keys of the earlier ones: other diagonals, and sliding caches."""
        model = tiny.build(name)
        ids, mask = tiny.tokens(length=30), tiny.padding("left", length=30)
        expected = tiny.answer(model, input_ids=ids, attention_mask=mask)
        enable(model)
        cache = transformers.DynamicCache(config=model.config)
        parts, start = [], 0
        for end in (11, 19, 30):
            part = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
            parts.append(tiny.answer(model, **part, past_key_values=cache))
            start = end
        assert difference(torch.cat(parts, 1), expected, mask.bool()) <= TOLERANCE


@pytest.mark.parametrize(
    "cache, name",
    [
        *(("dynamic", name) for name in ("Gemma2", "gpt-oss", "Llama4")),
        *(("static", name) for name in ("Mistral", "Llama4")),
    ],
)
def test_generation_on_device(name, cache, device):
    """The prompt in one kernel, every token behind it in the other.

    Static caches of every core family are in test_families, on the CPU.
    """
    before, options = launches(), {"cache_implementation": cache, "max_new_tokens": 4}
    with record_routes() as routes:
        assert compare_generated(name, device=device, **options) <= TOLERANCE
    assert not routes.dense
    if runs.current() is not None:
        layers = tiny.build(name).config.num_hidden_layers
        kernels = ["flash_fwd"] * layers + ["flash_decode"] * 3 * layers
        assert [launch.kernel for launch in runs.current().launches[before:]] == kernels


def test_compiled_descriptor_from_outside_the_graph():
    """What `generate` does with a static cache: masks come from outside a compiled forward.

    Gemma 2 has Llama's in every other layer.
    """
    model, given = tiny.build("Gemma2"), tiny.inputs("Gemma2", "left")
    options = {"cache_implementation": "static", "max_new_tokens": 4}
    expected, expected_scores = tiny.generate(model, given, disable_compile=True, **options)
    config = transformers.CompileConfig(fullgraph=True, backend="eager")
    config._compile_all_devices = True
    with simulate(check=True) as run:
        actual, scores = tiny.generate(enable(model), given, compile_config=config, **options)
    assert actual.tolist() == expected.tolist()
    assert difference(scores, expected_scores) <= TOLERANCE
    decoded = [launch for launch in run.launches if launch.kernel == "flash_decode"]
    assert len(decoded) == 3 * 2
    assert all("MASK" not in launch.defines for launch in decoded)


def drop(name):
    return lambda options: {**options, name: None}


def change(name, function):
    def changed(options):
        return {**options, name: function(options[name])} if name in options else options

    return changed


FAULTS = {
    "softcap dropped": ("Gemma2", "none", change("softcap", lambda cap: 0.0)),
    "sinks dropped": ("gpt-oss", "none", drop("learnable_sink")),
    "bias dropped": ("T5", "none", drop("attn_bias")),
    "prefix dropped": ("PaliGemma", "none", drop("attn_mask")),
    "window one larger": ("Mistral", "none", change("window_size_left", lambda size: size + 1)),
    "window one smaller": ("Mistral", "none", change("window_size_left", lambda size: size - 1)),
    "window one larger on the right": (
        "ModernBERT",
        "none",
        change("window_size_right", lambda size: size + 1 if size > 0 else size),
    ),
    "chunk one larger": ("Llama4", "none", change("attention_chunk", lambda size: size + 1)),
    "chunks from key 0": ("Llama4", "left", change("leftpad_k", torch.zeros_like)),
    "left padding ignored": ("Llama", "left", drop("leftpad_k")),
    "right padding ignored": ("BERT", "right", drop("seqused_k")),
    "one key past the length": (
        "BERT",
        "right",
        change("seqused_k", lambda lengths: (lengths + 1).clamp(max=PROMPT)),
    ),
}


class TestPlantedFaults:
    """The comparisons above notice what would be wrong."""

    def plant(self, monkeypatch, fault):
        flash = attention_module._flash

        def faulty(query, key, value, **options):
            return flash(query, key, value, **fault(options))

        monkeypatch.setattr(attention_module, "_flash", faulty)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_option(self, fault, monkeypatch):
        name, side, fault = FAULTS[fault]
        self.plant(monkeypatch, fault)
        assert compare(name, side)[0] > 10 * TOLERANCE

    @pytest.mark.parametrize("name", ["Llama", "Gemma2", "Llama4", "gpt-oss", "Whisper"])
    def test_offset(self, name, monkeypatch):
        """Ignored where a static cache decodes; dense masks and full windows carry none."""
        self.plant(monkeypatch, change("q_offset", lambda offset: 0))
        model, given = tiny.build(name), tiny.inputs(name)
        options = {"cache_implementation": "static", "disable_compile": True}
        _, expected = tiny.generate(model, given, **options)
        _, scores = tiny.generate(enable(model), given, **options)
        assert difference(scores, expected) > 10 * TOLERANCE
