"""The real version of macOS, also in programs to which macOS reports another version."""

import ctypes
import functools
import os
import platform
import subprocess

# The oldest version that the package is built for. setup.py reads it too.
OLDEST = (14, 0)


@functools.cache
def version() -> str:
    """The version, such as "26.2.1"; "" on other systems.

    To programs linked for older versions, among them some builds of Python, macOS reports a
    compatible version, 10.16 or 16.2 for 26.2, in its kernel and in the files that platform.mac_ver
    reads. System programs get the real version.
    """
    reported = platform.mac_ver()[0]
    if not reported:
        return ""
    reported = _of_the_kernel() or reported
    # macOS never had these versions: 15 was followed by 26, and 10.15 by 11.
    if reported.startswith(("10.16", "16.")):
        return sysctl("kern.osproductversion") or reported
    return reported


def at_least(major: int, minor: int) -> bool:
    numbers = [int(number) for number in version().split(".")[:2] if number.isdigit()]
    return tuple(numbers) >= (major, minor)


def _of_the_kernel() -> str:
    try:
        sysctl = ctypes.CDLL(None).sysctlbyname
    except AttributeError:  # not on macOS
        return ""
    text = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(text))
    failed = sysctl(b"kern.osproductversion", text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else text.value.decode("ascii", "replace")


def sysctl(name: str) -> str:
    """The value that system programs get; "" if it cannot be read."""
    command, env = ["/usr/sbin/sysctl", "-n", name], os.environ | {"SYSTEM_VERSION_COMPAT": "0"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
