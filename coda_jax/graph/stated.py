"""The pullback or the inverse that an author states of a map, compared with what it should be."""

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
    """A map at its arrays.

    Attributes:
      name: of its function.
      f, pullback, inverse: as `Value.map` takes them.
      arrays: of its inputs, as it sees them.
    """

    name: str
    f: Callable[..., Any]
    pullback: Callable[..., Any] | None
    inverse: Callable[..., Any] | None
    arrays: Sequence[jax.Array]

    def errors(self) -> dict[str, float]:
        """Relative errors, by what is stated; where JAX has no derivative a pullback is not looked at."""
        results = jax.tree.leaves(self.f(*self.arrays))
        found: dict[str, float] = {}
        if self.inverse is not None:
            recovered = self.inverse(*results, *self.arrays[1:])
            found[f"the inverse of map '{self.name}'"] = relative_error(recovered, self.arrays[0])
        if self.pullback is not None and is_float(results[0].dtype) and results[0].dtype.itemsize > 1:
            found |= self._of_pullback(results[0])
        return found

    def _of_pullback(self, y: jax.Array) -> dict[str, float]:
        numbers = [i for i, x in enumerate(self.arrays) if is_float(x.dtype)]

        def of_floats(*floats: jax.Array) -> jax.Array:
            given = dict(zip(numbers, floats, strict=True))
            (result,) = jax.tree.leaves(self.f(*(given.get(i, x) for i, x in enumerate(self.arrays))))
            return jnp.asarray(result)

        _, exact = jax.vjp(of_floats, *(self.arrays[i] for i in numbers))
        dy = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
        assert self.pullback is not None
        stated = self.pullback(y, *self.arrays, dy)
        errors = {}
        for i, of in zip(numbers, exact(dy), strict=True):
            given = jnp.zeros_like(of) if stated[i] is None else stated[i]
            errors[f"the pullback of map '{self.name}', cotangent {i}"] = relative_error(given, of)
        return errors


def relative_error(found: Any, exact: Any) -> float:
    """|found - exact| / |exact|, of Euclidean norms; |found| where exact is zero."""
    a, b = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (found, exact))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
