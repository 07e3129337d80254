"""A fused function that is compared with the original in each call, in values and in gradients."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.fusion.in_float32 import InFloat32
from coda_jax.fusion.nested import Function
from coda_jax.graph.calls import is_key
from coda_jax.graph.judged import judged, wrong
from coda_jax.graph.values import is_float

_MOST_NAMED = 4


def checked(
    name: str, fused: Function, closed: core.ClosedJaxpr, arguments: Sequence[str], results: Sequence[str]
) -> Function:
    """The fused function, whose results and cotangents are compared with those of the plain one where they are made.

    A plain one that computes in 16 bits runs in float32 too: its own distance from that, by its roundings, is the
    measure of the fused one's.

    Args:
      name: of the function.
      fused: the fused function.
      closed: the plain one, without constants.
      arguments, results: their names.
    """
    plain, exact = core.jaxpr_as_fun(closed), InFloat32(closed)

    def runs(arrays: Sequence[Any]) -> list[tuple[Function, Sequence[Any]]]:
        """The functions and their arguments: fused, plain, and in float32 where that is another one."""
        in_float32 = [(exact, list(map(exact.widened, arrays)))] if exact.dtypes else []
        return [(fused, arrays), (plain, arrays), *in_float32]

    def compared(names: Sequence[str], made: Sequence[Sequence[Any]]) -> list[Any]:
        """The fused function's arrays; the program raises where one of them is wrong."""
        each = list(zip(names, zip(*made, strict=True), strict=True))
        floats = [(n, xs) for n, xs in each if _is_float_array(xs[0])]
        raises = functools.partial(_raise_if_wrong, name, [n for n, _ in floats], exact.dtypes, exact.narrow)
        jax.debug.callback(raises, [xs for _, xs in floats])
        return list(made[0])

    @jax.custom_vjp
    def function(*arrays: Any) -> list[Any]:
        return compared(results, [f(*xs) for f, xs in runs(arrays)])

    def forward(*arrays: Any) -> tuple[list[Any], Any]:
        made = [jax.vjp(lambda *xs, f=f: list(f(*xs)), *xs) for f, xs in runs(arrays)]
        return compared(results, [x for x, _ in made]), [pullback for _, pullback in made]

    def backward(pullbacks: Sequence[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        wide = [x if x.dtype == jax.dtypes.float0 else exact.widened(x) for x in cotangents]
        made = [pullback(given) for pullback, given in zip(pullbacks, (cotangents, cotangents, wide), strict=False)]
        return tuple(compared([f"gradient of {x}" for x in arguments], made))

    function.defvjp(forward, backward)
    return function


def _is_float_array(x: Any) -> bool:
    return x.dtype != jax.dtypes.float0 and not is_key(x) and is_float(x.dtype)


def _raise_if_wrong(
    name: str, names: Sequence[str], dtypes: Collection[Any], narrow: Collection[str], arrays: Sequence[Sequence[Any]]
) -> None:
    """Raises for arrays of the fused function, beside the plain one's and the exact ones, that are wrong."""
    found = wrong([judged(n, xs[0], xs[1], xs[-1], dtypes) for n, xs in zip(names, arrays, strict=True)])
    if found:
        told = "; ".join(map(str, found[:_MOST_NAMED]))
        told += f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        told += f"; {', '.join(sorted(narrow))} ran in 16 bits there too" if narrow else ""
        measured = "the original's in float32" if dtypes else "the original's"
        raise AssertionError(f"fuse: {name} differs from {measured}: {told}")
