"""Reading LLVM IR as text."""

import pytest

from torch_metal_attn.simulator.llvm import ir

STRUCTS = {
    "%struct.P": "{ i8, float, <3 x float> }",
    '%"struct.Q<P, 2>"': "<{ i8, %struct.P }>",
}

TEXT = """%struct.P = type { i8, float }
@table = constant [2 x i8] c"}\\00"

define void @own(ptr %0) #0 !dbg !3 {
  br label %2

2:                                                ; preds = %1
  ret void, !dbg !4
}

declare void @f()

define void @engine() #1 {
  ret void
}

attributes #0 = { nounwind sanitize_thread }
attributes #1 = { disable_sanitizer_instrumentation sanitize_thread }
!3 = !{}
"""


def test_a_module_has_functions_and_all_else():
    module = ir.parse(TEXT)
    own, engine = module.functions
    assert own.head == "define void @own(ptr %0) #0 !dbg !3 {"
    assert (own.body[0], own.body[-1]) == ("  br label %2", "  ret void, !dbg !4")
    assert (own.is_kernels, engine.is_kernels) == (True, False)
    assert module.structs == {"%struct.P": "{ i8, float }"}
    assert not [line for line in module.outside if "ret void" in line or line == "}"]
    assert sorted(filter(None, module.text().split("\n"))) == sorted(filter(None, TEXT.split("\n")))


def test_functions_keep_the_order_of_their_lines():
    again = ir.parse(ir.parse(TEXT).text())
    assert again.functions == ir.parse(TEXT).functions


@pytest.mark.parametrize(
    ("type_text", "expected"),
    [
        ("i1", (1, 1)),
        ("i64", (8, 8)),
        ("bfloat", (2, 2)),
        ("ptr", (8, 8)),
        ("<3 x float>", (16, 16)),
        ("<4 x i1>", (1, 1)),
        ("<16 x i1>", (2, 2)),
        ("[3 x <2 x half>]", (12, 4)),
        ("[2 x [3 x i16]]", (12, 2)),
        ("%struct.P", (32, 16)),
        ("[2 x %struct.P]", (64, 16)),
        ('%"struct.Q<P, 2>"', (33, 1)),
        ("{ i8, { i64 } }", (16, 8)),
        ("%struct.Unknown", (0, 1)),
        ("{ i8, %struct.Unknown }", (0, 1)),
    ],
)
def test_bytes_and_alignment_of_a_type(type_text, expected):
    assert ir.layout(type_text, STRUCTS) == expected


def test_fields_have_offsets():
    assert ir.fields("%struct.P", STRUCTS) == [(0, "i8"), (4, "float"), (16, "<3 x float>")]
    assert ir.fields('%"struct.Q<P, 2>"', STRUCTS) == [(0, "i8"), (1, "%struct.P")]
    assert ir.fields("[2 x i8]", STRUCTS) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("i32 %x", ("i32", "%x")),
        ("ptr noundef nonnull %x", ("ptr", "noundef nonnull %x")),
        ("nuw nsw <2 x i32> <i32 1, i32 2>", ("<2 x i32>", "<i32 1, i32 2>")),
        ("[2 x [3 x i8]] zeroinitializer", ("[2 x [3 x i8]]", "zeroinitializer")),
        ('%"struct.Q<P, 2>" undef', ('%"struct.Q<P, 2>"', "undef")),
        ("float", ("float", "")),
    ],
)
def test_an_operand_is_a_type_and_a_value(text, expected):
    assert ir.typed(text) == expected


def test_the_value_of_an_operand_has_no_attributes():
    assert ir.operand("ptr noundef nonnull @f") == "@f"
    assert ir.operand("double noundef 0x3FF0000000000000") == "0x3FF0000000000000"


def test_commas_in_brackets_separate_nothing():
    text = "<2 x i32> <i32 1, i32 2>, { i8, i8 } %x, i32 3"
    assert ir.split(text) == ["<2 x i32> <i32 1, i32 2>", "{ i8, i8 } %x", "i32 3"]
    assert ir.split("a, b ,c") == ["a", "b", "c"]
