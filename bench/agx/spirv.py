"""Metal text to SPIR-V. Instructions of Apple's GPU are calls that the driver replaces."""

import re
import tempfile
from pathlib import Path

from bench.front_end import Source, clang, front_end

TARGET = ["--target=spirv64-unknown-unknown", "-D__int128=long"]
# Metal's registers have 32 bits, so no index is widened to 64.
OPTIMISE = ["-O3", "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-indvars-widen-indvars=false"]

TO_BFLOAT = "call i16 @agx_to_bfloat(float {})"
FROM_BFLOAT = "call float @agx_from_bfloat(i16 {})"
# M1 and M2 have no bfloat: a conversion takes integer operations, and rounds to nearest even.
CONVERSIONS = """
define internal i16 @agx_to_bfloat(float %x) alwaysinline {
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %round = add i32 %odd, 32767
  %sum = add i32 %bits, %round
  %kept = lshr i32 %sum, 16
  %word = trunc i32 %kept to i16
  ret i16 %word
}
define internal float @agx_from_bfloat(i16 %x) alwaysinline {
  %wide = zext i16 %x to i32
  %bits = shl i32 %wide, 16
  %value = bitcast i32 %bits to float
  ret float %value
}
"""
CONVERSION = re.compile(
    r"(?P<result>\s*%\S+ =) (?P<what>fptrunc|fpext)(?: \w+)* (?:<(?P<length>\d+) x )?b?float>? "
    r"(?P<value>\S+) to (?:<\d+ x )?b?float>?(?:, .*)?$"
)
COMPARISON = re.compile(
    r"(?P<result>\s*%\S+ = fcmp(?: \w+)*) bfloat (?P<left>[^,\s]+), (?P<right>[^,\s]+)(?P<rest>.*)$"
)
FROM_INTEGER = re.compile(
    r"(?P<result>\s*%\S+ =) (?P<what>[su]itofp(?: \w+)* i\d+ \S+) to bfloat(?:, .*)?$"
)
ARITHMETIC = re.compile(
    r"^.*= (fadd|fsub|fmul|fdiv|fcmp|fneg|sitofp|uitofp|fptosi|fptoui)\b[^\n]*bfloat.*$", re.M
)


class LensError(RuntimeError):
    """The driver is not built, or it cannot compile the kernel."""


def _converted(groups: re.Match[str], serial: int) -> list[str]:
    narrows = groups["what"] == "fptrunc"
    call = TO_BFLOAT if narrows else FROM_BFLOAT
    if not groups["length"]:
        return [f"{groups['result']} {call.format(groups['value'])}"]
    source, target = ("float", "i16") if narrows else ("i16", "float")
    length, vector = int(groups["length"]), "poison"
    lines = []
    for i in range(length):
        name = f"%agx.{serial}.{i}"
        lines.append(
            f"  {name}.e = extractelement <{length} x {source}> {groups['value']}, i32 {i}"
        )
        lines.append(f"  {name}.c = {call.format(f'{name}.e')}")
        result = groups["result"] if i == length - 1 else f"  {name}.v ="
        insert = f"insertelement <{length} x {target}> {vector}, {target} {name}.c, i32 {i}"
        lines.append(f"{result} {insert}")
        vector = f"{name}.v"
    return lines


def _compared(groups: re.Match[str], serial: int) -> list[str]:
    wide = [f"%agx.{serial}.{side}" for side in ("left", "right")]
    return [
        *(
            f"  {name} = {FROM_BFLOAT.format(groups[side])}"
            for name, side in zip(wide, ("left", "right"), strict=True)
        ),
        f"{groups['result']} float {wide[0]}, {wide[1]}{groups['rest']}",
    ]


def _from_integer(groups: re.Match[str], serial: int) -> list[str]:
    wide = f"%agx.{serial}.wide"
    return [
        f"  {wide} = {groups['what']} to float",
        f"{groups['result']} {TO_BFLOAT.format(wide)}",
    ]


REWRITTEN = ((CONVERSION, _converted), (COMPARISON, _compared), (FROM_INTEGER, _from_integer))


def without_bfloat(ir: str) -> str:
    """LLVM IR with words of 16 bits instead of bfloats, and conversions as calls."""
    # Constants such as 0xR3F80 are a bfloat's bits.
    ir = re.sub(r"0xR([0-9A-F]{4})", lambda groups: str(int(groups[1], 16)), ir)
    lines = []
    for serial, line in enumerate(ir.split("\n")):
        lines += next(
            (
                rewrite(match, serial)
                for pattern, rewrite in REWRITTEN
                if "bfloat" in line and (match := pattern.match(line))
            ),
            [line],
        )
    ir = "\n".join(lines)
    arithmetic = ARITHMETIC.search(ir)
    if arithmetic:
        raise LensError(f"M1 has no arithmetic on bfloats: {arithmetic[0].strip()}")
    return re.sub(r"(?<![\w@.])bfloat\b", "i16", ir) + CONVERSIONS


def with_constant_parameters(ir: str) -> str:
    """LLVM IR with parameters in constant memory, because SPIR-V cannot convert pointers to it."""
    for cast in re.finditer(r"(%\d+) = ptrtoint ptr addrspace\(1\) (%\d+) to i64", ir):
        whole, integer, parameter = cast[0], re.escape(cast[1]), cast[2]
        back = rf"inttoptr i64 {integer} to ptr addrspace\(2\)"
        if not re.search(back, ir):
            continue
        ir = re.sub(back, f"getelementptr i8, ptr addrspace(2) {parameter}, i64 0", ir)
        ir = ir.replace(whole, whole.replace("addrspace(1)", "addrspace(2)"))
        declared = rf"ptr addrspace\(1\)((?: [\w()]+)* {parameter}[,)])"
        ir = re.sub(declared, r"ptr addrspace(2)\1", ir, count=1)
    return ir


def llvm_ir(source: Source) -> tuple[str, str]:
    """Optimised LLVM IR of a kernel, and its function's name."""
    attributes = f"device_kernel, flatten, reqd_work_group_size({source.threads}, 1, 1)"
    ir, entry = front_end(source, attributes, TARGET)
    ir = re.sub(r"^@llvm\.(compiler\.)?used = .*\n", "", ir, flags=re.M)
    linkage = r"^(@_Z\S+ = )(local_unnamed_addr |unnamed_addr )?constant"
    ir = re.sub(linkage, r"\1internal constant", ir, flags=re.M)
    optimise = [*TARGET, *OPTIMISE, "-x", "ir", "-S", "-emit-llvm", "-", "-o", "-"]
    ir = clang(optimise, ir)
    if "bfloat" in ir:
        ir = clang(optimise, without_bfloat(ir))
    return with_constant_parameters(ir).replace("= or disjoint ", "= add "), entry.symbol


def compile_spirv(ir: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernel.spv")
        unoptimised = ["-O1", "-Xclang", "-disable-llvm-passes", "-mllvm", "-disable-lsr"]
        clang([*TARGET, "-x", "ir", *unoptimised, "-c", "-", "-o", str(out)], ir)
        return out.read_bytes()
