"""Shardings that a function asks of its arrays, as equations of its jaxpr say them: XLA's constraints, and reshards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding

from coda_jax.epilogue.values import same_shape
from coda_jax.graph.on_mesh import reshaped_as
from coda_jax.jaxprs.bind import bind
from coda_jax.primitives.mesh_types import with_sharding

CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})  # on automatic mesh axes; on explicit ones


@dataclasses.dataclass(frozen=True)
class Constraint:
    """The sharding that one equation asks of an array.

    An array of as many elements in another shape is constrained in the shape of the equation's: its columns may be
    several axes there, and its rows too.

    Attributes:
      shape: of the array in the equation; None for all arrays that begin with the axes that are sharded.
      primitive, params: of the equation.
    """

    shape: tuple[Any, ...] | None
    primitive: core.Primitive
    params: Mapping[str, Any]

    def __call__(self, x: jax.Array) -> jax.Array:
        """x, constrained."""
        # Outside of jit JAX would ask that x has a sharding of the same kind already.
        constrained: jax.Array = jax.jit(self.traced, inline=True)(x)
        return constrained

    def traced(self, x: jax.Array) -> jax.Array:
        """x, constrained, in a function that is traced to a jaxpr, where it is one equation."""
        y = x if self.shape is None else reshaped_as(x, self.shape)
        if self.primitive.name == "reshard":
            y = with_sharding(y, self._sharding)
        else:
            (y,) = bind(self.primitive, [y], dict(self.params))
        return reshaped_as(y, x.shape)

    def asks_as(self, other: Constraint) -> bool:
        """True for one that asks the same of an array of the same shape."""
        if self == other:
            return True
        shardings, shape = (self._sharding, other._sharding), self.shape or ()
        if not all(isinstance(x, NamedSharding) for x in shardings) or self.primitive != other.primitive:
            return False
        (mesh, own), (other_mesh, others) = ((x.mesh, _entries(x, len(shape))) for x in shardings)
        return self.shape == other.shape and mesh == other_mesh and own == others

    def of_rows(self, sizes: Sequence[Any]) -> Constraint | None:
        """The sharding of the axes of rows, of these sizes, where columns are sharded too; None where they are not."""
        sharding, shape, count = self._sharding, self.shape or (), len(sizes)
        if not isinstance(sharding, NamedSharding) or not same_shape(shape[:count], sizes):
            return None
        entries = _entries(sharding, len(shape))
        if all(entry in ((), jax.P.UNCONSTRAINED) for entry in entries[count:]):
            return None
        return self._of(jax.P(*entries[:count]))

    def of_axes(self, axes: Sequence[int | None]) -> Constraint | None:
        """The same for an array that has these axes of the array's, and others, None, that it leaves as they are."""
        sharding = self._sharding
        if not isinstance(sharding, NamedSharding) or self.primitive.name == "reshard":
            return None
        entries = _entries(sharding, len(self.shape or ()))
        own = [jax.P.UNCONSTRAINED if axis is None else entries[axis] for axis in axes]
        return self._of(jax.P(*own))

    def without_axis(self, axis: int) -> Constraint | None:
        """The same for an array without one of its axes; None where that one is sharded."""
        sharding, rank = self._sharding, len(self.shape or ())
        if not isinstance(sharding, NamedSharding) or _entries(sharding, rank)[axis] not in ((), jax.P.UNCONSTRAINED):
            return None
        return self.of_axes([i for i in range(rank) if i != axis])

    def of_halves(self) -> Constraint | None:
        """The same for an array (..., 2, F) with two of the array's (..., F); None where the sharding has no spec."""
        shape = self.shape or ()
        if not isinstance(self._sharding, NamedSharding):
            return None
        *rows, columns = _entries(self._sharding, len(shape))
        return dataclasses.replace(self._of(jax.P(*rows, None, columns)), shape=(*shape[:-1], 2, shape[-1]))

    def mesh_axes(self, count: int | None = None) -> set[str]:
        """The mesh axes that shard the array's axes, or the first of them; none where the sharding has no spec."""
        sharding = self._sharding
        if not isinstance(sharding, NamedSharding):
            return set()
        entries = _entries(sharding, len(self.shape or ()))[:count]
        return {axis for entry in entries if entry is not jax.P.UNCONSTRAINED for axis in entry}

    def _of(self, spec: jax.P) -> Constraint:
        """The same that asks for this spec, of all arrays that begin with its axes."""
        params = {**self.params, _key(self.primitive): NamedSharding(self._sharding.mesh, spec)}
        if "unconstrained_dims" in params:
            free = (axis for axis, entry in enumerate(spec) if entry is jax.P.UNCONSTRAINED)
            params["unconstrained_dims"] = frozenset(free)
        return Constraint(None, self.primitive, params)

    @property
    def _sharding(self) -> Any:
        return self.params[_key(self.primitive)]


def constraint_of(equation: core.JaxprEqn) -> Constraint:
    """The constraint that an equation of `CONSTRAINTS` asks."""
    x: Any = equation.invars[0]
    return Constraint(tuple(x.aval.shape), equation.primitive, equation.params)


def is_constraint(equation: core.JaxprEqn) -> bool:
    """True for an equation that asks for a sharding alone: for no layout, and for no array in the host's memory."""
    if equation.primitive.name not in CONSTRAINTS or equation.params.get("layout") is not None:
        return False
    return equation.params[_key(equation.primitive)].memory_kind in (None, "device")


def _key(primitive: core.Primitive) -> str:
    """The name of the parameter that is the sharding."""
    return "dst_sharding" if primitive.name == "reshard" else "sharding"


def _entries(sharding: NamedSharding, rank: int) -> list[Any]:
    """The mesh axes that shard each axis of an array, or UNCONSTRAINED."""
    entries = (*sharding.spec, *(None,) * rank)[:rank]
    return [() if x is None else x if isinstance(x, tuple) or x is jax.P.UNCONSTRAINED else (x,) for x in entries]
