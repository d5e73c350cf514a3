"""Plants faults: the text of a shader is changed, and a check of the tests must fail."""

import ctypes
import re
import textwrap
from functools import cache, lru_cache, partial
from typing import NamedTuple

import pytest

from tests.helpers.switched import SWITCH, switched
from torch_metal_attn import SimulatorFault, simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import Program

KERNEL_NAME = re.compile(r"\[\[kernel\b[^\]]*\]\]\s*void\s+(\w+)\(")

# {~old => new~}, where old or new may be empty.
CHANGE = re.compile(r"\{~(.*?)=>(.*?)~\}", re.DOTALL)
EVERYWHERE, WRONG = "everywhere", "wrong"


class Mutant(NamedTuple):
    """A fault that is planted in the text of a family of kernels.

    problem: a check that passes with the unchanged text, and fails with the fault.
    pattern: a part of the text with its changes marked; blanks match any blanks.
    everywhere: the text may occur at several places, which all change.
    fault: the kinds of fault that the simulator may report; None: the check may fail instead.
    """

    problem: object
    family: str
    pattern: str
    everywhere: bool
    fault: tuple

    @property
    def change(self):
        text = shaders.source(self.family)
        old, new = changed(self.pattern, text) or (CHANGE.sub(r"\1", self.pattern), "")
        return (repeated(old) if self.everywhere else old), new


class repeated(str):
    """A text that may occur several times."""

    __slots__ = ()


@cache
def changed(pattern, text):
    """The text that a pattern matches, and its change; None unless it matches one text."""
    parts = CHANGE.split(pattern)
    for words in (re.escape, lambda part: r"\s+".join(map(re.escape, part.split()))):
        expression = ""
        for i, part in enumerate(parts):
            if i % 3 == 0:
                expression += f"({words(part.strip())})"
            elif i % 3 == 1:
                # Blanks at the ends of the pattern do not count.
                before, after = (r"(\s*)" if parts[j].strip() else "()" for j in (i - 1, i + 2))
                expression += before + words(part.strip()) + after
        actual = list(re.finditer(expression, text))
        if len({match.group() for match in actual}) == 1:
            break
    else:
        return None
    groups = actual[0].groups()
    new = groups[0]
    kept = zip(groups[1::3], groups[2::3], groups[3::3], strict=True)
    for (before, after, text), inserted in zip(kept, parts[2::3], strict=True):
        new += f"{before} {inserted.strip()} {after}{text}"
    return actual[0].group(), new


def read(table, family, problem, fault):
    """{name: mutant} of a table's text. Further lines of a mutant are indented."""
    mutants = {}
    for line in textwrap.dedent(table).replace("\n    ", " ").strip().splitlines():
        kernels, rest = line.split(": ", 1) if "{}" in family else ("", line)
        head, pattern = rest.split(":", 1)
        assert CHANGE.search(pattern), f"{line!r} changes nothing"
        name, _, remarks = head.partition(" [")
        words = remarks.rstrip("]").split(", ")
        kinds = [word for word in words if word not in ("", EVERYWHERE)]
        kinds = tuple(None if x == WRONG else x for x in kinds[0].split(" or ")) if kinds else fault
        for kernel in kernels.split(", "):
            full_name = f"{kernel}: {name}" if kernel else name
            assert full_name not in mutants, f"two mutants have the name {full_name!r}"
            place = family.format(kernel), pattern.strip()
            mutants[full_name] = Mutant(problem, *place, EVERYWHERE in words, kinds)
    return mutants


def mutant_tests(
    table, family="{}", run=lambda problem: problem(), fault=(None,), together=False, fixtures=()
):
    """Two tests: each mutant is caught, and its problem passes if no fault is chosen.

    table: {problem: text}, in which one or several lines are a mutant:

        name [everywhere, race or wrong]: part of the text, {~old => new~}, and more

        The words in brackets are fields of Mutant. By default the text occurs once, and the check
        fails. If `family` has a {}, the line begins with its value and a colon. "dq, dkv: " plants
        the same fault in two kernels.
    run: runs a problem.
    fault: Mutant.fault of the mutants that name none in brackets.
    together: one text has the faults of all problems, which share a specialisation.
    fixtures: names of fixtures that the problems need.
    """
    mutants = {
        f"{_name(problem)}: {name}": mutant
        for problem, text in table.items()
        for name, mutant in read(text, family, problem, fault).items()
    }

    def among(mutant):
        """The changes in the same text as this mutant's."""
        return tuple(
            other.change
            for other in mutants.values()
            if other.family == mutant.family and (together or other.problem == mutant.problem)
        )

    def changes_of(problem):
        """The changes of the problem by family."""
        return {m.family: among(m) for m in mutants.values() if m.problem == problem}

    @pytest.mark.parametrize("mutant", mutants.values(), ids=mutants)
    def test_mutant_is_caught(mutant, monkeypatch):
        kernels = KERNEL_NAME.findall(shaders.source(mutant.family))
        changes = changes_of(mutant.problem)
        others = changes.pop(mutant.family)
        # Other kernels of the problem have the texts of its other mutants, with no fault chosen.
        _use(monkeypatch, _texts(changes), 0)
        _require(mutant.family, mutant.change[0])
        text, numbers = _switched(shaders.source(mutant.family), others)
        if mutant.change in numbers:
            _use(monkeypatch, {mutant.family: text}, numbers[mutant.change])
        else:
            plant(monkeypatch, mutant.family, *mutant.change)
        expect_caught(lambda: run(mutant.problem), fault=mutant.fault, kernel=kernels)

    @pytest.mark.parametrize("problem", table, ids=_name)
    def test_the_unchanged_kernels_pass(problem, monkeypatch):
        _use(monkeypatch, _texts(changes_of(problem)), 0)
        with simulate(check=True):
            run(problem)

    tests = test_mutant_is_caught, test_the_unchanged_kernels_pass
    marked = map(pytest.mark.mutant, tests)
    return tuple(map(pytest.mark.usefixtures(*fixtures), marked) if fixtures else marked)


def _name(problem):
    if isinstance(problem, partial) and not hasattr(problem, "__name__"):
        return f"{problem.func.__name__} {[*problem.args, *problem.keywords.values()]}"
    return getattr(problem, "__name__", problem)


def plant(monkeypatch, family, old, new):
    _require(family, old)
    text, source = shaders.source(family).replace(old, new), shaders.source
    monkeypatch.setattr(shaders, "source", lambda name: text if name == family else source(name))


def _texts(changes):
    return {family: _switched(shaders.source(family), of)[0] for family, of in changes.items()}


def _require(family, old):
    places = shaders.source(family).count(old)
    assert places > 0, f"{family} no longer contains {old!r}: update the mutant"
    once = not isinstance(old, repeated)
    assert (places == 1) == once, f"{family} contains {old!r} {places} times: update the mutant"


def _use(monkeypatch, texts, number):
    source = shaders.source
    monkeypatch.setattr(shaders, "source", lambda name: texts.get(name) or source(name))
    use_fault(monkeypatch, number, KERNEL_NAME.findall("".join(texts.values())))


def use_fault(monkeypatch, number, kernels=None):
    """Choose this fault in the texts of `kernels`, or in all texts with several faults."""
    image = Program.image

    def chosen(program, name):
        actual = image(program, name)
        if SWITCH in program.text and (kernels is None or name in kernels):
            ctypes.c_int.in_dll(actual.library, SWITCH).value = number
        return actual

    monkeypatch.setattr(Program, "image", chosen)


_switched = lru_cache(maxsize=None)(switched)


def expect_caught(check, *, fault=None, kernel=None):
    """Require that `check` fails, or that the simulator reports one of the faults in a kernel."""
    kinds, kernels = (x if isinstance(x, tuple | list) else (x,) for x in (fault, kernel))
    errors = tuple(AssertionError if kind is None else SimulatorFault for kind in kinds)
    with simulate(check=True), pytest.raises(errors) as raised:
        check()
    if isinstance(raised.value, SimulatorFault):
        assert raised.value.kind in kinds, raised.value
        assert raised.value.kernel in kernels
        assert raised.value.file.startswith("shaders/")
        assert raised.value.line > 0
