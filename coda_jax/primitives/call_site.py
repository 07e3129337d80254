"""The user's line that made a product: a warning about it comes when it is lowered, on whoever's stack that is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys

import jax


@dataclasses.dataclass(frozen=True)
class CallSite:
    """A line of a file. All are equal: where a product is called from makes no difference to it, nor to a cache."""

    file: str = dataclasses.field(compare=False)
    line: int = dataclasses.field(compare=False)


_libraries: list[str] = [contextlib.__file__]


def hide(package: str) -> None:
    """Makes a file's folder one of those that are no user's."""
    _libraries.append(os.path.dirname(package) + os.sep)


hide(jax.__file__)
hide(os.path.dirname(__file__))


def call_site() -> CallSite:
    """The innermost line on Python's stack that is in no library. In a backward pass it is that of jax.grad."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tuple(_libraries)):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)
