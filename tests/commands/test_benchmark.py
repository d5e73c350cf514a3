"""`bench`: shapes, JSON, pictures, and times of a fake clock or of the CPU's reference."""

import argparse
import dataclasses
import json
import re
import subprocess

import pytest
import torch

from tests.docs.doc_pages import ROOT
from tests.helpers.cases import each_case
from tests.tuning.fake_gpu import CPU, FakeClock
from torch_metal_attn import explain, mps
from torch_metal_attn.__main__ import main
from torch_metal_attn.runtime import machine
from torch_metal_attn.tools import bench as benchmark
from torch_metal_attn.tools.bench import memory, shapes, timing, versus
from torch_metal_attn.tools.bench.shapes import BadShape, Shape

SMALL = {"heads": 4, "kv_heads": 2, "length": 16, "kv_length": 32, "head_dim": 16}


def small(kind="forward", **options):
    return Shape(kind, **SMALL | {"dtype": "float32"} | options)


class TestTiming:
    def test_each_call_has_times_or_an_error(self):
        clock = FakeClock()

        def full():
            raise torch.OutOfMemoryError("MPS backend out of memory")

        calls = {"slow": clock.work(0.25), "fast": clock.work(0.001), "full": full}
        result = timing.interleaved(calls | {"instant": lambda: None}, clock.timer, 5)
        assert result["slow"].seconds == pytest.approx([0.25] * 5)
        assert result["fast"].seconds == pytest.approx([0.001] * 5)
        assert result["slow"].median == pytest.approx(0.25)
        assert result["instant"].median == 0.0  # a sample of an instant call ends too
        assert result["full"].error == "OutOfMemoryError: MPS backend out of memory"
        assert result["full"].seconds == ()

    def test_samples_of_short_calls_take_10_ms(self):
        """Each wait for the device takes 1 ms, 10 times as long as a call."""
        clock, calls = FakeClock(), []
        timer = timing.Timer(clock.timer.now, lambda: (clock.ask(0.001), clock.synchronise()))
        result = timing.interleaved({"short": lambda: calls.append(clock.ask(0.0001))}, timer, 1)
        doubled = [1, 2, 4, 8, 16, 32, 64, 128]
        assert len(calls) == 1 + sum(doubled) + 128
        assert clock.waits == 2 * (1 + len(doubled) + 1)  # it waits before and after a sample
        assert result["short"].median * 128 == pytest.approx(0.0128 + 0.001)

    def test_the_order_of_calls_alternates(self):
        clock, calls = FakeClock(), []

        def called(name):
            return lambda: calls.append(name) or clock.ask(1.0)

        timing.interleaved({"a": called("a"), "b": called("b")}, clock.timer, 3)
        assert "".join(calls) == "aabb" + "ab" + "ba" + "ab"


class TestVersus:
    SHAPES = (
        small(causal=True),
        small(causal=True, length=32),
        small(causal=True, window=5, kv_heads=4),
        small("decode", length=1, window=9, causal=True),
        small("training"),
    )

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_both_compute_the_same(self, shape):
        result = versus.compare(shape, CPU, timing.timer_of(CPU), 1)
        assert not any(times.error for times in result.times.values())
        assert result.difference < 1e-5
        assert result.agree
        assert all(len(times.seconds) == 1 for times in result.times.values())

    def test_a_row_has_a_ratio_or_an_error(self):
        times = {"metal_attn": timing.Times((0.5, 0.5)), "torch": timing.Times((1.0, 3.0))}
        assert versus.Compared(small(), times, 0.0).ratio == 4.0
        times["torch"] = timing.Times(error="no memory")
        compared = versus.Compared(small(), times, None)
        assert (compared.ratio, compared.agree) == (None, True)
        assert "torch: no memory" in str(compared)

    def test_inputs_that_are_too_large_to_allocate_are_reported(self):
        shape = Shape(batch=2**20, heads=2**10, kv_heads=2**10, length=2**20)
        result = versus.compare(shape, CPU, timing.timer_of(CPU), 1)
        assert "the inputs cannot be allocated" in result.times["metal_attn"].error


RUN_SHAPES = [small(), small(kv_length=64), small("training", causal=True)]
RUN_SHAPES.append(small("decode", length=1, dtype="bfloat16"))


class TestRun:
    @pytest.fixture
    def fake_gpu(self, monkeypatch):
        """mps with times of the CPU's reference; records empty_cache() and synchronize()."""
        monkeypatch.setattr(benchmark.mps, "problem", lambda: "")
        monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 10)
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 24 * 2**30)
        monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append(True))
        monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(True))
        compare = versus.compare
        monkeypatch.setattr(versus, "compare", lambda s, device, *rest: compare(s, CPU, *rest))
        emptied, waits = [], []
        return emptied, waits

    def test_an_interrupt_keeps_the_results(self, fake_gpu, monkeypatch, tmp_path, capsys):
        compare = versus.compare

        def interrupted(shape, *arguments):
            if shape.length > 8:
                raise KeyboardInterrupt
            return compare(shape, *arguments)

        monkeypatch.setattr(versus, "compare", interrupted)
        assert main(["bench", "--length", "8", "9", "8", "--out", str(tmp_path)]) == 130
        data = json.loads((tmp_path / "torch_metal_attn-bench.json").read_text())
        assert data["interrupted"]
        assert [result["shape"]["length"] for result in data["results"]] == [8]
        assert capsys.readouterr().err.endswith("interrupted\n")

    @pytest.mark.skipif(mps.usable(), reason="mps measures times")
    def test_without_a_gpu_it_fails(self, capsys):
        assert main(["bench", "--length", "8"]) == 1
        assert "bench times an Apple GPU, and mps cannot be used here" in capsys.readouterr().err

    def test_the_command_writes_a_report(self, fake_gpu, monkeypatch, tmp_path, capsys):
        emptied, waits = fake_gpu
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps([dataclasses.asdict(shape) for shape in RUN_SHAPES]))
        arguments = ["--shapes", str(path), "--rounds", "2", "--out", str(tmp_path)]
        assert main(["bench", *arguments]) == 0
        assert len(emptied) == len(RUN_SHAPES)
        assert waits
        assert str(RUN_SHAPES[0]) in capsys.readouterr().out
        data = json.loads((tmp_path / "torch_metal_attn-bench.json").read_text())
        assert (data["rounds"], data["interrupted"]) == (2, False)
        assert data["machine"]["backend"] == "mps"
        assert data["machine"]["GPU cores"] == "10"
        assert data["machine"]["GPU memory"] == "24 GiB"
        for shape, result in zip(RUN_SHAPES, data["results"], strict=True):
            assert Shape(**result["shape"]) == shape
            assert len(result["torch"]["seconds"]) == 2
            assert result["difference"] < 1e-2
        monkeypatch.setattr(versus, "_ours", lambda shape, operands: operands[0] * 2)
        assert main(["bench", *arguments]) == 1
        assert "the results differ by" in capsys.readouterr().out


def test_the_chip_of_a_mac_is_found(monkeypatch):
    ran = []

    def sysctl(command, **options):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "Apple M3 Pro\n")

    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(subprocess, "run", sysctl)
    assert machine.describe(CPU)["chip"] == "Apple M3 Pro"
    assert ran[0][-1] == "machdep.cpu.brand_string"


class TestMemory:
    def test_the_command_draws_the_picture_of_the_docs(self, tmp_path, capsys):
        assert main(["bench", "--memory", "--out", str(tmp_path)]) == 0
        (drawn,) = tmp_path.iterdir()
        kept = ROOT / "docs" / "images" / drawn.name
        assert drawn.read_text() == kept.read_text(), "python -m torch_metal_attn bench --memory"
        assert "| 32768 x 32768 | 2.16 GB | 140 GB |" in capsys.readouterr().out

    def test_bytes_follow_from_the_shape(self):
        shape = small("training", dtype="float16")
        result = memory.memory(shape)
        q, k, v = shape.operands(CPU)
        assert result.ours == explain(q, k, v, backward=True, **shape.options).training.total
        scores = shape.batch * shape.heads * shape.length * shape.kv_length
        assert result.torch == 2 * (4 * q.numel() + 4 * k.numel()) + 4 * scores
        assert memory.memory(dataclasses.replace(shape, kind="forward")).ours == result.ours

    def test_each_series_has_a_picture(self, tmp_path, capsys):
        lengths = ["--length", "64", "128", "--out", str(tmp_path)]
        assert main(["bench", "--memory", *lengths]) == 0
        assert "| 128 x 128 |" in capsys.readouterr().out
        sizes = ((64, 64), (64, 128), (32, 64), (32, 128), (32, 32))
        some = [small(length=q, kv_length=kv) for q, kv in sizes]
        some += [small(heads=8), small(heads=8, window=5)]
        pictures = memory.plots([memory.memory(shape) for shape in some])
        assert len(pictures) == len(set(pictures)) == 5
        lines = [re.findall(r'<circle cx="([^"]+)"', picture) for picture in pictures]
        assert sorted(map(len, lines)) == [2, 2, 2, 4, 4]  # two series: two points per length
        for places in lines:
            half = [float(place) for place in places[: len(places) // 2]]
            assert half == sorted(set(half))


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    shapes.add_arguments(parser)
    return shapes.chosen(parser.parse_args(arguments))


class TestShapes:
    def test_options_give_lengths_and_kinds(self):
        assert parsed() is None
        result = parsed("--length", "8", "16", "--heads", "4", "--backward", "--causal")
        assert {(s.kind, s.kv_heads, s.causal) for s in result} == {("training", 4, True)}
        assert [(s.length, s.kv_length) for s in result] == [(8, 8), (16, 16)]
        result = parsed("--decode", "--kv-length", "64", "128", "--kv-heads", "2")
        assert {s.kind for s in result} == {"decode"}
        assert [(s.length, s.kv_length) for s in result] == [(1, 64), (1, 128)]

    def test_the_shape_option_is_the_shape_of_q(self):
        (shape,) = parsed("--shape", "2", "6", "100", "64", "--kv-heads", "3", "--causal")
        assert shape == Shape("forward", 2, 6, 3, 100, 100, 64, causal=True)
        assert parsed("--shape", "2", "6", "100", "64")[0].kv_heads == 6

    @each_case(
        "fields, arguments",
        [
            ({"heads": 4}, ["--heads", "4"]),
            ({"length": 64}, ["--length", "64"]),
            ({"kind": "decode", "kv_length": 9}, ["--decode", "--kv-length", "9"]),
            ({"kind": "training", "heads": 6}, ["--backward", "--heads", "6"]),
        ],
    )
    def test_a_file_has_the_defaults_of_the_options(self, fields, arguments, tmp_path):
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps([fields]))
        assert parsed("--shapes", str(path)) == parsed(*arguments)

    @pytest.mark.parametrize("nested", [False, True])
    def test_the_config_of_a_model_gives_the_shapes(self, tmp_path, nested):
        config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
        config = {"text_config": config} if nested else config
        (tmp_path / "config.json").write_text(json.dumps(config))
        for model in (tmp_path, tmp_path / "config.json"):
            (shape,) = parsed("--model", str(model), "--length", "7")
            assert (shape.heads, shape.kv_heads, shape.head_dim, shape.length) == (8, 2, 64, 7)

    @each_case(
        "content, words",
        [
            ("[" * 10**5, "cannot be read as JSON: maximum recursion depth exceeded"),
            ("[]", "a list of objects"),
            ('[{"speed": 1}]', "shape 0 has 'speed'; it must be an object with some of kind"),
            ("[7]", "shape 0 is 7; it must be an object with some of kind, batch"),
            (
                '[{"batch": 2147483647, "length": 2147483647}]',
                "a tensor of shape (2147483647, 32, 2147483647, 128) has too many elements",
            ),
            ('[{"kind": "sideways"}]', "shape 0: kind is 'sideways'"),
            ('[{"heads": 3, "kv_heads": 2}]', "shape 0: heads is 3 and kv_heads 2"),
            ('[{"dtype": "float8"}]', "dtype is 'float8'"),
            ('[{"length": 0}]', "length is 0; it must be an int from 1 to 2147483647"),
            ('[{"heads": 4294967296}]', "heads is 4294967296; it must be an int from 1 to 2147483"),
            ('[{"causal": 3}]', "causal is 3; it must be true or false"),
            ('[{"window": "a"}]', "window is 'a'; it must be the number of keys"),
            ('[{"dtype": []}]', "dtype is []; it must be one of float32"),
        ],
    )
    def test_bad_files_are_refused(self, content, words, tmp_path):
        path = tmp_path / "shapes.json"
        path.write_text(content)
        with pytest.raises(BadShape, match=re.escape(words)):
            parsed("--shapes", str(path))

    @pytest.mark.parametrize(
        "content, words",
        [
            (None, "--model is {}, and there is no file {}/config.json; it must be the path of a "),
            ("{", "cannot be read as JSON"),
            ("[]", "config.json is not the JSON object of a config.json"),
            ("{}", "config.json: num_attention_heads is None; it must be an int above 0"),
            ('{"num_attention_heads": "8"}', "num_attention_heads is '8'; it must be an int"),
            ('{"num_attention_heads": 8}', "hidden_size is None; it must be an int"),
            ('{"num_attention_heads": 8, "head_dim": -8}', "head_dim is -8; it must be an int"),
        ],
    )
    def test_bad_models_are_refused(self, content, words, tmp_path):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(BadShape, match=re.escape(words.replace("{}", str(tmp_path)))):
            parsed("--model", str(tmp_path))

    def test_bad_arguments_end_the_command(self, tmp_path, capsys):
        for arguments, words in (
            (["--shapes", "x.json", "--heads", "3"], "leave out --heads"),
            (["--shapes", "x.json", "--shape", "1", "2", "3", "4"], "leave out --shape"),
            (["--shape", "1", "2", "3", "4", "--head-dim", "3"], "leave out --head-dim"),
            (["--model", "your/model"], "--model is your/model, and there is no file your/model"),
            (["--window", "-3"], "window is -3; it must be the number of keys that a query sees"),
            (["--length", "64", "--kv-length", "0"], "kv_length is 0; it must be an int from 1"),
            (["--rounds", "0"], "--rounds is 0"),
            (["--memory", "--decode"], "leave out --decode"),
        ):
            assert main(["bench", *arguments]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("error: ")
            assert words in line

    @each_case("shape", shapes.DEFAULT_SHAPES)
    def test_the_default_shapes_are_supported(self, shape):
        op = getattr(torch.ops.metal_attn, shape.op)
        row = torch.zeros(shape.head_dim, dtype=torch.float16)
        q, k, v = (row.expand(size) for size in shape.sizes)
        assert explain(op, q, k, v, **shape.options).refusal is None
