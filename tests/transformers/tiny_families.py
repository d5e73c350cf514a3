"""The families of models that are tested: a class, its options and its inputs.

CORE has one family for each form of masks, options and outputs of attention functions. The others
rotate queries in other ways, or separate packed sequences by positions alone.
"""

from dataclasses import dataclass, field
from typing import Any

PROMPT = 33  # tokens, more than flash_decode takes
PADDED = 4  # padding tokens of the second sequence
WINDOW = 10  # also the size of chunks: both end inside the prompt
IMAGE_TOKEN = 98
IMAGE_TOKENS = 16  # patches of 8 columns and rows


@dataclass(frozen=True)
class Family:
    """A model class. options: the options that differ from the rules of `tiny_configs`."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    takes: str = "ids"  # or pixels, both, audio, two texts, prefix
    generates: bool = True
    gain: float = 4


def _causal(name: str, gain: float = 4, **options: Any) -> Family:
    # Without eos_token_id every text has its full length.
    return Family(f"{name}ForCausalLM", {"eos_token_id": None} | options, gain=gain)


def _encoder(name: str, takes: str = "ids", **options: Any) -> Family:
    return Family(f"{name}Model", options, takes, generates=False)


def _conditional(name: str, takes: str, gain: float = 4, **options: Any) -> Family:
    return Family(f"{name}ForConditionalGeneration", options, takes, gain=gain)


_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
# index_topk is less than the length of the shorter sequence.
_INDEXED = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 16}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "partial_rotary_factor": 1.0}
_LONG_ROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_THREE_AXES: dict[str, Any] = {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}

CORE = {
    "Llama": _causal("Llama", **_GROUPED),
    "Mistral": _causal("Mistral"),
    "Qwen3": _causal("Qwen3", **_GROUPED, head_dim=32),
    "Gemma2": _causal("Gemma2", attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
    "Gemma3": _causal("Gemma3"),
    "Gemma4": _causal(
        "Gemma4",
        gain=2,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        global_head_dim=32,
        hidden_size_per_layer_input=8,
    ),
    "gpt-oss": _causal("GptOss", rope_parameters=_ROPE),
    "Phi3": _causal(
        "Phi3", **_GROUPED, original_max_position_embeddings=64, rope_parameters=_ROPE | _LONG_ROPE
    ),
    "DeepSeek-V3": _causal("DeepseekV3"),
    "DeepSeek-V3.2": _causal("DeepseekV32", **_INDEXED),
    # The second layer shares the keys of the first.
    "GLM-MoE-DSA": _causal("GlmMoeDsa", **_INDEXED, indexer_types=["full", "shared"]),
    "Llama4": _causal(
        "Llama4",
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        interleave_moe_layer_step=2,
    ),
    "BERT": _encoder("Bert"),
    "ModernBERT": _encoder("ModernBert", cls_token_id=1, sep_token_id=2),
    "ViT": _encoder("ViT", "pixels"),
    "CLIP": _encoder("CLIP", "both"),
    "Whisper": _conditional("Whisper", "audio", num_mel_bins=8, max_source_positions=30),
    "T5": _conditional("T5", "two texts", gain=1.5, decoder_start_token_id=0),
    "PaliGemma": _conditional("PaliGemma", "prefix", image_token_index=IMAGE_TOKEN),
}

FAMILIES = CORE | {
    "Cohere2": _causal("Cohere2", **_GROUPED, logit_scale=1.0),
    "DeepSeek-V2": _causal("DeepseekV2", num_experts_per_tok=2),
    "DINOv3": _encoder("DINOv3ViT", "pixels"),
    "GLM": _causal("Glm"),
    "GPT-NeoX": _causal("GPTNeoX"),
    "Ministral 3": _causal("Ministral3"),
    "Qwen2-VL": _encoder("Qwen2VLText", **_THREE_AXES),
    "Qwen3-VL": _encoder("Qwen3VLText", **_GROUPED, **_THREE_AXES),
    "StableLM": _causal("StableLm", **_GROUPED),
}

# Families that transformers can batch continuously: no chunks, and one head dim for K and V.
BATCHED = ["Llama", "Mistral", "Gemma2", "Gemma3", "Qwen3", "gpt-oss"]
