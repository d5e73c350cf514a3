"""Every class of transformers' auto mappings, small, with metal_attn, against its eager attention.

Run `make census`, or `python -m tests.transformers.census [NAME ...]`. Each class must be equal to
eager attention in every way in which it can be used, or be refused with a reason. None is accepted
without a call in a kernel. bench/results/census.md is the result.
"""

import argparse
import copy
import gc
import json
import random
import re
import signal
import subprocess
import textwrap
import time
import warnings
from collections import defaultdict
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

from tests.transformers import tiny_configs, tiny_inputs, tiny_models
from torch_metal_attn import sdpa_replaced
from torch_metal_attn.integrations.transformers import attention as attention_module
from torch_metal_attn.integrations.transformers import enable, record_routes
from torch_metal_attn.simulator import simulate

PARAMETERS = 110e6  # a larger model is not small
SECONDS = 20  # of processor time for one class
TOLERANCE = 1e-4  # of the largest number in a result, where float64 does not say better
# At 4 times their size the weights of some models overflow.
GAINS = (4, 2, 1)


OUTCOMES = (
    "wrong",
    "equal",
    "equal, not sensitive",
    "partly refused",
    "refused",
    "not built small",
)


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


class NotSmallError(Exception):
    """Why no small model could be built from a class, or why it ran with none of the inputs."""


class TookTooLong(BaseException):
    """Of a class; no Exception, so that nothing takes it for one of the model's."""


def classes() -> list[tuple[str, str]]:
    """Each class in an auto mapping of transformers, once, after a model type that it serves."""
    found: dict[str, str] = {}
    for mapping, types in sorted(vars(modeling_auto).items()):
        if not re.fullmatch(r"MODEL_(FOR_\w+_)?MAPPING_NAMES", mapping):
            continue
        for model_type, names in types.items():
            for name in [names] if isinstance(names, str) else names:
                # Some types are other names of one model.
                found[name] = min(model_type, found.get(name, model_type))
    return sorted((model_type, name) for name, model_type in found.items())


def examine(model_type: str, kind: str) -> Entry:
    """Build one class small, and compare it in every way."""
    entry = Entry(model_type, kind)
    try:
        with _limit(SECONDS):
            _examine(entry)
    except NotSmallError as error:
        entry.not_small = str(error)
    except TookTooLong:
        entry.not_small = f"takes more than {SECONDS} s"
    except Exception as error:
        entry.faults.append(_shown(error))
    return entry


def _examine(entry: Entry) -> None:
    model, config, given, expected = _eager(entry)
    before = model.config._attn_implementation
    reason = _refusal(lambda: enable(model))
    if reason is not None and model.config._attn_implementation != before:
        entry.faults.append("refused, and changed all the same")
    loaded = _refusal(lambda: _from_config(type(model), copy.deepcopy(config)))
    entry.faults += [found for found in (reason, loaded) if found and found.startswith("fails")]
    if (reason is None) != (loaded is None):
        entry.faults.append(f"enable: {reason or 'accepted'}; from_config: {loaded or 'accepted'}")
    if reason is not None:
        entry.refused = reason
        entry.faults += _advice_fails(reason, model, config, given, expected)
        return
    with record_routes() as routes:
        for way, call in _ways(model, given):
            _compare(entry, model, way, call)
    entry.calls = routes.kernel.total()
    if not entry.calls and not any(isinstance(apart, str) for apart in entry.ways.values()):
        entry.faults.append("accepted, and no kernel was called")
    elif isinstance(entry.ways.get("unpadded"), float):
        entry.dull = not _notices(model, given, expected)


def _advice_fails(
    refusal: str, model: Any, config: Any, given: dict[str, Any], expected: list[Tensor]
) -> list[str]:
    """What is wrong with a refusal's advice: each way that it could name is tried."""

    def loaded(**options: str) -> Any:
        other = type(model)._from_config(copy.deepcopy(config), **options).eval()
        other.load_state_dict(model.state_dict())
        return other

    def apart(other: Any) -> str | None:
        found, scale = _apart(_answer(other, given), expected)
        return None if found <= TOLERANCE * scale else f"advice: {found:.2g} of {scale:.2g}"

    faults: list[str | None] = []
    with warnings.catch_warnings(), simulate(), sdpa_replaced() as calls:
        warnings.simplefilter("ignore")  # of a block without a call
        try:
            fault = apart(loaded(attn_implementation="sdpa"))
        except ValueError:  # transformers refuses sdpa
            fault = None
    if bool(calls.replaced) != ("sdpa_replaced()" in refusal) or calls.left_alone:
        faults.append(f"advice: {calls}")
    if calls.replaced:
        return [fault for fault in [*faults, fault] if fault]
    advised = re.search(r'attn_implementation="(\w+)"', refusal)
    faults.append(apart(loaded(**({"attn_implementation": advised[1]} if advised else {}))))
    return [fault for fault in faults if fault]


def _eager(entry: Entry) -> tuple[Any, Any, dict[str, Any], list[Tensor]]:
    """The model, its configuration, inputs that it accepts, and its output for them."""
    kind = getattr(transformers, entry.kind, None)
    if kind is None:
        raise NotSmallError(f"transformers has no {entry.kind}")
    own = getattr(kind, "config_class", None) or CONFIG_MAPPING[entry.model_type]
    reasons: list[str] = []
    is_built = False
    for level in tiny_configs.LEVELS:
        try:
            decodes = "CausalLM" in entry.kind or "LMHead" in entry.kind
            config = tiny_configs.small(own, level, decodes)
            size = _size(kind, config)
            is_built = True
            if size > PARAMETERS:
                # Those of the levels to come are larger.
                reasons.append(f"{size / 1e6:.0f} million parameters")
                break
            for gain in GAINS:
                model = tiny_models.build_from(config, kind, gain)
                given, expected = _answered(model)
                # Some models mask out answers by infinities.
                if not any(v.isnan().any() or v.isinf().all() for v in expected):
                    return model, config, given, expected
            raise NotSmallError("its answers are not finite")
        except Exception as error:
            reasons.append(_shown(error))
    if not is_built:
        try:
            _size(kind, own())
        except Exception as error:
            reasons = [f"nor from its default configuration: {_shown(error)}"]
    raise NotSmallError("; ".join(dict.fromkeys(reasons)))


def _size(kind: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in kind(config).parameters())


def _from_config(kind: Any, config: Any) -> None:
    with torch.device("meta"):
        kind._from_config(config, attn_implementation="metal_attn")


def _answered(model: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """The first inputs that the model accepts, and its output."""
    told = ""
    for guess in tiny_inputs.guesses(model):
        given: dict[str, Any] | None = guess
        reason = ""
        for _ in range(3):
            try:
                assert given is not None
                answer = _answer(model, given)
                if not answer:
                    raise NotSmallError("its answer has no numbers")
                return given, answer
            except Exception as error:
                reason = _shown(error)
                given = tiny_inputs.with_as_many_tokens(model, guess, str(error))
                if given is None:
                    break
        told = told or reason  # the first inputs are the most complete
    raise NotSmallError(told or "takes inputs that are not known here")


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
        padded = tiny_inputs.padded(model, given, side)
        if padded is not None:
            yield name, partial(_padded, model, padded)
    if model.can_generate():
        prompt = tiny_inputs.padded(model, given, "left") or given
        prompt = {n: value for n, value in prompt.items() if not n.startswith("decoder_")}
        for cache in ("dynamic", "static"):
            yield f"{cache} cache", partial(_generated, model, prompt, cache)


def _padded(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """The output for tokens that exist, or for whole sequences if it has none for single tokens."""
    mask = given.get("decoder_attention_mask", given.get("attention_mask"))
    assert isinstance(mask, Tensor)
    where, answer = mask.bool(), _answer(model, given)
    of_tokens = [
        # Codebooks of one sequence are in rows one after the other.
        value[where.repeat_interleave(len(value) // len(where), 0)]
        for value in answer
        if value.shape[1:2] == where.shape[1:] and len(value) % len(where) == 0
    ]
    # Frames of a sound: those before the one in which the padding may begin.
    length = where.sum(-1).min().item() / where.shape[-1]
    frames = [
        value[:, : int(value.shape[1] * length) - 1]
        for value in answer
        if "input_ids" not in given and value.dim() == 3 and len(value) == len(where)
    ]
    return of_tokens or frames or [value for value in answer if value.dim() <= 2]


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
    except Exception as error:
        return f"fails with {_shown(error)}"
    return None


def _shown(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, NotSmallError):
        return text
    if isinstance(error, ImportError):
        text = text.split(". ")[0]  # the others say how to install it
    return f"{type(error).__name__}: {text[:300]}"


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _by_outcome(entries: list[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda one: (one.model_type, one.kind)):
        groups[entry.outcome].append(entry)
    return groups


def summary(entries: list[Entry], total: int, tolerance: float) -> str:
    """The census as a page that a person reads: counts, and the model types of each outcome."""
    groups = _by_outcome(entries)
    commit = ["git", "log", "-1", "--format=%h of %cs"]
    made = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        *_counts(entries, total, tolerance),
        "",
        f"Made at {made}. `make census` writes what it found of each class to build/census.jsonl.",
        "A model type is under each outcome that one of its classes has; those that are under none",
        "are equal in all classes. The advice of a refusal was followed, and its answer compared;",
        "none: load the model as it is.",
    ]
    for name in OUTCOMES:
        if groups[name] and name not in ("equal", "refused"):
            lines += ["", f"## {name.capitalize()}", "", *_model_types(groups[name])]
        for (reason, advised), refused in _refused_for(groups[name], name == "refused").items():
            number = f"{len(refused)} class" + "es" * (len(refused) > 1)
            lines += ["", f"## Refused: {reason}", ""]
            lines += [f"{number}; the refusal advises: {advised}", "", *_model_types(refused)]
    return "\n".join(lines) + "\n"


def _refused_for(entries: list[Entry], are_refused: bool) -> dict[tuple[str, str], list[Entry]]:
    """The refused classes by reason and advice, most first."""
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries if are_refused else ():
        groups[_reason(entry).split(",")[0], advice(entry)].append(entry)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))


def _model_types(entries: list[Entry]) -> list[str]:
    names = ", ".join(dict.fromkeys(entry.model_type for entry in entries))
    return textwrap.wrap(names, 138, break_on_hyphens=False)


def _counts(entries: list[Entry], total: int, tolerance: float) -> list[str]:
    groups = _by_outcome(entries)
    return [
        f"# Census of transformers {transformers.__version__} (`make census`)",
        "",
        "Tiny random models of every class in transformers' auto mappings, with enlarged weights,",
        "against their own eager attention on the CPU in float32. Ways: unpadded (no mask), padded",
        "(a mask of ones, padding on the left, padding on the right; sounds on the right only) and",
        "generate (a dynamic and a static cache, padded left). A model is not sensitive if scores",
        f"that are off by 2 % change its answer by less than {tolerance:g} of its largest number.",
        "",
        f"{len(entries)} of {total} classes were examined.",
        "",
        "| outcome | classes | model types with such a class |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {len(groups[name])} | {len({e.model_type for e in groups[name]})} |"
            for name in OUTCOMES
        ),
        f"| all | {len(entries)} | {len({entry.model_type for entry in entries})} |",
    ]


def _reason(entry: Entry) -> str:
    """Why a class is refused, without the names in it."""
    reason = re.sub(r"^\w+( at '[^']*')? (\([^)]*\) )?", "", entry.refused).split(". ")[0]
    return re.sub(r"\b[A-Z0-9_]+_CLASSES\b", "a table", reason)


def advice(entry: Entry) -> str:
    """The attention that runs the class, as its refusal says."""
    if "sdpa_replaced()" in entry.refused:
        return "sdpa_replaced()"
    named = re.findall(r'attn_implementation="(\w+)"', entry.refused)
    return ", ".join(sorted(set(named))) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or classes; all of them if none")
    parser.add_argument("--keep", type=Path, help="entries as JSON lines; those in it are not run")
    parser.add_argument("--results", type=Path, help="the Markdown file for the summary")
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
    listed = [entries[kind] for _, kind in classes() if kind in entries]
    if arguments.results:
        arguments.results.write_text(summary(listed, len(classes()), TOLERANCE))
    if any(entry.faults for entry in entries.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
