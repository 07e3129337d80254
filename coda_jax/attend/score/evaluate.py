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


def evaluate(
    score: Score, roots: Sequence[int], s: jax.Array, row: jax.Array, column: jax.Array, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """The values of these nodes, which broadcast to s.

    Args:
      s: scaled scores of any shape, float32, or float64: then all that is float32 in the function is float64.
      row, column: positions of queries and keys, int32, that broadcast to s.
      arrays: what the function reads, broadcast to s alike.
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
    if node.op == "convert_element_type":
        attributes["dtype"] = working(attributes["dtype"]).name
    inputs = jnp.broadcast_arrays(*(made[i] for i in node.inputs))
    return elementwise.apply(node.op, list(inputs), attributes)
