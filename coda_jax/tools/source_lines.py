"""Which line of a program made an equation, as far as JAX knows it."""

from __future__ import annotations

import functools
import os
import sysconfig
from typing import Any

import jax
import numpy as np
from jax.extend import core

_CODA = os.path.dirname(os.path.dirname(__file__))
_LAYERS = os.path.join(os.path.dirname(_CODA), "flax_layers")
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_HIDDEN = (*(os.path.dirname(file) + os.sep for file in (jax.__file__, np.__file__)), _CODA + os.sep, "<frozen")


def line_of(equation: core.JaxprEqn) -> str | None:
    """The innermost line outside of JAX and coda_jax: "train.py:12", of another package "optax/contrib/_muon.py:88".

    The latter has the line of the program that called the package behind it, where there is one: ", from train.py:12".
    In a backward pass it is the line of the forward pass, or that of a custom derivative's call. None where JAX knows
    no line, as of a custom derivative that is made again by `jax.checkpoint`.
    """
    traceback: Any = equation.source_info.traceback
    inner = None
    for frame in () if traceback is None else traceback.frames:
        name, of_package = _named(frame.file_name)
        if name is None:
            continue
        line = f"{name}:{frame.line_num}"
        if not of_package:
            return line if inner is None else f"{inner}, from {line}"
        inner = inner or line
    return inner


@functools.cache
def _named(file: str) -> tuple[str | None, bool]:
    """What a file is called here, None where it is not told; and whether it is a package's."""
    if file.startswith(_HIDDEN):
        return None, False
    for packages in (*_PACKAGES, os.path.dirname(_LAYERS) if file.startswith(_LAYERS + os.sep) else None):
        if packages is not None and file.startswith(packages + os.sep):
            return os.path.relpath(file, packages).replace(os.sep, "/"), True
    return (None, False) if file.startswith(_STANDARD + os.sep) else (os.path.basename(file), False)
