"""Rules for types, over clang's syntax tree of the shader in its host form.

The tree is clang's JSON. It contains templates as written and each instantiation, so a rule for
dependent types sees the types that the kernels use.
"""

import bisect
import json
import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..build import in_shim
from ..diagnostics import in_metal
from ..metal.lexer import MARKER


class Finding(NamedTuple):
    """One place in a shader that breaks a rule."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


Node = dict[str, Any]
Message = tuple[str, str]  # rule, message

FUNCTIONS = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl"}
VARIABLES = {"VarDecl", "ParmVarDecl", "FieldDecl"}
ALIASES = {"TypedefDecl", "TypeAliasDecl"}
CASTS = {"CStyleCastExpr", "CXXReinterpretCastExpr", "CXXStaticCastExpr", "CXXConstCastExpr"}
CONVERSIONS = CASTS | {"ImplicitCastExpr", "CXXFunctionalCastExpr"}
CALLS = {"CallExpr", "CXXMemberCallExpr"}
ADDRESS_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")
FUNCTION_POINTER = re.compile(r"\([*&]+[^()]*\)\s*\(")
SCALAR_OR_VECTOR = re.compile(
    r"ext_vector_type|\b(?:packed_)?(?:bool|u?char|u?short|u?int|u?long|unsigned|half|bfloat|float"
    r"|_Float16|__bf16)(?:[234]|\d+_t)?\b"
)
STRUCT_CALLS = tuple(f"::metal::__{name}" for name in ("read", "target"))
FLOATS = {"_Float16": "half", "__bf16": "bfloat", "float": "float", "double": "double"}
FLOAT = re.compile(r"\b(_Float16|__bf16|float|double)\b")


@dataclass
class HostText:
    """The text that clang parsed, and the file and line of each offset in it."""

    text: str

    def __post_init__(self) -> None:
        self._marks = list(MARKER.finditer(self.text))
        self._starts = [mark.end() + 1 for mark in self._marks]

    def place(self, offset: int) -> tuple[str, int] | None:
        """File and line; None in the simulator's headers and in text that it added."""
        at = bisect.bisect_right(self._starts, offset) - 1
        if at < 0:
            return None
        mark = self._marks[at]
        file = mark.group(2) or ""
        if in_shim(file):
            return None
        return file, int(mark.group(1)) + self.text.count("\n", self._starts[at], offset)


@dataclass
class Visit:
    """A node of the tree, during a walk."""

    node: Node
    parent: Node
    function: Node | None
    host: HostText

    @property
    def kind(self) -> str:
        return str(self.node.get("kind"))

    @property
    def type(self) -> str:
        return _type(self.node)

    def written(self, end: int | None = None) -> str:
        """The node's text up to `end`, with a preceding `thread`, which clang does not see."""
        span = self.node.get("range", {})
        begin, last = _offset(span.get("begin")), _offset(span.get("end"))
        if begin is None or last is None:
            return ""
        thread = re.search(r"\bthread\s+\Z", self.host.text[max(0, begin - 80) : begin])
        return (thread.group() if thread else "") + self.host.text[begin : end or last + 1]


def check_tree(tree: bytes, host: HostText, metal_names: AbstractSet[str]) -> Iterator[Finding]:
    """Findings in clang's JSON tree of `host`. metal_names: the names in namespace metal."""
    # Declarations without a place are clang's or the simulator's.
    declarations = [node for node in json.loads(tree).get("inner", []) if _place(node, host)]
    for node in declarations:
        # The id marks a method defined outside of its class, and a specialised template of Metal.
        if node.get("name") in metal_names and "parentDeclContextId" not in node:
            message = f"`{node['name']}` is also a name of namespace metal: a call may find either"
            yield from _finding(node, host, "metal-name", message)
    visits = [visit for node in declarations for visit in _walk(node, host)]
    for visit in visits:
        for rule in TREE_RULES.get(visit.node.get("kind"), ()):
            for name, message in rule(visit):
                yield from _finding(visit.node, host, name, message)
    for node, name, message in recursion(visits):
        yield from _finding(node, host, name, message)


def lambdas(visit: Visit) -> Iterator[Message]:
    yield "lambda", "lambdas are not in Metal 3.1: write a function"


def function_pointers(visit: Visit) -> Iterator[Message]:
    declared = visit.kind in VARIABLES and FUNCTION_POINTER.search(visit.type)
    callee = visit.parent.get("inner", [None])[0] is visit.node
    converted = visit.node.get("castKind") == "FunctionToPointerDecay" and not (
        callee and str(visit.parent.get("kind")).endswith("CallExpr")
    )
    if declared or converted:
        yield "function-pointer", "pointers and references to functions are not in Metal"


def static_locals(visit: Visit) -> Iterator[Message]:
    is_static = visit.node.get("storageClass") == "static"
    if is_static and visit.parent.get("kind") == "DeclStmt":
        yield "static-local", f"local variable `{visit.node.get('name')}` cannot be static"


def globals_are_constant(visit: Visit) -> Iterator[Message]:
    if visit.function or visit.parent.get("kind") == "DeclStmt":
        return
    if "__constant" not in visit.type and "::metal::__in_constant" not in visit.written():
        name = visit.node.get("name")
        yield "mutable-global", f"program-scope variable `{name}` must be in `constant` memory"


def address_spaces(visit: Visit) -> Iterator[Message]:
    """Every `*` and `&` needs an address space, which may be `thread`."""
    if visit.node.get("isImplicit") or FUNCTION_POINTER.search(visit.type):
        return
    if visit.kind in VARIABLES | FUNCTIONS:
        written = visit.written(_offset(visit.node.get("loc")))
    elif visit.kind in CASTS:
        written = _cast_target(visit.written())
    else:
        written = visit.written()
    written = _declarator(written)
    pointers = len(re.findall(r"\*|&&?", written))
    if visit.kind in VARIABLES:
        # `T *a, *b` has two stars, but each variable is one pointer.
        levels = len(re.findall(r"\*|&&?", _without_arguments(visit.type)))
        pointers = min(pointers, levels)
    missing = pointers - len(ADDRESS_SPACE.findall(written))
    if missing > 0:
        text = " ".join(written.split())
        pointer_references = len(re.findall(r"\*\s*&", written))
        rule = "address-space" if missing > pointer_references else "pointer-reference"
        yield rule, f"`{text}` has a pointer or reference without an address space"


def address_space_casts(visit: Visit) -> Iterator[Message]:
    if visit.node.get("castKind") == "AddressSpaceConversion":
        if "__msl_threadgroup_memory" not in visit.written():  # the host form of a variable
            yield "address-space-cast", f"conversion to `{visit.type}` changes the address space"


def implicit_floats(visit: Visit) -> Iterator[Message]:
    """half, bfloat and float may mix only through an explicit cast."""
    if visit.kind == "ImplicitCastExpr" and visit.node.get("castKind") == "FloatingCast":
        if visit.node.get("isPartOfExplicitCast"):
            return
        source, target = _float(_type(visit.node["inner"][0])), _float(visit.type)
    elif visit.kind == "CompoundAssignOperator":
        source, target = _float(visit.type), _float(_type({"type": visit.node["computeLHSType"]}))
    else:
        return
    if source and target and source != target:
        yield "implicit-float", f"implicit conversion from {source} to {target}: write a cast"


def struct_copies(visit: Visit) -> Iterator[Message]:
    """A struct that is read or stored as a whole, by a call that the rewriter added."""
    if not visit.written().startswith(STRUCT_CALLS):
        return
    copied = _type(visit.node["inner"][1])
    known = "dependent" not in visit.type and not visit.type.endswith("*")
    if known and not SCALAR_OR_VECTOR.search(copied):
        yield "struct-copy", f"copy of a whole `{copied}` between address spaces: copy its fields"


def temporaries(visit: Visit) -> Iterator[Message]:
    """Class temporaries as arguments by reference, which macOS 27 may refuse (mlx#4533)."""
    of_class = not SCALAR_OR_VECTOR.search(_without_arguments(visit.type))
    if of_class and visit.parent.get("kind") in CALLS:
        yield "temporary", f"a reference binds to this `{visit.type}`: give it a name first"


def recursion(visits: list[Visit]) -> Iterator[tuple[Node, str, str]]:
    """Functions that call themselves, directly or through other functions."""
    canonical: dict[str, str] = {}  # id of a declaration: id of its function's first declaration
    functions: dict[str, Node] = {}
    for visit in visits:
        if visit.kind in FUNCTIONS:
            first = str(visit.node.get("previousDecl") or visit.node["id"])
            first = canonical.get(first, first)
            canonical[visit.node["id"]] = first
            functions.setdefault(first, visit.node)
    calls: dict[str, set[str]] = {}
    for visit in visits:
        reference = visit.node.get("referencedDecl", {})
        callee = str(visit.node.get("referencedMemberDecl") or reference.get("id"))
        if visit.function and callee in canonical:
            caller = canonical[visit.function["id"]]
            calls.setdefault(caller, set()).add(canonical[callee])
    for start in calls:
        reached: set[str] = set()
        pending = list(calls[start])
        while pending:
            function = pending.pop()
            if function not in reached:
                reached.add(function)
                pending += calls.get(function, ())
        if start in reached:
            node = functions[start]
            yield node, "recursion", f"function `{node.get('name')}` calls itself"


Rule = Callable[[Visit], Iterator[Message]]
# A tree has a quarter of a million nodes, so each rule is called for its kinds of node only.
_KINDS: list[tuple[Rule, set[str]]] = [
    (lambdas, {"LambdaExpr"}),
    (function_pointers, VARIABLES | CONVERSIONS),
    (static_locals, {"VarDecl"}),
    (globals_are_constant, {"VarDecl"}),
    (address_spaces, VARIABLES | FUNCTIONS | ALIASES | CASTS),
    (address_space_casts, CONVERSIONS),
    (implicit_floats, {"ImplicitCastExpr", "CompoundAssignOperator"}),
    (struct_copies, {"CallExpr"}),
    (temporaries, {"MaterializeTemporaryExpr"}),
]
TREE_RULES: dict[Any, list[Rule]] = {
    kind: [rule for rule, kinds in _KINDS if kind in kinds]
    for kind in set().union(*(kinds for _, kinds in _KINDS))
}


def _walk(declaration: Node, host: HostText) -> Iterator[Visit]:
    """Every node of a declaration that a rule or `recursion` needs, parents first."""
    stack: list[tuple[Node, Node, Node | None]] = [(declaration, {}, None)]
    while stack:
        node, parent, function = stack.pop()
        kind = node.get("kind")
        if kind in TREE_RULES or "referencedDecl" in node or "referencedMemberDecl" in node:
            yield Visit(node, parent, function, host)
        if kind in FUNCTIONS:
            function = node
        if "inner" in node:
            stack += [(child, node, function) for child in reversed(node["inner"]) if child]


def _finding(node: Node, host: HostText, rule: str, message: str) -> Iterator[Finding]:
    place = _place(node, host)
    if place:
        yield Finding(*place, rule, in_metal(message))


def _place(node: Node, host: HostText) -> tuple[str, int] | None:
    offset = _offset(node.get("loc")) or _offset(node.get("range", {}).get("begin"))
    return None if offset is None else host.place(offset)


def _offset(location: Any) -> int | None:
    """The offset in the parsed text. For a macro, such as an address space, where it is used."""
    if not location:
        return None
    offset = location.get("expansionLoc", location).get("offset")
    return None if offset is None else int(offset)


def _type(node: Node) -> str:
    types = node.get("type", {})
    return str(types.get("desugaredQualType") or types.get("qualType") or "")


def _float(type_name: str) -> str | None:
    match = FLOAT.search(type_name)
    return FLOATS[match.group()] if match else None


def _declarator(text: str) -> str:
    """The last declaration in `text`, less its expressions, in which a `*` would multiply."""
    last = re.split(r"[{};]", text)[-1]
    without = re.sub(r"\[[^\[\]]*\]|\bdecltype\s*\(.*\)", "", last, flags=re.S)
    return _without_arguments(without)


def _without_arguments(text: str) -> str:
    text = text.replace("<=", " ")  # a comparison in an argument list
    shorter = re.sub(r"<[^<>]*>", "", text)
    return text if shorter == text else _without_arguments(shorter)


def _cast_target(text: str) -> str:
    named = re.match(r"\w+_cast\s*<(.*?)>\s*\(", text, re.S)
    plain = re.match(r"\(([^()]*)\)", text)
    match = named or plain
    return match.group(1) if match else ""
