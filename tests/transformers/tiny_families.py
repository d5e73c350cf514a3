"""The families of models that are tested: a class, a tiny configuration, and its inputs.

CORE has one family for each form of masks, options and outputs of attention functions. The others
rotate queries in ways of their own, or keep packed sequences apart by positions alone. All other
models of transformers are compared by `make census`.
"""

from dataclasses import dataclass
from typing import Any

PROMPT = 33  # more than flash_decode is used for
PADDED = 4  # tokens of the second sequence
WINDOW = 10  # also the size of chunks: both end inside the prompt

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
ALTERNATING = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
IMAGE_TOKEN = 98
IMAGE_TOKENS = 4  # patches of 16 columns and rows
_LATENT = TEXT | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
# Fewer keys than the shorter sequence has.
_INDEXED = _LATENT | {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 16}
_TWO_TEXTS = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A model class and its configuration, by name in transformers, and its inputs."""

    model: str
    config: str
    options: dict[str, Any]
    takes: str = "ids"  # or pixels, both, audio, two texts, prefix
    generates: bool = True
    gain: float = 4


CORE = {
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": WINDOW}),
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 32}),
    "Gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED | ALTERNATING | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "Gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | ALTERNATING),
    "Gemma4": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GROUPED
        | ALTERNATING
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 99,
        },
        gain=3,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED
        | ALTERNATING
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "Phi3": Family(
        "Phi3ForCausalLM",
        "Phi3Config",
        GROUPED
        | {
            "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _LATENT,
    ),
    "DeepSeek-V3.2": Family("DeepseekV32ForCausalLM", "DeepseekV32Config", _INDEXED),
    "GLM-MoE-DSA": Family(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        # The second layer has the first one's keys.
        _INDEXED | {"indexer_types": ["full", "shared"]},
    ),
    "Llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        GROUPED
        | {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "interleave_moe_layer_step": 2,
        },
    ),
    "BERT": Family("BertModel", "BertConfig", TEXT, generates=False),
    "ModernBERT": Family(
        "ModernBertModel",
        "ModernBertConfig",
        TEXT
        | {
            "local_attention": WINDOW,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        generates=False,
    ),
    "ViT": Family("ViTModel", "ViTConfig", VISION, "pixels", generates=False),
    "CLIP": Family(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT | {"eos_token_id": 2}, "vision_config": VISION, "projection_dim": 32},
        "both",
        generates=False,
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _TWO_TEXTS
        | {
            "num_mel_bins": 8,
            "max_source_positions": 30,
            "max_target_positions": 64,
        },
        "audio",
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 99,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        "two texts",
        gain=1.5,
    ),
    "PaliGemma": Family(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": GROUPED | {"model_type": "gemma", "head_dim": 16},
            "vision_config": VISION | {"model_type": "siglip_vision_model", "patch_size": 16},
            "image_token_index": IMAGE_TOKEN,
            "projection_dim": 64,
        },
        "prefix",
    ),
}


def _causal(name: str, options: dict[str, Any], gain: float = 4) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", options, gain=gain)


def _encoder(name: str, options: dict[str, Any], takes: str = "ids", gain: float = 4) -> Family:
    return Family(f"{name}Model", f"{name}Config", options, takes, generates=False, gain=gain)


_THREE_AXES = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
}

FAMILIES = CORE | {
    "Cohere2": _causal("Cohere2", GROUPED | ALTERNATING | {"logit_scale": 1.0}),
    "DeepSeek-V2": _causal("DeepseekV2", _LATENT),
    "DINOv3": _encoder("DINOv3ViT", VISION, "pixels"),
    "GLM": _causal("Glm", GROUPED | {"head_dim": 16}),
    "GPT-NeoX": _causal("GPTNeoX", TEXT),
    "Ministral 3": _causal("Ministral3", GROUPED | {"head_dim": 16}),
    "Qwen2-VL": _encoder("Qwen2VLText", GROUPED | _THREE_AXES),
    "Qwen3-VL": _encoder("Qwen3VLText", GROUPED | _THREE_AXES | {"head_dim": 16}),
    "StableLM": _causal("StableLm", GROUPED),
}

# transformers batches them continuously: it knows no chunks, and keeps K and V of one head dim.
BATCHED = ["Llama", "Mistral", "Gemma2", "Gemma3", "Qwen3", "gpt-oss"]
