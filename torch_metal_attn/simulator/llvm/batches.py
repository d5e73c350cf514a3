"""The pass of plain builds: successive matrix products become one meeting of the lanes.

A meeting of the lanes (rounds.py) costs far more than an 8x8 product. So the operands of each
product are stored, and `__msl_products` computes all products when the first result is read, the
block ends, or the SIMD group has another operation. The order of the products and their results
stay the same.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from .ir import INSTRUCTION, LABEL, NAME, VALUE, Function, operand, parse, split
from .rounds import mark_rounds

ABI = (Path(__file__).parents[1] / "shim" / "abi.h").read_text()
MOST = int(ABI.partition("#define MSL_MOST_PRODUCTS ")[2].partition("u")[0])
PRODUCT_BYTES, OPERAND_BYTES = 1024, 256  # of abi.h's __msl_matrices

PRODUCT = re.compile(
    rf"^  (?P<result>{NAME}) = (?:tail )?call (?:noundef )?(?P<type>.+?) @__msl_matrix"
    r"\((?P<arguments>.*)\)[^)]*$"
)
# Instructions that can be delayed, because they neither read nor write memory.
PURE = frozenset(
    "fadd fsub fmul fdiv fneg fcmp icmp select bitcast insertelement extractelement shufflevector "
    "insertvalue extractvalue add sub mul and or xor shl lshr ashr zext sext trunc fpext fptrunc "
    "sitofp uitofp fptosi fptoui freeze getelementptr".split()
)
# LLVM's functions that read no memory and may take results as arguments.
PURE_CALL = re.compile(r"@llvm\.(?:fma|fmuladd|fabs|maxnum|minnum|maximum|minimum|exp2?|log2?)\.")
BATCH_ENDS = frozenset({"phi", "alloca", "invoke", "atomicrmw", "cmpxchg"})
# Instructions without a result that neither end a block nor meet other lanes.
MOVABLE = re.compile(r"^  (?:store |(?:tail )?call \S+ @llvm\.)")


@dataclass
class _Product:
    result: str
    type: str
    combine: str
    accumulator: int  # the index of the batch's product to which this one is added; -1 for none


class _Pass:
    def __init__(self) -> None:
        self.out: list[str] = []
        self.tables: list[str] = []
        self.places = 0
        self.place = ""  # the address of this batch's operands
        self.batch: list[_Product] = []
        self.results: dict[str, int] = {}  # each result of the batch and its product's index
        self.delayed: list[str] = []  # lines that read results
        self.late: set[str] = set()  # names that delayed lines assign

    def line(self, line: str) -> None:
        if "@__msl_matrix(" in line and (match := PRODUCT.match(line)):
            self.product(match)
        elif self.batch and not self.move(line):
            self.flush()
            self.out.append(line)
        elif not self.batch:
            self.out.append(line)

    def move(self, line: str) -> bool:
        """Move a line before the batch or, if it reads results, after it; False if impossible."""
        assigned = INSTRUCTION.match(line)
        if assigned is None:
            if not MOVABLE.match(line) or self.reads_results(line):
                return False
            self.out.append(line)
            return True
        result, instruction, rest = assigned.groups()
        is_call = instruction == "call"
        if instruction in BATCH_ENDS or (is_call and "@llvm." not in line):
            return False
        if not self.reads_results(rest):
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
        type_ = match.group("type")
        function, a, b, c = map(operand, split(match.group("arguments")))
        if len(self.batch) == MOST or self.reads_results(f"{a} {b}") or c in self.late:
            self.flush()
        if not self.batch:
            self.places += 1
            self.place = f"%msl.place.{self.places}"
            self.out.append(f"  {self.place} = call ptr @__msl_operands()")
        accumulator = self.results.get(c, -1)
        for which, value in enumerate((a, b, c)):
            if which < 2 or accumulator < 0:
                address = self.at(len(self.batch), which)
                self.out.append(f"  store {type_} {value}, ptr {address}, align 8")
        self.results[match.group("result")] = len(self.batch)
        self.batch.append(_Product(match.group("result"), type_, function, accumulator))

    def at(self, product: int, which: int) -> str:
        name = f"{self.place}.{product}.{which}"
        offset = product * PRODUCT_BYTES + which * OPERAND_BYTES
        self.out.append(f"  {name} = getelementptr i8, ptr {self.place}, i64 {offset}")
        return name

    def flush(self) -> None:
        """Compute the batch, read its results, and add the delayed lines."""
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


def _name_values(function: Function) -> None:
    """Name a function's values and blocks, because LLVM requires numbers to be in order."""
    body = function.body
    if not LABEL.match(body[0]):  # an unnamed first block has no label
        numbers = [int(number) for number in re.findall(r"%(\d+)", function.head)]
        body = [f"{max(numbers, default=-1) + 1}:", *body]
    text = re.sub(r"%(\d+)", r"%msl.v\1", "\n".join([function.head, *body]))
    named = re.sub(r"^(\d+):", r"msl.v\1:", text, flags=re.MULTILINE)
    function.head, *function.body = named.split("\n")


def batch_products(text: str) -> str:
    """The IR with its matrix products in batches."""
    module = parse(text)
    products = _Pass()
    for function in module.functions:
        if any("@__msl_matrix(" in line for line in function.body):
            _name_values(function)
            products.out = []
            for line in function.body:
                products.line(line)
            function.body = products.out
    mark_rounds(module.functions)
    module.outside += products.tables
    return module.text() + "\n"
