"""The score options of flash-attn's functions, each described once.

flash-attn 2's options are positional, so each function names them. Options of newer versions are
keywords of every function. To add an option of the op, add its name and type to `NewerOptions`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from torch import Tensor
from typing_extensions import TypedDict

from torch_metal_attn.call.arguments import Window, as_bool, as_int, as_number, as_python_number
from torch_metal_attn.call.keywords import check_keywords, show_parameters
from torch_metal_attn.call.philox import draw_rng_state
from torch_metal_attn.wording import value_text

_Function = TypeVar("_Function", bound=Callable[..., Any])


class NewerOptions(TypedDict, total=False):
    """Score options that flash-attn 2 does not have."""

    attention_chunk: int
    learnable_sink: Tensor | None


class ScoreOptions(NewerOptions, total=False):
    """Options that change scores, with the op's names. 0 or None disables an option."""

    softcap: float
    alibi_slopes: Tensor | None


class FlashAttnOptions(ScoreOptions, total=False):
    """The options that flash-attn's functions without a cache share."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    deterministic: bool
    return_attn_probs: bool


# Arguments of flash-attn 3 that choose between its kernels or have another name here: the allowed
# values, and advice for other values.
_FLASH_ATTN_3: dict[str, tuple[tuple[int | None, ...], str]] = {
    "num_splits": ((0, 1), "only flash_attn_with_kvcache splits keys"),
    "pack_gqa": ((None,), "the op chooses the kernels of grouped heads"),
    "sm_margin": ((0,), "all cores are used"),
    "scheduler_metadata": ((None,), "nothing is scheduled beforehand"),
    "qv": ((None,), "concatenate q and qv, and k and v, in the last dimension"),
    "rotary_seqlens": ((None,), "rows of the rotary tables are counted from cache_seqlens"),
    "page_table": ((None,), "flash_attn_varlen_func takes it as block_table"),
    "seqused_q": ((None,), "pass the sequences' lengths as cu_seqlens_q"),
    **{
        f"{x}_descale": ((None,), f"multiply {x} by it; quantised caches have k_scale and v_scale")
        for x in "qkv"
    },
}
# The type of each numeric option; None for a tensor.
_TYPES = {
    name: kind if kind in (int, float) else None
    for name, kind in get_type_hints(ScoreOptions).items()
}
_NEWER = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=kind() if kind in (int, float) else None,
        annotation=kind,
    )
    for name, kind in get_type_hints(NewerOptions).items()
]


def check_newer(function: str, newer: Iterable[str]) -> None:
    """`check_keywords`, but flash-attn 3's are allowed; `score_options` checks their values."""
    check_keywords(function, (name for name in newer if name not in _FLASH_ATTN_3))


def score_options(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The op's keywords for these options. Disabled options are left out, as each costs time."""
    options: dict[str, Any] = {}
    for name, value in scores.items():
        if name in _FLASH_ATTN_3:
            defaults, advice = _FLASH_ATTN_3[name]
            number = as_python_number(name, value)
            if not isinstance(number, int | None) or number not in defaults:
                allowed = " or ".join(map(str, defaults))
                raise ValueError(f"{name} is {value_text(value)}; it must be {allowed}: {advice}")
            continue
        kind = _TYPES[name]
        if kind is not None and type(value) is not kind:
            value = as_int(name, value) if kind is int else as_number(name, value)
        # None disables a tensor, 0 a number.
        if value is not None if kind is None else value != 0:
            options[name] = value
    return options


def limit_options(causal: bool, left: int, right: int) -> dict[str, Any]:
    """The op's keywords for these limits; -1 means no limit; causal overrides `right`."""
    options: dict[str, Any] = {"causal": True} if causal else {}
    if left >= 0:
        options["window_size_left"] = left
    if right >= 0 and not causal:
        options["window_size_right"] = right
    return options


def op_options(
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    limits: tuple[int, int],
    score: Mapping[str, Any],
) -> dict[str, Any]:
    """The op's keywords that differ from their defaults, with dropout's random state drawn."""
    options = score_options(score)
    if softmax_scale is not None:
        if type(softmax_scale) is not float:
            softmax_scale = as_number("softmax_scale", softmax_scale)
        options["softmax_scale"] = softmax_scale
    if causal is not False:
        causal = as_bool("causal", causal)
    options |= limit_options(causal, *limits)
    if type(dropout_p) is not float:
        dropout_p = as_number("dropout_p", dropout_p)
    rng_state = draw_rng_state(dropout_p, q.device)
    if rng_state is not None:
        options["dropout_p"] = dropout_p
        options["rng_state"] = rng_state
    return options


def named_options(function: _Function) -> _Function:
    """Let help() and inspect.signature show the names in `**newer: Unpack[NewerOptions]`."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return show_parameters(function, [*named, *_NEWER])


def options_of(
    other: Callable[..., Any], operands: int, without: str = ""
) -> Callable[[_Function], _Function]:
    """Let help() also show `other`'s parameters after the first `operands`, except `without`."""
    parameters = list(inspect.signature(other).parameters.values())[operands:]
    passed_on = [p for p in parameters if p.name != without]

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return show_parameters(function, [*named, *passed_on])

    return decorate
