"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("torch_metal_attn")
except PackageNotFoundError:  # run from a source tree that was built in place
    VERSION = "0+unknown"
