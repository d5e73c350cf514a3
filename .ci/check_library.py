"""Checks that the macOS extension loads with every torch on macOS 14, and has its kernels."""

from collections.abc import Sequence

from macho import Library
from torches import LIBCXX, LIBSYSTEM, MACOS, TORCH_CPU, Torch

# macOS has had these since 10.3 (man 3 dladdr) or by POSIX; no library of torch imports them.
KNOWN_IN_LIBSYSTEM = {"_dladdr", "_pthread_kill", "_sigaltstack"}
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
        ("macOS libSystem", LIBSYSTEM, KNOWN_IN_LIBSYSTEM),
    ):
        taken = (torch.taken_from_macos.get(name, []) for torch in torches)
        places.append((label, name, sure.union(*taken)))
    problems = []
    for label, name, available in places:
        needed = {symbol for symbol, source in library.imports.items() if source == name}
        problems += [f"{label} lacks {symbol}" for symbol in sorted(needed - available)]
    for torch in torches:
        missing = sorted(COMMITS.difference(torch.exports[TORCH_CPU]))
        problems += [f"torch {torch.version} lacks {name}, needed to commit" for name in missing]
    return problems + _header(library) + _dependencies(library, torches) + _mps(library)


def _header(library: Library) -> list[str]:
    problems = []
    if library.architecture != "ARM64":
        problems.append(f"the extension is for {library.architecture}; it must be for ARM64")
    if library.kind != "DYLIB":
        # zig links other kinds wrongly.
        problems.append(f"the extension is a {library.kind}; it must be a DYLIB")
    if library.oldest_macos != MACOS:
        oldest = library.oldest_macos
        problems.append(f"the extension's oldest macOS is {oldest}; it must be {MACOS}")
    if not library.signed:
        problems.append("the extension is not signed; macOS loads only signed arm64 code")
    return problems


def _dependencies(library: Library, torches: Sequence[Torch]) -> list[str]:
    known = {TORCH_CPU, LIBCXX, LIBSYSTEM}
    problems = [f"the extension depends on {name}" for name in sorted(library.dependencies - known)]
    for symbol, source in sorted(library.imports.items()):
        if source not in known:
            problems.append(f"{symbol} is imported from {source or 'any loaded library'}")
    # Exceptions cannot cross between torch and a second copy of libc++.
    libcxx = {symbol for torch in torches for symbol in torch.taken_from_macos.get(LIBCXX, [])}
    for symbol in sorted(library.defined & libcxx):
        problems.append(f"the extension defines {symbol}; it must import it from libc++")
    for symbol in sorted(library.exports):
        if not symbol.startswith(EXPORTS):
            problems.append(f"the extension exports {symbol}, which is no name of this package")
    return problems


def _mps(library: Library) -> list[str]:
    """Each kernel that is registered for the simulator must be registered for mps too."""
    problems = []
    if not any(MPS_REGISTRATION in symbol for symbol in library.defined):
        problems.append("no op is registered for mps: csrc/runtime/mps.cpp is not compiled in")
    boxed = {symbol for symbol in library.defined if "8boxed_fn" in symbol}
    simulated = {symbol for symbol in boxed if "17simulator_backend" in symbol}
    if not simulated:
        problems.append("no op is registered for the simulator, or its symbols are unknown here")
    for symbol in sorted(simulated):
        if symbol.replace("17simulator_backend", "11mps_backend") not in boxed:
            problems.append(f"not registered for mps: {symbol}")
    return problems
