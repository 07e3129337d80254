"""The units of a straight jaxpr, which become values of a graph: products, maps that treat rows alone, and calls.

a dot_general of two matrices, once the axes of rows are one, is a product, and so is a ragged_dot_general of groups of
rows
equations that treat rows alone are maps: one for each array that something else reads, a sum that is finished for a
whole row, or a value that two such arrays are made of
a constraint, or a name, is a map that changes nothing: the value in memory takes it
the largest magnitude of an array with rows, for a scale of 8 bits, is a maximum
all other equations are calls, as attention is: those that need nothing of each other's products are one; so are those
of dtypes that maps do not see, as those of 64 bits
casts between floats are no equations: a map sees float32, and a product rounds its factors
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.values import same_size
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Equation, is_derivative
from coda_jax.fusion.rows import MARKS, SHAPES, Rows, sums_rows
from coda_jax.graph.constraint import CONSTRAINTS, Constraint, constraint_of
from coda_jax.graph.on_mesh import PVARY
from coda_jax.graph.row_axes import REDUCTIONS
from coda_jax.graph.values import is_float, is_seen
from coda_jax.jaxprs.def_use import DefUse, free_variables, variables
from coda_jax.jaxprs.walk import inner_jaxprs
from coda_jax.operators.rounded_dot import largest_p

CASTS = frozenset({"convert_element_type", "copy"}) | PVARY
_SUMS = frozenset({"add", "add_any", "sub", "neg"})
_LINEAR = _SUMS | {"mul"}  # of one array beside numbers, and vectors
_COPIES = SHAPES | {"convert_element_type", "iota"}  # a value of these is no more than its argument


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """Results that are made together: a product's, a call's, or one value of a map."""

    number: int
    kind: str
    equations: list[Equation]
    results: list[Any]
    inputs: list[Any]


class Units:
    """The equations of a jaxpr, by kind, and who makes and reads its variables.

    Args:
      jaxpr: a straight one.
      is_exact: whether casts to fewer bits round, and so are equations.
      kept: variables that are values because policies of `jax.checkpoint` keep them.

    Attributes:
      rows: of its variables.
      dtype: of the products' factors.
      kinds: of the equations: "product", "map", "cast", "maximum", "call", or "absorbed" by a product.
      makers: the number of the equation that a variable is a result of.
      readers: the numbers of the equations that read a variable; -1 for the results of all.
      last_terms: for products that are one as terms of a sum, the number of the last of them.
    """

    def __init__(self, jaxpr: core.Jaxpr, *, is_exact: bool, kept: Collection[Any] = ()):
        self.jaxpr, self._is_exact, self._kept = jaxpr, is_exact, kept
        def_use = DefUse(jaxpr)
        self.rows = Rows(def_use)
        self.dtype = self._products_dtype()
        self.makers, self.last_terms = def_use.defs, dict[int, int]()
        self.kinds = list(map(self._kind, range(len(jaxpr.eqns))))
        ends = {x: [*def_use.uses.get(x, ()), -1] for x in def_use.results}
        self.readers = defaultdict(list, def_use.uses | ends)
        self._move_constraints_to_calls()
        self._move_masks_to_calls()
        self._move_passes_to_calls()
        self._move_copies_to_calls()
        self._move_casts_to_calls()
        self._move_constraints_to_calls()  # on what has become a call's result

    def _products_dtype(self) -> np.dtype[Any]:
        """The dtype of the factors in which most operations are done; one of 16 bits, as kernels have, if any is."""
        flops: dict[Any, int] = defaultdict(int)
        for dot in self.rows.dots.values():
            flops[dot.a.aval.dtype] += dot.flops
        return max(flops, key=lambda dtype: (dtype.itemsize == 2, flops[dtype]), default=np.dtype(FLOAT32))

    def _kind(self, number: int) -> str:
        """The kind of an equation: product, map, cast or call."""
        equation: Equation = self.jaxpr.eqns[number]
        if number in self.rows.dots:
            return "product" if self._is_product(number) else "call"
        if number in self.rows.absorbed:
            return "absorbed" if self._is_product(self.makers[equation.invars[0]]) else "call"
        if self._is_cast(equation):
            return "cast"
        if equation.primitive is largest_p:
            return "maximum" if self.rows.of(equation.invars[0]) else "call"
        if not all(is_seen(x.aval.dtype) for x in (*equation.invars, *equation.outvars)):
            return "call"
        if equation.primitive.name not in _COPIES and any(is_of_8_bits(x.aval.dtype) for x in equation.outvars):
            return "call"  # it rounds to 8 bits what maps would not
        if equation.primitive.name in CUSTOM_VJPS and len(equation.outvars) > 1:
            return "call"  # a rule need not be linear: it is given all results' cotangents together
        counts = {self.rows.of(x) for x in equation.outvars}
        if sums_rows(equation, self.rows.counts):
            return "map"
        if len(counts) == 1 and counts != {0} and self.rows.is_alone(equation, *counts):
            return "map"
        return "call"

    def _is_product(self, number: int) -> bool:
        """True for a product of matrices that is one of the graph's."""
        dot = self.rows.dots[number]
        is_copied = dot.order_b is not None and self.rows.of(dot.b)  # an activation that would be transposed
        is_of_rows = dot.has_matrices and bool(self.rows.of(dot.b))
        return dot.a.aval.dtype == self.dtype and not is_copied and not is_of_rows

    def _is_cast(self, equation: Equation) -> bool:
        """True for a cast between floats, which changes no value here; exactly, for one to more precision.

        One from 8 bits is none, though it changes no value either: a product's factors, whose casts are not seen, would
        be of 8 bits.
        """
        if equation.primitive.name == "reshape":
            return self._keeps_matrix(equation)
        if equation.primitive.name not in CASTS or not variables(equation.invars):
            return False
        before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        if before == after:
            return True
        if not (is_float(before) and is_float(after) and is_seen(before) and is_seen(after)):
            return False
        return not (is_of_8_bits(before) or is_of_8_bits(after) or (self._is_exact and narrows(equation)))

    def _keeps_matrix(self, reshape: Equation) -> bool:
        """True for a reshape of an array without rows, as a weight (D, 2, F), that keeps its matrix, (D, 2 F)."""
        x, (y,) = reshape.invars[0], reshape.outvars
        if isinstance(x, core.Literal) or self.rows.of(x) or self.rows.of(y) or not is_seen(x.aval.dtype):
            return False
        return min(x.aval.ndim, y.aval.ndim) >= 2 and same_size(x.aval.shape[0], y.aval.shape[0])

    def _move_constraints_to_calls(self) -> None:
        """Leaves to the calls a constraint of what they give, and one that asks otherwise than an earlier one.

        All others are of arguments, or of what a product or a map makes: of an array in memory each has one.
        """
        equations: list[Equation] = self.jaxpr.eqns
        asked: dict[Any, Constraint] = {}
        for i, equation in enumerate(equations):
            if self.kinds[i] != "map" or equation.primitive.name not in CONSTRAINTS:
                continue
            x, constraint = self.bare(equation.invars[0]), constraint_of(equation)
            if self.maker(x, "call") is not None or not constraint.asks_as(asked.setdefault(x, constraint)):
                self.kinds[i] = "call"

    def _move_masks_to_calls(self) -> None:
        """Leaves masks that depend on no product to the calls, with what they alone are made of: of a byte each.

        A mask that is made of vectors of rows and columns alone stays a map: an epilogue reads these at less.
        """
        equations: list[Equation] = self.jaxpr.eqns
        behind: set[Any] = set()  # what depends on products
        from_tiles: set[Any] = set()  # what maps make of tiles that calls or arguments are
        for i, equation in enumerate(equations):
            inputs = variables(equation.invars)
            if self.kinds[i] == "product" or not behind.isdisjoint(inputs):
                behind |= set(equation.outvars)
            elif self.kinds[i] in ("map", "cast") and any(x in from_tiles or self._is_given_tile(x) for x in inputs):
                from_tiles |= set(equation.outvars)
        masks: set[int] = set()
        for i, equation in reversed(list(enumerate(equations))):
            if self.kinds[i] not in ("map", "cast") or equation.primitive.name == "name":
                continue
            readers = {j for x in equation.outvars for j in self.readers[x]}
            is_mask = all(x.aval.dtype == bool and self.is_tile(x) and x in from_tiles for x in equation.outvars)
            if (is_mask or (readers and readers <= masks)) and behind.isdisjoint(equation.outvars):
                masks.add(i)
        self.kinds = ["call" if i in masks else kind for i, kind in enumerate(self.kinds)]

    def _is_given_tile(self, x: Any) -> bool:
        """True for a tile that no map makes."""
        number = self.makers.get(x, -1)
        return self.is_tile(x) and (number < 0 or self.kinds[number] not in ("map", "cast"))

    def is_tile(self, x: Any) -> bool:
        """True for a variable with rows and columns."""
        count = self.rows.of(x)
        return count > 0 and not same_size(math.prod(x.aval.shape[count:]), 1)

    def _move_passes_to_calls(self) -> None:
        """Moves what stands between calls into them: no epilogue makes it, and it rounds as the function does."""
        equations: list[Equation] = self.jaxpr.eqns
        moved = {i for i, kind in enumerate(self.kinds) if kind in ("map", "cast")}
        changes = True
        while changes:
            stays = {i for i in moved if not self._is_between_calls(i, equations[i], moved)}
            moved, changes = moved - stays, bool(stays)
        self.kinds = ["call" if i in moved else kind for i, kind in enumerate(self.kinds)]

    def _is_between_calls(self, number: int, equation: Equation, moved: set[int]) -> bool:
        """True if calls, or equations that are moved to these, alone make what it reads and read what it makes."""
        makers = {self.makers.get(x, -1) for x in variables(equation.invars)} - {-1}
        readers = {j for x in equation.outvars for j in self.readers[x]}
        is_alone = all(j in moved or self.kind_of_reader(j) == "call" for j in makers | readers)
        return is_alone and bool(readers) and equation.primitive.name != "name"

    def _move_copies_to_calls(self) -> None:
        """Moves an equation into the calls that alone read it, unless its result is smaller than its inputs."""
        equations: list[Equation] = self.jaxpr.eqns
        for i, equation in reversed(list(enumerate(equations))):
            kinds = {self.kind_of_reader(j) for x in equation.outvars for j in self.readers[x]}
            if kinds == {"call"} and equation.primitive.name != "name" and self._is_no_less(i, equation):
                self.kinds[i] = "call"

    def _move_casts_to_calls(self) -> None:
        """Moves a cast to fewer bits into the operation that makes what it alone reads, as rows of an embedding."""
        equations: list[Equation] = self.jaxpr.eqns
        for i, equation in enumerate(equations):
            if self.kinds[i] != "cast" or equation.primitive.name not in CASTS or not narrows(equation):
                continue
            x = equation.invars[0]
            maker = self.maker(x, "call")
            if self.is_tile(x) and set(self.readers[x]) == {i} and maker is not None and not inner_jaxprs(maker):
                self.kinds[i] = "call"

    def _is_no_less(self, number: int, equation: Equation) -> bool:
        """True for copies, squares, casts to more bytes, and what is computed in float32 beside products of 16 bits."""
        if self.kinds[number] == "cast":
            maker = self.makers.get(equation.invars[0], -1)
            return _widens(equation) or (maker >= 0 and self.kinds[maker] == "call")
        if self.kinds[number] != "map" or equation.primitive.name in REDUCTIONS:
            return False
        is_wide = all(x.aval.dtype.itemsize > self.dtype.itemsize for x in equation.outvars)
        is_copy = equation.primitive.name in _COPIES and not self._is_part_of_product(equation)
        return is_wide or is_copy or is_square(equation)

    def _is_part_of_product(self, equation: Equation) -> bool:
        """True for some columns of what products make, as v is of one product for q, k and v: a tile of its own."""
        if equation.primitive.name not in ("slice", "split"):
            return False
        x, parts = equation.invars[0], equation.outvars
        while (number := self.makers.get(x, -1)) >= 0 and self.jaxpr.eqns[number].primitive.name in ("reshape", *CASTS):
            x = self.jaxpr.eqns[number].invars[0]
        return all(map(self.is_tile, parts)) and number >= 0 and self.kinds[number] in ("product", "absorbed", "map")

    def _is_named_part(self, x: Any) -> bool:
        """True for a named part of a product's columns: what reads it is made of the product, in the same epilogue."""
        maker = self.maker(x, "map")
        while maker is not None and maker.primitive.name == "name":
            x = maker.invars[0]
            maker = self.maker(x, "map")
            if maker is not None and self._is_part_of_product(maker):
                return True
        return False

    def is_read_in_halves(self, x: Any) -> bool:
        """True for an array (..., 2 F) of which either half is read alone, also behind casts, names and constraints."""
        for number in self.readers[x]:
            reader = None if number < 0 else self.jaxpr.eqns[number]
            if reader is None:
                return False
            if reader.primitive.name in CASTS | MARKS:
                if not self.is_read_in_halves(reader.outvars[0]):
                    return False
            elif reader.primitive.name not in ("slice", "split") or any(
                not same_size(2 * y.aval.shape[-1], x.aval.shape[-1]) for y in reader.outvars
            ):
                return False
        return True

    def parts_with_norms(self, x: Any) -> list[Any]:
        """The parts of a product's columns, in order, if parts alone read it, and heads of some of them have norms.

        As q, k and v of one product are, where heads of q and k have norms.
        """
        found: list[tuple[int, Any]] = []
        open_ = [x]
        while open_:
            y = open_.pop()
            for j in self.readers[y]:
                equation = None if j < 0 else self.jaxpr.eqns[j]
                if equation is not None and equation.primitive.name in ("reshape", *CASTS):
                    open_ += equation.outvars
                elif equation is None or not self._is_part_of_product(equation):
                    return []
                else:
                    found += _parts(equation, self.rows.of(y))
        found.sort(key=lambda part: part[0])
        sizes = [math.prod(y.aval.shape[self.rows.of(y) :]) for y in (x, *(part for _, part in found))]
        ends = [begin + size for (begin, _), size in zip(found, sizes[1:], strict=True)]
        is_whole = [0, *ends] == [*(begin for begin, _ in found), sizes[0]]
        has_norms = any(self._has_sums_of_heads(y) for _, y in found)
        return [self._as_named(y) for _, y in found] if is_whole and has_norms else []

    def _as_named(self, x: Any) -> Any:
        """The variable, or what alone reads it and has a name, behind reshapes: the same array in memory."""
        y = x
        while len(self.readers[y]) == 1 and self.kind_of_reader(self.readers[y][0]) == "map":
            reader = self.jaxpr.eqns[self.readers[y][0]]
            if reader.primitive.name not in ("reshape", "name"):
                break
            (y,) = reader.outvars
            x = y if reader.primitive.name == "name" else x
        return x

    def _has_sums_of_heads(self, x: Any) -> bool:
        """True for columns whose heads have norms."""
        open_ = [x]
        while open_:
            for equation in (self.jaxpr.eqns[j] for j in self.readers[open_.pop()] if j >= 0):
                if equation.primitive.name in REDUCTIONS:
                    return all(map(self.is_tile, equation.outvars))
                if equation.primitive.name in ("reshape", "name", *CASTS) or is_square(equation):
                    open_ += equation.outvars
        return False

    def kind_of(self, equation: Equation) -> str:
        """The kind of an equation that has results."""
        return self.kinds[self.makers[equation.outvars[0]]]

    def kind_of_reader(self, number: int) -> str:
        """The kind of the equation with this number, or "result"."""
        return "result" if number < 0 else self.kinds[number]

    def is_read_outside(self, x: Any) -> bool:
        """True for a variable that a call or the caller reads, directly or through maps."""
        open_, seen = [x], {x}
        while open_:
            for j in self.readers[open_.pop()]:
                if self.kind_of_reader(j) in ("call", "result"):
                    return True
                if self.kinds[j] in ("map", "cast"):
                    new = set(self.jaxpr.eqns[j].outvars) - seen
                    seen |= new
                    open_ += new
        return False

    @functools.cached_property
    def _anchors(self) -> set[Any]:
        """The results of maps' equations that are values; all others are computed in the values that read them.

        In a derivative a value of one tile, or none, is no value where one of other tiles reads it, in an epilogue
        behind: there it is computed again, and what JAX keeps of an activation is one tile.
        """
        readers: dict[Any, set[Any]] = {}  # for each such result the values in which it is read; itself if it is one
        candidates: dict[Any, set[Any]] = {}
        is_cast_read: dict[Any, bool] = {}
        for i, equation in reversed(list(enumerate(self.jaxpr.eqns))):
            if self.kinds[i] not in ("map", "cast"):
                continue
            for x in equation.outvars:
                used: set[Any] = set()
                is_read = self._is_value(equation, x)
                for j in self.readers[x]:
                    if self.kind_of_reader(j) in ("map", "cast"):
                        used |= set().union(*(readers[y] for y in self.jaxpr.eqns[j].outvars))
                        is_read = is_read or any(is_cast_read.get(y, False) for y in self.jaxpr.eqns[j].outvars)
                    else:
                        is_read = True
                if self.kinds[i] == "cast":
                    readers[x], is_cast_read[x] = used, is_read
                    continue
                is_anchor = is_read or (len(used) > 1 and equation.primitive.name not in _COPIES) or x in self._sums
                is_anchor = is_anchor and x not in self._made_again
                readers[x] = {x} if is_anchor else used
                if is_anchor and not is_read:
                    candidates[x] = used
        anchors = {x for x, used in readers.items() if x in used}
        if self._is_derivative:
            for x, used in reversed(candidates.items()):  # inputs before their readers
                tiles = self._tiles_read(x, anchors)
                if len(tiles) <= 1 and any(self._tiles_read(y, anchors) - tiles - {x} for y in used):
                    anchors.remove(x)
        return anchors

    @functools.cached_property
    def _sums(self) -> set[Any]:
        """Sums of several products that are read as the sum alone, and by more than a sum: values, kept as one array.

        As x w + (x a) b of a low-rank adapter, in front of an activation.
        """
        if self._is_derivative:
            return set()
        counts: dict[Any, int] = {}  # of the products that a variable is a sum of
        for i, equation in enumerate(self.jaxpr.eqns):
            kind, name = self.kinds[i], equation.primitive.name
            if kind == "product":
                counts[self.rows.results[i]] = 1
            elif kind == "cast" or (kind == "map" and (name in MARKS or name in _LINEAR)):
                tiles = [x for x in variables(equation.invars) if self.is_tile(x)]
                is_sum = len(equation.outvars) == 1 and all(x in counts and len(self.readers[x]) == 1 for x in tiles)
                if tiles and is_sum and (len(tiles) == 1 or name != "mul"):
                    counts[equation.outvars[0]] = sum(counts[x] for x in tiles)
        return {x for x, count in counts.items() if count > 1 and self._is_read_in_maps(x, counts)}

    def _is_read_in_maps(self, x: Any, sums: Collection[Any]) -> bool:
        """True for a sum that an equation reads, also behind casts and copies, that is no sum itself."""
        open_ = [x]
        while open_:
            for j in self.readers[open_.pop()]:
                equation = None if j < 0 else self.jaxpr.eqns[j]
                if equation is None or self.kinds[j] not in ("map", "cast"):
                    continue
                if equation.primitive.name in _COPIES:
                    open_ += equation.outvars
                elif equation.primitive.name not in _SUMS and not any(y in sums for y in equation.outvars):
                    return True
        return False

    @functools.cached_property
    def _made_again(self) -> set[Any]:
        """The tiles that calls read and that are no more than a product of fewer bytes: all readers compute them again.

        As capped logits in float32, of a product in bfloat16: XLA's passes read the product too.
        """
        numbered = [(i, e) for i, e in enumerate(self.jaxpr.eqns) if self.kinds[i] == "map"]
        return {e.outvars[0] for i, e in numbered if self._is_made_again(e, e.outvars[0])}

    def _is_made_again(self, equation: Equation, x: Any) -> bool:
        if equation.primitive.name in (*REDUCTIONS, *MARKS) or x in self._kept or not self.is_tile(x):
            return False
        read = [(y, self.kind_of_reader(j)) for y in self._casts(x) for j in self.readers[y]]
        if not {kind for _, kind in read} <= {"call", "map", "cast"}:
            return False
        by_calls = [y for y, kind in read if kind == "call"]  # which may read it in 16 bits, as attention does
        if not by_calls or any(y.aval.dtype.itemsize <= self.dtype.itemsize for y in by_calls):
            return False
        equations, inputs = self._inlined(x, set())
        tiles = {y for y in map(self.uncast, inputs) if self.is_tile(y)}
        are_narrow = all(self.maker(y, "product") is not None and y.aval.dtype == self.dtype for y in tiles)
        return len(tiles) == 1 and are_narrow and not any(e.primitive.name in REDUCTIONS for e in equations)

    def _casts(self, x: Any) -> list[Any]:
        """The variable, and what it is cast to."""
        found = [x]
        for y in found:
            casts = (self.jaxpr.eqns[j] for j in self.readers[y] if self.kind_of_reader(j) == "cast")
            found += [cast.outvars[0] for cast in casts]
        return found

    @functools.cached_property
    def _is_derivative(self) -> bool:
        return is_derivative(self.jaxpr)

    def _is_value(self, equation: Equation, x: Any) -> bool:
        """True for a map's result that is a value wherever it is read: a sum, and what a policy may keep.

        A sum of each head is none: an epilogue has whole heads, and makes the sum for itself. A maximum is one, of what
        is stored.
        """
        is_named = equation.primitive.name == "name" and not self._is_derivative
        is_finished = equation.primitive.name in REDUCTIONS
        is_finished &= not self.is_tile(x) or equation.primitive.name != "reduce_sum"
        is_finished |= equation.primitive.name in CUSTOM_VJPS and not self.is_tile(x)  # as known sums of rows
        return is_finished or ((is_named or x in self._kept) and is_float(x.aval.dtype))

    def _tiles_read(self, x: Any, anchors: set[Any]) -> set[Any]:
        """The arrays with rows and columns that a value of a map is computed from."""
        _, inputs = self._inlined(x, anchors)
        return {y for y in map(self.uncast, inputs) if self.is_tile(y)}

    def _levels(self) -> dict[int, int]:
        """For each call's equation how many calls come before it with a product or a map between; as late as it may."""
        level: dict[Any, int] = {}
        own: dict[int, int] = {}
        for i, equation in enumerate(self.jaxpr.eqns):
            is_call = self.kinds[i] == "call"
            depth = 0
            for x in variables(equation.invars):
                behind_call = x in self.makers and self.kinds[self.makers[x]] == "call"
                depth = max(depth, level.get(x, 0) + (behind_call and not is_call))
            level |= dict.fromkeys(equation.outvars, depth)
            if is_call:
                own[i] = depth
        for i in reversed(own):
            readers = [j for x in self.jaxpr.eqns[i].outvars for j in self.readers[x]]
            if readers and all(self.kind_of_reader(j) == "call" for j in readers):
                own[i] = min(own[j] for j in readers)
        return own

    def _calls(self) -> list[list[int]]:
        """The equations of each call: those of a level that read each other's results."""
        levels, group = self._levels(), {}
        for i in levels:
            group[i] = {i}
        for i in levels:
            for x in self.jaxpr.eqns[i].outvars:
                for j in self.readers[x]:
                    if j in levels and levels[j] == levels[i] and group[j] is not group[i]:
                        merged = group[i] | group[j]
                        group |= dict.fromkeys(merged, merged)
        return [sorted(one) for one in {id(one): one for one in group.values()}.values()]

    def in_order(self) -> list[Unit]:
        """All units, each after those whose results it reads."""
        anchors, units = self._anchors, list[Unit]()
        for i, equation in enumerate(self.jaxpr.eqns):
            if self.kinds[i] == "maximum":
                units.append(Unit(i, "maximum", [equation], equation.outvars, variables(equation.invars)))
            elif self.kinds[i] == "product":
                units.append(Unit(i, "product", [equation], [self.rows.results[i]], variables(equation.invars)))
            elif self.kinds[i] == "map":
                for x in (x for x in equation.outvars if x in anchors):
                    equations, inputs = self.inlined(x)
                    units.append(Unit(i, "map", equations, [x], inputs))
        for numbers in self._calls():
            equations = [self.jaxpr.eqns[i] for i in numbers]
            made = dict.fromkeys(x for equation in equations for x in equation.outvars)  # in the equations' order
            results = [x for x in made if any(j not in numbers for j in self.readers[x])]
            equations = self._with_made_again(numbers)
            units.append(Unit(numbers[0], "call", equations, results, free_variables(equations)))
        return self._sorted(units)

    def _with_made_again(self, numbers: Sequence[int]) -> list[Equation]:
        """The equations of a call, with those of the arrays that it computes again."""
        every = set(numbers)
        for x in (x for i in numbers for x in variables(self.jaxpr.eqns[i].invars)):
            if self.uncast(x) in self._made_again:
                every |= {self.makers[e.outvars[0]] for e in self._inlined(x, self._anchors)[0]}
        return [self.jaxpr.eqns[i] for i in sorted(every)]

    def inlined(self, result: Any) -> tuple[list[Equation], list[Any]]:
        """The equations that compute one value of a map, and the variables that these read of others."""
        return self._inlined(result, self._anchors)

    def _inlined(self, result: Any, anchors: set[Any]) -> tuple[list[Equation], list[Any]]:
        equations: set[int] = set()
        inputs: dict[Any, None] = {}
        open_ = [result]
        while open_:
            x = open_.pop()
            i = self.makers.get(x, -1)
            is_value = x in anchors and x is not result and not self._is_named_part(x)
            is_inlined = i >= 0 and self.kinds[i] == "map" and not is_value
            if i >= 0 and self.kinds[i] == "cast":
                open_ += variables(self.jaxpr.eqns[i].invars)
                equations.add(i)
            elif not is_inlined:
                inputs[x] = None
            elif i not in equations:
                equations.add(i)
                open_ += variables(self.jaxpr.eqns[i].invars)
        return [self.jaxpr.eqns[i] for i in sorted(equations)], sorted(inputs, key=lambda x: self.makers.get(x, -1))

    def _sorted(self, units: Sequence[Unit]) -> list[Unit]:
        """The units, each after those whose results it reads, otherwise as their first equations come."""
        maker = {x: unit for unit in units for x in unit.results}
        waits: dict[Unit, int] = {}
        users: dict[Unit, list[Unit]] = defaultdict(list)
        for unit in units:
            needed = {maker[y] for x in unit.inputs for y in [self.uncast(x)] if y in maker} - {unit}
            waits[unit] = len(needed)
            for other in needed:
                users[other].append(unit)
        late = self._late()
        ready = [(late.get(unit.number, unit.number), i, unit) for i, unit in enumerate(units) if not waits[unit]]
        heapq.heapify(ready)
        order, counter = [], itertools.count(len(units))
        while ready:
            *_, unit = heapq.heappop(ready)
            order.append(unit)
            for user in users[unit]:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (late.get(user.number, user.number), next(counter), user))
        assert len(order) == len(units), "units that wait for each other"
        return order

    def _late(self) -> dict[int, float]:
        """The places of gradients of weights in the order: h^T d comes after d W^T, whose epilogue may make h."""
        dots = {i: dot for i, dot in self.rows.dots.items() if self.kinds[i] == "product"}
        last = {self.uncast(dot.a): self.last_terms.get(i, i) for i, dot in dots.items() if not dot.transpose_a}
        places: dict[int, float] = {}
        for i, dot in dots.items():
            if dot.transpose_a:
                behind = max(last.get(self.uncast(x), -1) for x in (dot.a, dot.b))
                places |= {i: behind + 0.5} if behind > i else {}
        return places

    def maker(self, x: Any, *kinds: str) -> Equation | None:
        """The equation of one of these kinds that a variable is a result of."""
        number = -1 if isinstance(x, core.Literal) else self.makers.get(x, -1)
        return self.jaxpr.eqns[number] if number >= 0 and self.kinds[number] in kinds else None

    def bare(self, x: Any) -> Any:
        """The variable that has these elements first: without casts, names and constraints."""
        while (equation := self.maker(x, "map", "cast")) is not None:
            if self.kinds[self.makers[x]] == "map" and equation.primitive.name not in MARKS:
                break
            x = equation.invars[0]
        return x

    def uncast(self, x: Any) -> Any:
        """The variable that a cast is of."""
        while (cast := self.maker(x, "cast")) is not None:
            x = cast.invars[0]
        return x


def _parts(cut: Equation, rows: int) -> Iterator[tuple[int, Any]]:
    """The parts of columns that a slice or a split gives, each with its first column: of an axis behind these rows."""
    shape, starts = cut.invars[0].aval.shape, cut.params.get("start_indices")
    width = math.prod(shape[rows + 1 :])
    if starts is None:
        sizes = cut.params["sizes"] if cut.params["axis"] == rows else ()
        begins = itertools.accumulate(sizes[:-1], initial=0)
        yield from ((begin * width, y) for begin, y in zip(begins, cut.outvars, strict=False))
    elif all(
        same_size(*pair) for i, pair in enumerate(zip(shape, cut.outvars[0].aval.shape, strict=True)) if i != rows
    ):
        yield starts[rows] * width, cut.outvars[0]


def narrows(cast: Equation) -> bool:
    """True for a cast to fewer bits."""
    return bool(cast.invars[0].aval.dtype.itemsize > cast.outvars[0].aval.dtype.itemsize)


def _widens(cast: Equation) -> bool:
    return bool(cast.invars[0].aval.dtype.itemsize < cast.outvars[0].aval.dtype.itemsize)


def is_square(equation: Equation) -> bool:
    """True for the square of one argument, element by element."""
    inputs = equation.invars
    is_product = equation.primitive.name == "mul" and inputs[0] is inputs[1]
    return is_product or equation.primitive.name in ("square", "integer_pow")
