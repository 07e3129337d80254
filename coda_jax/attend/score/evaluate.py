"""A score function by XLA: the reference for its CUDA, and what attention on other platforms computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.attend.score.program import Score
from coda_jax.epilogue import elementwise
from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.program import Node, needed_nodes
from coda_jax.epilogue.values import same_size


def evaluate(
    score: Score, roots: Sequence[int], s: jax.Array, row: jax.Array, column: jax.Array, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """The values of these nodes, which broadcast to s.

    Args:
      s: scaled scores of any shape, float32, or float64: then all that is float32 in the function is float64.
      row, column: positions of queries and keys, int32, that broadcast to s.
      arrays: what the function reads, broadcast to s alike; tables (.., 1, entries), as s but for the last two axes.
    """
    made: dict[int, jax.Array] = {}
    leaves = {"score": s, "row": row, "column": column}
    for number in sorted(needed_nodes(score.nodes, roots)):
        made[number] = _node(score.nodes[number], made, leaves, arrays, s.dtype)
    return [made[number] for number in roots]


def _node(
    node: Node, made: Mapping[int, jax.Array], leaves: Mapping[str, jax.Array], arrays: Sequence[jax.Array], wide: Any
) -> jax.Array:
    def working(dtype: str) -> Any:
        return wide if dtype == FLOAT32 else jnp.dtype(dtype)

    match node.op:
        case "score" | "row" | "column":
            return leaves[node.op]
        case "operand":
            return arrays[node["index"]].astype(working(node.dtype))
        case "literal":
            return jnp.asarray(node["value"], working(node.dtype))
    attributes = dict(node.attributes)
    if node.op == "entry":
        table = arrays[node["index"]].astype(working(node.dtype))
        return _entry(table, made[node.inputs[0]], attributes.get("fill"))
    if node.op == "convert_element_type":
        attributes["dtype"] = working(attributes["dtype"]).name
    inputs = jnp.broadcast_arrays(*(made[i] for i in node.inputs))
    return elementwise.apply(node.op, list(inputs), attributes)


def _entry(table: jax.Array, index: jax.Array, fill: Any) -> jax.Array:
    """The entries of a table (.., 1, entries) at an index that broadcasts to scores."""
    within = jnp.clip(index, 0, table.shape[-1] - 1)
    within = within.reshape((1,) * (table.ndim - within.ndim) + within.shape)
    if all(same_size(size, 1) for size in within.shape[:-2]):
        found = jnp.take(table[..., 0, :], within.reshape(within.shape[-2:]), axis=-1, mode="clip")
    else:
        rows, columns = within.shape[-2:]
        flat = within.reshape(*within.shape[:-2], 1, rows * columns)
        shape = (*jnp.broadcast_shapes(table.shape[:-2], flat.shape[:-2]), 1)
        table, flat = (jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (table, flat))
        found = jnp.take_along_axis(table, flat, axis=-1, mode="clip").reshape(*shape[:-1], rows, columns)
    return found if fill is None else jnp.where(index == within, found, jnp.asarray(fill, found.dtype))
