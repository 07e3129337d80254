"""The line of a program that made an equation, if JAX knows it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

from coda_jax.jaxprs.walk import inner_jaxprs

_GIVEN = re.compile(r"\bline (\S+?:\d+(?:, from \S+?:\d+)?)")  # by `at_line_of`
_CALLER = re.compile(r"\bcalled from (\S+?:\d+)")  # by `at_call`
_TRANSFORMS, _MODULE = re.compile(r"\w+\("), re.compile(r"[A-Za-z_][\w.\[\]]*")
_OF_JAX = frozenset({"checkpoint", "rematted_computation", "while", "body", "cond", "scan", "closed_call", "shard_map"})
_CODA = os.path.dirname(os.path.dirname(__file__))
_LAYERS = os.path.join(os.path.dirname(_CODA), "flax_layers")
_BLOCK_FOLDERS = tuple(os.path.join(_CODA, room) + os.sep for room in ("graph", "operators"))
_NORMS = tuple(os.sep + name for name in ("stream.py", "deferred_norm.py", "norm.py", "fused.py"))  # and their wrapper
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_HIDDEN = (*(os.path.dirname(file) + os.sep for file in (jax.__file__, np.__file__)), _CODA + os.sep, "<frozen")


def line_of(equation: core.JaxprEqn, *, with_function: bool = False) -> str | None:
    """The innermost line outside of JAX and coda_jax: "train.py:12", or "optax/contrib/_muon.py:88" in another package.

    A line in another package is followed by that of the program that called it, if there is one: ", from train.py:12".
    In a backward pass it is the line of the forward pass, or that of a custom derivative's call. A pass between the
    products of a graph has the line that `at_line_of` gave it, and a function of another package that is traced by
    itself was called where `at_call` says. None if JAX knows no line, as for a custom derivative that `jax.checkpoint`
    runs again.

    Args:
      with_function: also names the function that the program's line is in: "train.py:12 (loss)".
    """
    line = _given_line(equation) or line_in(equation.source_info.traceback, with_function=with_function)
    callers = _CALLER.findall(str(equation.source_info.name_stack))
    return f"{line}, from {callers[-1]}" if line and callers and _is_in_package(line) else line


def users_line(line: str) -> str:
    """The program's part of a line: "train.py:12" of "optax/losses/_regression.py:9, from train.py:12"."""
    return line.rpartition(", from ")[2]


def _is_in_package(line: str) -> bool:
    """Whether a line has no program's part: a program's files are named without their folders."""
    return "/" in users_line(line)


def module_of(equation: core.JaxprEqn) -> str:
    """The path of the module that made an equation, by name scopes of libraries: "Model/layers_0"; empty for none."""
    names = _TRANSFORMS.sub("", str(equation.source_info.name_stack)).replace(")", "").split("/")
    return "/".join(name for name in names if _MODULE.fullmatch(name) and name not in _OF_JAX)


def line_in(traceback: Any, *, with_function: bool = False) -> str | None:
    """`line_of` for a traceback of JAX's."""
    inner = None
    for frame in () if traceback is None else traceback.frames:
        name, in_package = _named(frame.file_name)
        if name is None:
            continue
        line = f"{name}:{frame.line_num}"
        if not in_package:
            line += f" ({frame.function_name.rpartition('<locals>.')[2]})" if with_function else ""
            return line if inner is None else f"{inner}, from {line}"
        inner = inner or line
    return inner


@contextlib.contextmanager
def at_line_of(traceback: Any) -> Iterator[None]:
    """A context whose equations have this traceback's line, though the library makes them; None: their own.

    It is a name scope, so that derivatives keep it, and profiles show it.
    """
    line = line_in(traceback)
    with jax.named_scope(f"line {line}") if line else contextlib.nullcontext():
        yield


def at_call() -> contextlib.AbstractContextManager[Any]:
    """A context for the call of a function that is traced by itself: its equations have the line of the program's call.

    A name scope too. JAX ends the tracebacks of such equations where the trace begins.
    """
    line = line_in(source_info_util.current().traceback)
    if line is None or _is_in_package(line):
        return contextlib.nullcontext()
    return jax.named_scope(f"called from {users_line(line)}")


def is_of_package(function: Any) -> bool:
    """Whether a function is written in another package than the program."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and _named(code.co_filename)[1]


def _given_line(equation: core.JaxprEqn) -> str | None:
    lines = _GIVEN.findall(str(equation.source_info.name_stack))
    return lines[-1] if lines else None


def is_in_a_block(equation: core.JaxprEqn) -> bool:
    """Whether a `coda.block`, an operator, or a layer or model other than a norm made the equation."""
    files = (frame.file_name for frame in _frames(equation))
    return any(file.startswith((*_BLOCK_FOLDERS, _LAYERS + os.sep)) and not file.endswith(_NORMS) for file in files)


def called_directly(
    jaxpr: core.Jaxpr, names: Collection[core.Primitive], arguments: Sequence[Any] = (), inherited: bool = False
) -> dict[int, list[Any]]:
    """The equations by which the program itself calls `coda.gemm` and the like, and derivatives of such calls.

    They are keyed by id, with the variables of the outermost jaxpr that are the first argument, one for each path of
    calls to the equation. Calls by a block, an operator or a layer are left out, and so are equations whose lines JAX
    loses when it differentiates.

    Args:
      names: the primitives of these equations.
      arguments: the jaxpr's arguments as variables of the outermost jaxpr; by default its own variables.
      inherited: whether the program itself calls the jaxpr.
    """
    outside = dict(zip(jaxpr.invars, arguments, strict=True)) if arguments else {}
    calls: dict[int, list[Any]] = {}
    for equation in jaxpr.eqns:
        files = [frame.file_name for frame in _frames(equation)]
        is_direct = inherited
        if any(file.startswith((*_BLOCK_FOLDERS, _LAYERS + os.sep)) for file in files):
            is_direct = False
        elif any(name is not None and not in_package for name, in_package in map(_named, files)):
            is_direct = True
        variables_read = [x if isinstance(x, core.Literal) else outside.get(x, x) for x in equation.invars]
        if is_direct and equation.primitive in names:
            calls.setdefault(id(equation), []).append(variables_read[0])
        for inner in inner_jaxprs(equation):
            is_call = len(inner.invars) == len(variables_read)
            for one, variables in called_directly(inner, names, variables_read if is_call else (), is_direct).items():
                calls.setdefault(one, []).extend(variables)
    return calls


def _frames(equation: core.JaxprEqn) -> Sequence[Any]:
    traceback: Any = equation.source_info.traceback
    return () if traceback is None else traceback.frames


@functools.cache
def _named(file: str) -> tuple[str | None, bool]:
    """The name by which a file is shown, None if it is hidden; and whether it is in another package."""
    if file.startswith(_HIDDEN):
        return None, False
    for packages in (*_PACKAGES, os.path.dirname(_LAYERS) if file.startswith(_LAYERS + os.sep) else None):
        if packages is not None and file.startswith(packages + os.sep):
            return os.path.relpath(file, packages).replace(os.sep, "/"), True
    for packages in ("site-packages", "dist-packages"):  # of another environment on the path
        _, found, inner = file.rpartition(os.sep + packages + os.sep)
        if found:
            return inner.replace(os.sep, "/"), True
    return (None, False) if file.startswith(_STANDARD + os.sep) else (os.path.basename(file), False)
