"""What the IR says about addresses of private variables."""

import pytest

from torch_metal_attn.simulator.llvm.places import Places

VARIABLES = "%a = alloca [8 x float], align 4\n%b = alloca %struct.P, align 4\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%p = getelementptr inbounds nuw i8, ptr %a, i64 12", {"%a": (12, 12)}),
        ("%p = getelementptr float, ptr %a, i64 -1", {"%a": (-4, -4)}),
        ("%p = getelementptr float, ptr %a, i64 %n", None),
        ("%p = getelementptr [2 x float], ptr %a, i64 1, i64 1", {"%a": (12, 12)}),
        ("%p = getelementptr %struct.P, ptr %b, i64 0, i32 1, i64 1", {"%b": (8, 8)}),
        ("%p = getelementptr %struct.P, ptr %b, i64 0, i32 1, i64 %n", None),
        (
            "%q = getelementptr i8, ptr %a, i64 8\n%p = phi ptr [ %a, %1 ], [ %q, %2 ]",
            {"%a": (0, 8)},
        ),
        ("%p = select i1 %c, ptr %a, ptr %b", {"%a": (0, 0), "%b": (0, 0)}),
        ("%p = phi ptr [ %a, %1 ], [ %q, %2 ]\n%q = getelementptr i8, ptr %p, i64 4", None),
        ("%p = select i1 %c, ptr %a, ptr %other", None),
        ("%p = getelementptr %struct.Q, ptr %a, i64 1", None),
        ("%p = load ptr, ptr %a, align 8", None),
    ],
)
def test_places_of_addresses(body, expected):
    lines = [f"  {line}" for line in (VARIABLES + body).split("\n")]
    assert Places(lines, {"%struct.P": "{ i8, [3 x float] }"}).of("%p") == expected
