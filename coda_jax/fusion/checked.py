"""A fused function that is compared with the original in each call, in values and in gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coda_jax.fusion.nested import Function
from coda_jax.graph.calls import is_key
from coda_jax.graph.stated import relative_error
from coda_jax.graph.values import is_float

_BOUNDS = {1: 2e-1, 2: 5e-2, 4: 1e-3, 8: 1e-3}  # by an element's bytes


def checked(name: str, fused: Function, plain: Function) -> Function:
    """The fused function, whose results and cotangents are compared with those of the plain one where they are made."""

    @jax.custom_vjp
    def function(*arrays: Any) -> list[Any]:
        return _compared(f"{name}, result", list(fused(*arrays)), list(plain(*arrays)))

    def forward(*arrays: Any) -> tuple[list[Any], Any]:
        results, pullback = jax.vjp(lambda *xs: list(fused(*xs)), *arrays)
        plain_results, plain_pullback = jax.vjp(lambda *xs: list(plain(*xs)), *arrays)
        return _compared(f"{name}, result", results, plain_results), (pullback, plain_pullback)

    def backward(pullbacks: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        found, expected = (pullback(cotangents) for pullback in pullbacks)
        return tuple(_compared(f"{name}, gradient", list(found), list(expected)))

    function.defvjp(forward, backward)
    return function


def _compared(what: str, found: list[Any], expected: list[Any]) -> list[Any]:
    """The arrays found; the program raises where one of them differs from the one expected."""
    pairs = [
        (i, x, y)
        for i, (x, y) in enumerate(zip(found, expected, strict=True))
        if x.dtype != jax.dtypes.float0 and not is_key(x) and is_float(x.dtype)
    ]
    numbers = [i for i, _, _ in pairs]
    jax.debug.callback(functools.partial(_raise_if_different, what, numbers), [pair[1:] for pair in pairs])
    return found


def _raise_if_different(what: str, numbers: Sequence[int], pairs: Sequence[tuple[Any, Any]]) -> None:
    for i, (x, y) in zip(numbers, pairs, strict=True):
        error, bound = relative_error(*_finite_where_alike(x, y)), _BOUNDS[y.dtype.itemsize]
        if not error <= bound:
            raise AssertionError(
                f"fuse: {what} {i} differs from the original's by {error:.1e}; the bound is {bound:.0e}"
            )


def _finite_where_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """The arrays, with zeros where both have the same infinity or NaN."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    is_alike = ~np.isfinite(b) & ((a == b) | (np.isnan(a) & np.isnan(b)))
    return np.where(is_alike, 0.0, a), np.where(is_alike, 0.0, b)
