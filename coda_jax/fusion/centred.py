"""Sums of centred elements, which are 0: of a variance by two passes the derivative needs no sum for the mean.

    c_j = x_j - mean,   v = sum_j c_j^2:   dv / dmean = -2 sum_j c_j = 0

Before a function is differentiated, the squares in a variance get a rule without the mean's gradient: what else reads
the mean, or c, has its gradient, and so does the derivative itself, which is no sum of centred elements. In equations
that JAX has differentiated, terms that are centred are left out of sums over the axes that they are centred along; so
are factors of such a term that are the same along these axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation, is_derivative
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.straight import applied, at_line
from coda_jax.fusion.units import CASTS, is_square, narrows
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import needed_jaxpr, read
from coda_jax.primitives.mesh_types import explicit_sharding, vary, with_sharding

_SUMS = frozenset({"add", "add_any", "sub"})
_ZERO_OF_ZERO = CASTS | {"broadcast_in_dim", "reshape", "squeeze", "neg", "reduce_sum"}  # of one argument


def with_centred_sums(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr without the sums that are 0 because their elements are centred, in it or in its derivative."""
    found = _Centred(closed.jaxpr)
    rewritten = _Rewritten(found, stops=not is_derivative(closed.jaxpr))
    if not found.axes or not any(map(rewritten.changes, closed.jaxpr.eqns)):
        return closed
    return needed_jaxpr(lambda *xs: rewritten.results(closed, xs), closed.in_avals)


@dataclasses.dataclass(frozen=True)
class _Statistic:
    """A variable that is the sum or the mean of another one along some axes, or a view of it.

    Attributes:
      of: the variable that is summed, before casts.
      axes: those that are summed over.
      is_mean: whether it is divided by their size.
      places: for each of its own axes the one of `of` that it is; None where it is repeated.
    """

    of: Any
    axes: tuple[int, ...]
    is_mean: bool
    places: tuple[int | None, ...]


class _Centred:
    """The variables of a jaxpr that are centred.

    Attributes:
      makers: who makes its variables.
      axes: for each variable whose sum over some axes is 0, these.
      terms: the same for those that are sums with a term of which that is true.
    """

    def __init__(self, jaxpr: core.Jaxpr):
        self.makers = Makers(jaxpr)
        self.axes: dict[Any, tuple[int, ...]] = {}
        self.terms: dict[Any, tuple[int, ...]] = {}
        self._statistics: dict[Any, _Statistic] = {}
        for equation in self.makers.equations:
            if len(equation.outvars) == 1 and is_float(equation.outvars[0].aval.dtype):
                self._follow(equation)

    def difference(self, x: Any) -> Equation | None:
        """The x - mean that a variable is, but for casts."""
        maker = self.makers.maker(self._uncast(x))
        return maker if maker is not None and maker.primitive.name == "sub" and self._means(maker) else None

    def is_same_along(self, x: Any, axes: Sequence[int]) -> bool:
        """True for a number, and for an array whose elements along these axes are equal."""
        if isinstance(x, core.Literal) or all(size == 1 for size in x.aval.shape):
            return True
        maker = self.makers.maker(x)
        is_broadcast = maker is not None and maker.primitive.name == "broadcast_in_dim"
        return all(x.aval.shape[axis] == 1 or (is_broadcast and self._is_added(maker, axis)) for axis in axes)

    def _is_added(self, broadcast: Any, axis: int) -> bool:
        """True for an axis that a broadcast adds, or repeats."""
        dimensions, (x,) = broadcast.params["broadcast_dimensions"], broadcast.invars[:1]
        return axis not in dimensions or x.aval.shape[dimensions.index(axis)] == 1

    def _follow(self, equation: Equation) -> None:
        """Notes what an equation's result is."""
        statistic = self._statistic(equation)
        (out,), name = equation.outvars, equation.primitive.name
        if statistic is not None:
            self._statistics[out] = statistic
        elif name == "sub" and (axes := self._means(equation)):
            self.axes[out] = axes
        else:
            self._follow_terms(equation)

    def _follow_terms(self, equation: Equation) -> None:
        (out,), name = equation.outvars, equation.primitive.name
        for known in (self.axes, self.terms):
            inputs = [x for x in equation.invars if among(x, known)]
            axes = known[inputs[0]] if inputs else ()
            if not axes or any(known[x] != axes for x in inputs):
                continue
            is_alone = len(inputs) == len(equation.invars)
            if name == "neg" or (name in CASTS and not narrows(equation)):
                known[out] = axes
            elif name in _SUMS and all(x.aval.shape == out.aval.shape for x in equation.invars):
                (known if is_alone else self.terms)[out] = axes
            elif name == "mul" or (name == "div" and inputs[0] is equation.invars[0]):
                others = [x for x in equation.invars if x is not inputs[0]]
                if len(others) == 1 and self.is_same_along(others[0], axes):
                    known[out] = axes

    def _uncast(self, x: Any) -> Any:
        """The variable that casts to more bits are of."""
        while (maker := self.makers.maker(x)) is not None and maker.primitive.name in CASTS and not narrows(maker):
            if not variables(maker.invars) or not is_float(maker.invars[0].aval.dtype):
                break
            (x,) = maker.invars
        return x

    def _means(self, difference: Equation) -> tuple[int, ...]:
        """The axes along which x - m is centred; none if m is not the mean of x along axes."""
        x, m = difference.invars
        found = None if isinstance(m, core.Literal) else self._statistics.get(m)
        if found is None or not found.is_mean or isinstance(x, core.Literal) or self._uncast(x) is not found.of:
            return ()
        sizes = x.aval.shape
        wanted = [None if i in found.axes or size == 1 else i for i, size in enumerate(sizes)]
        own = [None if size == 1 else place for size, place in zip(sizes, found.places, strict=False)]
        return found.axes if len(found.places) == len(sizes) and own == wanted else ()

    def _statistic(self, equation: Equation) -> _Statistic | None:
        """The sum or the mean that an equation's result is, or is a view of; None for another array."""
        if not variables(equation.invars[:1]):
            return None
        name, params, x, (out,) = equation.primitive.name, equation.params, equation.invars[0], equation.outvars
        if name == "reduce_sum":
            axes = tuple(sorted(params["axes"]))
            return _Statistic(self._uncast(x), axes, False, tuple(i for i in range(x.aval.ndim) if i not in axes))
        found = self._statistics.get(x)
        if found is None:
            return None
        if name == "broadcast_in_dim":
            given = dict(zip(params["broadcast_dimensions"], found.places, strict=True))
            return dataclasses.replace(found, places=tuple(given.get(i) for i in range(out.aval.ndim)))
        if name == "squeeze":
            left = [place for i, place in enumerate(found.places) if i not in params["dimensions"]]
            return dataclasses.replace(found, places=tuple(left))
        if name == "reshape":
            return self._reshaped(found, x.aval.shape, out.aval.shape)
        if name in CASTS and not narrows(equation):
            return found
        if name in ("div", "mul") and not found.is_mean:
            sizes = [found.of.aval.shape[axis] for axis in found.axes]
            number = self.makers.constant(equation.invars[1])
            is_size = number is not None and all(isinstance(size, int) for size in sizes)
            count = math.prod(sizes) if name == "div" else 1 / max(1, math.prod(sizes)) if is_size else 0
            return dataclasses.replace(found, is_mean=True) if is_size and number == count else None
        return None

    def _reshaped(self, found: _Statistic, before: Sequence[Any], after: Sequence[Any]) -> _Statistic | None:
        """A statistic to whose axes others of one element are added, or of which such are taken away."""
        if [size for size in before if size != 1] != [size for size in after if size != 1]:
            return None
        places = iter([place for size, place in zip(before, found.places, strict=True) if size != 1])
        return dataclasses.replace(found, places=tuple(None if size == 1 else next(places) for size in after))


class _Rewritten:
    """The work of `with_centred_sums`: the arrays of a jaxpr's variables.

    Args:
      found: what is centred.
      stops: whether the gradients of means are left out of sums of squares; else centred terms are left out of sums.
    """

    def __init__(self, found: _Centred, *, stops: bool):
        self._found, self._stops = found, stops
        self._values: dict[Any, Any] = {}
        self._zeros: set[Any] = set()

    def changes(self, equation: Equation) -> bool:
        """True for a sum that is not evaluated as it stands."""
        if self._stops:
            return self._squared(equation) is not None
        return self._sums(equation, self._found.axes) or self._sums(equation, self._found.terms)

    def results(self, closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """The results of the jaxpr."""
        jaxpr, values = closed.jaxpr, self._values
        values.update(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arrays], strict=True))
        for equation in jaxpr.eqns:
            if self._sums(equation, self._found.axes):
                self._zeros |= set(equation.outvars)
            elif (same := self._of_zeros(equation)) is None:
                inputs = [self._value(x) for x in equation.invars]
                if self._sums(equation, self._found.terms):
                    inputs = [self._rest(equation.invars[0], _axes_of_sum(equation))]
                elif self._squared(equation) is not None:
                    inputs = [self._square(equation)]
                values.update(zip(equation.outvars, applied(equation, inputs), strict=True))
            elif among(same, self._zeros):
                self._zeros |= set(equation.outvars)
            else:
                values[equation.outvars[0]] = self._value(same)
        return [self._value(x) for x in jaxpr.outvars]

    def _sums(self, equation: Equation, known: Mapping[Any, tuple[int, ...]]) -> bool:
        """True for a sum of one of these variables over its axes that is evaluated without centred terms."""
        axes = () if self._stops else _axes_of_sum(equation)
        return bool(axes) and known.get(equation.invars[0]) == axes

    def _value(self, x: Any) -> Any:
        if among(x, self._zeros) and x not in self._values:
            zeros = with_sharding(jnp.zeros(x.aval.shape, x.aval.dtype), explicit_sharding(x.aval))
            (self._values[x],) = vary(x.aval.manual_axis_type.varying, zeros)
        return read(self._values, x)

    def _of_zeros(self, equation: Equation) -> Any:
        """The variable that an equation's result is the same as, where it reads zeros; None if it is another array."""
        flags, name = [among(x, self._zeros) for x in equation.invars], equation.primitive.name
        if not any(flags) or len(equation.outvars) != 1:
            return None
        zero = equation.invars[flags.index(True)]
        if name in _ZERO_OF_ZERO or name == "mul" or (name == "div" and flags[0]) or (name in _SUMS and all(flags)):
            return zero
        if name in ("add", "add_any") or (name == "sub" and flags[1]):
            other = equation.invars[flags.index(False)]
            is_whole = not isinstance(other, core.Literal) and other.aval.shape == equation.outvars[0].aval.shape
            return other if is_whole else None
        return None

    def _squared(self, equation: Equation) -> Equation | None:
        """The square that an equation sums, if its root is x - mean, and the gradient of the mean is to be left out."""
        square = self._found.makers.maker(equation.invars[0]) if self._stops and _axes_of_sum(equation) else None
        if square is None or not is_square(square) or square.params.get("y", 2) != 2:
            return None
        if not among(square.invars[0], self._found.axes):
            return None
        is_along = self._found.axes[square.invars[0]] == _axes_of_sum(equation)
        return square if is_along and self._found.difference(square.invars[0]) is not None else None

    def _square(self, equation: Equation) -> Any:
        """The squares that an equation sums, whose derivative has no term for the mean."""
        square = self._squared(equation)
        assert square is not None, "a sum of squares"
        difference = self._found.difference(square.invars[0])
        assert difference is not None, "a square of centred elements"
        return at_line(square, _centred_squares(difference, square), *map(self._value, difference.invars))

    def _rest(self, x: Any, axes: tuple[int, ...]) -> Any:
        """The array of a variable without its terms that are centred along these axes."""
        found, needed, open_ = self._found, dict[int, Equation](), [x]
        while open_:
            maker = found.makers.maker(open_.pop())
            assert maker is not None, "a sum with a centred term"
            if found.makers.number(maker) not in needed:
                needed[found.makers.number(maker)] = maker
                open_ += [y for y in variables(maker.invars) if found.terms.get(y) == axes]
        rests: dict[Any, Any] = {}
        for _, equation in sorted(needed.items()):
            (out,) = equation.outvars
            left = [y for y in equation.invars if isinstance(y, core.Literal) or found.axes.get(y) != axes]
            arrays = [rests[y] if among(y, rests) else self._value(y) for y in left]
            if len(left) == len(equation.invars):
                (rests[out],) = applied(equation, arrays)
            else:
                is_negative = equation.primitive.name == "sub" and left[0] is equation.invars[1]
                (rests[out],) = [at_line(equation, lax.neg, *arrays)] if is_negative else arrays
        return rests[x]


def _centred_squares(difference: Equation, square: Equation) -> Callable[[Any, Any], Any]:
    """The squares of x - mean as a function of x and the mean, whose derivative is that of x alone.

    A rule says so, not `lax.stop_gradient`: 2 (x - mean) depends on both where it is differentiated again.
    """

    def plain(x: Any, mean: Any) -> Any:
        (centred,) = applied(difference, [x, mean])
        centred = lax.convert_element_type(centred, square.invars[0].aval.dtype)
        (result,) = applied(square, [centred] * len(square.invars))
        return result

    squares = jax.custom_jvp(plain)

    @squares.defjvp
    def derivative(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        (x, mean), (dx, _) = primals, tangents
        result, tangent = jax.jvp(lambda x: plain(x, mean), (x,), (dx,))
        return result, tangent

    return squares


def _axes_of_sum(equation: Equation) -> tuple[int, ...]:
    """The axes that an equation sums a variable over; none for another equation."""
    is_sum = equation.primitive.name == "reduce_sum" and not isinstance(equation.invars[0], core.Literal)
    return tuple(sorted(equation.params["axes"])) if is_sum else ()
