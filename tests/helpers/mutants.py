"""Plants faults in the shaders' text, and checks that a test catches them."""

import pytest

from torch_metal_attn import SimulatorFault, shaders, simulate


def plant(monkeypatch, families, old, new):
    """Replace `old` by `new` in the text of `families`, one name or several."""
    families = (families,) if isinstance(families, str) else families
    source = shaders.source
    for family in families:
        assert old in source(family), f"{family} no longer holds {old!r}: update the mutant"

    def planted(family):
        text = source(family)
        return text.replace(old, new) if family in families else text

    monkeypatch.setattr(shaders, "source", planted)


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
        assert raised.value.kind in kinds
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
