"""The command `fuzz`: shrinking, outcomes, and complete reports of every run."""

import dataclasses
import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from tests.commands import fuzz_deadly
from tests.commands.test_fuzz import SEED, drawn
from tests.helpers import forks
from tests.helpers.cases import each_case
from tests.helpers.mutants import plant
from torch_metal_attn import simulate, testing
from torch_metal_attn.__main__ import main
from torch_metal_attn.testing import running, shrinking, storage
from torch_metal_attn.testing.families import FAMILIES, Family
from torch_metal_attn.testing.running import Outcome
from torch_metal_attn.tools.fuzz import command, report, workers
from torch_metal_attn.tools.fuzz.workers import Ran

CPU = torch.device("cpu")
SCALE = ("score * params.scale_log2", "0.98f * score * params.scale_log2")


SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 9, "kv_length": 40}


class TestShrinking:
    @pytest.fixture(autouse=True)
    def no_hurry(self, monkeypatch):
        monkeypatch.setattr(shrinking, "SHRINK_SECONDS", math.inf)

    # Few fields change the kernel, because each kernel with the planted fault is compiled anew.
    CASE = testing.Attention(**SIZES, seqused_k=(38, 5), seed=5)

    def test_a_planted_fault_is_shrunk_and_replayed(self, monkeypatch, tmp_path, capsys):
        plant(monkeypatch, "flash_decode", *SCALE)
        with simulate(check=True):
            ran = workers.run_and_shrink(3, self.CASE, CPU)
        simple, outcome = ran.shrunk
        assert outcome.shows(ran.outcome)
        assert len(simple.fields()) <= 4
        assert simple.batch == simple.heads == 1
        results = report.Report({}, SEED)
        results.add(ran)
        path = tmp_path / "report.json"
        results.write(path)
        assert report.read(path) == [simple]
        assert main(["fuzz", "--replay", str(path)]) == 1
        exec(storage.snippet(simple))
        out = capsys.readouterr().out
        assert "1 of 1 fail" in out
        assert f"Outcome(status='FAILED', what='{outcome.what}'" in out

    def test_the_failing_result_stays_the_same(self):
        def run(case):
            return Outcome(running.FAILED, "out" if case.heads > 1 else "softmax_lse")

        simple, _ = shrinking.shrink(self.CASE, run(self.CASE), run)
        assert simple.fields() == {"call": "flash_fwd", "heads": 2}

    def test_every_family_is_shrunk(self):
        def run(case):
            assert not case.invalid_reason()
            return Outcome(running.FAILED, "out")

        for case in drawn()[:60]:
            simple, _ = shrinking.shrink(case, run(case), run)
            assert len(simple.fields()) <= len(case.fields())
            assert bool(simple.refused()) == bool(case.refused())


def raising(error):
    def call(prepared, arguments):
        raise error

    return call


def writing(name, error=None):
    """Writes to an argument. Then it computes the results, or raises `error`."""

    def call(prepared, arguments):
        results = None if error else prepared.function(**arguments)
        arguments[name].zero_()
        if error:
            raise error
        return results

    return call


LEGAL, ILLEGAL = {}, {"softcap": -2.0}
# {name: (fields of a case, a function that replaces the call, expected status and subject)}
OUTCOMES = {
    "refused": (LEGAL, raising(ValueError("not today")), running.REFUSED, "ValueError"),
    "not refused": (ILLEGAL, lambda *_: None, running.ACCEPTED, "softcap below 0"),
    "written, then refused": (ILLEGAL, writing("q", ValueError()), running.FAILED, "memory"),
    "a refusal of another type": (ILLEGAL, raising(RuntimeError()), running.RAISED, "RuntimeError"),
    "an error": (LEGAL, raising(RuntimeError("broken")), running.RAISED, "RuntimeError"),
    "an argument that is written": (LEGAL, writing("k"), running.FAILED, "memory"),
    "a length beyond the keys": ({"seqused_k": (4,)}, lambda *_: None, running.ACCEPTED, "lengths"),
}


def outcome_of(monkeypatch, fields, call, device=CPU):
    family = FAMILIES[testing.Attention]

    def prepare(case, device):
        prepared = family.prepare(case, CPU)
        return dataclasses.replace(prepared, function=lambda **arguments: call(prepared, arguments))

    with monkeypatch.context() as patch, simulate(check=True):
        patch.setitem(FAMILIES, testing.Attention, family._replace(prepare=prepare))
        return running.run(testing.Attention(kv_length=3, **fields), device)


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes_are_classified(name, monkeypatch):
    fields, call, status, what = OUTCOMES[name]
    outcome = outcome_of(monkeypatch, fields, call)
    assert (outcome.status, outcome.what[: len(what)]) == (status, what)


def test_lengths_that_mps_cannot_check_may_be_accepted(monkeypatch):
    """mps may run the call, but must write nothing else."""
    fields, mps = {"seqused_k": (4,)}, torch.device("mps")
    assert outcome_of(monkeypatch, fields, lambda *_: None, mps).ok
    wrote = outcome_of(monkeypatch, fields, lambda _, arguments: arguments["k"].zero_(), mps)
    assert wrote.what.startswith("memory")


def test_workers_that_die_and_hang_are_reported(monkeypatch, tmp_path, capsys):
    drawn, looks = [], itertools.count()

    def draw(seed, index):
        drawn.append(fuzz_deadly.draw(seed, index))
        return drawn[-1]

    def clock():
        """Time passes only during the case that hangs."""
        return next(looks) if drawn and drawn[-1].call == "hangs" else 0

    monkeypatch.setattr(command, "draw", draw)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(workers.multiprocessing, "get_context", {"spawn": forks.context}.get)
    monkeypatch.setitem(FAMILIES, fuzz_deadly.Deadly, Family(0, fuzz_deadly.prepare))
    monkeypatch.setitem(storage._BY_NAME, "Deadly", fuzz_deadly.Deadly)
    path = tmp_path / "report.json"
    arguments = ["--cases", "3", "--minutes", "10", "--case-seconds", "2", "--workers", "1"]
    assert main(["fuzz", *arguments, "--out", str(path)]) == 1
    data = json.loads(path.read_text())
    assert data["cases"] == 3
    assert [(f["case"]["call"], f["status"], f["message"]) for f in data["failures"]] == [
        ("dies", running.DIED, "the process ended with exit status 7"),
        ("hangs", running.HUNG, "no end after 2 s"),
    ]
    assert "print(testing.check(testing.Deadly(call='dies')))" in capsys.readouterr().out


def test_a_paused_watcher_reports_no_hang(monkeypatch):
    now = iter([5.0, 5.5, 900.0, 900.25])
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock = workers._Clock()
    looks = [clock.look() for _ in range(3)]
    assert looks == [0.5, 0.5 + 2 * workers._PERIOD, 0.75 + 2 * workers._PERIOD]


NO_MASK = {"family": "Attention", "call": "scaled_dot_product_attention", "attn_mask": " "}


class TestCommand:
    @pytest.fixture
    def fuzzing(self, monkeypatch, tmp_path):

        def run(sent, *arguments):
            def instead(draw, seed, indices, count, **_):
                for ran in sent:
                    if isinstance(ran, BaseException):
                        raise ran
                    yield ran

            monkeypatch.setattr(workers, "run", instead)
            path = tmp_path / "report.json"
            code = main(["fuzz", "--seed", "5", "--out", str(path), *arguments])
            return code, json.loads(path.read_text())

        return run

    SOUND = Ran(0, testing.Copy(), Outcome(running.PASSED))
    BAD = Ran(1, testing.Softmax(seed=3), Outcome(running.FAILED, "weights", "text"))

    def test_a_run_without_failures_passes(self, fuzzing, capsys):
        code, data = fuzzing([self.SOUND, None])
        assert code == 0
        assert (data["seed"], data["cases"], data["failures"]) == (5, 1, [])
        assert data["cases_by_call"] == {"Copy copy_pages": 1}
        assert "1 case ran" in capsys.readouterr().out

    def test_a_run_without_cases_fails(self, fuzzing, tmp_path, capsys):
        path = str(tmp_path / "report.json")
        assert fuzzing([None])[0] == 2
        assert "no case ran, so nothing was tested" in capsys.readouterr().err
        assert main(["fuzz", "--replay", path]) == 2
        assert "a run in which no case ended" in capsys.readouterr().err
        fuzzing([self.SOUND])
        assert main(["fuzz", "--replay", path]) == 0
        assert capsys.readouterr().out.endswith(f"{path} has no failures to run again\n")

    @each_case(
        "options, message",
        [
            (["--case", "3"], "--case needs --seed"),
            (["--case", "3", "--seed", "5", "--cases", "2"], "leave out --cases"),
            (["--replay", "x.json", "--seed", "5"], "leave out --seed"),
        ],
    )
    def test_options_that_exclude_each_other_are_refused(self, options, message, capsys):
        assert main(["fuzz", *options]) == 2
        assert message in capsys.readouterr().err

    def test_the_same_failure_is_printed_once(self, fuzzing, capsys):
        bad = dataclasses.replace(self.BAD, shrunk=(testing.Softmax(), self.BAD.outcome))
        code, data = fuzzing([self.SOUND, bad, dataclasses.replace(bad, index=9)])
        assert code == 1
        failure, again = data["failures"]
        assert failure["case"] == again["case"] == {"family": "Softmax", "call": "softmax"}
        assert failure["drawn_as"]["seed"] == 3
        out = capsys.readouterr().out
        assert out.count("testing.Softmax(call='softmax')") == 1
        assert "case 9: the same failure as case 1\n" in out

    def test_an_interrupt_keeps_the_failures(self, fuzzing, capsys):
        code, data = fuzzing([self.SOUND, self.BAD, KeyboardInterrupt(), self.BAD])
        assert code == 130
        assert len(data["failures"]) == 1
        assert "2 cases ran" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "text",
        [
            *("", "{}", '{"failures": [{"case": {"family": "x"}}]}', "[" * 10**5),
            json.dumps({"failures": [{"case": NO_MASK}]}),
        ],
        ids=len,
    )
    def test_damaged_reports_are_refused(self, text, tmp_path, capsys):
        path = tmp_path / "x.json"
        path.write_text(text)
        assert main(["fuzz", "--replay", str(path)]) == 2
        assert str(path) in capsys.readouterr().err

    @each_case(
        "option, text, message",
        [
            *((name, "0", "not a positive") for name in ("--minutes", "--workers", "--cases")),
            ("--minutes", "inf", "inf is not a positive, finite number"),
            ("--case-seconds", "nan", "nan is not a positive, finite number"),
            ("--cases", "1" + "0" * 20, "is above 1000000000"),
            ("--workers", "1025", "1025 is above 1024"),
            ("--case", "-1", "-1 is not a case number: give 0 or more"),
        ],
    )
    def test_invalid_numbers_are_refused(self, option, text, message, capsys):
        with pytest.raises(SystemExit):
            main(["fuzz", option, text])
        assert message in capsys.readouterr().err


@each_case(
    "family, fields, message",
    [
        ("Attention", {"heads": None}, "heads is None; it must be of type int"),
        ("Attention", {"softmax_scale": "a"}, "softmax_scale is 'a'; it must be of type float or "),
        ("Attention", {"seqused_k": 3}, "seqused_k is 3; it must be of type tuple[int, ...] or "),
        ("Attention", {"packed": ((1,),)}, "it must be of type tuple[tuple[int, int], ...]"),
        ("Attention", {"q_layout": (3,)}, "q_layout is (3,); it must be of type tuple[str, ...]"),
        ("Attention", {"dtype": "a"}, "dtype is 'a'; it must be the name of a dtype of torch"),
        ("Attention", {"call": "a"}, "call is 'a'; it must be one of flash_fwd, flash_varlen_fwd"),
        ("Attention", {"cache": "paged", "call": "flash_bwd"}, "flash_bwd has no cache"),
        ("Quantised", {"call": "q8"}, "call is 'q8'; it must be one of q8_0, q4_0"),
    ],
)
def test_invalid_fields_are_refused(family, fields, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        testing.check(getattr(testing, family)(**fields))
