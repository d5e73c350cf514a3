"""Guesses a model's inputs from the argument names of its forward and from its configuration."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.transformers.tiny_configs import HIDDEN, TOKENS
from tests.transformers.tiny_families import PADDED, PROMPT

BATCH = 2
CHOICES = 2
SIDE = 4  # of a picture, in patches
_PICTURE = ("pixel_values", "pixel_values_videos", "video", "hidden_states", "flattened_patches")
_SOUND = ("input_features", "input_values", "audio_mel")
_GRID = re.compile(r"(image_|visual_)?(grid_(thw|hw)|spatial_shapes)|target_sizes")
_PATCHES = re.compile(_GRID.pattern + "|pixel_position_ids|flattened_patches")
_VECTORS = ("inputs", "inputs_embeds", "query_embeds", "latents", "noise_embeds")
_MISMATCH = re.compile(
    r"tokens?\D{0,40}?(?P<tokens>\d+)\D+features?\D{0,20}?(?P<features>\d+)"
    r"|(?P<vectors>\d+) feature vectors",
    re.IGNORECASE | re.DOTALL,
)


def guesses(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that the model may take, in the order in which to try them."""
    names = inspect.signature(model.forward).parameters
    for guess in _main(model, names):
        inputs = guess | _companions(model, names, guess)
        if type(model).__name__.endswith("MultipleChoice"):
            inputs = {n: x[:, None].repeat_interleave(CHOICES, 1) for n, x in inputs.items()}
        yield inputs


def _main(model: Any, names: Any) -> Iterator[dict[str, Any]]:
    texts = _texts(model, names)
    pictures = [
        {name: value}
        for name in _PICTURE
        if name in names
        for value in (_patches(model) if any(map(_PATCHES.fullmatch, names)) else _pixels(model))
    ]
    sounds = [{name: value} for name in _SOUND if name in names for value in _waves(model, name)]
    series = list(_series(model)) if "past_values" in names else []
    needed = [name for name in _VECTORS if _is_needed(names.get(name))]
    vectors = [{name: value} for name in needed[:1] for value in _vectors(model)]
    others = [*pictures, *sounds, *series, *vectors]
    decoded = {"decoder_input_ids": tokens()} if "decoder_input_ids" in names else {}
    if texts:
        for other in others:
            yield texts | other
        yield texts
    for other in others:
        yield other | decoded
        if decoded:
            yield other
    if not texts and not others:
        yield {}

    def columns(ids: Tensor, count: int) -> Tensor:
        return ids[..., None].expand(-1, -1, count).clone()

    # Tokens of several codebooks: a row or a column for each.
    books = _first(model.config, "num_codebooks", "num_channels")
    ids = texts | decoded
    if ids and isinstance(books, int):
        yield {name: value.repeat_interleave(books, 0) for name, value in ids.items()}
        yield texts | {name: value.repeat_interleave(books, 0) for name, value in decoded.items()}
        yield texts | {name: columns(value, books) for name, value in decoded.items()}
        yield {name: columns(value, books + 1) for name, value in ids.items()}


def _companions(model: Any, names: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Arguments that go with `inputs`, and other required ones."""
    config = model.config
    picture = next((inputs[name] for name in _PICTURE if name in inputs), None)
    sound = next((inputs[name] for name in _SOUND if name in inputs), None)
    has_own = not {"states", "visual_feats"}.isdisjoint(names)
    companions: dict[str, Tensor] = {}
    for name in names:
        if picture is not None and (value := _of_picture(config, names, name, picture)) is not None:
            companions[name] = value
        elif sound is not None and name in ("input_features_mask", "audio_mel_mask"):
            length = sound.shape[-1 if sound.shape[1] == _bins(config) else 1]
            companions[name] = torch.ones(BATCH, length, dtype=torch.bool)
        elif name in _SOUND and name not in inputs and _is_needed(names[name]):
            companions[name] = next(_waves(model, name))
        elif name == "mm_token_type_ids" and "input_ids" in inputs:
            companions[name] = torch.zeros_like(inputs["input_ids"])
        elif name == "decoder_input_values":
            companions[name] = _random(BATCH, PROMPT, _bins(config))
        elif name == "encoder_hidden_states" and "query_embeds" in inputs:
            companions[name] = _random(BATCH, 7, config.encoder_hidden_size)
        elif name in _RARE and (has_own or _is_needed(names[name])):
            companions[name] = _RARE[name](config)
    return companions


def _of_picture(config: Any, names: Any, name: str, picture: Tensor) -> Tensor | None:
    if _GRID.fullmatch(name):
        grid = [1, SIDE, SIDE] if name.endswith("thw") else [SIDE, SIDE]
        grids = torch.tensor([grid] * BATCH)
        if name == "spatial_shapes" and "input_ids" not in names:
            grids[1, 0] -= 1  # without its last row
        return grids
    if name == "pixel_position_ids":
        return torch.cartesian_prod(*[torch.arange(SIDE)] * 2).repeat(BATCH, 1, 1)
    if name == "pixel_attention_mask" and "spatial_shapes" in names:
        ones = torch.ones(BATCH, SIDE * SIDE, dtype=torch.int64)
        if "input_ids" not in names:
            ones[1, -SIDE:] = 0
        return ones
    if name == "pixel_attention_mask" and "state" in names:
        return torch.ones(picture.shape[:2], dtype=torch.bool)
    if name == "image_embeds_position_mask":
        return (torch.arange(PROMPT) < config.latent_query_num).expand(BATCH, -1)
    if name == "merge_sizes":
        return torch.ones(BATCH, dtype=torch.int64)
    if name == "image_attention_mask" and "input_ids" in names:
        return torch.ones(BATCH, PROMPT, picture.shape[1], dtype=torch.int64)
    return None


def _every_other_patch(config: Any) -> Tensor:
    frames = config.num_frames // config.tubelet_size
    count = frames * (config.image_size // config.patch_size) ** 2
    return (torch.arange(count) % 2 == 0).expand(BATCH, count)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


# Arguments that few models have, from their configuration.
_RARE: dict[str, Callable[[Any], Tensor]] = {
    "actions": lambda config: _random(BATCH, PROMPT, _first(config, "act_dim", "max_action_dim")),
    "aspect_ratio_ids": lambda config: torch.ones(BATCH, 1, dtype=torch.int64),
    "aspect_ratio_mask": lambda config: torch.ones(BATCH, 1, 4, dtype=torch.int64),
    "bool_masked_pos": _every_other_patch,
    "freq": lambda config: torch.zeros(BATCH, 1, dtype=torch.int64),
    "past_values_padding": lambda config: torch.zeros(BATCH, config.context_length),
    "returns_to_go": lambda config: _random(BATCH, PROMPT, 1),
    "rewards": lambda config: _random(BATCH, PROMPT, 1),
    "state": lambda config: _random(BATCH, config.max_state_dim),
    "states": lambda config: _random(BATCH, PROMPT, config.state_dim),
    "task_inputs": lambda config: _random(BATCH, config.task_seq_len),
    "timesteps": lambda config: torch.arange(PROMPT).expand(BATCH, PROMPT),
    "visual_feats": lambda config: _random(BATCH, 7, config.visual_feat_dim),
    "visual_pos": lambda config: _random(BATCH, 7, config.visual_pos_dim),
}


def _is_needed(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is parameter.empty


def tokens(length: int = PROMPT, batch: int = BATCH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TOKENS, (batch, length), generator=generator)


def padding(side: str, *shape: int) -> Tensor:
    """An attention mask (2, *shape) whose second sequence is padded on one side, or on none."""
    mask = torch.ones(BATCH, *shape, dtype=torch.int64)
    hidden = {"none": slice(0), "left": slice(PADDED), "right": slice(-PADDED, None)}
    mask[1, ..., hidden[side]] = 0
    return mask


def padded(model: Any, inputs: dict[str, Any], side: str) -> dict[str, Any] | None:
    """`inputs` with a mask, or None. Sounds without texts are padded on the right only."""
    masked = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
    masks = {}
    for mask, name in masked.items():
        if name in inputs:
            shape = inputs[name].shape[1:]
            # Several codebooks share one mask.
            masks[mask] = padding(side, *shape[: 2 if shape[0] == CHOICES else 1])
    sound = next((inputs[name] for name in _SOUND if name in inputs), None)
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if not masks and sound is not None and takes_mask and side != "left":
        length = sound.shape[-1 if sound.dim() == 2 or sound.shape[1] == _bins(model.config) else 1]
        ones = torch.ones(BATCH, length, dtype=torch.int64)
        if side == "right":
            ones[1, -length // 3 :] = 0
        masks["attention_mask"] = ones
    return inputs | masks if masks else None


def with_as_many_tokens(model: Any, inputs: dict[str, Any], error: str) -> dict[str, Any] | None:
    """`inputs` with an image or audio token for each feature that the error counts, or None."""
    match = _MISMATCH.search(error)
    token = _first(
        model.config,
        *("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"),
        "video_token_id",
    )
    if match is None or token is None or "input_ids" not in inputs:
        return None
    features = int(match["features"] or match["vectors"])
    if match["tokens"] == match["features"]:
        features //= HIDDEN  # the error counts elements, not features
    count = -(-features // BATCH)
    if not 0 < count <= 512:
        return None
    ids = inputs["input_ids"]
    if ids.shape[1] != PROMPT:
        ids = torch.cat([ids[:, :5], ids[:, 5 - PROMPT :]], 1)
    ids = torch.cat([ids[:, :5], torch.full((BATCH, count), token), ids[:, 5:]], 1)
    changed = {"input_ids": ids}
    if "mm_token_type_ids" in inputs:
        changed["mm_token_type_ids"] = (ids == token).long()
    return inputs | changed


def _texts(model: Any, names: Any) -> dict[str, Any]:
    if "input_ids" not in names:
        return {}
    inputs: dict[str, Any] = {"input_ids": tokens()}
    if re.search("Classification|QuestionAnswering|MultipleChoice", type(model).__name__):
        # Some models pool at the last separator, or separate a question from its context by one.
        inputs["input_ids"][:, [5, 6, -1]] = 2
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens(seed=1)
    needed = (n for n in names if n.endswith("_input_ids") and _is_needed(names[n]))
    inputs |= {name: tokens() for name in needed}
    if "bbox" in names:
        corners = torch.tensor([3, 5, 20, 30])
        inputs["bbox"] = corners.expand(BATCH, PROMPT, 4).clone()
    return inputs


def _pixels(model: Any) -> Iterator[Tensor]:
    config = model.config
    size = _first(config, "image_size", "img_size", "input_size", "crop_size") or 32
    height, width = (size if isinstance(size, (list, tuple)) else (size, size))[-2:]
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    frames = _first(config, "num_frames", "frames_per_clip") or 2
    if height > 512 or width > 512:
        height = width = 64
    yield _random(BATCH, channels, height, width)
    yield _random(BATCH, frames, channels, height, width)
    yield _random(BATCH, channels, 64, 64)
    yield _random(BATCH, channels, 224, 224)
    yield _random(BATCH, 1, 4, channels, height, width)


def _patches(model: Any) -> Iterator[Tensor]:
    """Pictures of SIDE * SIDE patches, concatenated or in a batch."""
    config, count = model.config, SIDE * SIDE
    side = _first(config, "patch_size") or 8
    side = side if isinstance(side, int) else side[-1]
    frames = _first(config, "temporal_patch_size") or 1
    frames = frames if isinstance(frames, int) else frames[0]
    channels = _first(config, "in_channels", "num_channels", "in_chans") or 3
    for depth in (frames, 1, 2):
        yield _random(BATCH * count, depth * channels * side * side)
    yield _random(BATCH * count, channels, side, side)
    yield _random(BATCH, count, channels * side * side)
    yield _random(BATCH, count, 2 + HIDDEN).abs().ceil()
    yield _random(1, BATCH * count, channels, side, side)
    yield _random(BATCH, channels, side, count * side)
    yield from _pixels(model)


def _waves(model: Any, name: str) -> Iterator[Tensor]:
    config, bins = model.config, _bins(model.config)
    length = _first(config, "max_source_positions", "max_length")
    length = 2 * length if isinstance(length, int) and length <= 2000 else 64
    shapes = [(7680,), (1, 7680), (_first(config, "max_length") or 1024, bins)]
    if name == "audio_mel":
        shapes = [(64, bins)]
    elif name == "input_features":
        shapes = [(bins, length), (64, bins), (160,), (1, 64, bins), (bins, 200)]
        shapes.append((bins, 8 * PROMPT))
        if isinstance(width := _first(config, "input_size"), int):
            shapes.append((64, width))
    for shape in shapes:
        yield _random(BATCH, *shape)


def _bins(config: Any) -> int:
    """The number of features of one frame of a sound."""
    bins = _first(
        config,
        *("num_mel_bins", "input_feat_per_channel", "num_mels", "n_mels", "feature_size"),
        *("feature_projection_input_dim", "input_feat_size"),
    )
    return bins if isinstance(bins, int) else 16


def _vectors(model: Any) -> Iterator[Tensor]:
    width = _first(model.config, "d_model", "hidden_size") or 64
    yield tokens()
    yield _random(BATCH, PROMPT, width)
    yield _random(BATCH, width, PROMPT)


def _series(model: Any) -> Iterator[dict[str, Tensor]]:
    """Time series: the past with its lags and the decoder's future, or several channels."""
    config = model.config
    lags = getattr(config, "lags_sequence", None) or [0]
    past = (_first(config, "context_length", "prediction_length") or PROMPT) + max(lags)
    future = _first(config, "prediction_length") or PROMPT
    features = getattr(config, "num_time_features", 0)
    names = inspect.signature(model.forward).parameters
    series = {
        "past_time_features": _random(BATCH, past, features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": _random(BATCH, future),
        "future_time_features": _random(BATCH, future, features),
    }
    if "past_time_features" not in names:
        del series["past_observed_mask"]
    inputs = {name: value for name, value in series.items() if name in names}
    inputs["past_values"] = _random(BATCH, past)
    yield inputs
    yield {"past_values": _random(BATCH, past, _first(config, "num_input_channels") or 1)}


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in getattr(config, "sub_configs", ()):
        inner = getattr(config, part, None)
        if inner is not None and (value := _first(inner, *names)) is not None:
            return value
    return None
