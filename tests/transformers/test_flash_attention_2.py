"""install_flash_attn(transformers=True): transformers' own flash_attention_2 on the kernels."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import modeling_flash_attention_utils as lookups  # noqa: E402

from tests.transformers import tiny_models as tiny  # noqa: E402
from tests.transformers.model_check import TOLERANCE, difference  # noqa: E402
from tests.transformers.tiny_families import CORE  # noqa: E402
from torch_metal_attn import install_flash_attn  # noqa: E402
from torch_metal_attn.simulator import runs  # noqa: E402

NAME = "flash_attention_2"
# For these families transformers has no flash-attn, or (PaliGemma) does not pass the prefix on.
UNSUPPORTED = {"gpt-oss", "Llama4", "PaliGemma", "T5", "DeepSeek-V3.2", "GLM-MoE-DSA"}


@pytest.mark.parametrize("name", [name for name in CORE if name not in UNSUPPORTED])
def test_matches_eager(name, device):
    side = "right" if name in ("BERT", "ModernBERT", "Whisper", "Gemma3") else "left"
    model, inputs = tiny.build(name), tiny.inputs(name, side)
    expected, where = tiny.answer(model, **inputs), tiny.present(inputs)
    with install_flash_attn(transformers=True):
        model.set_attn_implementation(NAME)
        actual = tiny.answer(model.to(device), **inputs)
    assert difference(actual, expected, where) <= TOLERANCE
    if runs.current() is not None:
        assert runs.current().counters


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_generates(name, device):
    model, inputs = tiny.build(name), tiny.inputs(name, "left")
    expected, expected_scores = tiny.generate(model, inputs, max_new_tokens=4)
    with install_flash_attn(transformers=True):
        model.set_attn_implementation(NAME)
        tokens, scores = tiny.generate(model.to(device), inputs, max_new_tokens=4)
    assert torch.equal(tokens, expected)
    assert difference(scores, expected_scores) <= TOLERANCE


def assert_refused():
    with pytest.raises(ImportError, match="FlashAttention2"):
        tiny.build("Llama").set_attn_implementation(NAME)


def test_allowed_only_inside_the_block():
    assert_refused()
    with install_flash_attn():
        assert_refused()
        with install_flash_attn(transformers=True):
            with install_flash_attn(transformers=True):
                pass
            model = tiny.build("Llama")
            model.set_attn_implementation(NAME)
            tiny.answer(model, input_ids=tiny.tokens())
        assert "flash_attn" in sys.modules
        assert_refused()
    with pytest.raises(ImportError):
        tiny.answer(model, input_ids=tiny.tokens())


def test_another_transformers_changes_nothing(monkeypatch):
    monkeypatch.delattr(lookups, "FLASH_ATTENTION_COMPATIBILITY_MATRIX")
    with pytest.raises(ImportError, match=r"needs transformers 5\.23"):
        install_flash_attn(transformers=True)
    assert "flash_attn" not in sys.modules
