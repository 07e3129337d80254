"""The library's docstrings, which are plain text, as the reStructuredText that autodoc expects."""

from __future__ import annotations

import re
from typing import Any

SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:", "Example:", "Note:")


def to_rst(lines: list[str]) -> list[str]:
    """Formulas, which are indented, become literal blocks; names in backticks literals; all else stays as it reads.

    Napoleon, which runs afterwards, makes lists of the sections.
    """
    made: list[str] = []
    in_section, in_formula, in_name = False, False, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() in SECTIONS:
            in_section, in_formula = True, False
            made.append(line)
            continue
        if not line.strip():
            made.append(line)
            in_name = False
            continue
        if indent == 0:
            in_section = False
        if not in_section and (indent >= 4 or line.startswith("|")):
            made += [] if in_formula else ["", "::", ""]
            made.append(line if indent >= 4 else "    " + line)
            in_formula = True
            continue
        in_formula = False
        line, in_name = escaped(line, in_name)
        made.append(line)
    return made


def escaped(line: str, in_name: bool = False) -> tuple[str, bool]:
    """Text in which only names in backticks mean something; and whether one goes on in the next line."""
    parts = line.replace("``", "`").split("`")
    for i, part in enumerate(parts):
        if (i % 2 == 0) != in_name:
            text = re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
            parts[i] = "\\ " + text if i and part[:1].isalnum() else text  # a literal ends before a letter only so
    return "``".join(parts), in_name != (len(parts) % 2 == 0)


def process(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """For Sphinx's event `autodoc-process-docstring`."""
    lines[:] = to_rst(lines)
    if what == "property" and lines and ": " in lines[0]:
        # Else napoleon takes what is in front of a colon for its type. The backslash joins the lines again.
        before, _, behind = lines[0].partition(": ")
        lines[:1] = [before + "\\", ": " + behind]
