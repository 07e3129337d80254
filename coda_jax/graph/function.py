"""A graph as a function of arrays, with its derivative: what runs forward, what is kept, what runs backward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import TABLE, listed
from coda_jax.epilogue.values import same_shape
from coda_jax.graph.again import made_again
from coda_jax.graph.as_stored import seen_as_stored
from coda_jax.graph.derivative import cotangents_of
from coda_jax.graph.describe import described, maps_that_are_not_local
from coda_jax.graph.kept import Answers, kept_values
from coda_jax.graph.on_mesh import placed_as, reshaped_as
from coda_jax.graph.plan import Plan, has_rows
from coda_jax.graph.run import run
from coda_jax.graph.saved import named
from coda_jax.graph.values import Leaf, Map, Product, Value, reachable
from coda_jax.graph.zero_rows import Groups, unread_rows
from coda_jax.primitives.fallbacks import with_fallback_note
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.plan_text import with_plan_text
from coda_jax.primitives.reverse_mode import Backward, OfBatch, Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Outputs as values of leaves.

    Attributes:
      name: in messages and in the kernels' names.
      leaves, outputs: its arguments and results. An argument's array may have several axes for each of its leaf's.
      dtype: of the products' factors, and of tiles between products.
      out_dtypes: of the outputs.
      rows: the axes that arrays have in the place of the rows; none where these are one axis.
      implementation: as in `gemm`.
      of_batch: the same graph of a batch of this size of all arrays that have the rows; None where that is not known.
      keeps_joins: whether maps of several tiles are kept for the backward pass, and not computed again.
      answers: of policies of `jax.checkpoint`: what they do not keep the backward pass computes again. None without
        policies.
      is_step: whether it is in the body of a loop: its leaves may be slices of arrays, which no array holds yet.
    """

    name: str
    leaves: Sequence[Leaf]
    outputs: Sequence[Value]
    dtype: Any
    out_dtypes: Sequence[Any]
    rows: Sequence[Any] = ()
    implementation: str = "auto"
    of_batch: Callable[[Any], Graph] | None = None
    keeps_joins: bool = True
    answers: Answers | None = None
    is_step: bool = False

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """The outputs' arrays, differentiable."""
        arguments = vary(varying_axes(*arrays), *arrays)
        rule = Rule(self.name, functools.partial(_run, self), self.derivative().forward, _Backward(self))
        outputs: list[jax.Array] = rule.function(arguments)(rule.zero(arguments), *arguments)
        return outputs

    def pass_options(self, plan: Plan, which: str = "forward") -> dict[str, Any]:
        """The options of `run` for the plan of this pass."""
        name = self.name if which == "forward" else f"{self.name}_{which}"
        text, not_local = self._described(plan, name)

        def add_plan_text(x: jax.Array) -> jax.Array:
            x = with_plan_text(x, f"block '{self.name}', {which}\n{text}")
            for name, reason in not_local:
                message = f"map '{name}' is a pass of XLA's: {reason}"
                x = with_fallback_note(x, f"block '{self.name}'", message, "coda.opaque says that this is meant")
            return x

        options = {"name": name, "dtype": self.dtype, "rows": self.rows, "implementation": self.implementation}
        return options | {"add_plan_text": add_plan_text}

    def _described(self, plan: Plan, name: str) -> tuple[str, list[tuple[str, str]]]:
        """The plan in words, and the author's maps that no epilogue can make."""
        if plan not in self._descriptions:
            self._descriptions[plan] = described(plan, name), list(dict.fromkeys(maps_that_are_not_local(plan)))
        return self._descriptions[plan]

    def known(self, arrays: Sequence[jax.Array]) -> dict[Value, jax.Array]:
        """The leaves, with the axes that values have."""

        def as_leaf(leaf: Leaf, x: jax.Array) -> jax.Array:
            rows = self.rows if leaf.has_rows else leaf.shape[:1]
            return x if leaf.has_halves else reshaped_as(x, (*rows, *leaf.shape[1:]))

        return {leaf: as_leaf(leaf, x) for leaf, x in zip(self.leaves, arrays, strict=True)}

    def behind_a_barrier(self, backward: Plan, arrays: Mapping[Value, Any]) -> dict[Value, Any]:
        """The arrays of leaves and of kept values as a backward pass reads them.

        Without a barrier XLA would keep what the forward pass made of these of which this pass makes the same, or what
        it cast them to. The barrier is in front of the axes that values have: XLA copies an array that has other axes
        before it than behind it. A loop's step has none: its forward pass is another loop's or its own, computed again,
        and XLA would store each slice of stacked weights in their own dtype, beside what it casts the slice to.
        """
        if self.is_step:
            return dict(arrays)
        made_again = backward.read_by_passes | (self.weights & {x for of in backward.steps for x in of.product.inputs})
        again = {x: array for x, array in arrays.items() if x in made_again}
        return {**arrays, **dict(zip(again, lax.optimization_barrier([*again.values()]), strict=True))}

    @functools.cached_property
    def _descriptions(self) -> dict[Plan, tuple[str, list[tuple[str, str]]]]:
        return {}

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan that makes the outputs."""
        return Plan(self.outputs, as_stored=seen_as_stored(self.outputs), unread_rows=unread_rows(self.outputs))

    @functools.cached_property
    def weights(self) -> frozenset[Value]:
        """The leaves by which something is multiplied that are in another dtype than products read."""
        factors = {b for x in reachable(self.outputs) if isinstance(x, Product) for _, b in x.pairs}
        return frozenset(x for x in factors if isinstance(x, Leaf) and x.dtype != self.dtype)

    @functools.cached_property
    def _derivatives(self) -> dict[frozenset[Leaf], Derivative]:
        return {}

    def batched(self, size: Any) -> Graph | None:
        """The same graph of a batch that shares all that has no rows; None of one with an author's shardings."""
        values = reachable(self.outputs)
        sorts_rows = any(isinstance(x, Product) and x.groups is not None for x in values)  # of a batch they are not
        if self.of_batch is None or sorts_rows or any(x.spec is not None for x in values):
            return None
        if size not in self._batches:
            self._batches[size] = self.of_batch(size)
        return self._batches[size]

    def keeping_least(self) -> Graph:
        """The graph with `Answers.is_least`; itself without policies."""
        if self.answers is None:
            return self
        return dataclasses.replace(self, answers=dataclasses.replace(self.answers, is_least=True))

    @functools.cached_property
    def _batches(self) -> dict[Any, Graph]:
        return {}

    def derivative(self, is_differentiated: Sequence[bool] | None = None) -> Derivative:
        """The graph where these leaves are differentiated; None for all."""
        flags = [True] * len(self.leaves) if is_differentiated is None else is_differentiated
        leaves = frozenset(x for x in itertools.compress(self.leaves, flags) if x.has_cotangent)
        if leaves not in self._derivatives:
            self._derivatives[leaves] = Derivative(self, leaves)
        return self._derivatives[leaves]


def _run(graph: Graph, _: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    options = graph.pass_options(graph.plan)  # JAX differentiates `Derivative.forward` in the place of this
    return run(graph.plan, graph.known(arrays), out_dtypes=graph.out_dtypes, has_derivative=False, **options)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """A graph that is differentiated: what it keeps, and its backward passes.

    Attributes:
      graph: the graph.
      leaves: those that are differentiated.
    """

    graph: Graph
    leaves: frozenset[Leaf]

    def forward(self, *arrays: jax.Array) -> tuple[list[jax.Array], Any]:
        """The outputs, and what a backward pass takes."""
        graph, known = self.graph, self.graph.known(arrays)
        dtypes = [*graph.out_dtypes, *(x.stored_as(graph.dtype) for x in self.kept)]
        plan, count = self.forward_plan, len(graph.outputs)
        given = self._names
        if graph.answers is not None:  # policies that it knows keep what has their names, and nothing beside it
            given = {x: graph.answers.name({}, name) for x, name in given.items()}
        made = run(plan, known, out_dtypes=dtypes, names=given, **graph.pass_options(plan))
        made = self._named(made)
        if graph.answers is not None:
            names = [self._policies_name(i) for i in range(len(made))]
            made = made_again(self, made, names, arrays)
        return made[:count], (arrays, made[count:], self)

    def _named(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs and the kept values, with the names under which policies keep them; of equal arrays one."""
        known: dict[Hashable, Any] = {}
        results = []
        for i, (value, array) in enumerate(zip(self.forward_plan.wanted, arrays, strict=True)):
            key, name = (value, *(x.dtype for x in jax.tree.leaves(array))), self._policies_name(i)
            if name is not None:
                if key not in known:
                    known[key] = jax.tree.map(functools.partial(named, name=name), array)
                array = known[key]
            results.append(array)
        return results

    def _policies_name(self, i: int) -> str | None:
        """The name under which policies keep one of the outputs and the kept values; None where they do not."""
        answers = self.graph.answers
        is_named = answers is not None and (answers.names_outputs or i >= len(self.graph.outputs))
        return self._choice[1].get(self.forward_plan.wanted[i]) if is_named else None

    @functools.cached_property
    def forward_plan(self) -> Plan:
        """The plan that makes the outputs and the kept values."""
        return Plan([*self.graph.outputs, *self.kept], as_stored=self.as_stored, unread_rows=self.unread_rows)

    @functools.cached_property
    def as_stored(self) -> frozenset[Value]:
        """The tiles of both passes that each reader sees as they are stored."""
        return seen_as_stored([*self.graph.outputs, *self._leaf_cotangents])

    @functools.cached_property
    def unread_rows(self) -> Mapping[Value, Groups]:
        """`unread_rows` of both passes."""
        return unread_rows([*self.graph.outputs, *self._leaf_cotangents])

    @functools.cached_property
    def _leaf_cotangents(self) -> list[Value]:
        return [x for x in self._derived(frozenset())[1] if x is not None]

    @functools.cached_property
    def kept(self) -> list[Value]:
        """The values of the forward pass that the backward pass reads, beside the leaves."""
        return self._choice[0]

    @property
    def named(self) -> list[Value]:
        """The kept values that policies of `jax.checkpoint` keep."""
        return [x for x in self.kept if x in self._choice[1]]

    @functools.cached_property
    def _choice(self) -> tuple[list[Value], dict[Value, str]]:
        """The kept values; the names under which policies of `jax.checkpoint` keep these and outputs."""
        graph, joins = self.graph, not self.graph.keeps_joins
        kept = kept_values(graph.outputs, self._leaf_cotangents, self.as_stored, joins=joins)
        return (kept, {}) if graph.answers is None else graph.answers.choice(kept, graph.outputs, graph.dtype)

    @functools.cached_property
    def _names(self) -> dict[Value, str]:
        """The names of outputs and kept values: tiles from which a named value is made again have its name.

        Vectors that a product's epilogue stores have the name of a tile beside them: the product is then not run again.
        """
        kept, names = frozenset(self.kept), {x: x.name for x in self.graph.outputs if x.name is not None}
        for value in reachable([*self.graph.outputs, *self.kept]):
            if value.name is not None:
                names.setdefault(value, value.name)
                open_ = [value]
                while open_:
                    x = open_.pop()
                    if x in kept:
                        names.setdefault(x, value.name)
                    elif isinstance(x, Map):
                        open_ += [of for of in x.inputs if of.is_tile]
        for step in self.forward_plan.steps:
            tile_names = [names[x] for x in step.stores if x.is_tile and x in names]
            for x in step.stores if tile_names else []:
                if not x.is_tile:
                    names.setdefault(x, tile_names[0])
        return names

    @functools.cached_property
    def _passes(self) -> dict[frozenset[int], BackwardPass]:
        return {}

    def backward(self, absent: frozenset[int] = frozenset()) -> BackwardPass:
        """The backward pass where the cotangents of these outputs are zeros."""
        if absent not in self._passes:
            cotangents, leaf_cotangents = self._derived(absent)
            wanted = [x for x in leaf_cotangents if x is not None]
            as_stored = self.as_stored if not absent else self.as_stored | seen_as_stored(wanted)
            unread = self.unread_rows if not absent else unread_rows([*self.graph.outputs, *wanted])
            plan = Plan(wanted, self.kept, as_stored=as_stored, unread_rows=unread)
            self._passes[absent] = BackwardPass(cotangents, leaf_cotangents, plan)
        return self._passes[absent]

    @functools.cached_property
    def _derivations(self) -> dict[frozenset[int], tuple[list[Leaf | None], list[Value | None]]]:
        return {}

    def _derived(self, absent: frozenset[int]) -> tuple[list[Leaf | None], list[Value | None]]:
        """The outputs' cotangents and the leaves', derived once."""
        if absent not in self._derivations:
            graph = self.graph
            each = enumerate(zip(graph.outputs, graph.out_dtypes, strict=True))
            given = [
                None if i in absent else Leaf(x.shape, dtype, has_rows=has_rows(x), has_one_row=x.has_one_row)
                for i, (x, dtype) in each
            ]
            wanted = [x for x in graph.leaves if x in self.leaves]
            found = dict(zip(wanted, cotangents_of(graph.outputs, given, wanted), strict=True))
            self._derivations[absent] = given, [found.get(x) for x in graph.leaves]
        return self._derivations[absent]


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardPass:
    """The cotangents of a graph's leaves, as values of the leaves, of what is kept and of the outputs' cotangents.

    Attributes:
      cotangents: of the outputs; None where they are zeros.
      leaf_cotangents: None where there is none.
      plan: makes the others.
    """

    cotangents: list[Leaf | None]
    leaf_cotangents: list[Value | None]
    plan: Plan


@dataclasses.dataclass(frozen=True)
class _Backward(Backward):
    graph: Graph

    def check(self, arguments: Sequence[Any], is_differentiated: Sequence[bool]) -> None:
        """Warns where leaves are differentiated and an fp8 history is not."""
        leaves = self.graph.leaves
        differentiated = {x for x in itertools.compress(leaves, is_differentiated) if x.has_cotangent}
        if differentiated and any(x.is_history and x not in differentiated for x in leaves):
            warnings.warn(
                f"block '{self.graph.name}' is differentiated, but not by its fp8 histories: their scales will not "
                "follow the tensors. Of flax_layers' models nnx.DiffState(0, flax_layers.fp8.DIFFERENTIATED) is all of "
                "them",
                stacklevel=2,
            )

    def forward_of(self, forward: Callable[..., Any], is_differentiated: Sequence[bool]) -> Callable[..., Any]:
        return self.graph.derivative(is_differentiated).forward

    def __call__(self, kept: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        (arrays, values, derivative), graph = kept, self.graph
        backward = derivative.backward(frozenset(i for i, x in enumerate(cotangents) if x is None))
        read: dict[Value, Any] = dict(zip([*graph.leaves, *derivative.kept], [*arrays, *values], strict=True))
        read = graph.behind_a_barrier(backward.plan, read)
        arrays = [read[leaf] for leaf in graph.leaves]
        known = read | graph.known(arrays)
        known |= {leaf: x for leaf, x in zip(backward.cotangents, cotangents, strict=True) if leaf is not None}
        each = list(zip(backward.leaf_cotangents, arrays, strict=True))
        dtypes = [x.dtype for of, x in each if of is not None]
        options = graph.pass_options(backward.plan, "backward")
        made = iter(run(backward.plan, known, out_dtypes=dtypes, **options))
        return tuple(None if of is None else placed_as(reshaped_as(next(made), x.shape), x) for of, x in each)

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        """The pass of more rows, where the batch shares all that has no rows."""
        whole = self.graph.batched(size)
        # JAX gives one cotangent for all of an output that the batch shares.
        given = jax.tree.map(lambda x, has_batch: x if has_batch else _first_of(size, x), cotangents, batched[1])
        (arrays, values, derivative), (has_batch, value_has_batch, _) = kept, batched[0]
        if whole is not None:
            whole_derivative = whole.derivative([x in derivative.leaves for x in self.graph.leaves])
            arrays = _with_batch(size, whole.leaves, arrays, has_batch)
            values = _with_batch(size, whole_derivative.kept, values, value_has_batch)
            if arrays is not None and values is not None:
                return OfBatch(
                    _Backward(whole), (arrays, values, whole_derivative), given, list(map(has_rows, whole.leaves))
                )
        if all(jax.tree.leaves(batched[1])):
            return None
        axes = jax.tree.map(lambda has_batch: 0 if has_batch else None, batched[0])

        def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
            found = jax.vmap(self, in_axes=(axes, 0), axis_size=size)(kept, cotangents)
            each = zip(found, has_batch, strict=True)
            return tuple(x if x is None or has_batch else jnp.sum(x, axis=0) for x, has_batch in each)

        return OfBatch(backward, kept, given, list(has_batch))


def _first_of(size: Any, x: jax.Array) -> jax.Array:
    """x as the first of a batch whose others are zeros."""
    return jnp.concatenate([x[None], jnp.zeros_like(x, shape=(size - 1, *x.shape))])


def _with_batch(
    size: Any, values: Sequence[Value], arrays: Sequence[Any], has_batch: Sequence[Any]
) -> list[Any] | None:
    """The arrays of a batch, those of rows with its axis; None where one that has no rows differs in it."""
    made = []
    for value, x, flags in zip(values, arrays, has_batch, strict=True):
        is_batched = any(jax.tree.leaves(flags))
        if is_batched and not has_rows(value):
            return None
        made.append(jnp.broadcast_to(x, (size, *x.shape)) if has_rows(value) and not is_batched else x)
    return made


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
      out_dtypes: of the outputs; default `Value.stored_as`.
      rows: arrays that begin with these axes have them in the place of the rows of their values.

    Raises:
      TypeError: an array of a dtype that a map does not see.
    """
    leaves = [_leaf(x, tuple(rows)) for x in arrays]
    outputs = jax.tree.leaves(f(*leaves))
    given = [x.stored_as(dtype) for x in outputs] if out_dtypes is None else list(out_dtypes)
    return Graph(name, leaves, outputs, np.dtype(dtype), given, rows, implementation)


def _leaf(x: Any, rows: tuple[Any, ...]) -> Leaf:
    if not isinstance(x.dtype, np.dtype) or x.dtype.name not in TABLE:
        raise TypeError(f"graph: an array of shape {x.shape} has dtype {x.dtype}; it must be {listed(list(TABLE))}")
    has_rows_in_front = bool(rows) and len(x.shape) > len(rows) and same_shape(x.shape[: len(rows)], rows)
    return Leaf(
        (math.prod(rows), *x.shape[len(rows) :]) if has_rows_in_front else x.shape, x.dtype, has_rows=has_rows_in_front
    )
