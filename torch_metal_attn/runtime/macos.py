"""The version of macOS, also for programs to which macOS tells another one."""

import functools
import os
import platform
import subprocess


@functools.cache
def version() -> str:
    """Such as "26.2.1"; "" on other systems.

    macOS tells programs that were linked for older versions, some builds of Python among them, a
    version that these know: 10.16, or 16.2 for 26.2. A program of the system is told the truth.
    """
    reported = platform.mac_ver()[0]
    if not reported:
        return ""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "kern.osproductversion"],
            env=os.environ | {"SYSTEM_VERSION_COMPAT": "0"},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return reported
    return done.stdout.strip()


def at_least(major: int, minor: int) -> bool:
    """Whether this is that version of macOS, or a later one."""
    numbers = [int(number) for number in version().split(".")[:2] if number.isdigit()]
    return tuple(numbers) >= (major, minor)
