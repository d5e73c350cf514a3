"""The command runs a script as python does, and always prints the report."""

import os
import sys

import pytest

from torch_metal_attn.__main__ import main
from torch_metal_attn.tools.doctor import report, watch

ATTENTION = """
import sys, torch
import torch.nn.functional as F
x = torch.zeros(1, 2, 16, 40)
for _ in range(3):
    F.scaled_dot_product_attention(x, x, x)
"""
REPORTED = "x (1, 2, 16, 40)"


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Run a script's text. Returns its status or exception, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        path = tmp_path / "script.py"
        path.write_text(text)
        process = os.getpid()
        before = sys.modules["__main__"], sys.argv, sys.path[:]
        try:
            ended = main(["doctor", *(arguments or ("script.py",))])
        except BaseException as error:
            ended = error
        assert before == (sys.modules["__main__"], sys.argv, sys.path)
        out, err = capsys.readouterr()
        if os.getpid() != process:  # a fork, which must not return to pytest
            os._exit("doctor: attention" in err)
        return ended, out, err

    return run


def test_the_report_describes_an_attention(doctor):
    ended, out, err = doctor(ATTENTION)
    assert (ended, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith("doctor: attention of script.py, torch ")
    row = "    3  (1, 2, 16, 40) x (1, 2, 16, 40)  float32  torch's function  2.05 kB"
    assert row in lines
    below = lines[lines.index(row) + 1 :]
    assert below[0].strip() == "called in script.py:6"
    assert below[1].strip().startswith("to run it on metal_attn: run it inside `with ")
    assert "3 calls: torch's function: 3" in lines
    assert max(map(len, lines)) <= 120


def test_lengths_of_one_place_share_a_row(doctor):
    growing = """
import torch_metal_attn
for keys in (33, 40, 45):
    k = torch.zeros(1, 2, keys, 40)
    F.scaled_dot_product_attention(x[:, :, :1], k, k)
    F.scaled_dot_product_attention(k, k, k, attn_mask=torch.zeros(keys, keys))
    (k @ k.mT).softmax(-1)
    ends = torch.tensor([0, keys], dtype=torch.int32)
    packed = k[0].transpose(0, 1)
    torch_metal_attn.flash_attn_varlen_func(packed, packed, packed, ends, ends, keys, keys)
"""
    _, _, err = doctor(ATTENTION + growing)
    rows = [line.split("float32")[0].split(maxsplit=1) for line in err.splitlines()]
    shown = {row[1].strip(): row[0] for row in rows if row and row[0].isdigit() and len(row) > 1}
    shown.pop("calls: torch's function: 9; written out by hand: 3; metal_attn: 3")
    assert shown == {
        "(1, 2, 16, 40) x (1, 2, 16, 40)": "3",
        "(1, 2, 1, 40) x (1, 2, 33-45, 40)": "3",
        "(1, 2, 33-45, 40) x (1, 2, 33-45, 40)": "3",
        "(1, 2, 33-45, 33-45)": "3",
        "(33-45, 2, 40) x (33-45, 2, 40)": "3",
    }


def test_a_script_is_main_with_its_arguments(doctor, tmp_path):
    (tmp_path / "other.py").write_text("value = 1")
    ended, out, _ = doctor(
        "import sys, other\nprint(__name__, sys.argv, __file__, sys.path[0])\n"
        "print(sys.modules['__main__'].other.value)",
        *("script.py", "-m", "--full", "x"),
    )
    assert ended == 0
    assert out.splitlines() == [
        f"__main__ ['script.py', '-m', '--full', 'x'] script.py {tmp_path}",
        "1",
    ]


def test_a_module_is_run_as_main(doctor, tmp_path):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys\nfrom . import other\nprint(__name__, __package__, sys.argv[1:])"
    )
    (package / "other.py").write_text("print(__name__)")
    ended, out, err = doctor("", "-m", "some_package", "-m", "3")
    assert (ended, out) == (0, "some_package.other\n__main__ some_package ['-m', '3']\n")
    assert "doctor: attention of -m some_package" in err
    assert "No attention was seen." in err


@pytest.mark.parametrize("end", [SystemExit(7), OSError("its own"), KeyboardInterrupt()], ids=repr)
def test_exceptions_of_the_script_pass_after_the_report(end, doctor):
    ended, _, err = doctor(f"{ATTENTION}raise {end!r}")
    assert repr(ended) == repr(end)
    assert REPORTED in err


FAILS = {
    "raise ValueError('its own')": ['  File "script.py", line 7, in <module>'],
    "def f(): F.softmax(3)\nf()": [f'  File "script.py", line {n}' for n in (8, 7)],
    "1 +": ['  File "script.py", line 7'],
}


@pytest.mark.parametrize("end", FAILS)
def test_a_traceback_begins_in_the_script(end, doctor, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # not the hook of a library
    ended, _, _ = doctor(ATTENTION + end)
    sys.excepthook(type(ended), ended, ended.__traceback__)
    files = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
    assert len(files) >= len(FAILS[end])
    for line, expected in zip(files, FAILS[end], strict=False):
        assert line.startswith(expected)


def test_the_report_is_printed_if_stdout_is_closed(doctor):
    closed = "class Closed:\n    def flush(self): raise BrokenPipeError\nimport sys\n"
    _, _, err = doctor(ATTENTION + closed + "sys.stdout = Closed()")
    assert REPORTED in err


def test_threads_that_outlive_the_script_are_recorded(doctor):
    threaded = "import threading\nthreading.Timer(0.2, lambda: F.softmax(x @ x.mT, -1) @ x).start()"
    _, _, err = doctor(ATTENTION + threaded)
    assert "written out by hand" in err


def test_a_fork_does_not_report(doctor):
    # The `doctor` above exits the child with 1 if it printed a report.
    ended, out, err = doctor(
        "import os, sys\npid = os.fork()\nif pid == 0:\n    sys.exit()\n"
        "print('child', os.waitpid(pid, 0)[1])\n" + ATTENTION
    )
    assert (ended, out) == (0, "child 0\n")
    assert err.count("doctor: attention") == 1


@pytest.mark.parametrize("available", [True, False])
def test_cpu_tensors_get_advice_on_a_mac(available, doctor, monkeypatch):
    monkeypatch.setattr(report.mps, "available", lambda: available)
    _, _, err = doctor(ATTENTION)
    assert "Tensors were on the CPU: the list says what would run each call on mps." in err
    assert ('.to("mps")' in err) == available


def test_errors_of_the_report_do_not_end_the_script(doctor, monkeypatch):
    def broken(*arguments):
        raise ValueError("planted")

    monkeypatch.setattr(watch, "torchs", broken)
    ended, out, err = doctor(ATTENTION + "print('ran')")
    assert (ended, out) == (0, "ran\n")
    assert "3 calls could not be described; please report this: ValueError: planted" in err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["missing.py"], "cannot read the script missing.py: No such file or directory"),
        (["."], "cannot read the script .: Is a directory"),
        (["-m", "missing_module"], "cannot run the module missing_module: No module named"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_a_script_that_cannot_run_is_named(arguments, said, capsys):
    try:
        status = main(["doctor", *arguments])
    except SystemExit as ended:  # raised by argparse
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err
