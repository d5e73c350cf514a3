"""The version of this package, and where its issues are."""

from importlib.metadata import PackageNotFoundError, metadata, version

try:
    VERSION = version("torch_metal_attn")
except PackageNotFoundError:  # run from a source tree that was built in place
    VERSION = "0+unknown"


def open_an_issue() -> str:
    """The words, with the URL if the package has it."""
    try:
        urls = metadata("torch_metal_attn").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    result = [url for label, url in (each.split(", ", 1) for each in urls) if label == "Issues"]
    return f"open an issue ({result[0]})" if result else "open an issue"
