"""The structs and buffer slots of shaders/params.h, read from its text."""

import ctypes
import re

from torch_metal_attn import shaders

TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}


def struct(name):
    """The struct as a ctypes.Structure, structs inside it included."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", _text(), re.DOTALL)[1]
    fields = re.findall(r"^  (\w+) (\w+);", body, re.MULTILINE)
    types = [(field, TYPES.get(kind) or struct(kind)) for kind, field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": types})


def slots(enum, prefix):
    """Slot by name, in lower case and without the prefix."""
    body = re.search(rf"enum {enum} {{(.*?)}};", _text(), re.DOTALL)[1]
    names = re.findall(rf"{prefix}(\w+) = (\d+)", body)
    return {name.lower(): int(slot) for name, slot in names}


def values(structure):
    """The fields as numbers and, of structs inside, as tuples of numbers."""

    def value(field):
        field = getattr(structure, field)
        if isinstance(field, ctypes.Structure):
            return tuple(getattr(field, name) for name, _ in field._fields_)
        return field

    return {name: value(name) for name, _ in structure._fields_}


def _text():
    return shaders.source("flash_fwd")
