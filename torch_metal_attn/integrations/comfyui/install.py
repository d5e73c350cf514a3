"""`python -m torch_metal_attn comfyui install | uninstall DIR`: the files that ComfyUI loads."""

import argparse
import shutil
from pathlib import Path

from torch_metal_attn.simulator.exit_status import BadRequest

FOLDER = Path("custom_nodes", "torch_metal_attn")
FILE = "__init__.py"
TEXT = '''"""Made by `python -m torch_metal_attn comfyui install`; `uninstall` removes it."""

from torch_metal_attn.integrations.comfyui.nodes import (
    NODE_CLASS_MAPPINGS,
    NODE_DISPLAY_NAME_MAPPINGS,
    replace_everywhere,
)

replace_everywhere()
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
'''


class NotComfyUI(BadRequest):
    """The folder is not ComfyUI's, or this command did not make the file in it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["install", "uninstall"])
    parser.add_argument("folder", type=Path, metavar="DIR", help="ComfyUI's own folder")


def comfyui(options: argparse.Namespace) -> bool:
    if not (options.folder / FOLDER.parent).is_dir():
        raise NotComfyUI(
            f"{options.folder} has no folder {FOLDER.parent}: give the folder that ComfyUI's "
            "main.py is in"
        )
    file = options.folder / FOLDER / FILE
    if file.exists() and file.read_text() != TEXT:
        raise NotComfyUI(f"{file} was not written by this version of the command: delete it")
    if options.action == "install":
        file.parent.mkdir(exist_ok=True)
        file.write_text(TEXT)
        print(f'wrote {file}: restart ComfyUI, and add the node "Metal attention"')
    elif file.exists():
        if {path.name for path in file.parent.iterdir()} - {FILE, "__pycache__"}:
            file.unlink()
        else:
            shutil.rmtree(file.parent)
        print(f"removed {file}")
    else:
        print(f"there is no {file}")
    return True
