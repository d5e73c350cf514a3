"""Headers of other projects' Metal kernels, taken out of their macOS wheels."""

import fcntl
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torch_metal_attn.simulator import cache

WHEELS = {
    "mlx-metal==0.32.4": ("mlx/include/mlx/backend/metal/kernels/",),
    "torch==2.15.0": ("torch/include/ATen/native/mps/kernels/", "torch/include/c10/metal/"),
}
DOWNLOAD_SECONDS = 900


def include_dir(requirement: str) -> Path:
    """The include directory of a wheel, downloaded once into the user's cache; skips without it."""
    name = requirement.replace("==", "-")
    folder = cache.default_dir() / "peers" / name
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _download(requirement, folder)
            done.touch()
    return folder / requirement.split("==")[0].split("-")[0] / "include"


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--platform",
        "macosx_14_0_arm64",
        "--python-version",
        "3.11",
    ]
    command += ["--implementation", "cp", "--abi", "cp311", "--abi", "none"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip took more than {DOWNLOAD_SECONDS} s for {requirement}")
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = pip.stderr.strip().split("\n")[-1]
        pytest.skip(f"pip cannot get {requirement} for macOS: {reason}")
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in archive.namelist():
            if member.startswith(WHEELS[requirement]) and member.endswith(".h"):
                archive.extract(member, folder)
    for wheel in wheels:
        wheel.unlink()
