"""The compiler's messages: where the user's text is wrong, and no more."""

import pytest

from torch_metal_attn.simulator.build import in_shim
from torch_metal_attn.simulator.diagnostics import MOST_LINES, readable

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
    ("said", "shown"),
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
def test_messages(said, shown):
    assert readable(said, in_shim) + "\n" == shown


def test_no_more_than_a_screen():
    assert readable("a.metal:1:1: error: no\n" * 100, in_shim).count("\n") == MOST_LINES - 1
