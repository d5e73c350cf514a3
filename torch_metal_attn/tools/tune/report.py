"""What `tune` prints: a block for each shape, and a report for an issue."""

from collections.abc import Iterator, Sequence

from torch_metal_attn.tools import text_table
from torch_metal_attn.tools.bench.shapes import KINDS
from torch_metal_attn.tools.bench.versus import OURS, TORCHS
from torch_metal_attn.tools.tune.measure import Beside, Tried
from torch_metal_attn.tuned.tables import Row, Table, counted


def lines_of(found: Tried | Beside, chosen: str = "") -> list[str]:
    """The times of a kernel's tiles, or those beside torch. chosen: the tile of the table."""
    if isinstance(found, Beside):
        cells = []
        for name, times in (("ours", found.times[OURS]), ("torch", found.times[TORCHS])):
            text = times.error.splitlines()[0] if times.error else _milliseconds(times.median)
            cells.append(f"{name} {text}")
        compared = found.compared
        if compared is not None:
            cells.append(f"torch / ours {compared.torch / compared.ours:.2f}")
        return [f"  {'whole call':<13} {', '.join(cells)}"]
    lines = [f"  {found.kernel}"]
    default = found.trials[0]
    for trial in found.trials:
        if trial.seconds is None:
            lines.append(f"    {trial.tile:<78} left out: {trial.left_out}")
            continue
        notes = ["default"] if trial is default else []
        notes += [f"again {trial.again} of the default tile's time"] if trial.again else []
        notes += ["chosen"] if trial.tile == chosen else []
        notes += [str(trial.pipeline)] if trial.pipeline else []
        time = _milliseconds(trial.seconds)
        lines.append(f"    {trial.tile:<78} {time:>12}  {', '.join(notes)}".rstrip())
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def markdown(table: Table, ran: Sequence[str], left: int) -> str:
    """The report for an issue: the machine, and each row of this run with its gain.

    ran: keys of the rows. left: shapes that were not measured.
    """
    lines = [
        "# torch_metal_attn: tune",
        "",
        *text_table.markdown(("", ""), table.about.items()),
        "",
    ]
    if left:
        lines += [f"Not measured: {counted(left, 'shape')}.", ""]
    lines += ["Times are relative to the default tile's, and torch's to ours.", ""]
    headings = ("kernel, dtype, head dims, features, lengths", "tile", "time", "torch")
    rows = (cells for key in ran for cells in _rows(table.rows[key]))
    return "\n".join([*lines, *text_table.markdown(headings, rows, numbers=(2,))]) + "\n"


def _rows(row: Row) -> Iterator[tuple[str, ...]]:
    shares = [
        one.share(row.tile) for one in row.timed if {row.tile, one.default} <= one.seconds.keys()
    ]
    ratios = {kind: row.ratio(kind) for kind in KINDS}
    torchs = ", ".join(f"{kind} {x:.2f}" for kind, x in ratios.items() if x is not None)
    yield row.key, row.tile, f"{min(shares):.2f}" if shares else "-", torchs or "-"
    for one in row.timed:
        yield from (("", tile, "left out", why) for tile, why in one.left_out.items())
