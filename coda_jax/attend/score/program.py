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
      of_distance: where the array has an entry for each distance, and the index is the row less the column, and a
        number: the node of the entry of the table that it was made of. Else None.
      entries: the number of entries of that table.
    """

    array: int
    index: int
    fills: bool = False
    of_distance: int | None = None
    entries: int = 0

    @property
    def is_by_distance(self) -> bool:
        """Whether the array has an entry for each distance."""
        return self.of_distance is not None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that it names."""
        return (self.index,) if self.of_distance is None else (self.index, self.of_distance)

    def with_nodes(self, at: Mapping[int, int]) -> Table:
        """The table where nodes have other numbers."""
        of_distance = None if self.of_distance is None else at[self.of_distance]
        return dataclasses.replace(self, index=at[self.index], of_distance=of_distance)

    def __str__(self) -> str:
        if self.of_distance is None:
            return f"table {self.array}: entry v{self.index}"
        fills = ", or none" if self.fills else ""
        return f"table {self.array}: distance v{self.index}, entry v{self.of_distance} of {self.entries}{fills}"


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
                *map(str, self.tables),
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
        nodes, at = simplify(self.nodes, [*self.roots, *(node for table in self.tables for node in table.nodes)])
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
            tables=tuple(table.with_nodes(at) for table in self.tables),
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
        """The arrays of which the backward kernel makes the gradients.

        Args:
          shapes: of its arrays.
        """
        left = self.left_by_kernel(shapes)
        return tuple(array for array, _ in self.slopes if array not in left)

    def left_by_kernel(self, shapes: Sequence[Sequence[Any]]) -> dict[int, str]:
        """The other arrays that have gradients, which XLA makes, and why.

        Args:
          shapes: of its arrays.
        """
        left, of_product = {}, 0
        for array, _ in self.slopes:
            _, _, rows, keys = shapes[array]
            table, is_of_product = self.table_of.get(array), self.is_slope_of_product(array)
            if table is not None and not table.is_by_distance:
                left[array] = "a table's index is no distance of query and key"
            elif table is None and not (same_size(rows, 1) or same_size(keys, 1)):
                left[array] = "an array has rows and keys"
            elif of_product + is_of_product > _MOST_OF_PRODUCT:
                left[array] = f"more than {_MOST_OF_PRODUCT} derivative depends on the scores"
            else:
                of_product += is_of_product
        return left

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
