"""Parts of an array along an axis that the function puts first are parts along the axis where it is.

    transpose(z, (2, 0, 1, 3))[i] = z[:, :, i]

So q, k and v that are unpacked, as of `jnp.moveaxis(z, 2, 0)`, are parts of a product's columns, as `flat_columns`
finds them. In a derivative, which puts their cotangents one after the other in front, each goes to its place alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import at_line, results_with
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.evaluate import needed_jaxpr, read

_SUMS = frozenset({"add", "add_any"})


def with_parts_in_place(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr that takes parts of arrays along the axes that it transposes to the front for this alone."""
    makers = Makers(closed.jaxpr)
    parts = _Parts(makers)
    if not (parts.slices or parts.sums):
        return closed
    return needed_jaxpr(lambda *arrays: results_with(closed, arrays, parts), closed.in_avals)


class _Parts:
    """Evaluates equations.

    Attributes:
      slices: for each part that is taken in front the transpose of which it is one.
      sums: the transposes of sums of parts in front, by their results.
    """

    def __init__(self, makers: Makers):
        self._makers = makers
        transposes = [e for e in makers.jaxpr.eqns if e.primitive.name == "transpose"]
        self.slices: dict[Any, Equation] = {}
        self.sums: set[Any] = set()
        self._parts: dict[Any, jax.Array] = {}  # by the parts in front, without their first axis
        for equation in transposes:
            (x,), (y,), order = equation.invars, equation.outvars, equation.params["permutation"]
            readers = makers.readers(y)
            if order[0] > 0 and readers and y not in makers.jaxpr.outvars and all(map(_is_one_in_front, readers)):
                self.slices |= {reader.outvars[0]: equation for reader in readers}
            elif order[0] != 0 and not isinstance(x, core.Literal) and self._is_sum(x):
                self.sums.add(y)

    def __call__(self, equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        """The results of an equation; None where it stays."""
        (out, *_), x = equation.outvars or [None], next(iter(equation.invars), None)
        if out in self.slices:
            self._parts[out] = at_line(equation, self._part, equation, values)
            return [lax.expand_dims(self._parts[out], [0])]
        if equation.primitive.name == "squeeze" and x in self._parts and equation.params["dimensions"] == (0,):
            return [self._parts[x]]
        if out in self.sums:
            return [at_line(equation, self._in_place, x, equation.params["permutation"], values)]
        return None

    def _part(self, equation: Equation, values: dict[Any, Any]) -> jax.Array:
        """A part of a transpose as the transpose of a part, without the axis of one element."""
        transpose = self.slices[equation.outvars[0]]
        first, *order = transpose.params["permutation"]
        start = equation.params["start_indices"][0]
        part = lax.slice_in_dim(read(values, transpose.invars[0]), start, start + 1, axis=first)
        return _transposed(lax.squeeze(part, [first]), [axis - (axis > first) for axis in order])

    def _is_sum(self, x: Any) -> bool:
        """True for a sum, which nothing else reads, of parts in front of zeros and behind them."""
        maker = self._makers.maker(x)
        if maker is None or len(self._makers.readers(x)) != 1 or x in self._makers.jaxpr.outvars:
            return False
        if maker.primitive.name in _SUMS:
            return all(not isinstance(y, core.Literal) and self._is_sum(y) for y in maker.invars)
        return maker.primitive.name == "pad" and _is_one_in_front(maker)

    def _in_place(self, x: Any, order: Sequence[int], values: dict[Any, Any]) -> jax.Array:
        """The transpose of a sum of parts in front."""
        maker: Any = self._makers.maker(x)
        if maker.primitive.name in _SUMS:
            arrays = [self._in_place(y, order, values) for y in maker.invars]
            total: jax.Array = bind(maker.primitive, arrays, maker.params)[0]
            return total
        part, zero = maker.invars
        config = maker.params["padding_config"]
        place = list(order).index(0)
        bare = _transposed(self._without_first(part, values), [axis - 1 for axis in order if axis])
        return lax.pad(lax.expand_dims(bare, [place]), read(values, zero), [config[axis] for axis in order])

    def _without_first(self, part: Any, values: dict[Any, Any]) -> jax.Array:
        """An array (1, ...) without its first axis."""
        maker = self._makers.maker(part)
        axes = None if maker is None else maker.params.get("broadcast_dimensions")
        if maker is not None and axes == tuple(range(1, part.aval.ndim)) and maker.invars[0].aval.ndim == len(axes):
            return jax.numpy.broadcast_to(read(values, maker.invars[0]), part.aval.shape[1:])
        return lax.squeeze(read(values, part), [0])


def _is_one_in_front(equation: Equation) -> bool:
    """True for a slice of one element of the first axis, or a pad of such: of that axis alone."""
    x, y, params = equation.invars[0].aval, equation.outvars[0].aval, equation.params
    if equation.primitive.name == "pad":
        own, *others = params["padding_config"]
        return (
            x.shape[0] == 1
            and min(own) >= 0
            and not own[2]
            and all(tuple(map(int, one)) == (0, 0, 0) for one in others)
        )
    is_plain = equation.primitive.name == "slice" and set(params["strides"] or (1,)) == {1}
    return is_plain and y.shape[0] == 1 and x.shape[1:] == y.shape[1:]


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    return x if list(order) == list(range(x.ndim)) else lax.transpose(x, order)
