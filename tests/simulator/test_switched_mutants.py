"""The text that holds several faults: where each stands, and which are compiled alone."""

import pytest

from tests.helpers.mutants import plant, plant_among
from tests.helpers.switched import PRELUDE, switched

TEXT = """#define ROWS 8
constexpr int padded(int columns) { return columns | 8; }
kernel void f(device float* out, int row, int rows) {
  const int last = min(row + 1, rows - 1);
  Tile<ROWS, 2> tile;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < rows; i++) {
    if (row < last) {
      out[i] = row + row * 2;  // twice
    }
  }
}
"""


def line_of(mutants, part):
    ((text, numbers),) = switched(TEXT, mutants)
    assert text.startswith(PRELUDE + "\n")
    assert text.count("\n") == TEXT.count("\n") + 1, "the lines keep their numbers"
    assert numbers == {mutant: number for number, mutant in enumerate(mutants, 1)}
    return next(line.strip() for line in text.split("\n") if part in line)


@pytest.mark.parametrize(
    "old, new, part, line",
    [
        (
            "rows - 1)",
            "rows)",
            "last =",
            "const int last = (mutant(1) ? (min ( row + 1 , rows )) : (min(row + 1, rows - 1)));",
        ),
        (
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n  for",
            "for",
            "barrier",
            "if (mutant(1)) {  } else { threadgroup_barrier(mem_flags::mem_threadgroup); }",
        ),
        ("row < last", "true", "if (", "if ((mutant(1) ? (true) : (row < last))) {"),
        (
            "i < rows",
            "i < rows + 1",
            "for (",
            "for (int i = 0; (mutant(1) ? (i < rows + 1) : (i < rows)); i++) {",
        ),
    ],
)
def test_place(old, new, part, line):
    assert line_of([(old, new)], part) == line


def test_two_faults_of_one_statement_are_chosen_one_after_the_other():
    line = line_of([("row * 2", "row * 3"), ("row + row", "rows + row")], "twice")
    assert line == (
        "if (mutant(2)) { out [ i ] = rows + row * 2 ; } else { if (mutant(1)) "
        "{ out [ i ] = row + row * 3 ; } else { out[i] = row + row * 2; } }  // twice"
    )


def test_all_of_what_one_fault_replaces_in_a_statement_changes():
    line = line_of([("row ", "rows ")], "twice")
    assert "{ out [ i ] = rows + rows * 2 ; }" in line


def test_places_that_overlap_are_in_two_texts():
    mutants = [
        (
            "if (row < last) {\n      out[i] = row + row * 2;",
            "if (row < last) {\n      out[i] = 0;",
        ),
        ("for (int i = 0; i < rows; i++)", "for (int i = 0; i <= rows; i++)"),
        ("row < last", "row <= last"),
    ]
    assert [set(numbers) for _, numbers in switched(TEXT, mutants)] == [set(mutants)]


@pytest.mark.parametrize(
    "old, new",
    [
        ("columns | 8", "columns"),  # a constant expression
        ("#define ROWS 8", "#define ROWS 16"),
        ("Tile<ROWS, 2>", "Tile<ROWS, 4>"),
        ("const int last", "const short last"),
        ("device float* out, int row", "device float* out, short row"),
        ("row", "rows"),  # a parameter's name among others
    ],
)
def test_what_cannot_be_chosen_as_a_kernel_runs_is_left_out(old, new):
    assert switched(TEXT, [(old, new)]) == []


def test_a_fault_that_no_longer_fits_the_shader_says_so(monkeypatch):
    fault = ("text that is gone", "")
    for planted in (plant, lambda *arguments: plant_among(*arguments, [fault])):
        with pytest.raises(AssertionError, match="merge no longer holds 'text that is gone': upd"):
            planted(monkeypatch, "merge", *fault)
