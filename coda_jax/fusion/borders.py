"""Whether a fused function may stay a call in another one: that no pass and no array in memory is owed to its borders.

A call is a graph of its own. What stands in front of its first product, behind the first product of its backward pass,
or behind the call could be in an epilogue of the function around, but for the row sums that a body is given
(`fusion.row_sums`). So a call costs nothing if an epilogue stores its results, which the function around might make
again where it reads them; if nothing but other calls, products and what waits for sums of its rows reads these; and if
no pass reads an argument or a result's cotangent that waits for no product of the call:

    x -> norm(x) W     reads x with the row sums of x: where they are known, the epilogue that made x has ended
    x -> gelu(x) W     would be made in the epilogue that makes x: it costs a pass
    z -> z + b         its backward pass sums dz over the rows, which the epilogue that makes dz could do

But cotangents that a layer is given are what an equal layer gives: if passes make these, no epilogue could read them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jax.extend import core

from coda_jax.fusion.dots import PRODUCTS
from coda_jax.fusion.lift import Lifted
from coda_jax.fusion.row_sums import KNOWN, sums_last_axis
from coda_jax.fusion.straight import is_call
from coda_jax.graph.constraint import CONSTRAINTS
from coda_jax.graph.plan import Plan
from coda_jax.graph.row_axes import REDUCTIONS
from coda_jax.graph.values import Map, Value, reachable
from coda_jax.jaxprs.def_use import DefUse, variables
from coda_jax.jaxprs.walk import inner_jaxprs

_VIEWS = CONSTRAINTS | {"convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy", "name"}
_PARTS = frozenset({"slice", "gather", "dynamic_slice"})  # no epilogue stores some rows alone


def borders_cost_nothing(lifted: Lifted) -> bool:
    """True for a graph both of whose passes begin with products and with what is local to their epilogues."""
    graph, derivative = lifted.graph, lifted.graph.derivative()
    forward = derivative.forward_plan
    if _reads_first(forward, lifted.streams) or any(x in forward.by_xla for x in graph.outputs if x.is_tile):
        return False
    backward = derivative.backward()
    by_leaf = zip(graph.leaves, backward.leaf_cotangents, strict=True)
    given = {x for leaf, x in by_leaf if leaf in lifted.streams and x is not None}
    if given.issubset(backward.plan.by_xla):  # so are the cotangents that equal layers are given
        return True
    return not _reads_first(backward.plan, {x for x in backward.cotangents if x is not None and x.is_tile})


def read_otherwise(jaxpr: core.Jaxpr) -> set[int]:
    """The ids of the calls of fused functions in a straight jaxpr behind which an epilogue would do more."""
    uses = DefUse(jaxpr)
    calls = ((i, e) for i, e in enumerate(uses.equations) if is_call(e))
    return {id(e) for i, e in calls if any(x.aval.ndim > 1 and _is_read_otherwise(x, i, uses) for x in e.outvars)}


def _is_read_otherwise(y: Any, number: int, uses: DefUse) -> bool:
    """True for a result that is read elementwise, by what waits for no sums of its rows and no product of it."""
    views, alone = {y}, {y}  # of y; all that is made of its elements alone
    behind = set[Any]()  # what waits for sums, products or calls of y
    for equation in uses.equations[number + 1 :]:
        inputs, name = variables(equation.invars), equation.primitive.name
        if not behind.isdisjoint(inputs):
            behind.update(equation.outvars)
        elif not alone.isdisjoint(inputs):
            if name in PRODUCTS | _PARTS or inner_jaxprs(equation):
                if not views.issuperset(inputs) and not alone.isdisjoint(set(inputs) - views):
                    return True
                behind.update(equation.outvars)
            elif sums_last_axis(equation):
                behind.update(equation.outvars)
            elif name in REDUCTIONS or not alone.issuperset(inputs):
                return True
            else:
                alone.update(equation.outvars)
                if name in _VIEWS and views.issuperset(inputs):
                    views.update(equation.outvars)
    return not (alone - views).isdisjoint(uses.results)


def _reads_first(plan: Plan, borders: Collection[Value]) -> bool:
    return any(
        x in borders and not _is_read_with_its_sums(value, x)
        for value in plan.by_xla
        if plan.place[value].step < 0
        for x in plan.read_by_pass(value)
    )


def _is_read_with_its_sums(value: Value, x: Value) -> bool:
    sums = (of for of in reachable([value]) if isinstance(of, Map) and of.origin.name == KNOWN)
    return any(x in of.inputs for of in sums)
