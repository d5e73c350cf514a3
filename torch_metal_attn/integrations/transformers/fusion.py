"""`enable(model, fuse_rope=True)`: the attention kernel rotates queries as it loads them.

transformers rotates q and k by `apply_rotary_pos_emb`, which the forward of an attention module
calls long before the attention function. A fused module gets a class whose forward is the same
code, but calls a function of this file instead. That function rotates k, because the cache holds
rotated keys, and leaves q to the kernel (see `unrotated`).
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from torch_metal_attn.integrations.transformers.packing import hidden
from torch_metal_attn.integrations.transformers.unrotated import Tables, Unrotated, rotated
from torch_metal_attn.reference import rotate
from torch_metal_attn.wording import with_article

_FUNCTION = "apply_rotary_pos_emb"
_RENAMING = "transformers.utils.deprecation"  # its decorator is on most forwards since 5.24
_POSITIONS = (3, 17, 101)  # of the tokens with which a rotation is tried out


def restore(model: nn.Module) -> None:
    """Undo the replacement of classes, here and in `latent`, in every module of `model`."""
    for module in model.modules():
        if own_class(module) is not type(module):
            module.__class__ = own_class(module)


def plan(model: PreTrainedModel) -> list[tuple[nn.Module, type]]:
    """The modules to fuse, with their new classes. Raises NotImplementedError."""
    modules = [(module, own_class(module)) for module in model.modules()]
    rotating = [(module, kind) for module, kind in modules if _rotations(kind)]
    where = f"fuse_rope=True for {type(model).__name__}"
    if not rotating:
        raise _refusal(f"{where}, which has no attention that calls {_FUNCTION}")
    for module, kind in rotating:
        if "forward" in vars(module):
            # accelerate adds such a forward if a model is spread over devices.
            text = f"{where}: {with_article(kind.__name__)} has a forward that is not its class's"
            raise _refusal(text, ", or fuse before hooks are added")
    kinds = {kind for _, kind in rotating}
    fused = {kind: fused_class(kind, _probe(model, kind, where)) for kind in kinds}
    return [(module, fused[kind]) for module, kind in rotating]


def _refusal(text: str, more: str = "") -> NotImplementedError:
    return NotImplementedError(f"{text}; use enable(model){more}")


class Replacement:
    """The first base of a class that replaces a module's class, which is its second base."""

    _metal_attn_original: type
    _metal_attn_factory: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle the original class, because pickle looks classes up by their names.
        return _bare, self._metal_attn_factory, self.__dict__


def _bare(make: Callable[..., type], *arguments: Any) -> Any:
    return object.__new__(make(*arguments))


def subclass_of(base: type, make: Callable[..., type], kind: type, *more: Any, **body: Any) -> type:
    """A subclass of `kind` with the attributes `body`. make(kind, *more) returns it again."""
    attributes = {"_metal_attn_original": kind, "_metal_attn_factory": (make, kind, *more)}
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (base, kind), body | attributes | names)


class _Fused(Replacement):
    """The base of fused classes."""


def own_class(module: nn.Module) -> type:
    kind: type = getattr(type(module), "_metal_attn_original", type(module))
    return kind


@functools.cache
def fused_class(kind: type, tables: Tables) -> type:
    """`kind` with a forward that does not rotate its queries."""
    forward = _undecorated(kind)
    assert forward is not None
    code = forward.__code__
    replaced: dict[str, Any] = {_FUNCTION: _key_rotation(kind.__name__, tables)}
    if "cat" in code.co_names:
        replaced["torch"] = _Torch()
    # Add to forward's globals: torch.compile looks names up in the module of a code object.
    prefix = f"_metal_attn_{kind.__name__}_{tables.repeats}_{tables.interleaved}_"
    forward.__globals__.update({prefix + name: value for name, value in replaced.items()})
    names = (prefix + name if name in replaced else name for name in code.co_names)
    code = code.replace(co_names=tuple(names))
    fused = _with_code(forward, code, forward.__closure__)
    fused.__annotations__, fused.__doc__ = forward.__annotations__, forward.__doc__
    fused.__qualname__ = forward.__qualname__
    forward = _decorated(kind.forward, fused)  # type: ignore[attr-defined]
    return subclass_of(_Fused, fused_class, kind, tables, forward=forward)


def _undecorated(kind: type) -> Any:
    """The forward of `kind` without decorators that rename arguments; None if others wrap it."""
    forward = kind.forward  # type: ignore[attr-defined]
    while hasattr(forward, "__wrapped__"):
        if forward.__globals__["__name__"] != _RENAMING:
            return None
        forward = forward.__wrapped__
    return forward


def _decorated(like: Any, function: Any) -> Any:
    """`function` with the decorators of `like`, whose closures hold the decorated function."""
    if not hasattr(like, "__wrapped__"):
        return function
    inner = _decorated(like.__wrapped__, function)
    closure = tuple(
        types.CellType(inner) if cell.cell_contents is like.__wrapped__ else cell
        for cell in like.__closure__
    )
    return functools.wraps(inner)(_with_code(like, like.__code__, closure))


def _with_code(like: Any, code: types.CodeType, closure: Any) -> types.FunctionType:
    function = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    function.__kwdefaults__ = like.__kwdefaults__
    return function


class _Torch:
    """`torch` for code that appends unrotated columns to the rotated columns of q."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def cat(tensors: Any, dim: int = 0) -> Tensor | Unrotated:
        if dim == -1 and len(tensors) == 2 and isinstance(tensors[0], Unrotated):
            return tensors[0].before(tensors[1])
        return torch.cat(tensors, dim=dim)


def _key_rotation(owner: str, tables: Tables) -> Callable[..., tuple[Unrotated, Tensor]]:
    def rotate_k(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Unrotated, Tensor]:
        if unsqueeze_dim != 1:
            raise _refusal(
                f"unsqueeze_dim={unsqueeze_dim} in {owner} with fuse_rope=True: the heads must be "
                "the second dimension of q"
            )
        cos, sin = tables.shortened(cos), tables.shortened(sin)
        return (
            Unrotated(q, cos, sin, tables.interleaved, owner),
            rotated(k, cos, sin, tables.interleaved),
        )

    return rotate_k


@functools.cache
def _rotations(kind: type) -> list[str]:
    """The functions whose names look like a rotation and that the forward of `kind` calls."""
    forward = inspect.unwrap(getattr(kind, "forward", None) or _rotations)
    code = getattr(forward, "__code__", None)
    names = getattr(code, "co_names", ())
    return [name for name in names if re.search(r"apply\w*(rotary|rope)", name)]


def _probe(model: PreTrainedModel, kind: type, where: str) -> Tables:
    """Find out how modules of `kind` rotate by calling their function on the model's tables."""
    where = f"{where}: {kind.__name__}"
    forward, names = _undecorated(kind), _rotations(kind)
    rotates = f"{where} rotates its queries"
    if names != [_FUNCTION] or forward is None:
        raise _refusal(f"{rotates} by {', '.join(names)}, which is not known")
    _check_uses(forward, where)
    function = forward.__globals__[_FUNCTION]
    arguments = list(inspect.signature(function).parameters)
    if arguments[:4] != ["q", "k", "cos", "sin"]:
        by = f"a function of {', '.join(arguments)}"
        raise _refusal(f"{rotates} by {by}, which is not known")
    try:
        with unset_fake_temporarily():
            forms = {_recognise(function, *tables) for tables in _tables_of(model, kind)}
    except Exception as error:
        raise _refusal(f"{where} could not be tried out ({error!r})") from error
    form = forms.pop() if len(forms) == 1 else None
    if form is None:
        raise _refusal(
            f"{rotates} neither by halves nor by pairs of columns, or with tables of a form that "
            "the kernel does not take"
        )
    return form


def _check_uses(forward: Callable[..., Any], where: str) -> None:
    """Refuse code that uses q between the rotation and the attention."""
    text = inspect.getsource(forward)
    call = re.search(rf"(\w+), \w+ = {_FUNCTION}\(", text)
    end = text.find("attention_interface(", call.end() if call else 0)
    if call is None or end < 0:
        raise _refusal(f"{where} calls {_FUNCTION} in an unknown way")
    query = call.group(1)
    for line in text[call.end() : end].splitlines()[1:]:
        appended = rf"\w+ = torch\.cat\(\({query}, \w+\), dim=-1\)"
        if re.search(rf"\b{query}\b", line) and not re.search(appended, line):
            raise _refusal(
                f"{where} uses its queries between rotation and attention ({line.strip()})"
            )


def _tables_of(model: PreTrainedModel, kind: type) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields cos and sin of a few positions, on the CPU, of every module with tables for `kind`."""
    for module in model.modules():
        cls = type(module)
        if cls.__module__ != kind.__module__ or not cls.__name__.endswith("RotaryEmbedding"):
            continue
        if any(map(hidden, module.buffers())):  # on meta or fake, so make the tables on the CPU
            with torch.device("cpu"):
                module = cls(module.config)
        device = next(module.buffers()).device
        positions = torch.tensor([_POSITIONS], device=device)
        if hasattr(module, "mrope_section"):
            positions = torch.stack([positions, positions * 2, positions * 3])
        x = torch.zeros(1, len(_POSITIONS), 1, device=device)
        options: list[dict[str, Any]] = [{}]
        if "layer_type" in inspect.signature(module.forward).parameters:
            kinds = getattr(module.config, "layer_types", None) or [None]
            options = [{"layer_type": layer_type} for layer_type in dict.fromkeys(kinds)]
        for option in options:
            cos, sin = module(x, positions, **option)
            yield cos.cpu().double(), sin.cpu().double()


def _recognise(function: Callable[..., Any], cos: Tensor, sin: Tensor) -> Tables | None:
    """How to read the tables so that `rotate` gives the results of `function`."""
    for repeats in ("halves", "pairs", "none"):
        for interleaved in (False, True):
            tables = Tables(repeats, interleaved)
            if _agrees(function, cos, sin, tables):
                return tables
    return None


def _agrees(function: Callable[..., Any], cos: Tensor, sin: Tensor, tables: Tables) -> bool:
    short = tables.shortened(cos), tables.shortened(sin)
    if tables.repeats != "none" and cos.shape[-1] % 2:
        return False
    rotary_dim = 2 * short[0].shape[-1]
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 1, 2, len(_POSITIONS), 2 * rotary_dim)
    x = torch.randn(sizes, generator=generator, device="cpu").double()
    # Heads that are rotated completely, and heads that are rotated in part if it supports them.
    for width in (rotary_dim, 2 * rotary_dim):
        q, k = x[..., :width]
        try:
            results = function(q, k, cos, sin)
        except RuntimeError:
            if width == rotary_dim:
                return False
            continue
        for actual, original in zip(results, (q, k), strict=True):
            expected = rotate(original, *short, tables.interleaved)
            if actual.shape != original.shape or not torch.allclose(
                actual.double(), expected, rtol=1e-5, atol=1e-5
            ):
                return False
    return True
