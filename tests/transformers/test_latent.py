"""enable(model, absorb=True): DeepSeek's attention on the latent rows that are cached."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

from transformers.cache_utils import DynamicLayer  # noqa: E402

import torch_metal_attn  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import (  # noqa: E402
    TOLERANCE,
    assert_same_gradients,
    difference,
    gradients,
)
from torch_metal_attn.integrations.transformers import (  # noqa: E402
    enable,
    latent_cache,
    record_routes,
)
from torch_metal_attn.integrations.transformers.latent import Latents  # noqa: E402
from torch_metal_attn.quantisation import DTYPES, dequantise, quantise  # noqa: E402
from torch_metal_attn.simulator import runs  # noqa: E402
from torch_metal_attn.with_kvcache import VERIFY_QUERIES  # noqa: E402

# The other models that cache latent rows. Two of these models do so in some layers only.
OTHERS = [
    *("AXK1", "BailingHybrid", "Glm4MoeLite", "KimiLinear", "LongcatFlash", "MiniCPM3", "Mistral4"),
    *("Youtu", "Kimi_K25ForConditionalGeneration"),
]
# Models with an indexer that test_families.py lacks.
SELECTING = ["AXK2", "Dots3Note", "HYV4", "MistralLarge4ForConditionalGeneration"]
BEAMS, SAMPLE = {"num_beams": 2}, {"do_sample": True, "top_k": 3}
LOOKUP = {"prompt_lookup_num_tokens": 3}
GREEDY = {"disable_compile": True, "max_new_tokens": 6}
COLUMNS = 16 + 8  # kv_lora_rank and qk_rope_head_dim


def generate(model, inputs, **options):
    return tiny.generate(model, inputs, **GREEDY | options)


def check(model, inputs, expected, tolerance=TOLERANCE, **options):
    """The routes of a model that must generate the tokens and scores of `expected`."""
    tokens, scores = expected
    with record_routes() as routes:
        actual, actual_scores = generate(model, inputs, **options)
    assert actual.tolist() == tokens.tolist()
    assert difference(actual_scores, scores) <= tolerance
    return routes


@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-V2", "DeepSeek-V3.2", "GLM-MoE-DSA"])
@pytest.mark.parametrize("paging", [None, {}, {"page_size": 5}], ids=str)
def test_tokens_match_eager(name, paging):
    side = "none" if paging is None else "left"
    model, inputs = tiny.build(name), tiny.inputs(name, side)
    expected = generate(model, inputs)
    enable(model, absorb=True)
    options = {} if paging is None else {"cache": latent_cache(model, 64, **paging)}
    routes = check(model, inputs, expected, **options)
    # Only the prompt's attention expands its latent rows.
    steps = [call for call in routes.kernel if " q (2, 4, 1, " in call]
    assert len(steps) == GREEDY["max_new_tokens"] - 1
    assert all(f"q (2, 4, 1, {COLUMNS}) k (2, 1, " in call for call in steps)


def test_masks_with_holes_match_eager():
    model, inputs = tiny.build("DeepSeek-V3"), tiny.inputs("DeepSeek-V3", "left")
    inputs["attention_mask"][:, 4] = 0
    expected = generate(model, inputs)
    enable(model, absorb=True)
    for page_size in (None, 5):
        cache = latent_cache(model, 64, page_size=page_size)
        routes = check(model, inputs, expected, cache=cache)
        assert any(" q (2, 4, 1, " in call for call in routes.dense)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_match_eager(kind):
    model, inputs = tiny.smallest(kind), tiny.inputs("Llama", "left")
    options = {"max_new_tokens": 3}
    expected = generate(model, inputs, **options)
    enable(model, absorb=True)
    if kind in ("BailingHybrid", "KimiLinear"):
        with pytest.raises(NotImplementedError, match="has it in 1 layer: call enable"):
            latent_cache(model, 64)
    else:
        options["cache"] = latent_cache(model, 64)
    routes = check(model, inputs, expected, TOLERANCE * expected[1].abs().max(), **options)
    assert any(" k (2, 1, " in call for call in routes.kernel)


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("kind", SELECTING)
def test_selected_keys_match_eager(kind, absorb):
    inputs = tiny.inputs("Llama", "left")
    model = tiny.smallest(kind, index_topk=3)
    expected = generate(model, inputs, max_new_tokens=3)
    if absorb and kind.startswith("Dots3"):
        with pytest.raises(NotImplementedError, match=r"have 1024 \+ 64 columns; the kernels take"):
            enable(model, absorb=True)
        return
    routes = check(enable(model, absorb=absorb), inputs, expected, max_new_tokens=3)
    assert any("3 keys of each query" in call for call in routes.dense)
    _, of_all = generate(tiny.smallest(kind, index_topk=64), inputs, max_new_tokens=1)
    assert difference(of_all, expected[1][:, :1]) > 10 * TOLERANCE


WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32}


def check_rounded(rounded, inputs, options, length, format, **cache_options):
    """Compare with eager attention, whose cache `rounded` updates. Returns cache, model, scores."""
    model = tiny.build("DeepSeek-V3", **WIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicLayer, "update", rounded)
        expected = generate(model, inputs, **options)
    enable(model, absorb=True)
    cache = latent_cache(model, length, format, **cache_options)
    # Rounding in float32 may change a row's code.
    check(model, inputs, expected, 1e-3, cache=cache, **options)
    return cache, model, expected[1]


@pytest.mark.parametrize(
    "format, page_size, options",
    [("q8_0", None, BEAMS), ("fp8_e4m3", None, LOOKUP), ("q4_0", 5, BEAMS), ("q3_g32", 16, LOOKUP)],
)
def test_quantised_rows_match_rounded_eager(format, page_size, options):
    update = DynamicLayer.update

    def rounded(self, key_states, value_states, *arguments, **inputs):
        rows = torch.cat([key_states, value_states], -1)
        rows = dequantise(*quantise(rows, format), rows.dtype)
        parts = rows.split([key_states.shape[-1], value_states.shape[-1]], -1)
        return update(self, *parts, *arguments, **inputs)

    ids = tiny.tokens(6, batch=1).repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache, *_ = check_rounded(rounded, inputs, options, 64, format, page_size=page_size)
    assert cache.layers[0].cache.layers[0].k_cache.dtype == DTYPES[format]


@pytest.mark.parametrize(
    "repeats, page_size, options",
    [(3, None, {}), (16, 16, {}), (16, None, BEAMS), (16, 16, LOOKUP)],
)
def test_recent_rows_are_not_rounded(repeats, page_size, options):
    """All rows except for the last ones are rounded."""
    update, kept, padding = DynamicLayer.update, 8 + VERIFY_QUERIES, 3

    def rounded(self, key_states, value_states, *arguments, **inputs):
        k, v = update(self, key_states, value_states, *arguments, **inputs)
        # Rows that drafts evicted stay rounded.
        old = self.old = max(getattr(self, "old", 0), k.shape[2] - kept)
        rows = torch.cat([k, v], -1)
        codes = dequantise(*quantise(rows[:, :, :old].contiguous(), "q4_0"), rows.dtype)
        rows = torch.cat([codes, rows[:, :, old:]], 2)
        return rows.split([k.shape[-1], v.shape[-1]], -1)

    ids = tiny.tokens(6, batch=1).repeat(2, repeats)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    batch = 1 if options else 2
    inputs = {"input_ids": ids[:batch], "attention_mask": mask[:batch]}
    cache_options = {"page_size": page_size, "recent": 8}
    _, model, expected = check_rounded(rounded, inputs, options, 128, "q4_0", **cache_options)
    exact = generate(model, inputs, cache=latent_cache(model, 128), **options)[1]
    assert (difference(exact, expected) > 1e-2) == (repeats > 3)


def test_quantised_rows_on_device(device):
    model, inputs = tiny.build("DeepSeek-V3.2", **WIDE, index_head_dim=32), tiny.inputs("Llama")
    enable(model, absorb=True)
    options = [{"max_new_tokens": 3, "cache": latent_cache(model, 40, "q8_0")} for _ in range(2)]
    expected = generate(model, inputs, **options[0])
    check(model.to(device), inputs, expected, **options[1])


@pytest.mark.parametrize("page_size", [None, 8])
def test_on_device(page_size, device):
    model, inputs = tiny.build("DeepSeek-V3"), tiny.inputs("DeepSeek-V3", "left")
    expected = generate(model, inputs, max_new_tokens=3)
    enable(model, absorb=True).to(device)
    cache = latent_cache(model, 40, page_size=page_size)
    check(model, inputs, expected, max_new_tokens=3, cache=cache)
    for layer in cache.layers:
        (held,) = layer.cache.layers[0].by_block()
        assert held.shape == ((2, 40, 1, COLUMNS) if page_size is None else (10, 8, 1, COLUMNS))
    if (run := runs.current()) is not None:
        decoding = [one for one in run.launches if one.kernel == "flash_decode"]
        assert len(decoding) == 2 * 2
        assert all(one.defines["V_IN_K"] == "1" for one in decoding)


@pytest.mark.parametrize("options", [{"num_beams": 3}, LOOKUP, SAMPLE], ids=str)
@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-V3.2", "GLM-MoE-DSA"])
def test_ways_to_generate_match_eager(name, page_size, options):
    torch.manual_seed(0)
    ids = tiny.tokens(6, batch=1).repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY, **options}
    model = tiny.build(name)
    expected = model.generate(**inputs)
    cache = latent_cache(enable(model, absorb=True), 64, page_size=page_size)
    torch.manual_seed(1)
    assert model.generate(**inputs, cache=cache).tolist() == expected.tolist()


FAULTS = {  # one drops the rotated keys, the other takes the first head's values for all heads
    "rows": lambda self: torch.cat([self.latents, 0 * self.k_rotated], -1),
    "values": lambda self, out: Latents.unbroken(self, out[:, :, :1].expand_as(out)),
}


@pytest.mark.parametrize("method, fault", FAULTS.items())
def test_a_fault_is_noticed(method, fault, monkeypatch):
    monkeypatch.setattr(Latents, "unbroken", getattr(Latents, method), raising=False)
    monkeypatch.setattr(Latents, method, fault)
    model, inputs = tiny.build("DeepSeek-V3"), tiny.inputs("DeepSeek-V3", "left")
    _, scores = generate(model, inputs, max_new_tokens=2)
    _, actual_scores = generate(enable(model, absorb=True), inputs, max_new_tokens=2)
    assert difference(actual_scores, scores) > 10 * TOLERANCE


def test_gradients_match_eager():
    inputs = {"input_ids": tiny.tokens(7), "use_cache": False}
    actual = gradients(enable(tiny.build("DeepSeek-V3"), absorb=True), inputs)
    assert_same_gradients(actual, gradients(tiny.build("DeepSeek-V3"), inputs))


def test_explain_shows_the_bytes():
    model = enable(tiny.build("DeepSeek-V3"), absorb=True)
    options = {"max_new_tokens": 2, "cache": latent_cache(model, 16)}
    text = str(torch_metal_attn.explain(model.generate, tiny.tokens(8, batch=1), **options))
    # float32: 24 columns, or for each of 4 heads 24 for the key and 16 for the value.
    assert "latent rows of 96 bytes a token" in text
    assert "keys and values expanded to 4 heads would be 640 bytes" in text


def test_enable_removes_absorption():
    model = tiny.build("DeepSeek-V3")
    kinds = [type(module) for module in model.modules()]
    enable(model, absorb=True)
    assert [type(module) for module in model.modules()] != kinds
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    inputs = tiny.inputs("DeepSeek-V3")
    assert torch.equal(tiny.answer(again, **inputs), tiny.answer(model, **inputs))
    enable(model)
    assert [type(module) for module in model.modules()] == kinds


def test_another_attention_is_refused():
    model = enable(tiny.build("DeepSeek-V3"), absorb=True)
    model.set_attn_implementation("eager")
    with pytest.raises(NotImplementedError, match="was given absorb=True, so only metal_attn"):
        model(tiny.tokens(4))


class TestRefused:
    @pytest.mark.parametrize(
        "options, who",
        [({"page_size": 8}, "metal_attn::flash_decode"), ({"recent": 4}, "a latent cache")],
    )
    def test_gradients(self, options, who):
        model = enable(tiny.build("DeepSeek-V3", **WIDE), absorb=True)
        cache = latent_cache(model, 128, "q4_0", **options)
        for length in (90, 3):
            logits = model(tiny.tokens(length, batch=1), cache=cache).logits
        with pytest.raises(NotImplementedError, match=f"{who} has no gradient, and q requires"):
            logits.sum().backward()

    def test_recent_rows_of_selected_keys(self):
        model = enable(tiny.build("DeepSeek-V3.2", **WIDE, index_head_dim=32), absorb=True)
        cache = latent_cache(model, 64, "q8_0", recent=8)
        with pytest.raises(NotImplementedError, match="indices is not implemented for the recent"):
            generate(model, tiny.inputs("Llama"), cache=cache)

    def test_models_without_latents(self):
        model = tiny.build("Llama")
        with pytest.raises(NotImplementedError, match="absorb=True for LlamaForCausalLM, which"):
            enable(model, absorb=True)
        assert model.config._attn_implementation == "eager"

    def test_a_subclassed_projection(self):
        class Adapted(torch.nn.Linear):
            pass

        model = tiny.build("DeepSeek-V3")
        model.model.layers[1].self_attn.kv_b_proj.__class__ = Adapted
        with pytest.raises(NotImplementedError, match="kv_b_proj of a DeepseekV3Attention is an A"):
            enable(model, absorb=True)

    def test_latent_cache(self):
        model = tiny.build("DeepSeek-V3")
        with pytest.raises(NotImplementedError, match="has it in 0 layers: call enable"):
            latent_cache(model, 16)
        with pytest.raises(TypeError, match="model is None; it must be a transformers"):
            latent_cache(None, 16)
        enable(model, absorb=True)
        for options, message in (
            ({"max_length": 0}, "max_length is 0; it must be at least 1"),
            ({"format": "q8_0"}, "latent_dim is 16; q8_0 needs a multiple of 32"),
            ({"format": "q5"}, "format is 'q5'; it must be one of q8_0"),
            ({"page_size": 0}, "page_size is 0; it must be at least 1"),
            ({"recent": 8}, "recent is 8 with no format, so all rows"),
        ):
            with pytest.raises(ValueError, match=message):
                latent_cache(model, **{"max_length": 64} | options)
        cache = latent_cache(model, 4)
        with pytest.raises(torch_metal_attn.kv_cache.CacheFull, match="5 more rows do not fit"):
            model(tiny.tokens(5), cache=cache)
        with pytest.raises(torch_metal_attn.kv_cache.CacheFull, match="10 new rows of 2 sequence"):
            model(tiny.tokens(5), cache=latent_cache(model, 4, page_size=4))
        with pytest.raises(ValueError, match="they must be latents"):
            tiny.build("Llama")(tiny.tokens(3), past_key_values=cache)
