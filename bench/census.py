"""Every model type of transformers, small, with metal_attn, compared with its own eager attention.

Run `make census`, or `python -m bench.census [NAME ...]`. From each type in transformers' auto
mappings it takes the class that generates, else the model itself, whose body the other classes
share. Each must be equal to eager attention in every way in which it can be used, or be refused
with a reason. None is accepted without a call in a kernel. bench/results/census.md is the result.
"""

import argparse
import copy
import gc
import json
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench import tiny_configs, tiny_inputs
from torch_metal_attn.integrations.transformers import attention as attention_module
from torch_metal_attn.integrations.transformers import enable, record_routes

PARAMETERS = 30e6  # a larger model is not small
SECONDS = 20  # of processor time for one class
TOLERANCE = 1e-4  # of the largest number in a result, where float64 does not say better
# At 4 times their size the weights of some models overflow.
GAINS = (4, 2, 1)
GENERATING = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
)


OUTCOMES = (
    "wrong",
    "equal",
    "equal, not sensitive",
    "partly refused",
    "refused",
    "not built small",
)


class NotSmallError(Exception):
    """Why no small model could be built from a class, or why it ran with none of the inputs."""


@dataclass
class Entry:
    """A class and its outcome. ways: the largest difference, or the reason of a refusal."""

    model_type: str
    kind: str
    ways: dict[str, float | str] = field(default_factory=dict)
    calls: int = 0
    refused: str = ""
    not_small: str = ""
    faults: list[str] = field(default_factory=list)
    dull: bool = False  # 2 percent in the scale of the scores do not show

    @property
    def outcome(self) -> str:
        if self.faults:
            return "wrong"
        if self.refused or self.not_small:
            return "refused" if self.refused else "not built small"
        if any(isinstance(apart, str) for apart in self.ways.values()):
            return "partly refused"
        return "equal, not sensitive" if self.dull else "equal"


def classes() -> list[tuple[str, str]]:
    """Each model type and its class that generates, else the model itself."""
    found: dict[str, str] = {}
    for mapping in (*GENERATING, "MODEL_MAPPING_NAMES"):
        for model_type, names in getattr(modeling_auto, mapping).items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    # Some types are other names of one model.
    unique = {name: model_type for model_type, name in sorted(found.items(), reverse=True)}
    return sorted((model_type, name) for name, model_type in unique.items())


def examine(model_type: str, kind: str) -> Entry:
    """Build one class small, and compare it in every way."""
    entry = Entry(model_type, kind)
    try:
        with _limit(SECONDS):
            _examine(entry)
    except NotSmallError as error:
        entry.not_small = str(error)
    except TimeoutError:
        entry.not_small = f"takes more than {SECONDS} s"
    except Exception as error:
        entry.faults.append(_shown(error))
    return entry


def _examine(entry: Entry) -> None:
    model, config, given, expected = _eager(entry)
    reason = _refusal(lambda: enable(model))
    loaded = _refusal(lambda: _from_config(type(model), copy.deepcopy(config)))
    entry.faults += [found for found in (reason, loaded) if found and found.startswith("fails")]
    if (reason is None) != (loaded is None):
        entry.faults.append(f"enable: {reason or 'accepted'}; from_config: {loaded or 'accepted'}")
    if reason is not None:
        entry.refused = reason
        return
    with record_routes() as routes:
        for way, call in _ways(model, given):
            _compare(entry, model, way, call)
    entry.calls = routes.kernel.total()
    if not entry.calls and not any(isinstance(apart, str) for apart in entry.ways.values()):
        entry.faults.append("accepted, and no kernel was called")
    elif isinstance(entry.ways.get("unpadded"), float):
        entry.dull = not _notices(model, given, expected)


def _eager(entry: Entry) -> tuple[Any, Any, dict[str, Any], list[Tensor]]:
    """The model, its configuration, inputs that it accepts, and its output for them."""
    kind = getattr(transformers, entry.kind, None)
    if kind is None:
        raise NotSmallError(f"transformers has no {entry.kind}")
    reasons: list[str] = []
    for level in tiny_configs.LEVELS:
        try:
            config = tiny_configs.small(_config_class(entry.model_type, kind), level)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters())
            if size > PARAMETERS:
                # Those of the levels to come are larger.
                reasons.append(f"{size / 1e6:.0f} million parameters")
                break
            for gain in GAINS:
                model = _weighted(kind, config, gain)
                given, expected = _answered(model)
                if all(value.isfinite().all() for value in expected):
                    return model, config, given, expected
            raise NotSmallError("its answers are not finite")
        except TimeoutError:
            raise
        except Exception as error:
            reasons.append(_shown(error))
    raise NotSmallError("; ".join(dict.fromkeys(reasons)))


def _config_class(model_type: str, kind: Any) -> type:
    own = getattr(kind, "config_class", None)
    return own or CONFIG_MAPPING[model_type]


def _weighted(kind: Any, config: Any, gain: float) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():  # of torch.empty
                weight.normal_(std=0.02)
            if weight.dim() > 1:
                weight.mul_(gain)
            elif name.endswith("sinks"):
                weight.normal_()
    model.set_attn_implementation("eager")
    return model


def _from_config(kind: Any, config: Any) -> None:
    with torch.device("meta"):
        kind._from_config(config, attn_implementation="metal_attn")


def _answered(model: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """The first inputs that the model accepts, and its output."""
    reasons = []
    for guess in tiny_inputs.guesses(model):
        given: dict[str, Any] | None = guess
        for _ in range(3):
            try:
                assert given is not None
                answer = _answer(model, given)
                if not answer:
                    raise NotSmallError("its answer has no numbers")
                return given, answer
            except TimeoutError:
                raise
            except Exception as error:
                reasons.append(_shown(error))
                given = tiny_inputs.with_as_many_tokens(model, guess, str(error))
                if given is None:
                    break
    raise NotSmallError(reasons[-1] if reasons else "takes inputs that are not known here")


@torch.no_grad()
def _answer(model: Any, given: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return list(_numbers(model(**given)))


def _numbers(result: Any) -> Iterator[Tensor]:
    """The floating tensors of an output, without caches and attention weights."""
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.numel():
            yield result
    elif isinstance(result, dict):
        for name, value in result.items():
            if name not in ("past_key_values", "loss") and not name.endswith("attentions"):
                yield from _numbers(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _numbers(value)


def _ways(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    yield "unpadded", lambda: _answer(model, given)
    names = {"none": "mask of ones", "left": "padded left", "right": "padded right"}
    for side, name in names.items():
        padded = tiny_inputs.padded(given, side)
        if padded is not None:
            yield name, partial(_padded, model, padded)
    if model.can_generate():
        prompt = tiny_inputs.padded(given, "left") or given
        prompt = {n: value for n, value in prompt.items() if not n.startswith("decoder_")}
        for cache in ("dynamic", "static"):
            yield f"{cache} cache", partial(_generated, model, prompt, cache)


def _padded(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """The output for tokens that exist, or for whole sequences if it has none for single tokens."""
    mask = given.get("decoder_attention_mask", given.get("attention_mask"))
    assert isinstance(mask, Tensor)
    where, answer = mask.bool(), _answer(model, given)
    of_tokens = [value[where] for value in answer if value.shape[:2] == where.shape]
    return of_tokens or [value for value in answer if value.dim() <= 2]


@torch.no_grad()
def _generated(model: Any, prompt: dict[str, Any], cache: str) -> list[Tensor]:
    torch.manual_seed(0)
    result = model.generate(
        **prompt,
        max_new_tokens=4,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        **({"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}),
        disable_compile=True,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return [result.sequences.double(), *result.logits]


def _compare(entry: Entry, model: Any, way: str, call: Callable[[], list[Tensor]]) -> None:
    """Note the difference from eager, or the refusal; skip ways that eager does not support."""
    model.set_attn_implementation("eager")
    try:
        expected = call()
    except TimeoutError:
        raise
    except Exception:
        expected = []
    enable(model)
    if not expected:
        return
    try:
        actual = call()
    except (NotImplementedError, ValueError) as error:
        entry.ways[way] = _shown(error)
        return
    except TimeoutError:
        raise
    except Exception as error:
        entry.faults.append(f"{way}: {_shown(error)}")
        return
    apart, scale = _apart(actual, expected)
    entry.ways[way] = apart
    if not apart <= TOLERANCE * scale:
        entry.faults.append(f"{way}: {apart:.2g} of {scale:.2g}")


def _apart(actual: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """The largest difference, and the largest magnitude in that tensor."""
    worst = (0.0, 1.0)
    if [value.shape for value in actual] != [value.shape for value in expected]:
        return float("inf"), 1.0
    for ours, theirs in zip(actual, expected, strict=True):
        # A mask that a model adds to its scores is the lowest number of all.
        seen = theirs.abs() < 1e30
        if not torch.equal(seen, ours.abs() < 1e30):
            return float("inf"), 1.0
        if seen.any():
            apart = (ours - theirs)[seen].abs().max().item()
            scale = max(theirs[seen].abs().max().item(), 1e-3)
            worst = max(worst, (apart, scale), key=lambda pair: pair[0] / pair[1])
    return worst


def _notices(model: Any, given: dict[str, Any], expected: list[Tensor]) -> bool:
    """Whether scores that are off by 2 percent are noticed."""
    flash = attention_module._flash
    attention_module._flash = lambda q, k, v, **options: flash(q * 0.98, k, v, **options)
    try:
        apart, scale = _apart(_answer(model, given), expected)
    finally:
        attention_module._flash = flash
    return not apart <= TOLERANCE * scale


def _refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    except TimeoutError:
        raise
    except Exception as error:
        return f"fails with {_shown(error)}"
    return None


def _shown(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def markdown(entries: list[Entry], total: int) -> str:
    """The census as a page: counts, then a table for each outcome."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda one: (one.model_type, one.kind)):
        groups.setdefault(entry.outcome, []).append(entry)
    lines = [
        f"# Census of transformers {transformers.__version__} (`make census`)",
        "",
        "Tiny random models of each model type, with enlarged weights, against their own eager",
        "attention on the CPU in float32. Of each type it is the class that generates, else the",
        "model itself. Ways: without a mask, a mask of ones, padded left, padded right, and",
        "`generate` with a dynamic and a static cache, padded left. The largest difference is of",
        "the way that differs most. A model is not sensitive if scores that are off by 2 % change",
        f"its answer by less than {TOLERANCE:g} of its largest number.",
        "",
        f"{len(entries)} of {total} model types were examined.",
        "",
        "| outcome | model types |",
        "| --- | --- |",
        *(f"| {name} | {len(groups.get(name, []))} |" for name in OUTCOMES),
    ]
    for name in OUTCOMES:
        if name not in groups:
            continue
        lines += ["", f"## {name.capitalize()}", ""]
        if name in ("equal", "equal, not sensitive", "partly refused", "wrong"):
            lines += [
                "| model type | class | ways | calls | largest difference | refused or wrong |"
            ]
            lines += ["| --- | --- | --- | --- | --- | --- |"]
            lines += [_row(entry) for entry in groups[name]]
        else:
            lines += ["| model type | class | reason |", "| --- | --- | --- |"]
            lines += [
                f"| {entry.model_type} | {entry.kind} | {_cell(entry.refused or entry.not_small)} |"
                for entry in groups[name]
            ]
    return "\n".join(lines) + "\n"


def _row(entry: Entry) -> str:
    equal = {way: apart for way, apart in entry.ways.items() if isinstance(apart, float)}
    told = [
        *entry.faults,
        *(f"{w}: {why}" for w, why in entry.ways.items() if isinstance(why, str)),
    ]
    largest = f"{max(equal.values()):.1e}" if equal else ""
    return (
        f"| {entry.model_type} | {entry.kind} | {', '.join(equal)} | {entry.calls} | {largest} "
        f"| {_cell('; '.join(told))} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:240]


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or classes; all of them if none")
    parser.add_argument("--keep", type=Path, help="entries as JSON lines; those in it are not run")
    parser.add_argument("--results", type=Path, help="the Markdown file to write")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    kept = (
        arguments.keep.read_text().splitlines()
        if arguments.keep and arguments.keep.exists()
        else []
    )
    entries = {entry.kind: entry for entry in (Entry(**json.loads(line)) for line in kept)}
    wanted = [one for one in classes() if not arguments.names or set(one) & set(arguments.names)]
    random.Random(0).shuffle(wanted)
    waiting = [one for one in wanted if one[1] not in entries]
    start = time.monotonic()
    for number, (model_type, kind) in enumerate(waiting, 1):
        entry = examine(model_type, kind)
        entries[kind] = entry
        if arguments.keep:
            with arguments.keep.open("a") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
        passed = time.monotonic() - start
        left = passed / number * (len(waiting) - number)
        print(
            f"{number} of {len(waiting)}, {left:.0f} s left: {model_type} {kind} {entry.outcome} "
            f"{' '.join(entry.faults)}",
            flush=True,
        )
        gc.collect()
    if arguments.results:
        arguments.results.write_text(markdown(list(entries.values()), len(classes())))
    if any(entry.faults for entry in entries.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
