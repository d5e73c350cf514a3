"""The pass of checked builds, which rewrites LLVM IR to report every access to the engine.

Clang's thread sanitizer inserts a call before each access. This pass turns these calls into
`__msl_access(address, bytes, flags, site)`, adds the site to calls into the engine, and counts
operations. A site is an index into a table of source locations.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..metal.kernels import ENTRY_PREFIX
from .ir import DEBUG, LABEL, NAME, Function, debug, layout, parse
from .operations import ALWAYS, COUNTS, operation
from .rounds import mark_rounds
from .undefined import SITE, find_undefined
from .uninitialised import WRITE, find_unset

ALIGNMENT_UNKNOWN = 2

# Functions that the IR may lack a declaration of. It always declares the engine's functions.
DECLARATIONS = {
    "memcpy": "declare ptr @memcpy(ptr, ptr, i64)",
    "memmove": "declare ptr @memmove(ptr, ptr, i64)",
    "memset": "declare ptr @memset(ptr, i32, i64)",
}

ACCESS = re.compile(
    r"^  (?:tail )?call void @__tsan_(?P<unaligned>unaligned_)?(?P<kind>read_write|read|write)"
    r"(?P<bytes>\d+)\(ptr (?P<attributes>(?:[a-z]\w*(?:\([^)]*\))? )*)(?P<address>[^,]+)\)"
)
BLOCK = re.compile(
    r"^  (?P<result>%\S+) = (?:tail )?call ptr @__tsan_(?P<name>memcpy|memmove|memset)"
    r"\((?P<target>ptr [^,]+), (?P<other>(?:ptr|i32|i8) [^,]+), i64 (?P<bytes>\S+)\)"
)
ENGINE_CALL = re.compile(r"^  (?:%\S+ = )?(?:tail |musttail |notail )?call [^@]*@(__msl_\w+)\(")
START_OR_END = re.compile(r"call void @__tsan_(init|func_entry|func_exit|vptr_\w+)\(")
NO_SITE = ("__msl_access", "__msl_count", "__msl_deposit", "__msl_result", "__msl_site")
DEBUG_VERSION = '!"Debug Info Version", i32 3'
ALIGN = re.compile(r"^  .*\b(?:load|store)\b.*, align (\d+)")
VARIABLE = re.compile(
    rf"^(?P<name>  {NAME}) = alloca (?P<type>.+?), align (?P<align>\d+)", re.MULTILINE
)
# Headers of the shim with arithmetic that a GPU does not do.
ENGINE_HEADERS = tuple(
    f"__msl_{name}.h"
    for name in "atomic cooperative engine launch matmul matrix simd tensor tensor_engine "
    "tensor_reduce".split()
)
NODE = re.compile(r"^!\d+ = (?:distinct )?!(DI\w+)\((.*)\)$")
FIELD = re.compile(r'(\w+): ("(?:[^"\\]|\\.)*"|![\d]+|[^,()]+(?:\([^)]*\))?)')


@dataclass(frozen=True)
class Frame:
    """A source location and the function that contains it."""

    file: str
    line: int
    function: str


Site = tuple[Frame, ...]  # the innermost frame first, then the frames that it is inlined into


class InstrumentError(RuntimeError):
    """A callback of the thread sanitizer that this pass does not know, from a newer clang."""


class _DebugInfo:
    def __init__(self, lines: list[str]) -> None:
        self.lines = {line.partition(" ")[0]: line for line in lines if line.startswith("!")}
        self.node = cache(self._node)
        self.frames = cache(self._frames)
        self.scope = cache(self._scope)

    def _node(self, name: str) -> tuple[str, dict[str, str]] | None:
        match = NODE.match(self.lines.get(name, ""))
        return (match.group(1), dict(FIELD.findall(match.group(2)))) if match else None

    def _frames(self, location: str) -> Site:
        """The frames of a `!DILocation`, innermost first."""
        result: list[Frame] = []
        while node := self.node(location):
            _, fields = node
            file, function = self.scope(fields.get("scope", ""))
            result.append(Frame(file, int(fields.get("line", "0")), function))
            location = fields.get("inlinedAt", "")
        return tuple(result)

    def _scope(self, scope: str) -> tuple[str, str]:
        file = ""
        while node := self.node(scope):
            kind, fields = node
            if not file and (of := self.node(fields.get("file", ""))):
                file = _unquote(of[1].get("filename", ""))
            if kind == "DISubprogram":
                return file, _unquote(fields.get("name", ""))
            scope = fields.get("scope", "")
        return file, ""


def _unquote(text: str) -> str:
    return re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m.group(1), 16)), text.strip('"'))


class _Pass:
    def __init__(self, text: str, in_shim: Callable[[str], bool], count_all: bool) -> None:
        self.module = parse(text)
        self.info = _DebugInfo(self.module.outside)
        self.in_shim = in_shim
        self.count_all = count_all
        self.of_engine = cache(self._of_engine)
        self.sites: list[Site] = []
        self.index: dict[Site, int] = {}
        self.by_node: dict[str, int] = {}
        self.last_site: int | None = None
        self.used: set[str] = set()
        self.names = 0

    def site(self, line: str) -> int:
        match = DEBUG.search(line)
        node = match.group(1) if match else ""
        if node not in self.by_node:
            frames = self.info.frames(node)
            if frames and frames[0].line == 0 and self.last_site is not None:
                return self.last_site  # clang moved the code and dropped its location
            site = tuple(f for f in frames if not self.in_shim(f.file)) or frames[-1:]
            if site not in self.index:
                self.index[site] = len(self.sites)
                self.sites.append(site)
            self.by_node[node] = self.index[site]
        self.last_site = self.by_node[node]
        return self.last_site

    def in_entry(self, line: str) -> bool:
        """True if an access fetches a kernel's argument. The Metal text has no such access."""
        match = DEBUG.search(line)
        if not match or "_tsan_mem" in line:
            return False
        frames = self.info.frames(match.group(1))
        if not frames or frames[0].line == 0:
            return False
        inside = frames[-1].function.startswith(ENTRY_PREFIX)
        return inside and all(self.in_shim(frame.file) for frame in frames)

    def call(self, name: str, arguments: str, line: str) -> str:
        return f"  call void @{name}({arguments}){debug(line)}"

    def access(self, address: str, size: str, flags: int, line: str) -> str:
        arguments = f"ptr {address}, i32 {size}, i32 {flags}, i32 {self.site(line)}"
        return self.call("__msl_access", arguments, line)

    def rewrite_access(self, match: re.Match[str], line: str, after: str) -> list[str]:
        size = int(match.group("bytes"))
        align = ALIGN.match(after)
        unknown = bool(match.group("unaligned")) or (align and int(align.group(1)) < size)
        flags = ALIGNMENT_UNKNOWN if unknown else 0
        kinds = {"read": [0], "write": [WRITE], "read_write": [0, WRITE]}[match.group("kind")]
        return [self.access(match.group("address"), str(size), flags | k, line) for k in kinds]

    def rewrite_block(self, match: re.Match[str], line: str) -> list[str]:
        """Report the accesses of a memcpy, memmove or memset before the call."""
        out: list[str] = []
        result, name, target, other, count = match.group(
            "result", "name", "target", "other", "bytes"
        )
        size = count
        if not count.isdigit():
            self.names += 1
            size = f"%msl.bytes.{self.names}"
            out.append(f"  {size} = trunc i64 {count} to i32")
        if name != "memset":
            source = other.removeprefix("ptr ")
            out.append(self.access(source, size, ALIGNMENT_UNKNOWN, line))
        store_target = target.removeprefix("ptr ")
        out.append(self.access(store_target, size, WRITE | ALIGNMENT_UNKNOWN, line))
        self.used.add(name)
        called = f"  {result} = call ptr @{name}({target}, {other}, i64 {count})"
        return [*out, called + debug(line)]

    def run(self) -> str:
        module = self.module
        for function in module.functions:
            if function.is_kernels:
                function.body = find_unset(function.body, module.structs, self.count_all)
            function.body = find_undefined(function)
            function.body = self.report(function)
        mark_rounds(module.functions)
        is_tsan = re.compile("declare .*@__tsan_").match
        module.outside = [line for line in module.outside if not is_tsan(line)]
        heads = [function.head for function in module.functions]
        heads += [line for line in module.outside if line.startswith("declare ")]
        defined = "\n".join(heads)
        names = (name for name in sorted(self.used) if f"@{name}(" not in defined)
        module.outside += [DECLARATIONS[name] for name in names]
        # LLVM drops debug information of an unknown version. The sites replace it.
        return module.text().replace(DEBUG_VERSION, '!"Debug Info Version", i32 0', 1)

    def report(self, function: Function) -> list[str]:
        body = function.body
        out: list[str] = []
        counts: dict[str, list[int]] = {}  # kind: [position in `out`, count] in this block
        for number, line in enumerate(body):
            if not line.startswith("  "):
                if counts and LABEL.match(line):
                    self.flush(out, counts)
            elif SITE in line:
                line = line.replace(SITE, str(self.site(line)))
            elif "@__tsan_" in line:
                if not self.in_entry(line):
                    after = body[number + 1] if number + 1 < len(body) else ""
                    out += self.callback(line, after)
                continue
            elif function.is_kernels and "@__msl_" in line:
                entry = ENGINE_CALL.match(line)
                if entry and entry.group(1) not in NO_SITE and DEBUG.search(line):
                    out.append(self.call("__msl_site", f"i32 {self.site(line)}", line))
            elif function.is_kernels and (self.count_all or " = fp" in line or "exp" in line):
                self.count(line, out, counts)
            out.append(line)
        self.flush(out, counts)
        return out

    def callback(self, line: str, after: str) -> list[str]:
        if match := ACCESS.match(line):
            return self.rewrite_access(match, line, after)
        if match := BLOCK.match(line):
            return self.rewrite_block(match, line)
        if START_OR_END.search(line):
            return []
        raise InstrumentError(f"unknown callback in a checked build: {line.strip()}")

    def count(self, line: str, out: list[str], counts: dict[str, list[int]]) -> None:
        result = operation(line)
        if "!nosanitize" in line or line.startswith("  %msl."):
            return  # part of a check
        if result is None or (result[0] not in ALWAYS and not self.count_all):
            return
        kind, number = result
        location = DEBUG.search(line)
        if location and self.of_engine(location.group(1)):
            return
        if kind not in counts:
            counts[kind] = [len(out), 0]
            out.append(debug(line))
        counts[kind][1] += number

    def _of_engine(self, node: str) -> bool:
        return any(frame.file.endswith(ENGINE_HEADERS) for frame in self.info.frames(node))

    def flush(self, out: list[str], counts: dict[str, list[int]]) -> None:
        for kind, (position, number) in counts.items():
            arguments = f"i32 {COUNTS.index(kind)}, i32 {number}"
            out[position] = self.call("__msl_count", arguments, out[position])
        counts.clear()


def with_padded_variables(text: str) -> str:
    """Pad private variables to their alignment: `local-bounds` does not trap in the padding."""
    module = parse(text)

    def padded(match: re.Match[str]) -> str:
        size, align = layout(match.group("type"), module.structs)[0], int(match.group("align"))
        if size % align == 0:
            return match.group()
        return f"{match.group('name')} = alloca [{-(-size // align) * align} x i8], align {align}"

    return VARIABLE.sub(padded, text)


def instrument(
    text: str, in_shim: Callable[[str], bool], count_all: bool = False
) -> tuple[str, list[Site]]:
    """The rewritten IR of a checked build, and the table of sites without frames in the shim."""
    work = _Pass(text, in_shim, count_all)
    return work.run(), work.sites
