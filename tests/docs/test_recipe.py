"""The recipe for new score options in docs/adding-a-kernel.md works as it is written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs import recipe
from tests.docs.doc_pages import ROOT
from tests.runtime.fake_mps.build import compile_command, link_command, of_the_extension

CASE = Path(__file__).with_name("recipe_case.py")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# The definitions of a file: the last word of a line without indentation, its classes before it, and
# a function's parameters after it.
DEFINED = re.compile(
    r"^(?!namespace)\w[^;={(\n]*?((?:\w+::)*\w+(?:\[\w*\])?(?: =|\([^)]*\)| \{))", re.MULTILINE
)


def test_the_recipe_adds_two_score_options(tmp_path):
    copy = tmp_path / "copy"
    for folder in ("csrc", "shaders", "torch_metal_attn"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    build(copy, set().union(*(recipe.apply(copy, option) for option in recipe.OPTIONS)))
    # Python looks for modules in the program's folder first.
    command = [sys.executable, shutil.copy(CASE, copy)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(copy, changed):
    """Build the extension of `copy`. Unaffected files have the objects of the checkout."""
    rules = [
        f"rule compile\n  command = {' '.join(compile_command(copy))} -c $in -o $out",
        f"rule link\n  command = {' '.join(map(str, link_command('$in')))} -o $out",
    ]
    sources = sorted((copy / "csrc").rglob("*.cpp"))
    unedited = [s for s in sources if included(copy, s).isdisjoint(copy / name for name in changed)]
    kept = of_the_extension(ROOT / source.relative_to(copy) for source in unedited)
    edited = [s for s in sources if ROOT / s.relative_to(copy) not in kept]
    objects = [str(kept_object) for kept_object in kept.values()]
    for number, sources in enumerate(together(edited)):
        unit = copy / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
        objects.append(str(unit.with_suffix(".o")))
        rules.append(f"build {objects[-1]}: compile {unit}")
    library = copy / "torch_metal_attn" / "_C.abi3.so"
    rules.append(f"build {library}: link {' '.join(objects)}")
    (copy / "build.ninja").write_text("\n".join(rules) + "\n", encoding="utf-8")
    ninja = [sys.executable, "-m", "ninja", "-C", copy, "-j", os.environ.get("MAX_JOBS", "2")]
    subprocess.run([*ninja, "-k", "0"], check=True, stdout=subprocess.DEVNULL)


def together(sources):
    """Lists of files without equal definitions. A list compiles as one unit, 3 times faster."""
    units = [(set(), []), (set(), [])]
    for source in sources:
        names = {"".join(x.split()) for x in DEFINED.findall(source.read_text(encoding="utf-8"))}
        fitting = [unit for unit in units if names.isdisjoint(unit[0])]
        if not fitting:
            fitting = [(set(), [])]
            units += fitting
        unit = min(fitting, key=lambda unit: len(unit[1]))
        unit[0].update(names)
        unit[1].append(source)
    return [files for _, files in units]


def included(root, source):
    found, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = INCLUDE.findall(path.read_text(encoding="utf-8"))
            candidates = [folder / name for name in names for folder in (root, path.parent)]
            waiting += [each for each in candidates if each.is_file()]
    return found
