"""The public names of a module, for the page of the API: what `from module import *` would be meant to give."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any


def public(module: str) -> list[str]:
    """Of `__all__`, else all that is neither private nor a module."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]
    shown = (name for name in names if not name.startswith("_"))
    return sorted(name for name in shown if not isinstance(getattr(found, name), types.ModuleType))


def names(module: str) -> str:
    """A table of a module's public names, and their documentation."""
    found = importlib.import_module(module)
    listed = public(module)
    documented = [n for n in listed if _is_own(getattr(found, n), module)]
    lines = [f".. currentmodule:: {module}", "", ".. autosummary::", "   :nosignatures:", ""]
    lines += [f"   {name}" for name in documented]
    for name in documented:
        kind = "autoclass" if inspect.isclass(getattr(found, name)) else "autofunction"
        lines += ["", f".. {kind}:: {name}"]
        if kind == "autoclass":
            lines += ["   :members:"]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```"


def _is_own(x: Any, module: str) -> bool:
    """Whether x is a class or function of the module's package; others are documented where they are from."""
    is_documented = inspect.isclass(x) or inspect.isroutine(x)
    return is_documented and (x.__module__ or "").split(".")[0] == module.split(".")[0]
