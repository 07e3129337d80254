"""The public names of a module, for the page of the API: what `from module import *` would be meant to give."""

from __future__ import annotations

import importlib
import inspect
import re
import types
from typing import Any

from tools import pages


def public(module: str) -> list[str]:
    """The public names of a module: those of `__all__`, else all that is neither private nor a module."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]
    shown = (name for name in names if not name.startswith("_"))
    return sorted(name for name in shown if not isinstance(getattr(found, name), types.ModuleType))


def summaries(module: str) -> str:
    """A table of a module's public names: the first sentence of each docstring, and the file of each."""
    found = importlib.import_module(module)
    lines = ["| name | what it is | file |", "|---|---|---|"]
    for name in documented(module):
        of = getattr(found, name)
        path = pages.ROOT / of.__module__.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        link = f"[{file.name}](../{file.relative_to(pages.ROOT).as_posix()})"
        lines.append(f"| `{name}` | {_in_a_cell(inspect.getdoc(of) or '')} | {link} |")
    return "\n".join(lines)


def names(module: str) -> str:
    """The documentation of a module's public names, for Sphinx."""
    found = importlib.import_module(module)
    lines = [f".. currentmodule:: {module}"]
    for name in documented(module):
        kind = "autoclass" if inspect.isclass(getattr(found, name)) else "autofunction"
        lines += ["", f".. {kind}:: {name}"]
        if kind == "autoclass":
            lines += ["   :members:"]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```"


def documented(module: str) -> list[str]:
    """The public names that are documented with this module."""
    found = importlib.import_module(module)
    return [name for name in public(module) if _is_own(getattr(found, name), module)]


def _in_a_cell(docstring: str) -> str:
    """The first sentence of a docstring as a cell of a table, in which only names in backticks mean something."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    parts = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0].split("`")
    parts[::2] = [re.sub(r"([*<]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def _is_own(x: Any, module: str) -> bool:
    """Whether x is a class or function of the module's package; others are documented where they are from."""
    is_documented = inspect.isclass(x) or inspect.isroutine(x)
    return is_documented and (x.__module__ or "").split(".")[0] == module.split(".")[0]
