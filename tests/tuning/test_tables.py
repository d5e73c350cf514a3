"""Tables of tiles as files: what is read, what is ignored and why, and which one is used."""

import json
import math
from dataclasses import replace

import pytest

from tests.helpers.cases import each_case
from tests.tuning.fake_gpu import M2_MAX
from torch_metal_attn.tuned import loading, tables
from torch_metal_attn.tuned.tables import Again, BadTable, Compared, Machine, Row, Table, Timed

KEY = "flash_fwd half 64 64 band q<=2048 k<=2048"
OTHER = KEY.replace("band", "plain")
M1, OLD = "Apple M1", "macOS 14.7"
A, B = "BLOCK_K=16 ROW_FRAGMENTS=1", "BLOCK_K=32 ROW_FRAGMENTS=2"


def table(machine=M2_MAX, tile=A, keys=(KEY,)):
    left_out = {"BLOCK_K=8": "it does not compile"}
    timed = Timed("a shape", A, {A: 1.0, B: 2.0}, left_out, {B: Again(2.0, 0.1)})
    rows = {
        key: Row(key, tile, (timed,), (Compared("a shape", "forward", 1.0, 3.0),)) for key in keys
    }
    return Table(machine, rows, {"chip": "Apple M2 Max"})


def timed(data):
    return data["rows"][0]["timed"][0]


class TestFiles:
    def test_what_is_written_is_read(self, tmp_path):
        path = tmp_path / "new" / "table.json"
        table().write(path)
        assert tables.read(path) == table()
        assert [file.name for file in path.parent.iterdir()] == ["table.json"]

    @pytest.mark.parametrize(
        "damage, why",
        [
            (lambda data: data.update(format=1), "its format is 1; this version reads 3"),
            (lambda data: data.pop("gpu"), "it is damaged: KeyError: 'gpu'"),
            (lambda data: data.update(rows=7), "it is damaged: TypeError"),
            (lambda data: data["rows"].append(data["rows"][0]), "two rows have one key"),
            (lambda data: data["rows"][0].update(key="flash_fwd"), "a row has the key 'flash_fwd'"),
            (lambda data: data["rows"][0].update(tile="BLOCK_K=x"), "the tile 'BLOCK_K=x'"),
            (lambda data: data["rows"][0].update(tile="A=1\tB"), "a row has the key"),
            (lambda data: data["rows"][0].update(tile=f"A={2**32}"), "the tile 'A=4294967296'"),
            (lambda data: data["rows"][0].update(tile="A=\u0663"), "a row has the key"),
            (lambda data: timed(data).update(seconds=1, x=2), "it is damaged"),
            (lambda data: data["rows"][0]["compared"][0].update(torch=0), "is not above 0"),
            (lambda data: timed(data)["seconds"].update({A: 0.0}), "is not above 0 and finite"),
            (lambda data: timed(data)["seconds"].update({A: "1"}), "it is damaged: TypeError"),
            (lambda data: timed(data)["again"][B].update(share=math.inf), "is not above 0 and "),
            (lambda data: timed(data)["again"][B].update(error=-1.0), "an error of .* is below 0"),
        ],
    )
    def test_a_damaged_table(self, damage, why, tmp_path):
        path = tmp_path / "table.json"
        table().write(path)
        data = json.loads(path.read_text())
        damage(data)
        path.write_text(json.dumps(data))
        with pytest.raises(BadTable, match=why):
            tables.read(path)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null"])
    def test_no_table_at_all(self, text, tmp_path):
        path = tmp_path / "table.json"
        path.write_text(text)
        with pytest.raises(BadTable):
            tables.read(path)


def of_shape(shape, share, error=0.0):
    """B's share of A's time, as if it had been the same again."""
    return Timed(shape, A, {A: 1.0, B: share}, {}, {B: Again(share, error)})


# What was timed, and the tile that is chosen.
CHOSEN = {
    "the shortest time": ([of_shape("x", 0.9)], B),
    "a tile that was not timed again": ([Timed("x", A, {A: 1.0, B: 0.5})], A),
    "the second time decides": ([Timed("x", A, {A: 1.0, B: 0.5}, {}, {B: Again(1.0, 0.0)})], A),
    "a small gain is noise": ([of_shape("x", 0.99)], A),
    "a gain": ([of_shape("x", 0.98)], B),
    "above two standard errors": ([of_shape("x", 0.9, 0.049)], B),
    "below two standard errors": ([of_shape("x", 0.9, 0.051)], A),
    "the error of a mean is smaller": (
        [of_shape("x", 0.9, 0.051), of_shape("y", 0.9, 0.051)],
        B,
    ),
    "shapes count alike, however long they take": (
        [of_shape("x", 0.5), Timed("y", A, {A: 100.0, B: 110.0})],
        B,
    ),
    "a loss that is larger than the gain": (
        [of_shape("x", 0.5), Timed("y", A, {A: 100.0, B: 110.0}), Timed("z", A, {A: 1.0, B: 9.0})],
        A,
    ),
    "a tile that failed for a shape": ([of_shape("x", 0.5), Timed("y", A, {A: 1.0})], A),
    "the default tile cannot run": ([Timed("x", A, {B: 9.0})], B),
}


class TestFastest:
    @each_case("name", CHOSEN)
    def test_what_is_chosen(self, name):
        timed, tile = CHOSEN[name]
        assert tables.fastest(timed) == tile

    def test_a_shape_measured_again_replaces_its_times(self):
        own = Table(M2_MAX)
        own.add(KEY, of_shape("x", 0.5))
        assert own.add(KEY, Timed("y", A, {A: 1.0, B: 1.0})).tile == B
        own.compare(KEY, Compared("x", "forward", 1.0, 2.0))
        assert own.add(KEY, Timed("x", A, {A: 1.0, B: 3.0})).tile == A
        own.compare(KEY, Compared("y", "forward", 1.0, 8.0))
        assert len(own.rows[KEY].timed) == 2
        assert own.rows[KEY].ratio("forward") == pytest.approx(4.0)
        assert own.rows[KEY].ratio("training") is None


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The paths of the user's table, of the package's, and of one of their choice."""
    monkeypatch.setenv("TORCH_METAL_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(loading.SETTING, raising=False)
    monkeypatch.setattr(loading, "FOLDER", tmp_path / "package")
    own = tmp_path / "cache" / "tuned" / "apple-m2-max-38-cores.json"
    assert loading.path_of(M2_MAX) == own
    return own, tmp_path / "package" / "apple-m2-max-38-cores.json", tmp_path / "mine.json"


class TestPrecedence:
    """TORCH_METAL_ATTN_TUNED, then the user's own table, then the package's, then the chooser."""

    def test_nothing(self, places):
        assert loading.load(M2_MAX) == loading.Loaded()

    def test_the_users_own_table_and_the_packages(self, places):
        table(tile=B).write(places[0])
        table(keys=(KEY, OTHER)).write(places[1])
        found = loading.load(M2_MAX)
        assert {key: row.tile for key, row in found.rows.items()} == {KEY: B, OTHER: A}
        assert found.sources == {KEY: "tuned on this machine", OTHER: "table for Apple M2 Max"}
        assert found.words == "tuned on this machine (1 row), table for Apple M2 Max (1 row)"
        assert found.ignored == ()

    def test_off(self, places, monkeypatch):
        table().write(places[0])
        table().write(places[1])
        monkeypatch.setenv(loading.SETTING, "off")
        assert loading.load(M2_MAX) == loading.Loaded(words="default (TORCH_METAL_ATTN_TUNED=off)")

    def test_a_file(self, places, monkeypatch):
        """It alone."""
        table(tile=B).write(places[2])
        table(keys=(KEY, OTHER)).write(places[0])
        monkeypatch.setenv(loading.SETTING, str(places[2]))
        found = loading.load(M2_MAX)
        assert found.sources == {KEY: "table of TORCH_METAL_ATTN_TUNED"}
        assert found.rows[KEY].tile == B

    def test_a_file_that_is_not_there(self, places, monkeypatch):
        table().write(places[0])
        monkeypatch.setenv(loading.SETTING, str(places[2]))
        found = loading.load(M2_MAX)
        assert not found.rows
        assert f"the table of tiles {places[2]} is ignored: " in found.ignored[0]

    @pytest.mark.parametrize(
        "machine, why",
        [
            (replace(M2_MAX, gpu=M1), f"it was measured on {M1}, and this is Apple M2 Max"),
            (replace(M2_MAX, cores=30), "it was measured on 30 cores, and this GPU has 38 cores"),
            (replace(M2_MAX, system=OLD), f"it was measured with {OLD}, and this is macOS 15.1"),
            (
                replace(M2_MAX, torch="torch 2.12"),
                "it was measured with torch 2.12, and this is torch 2.13",
            ),
            (
                replace(M2_MAX, package="0.0.9"),
                "it was measured with torch_metal_attn 0.0.9, and this is 0.1.0",
            ),
        ],
    )
    def test_a_foreign_or_old_table_is_ignored_with_one_line(self, machine, why, places):
        table(machine).write(places[0])
        table(tile=B).write(places[1])
        found = loading.load(M2_MAX)
        assert found.ignored == (
            f"torch_metal_attn: the table of tiles {places[0]} is ignored: {why}",
        )
        assert found.rows[KEY].tile == B, "the package's is used"

    @pytest.mark.parametrize(
        "other", [{"gpu": M1}, {"cores": 30}, {"system": OLD}, {"torch": "torch 2.12"}]
    )
    def test_a_table_of_the_package_for_another_machine(self, other, places):
        """`info` says so; the user has nothing to do, and hears nothing at each start."""
        table(replace(M2_MAX, **other)).write(places[1])
        found = loading.load(M2_MAX)
        assert not found.rows
        assert found.ignored == ()
        why = replace(M2_MAX, **other).differs(M2_MAX)
        assert found.words == f"default, no table for Apple M2 Max: {why}"

    def test_a_user_without_a_home(self, places, monkeypatch):
        def no_home(gpu):
            raise loading.cache.CacheError("no home")

        monkeypatch.setattr(loading, "path_of", no_home)
        table().write(places[1])
        assert set(loading.load(M2_MAX).rows) == {KEY}

    @pytest.mark.parametrize("text", ["{", "[" * 10**5], ids=len)
    def test_the_lines_are_printed(self, text, places, monkeypatch, capsys):
        places[0].parent.mkdir(parents=True)
        places[0].write_text(text)
        monkeypatch.setattr(loading, "this_machine", lambda: M2_MAX)
        loading.install()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"torch_metal_attn: the table of tiles {places[0]} is ignored: it is not JSON"
        )


def test_the_packages_own_tables_can_be_read():
    """None so far."""
    for path in loading.FOLDER.glob("*.json"):
        found = tables.read(path)
        assert path.name == loading._file_name(found.machine)
    assert (loading.FOLDER / "README.md").is_file()


def test_the_name_of_a_mac(monkeypatch):
    monkeypatch.setattr(loading.mps, "available", lambda: True)
    monkeypatch.setattr(loading.torch.backends.mps, "get_name", lambda: "Apple M3 Pro")
    monkeypatch.setattr(loading.macos, "version", lambda: "15.1.1")
    monkeypatch.setattr(loading.torch.backends.mps, "get_core_count", lambda: 18, raising=False)
    monkeypatch.setattr(loading.torch, "__version__", "2.14.1+git123")
    found = loading.this_machine()
    assert found == Machine("Apple M3 Pro", 18, "macOS 15.1", "torch 2.14", found.package)
    assert loading._file_name(found) == "apple-m3-pro-18-cores.json"
