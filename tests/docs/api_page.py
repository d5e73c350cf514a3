"""docs/api.md, made from signatures and docstrings: `python -m tests.docs.api_page` writes it."""

import importlib
import inspect
import re
import textwrap

import torch

from tests.docs.doc_pages import ROOT

PAGE = ROOT / "docs" / "api.md"
MODULES = """
torch_metal_attn torch_metal_attn.kv_cache torch_metal_attn.masks torch_metal_attn.scores
torch_metal_attn.rope torch_metal_attn.distributed torch_metal_attn.quantisation
torch_metal_attn.mps torch_metal_attn.simulator torch_metal_attn.simulator.lint
torch_metal_attn.integrations.transformers torch_metal_attn.integrations.comfyui
torch_metal_attn.vllm
""".split()
# The modules that the package shows under another name than their own.
HOMES = {"torch_metal_attn.mps": "torch_metal_attn.runtime.mps"}
INTRODUCTION = """\
# API

Every public function and class with its signature, and every op. `help()` shows the whole
docstring, with shapes and errors. The guides have examples: [ops](ops.md), [training](training.md),
[serving](serving.md), [flex attention](flex.md).

This page is written by `python -m tests.docs.api_page`, and a test compares it with the code.
"""
OPS = """\
## torch.ops.metal_attn

[Ops](ops.md) says what each op computes. `(a!)` marks an argument that the op writes to. Two
lists of options are those of many ops:
"""
# Options by the word that stands for them: an op, and where in its schema they begin.
SHARED = {"[attention]": ("flash_fwd", "float? "), "[flex]": ("flex_fwd", "Tensor[] captures")}
WIDTH = 140  # as of every page


def text():
    """The page."""
    ops = public_ops()
    shared = {word: _options(ops[op], first) for word, (op, first) in SHARED.items()}
    lists = [_item(f"`{word}` is `{options}`") for word, options in shared.items()]
    items = []
    for schema in ops.values():
        for word, options in shared.items():
            schema = schema.replace(options, word)
        items.append(_item(f"`{schema}`"))
    return "\n".join([INTRODUCTION, *map(_module, MODULES), OPS, *lists, "", *items]) + "\n"


def _options(schema, first):
    """From the first to the last one before those of a cache."""
    return first + re.split(r", Tensor\? block_table|\) -> ", schema.partition(first)[2])[0]


def public_ops():
    """The schema of each op that is no inner one, by its name."""
    inner = re.compile(r"_.*|.*_(explain|plan)")  # the latter are what explain() calls
    ops = {}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("metal_attn::")
        if name != schema.name and not inner.fullmatch(name):
            ops[name] = str(schema).removeprefix("metal_attn::")
    return dict(sorted(ops.items()))


def _module(path):
    module = importlib.import_module(HOMES.get(path, path))
    names = getattr(module, "__all__", None) or [
        name
        for name, own in vars(module).items()
        if getattr(own, "__module__", "") == module.__name__
    ]
    parts = [f"## {path}\n", f"{_first_line(module)}\n"]
    for name in names:
        own = getattr(module, name)
        if name.startswith("_") or not (inspect.isclass(own) or inspect.isfunction(own)):
            continue
        parts.append(_entry(name, own))
        if inspect.isclass(own) and not issubclass(own, Exception):
            for method, function in vars(own).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    parts.append(_entry(f"{name}.{method}", function))
    return "\n".join(parts) + "\n"


def _entry(name, own):
    return _item(f"`{name}{_signature(own)}`: {_first_line(own)}")


def _signature(own):
    """Without types, which the docstring has in words; "" for an exception."""
    if inspect.isclass(own) and issubclass(own, Exception):
        return ""
    signature = inspect.signature(own)
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    # A function as a default has its address in its name.
    return re.sub(r"<function (\w+) at \w+>", r"\1", str(inspect.Signature(parameters)))


def _first_line(own):
    return inspect.getdoc(own).split("\n")[0].replace("*", r"\*")


def _item(text):
    return textwrap.fill(
        f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
