"""A graph as a function of arrays, with its derivative: what runs forward, what is kept, what runs backward."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from coda_jax.epilogue.values import same_shape
from coda_jax.graph.derivative import cotangents_of
from coda_jax.graph.plan import Plan, has_rows
from coda_jax.graph.run import run
from coda_jax.graph.values import Leaf, Map, Turned, Value, reachable
from coda_jax.primitives.reverse_mode import Backward, OfBatch, differentiable


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Outputs as values of leaves.

    Attributes:
      name: in messages and in the kernels' names.
      leaves, outputs: its arguments and results.
      dtype: of the products' factors, and of tiles between products.
      out_dtypes: of the outputs.
      rows: the axes that arrays have in the place of the rows; none where these are one axis.
      implementation: as in `gemm`.
    """

    name: str
    leaves: Sequence[Leaf]
    outputs: Sequence[Value]
    dtype: Any
    out_dtypes: Sequence[Any]
    rows: Sequence[Any] = ()
    implementation: str = "auto"

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """The outputs' arrays, differentiable."""
        outputs: list[jax.Array] = differentiable(self.name, self._run, self._forward, _Backward(self))(*arrays)
        return outputs

    def _run(self, *arrays: jax.Array) -> list[jax.Array]:
        return self._made(self._plan, self._of_leaves(arrays), dict(zip(self.outputs, self.out_dtypes, strict=True)))

    def _forward(self, *arrays: jax.Array) -> tuple[list[jax.Array], Any]:
        dtypes = dict(zip(self.outputs, self.out_dtypes, strict=True))
        made = self._made(self._forward_plan, self._of_leaves(arrays), dtypes)
        return made[: len(self.outputs)], (arrays, made[len(self.outputs) :])

    def _of_leaves(self, arrays: Sequence[jax.Array]) -> dict[Value, jax.Array]:
        return dict(zip(self.leaves, arrays, strict=True))

    def _made(self, plan: Plan, arrays: dict[Value, jax.Array], dtypes: dict[Value, Any]) -> list[jax.Array]:
        options: dict[str, Any] = {"name": self.name, "rows": self.rows, "implementation": self.implementation}
        return run(plan, arrays, dtype=self.dtype, dtypes=dtypes, **options)

    @functools.cached_property
    def _plan(self) -> Plan:
        return Plan(self.outputs)

    @functools.cached_property
    def _forward_plan(self) -> Plan:
        return Plan([*self.outputs, *self.kept])

    @functools.cached_property
    def kept(self) -> list[Value]:
        """What the backward pass reads of the forward pass, beside the leaves."""
        return kept_values(self.outputs, self.backward(frozenset()).plan.wanted)

    @functools.lru_cache  # noqa: B019  the graph lives as long as what was traced
    def backward(self, absent: frozenset[int]) -> BackwardPass:
        """The backward pass where the cotangents of these outputs are zeros."""
        return BackwardPass.of(self, absent)


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardPass:
    """The cotangents of a graph's leaves, as values of the leaves, of what is kept and of the outputs' cotangents.

    Attributes:
      cotangents: of the outputs; None where they are zeros.
      of_leaves: None where there is none.
      plan: makes the others, from nothing but leaves.
    """

    cotangents: list[Leaf | None]
    of_leaves: list[Value | None]
    plan: Plan

    @classmethod
    def of(cls, graph: Graph, absent: frozenset[int]) -> BackwardPass:
        each = enumerate(zip(graph.outputs, graph.out_dtypes, strict=True))
        cotangents = [None if i in absent else Leaf(x.shape, dtype, has_rows=has_rows(x)) for i, (x, dtype) in each]
        of_leaves = cotangents_of(graph.outputs, cotangents, list(graph.leaves))
        return cls(cotangents, of_leaves, Plan([x for x in of_leaves if x is not None]))

    def plan_from(self, kept: Sequence[Value]) -> Plan:
        return Plan(self.plan.wanted, kept)


@dataclasses.dataclass(frozen=True)
class _Backward(Backward):
    graph: Graph

    def __call__(self, kept: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        (arrays, values), graph = kept, self.graph
        backward = graph.backward(frozenset(i for i, x in enumerate(cotangents) if x is None))
        plan = backward.plan_from(graph.kept)
        known = dict(zip(graph.kept, values, strict=True)) | graph._of_leaves(arrays)
        again = [x for x in reachable(plan.by_xla, graph.kept) if isinstance(x, Leaf) and x in graph.leaves]
        # Without a barrier XLA would keep what the forward pass made of these leaves.
        known |= dict(zip(again, lax.optimization_barrier([known[x] for x in again]), strict=True))
        given = zip(backward.cotangents, cotangents, strict=True)
        known |= {leaf: x for leaf, x in given if leaf is not None}
        dtypes = {x: leaf.dtype for x, leaf in zip(backward.of_leaves, graph.leaves, strict=True) if x is not None}
        made = iter(graph._made(plan, known, dtypes))
        return tuple(None if x is None else next(made) for x in backward.of_leaves)

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        return None


def kept_values(outputs: Sequence[Value], wanted: Sequence[Value]) -> list[Value]:
    """What is kept of a forward pass for what is wanted of the backward pass.

    Kept is what the backward pass reads, but for what is as short to make again: maps of leaves alone that are tiles or
    read none, and maps of one tile that lies in memory. Of these the vectors that they read are kept.
    """
    forward = set(reachable(outputs))
    found: dict[Value, None] = {}
    open_, seen = list(wanted), set(wanted)
    while open_:
        value = open_.pop()
        if value in forward or (isinstance(value, Turned) and value.inputs[0] in forward):  # a copy made beside it
            if not isinstance(value, Leaf):
                found[value] = None
            continue
        new = set(value.inputs) - seen
        seen |= new
        open_ += new
    kept = set(found)

    def sources(value: Value) -> set[Value | None]:
        """The tiles in memory that a tile is or is made again of; None beside them if it cannot be made again."""
        if isinstance(value, Leaf) or value in kept:
            return {value}
        if not isinstance(value, Map):
            return {None}
        return set().union(*(sources(x) for x in value.inputs if x.is_tile))

    def keep_vectors(value: Value) -> None:
        for x in value.inputs:
            if isinstance(x, Leaf) or x in kept or _is_of_vectors(x):
                continue
            if x.is_tile:
                keep_vectors(x)
            else:
                kept.add(x)

    for value in sorted(found, key=lambda value: value.number):
        if isinstance(value, Turned) and _is_of_leaves(value):
            kept.remove(value)
        if not isinstance(value, Map):
            continue
        if not value.is_tile:
            if _is_of_vectors(value):
                kept.remove(value)
            continue
        kept.remove(value)
        of = sources(value)
        if _is_of_leaves(value) or (len(of) == 1 and None not in of):
            keep_vectors(value)
        else:
            kept.add(value)
    return sorted(kept, key=lambda value: value.number)


def _is_of_leaves(value: Value) -> bool:
    return all(isinstance(x, Leaf | Map | Turned) for x in reachable([value]))


def _is_of_vectors(value: Value) -> bool:
    """True for what is computed from vectors and scalars among the leaves alone."""
    return all(isinstance(x, Leaf | Map) and not x.is_tile for x in reachable([value]))


def graph_of(
    f: Callable[..., Any],
    arrays: Sequence[Any],
    *,
    dtype: Any,
    out_dtypes: Sequence[Any] | None = None,
    name: str = "graph",
    rows: Sequence[Any] = (),
    implementation: str = "auto",
) -> Graph:
    """The graph of f, a function of values, at these arrays or types; the rest as `Graph` has it.

    Args:
      rows: arrays that begin with these axes have them in the place of the rows of their values.
    """
    leaves = [_leaf(x, tuple(rows)) for x in arrays]
    outputs = jax.tree.leaves(f(*leaves))
    given = [np.dtype(dtype)] * len(outputs) if out_dtypes is None else list(out_dtypes)
    return Graph(name, leaves, outputs, np.dtype(dtype), given, rows, implementation)


def _leaf(x: Any, rows: tuple[Any, ...]) -> Leaf:
    has_rows = bool(rows) and len(x.shape) > len(rows) and same_shape(x.shape[: len(rows)], rows)
    return Leaf((math.prod(rows), *x.shape[len(rows) :]) if has_rows else x.shape, x.dtype, has_rows=has_rows)
