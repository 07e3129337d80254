"""A plan, run: each product with the maps of its epilogue, and XLA's passes between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.epilogue.user_code import default_types
from coda_jax.graph.calls import Result, called
from coda_jax.graph.evaluate import applied, as_seen
from coda_jax.graph.pieces import Pieces, in_pieces, whole
from coda_jax.graph.plan import Plan, has_rows, is_of_rows
from coda_jax.graph.values import Map, Product, Turned, Value, is_float, reachable
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.derivative import Options, product
from coda_jax.primitives.layout import spec_of_sum
from coda_jax.primitives.mesh_types import (
    constrained,
    explicit_cuts,
    explicit_sharding,
    sharding_over_explicit,
    varying_axes,
)


def run(
    plan: Plan,
    arrays: Mapping[Value, jax.Array],
    *,
    dtype: Any,
    out_dtypes: Sequence[Any],
    name: str,
    rows: Sequence[Any] = (),
    implementation: str = "auto",
) -> list[jax.Array]:
    """The arrays of what the plan makes.

    Args:
      arrays: of leaves and of values that are given.
      dtype: of the products' factors, and of tiles that lie in memory between them.
      out_dtypes: of what is wanted.
      name: of the graph, in messages and in the kernels' names.
      rows: the axes that arrays have in the place of a block's rows; none where these are one axis.
      implementation: as in `gemm`.
    """
    stored: dict[Value, np.dtype[Any]] = {}  # the widest that is asked for
    for value, of in zip(plan.wanted, out_dtypes, strict=True):
        stored[value] = max(np.dtype(of), stored.get(value, np.dtype(of)), key=lambda one: one.itemsize)
    running = _Run(plan, dict(arrays), np.dtype(dtype), stored, tuple(rows), implementation)
    for step in range(len(plan.steps)):
        running.multiply(step, f"{name}_{step}")
    return [running.known(value).astype(of) for value, of in zip(plan.wanted, out_dtypes, strict=True)]


@dataclasses.dataclass
class _Run:
    """What is known of a plan while it runs: arrays, with all axes of the rows."""

    plan: Plan
    arrays: dict[Value, jax.Array]
    dtype: np.dtype[Any]
    dtypes: dict[Value, np.dtype[Any]]
    rows: tuple[Any, ...]
    implementation: str

    def __post_init__(self) -> None:
        self.passing: dict[Value, jax.Array | Pieces] = {}
        self._by_xla = frozenset(self.plan.by_xla)

    def dtype_of(self, value: Value) -> np.dtype[Any]:
        """As which the value lies in memory."""
        if value in self.plan.factors_alone and is_float(value.dtype) and not is_of_8_bits(value.dtype):
            return self.dtype
        own = value.stored_as(self.dtype)
        return self.dtypes.get(value, own) if value.is_tile and is_float(value.dtype) else own

    def known(self, value: Value) -> jax.Array:
        """The value, which XLA makes if it is not known."""
        if value not in self.arrays and isinstance(value, Result):
            self.arrays.update(self._called(value))
        if value not in self.arrays:
            x = whole(self._in_pass(value))
            x = x.astype(self.dtype_of(value)) if value in self._by_xla else x
            self.arrays[value] = self._constrained(value, self._with_rows(value, x))
        return self.arrays[value]

    def _in_pass(self, value: Value) -> jax.Array | Pieces:
        """A map or a transpose, as a pass of XLA's makes it; what it reads is made in the same pass or known."""
        read, made = {*self.arrays, *self._by_xla} - {value}, self.passing
        for of in reachable([value], read):
            if isinstance(of, Map | Turned) and of not in read and of not in made:
                inputs = [made[x] if x in made else self._as_matrix(x, self.known(x)) for x in of.inputs]
                with default_types():
                    made[of] = _passed(of, inputs)
        return made[value]

    def _called(self, value: Result) -> dict[Value, jax.Array]:
        """The results of a value's call, and what its derivative keeps where the plan asks for that."""
        of = [x for x in (value, *self.plan.by_xla) if isinstance(x, Result) and x.call is value.call]
        made = called(of, [self.known(x) for x in value.inputs])
        return {x: array.reshape(self._shape_of(x)) for x, array in made.items()}

    def multiply(self, step: int, name: str) -> None:
        """Runs a product; what its epilogue stores is known then."""
        of, stores = self.plan.steps[step].product, self.plan.steps[step].stores
        operands = {x: self.known(x) for x in self.plan.operands(step)}
        vectors = [x for x in operands if is_of_rows(x)]

        def epilogue(acc: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
            values: dict[Value, jax.Array] = {of: acc}
            for value, x in zip(operands, arrays, strict=True):
                values[value] = x.reshape(value.shape) if value in vectors else x
            return [_made(value, values) for value in stores]

        epilogue.__name__ = name
        a, b = self._factors(of)
        outputs, _ = product(
            a,
            b,
            [x[..., None] if value in vectors else x for value, x in operands.items()],
            None if stores == [of] else epilogue,
            lambda _: [self.dtype_of(value) for value in stores],
            self._options(of, a, b, operands),
            None if of.groups is None else self.known(of.groups),
        )
        for value, x in zip(stores, outputs, strict=True):
            self.arrays[value] = x.reshape(value.shape) if isinstance(value, Turned) else self._constrained(value, x)

    def _constrained(self, value: Value, x: jax.Array) -> jax.Array:
        """x, lying as the author says; where columns are several axes of the author's, as its rows do."""
        if value.spec is None:
            return x
        rows = max(len(self.rows), 1)
        return constrained(x, value.spec if len(value.spec) <= rows + 1 else jax.P(*value.spec[:rows]))

    def _options(self, of: Product, a: jax.Array, b: jax.Array, operands: Mapping[Value, jax.Array]) -> Options:
        ragged = None if of.groups is None else Dimension.K if of.transpose_a else Dimension.M
        k_axes = len(self.rows) if self.rows and self._sums_rows(of) else 1
        like = None if of.like is None else self.arrays.get(of.like)
        spec = of.spec
        if spec is None and ragged is None and not of.transpose_a:
            spec = spec_of_sum(a, b, *operands.values(), transpose_b=of.transpose_b)
        return Options(
            of.transpose_a,
            of.transpose_b,
            implementation=self.implementation,
            ragged=ragged,
            k_axes=k_axes,
            out_sharding=sharding_over_explicit(spec) if like is None else explicit_sharding(like),
        )

    def _factors(self, of: Product) -> list[jax.Array]:
        factors = [self.known(x) for x in (of.a, of.b)]
        if not self._sums_rows(of):
            factors[1] = self._as_matrix(of.b, factors[1])
            if of.transpose_a:
                factors[0] = self._as_matrix(of.a, factors[0])
        return [x if is_of_8_bits(x.dtype) else x.astype(self.dtype) for x in factors]

    def _sums_rows(self, of: Product) -> bool:
        """True if it sums over the rows, with all their axes."""
        return of.transpose_a and not of.transpose_b and has_rows(of.a) and has_rows(of.b)

    def _as_matrix(self, value: Value, x: jax.Array) -> jax.Array:
        return x.reshape(value.shape) if self.rows and has_rows(value) else x

    def _with_rows(self, value: Value, x: jax.Array) -> jax.Array:
        return x.reshape(self._shape_of(value)) if self.rows and has_rows(value) else x

    def _shape_of(self, value: Value) -> tuple[Any, ...]:
        """Of its array, with all axes of the rows."""
        return (*self.rows, *value.shape[1:]) if self.rows and has_rows(value) else value.shape


def _passed(value: Value, inputs: Sequence[jax.Array | Pieces]) -> jax.Array | Pieces:
    arrays = [whole(x) for x in inputs]
    if isinstance(value, Map) and not varying_axes(*arrays) and not any(any(explicit_cuts(x)) for x in arrays):
        return in_pieces(value.jaxpr, [x.map(as_seen) if isinstance(x, Pieces) else as_seen(x) for x in inputs])
    return applied(value, arrays)


def _made(value: Value, values: dict[Value, jax.Array]) -> jax.Array:
    """The value from those that are known, in an epilogue."""
    for of in reachable([value], values):
        if of not in values:
            values[of] = applied(of, [values[x] for x in of.inputs])
    return values[value]
