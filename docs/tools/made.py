"""`PYTHONPATH=docs python -m tools.made`: writes what pages have between markers, from code and CSV files.

    <!-- made: name -->
    text that is committed, so that a code host shows it
    <!-- end of made -->

`MADE` says who makes it. A marker without an end is filled when the site is built, and says nothing on a code host.
`--check` writes nothing and fails where a page is not what the code and the files give.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tools import api, families, operators, pages, worth

MADE: dict[str, Callable[..., str]] = {
    "stored": pages.stored,
    "document": pages.document,
    "operators": operators.page,
    "names": api.names,
    "summaries": api.summaries,
    "steps": worth.steps,
    "family_steps": worth.family_steps,
    "fused_models": worth.fused_models,
    "sharded": worth.sharded,
    "products": worth.products,
    "layers": worth.layers,
    "families": families.layers,
}
_BEGIN, _END = r"<!-- made: (\w+)(?: (\S+))? -->\n", r"<!-- end of made -->"
_BETWEEN = re.compile(rf"^({_BEGIN})(?:(?!<!-- made: ).*\n)*?({_END})$", re.MULTILINE)


def rewritten(text: str) -> str:
    """A page with all made anew that stands between markers."""

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}\n{MADE[match[2]](*filter(None, [match[3]])).strip()}\n\n{match[4]}"

    return _BETWEEN.sub(filled, text)


def stale() -> dict[Path, str]:
    """The pages that are out of date, and what they should say."""
    texts = {path: path.read_text() for path in sorted(pages.DOCS.glob("*.md"))}
    return {path: new for path, text in texts.items() if (new := rewritten(text)) != text}


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.made", description="fills the made parts of pages")
    parser.add_argument("--check", action="store_true", help="fail where a page is out of date, and write nothing")
    check = parser.parse_args(None if arguments is None else list(arguments)).check
    found = stale()
    for path, text in found.items():
        if check:
            print(f"{path.name} is out of date: PYTHONPATH=docs python -m tools.made", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"written: {path}")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
