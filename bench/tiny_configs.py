"""A small configuration for any model type of transformers, by rules for its options' names.

There is no list of models. A rule names an option that many configurations have, and the value that
makes a model small. Options that no rule knows keep their default.
"""

import re
from collections.abc import Iterator
from typing import Any

from bench.tiny_families import PROMPT, WINDOW

VOCABULARY = 128
TOKENS = 90  # ordinary tokens are below, special ones above
HIDDEN = 64
HEADS = 4

# The first pattern that is found in the whole name of a whole number decides.
_SIZES: list[tuple[str, int]] = [
    (
        r"(vocab_size.*|.*_vocab_size|vocabulary_size|codebook_size|n_vocab|.*vocab_size.*)",
        VOCABULARY,
    ),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_length|seq_length)", 128),
    (r"max_target_positions|max_source_positions", 128),
    (r"(num_|n_)?(key_value_heads|kv_heads|head_kv|query_groups)|.*num_key_value_heads", 2),
    (r".*(num_|n_)(attention_)?heads?|.*attention_heads|n_head|.*num_heads", HEADS),
    (r"(global_|attention_|attn_)?head_dim|d_kv|attention_head_size|kv_channels", HIDDEN // HEADS),
    (r"qk_rope_head_dim", 8),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"q_lora_rank|o_lora_rank", 24),
    (r"kv_lora_rank", 16),
    (r"num_experts_per_tok|moe_topk|moe_top_k|top_k|moe_k|num_selected_experts", 2),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|.*num_experts", 4),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers|.*sparse_step", 1),
    (
        r".*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|hidden_dim_ffn)|d_ff|d_inner|n_inner",
        96,
    ),
    (r"dim_feedforward|.*intermediate_dim", 96),
    (r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|dim_model|projection_dim)", HIDDEN),
    (r"(dim|width|emb_dim|embedding_size|embed_size|output_dim|model_dim|projection_size)", HIDDEN),
    (r"(.*_)?(proj_dim|projector_dim|output_hidden_size|cross_attention_hidden_size)", HIDDEN),
    (r"(num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks|depth)|.*_(layers|num_layers)", 2),
    (r"num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers", 0),
    (r"image_size|img_size|input_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_frames|frames_per_clip", 2),
    (r"num_queries|num_query_tokens|num_latents|num_object_queries", 8),
    (r".*(sliding_window|attention_chunk_size|local_attention|attention_window)", WINDOW),
    (r"num_mel_bins|num_mels|feature_size|n_mels", 16),
    (r"prediction_length|context_length", PROMPT),
]
_COMPILED = [(re.compile(pattern), size) for pattern, size in _SIZES]

# Names, and what holds for single layers of many.
_FIXED = (
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "per_layer_config",
    "transformers_version",
)

# What may differ from one attempt to the next: some configurations check sizes against each other.
LEVELS = ("all", "without heads", "layers")
_HEADS = re.compile(r".*(head|rank|kv|hidden|dim|d_model|width|embd|inter|ffn|size)(?!.*vocab).*")


def small(kind: type, level: str = "all") -> Any:
    """A small configuration of the class `kind`. level: one of LEVELS, from smallest to largest."""
    config = kind()
    return kind(**_options(config, level), **_parts(config, level))


def _parts(config: Any, level: str) -> dict[str, Any]:
    """The configurations inside `config`, made small, and what `config` chose for them."""
    parts = {}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is None or isinstance(part, dict):
            continue
        kept = {
            option: value
            for option, value in part.to_dict().items()
            if option not in (*_FIXED, *part.sub_configs)
            and not option.startswith("_")
            and value is not None
        }
        parts[name] = type(part)(**kept | _options(part, level) | _parts(part, level))
    return parts


def _options(config: Any, level: str) -> dict[str, Any]:
    given = {
        name: value
        for name, value in config.to_dict().items()
        if name not in (*_FIXED, *config.sub_configs) and not name.startswith("_")
    }
    return dict(_changed(given, level))


def _changed(given: dict[str, Any], level: str) -> Iterator[tuple[str, Any]]:
    """The options among `given` that become smaller."""
    total = given.get("num_hidden_layers")
    kinds = [value for name, value in given.items() if _of_layers(name) and value]
    # One of each kind.
    layers = max([2, *(len(set(value)) for value in kinds if isinstance(value, list))])
    grouped = given.get("num_key_value_heads") != given.get("num_attention_heads")
    for name, value in given.items():
        if name == "prediction_length":
            yield name, PROMPT
        elif name.endswith(("token_id", "token_index", "_token_ids")) and value is not None:
            yield name, _special(name, value)
        elif isinstance(value, list) and value and (_of_layers(name) or len(value) == total):
            few = list(dict.fromkeys(value)) if isinstance(value[0], str) else value
            yield name, (few + few[-1:] * layers)[:layers]
        elif name == "num_hidden_layers":
            yield name, min(value, layers) if isinstance(value, int) else value
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            if level == "layers" and not re.fullmatch(
                r".*(layers|blocks|depth|experts|vocab).*", name
            ):
                continue
            if level == "without heads" and _HEADS.fullmatch(name):
                continue
            size = HEADS if name == "num_key_value_heads" and not grouped else _size(name)
            if size is not None and (value > size or name in ("n_group", "topk_group")):
                yield name, size
        elif isinstance(value, (list, tuple)) and value and name == "mrope_section":
            yield name, [2, 3, 3]
        elif isinstance(value, (list, tuple)) and value and level == "all":
            yield from _lists(name, value)
        elif isinstance(value, dict) and name == "rope_parameters" and "mrope_section" in value:
            if level == "all":
                yield name, value | {"mrope_section": [2, 3, 3]}


def _size(name: str) -> int | None:
    for pattern, size in _COMPILED:
        if pattern.fullmatch(name):
            return size
    return None


def _lists(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Sizes of stages: as many, and small."""
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return
    if name in ("depths", "layers", "num_blocks", "encoder_depths", "layer_depths"):
        yield name, type(value)([1] * len(value))
    elif name in ("image_size", "img_size", "input_size") and len(value) == 2:
        yield name, type(value)([32] * len(value))
    elif re.fullmatch(
        r"(.*_)?(hidden_sizes|embed_dims?|dims|channels|conv_dim|out_channels)", name
    ):
        yield name, type(value)([min(item, HIDDEN) for item in value])
    elif re.fullmatch(r"(.*_)?(num_)?(attention_)?heads", name):
        yield name, type(value)([min(item, HEADS) for item in value])


def _of_layers(name: str) -> bool:
    return name.endswith(("layer_types", "layers_block_type"))


def _special(name: str, value: Any) -> Any:
    """A token of its own for each kind, above the ordinary ones; none ends a sentence."""
    if name == "pad_token_id":
        return 0
    if name == "bos_token_id" or name == "decoder_start_token_id":
        return 1
    if name == "eos_token_id":
        return 2
    if isinstance(value, int) and value >= VOCABULARY:
        return TOKENS + sum(map(ord, name)) % (VOCABULARY - TOKENS)
    return value
