"""Results and gradients judged by the roundings that the function itself makes, which a run in float32 shows."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_FACTOR = 3.0  # of the function's own error; two sets of roundings are alike, and a deferred norm rounds its weights
_LEAST = 1e-3  # of an array's norm, in float32
_ZERO = 8.0  # roundings of the arrays' typical element: what a sum that is 0 in truth may come to


@dataclasses.dataclass(frozen=True)
class Judged:
    """An array's errors, as Euclidean norms.

    Attributes:
      name: of the array.
      error: of the array.
      own: of the function's own, as plain JAX computes it.
      norm: of the exact array.
      count: the number of its elements.
      rounding: the least relative error that its dtype, and those that the function computes in, may make.
    """

    name: str
    error: float
    own: float
    norm: float
    count: int
    rounding: float

    @property
    def is_zero(self) -> bool:
        """True for an array of which the function itself has no digit: it is 0 in truth.

        So is the gradient of a key's bias in attention.
        """
        return self.own >= 0.5 * self.norm

    def bound(self, typical: float) -> float:
        """The largest error that is none of a wrong function; typical: the size of the arrays' elements.

        An array that is 0 in truth is judged by the size of the others.
        """
        absolute = _ZERO * typical * math.sqrt(self.count) * (self.rounding if self.is_zero else _eps(np.float32))
        return _FACTOR * self.own + self.rounding * self.norm + absolute

    def __str__(self) -> str:
        norm = self.norm or 1.0
        return f"{self.name} by {self.error / norm:.1e}, where its own roundings make {self.own / norm:.1e}"


def judged(name: str, found: Any, own: Any, exact: Any, dtypes: Iterable[Any] = ()) -> Judged:
    """The errors of an array.

    Args:
      name: of the array.
      found: the array that is judged.
      own: the same as plain JAX computes it.
      exact: the same in float32. Where it is not finite, and the function's own is, that takes its place.
      dtypes: floats of 16 bits that the function computes in.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (found, own, exact))
    is_known = ~np.isfinite(a) & (_are_alike(a, b) | _are_alike(a, c))
    a, b, c = (np.where(is_known, 0.0, x) for x in (a, b, c))
    c = np.where(np.isfinite(c), c, b)
    b = np.where(np.isfinite(b), b, c)
    with np.errstate(invalid="ignore"):  # of infinities that are not found
        errors = float(np.linalg.norm(a - c)), float(np.linalg.norm(b - c))
    rounding = max([_LEAST, _eps(own.dtype), *map(_eps, dtypes)])
    return Judged(name, *errors, float(np.linalg.norm(c)), a.size, rounding)


def wrong(every: Sequence[Judged]) -> list[Judged]:
    """The arrays whose errors are more than roundings make, the worst first."""
    sizes = sorted(x.norm / math.sqrt(x.count) for x in every if x.norm)
    typical = sizes[(len(sizes) - 1) // 2] if sizes else 0.0
    found = [x for x in every if not x.error <= x.bound(typical)]
    return sorted(found, key=lambda x: -x.error / (x.norm or 1.0))


def names_of_arguments(arguments: tuple[Any, Any], parameters: Sequence[str] | None = None) -> list[str]:
    """The names of the leaves of (args, kwargs), by their paths: "argument 0['w']", "argument mask".

    Args:
      arguments: both.
      parameters: of the function, by place; then these begin the names, "params['w']", and so do keywords, "mask".
    """
    return [_name_of_argument(path, parameters) for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]


def parameters_of(f: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters that arguments are given to by place; empty if Python does not know them."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return []
    return [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]


def names_of_results(results: Any) -> list[str]:
    """The names of the leaves of results, by their paths: "result['loss']"."""
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(results)]


def _name_of_argument(path: Any, parameters: Sequence[str] | None) -> str:
    kind, which, *rest = path
    first = f"argument {which.idx}" if kind.idx == 0 else f"argument {which.key}"
    if parameters is not None and (kind.idx or which.idx < len(parameters)):
        first = which.key if kind.idx else parameters[which.idx]
    return f"{first}{jax.tree_util.keystr(tuple(rest))}"


def _are_alike(a: Any, b: Any) -> Any:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _eps(dtype: Any) -> float:
    """The distance of 1 from the next larger number; 0 for numbers that are not rounded."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
