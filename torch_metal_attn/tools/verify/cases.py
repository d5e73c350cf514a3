"""The self-test's cases: which check runs with which parameters."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_metal_attn.runtime import tensor_tiles
from torch_metal_attn.testing.judge import DTYPES, Measure
from torch_metal_attn.tools.verify.attention import (
    check_backward,
    check_far,
    check_forward,
    check_matrix_gradients,
    check_matrix_tiles,
    check_packed,
    check_same_bits,
    check_tf32,
    check_tf32_gradients,
)
from torch_metal_attn.tools.verify.caches import check_append, check_copy, check_step
from torch_metal_attn.tools.verify.elementwise import (
    check_causal_mask,
    check_merge,
    check_rope,
    check_rope_tables,
    check_softmax,
)
from torch_metal_attn.tools.verify.problems import CACHES, FEATURES, HALF_CACHES

Check = Callable[..., list[Measure]]
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A check and its parameters, including dtype. The report has a line for each family."""

    family: str
    check: Check
    parameters: Parameters = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return str(self.parameters["dtype"]).removeprefix("torch.")

    def run(self, device: torch.device) -> list[Measure]:
        return self.check(device, **self.parameters)

    @property
    def words(self) -> str:
        """The parameters without the dtype; missing ones have the check's defaults."""
        others = ((n, x) for n, x in self.parameters.items() if n != "dtype")
        return ", ".join(f"{n} {_shown(x)}" for n, x in others) or "plain"

    def __str__(self) -> str:
        return f"{self.family}: {self.words}"

    @property
    def all_parameters(self) -> Parameters:
        """The parameters, with the check's defaults."""
        signature = inspect.signature(self.check)
        named = (p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY)
        return {p.name: self.parameters.get(p.name, p.default) for p in named}

    def snippet(self, device: str) -> str:
        """Python that runs the case by itself."""
        given = [f"    {name}={x!r}," for name, x in self.all_parameters.items()]
        module, name = self.check.__module__, self.check.__name__
        call = [f"measures = {name}(", f'    torch.device("{device}"),', *given, ")"]
        if device != "mps":
            call = ["with simulate(check=True):", *(f"    {line}" for line in call)]
        imports = ["import torch", "from torch_metal_attn import simulate"]
        show = ["for measure in measures:", "    print(measure)"]
        return "\n".join([*imports, f"from {module} import {name}", "", *call, *show]) + "\n"


def _shown(x: Any) -> str:
    return "x".join(map(str, x)) if isinstance(x, tuple) else str(x)


def every_dtype(family: str, check: Check, *parameters: Parameters) -> Iterator[Case]:
    """A case for each of the parameters in each dtype."""
    for given, dtype in itertools.product(parameters, DTYPES):
        yield Case(family, check, {"dtype": dtype, **given})


# `verify` without --full: seconds.
QUICK: tuple[Case, ...] = (
    *every_dtype(
        "flash_fwd",
        check_forward,
        {"kv_heads": 4, "q_length": 64, "kv_length": 64},
        {"q_length": 65, "kv_length": 65, "feature": "causal"},
        {"head_dim": 32, "kv_length": 97, "feature": "causal"},
        {"q_length": 1, "kv_length": 129, "head_dim": 128},
        {"head_dim": 256, "feature": "causal, top left"},
        {"q_length": 16, "kv_length": 7, "head_dim": 80, "feature": "rows without keys"},
        {"head_dim": 40, "feature": "window"},
        {"head_dim": 20, "feature": "all scores"},
        {"feature": "mask"},
        {"feature": "rotary"},
    ),
    *every_dtype("flash_bwd", check_backward, {"feature": "causal"}),
    *every_dtype(
        "flash_decode",
        check_forward,
        {"op": "flash_decode", "q_length": 1, "kv_length": 300, "num_splits": 3},
        {"op": "flash_decode", "heads": 8, "kv_heads": 1, "q_length": 2, "num_splits": 1},
    ),
)

_HEAD_DIMS = (1, 7, 65, 96, 128, 256)
_MLA = {"head_dim": 576, "v_head_dim": 512, "kv_heads": 1}
# Lengths that are not a multiple of a tile, 0 and 1.
_LENGTHS = ((1, 1), (1, 257), (7, 31), (31, 7), (65, 1023), (0, 9), (9, 0))


def _forwards() -> Iterator[Case]:
    yield from every_dtype(
        "flash_fwd: features", check_forward, *({"feature": name} for name in FEATURES)
    )
    yield from every_dtype(
        "flash_fwd: head dims",
        check_forward,
        *({"head_dim": d, "feature": "causal"} for d in _HEAD_DIMS),
        {"head_dim": 64, "v_head_dim": 40},
        _MLA,
    )
    yield from every_dtype(
        "flash_fwd: lengths",
        check_forward,
        *({"q_length": q, "kv_length": k} for q, k in _LENGTHS),
    )
    yield from every_dtype(
        "flash_fwd: layouts and caches",
        check_forward,
        {"layout": "by token"},
        {"layout": "cut out of NaN"},
        {"layout": "cut out of NaN", "head_dim": 65},
        *({"cache": cache} for cache in CACHES),
    )
    for cache in HALF_CACHES:
        given = {"dtype": torch.float32, "cache": cache}
        yield Case("flash_fwd: layouts and caches", check_forward, given)
        decode = {"op": "flash_decode", "q_length": 1, "num_splits": 2}
        yield Case("flash_decode: caches", check_forward, given | decode)
    yield from every_dtype(
        "NaN, seen and unseen",
        check_forward,
        {"poison": "seen"},
        {"poison": "behind", "feature": "lengths"},
        {"op": "flash_decode", "poison": "seen", "num_splits": 2},
        {"op": "flash_decode", "poison": "behind", "feature": "lengths", "num_splits": 2},
    )
    yield from every_dtype(
        "flash_varlen_fwd",
        check_packed,
        {"q_lengths": (5, 0, 33), "kv_lengths": (70, 9, 33), "causal": True},
        {"q_lengths": (1, 64, 7), "kv_lengths": (1, 3, 0), "window": 20, "head_dim": 128},
    )


def _other_tiles() -> Iterator[Case]:
    """The features again on 8x8 tiles where other cases have tensor tiles, and the reverse."""
    if not tensor_tiles.problem():
        for feature, dtype in itertools.product(FEATURES, (torch.float16, torch.bfloat16)):
            given = {"dtype": dtype, "feature": feature}
            yield Case("flash_fwd on 8x8 tiles", check_matrix_tiles, given)
            yield Case("flash_bwd on 8x8 tiles", check_matrix_gradients, given)
        for feature in FEATURES:
            given = {"dtype": torch.float32, "feature": feature}
            yield Case("flash_fwd in TF32", check_tf32, given)
            yield Case("flash_bwd in TF32", check_tf32_gradients, given)


def _decodes() -> Iterator[Case]:
    decode: Parameters = {"op": "flash_decode", "q_length": 1, "kv_length": 257}
    yield from every_dtype(
        "flash_decode: splits and heads",
        check_forward,
        *(decode | {"num_splits": n} for n in (0, 1, 3, 64)),
        *(decode | {"heads": h, "kv_heads": kv, "num_splits": 1} for h, kv in ((8, 8), (32, 1))),
        decode | {"q_length": 5, "feature": "causal", "num_splits": 2},
        decode | _MLA | {"values_in_keys": True, "num_splits": 2},
        *(decode | {"head_dim": d, "num_splits": 2} for d in (7, 96, 128, 256)),
    )
    # k of a decode is already rotated, and nothing is dropped.
    features = [n for n in FEATURES if "rotary" not in n and n not in ("plain", "dropout")]
    yield from every_dtype(
        "flash_decode: features",
        check_forward,
        *(decode | {"q_length": 3, "feature": name, "num_splits": 2} for name in features),
    )
    yield from every_dtype(
        "flash_decode: caches",
        check_forward,
        *(decode | {"cache": cache, "num_splits": 2} for cache in CACHES),
    )


def _backwards() -> Iterator[Case]:
    yield from every_dtype(
        "flash_bwd: features", check_backward, *({"feature": name} for name in FEATURES)
    )
    yield from every_dtype(
        "flash_bwd: head dims",
        check_backward,
        *({"head_dim": d, "feature": "causal"} for d in _HEAD_DIMS),
        {"head_dim": 64, "v_head_dim": 40},
    )
    yield from every_dtype(
        "flash_bwd: lengths and layouts",
        check_backward,
        *({"q_length": q, "kv_length": k} for q, k in _LENGTHS),
        {"through_lse": True, "feature": "rows without keys"},
        {"layout": "cut out of NaN"},
    )
    yield from every_dtype(
        "flash_varlen_bwd",
        check_packed,
        {"q_lengths": (5, 0, 33), "kv_lengths": (70, 9, 33), "causal": True, "backward": True},
    )


def _caches() -> Iterator[Case]:
    formats = ("", "q8_0", "q4_0", "fp8_e4m3")
    caches = [{"format": f, "paged": paged} for f in formats for paged in (False, True)]
    rotated: list[Parameters] = [{"rotary": True}, {"rotary": True, "paged": True}]
    yield from every_dtype("append_kv", check_append, *caches, *rotated)
    yield from every_dtype(
        "decode_step",
        check_step,
        *caches,
        *rotated,
        {"rotary": True, "format": "q8_0", "num_splits": 3},
        {"length": 4, "num_splits": 2},
    )
    for dtype in (*DTYPES, torch.int8, torch.uint8):
        yield Case("copy_pages", check_copy, {"dtype": dtype})
    yield Case("copy_pages", check_copy, {"dtype": torch.float16, "page": (3, 5, 7)})


def _elementwise() -> Iterator[Case]:
    yield from every_dtype(
        "rope",
        check_rope,
        {},
        {"interleaved": True},
        {"rotary_dim": 14, "offset": 5},
        {"positions": True, "conjugate": True},
        {"layout": "cut out of NaN", "head_dim": 65, "rotary_dim": 64},
        {"in_place": True, "layout": "by token"},
    )
    yield from every_dtype("rope_tables", check_rope_tables, {}, {"head_dim": 14})
    yield from every_dtype(
        "softmax",
        check_softmax,
        {},
        {"dim": 1, "hidden": True},
        {"shape": (3, 4099), "hidden": True},
        {"in_place": True},
        {"shape": (0, 5)},
    )
    yield from every_dtype("apply_causal_mask_", check_causal_mask, {}, {"q_offset": -7})
    yield from every_dtype(
        "merge", check_merge, {}, {"head_dim": 7}, {"splits": 40}, {"splits": 3, "sink": True}
    )


def _repeats() -> Iterator[Case]:
    yield from every_dtype(
        "two runs, the same bits",
        check_same_bits,
        {},
        {"feature": "all scores"},
        {"feature": "dropout", "head_dim": 96},
    )
    yield from every_dtype("threads", check_same_bits, {"threads": 4})
    yield Case("offsets beyond 2**31", check_far, {"dtype": torch.float16})


def full() -> tuple[Case, ...]:
    """All cases of `verify --full`, by family."""
    parts = (_forwards, _other_tiles, _decodes, _backwards, _caches, _elementwise, _repeats)
    return tuple(case for part in parts for case in part())
