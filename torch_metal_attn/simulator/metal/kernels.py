"""The kernels of a Metal text: their parameters, instantiations and entries."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import unsupported
from .constants import Enumerators, enumerators, number
from .lexer import MetalSourceError, TokenList, lex
from .objects import ADDRESS_SPACES, structs
from .vectors import ELEMENTS, VECTORS

LAUNCH = (Path(__file__).parents[1] / "shim" / "__msl_launch.h").read_text()
ATTRIBUTES = frozenset(re.findall(r"^__MSL_ATTRIBUTE3?\(\s*(\w+)", LAUNCH, re.M))
MAX_BUFFERS = 31
ENTRY_PREFIX = "__msl_kernel_"
TYPES_PREFIX = "__msl_types_"
MOST_THREADS = "max_total_threads_per_threadgroup"
MOST_THREADS_PREFIX = "__msl_most_threads_"
EXPORTED = 'extern "C" __attribute__((visibility("default")))'
TYPES = VECTORS.union(ELEMENTS)
LITERAL = re.compile(r"(?:[0-9]|true$|false$)")
ARGUMENT_BUFFER = (
    "an argument buffer holds pointers, but a tensor cannot: pass each buffer as an argument "
    "of the kernel"
)


@dataclass
class Parameter:
    name: str
    kind: str  # buffer, threadgroup, attribute
    index: int = 0  # of [[buffer(index)]] or [[threadgroup(index)]]
    attribute: str = ""  # of a built-in value
    space: str = ""  # device, constant, threadgroup
    type: str = ""
    condition: str = ""  # of function_constant(...); if it is false, the parameter is absent

    @property
    def declared(self) -> str:
        """The slot and the declaration, for messages."""
        return f"{self.kind}({self.index}) `{self.type} {self.name}`"

    @cached_property
    def writable(self) -> bool:
        """True if the kernel may write to the buffer: its elements are not declared const."""
        element = re.sub(r"<.*>", "", re.sub(r"[*&][^*&]*$", "", self.type))
        return self.space == "device" and "const" not in re.findall(r"\w+", element)


@dataclass
class Kernel:
    """One kernel that a host can call."""

    name: str  # by which the host calls it
    symbol: str  # of the kernel's entry in the image
    callee: str  # the C++ expression of the function
    function: str  # the unqualified name of the function
    parameters: list[Parameter]
    missing: list[str] = field(default_factory=list)  # function constants without a value
    signature: str = ""  # the function type, if an instantiation gives it to choose an overload
    most_threads: str = ""  # the C++ expression of max_total_threads_per_threadgroup, if any

    @property
    def type(self) -> str:
        return self.signature or f"decltype({self.callee})"

    @cached_property
    def buffers(self) -> dict[int, Parameter]:
        return {p.index: p for p in self.parameters if p.kind == "buffer"}

    @property
    def types_symbol(self) -> str:
        return self.symbol.replace(ENTRY_PREFIX, TYPES_PREFIX, 1)

    @cached_property
    def most_threads_symbol(self) -> str:
        return self.symbol.replace(ENTRY_PREFIX, MOST_THREADS_PREFIX, 1)


# The first words of a kernel's declaration or instantiation.
KERNEL_BEGINS = frozenset({"template", "kernel", "["})


@dataclass
class _Function:
    qualified: str
    parameters: list[Parameter]
    most_threads: str  # the constant of max_total_threads_per_threadgroup, if any
    template: list[str] | None  # the template parameters

    def accepts(self, callee: str, signature: str) -> bool:
        """True if an instantiation may mean this one of several functions with its name."""
        _, bracket, arguments = callee.partition("<")
        types = _parts(signature.partition("(")[2][:-1]) if signature else None
        if types is not None and len(types) != len(self.parameters):
            return False
        if self.template is None or not bracket:
            return (self.template is None) == (not bracket)
        actual = _parts(arguments.rstrip()[:-1])
        needed = [text for text in self.template if "=" not in text and "..." not in text]
        most = len(actual) if any("..." in text for text in self.template) else len(self.template)
        fits = (types is not None or len(needed) <= len(actual)) and len(actual) <= most
        return fits and not any(
            LITERAL.match(text) if parameter.startswith(("typename", "class")) else text in TYPES
            for text, parameter in zip(actual, self.template, strict=False)
        )


def _parts(text: str) -> list[str]:
    tokens = TokenList(lex(text))
    return _sources(tokens, 0, len(tokens) - 1)


def _sources(tokens: TokenList, start: int, end: int) -> list[str]:
    return [tokens.source(*span) for span in tokens.split(start, end)]


def extract_kernels(tokens: TokenList) -> list[Kernel]:
    """Find every kernel, remove the syntax that C++ lacks, and list the callable kernels."""
    functions: dict[str, list[_Function]] = {}
    callables: list[tuple[str, str, str, str]] = []  # host name, callee, function, signature
    names = enumerators(tokens)
    index = 0
    while (index := tokens.next(index, KERNEL_BEGINS)) < len(tokens):
        if tokens.text(index) == "[" != tokens.text(index + 1):
            index += 1
            continue  # an array extent or a subscript, skipped early because there are many
        instance = _instantiation(tokens, index)
        if instance is not None:
            callables.append(instance)
            continue
        head = _kernel_head(tokens, index)
        if head is None:
            index += 1
            continue
        attributes, index, template = head
        host_name = _host_name(attributes)
        opening = tokens.next(index, ("(", ";", "{"))
        if tokens.text(opening) == "(" and tokens.text(tokens.close(opening) + 1) == ";":
            continue  # a declaration; its parameters need no attributes
        most_threads = _most_threads(tokens, index, attributes, template)
        declared = None
        if template:
            declared = _sources(tokens, tokens.open_angle(index - 1) + 1, index - 1)
        name_at, parameters = _signature(tokens, index, names)
        name = tokens.text(name_at)
        qualified = "".join(f"::{space}" for space in _namespaces(tokens, name_at)) + f"::{name}"
        functions.setdefault(name, []).append(
            _Function(qualified, parameters, most_threads, declared)
        )
        if not template:
            callables.append((host_name or qualified[2:], qualified, name, ""))
        index = name_at
    kernels: dict[str, Kernel] = {}
    for host_name, callee, name, signature in callables:
        if host_name in kernels or name not in functions:
            continue
        symbol = f"{ENTRY_PREFIX}{len(kernels)}_{re.sub(r'[^A-Za-z0-9_]', '_', host_name)}"
        function = _find_function(host_name, functions[name], callee, signature)
        plain, bracket, rest = callee.partition("<")
        kernel = Kernel(host_name, symbol, callee, name, function.parameters, signature=signature)
        # If template arguments are deduced, the constant's arguments are unknown.
        if function.most_threads and (bracket or callee == function.qualified):
            qualifier = plain.rpartition(name)[0]
            kernel.most_threads = qualifier + function.most_threads + bracket + rest
        kernels[host_name] = kernel
    return list(kernels.values())


def _find_function(
    host_name: str, candidates: list[_Function], callee: str, signature: str
) -> _Function:
    """The function that an instantiation or a kernel's name refers to."""
    if len(candidates) == 1:
        return candidates[0]
    exact = [function for function in candidates if function.qualified == callee]
    fitting = exact or [f for f in candidates if f.accepts(callee, signature)]
    if not fitting or any(f.parameters != fitting[0].parameters for f in fitting):
        written = callee.replace(" ", "")
        raise MetalSourceError(
            f"kernel {host_name}: the text has {len(candidates)} functions named "
            f"{candidates[0].qualified[2:]}, and the simulator cannot tell which `{written}` is: "
            "rename all but one of these functions"
        )
    return fitting[0]


def _attribute_end(tokens: TokenList, index: int) -> int:
    if tokens.text(index) == "[" and tokens.text(index + 1) == "[":
        return tokens.close(index) + 1
    return index


def _take_attributes(tokens: TokenList, start: int, end: int) -> tuple[str, int]:
    """Remove the attributes in [start, end); returns their text and the new end."""
    result: list[str] = []
    index = start
    while index < end:
        after = _attribute_end(tokens, index)
        if after > index:
            result.append(tokens.source(index + 2, after - 2))
            tokens.remove(index, after)
            end -= after - index
        else:
            index += 1
    return " , ".join(result), end


def _host_name(attributes: str) -> str:
    match = re.search(r'host_name \( ((?:"[^"]*" ?)+)\)', attributes)
    return "".join(re.findall(r'"([^"]*)"', match.group(1))) if match else ""


def _kernel_head(tokens: TokenList, index: int) -> tuple[str, int, bool] | None:
    """Strip `[[attributes]] kernel`; returns (attributes, index of return type, is template)."""
    after = index
    while (end := _attribute_end(tokens, after)) > after:
        after = end
    attributes = tokens.source(index, after)
    keyword = tokens.text(after) == "kernel" and tokens[after].kind == "name"
    if not keyword and not re.search(r"\bkernel\b", attributes):
        return None
    if keyword:
        tokens.remove(after, after + 1)
    tokens.remove(index, after)
    # Attributes may also follow the keyword.
    end = index
    while tokens.text(end) == "[":
        end = _attribute_end(tokens, end)
    more, _ = _take_attributes(tokens, index, end)
    if tokens.text(index - 1) == "template":
        raise tokens.error(index, 'an instantiated kernel needs [[host_name("...")]]')
    template = tokens.text(index - 1) == ">"
    if not template and tokens[index - 1].kind != "string":
        # Only the entry calls the kernel. A static kernel is inlined into it, not compiled twice.
        tokens[index].text = "static " + tokens[index].text
    return attributes + more, index, template


def _most_threads(tokens: TokenList, index: int, attributes: str, template: bool) -> str:
    """Declare a constant for max_total_threads_per_threadgroup; returns its name, or ""."""
    _, marker, rest = attributes.partition(MOST_THREADS)
    if not marker:
        return ""
    in_parentheses = TokenList(lex(rest.lstrip()))
    value = in_parentheses.source(1, in_parentheses.close(0))
    name = f"{MOST_THREADS_PREFIX}{index}"
    parameters = ""
    start = index
    if template:
        start = tokens.open_angle(index - 1) - 1
        parameters = tokens.source(start, index) + " "
    tokens[start].space += f"{parameters}constant constexpr unsigned {name} = {value}; "
    return name


def _instantiation(tokens: TokenList, index: int) -> tuple[str, str, str, str] | None:
    """Remove `template [[host_name("x")]] ... f<args>...;` and return its parts.

    The parts are the host's name, the C++ expression, the function's name and the signature.
    """
    if tokens.text(index) != "template" or tokens.text(index + 1) != "[":
        return None
    end = tokens.seek(index, (";",))
    if end >= len(tokens):
        raise tokens.error(index, "a template instantiation does not end with `;`")
    attributes, stop = _take_attributes(tokens, index, end)
    name = _host_name(attributes)
    if not name:
        raise tokens.error(index, 'an instantiated kernel needs [[host_name("...")]]')
    last = stop - 1
    signature = ""
    if tokens.text(last) == ")":
        opening = tokens.open(last)
        signature = f"void {tokens.source(opening, last + 1)}"
        last = opening - 1
    name_at = tokens.open_angle(last) - 1 if tokens.text(last) == ">" else last
    function = tokens.text(name_at)
    callee = tokens.source(tokens.qualified_start(name_at), last + 1)
    tokens.remove(index, stop + 1)
    return name, callee, function, signature


def _namespaces(tokens: TokenList, index: int) -> list[str]:
    around: list[str] = []
    while (index := tokens.seek_back(index - 1, ("{",))) >= 0:
        if tokens.text(index - 2) == "namespace":
            around.insert(0, tokens.text(index - 1))
    return around


def _signature(tokens: TokenList, index: int, names: Enumerators) -> tuple[int, list[Parameter]]:
    opening = tokens.next(index, ("(", ";", "{"))
    if tokens.text(opening) != "(" or tokens[opening - 1].kind != "name":
        raise tokens.error(index, "`kernel` is not followed by a function")
    name = tokens.text(opening - 1)
    if tokens.text(opening - 2) not in ("void", "static void"):
        raise tokens.error(opening - 1, f"kernel {name} must return void")
    parameters: list[Parameter] = []
    count = len(tokens.split(opening + 1, tokens.close(opening)))
    for position in range(count):
        start, end = tokens.split(opening + 1, tokens.close(opening))[position]
        parameters.append(_parameter(tokens, name, start, end, names))
    taken = {p.index for p in parameters if p.kind == "buffer" and p.index >= 0}
    for parameter in parameters:
        if parameter.kind == "buffer" and parameter.index < 0:
            parameter.index = next(i for i in range(MAX_BUFFERS + len(taken)) if i not in taken)
            taken.add(parameter.index)
        if parameter.kind == "buffer" and parameter.index >= MAX_BUFFERS:
            raise tokens.error(
                opening,
                f"kernel {name}: parameter {parameter.name} is buffer({parameter.index}); "
                f"the simulator has buffers 0 to {MAX_BUFFERS - 1}",
            )
    _check_slots(tokens, opening, name, parameters)
    return opening - 1, parameters


def _check_slots(tokens: TokenList, opening: int, kernel: str, parameters: list[Parameter]) -> None:
    """Raise MetalSourceError if parameters that exist together share a slot."""
    taken: dict[tuple[str, int], str] = {}
    for parameter in parameters:
        if parameter.kind == "attribute" or parameter.condition:
            continue
        slot = (parameter.kind, parameter.index)
        if slot in taken:
            both = f"{taken[slot]} and {parameter.name}"
            raise tokens.error(
                opening, f"kernel {kernel}: {both} are both {parameter.kind}({parameter.index})"
            )
        taken[slot] = parameter.name


def _parameter(
    tokens: TokenList, kernel: str, start: int, end: int, numbers: Enumerators
) -> Parameter:
    attributes, end = _take_attributes(tokens, start, end)
    names = [i for i in range(start, end) if tokens[i].kind == "name"]
    if not names:
        raise tokens.error(start, f"kernel {kernel}: a parameter has no name")
    name = tokens.text(names[-1])
    type_text = tokens.source(start, names[-1])
    words = set(re.findall(r"\w+", type_text))
    condition = re.search(r"function_constant \( (.+?) \)", attributes)
    slot = re.search(r"\b(buffer|threadgroup) \( (.+?) \)(?: ,|$)", attributes)
    is_pointer = "*" in type_text or "&" in type_text or tokens.text(end - 1) == "]"
    slot_index = number(tokens, start, slot.group(2), numbers) if slot else -1
    if slot or (is_pointer and words & {"device", "constant"}):
        kind = slot.group(1) if slot else "buffer"
        if kind == "buffer" and not is_pointer:
            why = _unsupported(type_text) or "it must be a pointer or a reference"
            raise tokens.error(start, f"kernel {kernel}: parameter {name}: {why}")
        return Parameter(
            name=name,
            kind=kind,
            index=slot_index,
            space="constant" if "constant" in words else "device" if kind == "buffer" else kind,
            type=type_text,
            condition=condition.group(1) if condition else "",
        )
    built_in = [word for word in re.findall(r"\w+", attributes) if word in ATTRIBUTES]
    if not built_in:
        actual = f"it has {f'[[{attributes}]]'.replace(' ', '') if attributes else 'no attribute'}"
        why = _unsupported(f"{type_text} {attributes}") or (
            f"it needs an attribute that the simulator supports, such as [[buffer(0)]]; {actual}"
        )
        raise tokens.error(start, f"kernel {kernel}: parameter {name}: {why}")
    return Parameter(name=name, kind="attribute", attribute=built_in[0], type=type_text)


def _unsupported(text: str) -> str | None:
    return next(filter(None, map(unsupported.reason, re.findall(r"\w+", text))), None)


def refuse_argument_buffers(tokens: TokenList, kernels: list[Kernel]) -> None:
    """Raise MetalSourceError for `[[id(n)]]`, and for a struct argument that has pointers."""
    for index in tokens.find("id"):
        if tokens.text(index - 2) == "[" == tokens.text(index - 1):
            raise tokens.error(
                index, f"the attribute id({tokens.text(index + 2)}): {ARGUMENT_BUFFER}"
            )
    buffers = (p for kernel in kernels for p in kernel.parameters if p.kind == "buffer")
    used = {word for parameter in buffers for word in re.findall(r"\w+", parameter.type)}
    for name, body, end in structs(tokens):
        if name not in used:
            continue
        for index in range(body + 1, end):
            last = tokens.next(index, (";", "(", ")", "{"))
            words = {tokens.text(at) for at in range(index, last)}
            is_pointer = tokens.text(last) == ";" and not words.isdisjoint(("*", "&"))
            if tokens.text(index) in ADDRESS_SPACES and is_pointer:
                raise tokens.error(
                    index, f"struct {name} of a kernel's argument: {ARGUMENT_BUFFER}"
                )


def entries(kernels: list[Kernel]) -> str:
    """C++ of each kernel's entry, parameter types and maximum number of threads.

    An entry calls its kernel with the engine's arguments.
    """
    lines = ['\n# 1 "<kernel entries>" 1 3']
    for kernel in kernels:
        signature = f"::metal::__signature<{kernel.type}>"
        types = ", ".join(
            f"::metal::__parameter_type_of<{signature}::parameter<{position}>>"
            f"({parameter.condition or 'true'})"
            for position, parameter in enumerate(kernel.parameters)
        )
        lines += [
            f"{EXPORTED} void {kernel.symbol}("
            "const __msl_launch* launch, const __msl_thread* thread_state) { "
            f"typedef {signature} S; "
            f"(void)launch; (void)thread_state; {kernel.callee}({arguments(kernel)}); }}",
            f"{EXPORTED} const ::metal::__parameter_type {kernel.types_symbol}[] = {{{types}}};",
            f"{EXPORTED} const unsigned {kernel.most_threads_symbol} = {kernel.most_threads or 0};",
        ]
    return "\n".join(lines) + "\n"


def arguments(kernel: Kernel) -> str:
    """The arguments that an entry passes to its kernel, from `launch` and `thread_state`."""
    expressions: list[str] = []
    for position, parameter in enumerate(kernel.parameters):
        if parameter.kind == "attribute":
            name, values = f"attribute_{parameter.attribute}", "launch, thread_state"
        else:
            name, values = f"{parameter.kind}_argument", f"launch, {parameter.index}"
        expressions.append(f"::metal::__{name}<S::template parameter<{position}>>({values})")
    return ", ".join(expressions)
