"""What the compiler refuses for the simulator's sake."""

import functools

import pytest

from torch_metal_attn.simulator.build import ShaderCompileError

from . import planted

PARAMETERS = "device int* o [[buffer(0)]], constant int& n [[buffer(1)]]"
compiled = functools.partial(planted.compiled, parameters=PARAMETERS)


@pytest.mark.parametrize("check", [False, True])
def test_array_of_a_length_known_later(check):
    with pytest.raises(ShaderCompileError, match=r"program_source:6:.*variable length array"):
        compiled("int a[n]; a[0] = o[0]; o[1] = a[n - 1];", check=check)


# The arrays are indexed by what memory holds, so that they stay on the stack.
@pytest.mark.parametrize("check", [False, True])
def test_more_memory_than_a_thread_has(check):
    use = "int a[{}]; for (int i = 0; i < n; ++i) a[o[i]] = i; o[0] = a[o[1]];"
    compiled(use.format(40_000), check=check)
    with pytest.raises(ShaderCompileError, match=r"stack frame size .* '.*k.*'"):
        compiled(use.format(60_000), check=check)


def test_an_error_in_a_header_is_at_its_line_after_many_others():
    """Clang finds what templates refuse at the end of a text."""
    lines = [f"int a{i} = missing{i};\n" for i in range(30)]
    with pytest.raises(ShaderCompileError) as raised:
        compiled("".join(lines) + "auto v = float4(1, 2, 3, 4, 5);", check=True)
    said = str(raised.value).split("\n")[1:]
    assert [int(line.split(":")[1]) for line in said] == list(range(6, 6 + 31)), said


def test_warnings_are_no_errors():
    compiled("int unused; o[0] = 1.5f; if (unused = 1) o[1] = n == n;")
