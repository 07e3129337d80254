"""The row sums that a body begins with are its arguments: what makes the array sums its rows too, in its epilogue.

A layer begins with a norm, whose sum of squares needs a pass over the residual stream where the stream is an argument
of a body: of a loop's step, or of a checkpoint. Here a loop carries the sums beside the stream, and a checkpoint is
given them by what calls it, and gives those of its result:

    x -> f(x, S(x))                                x, s -> y = f(x, s), S(y)          s = S(x)

S is a sum over the last axis of an elementwise function of x alone. In front of the first step of a loop it is computed
of what the loop is given. A loop carries it only if a step makes its new x by a product, or by a pass that writes it.
A backward loop that computes S of a stacked x again, as of a checkpoint, is given s too, stacked beside x.

The sums have no gradient of their own. The body reads them by a function whose derivative is that of S(x), so that the
gradient goes to x where the body is differentiated:

    known(s, x) = s,    d known = dS(x)            stopped(S(y)) is what the body gives

Proof: s and S(x) are the same numbers, and each S(x) that is read has its own derivative. Where JAX has differentiated
the function already, there is no derivative to state, and the body reads s itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.fusion.alike import own_params, structure
from coda_jax.fusion.centred import with_centred_sums
from coda_jax.fusion.dots import PRODUCTS, Dot, Equation, dot_of, is_derivative
from coda_jax.fusion.makers import asks_sharding
from coda_jax.fusion.nested import with_body
from coda_jax.fusion.residuals import scanned
from coda_jax.fusion.rows import OF_ELEMENTS, SHAPES
from coda_jax.fusion.straight import CHECKPOINTS, applied, at_line, called_as, is_call, straight
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.def_use import DefUse, variables
from coda_jax.jaxprs.evaluate import evaluate, needed_jaxpr, read, run, without_constants
from coda_jax.jaxprs.walk import equations, inner_jaxprs, num_carried, num_constants

_OF_TILES = OF_ELEMENTS | SHAPES | CUSTOM_DERIVATIVES
KNOWN = "row_sums"  # the name of the function in `_Sums.known`
_LEAST_BYTES = 4  # of a sum's elements
_MOST_EQUATIONS = 16  # that make sums


def with_row_sums_in_front(closed: core.ClosedJaxpr, *, is_exact: bool) -> core.ClosedJaxpr:
    """A straight jaxpr whose loops carry the row sums that their steps begin with; checkpoints are given theirs.

    Args:
      closed: the jaxpr.
      is_exact: whether sums stay as they are written, also those that are 0.
    """
    bodies = _Bodies(is_exact)
    if not any(map(bodies.may_hold_sums, closed.jaxpr.eqns)):
        return closed
    level = _Level(closed, bodies)
    if not level.changes:
        return closed
    return level.rewritten((), (), states_derivatives=not level.is_derivative)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Row sums of an elementwise function of one array.

    Attributes:
      key: equal for the same function of arrays of one type.
      of: the variable that they are of.
      equations: what makes them, the last one being the sum.
    """

    key: Hashable
    of: Any = dataclasses.field(compare=False)
    equations: Sequence[Equation] = dataclasses.field(compare=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sums of an array."""
        values = {self.of: x}
        run(self.equations, values, applied, ())
        sums: jax.Array = values[self.equations[-1].outvars[0]]
        return sums

    def known(self, sums: jax.Array, x: jax.Array) -> jax.Array:
        """The sums, with the derivative of those of x."""
        types = [jax.typeof(x), jax.typeof(sums)]
        gradient = needed_jaxpr(lambda x, d: jax.vjp(self, x)[1](d), types)

        @jax.custom_vjp
        def row_sums(sums: jax.Array, x: jax.Array) -> jax.Array:
            return sums

        def backward(x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
            (dx,) = evaluate(gradient.jaxpr, gradient.consts, [x, d], applied, ())
            return jnp.zeros_like(d), dx

        row_sums.defvjp(lambda sums, x: (row_sums(sums, x), x), backward)  # which has this derivative in its turn
        result: jax.Array = at_line(self.equations[-1], row_sums, sums, x)
        return result


class _Bodies:
    """The bodies that equations hold, each read once.

    Args:
      is_exact: as in `with_row_sums_in_front`.
    """

    def __init__(self, is_exact: bool):
        self._is_exact = is_exact
        self._levels: dict[int, tuple[Any, _Level]] = {}

    def may_hold_sums(self, equation: Equation) -> bool:
        """True for a loop, a checkpoint or a call of a fused function, with a product and a sum in it."""
        if not is_call(equation) and equation.primitive.name not in CHECKPOINTS | {"scan"}:
            return False
        names = {e.primitive.name for jaxpr in inner_jaxprs(equation) for e, _ in equations(jaxpr)}
        return "reduce_sum" in names and not names.isdisjoint(PRODUCTS)

    def level(self, equation: Equation) -> _Level:
        """The equation's body."""
        body = callee(equation)
        if id(body) not in self._levels:
            closed = core.ClosedJaxpr(*opened(body))
            flat = straight(closed, closed.in_avals, opens_inner=False)
            self._levels[id(body)] = body, _Level(flat if self._is_exact else with_centred_sums(flat), self)
        return self._levels[id(body)][1]


class _Level:
    """A straight jaxpr with the bodies in it.

    Attributes:
      closed: the jaxpr.
      inner: the bodies of loops, checkpoints and calls of fused functions, by their equations' ids.
      given: by the same ids, the sums that the body is given, each with the number of the argument that it is of.
      sliced: for a loop further ones of what it slices, which another loop stacks.
      stacked: the sums that a loop stacks, each with the number of the result that it is of.
      sums: the variables that are sums of arguments, or of what is given to bodies or comes from them, with what they
        are of.
      is_derivative: whether JAX has differentiated it, or a part of it.
      changes: whether it has a body that is given sums.
    """

    def __init__(self, closed: core.ClosedJaxpr, bodies: _Bodies):
        self.closed, self._makers = closed, DefUse(closed.jaxpr)
        holding = [e for e in self._makers.equations if bodies.may_hold_sums(e)]
        self.inner = {id(e): bodies.level(e) for e in holding}
        ends = {*closed.jaxpr.invars, *(x for e in holding for x in (*variables(e.invars), *e.outvars))}
        self.sums = dict(_sums_of(self._makers.equations, ends))
        self.given = {id(e): list(self._given(e)) for e in holding}
        self.changes: bool = any(self.given.values()) or any(level.changes for level in self.inner.values())
        self.changes |= any(any(self.asked(e, ())) for e in holding)
        each = [closed.jaxpr, *(level.closed.jaxpr for level in self.inner.values())]
        inner_flags = (level.is_derivative for level in self.inner.values())
        self.is_derivative: bool = any(map(is_derivative, each)) or any(inner_flags)
        self.sliced: dict[int, list[tuple[int, _Sums]]] = {}
        self.stacked: dict[int, list[tuple[int, _Sums]]] = {}
        self._rewritten: dict[Hashable, core.ClosedJaxpr] = {}
        self._calls: dict[int, Callable[..., Sequence[Any]]] = {}  # of these, by their ids
        for equation in holding:
            self._slice_what_is_stacked(equation)

    @functools.cached_property
    def needs(self) -> dict[Any, dict[_Sums, None]]:
        """The sums that are read, by the variables that they are of."""
        found: dict[Any, dict[_Sums, None]] = {}
        for x, sums in self.sums.values():
            found.setdefault(x, {})[sums] = None
        for equation in self._makers.equations:
            for i, sums in self.given.get(id(equation), ()):
                found.setdefault(equation.invars[i], {})[sums] = None
        return found

    def _given(self, equation: Equation) -> Iterator[tuple[int, _Sums]]:
        """The sums that a body is given: those that it needs of what it is called with, or of what it carries."""
        level, is_loop = self.inner[id(equation)], equation.primitive.name == "scan"
        invars, outvars = level.closed.jaxpr.invars, level.closed.jaxpr.outvars
        first = num_constants(equation) if is_loop else 0
        count = num_carried(equation) if is_loop else len(invars)
        for i in range(first, first + count):
            for sums in level.needs.get(invars[i], ()):
                if level.makes(outvars[i - first], sums) if is_loop else variables([equation.invars[i]]):
                    yield i, sums

    def _slice_what_is_stacked(self, equation: Equation) -> None:
        """Notes the sums that a loop needs of slices, where the loop that stacked these carries them."""
        first = num_constants(equation) + num_carried(equation) if equation.primitive.name == "scan" else 0
        invars = self.inner[id(equation)].closed.jaxpr.invars
        for i, x in enumerate(equation.invars):
            maker = self._makers.maker(x)
            if not first or i < first or maker is None or maker.primitive.name != "scan" or id(maker) not in self.inner:
                continue
            number, body = maker.outvars.index(x), self.inner[id(maker)].closed.jaxpr
            for sums in self.inner[id(equation)].needs.get(invars[i], ()):
                carried = [body.invars[j] for j, one in self.given[id(maker)] if one == sums]
                if number >= num_carried(maker) and body.outvars[number] in carried:
                    self.sliced.setdefault(id(equation), []).append((i, sums))
                    stacked = self.stacked.setdefault(id(maker), [])
                    stacked += [(number, sums)] if (number, sums) not in stacked else []

    def makes(self, x: Any, sums: _Sums) -> bool:
        """True for a variable whose sums need no pass of their own: what makes it can make them."""
        if isinstance(x, core.Literal):
            return False
        maker = self._makers.maker(x)
        if maker is not None and id(maker) in self.inner:
            return self._comes_with(maker, maker.outvars.index(x), sums)
        open_, seen = [x], {x}
        while open_:
            maker = self._makers.maker(open_.pop())
            if maker is None:
                continue
            if id(maker) in self.inner or (maker.primitive.name in PRODUCTS and isinstance(dot_of(maker), Dot)):
                return True
            if maker.primitive.name in _OF_TILES:
                new = [y for y in variables(maker.invars) if y.aval.size == x.aval.size and y not in seen]
                seen.update(new)
                open_ += new
        return False

    def _comes_with(self, equation: Equation, number: int, sums: _Sums) -> bool:
        """True for a result of a body that can give its sums."""
        if equation.primitive.name == "scan":
            return (num_constants(equation) + number, sums) in self.given[id(equation)]
        level = self.inner[id(equation)]
        return level.makes(level.closed.jaxpr.outvars[number], sums)

    def asked(self, equation: Equation, wanted: Sequence[tuple[Any, _Sums]]) -> Iterator[tuple[int, _Sums]]:
        """The sums of a body's results that are read, or wanted beside the variable that they are of.

        Only those that the body can give; each with the number of the result.
        """
        for i, x in enumerate(equation.outvars):
            every = [*self.needs.get(x, ()), *(sums for y, sums in wanted if y is x)]
            yield from ((i, sums) for sums in dict.fromkeys(every) if self._comes_with(equation, i, sums))

    def rewritten(
        self,
        given: Sequence[tuple[int, _Sums]],
        wanted: Sequence[tuple[int, _Sums]],
        *,
        states_derivatives: bool,
    ) -> core.ClosedJaxpr:
        """The jaxpr, whose bodies are given sums; of equal arguments one.

        Args:
          given: the sums that are further arguments, each with the number of the argument that it is of.
          wanted: those that are further results, with the number of the result.
          states_derivatives: whether sums are read with the derivative of what they are of.
        """
        key = tuple(given), tuple(wanted), states_derivatives
        if key not in self._rewritten:
            self._rewritten[key] = self._made(given, wanted, states_derivatives=states_derivatives)
        return self._rewritten[key]

    def call(self, equation: Equation, body: core.ClosedJaxpr) -> Callable[..., Sequence[Any]]:
        """A call of a fused function with another body, one of `rewritten`; the same for all of its calls."""
        if id(body) not in self._calls:
            self._calls[id(body)] = called_as(
                equation, lambda *arrays: evaluate(body.jaxpr, body.consts, arrays, applied, ())
            )
        return self._calls[id(body)]

    def _made(
        self, given: Sequence[tuple[int, _Sums]], wanted: Sequence[tuple[int, _Sums]], *, states_derivatives: bool
    ) -> core.ClosedJaxpr:
        jaxpr = self.closed.jaxpr
        invars: Sequence[Any] = jaxpr.invars
        types = [*self.closed.in_avals, *(_type_of(sums, invars[i].aval) for i, sums in given)]

        def function(*arrays: Any) -> list[Any]:
            arguments, others = arrays[: len(invars)], arrays[len(invars) :]
            values = dict(zip([*jaxpr.constvars, *invars], [*self.closed.consts, *arguments], strict=True))
            of_arguments = {(invars[i], sums): x for (i, sums), x in zip(given, others, strict=True)}
            return _Rewriting(self, values, of_arguments, wanted, states_derivatives).results()

        return needed_jaxpr(function, types)


class _Rewriting:
    """The work of `_Level.rewritten`.

    Args:
      level: the jaxpr.
      values: of its constants and arguments.
      known: the sums that are known, by what they are of.
      wanted, states_derivatives: as there.
    """

    def __init__(
        self,
        level: _Level,
        values: dict[Any, Any],
        known: dict[tuple[Any, _Sums], Any],
        wanted: Sequence[tuple[int, _Sums]],
        states_derivatives: bool,
    ):
        self._level, self._values, self._known, self._states = level, values, known, states_derivatives
        self._wanted = [(level.closed.jaxpr.outvars[i], sums) for i, sums in wanted]
        passed = [(e.invars[i], sums) for e in level.closed.jaxpr.eqns for i, sums in level.given.get(id(e), ())]
        self._passed = dict.fromkeys([*known, *passed, *self._wanted])  # the sums that are arrays of their own

    def results(self) -> list[Any]:
        """The results of the jaxpr, and then the sums that are wanted."""
        every: Sequence[Equation] = self._level.closed.jaxpr.eqns
        for equation in every:
            outputs: Sequence[Any]
            if id(equation) in self._level.inner:
                outputs = at_line(equation, self._of_body, equation)
            elif (own := self._level.sums.get(equation.outvars[0])) is not None and self._is_known(own):
                outputs = [self._read(*own)]
            else:
                outputs = applied(equation, [read(self._values, x) for x in equation.invars])
            self._values.update(zip(equation.outvars, outputs, strict=True))
        outvars: Sequence[Any] = self._level.closed.jaxpr.outvars
        return [*(read(self._values, x) for x in outvars), *(self._sums(*own) for own in self._wanted)]

    def _is_known(self, own: tuple[Any, _Sums]) -> bool:
        return own in self._known or own in self._passed

    def _sums(self, x: Any, sums: _Sums) -> Any:
        """The sums of a variable."""
        if (x, sums) not in self._known:
            array = self._values[x]
            self._known[x, sums] = sums(lax.stop_gradient(array) if self._states else array)
        return self._known[x, sums]

    def _read(self, x: Any, sums: _Sums) -> Any:
        """The sums of a variable, with their derivative."""
        array = self._sums(x, sums)
        return sums.known(array, self._values[x]) if self._states else array

    def _of_body(self, equation: Equation) -> Sequence[Any]:
        """The results of an equation whose body is given sums; those that it gives are known then."""
        level, given = self._level.inner[id(equation)], self._level.given[id(equation)]
        sliced, stacked = (of.get(id(equation), []) for of in (self._level.sliced, self._level.stacked))
        inputs = [read(self._values, x) for x in equation.invars]
        more = [self._sums(equation.invars[i], sums) for i, sums in given]
        is_loop, count = equation.primitive.name == "scan", len(equation.outvars)
        carried = ((i - num_constants(equation), sums) for i, sums in given)
        wanted = list(carried if is_loop else self._level.asked(equation, self._wanted))
        body = level.rewritten([*given, *sliced], [*wanted, *stacked], states_derivatives=self._states)
        outputs: Sequence[Any]
        if is_loop:
            slices = [self._known[equation.invars[i], sums] for i, sums in sliced]
            outputs = _scan(equation, body, inputs, more, slices)
        else:
            arrays = [*inputs, *more]
            outputs = (
                level.call(equation, body)(*arrays)
                if is_call(equation)
                else with_body(equation, without_constants(body), body.consts, arrays)
            )
        of_results = [(equation.outvars[i], sums) for i, sums in [*wanted, *stacked]]
        self._known.update(zip(of_results, outputs[count:], strict=True))
        return outputs[:count]


def _sums_of(every: Sequence[Equation], ends: set[Any]) -> Iterator[tuple[Any, tuple[Any, _Sums]]]:
    """The variables that are row sums of some arrays, with the array and the sums."""
    # Elementwise functions of one array: the array, and the numbers of their equations.
    made: dict[Any, tuple[Any, frozenset[int]]] = {x: (x, frozenset()) for x in ends}
    unnamed: dict[Any, Any] = {}  # what a policy's names are given to
    for i, equation in enumerate(every):
        inputs, name = variables(equation.invars), equation.primitive.name
        if name == "name" and inputs and inputs[0] in made and equation.outvars[0] not in made:
            unnamed[equation.outvars[0]] = unnamed.get(inputs[0], inputs[0])
            made[equation.outvars[0]] = made[inputs[0]]
            continue
        if len(equation.outvars) != 1 or not inputs or not all(x in made for x in inputs) or equation.effects:
            continue
        (x, *others), (out,) = dict.fromkeys(made[y][0] for y in inputs), equation.outvars
        numbers = frozenset({i}).union(*(made[y][1] for y in inputs))
        if others or len(numbers) > _MOST_EQUATIONS or out in made:
            continue
        if sums_last_axis(equation):
            makers = [_reading(every[j], unnamed) for j in sorted(numbers)]
            key = structure(makers, [x], [out], lambda x: str(x.aval), own_params)
            if key is not None:
                yield out, (x, _Sums(key, x, makers))
        elif (name in ELEMENTWISE or asks_sharding(equation)) and _is_of_elements(equation, x):
            made[out] = x, numbers


def _reading(equation: Equation, others: Mapping[Any, Any]) -> Equation:
    """The equation, which reads other variables in the place of some."""
    inputs = [x if isinstance(x, core.Literal) else others.get(x, x) for x in equation.invars]
    return equation.replace(invars=inputs)


def _is_of_elements(equation: Equation, x: Any) -> bool:
    """True for a result of floats with the shape of x, made of arrays of that shape and of numbers."""
    inputs: Sequence[Any] = equation.invars
    out: Any = equation.outvars[0]
    shapes = {y.aval.shape for y in (*variables(inputs), out)}
    are_numbers = all(np.ndim(y.val) == 0 for y in inputs if isinstance(y, core.Literal))
    return shapes == {x.aval.shape} and are_numbers and is_float(out.aval.dtype)


def sums_last_axis(equation: Equation) -> bool:
    """True for a sum over the last axis alone, of more than 16 bits."""
    if equation.primitive.name != "reduce_sum":
        return False
    x, (out,) = equation.invars[0], equation.outvars
    is_last = tuple(equation.params["axes"]) == (x.aval.ndim - 1,) and x.aval.ndim > 1
    return is_last and out.aval.dtype.itemsize >= _LEAST_BYTES


def _type_of(sums: _Sums, aval: Any) -> Any:
    """The type of the sums of an array of this type."""
    (found,) = jax.make_jaxpr(sums)(aval).out_avals
    return found


def _scan(
    equation: Equation, body: core.ClosedJaxpr, inputs: Sequence[Any], sums: Sequence[Any], slices: Sequence[Any]
) -> list[Any]:
    """The results of a loop, the sums of what it carries, and those that it stacks."""
    consts, carried, count = num_constants(equation), num_carried(equation), len(equation.outvars)

    def step(carry: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> Any:
        arrays = [*inputs[:consts], *carry[0], *xs[0], *carry[1], *xs[1]]
        outputs = evaluate(body.jaxpr, body.consts, arrays, applied, ())
        of_carry, stacked = outputs[count:][: len(sums)], outputs[count + len(sums) :]
        return [outputs[:carried], of_carry], [outputs[carried:count], stacked]

    end = consts + carried
    given = list(inputs[consts:end]), list(sums)
    (carry, of_carry), (ys, stacked) = scanned(equation, step, given, (list(inputs[end:]), list(slices)))
    return [*carry, *ys, *of_carry, *stacked]
