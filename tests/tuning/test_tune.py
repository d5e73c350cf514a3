"""`tune` on a GPU with a fake clock, and once in the simulator."""

import json
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
from torch_metal_attn.testing.running import FAILED, RAISED, Outcome
from torch_metal_attn.tools import tune
from torch_metal_attn.tuned import loading
from torch_metal_attn.tuned.loading import Row, Table

FORWARD = {"heads": 2, "kv_heads": 1, "length": 100, "kv_length": 200, "head_dim": 16}
FORWARD |= {"dtype": "float32"}
PLAIN, BAND = (f"flash_fwd float 16 16 {word} q<=512 k<=512" for word in ("plain", "band"))


@pytest.fixture
def run(tmp_path, capsys):
    """Run `tune` on shapes that differ from FORWARD. Returns its status, output and rows."""

    def tune(*shapes, rounds=1, options=()):
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps([FORWARD | shape for shape in shapes]))
        arguments = ["--shapes", str(path), "--rounds", str(rounds)] if shapes else []
        try:
            status = main(["tune", *arguments, *map(str, options)])
        except SystemExit as stopped:  # raised by argparse
            status = stopped.code
        captured = capsys.readouterr()
        table = tmp_path / "tuned" / "apple-m2-max-38-cores.json"
        rows = loading.read(table, M2_MAX).rows if table.exists() else {}
        return types.SimpleNamespace(
            status=status, out=captured.out, err=captured.err, path=table, rows=rows
        )

    return tune


def explained(**options):
    q, k = torch.zeros(1, 2, 100, 16), torch.zeros(1, 1, 200, 16)
    return explain(q, k, k, **options)


def candidates(**options):
    """The tiles of flash_fwd for FORWARD, the default one first."""
    return explained(**options).kernels["flash_fwd"].candidates


class TestOnAFakeClock:
    def test_the_fastest_tile_is_kept_and_used(self, fake_gpu, run):
        tiles = candidates(causal=True)
        tile = tiles[2]
        fake_gpu.seconds = {tile: 0.25}
        fake_gpu.torch = 0.5
        done = run({"causal": True}, rounds=3)
        assert done.status == 0
        lines = done.out.splitlines()
        first = lines.index("forward 100 x 200, B1 H2/1 D16 float32 causal")
        assert lines[first + 1 : first + 3] == [
            "  flash_fwd",
            f"    {tiles[0]:<78} 1000.000 ms, default",
        ]
        again = "again 0.250 +- 0.000 of the default tile's time"
        assert f"    {tile:<78} 250.000 ms, {again}, chosen" in lines
        assert "  whole call: torch takes 2.00 of our time" in lines
        assert lines[-1] == f"1 tile in {done.path}"
        assert done.rows == {BAND: Row(tile, {"forward": 2.0})}
        assert explained(causal=True).kernels["flash_fwd"].choice == loading.MEASURED
        assert explained().kernels["flash_fwd"].choice == loading.DEFAULT

    @pytest.mark.parametrize(
        ("seconds", "chosen"),
        [
            (lambda again: 0.9, True),
            (lambda again: 0.97 + 0.01 * (again % 2), True),  # 2.5 % with an error of 0.2 %
            (lambda again: 0.99, False),  # too small a gain
            (lambda again: 0.5 + 0.9 * (again % 2), False),  # 10 % with an error of 20 %
        ],
    )
    def test_the_tile_that_looks_fastest_is_timed_again(self, seconds, chosen, fake_gpu, run):
        """It alternates with the default tile, because by noise one of many looks fastest."""
        rounds = 6
        first = 2 + rounds  # two calls precede the rounds
        tiles = candidates()
        fake_gpu.seconds = {tiles[-1]: lambda n: 0.5 if n < first else seconds(n - first)}
        done = run({}, rounds=rounds)
        assert [row.tile for row in done.rows.values()] == [tiles[-1] if chosen else tiles[0]]
        turns = fake_gpu.calls[len(tiles) * first :][: 2 * first]
        assert len(set(turns)) == 2

    def test_training_keeps_the_best_tile_of_each_of_three_kernels(self, fake_gpu, run):
        kernels = explained(backward=True).training.kernels
        tile = kernels["flash_bwd_dq"].candidates[1]
        fake_gpu.seconds = {f"flash_bwd_dq {tile}": 0.5}
        fake_gpu.torch = 0.75
        rows = {key.split()[0]: row for key, row in run({"kind": "training"}).rows.items()}
        assert [*rows] == ["flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"]
        assert rows["flash_bwd_dq"].tile == tile
        assert rows["flash_bwd_dkv"].tile == kernels["flash_bwd_dkv"].candidates[0]
        assert fake_gpu.calls[-1].count("; ") == 2, "the whole step has the best tile of each"
        assert rows["flash_fwd"].torch == {"training": pytest.approx(1.5)}

    def test_the_first_shape_of_a_key_decides(self, fake_gpu, run):
        done = run({}, {"length": 101}, {"kind": "training"})
        assert done.out.count("  flash_fwd\n") == 1
        assert done.rows[PLAIN].torch.keys() == {"forward", "training"}

    def test_another_run_adds_to_the_table(self, fake_gpu, run):
        decoding = "flash_decode float 16 16 plain q<=8 k<=512"
        assert [*run({"kind": "decode", "length": 1}).rows] == [decoding]
        run({})
        tile = candidates()[1]
        fake_gpu.seconds = {tile: 0.5}
        rows = run({}).rows
        assert [*rows] == [decoding, PLAIN]
        assert rows[PLAIN].tile == tile

    def test_a_table_of_another_version_is_replaced(self, fake_gpu, run):
        path = loading.path_of(M2_MAX)
        Table(M2_MAX._replace(torch="torch 2.10"), {"a b": Row("X=1")}).write(path)
        done = run({})
        assert f"{path} is replaced: it was measured with torch 2.10" in done.err
        assert [*done.rows] == [PLAIN]

    def test_an_interrupt_keeps_what_was_measured(self, fake_gpu, run):
        launch = fake_gpu.launch

        def interrupted():
            if len(fake_gpu.calls) == 28:
                raise KeyboardInterrupt
            launch()

        fake_gpu.launch = interrupted
        done = run({}, {"causal": True}, {"window": 5})
        assert (done.status, [*done.rows]) == (130, [PLAIN])
        assert done.err.endswith("interrupted\n")

    @pytest.mark.parametrize(
        "outcome, status, why",
        [
            (
                Outcome(FAILED, measures=(Measure("out", 1.0, 1e-3),)),
                1,
                "its result is wrong: out is off by 1.0e+00, allowed 1.0e-03",
            ),
            (
                Outcome(RAISED, message="it does not compile: no\nmore"),
                0,
                "it does not compile: no",
            ),
        ],
    )
    def test_a_failing_tile_is_left_out(self, outcome, status, why, fake_gpu, run, monkeypatch):
        """This holds even for the default and fastest tile. A wrong result exits with 1."""
        check, checked = tune.run, []

        def planted(*arguments):
            checked.append(arguments)
            return outcome if len(checked) == 1 else check(*arguments)

        monkeypatch.setattr(tune, "run", planted)
        default = candidates()[0]
        fake_gpu.seconds = {default: 0.1}
        done = run({})
        assert done.status == status
        assert f"left out: {why}, default\n" in done.out
        assert ("Please open an issue" in done.out) == status
        assert done.rows[PLAIN].tile != default
        assert not any(default in call for call in fake_gpu.calls), "it is not timed"

    @pytest.mark.parametrize("first", [1, 4])
    def test_a_tile_that_raises_when_it_is_timed_is_left_out(self, first, fake_gpu, run):
        launch, tile = fake_gpu.launch, candidates()[1]
        fake_gpu.seconds = {tile: 0.1}

        def full():
            launch()
            if fake_gpu.calls.count(fake_gpu.calls[-1]) >= first and tile in fake_gpu.calls[-1]:
                raise torch.OutOfMemoryError("MPS backend out of memory\nmore")

        fake_gpu.launch = full
        done = run({})
        assert done.status == 0
        assert "left out: OutOfMemoryError: MPS backend out of memory\n" in done.out
        assert done.rows[PLAIN].tile == candidates()[0]

    def test_a_shape_without_memory_is_named(self, fake_gpu, run, monkeypatch):
        def none(*arguments):
            raise RuntimeError("Invalid buffer size: 99 GB")

        monkeypatch.setattr(tune, "calls_of", none)
        done = run({})
        assert (done.status, done.rows) == (0, {})
        assert "  not measured: Invalid buffer size: 99 GB\n" in done.out

    def test_the_config_of_a_model_gives_the_shapes(self, fake_gpu, run, tmp_path):
        config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        (tmp_path / "config.json").write_text(json.dumps(config))
        rows = run(options=["--model", tmp_path, "--rounds", 1]).rows
        assert all(key.split()[1:4] == ["bfloat", "16", "16"] for key in rows)
        kernels = Counter(key.split()[0] for key in rows)
        assert (kernels["flash_fwd"], kernels["flash_decode"], kernels["flash_bwd_dq"]) == (3, 3, 1)


class TestBadInput:
    @pytest.mark.skipif(mps.usable(), reason="mps can be tuned")
    def test_without_mps_it_fails(self, run):
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
            ([], ["--rounds", "0"], "--rounds is 0; it must be above 0"),
            ([], ["--dtype", "float16"], "--dtype is for --model"),
            ([], ["--model", "x", "--shapes", "y"], "not allowed with argument"),
            ([{}], ["--out", "{file}/table.json"], "{file}"),  # the table cannot be written
        ],
    )
    def test_invalid_options_are_refused(self, shapes, options, why, fake_gpu, run, tmp_path):
        file = tmp_path / "file"
        file.touch()
        done = run(*shapes, options=[option.format(file=file) for option in options])
        assert done.status == 2
        assert why.format(file=file) in done.err
        assert fake_gpu.calls == []


@each_case("shape", tune.COMMON)
def test_the_default_shapes_have_kernels_to_choose(shape):
    assert tune.kernels_of(shape, CPU)


# Runs in a new process, which reads the table on import.
USED = """
import torch, torch_metal_attn
q = torch.zeros(1, 1, 40, 16, dtype=torch.float16)
print(torch_metal_attn.explain(q, q, q).kernels["flash_fwd"].choice)
"""


def test_end_to_end_in_the_simulator(run, tmp_path, monkeypatch):
    """Times a few tiles in real time."""
    kernels_of = tune.kernels_of

    def some(shape, device):
        kernels = kernels_of(shape, device).items()
        return {name: replace(kernel, candidates=kernel.candidates[:3]) for name, kernel in kernels}

    monkeypatch.setattr(tune, "kernels_of", some)
    monkeypatch.setattr(tune.mps, "problem", lambda: "")
    monkeypatch.setattr(tune, "DEVICE", CPU)
    out = tmp_path / "table.json"
    shape = {"length": 40, "kv_length": 40, "heads": 1, "dtype": "float16"}
    with simulate():
        done = run(shape, options=["--out", out])
    assert done.status == 0
    assert "left out" not in done.out
    rows = loading.read(out, loading.this_machine()).rows
    assert rows.keys() == {"flash_fwd half 16 16 plain q<=512 k<=512"}
    used = run_alone(USED, **{loading.SETTING: str(out)})
    assert used == "table of TORCH_METAL_ATTN_TUNED\n"
    assert run_alone(USED, **{loading.SETTING: "off"}) == "default\n"
