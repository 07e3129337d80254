"""Pages are plain Markdown, which a code host shows as it is; for Sphinx their Python blocks become executed cells.

    ```python               a cell: executed, shown with its output
    ```py                   shown, not executed: part of something larger
    <!-- run: tags -->      before a block: the cell's tags, as `remove-input`
    <!-- run
    code
    -->                     a cell that is executed and not shown
    <!-- made: name -->     what the function `name` of `MADE` in made.py returns; `name x` for one of x. Up to a line
                            `<!-- end of made -->` it is committed; without such a line it is made for Sphinx alone
    <!-- whole: path -->    the page is this document of the repository; what else it says is for a code host

`setups.py` has what a page's first block needs and the page does not say. Before Sphinx reads a page `to_notebook`
rewrites it. So no page needs another program than a text editor, and jupytext reads each as a notebook, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.setups import SETUPS

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
DEVICE = DOCS / "device"  # outputs of a GPU

FRONT = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
NOTES, ORPHAN = "measurements/", "---\norphan: true\n---\n"  # lab notes: their README links to them, no sidebar
_HIDDEN = re.compile(r"^<!-- run\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^(?:<!-- run: ([\w, -]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMITTED = re.compile(r"^<!-- made: [^\n]* -->\n((?:(?!<!-- made: )[^\n]*\n)*?)<!-- end of made -->$", re.MULTILINE)
_MADE = re.compile(r"^<!-- made: (\w+)(?: (\S+))? -->$", re.MULTILINE)
_WHOLE = re.compile(r"^<!-- whole: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )(?![a-z]+://|#)([^)\s#]+)", re.MULTILINE)
_OUTSIDE = re.compile(r"\]\((?:\.\./)+([A-Z]+\.md|benchmarks/REPORT\.md)(#[\w-]+)?\)")


# Documents outside this folder, and the pages that include them.
PAGES = {
    "benchmarks/REPORT.md": "benchmarks.md",
    "CHANGELOG.md": "versions.md",
    "AGENTS.md": "agents.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}


def cell(code: str, tags: str = "") -> str:
    """A cell of myst-nb."""
    return f"```{{code-cell}} python\n{f':tags: [{tags}]' if tags else ''}\n{code}```"


def blocks_of(text: str) -> list[str]:
    """The code of all cells of a page, shown or not, in order."""
    found = [(match.start(), match[1]) for match in _HIDDEN.finditer(text)]
    found += [(match.start(), match[2]) for match in _BLOCK.finditer(text)]
    return [code for _, code in sorted(found)]


def to_notebook(text: str, name: str = "", made: Mapping[str, Callable[..., str]] | None = None) -> str:
    """A page as Sphinx is to read it.

    Args:
      text: the page.
      name: of the page, relative to docs, without its ending.
      made: what `<!-- made: name -->` stands for.

    Raises:
      KeyError: a name that `made` lacks.
    """
    made = made or {}
    if whole := _WHOLE.search(text):
        text = document(whole[1], shift=0)
    has_cells = bool(blocks_of(text))
    text = _COMMITTED.sub(lambda match: match[1].strip(), text)
    text = _MADE.sub(lambda match: made[match[1]](*filter(None, match.groups()[1:])), text)
    if has_cells:
        if name in SETUPS:
            text = _BLOCK.sub(lambda match: f"<!-- run\n{SETUPS[name].strip()}\n-->\n\n{match[0]}", text, count=1)
        text = _HIDDEN.sub(lambda match: cell(match[1], "remove-cell"), text)
        text = _BLOCK.sub(lambda match: cell(match[2], match[1] or ""), text)
    up = "../" * name.count("/")
    text = _OUTSIDE.sub(
        lambda match: f"]({up}{PAGES[match[1]]}{match[2] or ''})" if match[1] in PAGES else match[0], text
    )
    if name.startswith(NOTES) and name != f"{NOTES}README":
        return ORPHAN + text
    return (FRONT if has_cells else "") + text


def document(path: str, shift: int = 1) -> str:
    """A document of the repository as a part of a page: its headings are lower, its links lead where they did."""
    folder = Path(path).parent

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[2])
        is_page = target.startswith("docs/")
        return match[1] + (target.removeprefix("docs/") if is_page else f"../{target}")

    text = _LINK.sub(moved, (ROOT / path).read_text())
    return re.sub(r"^(?=#+ )", "#" * shift, text, flags=re.MULTILINE)


def stored(name: str) -> str:
    """The output of a GPU in `docs/device`, with its header; where there is none, the command that writes it."""
    path = DEVICE / name
    if not path.exists():
        return (
            "```{note}\nNo output of a GPU is stored here yet. "
            "On a machine with a Hopper GPU `make docs-device` writes it.\n```"
        )
    return f"```text\n{path.read_text().rstrip()}\n```"
