"""Checks that the macOS extension will load: with every torch, on macOS 14, with its kernels."""

from collections.abc import Sequence

from macho import Library
from torches import LIBCXX, LIBSYSTEM, MACOS, TORCH_CPU, Torch

# In macOS since 10.3 (man 3 dladdr) or of POSIX. torch's libraries do not use them.
SURELY_IN_LIBSYSTEM = {"_dladdr", "_pthread_kill", "_sigaltstack"}
# Symbols that csrc/runtime/mps.cpp looks up at run time to divide long launches.
COMMITS = {
    "__ZN2at3mps19getCurrentMPSStreamEv",
    "__ZN2at3mps9MPSStream11synchronizeENS0_8SyncTypeE",
}
MPS_REGISTRATION = "STABLE_TORCH_LIBRARY_IMPL_static_init_metal_attn_MPS"
EXPORTS = ("_metal_attn_", "___dso_handle", "__mh_dylib_header")


def faults(library: Library, torches: Sequence[Torch]) -> list[str]:
    places = [(f"torch {x.version}", TORCH_CPU, set(x.exports[TORCH_CPU])) for x in torches]
    for label, name, sure in (
        ("macOS libc++", LIBCXX, set()),
        ("macOS libSystem", LIBSYSTEM, SURELY_IN_LIBSYSTEM),
    ):
        taken = (torch.taken_from_macos.get(name, []) for torch in torches)
        places.append((label, name, sure.union(*taken)))
    problems = []
    for label, name, available in places:
        needed = {symbol for symbol, source in library.imports.items() if source == name}
        problems += [f"{label} lacks {symbol}" for symbol in sorted(needed - available)]
    for torch in torches:
        missing = sorted(COMMITS.difference(torch.exports[TORCH_CPU]))
        problems += [f"torch {torch.version} lacks {name}, to commit a stream" for name in missing]
    return problems + _header(library) + _dependencies(library, torches) + _mps(library)


def _header(library: Library) -> list[str]:
    problems = []
    if library.architecture != "ARM64":
        problems.append(f"it is for {library.architecture}; it must be for ARM64")
    if library.kind != "DYLIB":
        problems.append(f"it is a {library.kind}; it must be a DYLIB, as zig links others wrongly")
    if library.oldest_macos != MACOS:
        problems.append(f"its oldest macOS is {library.oldest_macos}; the wheel's name has {MACOS}")
    if not library.signed:
        problems.append("it has no signature, without which a Mac loads no arm64 code")
    return problems


def _dependencies(library: Library, torches: Sequence[Torch]) -> list[str]:
    known = {TORCH_CPU, LIBCXX, LIBSYSTEM}
    problems = [f"it depends on {name}" for name in sorted(library.dependencies - known)]
    for symbol, source in sorted(library.imports.items()):
        if source not in known:
            problems.append(f"{symbol} is taken from {source or 'whatever is loaded'}")
    # Exceptions cannot cross between torch and a second copy of libc++.
    libcxx = {symbol for torch in torches for symbol in torch.taken_from_macos.get(LIBCXX, [])}
    for symbol in sorted(library.defined & libcxx):
        problems.append(f"it has a {symbol} of its own, which is libc++'s")
    for symbol in sorted(library.exports):
        if not symbol.startswith(EXPORTS):
            problems.append(f"it exports {symbol}, which is not a name of this package")
    return problems


def _mps(library: Library) -> list[str]:
    """Each kernel that is registered for the simulator must be registered for mps too."""
    problems = []
    if not any(MPS_REGISTRATION in symbol for symbol in library.defined):
        problems.append("no op is registered for mps: csrc/runtime/mps.cpp is not compiled in")
    boxed = {symbol for symbol in library.defined if "8boxed_fn" in symbol}
    simulated = {symbol for symbol in boxed if "17simulator_backend" in symbol}
    if not simulated:
        problems.append("no op is registered for the simulator under a name that this check knows")
    for symbol in sorted(simulated):
        if symbol.replace("17simulator_backend", "11mps_backend") not in boxed:
            problems.append(f"not registered for mps: {symbol}")
    return problems
