"""What importing the package says where its extension cannot work, and strings to and from ops."""

import gc

import psutil
import pytest
import torch

from tests.helpers.forks import run_program
from torch_metal_attn import extension


def test_torch_that_is_too_old():
    """Before anything else of the package is imported, which may use what it has not."""
    source = "import torch; torch.__version__ = '2.9.1'; import torch_metal_attn"
    done = run_program(source)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_metal_attn needs torch 2.10 or later, and this is 2.9.1: "
        "pip install -U 'torch>=2.10'"
    )


@pytest.mark.parametrize("found", ["2.10.0a0+git", "3.0"])
def test_torch_that_is_not_too_old(found, monkeypatch):
    monkeypatch.setattr(torch, "__version__", found)
    extension._require_torch()


def test_not_built(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "PATH", tmp_path / "_C.abi3.so")
    with pytest.raises(ImportError, match=r"not built: no _C\.abi3\.so in .*`pip install \.`"):
        extension.load.__wrapped__()


def test_built_for_another_machine(tmp_path, monkeypatch):
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(b"no library of this machine")
    monkeypatch.setattr(extension, "PATH", path)
    with pytest.raises(ImportError, match=r"cannot be loaded .*--force-reinstall.*: .*_C"):
        extension.load.__wrapped__()


def flex_texts():
    """A string, and lists of them."""
    text = f"return {' && '.join(['true'] * 500)};"
    q = torch.zeros(1, 1, 8, 8)
    return lambda: torch.ops.metal_attn.flex_fwd_explain(
        q, q, q, captures=[], mask=text, shares=[text] * 2, places=[text]
    )


def a_plan():
    q = torch.zeros(1, 1, 8, 8)
    return lambda: torch.ops.metal_attn.flash_bwd_plan(q, q, q)


@pytest.mark.parametrize("make", [flex_texts, a_plan])
def test_ops_free_the_strings_that_they_take_and_return(make):
    """Torch's own conversions (2.13) leak a copy of each, 2,000 to 16,000 bytes a call."""
    call = make()

    def memory():
        gc.collect()
        return psutil.Process().memory_info().rss

    for _ in range(200):
        call()
    before = memory()
    for _ in range(2000):
        call()
    assert memory() - before < 2 << 20
