"""Tables that are read at an index of the distance of a query and a key alone, as T5's buckets: arrays by distance.

Where the rows and the columns of an index stand in differences of both alone, the entry is a function of row - column,
and XLA computes it before the call, as JAX has it, for each distance once: the logarithm of a bucket too. What a kernel
does for a pair is a load.

Distances of one entry are tied: what the derivative by the table adds up is the derivative by all of them. So where a
kernel makes the gradient it adds them up itself, by entry, and the array's gradient has that at the first distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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

STEP = 16  # distances from a window to the next
SEVERAL, NO_ENTRY = -1, -2  # in the place of an entry: cuda/attention_scores.cuh has the same


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
    new = _read_by_distance(score, {x.array: arrays[x.array].shape[3] for x in tables}, middle)
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


def _read_by_distance(score: Score, counts: Mapping[int, int], middle: int) -> Score:
    """The score that reads these arrays, whose tables have so many entries, at row - column + middle."""
    nodes: list[Node] = []

    def add(op: str, inputs: tuple[int, ...] = (), **attributes: Any) -> int:
        nodes.append(Node(op, inputs, INT32, tuple(attributes.items())))
        return len(nodes) - 1

    distance = add("sub", (add("row"), add("column")))
    place = add("add", (distance, add("literal", value=middle)))
    at = {i: len(nodes) + i for i in range(len(score.nodes))}
    for node in score.nodes:
        if node.op == "entry" and node["index"] in counts:
            of = (("index", node["index"]), ("entries", 2 * middle), ("is_inside", True))
            nodes.append(Node("entry", (place,), node.dtype, of))
        else:
            nodes.append(dataclasses.replace(node, inputs=tuple(at[i] for i in node.inputs)))
    new = score.with_nodes(nodes, at)
    tables = [
        Table(x.array, place, x.fills, of_distance=x.index, entries=counts[x.array]) if x.array in counts else x
        for x in new.tables
    ]
    return dataclasses.replace(new, tables=tuple(tables)).simplified()


def entries_of_distances(score: Score, table: Table, middle: int, window: int) -> jax.Array:
    """The entry that each distance of a table's array reads, int32: (2 n), and then (2 n / `STEP`) of windows.

    Window i has `window` distances from the array's entry STEP i on: its number is the entry that all of them read, or
    `SEVERAL`. A distance that reads none has `NO_ENTRY`.

    Args:
      table: by distance.
      middle: n.
    """
    each = jnp.arange(2 * middle, dtype=jnp.int32)
    firsts = each[::STEP, None] + jnp.arange(window, dtype=jnp.int32)
    in_windows = _entry_of(score, table, firsts - middle)
    least, most = jnp.min(in_windows, axis=1), jnp.max(in_windows, axis=1)
    return jnp.concatenate([_entry_of(score, table, each - middle), jnp.where(least == most, least, SEVERAL)])


def _entry_of(score: Score, table: Table, distances: jax.Array) -> jax.Array:
    assert table.of_distance is not None
    nothing = jnp.zeros((), jnp.float32), distances, jnp.zeros((), jnp.int32)
    (index,) = evaluate(score, [table.of_distance], *nothing, [distances] * len(score.dtypes))  # or an array of rows
    within = jnp.clip(jnp.broadcast_to(index, distances.shape), 0, table.entries - 1)
    return jnp.where(index == within, within, NO_ENTRY) if table.fills else within


def at_first_distances(sums: jax.Array, entries: jax.Array) -> jax.Array:
    """An array by distance (.., 2 n) with each entry's sum (.., entries) at the first distance that reads it, else 0.

    Args:
      entries: (2 n), of the distances, as `entries_of_distances` has them.
    """
    places, count = jnp.arange(entries.shape[0], dtype=jnp.int32), sums.shape[-1]
    is_read = entries[:, None] == jnp.arange(count, dtype=jnp.int32)
    first = jnp.argmax(is_read, axis=0).astype(jnp.int32)
    within = jnp.clip(entries, 0, count - 1)
    is_first = (entries >= 0) & (places == jnp.take(first, within))
    return jnp.where(is_first, jnp.take(sums, within, axis=-1), jnp.zeros((), sums.dtype))


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
