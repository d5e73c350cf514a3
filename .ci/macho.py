"""The headers and symbols of a macOS library, read by lief."""

from dataclasses import dataclass

import lief

# lief warns about the tables that zig leaves empty.
lief.logging.disable()

FLAT = ""  # in place of a library's name: the symbol may come from any loaded library
# If one of these bits of a symbol's type is set, the symbol is for debuggers (<mach-o/nlist.h>).
# Then a variable's symbol has no section, so it looks like an undefined symbol.
N_STAB = 0xE0


@dataclass(frozen=True)
class Library:
    """Names of symbols are as in the file, with the leading underscore of C."""

    architecture: str  # ARM64
    kind: str  # DYLIB, BUNDLE
    oldest_macos: tuple[int, ...]  # (14, 0, 0); empty if it is not for macOS
    dependencies: frozenset[str]  # install names
    imports: dict[str, str]  # symbol: install name of its library, or FLAT
    exports: frozenset[str]
    defined: frozenset[str]  # exported or not
    signed: bool


def read(data: bytes, name: str) -> Library:
    """Raises ValueError if `data` is not a macOS library for one architecture."""
    parsed = lief.MachO.parse(data)
    if parsed is None or parsed.size != 1:
        raise ValueError(f"{name} is not a macOS library for one architecture")
    binary = parsed.at(0)
    assert binary is not None
    # library_ordinal counts the load commands of the dependencies, from 1.
    own_name = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    dependencies = [str(lib.name) for lib in binary.libraries if lib.command != own_name]
    imports = {}
    for symbol in binary.imported_symbols:
        if symbol.raw_type & N_STAB:
            continue
        ordinal = symbol.library_ordinal
        known = 1 <= ordinal <= len(dependencies)
        imports[str(symbol.name)] = dependencies[ordinal - 1] if known else FLAT
    version = binary.build_version
    for_macos = version is not None and version.platform.name == "MACOS"
    return Library(
        architecture=binary.header.cpu_type.name,
        kind=binary.header.file_type.name,
        oldest_macos=tuple(version.minos) if version is not None and for_macos else (),
        dependencies=frozenset(dependencies),
        imports=imports,
        exports=frozenset(str(symbol.name) for symbol in binary.exported_symbols),
        defined=frozenset(str(symbol.name) for symbol in binary.symbols) - imports.keys(),
        signed=binary.has_code_signature,
    )
