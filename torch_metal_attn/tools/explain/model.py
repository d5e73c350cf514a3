"""Explains every attention of a model, by running the model without kernels."""

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
from torch_metal_attn.tools import costs
from torch_metal_attn.tools.costs import Cost
from torch_metal_attn.tools.explain import table
from torch_metal_attn.tools.explain.ops import bound, explain_op, explained_name
from torch_metal_attn.tools.explain.table import LayerCall, known_cost

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# In torch.ops.aten: attention as one op, and ops that only attention uses.
_FUSED = ("_scaled_dot_product_", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_SDPA_SOFTMAX, _SOFTMAX, _PRODUCTS = "_safe_softmax", "_softmax", ("bmm", "baddbmm")
_ATTENTION_DIMS = 4  # (B, H, Lq, Lk); a softmax of fewer dimensions may choose experts or tokens


@dataclass(frozen=True)
class ModelExplanation:
    """Every attention in one call of a model, a plan or a cache, in order.

    Attributes: model: the class of that object. rows: the calls. stopped: the layer and the error,
        if an error of this package ended the call early; None if the call completed.
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
    model: object, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> ModelExplanation:
    """Explain `call`, the model itself or one of its methods; see `torch_metal_attn.explain`."""
    name = type(model).__name__
    stopped = None
    # torch.compile never compiles a frame again that it first sees under a dispatch mode.
    with _layer_names(model) as layers, torch.compiler.set_stance("force_eager"), torch.no_grad():
        recorder = _Recorder(layers)
        try:
            with recorder, recorder.observe_copies():
                call(*arguments, **options)
        except Exception as error:
            if not _is_ours(error):
                raise
            stopped = f"{layers[-1]}: {error}"
    return ModelExplanation(name, tuple(recorder.rows), stopped)


def _is_ours(error: Exception) -> bool:
    """True if code of this package raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


@contextmanager
def _layer_names(model: object) -> Iterator[list[str]]:
    """A stack with the paths of the running modules. A module that raises stays on the stack."""
    stack = [type(model).__name__]
    hooks = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: stack.append(path)

    def leave(*_: Any) -> None:
        stack.pop()

    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if path:
            hooks.append(module.register_forward_pre_hook(enter(path), prepend=True))
            hooks.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder(TorchDispatchMode):
    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.rows: list[LayerCall] = []
        self._layers = layers
        self._weights: Tensor | None = None  # the last softmax, if it has three dimensions
        # For the next op of ours: copied tensors with their bytes, and remarks.
        self._copied: list[tuple[str, int]] = []
        self._notes: list[str] = []

    @contextmanager
    def observe_copies(self) -> Iterator[None]:
        def listener(name: str, tensor: Tensor | None) -> None:
            if tensor is None:
                self._notes.append(name)
                return
            words = f"{name}, whose strides were {tuple(tensor.stride())}"
            self._copied.append((words, tensor.numel() * tensor.element_size()))

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
        name = explained_name(func)
        if name is not None:
            return self._explain(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "aten":
            self._note(func._opname, args, kwargs, result)
        return result

    def _explain(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        explanation = explain_op(name, args, kwargs)
        by_name = bound(name, args, kwargs)
        tensors = [by_name["q"] if "q" in by_name else args[0]]
        tensors += [by_name.get("k_cache", by_name.get("k"))]
        shapes = tuple(tuple(x.shape) for x in tensors if isinstance(x, Tensor))
        copied, self._copied = self._copied, []
        notes, self._notes = tuple(self._notes), []
        cost = explanation.cost
        if cost is not None:
            cost += Cost(0, sum(2 * size for _, size in copied))
        copies_text = tuple(text for text, _ in copied)
        layer = self._layers[-1]
        self.rows.append(LayerCall(layer, name, shapes, explanation, "", cost, copies_text, notes))
        if explanation.refusal is not None:
            return _refused_result(name, by_name, explanation.refusal)
        return blank_result(func, args, kwargs)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name.startswith(_FUSED) and not name.endswith("backward"):
            shapes = tuple(tuple(a.shape) for a in args[:2] if isinstance(a, Tensor))
            words, cost = f"torch's {name}", None
            if name.startswith("_scaled_dot_product_"):
                words = f"torch's scaled_dot_product_attention ({name})"
                cost = _sdpa_cost(name, args, kwargs)
            self._add(name, shapes, words, cost)
        elif name == _SDPA_SOFTMAX:
            words = "torch's scaled_dot_product_attention, composed of products and a softmax"
            self._add(name, (tuple(args[0].shape),), words, None)
        elif name == _SOFTMAX and result.dim() == _ATTENTION_DIMS:
            self._add_softmax(result)
        elif name == _SOFTMAX:
            self._weights = result if result.dim() == 3 else None
        elif name in _PRODUCTS and self._weights is not None:
            if any(isinstance(a, Tensor) and _same_memory(a, self._weights) for a in args):
                self._add_softmax(self._weights)
                self._weights = None

    def _add_softmax(self, weights: Tensor) -> None:
        words = "a softmax of scores, as in eager attention"
        self._add(_SOFTMAX, (tuple(weights.shape),), words, None)

    def _add(self, op: str, shapes: Any, elsewhere: str, cost: Cost | None) -> None:
        self.rows.append(LayerCall(self._layers[-1], op, shapes, None, elsewhere, cost))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() > 0 and a.data_ptr() == b.data_ptr()


def _sdpa_cost(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cost | None:
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = (by_name.get(key) for key in ("query", "key", "value"))
    if not all(isinstance(t, Tensor) and t.dim() == _ATTENTION_DIMS for t in (q, k, v)):
        return None
    mask = by_name.get("attn_mask", by_name.get("attn_bias"))
    visible = {"causal": bool(by_name.get("is_causal")), "q_offset": 0, "attn_mask": mask}
    return costs.cost("flash_fwd", {"q": q, "k": k, "v": v} | visible)


def blank_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's result, filled with zeros. Arguments that the op returns are not changed."""
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


def _refused_result(name: str, by_name: dict[str, Any], refusal: str) -> tuple[Tensor, Tensor]:
    """A result for a refused attention, so that the model's other layers run too."""
    q, v = by_name.get("q"), by_name.get("v_cache", by_name.get("v"))
    if not name.endswith(("fwd", "decode", "step")) or not isinstance(q, Tensor) or q.dim() < 3:
        raise ValueError(refusal)
    columns = v.shape[-1] if isinstance(v, Tensor) and v.dim() else q.shape[-1]
    lse = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_zeros((*q.shape[:-1], columns)), q.new_zeros(lse, dtype=torch.float32)
