"""A directory of compiled images, addressed by what they were made from (`trim` has its limits)."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OVERRIDE = "TORCH_METAL_ATTN_CACHE"
LIMIT = "TORCH_METAL_ATTN_CACHE_MIB"
DEFAULT_LIMIT_MIB = 1024
SEAL = "seal.json"
IN_USE_SECONDS = 3600.0
NOTE_SECONDS = 600.0  # between two notes of a use on disk
# The directory is measured at a process' first store, and again after so large a part of the limit.
MEASURED_PART = 16
# To take the place of damaged entries, each of which another process may have stored meanwhile.
ATTEMPTS = 100

_Version = tuple[int, int] | None


class CacheError(OSError):
    """No cache can be used: no directory can be written, or a setting is wrong."""


_unmeasured: int | None = None  # bytes stored since the last measurement, None before the first


def cache_dir() -> Path:
    """TORCH_METAL_ATTN_CACHE, else the platform's directory for user caches."""
    override = os.environ.get(OVERRIDE)
    return Path(override).absolute() if override else default_dir()


def limit() -> int:
    """The bytes that the cache may take; raises CacheError if the setting is not such a number."""
    text = os.environ.get(LIMIT, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise CacheError(f"{LIMIT} is {text!r}; it must be a whole number of MiB from 1 up")
    return (int(text) if text else DEFAULT_LIMIT_MIB) * 2**20


def default_dir() -> Path:
    """The platform's directory for user caches; raises CacheError for a user without a home."""
    base = None if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "torch_metal_attn"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise CacheError(
            f"no place for the cache of compiled kernels ({error}): set {OVERRIDE} to a directory "
            "that can be written"
        ) from error
    caches = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return caches / "torch_metal_attn"


def digest(parts: Iterable[str | bytes]) -> str:
    """One hash over the parts and their lengths, so that no two lists of parts collide."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()[:40]


def lookup(key: str) -> Path | None:
    """The entry's directory if every file is as it was stored. Raises CacheError."""
    limit()  # a wrong setting is an error, also when nothing has to be stored
    entry = cache_dir() / key[:2] / key
    # Asked before the files are read: another process may store the entry now, and it is whole.
    if not entry.is_dir():
        return None
    version = _version(entry)
    try:
        seal = json.loads((entry / SEAL).read_text())
        for name, expected in seal.items():
            if digest([(entry / name).read_bytes()]) != expected:
                raise ValueError(name)
        if not seal:
            raise ValueError(SEAL)
    except (OSError, ValueError, AttributeError):
        pass
    else:
        with suppress(OSError):  # a cache that only others may write
            if time.time() - (entry / SEAL).stat().st_mtime > NOTE_SECONDS:
                os.utime(entry / SEAL)
        return entry
    _discard(entry, version)
    return None


def store(key: str, files: dict[str, bytes]) -> Path:
    """Store an entry in one step, or use another process's entry; raises CacheError."""
    most = limit()
    try:
        entry = _store(key, files)
    except OSError as error:
        raise CacheError(
            error.errno,
            f"the cache of compiled kernels cannot be written ({error.strerror or error}): "
            f"set {OVERRIDE} to a directory that can",
            str(cache_dir()),
        ) from error
    _count(sum(map(len, files.values())), most)
    return entry


def _store(key: str, files: dict[str, bytes]) -> Path:
    entry = cache_dir() / key[:2] / key
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
    try:
        for name, data in files.items():
            (scratch / name).write_bytes(data)
        seal = {name: digest([data]) for name, data in files.items()}
        (scratch / SEAL).write_text(json.dumps(seal))
        scratch.chmod(0o755)
        for left in reversed(range(ATTEMPTS)):
            try:
                scratch.rename(entry)
                break
            except OSError:
                if lookup(key) is not None:
                    break
                if left == 0:
                    raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return entry


def trim(most: int) -> None:
    """Remove the entries unused for longest until `most` bytes are left; keep the last hour's."""
    now, total = time.time(), 0
    old: list[tuple[float, int, Path, _Version]] = []
    for entry in cache_dir().glob("??/*"):
        try:
            version, size = _version(entry), _size(entry)
            finished = not entry.name.startswith(".")
            used = (entry / SEAL if finished else entry).stat().st_mtime
        except OSError:  # another process is removing it
            continue
        total += size
        if now - used > IN_USE_SECONDS:
            old.append((used if finished else 0.0, size, entry, version))
    for used, size, entry, version in sorted(old, key=lambda one: one[:3]):
        if used > 0.0 and total <= most:
            break
        _discard(entry, version)
        total -= size


def _size(entry: Path) -> int:
    """The bytes of its files. pathlib would take three times as long."""
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(entry)
        for name in names
    )


def _count(size: int, most: int) -> None:
    global _unmeasured
    if _unmeasured is None or _unmeasured + size > most // MEASURED_PART:
        trim(most)
        _unmeasured = 0
    else:
        _unmeasured += size


def _version(entry: Path) -> _Version:
    """The identity of an entry, unlike that of one in its place; None if it is gone."""
    try:
        about = entry.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _discard(entry: Path, version: _Version) -> None:
    """Move an entry away and delete it, unless another process has removed or replaced it."""
    with _alone(entry.parent):
        if version is None or _version(entry) != version:
            return
        trash = entry
        try:
            trash = Path(tempfile.mkdtemp(prefix=".old-", dir=entry.parent))
            entry.rename(trash / "entry")
        except OSError:
            shutil.rmtree(entry, ignore_errors=True)
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time is inside, where the file system has locks."""
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # children of a fork have the file too
        os.close(file)
