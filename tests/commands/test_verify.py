"""`verify`: its checks notice faults, every case runs, and the report is complete."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

from tests.helpers.mutants import plant
from torch_metal_attn import reference, testing
from torch_metal_attn.__main__ import main
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.testing import judge as measure
from torch_metal_attn.testing import running, tensors
from torch_metal_attn.testing.attention_problem import build
from torch_metal_attn.testing.case import Case, Prepared
from torch_metal_attn.testing.families import FAMILIES, Family
from torch_metal_attn.testing.features import CACHES, attention
from torch_metal_attn.testing.tensors import DTYPES, Memory
from torch_metal_attn.tools import verify
from torch_metal_attn.tools.verify import cases, report

CPU = torch.device("cpu")
FULL = cases.full()


FAMILY_CASES = {}
for listed in FULL:
    FAMILY_CASES.setdefault(listed.family, []).append(listed)
# Cases near the start, because later cases have kernels that no other test compiles.
SAMPLE = {name: members[len(members) // 5] for name, members in FAMILY_CASES.items()}
del SAMPLE["offsets beyond 2**31"]  # takes gigabytes
# These run in the reference: their kernels compile for seconds, and other tests judge them.
REFERENCE_FAMILIES = re.compile("flash_(?!varlen_fwd)|decode_step|NaN|two runs|threads")


@pytest.mark.parametrize("family", SAMPLE)
def test_one_case_of_each_family_passes(family):
    if REFERENCE_FAMILIES.search(family):
        outcome = running.run(SAMPLE[family].case, CPU)
    else:
        with best_device(check=True) as device:
            outcome = running.run(SAMPLE[family].case, device)
    assert outcome.status == running.PASSED, outcome
    assert outcome.measures


def test_cases_are_distinct():
    assert len({(str(case), case.dtype) for case in FULL}) == len(FULL) > 500
    assert len({case.case for case in FULL}) == len(FULL)
    assert not [case for case in FULL if case.case.invalid_reason() or case.case.refused()]
    assert {type(case.case) for case in FULL} == set(FAMILIES) - {testing.Quantised}
    for dtype in DTYPES:
        assert sum(case.dtype == dtype for case in FULL) > 150
    dims = {case.case.fields().get("head_dim") for case in FULL}
    assert dims >= {1, 7, 65, 96, 128, 256, 576}


@pytest.mark.parametrize("cache", CACHES)
def test_caches_match_the_reference(cache):
    case = attention(call="flash_decode", dtype="float16", q_length=3, head_dim=64, cache=cache)
    problem = build(case)
    (k, v), seen = problem.stored, {"seqused_k": torch.full((2,), 65, dtype=torch.int32)}
    out, _ = torch.ops.metal_attn.flash_decode(problem.q, k, v, **problem.where, **seen)
    exact, _ = reference.attention(problem.q, problem.k, problem.v, **seen)
    assert (out - exact).abs().max() < 2e-3


class TestJudges:
    def test_nan_differs_from_a_number(self):
        actual, exact = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]).double()
        assert not measure.near("out", actual, exact, 1.0).ok
        assert not measure.near("out", exact.float(), actual.double(), 1.0).ok
        assert measure.near("out", actual, actual.double(), 0.0).ok

    def test_infinity_differs_from_a_number(self):
        actual, exact = torch.tensor([-torch.inf]), torch.tensor([-3.0]).double()
        assert not measure.near_statistic("lse", actual, exact, 1e-5).ok
        assert measure.near_statistic("lse", actual, actual, 1e-5).ok

    def test_numbers_that_round_to_infinity_may_be_infinite(self):
        """float16 rounds 65520 to infinity, and 65500 by an error of 20."""
        actual = torch.tensor([torch.inf, -torch.inf]).half()
        for exact, error in ((65949.0, 0), (65500.0, 20), (60000.0, 5520)):
            expected = torch.tensor([exact, -exact]).double()
            assert measure.near("out", actual, expected, 0.5 * error + 0.1).ok
            assert error < 100 or not measure.near("out", actual, expected, 0.4 * error).ok
        assert not measure.near("out", actual, torch.tensor([-65949.0, -65949.0]).double(), 9.0).ok
        assert not measure.near("out", actual.float(), torch.tensor([7e4, -7e4]).double(), 9.0).ok

    @pytest.mark.parametrize("dtype", measure.DTYPES)
    def test_the_bound_is_exact(self, dtype):
        exact = torch.tensor([0.0, 1.0]).double()
        near = exact.to(dtype) + torch.tensor([2e-2, 0.0]).to(dtype)
        assert measure.near("out", near, exact, 1.01e-2).ok
        assert not measure.near("out", near, exact, 0.9e-2).ok

    def test_another_shape_is_an_error(self):
        with pytest.raises(AssertionError, match=r"out has shape \(2,\) and not \(3,\)"):
            measure.near("out", torch.zeros(2), torch.zeros(3).double(), 1.0)

    def test_same_bits_distinguishes_signed_zeros(self):
        x = torch.tensor([0.0, 1.0])
        assert measure.same_bits("cache", x, x.clone()).ok
        assert not measure.same_bits("cache", -x, x).ok
        assert measure.same_bits("cache", torch.tensor([-0.0, 1.0]), x).error == 1


def test_a_lost_gradient_of_listed_keys_is_noticed(monkeypatch):
    """Gradients of keys in several lists must be accumulated."""
    monkeypatch.setattr(torch.Tensor, "index_add_", torch.Tensor.index_copy_)
    cases = [case for case in FULL if case.family == "flash_bwd: lists of keys"]
    outcomes = [running.run(case.case, CPU) for case in cases]
    assert all(outcome.status == running.FAILED for outcome in outcomes)
    assert {outcome.worst.what for outcome in outcomes} <= {"dk", "dv"}


@pytest.mark.parametrize("family", ["two runs, the same bits", "threads"])
def test_a_different_second_run_is_noticed(family, monkeypatch):
    op, calls = torch.ops.metal_attn.flash_decode, []

    def unsteady(*arguments, **options):
        calls.append(op(*arguments, **options))
        return calls[-1][0] + (len(calls) == 2), calls[-1][1]

    monkeypatch.setattr(torch.ops.metal_attn, "flash_decode", unsteady)
    family += ": flash_decode"
    (case,) = (c for c in FULL if c.family == family and c.dtype == "float32")
    outcome = running.run(case.case, CPU)
    assert outcome.status == running.FAILED
    assert outcome.worst.what == "result 0 of another run, bytes that differ"


@pytest.mark.parametrize("fault", ["out", "softmax_lse"])
def test_a_step_that_differs_from_its_parts_is_noticed(fault, monkeypatch):
    op = torch.ops.metal_attn.flash_decode

    def other(*arguments, **options):
        results = dict(zip(("out", "softmax_lse"), op(*arguments, **options), strict=True))
        results[fault] = results[fault] * (1 + 2**-9)
        return tuple(results.values())

    monkeypatch.setattr(torch.ops.metal_attn, "flash_decode", other)
    case = next(case for case in FULL if case.family == "decode_step")
    assert running.run(case.case, CPU).what == f"{fault}, bytes that differ"


def run_full(monkeypatch, tmp_path, some):
    monkeypatch.setattr(cases, "full", lambda: tuple(some))
    path = tmp_path / "report.md"
    return main(["verify", "--full", "--report", str(path)]), path.read_text()


@pytest.fixture
def broken(monkeypatch):
    """A listed case that runs a function instead of a call."""

    def listed(family, instead, dtype="float32"):
        def prepare(case, device):
            return Prepared(lambda: instead(), {}, lambda results: [], Memory(device))

        monkeypatch.setitem(FAMILIES, Case, Family(0, prepare))
        return cases.Listed(family, Case(dtype=dtype))

    return listed


def causal(dtype="float16"):
    make = functools.partial(attention, call="flash_fwd")
    return cases.listed("flash_fwd", make, dtype, {"feature": "causal"})


class TestReport:
    def test_a_run_without_failures_passes(self, monkeypatch, tmp_path, capsys):
        code, text = run_full(monkeypatch, tmp_path, [causal(), causal("float32")])
        assert code == 0
        assert "**No failures, 2 passed**" in text
        assert "| flash_fwd | 2 | 0 | 0." in text
        assert "## Failures" not in text
        for name in ("chip", "system", "backend", "torch", "python"):
            assert f"| {name} | " in text
        captured = capsys.readouterr()
        assert "2 cases ran" in captured.out
        assert captured.err.splitlines() == ["[1/2] flash_fwd"]

    def test_a_wrong_kernel_fails(self, monkeypatch, tmp_path, capsys):
        scale = "score * params.scale_log2"
        plant(monkeypatch, "flash_fwd", scale, f"0.98f * {scale}")
        code, text = run_full(monkeypatch, tmp_path, [causal()])
        assert code == 1
        assert "**1 failed, 0 passed**" in text
        assert "### flash_fwd: feature causal (float16)" in text
        assert "| out | " in text
        assert "FAILED" in text
        assert "FAILED" in capsys.readouterr().out

    def test_other_cases_run_after_an_exception(self, monkeypatch, tmp_path, broken):
        def instead():
            raise RuntimeError("the queue is gone\n" * 100)

        some = [broken("broken", instead), causal()]
        code, text = run_full(monkeypatch, tmp_path, some)
        assert code == 1
        assert "**1 failed, 1 passed**" in text
        assert "RuntimeError: the queue is gone" in text
        assert "more lines" in text

    def test_skips_are_not_failures(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tensors, "memory_of", lambda device: 1e9)
        far = next(case for case in FULL if case.family == "offsets beyond 2**31")
        code, text = run_full(monkeypatch, tmp_path, [far, causal()])
        assert code == 0
        assert "**No failures, 1 passed, 1 skipped**" in text
        reason = "the machine has 1 GB; this case needs 16 GB"
        assert f"- offsets beyond 2**31: plain (float16): {reason}" in text

    def test_an_interrupt_keeps_the_results(self, monkeypatch, tmp_path, capsys, broken):
        def instead():
            raise KeyboardInterrupt

        stop = broken("stop", instead, "float16")
        code, text = run_full(monkeypatch, tmp_path, [causal(), stop, causal()])
        assert code == 130
        assert "The run ended after 1 of 3 cases, in this case:\n\nstop: plain (float16)" in text
        assert "interrupted" in capsys.readouterr().err

    def test_the_report_is_written_before_each_case(self, monkeypatch, tmp_path, broken):
        texts = []
        report = tmp_path / "report.md"
        last = broken("deadly", lambda: texts.append(report.read_text()), "float16")
        run_full(monkeypatch, tmp_path, [causal(), last])
        assert "ended after 1 of 2 cases, in this case:\n\ndeadly: plain (float16)" in texts[0]
        assert "1 passed" in texts[0]

    def test_reports_contain_no_paths(self, monkeypatch, tmp_path, broken):
        home, package = str(Path.home()), verify.__path__[0]

        def instead():
            raise RuntimeError(f"{package}/x.py and {home}/secret")

        _, text = run_full(monkeypatch, tmp_path, [broken("x", instead)])
        assert package not in text
        assert f"{home}/secret" not in text
        assert "torch_metal_attn/tools/verify/x.py" in text


def test_an_error_is_shown_as_a_share_of_its_bound():
    one = measure.Measure("out", 1.0, 4.0)
    assert report.share_text(one) == "0.25"
    assert report.share_text(dataclasses.replace(one, bound=0.0)) == "1 byte"
    assert one.ok
    assert not measure.Measure("out", float("nan"), 1.0).ok
