"""`tune`: on a GPU with a fake clock, on a fake Metal compiler, and once in the simulator."""

import json
import re
import types
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.helpers.cases import each_case
from tests.helpers.forks import run_alone
from tests.tuning.fake_gpu import CPU, M2_MAX
from torch_metal_attn import explain, mps, simulate
from torch_metal_attn.__main__ import main
from torch_metal_attn.testing.judge import Measure
from torch_metal_attn.testing.running import FAILED, Outcome
from torch_metal_attn.tools import info
from torch_metal_attn.tools.tune import command, measure, pipelines
from torch_metal_attn.tools.tune.shapes import COMMON
from torch_metal_attn.tuned import loading, tables

FORWARD = {"heads": 2, "kv_heads": 1, "length": 100, "kv_length": 200, "head_dim": 16}
FORWARD |= {"dtype": "float32"}


@pytest.fixture
def run(tmp_path, capsys):
    """Runs `tune` on shapes that differ from FORWARD by these; what it returned, said and wrote."""

    def tune(*shapes, rounds=1, options=()):
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps([FORWARD | shape for shape in shapes]))
        given = ["--shapes", str(path), "--rounds", str(rounds)] if shapes else []
        try:
            status = main(["tune", *given, *map(str, options)])
        except SystemExit as stopped:  # argparse's
            status = stopped.code
        captured = capsys.readouterr()
        table = tmp_path / "tuned" / "apple-m2-max-38-cores.json"
        found = tables.read(table) if table.exists() else tables.Table(M2_MAX)
        return types.SimpleNamespace(
            status=status, out=captured.out, err=captured.err, table=found, tiles=found.tiles()
        )

    return tune


def candidates(**options):
    """The tiles of flash_fwd for FORWARD, the default one first."""
    q, k = torch.zeros(1, 2, 100, 16), torch.zeros(1, 1, 200, 16)
    return explain(q, k, k, **options).kernels["flash_fwd"].candidates


class TestOnAFakeClock:
    def test_the_fastest_tile_is_kept_and_used(self, fake_gpu, run, tmp_path):
        """The transcript: each tile's time, torch's, the report; and what the chooser then does."""
        tiles = candidates(causal=True)
        tile = tiles[2]
        fake_gpu.seconds = {tile: 0.25}
        fake_gpu.torch = 0.5
        done = run({"causal": True}, rounds=3)
        assert done.status == 0
        out, table = done.out, done.table
        shape = "forward 100 x 200, B1 H2/1 D16 float32 causal"
        key = "flash_fwd float 16 16 band q<=512 k<=512"
        assert re.search(rf"^{shape}\n  flash_fwd\n    V_SLICE.* 1000\.000 ms  default$", out, re.M)
        again = r"again 0\.250 \+- 0\.000 of the default tile's time"
        assert re.search(rf"^    {tile} +250\.000 ms  {again}, chosen$", out, re.M)
        assert re.search(r"^  whole call\n    torch +500\.000 ms  2\.00 of our time$", out, re.M)
        assert f"| {key} | {tile} | 0.25 | forward 2.00 |\n" in out
        assert f"1 tile in {tmp_path / 'tuned' / 'apple-m2-max-38-cores.json'}\n" in out
        assert (table.machine, done.tiles) == (M2_MAX, {key: tile})
        assert table.rows[-1] == tables.Row(key, shape, tables.TORCH, 0.5, 2.0)
        assert tuple(row.tile for row in table.rows[:-1]) == tiles
        q, k = torch.zeros(1, 2, 100, 16), torch.zeros(1, 1, 200, 16)
        assert explain(q, k, k, causal=True).kernels["flash_fwd"].choice == loading.OWN
        assert explain(q, k, k).kernels["flash_fwd"].choice == loading.RECKONED
        assert loading.loaded().words == "tuned on this machine (1 tile)"

    @pytest.mark.parametrize(
        ("seconds", "chosen"),
        [
            (lambda again: 0.9, True),
            (lambda again: 0.97 + 0.01 * (again % 2), True),  # 2.5 % with an error of 0.2 %
            (lambda again: 0.99, False),  # too small a gain
            (lambda again: 1.0, False),  # luck
            (lambda again: 0.5 + 0.9 * (again % 2), False),  # 10 % with an error of 20 %
        ],
    )
    def test_what_looks_fastest_is_timed_again(self, seconds, chosen, fake_gpu, run):
        """In turns with the default tile alone, as noise makes one of many look fastest."""
        rounds = 6
        first = 2 + rounds  # two calls before the rounds

        def lucky(before):
            return 0.5 if before < first else seconds(before - first)

        tiles = candidates()
        fake_gpu.seconds = {tiles[-1]: lucky}
        done = run({}, rounds=rounds)
        assert [*done.tiles.values()] == [tiles[-1] if chosen else tiles[0]]
        assert [row.tile for row in done.table.rows if row.error is not None] == [tiles[-1]]
        turns = fake_gpu.calls[len(tiles) * first :][: 2 * first]
        assert len(set(turns)) == 2

    def test_training_has_three_kernels_each_with_its_best(self, fake_gpu, run):
        q, k = torch.zeros(1, 2, 100, 16), torch.zeros(1, 1, 200, 16)
        kernels = explain(q, k, k, backward=True).training.kernels
        tile = kernels["flash_bwd_dq"].candidates[1]
        fake_gpu.seconds = {f"flash_bwd_dq {tile}": 0.5}
        fake_gpu.torch = 0.75
        done = run({"kind": "training"})
        found = {key.split()[0]: chosen for key, chosen in done.tiles.items()}
        assert [*found] == ["flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"]
        assert found["flash_bwd_dq"] == tile
        assert found["flash_bwd_dkv"] == kernels["flash_bwd_dkv"].candidates[0]
        # The whole step, with the best tile of each.
        assert fake_gpu.calls[-1].count("; ") == 2
        assert done.table.ratios() == {(next(iter(done.tiles)), "training"): pytest.approx(1.5)}

    def test_another_run_adds_to_the_table(self, fake_gpu, run):
        decoding = "flash_decode float 16 16 plain q<=8 k<=512"
        assert [*run({"kind": "decode", "length": 1}).tiles] == [decoding]
        run({})
        tile = candidates(causal=True)[1]
        fake_gpu.seconds = {tile: 0.5}
        assert [*run({"causal": True}).tiles.values()][1:] == [candidates()[0], tile]

    def test_a_table_of_another_version_is_replaced(self, fake_gpu, run):
        old = M2_MAX._replace(package="torch_metal_attn 0.0.1")
        path = loading.path_of(M2_MAX)
        tables.Table(old, [tables.Row("a b", "x", "X=1", default=True)]).write(path)
        done = run({})
        assert f"{path} is replaced: it was measured with torch_metal_attn 0.0.1" in done.err
        assert [key.split()[0] for key in done.tiles] == ["flash_fwd"]

    def test_an_interrupt_keeps_what_was_measured(self, fake_gpu, run):
        launch, limit = fake_gpu.launch, 28

        def interrupted():
            if len(fake_gpu.calls) == limit:
                raise KeyboardInterrupt
            launch()

        fake_gpu.launch = interrupted
        done = run({}, {"causal": True}, {"window": 5})
        assert done.status == 130
        assert [*done.tiles] == ["flash_fwd float 16 16 plain q<=512 k<=512"]
        assert "Not measured: 2 shapes." in done.out
        assert done.err.endswith("interrupted\n")

    def test_no_shape_begins_after_the_minutes(self, fake_gpu, run, monkeypatch):
        now = iter([0.0, 1.0, 59.0, 61.0])
        monkeypatch.setattr(command, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
        done = run({}, {"causal": True}, {"window": 5}, options=["--minutes", 1])
        assert done.status == 0
        assert "Not measured: 1 shape." in done.out

    def test_a_wrong_result_is_left_out_and_fails(self, fake_gpu, run, monkeypatch):
        """Of the first tile, which would have been the fastest."""
        judged, wrong = measure.run, []

        def planted(*arguments):
            outcome = judged(*arguments)
            if not wrong:
                wrong.append(outcome)
                return Outcome(FAILED, measures=(Measure("out", 1.0, 1e-3),))
            return outcome

        monkeypatch.setattr(measure, "run", planted)
        default = candidates()[0]
        fake_gpu.seconds = {default: 0.1}
        done = run({})
        assert done.status == 1
        assert "left out: its result is wrong: out is off by 1.0e+00, allowed 1.0e-03" in done.out
        assert "Please open an issue" in done.out
        (row,) = (row for row in done.table.rows if row.seconds is None)
        assert row.default
        assert [*done.tiles.values()] != [default]
        assert not any(default in call for call in fake_gpu.calls), "it is not timed"

    def test_a_tile_that_raises_when_it_is_timed(self, fake_gpu, run):
        launch, tile = fake_gpu.launch, candidates()[1]

        def full():
            launch()
            if tile in fake_gpu.calls[-1]:
                raise torch.OutOfMemoryError("MPS backend out of memory\nmore")

        fake_gpu.launch = full
        done = run({})
        assert done.status == 0
        assert "left out: OutOfMemoryError: MPS backend out of memory\n" in done.out
        assert [row.tile for row in done.table.rows if row.seconds is None] == [tile]

    def test_a_shape_without_memory_is_named(self, fake_gpu, run, monkeypatch):
        def none(*arguments):
            raise RuntimeError("Invalid buffer size: 99 GB")

        monkeypatch.setattr(measure, "calls_of", none)
        done = run({})
        assert done.status == 0
        assert "  not measured: Invalid buffer size: 99 GB\n" in done.out
        assert not loading.loaded().tiles

    def test_a_model(self, fake_gpu, run, tmp_path):
        config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = run(options=["--model", tmp_path, "--rounds", 1]).tiles
        assert all(key.split()[1:4] == ["bfloat", "16", "16"] for key in found)
        kernels = Counter(key.split()[0] for key in found)
        assert (kernels["flash_fwd"], kernels["flash_decode"], kernels["flash_bwd_dq"]) == (3, 3, 1)


class TestMetalsCompiler:
    """What torch tells of a pipeline; a fake of torch.mps.compile_shader."""

    @pytest.fixture
    def threads(self, monkeypatch):
        """The most threads by whether the text has the promise, and the texts."""
        most, texts = {False: 1024, True: 1024}, []

        def compile_shader(text):
            texts.append(text)
            if "#define BLOCK_K 24\n" in text and most.get("broken"):
                raise SyntaxError("failed to compile: program_source:3: error: no\nmore")
            kernel = types.SimpleNamespace(
                max_threads_per_threadgroup=most["max_total_threads_per_threadgroup" in text],
                thread_execution_width=32,
                static_thread_group_memory_length=5120,
            )
            return types.SimpleNamespace(flash_fwd=kernel)

        monkeypatch.setattr(torch.mps, "compile_shader", compile_shader)
        most["texts"] = texts
        return most

    def test_what_it_tells(self, threads):
        pipeline, trouble = pipelines.inspect("flash_fwd", {"BLOCK_K": "32"}, 128)
        assert str(pipeline) == (
            "at most 1024 threads, SIMD groups of 32, 5120 bytes of threadgroup memory"
        )
        assert trouble == ""
        (text,) = threads["texts"]
        assert "#define BLOCK_K 32\n#line" in text
        assert "[[kernel]] void flash_fwd(" in text

    def test_a_kernel_that_only_runs_by_its_promise(self, threads):
        threads[False] = 96
        pipeline, trouble = pipelines.inspect("flash_fwd", {}, 128)
        assert (pipeline.max_threads, trouble) == (96, "")

    def test_a_kernel_that_cannot_run(self, threads):
        threads[False] = threads[True] = 96
        trouble = pipelines.inspect("flash_fwd", {}, 128)[1]
        assert trouble == "a threadgroup of it has 128 threads and can have at most 96"

    def test_an_older_torch(self, monkeypatch):
        monkeypatch.delattr(torch.mps, "compile_shader")
        assert pipelines.inspect("flash_fwd", {}, 128) == (None, "")

    def test_candidates_that_cannot_run_are_left_out(self, threads, fake_gpu, run, monkeypatch):
        monkeypatch.setattr(measure, "_compiled_by_metal", lambda device: True)
        threads |= {False: 128, True: 128, "broken": True}
        done = run({})
        assert done.status == 0
        many = "a threadgroup of it has 256 threads and can have at most 128"
        error = "it does not compile: failed to compile: program_source:3: error: no"
        tiles = candidates()
        broken = [tile for tile in tiles if " BLOCK_K=24 " in tile]
        large = [tile for tile in tiles if " SIMDGROUPS=8 " in tile and tile not in broken]
        assert len(broken) > 0 < len(large)
        assert done.out.count(f"left out: {error}\n") == len(broken)
        assert done.out.count(f"left out: {many}\n") == len(large)
        assert "at most 128 threads, SIMD groups of 32" in done.out
        left_out = {row.tile: row.note for row in done.table.rows if row.seconds is None}
        assert left_out == dict.fromkeys(broken, error) | dict.fromkeys(large, many)

    def test_info(self, threads, monkeypatch):
        explained = info.explained
        monkeypatch.setattr(info, "explained", lambda shape, device: explained(shape, CPU))
        found = "flash_fwd in float16 at head dim 128: at most 1024 threads, SIMD groups of 32"
        assert info._pipeline().startswith(found)
        threads[False] = threads[True] = 64
        assert "has 256 threads and can have at most 64" in info._pipeline()


class TestBadInput:
    @pytest.mark.skipif(mps.usable(), reason="mps can be tuned")
    def test_without_mps(self, run):
        done = run()
        assert (done.status, done.out) == (1, "")
        words = "tune measures an Apple GPU, and mps cannot be used here"
        assert done.err == f"{words}: {mps.problem()}\n"

    @pytest.mark.parametrize(
        "shapes, options, why",
        [
            (
                [{}, {"head_dim": 600}],
                [],
                "no kernel takes the shape forward 100 x 200, B1 H2/1 D600 float32 full: "
                "q has a head dim of 600",
            ),
            ([{"tiles": "8x8"}], [], "tiles is '8x8'; tune chooses the tiles"),
            ([], ["--rounds", "0"], "--rounds is 0; it must be above 0"),
            ([], ["--minutes", "-1"], "--minutes is -1.0; it must be above 0"),
            ([], ["--minutes", "nan"], "--minutes is nan; it must be above 0"),
            ([], ["--minutes", "inf"], "--minutes is inf; it must be above 0 and finite"),
            ([], ["--dtype", "float16"], "--dtype is for --model"),
            ([], ["--shapes", "nothing.json"], "nothing.json cannot be read: No such file"),
            ([], ["--model", "nothing"], "--model is nothing, and there is no file nothing"),
            ([], ["--model", "x", "--shapes", "y"], "not allowed with argument"),
            ([{}], ["--out", "{file}/table.json"], "{file}"),  # it cannot be written
        ],
    )
    def test_what_is_refused(self, shapes, options, why, fake_gpu, run, tmp_path):
        file = tmp_path / "file"
        file.touch()
        done = run(*shapes, options=[option.format(file=file) for option in options])
        assert done.status == 2
        assert why.format(file=file) in done.err
        assert fake_gpu.calls == []


@each_case("shape", COMMON)
def test_the_default_shapes_have_kernels_to_choose(shape):
    assert measure.kernels_of(shape, CPU)


# In a process of its own, as a user's: the table is found on import.
USED = """
import torch, torch_metal_attn
q = torch.zeros(1, 1, 8, 16, dtype=torch.float16)
print(torch_metal_attn.explain(q, q, q).kernels["flash_fwd"].choice)
"""


def test_end_to_end_in_the_simulator(run, tmp_path, monkeypatch):
    """With real times of some tiles, which say nothing of a GPU."""
    every = measure.kernels_of

    def some(shape, device):
        kernels = every(shape, device).items()
        return {name: replace(kernel, candidates=kernel.candidates[:3]) for name, kernel in kernels}

    monkeypatch.setattr(measure, "kernels_of", some)
    monkeypatch.setattr(command.mps, "problem", lambda: "")
    monkeypatch.setattr(command, "DEVICE", CPU)
    out = tmp_path / "table.json"
    shape = {"length": 8, "kv_length": 8, "heads": 1, "dtype": "float16"}
    with simulate():
        assert run(shape, options=["--out", out]).status == 0
    table = tables.read(out)
    assert {row.key for row in table.rows} == {"flash_fwd half 16 16 plain q<=8 k<=8"}
    assert len(table.rows) == 4
    assert all(row.seconds > 0 and not row.note for row in table.rows)
    used = run_alone(USED, **{loading.SETTING: str(out)})
    assert used == "table of TORCH_METAL_ATTN_TUNED\n"
    assert run_alone(USED, **{loading.SETTING: "off"}) == "default\n"
