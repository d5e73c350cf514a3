"""The shapes that `tune` measures: those of common models, or the user's."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_metal_attn.tools.bench.shapes import DTYPES, BadShape, Shape, from_file, of_model
from torch_metal_attn.wording import value_text

LENGTHS = (512, 2048, 8192)
CACHES = (2048, 8192, 32768)

# Heads, KV heads and head dim, and the models that have them.
_LANGUAGE = (
    {"heads": 32, "kv_heads": 8, "head_dim": 128},  # Llama 3, Mistral, Qwen 3
    {"heads": 14, "kv_heads": 2, "head_dim": 64},  # Qwen 2.5 0.5B, Llama 3.2 1B alike
    {"heads": 8, "kv_heads": 4, "head_dim": 256},  # Gemma 2 and 3
    {"heads": 32, "kv_heads": 32, "head_dim": 96},  # Phi 3 mini
)
_IMAGES = (
    {"heads": 8, "head_dim": 40, "length": 4096},  # Stable Diffusion 1.5
    {"heads": 10, "head_dim": 64, "length": 4096},  # Stable Diffusion XL
    {"heads": 24, "head_dim": 128, "length": 4608},  # Flux
)
_ENCODERS = (
    {"heads": 12, "head_dim": 64, "length": 512},  # BERT, ViT
    {"heads": 12, "head_dim": 32, "length": 512},  # MiniLM
    {"heads": 20, "head_dim": 64, "length": 1500},  # Whisper
)
_TEXT_TOKENS = 77  # that images attend to


def _square(shape: dict[str, Any], **options: Any) -> Shape:
    """With as many heads and lengths of k as of q."""
    alike = {"kv_heads": shape["heads"], "kv_length": shape["length"]}
    return Shape(**alike | shape, **options)


def _language(heads: Mapping[str, Any], dtype: str, training: Iterable[int] = ()) -> list[Shape]:
    """Prompts, decoding and training of a model."""
    return [
        *(
            Shape("forward", length=n, kv_length=n, causal=True, dtype=dtype, **heads)
            for n in LENGTHS
        ),
        *(Shape("decode", length=1, kv_length=n, dtype=dtype, **heads) for n in CACHES),
        *(
            Shape("training", length=n, kv_length=n, causal=True, dtype=dtype, **heads)
            for n in training
        ),
    ]


# What is used most comes first: --minutes may end before the last.
COMMON = (
    *_language(_LANGUAGE[0], "bfloat16"),
    *_language(_LANGUAGE[0], "float16"),
    *(_square(shape, dtype="float16") for shape in _IMAGES),
    *(replace(_square(shape, dtype="float16"), kv_length=_TEXT_TOKENS) for shape in _IMAGES[:2]),
    *(_square(shape, dtype="float32") for shape in _ENCODERS),
    *(shape for heads in _LANGUAGE[1:] for shape in _language(heads, "bfloat16")),
    *(
        Shape("training", 1, 12, 12, n, n, 64, dtype, causal=True)  # GPT-2
        for dtype in ("bfloat16", "float32")
        for n in LENGTHS[:2]
    ),
    Shape("training", 1, 32, 8, 2048, 2048, 128, "bfloat16", causal=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose shapes."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="measure the shapes of a model: a transformers config.json, or a folder with one",
    )
    group.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="measure the shapes in a JSON file, as for `bench`",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="with --model: the dtype that it runs in (default: bfloat16)",
    )


def chosen(options: argparse.Namespace) -> list[Shape] | None:
    """The shapes that the arguments choose; None without any. Raises BadShape."""
    if options.shapes is not None:
        shapes = from_file(options.shapes)
        for shape in shapes:
            if shape.tiles != "best":
                raise BadShape(
                    f"tiles is {value_text(shape.tiles)}; tune chooses the tiles: leave it out"
                )
        return shapes
    if options.model is not None:
        heads = of_model(options.model)
        return _language(heads, options.dtype or "bfloat16", training=LENGTHS[1:2])
    return None
