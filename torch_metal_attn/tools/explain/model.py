"""What our ops in a model would run, found by running the model without kernels."""

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from torch_metal_attn.integrations import copies
from torch_metal_attn.tools.costs import Cost
from torch_metal_attn.tools.explain import table
from torch_metal_attn.tools.explain.ops import bound, explain_op, recording_op, short_name
from torch_metal_attn.tools.explain.table import LayerCall, known_cost

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


@dataclass(frozen=True)
class ModelExplanation:
    """Our ops in one call of a model, in the order in which they ran.

    Attributes: model: its class. rows: the calls. stopped: this package's error, with the layer,
        if one ended the model's call early; None if the call went through.
    """

    model: str
    rows: tuple[LayerCall, ...]
    stopped: str | None = None

    @property
    def cost(self) -> Cost:
        """The sum over the calls whose cost is known."""
        return known_cost(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return table.text(self.model, self.rows, self.stopped)


def explain_model(
    model: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> ModelExplanation:
    """Explain `call`, the model itself or one of its methods; see `torch_metal_attn.explain`."""
    name = type(model).__name__
    stopped = None
    # torch.compile would never again compile a frame that it first meets under a dispatch mode.
    with _layer_names(model) as layers, torch.compiler.set_stance("force_eager"), torch.no_grad():
        recorder = _Recorder(layers)
        try:
            with recorder, recorder.told_of_copies():
                call(*arguments, **options)
        except Exception as error:
            if not _is_ours(error):
                raise
            stopped = f"{layers[-1]}: {error}"
    return ModelExplanation(name, tuple(recorder.rows), stopped)


def _is_ours(error: Exception) -> bool:
    """Whether this package raised it, and not the model or model code that the package called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


@contextmanager
def _layer_names(model: nn.Module) -> Iterator[list[str]]:
    """A stack of the paths of the modules that are running; after an error it stays as it was."""
    stack = [type(model).__name__]
    hooks = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: stack.append(path)

    def leave(*_: Any) -> None:
        stack.pop()

    for path, module in model.named_modules():
        if path:
            hooks.append(module.register_forward_pre_hook(enter(path), prepend=True))
            hooks.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder(TorchDispatchMode):
    """Explains our ops instead of running them."""

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.rows: list[LayerCall] = []
        self._layers = layers
        self._copied: list[tuple[str, int]] = []  # for the next op of ours: words and bytes

    @contextmanager
    def told_of_copies(self) -> Iterator[None]:
        def listener(name: str, tensor: Tensor) -> None:
            words = f"{name}, whose strides were {tuple(tensor.stride())}"
            self._copied.append((words, tensor.nbytes))

        copies.listeners.append(listener)
        try:
            yield
        finally:
            copies.listeners.remove(listener)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = short_name(func)
        if name is None or recording_op(name) is None:
            return func(*args, **kwargs)
        explanation = explain_op(name, args, kwargs)
        given = bound(name, args, kwargs)
        keys = given.get("k", given.get("k_cache"))
        tensors = [given[n] for n in ("q",) if n in given] or [args[0]]
        if isinstance(keys, Tensor):
            tensors.append(given.get("k_cache", keys))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        copied, self._copied = self._copied, []
        cost = explanation.cost
        if cost is not None:
            cost += Cost(0, sum(2 * size for _, size in copied))
        words = tuple(word for word, _ in copied)
        self.rows.append(LayerCall(self._layers[-1], name, shapes, explanation, cost, words))
        if explanation.refusal is not None:
            return _refused_result(name, given, explanation.refusal)
        return _blank_result(func, args, kwargs)


def _blank_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op would return, filled with zeros; arguments that it returns are not changed."""
    originals: dict[int, Tensor] = {}
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shadow = mode.from_tensor(value)
            originals[id(shadow)] = value
            return shadow

        fakes = tree_map(fake, (args, kwargs))
        result = func(*fakes[0], **fakes[1])

    def real(shadow: Any) -> Any:
        if not isinstance(shadow, Tensor):
            return shadow
        if id(shadow) in originals:
            return originals[id(shadow)]
        return torch.empty_strided(
            shadow.shape, shadow.stride(), dtype=shadow.dtype, device=shadow.device
        ).zero_()

    return tree_map(real, result)


def _refused_result(name: str, given: dict[str, Any], refusal: str) -> tuple[Tensor, Tensor]:
    """A result for a refused attention, so that the model goes on to its other layers."""
    q, v = given.get("q"), given.get("v_cache", given.get("v"))
    if not name.endswith(("fwd", "decode", "step")) or not isinstance(q, Tensor) or q.dim() < 3:
        raise ValueError(refusal)
    columns = v.shape[-1] if isinstance(v, Tensor) and v.dim() else q.shape[-1]
    lse = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_zeros((*q.shape[:-1], columns)), q.new_zeros(lse, dtype=torch.float32)
