"""The pass over the IR of checked builds, on small IR in the text of several clangs."""

import pytest

from tests.helpers.cases import each_case
from torch_metal_attn.simulator.llvm.instrument import Frame, InstrumentError, instrument
from torch_metal_attn.simulator.llvm.operations import operation
from torch_metal_attn.simulator.llvm.places import Places

METADATA = """
!llvm.module.flags = !{!0}
!0 = !{i32 2, !"Debug Info Version", i32 3}
!1 = distinct !DICompileUnit(language: DW_LANG_C_plus_plus_14, file: !2)
!2 = !DIFile(filename: "-", directory: "/metal")
!3 = !DIFile(filename: "a.metal", directory: "/metal", checksumkind: CSK_MD5, checksum: "00")
!5 = !DIFile(filename: "/h/with \\22quote\\22.h", directory: "")
!10 = distinct !DISubprogram(name: "k", scope: !3, file: !3, line: 1, unit: !1)
!13 = !DILexicalBlock(scope: !10, file: !3, line: 2, column: 5)
!14 = !DILexicalBlockFile(scope: !13, file: !5, discriminator: 0)
!20 = !DILocation(line: 5, column: 3, scope: !13)
!23 = !DILocation(line: 77, column: 1, scope: !14)
attributes #0 = { mustprogress nounwind sanitize_thread uwtable "target-cpu"="x86-64" }
"""


def run(body, count_all=False):
    text = f"define void @__msl_kernel_0_k(ptr %0, ptr %1, i64 %n) #0 !dbg !10 {{\n{body}\n}}\n"
    text += METADATA
    out, sites = instrument(text, lambda file: file.startswith(("/shim", "<")), count_all)
    inside = out[out.index("{\n") + 2 : out.index("\n}\n")]
    return inside.split("\n"), sites, out


def access(address, size, flags):
    return f"  call void @__msl_access(ptr {address}, i32 {size}, i32 {flags}, i32 0), !dbg !20"


@each_case(
    "body, expected",
    [
        ("call void @__tsan_read4(ptr %0)", [access("%0", 4, 0)]),
        ("call void @__tsan_write8(ptr %0)", [access("%0", 8, 1)]),
        ("call void @__tsan_unaligned_read8(ptr %0)", [access("%0", 8, 2)]),
        ("call void @__tsan_unaligned_write8(ptr %0)", [access("%0", 8, 3)]),
        ("call void @__tsan_read_write8(ptr %0)", [access("%0", 8, 0), access("%0", 8, 1)]),
        ("tail call void @__tsan_write8(ptr noundef nonnull %0)", [access("%0", 8, 1)]),
    ],
)
def test_accesses_have_length_direction_and_site(body, expected):
    lines, sites, _ = run(f"  {body}, !dbg !20")
    assert lines == expected
    assert sites == [(Frame("a.metal", 5, "k"),)]


def test_copies_and_fills_access_their_whole_length():
    lines, _, out = run("  %8 = call ptr @__tsan_memcpy(ptr %0, ptr %1, i64 36), !dbg !20")
    call = "  %8 = call ptr @memcpy(ptr %0, ptr %1, i64 36), !dbg !20"
    assert lines == [access("%1", 36, 2), access("%0", 36, 3), call]
    assert "@memset" not in out
    lines, _, out = run("  %8 = call ptr @__tsan_memset(ptr %0, i32 0, i64 %n), !dbg !20")
    size, call = "%msl.bytes.1", "  %8 = call ptr @memset(ptr %0, i32 0, i64 %n), !dbg !20"
    assert lines == [f"  {size} = trunc i64 %n to i32", access("%0", size, 3), call]
    assert "declare ptr @memset(ptr, i32, i64)" in out


def test_alignment_below_the_length_is_flagged():
    body = "  call void @__tsan_read16(ptr %0), !dbg !20\n  %2 = load <4 x float>, ptr %0, align "
    assert run(f"{body}8")[0][0] == access("%0", 16, 2)
    assert run(f"{body}16")[0][0] == access("%0", 16, 0)


def test_a_site_has_the_file_of_its_lexical_block():
    _, sites, _ = run("  call void @__tsan_read4(ptr %0), !dbg !23")
    assert sites == [(Frame('/h/with "quote".h', 77, "k"),)]


@each_case(
    "line, counted",
    [
        ("fdiv fast half %a, %b", ("float_operations", 1)),
        ("fneg <2 x half> %a", None),
        ("tail call noundef <2 x float> @llvm.fma.v2f32(<2 x float> %a)", ("float_operations", 2)),
        ("call float @llvm.fabs.f32(float %a)", None),
        ("call float @floorf(float %a)", ("float_operations", 1)),
        ("lshr exact <4 x i32> %a, splat (i32 16)", ("integer_operations", 4)),
        ("and i1 %a, %b", ("selects", 1)),
        ("xor <8 x i1> %a, %b", ("selects", 8)),
        ("tail call i32 @llvm.umin.i32(i32 %a, i32 1)", ("selects", 1)),
        ("fcmp ogt <2 x float> %a, %b", ("selects", 2)),
        ("select i1 %a, float %b, float 0.0", ("selects", 1)),
        ("sitofp <4 x i32> %a to <4 x float>", ("converts", 4)),
        ("call fast float @tanhf(float noundef %a)", ("functions", 1)),
        ("tail call <4 x float> @llvm.log2.v4f32(<4 x float> %a)", ("functions", 4)),
        ("getelementptr inbounds nuw half, ptr %a, i64 %b", ("addresses", 1)),
        ("getelementptr inbounds nuw i8, ptr %a, i64 16, !dbg !20", None),
        ("load <4 x half>, ptr %a, align 8", None),
        ("zext i16 %a to i32", None),
        ("tail call i32 @fma_of_the_kernel(i32 %a)", None),
    ],
)
def test_operations_are_counted_by_kind(line, counted):
    assert operation(f"  %3 = {line}") == counted


def test_unknown_callback_is_an_error():
    with pytest.raises(InstrumentError, match="__tsan_atomic32_load"):
        run("  %2 = call i32 @__tsan_atomic32_load(ptr %0, i32 0), !dbg !20")


PRIVATE = """  %v = alloca [4 x float], align 4
  %p = getelementptr float, ptr %v, i64 {index}
  call void @__tsan_read4(ptr %p), !dbg !20
  %x = load float, ptr %p, align 4, !dbg !20"""


@pytest.mark.parametrize(("index", "checked"), [("3", False), ("4", True), ("%n", True)])
def test_accesses_inside_a_private_variable_are_not_checked(index, checked):
    text = "\n".join(run(PRIVATE.format(index=index))[0])
    assert ("@__msl_private(" in text) == ("@__msl_access(" in text) == checked


def test_accesses_without_a_check_are_counted():
    lines, _, _ = run(PRIVATE.format(index=3), count_all=True)
    assert [line for line in lines if "__msl_access" in line or "__msl_private" in line] == [
        "  call void @__msl_access(ptr %p, i32 4, i32 0, i32 0), !dbg !20"
    ]


@pytest.mark.parametrize(
    ("between", "marked"), [("", False), ("  %y = load float, ptr %v, align 4, !dbg !20\n", True)]
)
def test_a_variable_that_is_written_at_once_has_no_marks(between, marked):
    unset, written = (
        f"  store float {value}, ptr %v, align 4, !dbg !20\n" for value in ("%u", "2.0")
    )
    text, load = "  %v = alloca float, align 4\n", "  %x = load float, ptr %v, align 4, !dbg !20"
    text += "  %u = call float @__msl_unset_float(ptr @name), !dbg !20\n"
    lines, _, _ = run(text + unset + between + written + load)
    assert any("%msl.marks.v" in line for line in lines) == marked


IN_MEMORY = "%a = alloca [8 x float], align 4\n%b = alloca %struct.P, align 4\n"
THIRD = "%q = getelementptr i8, ptr %a, i64 8\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%p = getelementptr inbounds nuw i8, ptr %a, i64 12", {"%a": (12, 12)}),
        ("%p = getelementptr float, ptr %a, i64 -1", {"%a": (-4, -4)}),
        ("%p = getelementptr float, ptr %a, i64 %n", None),
        ("%p = getelementptr [2 x float], ptr %a, i64 1, i64 1", {"%a": (12, 12)}),
        ("%p = getelementptr %struct.P, ptr %b, i64 0, i32 1, i64 1", {"%b": (8, 8)}),
        ("%p = getelementptr %struct.P, ptr %b, i64 0, i32 1, i64 %n", None),
        (f"{THIRD}%p = phi ptr [ %a, %1 ], [ %q, %2 ]", {"%a": (0, 8)}),
        ("%p = select i1 %c, ptr %a, ptr %b", {"%a": (0, 0), "%b": (0, 0)}),
        ("%p = phi ptr [ %a, %1 ], [ %q, %2 ]\n%q = getelementptr i8, ptr %p, i64 4", None),
        ("%p = select i1 %c, ptr %a, ptr %other", None),
        ("%p = getelementptr %struct.Q, ptr %a, i64 1", None),
        ("%p = load ptr, ptr %a, align 8", None),
    ],
)
def test_constant_places_of_addresses_are_found(body, expected):
    lines = [f"  {line}" for line in (IN_MEMORY + body).split("\n")]
    assert Places(lines, {"%struct.P": "{ i8, [3 x float] }"}).of("%p") == expected
