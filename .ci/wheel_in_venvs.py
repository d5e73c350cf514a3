"""Runs `verify` of dist/'s wheel for this machine in a fresh environment for each torch."""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from check_wheel import ROOT


def verify(wheel: Path, torch: str) -> bool:
    """True if `python -m torch_metal_attn verify` passes where nothing else is installed."""
    print(f"== {wheel.name} with torch {torch}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        (python,) = Path(folder).glob("bin/python")
        for command in (
            ["-m", "pip", "install", "--no-cache-dir", f"torch=={torch}", str(wheel)],
            ["-m", "torch_metal_attn", "info"],
            ["-m", "torch_metal_attn", "verify"],
        ):
            # Isolated, so that the package can only be the wheel's.
            if subprocess.run([python, "-I", *command], cwd=folder).returncode != 0:
                print(f"{wheel.name}: failed with torch {torch}", file=sys.stderr)
                return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torches", nargs="+", metavar="TORCH", help="a version of torch: 2.10.0")
    torches = parser.parse_args().torches
    platform = "macosx" if sys.platform == "darwin" else "linux"
    wheels = sorted((ROOT / "dist").glob(f"torch_metal_attn-*-{platform}_*.whl"))
    if len(wheels) != 1:
        names = ", ".join(wheel.name for wheel in wheels) or "none"
        print(f"dist/ must have one wheel for {platform}: {names}; run make wheel", file=sys.stderr)
        return 1
    passed = [verify(wheels[0], torch) for torch in torches]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
