"""What importing the package says where its extension cannot work."""

import subprocess
import sys

import pytest

from torch_metal_attn import extension


@pytest.mark.parametrize("found, fits", [("2.9.1", False), ("2.10.0a0+git", True), ("3.0", True)])
def test_torch_that_is_too_old(found, fits):
    source = f"import torch; torch.__version__ = {found!r}; import torch_metal_attn"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.returncode == 0) == fits, done.stderr
    if not fits:
        assert done.stderr.splitlines()[-1] == (
            "ImportError: torch_metal_attn needs torch 2.10 or later, and this is 2.9.1: "
            "pip install -U 'torch>=2.10'"
        )


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
