"""Records the launches, compiles them and the peers' kernels to PTX, and packs them into FOLDER."""

import argparse
import re
from itertools import chain
from pathlib import Path

from . import cases
from .collect import Collection


def main() -> None:
    """Write FOLDER. Nothing here needs a GPU."""
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--only", default="", help="a regular expression of names of problems")
    parser.add_argument("--workers", type=int, default=1, help="compilers at a time (default: 1)")
    arguments = parser.parse_args()
    timed = Collection()
    problems = chain(cases.copy(timed), cases.decode(timed))
    timed.manifest.problems = [p for p in problems if re.search(arguments.only, p.name)]
    timed.keep_used()
    timed.write(arguments.folder, arguments.workers)
    print(f"{len(timed.manifest.problems)} problems, {len(timed.sources)} programs")


if __name__ == "__main__":
    main()
