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


def test_faults_of_one_statement_are_chosen_one_after_the_other():
    mutants = [("row * 2", "row * 3"), ("row + row", "rows + row")]
    ((text, numbers),) = switched(TEXT, mutants)
    assert text.startswith(PRELUDE + "\n")
    assert text.count("\n") == TEXT.count("\n") + 1, "the lines keep their numbers"
    assert numbers == {mutant: number for number, mutant in enumerate(mutants, 1)}
    assert (
        "if (mutant(2)) { out [ i ] = rows + row * 2 ; } else { if (mutant(1)) "
        "{ out [ i ] = row + row * 3 ; } else { out[i] = row + row * 2; } }  // twice"
    ) in text


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
