"""Makes a small configuration for any model type of transformers. Option names decide values."""

import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from transformers import ResNetConfig

from tests.transformers.tiny_families import PROMPT, WINDOW

VOCABULARY = 128
TOKENS = 90  # ordinary tokens are below, special ones above
HIDDEN = 64
HEADS = 4

# Sizes of integer options. The first pattern that matches an option's whole name decides.
_SIZES: list[tuple[str, int]] = [
    (r"codebook_size|.*vocab_size.*|.*_vocab", VOCABULARY),
    (r"max_(position_embeddings|seq_len|length|(target|source)_positions)|n_positions|n_ctx", 128),
    (r"(num_|n_)?(key_value_heads|kv_heads|head_kv|query_groups)|.*num_key_value_heads", 2),
    (r".*(num_|n_)(attention_)?heads?", HEADS),
    (r"(global_|attention_|attn_)?head_dim|d_kv|attention_head_size|kv_channels", HIDDEN // HEADS),
    (r"q_lora_rank|o_lora_rank", 24),
    (r"qk_nope_head_dim|v_head_dim|kv_lora_rank|mamba_headdim", 16),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|attn_layer_period|num_frames|frames_per_clip", 2),
    (r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|num_windows", 4),
    (r"image_embedding_size|mm_tokens_per_image", 4),
    (r"n_group|topk_group|num_expert_group|(mamba_)?n_groups|attn_layer_offset", 1),
    (r"first_k_dense_replace|num_dense_layers|.*sparse_step", 1),
    (r"merge_index", 0),
    (r"attention_hidden_size", 2 * HIDDEN),
    (r"qk_rope_head_dim|rotary_dim|latent_query_num|visual_prompt_size|(num|n)_filters", 8),
    (r"num_queries|num_query_tokens|num_latents|patch_size", 8),
    (r".*(intermediate_(size|dim)|ffn_(dim|hidden_size)|mlp_dim|hidden_dim_ffn)", 96),
    (r"dim_feedforward|d_ff|d_inner", 96),
    (r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|dim_model|projection_dim)", HIDDEN),
    (r"num_pos_feats", HIDDEN // 2),
    (r"dim|d_latents|output_channels|(emb|output|model|condition)_dim", HIDDEN),
    (r"upsample_groups|spec_size|max_img_size|(embedding|projection)_size", HIDDEN),
    (r"(.*_)?(proj_dim|projector_dim|output_hidden_size|cross_attention_hidden_size)", HIDDEN),
    (r"(num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks|depth)|.*_(layers|num_layers)", 2),
    (r"image_size|input_size|crop_size", 32),
    (r".*(sliding_window|attention_chunk_size|local_attention|attention_window)", WINDOW),
    (r"num_mel_bins|model_in_dim|feature_size", 16),
    (r"context_length", PROMPT),
]

# Options whose default is None, for models that need a value.
_FILLED: dict[str, Any] = {
    **dict.fromkeys(("decoder_depth", "indexer_kv_heads", "n_shared_experts"), 1),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
    **dict.fromkeys(("indexer_compress_ratio", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("decoder_num_heads", "indexer_n_heads", "num_key_value_heads"), HEADS),
    **dict.fromkeys(("head_dim", "indexer_head_dim"), HIDDEN // HEADS),
    **dict.fromkeys(("image_token_id", "image_token_index"), VOCABULARY - 1),
    **dict.fromkeys(("video_token_id", "video_token_index"), VOCABULARY - 2),
    "attn_layer_indices": [1],
    "decoder_hidden_size": HIDDEN,
    "deepstack_layer_map": [[-1, 0]],
    "default_language": "en_XX",
    "downsample_rate": "1/2",
    "indexer_budget": 8,
    "layer_types": ["conv", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 32,
    "sliding_window": WINDOW,
    "vocab_size": VOCABULARY,
    "vocabulary_map": {"<image>": VOCABULARY - 1},
}

# Entries of a configuration that are not passed to its class.
_FIXED = "architectures dtype id2label label2id model_type per_layer_config transformers_version"

# Rules for attempts at a configuration, because some configurations check sizes against each other.
LEVELS = ("all", "filled", "without heads", "layers")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers")
_DEPTHS = ("depths", "layers", "num_blocks")
_ALWAYS = ("max_position_embeddings", "n_group", "topk_group", "vocab_size")
_TOKEN = ("token_id", "token_index", "_token_ids")
_HEADS = re.compile(r".*(head|rank|kv|hidden|dim|d_model|width|embd|inter|ffn|size)(?!.*vocab).*")


def small(kind: type, level: str = "all", decodes: bool = False, **changes: Any) -> Any:
    """A small configuration of the class `kind`.

    level: one of LEVELS, from smallest to largest; "filled" also gives a value to options without
        one. decodes: for a model that generates text and could also be an encoder.
    """
    config = kind()
    options = dict(_small_options(config, level))
    if decodes and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        options["is_decoder"] = True
    return kind(**options | _parts(config, level) | changes)


def _parts(config: Any, level: str) -> dict[str, Any]:
    """Small sub-configurations of `config`, which keep the values that `config` set."""
    parts = {}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is None or isinstance(part, dict):
            continue
        if part.model_type == "timm_backbone":
            part = ResNetConfig(out_indices=part.out_indices)  # most timm backbones are ResNets
        kept = {option: value for option, value in _own_options(part).items() if value is not None}
        parts[name] = type(part)(**kept | dict(_small_options(part, level)) | _parts(part, level))
    return parts


def _own_options(config: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in (*_FIXED.split(), *config.sub_configs) and not name.startswith("_")
    }


def _small_options(config: Any, level: str) -> Iterator[tuple[str, Any]]:
    """The options of `config` that differ in a small one, except for sub-configurations."""
    options = _own_options(config)
    total = next((options[name] for name in _LAYERS if isinstance(options.get(name), int)), None)
    depths = [options[name] for name in _DEPTHS if isinstance(options.get(name), (list, tuple))]
    stages = len(depths[0]) if depths else None
    layers = _count_of_layers(options)
    for name, value in options.items():
        if name == "prediction_length":
            yield name, PROMPT
        elif name == "pad_token_id" or (name.endswith(_TOKEN) and value is not None):
            yield name, _special(name, value)
        elif value is None:
            if level == "filled" and name in _FILLED:
                yield name, _FILLED[name]
        elif isinstance(value, bool):
            continue
        elif isinstance(value, (list, tuple)) and value:
            few = _list(name, list(value), level, None if stages else total, layers)
            if few is not None:
                yield name, type(value)(few)
        elif name in _LAYERS and isinstance(value, int) and not stages:
            yield name, min(value, layers)
        elif isinstance(value, int) and (value != stages or "head" in name):
            size = None if _is_kept(name, level) else _number(name, value, options, layers)
            if size is not None and (value > size or name in _ALWAYS):
                yield name, size
        elif isinstance(value, dict) and "mrope_section" in value:
            yield name, value | {"mrope_section": _sections(value["mrope_section"], options, level)}
        elif level == "filled" and name == "rope_parameters" and "rope_theta" in value:
            half = int(HIDDEN // HEADS * value.get("partial_rotary_factor", 1)) // 2
            third = round(half / 3)
            yield name, value | {"mrope_section": [third, third, half - 2 * third]}


def _is_kept(name: str, level: str) -> bool:
    if level == "layers":
        return not re.fullmatch(r".*(layers|blocks|depth|experts|vocab).*", name)
    return level == "without heads" and _HEADS.fullmatch(name) is not None


def _number(name: str, value: int, options: dict[str, Any], layers: int) -> int | None:
    """The small value of an integer option."""
    if name == "num_kv_shared_layers":
        return layers // 2
    if name == "num_key_value_heads" and value == options.get("num_attention_heads"):
        return HEADS
    if name == "head_dim" and value == options.get("qk_rope_head_dim"):
        return _size("qk_rope_head_dim")
    if name == "num_heads" and "state_size" in options:
        return int(HEADS * options["expand"])
    if name == "feature_size" and value > 128:  # of a picture, not of audio
        return HIDDEN
    return _size(name)


def _count_of_layers(options: dict[str, Any]) -> int:
    """Enough layers for one of each kind, and for each output of a backbone."""
    kinds = [len(set(v)) for name, v in options.items() if _of_layers(name) and isinstance(v, list)]
    pattern = options.get("block_types") or ()
    outputs = [len(options.get(name) or ()) for name in ("out_features", "backbone_out_indices")]
    layers = max(2, *kinds, len(set(pattern)), *outputs)
    if any("hybrid" in v for name, v in options.items() if _of_layers(name) and v):
        return layers + 1  # a second hybrid layer shares the weights of the first one
    return layers * 2 if options.get("num_kv_shared_layers") else layers


def _sections(sections: Any, options: dict[str, Any], level: str) -> Any:
    """The numbers of columns for time, height and width, scaled to the small head dimension."""
    width = options.get("hidden_size", 0) // max(options.get("num_attention_heads", 1), 1)
    before = options.get("head_dim") or width
    if level not in ("all", "filled") or not before:
        return sections
    ends = [round(end * (HIDDEN // HEADS) / before) for end in accumulate(sections, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def _size(name: str) -> int | None:
    if name == "num_feat_extract_layers":  # a number of convolutions, each with its sizes
        return None
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)


def _list(name: str, value: list[Any], level: str, total: int | None, layers: int) -> Any:
    """A shorter list. total: the original number of layers; None keeps the number of stages."""
    if name == "block_types":
        return list(dict.fromkeys(value))
    if name == "attention_types":
        return [[["global", "local"], 1]]
    if _of_layers(name) or len(value) == total:
        few = value
        if isinstance(value[0], str):
            few = list(dict.fromkeys(value))
            if level == "filled" and few == ["linear_attention"]:
                few.append("full_attention")
            if layers == 2 * len(few):
                few = few * 2  # the second half shares the keys of the first
        return (few + few[-1:] * layers)[:layers]
    if name in ("out_features", "out_indices"):
        highest = max(int(re.sub(r"\D", "", str(item)) or 0) for item in value)
        last = range(layers - len(value) + 1, layers + 1)
        if total is None or highest <= layers:
            return None
        return [f"stage{number}" if name == "out_features" else number for number in last]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return None
    is_of_layers = re.search("(?<!hybrid_)layer|index|indices", name) and min(value) >= 0
    known = max(value) if "feature_layer" in name else total
    if is_of_layers and known is not None and layers <= max(value) <= known:
        # The last layers, as the first one is often of another kind.
        return list(range(layers))[-len(value) :] if "out_indices" in name else [layers - 1]
    return _sizes_of_stages(name, value) if level in ("all", "filled") else None


def _sizes_of_stages(name: str, value: list[int]) -> list[int] | None:
    if name in _DEPTHS:
        return [1] * len(value)
    if name in ("image_size", "img_size", "input_size") and len(value) == 2:
        return [32] * len(value)
    if re.fullmatch(r"(.*_)?(hidden_sizes|embed_dims?|dims|channels|conv_dim|out_channels)", name):
        return [min(item, HIDDEN) for item in value]
    if re.fullmatch(r"(.*_)?(num_)?(attention_)?heads", name):
        return [HEADS if item >= HEADS else min(item, 2) for item in value]
    return None


def _of_layers(name: str) -> bool:
    return name.endswith(("layer_types", "layers_block_type"))


def _special(name: str, value: Any) -> Any:
    """A different token for each name, above the ordinary ones."""
    known = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    if name in known:
        return known[name]
    if isinstance(value, int) and value >= VOCABULARY:
        return TOKENS + sum(map(ord, name)) % (VOCABULARY - TOKENS)
    return value
