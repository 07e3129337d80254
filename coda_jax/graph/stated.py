"""The pullback or the inverse that an author states of a map, compared with the exact one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.graph.values import is_float


@dataclasses.dataclass(frozen=True)
class Stated:
    """A map, and the arrays that it was stated at.

    Attributes:
      name: of its function.
      f, pullback, inverse: as in `Value.map`.
      arrays: of its inputs, as it sees them.
    """

    name: str
    f: Callable[..., Any]
    pullback: Callable[..., Any] | None
    inverse: Callable[..., Any] | None
    arrays: Sequence[jax.Array]

    def errors(self) -> dict[str, float]:
        """Relative errors, by what is stated; a pullback is not compared where JAX has no derivative."""
        results = jax.tree.leaves(self.f(*self.arrays))
        errors: dict[str, float] = {}
        if self.inverse is not None:
            recovered = self.inverse(*results, *self.arrays[1:])
            errors[f"the inverse of map '{self.name}'"] = relative_error(recovered, self.arrays[0])
        if self.pullback is not None and is_float(results[0].dtype) and results[0].dtype.itemsize > 1:
            errors |= self._pullback_errors(results[0])
        return errors

    def _pullback_errors(self, y: jax.Array) -> dict[str, float]:
        numbers = [i for i, x in enumerate(self.arrays) if is_float(x.dtype)]

        def floating_function(*floats: jax.Array) -> jax.Array:
            stated_cotangent = dict(zip(numbers, floats, strict=True))
            (result,) = jax.tree.leaves(self.f(*(stated_cotangent.get(i, x) for i, x in enumerate(self.arrays))))
            return jnp.asarray(result)

        _, exact = jax.vjp(floating_function, *(self.arrays[i] for i in numbers))
        dy = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
        assert self.pullback is not None
        stated = self.pullback(y, *self.arrays, dy)
        errors = {}
        for i, exact_cotangent in zip(numbers, exact(dy), strict=True):
            stated_cotangent = jnp.zeros_like(exact_cotangent) if stated[i] is None else stated[i]
            errors[f"the pullback of map '{self.name}', cotangent {i}"] = relative_error(
                stated_cotangent, exact_cotangent
            )
        return errors


def relative_error(result: Any, exact: Any) -> float:
    """|result - exact| / |exact|, of Euclidean norms; |result| where exact is zero."""
    a, b = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (result, exact))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
