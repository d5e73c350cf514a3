"""Markdown pages as programs: every fenced block of a page is run or checked.

- ```python: executed, all blocks of a page in one namespace and an empty folder. A block that
  begins with `# test_<name>.py` is written to that file, which pytest runs.
- ```text: the output of the python block or command before it; `...` matches anything. One of
  several consecutive text blocks must match.
- ```metal: compiled for the simulator, and linted, as Metal 4.0 if it has tensor operations. The
  first line, `// <name>.metal`, names the file for later blocks.
- ```sh and ```yaml: see `doc_commands`.
"""

import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.docs.doc_commands import check_commands, check_yaml
from tests.helpers.forks import run_program
from torch_metal_attn.simulator import compile_shader
from torch_metal_attn.simulator.lint import lint_source
from torch_metal_attn.simulator.metal import versions

ROOT = Path(__file__).parents[2]
MODEL = '"your/model"'
FOLDERS = "bench|csrc|docs|shaders|tests|torch_metal_attn"
PYTEST = """
import sys, pytest
plugins = ["-p", "no:cacheprovider", "-p", "torch_metal_attn_pytest"]
sys.exit(pytest.main(["-q", *plugins, sys.argv[1]]))
"""
FENCE = re.compile(r" *```([a-z]*)$")


@dataclass
class Block:
    """A fenced block; line: where its text begins on the page."""

    language: str
    text: str
    line: int


def blocks_of(text):
    """The blocks of a page. Raises AssertionError for a fence without an end or with options."""
    blocks, opened, lines = [], None, text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        fence = FENCE.match(line)
        assert fence, f"line {number}: {line!r} is no known fence"
        if opened is None:
            opened = Block(fence[1], "", number + 1)
        else:
            opened.text = "\n".join(lines[opened.line - 1 : number - 1]) + "\n"
            blocks.append(opened)
            opened = None
    assert opened is None, f"the block at line {opened.line} has no end"
    return blocks


def run_page(path, folder, model=None):
    """model: a folder with a model and its tokenizer, which replaces "your/model"."""
    namespace = {"__name__": "__page__"}
    printed = None
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    rows = [list(row) for _, row in groupby(blocks, key=lambda block: block.language == "text")]
    for block, outputs in [(block, row) for row in rows for block in row]:
        where = f"{path.name}:{block.line}"
        first = block.text.split("\n")[0]
        if block.language == "python" and re.fullmatch(r"# test_\w+\.py", first):
            name = first.removeprefix("# ")
            (folder / name).write_text(block.text, encoding="utf-8")
            done = run_program(PYTEST, name, folder=folder)
            assert done.returncode == 0, done.stdout + done.stderr
        elif block.language == "python":
            printed = _run_python(block, path, namespace, model)
        elif block.language == "text":
            if block is not outputs[0]:
                continue
            assert printed is not None, f"{where}: nothing before this block has printed"
            same = doctest.OutputChecker().check_output
            matches = [same(output.text, printed, doctest.ELLIPSIS) for output in outputs]
            assert any(matches), f"{where}: printed was\n{printed}"
            printed = None
        elif block.language == "metal":
            needs_4 = "<MetalPerformancePrimitives/" in block.text
            language = "4.0" if needs_4 else versions.DEFAULT
            compile_shader(block.text, check=True, language=language)
            findings = lint_source(block.text, language=language)
            assert not findings, f"{where}: {[str(finding) for finding in findings]}"
            assert re.fullmatch(r"// \w+\.metal", first), f"{where}: {first!r} names no file"
            (folder / first.removeprefix("// ")).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            printed = check_commands(block.text, where) or None
        elif block.language == "yaml":
            check_yaml(block.text, where)
        else:
            raise AssertionError(f"{where}: no rule says how to run a block of {block.language!r}")


def _run_python(block, path, namespace, model):
    text = block.text
    if MODEL in text:
        assert model is not None, f"{path.name}:{block.line}: there is no model for {MODEL}"
        text = text.replace(MODEL, repr(str(model)))
    # The line breaks make tracebacks name the line of the page.
    code = compile("\n" * (block.line - 1) + text, str(path), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)
    return out.getvalue()


def dead_paths(path):
    dead = []
    for quoted in re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8")):
        if not re.match(rf"({FOLDERS})/[\w./:-]*$", quoted):
            continue
        file, *names = quoted.split("::")
        place = ROOT / file
        text = place.read_text(encoding="utf-8") if place.is_file() else ""
        known = all(re.search(rf"^ *(def|class) {name}\b", text, re.M) for name in names)
        if not place.exists() or not known:
            dead.append(quoted)
    return dead


def dead_links(path):
    # Brackets in code are not links.
    text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.S)
    dead = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, heading = target.partition("#")
        place = path.parent / file if file else path
        if not place.exists() or (heading and heading not in _headings(place)):
            dead.append(target)
    return dead


def _headings(path):
    """Anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
