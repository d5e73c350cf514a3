"""A model's inputs, guessed from the argument names of its forward and from its configuration."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.tiny_configs import TOKENS
from bench.tiny_families import PADDED, PROMPT

BATCH = 2
_PICTURE = ("pixel_values", "pixel_values_videos", "video")
_SOUND = ("input_features", "input_values")
_MISMATCH = re.compile(
    r"tokens?\D{0,40}?(\d+)\D+features?\D{0,20}?(\d+)", re.IGNORECASE | re.DOTALL
)


def guesses(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that the model may take, in the order in which to try them."""
    names = inspect.signature(model.forward).parameters
    texts = _texts(model, names)
    pictures = [{name: value} for name in _PICTURE if name in names for value in _pixels(model)]
    sounds = [{name: value} for name in _SOUND if name in names for value in _waves(model, name)]
    series = [_series(model)] if "past_values" in names else []
    vectors = [{"inputs": value} for value in _vectors(model)] if "inputs" in names else []
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


def tokens(shift: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(shift)
    return torch.randint(3, TOKENS, (BATCH, PROMPT), generator=generator)


def padded(given: dict[str, Any], side: str) -> dict[str, Any] | None:
    """`given`, its second sequence padded on one side ("none": a mask of ones), or None."""
    masked = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
    found = {}
    for mask, name in masked.items():
        if name in given:
            ones = torch.ones(given[name].shape[:2], dtype=torch.int64)
            if side == "left":
                ones[1, :PADDED] = 0
            elif side == "right":
                ones[1, -PADDED:] = 0
            found[mask] = ones
    return given | found if found else None


def with_as_many_tokens(model: Any, given: dict[str, Any], error: str) -> dict[str, Any] | None:
    """`given` with a token for each feature of a picture or sound, as an error asks for."""
    found = _MISMATCH.search(error)
    token = _first(
        model.config,
        "image_token_id",
        "image_token_index",
        "audio_token_id",
        "audio_token_index",
        "video_token_id",
    )
    if found is None or token is None or "input_ids" not in given:
        return None
    count = -(-int(found[2]) // BATCH)
    if not 0 < count <= 512:
        return None
    ids = given["input_ids"]
    ids = ids[:, :PROMPT] if ids.shape[1] == PROMPT else torch.cat([ids[:, :5], ids[:, -14:]], 1)
    ids = torch.cat([ids[:, :5], torch.full((BATCH, count), token), ids[:, 5:]], 1)
    return given | {"input_ids": ids}


def _texts(model: Any, names: Any) -> dict[str, Any]:
    if "input_ids" not in names:
        return {}
    given: dict[str, Any] = {"input_ids": tokens()}
    # Pooled outputs are those of the last token of this kind.
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = tokens(shift=1)
    needed = {n for n, parameter in names.items() if parameter.default is parameter.empty}
    given |= {name: tokens() for name in needed if name.endswith("_input_ids")}
    if "bbox" in names:
        corners = torch.tensor([3, 5, 20, 30])
        given["bbox"] = corners.expand(BATCH, PROMPT, 4).clone()
    return given


def _pixels(model: Any) -> Iterator[Tensor]:
    config = model.config
    size = _first(config, "image_size", "img_size", "input_size", "crop_size") or 32
    height, width = (size if isinstance(size, (list, tuple)) else (size, size))[-2:]
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    if not isinstance(channels, int):
        channels = 3
    generator = torch.Generator().manual_seed(1)
    frames = _first(config, "num_frames", "frames_per_clip") or 2
    if height > 512 or width > 512:
        height = width = 64
    yield torch.randn(BATCH, channels, height, width, generator=generator)
    yield torch.randn(BATCH, frames, channels, height, width, generator=generator)
    yield torch.randn(BATCH, channels, 64, 64, generator=generator)
    yield torch.randn(BATCH, channels, 224, 224, generator=generator)


def _waves(model: Any, name: str) -> Iterator[Tensor]:
    config = model.config
    generator = torch.Generator().manual_seed(2)
    bins = _first(
        config, "num_mel_bins", "input_feat_per_channel", "num_mels", "n_mels", "feature_size"
    )
    bins = bins if isinstance(bins, int) else 16
    length = _first(config, "max_source_positions", "max_length")
    length = 2 * length if isinstance(length, int) and length <= 2000 else 64
    if name == "input_features":
        yield torch.randn(BATCH, bins, length, generator=generator)
        yield torch.randn(BATCH, 64, bins, generator=generator)
        yield torch.randn(BATCH, 160, generator=generator)
    else:
        yield torch.randn(BATCH, 4000, generator=generator)
        yield torch.randn(BATCH, 1, 4000, generator=generator)
        yield torch.randn(BATCH, 1024, bins, generator=generator)


def _vectors(model: Any) -> Iterator[Tensor]:
    width = _first(model.config, "d_model", "hidden_size") or 64
    yield tokens()
    yield torch.randn(BATCH, PROMPT, width, generator=torch.Generator().manual_seed(3))


def _series(model: Any) -> dict[str, Tensor]:
    """Time series: the past with its lags, and the future for the decoder."""
    config, generator = model.config, torch.Generator().manual_seed(4)
    lags = getattr(config, "lags_sequence", None) or [0]
    past = (_first(config, "context_length", "prediction_length") or PROMPT) + max(lags)
    future = _first(config, "prediction_length") or PROMPT
    features = getattr(config, "num_time_features", 0)
    given = {"past_values": torch.randn(BATCH, past, generator=generator)}
    names = inspect.signature(model.forward).parameters
    if "past_time_features" in names:
        given["past_time_features"] = torch.randn(BATCH, past, features, generator=generator)
        given["past_observed_mask"] = torch.ones(BATCH, past)
    if "future_values" in names:
        given["future_values"] = torch.randn(BATCH, future, generator=generator)
        given["future_time_features"] = torch.randn(BATCH, future, features, generator=generator)
    return given


def _first(config: Any, *names: str) -> Any:
    """The first of these options that a configuration, or one of its parts, has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in getattr(config, "sub_configs", ()):
        inner = getattr(config, part, None)
        if inner is not None and (value := _first(inner, *names)) is not None:
            return value
    return None
