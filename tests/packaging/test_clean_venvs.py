"""The check that runs the blocks of the README."""

import os
import sys
from pathlib import Path

import pytest

from tests.packaging.built_wheels import IS_CHECKOUT, ROOT

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
clean_venvs = pytest.importorskip("clean_venvs", reason="no .ci folder")

PAGE = """
```python
print("before it is installed")
```
```text
before it is installed
```
```sh
mkdir clone
cd clone
echo {shell} | tee made
```
```text
2
```
```python
x = int(open("made").read())
print("first")
```
```sh
test -f made
```
```python
print(x + 1)
```
On a Mac:
```text
4
```
Elsewhere:
```text
{printed}
```
```sh
make test
false
```
```python
load("your/model")
```
"""


@pytest.mark.parametrize(
    "shell, printed, passes",
    [
        ("2", "3", True),
        ("2", "5", False),  # another output of Python
        ("7", "8", False),  # another output of a command
        ("2 && false", "3", False),
    ],
)
def test_readme_blocks_must_print_the_outputs_shown(shell, printed, passes, tmp_path, capfd):
    settings = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    page = PAGE.format(shell=shell, printed=printed)
    assert clean_venvs.passes(page, tmp_path, settings) == passes
    assert ("error: exit status" in capfd.readouterr().err) != passes


def test_the_first_steps_are_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = ["pip install --no-build-isolation", "torch.Size", "torch_metal_attn verify", "1 {}"]
    seen = [[block, *outputs] for _, block, outputs in clean_venvs._blocks(text)]
    places = [next(i for i, row in enumerate(seen) if step in "".join(row)) for step in steps]
    assert places == sorted(set(places))
