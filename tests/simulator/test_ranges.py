"""What the IR says about integers and addresses."""

import itertools

import pytest

from torch_metal_attn.simulator.llvm.ranges import Ranges


def of(body, value="%x", bits=32):
    """The range of a value in the lines of a function with the arguments %n and %m."""
    lines = [f"  {line}" if line[0] != ">" else f"{line[1:]}:" for line in body.split("\n")]
    return Ranges(lines, {}).of(value, bits)


UNKNOWN = (-(2**31), 2**31 - 1)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%x = and i32 %n, 7", (0, 7)),
        ("%x = and i32 %n, -8", UNKNOWN),
        ("%x = urem i32 %n, 9", (0, 8)),
        ("%x = srem i32 %n, 9", UNKNOWN),
        ("%x = lshr i32 %n, 28", (0, 15)),
        ("%x = lshr i32 %n, 0", UNKNOWN),
        ("%a = and i32 %n, 7\n%x = add nuw nsw i32 %a, 3", (3, 10)),
        ("%a = and i32 %n, 7\n%x = sub i32 3, %a", (-4, 3)),
        ("%a = and i32 %n, 7\n%x = mul i32 %a, -3", (-21, 0)),
        ("%a = and i32 %n, 7\n%x = shl i32 %a, 2", (0, 28)),
        ("%a = and i32 %n, 7\n%x = shl i32 %a, %n", UNKNOWN),
        ("%a = and i32 %n, 7\n%b = and i32 %m, 1\n%x = shl i32 %b, %a", (0, 128)),
        ("%a = and i32 %n, 6\n%x = or disjoint i32 %a, 1", (1, 7)),
        ("%a = and i32 %n, 6\n%x = or i32 %a, 9", (9, 15)),
        ("%a = and i32 %n, 6\n%x = xor i32 %a, 9", (0, 15)),
        ("%a = and i32 %n, 7\n%b = sub i32 %a, 4\n%x = ashr i32 %b, 1", (-2, 1)),
        ("%a = and i32 %n, 7\n%x = udiv i32 %a, 2", (0, 3)),
        ("%a = and i32 %n, 7\n%x = select i1 %c, i32 %a, i32 -1", (-1, 7)),
        ("%a = trunc i32 %n to i8\n%x = sext i8 %a to i32", (-128, 127)),
        ("%a = trunc i32 %n to i8\n%x = zext i8 %a to i32", (0, 255)),
        ("%a = icmp eq i32 %n, 3\n%x = zext i1 %a to i32", (0, 1)),
        ("%x = call i32 @llvm.umin.i32(i32 %n, i32 7)", UNKNOWN),
        ("%a = and i32 %n, 15\n%x = tail call noundef i32 @llvm.umin.i32(i32 %a, i32 7)", (0, 7)),
        ("%a = call i32 @llvm.smax.i32(i32 %n, i32 0)", UNKNOWN),
        ("%a = call i32 @llvm.smax.i32(i32 %n, i32 0)\n%x = add i32 %a, 1", UNKNOWN),
        ("%x = load i32, ptr %p, align 4", UNKNOWN),
        ("%x = phi i32 [ 3, %1 ], [ -2, %2 ], [ 5, %3 ]", (-2, 5)),
        ("%x = phi i32 [ 3, %1 ], [ %n, %2 ]", UNKNOWN),
    ],
)
def test_ranges_of_arithmetic(body, expected):
    assert of(body) == expected


def loop(first, step, condition, stays="true"):
    """A loop with a counter %x, that goes on (or ends) where a condition holds."""
    targets = "label %1, label %2" if stays == "true" else "label %2, label %1"
    return (
        f"br label %1\n>1\n%x = phi i32 [ {first}, %0 ], [ %y, %1 ]\n%y = add nsw i32 %x, {step}\n"
        f"%c = icmp {condition}\nbr i1 %c, {targets}, !llvm.loop !3\n>2\nret void"
    )


def signed(value):
    return (value + 2**31) % 2**32 - 2**31


def holds(relation, a, b):
    if relation[0] == "u":
        a, b = a % 2**32, b % 2**32
    order = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    return order[relation[-2:]]


RELATIONS = "eq ne slt sle sgt sge ult ule ugt uge".split()


@pytest.mark.parametrize("relation", RELATIONS)
def test_ranges_of_counters_hold_all_that_loops_count(relation):
    """Small loops are counted out; those that go far must not be known to be short."""
    exact = 0
    choices = itertools.product(
        (-2, 0, 3), (1, 2, 3, -1, -2), (-1, 0, 4, 7), "xy", (True, False), (True, False)
    )
    for first, step, bound, compared, swapped, on_true in choices:
        operands = f"{bound}, %{compared}" if swapped else f"%{compared}, {bound}"
        body = loop(first, step, f"{relation} i32 {operands}", str(on_true).lower())
        seen, x = [], first
        while len(seen) < 64:
            seen.append(x)
            a, b = (x if compared == "x" else signed(x + step)), bound
            if holds(relation, *((b, a) if swapped else (a, b))) != on_true:
                break
            x = signed(x + step)
        low, high = of(body)
        assert {low, high} == {min(low, *seen), max(high, *seen)}, (body, seen)
        exact += (low, high) == (min(seen), max(seen))
    assert exact >= 40


def test_a_counter_near_the_end_of_its_type_may_go_on_from_the_other():
    assert of(loop(0, 1, "slt i32 %y, 2147483647")) == (0, 2147483646)
    assert of(loop(0, 1, "sle i32 %y, 2147483647")) == UNKNOWN
    assert of(loop(0, 2, "slt i32 %x, 2147483647")) == UNKNOWN
    assert of(loop(0, 1, "sle i32 %x, 2147483647")) == UNKNOWN


def test_a_counter_with_two_ways_back_is_not_known():
    body = (
        "br label %1\n>1\n%x = phi i32 [ 0, %0 ], [ %y, %1 ], [ %z, %3 ]\n%y = add i32 %x, 1\n"
        "%z = add i32 %x, 2\n%c = icmp slt i32 %y, 8\nbr i1 %c, label %1, label %3\n>3\n"
        "br i1 %d, label %1, label %4\n>4\nret void"
    )
    assert of(body) == UNKNOWN


def test_a_loop_that_another_block_ends_is_not_known():
    body = (
        "br label %1\n>1\n%x = phi i32 [ 0, %0 ], [ %y, %2 ]\n%c = icmp slt i32 %x, 8\n"
        "br i1 %c, label %2, label %3\n>2\n%y = add i32 %x, 1\nbr label %1\n>3\nret void"
    )
    assert of(body) == UNKNOWN


def places(body, address="%p"):
    lines = [f"  {line}" if line[0] != ">" else f"{line[1:]}:" for line in body.split("\n")]
    return Ranges(lines, {"%struct.P": "{ i8, [3 x float] }"}).places_of(address)


VARIABLES = "%a = alloca [8 x float], align 4\n%b = alloca %struct.P, align 4\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%p = getelementptr inbounds nuw i8, ptr %a, i64 12", {"%a": (12, 12)}),
        ("%i = and i64 %n, 7\n%p = getelementptr float, ptr %a, i64 %i", {"%a": (0, 28)}),
        (
            "%i = and i64 %n, 7\n%p = getelementptr [8 x float], ptr %a, i64 0, i64 %i",
            {"%a": (0, 28)},
        ),
        (
            "%i = and i64 %n, 1\n%p = getelementptr [2 x float], ptr %a, i64 %i, i64 1",
            {"%a": (4, 12)},
        ),
        (
            "%i = and i64 %n, 1\n%p = getelementptr %struct.P, ptr %b, i64 0, i32 1, i64 %i",
            {"%b": (4, 8)},
        ),
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
    assert places(VARIABLES + body) == expected
