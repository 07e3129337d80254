"""The user's line that made a product or raised an error, not that of a library in between."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from types import FrameType

import jax
import numpy as np
from jax.extend import source_info_util

_libraries: tuple[str, ...] = (contextlib.__file__,)


@dataclasses.dataclass(frozen=True)
class CallSite:
    """A line of a file. All are equal, so that neither a product nor a cache depends on where it is called from."""

    file: str = dataclasses.field(compare=False)
    line: int = dataclasses.field(compare=False)

    def __repr__(self) -> str:  # in a printed jaxpr
        return f"{os.path.basename(self.file)}:{self.line}"


def hide(module_file: str) -> None:
    """Declares the files in the folder of this module a library's: they are no user's lines."""
    global _libraries
    _libraries = (*_libraries, os.path.dirname(module_file) + os.sep)


def call_site() -> CallSite:
    """The innermost line on Python's stack that is in no library. In a backward pass it is that of jax.grad."""
    frame = sys._getframe()
    while frame.f_back is not None and not _is_users(frame):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)


def line_of(error: BaseException) -> str:
    """The user's line from which an error came: "train.py:12 (my_epilogue)"."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    if not frames:
        return "a line that is not known"
    frame, line = frames[-1]
    return f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_libraries)


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # coda_jax
for file in (jax.__file__, np.__file__, _PACKAGE):
    hide(file)
# JAX too, in its messages and profiles, names the line that called this package.
source_info_util.register_exclusion(_PACKAGE)
