"""Runs a score_mod or mask_mod once on scalars without values, and records its ops.

As in torch's flex_attention, a function gets scalar tensors. Indexing a captured tensor with these
scalars is recorded as an op. Values that depend only on captured tensors are computed immediately.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torch_metal_attn.call.arguments import refuse_dtensor
from torch_metal_attn.flex.captured import Captured, Part, Row, loaded_dtype
from torch_metal_attn.flex.composed import SLOT, Composed, decomposition
from torch_metal_attn.flex.function import Traced
from torch_metal_attn.flex.graph import DTYPE_NAMES, DTYPES, Graph, Node
from torch_metal_attn.flex.table import COMPARISONS, LOGICAL, OPS
from torch_metal_attn.wording import count_text, type_text

# The most elements of a captured row in a pointwise op, as each element is a load.
MOST_ELEMENTS = 32

_of_transform = torch._C._functorch.is_functorch_wrapped_tensor
POSITIONS = ("b", "h", "q_idx", "kv_idx")

# aten's names of ops, where they differ from the table's.
_NAMES = {
    "max": "maximum",
    "min": "minimum",
    "true_divide": "div",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
}
_FILLED = {"ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}
_SUMS = ("sum", "mean", "dot")
_CONVERSIONS = frozenset(("__bool__", "__int__", "__float__", "__index__", "item", "tolist"))


def trace(
    name: str,
    function: Callable[..., Any],
    graph: Graph,
    captured: Captured,
    device: torch.device,
) -> Node:
    """The graph of a "score_mod" or "mask_mod", or an error that shows the user's line."""
    tracer = Tracer(name, function, graph, captured, device)
    dtypes = dict.fromkeys(POSITIONS, torch.int32)
    if name == "score_mod":
        dtypes = {"score": torch.float32} | dtypes
    try:
        inspect.signature(function).bind(*dtypes)
    except TypeError:
        raise TypeError(f"{name} must be a function of ({', '.join(dtypes)})") from None
    inputs = [tracer.scalar(graph.node("input", (), dtype, n)) for n, dtype in dtypes.items()]
    with tracer, _Indexing(tracer):
        result = function(*inputs)
    return tracer.result(result, torch.float32 if name == "score_mod" else torch.bool)


class Tracer(Traced, TorchDispatchMode):
    """Records the ops on its scalars as nodes, and the tensors that these index in `captured`."""

    # Ops that return the value of their argument, possibly in another dtype or memory.
    same_value = frozenset(
        "_to_copy clone alias lift_fresh lift_fresh_copy view reshape squeeze expand to "
        "convert_element_type real".split()
    )

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        graph: Graph,
        captured: Captured,
        device: torch.device,
    ) -> None:
        super().__init__(name, function)
        self.graph = graph
        self.captured = captured
        self.device = device
        # By id. The tuples keep the tensors alive, so that no other tensor gets the same id.
        self.traced: dict[int, tuple[Tensor, Node | Part | Row]] = {}
        self.constants: dict[int, Tensor] = {}

    def scalar(self, node: Node) -> Tensor:
        return self.known(torch.empty((), dtype=node.dtype, device="meta"), node)

    def known(self, tensor: Tensor, value: Node | Part | Row) -> Tensor:
        self.traced[id(tensor)] = tensor, value
        return tensor

    def value(self, tensor: object) -> Node | Part | Row | None:
        return self.traced[id(tensor)][1] if id(tensor) in self.traced else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        name = func._schema.name.removeprefix("aten::").removeprefix("prims::")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.unsupported(name, "every score would get the same random number")
        if not any(id(x) in self.traced for x in tensors):
            return self.computed(func, args, kwargs, tensors)
        if name == "prim::device":
            # A scalar inside a graph of torch.compile is a FakeTensor.
            return torch.device("meta")
        if name in ("_local_scalar_dense", "is_nonzero", "item"):
            raise self.control_flow()
        if name == "index":
            return self.indexed(args[0], list(args[1]))
        result = self.viewed(name, func, args, kwargs)
        if result is None:
            result = self.row_op(name, func, args, kwargs, tensors)
        if result is not None:
            return result
        if name in _FILLED or name in ("full_like", "new_full"):
            return self.filled(name, func, args, kwargs)
        in_place = name.endswith("_") and not name.endswith("__")
        node = self.applied(name[:-1] if in_place else name, func, args, kwargs)
        if in_place:
            if id(args[0]) not in self.traced or node.dtype != args[0].dtype:
                raise self.unsupported(name, "it would write into a captured tensor")
            return self.known(args[0], node)
        return tuple(map(self.scalar, node)) if isinstance(node, list) else self.scalar(node)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run an op that depends on neither the score nor a position."""
        is_constant = all(id(x) in self.constants for x in tensors)
        self.captured.depends_on_values |= not is_constant
        if getattr(kwargs.get("device"), "type", None) == "meta":
            # The device of a scalar is replaced by the device of the call.
            kwargs = kwargs | {"device": self.device}
        if not is_constant and func._schema.is_mutable:
            raise self.unsupported(func._schema.name, "it would write into a captured tensor")
        result = func(*args, **kwargs)
        if is_constant and isinstance(result, Tensor):
            self.constants[id(result)] = result
        return result

    def filled(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        values = self.arguments(func, args, kwargs)
        shape = args[0].shape if name.endswith("_like") else tuple(values["size"])
        if tuple(shape) != ():
            raise self.unsupported(name, "only scalars can be made of scalars")
        dtype = values.get("dtype") or args[0].dtype
        value = _FILLED.get(name, values.get("fill_value"))
        if isinstance(value, torch.SymInt | torch.SymFloat):
            self.check_dtype("a constant", dtype)
            return self.scalar(self.graph.cast(self.operand(value), dtype))
        return self.scalar(self.constant(value, dtype))

    def constant(self, value: Any, dtype: torch.dtype) -> Node:
        self.check_dtype("a constant", dtype)
        if dtype == torch.int32 and not _fits_int32(value):
            raise ValueError(
                f"{self.name} fills an int32 with {value}, which does not fit int32{self.place()}"
            )
        return self.graph.constant(value, dtype)

    def arguments(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [a.name for a in func._schema.arguments]
        return dict(zip(names, args, strict=False)) | kwargs

    def applied(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        values = self.arguments(func, args, kwargs)
        name = _NAMES.get(name, name)
        if name in self.same_value:
            return self.same(name, func, args, kwargs)
        if name == "clamp":
            low, high = values.get("min"), values.get("max")
            node = self.operand(values["self"])
            result = self.dtype_of(func, args, kwargs)
            for limit, op in ((low, "clamp_min"), (high, "clamp_max")):
                if limit is not None:
                    node = self.row(op, [node, self.operand(limit)], result)
            return node
        operands = [v for k, v in values.items() if k not in ("alpha", "rounding_mode", "dtype")]
        alpha, rounding = values.get("alpha", 1), values.get("rounding_mode")
        if name == "rsub":
            name, operands = "sub", operands[::-1]
            if alpha != 1:
                raise self.unsupported(name, f"alpha is {alpha}; multiply by it instead")
        if name == "div" and rounding is not None:
            name = {"floor": "floor_divide", "trunc": "truncating_divide"}[rounding]
        if name == "masked_fill":
            mask, node = self.operand(values["mask"]), self.operand(values["self"])
            value = self.graph.cast(self.operand(values["value"]), node.dtype)
            return self.row("where", [mask, value, node], node.dtype)
        if name == "fill":
            return self.graph.cast(self.operand(values["value"]), values["self"].dtype)
        if name not in OPS or len(operands) != _arity(name):
            return self.composed(func, name, args, kwargs)
        nodes = [self.operand(x) for x in operands]
        if name in COMPARISONS:
            return self.row(name, nodes, self.common_dtype(operands))
        if name in LOGICAL:
            return self.row(name, nodes, torch.bool)
        result = self.dtype_of(func, args, kwargs)
        if alpha != 1:
            nodes[1] = self.row("mul", [nodes[1], self.operand(alpha)], result)
        if name == "pow":
            return self.power(nodes[0], nodes[1], result)
        return self.row(name, nodes, result)

    def composed(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The nodes of an op that is not in the table, from a trace of its decomposition."""
        if func._schema.is_mutable:  # use the op that is not in place
            func = getattr(getattr(torch.ops.aten, name), func._overloadname)
        refusal = self.unsupported(func._schema.name.removeprefix("aten::"))
        body = decomposition(func, name)
        if body is None:
            raise refusal
        flat, spec = tree_flatten((args, kwargs))
        nodes = [self.operand(x) for x in flat if isinstance(x, Tensor)]
        constants = tuple(SLOT if isinstance(x, Tensor) else x for x in flat)
        scalars = iter(nodes)
        flat = [self.scalar(next(scalars)) if x is SLOT else x for x in constants]
        args, kwargs = tree_unflatten(flat, spec)
        try:
            with self:
                results = body(*args, **kwargs)
        except (NotImplementedError, RuntimeError, ValueError):
            raise refusal from None

        def composed_node(result: Tensor, item: int | None) -> Node:
            node = self.operand(result)
            if not node.dtype.is_floating_point:
                return node
            value = Composed(func, constants, spec, item, node)
            return self.graph.node("composed", nodes, node.dtype, value)

        if isinstance(results, Tensor):
            return composed_node(results, None)
        return [composed_node(result, item) for item, result in enumerate(results)]

    def common_dtype(self, operands: list[Any]) -> torch.dtype:
        """The dtype in which torch compares scalars and numbers."""
        dtypes = [x.dtype for x in operands if isinstance(x, Tensor)]
        common = functools.reduce(torch.promote_types, dtypes)
        for x in operands:
            if not isinstance(x, Tensor):
                scalar = torch.empty((), dtype=common, device="meta")
                common = torch.result_type(scalar, _any_value(x))
        return _wide(common, operands)

    def row(self, name: str, nodes: list[Node], common: torch.dtype) -> Node:
        """An op of the table. common: the dtype that it computes in."""
        result = torch.bool if name in COMPARISONS or name in LOGICAL else common
        self.check_dtype(f"the result of {name}", common)
        if OPS[name].text_in(common) is None:
            raise self.unsupported(name, f"not in {common}")
        first = nodes[:1] if name == "where" else []
        condition = [self.graph.cast(x, torch.bool) for x in first]
        rest = [self.graph.cast(x, common) for x in nodes[len(first) :]]
        return self.graph.node(name, condition + rest, result)

    def power(self, base: Node, exponent: Node, result: torch.dtype) -> Node:
        """pow. Squares (as in PyTorch) and cubes become products; pow has no text for integers."""
        number = exponent.value if exponent.op == "constant" else None
        if number in (2, 3):
            square = self.row("mul", [base, base], result)
            return square if number == 2 else self.row("mul", [square, base], result)
        return self.row("pow", [base, exponent], result)

    def same(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Node:
        node = self.operand(args[0])
        with_shape = self.on_meta(func, args, kwargs)
        if with_shape.shape != ():
            raise self.unsupported(name, f"its result has shape {tuple(with_shape.shape)}")
        self.check_dtype(f"the result of {name}", with_shape.dtype)
        return self.graph.cast(node, with_shape.dtype)

    def on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        numbers = tree_flatten((args, kwargs))[0]

        def meta(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return _any_value(x)
            return torch.empty((), dtype=_wide(x.dtype, numbers), device="meta")

        kwargs = {name: x for name, x in kwargs.items() if name != "device"}  # the result is meta
        with torch.no_grad():
            result: Tensor = func(*tree_map(meta, args), **tree_map(meta, kwargs))
        return result

    def dtype_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype:
        result = self.on_meta(func, args, kwargs)
        if not isinstance(result, Tensor):
            raise self.unsupported(func._schema.name.removeprefix("aten::"))
        return result.dtype

    def operand(self, x: Any) -> Node:
        """The node of an argument: a traced scalar, a number, or a captured scalar."""
        if isinstance(x, torch.SymInt | torch.SymFloat):
            return self.symbolic_number(x)
        if not isinstance(x, Tensor):
            if not isinstance(x, bool | int | float):
                raise self.unsupported(type(x).__name__)
            integer = torch.int32 if _fits_int32(x) else torch.int64
            number = torch.float32 if isinstance(x, float) else integer
            return self.graph.constant(x, torch.bool if isinstance(x, bool) else number)
        value = self.value(x)
        if isinstance(value, Node):
            return value
        if isinstance(value, Part | Row) or x.dim() > 0:
            row = f" or a row of up to {MOST_ELEMENTS} elements" * (x.dim() == 1)
            what = value.name if isinstance(value, Part) else self.name_of(x)
            raise ValueError(
                f"{self.name} computes with {what}, which has shape {tuple(x.shape)}: index it "
                f"until a scalar{row} is left{self.place()}"
            )
        if id(x) in self.constants:
            return self.constant(x.item(), x.dtype)
        return self.load(self.capture(x))

    def symbolic_number(self, x: torch.SymInt | torch.SymFloat) -> Node:
        """A symbolic number of torch.compile becomes a captured tensor."""
        name = f"the number {x.node.expr}"
        if name not in self.captured.numbers:
            dtype = torch.int64 if isinstance(x, torch.SymInt) else torch.float32
            one = torch.ones((), dtype=dtype, device=self.device)
            # torch.compile does not specialise a product on a float's value.
            self.captured.numbers[name] = torch.mul(one, x)  # type: ignore[arg-type]
        return self.load(Part(self.captured.numbers[name], name))

    def capture(self, tensor: Tensor) -> Part:
        name = self.name_of(tensor)
        refuse_dtensor(name, tensor)
        if tensor.device != self.device:
            raise ValueError(
                f"{self.name} captures {name}, which is on {tensor.device}, and query is on "
                f"{self.device}; they must be on one device{self.place()}"
            )
        if loaded_dtype(tensor) not in DTYPES:
            raise NotImplementedError(
                f"{self.name} captures {name}, which has dtype {tensor.dtype}; it must be "
                f"{DTYPE_NAMES}{self.place()}"
            )
        if tensor.numel() == 0:
            raise ValueError(f"{self.name} indexes {name}, which is empty{self.place()}")
        return Part(tensor, name)

    def load(self, part: Part) -> Node:
        number = self.captured.number(part.tensor, part.name, part.source)
        return self.graph.node("load", part.indices, loaded_dtype(part.tensor), number)

    def part(self, part: Part) -> Tensor:
        """The scalar of a fully indexed part; else a meta tensor of dimensions without index."""
        if part.indices and len(part.indices) == part.tensor.dim():
            return self.scalar(self.load(part))
        return self.known(part.rest(), part)

    def viewed(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A view of a part, such as its transpose, or a selection; None for other ops."""
        first, returns = args[0], func._schema.returns
        value = self.value(first)
        if name in ("index_select", "embedding"):
            index = args[2 if name == "index_select" else 1]
            one = self.value(index)
            nodes = one.elements if isinstance(one, Row) else (one,)
            if isinstance(value, Node | Row) or len(nodes) != 1 or not isinstance(nodes[0], Node):
                return None
            part = value or self.capture(first)
            n, dim = len(part.indices), args[1] % first.dim() if name == "index_select" else 0
            part = self.at(part.view(part.tensor.movedim(n + dim, n)), [self.scalar(nodes[0])])
            if name == "index_select" or isinstance(one, Row):
                part = part.view(part.tensor.unsqueeze(n + 1 + dim))
        elif isinstance(value, Part) and len(returns) == 1 and returns[0].alias_info is not None:
            views = func(first, *args[1:], **kwargs)
            if any(x.dtype != first.dtype for x in tree_flatten(views)[0]):
                raise self.unsupported(name, "it would read the bits as another dtype")
            self.captured.depends_on_values = True
            return tree_map(lambda x: self.part(value.as_in(x)), views)
        elif isinstance(value, Node | Row) and name in ("view", "squeeze", "unsqueeze"):
            nodes = value.elements if isinstance(value, Row) else (value,)
            shape = func(torch.empty(first.shape, device="meta"), *args[1:]).shape
            if not shape:
                return self.scalar(nodes[0])
            return self.known(torch.empty(shape, dtype=first.dtype, device="meta"), Row(nodes))
        else:
            return None
        self.captured.depends_on_values = True
        return self.part(part)

    def at(self, part: Part, indices: list[Any]) -> Part:
        nodes = [self.operand(i) for i in indices]
        for node in nodes:
            if node.dtype not in (torch.int32, torch.int64):
                raise TypeError(
                    f"{self.name} indexes {part.name} with {node.dtype}; an index must be int32 or "
                    f"int64{self.place()}"
                )
        nodes = [*part.indices, *nodes]
        if len(nodes) > part.tensor.dim():
            raise IndexError(
                f"{self.name} has {len(nodes)} indices for {part.name}, which has "
                f"{count_text(part.tensor.dim(), 'dimension')}{self.place()}"
            )
        return replace(part, indices=tuple(nodes))

    def indexed(self, tensor: Tensor, indices: list[Any]) -> Tensor:
        value = self.value(tensor)
        if isinstance(value, Node | Row) or any(not isinstance(i, Tensor | int) for i in indices):
            raise self.unsupported("index", "scalars index the leading dimensions of a tensor")
        return self.part(self.at(value or self.capture(tensor), indices))

    def result(self, result: object, dtype: torch.dtype) -> Node:
        if not isinstance(result, Tensor):
            raise TypeError(f"{self.name} returns {type_text(result)}; it must be a tensor")
        value = self.value(result)
        if result.shape != () or isinstance(value, Part | Row):
            raise ValueError(
                f"{self.name} returns a tensor of shape {tuple(result.shape)}; it must be a scalar"
            )
        if result.dtype != dtype:
            more = "return it with .to(score.dtype)" if dtype == torch.float32 else "compare it"
            raise TypeError(
                f"{self.name} returns {result.dtype}; it must be {dtype}, "
                f"{'that of score' if dtype == torch.float32 else 'True where a key is seen'}: "
                f"{more}"
            )
        return self.operand(result)

    def row_op(
        self, name: str, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Tensor | None:
        """A pointwise op or a sum on captured rows; None for other ops."""
        if name not in _SUMS and torch.Tag.pointwise not in func.tags:
            return None
        rows = [x for x in tensors if x.dim() > 0]
        if len({x.shape for x in rows}) > 1 or any(x.numel() > MOST_ELEMENTS for x in rows):
            return None  # the caller raises
        if name == "dot":
            with self:
                product: Tensor = (args[0] * args[1]).sum()
            return product
        if name in _SUMS:
            return self.summed(name, self.arguments(func, args, kwargs))
        if not rows:
            return None
        nodes = {id(x): self.elements(x) for x in rows}
        results = []
        for i in range(rows[0].numel()):

            def at(x: Any, i: int = i) -> Any:
                return self.scalar(nodes[id(x)][i]) if id(x) in nodes else x

            results.append(self.applied(name, func, tree_map(at, args), tree_map(at, kwargs)))
        result = torch.empty(rows[0].shape, dtype=results[0].dtype, device="meta")
        return self.known(result, Row(tuple(results)))

    def elements(self, x: Tensor) -> tuple[Node, ...]:
        value = self.value(x)
        if isinstance(value, Row):
            return value.elements
        if isinstance(value, Node):
            return (value,)
        part = self.capture(x) if value is None else value
        places = itertools.product(*(range(size) for size in x.shape))
        indices = [tuple(self.operand(i) for i in place) for place in places]
        return tuple(self.load(replace(part, indices=(*part.indices, *each))) for each in indices)

    def summed(self, name: str, values: dict[str, Any]) -> Tensor:
        """The sum or mean of all elements, in float32 or int64 as in PyTorch."""
        x = values["self"]
        dims = values.get("dim")
        if x.dim() > 0 and (values.get("keepdim") or (dims and len(dims) < x.dim())):
            raise self.unsupported(name, "only sums over all dimensions of a row are supported")
        floating = x.dtype.is_floating_point
        if name == "mean" and not floating:
            raise self.unsupported(name, f"not in {x.dtype}")
        common = torch.float32 if floating else torch.int64
        if x.numel() == 0:
            raise self.unsupported(name, "it has no elements")
        first, *others = self.elements(x)
        node = self.graph.cast(first, common)
        for other in others:
            node = self.row("add", [node, other], common)
        if name == "mean":
            node = self.row("div", [node, self.operand(1 + len(others))], common)
        dtype = values.get("dtype") or (x.dtype if floating else common)
        return self.scalar(self.graph.cast(node, dtype))


def _fits_int32(number: Any) -> bool:
    return -(2**31) <= number < 2**31


def _any_value(x: Any) -> Any:
    """A constant of the type of a symbolic number; other values are returned unchanged."""
    return 1 if isinstance(x, torch.SymInt) else 1.0 if isinstance(x, torch.SymFloat) else x


def _wide(dtype: torch.dtype, operands: Sequence[Any]) -> torch.dtype:
    """`dtype`, or int64 if it is int32 and a number may not fit, so that no position wraps."""
    numbers = [x for x in operands if isinstance(x, int) and not isinstance(x, bool)]
    wide = any(isinstance(x, torch.SymInt) for x in operands)
    wide = wide or not all(map(_fits_int32, numbers))
    return torch.int64 if dtype == torch.int32 and wide else dtype


def _arity(name: str) -> int:
    row = OPS[name]
    return len(set(re.findall(r"\{\d\}", row.floating or row.integer or row.boolean or "")))


class _Indexing(TorchFunctionMode):
    """Records `captured[q_idx]` as an op; PyTorch itself would read the value of the index."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = tree_flatten((args, kwargs))[0]
        name = getattr(func, "__name__", "an op")
        if func is Tensor.__getitem__:
            tensor, index = args
            indices = list(index) if isinstance(index, tuple | list) else [index]
            scalars = [self.tracer.value(x) for x in indices]
            plain = not any(scalars) and any(not isinstance(x, Tensor | int) for x in indices)
            if any(scalars) or (self.tracer.value(tensor) is not None and not plain):
                return self.tracer.indexed(tensor, indices)
        elif name in _CONVERSIONS and self.tracer.value(args[0]) is not None:
            raise self.tracer.control_flow()
        elif not any(self.tracer.value(x) is not None for x in arguments):
            # This includes functions that dispatch no op, such as tolist().
            self.tracer.captured.depends_on_values = True
        if any(isinstance(x, Tensor) and _of_transform(x) for x in arguments):
            raise self.tracer.unsupported(
                name, "torch.func tensors support only indexing with scalars"
            )
        return func(*args, **(kwargs or {}))
