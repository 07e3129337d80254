"""Tables that are read at an index of the distance of a query and a key alone, as T5's buckets: arrays by distance.

Where the rows and the columns of an index stand in differences of both alone, the entry is a function of row - column,
and XLA computes it before the call, as JAX has it, for each distance once: the logarithm of a bucket too. What a kernel
does for a pair is a load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend.score.evaluate import evaluate
from coda_jax.attend.score.program import Score, Table
from coda_jax.attend.score.ranges import Form, sum_of
from coda_jax.epilogue.dtypes import FLOATS_OF_16_BITS, INT32
from coda_jax.epilogue.program import Node, needed_nodes

_MOST_PADDING = 256  # rows or columns of a tile beyond the last
_MOST_DISTANCES = 1 << 20
_NODES_OF_POSITIONS = ("row", "column")


def by_distance(score: Score, arrays: Sequence[jax.Array], shape: Sequence[Any]) -> tuple[Score, tuple[jax.Array, ...]]:
    """The score and what it reads, with arrays by distance in the place of tables whose indices are of it.

    Such an array is (1 or B, 1 or H, 1, 2 n): its entry n + i is that of row - column = i. n is a power of two, so
    that a kernel's text is one for many sizes. Floats of 16 bits are float32 there, so that the table's gradient, whose
    parts are sums by distance, is rounded once.

    Args:
      shape: (B, H, T, S).
    """
    queries, keys = shape[2:]
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return score, tuple(arrays)
    middle = 1 << (max(queries, keys) + _MOST_PADDING - 1).bit_length()
    tables = [x for x in score.tables if 2 * middle <= _MOST_DISTANCES and _is_of_distance(score.nodes, x.index)]
    if not tables:
        return score, tuple(arrays)
    found = list(arrays)
    distances = jnp.arange(-middle, middle, dtype=jnp.int32)
    for table in tables:
        nodes = [i for i, x in enumerate(score.nodes) if x.op == "entry" and x["index"] == table.array]
        fill = next((dict(score.nodes[i].attributes).get("fill") for i in nodes), None)
        nothing = jnp.zeros((), jnp.int32), [jnp.zeros((), jnp.float32)] * len(arrays)
        (index,) = evaluate(score, [table.index], jnp.zeros((), jnp.float32), distances, *nothing)
        array = arrays[table.array]
        array = array.astype(jnp.float32) if array.dtype.name in FLOATS_OF_16_BITS else array
        found[table.array] = _entries(array, jnp.broadcast_to(index, distances.shape), fill)
    new = _read_by_distance(score, {x.array for x in tables}, middle)
    return dataclasses.replace(new, dtypes=tuple(np.dtype(x.dtype).name for x in found)), tuple(found)


def _entries(table: jax.Array, index: jax.Array, fill: Any) -> jax.Array:
    """table[..., index], by sums of which one term is not 0: so is its derivative, which has one order then."""
    count, each = table.shape[3], table[:, :, :, None]
    within = jnp.clip(index, 0, count - 1)
    is_entry = within[:, None] == jnp.arange(count, dtype=jnp.int32)
    if table.dtype == jnp.bool_:
        found = jnp.any(is_entry & each, axis=-1)
    else:
        found = jnp.sum(jnp.where(is_entry, each, jnp.zeros((), table.dtype)), axis=-1, dtype=table.dtype)
    return found if fill is None else jnp.where(index == within, found, jnp.asarray(fill, table.dtype))


def _read_by_distance(score: Score, arrays: set[int], middle: int) -> Score:
    """The score that reads these arrays at row - column + middle."""
    nodes: list[Node] = []

    def add(op: str, inputs: tuple[int, ...] = (), **attributes: Any) -> int:
        nodes.append(Node(op, inputs, INT32, tuple(attributes.items())))
        return len(nodes) - 1

    distance = add("sub", (add("row"), add("column")))
    place = add("add", (distance, add("literal", value=middle)))
    at = {i: len(nodes) + i for i in range(len(score.nodes))}
    for node in score.nodes:
        if node.op == "entry" and node["index"] in arrays:
            of = (("index", node["index"]), ("entries", 2 * middle), ("is_inside", True))
            nodes.append(Node("entry", (place,), node.dtype, of))
        else:
            nodes.append(dataclasses.replace(node, inputs=tuple(at[i] for i in node.inputs)))
    new = score.with_nodes(nodes, at)
    tables = [Table(x.array, place, is_by_distance=True) if x.array in arrays else x for x in new.tables]
    return dataclasses.replace(new, tables=tuple(tables)).simplified()


def _is_of_distance(nodes: Sequence[Node], root: int) -> bool:
    """Whether a node is a function of row - column and of numbers alone."""
    forms: dict[int, Form | None] = {}  # the integer sum of positions that a node is
    alone: dict[int, bool] = {}
    for number in sorted(needed_nodes(nodes, [root])):
        node = nodes[number]
        form: Form | None = None
        if node.op in _NODES_OF_POSITIONS:
            form = {node.op: 1}
        elif node.op == "literal" and node.dtype == INT32:
            form = {None: int(node["value"])}
        elif node.inputs and node.dtype == INT32:
            form = sum_of(node.op, [forms[i] for i in node.inputs])
        forms[number] = form
        if form is not None:
            alone[number] = form.get("row", 0) == -form.get("column", 0)
        elif node.inputs:
            alone[number] = node.op != "entry" and all(alone[i] for i in node.inputs)
        else:
            alone[number] = node.op == "literal"
    return alone[root]
