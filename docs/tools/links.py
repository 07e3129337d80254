"""Checks the links of the built documentation: `python -m tools.links build/docs`, or `make docs-links`.

Every file that a page refers to is there, and every heading. Links to elsewhere are counted: they would need a network.
"""

from __future__ import annotations

import functools
import html.parser
import sys
import urllib.parse
from pathlib import Path


class Page(html.parser.HTMLParser):
    """The links of a page, and what can be linked to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def check(folder: Path) -> tuple[list[str], int, int]:
    """Links that lead nowhere; how many were looked at; how many lead out of the folder's pages."""
    page_of = functools.cache(Page)
    broken, inside, outside = [], 0, 0
    for path in sorted(set(folder.rglob("*.html")) - set(folder.glob("_static/**/*"))):  # there are templates
        for link in page_of(path).links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                outside += 1
                continue
            inside += 1
            target = path.parent / urllib.parse.unquote(url.path) if url.path else path
            if not target.exists():
                broken.append(f"{path.relative_to(folder)}: {link}")
            elif url.fragment and target.suffix == ".html":
                anchor = urllib.parse.unquote(url.fragment)
                if anchor not in page_of(target).anchors:
                    broken.append(f"{path.relative_to(folder)}: {link}")
    return broken, inside, outside


def main(folder: str) -> int:
    broken, inside, outside = check(Path(folder))
    print("\n".join(broken), end="\n" * bool(broken))
    print(f"{inside} links inside, {len(broken)} of them broken; {outside} to elsewhere, not looked at")
    return bool(broken) or not inside


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
