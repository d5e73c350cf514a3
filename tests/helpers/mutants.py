"""Planted faults: a text of a shader is changed, and a problem of the tests must notice.

`mutant_tests` makes the tests of a table of them; `plant` serves tests that need one fault.
"""

import re
from functools import lru_cache, partial
from typing import NamedTuple

import pytest

from tests.helpers.switched import SWITCH, choose, switched
from torch_metal_attn import SimulatorFault, simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import Program

KERNEL_NAME = re.compile(r"\[\[kernel\b[^\]]*\]\]\s*void\s+(\w+)\(")


class Mutant(NamedTuple):
    """A fault that is planted where `old` stands in the text of a family of kernels.

    problem: what passes as the text is, and fails with the fault.
    fault: the kind that the simulator reports, None if only the numbers show it, or a tuple if it
        depends on chance which one.
    """

    problem: object
    family: str
    old: str
    new: str
    fault: str | tuple | None = None

    @property
    def change(self):
        return self.old, self.new


class repeated(str):
    """An `old` text that stands at several places, which change alike."""

    __slots__ = ()


def mutant_tests(
    table, family="{}", run=lambda problem: problem(), fault=None, together=False, fixtures=()
):
    """Two tests: each mutant is caught, and with no fault chosen its problem passes.

    table: {problem: {name: mutant}}, where a mutant is (old, new) or (old, new, fault), behind what
        fills the {} of `family` if it has one.
    run: runs a problem.
    fault: of mutants that name none.
    together: one text has the faults of all problems, which share a specialisation; else of one.
    fixtures: names of those that the problems need.
    """
    mutants = {
        f"{_name(problem)}: {name}": _mutant(problem, family, mutant, fault)
        for problem, by_name in table.items()
        for name, mutant in by_name.items()
    }

    def among(mutant):
        """The changes that share a text with this mutant's."""
        return tuple(
            other.change
            for other in mutants.values()
            if other.family == mutant.family and (together or other.problem == mutant.problem)
        )

    @pytest.mark.parametrize("mutant", mutants.values(), ids=mutants)
    def test_mutant_is_caught(mutant, monkeypatch):
        plant_among(monkeypatch, mutant.family, *mutant.change, among(mutant))
        kernels = KERNEL_NAME.findall(shaders.source(mutant.family))
        expect_caught(lambda: run(mutant.problem), fault=mutant.fault, kernel=kernels)

    @pytest.mark.parametrize("problem", table, ids=_name)
    def test_the_unchanged_kernels_pass(problem):
        texts = {m.family: among(m) for m in mutants.values() if m.problem == problem}
        for name, changes in texts.items():
            for _ in each_unchanged(name, changes):
                with simulate(check=True):
                    run(problem)

    test_mutant_is_caught.planted = len(mutants)  # for tests/helpers/count_mutants.py
    tests = test_mutant_is_caught, test_the_unchanged_kernels_pass
    return tuple(map(pytest.mark.usefixtures(*fixtures), tests)) if fixtures else tests


def _name(problem):
    if isinstance(problem, partial):
        return f"{problem.func.__name__} {[*problem.args, *problem.keywords.values()]}"
    return getattr(problem, "__name__", problem)


def _mutant(problem, family, mutant, fault):
    if "{}" in family:
        family, mutant = family.format(mutant[0]), mutant[1:]
    return Mutant(problem, family, *(*mutant, fault)[:3])


def plant(monkeypatch, families, old, new):
    """Replace `old` by `new` in the text of `families`, one name or several."""
    families = (families,) if isinstance(families, str) else families
    source = shaders.source
    for family in families:
        _require(family, old)

    def planted(family):
        text = source(family)
        return text.replace(old, new) if family in families else text

    monkeypatch.setattr(shaders, "source", planted)


def plant_among(monkeypatch, family, old, new, others):
    """`plant`, in a text that holds the `others` too, so that they share what is compiled.

    others: (old, new) of faults that are shown by the same problem.
    """
    _require(family, old)
    for text, numbers in _switched(shaders.source(family), tuple(others)):
        if (old, new) in numbers:
            _use(monkeypatch, family, text, numbers[old, new])
            return
    plant(monkeypatch, family, old, new)


def each_unchanged(family, others):
    """Contexts in which `family` is each text of `plant_among`, with no fault chosen.

    Where all the faults are compiled alone, the text as it is.
    """
    source = shaders.source(family)
    for text, _ in _switched(source, tuple(others)) or [(source, {})]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            _use(monkeypatch, family, text, 0)
            yield


def _require(family, old):
    places = shaders.source(family).count(old)
    assert places > 0, f"{family} no longer holds {old!r}: update the mutant"
    once = not isinstance(old, repeated)
    assert (places == 1) == once, f"{family} holds {old!r} {places} times: update the mutant"


def _use(monkeypatch, family, text, number):
    source = shaders.source
    monkeypatch.setattr(shaders, "source", lambda name: text if name == family else source(name))
    use_fault(monkeypatch, number)


def use_fault(monkeypatch, number):
    """Choose this fault in each text that holds several."""
    image = Program.image

    def chosen(program, name):
        found = image(program, name)
        if SWITCH in program.text:
            choose(found, number)
        return found

    monkeypatch.setattr(Program, "image", chosen)


_switched = lru_cache(maxsize=None)(switched)


def expect_caught(check, *, fault=None, kernel=None):
    """`check` fails, or the simulator stops `kernel`, at a place that it names.

    fault: as a Mutant's.
    kernel: its name, or of several that may be stopped.
    """
    kinds = fault if isinstance(fault, tuple) else (fault,)
    errors = tuple(AssertionError if kind is None else SimulatorFault for kind in kinds)
    with simulate(check=True), pytest.raises(errors) as raised:
        check()
    if isinstance(raised.value, SimulatorFault):
        assert raised.value.kind in kinds, raised.value
        assert raised.value.kernel in ((kernel,) if isinstance(kernel, str) else kernel)
        assert raised.value.file.startswith("shaders/")
        assert raised.value.line > 0
