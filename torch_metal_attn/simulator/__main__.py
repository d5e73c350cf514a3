"""Command line: python -m torch_metal_attn.simulator run | check."""

import argparse
import sys
from collections.abc import Sequence

from .build import ShaderCompileError
from .command import check, run
from .command.values import BadRequest
from .engine import SimulatorFault
from .exit_status import exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_metal_attn.simulator",
        description="Runs and checks Metal compute kernels on the CPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, summary in (
        ("run", run, "run a kernel of a file and print what it wrote"),
        ("check", check, "compile a file, lint it, and list its kernels"),
    ):
        module.add_options(
            commands.add_parser(
                name,
                help=summary,
                description=module.DESCRIPTION,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser


def _succeeds(options: argparse.Namespace) -> bool:
    try:
        if options.command == "check":
            return check.check(options)
        run.run(options)
        return True
    except (SimulatorFault, ShaderCompileError) as error:
        print(error, file=sys.stderr)
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0 on success, 1 for a fault or findings in the Metal file, 2 if the command cannot run.
    """
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _succeeds(options), BadRequest)


if __name__ == "__main__":
    sys.exit(main())
