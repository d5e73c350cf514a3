"""Compares a small model of every class in transformers' auto mappings with its eager attention.

Run `make census`, or `python -m tests.transformers.census [NAME ...]`. Each class must call the
kernels and equal eager attention in every way, or be refused with a reason.
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
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.transformers import tiny_inputs, tiny_models
from tests.transformers.tiny_models import NotSmallError, shown
from torch_metal_attn import sdpa_replaced
from torch_metal_attn.integrations.transformers import attention as attention_module
from torch_metal_attn.integrations.transformers import enable, record_routes
from torch_metal_attn.simulator import simulate

SECONDS = 20  # of processor time for one class
TOLERANCE = 1e-4  # relative to the largest number in a result
NOT_SENSITIVE, NOT_BUILT = "equal, not sensitive", "not built small"
OUTCOMES = ("wrong", "equal", NOT_SENSITIVE, "partly refused", "refused", NOT_BUILT)
HEAD = """# Census of transformers {version} (`make census`)

Tiny random models of every class in transformers' auto mappings, with enlarged weights,
against their own eager attention on the CPU in float32. Ways: unpadded (no mask), padded
(a mask of ones, padding on the left, padding on the right; sounds on the right only) and
generate (a dynamic and a static cache, padded left). A model is not sensitive if scores
that are off by 2 % change its answer by less than {tolerance:g} of its largest number.

{count} of {total} classes were examined.

| outcome | classes | model types with such a class |
| --- | --- | --- |
{rows}

Made at {commit}. `make census` writes the result of each class to build/census.jsonl.
Each outcome except "equal" lists the model types that have such a class. The advice of
each refusal was followed, and the answer compared with eager attention. Advice "none"
means that the model should be loaded as it is.
"""


@dataclass
class Entry:
    """A class and its outcome. ways: for each way's name, why it is refused, or "" if equal."""

    model_type: str
    kind: str
    ways: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    refused: str = ""
    not_small: str = ""
    faults: list[str] = field(default_factory=list)
    dull: bool = False  # scores that are off by 2 % do not change the result

    @property
    def outcome(self) -> str:
        if self.faults:
            return "wrong"
        if self.refused or self.not_small:
            return "refused" if self.refused else NOT_BUILT
        if any(self.ways.values()):
            return "partly refused"
        return NOT_SENSITIVE if self.dull else "equal"

    @property
    def advice(self) -> str:
        if "sdpa_replaced()" in self.refused:
            return "sdpa_replaced()"
        named = re.search(r'attn_implementation="(\w+)"', self.refused)
        return named[1] if named else "none"


class TookTooLong(BaseException):
    """A BaseException, so that models do not catch it."""


def classes() -> list[tuple[str, str]]:
    """(model type, class) of each class in transformers' auto mappings, without repetition."""
    types: dict[str, str] = {}
    for mapping, names_of_type in sorted(vars(modeling_auto).items()):
        if re.fullmatch(r"MODEL_(FOR_\w+_)?MAPPING_NAMES", mapping):
            for model_type, names in names_of_type.items():
                for name in [names] if isinstance(names, str) else names:
                    # Several types may share a class.
                    types[name] = min(model_type, types.get(name, model_type))
    return sorted((model_type, name) for name, model_type in types.items())


def examine(model_type: str, kind: str) -> Entry:
    entry = Entry(model_type, kind)

    def stop(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        _examine(entry)
    except NotSmallError as error:
        entry.not_small = str(error)
    except TookTooLong:
        entry.not_small = f"takes more than {SECONDS} s"
    except Exception as error:
        entry.faults.append(shown(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return entry


def _examine(entry: Entry) -> None:
    model, inputs, expected = eager(entry.model_type, entry.kind)
    config, before = copy.deepcopy(model.config), model.config._attn_implementation

    def load() -> None:
        with torch.device("meta"):
            type(model)._from_config(copy.deepcopy(config), attn_implementation="metal_attn")

    reason, loaded = _refusal(partial(enable, model)), _refusal(load)
    entry.faults += [text for text in (reason, loaded) if text and text.startswith("fails")]
    if reason is not None and model.config._attn_implementation != before:
        entry.faults.append("refused, but the model was changed")
    if (reason is None) != (loaded is None):
        entry.faults.append(f"enable: {reason or 'accepted'}; from_config: {loaded or 'accepted'}")
    if reason is not None:
        entry.refused = reason
        entry.faults += _advice_fails(reason, model, config, inputs, expected)
        return
    with record_routes() as routes:
        for way, call in _ways(model, inputs):
            _compare(entry, model, way, call)
    entry.calls = routes.kernel.total()
    if not entry.calls and not any(entry.ways.values()):
        entry.faults.append("accepted, and no kernel was called")
    elif entry.ways.get("unpadded") == "":
        flash = attention_module._flash
        attention_module._flash = lambda q, k, v, **options: flash(q * 0.98, k, v, **options)
        try:
            entry.dull = not _fault(_answer(model, inputs), expected)
        finally:
            attention_module._flash = flash


def _advice_fails(
    refusal: str, model: Any, config: Any, inputs: dict[str, Any], expected: list[Tensor]
) -> list[str]:
    """The faults in a refusal's advice. Each alternative is tried."""

    def faults_of(**options: str) -> list[str]:
        other = type(model)._from_config(copy.deepcopy(config), **options).eval()
        other.load_state_dict(model.state_dict())
        fault = _fault(_answer(other, inputs), expected)
        return [f"advice: {fault}"] if fault else []

    faults = []
    with warnings.catch_warnings(), simulate(), sdpa_replaced() as calls:
        warnings.simplefilter("ignore")  # a block without a call warns
        with suppress(ValueError):  # transformers refuses sdpa
            faults = faults_of(attn_implementation="sdpa")
    if not calls.replaced:
        advised = re.search(r'attn_implementation="(\w+)"', refusal)
        faults = faults_of(**({"attn_implementation": advised[1]} if advised else {}))
    if bool(calls.replaced) != ("sdpa_replaced()" in refusal) or calls.left_alone:
        faults.append(f"advice: {calls}")
    return faults


def eager(model_type: str, kind: str) -> tuple[Any, dict[str, Any], list[Tensor]]:
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        raise NotSmallError(f"transformers has no {kind}")
    config_class = getattr(model_class, "config_class", None) or CONFIG_MAPPING[model_type]
    decodes = "CausalLM" in kind or "LMHead" in kind
    model, (inputs, answer) = tiny_models.first_that_runs(
        model_class, config_class, _first_answer, decodes, gains=(4, 2, 1)
    )
    return model, inputs, answer


def _first_answer(model: Any) -> tuple[dict[str, Any], list[Tensor]] | None:
    """The first inputs that the model accepts, and its output; None if the output is not finite."""
    first_reason = ""
    for guess in tiny_inputs.guesses(model):
        inputs: dict[str, Any] | None = guess
        reason = ""
        for _ in range(3):
            try:
                assert inputs is not None
                answer = _answer(model, inputs)
                if not answer:
                    raise NotSmallError("its answer has no numbers")
                # Some models mask out answers by infinities.
                finite = not any(x.isnan().any() or x.isinf().all() for x in answer)
                return (inputs, answer) if finite else None
            except Exception as error:
                reason = shown(error)
                inputs = tiny_inputs.with_as_many_tokens(model, guess, str(error))
                if inputs is None:
                    break
        first_reason = first_reason or reason  # the first inputs are the most complete
    raise NotSmallError(first_reason or "takes inputs that tiny_inputs.py does not know")


@torch.no_grad()
def _answer(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return list(_numbers(model(**inputs)))


def _numbers(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
        yield result
    elif isinstance(result, dict):
        for name, value in result.items():
            if name not in ("past_key_values", "loss") and not name.endswith("attentions"):
                yield from _numbers(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _numbers(value)


def _ways(model: Any, inputs: dict[str, Any]) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    yield "unpadded", partial(_answer, model, inputs)
    names = {"none": "mask of ones", "left": "padded left", "right": "padded right"}
    for side, name in names.items():
        padded = tiny_inputs.padded(model, inputs, side)
        if padded is not None:
            yield name, partial(_answer_without_padding, model, padded)
    if model.can_generate():
        prompt = tiny_inputs.padded(model, inputs, "left") or inputs
        for cache in ("dynamic", "static"):
            yield f"{cache} cache", partial(_generate, model, prompt, cache)


def _answer_without_padding(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The output for tokens that are not padding, or for whole sequences."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    assert isinstance(mask, Tensor)
    where, answer = mask.bool(), _answer(model, inputs)
    of_tokens = [
        # Codebooks of one sequence are in consecutive rows.
        value[where.repeat_interleave(len(value) // len(where), 0)]
        for value in answer
        if value.shape[1:2] == where.shape[1:] and len(value) % len(where) == 0
    ]
    # Frames before the first one that may contain padding.
    length = where.sum(-1).min().item() / where.shape[-1]
    sounds = [] if "input_ids" in inputs else [x for x in answer if x.dim() == 3]
    frames = [x[:, : int(x.shape[1] * length) - 1] for x in sounds if len(x) == len(where)]
    return of_tokens or frames or [value for value in answer if value.dim() <= 2]


def _generate(model: Any, prompt: dict[str, Any], cache: str) -> list[Tensor]:
    torch.manual_seed(0)
    options = {"max_new_tokens": 4, "num_beams": 1, "eos_token_id": None, "disable_compile": True}
    if model.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 1
    tokens, scores = tiny_models.generate(model, prompt, cache_implementation=cache, **options)
    return [tokens.double(), scores]


def _compare(entry: Entry, model: Any, way: str, call: Callable[[], list[Tensor]]) -> None:
    """Note a difference from eager, or the refusal; skip ways that eager does not support."""
    model.set_attn_implementation("eager")
    expected: list[Tensor] = []
    fault = ""
    with suppress(Exception):
        expected = call()
    enable(model)
    if not expected:
        return
    try:
        fault, entry.ways[way] = _fault(call(), expected), ""
    except (NotImplementedError, ValueError) as error:
        entry.ways[way] = shown(error)
    except Exception as error:
        fault = shown(error)
    if fault:
        entry.faults.append(f"{way}: {fault}")


def _fault(actual: list[Tensor], expected: list[Tensor]) -> str:
    """A text about the difference, or "" if the results differ by rounding only."""
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return "the shapes differ"
    for ours, theirs in zip(actual, expected, strict=True):
        # Models mask scores by adding the lowest number.
        seen = theirs.abs() < 1e30
        if not torch.equal(seen, ours.abs() < 1e30):
            return "different numbers are masked out"
        if seen.any():
            difference = (ours - theirs)[seen].abs().max().item()
            scale = max(theirs[seen].abs().max().item(), 1e-3)
            if not difference <= TOLERANCE * scale:
                return f"{difference:.2g} of {scale:.2g}"
    return ""


def _refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        is_refusal = isinstance(error, NotImplementedError)
        return str(error) if is_refusal else f"fails with {shown(error)}"
    return None


def summary(entries: list[Entry], total: int) -> str:
    entries = sorted(entries, key=lambda entry: (entry.model_type, entry.kind))
    outcomes = {name: [e for e in entries if e.outcome == name] for name in OUTCOMES}
    rows = [
        f"| {name} | {len(group)} | {len({entry.model_type for entry in group})} |"
        for name, group in [*outcomes.items(), ("all", entries)]
    ]
    commit = ["git", "log", "-1", "--format=%h of %cs"]
    made = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    sizes = {"tolerance": TOLERANCE, "count": len(entries), "total": total, "commit": made}
    page = HEAD.format(version=transformers.__version__, rows="\n".join(rows), **sizes)
    refused: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in outcomes.pop("refused"):
        # The reason without the names in it.
        reason = re.sub(r"^\w+( at '[^']*')? (\([^)]*\) )?", "", entry.refused).split(". ")[0]
        reason = re.sub(r"\b[A-Z0-9_]+_CLASSES\b", "a table", reason).split(",")[0]
        refused[reason, entry.advice].append(entry)
    sections = [(name.capitalize(), "", outcomes[name]) for name in outcomes if name != "equal"]
    for (reason, advised), group in sorted(refused.items(), key=lambda pair: -len(pair[1])):
        number = f"{len(group)} class" + "es" * (len(group) > 1)
        about = f"{number}; the refusal advises: {advised}\n\n"
        sections.append((f"Refused: {reason}", about, group))
    for title, about, group in sections:
        if group:
            names = ", ".join(dict.fromkeys(entry.model_type for entry in group))
            lines = textwrap.wrap(names, 138, break_on_hyphens=False)
            page += f"\n## {title}\n\n{about}" + "\n".join(lines) + "\n"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or classes (default: all)")
    parser.add_argument("--keep", type=Path, help="JSON lines of entries; their classes do not run")
    parser.add_argument("--results", type=Path, help="the Markdown file for the summary")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    keep, names, every = arguments.keep, set(arguments.names), classes()
    lines = keep.read_text().splitlines() if keep and keep.exists() else []
    entries = {entry.kind: entry for entry in (Entry(**json.loads(line)) for line in lines)}
    wanted = [one for one in every if not names or names & set(one)]
    random.Random(0).shuffle(wanted)
    waiting = [one for one in wanted if one[1] not in entries]
    for number, (model_type, kind) in enumerate(waiting, 1):
        entry = entries[kind] = examine(model_type, kind)
        if keep:
            with keep.open("a") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
        progress = f"{number} of {len(waiting)}: {model_type} {kind}"
        print(progress, entry.outcome, *entry.faults, flush=True)
        gc.collect()
    if arguments.results:
        listed = [entries[kind] for _, kind in every if kind in entries]
        arguments.results.write_text(summary(listed, len(every)))
    if any(entry.faults for entry in entries.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
