"""The compiler's messages are at lines of the user's text, and name what it refuses."""

import functools

import pytest

from torch_metal_attn.simulator.build import ShaderCompileError, in_shim
from torch_metal_attn.simulator.diagnostics import MOST_LINES, readable

from . import planted

IN_SHIM = """\
In file included from <stdin>:1:
In file included from <built-in>:1:
<metal>/__msl_types.h:209:19: error: static assertion failed: wrong number of components
<metal>/__msl_simd.h:12:2: note: in instantiation of 'f<3>' requested here
a.metal:2:22: note: in instantiation of 'g<3>' requested here
b.h:7:1: note: in instantiation of 'h<3>' requested here
<metal>/__msl_types.h:209:39: note: expression evaluates to '3 == 4'
"""
OWN = """\
a.metal:4:9: error: no matching function for call to 'fma'
<metal>/__msl_math.h:242:53: note: candidate function not viable: requires 3 arguments
"""
FOLLOWS = """\
In file included from a.metal:5:
<kernel entries>:1:8: error: expected unqualified-id
"""


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (OWN, OWN),
        (OWN + FOLLOWS, OWN),
        (FOLLOWS, "<kernel entries>:1:8: error: expected unqualified-id\n"),
        (
            IN_SHIM,
            "a.metal:2:22: error: static assertion failed: wrong number of components\n"
            "b.h:7:1: note: in instantiation of 'h<3>' requested here\n",
        ),
        (
            "In file included from a.metal:1:\nb.h:3:2: fatal error: no\n",
            "b.h:3:2: fatal error: no\n",
        ),
        ("clang: error: no input files\n", "clang: error: no input files\n"),
    ],
)
def test_messages_are_those_about_the_users_files(output, shown):
    assert readable(output, in_shim) + "\n" == shown


def test_long_messages_are_cut():
    assert readable("a.metal:1:1: error: no\n" * 100, in_shim).count("\n") == MOST_LINES - 1


PARAMETERS = "device int* o [[buffer(0)]], constant int& n [[buffer(1)]]"
compiled = functools.partial(planted.compiled, parameters=PARAMETERS)


@pytest.mark.parametrize("check", [False, True])
def test_variable_length_arrays_are_refused(check):
    with pytest.raises(ShaderCompileError, match=r"program_source:6:.*variable length array"):
        compiled("int a[n]; a[0] = o[0]; o[1] = a[n - 1];", check=check)


# Indices come from memory, so the arrays stay on the stack.
@pytest.mark.parametrize("check", [False, True])
def test_more_stack_than_a_thread_has_is_refused(check):
    use = "int a[{}]; for (int i = 0; i < n; ++i) a[o[i]] = i; o[0] = a[o[1]];"
    compiled(use.format(40_000), check=check)
    with pytest.raises(ShaderCompileError, match=r"stack frame size .* '.*k.*'"):
        compiled(use.format(60_000), check=check)


def test_an_error_in_a_header_is_at_its_line_after_many_others():
    """Clang reports errors in templates at the end of a text."""
    lines = [f"int a{i} = missing{i};\n" for i in range(30)]
    with pytest.raises(ShaderCompileError) as caught:
        compiled("".join(lines) + "auto v = float4(1, 2, 3, 4, 5);", check=True)
    messages = str(caught.value).split("\n")[1:]
    assert [int(line.split(":")[1]) for line in messages] == list(range(6, 6 + 31)), messages
