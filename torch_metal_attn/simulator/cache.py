"""A directory of compiled images. The key is a digest of their inputs. `trim` limits the size."""

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
NOTE_SECONDS = 600.0  # the minimum time between two updates of an entry's time of last use
# The directory's size is measured at a process's first store, and then each time that the process
# has stored 1/MEASURED_PART of the limit.
MEASURED_PART = 16
ATTEMPTS = 100  # to replace a damaged entry, which another process may store again meanwhile

_Version = tuple[int, int] | None


class CacheError(OSError):
    """No cache can be used: no directory can be written, or a setting is wrong."""


_unmeasured: int | None = None  # bytes stored since the last measurement, None before the first


def cache_dir() -> Path:
    """TORCH_METAL_ATTN_CACHE, else the platform's directory for user caches."""
    override = os.environ.get(OVERRIDE)
    return Path(override).absolute() if override else default_dir()


def limit() -> int:
    """The maximum bytes of the cache; raises CacheError if the setting is invalid."""
    text = os.environ.get(LIMIT, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise CacheError(f"{LIMIT} is {text!r}; it must be a whole number of MiB, at least 1")
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
            f"no place for the cache of compiled kernels ({error}): set {OVERRIDE} to a writable "
            "directory"
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
    """The entry's directory; None if it is missing or damaged. Raises CacheError."""
    limit()  # raises for an invalid setting, even if nothing is stored later
    entry = cache_dir() / key[:2] / key
    # An entry that another process stores after this line is complete and must not be discarded.
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
        with suppress(OSError):  # the cache may be read-only for this user
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
            f"set {OVERRIDE} to a writable directory",
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
    """Remove entries, the least recently used first, down to `most` bytes; keep the last hour's."""
    now, total = time.time(), 0
    old: list[tuple[float, int, Path, _Version]] = []
    for entry in cache_dir().glob("??/*"):
        try:
            version, size = _version(entry), _size(entry)
            is_complete = not entry.name.startswith(".")
            used = (entry / SEAL if is_complete else entry).stat().st_mtime
        except OSError:  # another process is removing it
            continue
        total += size
        if now - used > IN_USE_SECONDS:
            # 0.0: left by a process that ended, and removed in any case.
            old.append((used if is_complete else 0.0, size, entry, version))
    for used, size, entry, version in sorted(old, key=lambda one: one[:3]):
        if used > 0.0 and total <= most:
            break
        _discard(entry, version)
        total -= size


def _size(entry: Path) -> int:
    """The bytes of an entry's files. pathlib would take three times as long."""
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
    """Identifies an entry: a replaced entry has another version. None if there is no entry."""
    try:
        about = entry.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _discard(entry: Path, version: _Version) -> None:
    """Move an entry away and delete it, unless another process has removed or replaced it."""
    with _locked(entry.parent):
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
def _locked(folder: Path) -> Iterator[None]:
    """Admit one process at a time, if the file system supports locks."""
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
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone does not unlock after a fork
        os.close(file)
