"""The wheel and the sdist of this tree are complete, and the release's checker finds faults."""

import re
import shutil
import tarfile
import zipfile

import pytest

from tests.packaging.built_wheels import IS_CHECKOUT, ROOT, run_setup

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
pytest.importorskip("setuptools")
check_wheel = pytest.importorskip("check_wheel", reason="no .ci folder or no packaging")

SHADER = "torch_metal_attn/_shaders/rope.metal"
INFO = "torch_metal_attn-0.1.0.dist-info"


def faults(wheel):
    return check_wheel.faults(wheel, wheel.stem.split("-")[-1])


def test_the_wheel_is_complete(wheel):
    assert faults(wheel) == []


def test_sdist_has_what_the_build_needs(tmp_path):
    run_setup(tmp_path, "sdist", "--formats", "tar", "--dist-dir", tmp_path)
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = [path for path in (ROOT / "torch_metal_attn").rglob("*") if path.is_file()]
    sources = [path for folder in ("csrc", "shaders") for path in (ROOT / folder).rglob("*.*")]
    generated_here = {"_shaders", "__pycache__"}
    for path in [*package, *sources, ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "LICENSE"]:
        if path.suffix != ".so" and not generated_here.intersection(path.parts):
            assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if re.search(r"\.(so|pyc|o)$", name)]


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        (SHADER, b"", None, f"{SHADER} is missing"),
        (SHADER, b"kernel", b"kernal", f"{SHADER} differs from the file in the source tree"),
        ("torch_metal_attn/rope.py", b"", None, "torch_metal_attn/rope.py is missing"),
        ("torch_metal_attn/gone.py", b"", b"", "gone.py does not belong in a wheel"),
        ("torch_metal_attn/_C.abi3.so", b"", None, "_C.abi3.so is missing"),
        (f"{INFO}/METADATA", b"torch>=2.10", b"torch<3,>=2.10", "without an upper pin"),
        (f"{INFO}/METADATA", b": torch>=2.10", b": numpy", "it requires no torch"),
        (f"{INFO}/METADATA", b">=3.10", b">=3.11", "Requires-Python is '>=3.11'"),
        (f"{INFO}/METADATA", b"0.1.0", b"0.2.0", "Version is '0.2.0'"),
        (f"{INFO}/WHEEL", b"cp310-abi3", b"cp311-abi3", "its tags are"),
    ],
)
def test_a_planted_fault_is_found(wheel, tmp_path, name, old, new, fault):
    with zipfile.ZipFile(wheel) as archive:
        files = {member: archive.read(member) for member in archive.namelist()}
    if new is None:
        del files[name]
    else:
        files[name] = files.get(name, b"").replace(old, new)
    with zipfile.ZipFile(tmp_path / wheel.name, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    assert [line for line in faults(tmp_path / wheel.name) if re.search(fault, line)]


def test_a_wheel_under_another_name_is_reported(wheel, tmp_path):
    other = tmp_path / wheel.name.replace("cp310-abi3", "cp310-cp310")
    shutil.copy(wheel, other)
    (fault,) = faults(other)
    assert fault.startswith(f"its name is {other.name}; it must be {wheel.name}")
