"""A case: one call of a public function as plain data. Its fields say how they are drawn."""

import dataclasses
import random
import types
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args

import torch

from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing.judge import Measure
from torch_metal_attn.testing.tensors import DTYPES, KINDS, Layout, Memory
from torch_metal_attn.wording import value_text

Draw = Callable[[random.Random, Any], Any]  # None leaves the default


@dataclass(frozen=True)
class Drawn:
    """How a field is drawn; see `field`."""

    draw: Draw
    share: float
    calls: Container[str] | None
    when: Callable[[Any], Any]
    varied: bool


def field(
    default: Any,
    draw: Draw = lambda r, case: None,
    *,
    share: float = 1.0,
    calls: Container[str] | None = None,
    when: Callable[[Any], Any] = lambda case: True,
    varied: bool = False,
    least: float | None = None,
    feature: Any = None,
) -> Any:
    """A field of a case, and how it is drawn.

    default: the value in the simplest case. share: the probability that the field is drawn;
    otherwise it is the default. calls: the calls that have the field; None for all. when: True if
    the field has a meaning next to the earlier fields. varied: no kernel is specialised for the
    value, so variations of a case draw it again, unless its share left it at the default. least:
    the call refuses smaller values. feature: the value for this option in `features.FEATURES`.
    """
    how = Drawn(draw, share, calls, when, varied)
    metadata = {"drawn": how, "least": least, "feature": feature}
    return dataclasses.field(default=default, metadata=metadata)


def call(*names: str) -> Any:
    """The field `call`. Repeated names are drawn more often. The first is the default."""
    how = Drawn(one_of(*names), 1.0, None, lambda case: True, False)
    return dataclasses.field(default=names[0], metadata={"drawn": how, "calls": names})


def one_of(*values: Any) -> Draw:
    return lambda r, case: r.choice(values)


def chance(share: float) -> Draw:
    return lambda r, case: r.random() < share


def layout(*layouts: Layout, **options: Any) -> Any:
    """A field for the memory layout of some tensors, see `tensors.Memory.place`."""
    return field((), one_of((), *layouts), **options)


def value_formats(**options: Any) -> Any:
    """A field for the format of a cache's values; "" for that of its keys."""
    return field(
        "",
        one_of(*FORMATS),
        share=0.3,
        when=lambda case: case.format and not case.values_in_keys,
        **options,
    )


def kinds() -> Any:
    """A field for the kind of values, one of `tensors.KINDS`."""
    return field("normal", one_of(*["normal"] * 6, *KINDS), varied=True)


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to run. written: the tensors in `memory` that it may write."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    judge: Callable[[Any], list[Measure]]
    memory: Memory
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One call. Fields are numbers, strings and tuples; their defaults make the simplest call.

    Attributes: call: the function. dtype: that of its operands. seed: that of the values.
        invalidated: the argument that is made wrong, and how, so that the call must be refused; see
        `invalidation`. strict: judge by the policy alone. Otherwise the bounds also allow the
        roundings that few or equal values show (docs/numerics.md). threads: repeat the call in this
        number of threads at once, and compare the bits. tiles: those of attention: "8x8", "TF32" if
        the GPU has it, or "" for the tiles that the dtype normally has.
    """

    call: str = ""
    dtype: str = field("float32", one_of(*DTYPES))
    seed: int = field(0, lambda r, case: r.randrange(2**31), varied=True)
    invalidated: str = ""
    strict: bool = False
    threads: int = 0
    tiles: str = ""

    # Documented exceptions of a call, in addition to those of every call.
    ALSO_RAISES: ClassVar[dict[str, tuple[type[Exception], ...]]] = {}

    # Reasons of `refused` that depend on values of tensors, which the host does not read on mps.
    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ()

    # OF_SEQUENCES: fields with an entry for each sequence, or with the number of sequences. SIZES:
    # groups of fields that shrink together.
    OF_SEQUENCES: ClassVar[tuple[str, ...]] = ()
    SIZES: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), cast(Any, field.type)
            if value is not field.default and not _fits(value, kind):
                words = str(kind).replace(" | ", " or ") if get_args(kind) else kind.__name__
                raise TypeError(f"{field.name} is {value_text(value)}; it must be of type {words}")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(
                f"dtype is {value_text(self.dtype)}; it must be the name of a dtype of torch"
            )

    def has(self, name: str) -> bool:
        """True if the field has a meaning for this call and these other fields."""
        how = self.__dataclass_fields__[name].metadata.get("drawn")
        return how is None or ((how.calls is None or self.call in how.calls) and how.when(self))

    def invalid_reason(self) -> str:
        """Why no call can be made from the fields; "" for drawn cases."""
        names = self.__dataclass_fields__["call"].metadata.get("calls", (self.call,))
        if self.call not in names:
            allowed = ", ".join(dict.fromkeys(names))
            return f"call is {value_text(self.call)}; it must be one of {allowed}"
        for name in self.fields():
            if not self.has(name):
                return f"{self.call} has no {name}, or not with the other fields"
        if self.invalidated and self.invalidated not in self.ways():
            return f"invalidated is {value_text(self.invalidated)}, which the call does not have"
        return next((why for why, holds in self.conflicts().items() if holds), "")

    def conflicts(self) -> dict[str, Any]:
        """Reasons why fields have no meaning together, and whether each holds."""
        return {}

    def refused(self) -> str:
        """Why the documentation says that the call must raise; "" if it must not."""
        if self.invalidated:
            return f"{self.invalidated} is wrong"
        return next((why for why, holds in self.illegal().items() if holds), "")

    def illegal(self) -> dict[str, Any]:
        """Reasons why the fields are illegal, and whether each holds."""
        return {}

    def ways(self) -> tuple[str, ...]:
        """The values that `invalidated` may have."""
        return ()

    def wrong(self) -> list[dict[str, Any]]:
        """Changes after which the call may have to be refused."""
        return []

    def fields(self) -> dict[str, Any]:
        """The fields that differ from the defaults, and the call."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default or field.name == "call"
        }

    def __str__(self) -> str:
        arguments = (f"{name}={value!r}" for name, value in self.fields().items())
        return f"{type(self).__name__}({', '.join(arguments)})"


def _fits(value: Any, kind: Any) -> bool:
    """True if a value has a field's type: a class, tuples of one, or `a | b` of these."""
    parts = get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if parts:
        as_many = isinstance(value, tuple) and (... in parts or len(value) == len(parts))
        return as_many and all(_fits(x, parts[0]) for x in value)
    return isinstance(value, (float, int) if kind is float else kind)


def with_metadata(family: type[Case], name: str) -> dict[str, Any]:
    """The `least` or `feature` of each field that has one, by the field's name."""
    fields = dataclasses.fields(family)
    return {f.name: f.metadata[name] for f in fields if f.metadata.get(name) is not None}


def drawn(family: type[Case]) -> dict[str, Drawn]:
    """How the drawn fields of a family are drawn, by name and in order."""
    fields = dataclasses.fields(family)
    return {f.name: f.metadata["drawn"] for f in fields if "drawn" in f.metadata}
