"""Plants faults in the shaders' text, and checks that a test catches them."""

from functools import lru_cache

import pytest

from tests.helpers.switched import SWITCH, choose, switched
from torch_metal_attn import SimulatorFault, simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import Program


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
    """Contexts in which `family` is each text of `plant_among`, with no fault chosen."""
    for text, _ in _switched(shaders.source(family), tuple(others)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            _use(monkeypatch, family, text, 0)
            yield


def _require(family, old):
    assert old in shaders.source(family), f"{family} no longer holds {old!r}: update the mutant"


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

    fault: the kind that the simulator reports, or None if only the numbers show it; a tuple if it
        depends on chance which one.
    """
    kinds = fault if isinstance(fault, tuple) else (fault,)
    errors = tuple(AssertionError if kind is None else SimulatorFault for kind in kinds)
    with simulate(check=True), pytest.raises(errors) as raised:
        check()
    if isinstance(raised.value, SimulatorFault):
        assert raised.value.kind in kinds, raised.value
        assert raised.value.kernel == kernel
        assert raised.value.file.startswith("shaders/")
        assert raised.value.line > 0


def cases(mutants, size=3):
    """Parameters (shown, *mutant) of {shown: {name: mutant}}; a fault not given is None.

    size: of a mutant with its fault.
    """
    return [
        pytest.param(
            shown, *(*mutant, None)[:size], id=f"{getattr(shown, '__name__', shown)}: {name}"
        )
        for shown, by_name in mutants.items()
        for name, mutant in by_name.items()
    ]


def pairs(by_name, kernel=None):
    """(old, new) of the mutants in {name: mutant}; where each begins with its kernel, of one."""
    mutants = by_name.values()
    if kernel is None:
        return [mutant[:2] for mutant in mutants]
    return [mutant[1:3] for mutant in mutants if mutant[0] == kernel]
