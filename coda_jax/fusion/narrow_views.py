"""Views of arrays in float32 that are of no more than 16 bits are made in 16 bits.

    slice(f32(x)) = f32(slice(x))        bf16(pad(y)) = pad(bf16(y))

A cast to more bits stands behind a view, one to fewer in front of it: what a view moves in memory is narrow then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, FLOATS
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import applied, at_line, results_with
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.evaluate import needed_jaxpr, read

_VIEWS = frozenset({"slice", "reshape", "squeeze", "transpose", "pad"})


def with_narrow_views(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr with casts to more bits behind views, and those to fewer bits in front of them."""
    casts = _Casts(Makers(closed.jaxpr))
    if not casts.widened and not casts.narrowed:
        return closed
    return needed_jaxpr(lambda *arrays: casts.results(closed, arrays), closed.in_avals)


class _Casts:
    """Evaluates a jaxpr.

    Attributes:
      widened: the views in float32 of what is cast from fewer bits.
      narrowed: the views in float32 that are read in fewer bits alone, and in which dtype.
    """

    def __init__(self, makers: Makers):
        self._makers = makers
        self._narrow: dict[Any, Any] = {}  # by the variables in float32 that are casts of these
        views = [e for e in makers.equations if e.primitive.name in _VIEWS and self._is_view(e)]
        self.widened: set[Any] = set()
        for view in views:
            maker = makers.maker(view.invars[0])
            if view.invars[0] in self.widened or (maker is not None and _is_cast(maker, of_source=True)):
                self.widened.add(view.outvars[0])
        self.narrowed: dict[Any, Any] = {}
        for view in reversed(views):
            dtypes = {self._dtype_read(view.outvars[0], e) for e in makers.readers(view.outvars[0])}
            if len(dtypes) == 1 and None not in dtypes and view.outvars[0] not in makers.jaxpr.outvars:
                (self.narrowed[view.outvars[0]],) = dtypes

    def _is_view(self, equation: Equation) -> bool:
        """True for a view of an array in float32, padded with zeros where it is padded."""
        x, (out,) = equation.invars[0], equation.outvars
        is_padded = equation.primitive.name == "pad"
        if len(equation.invars) != 1 + is_padded or (is_padded and self._makers.constant(equation.invars[1]) != 0.0):
            return False
        return not isinstance(x, core.Literal) and out.aval.dtype == FLOAT32

    def _dtype_read(self, x: Any, reader: Equation) -> Any:
        """The dtype of fewer bits in which an equation reads a view; None for another one."""
        if not reader.outvars:
            return None
        if reader.outvars[0] in self.narrowed and reader.invars[0] is x:
            return self.narrowed[reader.outvars[0]]
        return reader.outvars[0].aval.dtype if _is_cast(reader, of_source=False) else None

    def results(self, closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """The results of the jaxpr at these arrays."""
        return results_with(closed, arrays, lambda equation, values: at_line(equation, self._made, equation, values))

    def _made(self, equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        """The results of an equation; None where it stays."""
        inputs: list[Any] = [read(values, x) for x in equation.invars]
        out: Any = next(iter(equation.outvars), None)
        if _is_cast(equation, of_source=True):
            self._narrow[out] = inputs[0]
        elif _is_cast(equation, of_source=False) and equation.invars[0] in self._narrow:
            narrow = self._narrow[equation.invars[0]]
            return [narrow] if narrow.dtype == out.aval.dtype else applied(equation, inputs)
        elif out in self.widened or out in self.narrowed:
            x = equation.invars[0]
            narrow = self._narrow[x] if out in self.widened else inputs[0].astype(self.narrowed[out])
            others = [y.astype(narrow.dtype) for y in map(jax.numpy.asarray, inputs[1:])]
            (self._narrow[out],) = bind(equation.primitive, [narrow, *others], equation.params)
            return [self._narrow[out].astype(FLOAT32)]
        return None


def _is_cast(equation: Equation, *, of_source: bool) -> bool:
    """True for a cast of floats to float32 from fewer bits, or with of_source=False from float32 to fewer bits."""
    if equation.primitive.name != "convert_element_type" or isinstance(equation.invars[0], core.Literal):
        return False
    wide, narrow = (equation.outvars[0].aval, equation.invars[0].aval)[:: 1 if of_source else -1]
    return wide.dtype == FLOAT32 and narrow.dtype.name in FLOATS and narrow.dtype.itemsize < wide.dtype.itemsize
