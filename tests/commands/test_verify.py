"""`verify`: its checks notice faults, a broken case hides no other, and the report is complete."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

from tests.helpers.mutants import plant
from torch_metal_attn import simulate
from torch_metal_attn.__main__ import main
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import ShaderCompileError
from torch_metal_attn.testing import judge as measure
from torch_metal_attn.tools import verify
from torch_metal_attn.tools.verify import cases, report, runner
from torch_metal_attn.tools.verify.attention import check_forward
from torch_metal_attn.tools.verify.problems import CACHES, FEATURES, HALF_CACHES, Sizes, cached

CPU = torch.device("cpu")
FULL = cases.full()


def sample():
    """An early case of each family, but the one that takes gigabytes: later ones, with more
    options, have kernels that no other test compiles."""
    families = {}
    for case in FULL:
        families.setdefault(case.family, []).append(case)
    families.pop("offsets beyond 2**31")
    return {name: members[len(members) // 5] for name, members in families.items()}


SAMPLE = sample()


@pytest.mark.parametrize("family", SAMPLE)
def test_a_case_of_each_family(family, device):
    result = runner.run(SAMPLE[family], device)
    assert result.status == runner.PASSED, result
    assert result.measures


def test_the_cases_are_many_and_different():
    assert len({(str(case), case.dtype) for case in FULL}) == len(FULL) > 500
    by_check = {case.check.__name__ for case in FULL}
    assert len(by_check) == 13
    for dtype in measure.DTYPES:
        assert sum(case.parameters["dtype"] == dtype for case in FULL) > 150
    used = {case.parameters.get("feature") for case in FULL}
    assert used >= set(FEATURES)
    assert {case.parameters.get("cache") for case in FULL} >= {*CACHES, *HALF_CACHES}
    dims = {case.parameters.get("head_dim") for case in FULL}
    assert dims >= {1, 7, 65, 96, 128, 256, 576}


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_is_worth_what_it_holds(cache):
    """Rows that belong to nobody are not what the reference is given."""
    q, k, v = Sizes(2, 4, 2, 3, 40, 32, 32).operands(torch.float16)
    held = cached(k, v, cache)
    out, _ = torch.ops.metal_attn.flash_decode(q, held.k, held.v, **held.options)
    assert out.isfinite().all()
    assert (held.exact_k - k).abs().max() <= (0 if cache in ("paged", "indexed") else 0.6)


class TestJudges:
    def test_nan_is_no_match_for_a_number(self):
        found, exact = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]).double()
        assert not measure.near("out", found, exact, 1.0).ok
        assert not measure.near("out", exact.float(), found.double(), 1.0).ok
        assert measure.near("out", found, found.double(), 0.0).ok

    def test_infinity_is_no_match_for_a_number(self):
        found, exact = torch.tensor([-torch.inf]), torch.tensor([-3.0]).double()
        assert not measure.near_statistic("lse", found, exact, 1e-5).ok
        assert measure.near_statistic("lse", found, found, 1e-5).ok

    @pytest.mark.parametrize("dtype", measure.DTYPES)
    def test_twice_torchs_error_and_no_more(self, dtype):
        exact = torch.tensor([0.0, 1.0]).double()
        near = exact.to(dtype) + torch.tensor([2e-2, 0.0]).to(dtype)
        assert measure.near("out", near, exact, 1.01e-2).ok
        assert not measure.near("out", near, exact, 0.9e-2).ok

    def test_another_shape_is_an_error(self):
        with pytest.raises(AssertionError, match=r"out has shape \(2,\) and not \(3,\)"):
            measure.near("out", torch.zeros(2), torch.zeros(3).double(), 1.0)

    def test_bits(self):
        x = torch.tensor([0.0, 1.0])
        assert measure.same_bits("cache", x, x.clone()).ok
        assert not measure.same_bits("cache", -x, x).ok
        assert measure.same_bits("cache", torch.tensor([-0.0, 1.0]), x).error == 1


ANGLES = ("params.sine_sign * angles.sines[i]", "0.9f * params.sine_sign * angles.sines[i]")
# What is planted in a shader, and the check that must notice.
FAULTS = {
    "forward": (
        "flash_fwd",
        "scores.scale(params.scale_log2)",
        "scores.scale(0.98f * params.scale_log2)",
    ),
    "packed": ("flash_fwd", "log2(row_sum)) * M_LN2_F", "log2(row_sum))"),
    "backward": (
        "flash_bwd_dq",
        "dq_tile.fragments[i][d] * scale",
        "dq_tile.fragments[i][d]",
    ),
    "append": ("append_kv", "min(end, params.capacity", "min(end - 1, params.capacity"),
    "rope": ("rope", *ANGLES),
    "softmax": ("softmax", "row_sum = simd_sum(row_sum)", "row_sum = row_sum"),
    "merge": ("merge", "weight_a * value_a + weight_b", "weight_b * value_a + weight_a"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, monkeypatch):
    plant(monkeypatch, *FAULTS[name])
    case = next(case for case in FULL if case.check.__name__ == f"check_{name}")
    with simulate(check=True):
        result = runner.run(case, CPU)
    assert result.status == runner.FAILED
    assert result.bad
    assert not result.worst.ok


def test_a_run_that_differs_is_seen(monkeypatch):
    op, calls = torch.ops.metal_attn.flash_decode, []

    def unsteady(*arguments, **options):
        calls.append(op(*arguments, **options))
        return calls[-1][0] + (len(calls) == 2), calls[-1][1]

    monkeypatch.setattr(torch.ops.metal_attn, "flash_decode", unsteady)
    (case,) = (c for c in FULL if c.family == "threads" and c.dtype == "float32")
    result = runner.run(case, CPU)
    assert result.status == runner.FAILED
    assert result.worst.what == "decoded, bytes that differ"


def run_full(monkeypatch, tmp_path, some):
    monkeypatch.setattr(cases, "full", lambda: tuple(some))
    path = tmp_path / "report.md"
    return main(["verify", "--full", "--report", str(path)]), path.read_text()


def causal(dtype=torch.float16, **parameters):
    return cases.Case(
        "flash_fwd", check_forward, {"dtype": dtype, "feature": "causal", **parameters}
    )


class TestReport:
    def test_all_is_well(self, monkeypatch, tmp_path, capsys):
        code, text = run_full(monkeypatch, tmp_path, [causal(), causal(torch.float32)])
        assert code == 0
        assert "**No failures, 2 passed**" in text
        assert "| flash_fwd | 2 | 0 | 0." in text
        assert "## Failures" not in text
        for name in ("chip", "system", "backend", "torch", "python"):
            assert f"| {name} | " in text
        captured = capsys.readouterr()
        assert "2 cases ran" in captured.out
        assert captured.err.splitlines() == ["[1/2] flash_fwd"]

    def test_a_wrong_kernel(self, monkeypatch, tmp_path, capsys):
        plant(monkeypatch, *FAULTS["forward"])
        code, text = run_full(monkeypatch, tmp_path, [causal()])
        assert code == 1
        assert "**1 failed, 0 passed**" in text
        assert "### flash_fwd: feature causal (float16)" in text
        assert "| out | " in text
        assert text.count("FAILED") >= 1
        assert "FAILED" in capsys.readouterr().out

    def test_an_exception_hides_no_other(self, monkeypatch, tmp_path):
        def broken(device, *, dtype):
            raise RuntimeError("the queue is gone\n" * 100)

        some = [cases.Case("broken", broken, {"dtype": torch.float32}), causal()]
        code, text = run_full(monkeypatch, tmp_path, some)
        assert code == 1
        assert "**1 failed, 1 passed**" in text
        assert "RuntimeError: the queue is gone" in text
        assert "more lines" in text

    def test_a_compile_error_is_quoted(self, monkeypatch, tmp_path):
        source = shaders.source

        def broken(family):
            return source(family) + ("\nint oops = nothing_of_this_name;\n")

        monkeypatch.setattr(shaders, "source", broken)
        code, text = run_full(monkeypatch, tmp_path, [causal()])
        assert code == 1
        assert ShaderCompileError.__name__ in text
        assert "nothing_of_this_name" in text

    def test_skips_are_no_failures(self, monkeypatch, tmp_path):
        def absent(device, *, dtype):
            raise measure.Skipped("too little memory")

        skipped = cases.Case("far", absent, {"dtype": torch.float16})
        code, text = run_full(monkeypatch, tmp_path, [skipped, causal()])
        assert code == 0
        assert "**No failures, 1 passed, 1 skipped**" in text
        assert "- far: plain (float16): too little memory" in text

    def test_an_interrupt_keeps_what_was_done(self, monkeypatch, tmp_path, capsys):
        def interrupted(device, *, dtype):
            raise KeyboardInterrupt

        stop = cases.Case("stop", interrupted, {"dtype": torch.float16})
        code, text = run_full(monkeypatch, tmp_path, [causal(), stop, causal()])
        assert code == 130
        assert "It ended after 1 of 3 cases, in this one:\n\nstop: plain (float16)" in text
        assert "interrupted" in capsys.readouterr().err

    def test_a_process_that_dies_leaves_what_was_done(self, monkeypatch, tmp_path):
        """The report of the moment before the case that took it along."""
        texts = []

        def deadly(device, *, dtype):
            texts.append((tmp_path / "report.md").read_text())
            return []

        last = cases.Case("deadly", deadly, {"dtype": torch.float16})
        run_full(monkeypatch, tmp_path, [causal(), last])
        assert "It ended after 1 of 2 cases, in this one:\n\ndeadly: plain (float16)" in texts[0]
        assert "1 passed" in texts[0]

    def test_where_it_cannot_be_written(self, tmp_path, capsys):
        path = tmp_path / "no folder" / "report.md"
        assert main(["verify", "--full", "--report", str(path)]) == 2
        assert "no folder" in capsys.readouterr().err

    def test_no_paths_and_no_names(self, monkeypatch, tmp_path):
        home, package = str(Path.home()), verify.__path__[0]

        def broken(device, *, dtype):
            raise RuntimeError(f"{package}/x.py and {home}/secret")

        _, text = run_full(monkeypatch, tmp_path, [cases.Case("x", broken, {"dtype": torch.half})])
        assert package not in text
        assert f"{home}/secret" not in text
        assert "torch_metal_attn/tools/verify/x.py" in text

    @pytest.mark.parametrize("family", SAMPLE)
    def test_snippets_run(self, family, capsys):
        """As they are, but for the checks, which the families' own tests run."""
        case = SAMPLE[family]
        ast.parse(case.snippet("mps"))
        given = {}

        def check(device, **parameters):
            given.update(parameters)
            return []

        own_import = f"from {case.check.__module__} import"
        lines = case.snippet("cpu").splitlines()
        code = "\n".join(line for line in lines if not line.startswith(own_import))
        exec(code, {case.check.__name__: check})
        assert given == case.all_parameters
        assert given.items() >= case.parameters.items()


def test_report_needs_full(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--report", "x.md"])
    assert ended.value.code == 2
    assert "--full" in capsys.readouterr().err


def test_shares():
    one = measure.Measure("out", 1.0, 4.0)
    assert report.share_text(one) == "0.25"
    assert report.share_text(dataclasses.replace(one, bound=0.0)) == "1 bytes"
    assert one.ok
    assert not measure.Measure("out", float("nan"), 1.0).ok
