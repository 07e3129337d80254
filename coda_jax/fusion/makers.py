"""Arrays of a jaxpr that are one array in other words: casts, views, constants."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.epilogue.values import same_shape
from coda_jax.fusion.dots import Equation
from coda_jax.graph.constraint import is_constraint
from coda_jax.graph.on_mesh import PVARY
from coda_jax.jaxprs.def_use import DefUse

VIEWS = PVARY | {"broadcast_in_dim", "reshape", "squeeze", "copy", "convert_element_type"}


class Makers(DefUse):
    """The definitions and uses of a jaxpr's variables, and the variables that are one array."""

    def casts(self, x: Any) -> set[Any]:
        """The variable and what it is cast to, among floats of an epilogue's, also behind constraints of shardings."""
        found, open_ = {x}, [x]
        while open_:
            for equation in self.readers(open_.pop()):
                is_same = equation.primitive.name == "convert_element_type" or asks_sharding(equation)
                if is_same and equation.outvars[0].aval.dtype.name in FLOATS:
                    found.add(equation.outvars[0])
                    open_.append(equation.outvars[0])
        return found

    def views(self, x: Any) -> set[Any]:
        """The variable, and what is the same in another shape or by another name."""
        found, open_ = {x}, [x]
        while open_:
            for equation in self.readers(open_.pop()):
                if not is_view(equation):
                    continue
                (out,) = equation.outvars
                if out not in found and out.aval.size == x.aval.size and out.aval.dtype.name in FLOATS:
                    found.add(out)
                    open_.append(out)
        return found

    def root(self, x: Any) -> tuple[Any, bool]:
        """The variable that one is a view of, and whether its gradient is stopped, as of JAX's largest logit."""
        passed, is_stopped = VIEWS | {"stop_gradient"}, False
        while (maker := self.maker(x)) is not None and maker.primitive.name in passed:
            source: Any = maker.invars[0]
            if isinstance(source, core.Literal) or source.aval.size != x.aval.size:
                break
            is_stopped |= maker.primitive.name == "stop_gradient"
            x = source
        return x, is_stopped

    def are_alike(self, x: Any, y: Any, depth: int = 8) -> bool:
        """True for variables that are one, or made alike of such."""
        if isinstance(x, core.Literal) or isinstance(y, core.Literal):
            is_literal = isinstance(x, core.Literal) and isinstance(y, core.Literal) and x.aval == y.aval
            return is_literal and np.array_equal(x.val, y.val)
        one, other = self.maker(x), self.maker(y)
        if x is y or one is None or other is None or not depth:
            return x is y
        is_same = one.primitive is other.primitive and str(one.params) == str(other.params) and not one.effects
        is_one = len(one.outvars) == 1 and len(one.invars) == len(other.invars)
        return is_same and is_one and all(map(self.are_alike, one.invars, other.invars, [depth - 1] * len(one.invars)))

    def scalar(self, x: Any) -> Any:
        """The number, or the variable (), that all elements of an array are; None if they are not known to be one."""
        while not isinstance(x, core.Literal) and x.aval.shape:
            maker = self.maker(x)
            if maker is None or maker.primitive.name not in VIEWS:
                return None
            x = maker.invars[0]
        return float(x.val) if isinstance(x, core.Literal) and np.ndim(x.val) == 0 else x

    def constant(self, x: Any) -> float | None:
        """The number that all elements of an array are, if that is known."""
        while not isinstance(x, core.Literal):
            maker = self.maker(x)
            if maker is None or maker.primitive.name not in VIEWS:
                return None
            x = maker.invars[0]
        return float(x.val) if np.ndim(x.val) == 0 else None

    def counts_along_last(self, x: Any, rank: int) -> bool:
        """True for integers 0, 1, 2 ... along the last axis, the same for all others."""
        if x.aval.ndim != rank:
            return False
        while (maker := self.maker(x)) is not None:
            dtype, size = x.aval.dtype, x.aval.shape[-1]  # of few bits it counts from the start again
            if not jnp.issubdtype(dtype, jnp.integer) or size - 1 > jnp.iinfo(dtype).max:
                return False
            if maker.primitive.name == "iota":
                return bool(maker.params["dimension"] == x.aval.ndim - 1)
            if maker.primitive.name not in ("broadcast_in_dim", "reshape", "convert_element_type"):
                return False
            source: Any = maker.invars[0]
            last = maker.params.get("broadcast_dimensions", (x.aval.ndim - 1,))[-1:]
            if isinstance(source, core.Literal) or source.aval.shape[-1:] != (size,) or last != (x.aval.ndim - 1,):
                return False
            x = source
        return False

    def row(self, x: Any) -> Any:
        """The variable (V,), or (1, ..., V), that an array (..., V) has in each row; None if that is not seen."""
        size = x.aval.shape[-1] if x.aval.shape else 0
        while x.aval.size != size or x.aval.shape[-1] != size:
            maker = self.maker(x)
            if maker is None or maker.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
                return None
            source: Any = maker.invars[0]
            if isinstance(source, core.Literal) or source.aval.shape[-1:] != (size,):
                return None
            dimensions = maker.params.get("broadcast_dimensions", (x.aval.ndim - 1,))
            if dimensions[-1] != x.aval.ndim - 1:
                return None
            x = source
        return x

    def repeated(self, x: Any) -> Any:
        """The variable of one number of each row that an array (..., V) or (..., 1) has in all columns, or None."""
        if x.aval.shape[-1:] == (1,):
            return x
        maker = self.maker(x)
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return None
        source: Any = maker.invars[0]
        rows = tuple(range(x.aval.ndim - 1))
        is_row = tuple(maker.params["broadcast_dimensions"])[: len(rows)] == rows
        return source if is_row and same_shape(source.aval.shape, (*x.aval.shape[:-1], 1)[: source.aval.ndim]) else None


def among(x: Any, arrays: Collection[Any]) -> bool:
    """True for a variable that is one of some; a literal has no hash."""
    return not isinstance(x, core.Literal) and x in arrays


def is_view(equation: Equation) -> bool:
    """True for an equation whose result may be its argument in another shape or by another name."""
    return equation.primitive.name in VIEWS or any(f(equation) for f in (asks_sharding, _takes_the_first, _sums_one))


def asks_sharding(equation: Equation) -> bool:
    """True for a constraint that says how an array is sharded, and nothing else of it."""
    return equation.primitive.name == "sharding_constraint" and is_constraint(equation)


def _sums_one(equation: Equation) -> bool:
    """True for a sum over axes of one element, as in derivatives of what was broadcast."""
    return equation.primitive.name == "reduce_sum" and same_shape(
        [size for size in equation.invars[0].aval.shape if size != 1],
        [size for size in equation.outvars[0].aval.shape if size != 1],
    )


def _takes_the_first(equation: Equation) -> bool:
    """True for x[..., 0] of an x whose last axis has one element."""
    if equation.primitive.name != "gather":
        return False
    x, sizes = equation.invars[0], equation.params["slice_sizes"]
    numbers = equation.params["dimension_numbers"]
    is_first = tuple(numbers.collapsed_slice_dims) == (x.aval.ndim - 1,) == tuple(numbers.start_index_map)
    return is_first and x.aval.shape[-1] == 1 and tuple(sizes) == tuple(x.aval.shape)


FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}  # comparisons, and those of the arguments in reverse


def kept_columns(makers: Makers, mask: Any) -> tuple[int, bool] | None:
    """A number n and the value that a mask (..., V) has in the columns below n alone; None for another mask."""
    row = makers.row(mask) if getattr(mask.aval, "shape", ()) and not isinstance(mask, core.Literal) else None
    comparison = next((e for e in map(makers.maker, (row, mask)) if e and e.primitive.name in FLIPPED), None)
    if comparison is None:
        return None
    (left, right), name = comparison.invars, comparison.primitive.name
    rank = comparison.outvars[0].aval.ndim
    if not makers.counts_along_last(left, rank):
        left, right, name = right, left, FLIPPED[name]
    limit = makers.constant(right)
    if limit is None or not makers.counts_along_last(left, rank):
        return None
    return int(limit) + (name in ("le", "gt")), name in ("lt", "le")
