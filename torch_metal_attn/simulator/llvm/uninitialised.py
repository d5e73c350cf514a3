"""Finds reads of unwritten private variables in checked builds.

A variable without a value is initialised by `__msl_unset_*`, which is opaque to the compiler. After
optimisation, each value that depends on such a call gets a flag for each vector element. Where the
value decides something (a branch, a store, an address, a call), the flag is passed to the engine. A
variable that stays in memory gets an array of marks: 1 for each byte that is unwritten.

This pass also checks accesses that may be outside of a private variable.
"""

import re
from dataclasses import dataclass

from .choices import Choices, Variable
from .flags import Flags, parse
from .ir import (
    ALLOCA,
    INSTRUCTION,
    LOAD,
    METADATA,
    NAME,
    SCALARS,
    STORE,
    VALUE,
    debug,
    lanes_of,
    layout,
    padding,
    scalars,
    typed,
)
from .places import Places
from .undefined import SITE

UNSET = re.compile(
    rf"^  ({NAME}) = (?:tail )?call (?:[a-z]+ )*(i\d+|float|half|bfloat) "
    r"@__msl_unset_\w+\(ptr (?:[a-z]+ )*([^)]+)\)"
)
LABEL = re.compile(rf"label {NAME}")
LABEL_OF_PHI = re.compile(rf", {NAME} \]")
ADDRESS = re.compile(rf"^  ({NAME}) = getelementptr (?:[a-z]+ )*[^,]+, ptr ({NAME})(, .*)?$")
POINTERS = re.compile(rf"^  ({NAME}) = (?:phi ptr|select i1 [^,]+, ptr) (.*)$")
# A memset, or a memcpy from a constant.
FILL = re.compile(
    rf"^  %\S+ = (?:tail )?call ptr @__tsan_mem(?:set|cpy)\(ptr (?:[a-z]+ )*({NAME}), "
    r"(?:i32 |i8 |ptr (?:[a-z]+ )*(?=@))([^,]+), i64 ([^)]+)\)"
)
# A memcpy or memmove that may copy private memory. The groups are target, source and length.
COPY = re.compile(
    r"^  %\S+ = (?:tail )?call ptr @__tsan_mem(?:cpy|move)\(ptr (?:[a-z]+ )*([^ ,]+), "
    rf"ptr (?:[a-z]+ )*({NAME}), i64 ([^)]+)\)"
)
WATCHED = re.compile(
    r"^  (?:tail )?call void @__tsan_(?:unaligned_)?(?:read_write|read|write)(\d+)\("
)
SCOPE = re.compile(
    rf"^  (?:tail )?call void @llvm\.lifetime\.(start|end)\.p0\(.*ptr [^%]*({NAME})\)"
)
FLOATS = {"float", "half", "bfloat"}
READ, WRITE = 0, 1
MAX_MARKED = 4096  # bytes of a variable with marks; the marks need stack too


def find_unset(body: list[str], structs: dict[str, str], keep_counts: bool) -> list[str]:
    """A function's lines with flags and calls added. The calls have `$site` as their site."""
    return _Function(body, structs, keep_counts).run()


@dataclass
class _Private:
    bytes: int
    captured: bool = False  # other code may write to the variable
    unset: bool = False  # the variable may be read before it is written
    outlived: bool = False  # the variable may be used after the end of its scope


class _Function(Flags):
    def __init__(self, body: list[str], structs: dict[str, str], keep_counts: bool) -> None:
        super().__init__()
        self.body = body
        self.structs = structs
        self.keep_counts = keep_counts
        self.users: dict[str, list[int]] = {}  # the lines that contain each name
        self.private: dict[str, _Private] = {}
        self.root: dict[str, str] = {}  # the variable of each address
        self.mixed: set[str] = set()  # addresses that may be in several variables
        self.special: set[int] = set()  # lines to rewrite
        self.watched: list[tuple[int, str, int]] = []  # reported accesses: line, address, bytes
        self.patterns: list[tuple[str, int]] = []  # variable, and line that fills it with a pattern

    def run(self) -> list[str]:
        variable_lines = [
            number
            for number, line in enumerate(self.body)
            if " = alloca " in line or "@__msl_unset_" in line
        ]
        if not variable_lines:
            return self.body
        self.places = Places(self.body, self.structs)
        for number, line in enumerate(self.body):
            for name in VALUE.findall(line):
                self.users.setdefault(name, []).append(number)
        for number in variable_lines:
            self.add_variable(number)
        checked = [address for address in self.mixed if self.may_be_outside(address)]
        self.choices = Choices(checked, self.mixed, self.places, self.variable_of)
        self.find_values()
        # Accesses that are always inside of their variable are reported only if they are counted.
        needless: set[int] = set()
        if not self.keep_counts:
            needless = {number for number, name, size in self.watched if self.inside(name, size)}
        for number, line in enumerate(self.body):
            if number in needless:
                continue
            if number in self.special:
                self.add_line(line)
            else:
                self.out.append(line)
        return self.out

    def add_variable(self, number: int) -> None:
        """Record the variable in memory or the unwritten value that a line creates."""
        line = self.body[number]
        self.special.add(number)
        if match := UNSET.match(line):
            self.unset[match.group(1)] = match.group(3)
            self.types[match.group(1)] = match.group(2)
        elif match := ALLOCA.match(line):
            name, size = match.group(1), layout(match.group(2), self.structs)[0]
            self.private[name] = _Private(size, captured=not size)
            self.root[name] = name
            self.types[name] = match.group(2)
            self.find_addresses(name)
            self.find_outlived(name)

    def find_addresses(self, variable: str) -> None:
        private, matches = self.private[variable], [variable]
        for name in matches:
            for number in self.users[name]:
                line = self.body[number]
                match = ADDRESS.match(line) or POINTERS.match(line)
                if match and match.group(1) != name:
                    if self.root.setdefault(match.group(1), variable) != variable:
                        private.captured = True
                    if match.group(1) not in matches:
                        matches.append(match.group(1))
                elif match is None:
                    self.use(private, name, number)
        # A phi or select of addresses is in this variable only if all its operands are in it.
        for name in matches[1:]:
            for number in self.users[name]:
                match = POINTERS.match(self.body[number])
                if match and match.group(1) == name:
                    operands = VALUE.findall(LABEL_OF_PHI.sub("", match.group(2)))
                    if any(self.root.get(v) != variable for v in operands):
                        private.captured = True
                        self.find_mixed(name)

    def find_outlived(self, variable: str) -> None:
        """Note whether a variable is used after its scope ends, also by a loop's next iteration."""
        addresses = [name for name, root in self.root.items() if root == variable]
        lives, scopes = True, []
        for number in sorted({n for name in addresses for n in self.users[name]}):
            if match := SCOPE.match(self.body[number]):
                lives = match.group(1) == "start"
                scopes.append(number)
            elif not lives and not ADDRESS.match(self.body[number]):
                self.private[variable].outlived = True
        if self.private[variable].outlived:
            self.special.update(scopes)

    def find_mixed(self, address: str) -> None:
        """Record a phi or select of addresses in several variables, and all derived addresses."""
        matches = [address]
        for name in matches:
            self.mixed.add(name)
            for number in self.users[name]:
                match = ADDRESS.match(self.body[number]) or POINTERS.match(self.body[number])
                if match and match.group(1) == name:
                    self.special.add(number)
                elif match and match.group(1) not in self.mixed:
                    matches.append(match.group(1))

    def may_be_outside(self, address: str) -> bool:
        """True if an access at an address may be outside of its variable."""
        for number in self.users[address]:
            line, of_type = self.body[number], ""
            if (match := LOAD.match(line)) and match.group(3) == address:
                of_type = match.group(2)
            elif (match := STORE.match(line)) and match.group(2) == address:
                of_type = typed(match.group(1))[0]
            if of_type and not self.inside(address, layout(of_type, self.structs)[0]):
                return True
        return False

    def variable_of(self, address: str) -> Variable:
        size = self.private[self.root[address]].bytes if address in self.root else 0
        return (self.root[address], str(size)) if size else None

    def use(self, private: _Private, name: str, number: int) -> None:
        """Record the use of an address in a line."""
        line = self.body[number]
        if ALLOCA.match(line) or "@llvm.lifetime" in line:
            return
        load, store, fill = LOAD.match(line), STORE.match(line), FILL.match(line)
        copy = COPY.match(line)
        if load or fill or copy or (store and name not in VALUE.findall(store.group(1))):
            self.special.add(number)
            if self.is_pattern(line):
                self.patterns.append((name, number))
        elif watched := WATCHED.match(line):
            self.watched.append((number, name, int(watched.group(1))))
        elif "@__tsan_" not in line:
            private.captured = True

    def inside(self, address: str, size: int) -> bool:
        """True if `size` bytes from `address` on are always in one variable."""
        places = self.places.of(address)
        return places is not None and all(
            name in self.private and 0 <= low and high + size <= self.private[name].bytes
            for name, (low, high) in places.items()
        )

    def is_pattern(self, line: str) -> bool:
        """True for the line by which -ftrivial-auto-var-init fills a variable without a value."""
        match = FILL.match(line)
        if not match or match.group(1) not in self.private:
            return False
        whole = match.group(3) == str(self.private[match.group(1)].bytes)
        floats = scalars(self.types[match.group(1)], self.structs) <= FLOATS
        return whole and match.group(2) in (("-1", "255") if floats else ("-86", "170"))

    def find_values(self) -> None:
        matches = list(self.unset)
        for variable, private in self.private.items():
            if private.outlived and not private.unset:
                private.unset = True
                matches += self.find_loads(variable) if self.has_marks(variable) else []
        for variable, number in self.patterns:
            matches += self.note_unset(variable, number)
        for name in matches:
            for number in self.users[name]:
                matches += self.follow(name, number)

    def follow(self, name: str, number: int) -> list[str]:
        """Record a line that uses the undefined `name`; returns values that become undefined."""
        self.special.add(number)
        line = self.body[number]
        store = STORE.match(line)
        if store and store.group(2) in self.root:
            if typed(store.group(1))[1] != name:
                return []
            return self.note_unset(self.root[store.group(2)], number)
        if (fill := FILL.match(line)) and fill.group(1) in self.root and fill.group(2) == name:
            return self.note_unset(self.root[fill.group(1)], number)
        match = INSTRUCTION.match(line)
        if not match or match.group(1) in self.unset:
            return []
        value = parse(match.group(2), METADATA.sub("", METADATA.sub("", match.group(3))))
        if not value or all(operand != name for _, operand in value.operands):
            return []
        self.values[match.group(1)] = value
        self.types[match.group(1)] = value.type
        self.unset[match.group(1)] = self.unset[name]
        return [match.group(1)]

    def note_unset(self, variable: str, number: int) -> list[str]:
        """Record a line that leaves bytes of a variable unwritten; returns new undefined values."""
        private = self.private[variable]
        if private.unset or self.overwritten(variable, number):
            return []
        private.unset = True
        return self.find_loads(variable) if self.has_marks(variable) else []

    def bytes_written(self, variable: str, line: str) -> set[int]:
        if match := STORE.match(line):
            address, size = match.group(2), layout(typed(match.group(1))[0], self.structs)[0]
        elif (match := FILL.match(line) or COPY.match(line)) and match.group(3).isdigit():
            address, size = match.group(1), int(match.group(3))
        else:
            return set()
        low, high = (self.places.of(address) or {}).get(variable, (0, -1))
        return set(range(low, low + size)) if low == high else set()

    def overwritten(self, variable: str, number: int) -> bool:
        """True if the block later overwrites all bytes that a line writes, before any is read."""
        if self.private[variable].captured or self.private[variable].bytes > MAX_MARKED:
            return False
        left = self.bytes_written(variable, self.body[number])
        for line in self.body[number + 1 :] if left else ():
            if not line.startswith("  ") or line.startswith(("  br ", "  switch ")):
                return False
            if all(self.root.get(name) != variable for name in VALUE.findall(line)):
                continue
            copy = COPY.match(line)
            if copy and self.root.get(copy.group(2)) == variable:
                return False
            if copy or STORE.match(line) or FILL.match(line):
                left -= self.bytes_written(variable, line)
                if not left:
                    return True
            elif not (ADDRESS.match(line) or WATCHED.match(line) or "@llvm.lifetime" in line):
                return False
        return False

    def find_loads(self, variable: str) -> list[str]:
        matches = []
        for address in [name for name, root in self.root.items() if root == variable]:
            for number in self.users[address]:
                copy = COPY.match(self.body[number])
                if copy and copy.group(2) == address and copy.group(1) in self.root:
                    matches += self.note_unset(self.root[copy.group(1)], number)
                match = LOAD.match(self.body[number])
                if not match or match.group(3) != address or match.group(1) in self.unset:
                    continue
                if layout(match.group(2), self.structs)[0]:
                    self.unset[match.group(1)] = "null"
                    self.types[match.group(1)] = match.group(2)
                    matches.append(match.group(1))
        return matches

    def has_marks(self, address: str) -> bool:
        private = self.private.get(self.root.get(address, ""))
        if private is None or private.captured or private.bytes > MAX_MARKED:
            return False
        return private.unset

    def add_line(self, line: str) -> None:
        if match := UNSET.match(line):
            name = match.group(1)
            bits = 8 * SCALARS.get(match.group(2), 0) or match.group(2)[1:]
            self.out.append(f"  {name} = bitcast i{bits} -1 to {match.group(2)}")
            self.out.append(f"  %msl.defined.{name[1:]} = and i1 false, false")
            return
        if (match := ALLOCA.match(line)) and self.has_marks(match.group(1)):
            size = self.private[match.group(1)].bytes
            mark = f"%msl.marks.{match.group(1)[1:]}"
            self.out += [line, f"  {mark} = alloca [{size} x i8], align 1"]
            self.fill(mark, 0, size)
            return
        if self.is_pattern(line):
            self.pattern(line)
            return
        if (match := SCOPE.match(line)) and self.has_marks(match.group(2)):
            what, name = match.groups()
            self.fill(f"%msl.marks.{name[1:]}", int(what == "end"), self.private[name].bytes)
            self.unmark_padding(name)
        if (match := FILL.match(line)) and match.group(1) in self.root:
            address, value, length = match.groups()
            marked = value in self.unset and self.has_marks(address)
            self.use_values(line, [name for name in VALUE.findall(line) if name != value])
            stored = self.emit(f"zext i1 {self.flag(value, 0)} to i32") if marked else "-1"
            if self.has_marks(address):
                self.check(address, self.as_int(length), 1, WRITE, stored, line)
                self.unmark_padding(self.root[address])
            self.out.append(line)
            return
        if (match := COPY.match(line)) and not self.root.keys().isdisjoint(match.groups()):
            self.copy(match, line)
            return
        if (match := LOAD.match(line)) and match.group(3) in self.root:
            self.access(match.group(1), match.group(2), "", match.group(3), READ, line)
            return
        if (match := STORE.match(line)) and match.group(2) in self.root:
            self.use_values(line, VALUE.findall(match.group(2)))
            self.access("", *typed(match.group(1)), match.group(2), WRITE, line)
            return
        if match := INSTRUCTION.match(line):
            name = match.group(1)
            if name in self.values or name in self.mixed:
                self.out += [line, *self.choices.lines(name)]
                if name in self.unset:
                    self.define(name, self.values[name])
                return
        if "@llvm.lifetime" not in line and "@llvm.assume" not in line:
            self.use_values(line, VALUE.findall(LABEL.sub("", line)))
        self.out.append(line)

    def fill(self, name: str, value: int, size: int) -> None:
        self.out.append(f"  call void @__msl_fill(ptr {name}, i32 {value}, i32 {size})")

    def pattern(self, line: str) -> None:
        """Replace the line that fills a variable by one that is not checked or counted."""
        match = FILL.match(line)
        assert match
        name, size = match.group(1), int(match.group(3))
        self.fill(name, int(match.group(2)), size)
        if self.has_marks(name):
            self.fill(f"%msl.marks.{name[1:]}", 1, size)
            self.unmark_padding(name)

    def unmark_padding(self, variable: str) -> None:
        """Clear the marks of a struct's padding: a copy reads it, but nothing writes it."""
        for begin, end in padding(self.types[variable], self.structs):
            mark = f"getelementptr i8, ptr %msl.marks.{variable[1:]}, i64 {begin}"
            self.fill(self.emit(mark), 0, end - begin)

    def as_int(self, size: str) -> str:
        return self.emit(f"trunc i64 {size} to i32") if size.startswith("%") else size

    def copy(self, match: re.Match[str], line: str) -> None:
        target, source, length = match.groups()
        self.use_values(line, VALUE.findall(length))
        size = self.as_int(length)
        if self.has_marks(source):
            bits = self.check(source, size, 1, READ, "-1", line)
            if target not in self.root:
                self.report_use(self.emit(f"and i32 {bits}, 1"), "null", line)
        if self.has_marks(target):
            self.check(target, size, 1, WRITE, "-1", line)
            if self.has_marks(source):
                marks = f"ptr {self.mark_of(target)}, ptr {self.mark_of(source)}"
                self.out.append(f"  call void @__msl_copy({marks}, i32 {size})")
        self.out.append(line)

    def mark_of(self, address: str) -> str:
        base = self.root[address]
        here, begin = (self.emit(f"ptrtoint ptr {x} to i64") for x in (address, base))
        at = self.emit(f"sub i64 {here}, {begin}")
        return self.emit(f"getelementptr i8, ptr %msl.marks.{base[1:]}, i64 {at}")

    def check(self, address: str, size: str, lanes: int, flags: int, stored: str, line: str) -> str:
        """Check an access; returns the mask of vector elements whose values are defined."""
        variable = self.choices.variable_of(address)
        assert variable
        base, whole = variable
        marks = f"%msl.marks.{base[1:]}" if self.has_marks(address) else "null"
        return self.emit(
            f"call i32 @__msl_private(ptr {address}, i32 {size}, i32 {lanes}, ptr {base}, "
            f"i32 {whole}, ptr {marks}, i32 {flags}, i32 {stored}, i32 {SITE})" + debug(line)
        )

    def access(
        self, result: str, type_text: str, value: str, address: str, flags: int, line: str
    ) -> None:
        """Check an access to a variable in memory; the thread sanitizer reports few of them."""
        has_marks = self.has_marks(address)
        lanes = max(lanes_of(type_text), 1)
        size = layout(type_text, self.structs)[0]
        checked = has_marks or not (address in self.private or self.inside(address, size))
        if not self.choices.variable_of(address) or not size or not checked:
            self.out.append(line)
            return
        defined = "-1"
        if value in self.unset:
            flag = self.flag(value, lanes_of(type_text))
            if lanes > 1:
                flag = self.emit(f"bitcast <{lanes} x i1> {flag} to i{lanes}")
            defined = self.emit(f"zext i{lanes} {flag} to i32")
        called = self.check(address, str(size), lanes, flags, defined, line)
        self.out.append(line)
        if result and has_marks:
            bits = self.emit(f"trunc i32 {called} to i{lanes}")
            vector = lanes_of(type_text)
            to = f"bitcast i{lanes} {bits} to <{lanes} x i1>" if vector else f"or i1 {bits}, {bits}"
            self.out.append(f"  %msl.defined.{result[1:]} = {to}")
