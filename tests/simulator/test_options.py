"""The simulator's functions refuse options and arguments of a wrong type or out of range."""

import numpy as np
import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import compile_shader, replacing_compile_shader, simulate
from torch_metal_attn.simulator.library import ShaderKernel
from torch_metal_attn.simulator.lint import lint_source

SOURCE = """
kernel void scale(device float* x, constant float& by) { x[0] = by; }
kernel void reverse(device float* x, threadgroup float* scratch [[threadgroup(0)]]) {}
"""
ONE, META = torch.zeros(1), torch.zeros(1, device="meta")


def block(**options):
    with simulate(**options):
        pytest.fail("the block is entered")


def replaced(**options):
    with replacing_compile_shader(**options):
        pytest.fail("the block is entered")


def compiled(source=SOURCE, **options):
    compile_shader(source, **options)


def linted(source=SOURCE, **options):
    lint_source(source, **options)


KERNEL_OPTIONS = {"check": True, "count": True, "seed": 3, "workers": 1, "language": "4.0"}
KERNEL_OPTIONS |= {"lane_map": 3, "relaxed_precision": "round"}
NOT_A_LIST = {"check": True, "uninitialised": ONE}
WRONG = {
    (block, ValueError): [
        ({"workers": 0}, "workers is 0; .* from 1 to"),
        *(
            ({name: value}, f"{name} is {value!r}; .* from [01] to")
            for name in ("seed", "workers", "step_limit")
            for value in (-1, 1.5, "2", 2**64)
        ),
        ({"uninitialised": [ONE]}, "uninitialised needs check=True"),
        (NOT_A_LIST | {"uninitialised": [ONE, META]}, r"uninitialised\[1\] is on meta"),
        *(
            ({"record": True, name: value}, f"runs no kernel, so .*{name}.* no effect")
            for name, value in KERNEL_OPTIONS.items()
        ),
    ],
    (block, TypeError): [
        (NOT_A_LIST, "uninitialised is a float32 tensor .*; it must be a list of tensors"),
        (NOT_A_LIST | {"uninitialised": [3]}, r"uninitialised\[0\] is an int"),
    ],
    (compiled, ValueError): [
        ({"defines": {"A B": 1}}, "has 'A B', which is not the name"),
        ({"defines": {3: 1}}, "defines has 3"),
        ({"defines": {"A": "1\n#error"}}, "it must be one line"),
        ({"constants": {5: 1}}, "no function constant 5"),
        ({"source": "// \ud800"}, "source cannot be encoded as UTF-8"),
    ],
    (compiled, TypeError): [
        ({"defines": {"A": None}}, r"defines\['A'\] is None"),
        ({"constants": [1]}, "constants is a list; it must be a dict"),
        ({"include_dirs": "."}, r"include_dirs is '\.'; it must be a list"),
        ({"include_dirs": [5]}, "include_dirs has 5; each item must be a path"),
        ({"count": torch.ones(2)}, "count is a float32 tensor .*; it must be a bool"),
    ],
    (compiled, FileNotFoundError): [({"include_dirs": ["/no/such"]}, "include_dirs: /no/such")],
}
for call in (compiled, linted):
    WRONG[call, TypeError] = [
        *WRONG.get((call, TypeError), ()),
        ({"source": 3}, "source is an int; it must be a str"),
        ({"defines": [1]}, "defines is a list; it must be a dict"),
        ({"include_dirs": None}, "include_dirs is None; it must be a list of di"),
    ]
FLAGS = {block: ["check", "count", "record"], compiled: ["check", "count"], linted: ["strict"]}
FLAGS |= {replaced: ["check", "process_wide"]}
for call, flags in FLAGS.items():
    words = {1: "1", None: "None", "yes": "'yes'"}
    WRONG.setdefault((call, TypeError), []).extend(
        ({flag: value}, f"{flag} is {shown}; it must be a bool")
        for flag in flags
        for value, shown in words.items()
    )
    for language, error in (("3.0", ValueError), ("4", ValueError), (3.1, TypeError)):
        row = ({"language": language}, r"language is .*3\.1")
        WRONG.setdefault((call, error), []).append(row)


@each_case("call, error, options, words", [(*key, *row) for key in WRONG for row in WRONG[key]])
def test_wrong_options_are_refused(call, error, options, words):
    with pytest.raises(error, match=words):
        call(**options)


@pytest.fixture(scope="module")
def scale() -> ShaderKernel:
    return compile_shader(SOURCE).scale


@each_case(
    "options, error, message",
    [
        ({"lane_map": "apple8"}, ValueError, "lane_map is 'apple8'; it must be \"apple10\""),
        ({"lane_map": -1}, ValueError, "lane_map is -1; .* an int from 0"),
        ({"lane_map": 0.5}, TypeError, "lane_map is 0.5; .* an int from 0"),
        ({"relaxed_precision": "cut"}, ValueError, '\'cut\'; it must be "truncate" or "round"'),
        ({"relaxed_precision": np.ones(2)}, ValueError, "relaxed_precision is a float64 ndarray"),
    ],
)
def test_wrong_options_of_tensor_operations_are_refused(scale, options, error, message):
    for call in (block, lambda **options: scale(torch.zeros(1), 1.0, **options)):
        with pytest.raises(error, match=message):
            call(**options)


@each_case(
    "options, error, message",
    [
        ({"arg_casts": {5: "fp16"}}, ValueError, r"arg_casts\[5\]: there is no argument 5"),
        ({"arg_casts": {"1": "fp16"}}, ValueError, r"arg_casts\['1'\]: there is no argument"),
        ({"arg_casts": {0: "fp16"}}, ValueError, "argument 0 is a tensor; only scalars are cast"),
        ({"arg_casts": {1: ["fp16"]}}, ValueError, r"arg_casts has \['fp16'\]; expected fp16"),
        ({"arg_casts": "fp8"}, ValueError, "arg_casts has 'fp8'"),
        ({"arg_casts": 3}, TypeError, "arg_casts is an int"),
        ({"threads": (1, 1, 1, 1)}, TypeError, "1 to 3 ints"),
        ({"threads": -1}, ValueError, "threads is -1"),
        ({"threads": 2**32}, ValueError, r"threads is 4294967296; .* 0 to 2\*\*32 - 1"),
        ({"threads": (2**32 - 1,) * 3, "group_size": (1,) * 3}, ValueError, "too large"),
        ({"threads": 8.0}, TypeError, r"threads is 8\.0; it must be an int or 1 to 3 ints"),
        ({"threads": (1, 1), "group_size": 1}, ValueError, "has 1 dimension and threads has 2"),
        ({"group_size": 4.0}, TypeError, r"group_size is 4\.0; it must be an int"),
        ({"group_size": 0}, ValueError, "is 0 threads"),
        ({"threadgroup_bytes": 5}, TypeError, "threadgroup_bytes is an int"),
        ({"threadgroup_bytes": {0: 4}}, ValueError, r"there is no threadgroup\(0\)"),
        ({"threadgroup_bytes": {"0": 5}}, ValueError, r"threadgroup_bytes\['0'\]: there is no"),
        ({"workers": 0}, ValueError, "workers is 0; it must be an int from 1 to 1024"),
        ({"step_limit": 0}, ValueError, r"step_limit is 0; .* from 1 to 2\*\*63 - 1"),
        ({"seed": 2**63}, ValueError, r"seed is 9223372036854775808; .* 0 to 2\*\*63 - 1"),
    ],
)
def test_wrong_options_of_a_call_are_refused(scale, options, error, message):
    x = torch.zeros(8)
    with pytest.raises(error, match=message):
        scale(x, 2.0, **options)


@each_case("size", [0, -1, 2**64 + 32, 32.0, "32", None])
def test_wrong_threadgroup_bytes_are_refused(size):
    words = r"\[0\] is .* threadgroup\(0\) scratch and must be an int of at least 1"
    with pytest.raises(TypeError, match=words):
        compile_shader(SOURCE).reverse(torch.zeros(8), threadgroup_bytes={0: size})
