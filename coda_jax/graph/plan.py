"""The plan of a graph: which maps a product's epilogue makes, which XLA makes, and what is in memory between them.

Each product is a step, in the order in which the values were made. A value's `Place` says when it is known: in the
epilogue of the last product that it depends on, or after it. The rules are these:

    a map joins the epilogue of the last product that it reads, if it is local to its tiles
    a map of heads that no tile has whole, as of 80 columns, is a pass: the product keeps its kernel
    a map that reads a sum along rows or columns is placed after the product whose epilogue makes the sum
    a tile map that is placed after a product is computed again where it is read, in an epilogue or a pass of XLA's
    but a factor has to be in memory: an earlier epilogue that reads the same tiles stores it, else XLA makes it
    and so has a tile that is read beside a vector reduced from it: all readers see it as it is stored (`as_stored`)
    an epilogue has at most `MOST_INSTRUCTIONS`: a map that would exceed them is placed after the product
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coda_jax.epilogue import NotTileLocalError, trace
from coda_jax.epilogue.code_size import instructions
from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.program import Program
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.graph.attended import is_attended, may_join
from coda_jax.graph.calls import Call, Result
from coda_jax.graph.pulled_back import Behind, behind_attention
from coda_jax.graph.values import (
    ForEachRow,
    Leaf,
    Map,
    Product,
    Transposed,
    Value,
    inputs_read,
    is_float,
    reachable,
    reachable_until,
)
from coda_jax.graph.zero_rows import Groups, ZeroRows
from coda_jax.tiles.choose import takes_heads

# The most instructions of an epilogue's maps, as `code_size.instructions` counts them for an element. In (16384, 2048)
# @ (2048, 8192) on an H100 a chain of tanh is as fast in the epilogue as in a pass after it at 257, 2 % slower at 513.
MOST_INSTRUCTIONS = 256


class Place(NamedTuple):
    """When a value is known.

    Attributes:
      step: the number of the last product that it depends on; -1 for none.
      after: whether only after that product; else in its epilogue.
    """

    step: int
    after: bool


@dataclasses.dataclass
class Step:
    """A product, and what its epilogue stores: tiles, last those of maps made for other epilogues, then reductions."""

    product: Product
    stores: list[Value]


class Plan:
    """How to compute values from others.

    Args:
      wanted: the values to compute.
      given: values that are known, beside the leaves.
      as_stored: tiles that each reader sees as they are stored.
      unread_rows: as by the function of this name.

    Attributes:
      steps: the products, in order.
      by_xla: the maps that XLA makes and stores in memory, in order.
      beside: of these, for each result of attention those that its kernel may make, in order.
      unread: results of attention in memory that nothing else reads.
      behind: for each derivative of attention what its kernels make of dq, dk and dv.
      factors_alone: the tiles in memory that products alone read, as factors.
      read_by_passes: the leaves that passes of XLA's read, and the vectors without rows that it is given.
      too_long: maps that would make an epilogue longer than `MOST_INSTRUCTIONS`.
      beyond_zero: maps that are not zeros in rows in no group, where an epilogue of groups would store zeros.
      epilogues: a cache for the function that runs the plan, by the step's number.
      traces: another, of the traces of epilogues, by what they compute.
    """

    def __init__(
        self,
        wanted: Sequence[Value],
        given: Iterable[Value] = (),
        as_stored: frozenset[Value] = frozenset(),
        unread_rows: Mapping[Value, Groups] | None = None,
    ):
        self.wanted, self.given, self.as_stored = list(wanted), frozenset(given), as_stored
        self._unread_rows = unread_rows or {}
        order = _in_late_order(reachable(wanted, self.given), self.given)
        products = [value for value in order if isinstance(value, Product) and value not in self.given]
        self.steps = [Step(product, []) for product in products]
        self._number = {product: i for i, product in enumerate(products)}
        self._epilogue: dict[Value, int] = {}  # whose epilogue makes it
        self._lengths = [0] * len(products)  # of their epilogues, in instructions
        self._halves: dict[int, set[bool | None]] = {}  # whether maps that joined take columns apart as halves
        self.too_long: set[Value] = set()
        self.beyond_zero: set[Value] = set()
        self._zero_rows = ZeroRows()
        self.epilogues: dict[int, Callable[..., Any]] = {}
        self.traces: dict[Hashable, dict[Any, Any]] = {}
        self.place: dict[Value, Place] = {}
        self._last: dict[Value | Call, Place] = {}  # of the inputs of values, and of calls
        for value in order:
            self.place[value] = self._place_of(value)
        self._in_memory: dict[Value, None] = {}
        # Values that passes read, and those whose inputs they read, where all that is behind them has been asked for.
        self._asked: set[Value | Call] = set()
        factors = [x for product in products for x in product.inputs]
        for value in (*factors, *wanted):
            self._ask(value)
        own = dict(self._epilogue)
        self._attach(factors)
        for value in sorted(self._in_memory, key=lambda value: (not value.is_tile, value not in own)):
            if value in self._epilogue:
                self.steps[self._epilogue[value]].stores.append(value)
        self.by_xla = [value for value in order if value in self._in_memory and value not in self._epilogue]
        self.beside = self._beside_attention()
        read = [x for step in range(len(products)) for x in self.operands(step)]
        read += _leaves([x for one in _once_a_call(self.by_xla) for x in one.inputs], self._pass_inputs)
        self.read_by_passes = self._read_by_passes()
        self.factors_alone = frozenset(x for x in self._in_memory if x.is_tile).difference(wanted, read)
        self.unread = self._unread([*factors, *wanted])
        self.behind: dict[Call, Behind] = behind_attention(
            self.by_xla,
            order,
            self._epilogue,
            frozenset(wanted),
            self.as_stored,
            self._is_read_behind,
            self._is_made_again_behind,
        )

    # --- where values are known

    def _place_of(self, value: Value) -> Place:
        if value in self.given or isinstance(value, Leaf):
            return Place(-1, True)
        one = _with_same_inputs(value)
        if one not in self._last:
            self._last[one] = max((self.place[x] for x in value.inputs), default=Place(-1, True))
        last = self._last[one]
        if isinstance(value, Product):
            step = self._number[value]
            assert last < Place(step, False), "a product before what it reads"
            self._epilogue[value] = step
            return Place(step, False)
        if not last.after and self._joins(value, last.step):
            self._epilogue[value] = last.step
            return Place(last.step, not value.is_tile or not self._fits_beside(value, last.step))
        return Place(last.step, True)

    def _joins(self, value: Value, step: int) -> bool:
        """True if the epilogue of this product may make the value."""
        product = self.steps[step].product
        if len(product.shape) != 2 or (product.groups is not None and _reduces_rows(value)):
            return False  # one (G, M, N) has no epilogue, and with groups a sum over rows would be one a group
        if isinstance(value, Transposed):
            return fits_beside(value.inputs[0], product)
        if isinstance(value, Result):
            return False
        assert isinstance(value, Map)
        if not _is_of_groups(value, product):
            return False
        is_zero = not product.maps_zeros or product.groups in self._zero_rows.groups_of(value)
        if not is_zero and product.groups not in self._unread_rows.get(value, ()):
            self.beyond_zero.add(value)
            return False
        tiles = [x for x in value.inputs if x.is_tile and not self._may_be_table(x)]
        if not all(fits_beside(x, product) for x in tiles) or not is_local(value, product.shape):
            return False
        program = program_beside(value, product.shape)
        assert program is not None
        length = self._lengths[step] + instructions(program)
        if length > MOST_INSTRUCTIONS:
            self.too_long.add(value)
            return False
        if self._halves.setdefault(step, set()) | {_takes_halves(program)} >= {True, False}:
            return False  # halves of all columns do not go together with heads or slices
        self._halves[step].add(_takes_halves(program))
        self._lengths[step] = length
        return True

    def _may_be_table(self, value: Value) -> bool:
        """True for what may be a table of heads: a leaf, or what is known before all products."""
        return isinstance(value, Leaf) or self.place[value].step < 0

    def _fits_beside(self, value: Value, step: int) -> bool:
        """False for a slice of the columns: it is stored, and its readers are placed after the product."""
        return fits_beside(value, self.steps[step].product)

    def is_inlined(self, value: Value) -> bool:
        """True for a map of tiles that is computed again where it is read."""
        return (
            isinstance(value, Map)
            and value.is_tile
            and any(x.is_tile for x in value.inputs)
            and value not in self.given
            and value not in self._epilogue
            and value not in self._in_memory
            and value not in self.as_stored
            and is_local(value, value.shape)
        )

    # --- which values are in memory

    def is_in_memory(self, value: Value) -> bool:
        """True for what a product's epilogue stores, or XLA."""
        return value in self._in_memory

    def _ask(self, value: Value) -> None:
        """Notes that the value is needed in memory."""
        if value in self._in_memory or value in self.given or isinstance(value, Leaf):
            return
        self._in_memory[value] = None
        if value in self._epilogue:
            for x in self._read([value], self._epilogue[value]):
                for of in x.inputs if self.is_by_group(x) else [x]:
                    self._ask(of)
            return
        one = _with_same_inputs(value)
        if one not in self._asked:
            for x in value.inputs:
                self._ask_for_pass(x)
            self._asked.add(one)

    def _ask_for_pass(self, value: Value) -> None:
        """Notes that a pass of XLA's reads the value; what has been asked for is not walked again."""
        walked: list[Value] = []

        def inputs_of(x: Value) -> Sequence[Value] | None:
            walked.append(x)
            return () if x in self._asked else self._pass_inputs(x)

        for x in _leaves([value], inputs_of):
            self._ask(x)
        self._asked.update(walked)

    def _pass_inputs(self, value: Value) -> Sequence[Value] | None:
        """The inputs from which a pass computes this value itself; None for a value that it reads from memory."""
        by_xla = isinstance(value, Map) and value not in self.given and value not in self._epilogue
        is_inlined = by_xla and value not in self._in_memory and value not in self.as_stored
        return value.inputs if is_inlined else None

    def read_by_pass(self, value: Value) -> list[Value]:
        """The values in memory, and the leaves, that the pass reads which makes this value."""
        return _leaves(value.inputs, self._pass_inputs)

    def _read_by_passes(self) -> frozenset[Value]:
        def inputs_of(value: Value) -> Sequence[Value] | None:
            return None if self._pass_inputs(value) is None else inputs_read(value)

        read = _leaves([x for one in _once_a_call(self.by_xla) for x in inputs_read(one)], inputs_of)
        vectors = (x for x in read if x in self.given and not (x.is_tile or has_rows(x)))
        return frozenset([*(x for x in read if isinstance(x, Leaf)), *vectors])

    def _beside_attention(self) -> dict[Result, list[Value]]:
        """For each result of attention in memory the maps of it that its kernel may make."""
        found: dict[Result, list[Value]] = {}
        result_of: dict[Value, Result] = {}  # of each map, the attention whose result it is of
        for value in self.by_xla:
            tiles = [result_of.get(x, x) for x in _leaves(value.inputs, self._pass_inputs) if x.is_tile]
            y = tiles[0] if len(set(tiles)) == 1 else None
            if not isinstance(y, Result) or y in self.given or not is_attended(y):
                continue
            group = found.get(y, [])
            if self._is_made_beside(value, y, group) and all(map(self.is_known_before(y), self._read_of(value, group))):
                found.setdefault(y, []).append(value)
                result_of[value] = y
        return found

    def _unread(self, read: Sequence[Value]) -> frozenset[Result]:
        """The results of attention that neither are among these values nor are read but by what is made beside them."""
        made = {x for values in self.beside.values() for x in values}
        inputs = [x for one in _once_a_call(y for y in self.by_xla if y not in made) for x in one.inputs]
        others = {*read, *_leaves(inputs, self._pass_inputs)}
        others |= {x for step in range(len(self.steps)) for x in self.operands(step)}
        return frozenset(y for y in self.beside if y not in others)

    def _is_made_beside(self, value: Value, y: Result, group: Sequence[Value]) -> bool:
        """Whether attention's kernel may make a map of y, and all that this computes again."""
        maps = [value]
        for x in maps:
            program = program_beside(x, y.shape) if isinstance(x, Map) else None
            if not may_join(x, program):
                return False
            maps += [of for of in x.inputs if of.is_tile and of is not y and of not in group]
        return True

    def is_known_before(self, y: Result) -> Callable[[Value], bool]:
        """A function that tells whether a value is known before attention, whose result y is, has run."""
        first = y.call.results[0].number  # values with smaller numbers are not made of it

        def is_before(x: Value) -> bool:
            return x.number < first or x in self.given

        return lambda x: (
            self.place[x] <= self.place[y]
            and not any(isinstance(of, Result) and of.call is y.call for of in reachable_until([x], is_before))
        )

    def _is_read_behind(self, x: Value, gradient: Result) -> bool:
        """Whether a value is known before a derivative of attention, and is no large tile that a pass has to make."""
        is_there = x in self._in_memory or x in self.given or isinstance(x, Leaf) or not x.is_tile
        if not is_there and self.place[x].step < 0:
            is_there = not _is_large(x, gradient)  # a table of heads, maybe
        return is_there and self.is_known_before(gradient)(x)

    def _is_made_again_behind(self, x: Value, gradient: Result) -> bool:
        """Whether the kernels of a derivative of attention compute a tile again, of large tiles in memory."""
        if not x.is_tile or self._pass_inputs(x) is None:
            return False
        return any(_is_large(of, gradient) for of in _leaves([x], self._pass_inputs) if of.is_tile)

    def read_beside(self, y: Result) -> list[Value]:
        """The scalars that the maps beside a result of attention read."""
        group = self.beside[y]
        return list(dict.fromkeys(x for value in group for x in self._read_of(value, group)))

    def _read_of(self, value: Value, group: Sequence[Value]) -> list[Value]:
        """The values that a map beside attention reads and that are no tiles."""

        def inputs_of(x: Value) -> Sequence[Value] | None:
            return x.inputs if x.is_tile and x not in group and self._pass_inputs(x) is not None else None

        return [x for x in _leaves(inputs_read(value), inputs_of) if not x.is_tile]

    def operands(self, step: int) -> list[Value]:
        """The values that its epilogue reads beside this product, as its stores need them."""
        return self._read(self.steps[step].stores, step)

    def _read(self, values: Iterable[Value], step: int) -> list[Value]:
        """The values that the epilogue of this product reads to make the given ones."""
        product = self.steps[step].product
        inputs = [x for value in values if value is not product for x in value.inputs if x is not product]

        def inputs_of(x: Value) -> list[Value] | None:
            return [y for y in x.inputs if y is not product] if self.is_made_in(x, step) else None

        return _leaves(inputs, inputs_of)

    def is_made_in(self, value: Value, step: int) -> bool:
        """True for a tile that the epilogue of this product makes for itself, where it reads it."""
        if not value.is_tile or isinstance(value, Product):
            return False
        if self._epilogue.get(value) == step:
            return not self.place[value].after
        product, tiles = self.steps[step].product, [x for x in (*value.inputs, value) if x.is_tile]
        is_beside = _is_of_groups(value, product) and all(fits_beside(x, product) for x in tiles)
        return self.is_inlined(value) and is_beside

    def is_by_group(self, value: Value) -> bool:
        """True for a vector of each group that an epilogue reads as it is, and not as each row has it."""
        return isinstance(value, ForEachRow) and value not in self.given

    def _attach(self, factors: Sequence[Value]) -> None:
        """Assigns maps of values in memory to earlier epilogues that read these values anyway."""
        first_use: dict[Value, int] = {}  # as a factor
        for step, product in enumerate(self._number):
            for factor in product.inputs:
                first_use.setdefault(factor, step)
        users, stores = defaultdict(list), defaultdict(list)
        for value in self._in_memory:
            for x in value.inputs:
                users[x].append(self.place[value].step)
            if value in self._epilogue:
                stores[self._epilogue[value]].append(value)
        readers = defaultdict(set)  # of a tile in memory: the products whose epilogues read it
        for step, stored in stores.items():
            for x in self._read(stored, step):
                readers[x].add(step)
        for value in [x for x in self._in_memory if isinstance(x, Map | Transposed) and x not in self._epilogue]:
            sources = self._sources(value)
            # The epilogue that makes a tile may read it; a sum is known only after that epilogue.
            last = min([len(self.steps), *(step + value.is_tile for step in [*users[value], *readers[value]])])
            if value.is_tile:
                last = min(last, first_use.get(value, 0))
            read = [readers[x] for x in sources]
            near = set[int]().union(readers[value], *read) if value.is_tile else set(*read[:1]).intersection(*read)
            for step in sorted(near):
                product = self.steps[step].product
                if self.place[value].step < step < last and is_of_tile(value, product) and self._joins(value, step):
                    self._epilogue[value] = step
                    self.place[value] = Place(step, not value.is_tile)
                    break

    def _sources(self, value: Value) -> set[Value]:
        """The tiles in memory that the map reads, directly or through maps that are computed again."""
        leaves = _leaves(value.inputs, self._pass_inputs)
        return {x for x in leaves if x.is_tile}


def _is_large(x: Value, gradient: Value) -> bool:
    """True for a tile that has about as many columns as a gradient, or more: no table of heads."""
    return bool(4 * x.shape[1] > gradient.shape[1])


def _leaves(values: Iterable[Value], inputs_of: Callable[[Value], Iterable[Value] | None]) -> list[Value]:
    """The values, each once, after replacing a value by its `inputs_of`, repeatedly; None keeps the value."""
    leaves: dict[Value, None] = {}
    seen: set[Value] = set()
    open_ = list(values)[::-1]
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        new = inputs_of(value)
        if new is None:
            leaves[value] = None
        else:
            open_ += list(new)[::-1]
    return list(leaves)


def _takes_halves(program: Program) -> bool | None:
    """True for a program of halves of all columns, False for one of heads or slices, None for one of neither."""
    if program.halves.head or program.columns:
        return False
    return True if program.halves.count > 1 else None


def _in_late_order(order: Sequence[Value], given: Collection[Value]) -> list[Value]:
    """The values, with products that read a factor which is made again behind all that make the factor's cotangent.

    As h^T dy behind the last product whose sum is h's cotangent, and x8^T t8, of a transposed copy, behind the last
    t8 W8^T: the epilogue there reads what h is made of, or x, and so makes the factor.
    """
    last = {value.like: i for i, value in enumerate(order) if isinstance(value, Product) and value.like is not None}
    places: dict[Value, float] = {}
    last_input: dict[Value | Call, float] = {}
    for i, value in enumerate(order):
        behind = [last[x] + 0.5 for x in _made_again(value, given) if x in last]
        one = _with_same_inputs(value)
        if one not in last_input:
            last_input[one] = max((places[x] for x in value.inputs if x in places), default=-1.0)
        places[value] = max([i, *behind, last_input[one]])
    return sorted(order, key=places.__getitem__)


def _once_a_call(values: Iterable[Value]) -> Iterable[Value]:
    """The values, of the results of a call one."""
    return {_with_same_inputs(x): x for x in values}.values()


def _with_same_inputs(value: Value) -> Value | Call:
    """The call of a result, all of whose results have its inputs; another value itself."""
    return value.call if isinstance(value, Result) else value


def _made_again(value: Value, given: Collection[Value]) -> list[Value]:
    """The factors of a product that are maps of given tiles, and those of which it reads copies in 8 bits."""
    if not isinstance(value, Product):
        return []
    copies = [x.inputs[0] for x in value.inputs if isinstance(x, Transposed)]
    found = [x for x in copies if is_of_8_bits(x.dtype)]
    if not value.transpose_a or not isinstance(value.a, Map) or value.a in given:
        return found
    sources = _leaves(value.a.inputs, lambda x: x.inputs if isinstance(x, Map) and x not in given else None)
    return [*found, value.a] if any(x.is_tile and x in given for x in sources) else found


def _is_of_groups(value: Value, product: Product) -> bool:
    """True if the product has the groups of all vectors by group that a map reads."""
    vectors = (x for x in value.inputs if isinstance(x, ForEachRow))
    return all(x.groups is product.groups and not product.transpose_a for x in vectors)


def is_of_tile(value: Value, product: Value) -> bool:
    """False for a vector computed from vectors, though a tile is among its inputs, as a norm's rstd for x."""
    program = program_beside(value, product.shape) if isinstance(value, Map) and not value.is_tile else None
    return program is None or bool(program.reductions)


def fits_beside(value: Value, product: Value) -> bool:
    """True if the epilogue of the product may read or make a tile of this shape: N columns, 2N or N/2."""
    (m, n), shape = product.shape, value.shape
    if len(shape) != 2 or not same_size(shape[0], m):
        return False
    columns = shape[1]
    return any(same_size(*pair) for pair in ((columns, n), (columns, 2 * n), (2 * columns, n)))


def is_local(value: Map, shape: tuple[Any, ...]) -> bool:
    """True if an epilogue beside a product of this shape may make this map, and a tile for maps that read it there."""
    program = program_beside(value, shape)
    if program is None or not are_in_tiles(program.halves.head):
        return False
    if not value.is_tile:
        return True
    return not program.reductions and not any(store.transposed for store in program.stores)


def are_in_tiles(columns: int) -> bool:
    """True if some tile has whole heads of so many columns; also for 0, of a map without heads."""
    return not columns or takes_heads(columns)


def remembered(f: Callable[[Value], bool]) -> Callable[[Value], bool]:
    """f, called once for each value, and for what it is made of before it, so that no question goes deep."""
    answers: weakref.WeakKeyDictionary[Value, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(f)
    def ask(value: Value) -> bool:
        open_ = [] if value in answers else [value]
        while open_:
            inputs = () if isinstance(open_[-1], Result) else open_[-1].inputs  # a result's answer needs none of them
            new = [x for x in inputs if x not in answers]
            open_ += new
            if not new:
                x = open_.pop()
                answers[x] = f(x)
        return answers[value]

    return ask


@remembered
def has_rows(value: Value) -> bool:
    """True if the value's first axis is the rows of the block's arrays."""
    if isinstance(value, Leaf | Result):
        return value.has_rows
    if isinstance(value, Product):
        return not value.transpose_a and has_rows(value.a)
    if value.cotangent_of is not None and has_rows(value.cotangent_of):
        return True
    may_have_rows = is_of_rows(value) if len(value.shape) == 1 else isinstance(value, Map) and len(value.shape) == 2
    alike = [x for x in value.inputs if same_shape(x.shape, value.shape)]
    beside = alike or [
        x for x in value.inputs if same_size(x.shape[0] if x.shape else 1, value.shape[0] if value.shape else 1)
    ]
    return may_have_rows and any(map(has_rows, beside))


@remembered
def has_halves(value: Value) -> bool:
    """True if the columns of its array are two axes, (2, N / 2), as for a weight of which a mesh shards N / 2."""
    if isinstance(value, Leaf):
        return value.has_halves
    if isinstance(value, Product):
        return not value.transpose_b and has_halves(value.b)
    is_matrix = isinstance(value, Map) and len(value.shape) > 1
    return is_matrix and any(
        x.shape[-1:] == value.shape[-1:] and len(x.shape) > 1 and has_halves(x) for x in value.inputs
    )


def _reduces_rows(value: Value) -> bool:
    """True for a value that reads a tile and does not have a row for each of the tile's."""
    return not value.is_tile and any(x.is_tile for x in value.inputs) and not (is_of_rows(value) or is_column(value))


def is_column(value: Value) -> bool:
    return len(value.shape) == 2 and same_size(value.shape[1], 1)


@remembered
def is_of_rows(value: Value) -> bool:
    """True for a vector (M,) with an element for each row. A leaf (N,) has an element for each column."""
    if len(value.shape) != 1 or not isinstance(value, Map):
        return False
    tiles = [x for x in value.inputs if x.is_tile]
    if tiles:
        program = next(filter(None, (program_beside(value, x.shape) for x in tiles)), None)
        return program is not None and 0 in program.finishing.row_axes[0]
    return any(is_of_rows(x) or is_column(x) for x in value.inputs)


def program_beside(value: Map, shape: tuple[Any, ...]) -> Program | None:
    """The program of an epilogue that is this map, beside a product of this shape; None if there is none."""
    program = _program_or_reason(value, shape)
    return None if isinstance(program, str) else program


def reason_beside(value: Map, shape: tuple[Any, ...]) -> str:
    """Why there is no such epilogue; empty if there is one."""
    reason = _program_or_reason(value, shape)
    return reason if isinstance(reason, str) else ""


def _program_or_reason(value: Map, shape: tuple[Any, ...]) -> Program | str:
    if value.is_pass:
        return "no kernel's epilogue can make it"
    if value.is_tile and not is_float(value.dtype):
        return f"it is a tile of {value.dtype}, which no epilogue stores"  # one row beside vectors looks like a vector
    row_flags = tuple(map(is_of_rows, value.inputs))
    found: Program | str = value.body.once(("program", shape, row_flags), lambda: _traced(value, shape, row_flags))
    return found


def _traced(value: Map, shape: tuple[Any, ...], row_flags: Sequence[bool]) -> Program | str:
    types = [x.type for x in value.inputs]
    acc_index = next((i for i, x in enumerate(types) if x.shape == shape and x.dtype == FLOAT32), -1)

    def epilogue(acc: jax.Array, *arrays: jax.Array) -> list[Any]:
        given = iter(arrays)
        inputs = [acc if i == acc_index else next(given) for i in range(len(types))]
        return [value(*(jnp.reshape(x, of.shape) for x, of in zip(inputs, types, strict=True)))]

    epilogue.__name__ = value.origin.name
    others = [as_operand(x, one) for i, (x, one) in enumerate(zip(types, row_flags, strict=True)) if i != acc_index]
    try:
        return trace(epilogue, jax.ShapeDtypeStruct(shape, FLOAT32), others)[0].program
    except NotTileLocalError as error:
        return str(error)


def as_operand(type_: Any, is_row_vector: bool) -> Any:
    """The type of a value as an operand, where a vector of rows is (M, 1)."""
    return jax.ShapeDtypeStruct((*type_.shape, 1), type_.dtype) if is_row_vector else type_
