"""README, CONTRIBUTING and docs/: every block is run or checked, and every link has a target."""

import operator
import re
import sys

import docs_site
import pytest
import torch

import torch_metal_attn
from tests.docs import doc_commands, doc_pages
from tests.docs.doc_pages import ROOT
from tests.helpers.cases import each_case

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
PAGES += DESIGN
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
ID = operator.attrgetter("name")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tiny_models = pytest.importorskip("tests.transformers.tiny_models")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    llama = tiny_models.build("Llama")
    words = ["?", "The", "Metal", "shading", "language", "Attention"]
    words += [f"w{i}" for i in range(len(words), llama.config.vocab_size)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    llama.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", pad_token="w9"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    before = set(sys.modules)

    def run(page, model=None):
        if isinstance(page, str):
            path = tmp_path / "page.md"
            path.write_text(page, encoding="utf-8")
            page = path
        doc_pages.run_page(page, tmp_path, model)

    yield run
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "flash_attn":
            del sys.modules[name]


# Pages that print results of kernels.
ON_KERNELS = [ROOT / name for name in ("README.md", "docs/numerics.md")]


@pytest.mark.parametrize("path", [path for path in PAGES if path not in ON_KERNELS], ids=ID)
def test_blocks_of_a_page_run(path, page, request):
    model = request.getfixturevalue("model") if doc_pages.MODEL in path.read_text() else None
    page(path, model)


@pytest.mark.parametrize("path", ON_KERNELS, ids=ID)
def test_blocks_that_print_results_of_kernels_run(path, page, device, request):
    page(path, request.getfixturevalue("model"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ID)
def test_notebooks_run(path, page, device):
    text = docs_site.notebook_page(path)
    page(text)
    assert str(ROOT) not in text


@each_case("path", PAGES)
def test_links_have_targets_and_lines_fit(path):
    assert doc_pages.dead_links(path) == []
    assert doc_pages.dead_paths(path) == []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert len(line) <= 140, f"{path.name}:{number} has {len(line)} columns"


def test_every_op_and_public_name_is_on_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    names = {*docs_site.public_ops(), *torch_metal_attn.__all__}
    assert len(names) > 30
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)]


def test_every_report_has_a_test():
    """Each number occurs once on the page, and once in the name or the id of a test."""
    page = (ROOT / "docs" / "mps-issues.md").read_text()
    tests = (ROOT / "tests" / "sdpa" / "test_reported.py").read_text()
    numbers = re.findall(r"\[\w*#(\d+)\]:", page)
    assert sorted(numbers) == sorted(re.findall(r"(?<=[a-zA-Z_])\d{4,6}(?=[(=_:])", tests))


TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = [line.split(" | ")[0] for line in TROUBLE.splitlines() if line[:3] == "| `"]
# Cells that quote the package, not variables or other programs.
SAID = [row for row in ROWS if "from Xcode" not in row and not re.match(r"\| `[A-Z_]+=", row)]


@each_case("row", SAID)
def test_the_package_says_what_troubleshooting_quotes(row):
    folders = ("torch_metal_attn", "csrc")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.[pch]*")]
    files += [ROOT / "setup.py"]
    text = "".join(path.read_text() for path in files if path.suffix in (".py", ".cpp", ".h"))
    text = re.sub(r'"\s*(//[^\n]*)?\n\s*f?"', "", text).replace('\\"', '"')
    quoted = re.search("`(.*?)`", row)[1].replace(" or later", "").split("...")
    assert [part for part in quoted if part.strip() not in text] == []


def test_the_extras_are_on_the_page():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = text.split("## Extras")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == doc_commands.extras()


def test_requirements_are_those_of_the_package():
    pages = (ROOT / name for name in ("README.md", "docs/install.md"))
    readme, install = (page.read_text(encoding="utf-8") for page in pages)
    assert "**No Mac has run this yet.**" in readme.split("\n## ")[0]
    wanted = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = dict(re.findall(r"(python|torch|transformers|diffusers)[ =\">]+([\d.]+)\"", wanted))
    shown = {"python": "Python", "torch": "PyTorch"}
    for name, version in needed.items():
        text = f"{shown.get(name, name)} {version} or later"
        assert text in install, text
        assert name not in shown or text in readme, text
        if name in shown:
            badge = ROOT / "docs" / "images" / f"{shown[name].lower()}.svg"
            assert f">{version}+<" in badge.read_text(encoding="utf-8")
    oldest = re.search(r"macosx_(\d+)_0_arm64", install)[1]
    assert all(f"macOS {oldest} or later" in page for page in (install, readme.replace("| ", "")))


DOCSTRING = """Does this.

Args: first: one. Two. second, third:
    others.

Example:
    f(1)
"""
MARKDOWN = """Does this.

**Args:**

- `first`: one. Two.
- `second, third`: others.

**Example:**

    f(1)
"""


def test_docstrings_become_lists():
    docs_docstrings = pytest.importorskip("docs_docstrings", reason="needs the extra docs")
    actual = docs_docstrings.as_markdown(DOCSTRING)
    assert re.sub(r" *\n+", "\n", actual) == re.sub(r"\n+", "\n", MARKDOWN)
    block = "Args:{}\n    a: one\n        more: of it.\n    *b: two.\n"
    for intro in ("", " one of"):
        actual = docs_docstrings.as_markdown(block.format(intro))
        assert actual == f"**Args:**{intro}\n\n- `a`: one more: of it.\n- `*b`: two.\n"


def test_every_page_is_linked():
    for page, linked in ((PAGES[0], PAGES[2 : -len(DESIGN)]), (PAGES[1], DESIGN)):
        text = page.read_text(encoding="utf-8")
        for path in linked:
            assert f"({path.relative_to(ROOT)})" in text


METAL = "```metal\n// k.metal\nkernel void k(device float* o [[buffer(0)]]) {{ o[0] = {}; }}\n```\n"
CHECK = "```sh\npython -m torch_metal_attn.simulator check k.metal\n```\n```text\nkernel k\n"
# {text of a page: part of the error}.
BROKEN = {
    "```python\nraise ValueError('these words')\n```": "these words",
    "```python\nprint(of_another_page)\n```": "name 'of_another_page' is not defined",
    "```python\nprint(1, 2, 3)\n```\n```text\n1 ... 4\n```": "printed was\n1 2 3",
    "```python\nprint(1)\n```\n```text\n2\n```\nOr:\n```text\n3\n```": "printed was\n1",
    "```text\n1\n```": "nothing before this block has printed",
    "```python\n# test_x.py\ndef test_x():\n    assert 0\n```": "1 failed",
    METAL.format("double(1)"): "`double` is not in Metal",
    "```sh\nmake tset\n```": "No rule to make target 'tset'",
    "```sh\npython -m torch_metal_attn verfy\n```": "verfy': not understood",
    METAL.format("1") + CHECK + "```": "printed was\nkernel k",
    "```sh\nX=1 pip install '.[deom]'\n```": "{'deom'}",
    "```sh\npip install wheels/torch_metal_attn-*.whl\n```": "*.whl is ['torch_metal_attn-",
    "```sh\nrm x\n```": "no rule says how to check 'rm x'",
    "```yaml\njobs: {a: {runs-on: x, steps: [{run: make tset}]}}\n```": "target 'tset'",
    "```rust\n```": "no rule says how to run a block of 'rust'",
    "```\n1\n```": "no rule says how to run a block of ''",
    "```python\nx = 1\n": "the block at line 2 has no end",
}


def test_a_broken_block_fails(page):
    page("```python\nof_another_page = 1\n```")
    for text, words in BROKEN.items():
        with pytest.raises(Exception, match=re.escape(words)):
            page(text)


def test_a_dead_link_is_found(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# One, two\n[a](page.md#one-two) `[b](c)` [d](e.md) [f](#three)\n")
    assert doc_pages.dead_links(path) == ["e.md", "#three"]
    here = "tests/docs/test_docs.py"
    path.write_text(f"`{here}::page` `{here}::pag` `docs/x.md` `docs`\n")
    assert doc_pages.dead_paths(path) == [f"{here}::pag", "docs/x.md"]
