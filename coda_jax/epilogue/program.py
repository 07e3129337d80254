"""The data model of a checked epilogue, independent of the sizes M and N."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.flatten import Equation, Literal
from coda_jax.epilogue.halves import Halves, Width
from coda_jax.epilogue.operand import Operand
from coda_jax.epilogue.user_names import UserNames


class Axis(enum.Enum):
    """The extent of a reduction. ROW: each row, to (M,). COLUMN: each column, to (N,). ALL: all elements, to ()."""

    ROW = "row"
    COLUMN = "column"
    ALL = "all"


class ReductionOp(enum.Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LOGSUMEXP = "logsumexp"

    @property
    def neutral(self) -> float:
        return {ReductionOp.SUM: 0.0, ReductionOp.MIN: np.inf}.get(self, -np.inf)

    def reduce(self, x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
        match self:
            case ReductionOp.SUM:
                return jnp.sum(x, axis=axis)
            case ReductionOp.MAX:
                return jnp.max(x, axis=axis)
            case ReductionOp.MIN:
                return jnp.min(x, axis=axis)
            case ReductionOp.LOGSUMEXP:
                return jax.nn.logsumexp(x, axis=axis)

    def combine(self, x: jax.Array, y: jax.Array) -> jax.Array:
        match self:
            case ReductionOp.SUM:
                return lax.add(x, y)
            case ReductionOp.MAX:
                return lax.max(x, y)
            case ReductionOp.MIN:
                return lax.min(x, y)
            case ReductionOp.LOGSUMEXP:
                return jnp.logaddexp(x, y)


# A key in a table of tiles has a digest of the program's text. The text keeps its first words, so that entries of old
# tables, users' among them, stay valid.
_WORDS_OF_TEXT = {"half": "way"}

HEAD_REDUCTIONS = {"head_sum": ReductionOp.SUM, "head_max": ReductionOp.MAX, "head_min": ReductionOp.MIN}


def _text_of(word: str) -> str:
    return _WORDS_OF_TEXT.get(word, word)


@dataclass(frozen=True)
class Node:
    """One value per element. Leaves: acc (half), operand (index, half), row, column (half), literal (value).

    Nodes of HEAD_REDUCTIONS reduce a head: the columns of all their inputs, each of which is one half of it.
    """

    op: str
    inputs: tuple[int, ...]
    dtype: str
    attributes: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.attributes)[key]

    def __str__(self) -> str:
        arguments = [f"v{i}" for i in self.inputs] + [f"{_text_of(key)}={value}" for key, value in self.attributes]
        return f"{self.dtype} {self.op}({', '.join(arguments)})"


@dataclass(frozen=True)
class TileStore:
    """Output number `output`, a tile of `width`; `values` are its nodes, one for each half it spans.

    `slice`: the first and the end of its columns, if it has not all. `transposed`: the output is (N, M).
    `contraction_order`: its last axis has the order of `coda.contraction_order`.
    """

    output: int
    width: Width
    values: tuple[int, ...]
    slice: tuple[int, int] | None = None
    transposed: bool = False
    contraction_order: bool = False

    @property
    def text(self) -> str:
        order = " transposed" * self.transposed + " in contraction order" * self.contraction_order
        values = ", ".join(f"v{value}" for value in self.values)
        return f"store output {self.output} {self.width.value} {self.slice or ''}{order}: {values}"


@dataclass(frozen=True)
class Reduction:
    """A float32 reduction of `values`, a node for each half; along a row the halves are combined."""

    op: ReductionOp
    axis: Axis
    width: Width
    values: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The equations over finished reductions and operands that XLA runs after the kernel.

    Attributes:
      inputs: (variable, "operand" or "reduction", its index).
      equations: over numbered variables.
      outputs: (output number, variable or literal).
      row_axes: for each of `outputs` the axes that the M rows index.
      mixes_rows: whether an equation of values with rows may combine several.
      text: canonical.
    """

    inputs: tuple[tuple[int, str, int], ...] = ()
    equations: tuple[Equation, ...] = ()
    outputs: tuple[tuple[int, int | Literal], ...] = ()
    row_axes: tuple[tuple[int, ...], ...] = ()
    mixes_rows: bool = False
    text: str = ""


@dataclass(frozen=True, eq=False)
class Program:
    """A tile-local epilogue.

    Two programs are equal when they compute the same values in the same order, whatever function they came from.

    Attributes:
      operands: explicit operands in order, then captured arrays.
      halves: how columns are paired, if f combines two.
      nodes: the elementwise program, inputs before users.
      stores: outputs that are tiles. All other outputs come from `finishing`.
      reductions: reductions of the tile.
      num_outputs: of f, flat.
      finishing: how the outputs that are not tiles follow from the reductions.
      columns: N where stores are slices of the columns; else 0, and the program is independent of it.
      symmetric: whether the outputs are symmetric matrices, of which the kernel computes the tiles on and below the
        diagonal, and stores those below it transposed too.
      user_names: for a reader of the generated source; programs that differ in them alone are equal.
    """

    operands: tuple[Operand, ...]
    halves: Halves
    nodes: tuple[Node, ...]
    stores: tuple[TileStore, ...]
    reductions: tuple[Reduction, ...]
    num_outputs: int
    finishing: Finish = field(default=Finish())
    columns: int = 0
    symmetric: bool = False
    user_names: UserNames | None = field(default=None, repr=False)

    @cached_property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """First and end of each range of columns that no tile may straddle. (0, 0) stands for all columns."""
        ends = sorted({end for store in self.stores if store.slice for end in store.slice} - {0, self.columns})
        return tuple(zip([0, *ends], [*ends, self.columns], strict=True))

    def stores_of(self, section: tuple[int, int]) -> tuple[int, ...]:
        """Indices of the stores that have columns of this section."""
        first, end = section
        return tuple(
            i
            for i, store in enumerate(self.stores)
            if not store.slice or store.slice[0] <= first < end <= store.slice[1]
        )

    @cached_property
    def elementwise_text(self) -> str:
        """Canonical text of the work on a tile; see `_WORDS_OF_TEXT`."""
        halves = self.halves

        def operand(o: Operand) -> str:
            period = f" every {o.period} rows" if o.period else ""
            return f"{o.kind.text} {o.dtype}->{o.traced_dtype} {o.width.value}{period}"

        def names(values: Sequence[int]) -> str:
            return ", ".join(f"v{v}" for v in values)

        return "\n".join(
            [f"ways {halves.count}, acc {halves.acc.value}, heads of {halves.head}, columns {self.columns}"]
            + ["neighbours"] * halves.interleaved
            + ["symmetric"] * self.symmetric
            + [f"operand {i}: {operand(o)}" for i, o in enumerate(self.operands)]
            + [f"v{i} = {node}" for i, node in enumerate(self.nodes)]
            + [store.text for store in self.stores]
            + [f"{r.op.value} along {r.axis.value} {r.width.value}: {names(r.values)}" for r in self.reductions]
        )

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{self.elementwise_text}\noutputs {self.num_outputs}\n{self.finishing.text}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def with_acc(self) -> "Program":
        """The program with acc as an additional last output."""
        nodes = list(self.nodes)
        leaves = [Node("acc", (), "float32", (("half", half),)) for half in range(self.halves.acc_halves)]
        nodes += [leaf for leaf in leaves if leaf not in nodes]
        store = TileStore(self.num_outputs, self.halves.acc, tuple(map(nodes.index, leaves)))
        stores = (*self.stores, store)
        return replace(self, nodes=tuple(nodes), stores=stores, num_outputs=self.num_outputs + 1)

    def with_tile_added(self, tile: Operand) -> "Program":
        """The program of acc plus a tile (M, N), which is the last operand."""
        nodes: list[Node] = []
        number: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            nodes.append(replace(node, inputs=tuple(number[x] for x in node.inputs)))
            if node.op == "acc":
                attributes = (("index", len(self.operands)), ("half", node["half"]))
                nodes.append(Node("operand", (), "float32", attributes))
                nodes.append(Node("add", (len(nodes) - 2, len(nodes) - 1), "float32"))
            number[i] = len(nodes) - 1

        def moved(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(number[x] for x in values)

        stores = (replace(store, values=moved(store.values)) for store in self.stores)
        reductions = (replace(one, values=moved(one.values)) for one in self.reductions)
        return replace(
            self,
            operands=(*self.operands, tile),
            nodes=tuple(nodes),
            stores=tuple(stores),
            reductions=tuple(reductions),
            user_names=None,
        )

    def acc_outputs(self) -> list[int]:
        """The outputs that are acc itself, all its columns in their order."""
        outputs = []
        for store in self.stores:
            stored = [self.nodes[value]["half"] for value in store.values if self.nodes[value].op == "acc"]
            is_rearranged = store.slice or store.transposed or store.contraction_order
            if stored == [*range(self.halves.acc_halves)] and store.width is self.halves.acc and not is_rearranged:
                outputs.append(store.output)
        return outputs

    def without_acc(self) -> "Program":
        """Undoes `with_acc`; the program itself where its last output is not acc."""
        if self.num_outputs - 1 not in self.acc_outputs():
            return self
        stores = [store for store in self.stores if store.output != self.num_outputs - 1]
        read = [value for store in stores for value in store.values]
        read += [value for reduction in self.reductions for value in reduction.values]
        count = max(self.needed(read), default=-1) + 1
        return replace(self, nodes=self.nodes[:count], stores=tuple(stores), num_outputs=self.num_outputs - 1)

    @cached_property
    def row_axes(self) -> tuple[tuple[int, ...], ...]:
        """For each flat output the axes that the M rows index."""
        finish = self.finishing
        axes_of = {output: axes for (output, _), axes in zip(finish.outputs, finish.row_axes, strict=True)}
        axes_of |= {store.output: (int(store.transposed),) for store in self.stores}
        return tuple(axes_of[output] for output in range(self.num_outputs))

    @cached_property
    def unreduced(self) -> frozenset[int]:
        """The outputs that are neither tiles nor computed from reductions: functions of vectors."""
        finish = self.finishing
        reduced = {variable for variable, source, _ in finish.inputs if source == "reduction"}
        for equation in finish.equations:
            if reduced.intersection(atom for atom in equation.inputs if isinstance(atom, int)):
                reduced.update(equation.outputs)
        return frozenset(output for output, atom in finish.outputs if isinstance(atom, Literal) or atom not in reduced)

    @cached_property
    def tile_operands(self) -> tuple[int, ...]:
        """Indices of the operands with a tensor map that the elementwise program reads."""
        return tuple(i for i, o in enumerate(self.operands) if o.kind.by_tensor_map and self.loads(i))

    @cached_property
    def head_levels(self) -> dict[int, int]:
        """For each node that reduces heads, the length of the longest chain of such nodes before it."""
        below = [0] * len(self.nodes)
        levels: dict[int, int] = {}
        for number, node in enumerate(self.nodes):
            below[number] = max((below[i] for i in node.inputs), default=0)
            if node.op in HEAD_REDUCTIONS:
                levels[number] = below[number]
                below[number] += 1
        return levels

    @cached_property
    def tiles_of_heads(self) -> tuple[int, ...]:
        """Indices of the tile operands that reductions of heads depend on."""
        nodes = [self.nodes[number] for number in self.needed(self.head_levels)]
        read = {node["index"] for node in nodes if node.op == "operand"}
        return tuple(i for i in self.tile_operands if i in read)

    def needed(self, roots: Iterable[int]) -> frozenset[int]:
        """`roots` and all nodes that they are computed from."""
        return needed_nodes(self.nodes, roots)

    def loads(self, index: int) -> tuple[int, ...]:
        """The halves of operand `index` that the elementwise program reads."""
        halves = {node["half"] for node in self.nodes if node.op == "operand" and node["index"] == index}
        return tuple(sorted(halves))

    def loaded_runs(self, index: int) -> tuple[int, ...]:
        """The halves in `loads` with their own run of columns; see `Halves.runs`."""
        return self.loads(index)[: 1 if self.halves.interleaved else None]


def needed_nodes(nodes: Sequence[Node], roots: Iterable[int]) -> frozenset[int]:
    """`roots` and everything that they are computed from."""
    needed = set(roots)
    for number in range(len(nodes) - 1, -1, -1):  # inputs come before users
        if number in needed:
            needed.update(nodes[number].inputs)
    return frozenset(needed)
