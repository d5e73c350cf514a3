"""Files with tables of tiles: which table is used, and why others are ignored."""

import json

import pytest

from tests.helpers.cases import each_case
from tests.tuning.fake_gpu import M2_MAX
from torch_metal_attn.tuned import loading
from torch_metal_attn.tuned.loading import BadTable, Loaded, Machine, Row, Table

KEY = "flash_fwd half 64 64 band q<=2048 k<=2048"
ROW = Row("BLOCK_K=16 ROW_FRAGMENTS=1", {"forward": 3.0})


def write(path, machine=M2_MAX):
    Table(machine, {KEY: ROW, KEY.replace("band", "plain"): Row("C=1")}).write(path)


@each_case(
    "changes, why",
    [
        ({"format": 1}, "its format is 1; this version reads 5"),
        ({"machine": {"gpu": "Apple M1"}}, "it is damaged: TypeError"),
        ({"machine": None}, "it is damaged: TypeError"),
        ({"rows": [{"x": 2}]}, "it is damaged: KeyError"),
        (2, "two rows have the same key"),  # 2: the first row occurs twice
        ({"key": "flash_fwd"}, "a row has the key 'flash_fwd'"),
        *(({"tile": tile}, "a row has the key") for tile in ("A=x", "A=1\tB", "A=\u0663", "")),
        ({"tile": f"A={2**32}"}, "the tile 'A=4294967296'"),
        ({"torch": {"forward": 0.0}}, "is not above 0 and finite"),
        ({"torch": {"forward": "1"}}, "it is damaged: TypeError"),
        *((text, "it is not JSON|its format is None") for text in ("{", "[" * 10**5, "[]")),
    ],
)
def test_a_damaged_table_is_refused(changes, why, tmp_path):
    path = tmp_path / "table.json"
    write(path)
    data = json.loads(path.read_text())
    if changes == 2:
        data["rows"].append(data["rows"][0])
    elif isinstance(changes, dict):
        (data if {*changes} & {*data} else data["rows"][0]).update(changes)
    path.write_text(changes if isinstance(changes, str) else json.dumps(data))
    with pytest.raises(BadTable, match=why):
        loading.read(path, M2_MAX)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The paths of the table in the cache folder, and of a table that the user names."""
    monkeypatch.setenv("TORCH_METAL_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(loading.SETTING, raising=False)
    path = tmp_path / "cache" / "tuned" / "apple-m2-max-38-cores.json"
    assert loading.path_of(M2_MAX) == path
    return path, tmp_path / "mine.json"


class TestWhichTableIsUsed:
    def test_the_table_in_the_cache_folder_is_used(self, places, monkeypatch):
        assert loading.load(M2_MAX) == Loaded()
        write(places[0])
        assert [file.name for file in places[0].parent.iterdir()] == [places[0].name]
        loaded = loading.load(M2_MAX)
        assert loaded.rows == {KEY: ROW, KEY.replace("band", "plain"): Row("C=1")}
        assert loaded.words == "tuned on this machine (2 tiles)"
        monkeypatch.setenv(loading.SETTING, "off")
        assert loading.load(M2_MAX) == Loaded(words="default (TORCH_METAL_ATTN_TUNED=off)")

    def test_the_table_that_the_variable_names_is_used(self, places, monkeypatch):
        write(places[0])
        monkeypatch.setenv(loading.SETTING, str(places[1]))
        loaded = loading.load(M2_MAX)
        assert not loaded.rows
        assert f"the table of tiles {places[1]} is ignored: " in loaded.ignored
        write(places[1])
        loaded = loading.load(M2_MAX)
        assert (len(loaded.rows), loaded.source) == (2, "table of TORCH_METAL_ATTN_TUNED")

    @pytest.mark.parametrize(
        "field, other",
        [
            *(("gpu", "Apple M1"), ("cores", "30 cores"), ("system", "macOS 14.7")),
            *(("torch", "torch 2.12"), ("package", "torch_metal_attn 0.0.9")),
        ],
    )
    def test_a_table_of_another_machine_is_ignored(self, field, other, places, monkeypatch, capsys):
        write(places[0], M2_MAX._replace(**{field: other}))
        monkeypatch.setattr(loading, "this_machine", lambda: M2_MAX)
        loading.install()
        assert not loading.loaded().rows
        why = f"it was measured with {other}, and this is {getattr(M2_MAX, field)}"
        line = f"torch_metal_attn: the table of tiles {places[0]} is ignored: {why}\n"
        assert capsys.readouterr().err == line

    def test_no_table_is_used_without_a_home_directory(self, monkeypatch):
        def no_home(gpu):
            raise loading.cache.CacheError("no home")

        monkeypatch.delenv(loading.SETTING, raising=False)
        monkeypatch.setattr(loading, "path_of", no_home)
        assert loading.load(M2_MAX) == Loaded()


def test_a_mac_is_described_by_its_gpu_and_versions(monkeypatch):
    monkeypatch.setattr(loading.mps, "available", lambda: True)
    monkeypatch.setattr(loading.torch.backends.mps, "get_name", lambda: "Apple M3 Pro")
    monkeypatch.setattr(loading.macos, "version", lambda: "15.1.1")
    monkeypatch.setattr(loading.torch.backends.mps, "get_core_count", lambda: 18, raising=False)
    monkeypatch.setattr(loading.torch, "__version__", "2.14.1+git123")
    machine = loading.this_machine()
    expected = ("Apple M3 Pro", "18 cores", "macOS 15.1", "torch 2.14", machine.package)
    assert machine == Machine(*expected)
