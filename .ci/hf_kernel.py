"""Lays a wheel out as Hugging Face's `kernels` library loads it: dist/hf-kernel/build/<variant>/.

`kernels` loads a variant named after torch's stable ABI from macOS 26 on, and `torch-metal` before
that. Both are written, with the same files.
"""

import argparse
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

from check_wheel import PACKAGE, ROOT, project_version

OUTPUT = ROOT / "dist" / "hf-kernel"
MACOS_VARIANTS = ("torch-stable-abi210-metal-aarch64-darwin", "torch-metal")
# The version of the interface on the hub. Increase it when callers must change.
KERNEL_VERSION = 1

# `kernels` names this module, but the package's modules import each other as torch_metal_attn.*.
LOADER = '''\
"""Loads torch_metal_attn {version} from the folder of this file."""

import importlib.util
import sys
from pathlib import Path

_VERSION = "{version}"
_INIT = Path(__file__).parent / "torch_metal_attn" / "__init__.py"


def _load():
    package = sys.modules.get("torch_metal_attn")
    if package is not None:
        if package.__version__ != _VERSION:
            raise ImportError(
                f"torch_metal_attn {{package.__version__}} is loaded from {{package.__file__}}; a "
                f"process can load only one version, that one or {{_VERSION}} of this kernel"
            )
        return package
    spec = importlib.util.spec_from_file_location("torch_metal_attn", _INIT)
    package = importlib.util.module_from_spec(spec)
    sys.modules["torch_metal_attn"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["torch_metal_attn"]
        raise
    package.__version__ = _VERSION  # an installed package reads it from its metadata
    return package


_package = _load()
__version__ = _VERSION
__all__ = list(_package.__all__)
globals().update({{name: getattr(_package, name) for name in __all__}})
'''


def write_variant(wheel: Path, output: Path, variant: str) -> Path:
    """Unpack the package in `wheel` into `output`/build/`variant`, with the files of `kernels`."""
    folder = output / "build" / variant
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.startswith(f"{PACKAGE}/")])
    (backend,) = set(variant.split("-")) & {"metal", "cpu"}
    version = project_version()
    metadata = {
        # The name of the loaded module, which must differ between kernels and variants.
        "id": "_" + re.sub(r"\W", "_", f"{PACKAGE}_{version}_{variant}"),
        "name": "torch-metal-attn",
        "version": KERNEL_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "__init__.py").write_text(LOADER.format(version=version))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="the wheel for macOS")
    wheel = parser.parse_args().wheel
    shutil.rmtree(OUTPUT, ignore_errors=True)
    for variant in MACOS_VARIANTS:
        print(write_variant(wheel, OUTPUT, variant).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
