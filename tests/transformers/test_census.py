"""census.py on models that were wrong once: each is refused or equals eager."""

import pytest

pytest.importorskip("transformers", minversion="5.23")

from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from tests.transformers import census
from torch_metal_attn.integrations.transformers import attention, refusals

ONCE_WRONG = [
    ("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration"),
    ("bridgetower", "BridgeTowerModel"),
    ("clap_text_model", "ClapTextModel"),
    ("deepseek_v4", "DeepseekV4ForCausalLM"),
    ("informer", "InformerModel"),
    ("inkling2_text", "Inkling2ForCausalLM"),
    ("inkling_mm_model", "InklingForConditionalGeneration"),
    ("lasr_ctc", "LasrForCTC"),
    ("lfm3_vl_vision", "Lfm3VlVisionModel"),
    ("nllb-moe", "NllbMoeForConditionalGeneration"),
    ("pegasus_x", "PegasusXForConditionalGeneration"),
    ("qwen4_exp", "Qwen4ExpForCausalLM"),
    ("siglip2_vision_model", "Siglip2VisionModel"),
    ("splinter", "SplinterModel"),
    ("t5gemma2", "T5Gemma2ForConditionalGeneration"),
]
REFUSED = [
    ("bloom", "BloomForCausalLM", "does not use transformers' attention interface", "eager"),
    ("deberta", "DebertaModel", "does not use transformers' attention interface", "eager"),
    ("falcon", "FalconForCausalLM", "does not use transformers' attention", "sdpa_replaced()"),
    ("gemma4_unified_text", "Gemma4UnifiedTextModel", "prepares its masks", "sdpa_replaced()"),
    ("git", "GitForCausalLM", "its attention class from GIT_SELF_ATTENTION_CLASSES", "eager"),
    ("resnet", "ResNetModel", "has no attention that goes through", "none"),
    ("sam", "SamVisionModel", "class from SAM_VISION_ATTENTION_CLASSES", "sdpa_replaced()"),
]


def test_classes_are_those_of_every_auto_class():
    listed = [kind for _, kind in census.classes()]
    assert len(listed) == len(set(listed)) > 1400
    for auto in vars(modeling_auto).values():
        if isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass):
            mapping = getattr(auto._model_mapping, "_model_mapping", {})
            for names in mapping.values():
                assert set([names] if isinstance(names, str) else names) <= set(listed)


@pytest.mark.parametrize(("model_type", "kind"), ONCE_WRONG)
def test_classes_that_were_wrong_equal_eager(model_type, kind):
    entry = census.examine(model_type, kind)
    assert entry.outcome in {"equal", "equal, not sensitive"}, entry
    assert entry.calls
    assert "unpadded" in entry.ways


@pytest.mark.parametrize(("model_type", "kind", "reason", "advice"), REFUSED)
def test_refusals_name_a_reason_and_working_advice(model_type, kind, reason, advice):
    entry = census.examine(model_type, kind)
    assert entry.faults == []
    assert reason in entry.refused
    assert kind in entry.refused
    assert entry.advice == advice


@pytest.mark.parametrize("kind", ["BloomModel", "FalconModel"])
def test_wrong_advice_is_a_fault(kind, monkeypatch):
    """Bloom gets the advice for Falcon, which has no effect, and Falcon that for Bloom."""
    advice = "Load it, and call it in `sdpa_replaced()`"
    monkeypatch.setattr(refusals, "_THROUGH_SDPA", refusals._NOTHING_TO_REPLACE)
    monkeypatch.setattr(refusals, "_NOTHING_TO_REPLACE", advice)
    entry = census.examine(kind.removesuffix("Model").lower(), kind)
    assert entry.outcome == "wrong"
    assert any("advice" in fault and "SdpaReplaced" in fault for fault in entry.faults)


def test_faults_are_noticed(monkeypatch):
    flash = attention._flash
    monkeypatch.setattr(attention, "_flash", lambda *a, **o: flash(*a, **o | {"causal": True}))
    entry = census.examine("bert", "BertModel")
    assert entry.outcome == "wrong"
    assert "unpadded" in entry.faults[0]
    monkeypatch.setattr(census, "enable", lambda model: model)
    assert census.examine("bert", "BertModel").faults == ["accepted, and no kernel was called"]


def test_summary_lists_outcomes():
    entries = [
        census.Entry("a", "AModel", {"unpadded": ""}, calls=2),
        census.Entry("a", "AForCTC", {"unpadded": "", "padded left": ""}, calls=8),
        census.Entry("b", "BModel", {"unpadded": ""}, calls=2, faults=["unpadded: 2 of 3"]),
        census.Entry("d", "DModel", refused="DText at 'text' (d_text) prepares its masks only"),
        census.Entry("d", "DHead", not_small="ImportError: timm"),
    ]
    page = census.summary(entries, 9)
    for text in (
        *("5 of 9 classes were examined.", "| equal | 2 | 1 |", "| all | 5 | 3 |"),
        *("\n## Wrong\n\nb\n", "\n## Not built small\n\nd\n"),
        "## Refused: prepares its masks only\n\n1 class; the refusal advises: none\n",
    ):
        assert text in page
