"""A directory of compiled images, addressed by what they were made from."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

OVERRIDE = "TORCH_METAL_ATTN_CACHE"
SEAL = "seal.json"


def cache_dir() -> Path:
    """TORCH_METAL_ATTN_CACHE, else the platform's place for a user's caches."""
    override = os.environ.get(OVERRIDE)
    return Path(override) if override else default_dir()


def default_dir() -> Path:
    """The platform's place for a user's caches."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torch_metal_attn"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_metal_attn"


def digest(parts: Iterable[str | bytes]) -> str:
    """One hash over the parts, each with its length, so that no two lists of parts collide."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()[:40]


def lookup(key: str) -> Path | None:
    """The entry's directory if it is whole: every file as long and as it was when it was stored."""
    entry = cache_dir() / key[:2] / key
    try:
        seal = json.loads((entry / SEAL).read_text())
        for name, expected in seal.items():
            if digest([(entry / name).read_bytes()]) != expected:
                raise ValueError(name)
        if not seal:
            raise ValueError(SEAL)
    except FileNotFoundError:
        if not entry.is_dir():
            return None
    except (OSError, ValueError, AttributeError):
        pass
    else:
        return entry
    _discard(entry)
    return None


def store(key: str, files: dict[str, bytes]) -> Path:
    """Store an entry in one step; where another process was faster, its entry is as good."""
    entry = cache_dir() / key[:2] / key
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
    try:
        seal = {name: digest([data]) for name, data in files.items()}
        for name, data in files.items():
            (scratch / name).write_bytes(data)
        (scratch / SEAL).write_text(json.dumps(seal))
        scratch.chmod(0o755)
        try:
            scratch.rename(entry)
        except OSError:
            if lookup(key) is None:
                scratch.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return entry


def _discard(entry: Path) -> None:
    """Move a broken entry out of the way first: another process may be looking at it."""
    try:
        trash = Path(tempfile.mkdtemp(prefix=".old-", dir=entry.parent))
        entry.rename(trash / "entry")
        shutil.rmtree(trash, ignore_errors=True)
    except OSError:
        shutil.rmtree(entry, ignore_errors=True)


def replace(key: str, files: dict[str, bytes]) -> Path:
    """Store an entry whose content may differ from the one that is there."""
    entry = cache_dir() / key[:2] / key
    if entry.is_dir():
        _discard(entry)
    return store(key, files)
