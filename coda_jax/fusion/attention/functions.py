"""Curves of scores, and what is added to them by position, as a score function of `coda.attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.attend.score import trace
from coda_jax.epilogue.values import NotTileLocalError
from coda_jax.fusion.attention.axes import Label, Unlike, atoms_of, size_of, whole
from coda_jax.fusion.attention.layout import Layout
from coda_jax.fusion.attention.trees import ENTRIES, SAME, Node, Trees, constant_of, elementwise, merged, value_of
from coda_jax.jaxprs.bind import bind

Term = tuple[Node, float]  # an expression and its factor


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreFunction:
    """curve(s) + terms, where s are scaled scores (B, N, T, S).

    Attributes:
      layout: of the site's arrays.
      curve: an expression of scores, numbers and smaller arrays, with a factor; None for s itself.
      terms: expressions of positions and of smaller arrays.
    """

    layout: Layout
    curve: Term | None
    terms: tuple[Term, ...]

    @property
    def __name__(self) -> str:
        return " and ".join([*["curve"] * (self.curve is not None), *["positions"] * bool(self.terms)])

    @property
    def read(self) -> list[Node]:
        """The nodes that become operands, each once: arrays, and positions along a part of an axis."""
        expressions = [*([] if self.curve is None else [self.curve]), *self.terms]
        every = {id(node): node for term, _ in expressions for node in term.walk()}.values()
        return [node for node in every if node.op == "leaf" or (node.op == "iota" and self._axis(node.labels[0]) < 0)]

    def operands(self, values: Mapping[Any, Any]) -> list[jax.Array]:
        """The operands, (1 or B, 1 or N, 1 or T, 1 or S) or (1 or B, 1 or N, entries), from the values of variables."""
        groups = self.layout.pairs
        order = [atom for group in groups for atom in group]
        return [
            self._table(node, values) if node.is_table else merged(value_of(node, values, order), groups)
            for node in self.read
        ]

    def _table(self, node: Node, values: Mapping[Any, Any]) -> jax.Array:
        """A table, (1 or B, 1 or N, entries).

        Raises:
          Unlike: it has other axes.
        """
        entries = [atom for atom in atoms_of(node.labels) if atom.kind == ENTRIES]
        groups = *self.layout.pairs[:2], entries
        order = [atom for group in groups for atom in group]
        if not node.atoms() <= {*order}:
            raise Unlike("a table of entries has an axis of rows or keys")
        return merged(value_of(node, values, order), groups)

    def __call__(self, s: jax.Array, *operands: jax.Array) -> jax.Array:
        read = zip(self.read, operands, strict=True)  # floats are float32 in a score function
        known = {id(node): x.astype(node.var.aval.dtype if node.op == "leaf" else node.var) for node, x in read}
        value = s if self.curve is None else _times(_curved(self.curve[0], s, known), self.curve[1])
        for node, factor in self.terms:
            term = self._value(node, known, s.shape)
            value = value + _times(term.astype(jnp.promote_types(term.dtype, s.dtype)), factor)
        return value.astype(s.dtype)

    def _axis(self, label: Label) -> int:
        """The axis of the scores that a label is; -1 for a part of one."""
        groups = [whole(group) for group in self.layout.pairs]
        return groups.index(whole(label)) if whole(label) in groups else -1

    def _value(self, node: Node, known: dict[int, Any], shape: Sequence[int]) -> Any:
        """The value of an expression, (1 or B, 1 or N, 1 or T, 1 or S); `known` has those of its parts."""
        if id(node) not in known:
            args = [self._value(x, known, shape) for x in node.args]
            known[id(node)] = self._applied(node, args, shape)
        return known[id(node)]

    def _applied(self, node: Node, args: Sequence[Any], shape: Sequence[int]) -> Any:
        if node.op == "constant":
            return jnp.asarray(node.var).reshape(1, 1, 1, 1)
        if node.op == "iota":
            axis = self._axis(node.labels[0])
            of_axis = [size if i == axis else 1 for i, size in enumerate(shape)]
            return lax.broadcasted_iota(node.var, of_axis, axis) + np.asarray(node.start, node.var)
        if node.op == "entry":
            index, table = args
            return _entry(index, table, node.equation.params)
        return elementwise(node, args)


def _entry(index: jax.Array, table: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """The entries of a table (1, 1 or N, entries), as a gather with these parameters reads them.

    Raises:
      Unlike: sequences or heads have other indices, or sequences other tables.
    """
    options = {name: params[name] for name in ("mode", "fill_value")} | {"wrap_negative_indices": False}
    if table.shape[:2] == (1, 1):
        return table.reshape(-1).at[index].get(**options)
    if len(table) > 1 or index.shape[:2] != (1, 1):
        raise Unlike("sequences have tables of their own, or heads indices of their own")
    return table[0].at[:, index.reshape(index.shape[2:])].get(**options)[None]


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * np.asarray(factor, x.dtype)


def _curved(node: Node, s: jax.Array, known: Mapping[int, Any]) -> jax.Array:
    """The value of an expression of scores s, numbers and arrays that are known, in the dtype of s."""

    def of(one: Node) -> Any:
        if one.op == "score":
            return s
        if one.op == "leaf":
            return known[id(one)].astype(s.dtype)
        if (number := constant_of(one)) is not None:
            return np.asarray(number, s.dtype)
        args = list(map(of, one.args))
        if one.op in SAME or one.op == "convert_element_type":
            return args[0]
        (value,) = bind(
            one.equation.primitive, [x if x is s else jnp.broadcast_to(x, s.shape) for x in args], one.equation.params
        )
        return value

    value: jax.Array = of(node)
    return value


def is_taken(function: ScoreFunction) -> bool:
    """Whether `coda.attention` takes a function of scores."""
    shape = tuple(map(size_of, function.layout.pairs))
    variables = list(dict.fromkeys(node.var for node in function.read if node.op == "leaf"))

    def arrays_read(*arrays: jax.Array) -> Any:
        operands = function.operands(dict(zip(variables, arrays, strict=True)))
        return trace(function, operands, shape)[1]

    try:
        jax.eval_shape(arrays_read, *(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables))
    except (NotTileLocalError, ValueError, Unlike):
        return False
    return True


def lowest(term: Term, trees: Trees) -> float:
    """A number that a term is never less than; -inf where none is known."""
    node, factor = term
    low, high = _interval(node, trees)
    return min(low * factor, high * factor) if np.isfinite([low, high]).all() else -np.inf


def _interval(node: Node, trees: Trees) -> tuple[float, float]:
    """The numbers between which an expression is; infinite ones where none are known."""
    nothing = -np.inf, np.inf
    if node.op in ("constant", "leaf"):
        value = node.var if node.op == "constant" else trees.known(node.var)
        if value is None or not np.size(value):
            return nothing
        value = np.asarray(value, np.float64)
        return float(value.min()), float(value.max())
    if node.op == "iota":
        return float(node.start), float(node.start + size_of(node.labels[0]) - 1)
    args = [_interval(x, trees) for x in node.args]
    if not np.isfinite(args).all() or not args:
        return nothing
    (a, b), (c, d) = args[0], args[-1]
    if node.op in SAME or node.op == "convert_element_type":
        return a, b
    if node.op == "neg":
        return -b, -a
    if node.op == "abs":
        return (0.0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
    if node.op in ("add", "sub"):
        return (a + c, b + d) if node.op == "add" else (a - d, b - c)
    if node.op in ("min", "max"):
        choose = min if node.op == "min" else max
        return choose(a, c), choose(b, d)
    if node.op == "mul":
        products = a * c, a * d, b * c, b * d
        return min(products), max(products)
    return nothing
