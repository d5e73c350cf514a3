"""`python -m torch_metal_attn doctor SCRIPT ...` or `-m MODULE ...`."""

import argparse
import contextlib
import os
import sys
import threading

from torch_metal_attn.tools.doctor import report
from torch_metal_attn.tools.doctor.script import Script, module, script
from torch_metal_attn.tools.doctor.watch import Watch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", action="store_true", dest="module", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "target",
        # As for a subcommand: everything after it is the script's.
        nargs=argparse.PARSER,
        metavar="SCRIPT",
        help="the script, or with -m the module, and its arguments",
    )


def found(options: argparse.Namespace) -> Script:
    """The script or module; raises NoScript."""
    name, *arguments = options.target
    return (module if options.module else script)(name, arguments)


def doctor(target: Script) -> int:
    """Run it and report to stderr. What it raises passes, sys.exit() and Ctrl-C too."""
    process, others = os.getpid(), set(threading.enumerate())
    with Watch() as watch:
        try:
            target.run()
            for thread in set(threading.enumerate()) - others:
                if not thread.daemon:  # Python would wait for it too
                    thread.join()
        finally:
            if os.getpid() == process:  # not in a fork that ends here
                with contextlib.suppress(BrokenPipeError):  # a reader that has ended
                    sys.stdout.flush()
                print(report.text(target.name, watch), file=sys.stderr)
    return 0
