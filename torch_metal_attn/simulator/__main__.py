"""Command line: python -m torch_metal_attn.simulator run | check."""

import argparse
import sys
from collections.abc import Sequence

from .build import ShaderCompileError
from .command import check, run
from .command.values import BadRequest
from .engine import SimulatorFault
from .toolchain import ToolchainError


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0 on success, 1 for a fault or findings in the Metal file, 2 if the command cannot run.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "run":
            run.run(options)
            return 0
        return 0 if check.check(options) else 1
    except (SimulatorFault, ShaderCompileError) as error:
        print(error, file=sys.stderr)
        return 1
    except (BadRequest, ToolchainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
