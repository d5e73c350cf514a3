"""The order of the meetings of lanes, and the rounds of the loops that contain the meetings.

A meeting is a SIMD operation or a barrier. A round is one iteration of a loop. Each lane runs until
its next meeting. Two lanes are at the same meeting if they are at the same call in the same rounds
of all loops. If lanes wait at different meetings, the first meeting in program order continues.
"""

import re

from ..metal.kernels import ENTRY_PREFIX
from .ir import LABEL, Function, debug
from .undefined import targets

MEETING = re.compile(
    r"^  (?:%\S+ = )?(?:tail |musttail |notail )?call [^@]*@__msl_(?:matrix|products|shuffle|reduce"
    r"|broadcast|scan|threadgroup_barrier|simdgroup_barrier|matrix_access|tensor)\("
)
ENTRY = re.compile(rf"@{ENTRY_PREFIX}")
CALLED = re.compile(r"@([\w.$-]+)\(")
BRANCHES = ("  br ", "  switch ")
MOST_LOOPS = 8  # nested loops with a round number; as in abi.h
UNKNOWN = -1  # the order of a meeting in a function that is not inlined


class _Graph:
    def __init__(self, function: Function) -> None:
        lines = function.body
        numbers = [int(number) for number in re.findall(r"%(\d+)", function.head)]
        self.entry = f"%{max(numbers, default=-1) + 1}"
        self.first_line: dict[str, int] = {}  # the line after each block's label
        self.successors: dict[str, list[str]] = {}
        self.predecessors: dict[str, list[str]] = {}
        self.block_of: dict[int, str] = {}  # the block of each meeting
        name = self.entry
        for number, line in enumerate(lines):
            if not line.startswith("  "):
                if match := LABEL.match(line):
                    name = f"%{match.group(1)}"
                    self.entry = name if number == 0 else self.entry
                    self.first_line[name] = number + 1
            elif line.startswith(BRANCHES):
                self.successors[name] = list(targets(lines, number))
                for target in self.successors[name]:
                    self.predecessors.setdefault(target, []).append(name)
            elif _meets(line):
                self.block_of[number] = name
        self.order = self._order()

    def _order(self) -> dict[str, int]:
        """Numbers the blocks so that only the back edges of loops lead to a lower number."""
        finished: list[str] = []
        seen, path = {self.entry}, [(self.entry, iter(self.successors.get(self.entry, ())))]
        while path:
            name, rest = path[-1]
            target = next((target for target in rest if target not in seen), None)
            if target is None:
                finished.append(name)
                path.pop()
            else:
                seen.add(target)
                path.append((target, iter(self.successors.get(target, ()))))
        return {name: place for place, name in enumerate(reversed(finished))}

    def loops(self) -> dict[str, set[str]]:
        """The blocks of each loop that has a meeting, by loop header. Outer loops are first."""
        result: dict[str, set[str]] = {}
        meetings = set(self.block_of.values())
        for header, sources in self.predecessors.items():
            at = self.order.get(header)
            left = [s for s in sources if at is not None and self.order.get(s, -1) >= at]
            inside = {header}
            while left:
                name = left.pop()
                if name not in inside:
                    inside.add(name)
                    left += self.predecessors.get(name, ())
            if len(inside) > 1 or header in sources:
                if self.entry not in inside and inside & meetings:
                    result[header] = inside
        return dict(sorted(result.items(), key=lambda loop: -len(loop[1])))


def mark_rounds(functions: list[Function]) -> None:
    """Insert calls that report the place of each meeting and the start of each round."""
    with_meetings: dict[str, Function] = {}
    for function in functions:
        is_in_shim = "@__msl_" in function.head and not ENTRY.search(function.head)
        if not is_in_shim and any(map(_meets, function.body)):
            with_meetings[CALLED.findall(function.head)[0]] = function
    inner = [name for name, function in with_meetings.items() if not ENTRY.search(function.head)]
    callers: dict[str, list[bool]] = {name: [] for name in inner}
    for function in functions if inner else ():
        called = [name for line in function.body for name in CALLED.findall(line)]
        called = [name for name in called if name in callers]
        # An entry that only calls a function belongs to a kernel that was not inlined.
        is_sole = bool(ENTRY.search(function.head)) and len(called) == 1
        is_sole = is_sole and not any(line.startswith(BRANCHES) for line in function.body)
        for name in called:
            callers[name].append(is_sole)
    for name, function in with_meetings.items():
        _mark(function, is_ordered=name not in callers or all(callers[name]))


def _meets(line: str) -> bool:
    return "@__msl_" in line and bool(MEETING.match(line))


def _mark(function: Function, is_ordered: bool) -> None:
    graph = _Graph(function)
    loops = graph.loops()
    around = {
        block: [header for header, inside in loops.items() if block in inside]
        for block in {*graph.block_of.values(), *loops}
    }
    order = graph.order
    where = {
        number: ([order[header] for header in around[block]], order[block], number)
        for number, block in graph.block_of.items()
        if block in order
    }
    # In the order of all blocks, a loop's blocks may be apart. Sorting by headers joins the blocks.
    places = sorted(where, key=lambda number: (*where[number][0], *where[number][1:]))
    added: dict[int, list[str]] = {}
    for place, number in enumerate(places):
        line = function.body[number]
        depth = min(len(where[number][0]), MOST_LOOPS)
        at = f"i32 {place if is_ordered else UNKNOWN}, i32 {depth}"
        added[number] = [f"  call void @__msl_place({at})" + debug(line)]
    for loop, (header, inside) in enumerate(loops.items()):
        level, again = around[header].index(header), f"%msl.again.{loop}"
        if level >= MOST_LOOPS:
            continue
        sources = ", ".join(f"[ {int(s in inside)}, {s} ]" for s in graph.predecessors[header])
        begin = end = graph.first_line[header]
        while " = phi " in function.body[end]:
            end += 1
        placed = next((line for line in function.body[end:] if debug(line)), "")
        round_ = f"  call void @__msl_round(i32 {level}, i32 {loop}, i32 {again})" + debug(placed)
        added[end] = [round_, *added.get(end, [])]
        added[begin] = [f"  {again} = phi i32 {sources}", *added.get(begin, [])]
    function.body = [
        new for number, line in enumerate(function.body) for new in [*added.get(number, []), line]
    ]
