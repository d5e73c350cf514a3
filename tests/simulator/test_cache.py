"""The cache of compiled kernels, and the garbage collector, which is paused in the text passes."""

import errno
import gc
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.cases import each_case
from tests.helpers.forks import in_child, in_children
from torch_metal_attn.simulator import build, cache, compile_shader

SOURCE = "kernel void k(device int* x) { x[0] = 7; }"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path / "cache"))
    forget(monkeypatch)
    return tmp_path / "cache"


def forget(monkeypatch):
    """Act like a new process, which has loaded no program."""
    monkeypatch.setattr(build, "_programs", {})


@pytest.fixture
def commands(monkeypatch):
    calls = []
    original = build._run
    build._shim.cache_clear()
    monkeypatch.setattr(build, "_run", lambda *args: (calls.append(args[0]), original(*args))[1])
    return calls


def result(source=SOURCE, **options):
    x = torch.zeros(1, dtype=torch.int32)
    compile_shader(source, **options).k(x)
    return x.item()


def test_second_process_compiles_nothing(commands, monkeypatch):
    assert result() == 7
    assert len(commands) == 6  # preprocess text and shim, precompile it, compile twice, link
    forget(monkeypatch)
    assert result() == 7
    assert len(commands) == 6


def test_every_option_is_part_of_the_key(commands):
    source = "constant int c [[function_constant(0)]];\n" + SOURCE
    result(source)
    changes = {"defines": {"A": 1}}, {"constants": {"c": 1}}, {"check": True}
    for change in (*changes, {"constants": {"c": True}}):
        before = len(commands)
        result(source, **change)
        assert len(commands) > before, change


def test_changed_header_is_compiled_again(tmp_path, commands, monkeypatch):
    header = tmp_path / "value.h"
    source = '#include "value.h"\nkernel void k(device int* x) { x[0] = VALUE; }'
    options = {"include_dirs": [tmp_path]}
    header.write_text("#define VALUE 1\n")
    assert result(source, **options) == 1
    header.write_text("#define VALUE 2\n")
    assert result(source, **options) == 2
    header.write_text("#define VALUE 1\n")
    before = len(commands)
    forget(monkeypatch)
    assert result(source, **options) == 1
    # The text is only preprocessed: once for the headers' text and once for their macros.
    assert len(commands) == before + 2


MANY_KERNELS = "\n".join(f"kernel void k{i}(device int* x) {{ x[0] = {i}; }}" for i in range(12))


def test_installations_share_the_cache(tmp_path, monkeypatch):
    x = torch.zeros(1, dtype=torch.int32)
    compile_shader(MANY_KERNELS, check=True).k11(x)
    monkeypatch.setattr(build, "SHIM", shutil.copytree(build.SHIM, tmp_path / "shim"))
    forget(monkeypatch)
    compile_shader(MANY_KERNELS, check=True).k3(x)
    assert x.item() == 3


def test_many_kernels_are_compiled_when_they_are_called(commands):
    library = compile_shader(MANY_KERNELS)
    assert len(commands) == 2  # the text and the shim are preprocessed
    x = torch.zeros(1, dtype=torch.int32)
    for name, value in (("k11", 11), ("k3", 3), ("k11", 11)):
        getattr(library, name)(x)
        assert x.item() == value
    assert len(commands) == 2 + 1 + 2 * 3  # the shim is precompiled once


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("problem", ["none can be made", "it is unusable"])
def test_without_a_precompiled_shim_texts_are_compiled_whole(problem, check, monkeypatch):
    run = build._run

    def failing(command, *args):
        if "c++-header" in command:
            if problem == "none can be made":
                raise build.ShaderCompileError(problem)
            Path(command[-1]).write_bytes(b"of another compiler")
            return ""
        return run(command, *args)

    monkeypatch.setattr(build, "_run", failing)
    assert result(check=check) == 7


def truncated(data):
    return data[: len(data) // 2]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize("name", ["one", "two", "seal.json"])
@pytest.mark.parametrize("damage", [truncated, flipped, None])
def test_a_damaged_entry_is_removed_and_stored_again(name, damage):
    files = {"one": b"1" * 100, "two": b"2" * 100}
    entry = cache.store("abcd", files)
    assert cache.lookup("abcd") == entry
    if damage:
        (entry / name).write_bytes(damage((entry / name).read_bytes()))
    else:
        (entry / name).unlink()
    assert cache.lookup("abcd") is None
    assert not entry.exists()
    assert cache.lookup(cache.store("abcd", files).name) == entry


def test_a_damaged_image_is_compiled_again(empty_cache):
    """Two children compile at once. In this process, truncating a mapped image would be fatal."""
    for _ in range(2):
        assert in_children(2, result) == [7, 7]
        assert not list(empty_cache.glob("??/.new-*"))
        for image in empty_cache.rglob("image.so"):
            image.write_bytes(truncated(image.read_bytes()))
        for text in empty_cache.rglob("program.cpp"):
            text.unlink()


def test_store_keeps_an_existing_entry():
    entry = cache.store("abcd", {"file": b"first"})
    assert cache.store("abcd", {"file": b"second"}) == entry
    assert (entry / "file").read_bytes() == b"first"
    assert cache.lookup("abcd") == entry
    assert cache.lookup("ffff") is None


def test_an_entry_stored_in_place_of_a_damaged_one_is_used(monkeypatch):
    """Another process removes the damaged entry before the lookup and stores its entry after it."""
    entry = cache.store("abcd", {"file": b"first"})
    actual = iter([None])
    monkeypatch.setattr(cache, "lookup", lambda key: next(actual, entry))
    assert cache.store("abcd", {"file": b"second"}) == entry


def test_an_entry_stored_during_a_lookup_stays(empty_cache, monkeypatch):
    def is_dir(path):
        monkeypatch.undo()
        monkeypatch.setenv(cache.OVERRIDE, str(empty_cache))
        cache.store("abcd", {"file": b"another process'"})
        return path.is_dir()

    monkeypatch.setattr(Path, "is_dir", is_dir)
    cache.lookup("abcd")
    assert (cache.lookup("abcd") / "file").read_bytes() == b"another process'"


def test_an_entry_that_replaced_a_damaged_one_stays(monkeypatch):
    """Two processes find the damage. The slow one must not discard the other one's new entry."""
    files = {"file": b"sound"}
    entry = cache.store("abcd", files)
    (entry / "file").write_bytes(b"damaged")
    os.utime(entry, (1e9, 1e9))  # the file system's clock may be coarse
    discard = cache._discard

    def slow(*actual):
        discard(*actual)
        assert cache.store("abcd", files) == entry
        discard(*actual)

    monkeypatch.setattr(cache, "_discard", slow)
    assert cache.lookup("abcd") is None
    assert cache.lookup("abcd") == entry


def test_a_key_depends_on_where_its_parts_end():
    assert cache.digest(["ab", "c"]) != cache.digest(["a", "bc"])


OLDER = [4000.0 + 100 * n for n in range(6)]


@pytest.mark.parametrize(
    "limit, ages, used_again, stay",
    [
        ("4", OLDER, 5, [True, True, False, False, False, True]),  # 2, 3, 4 are the oldest
        ("1", [60.0] * 3, None, [True] * 3),  # used in the last hour
        ("9", [1e6] * 3, None, [True] * 3),
    ],
)
def test_entries_unused_for_long_go(limit, ages, used_again, stay, empty_cache, monkeypatch):
    """`ages`: seconds since each entry of 1 MiB was used. Leftovers of killed processes go too."""
    monkeypatch.setattr(cache, "_unmeasured", None)
    monkeypatch.setenv(cache.LIMIT, limit)
    entries = []
    for index, age in enumerate(ages):
        entries.append(cache._store(f"{index:04x}", {"image.so": bytes(2**20)}))
        os.utime(entries[-1] / cache.SEAL, (time.time() - age,) * 2)
    leftovers = [empty_cache / "00" / name for name in (".new-abc", ".old-abc")]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / "image.so").write_bytes(b"half")
        os.utime(leftover, (1e9, 1e9))
    if used_again is not None:
        assert cache.lookup(entries[used_again].name) == entries[used_again]
    cache.store("ffff", {"file": b"new"})
    assert [entry.exists() for entry in entries] == stay
    assert not any(leftover.exists() for leftover in leftovers)
    assert cache.lookup("ffff") is not None


def test_the_directory_is_measured_rarely(monkeypatch):
    measured = []
    monkeypatch.setattr(cache, "trim", measured.append)
    monkeypatch.setattr(cache, "_unmeasured", None)
    monkeypatch.setenv(cache.LIMIT, "16")
    for index in range(33):
        cache.store(f"{index:04x}", {"file": bytes(2**18)})
    assert measured == [16 * 2**20] * (1 + 32 // 5)


@each_case("value", ["0", "-1", "1.5", "much"])
def test_a_wrong_limit_is_an_error(monkeypatch, value):
    monkeypatch.setenv(cache.LIMIT, value)
    words = f"{cache.LIMIT} is '{value}'; it must be a whole number"
    with pytest.raises(cache.CacheError, match=words):
        result()
    with pytest.raises(cache.CacheError, match=words):
        cache.lookup("0000")


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(cache.OVERRIDE, str(place))
        with pytest.raises(
            cache.CacheError, match=f"cannot be written .* set {cache.OVERRIDE}.*{place}"
        ):
            result()


def test_entries_of_a_read_only_cache_are_used(empty_cache, monkeypatch):
    entry = cache.store("abcd", {"file": b"first"})
    os.utime(entry / cache.SEAL, (1e9, 1e9))

    def deny(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    # Permission bits would not stop root.
    monkeypatch.setattr(cache.os, "utime", deny)
    monkeypatch.setattr(cache.tempfile, "mkdtemp", deny)
    assert cache.lookup("abcd") == entry
    with pytest.raises(cache.CacheError, match=cache.OVERRIDE):
        cache.store("abce", {"file": b"second"})


def test_a_user_without_a_home_needs_a_setting(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", no_home)
    assert isinstance(cache.cache_dir(), Path)
    monkeypatch.delenv(cache.OVERRIDE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(cache.CacheError, match=f"no place .* set {cache.OVERRIDE}"):
        result()


def test_the_setting_or_the_platform_decides_the_place_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.OVERRIDE, "here")
    monkeypatch.chdir(tmp_path)
    assert cache.cache_dir() == tmp_path / "here"  # absolute
    monkeypatch.delenv(cache.OVERRIDE)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / "torch_metal_attn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_dir() == Path.home() / "Library" / "Caches" / "torch_metal_attn"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_in_passes_only(enabled, monkeypatch):
    seen = []
    for name in ("rewrite", "instrument"):
        wrapped = getattr(build, name)
        monkeypatch.setattr(
            build, name, lambda *a, run=wrapped: (seen.append(gc.isenabled()), run(*a))[1]
        )
    if not enabled:
        gc.disable()
    try:
        result(check=True)
        with pytest.raises(build.ShaderCompileError):
            build.build("kernel void k(device int* x { }")
        assert (seen, gc.isenabled()) == ([False] * 3, enabled)
    finally:
        gc.enable()


def test_the_collector_is_on_in_a_child_of_a_process_that_paused_it():
    with build._collector_paused():
        assert in_child(gc.isenabled)
        assert not gc.isenabled()
    assert gc.isenabled()
