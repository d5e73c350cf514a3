"""A function is traced once, and again if something that it depends on has changed."""

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from torch_metal_attn import masks, scores
from torch_metal_attn.flex import program
from torch_metal_attn.flex.program import compiled, traced

CPU = torch.device("cpu")
FACTOR = 2.0
FLAG = torch.tensor(True)
SETTINGS = SimpleNamespace(factor=2.0)
NUMBER = type("Number", (float,), {})(1.0)
NUMBERS = type("Numbers", (list,), {})([1.0])
NUMBER.factor = NUMBERS.factor = 2.0


@pytest.fixture
def traces(monkeypatch):
    count = []

    def counted(*arguments):
        count.append(arguments)
        return traced(*arguments)

    monkeypatch.setattr(program, "traced", counted)
    monkeypatch.setattr(program, "_programs", {})
    return count


def check(mods, mask=None):
    for mod in mods:
        actual, expected = compiled(mod, mask, CPU), traced(mod, mask, CPU)
        assert actual.texts == expected.texts
        assert actual.shares == expected.shares
        assert all(a is b for a, b in zip(actual.captures, expected.captures, strict=True))


def test_equal_functions_are_traced_once(traces):
    def attend(slopes, mask):
        return compiled(scores.alibi(slopes), masks.sliding_window(3) & mask, CPU)

    first = attend(torch.ones(2), masks.causal())
    slopes = torch.zeros(2)
    second = attend(slopes, masks.causal())
    assert len(traces) == 1
    assert second.texts == first.texts
    assert second.captures[0] is slopes
    attend(torch.ones(2), masks.causal(1))
    attend(torch.ones(3), masks.causal())
    attend(torch.ones(2, requires_grad=True), masks.causal())
    assert len(traces) == 4


def of_closure(factor):
    return lambda score, b, h, q_idx, kv_idx: score * factor


def of_tensors(first, second):
    return lambda score, b, h, q_idx, kv_idx: score * first[h] + second[q_idx]


def of_inner(factor):
    inner = of_closure(factor)
    return lambda score, *position: inner(score, *position) + 1


def of_named(defaults):
    def mod(score, b, h, q_idx, kv_idx, *, factor=0.0, shift=0.0):
        return score * factor + shift

    mod.__kwdefaults__ = defaults
    return mod


def of_argument(factor, score, b, h, q_idx, kv_idx):
    return score * factor


TENSOR, OTHER = torch.ones(4), torch.zeros(4)
CHANGES = {
    "a number": (of_closure(2.0), of_closure(3.0)),
    "its type": (of_closure(1), of_closure(True)),
    "its sign": (of_closure(0.0), of_closure(-0.0)),
    "an element": (lambda s, b, h, q, kv, x=[1]: s * x[0], lambda s, b, h, q, kv, x=[2]: s * x[0]),
    "one tensor or two": (of_tensors(TENSOR, TENSOR), of_tensors(TENSOR, OTHER)),
    "one memory or two": (of_tensors(TENSOR, TENSOR[:]), of_tensors(TENSOR, OTHER)),
    "a dtype": (of_tensors(TENSOR, OTHER), of_tensors(TENSOR, OTHER.half())),
    "a default": (lambda s, b, h, q, kv, x=2.0: s * x, lambda s, b, h, q, kv, x=3.0: s * x),
    # The values have the same order, and their names are swapped.
    "a named default": (
        of_named({"factor": 2.0, "shift": 3.0}),
        of_named({"shift": 2.0, "factor": 3.0}),
    ),
    "an argument": [functools.partial(of_argument, factor) for factor in (2.0, 3.0)],
    "an inner function": (of_inner(2.0), of_inner(3.0)),
    "a constant": (lambda s, b, h, q, kv: s * 0.0, lambda s, b, h, q, kv: s * -0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_traced_again(name, traces):
    check(CHANGES[name])
    assert len(traces) == 2


def of_import(score, b, h, q_idx, kv_idx):
    import os

    return score * float(os.environ["FACTOR_OF_TEST"])


def of_setting(s, b, h, q, kv, ask=torch.is_autocast_enabled):
    return s * (2.0 if ask("cpu") else 3.0)


# Functions that read a value which changes between two calls.
CHANGING_VALUES = {
    "a global": lambda s, b, h, q, kv: s * FACTOR,
    "a global by a builtin function": lambda s, b, h, q, kv: s * globals()["FACTOR"],
    "a value": lambda s, b, h, q, kv: s * 2 if FLAG else s,
    "a list of values": lambda s, b, h, q, kv: s * 2 if FLAG.tolist() else s,
    "an object": lambda s, b, h, q, kv: s * SETTINGS.factor,
    "a number of another type": lambda s, b, h, q, kv: s * NUMBER.factor,
    "a list of another type": lambda s, b, h, q, kv: s * NUMBERS.factor,
    "a setting": lambda s, b, h, q, kv: s * (2.0 if torch.is_autocast_enabled("cpu") else 3.0),
    "a setting by its function": of_setting,
    "what it imports": of_import,
}


@pytest.mark.parametrize("name", CHANGING_VALUES)
def test_values_that_change_between_calls(name, monkeypatch):
    mod = CHANGING_VALUES[name]
    monkeypatch.setenv("FACTOR_OF_TEST", "2")
    check([mod])
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    for each in (SETTINGS, NUMBER, NUMBERS):
        monkeypatch.setattr(each, "factor", 3.0)
    monkeypatch.setenv("FACTOR_OF_TEST", "3")
    FLAG.logical_not_()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            check([mod])
    finally:
        FLAG.logical_not_()


def test_values_folded_into_the_trace_are_updated(traces):
    slopes = torch.ones(2)

    def mod(score, b, h, q_idx, kv_idx):
        return score * slopes.exp()[h]

    first = compiled(mod, None, CPU).captures[0].clone()
    slopes.mul_(2)
    assert (compiled(mod, None, CPU).captures[0] > first).all()
    assert len(traces) == 2


def test_no_tensor_is_kept():
    slopes = torch.ones(2)
    reference = weakref.ref(slopes)
    compiled(scores.alibi(slopes), None, CPU)
    del slopes
    gc.collect()
    assert reference() is None
