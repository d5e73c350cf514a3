"""Collects the pages of the site that `make docs` builds. mkdocs calls the `on_` functions."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/*.md", "docs/design/*.md", "bench/results/*.md")
LINK = re.compile(r'(?:\]\(|src="|^\[\w+\]: )(?!https?://)([^)#"\s]+)', re.MULTILINE)
MODULES = """
torch_metal_attn torch_metal_attn.kv_cache torch_metal_attn.masks torch_metal_attn.scores
torch_metal_attn.rope torch_metal_attn.distributed torch_metal_attn.quantisation
torch_metal_attn.runtime.mps torch_metal_attn.simulator torch_metal_attn.simulator.lint
torch_metal_attn.integrations.transformers torch_metal_attn.integrations.comfyui
torch_metal_attn.vllm
""".split()


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: code as `python` blocks, and outputs as `text` blocks."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def public_ops() -> dict[str, str]:
    """The schemas of the public ops, by name."""
    import torch

    import torch_metal_attn  # noqa: F401  (registers them)

    private = re.compile(r"_.*|.*_(explain|plan)")  # explain() calls the *_explain and *_plan ops
    ops = {}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("metal_attn::")
        if name != schema.name and not private.fullmatch(name):
            ops[name] = str(schema).removeprefix("metal_attn::")
    return dict(sorted(ops.items()))


def _ops_page() -> str:
    parts = [
        "# torch.ops.metal_attn",
        "[Ops](../docs/ops.md) describes each op. `(a!)` marks an argument that the op writes.",
    ]
    for name, schema in public_ops().items():
        lines = textwrap.fill(schema, 78, subsequent_indent="    ", break_on_hyphens=False)
        parts.append(f"## {name}\n\n```text\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """The theme's files, the repository's pages with the files they link to, and the API."""
    from mkdocs.structure.files import File

    def generated_page(path: str, text: str) -> File:
        return File.generated(config, path, content=text)

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    linked = set()
    for page in pages:
        targets = LINK.findall(page.read_text(encoding="utf-8"))
        linked |= {(page.parent / target).resolve() for target in targets}
    linked = {path for path in linked if path.is_file()}
    notebooks = {path for path in linked if path.suffix == ".ipynb"}
    for path in sorted({*pages, *linked} - notebooks):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted(notebooks):
        name = path.relative_to(ROOT).with_suffix(".md").as_posix()
        files.append(generated_page(name, notebook_page(path)))
    for module in MODULES:
        files.append(generated_page(f"api/{module}.md", f"# {module}\n\n::: {module}\n"))
    files.append(generated_page("api/torch.ops.metal_attn.md", _ops_page()))
    paths = [file.src_uri for file in files.documentation_pages()]
    config.nav = [_with_folders(entry, paths) for entry in config.nav]
    return files


def _with_folders(entry: Any, paths: list[str]) -> Any:
    """A navigation entry, with each folder name replaced by the pages in it."""
    if isinstance(entry, dict):
        ((title, inner),) = entry.items()
        if isinstance(inner, str):
            return {title: sorted(path for path in paths if path.startswith(inner))}
        return {title: [_with_folders(each, paths) for each in inner]}
    return entry


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change links to notebooks into links to the pages made from them."""
    return markdown.replace(".ipynb)", ".md)")
