"""Refuses models that would not use this attention, or would give wrong results with it.

`enable` checks every part of a model. `from_pretrained(attn_implementation="metal_attn")` checks
nothing: transformers accepts a registered name for any model. A model that never looks the name up
would run another attention, with masks made for it. So the method that sets a model's
implementation is wrapped to check the model too.
"""

import ast
import difflib
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from torch_metal_attn.integrations.transformers.masks import (
    DENSE_MODELS,
    additive_masks,
    indexed_models,
)
from torch_metal_attn.wording import type_text

NAME = "metal_attn"

# The end of messages that advise another attention, which may mix packed sequences.
PADDED = ", and pass packed sequences as a padded batch with its attention_mask"
_WEIGHTS = (
    "metal_attn never forms the attention weights; use model.set_attn_implementation('eager')"
    + PADDED
)
# For models that transformers runs with "sdpa". `make census` follows this advice.
_THROUGH_SDPA = (
    'Load the model with attn_implementation="sdpa", and call it inside '
    "`with torch_metal_attn.sdpa_replaced():`, which runs that attention on the kernels"
)
_NOTHING_TO_REPLACE = (
    "Its attention consists of operations of its own, which this library cannot replace; load the "
    'model with attn_implementation="eager"'
)
# Models that return attention weights whatever output_attentions is. With metal_attn they are None.
_IGNORE_OUTPUT_ATTENTIONS = frozenset({"BridgeTowerModel"})
_GUARDED = "_metal_attn_guarded"
_CHOOSING_METHOD = "get_correct_attn_implementation"
_LOADING_METHODS = ("_from_config", "from_pretrained")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Code that compares the implementation's name; and the variable that is set for other names.
_BY_NAME = re.compile(r'_attn_implementation\s*(?:==|!=|in)[^\n]*"(?:sdpa|flex_attention)"')
_ELSE_BRANCH = re.compile(
    r'^( +)if self\.config\._attn_implementation in \("eager", "sdpa"\):\n'
    r"(?:\1 +[^\n]*\n|\n)*\1else:\n +(\w+) = \w+\n",
    re.M,
)


def check_part(part: PreTrainedModel, implementation: str, name: str = "") -> None:
    """Raises NotImplementedError if the code of `part`, at `name`, does not work with us."""
    kind: type = type(part)
    where = f"{kind.__name__}{f' at {name!r}' if name else ''}"
    chosen = f"attn_implementation={implementation!r}"
    if part.config.output_attentions:
        raise NotImplementedError(f"output_attentions=True in the config of {where}: {_WEIGHTS}")
    reason = None
    if not part._can_set_attn_implementation():
        reason = f"does not use transformers' attention interface, so it would ignore {chosen}"
    elif _passes_indices(kind):
        indexed_models.add(part.config.model_type)
    elif part.config.model_type not in DENSE_MODELS and _asks_by_name(kind):
        reason = (
            "prepares its masks only for attention implementations that it knows by name, so "
            f"{chosen} would give wrong results"
        )
    elif table := _chooses_by_name(kind):
        reason = f"takes its attention class from {table}, which has none for {chosen}"
    if reason is not None:
        advice = _THROUGH_SDPA if part._supports_sdpa else _NOTHING_TO_REPLACE
        raise NotImplementedError(f"{where} ({part.config.model_type}) {reason}. {advice}")
    if not part._supports_sdpa and part.config.model_type not in indexed_models:
        additive_masks.add(part.config.model_type)
    hooks = part._forward_pre_hooks.values()
    if kind.__name__ in _IGNORE_OUTPUT_ATTENTIONS and _refuse_weights_of_model not in hooks:
        part.register_forward_pre_hook(_refuse_weights_of_model, with_kwargs=True)


def _refuse_weights_of_model(part: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> None:
    if part.config._attn_implementation == NAME:
        refuse_weights(part, kwargs.get("output_attentions"))


def refuse_weights(module: nn.Module, asked: bool | None) -> None:
    """Raises NotImplementedError if attention weights are requested or collected."""
    # Graphs cannot read a context variable, so transformers sets a global one.
    compiling = torch.compiler.is_compiling()
    collected = _active_collector.global_var if compiling else _active_collector.get()
    if asked or any(name.endswith("attentions") for name in collected or ()):
        raise NotImplementedError(f"output_attentions=True in {type(module).__name__}: {_WEIGHTS}")


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model in wrappers such as torch.compile's and PEFT's, or TypeError."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        else:
            raise TypeError(
                f"model is {type_text(model)}; it must be a transformers PreTrainedModel, or "
                "one that torch.compile, PEFT or (Distributed)DataParallel has wrapped"
            )
    return inner


def checked_parts(model: PreTrainedModel, implementation: str) -> list[tuple[str, PreTrainedModel]]:
    """The models in `model`, including itself, with their names. Raises the errors of `enable`."""
    modules = model.named_modules()
    parts = [(name, part) for name, part in modules if isinstance(part, PreTrainedModel)]
    for name, part in parts:
        check_part(part, implementation, name)
    if not any(
        _INTERFACE in source(base)
        for kind in {type(module) for module in model.modules()}
        if not issubclass(kind, PreTrainedModel)
        for base in kind.__mro__
    ):
        raise NotImplementedError(
            f"{type(model).__name__} has no attention that goes through transformers' attention "
            "interface, so this library has nothing to replace; load it without attn_implementation"
        )
    return parts


def guard_models() -> None:
    """Make every model call `check_part` when it gets attn_implementation="metal_attn".

    Whether a model has attention is checked when the outermost model is complete, because a part
    of it may have none.
    """
    original = getattr(PreTrainedModel, _CHOOSING_METHOD)
    if hasattr(original, _GUARDED):
        return

    @functools.wraps(original)
    def checked(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        if requested == NAME:
            check_part(self, NAME)
        try:
            chosen: str = original(self, requested, *args, **kwargs)
        except ValueError as error:
            if difflib.get_close_matches(str(requested), [NAME]):  # the error does not list NAME
                raise ValueError(f'{error} Did you mean "{NAME}"?') from None
            raise
        return chosen

    setattr(checked, _GUARDED, True)
    setattr(PreTrainedModel, _CHOOSING_METHOD, checked)
    for name in _LOADING_METHODS:
        setattr(PreTrainedModel, name, classmethod(_guarded(vars(PreTrainedModel)[name].__func__)))


class _Building(threading.local):
    """The number of nested models that this thread is building."""

    depth = 0


_building = _Building()


def _guarded(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def checked(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        _building.depth += 1
        try:
            built = build(cls, *args, **kwargs)
        finally:
            _building.depth -= 1
        # With output_loading_info the model is the first of two results.
        model = built[0] if isinstance(built, tuple) else built
        if _building.depth == 0 and model.config._attn_implementation == NAME:
            checked_parts(model, NAME)
        return built

    return checked


@functools.cache
def source(kind: type) -> str:
    """The source of a class; "" if there is none."""
    return _class_texts(kind.__module__).get(kind.__qualname__, "")


@functools.cache
def _class_texts(module: str) -> dict[str, str]:
    """Sources by qualified name. Before Python 3.13 getsource parses the module for each class."""
    text = module_source(module)
    lines, texts = text.splitlines(keepends=True), dict[str, str]()

    def collect(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            within = prefix
            if isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                texts.setdefault(prefix + node.name, "".join(lines[first - 1 : node.end_lineno]))
                within = f"{prefix}{node.name}."
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                within = f"{prefix}{node.name}.<locals>."
            if isinstance(node, (ast.stmt, ast.excepthandler)):
                collect(node, within)

    collect(ast.parse(text), "")
    return texts


def module_source(module: str) -> str:
    """The source of a Python module; "" if there is none."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


@functools.cache
def _chooses_by_name(kind: type) -> str | None:
    """The table in which one of `kind`'s modules looks up a class by the implementation's name.

    Searches only classes of the same file that `kind` names, directly or through other classes,
    because a file may define several models.
    """
    seen, waiting = {kind}, [kind]
    while waiting:
        current = waiting.pop()
        text = source(current)
        if table := re.search(r"(\w+_ATTENTION_CLASSES)\[\w*\.?_?attn_implementation\]", text):
            return table[1]
        names = vars(sys.modules[current.__module__])
        named = [names.get(name) for name in re.findall(r"\b[A-Z]\w+", text)]
        near = {
            other
            for other in (*named, *current.__bases__)
            if isinstance(other, type) and other.__module__ == kind.__module__
        }
        waiting += near - seen
        seen |= near
    return None


@functools.cache
def _passes_indices(kind: type) -> bool:
    """True if the module of `kind` passes its selected keys to every implementation."""
    text = module_source(kind.__module__)
    passed = [name for _, name in _ELSE_BRANCH.findall(text) if f"indices={name}," in text]
    return bool(passed) and len(passed) == len(_BY_NAME.findall(text))


@functools.cache
def _asks_by_name(kind: type) -> bool:
    """True if the module of `kind` treats some implementations specially, by their names."""
    return _BY_NAME.search(module_source(kind.__module__)) is not None
