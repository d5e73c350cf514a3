"""A sample of bench/census.py, and models that it found wrong, each refused or equal to eager."""

import random

import pytest

pytest.importorskip("transformers", minversion="5.23")

from bench import census
from torch_metal_attn.integrations.transformers import attention

EQUAL = {"equal", "equal, not sensitive"}
SAMPLE = random.Random(12).sample(census.classes(), 6)

# Masks of None that are not causal though the module says so, or has copied nothing that says it
# is not; masks that a model adds to scores of its own, concatenates, or gives to a router; a sink
# per query; options of `generate` that reach attention.
ONCE_WRONG = [
    ("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration"),
    ("bridgetower", "BridgeTowerModel"),
    ("clap_text_model", "ClapTextModel"),
    ("deepseek_v4", "DeepseekV4ForCausalLM"),
    ("informer", "InformerModel"),
    ("inkling2_text", "Inkling2ForCausalLM"),
    ("inkling_mm_model", "InklingForConditionalGeneration"),
    ("lasr_ctc", "LasrForCTC"),
    ("nllb-moe", "NllbMoeForConditionalGeneration"),
    ("pegasus_x", "PegasusXForConditionalGeneration"),
    ("splinter", "SplinterModel"),
    ("t5gemma2", "T5Gemma2ForConditionalGeneration"),
]
REFUSED = [
    ("git", "GitForCausalLM", "takes its attention class from GIT_SELF_ATTENTION_CLASSES"),
    ("sam", "SamVisionModel", "takes its attention class from SAM_VISION_ATTENTION_CLASSES"),
    ("resnet", "ResNetModel", "has no attention that goes through"),
]


@pytest.mark.parametrize(("model_type", "kind"), SAMPLE)
def test_sample(model_type, kind):
    assert census.examine(model_type, kind).faults == []


@pytest.mark.parametrize(("model_type", "kind"), ONCE_WRONG)
def test_equal(model_type, kind):
    entry = census.examine(model_type, kind)
    assert entry.outcome in EQUAL, entry
    assert entry.calls
    assert "unpadded" in entry.ways


@pytest.mark.parametrize(("model_type", "kind", "reason"), REFUSED)
def test_refused(model_type, kind, reason):
    """enable and from_config both refuse, which `examine` compares."""
    entry = census.examine(model_type, kind)
    assert entry.faults == []
    assert reason in entry.refused
    assert kind in entry.refused


def test_faults_are_noticed(monkeypatch):
    flash = attention._flash

    def hides(query, key, value, **options):
        return flash(query, key, value, **options | {"causal": True})

    monkeypatch.setattr(attention, "_flash", hides)
    entry = census.examine("bert", "BertModel")
    assert entry.outcome == "wrong"
    assert "unpadded" in entry.faults[0]


def test_models_without_a_call_are_noticed(monkeypatch):
    monkeypatch.setattr(census, "enable", lambda model: model)
    entry = census.examine("bert", "BertModel")
    assert entry.faults == ["accepted, and no kernel was called"]


def test_page():
    entries = [
        census.Entry("a", "AModel", {"unpadded": 1e-7}, calls=2),
        census.Entry("b", "BModel", {"unpadded": 2.0}, calls=2, faults=["unpadded: 2 of 3"]),
        census.Entry("c", "CModel", refused="CModel has none"),
        census.Entry("d", "DModel", not_small="ImportError: timm"),
    ]
    page = census.markdown(entries, 5)
    assert "4 of 5 model types were examined." in page
    assert "| wrong | 1 |" in page
    assert "| a | AModel | unpadded | 2 | 1.0e-07 |  |" in page
    assert "| c | CModel | CModel has none |" in page
