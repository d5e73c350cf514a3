"""The shapes of `bench`, `explain` and `tune`: the user's, or a few typical ones."""

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_metal_attn.call.arguments import INT32_MAX
from torch_metal_attn.simulator.exit_status import BadRequest
from torch_metal_attn.wording import value_text

KINDS = ("forward", "training", "decode")
WIDTH = 56  # characters of a shape in a table
MOST_ELEMENTS = 2**61 - 1  # float32 has 4 bytes, and torch counts the bytes of a tensor in int64
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class BadShape(BadRequest):
    """A shape, or a file of shapes, that cannot be measured."""


@dataclass(frozen=True)
class Shape:
    """One problem: q (batch, heads, length, head_dim) and k, v (batch, kv_heads, kv_length, ...).

    Attributes: kind: "forward"; "training", a forward and its backward; or "decode", by
        `flash_decode`. causal: mask out later keys; the last query is at the last key. window:
        number of keys that a query sees before its own; -1 for all.
    """

    kind: str = "forward"
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    length: int = 1024
    kv_length: int = 1024
    head_dim: int = 128
    dtype: str = "float16"
    causal: bool = False
    window: int = -1

    def __post_init__(self) -> None:
        # DTYPES as a list, because a value from JSON may not be hashable.
        for name, allowed in (("kind", KINDS), ("dtype", list(DTYPES))):
            value = getattr(self, name)
            if value not in allowed:
                raise BadShape(
                    f"{name} is {value_text(value)}; it must be one of {', '.join(allowed)}"
                )
        for name in ("batch", "heads", "kv_heads", "length", "kv_length", "head_dim"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= INT32_MAX:
                raise BadShape(
                    f"{name} is {value_text(value)}; it must be an int from 1 to {INT32_MAX}"
                )
        if type(self.causal) is not bool:
            raise BadShape(f"causal is {value_text(self.causal)}; it must be true or false")
        if type(self.window) is not int or not -1 <= self.window <= INT32_MAX:
            raise BadShape(
                f"window is {value_text(self.window)}; it must be the number of keys that a query "
                f"sees before its own, an int from 0 to {INT32_MAX}, or -1 for all"
            )
        if self.heads % self.kv_heads:
            raise BadShape(
                f"heads is {self.heads} and kv_heads {self.kv_heads}; heads must be a multiple of "
                "kv_heads"
            )
        for size in self.sizes:
            if math.prod(size) > MOST_ELEMENTS:
                raise BadShape(f"a tensor of shape {size} has too many elements for torch")

    @property
    def series(self) -> str:
        seen = "causal" if self.causal else "full"
        if self.window >= 0:
            seen = f"{seen}, window {self.window}"
        heads = f"H{self.heads}/{self.kv_heads}"
        return f"B{self.batch} {heads} D{self.head_dim} {self.dtype} {seen}"

    def __str__(self) -> str:
        return f"{self.kind} {self.length} x {self.kv_length}, {self.series}"

    @property
    def options(self) -> dict[str, Any]:
        """The op's options for visibility."""
        return {"causal": self.causal, "window_size_left": self.window}

    @property
    def op(self) -> str:
        return "flash_decode" if self.kind == "decode" else "flash_fwd"

    def operands(self, device: torch.device) -> list[torch.Tensor]:
        """Normally distributed q, k and v, which require grad in training."""
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.empty(size, device=device, dtype=DTYPES[self.dtype])
            .normal_(generator=generator)
            .requires_grad_(self.kind == "training")
            for size in self.sizes
        ]

    @property
    def sizes(self) -> list[tuple[int, int, int, int]]:
        keys = (self.batch, self.kv_heads, self.kv_length, self.head_dim)
        return [(self.batch, self.heads, self.length, self.head_dim), keys, keys]


def _several(kind: str, kv_lengths: Iterable[int], **options: Any) -> list[Shape]:
    """A shape per length: one query for decoding, otherwise causal with as many queries as keys."""
    decode = kind == "decode"
    return [
        Shape(kind, length=1 if decode else n, kv_length=n, causal=not decode, **options)
        for n in kv_lengths
    ]


DEFAULT_SHAPES = (
    *_several("forward", (512, 2048, 8192)),
    *_several("forward", (512, 2048, 8192), heads=16, kv_heads=16, head_dim=64),
    *_several("forward", (2048,), heads=8, kv_heads=4, head_dim=256),
    *_several("training", (512, 2048, 4096), heads=16, kv_heads=16, head_dim=64),
    *_several("training", (512, 2048), heads=16, kv_heads=4),
    *_several("decode", (1024, 4096, 16384, 65536)),
    *_several("decode", (1024, 4096, 16384), batch=8),
    *_several("decode", (1024, 4096, 16384), heads=16, kv_heads=16, head_dim=64),
)


_Q_SHAPE = ("batch", "heads", "length", "head_dim")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose shapes. Without any of them a few default shapes are used."""
    group = parser.add_argument_group("shapes")
    group.add_argument(
        "--shape",
        type=int,
        nargs=len(_Q_SHAPE),
        metavar=("BATCH", "HEADS", "LENGTH", "HEAD_DIM"),
        help="shape of q; the same as --batch, --heads, --length and --head-dim",
    )
    heads = f"number of query heads (default: {Shape.heads}, with {Shape.kv_heads} KV heads)"
    kv_heads = f"number of KV heads (default: --heads, or {Shape.kv_heads} without it)"
    for name, nargs, help_text in (
        ("batch", None, f"number of sequences (default: {Shape.batch})"),
        ("heads", None, heads),
        ("kv-heads", None, kv_heads),
        ("head-dim", None, f"head dimension (default: {Shape.head_dim})"),
        ("length", "+", "number of queries, one or more (default: 1024; 1 with --decode)"),
        ("kv-length", "+", "number of keys (default: --length; 1024 with --decode)"),
    ):
        group.add_argument(f"--{name}", type=int, nargs=nargs, metavar="N", help=help_text)
    group.add_argument("--dtype", choices=list(DTYPES), help="default: float16")
    group.add_argument("--causal", action="store_true", help="mask out later keys")
    group.add_argument(
        "--window", type=int, metavar="N", help="sliding window: keys seen before the query's own"
    )
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--backward", action="store_true", help="forward and backward")
    kind.add_argument("--decode", action="store_true", help="decoding, with flash_decode")
    group.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="take heads and head dim from a transformers config.json, or from a folder with one",
    )
    group.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="read shapes from a JSON list of objects with kind (forward, training or decode), "
        "batch, heads, kv_heads, length, kv_length, head_dim, dtype, causal, window; the defaults "
        "are those of the options",
    )


_OPTIONS = (
    *("shape", "batch", "heads", "kv_heads", "head_dim", "length", "kv_length", "dtype", "window"),
    *("model", "causal", "backward", "decode"),
)


def chosen(options: argparse.Namespace) -> list[Shape] | None:
    """The shapes that the arguments choose, or None without such arguments. Raises BadShape."""
    values = {name: getattr(options, name) for name in _OPTIONS}
    used = [name for name, value in values.items() if value is not None and value is not False]
    if options.shapes is not None:
        if used:
            flag = used[0].replace("_", "-")
            raise BadShape(f"--shapes gives complete shapes: leave out --{flag}")
        return from_file(options.shapes)
    if options.shape is not None:
        twice = [name for name in _Q_SHAPE if name in used]
        if twice:
            flag = twice[0].replace("_", "-")
            raise BadShape(f"--shape already gives {twice[0]}: leave out --{flag}")
        values |= dict(zip(_Q_SHAPE, options.shape, strict=True))
        values["length"] = [values["length"]]
    elif not used:
        return None
    fields: dict[str, Any] = {} if options.model is None else of_model(options.model)
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "window")
    fields |= {name: values[name] for name in names if values[name] is not None}
    fields["kind"] = "decode" if options.decode else "training" if options.backward else "forward"
    fields["causal"] = options.causal
    lengths = {name: values[name] for name in ("length", "kv_length") if values[name]}
    products = itertools.product(*lengths.values())
    return [_shape(fields | dict(zip(lengths, sizes, strict=True))) for sizes in products]


def _shape(fields: dict[str, Any]) -> Shape:
    defaults = {"kv_heads": fields["heads"]} if "heads" in fields else {}
    if fields.get("kind") == "decode":
        defaults["length"] = 1
    elif "length" in fields:
        defaults["kv_length"] = fields["length"]
    return Shape(**(defaults | fields))


def from_file(path: Path) -> list[Shape]:
    listed = _json(path)
    names = [field.name for field in dataclasses.fields(Shape)]
    if not isinstance(listed, list) or not listed:
        raise BadShape(f"{path} must hold a list of objects, one for each shape")
    shapes = []
    for number, fields in enumerate(listed):
        unknown = sorted(fields.keys() - set(names)) if isinstance(fields, dict) else None
        if unknown != []:
            what = f"has {unknown[0]!r}" if unknown else f"is {value_text(fields)}"
            allowed = f"it must be an object with some of {', '.join(names)}"
            raise BadShape(f"{path}: shape {number} {what}; {allowed}")
        try:
            shapes.append(_shape(fields))
        except BadShape as error:
            raise BadShape(f"{path}: shape {number}: {error}") from None
    return shapes


def of_model(model: Path) -> dict[str, int]:
    """Heads and head dim of a transformers model, from its config or folder. Raises BadShape."""
    path = model / "config.json" if model.is_dir() else model
    if not path.is_file():
        raise BadShape(
            f"--model is {model}, and there is no file {path}; it must be the path of a "
            "transformers config.json or of a folder with one (nothing is downloaded)"
        )
    config = _json(path)
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise BadShape(f"--model is {model}, but {path} is not the JSON object of a config.json")
    heads = _number(path, config, "num_attention_heads")
    kv_heads = _number(path, config, "num_key_value_heads", heads)
    head_dim = _number(path, config, "head_dim", 0)
    head_dim = head_dim or _number(path, config, "hidden_size") // heads
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def _number(path: Path, config: dict[str, Any], name: str, missing: int | None = None) -> int:
    value = config.get(name)
    value = missing if value is None else value
    if type(value) is not int or (value < 1 and value != missing):
        raise BadShape(
            f"{path}: {name} is {value_text(value)}; it must be an int above 0 for --model"
        )
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadShape(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise BadShape(f"{path} cannot be read as JSON: {error}") from error
