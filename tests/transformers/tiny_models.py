"""Tiny random models of `tiny_families`, their inputs and their outputs.

Weights are multiplied by 4. With the initial weights attention is so uniform that a missing softcap
or a scale that is 10 % off passes (measured on transformers' own tests). T5 and Gemma 4 do not
scale their scores, so their factor is smaller: otherwise rounding alone comes near 1e-5.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.transformers import tiny_configs, tiny_inputs
from tests.transformers.tiny_families import FAMILIES, IMAGE_TOKEN, IMAGE_TOKENS, PROMPT
from tests.transformers.tiny_inputs import tokens

Prompts = list[list[int]]
Batch = list[tuple[list[int], Tensor]]  # for each prompt its tokens and their log-probabilities
PARAMETERS = 110e6  # the largest number of parameters of a small model


def build(name: str, **changes: Any) -> Any:
    model = _build(name, **changes) if changes else copy.deepcopy(_unchanged(name))
    torch.manual_seed(1)  # the same state after a build and after a copy
    return model


@cache
def _unchanged(name: str) -> Any:
    return _build(name)


def _build(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    kind = getattr(transformers, family.model).config_class
    config = tiny_configs.small(kind, decodes=family.generates, **family.options | changes)
    return build_from(config, getattr(transformers, family.model), family.gain)


def build_from(config: Any, kind: Any, gain: float = 4) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():  # from torch.empty
                weight.normal_(std=0.02)
            if weight.dim() > 1:
                weight.mul_(gain)
            elif name.endswith("sinks"):
                weight.normal_()
    model.set_attn_implementation("eager")
    return model


class NotSmallError(Exception):
    """No small model of a class could be built and run."""


def shown(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, NotSmallError):
        return text
    if isinstance(error, ImportError):
        text = text.split(". ")[0]  # the rest says how to install it
    return f"{type(error).__name__}: {text[:300]}"


def first_that_runs(
    kind: Any,
    config_class: Any,
    run: Callable[[Any], Any],
    decodes: bool = True,
    gains: tuple[float, ...] = (4,),
    **changes: Any,
) -> tuple[Any, Any]:
    """The first model of a class that runs, and its result. run: None if it is not finite."""
    reasons: list[str] = []
    for level in tiny_configs.LEVELS:
        try:
            config = tiny_configs.small(config_class, level, decodes)
            for name, value in changes.items():
                setattr(getattr(config, "text_config", None) or config, name, value)
            with torch.device("meta"):
                size = sum(weight.numel() for weight in kind(config).parameters())
            if size > PARAMETERS:  # models of later levels are larger
                reasons.append(f"{size / 1e6:.0f} million parameters")
                break
            for gain in gains:
                model = build_from(copy.deepcopy(config), kind, gain)
                if (result := run(model)) is not None:
                    return model, result
            raise NotSmallError("its answers are not finite")
        except Exception as error:
            reasons.append(shown(error))
    raise NotSmallError("; ".join(dict.fromkeys(reasons)))


def smallest(model_name: str, **changes: Any) -> Any:
    """A small generating model. changes: options of its text configuration."""

    def run(model: Any) -> Any:
        return generate(model, {"input_ids": tokens()}, max_new_tokens=1, disable_compile=True)

    kind = getattr(transformers, model_name if "For" in model_name else f"{model_name}ForCausalLM")
    return first_that_runs(kind, kind.config_class, run, pad_token_id=0, **changes)[0]


def prompts() -> Prompts:
    """Prompts for continuous batching. The last takes several steps; two are beyond WINDOW."""
    return [part.tolist() for part in tokens(48, batch=1)[0].split([5, 13, 30])]


def inputs(name: str, side: str = "none") -> dict[str, Tensor]:
    model = _unchanged(name)
    inputs = next(tiny_inputs.guesses(model))
    if FAMILIES[name].takes == "prefix":
        # The image lies in the prefix, and the last tokens are the answer.
        ids, image = inputs["input_ids"], torch.full((2, IMAGE_TOKENS), IMAGE_TOKEN)
        inputs["input_ids"] = torch.cat([ids[:, :5], image, ids[:, 5:]], 1)
        is_answer = torch.arange(PROMPT + IMAGE_TOKENS) >= IMAGE_TOKENS + 10
        inputs["token_type_ids"] = is_answer.long().expand(2, -1)
    return tiny_inputs.padded(model, inputs, side) or inputs


def present(inputs: dict[str, Tensor]) -> Tensor | None:
    """A mask of the queries that are not padding: bool (B, L), or None for all."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return None if mask is None else mask.bool()


def run(model: Any, **inputs: Any) -> Tensor:
    """The model's logits or last hidden state, on the CPU."""
    result = model(**_moved(inputs, model.device))
    if "text_model_output" in result:
        texts = result.text_model_output.last_hidden_state
        pictures = result.image_embeds[:, None].expand(-1, texts.shape[1], -1)
        return torch.cat([texts, pictures], -1).cpu()
    return (result.logits if "logits" in result else result[0]).cpu()


answer = torch.no_grad()(run)


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens and their logits, (B, new tokens, vocabulary)."""
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    result = model.generate(
        **_moved(prompt, model.device),
        **{"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return result.sequences.cpu(), torch.stack(result.logits, 1).cpu()


def generate_batch(model: Any, prompts: Prompts, new_tokens: int = 6, blocks: int = 16) -> Batch:
    """Greedy generation by continuous batching."""
    config = transformers.ContinuousBatchingConfig(
        page_size=8, num_blocks=blocks, max_batch_tokens=16, return_logprobs=True
    )
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": -1}
    greedy = transformers.GenerationConfig(**options)
    results = model.generate_batch(prompts, greedy, continuous_batching_config=config)
    return [(one.generated_tokens, torch.tensor(one.logprobs)) for one in results.values()]


def generate_each(model: Any, prompts: Prompts, new_tokens: int = 6) -> Batch:
    results, options = [], {"max_new_tokens": new_tokens, "eos_token_id": None}
    for prompt in prompts:
        tokens, scores = generate(model, {"input_ids": torch.tensor([prompt])}, **options)
        new = tokens[0, len(prompt) :]
        weights = scores[0].log_softmax(-1).gather(-1, new[:, None])[:, 0]
        results.append((new.tolist(), weights))
    return results


def _moved(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
