"""The line of a program that made an equation, as far as JAX knows it."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from coda_jax.jaxprs.walk import inner_jaxprs

_CODA = os.path.dirname(os.path.dirname(__file__))
_LAYERS = os.path.join(os.path.dirname(_CODA), "flax_layers")
_OF_BLOCKS = tuple(os.path.join(_CODA, room) + os.sep for room in ("graph", "operators"))
_NORMS = tuple(os.sep + name for name in ("stream.py", "deferred_norm.py", "norm.py"))
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_HIDDEN = (*(os.path.dirname(file) + os.sep for file in (jax.__file__, np.__file__)), _CODA + os.sep, "<frozen")


def line_of(equation: core.JaxprEqn) -> str | None:
    """The innermost line outside of JAX and coda_jax: "train.py:12", of another package "optax/contrib/_muon.py:88".

    The latter has the line of the program that called the package behind it, where there is one: ", from train.py:12".
    In a backward pass it is the line of the forward pass, or that of a custom derivative's call. None where JAX knows
    no line, as of a custom derivative that is made again by `jax.checkpoint`.
    """
    inner = None
    for frame in _frames(equation):
        name, of_package = _named(frame.file_name)
        if name is None:
            continue
        line = f"{name}:{frame.line_num}"
        if not of_package:
            return line if inner is None else f"{inner}, from {line}"
        inner = inner or line
    return inner


def is_in_a_block(equation: core.JaxprEqn) -> bool:
    """Whether a `coda.block`, an operator, or a layer or model made of others made the equation; a norm is none."""
    files = (frame.file_name for frame in _frames(equation))
    return any(file.startswith((*_OF_BLOCKS, _LAYERS + os.sep)) and not file.endswith(_NORMS) for file in files)


def called_directly(
    jaxpr: core.Jaxpr, names: Collection[core.Primitive], arguments: Sequence[Any] = (), inherited: bool = False
) -> dict[int, list[Any]]:
    """By the id of an equation that is the program's own call of `coda.gemm` and the like, or a derivative of one, the
    variables of the outermost jaxpr that are its first argument, one for each way to it.

    None is a block's, an operator's or a layer's. JAX forgets the lines of what it differentiates: such is none either.

    Args:
      names: the primitives of these equations.
      arguments: what the jaxpr's are in the outermost one; themselves unless given.
      inherited: whether what calls the jaxpr is the program's own.
    """
    outside = dict(zip(jaxpr.invars, arguments, strict=True)) if arguments else {}
    found: dict[int, list[Any]] = {}
    for equation in jaxpr.eqns:
        files = [frame.file_name for frame in _frames(equation)]
        is_direct = inherited
        if any(file.startswith((*_OF_BLOCKS, _LAYERS + os.sep)) for file in files):
            is_direct = False
        elif any(name is not None and not of_package for name, of_package in map(_named, files)):
            is_direct = True
        given = [x if isinstance(x, core.Literal) else outside.get(x, x) for x in equation.invars]
        if is_direct and equation.primitive in names:
            found.setdefault(id(equation), []).append(given[0])
        for inner in inner_jaxprs(equation):
            is_call = len(inner.invars) == len(given)
            for one, variables in called_directly(inner, names, given if is_call else (), is_direct).items():
                found.setdefault(one, []).extend(variables)
    return found


def _frames(equation: core.JaxprEqn) -> Sequence[Any]:
    traceback: Any = equation.source_info.traceback
    return () if traceback is None else traceback.frames


@functools.cache
def _named(file: str) -> tuple[str | None, bool]:
    """The name given to a file here, None where it is not told; and whether it is a package's."""
    if file.startswith(_HIDDEN):
        return None, False
    for packages in (*_PACKAGES, os.path.dirname(_LAYERS) if file.startswith(_LAYERS + os.sep) else None):
        if packages is not None and file.startswith(packages + os.sep):
            return os.path.relpath(file, packages).replace(os.sep, "/"), True
    return (None, False) if file.startswith(_STANDARD + os.sep) else (os.path.basename(file), False)
