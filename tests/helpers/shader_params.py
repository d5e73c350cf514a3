"""The structs and buffer slots of shaders/params, read from its text."""

import ctypes
import re

from torch_metal_attn.runtime import shaders


def struct(name):
    """The struct as a ctypes.Structure, including nested structs."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", _text(), re.DOTALL)[1]
    fields = re.findall(r"^  (\w+) (\w+)(?:\[(\w+)\])?;", body, re.MULTILINE)
    types = []
    for kind, field, count in fields:
        element = getattr(ctypes, f"c_{kind.removesuffix('_t')}", None) or struct(kind)
        if count:
            element *= int(re.search(rf"^#define {count} (\d+)$", _text(), re.MULTILINE)[1])
        types.append((field, element))
    return type(name, (ctypes.Structure,), {"_fields_": types})


def slots(enum, prefix):
    """{name: slot}; names are in lower case and without the prefix."""
    body = re.search(rf"enum {enum} {{(.*?)}};", _text(), re.DOTALL)[1]
    names = re.findall(rf"{prefix}(\w+) = (\d+)", body)
    return {name.lower(): int(slot) for name, slot in names}


def values(structure):
    """{name: field}; a struct or an array is a tuple of all its numbers."""
    results = {name: getattr(structure, name) for name, _ in structure._fields_}
    return {
        name: field if isinstance(field, int | float) else tuple(_numbers(field))
        for name, field in results.items()
    }


def _numbers(field):
    if isinstance(field, ctypes.Structure):
        field = [getattr(field, name) for name, _ in field._fields_]
    if isinstance(field, int | float):
        yield field
    else:
        for part in field:
            yield from _numbers(part)


def _text():
    return shaders.source("flash_fwd") + shaders.source("flash_decode")
