"""Tables of tiles as files: what is read, what is ignored and why, and which one is used."""

import json
import math
from dataclasses import replace

import pytest

from tests.helpers.cases import each_case
from tests.tuning.fake_gpu import M2_MAX
from torch_metal_attn.tuned import loading, tables
from torch_metal_attn.tuned.tables import TORCH, BadTable, Machine, Row, Table

KEY = "flash_fwd half 64 64 band q<=2048 k<=2048"
OTHER = KEY.replace("band", "plain")
A, B = "BLOCK_K=16 ROW_FRAGMENTS=1", "BLOCK_K=32 ROW_FRAGMENTS=2"


def of_shape(shape, share=None, error=0.0, key=KEY, base=1.0):
    """A is the default tile; B took a share of its time, also again where there is an error."""
    row = Row(key, shape, A, base, default=True)
    return [row] if share is None else [row, Row(key, shape, B, base * share, share, error)]


def table(machine=M2_MAX, share=2.0, keys=(KEY,)):
    rows = [row for key in keys for row in of_shape("forward x", share, key=key)]
    rows += [Row(KEY, "forward x", TORCH, 3.0, 3.0), Row(KEY, "forward x", "C=1", note="broken")]
    return Table(machine, rows, {"chip": "Apple M2 Max"})


def write(path, *arguments, **options):
    table(*arguments, **options).write(path)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "table.json"
    write(path)
    assert tables.read(path) == table()
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


@each_case(
    "changes, why",
    [
        ({"format": 1}, "its format is 1; this version reads 4"),
        ({"machine": {"gpu": "Apple M1"}}, "it is damaged: TypeError"),
        ({"machine": None}, "it is damaged: TypeError"),
        ({"rows": 7}, "it is damaged: TypeError"),
        ({"rows": [{"x": 2}]}, "it is damaged: TypeError"),
        (2, "two rows are of one key, shape and tile"),
        ({"key": "flash_fwd"}, "a row has the key 'flash_fwd'"),
        *(({"tile": tile}, "a row has the key") for tile in ("A=x", "A=1\tB", "A=\u0663", "")),
        ({"tile": f"A={2**32}"}, "the tile 'A=4294967296'"),
        ({"shape": 1}, "it is damaged: AttributeError"),
        ({"seconds": 0.0}, "is not above 0 and finite"),
        ({"seconds": "1"}, "it is damaged: TypeError"),
        ({"share": math.inf}, "is not above 0 and finite"),
        ({"error": -1.0}, "an error of .* is below 0"),
        ({"default": False}, "it is damaged: StopIteration"),
        *((text, "it is not JSON|its format is None") for text in ("", "{", "[]", "null")),
    ],
)
def test_a_damaged_table(changes, why, tmp_path):
    path = tmp_path / "table.json"
    write(path)
    data = json.loads(path.read_text())
    if changes == 2:
        data["rows"].append(data["rows"][0])
    elif isinstance(changes, dict):
        (data if {*changes} & {*data} else data["rows"][0]).update(changes)
    path.write_text(changes if isinstance(changes, str) else json.dumps(data))
    with pytest.raises(BadTable, match=why):
        tables.read(path)


SLOW = [*of_shape("y", base=100.0), Row(KEY, "y", B, 110.0, 1.1)]
# What was timed, and the tile that is chosen.
CHOSEN = {
    "the shortest time": (of_shape("x", 0.9), B),
    "a tile that was not timed again": (of_shape("x", 0.5, None), A),
    "the second time decides": (of_shape("x", 1.0), A),
    "a small gain is noise": (of_shape("x", 0.99), A),
    "a gain": (of_shape("x", 0.98), B),
    "above two standard errors": (of_shape("x", 0.9, 0.049), B),
    "below two standard errors": (of_shape("x", 0.9, 0.051), A),
    "the error of a mean is smaller": ([r for s in "xy" for r in of_shape(s, 0.9, 0.051)], B),
    "shapes count alike, however long they take": ([*of_shape("x", 0.5), *SLOW], B),
    "a loss that is larger than the gain": (
        [*of_shape("x", 0.5), *SLOW, *of_shape("z", 9.0, None)],
        A,
    ),
    "a tile that failed for a shape": (
        [*of_shape("x", 0.5), *of_shape("y"), Row(KEY, "y", B, note="it failed")],
        A,
    ),
    "the default tile cannot run": (
        [replace(of_shape("x")[0], seconds=None), Row(KEY, "x", B, 9.0)],
        B,
    ),
    "no tile can run": ([replace(of_shape("x")[0], seconds=None)], None),
}


@each_case("name", CHOSEN)
def test_what_is_chosen(name):
    rows, tile = CHOSEN[name]
    assert tables.fastest(rows) == tile


def test_a_shape_measured_again_replaces_its_times():
    own = Table(M2_MAX)

    def add(*rows):
        own.add(rows)
        return own.tiles()[KEY]

    assert add(*of_shape("forward x", 0.5)) == B
    assert add(*of_shape("forward y", 1.0, None)) == B
    assert add(Row(KEY, "forward x", TORCH, 2.0, 2.0)) == B
    assert add(*of_shape("forward x", 3.0, None)) == A
    own.add([Row(KEY, "forward y", TORCH, 8.0, 8.0)])
    own.add([Row(KEY, "training y", TORCH, note="no memory")])
    assert len(own.rows) == 7
    assert own.ratios() == {(KEY, "forward"): pytest.approx(4.0)}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The paths of the user's table, of the package's, and of one of their choice."""
    monkeypatch.setenv("TORCH_METAL_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(loading.SETTING, raising=False)
    monkeypatch.setattr(loading, "FOLDER", tmp_path / "package")
    own = tmp_path / "cache" / "tuned" / "apple-m2-max-38-cores.json"
    assert loading.path_of(M2_MAX) == own
    return own, tmp_path / "package" / "apple-m2-max-38-cores.json", tmp_path / "mine.json"


OWN, PACKAGED, FILE = loading.OWN, "table for Apple M2 Max", "table of TORCH_METAL_ATTN_TUNED"


class TestPrecedence:
    """TORCH_METAL_ATTN_TUNED, then the user's own table, then the package's, then the chooser."""

    def test_nothing(self, places):
        assert loading.load(M2_MAX) == loading.Loaded()

    def test_the_users_own_table_and_the_packages(self, places, monkeypatch):
        write(places[0], share=0.5)
        write(places[1], keys=(KEY, OTHER))
        found = loading.load(M2_MAX)
        assert found.tiles == {KEY: B, OTHER: A}
        assert found.sources == {KEY: OWN, OTHER: PACKAGED}
        assert found.ratios == {(KEY, "forward"): pytest.approx(3.0)}
        assert found.words == f"{OWN} (1 tile), {PACKAGED} (1 tile)"
        assert found.ignored == ()
        monkeypatch.setenv(loading.SETTING, "off")
        assert loading.load(M2_MAX) == loading.Loaded(words="default (TORCH_METAL_ATTN_TUNED=off)")

    def test_a_file_alone(self, places, monkeypatch):
        """Also if it is not there."""
        write(places[0], keys=(KEY, OTHER))
        monkeypatch.setenv(loading.SETTING, str(places[2]))
        found = loading.load(M2_MAX)
        assert not found.tiles
        assert f"the table of tiles {places[2]} is ignored: " in found.ignored[0]
        write(places[2], share=0.5)
        found = loading.load(M2_MAX)
        assert (found.tiles, found.sources) == ({KEY: B}, {KEY: FILE})

    @pytest.mark.parametrize(
        "field, other",
        [
            *(("gpu", "Apple M1"), ("cores", "30 cores"), ("system", "macOS 14.7")),
            *(("torch", "torch 2.12"), ("package", "torch_metal_attn 0.0.9")),
        ],
    )
    def test_a_table_for_another_machine(self, field, other, places):
        """A line for the user's own, and `info` alone for the package's."""
        why = f"it was measured with {other}, and this is {getattr(M2_MAX, field)}"
        write(places[0], M2_MAX._replace(**{field: other}))
        write(places[1], share=0.5)
        found = loading.load(M2_MAX)
        line = f"torch_metal_attn: the table of tiles {places[0]} is ignored: {why}"
        assert (found.ignored, found.tiles) == ((line,), {KEY: B})
        places[0].rename(places[1])
        found = loading.load(M2_MAX)
        assert (found.tiles, found.ignored) == ({}, ())
        assert found.words == f"default, no {PACKAGED}: {why}"

    def test_a_user_without_a_home(self, places, monkeypatch):
        def no_home(gpu):
            raise loading.cache.CacheError("no home")

        monkeypatch.setattr(loading, "path_of", no_home)
        write(places[1])
        assert set(loading.load(M2_MAX).tiles) == {KEY}

    @pytest.mark.parametrize("text", ["{", "[" * 10**5], ids=len)
    def test_the_lines_are_printed(self, text, places, monkeypatch, capsys):
        places[0].parent.mkdir(parents=True)
        places[0].write_text(text)
        monkeypatch.setattr(loading, "this_machine", lambda: M2_MAX)
        loading.install()
        (line,) = capsys.readouterr().err.splitlines()
        assert f"the table of tiles {places[0]} is ignored: it is not JSON" in line


def test_the_packages_own_tables_can_be_read():
    """None so far."""
    for path in loading.FOLDER.glob("*.json"):
        assert path.name == loading.file_name(tables.read(path).machine)
    assert (loading.FOLDER / "README.md").is_file()


def test_the_name_of_a_mac(monkeypatch):
    monkeypatch.setattr(loading.mps, "available", lambda: True)
    monkeypatch.setattr(loading.torch.backends.mps, "get_name", lambda: "Apple M3 Pro")
    monkeypatch.setattr(loading.macos, "version", lambda: "15.1.1")
    monkeypatch.setattr(loading.torch.backends.mps, "get_core_count", lambda: 18, raising=False)
    monkeypatch.setattr(loading.torch, "__version__", "2.14.1+git123")
    found = loading.this_machine()
    assert found == Machine("Apple M3 Pro", "18 cores", "macOS 15.1", "torch 2.14", found.package)
    assert loading.file_name(found) == "apple-m3-pro-18-cores.json"
