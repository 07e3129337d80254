"""The data model of a checked score function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from coda_jax.epilogue.dtypes import INT32
from coda_jax.epilogue.program import Node, needed_nodes
from coda_jax.epilogue.simplify import simplify
from coda_jax.epilogue.values import same_size

# A score of this or less hides its key, as -inf does. Of larger ones float32 can subtract a row's maximum and, in the
# backward pass, its log-sum-exp: -1e30 and float32's least number, which programs write for -inf, hide too.
HIDDEN = -(2.0**96)

READS = ("operand", "entry")  # nodes that read an array, whose number is their index

_MOST_OF_PRODUCT = 1  # gradients that the kernel makes where derivatives depend on the product: 16 to 32 registers each


@dataclasses.dataclass(frozen=True)
class Table:
    """An array of few entries, of which a score reads one for each pair.

    Attributes:
      array: its number.
      index: the node of the entry's number, one for each array.
      fills: whether no entry is read where the index is out of range; else it is the nearest.
      is_by_distance: whether the index is the row less the column, and a number.
    """

    array: int
    index: int
    fills: bool = False
    is_by_distance: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A function of one score, of positions and of entries of arrays. Equal mathematics is equal.

    Nodes are those of an epilogue's program, with other leaves: "score", "row" and "column" (positions of the query and
    the key, int32), "operand" (index) and "literal"; and "entry" (index, entries, is_inside, fill), the entry of a
    table whose number is its input: which is known to be in range if it is_inside, and else the nearest entry, or fill.

    Attributes:
      name: of the user's function, for messages and readers.
      dtypes: of the arrays that it reads, each (1 or B, 1 or H, 1 or T, 1 or S), or (1 or B, 1 or H, 1, entries) of
        tables.
      nodes: inputs before users.
      value: the node of s'.
      shown: the same where s' hides no key: without the choices that hide.
      slope: the node of the derivative by s.
      slopes: (array, node): the derivatives by the arrays of floating dtypes.
      why_no_slope: why it has no derivative; None if it has.
    """

    name: str
    dtypes: tuple[str, ...]
    nodes: tuple[Node, ...]
    value: int
    shown: int
    slope: int
    slopes: tuple[tuple[int, int], ...]
    why_no_slope: str | None = None
    tables: tuple[Table, ...] = ()

    @cached_property
    def text(self) -> str:
        """All that it computes."""
        return "\n".join(
            [
                ", ".join(self.dtypes),
                *(f"v{i} = {node}" for i, node in enumerate(self.nodes)),
                f"value v{self.value}, shown v{self.shown}, slope v{self.slope}",
                *(f"slope by {array}: v{node}" for array, node in self.slopes),
                *(f"table {x.array}: {'distance' if x.is_by_distance else 'entry'} v{x.index}" for x in self.tables),
            ]
        )

    @cached_property
    def table_of(self) -> dict[int, Table]:
        """The tables, by the numbers of their arrays."""
        return {table.array: table for table in self.tables}

    @cached_property
    def has_entries(self) -> bool:
        """Whether the value or a derivative reads an entry of a table."""
        return any(self.nodes[i].op == "entry" for i in needed_nodes(self.nodes, self.roots))

    def simplified(self) -> Score:
        """The same with fewer nodes: those that are needed, each once."""
        nodes, at = simplify(self.nodes, [*self.roots, *(table.index for table in self.tables)])
        return self.with_nodes(nodes, at)

    @property
    def roots(self) -> tuple[int, ...]:
        """The nodes of the values and of the derivatives."""
        return self.value, self.shown, self.slope, *(node for _, node in self.slopes)

    def reads(self, roots: Sequence[int]) -> set[int]:
        """The arrays that these nodes are computed of."""
        return {self.nodes[i]["index"] for i in needed_nodes(self.nodes, roots) if self.nodes[i].op in READS}

    def with_nodes(self, nodes: Sequence[Node], at: Mapping[int, int]) -> Score:
        """The score with other nodes; `at` has the new numbers of its own."""
        return dataclasses.replace(
            self,
            nodes=tuple(nodes),
            value=at[self.value],
            shown=at[self.shown],
            slope=at[self.slope],
            slopes=tuple((array, at[node]) for array, node in self.slopes),
            tables=tuple(dataclasses.replace(table, index=at[table.index]) for table in self.tables),
        )

    def of_arrays(self, kept: Sequence[int]) -> Score:
        """The score where it hides nothing, of these of its arrays, which it reads there."""
        at = {old: new for new, old in enumerate(kept)}
        nodes = [
            dataclasses.replace(node, attributes=(("index", at.get(node["index"], 0)),)) if node.op in READS else node
            for node in self.nodes
        ]
        return dataclasses.replace(
            self,
            dtypes=tuple(self.dtypes[i] for i in kept),
            nodes=tuple(nodes),
            value=self.shown,
            slopes=tuple((at[array], node) for array, node in self.slopes if array in at),
            tables=tuple(
                dataclasses.replace(table, array=at[table.array]) for table in self.tables if table.array in at
            ),
        )

    def is_slope_of_product(self, array: int) -> bool:
        """Whether the derivative by an array depends on the product of the query and the key."""
        needed = needed_nodes(self.nodes, [dict(self.slopes)[array]])
        return any(self.nodes[i].op == "score" for i in needed)

    def sums_of_kernel(self, shapes: Sequence[Sequence[Any]]) -> tuple[int, ...]:
        """The arrays of which the backward kernel makes the gradients: no tables, and not those with rows and keys.

        Args:
          shapes: of its arrays.
        """
        found, of_product = [], 0
        for array, _ in self.slopes:
            if array in self.table_of:
                continue
            _, _, rows, keys = shapes[array]
            is_of_product = self.is_slope_of_product(array)
            if (same_size(rows, 1) or same_size(keys, 1)) and of_product + is_of_product <= _MOST_OF_PRODUCT:
                found.append(array)
                of_product += is_of_product
        return tuple(found)

    @property
    def has_rows(self) -> bool:
        """Whether it reads the positions of queries."""
        return any(node.op == "row" for node in self.nodes)

    def with_rows_of_array(self) -> Score:
        """The same with positions of queries from a further array: of a part of them."""
        row = Node("operand", (), "int32", (("index", len(self.dtypes)),))
        nodes = tuple(row if node.op == "row" else node for node in self.nodes)
        return dataclasses.replace(self, dtypes=(*self.dtypes, INT32), nodes=nodes)

    @property
    def has_unit_slope(self) -> bool:
        """Whether the derivative by s is 1."""
        node = self.nodes[self.slope]
        return node.op == "literal" and float(node["value"]) == 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:  # in a printed jaxpr
        return self.name
