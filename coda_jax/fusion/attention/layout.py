"""The atoms of a site that are sequences, heads, rows and keys; q, k and v as `coda.attention` has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, FLOATS_OF_16_BITS
from coda_jax.fusion.attention.axes import VIEWS, Atom, Labels, Unlike, atoms_of, labels_of, moved_back, size_of
from coda_jax.fusion.attention.meanings import Site
from coda_jax.fusion.attention.trees import merged, spread
from coda_jax.fusion.makers import Makers

MOST_WIDTH = 256  # of heads
_LEAST_KEYS = 1024  # of one head of one sequence, whose backward pass has few tiles to run beside each other
_WIDE = (FLOAT32, "float64")


@dataclasses.dataclass(frozen=True)
class Source:
    """An array in front of its transposes, repeats and wider casts, and the labels of its axes."""

    var: Any
    labels: Labels

    @property
    def atoms(self) -> list[Atom]:
        return atoms_of(self.labels)

    @property
    def dtype(self) -> Any:
        return self.var.aval.dtype


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of a site and the atoms of its axes.

    Attributes:
      q, k, v: where the arrays are read.
      batch: atoms of sequences.
      rows, keys: of queries and of keys.
      heads: of heads of keys.
      groups: of queries' heads that have the same keys.
      width, value_width: of the columns of q and k, and of v.
      dtype: that attention is computed in.
    """

    q: Source
    k: Source
    v: Source
    batch: tuple[Atom, ...]
    rows: tuple[Atom, ...]
    keys: tuple[Atom, ...]
    heads: tuple[Atom, ...]
    groups: tuple[Atom, ...]
    width: tuple[Atom, ...]
    value_width: tuple[Atom, ...]
    dtype: Any

    @property
    def pairs(self) -> list[Sequence[Atom]]:
        """The groups of atoms of (B, N, T, S)."""
        return [self.batch, (*self.heads, *self.groups), self.rows, self.keys]

    def arrays(self, values: Mapping[Any, Any]) -> list[jax.Array]:
        """q (B, T, N, H), k (B, S, K, H) and v (B, S, K, Hv)."""
        of_keys = (self.batch, self.keys, self.heads)
        return [
            self._array(self.q, values, [self.batch, self.rows, (*self.heads, *self.groups), self.width]),
            self._array(self.k, values, [*of_keys, self.width]),
            self._array(self.v, values, [*of_keys, self.value_width]),
        ]

    def _array(self, source: Source, values: Mapping[Any, Any], groups: Sequence[Sequence[Atom]]) -> jax.Array:
        order, shape = [atom for group in groups for atom in group], tuple(map(size_of, groups))
        x = values[source.var].astype(self.dtype)
        if source.atoms == order:  # no axis has to be split
            return x.reshape(shape)
        x = merged(spread(x, source.labels, order), groups)
        return x if x.shape == shape else jnp.broadcast_to(x, shape)

    def result(self, y: jax.Array, labels: Labels, shape: Sequence[int]) -> jax.Array:
        """The result (B, T, N, Hv) with axes of these labels, in this shape."""
        groups = [self.batch, self.rows, (*self.heads, *self.groups), self.value_width]
        wanted = atoms_of(labels)
        order = sorted(range(4), key=lambda axis: wanted.index(groups[axis][0]) if groups[axis] else -1)
        if [atom for axis in order for atom in groups[axis]] == wanted:  # no axis has to be split
            return y.transpose(order).reshape(tuple(shape))
        own = [atom for group in groups for atom in group]
        split = y.reshape([atom.size for atom in own])
        return split.transpose([own.index(atom) for atom in wanted]).reshape(tuple(shape))


def layout_of(site: Site, makers: Makers, dependent: Collection[Atom]) -> Layout:
    """The layout of a site.

    Args:
      site: what it is of.
      makers: of the jaxpr.
      dependent: the atoms that masks depend on.

    Raises:
      Unlike: attention does not take such arrays, or gains nothing.
    """
    q, k = (_source(makers, *one, with_casts=True) for one in (site.q, site.k))
    v = _source(makers, *site.v, with_casts=False)
    dtype = jnp.result_type(q.dtype, k.dtype, v.dtype)
    if dtype.name not in (*FLOATS_OF_16_BITS, *_WIDE):
        raise Unlike(f"its arrays are {dtype}")
    keys = labels_of([site.keys])[0]
    of_q, of_k, of_v = (atoms_of(labels) for _, labels in (site.q, site.k, site.v))
    width = _ordered([x for x in of_q if x.kind == "sum"], [q, k])
    value_width = _ordered([x for x in of_v if x.kind == "value"], [v])
    wide = {*keys, *width, *value_width}
    alike = {*of_k, *of_v}.difference(of_q)  # q is the same along them
    shared = {*k.atoms, *v.atoms, *alike} - wide
    free = [x for x in of_q if x not in shared | wide]
    candidates = [x for x in free if x.kind in ("left", "right")]
    if not candidates:
        raise Unlike("it has one query, or values differ from query to query")
    rows = _rows(candidates, dependent, keys)
    groups = _ordered([x for x in free if x not in rows], [q])
    heads = _heads(_ordered(shared, [q, k, v]), q, rows, dependent)
    batch = [x for x in _ordered(shared, [q, k, v]) if x not in heads]
    layout = Layout(
        *(q, k, v),
        *(tuple(batch), tuple(_ordered(rows, [q])), tuple(keys), tuple(heads), tuple(groups)),
        *(tuple(width), tuple(value_width), dtype),
    )
    _check_gains(layout)
    return layout


def _source(makers: Makers, x: Any, labels: Labels, *, with_casts: bool) -> Source:
    """The variable that one is made of by views, and by casts to a wider float."""
    labels = labels_of(labels)
    while (equation := makers.maker(x)) is not None:
        before = equation.invars[0]
        if isinstance(before, core.Literal) or not before.aval.shape:
            break
        name = equation.primitive.name
        if name in VIEWS and len(equation.invars) == 1:
            try:
                labels = moved_back(equation, labels)
            except Unlike:
                break
        elif name == "convert_element_type" and with_casts:
            is_wider = before.aval.dtype.name in FLOATS_OF_16_BITS and x.aval.dtype.name in _WIDE
            if not is_wider:
                break
        elif name != "copy":
            break
        x = before
    return Source(x, labels_of(labels))


def _ordered(atoms: Iterable[Atom], sources: Sequence[Source]) -> list[Atom]:
    """The atoms in the order in which the sources' axes have them."""
    wanted = list(dict.fromkeys(atoms))
    found = [atom for source in sources for atom in source.atoms if atom in wanted]
    return list(dict.fromkeys([*found, *wanted]))


def _rows(candidates: Sequence[Atom], dependent: Collection[Atom], keys: Sequence[Atom]) -> list[Atom]:
    """The atoms of queries: those that masks depend on; the largest of several."""
    if len(keys) > 1 and len(candidates) > 1:  # of images
        return list(candidates)
    preferred = [x for x in candidates if x in dependent] or list(candidates)
    return [max(preferred, key=lambda x: x.size)]


def _heads(shared: Sequence[Atom], q: Source, rows: Sequence[Atom], dependent: Collection[Atom]) -> list[Atom]:
    """The atom of heads: the last one that masks do not depend on; one alone is of heads if it stands behind rows."""
    if len(shared) == 1:
        order = q.atoms
        first_row = min((order.index(x) for x in rows if x in order), default=0)
        is_behind = shared[0] in order and order.index(shared[0]) > first_row
        return list(shared) if is_behind and shared[0] not in dependent else []
    independent = [x for x in shared if x not in dependent]
    return independent[-1:] or list(shared[-1:])


def _check_gains(layout: Layout) -> None:
    widths = size_of(layout.width), size_of(layout.value_width)
    if max(widths) > MOST_WIDTH:
        raise Unlike(f"its heads have widths {widths[0]} and {widths[1]}; attention takes up to {MOST_WIDTH}")
    is_one = not (layout.batch or layout.heads or layout.groups)
    if is_one and size_of(layout.keys) < _LEAST_KEYS:
        raise Unlike(f"it is one head of one sequence, with fewer than {_LEAST_KEYS} keys")
