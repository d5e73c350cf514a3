"""The version of this package, and the URL of its issues."""

from importlib.metadata import PackageNotFoundError, metadata, version

try:
    VERSION = version("torch_metal_attn")
except PackageNotFoundError:  # run from a source tree that was built in place
    VERSION = "0+unknown"


def open_an_issue() -> str:
    """The advice to open an issue, with the URL if the package has one."""
    try:
        urls = metadata("torch_metal_attn").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    issues = [url.removeprefix("Issues, ") for url in urls if url.startswith("Issues, ")]
    return f"open an issue ({issues[0]})" if issues else "open an issue"
