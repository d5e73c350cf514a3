"""The pass of plain builds: matrix products that follow each other become one meeting of the lanes.

Every `__msl_matrix` is a rendezvous of a SIMD group, and a rendezvous costs far more than an 8x8
product. A lane needs a result only where code reads it, not where another product adds to it. So
each product's operands are left in a place for them, and `__msl_products` computes all of them
where the first result is read, the block ends, or another operation of the SIMD group follows. The
products and their order are the same, so the results are too, bit for bit.
"""

import re
from dataclasses import dataclass

MOST = 16  # as MSL_MOST_PRODUCTS in abi.h
PRODUCT_BYTES, OPERAND_BYTES = 1024, 256  # of abi.h's __msl_matrices

FUNCTION = re.compile(r"^define .*?^}$", re.MULTILINE | re.DOTALL)
PRODUCT = re.compile(
    r"^  (?P<result>%\S+) = (?:tail )?call (?:noundef )?(?P<type>.+?) @__msl_matrix"
    r"\((?P<arguments>.*)\)[^)]*$",
    re.MULTILINE,
)
ARGUMENT_ATTRIBUTES = re.compile(r"^(?:noundef|nonnull) ")
ASSIGNED = re.compile(r"^  (%\S+) = (?:tail |notail )?([a-z]+)")
VALUE = re.compile(r'%(?:[\w.$-]+|"[^"]*")')
# Instructions that can run later, as they neither read nor write memory.
PURE = frozenset(
    "fadd fsub fmul fdiv fneg fcmp icmp select bitcast insertelement extractelement shufflevector "
    "insertvalue extractvalue add sub mul and or xor shl lshr ashr zext sext trunc fpext fptrunc "
    "sitofp uitofp fptosi fptoui freeze getelementptr".split()
)
# Calls of LLVM's own that read no memory and whose arguments may be results.
PURE_CALL = re.compile(r"@llvm\.(?:fma|fmuladd|fabs|maxnum|minnum|maximum|minimum|exp2?|log2?)\.")
NOT_PASSED = frozenset({"phi", "alloca", "invoke", "atomicrmw", "cmpxchg"})
# What neither ends a block nor meets other lanes.
PASSED = re.compile(r"^  (?:store |(?:tail )?call \S+ @llvm\.)")


@dataclass
class _Product:
    result: str
    type: str
    combine: str
    accumulator: int  # the product of this batch that it adds to, or -1: the operand


def _split(arguments: str) -> list[str]:
    """The arguments of a call; vectors' constants have commas too."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "<({[") - (character in ">)}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _operand(argument: str, type_: str) -> str:
    """`%x` of "double noundef %x"."""
    argument = argument[len(type_) + 1 :]
    while match := ARGUMENT_ATTRIBUTES.match(argument):
        argument = argument[match.end() :]
    return argument


class _Pass:
    def __init__(self) -> None:
        self.out: list[str] = []
        self.tables: list[str] = []
        self.places = 0
        self.place = ""  # of this batch's operands
        self.batch: list[_Product] = []
        self.results: dict[str, int] = {}  # names of the batch's results
        self.delayed: list[str] = []  # lines that read results
        self.late: set[str] = set()  # names that such lines assign

    def line(self, line: str) -> None:
        if match := PRODUCT.match(line):
            self.product(match)
        elif self.batch and not self.passed(line):
            self.flush()
            self.out.append(line)
        elif not self.batch:
            self.out.append(line)

    def passed(self, line: str) -> bool:
        """Put a line before the batch or, if it reads results, after it; False if neither will."""
        assigned = ASSIGNED.match(line)
        if assigned is None:
            if not PASSED.match(line) or self.reads_results(line):
                return False
            self.out.append(line)
            return True
        result, instruction = assigned.groups()
        is_call = instruction == "call"
        if instruction in NOT_PASSED or (is_call and "@llvm." not in line):
            return False
        if not self.reads_results(line[assigned.end() :]):
            self.out.append(line)
            return True
        if not (PURE_CALL.search(line) if is_call else instruction in PURE):
            return False
        self.delayed.append(line)
        self.late.add(result)
        return True

    def reads_results(self, text: str) -> bool:
        return any(name in self.results or name in self.late for name in VALUE.findall(text))

    def product(self, match: re.Match[str]) -> None:
        combine, *given = _split(match.group("arguments"))
        type_ = match.group("type")
        a, b, c = (_operand(argument, type_) for argument in given)
        if len(self.batch) == MOST or self.reads_results(f"{a} {b}") or c in self.late:
            self.flush()
        if not self.batch:
            self.places += 1
            self.place = f"%msl.place.{self.places}"
            self.out.append(f"  {self.place} = call ptr @__msl_operands()")
        accumulator = self.results.get(c, -1)
        for which, operand in enumerate((a, b, c)):
            if which < 2 or accumulator < 0:
                address = self.at(len(self.batch), which)
                self.out.append(f"  store {type_} {operand}, ptr {address}, align 8")
        function = combine.split(" ")[-1]
        self.results[match.group("result")] = len(self.batch)
        self.batch.append(_Product(match.group("result"), type_, function, accumulator))

    def at(self, product: int, which: int) -> str:
        """The address of one of a product's a, b, c and result."""
        name = f"{self.place}.{product}.{which}"
        offset = product * PRODUCT_BYTES + which * OPERAND_BYTES
        self.out.append(f"  {name} = getelementptr i8, ptr {self.place}, i64 {offset}")
        return name

    def flush(self) -> None:
        """Compute the batch, read its results, and do what waited for them."""
        table = f"@msl.products.{len(self.tables)}"
        entry = "{ ptr, i32, i32 }"
        entries = ", ".join(
            f"{entry} {{ ptr {p.combine}, i32 {p.accumulator}, i32 0 }}" for p in self.batch
        )
        count = len(self.batch)
        self.tables.append(f"{table} = private constant [{count} x {entry}] [{entries}]")
        self.out.append(
            f"  call void @__msl_products(ptr {table}, i32 {count}) convergent nomerge nounwind"
        )
        for index, product in enumerate(self.batch):
            address = self.at(index, 3)
            self.out.append(f"  {product.result} = load {product.type}, ptr {address}, align 8")
        self.out += self.delayed
        self.batch, self.delayed = [], []
        self.results, self.late = {}, set()


def _named(function: str) -> str:
    """A function with names for its values and blocks, as numbers must be in order."""
    head, _, body = function.partition("\n")
    numbers = [int(number) for number in re.findall(r"%(\d+)", head)]
    entry = max(numbers, default=-1) + 1  # its block, which has no label
    text = f"{head}\n{entry}:\n{body}"
    return re.sub(r"^(\d+):", r"v\1:", re.sub(r"%(\d+)", r"%v\1", text), flags=re.MULTILINE)


def batch_products(text: str) -> str:
    """The IR with its matrix products in batches."""
    work = _Pass()

    def rewritten(function: re.Match[str]) -> str:
        if not PRODUCT.search(function.group()):
            return function.group()
        work.out = []
        for line in _named(function.group()).split("\n"):
            work.line(line)
        return "\n".join(work.out)

    return FUNCTION.sub(rewritten, text) + "\n".join(work.tables) + "\n"
