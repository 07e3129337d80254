"""The masks of a site as arguments of `coda.attention`: a band, intervals, ids, dense arrays; rows that see nothing.

A comparison of a key's position with what does not depend on keys bounds the keys that a row sees. Equality of what
depends on rows with what depends on keys is one of ids. All else is a dense mask, as small as its operands are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend.masks import Intervals
from coda_jax.fusion.attention.axes import Atom, Unlike, atoms_of, size_of, whole
from coda_jax.fusion.attention.bounds import Bound, bounds_of, known_bounds, static_band
from coda_jax.fusion.attention.functions import ScoreFunction, Term, is_taken, lowest
from coda_jax.fusion.attention.layout import Layout
from coda_jax.fusion.attention.linear import dtype_of, on_diagonal
from coda_jax.fusion.attention.logic import conjuncts, two_valued
from coda_jax.fusion.attention.terms import ADDED, SUMMED, WHERE, Mask, Terms
from coda_jax.fusion.attention.trees import Node, Trees, merged, positions, value_of
from coda_jax.fusion.makers import Makers

Condition = tuple[Node, bool]  # and the value that it has where a query sees a key
# The result of a row that sees no key, in the original. ADDED_MEAN: a number that hides scores was added to them.
NOTHING, NAN, MEAN, ADDED_MEAN, ZERO = "nothing", "nan", "mean", "added mean", "zero"
_HIDING = -1e20  # scores are lost to what is added to them
LOW = -2e4  # a log-sum-exp whose last place is more than 1e-3, so that a gradient by it is none


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks of a site.

    Attributes:
      layout: of its arrays.
      bounds: of the keys that rows see.
      rows: conditions of rows.
      ids: what must be equal, of rows and of keys.
      keys: conditions of keys, which are ids where no others are.
      dense: conditions of pairs.
      biases: added terms that are arrays, with their factors.
      function: the curve of scores and added terms of positions; None where there is neither.
      empty: what a row that sees nothing is: "nan", the "mean" of all values, "zero"; "nothing" where there is none.
      has_low_biases: whether a bias may make all scores of a row so low that their log-sum-exp is not exact.
    """

    layout: Layout
    bounds: tuple[Bound, ...]
    rows: tuple[Condition, ...]
    ids: tuple[Node, Node] | None
    keys: tuple[Condition, ...]
    dense: tuple[Condition, ...]
    biases: tuple[Term, ...]
    function: ScoreFunction | None
    empty: str
    has_low_biases: bool

    def arguments(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        """The arguments of `coda.attention`."""
        return {**self._of_bounds(values), **self._of_ids(values), **self._of_pairs(values)}

    def _of_bounds(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        layout = self.layout
        queries, keys = size_of(layout.rows), size_of(layout.keys)
        if self._band is not None and not (self.rows and self._rows_are_intervals):
            return _band_arguments(*self._band, queries, keys)
        if self._has_dense or not (self.bounds or self._rows_are_intervals):
            return {}
        groups = [layout.batch, layout.rows]
        order = [atom for group in groups for atom in group]
        first, last = jnp.zeros((1,) * len(order), jnp.int32), jnp.full((1,) * len(order), keys - 1, jnp.int32)
        for bound in self.bounds:
            value = bound.value(values, order)
            first = jnp.maximum(first, value) if bound.is_first else first
            last = last if bound.is_first else jnp.minimum(last, value)
        if self._rows_are_intervals:
            last = jnp.where(_all(self.rows, values, order), last, -1)
        shape = (size_of(layout.batch), queries)
        return {"mask": Intervals(*(jnp.broadcast_to(merged(x, groups), shape) for x in (first, last)))}

    @property
    def _band(self) -> tuple[int | None, int | None] | None:
        """The bounds as a band, if they are one; none of no bounds, nor of those that leave no key."""
        band = static_band(self.bounds, self.layout) if self.bounds else None
        return None if band is None or (None not in band and sum(band) < 0) else band  # type: ignore[arg-type]

    @property
    def _has_dense(self) -> bool:
        """Whether there is a mask of pairs, which then has intervals too, as `coda.attention` takes one of both."""
        return bool(self.dense or (self.keys and self.ids is not None))

    @property
    def _rows_are_intervals(self) -> bool:
        """Whether rows that see nothing have empty intervals: where neither ids say it nor a dense mask."""
        return bool(self.rows) and not self._has_dense and not self._has_own_ids

    @property
    def _has_own_ids(self) -> bool:
        """Whether conditions of rows and keys become ids."""
        if self.ids is not None or self._has_dense:
            return False
        return bool(self.keys or (self.rows and not self.bounds))

    def _of_ids(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        layout = self.layout
        if self.ids is not None:
            of_rows, of_keys = self.ids
            rows = self._of_axis(lambda order: value_of(of_rows, values, order), layout.rows)
            keys = self._of_axis(lambda order: value_of(of_keys, values, order), layout.keys)
        elif self._has_own_ids:
            rows = self._of_axis(lambda order: jnp.where(_all(self.rows, values, order), 0, 2), layout.rows)
            keys = self._of_axis(lambda order: jnp.where(_all(self.keys, values, order), 0, 1), layout.keys)
        else:
            return {}
        return {"segment_ids": rows, "key_value_segment_ids": keys}

    def _of_axis(self, value: Callable[[Sequence[Atom]], Any], axis: Sequence[Atom]) -> jax.Array:
        """(B, T) or (B, S) int32."""
        groups = [self.layout.batch, axis]
        x = merged(value([atom for group in groups for atom in group]).astype(jnp.int32), groups)
        return jnp.broadcast_to(x, tuple(map(size_of, groups)))

    def _of_pairs(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        groups = self.layout.pairs
        order = [atom for group in groups for atom in group]
        found: dict[str, Any] = {}
        if self._has_dense:
            mask = _all((*self.dense, *self.keys, *self.rows), values, order)
            for bound in self.bounds if self._band is None else ():
                position, limit = positions(self.layout.keys, order), bound.value(values, order)
                mask = mask & (position >= limit if bound.is_first else position <= limit)
            found["mask"] = merged(mask, groups)
        if self.biases:
            terms = [merged(_scaled(node, factor, values, order), groups) for node, factor in self.biases]
            total = terms[0]
            for term in terms[1:]:
                total = total.astype(jnp.float32) + term
            found["bias"] = total
        return found


def _scaled(node: Node, factor: float, values: Mapping[Any, Any], order: Sequence[Atom]) -> jax.Array:
    x: jax.Array = value_of(node, values, order)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return x if factor == 1 else x.astype(jnp.promote_types(x.dtype, jnp.float32)) * factor


def _all(conditions: Sequence[Condition], values: Mapping[Any, Any], order: Sequence[Atom]) -> Any:
    """The condition that all hold."""
    total: Any = jnp.ones((1,) * len(order), bool)
    for i, (node, sees) in enumerate(conditions):
        value = value_of(node, values, order)
        value = value if sees else ~value
        total = total & value if i else value
    return total


def _band_arguments(left: int | None, right: int | None, queries: int, keys: int) -> dict[str, Any]:
    """A band i - left <= j <= i + right in the words of `coda.attention`."""
    if left is None and right is None:
        return {}
    offset = right if right is not None else -left  # type: ignore[operator]
    window = None if left is None else (left + offset, 0 if right is not None else queries + keys + abs(offset))
    return {"is_causal": right is not None, "local_window_size": window, "query_offset": offset}


def masks_of(terms: Terms, layout: Layout, trees: Trees) -> Masks:
    """The masks and biases of a site.

    Raises:
      Unlike: a row that sees nothing would have another value, or an array would be as large as the scores.
    """
    found = _sorted_masks([(x.condition, x.sees) for x in terms.masks], layout, trees)
    removed = {id(mask.bias) for mask in terms.masks if mask.kind == ADDED}
    biases = tuple(one for one in terms.biases if id(one[0]) not in removed)
    is_low = terms.sink is None and any(_may_hide(bias, trees) for bias in biases)
    sees_all_rows = found.sees_all_rows or terms.sink is not None  # with a sink such a row is 0
    empty = NOTHING if sees_all_rows else _empty(terms.masks, biases, terms.zeroes, is_low=is_low)
    empty = NAN if is_low and empty == NOTHING else empty
    arrays, of_positions = _sorted_biases(biases, layout, trees)
    function = ScoreFunction(layout, terms.curve, of_positions) if terms.curve or of_positions else None
    if function is not None and terms.curve is not None and not is_taken(function):
        raise Unlike("scores pass through a function that coda.attention does not take")
    own = (tuple(found.bounds), tuple(found.rows), found.ids, tuple(found.keys), tuple(found.dense))
    return Masks(layout, *own, arrays, function, empty, is_low)


def _may_hide(bias: Term, trees: Trees) -> bool:
    """True for an added term that may be -inf, or make scores so low that their sum is not exact."""
    node, factor = bias
    if lowest(bias, trees) > LOW:
        return False
    found = two_valued(node)
    if found is not None:
        return not all(np.isfinite(x * factor) for x in (found.if_false, found.if_true))
    return any(jnp.issubdtype(leaf.var.aval.dtype, jnp.floating) for leaf in node.leaves)


def _empty(masks: Sequence[Mask], biases: Sequence[Term], zeroes: str, *, is_low: bool) -> str:
    """The value in the original of a row that sees nothing; `is_low`: whether a bias may hide keys.

    Raises:
      Unlike: that is not known.
    """
    if zeroes == "all" and not biases:
        return ZERO
    if zeroes != "none":
        raise Unlike("a mask that may hide all keys of a row, and sets some probabilities to 0")
    fills = {mask.fill for mask in masks if mask.kind != SUMMED}
    if fills <= {-np.inf}:
        return NAN
    if len(masks) == 1 and masks[0].kind == ADDED and masks[0].fill <= _HIDING and not biases:
        return ADDED_MEAN
    if any(mask.kind == ADDED for mask in masks):
        raise Unlike("a number is added to the scores of masked keys, which may be all keys of a row")
    if len(fills) > 1 or any(mask.kind != WHERE or not mask.is_innermost for mask in masks) or is_low:
        raise Unlike("several masks or a bias, which may hide all keys of a row")
    return MEAN


def _sorted_biases(biases: Sequence[Term], layout: Layout, trees: Trees) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """The added terms that stay arrays, and those that are functions of positions.

    Raises:
      Unlike: a term is scores, or its array would be about as large as the scores.
    """
    every = np.prod([size_of(group) for group in layout.pairs], dtype=float)
    arrays, of_positions = list[Term](), list[Term]()
    for bias in biases:
        node, _ = bias
        atoms = node.atoms()
        dense = [leaf for leaf in node.leaves if _is_of_pairs(leaf.atoms(), layout)]
        if any(_is_of_scores(leaf, layout, trees.makers) for leaf in dense):
            raise Unlike("two products of scores are added")
        size = np.prod([size_of(group) for group in layout.pairs if atoms & set(group)], dtype=float)
        if dense or not _is_of_pairs(atoms, layout):
            arrays.append(bias)
        elif is_taken(ScoreFunction(layout, None, (bias,))):
            of_positions.append(bias)
        elif 4 * size > every:
            raise Unlike("a function of positions is added to its scores, which coda.attention takes as an array alone")
        else:
            arrays.append(bias)
    return tuple(arrays), tuple(of_positions)


def _is_of_scores(leaf: Node, layout: Layout, makers: Makers) -> bool:
    """True for the product of an array of rows with one of keys."""
    equation = makers.maker(leaf.var)
    if equation is None or equation.primitive.name != "dot_general":
        return False
    (sums, _), (batch, _) = equation.params["dimension_numbers"]
    first = equation.invars[0].aval.ndim - len(sums)
    sides = [set(atoms_of(labels)) for labels in (leaf.labels[len(batch) : first], leaf.labels[first:])]
    rows, keys = set(layout.rows), set(layout.keys)
    return any(one & rows and other & keys for one, other in (sides, sides[::-1]))


def _is_of_pairs(atoms: frozenset[Atom], layout: Layout) -> bool:
    return bool(atoms & set(layout.rows)) and bool(atoms & set(layout.keys))


@dataclasses.dataclass
class _Sorted:
    """Conditions, sorted; whether every row is known to see a key."""

    bounds: list[Bound] = dataclasses.field(default_factory=list)
    rows: list[Condition] = dataclasses.field(default_factory=list)
    ids: tuple[Node, Node] | None = None
    keys: list[Condition] = dataclasses.field(default_factory=list)
    dense: list[Condition] = dataclasses.field(default_factory=list)
    sees_all_rows: bool = True


def _sorted_masks(conditions: Sequence[Condition], layout: Layout, trees: Trees) -> _Sorted:
    found, every = _Sorted(), [one for node, sees in conditions for one in conjuncts(node, is_true=sees)]
    twins = _twins(layout)
    holds = []
    for node, sees in every:
        known = known_bounds(node, sees, layout, trees)
        bounds = known if known is not None else bounds_of(node, sees, layout)
        if node.op == "constant" and not np.ndim(node.var) and bool(node.var) == sees:
            continue
        if known is not None:
            holds.append(all(bound.holds_on_diagonal for bound in known))
        else:
            holds.append(twins is not None and on_diagonal(node, twins) is sees)
        if bounds is not None:
            found.bounds += bounds
        else:
            _sort(node, sees, found, layout)
    found.sees_all_rows = all(holds) or _has_static_keys(found, layout)
    return found


def _sort(node: Node, sees: bool, found: _Sorted, layout: Layout) -> None:
    """Puts a condition that bounds no keys where it belongs."""
    atoms, batch = node.atoms(), set(layout.batch)
    of_rows, of_keys = batch | set(layout.rows), batch | set(layout.keys)
    if atoms <= of_rows and atoms & set(layout.rows):
        found.rows.append((node, sees))
    elif atoms <= of_keys:
        found.keys.append((node, sees))
    elif found.ids is None and node.op == ("eq" if sees else "ne") and (pair := _id_pair(node, of_rows, of_keys)):
        found.ids = pair
    else:
        found.dense.append((node, sees))


def _id_pair(node: Node, of_rows: set[Atom], of_keys: set[Atom]) -> tuple[Node, Node] | None:
    """Both sides of an equality, that of rows first; None where they are others, or no integers of 32 bits."""
    for arg in node.args:
        dtype = dtype_of(arg)
        if not (dtype == np.dtype(bool) or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 4)):
            return None
    for rows, keys in (node.args, node.args[::-1]):
        if rows.atoms() <= of_rows and keys.atoms() <= of_keys:
            return rows, keys
    return None


def _twins(layout: Layout) -> dict[Atom, Atom] | None:
    """The atoms of rows by those of keys, where there is a key for each row's number."""
    rows, keys = whole(layout.rows), whole(layout.keys)
    sizes = [(row.size, key.size) for row, key in zip(rows, keys, strict=False)]
    is_one = len(rows) == len(keys) == 1 and rows[0].size <= keys[0].size
    is_same = len(rows) == len(keys) and all(row == key for row, key in sizes)
    return dict(zip(keys, rows, strict=True)) if is_one or is_same else None


def _has_static_keys(found: _Sorted, layout: Layout) -> bool:
    """True where bounds alone, which are numbers, leave each row a key."""
    if found.rows or found.ids is not None or found.keys or found.dense:
        return False
    queries, keys = size_of(layout.rows), size_of(layout.keys)
    first, last = np.zeros(queries, np.int64), np.full(queries, keys - 1, np.int64)
    for bound in found.bounds:
        numbers = bound.numbers(layout)
        if numbers is None:
            return False
        first = np.maximum(first, numbers) if bound.is_first else first
        last = last if bound.is_first else np.minimum(last, numbers)
    return bool(np.all(first <= last))
