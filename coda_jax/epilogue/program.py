"""The data model: what a checked epilogue is, independent of the sizes M and N, and how XLA evaluates it."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.flatten import Equation, Literal, bind_equation
from coda_jax.epilogue.user_names import UserNames


class Kind(enum.Enum):
    """How an operand lies over the (M, N) tile; the value is its shape in messages."""

    SCALAR = "()"
    ROW_VECTOR = "(N,) or (1, N)"
    COLUMN_VECTOR = "(M, 1)"
    TILE = "(M, N)"
    HEAD_TABLE = "(M, Dh) or (M, Dh/2)"  # for every head the same; or with S rows, repeated to M
    HEAD_VECTOR = "(Dh,), (1, Dh), (Dh/2,) or (1, Dh/2)"  # for every row and head the same


class Width(enum.Enum):
    """Whether an array has all columns of the program's widest arrays or half of them.

    The widest have N columns, or 2N where acc is HALF itself (`Program.acc_width`). Those of head tables and head
    vectors are those of a head.
    """

    FULL = "full"
    HALF = "half"


class Axis(enum.Enum):
    """ROW: along a row, one value per row, (M,). COLUMN: along a column, one value per column."""

    ROW = "row"
    COLUMN = "column"


class ReductionOp(enum.Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LOGSUMEXP = "logsumexp"

    @property
    def neutral(self) -> float:
        return {ReductionOp.SUM: 0.0, ReductionOp.MIN: np.inf}.get(self, -np.inf)

    def reduce(self, x: jax.Array, axis: int) -> jax.Array:
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


HEAD_REDUCTIONS = {"head_sum": ReductionOp.SUM, "head_max": ReductionOp.MAX, "head_min": ReductionOp.MIN}


@dataclass(frozen=True)
class Operand:
    """An array beside acc.

    Attributes:
      dtype: as stored.
      traced_dtype: what f sees: float32 for floating operands, the stored dtype for captured arrays.
      width: of a row vector, a tile, a head table or a head vector.
      period: of a head table whose rows f repeats, their number: row r reads row r % period. Else 0.
    """

    kind: Kind
    dtype: np.dtype
    traced_dtype: np.dtype
    width: Width = Width.FULL
    period: int = 0


@dataclass(frozen=True)
class Node:
    """One value per element. Leaves: acc (way), operand (index, way), row, column (way), literal (value).

    Those of HEAD_REDUCTIONS reduce a head: the columns of all their inputs, each of which is a way.
    """

    op: str
    inputs: tuple[int, ...]
    dtype: str
    attributes: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.attributes)[key]

    def __str__(self) -> str:
        arguments = [f"v{i}" for i in self.inputs] + [f"{key}={value}" for key, value in self.attributes]
        return f"{self.dtype} {self.op}({', '.join(arguments)})"


@dataclass(frozen=True)
class TileStore:
    """Output number `output`, a tile of `width`; `values` are its nodes, one for each way it spans.

    `part` is the first and the end of the columns that it has, where these are not all.
    """

    output: int
    width: Width
    values: tuple[int, ...]
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Reduction:
    """A float32 reduction of `values`, a node for each way reduced over or kept; along a row the ways are combined."""

    op: ReductionOp
    axis: Axis
    width: Width
    values: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """What is left to XLA: equations over finished reductions and operands.

    Attributes:
      inputs: (variable, "operand" or "reduction", index of it).
      equations: over numbered variables.
      outputs: (output number, what it is).
      row_axes: for each of `outputs` the axes that the M rows index.
      text: canonical.
    """

    inputs: tuple[tuple[int, str, int], ...] = ()
    equations: tuple[Equation, ...] = ()
    outputs: tuple[tuple[int, int | Literal], ...] = ()
    row_axes: tuple[tuple[int, ...], ...] = ()
    text: str = ""


@dataclass(frozen=True, eq=False)
class Program:
    """A tile-local epilogue.

    Two programs are equal when they compute the same thing in the same order, whatever function they came from.

    Attributes:
      operands: explicit operands in order, then captured arrays.
      ways: 1, or 2 when two halves are worked on together: then one element has a value for each half.
      nodes: the elementwise program, inputs before users.
      stores: outputs that are tiles. All other outputs come from `finish`.
      reductions: reductions of the tile.
      num_outputs: of f, flat.
      finishing: how the outputs that are no tiles follow from the reductions.
      acc_width: HALF where acc (M, N) meets tiles of 2N columns.
      head: columns of a head, where the two halves are those of heads; else 0, and they are those of the widest arrays.
      neighbours: the halves of a head are its even and its odd columns.
      columns: N where stores are parts of the columns; else 0, and the program is independent of it.
      user_names: for a reader of the generated source; programs that differ in them alone are equal.
    """

    operands: tuple[Operand, ...]
    ways: int
    nodes: tuple[Node, ...]
    stores: tuple[TileStore, ...]
    reductions: tuple[Reduction, ...]
    num_outputs: int
    finishing: Finish = field(default=Finish())
    acc_width: Width = Width.FULL
    head: int = 0
    neighbours: bool = False
    columns: int = 0
    user_names: UserNames | None = field(default=None, repr=False)

    def ways_of(self, width: Width) -> int:
        """The ways that an array of this width spans."""
        return self.ways if width is Width.FULL else 1

    @property
    def acc_ways(self) -> int:
        """The ways that acc, and with it b, spans."""
        return self.ways_of(self.acc_width)

    def entries(self, width: Width) -> int:
        """How many places of a tile an array of this width takes its columns from: neighbours lie in one."""
        return 1 if self.neighbours else self.ways_of(width)

    @property
    def splits(self) -> int:
        """The sections of b's columns that a tile takes its columns from: the halves of N, or 1."""
        return 1 if self.head else self.acc_ways

    def width(self, width: Width, n: int) -> int:
        """Columns of an array of this width beside acc's n."""
        return n * self.ways_of(width) // self.acc_ways

    @cached_property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """First and end of the columns that tiles do not straddle. (0, 0) stands for all."""
        ends = sorted({end for store in self.stores if store.part for end in store.part} - {0, self.columns})
        return tuple(zip([0, *ends], [*ends, self.columns], strict=True))

    def stores_of(self, section: tuple[int, int]) -> tuple[int, ...]:
        """Indices of the stores that have columns of this section."""
        first, end = section
        return tuple(
            i for i, store in enumerate(self.stores) if not store.part or store.part[0] <= first < end <= store.part[1]
        )

    @cached_property
    def elementwise_text(self) -> str:
        """Canonical text of what runs on the tile."""

        def operand(o: Operand) -> str:
            period = f" every {o.period} rows" if o.period else ""
            return f"{o.kind.name.lower()} {o.dtype}->{o.traced_dtype} {o.width.value}{period}"

        def names(values: Sequence[int]) -> str:
            return ", ".join(f"v{v}" for v in values)

        return "\n".join(
            [f"ways {self.ways}, acc {self.acc_width.value}, heads of {self.head}, columns {self.columns}"]
            + ["neighbours"] * self.neighbours
            + [f"operand {i}: {operand(o)}" for i, o in enumerate(self.operands)]
            + [f"v{i} = {node}" for i, node in enumerate(self.nodes)]
            + [f"store output {s.output} {s.width.value} {s.part or ''}: {names(s.values)}" for s in self.stores]
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
        """The program with acc as one more output, the last."""
        nodes = list(self.nodes)
        leaves = [Node("acc", (), "float32", (("way", way),)) for way in range(self.acc_ways)]
        nodes += [leaf for leaf in leaves if leaf not in nodes]
        store = TileStore(self.num_outputs, self.acc_width, tuple(map(nodes.index, leaves)))
        stores = (*self.stores, store)
        return replace(self, nodes=tuple(nodes), stores=stores, num_outputs=self.num_outputs + 1)

    @cached_property
    def row_axes(self) -> tuple[tuple[int, ...], ...]:
        """For each flat output the axes that the M rows index."""
        finish = self.finishing
        finished = {output: axes for (output, _), axes in zip(finish.outputs, finish.row_axes, strict=True)}
        return tuple(finished.get(output, (0,)) for output in range(self.num_outputs))

    @cached_property
    def unreduced(self) -> frozenset[int]:
        """The outputs that are neither tiles nor made from reductions: functions of vectors."""
        finish = self.finishing
        reduced = {variable for variable, source, _ in finish.inputs if source == "reduction"}
        for equation in finish.equations:
            if reduced.intersection(atom for atom in equation.inputs if isinstance(atom, int)):
                reduced.update(equation.outputs)
        return frozenset(output for output, atom in finish.outputs if isinstance(atom, Literal) or atom not in reduced)

    @cached_property
    def tile_operands(self) -> tuple[int, ...]:
        """Indices of the tile operands that the elementwise program reads."""
        return tuple(i for i, o in enumerate(self.operands) if o.kind is Kind.TILE and self.loads(i))

    @cached_property
    def head_levels(self) -> dict[int, int]:
        """The nodes that reduce heads, and how many such reductions each needs one after the other before it."""
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
        """The ways of operand `index` that the elementwise program reads."""
        ways = {node["way"] for node in self.nodes if node.op == "operand" and node["index"] == index}
        return tuple(sorted(ways))

    def entry_ways(self, index: int) -> tuple[int, ...]:
        """Those that have an entry of their own: of neighbours, worked on together, the first stands for both."""
        return self.loads(index)[: 1 if self.neighbours else None]

    def evaluate(self, acc: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        """The program on whole arrays with XLA: the reference for the kernel, and for the check that trace() makes.

        Args:
          acc: (M, N) float32.
          operands: as in `self.operands`.

        Returns:
          The flat outputs; tiles have the dtype that f gives them.
        """
        rows, columns = acc.shape[0], acc.shape[1] // self.acc_ways
        values: list[jax.Array] = []
        for node in self.nodes:
            values.append(self._evaluate_node(node, values, acc, operands, columns))

        def full(value: int) -> jax.Array:
            return jnp.broadcast_to(values[value], (rows, columns))

        outputs: dict[int, jax.Array] = {}
        for store in self.stores:
            tile = self._joined([full(value) for value in store.values])
            outputs[store.output] = tile if store.part is None else tile[:, slice(*store.part)]
        reductions = []
        for reduction in self.reductions:
            axis = 1 if reduction.axis is Axis.ROW else 0
            parts = [reduction.op.reduce(full(value).astype(jnp.float32), axis) for value in reduction.values]
            reductions.append(self._joined(parts) if axis == 0 else _combine(reduction.op, parts))
        outputs.update(self.finish(reductions, operands))
        return [outputs[i] for i in range(self.num_outputs)]

    def _evaluate_node(
        self, node: Node, values: list[jax.Array], acc: jax.Array, operands: Sequence[jax.Array], columns: int
    ) -> jax.Array:

        def half(x: jax.Array, way: int) -> jax.Array:
            if x.shape[1] <= columns:
                return x
            if self.neighbours:
                return x[:, way::2]
            if self.head:
                return x.reshape(x.shape[0], -1, 2, self.head // 2)[:, :, way].reshape(x.shape[0], columns)
            return x[:, way * columns : (way + 1) * columns]

        def over_heads(x: jax.Array, way: int, period: int) -> jax.Array:
            width = self.head // 2
            if x.shape[1] > width:
                x = x[:, way::2] if self.neighbours else x[:, way * width : (way + 1) * width]
            return jnp.tile(x, (acc.shape[0] // period if period else 1, columns // width))

        match node.op:
            case "acc":
                return half(acc, node["way"])
            case "operand":
                operand, x = self.operands[node["index"]], operands[node["index"]]
                if operand.kind in (Kind.HEAD_TABLE, Kind.HEAD_VECTOR):
                    x = x.reshape(1, -1) if operand.kind is Kind.HEAD_VECTOR else x
                    return over_heads(x.astype(operand.traced_dtype), node["way"], operand.period)
                shape = {Kind.SCALAR: (1, 1), Kind.ROW_VECTOR: (1, -1), Kind.COLUMN_VECTOR: (-1, 1), Kind.TILE: x.shape}
                return half(x.astype(operand.traced_dtype).reshape(shape[operand.kind]), node["way"])
            case "row":
                return lax.broadcasted_iota(jnp.int32, (acc.shape[0], 1), 0)
            case "column":
                return half(lax.broadcasted_iota(jnp.int32, (1, columns * self.ways), 1), node["way"])
            case "literal":
                return jnp.full((1, 1), node["value"], node.dtype)
        if node.op in HEAD_REDUCTIONS:
            op, width = HEAD_REDUCTIONS[node.op], self.head // 2
            ways = [jnp.broadcast_to(values[i], (acc.shape[0], columns)) for i in node.inputs]
            total = _combine(op, [op.reduce(x.reshape(acc.shape[0], -1, width), axis=2) for x in ways])
            return jnp.repeat(total, width, axis=1, total_repeat_length=columns)
        inputs = jnp.broadcast_arrays(*(values[i] for i in node.inputs))
        return elementwise.apply(node.op, list(inputs), dict(node.attributes))

    def _joined(self, ways: Sequence[jax.Array]) -> jax.Array:
        """Whole columns, along the last axis, from those of each way."""
        if not self.head:
            return jnp.concatenate(ways, axis=-1)
        *rows, columns = ways[0].shape
        if self.neighbours:
            return jnp.stack(ways, axis=-1).reshape(*rows, columns * len(ways))
        heads = [x.reshape(*rows, -1, self.head // 2) for x in ways]
        return jnp.concatenate(heads, axis=-1).reshape(*rows, columns * len(ways))

    def finish(self, reductions: Sequence[jax.Array], operands: Sequence[jax.Array | None]) -> dict[int, jax.Array]:
        """Outputs that are not tile stores.

        Args:
          reductions: finished, (M,), (N,) or (N/2,) float32, as in `self.reductions`.
          operands: as in `self.operands`; tile operands are not read and may be None.

        Returns:
          The outputs by their number.
        """
        values: dict[int, Any] = {}
        for variable, source, index in self.finishing.inputs:
            if source == "reduction":
                values[variable] = reductions[index]
            else:
                x = operands[index]
                assert x is not None
                values[variable] = x.astype(self.operands[index].traced_dtype)

        def read(atom: int | Literal) -> Any:
            return jnp.asarray(atom.value) if isinstance(atom, Literal) else values[atom]

        for equation in self.finishing.equations:
            inputs = [read(atom) for atom in equation.inputs]
            values.update(zip(equation.outputs, bind_equation(equation, inputs), strict=True))
        return {output: read(atom) for output, atom in self.finishing.outputs}


def needed_nodes(nodes: Sequence[Node], roots: Iterable[int]) -> frozenset[int]:
    """`roots` and everything that they are computed from."""
    needed = set(roots)
    for number in range(len(nodes) - 1, -1, -1):  # inputs come before users
        if number in needed:
            needed.update(nodes[number].inputs)
    return frozenset(needed)


def _combine(op: ReductionOp, parts: Sequence[jax.Array]) -> jax.Array:
    out = parts[0]
    for part in parts[1:]:
        out = op.combine(out, part)
    return out
