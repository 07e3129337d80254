"""A plan, run: each product with the maps of its epilogue, and XLA's passes between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.user_code import default_types
from coda_jax.graph.evaluate import applied
from coda_jax.graph.plan import Plan, is_of_rows
from coda_jax.graph.values import Value, is_float
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.derivative import Options, product


def run(
    plan: Plan,
    arrays: Mapping[Value, jax.Array],
    *,
    dtype: Any,
    dtypes: Mapping[Value, Any],
    name: str,
    implementation: str = "auto",
) -> list[jax.Array]:
    """The arrays of what the plan makes.

    Args:
      arrays: of leaves and of values that are given.
      dtype: of the products' factors, and of tiles that lie in memory between them.
      dtypes: of values that are wanted in another.
      name: of the graph, in messages and in the kernels' names.
      implementation: as in `gemm`.
    """
    running = _Run(plan, dict(arrays), np.dtype(dtype), dict(dtypes), implementation)
    for step in range(len(plan.steps)):
        running.multiply(step, f"{name}_{step}")
    return [running.stored(value) for value in plan.wanted]


class _Run:
    def __init__(
        self,
        plan: Plan,
        arrays: dict[Value, jax.Array],
        dtype: np.dtype,
        dtypes: dict[Value, Any],
        implementation: str,
    ):
        self.plan, self.arrays, self.dtype, self.dtypes = plan, arrays, dtype, dtypes
        self.implementation = implementation
        self.by_xla = frozenset(plan.by_xla)

    def dtype_of(self, value: Value) -> np.dtype:
        """As which the value lies in memory."""
        if value in self.dtypes:
            return np.dtype(self.dtypes[value])
        if not is_float(value.dtype) or is_of_8_bits(value.dtype):
            return np.dtype(value.dtype)
        return self.dtype if value.is_tile else np.dtype(FLOAT32)

    def stored(self, value: Value) -> jax.Array:
        """The value as it lies in memory."""
        x = self.known(value)
        return x.astype(self.dtypes[value]) if value in self.dtypes else x

    def known(self, value: Value) -> jax.Array:
        """The value, which XLA makes if it is not known."""
        if value in self.arrays:
            return self.arrays[value]
        with default_types():
            x = applied(value, [self.known(of) for of in value.inputs])
        if value in self.by_xla:
            x = self.arrays[value] = x.astype(self.dtype_of(value))
        return x

    def multiply(self, step: int, name: str) -> None:
        """Runs a product; what its epilogue stores is known then."""
        of, stores = self.plan.steps[step].product, self.plan.steps[step].stores
        operands: dict[Value, jax.Array] = {}
        for value in stores:
            self._gather(value, step, operands)
        vectors = [x for x in operands if is_of_rows(x)]

        def epilogue(acc: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
            values: dict[Value, jax.Array] = {of: acc}
            for value, x in zip(operands, arrays, strict=True):
                values[value] = x.reshape(value.shape) if value in vectors else x
            return [_made(value, values) for value in stores]

        epilogue.__name__ = name
        a, b = self._factor(of.a), self._factor(of.b)
        ragged = None if of.groups is None else Dimension.K if of.transpose_a else Dimension.M
        given = [x[:, None] if value in vectors else x for value, x in operands.items()]
        is_bare = stores == [of]
        outputs, _ = product(
            a,
            b,
            given,
            None if is_bare else epilogue,
            lambda _: [self.dtype_of(value) for value in stores],
            Options(of.transpose_a, of.transpose_b, implementation=self.implementation, ragged=ragged),
            None if of.groups is None else self.known(of.groups),
        )
        self.arrays.update(zip(stores, outputs, strict=True))

    def _factor(self, value: Value) -> jax.Array:
        x = self.known(value)
        return x if is_of_8_bits(x.dtype) else x.astype(self.dtype)

    def _gather(self, value: Value, step: int, operands: dict[Value, jax.Array]) -> None:
        """The operands that the epilogue of this product reads to make the value."""
        for x in self.plan.beside_acc(value, step):
            if self.plan.is_made_in(x, step):
                self._gather(x, step, operands)
            elif x not in operands:
                operands[x] = self.known(x)


def _made(value: Value, values: dict[Value, jax.Array]) -> jax.Array:
    """The value from those that are known, in an epilogue."""
    if value not in values:
        values[value] = applied(value, [_made(x, values) for x in value.inputs])
    return values[value]
