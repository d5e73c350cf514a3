"""Checks a wheel: its names, metadata, modules and shaders."""

import re
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from torch_metal_attn.runtime import shaders

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "torch_metal_attn"
EXTENSION = f"{PACKAGE}/_C.abi3.so"
PLUGIN = f"{PACKAGE}_pytest.py"  # a plugin for pytest


def project_version() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'^version = "(.*)"$', text, re.MULTILINE)[0]


def faults(path: Path, platform: str) -> list[str]:
    """The faults of the wheel at `path`, one sentence each. platform: the tag in the name."""
    version = project_version()
    tag = f"cp310-abi3-{platform}"
    stem = f"{PACKAGE}-{version}"
    problems = []
    if path.name != f"{stem}-{tag}.whl":
        problems.append(f"its name is {path.name}; it must be {stem}-{tag}.whl")
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    info = f"{stem}.dist-info"
    problems += _metadata(files.get(f"{info}/METADATA", b"").decode(), version)
    tags = re.findall(r"^Tag: (.*)$", files.get(f"{info}/WHEEL", b"").decode(), re.MULTILINE)
    if tags != [tag]:
        problems.append(f"its tags are {tags}; they must be {[tag]}")
    return problems + _contents(files, info)


def _metadata(text: str, version: str) -> list[str]:
    metadata = Parser().parsestr(text)
    problems = []
    expected = {"Name": PACKAGE, "Version": version, "Requires-Python": ">=3.10"}
    for field, value in expected.items():
        if metadata[field] != value:
            problems.append(f"its {field} is {metadata[field]!r}; it must be {value!r}")
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    torch = [one for one in requirements if one.name == "torch"]
    if len(torch) != 1 or torch[0].specifier != Requirement("torch>=2.10").specifier:
        asked = ", ".join(map(str, torch)) or "no torch"
        problems.append(f"it requires {asked}; it must require torch>=2.10, without an upper pin")
    return problems


def _contents(files: dict[str, bytes], info: str) -> list[str]:
    package = ROOT / PACKAGE
    expected = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for pattern in ("*.py", "py.typed", "simulator/shim/**/*")
        for path in package.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected[PLUGIN] = (ROOT / PLUGIN).read_bytes()
    expected[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    for shader in sorted((ROOT / "shaders").glob("*.metal")):
        expected[f"{PACKAGE}/_shaders/{shader.name}"] = shaders.flatten(shader).encode("ascii")
    problems = []
    for name, data in expected.items():
        if name not in files:
            problems.append(f"{name} is missing")
        elif files[name] != data:
            problems.append(f"{name} differs from the file in the source tree")
    for name in files:
        if name not in expected and name != EXTENSION and not name.startswith(f"{info}/"):
            problems.append(f"{name} does not belong in a wheel")
    if EXTENSION not in files:
        problems.append(f"{EXTENSION} is missing")
    return problems
