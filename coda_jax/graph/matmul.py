"""The matrix products of values; a recipe rounds their factors to 8 bits."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.values import same_size
from coda_jax.graph import rounded
from coda_jax.graph.rounded import Recipe, Rounding
from coda_jax.graph.values import Leaf, Product, Transposed, kept_weight
from coda_jax.graph.values import Value as Node


class Matmul:
    """The products of a block's value, which `author.Value` inherits."""

    shape: tuple[Any, ...]
    dtype: np.dtype[Any]
    _trace: Any

    def __matmul__(self, other: Any) -> Any:
        return self.matmul(other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._trace.value(other) @ self

    def matmul(self, w: Any, *, fp8: Recipe | None = None, history: Any = None) -> Any:
        """self @ w, (..., K) by (K, ...).

        Args:
          w: a value or an array.
          fp8: a `coda.fp8.Recipe` for this product; default the block's.
          history: float32 (2, H), for a recipe that has one: the maxima of self and of the result's cotangent in the H
            steps before, the latest first, 0 where there is none. Its gradient is no derivative: it holds this step's
            maxima, from which `coda.fp8.next_history` makes the next step's history. Without a history, scales are
            those of the arrays themselves.

        Raises:
          ValueError: shapes that do not fit.
          TypeError: fp8 is no recipe; a history without a recipe.
        """
        return self._times(self._trace.value(w), recipe=fp8, history=history)

    def _times(self, w: Any, *, keep: bool = False, recipe: Recipe | None = None, history: Any = None) -> Any:
        """`matmul` with a value; keep: as by `Value.kept`."""
        self._check_factor(w)
        rounding = self._rounding(w, recipe, history)
        node = w._as_weight(halves=rounding is None)
        product = self._product(kept_weight(node) if keep else node, rounding)
        plain = self._plain_product(w, rounding) if self._trace.is_plain else None
        return self._computed(product, plain, (*self.shape[:-1], *w.shape[1:]))

    def _rounding(self, w: Any, recipe: Recipe | None, history: Any) -> Rounding | None:
        """How both factors are rounded, if they are."""
        name, recipe = f"block '{self._trace.name}'", recipe or self._trace.recipe
        if not isinstance(recipe, Recipe | None):
            raise TypeError(f"{name}: fp8 = {recipe!r}; it must be a coda.fp8.Recipe or None")
        if recipe is None or is_of_8_bits(self.dtype) or is_of_8_bits(w.dtype):
            if history is not None:
                raise TypeError(f"{name}: a history is given for a product without a recipe")
            return None
        if history is None:
            return Rounding(recipe)
        value = self._trace.value(history)
        if value.ndim != 2 or value.shape[0] != 2 or value.dtype != FLOAT32:
            raise ValueError(f"{name}: history is {value.dtype} of shape {value.shape}; it must be float32 (2, H)")
        node = value._viewed((math.prod(value.shape),))
        if isinstance(node, Leaf):
            node.is_history = True
        return Rounding(recipe, node, value._array() if self._trace.is_plain else None)

    def _check_factor(self, w: Any) -> None:
        """Raises ValueError if this value cannot be multiplied by w."""
        what = f"block '{self._trace.name}': {self.shape} @ {w.shape}"
        if len(self.shape) < 2 or w.ndim < 2 or not same_size(self.shape[-1], w.shape[0]):
            raise ValueError(f"{what}; they must be (..., K) and (K, ...), each of two axes or more")
        if not same_size(self._node.shape[-1], self.shape[-1]):
            rows = f"the block's rows, {self._trace.rows}, which are those of its first array"
            raise ValueError(f"{what}; the first has not {rows}. rows= names another argument")

    def _product(self, b: Node, rounding: Rounding | None) -> Node:
        """The product with b, a matrix, as a value of the graph."""
        a = self._node
        if rounding is not None:
            return rounded.multiplied(a, b, rounding)
        options: dict[str, Any] = {}
        if isinstance(a, Transposed) and not is_of_8_bits(a.dtype):
            a, options["transpose_a"] = a.inputs[0], True
        if isinstance(b, Transposed):
            b, options["transpose_b"] = b.inputs[0], True
        return Product(a, b, **options)

    def _plain_product(self, w: Any, rounding: Rounding | None) -> jax.Array:
        """The product with w in plain JAX."""
        if rounding is not None:
            return rounded.in_jax(self._array(), w._array(), rounding)
        axes = (((len(self.shape) - 1,), (0,)), ((), ()))
        return lax.dot_general(self._as_factor(), w._as_factor(), axes, preferred_element_type=np.dtype(FLOAT32))

    @property
    def _node(self) -> Node:
        """The value of the graph."""
        raise NotImplementedError

    def _array(self) -> jax.Array:
        """The array where the author's lines are run as plain JAX."""
        raise NotImplementedError

    def _as_factor(self) -> jax.Array:
        """The same array, in the products' dtype."""
        raise NotImplementedError

    def _computed(self, node: Node, plain: jax.Array | None, shape: tuple[Any, ...]) -> Any:
        """A value of its block that is this node; plain: its array."""
        raise NotImplementedError
