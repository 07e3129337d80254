"""The user's line that made a product, for warnings that come later, when JAX lowers it."""

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

    def __repr__(self) -> str:  # in a printed jaxpr
        return f"{os.path.basename(self.file)}:{self.line}"


_libraries: list[str] = [contextlib.__file__]


def hide(module_file: str) -> None:
    """Declares that the files in the folder of this one are a library's and no user's."""
    _libraries.append(os.path.dirname(module_file) + os.sep)


hide(jax.__file__)
hide(os.path.dirname(__file__))  # coda_jax


def call_site() -> CallSite:
    """The innermost line on Python's stack that is in no library. In a backward pass it is that of jax.grad."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tuple(_libraries)):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)
