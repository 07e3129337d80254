"""The check that a flat jaxpr is local to its tile, and its translation to one element's program.

`Analysis` walks the equations once, in order. It gives each value a `Local`: a node of the element's program, or one
for each half where a tile's element has two (halves of N, of heads, or even and odd columns), and a tag for each array
axis. The tag says what indexes the axis: the row, the column, the column inside one half of N, the head or the column
inside a head; None says that the value does not vary along it. Tags, not sizes, decide what an array is, so that
M == N, M == 1 and N == 1 mean nothing special.

A value that needs more than one element, such as a sum along the rows, becomes a reduction. What follows from finished
reductions is left to XLA (`Finished`). An equation that combines a tile with a finished reduction is refused with the
user's line.

Only the operation that splits the columns shows whether f works on halves, heads or slices of them. Values before it
were then analysed in the wrong form: the walk raises `NeedsLayout`, and begins again with the layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coda_jax.epilogue.dtypes import BOOL
from coda_jax.epilogue.elements import IDENTITIES, Elements, is_nested
from coda_jax.epilogue.flatten import Atom, Equation, Flat, Literal
from coda_jax.epilogue.halves import Halves, Width
from coda_jax.epilogue.operand import Operand
from coda_jax.epilogue.program import Reduction
from coda_jax.epilogue.values import (
    ALLOWED,
    BOTH_HALVES,
    BY_SLICES,
    COLUMN,
    COLUMNS,
    HALF,
    HINTS,
    INDEX,
    ROW,
    TABLE_ROW,
    Finished,
    Layout,
    Local,
    NeedsLayout,
    NotElementwise,
    Tag,
    Value,
    check_moved,
    is_tile,
    order_of,
    same_size,
)


class Analysis(Elements):
    """The values of one flat jaxpr, and the nodes and reductions they are made of.

    Args:
      flat: the equations; variable 0 is acc.
      order: the variables of the operands, in the order of `operands`.
      operands: their kinds and dtypes.
      layout: how f divides the columns, as far as it is known.
      name: of f, for messages.
      rules: for operations that change axes or reduce.

    Raises:
      NotTileLocalError: f is not local to a tile.
      NeedsLayout: f divides the columns in another way.
    """

    hints, allowed = HINTS, ALLOWED

    def __init__(
        self,
        flat: Flat,
        order: Sequence[int],
        operands: Sequence[Operand],
        layout: Layout,
        name: str,
        rules: Mapping[str, "Rule"],
    ):
        super().__init__(flat, name)
        self.rules = rules
        self.operands, self.layout = tuple(operands), layout
        self.halves, self.head = layout.halves, layout.halves.head
        self.m, n = flat.avals[0].shape
        self.n = 2 * n if layout.halves.acc is Width.HALF else n
        self.half = self.n // 2 if isinstance(self.n, int) and self.n % 2 == 0 else None
        self.values: dict[int, Value] = {}
        self.reductions: list[Reduction] = []
        self.sources: dict[int, tuple[str, int]] = {}  # flat variable -> ("operand" | "reduction", index)
        self.producers: dict[int, Equation] = {}
        # The flat equations; a reduction that the kernel makes is replaced by the equations that finish it.
        self.sequence: list[Equation] = []
        self.is_halved = False  # f has split or joined halves of N
        self.heads_are_halved = False
        column = COLUMN if self.halves.acc is Width.FULL else HALF
        leaves = tuple(self.node("acc", (), "float32", half=half) for half in range(self.halves.acc_halves))
        self.values[0] = Local((ROW, column), leaves, True)
        for index, (variable, operand) in enumerate(zip(order, operands, strict=True)):
            self.values[variable] = self.operand(index, operand, flat.avals[variable])
            self.sources[variable] = ("operand", index)
        for equation in flat.equations:
            self.equation(equation)

    def operand(self, index: int, operand: Operand, aval: Any) -> Local:
        kind, dtype = operand.kind, operand.traced_dtype.name
        halves = range(self.halves.of(operand.width) if kind.has_columns else 1)
        nodes = tuple(self.node("operand", (), dtype, index=index, half=half) for half in halves)
        return Local(kind.tags(operand, len(aval.shape)), nodes, kind.is_tile)

    # --- equations

    def value(self, atom: Atom) -> Value:
        if isinstance(atom, Literal):
            if atom.dtype.kind == "c":
                return Finished("a complex constant")
            return Local((), (self.literal(atom.value, atom.dtype),), False)
        return self.values[atom]

    def equation(self, equation: Equation) -> None:
        self.check_no_callback(equation)
        for variable in equation.outputs:
            self.producers[variable] = equation
        self.sequence.append(equation)
        inputs = [self.value(atom) for atom in equation.inputs]
        tile = any(is_tile(value) for value in inputs)
        finished = next((value for value in inputs if isinstance(value, Finished)), None)
        if finished is not None:
            if tile:
                self.refuse(equation, _combination(finished))
            self.finish_later(equation, finished)
            return
        local = [value for value in inputs if isinstance(value, Local)]
        try:
            if len(local) < len(inputs):
                outputs: list[Any] = [self.first_true(equation, inputs)]
            elif equation.name in self.rules:
                check_moved(equation.name, local)
                outputs = self.rules[equation.name](self, equation, local)
            elif equation.name in IDENTITIES:
                outputs = self.identity(equation, local)
            else:
                outputs = [self.elementwise(equation, local)]
        except NotElementwise as error:
            if tile:
                self.refuse(equation, error)
            self.finish_later(equation, Finished(f"the result of {equation.where()}, which {error}"))
            return
        self.values.update(zip(equation.outputs, outputs, strict=True))

    def finish_later(self, equation: Equation, value: Finished) -> None:
        if is_nested(equation):
            self.refuse(equation, "is control flow or a nested program, which an epilogue cannot hold")
        for variable in equation.outputs:
            self.values[variable] = value

    def first_true(self, equation: Equation, inputs: Sequence[Any]) -> Local:
        """argmax over stacked conditions: the index of the first true one, 0 if there is none."""
        if equation.name != "argmax" or tuple(equation.params["axes"]) != (0,) or len(inputs) != 1:
            raise NotElementwise("works on stacked arrays")
        (stacked,) = inputs
        if any(self.nodes[item.nodes[0]].dtype != BOOL for item in stacked.items):
            raise NotElementwise("looks for the largest of stacked arrays; use jnp.maximum and jnp.where")

        def first(conditions: tuple[int, ...]) -> int:
            index = self.literal(0, "int32")
            for number in range(len(conditions) - 1, -1, -1):
                index = self.node("select_n", (conditions[number], index, self.literal(number, "int32")), "int32")
            return index

        return self.map(stacked.items, first)

    def identity(self, equation: Equation, inputs: list[Local]) -> list[Local]:
        rounding = self.rounding(equation, self.nodes[inputs[0].nodes[0]].dtype)
        return list(inputs) if rounding is None else [self.map(inputs, rounding)]

    def elementwise(self, equation: Equation, inputs: list[Local]) -> Local:
        is_literal = bool(inputs) and self.nodes[inputs[0].nodes[0]].op == "literal"
        return self.map(inputs, self.operation(equation, is_literal))

    def map(self, inputs: Sequence[Local], f: Callable[[tuple[int, ...]], int]) -> Local:
        """Applies f to the nodes of elementwise combined inputs (equal shapes, or rank 0), half by half."""
        rank = max(len(value.tags) for value in inputs)
        ranked = [value if len(value.tags) == rank else replace(value, tags=(None,) * rank) for value in inputs]
        tags = tuple(self.unify([value.tags[axis] for value in ranked]) for axis in range(rank))
        known = [tag for tag in tags if tag not in (None, INDEX)]
        if len(set(known)) < len(known):
            raise NotElementwise("has the rows or the columns of the product along two of its axes")
        out = self.local(tags, (), inputs)
        resolved = [self.resolve(value, tags, out.slice) for value in ranked]
        count = self.halves.count if BOTH_HALVES.intersection(tags) else 1
        nodes = tuple(
            f(tuple(v.nodes[half] if len(v.nodes) > 1 else v.nodes[0] for v in resolved)) for half in range(count)
        )
        return replace(out, nodes=nodes)

    def local(self, tags: tuple[Tag, ...], nodes: tuple[int, ...], inputs: Sequence[Local]) -> Local:
        """A value made from `inputs`."""
        slices = {value.slice for value in inputs if value.slice is not None}
        if len(slices) > 1:
            one, other = (f"{start}:{stop}" for start, stop in sorted(slices)[:2])
            raise NotElementwise(f"combines columns {one} with columns {other}")
        for value in inputs:
            if slices and value.slice is None and not BY_SLICES.isdisjoint(value.tags):
                start, stop = next(iter(slices))
                raise NotElementwise(f"combines columns {start}:{stop} with all columns")
        tile = any(value.tile for value in inputs) or (ROW in tags and not COLUMNS.isdisjoint(tags))
        return Local(tags, nodes, tile, slices.pop() if slices else None, order_of(tags, inputs))

    def unify(self, tags: Sequence[Tag]) -> Tag:
        present = {tag for tag in tags if tag is not None}
        known = present - {INDEX}
        if len(known) > 1 and same_size(self.m, 1):
            known -= {ROW}  # with one row, a vector that was tagged as a row may be along the columns
        if len(known) > 1:
            one, other = sorted(known)[::-1]
            raise NotElementwise(
                f"combines an axis indexed by the {one} with one indexed by the {other} of the product"
            )
        return known.pop() if known else (INDEX if present else None)

    def resolve(self, value: Local, tags: tuple[Tag, ...], column_slice: tuple[int, int] | None = None) -> Local:
        """`value` with its INDEX axis tagged as in `tags`; `column_slice` is the slice of columns that it indexes."""
        if INDEX not in value.tags:
            return value
        tag = tags[value.tags.index(INDEX)]
        if tag in COLUMNS and (column_slice or tag not in (COLUMN, HALF)):
            raise NotElementwise("counts along the columns of a slice or of heads; take them from jnp.arange(N)")
        if tag == TABLE_ROW:
            raise NotElementwise("counts along the rows of a table before jnp.tile repeats them")
        if tag == ROW:
            leaves = [self.node("row", (), "int32")]
        elif tag in (COLUMN, HALF):
            count = self.halves.of(Width.FULL if tag == COLUMN else Width.HALF)
            leaves = [self.node("column", (), "int32", half=half) for half in range(count)]
        else:
            return value
        nodes = tuple(self.substitute(value.nodes[0], leaf, {}) for leaf in leaves)
        return Local(tuple(tag if t == INDEX else t for t in value.tags), nodes, value.tile, value.slice)

    def substitute(self, number: int, leaf: int, done: dict[int, int]) -> int:
        node = self.nodes[number]
        if node.op == INDEX:
            return leaf
        if number not in done:
            inputs = tuple(self.substitute(i, leaf, done) for i in node.inputs)
            done[number] = self.node(node.op, inputs, node.dtype, **dict(node.attributes))
        return done[number]

    def needs_twice_n(self) -> None:
        """Notes that f joins two arrays of N columns."""
        if self.head or self.layout.slices:
            raise NotElementwise("joins two arrays of N columns beside heads or slices of the columns")
        if self.halves.count == 1:
            raise NeedsLayout(Layout(Halves(2, acc=Width.HALF)))

    def needs_halves(self) -> None:
        """Notes that f works on halves of N."""
        if self.head or self.layout.slices:
            raise NotElementwise("works on halves of all columns beside heads or slices of the columns")
        if self.halves.count == 1:
            raise NeedsLayout(replace(self.layout, halves=replace(self.halves, count=2)))
        self.is_halved = True

    def needs_heads(self, size: int) -> None:
        """Notes that f works on heads of `size` columns."""
        if self.halves.acc is Width.HALF:
            raise NotElementwise("works on heads beside tiles of 2N columns")
        if self.head not in (0, size):
            raise NotElementwise(f"works on heads of {size} columns beside heads of {self.head}")
        if size % 2 or self.n % size:
            raise NotElementwise(f"makes heads of {size} of {self.n} columns; heads are whole and have an even size")
        if not self.head:
            raise NeedsLayout(Layout(Halves(2, head=size), slices=self.layout.slices or self.is_halved))

    def needs_halves_of_heads(self) -> None:
        """Notes that f works on the first and the second half of heads."""
        if self.halves.interleaved:
            raise NotElementwise("works on halves of heads beside even and odd columns")
        self.heads_are_halved = True

    def needs_interleaved_halves(self) -> None:
        """Notes that f works on even and odd columns of heads."""
        if not self.head or self.heads_are_halved:
            raise NotElementwise("takes every second column; that is possible in heads, acc.reshape(M, H, Dh)")
        if not self.halves.interleaved:
            raise NeedsLayout(replace(self.layout, halves=replace(self.halves, interleaved=True)))

    def slice(self, value: Local, start: int, stop: int) -> tuple[int, int]:
        """Columns start:stop of `value`, counted from the first of all."""
        if self.halves.acc is Width.HALF:
            raise NotElementwise("takes a slice of the columns beside tiles of 2N columns")
        if not self.layout.slices:
            halves = self.halves if self.head else replace(self.halves, count=1)
            raise NeedsLayout(replace(self.layout, halves=halves, slices=True))
        first, end = value.slice or (0, self.n)
        if not 0 <= start < stop <= end - first:
            raise NotElementwise(f"takes columns {start}:{stop} of {end - first}")
        if self.head and (start % self.head or stop % self.head):
            raise NotElementwise(f"takes columns {start}:{stop}, which are no whole heads of {self.head}")
        return (first + start, first + stop) if (first + start, first + stop) != (0, self.n) else (first, end)


def _combination(value: Finished) -> str:
    if value.from_reduction:
        return (
            f"combines the tile with {value.why}, which is known only after all tiles. Return the reduction, and apply "
            "it to the product's result outside, or pass it to a later product as an operand"
        )
    return f"combines the tile with {value.why}. Compute that before the call and pass it as an operand"


Rule = Callable[[Analysis, Equation, list[Local]], list[Any]]
