"""The backward pass of attention in a function that JAX has differentiated already.

The equations of a site are differentiated again by JAX, and the result is found in the function, equation by equation:
one whose inputs are known is the equation there of the same primitive, parameters and inputs. The cotangent of the
site's result is the variable for which all equations that depend on it are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.fusion.alike import own_params, structure
from coda_jax.fusion.attention.call import Call
from coda_jax.fusion.attention.linear import identity
from coda_jax.fusion.attention.trees import constant
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.straight import applied, straight
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.def_use import definitions, free_variables, variables
from coda_jax.jaxprs.evaluate import read

_SAID_ELSEWHERE = frozenset({"sharding", "out_sharding", "weak_type"})  # parameters that types of variables say too
_MOST_EQUATIONS = 4096  # of a site


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """The backward pass of a site.

    Attributes:
      call: what the site becomes.
      cotangent: the variable of the result's cotangent.
      found: the variables of the arguments' cotangents, by the arguments.
      products: the products that these are made of.
    """

    call: Call
    cotangent: Any
    found: Mapping[Any, Any]
    products: Sequence[Equation]

    @property
    def variables(self) -> list[Any]:
        """The variables that it makes."""
        return list(self.found.values())

    def forward(self, values: dict[Any, Any]) -> tuple[jax.Array, Callable[[jax.Array], Sequence[jax.Array]]]:
        """The site's result and its pullback."""

        def function(*arrays: jax.Array) -> jax.Array:
            return self.call.result(values | dict(zip(self.found, arrays, strict=True)))

        result, pullback = jax.vjp(function, *(values[x] for x in self.found))
        return result, pullback


class Equations:
    """The equations of a jaxpr by what they compute; equal ones are one."""

    def __init__(self, makers: Makers):
        self.makers = makers
        self._first: dict[Any, Any] = {}  # the variable in whose place another one may stand
        self._known: dict[Hashable, Equation] = {}
        self._derivatives: dict[Hashable, core.Jaxpr] = {}
        self._readers: dict[Hashable, list[Equation]] = {}
        equations: Sequence[Equation] = makers.equations
        for equation in equations:
            if equation.effects:
                continue
            kind = _kind(equation)
            key = kind, tuple(map(self._name, equation.invars))
            other: Equation = self._known.setdefault(key, equation)
            self._readers.setdefault(kind, []).append(equation)
            if other is not equation:
                self._first.update(zip(equation.outvars, other.outvars, strict=True))

    def _name(self, x: Any) -> Hashable:
        if isinstance(x, core.Literal):
            return identity(constant(x))
        return id(self._first.get(x, x))

    def like(self, kind: Hashable, equation: Equation, known: Mapping[Any, Any]) -> Equation | None:
        """The equation like another one, of this kind, whose variables are known as those here."""
        names = (self._name(x if isinstance(x, core.Literal) else known[x]) for x in equation.invars)
        return self._known.get((kind, tuple(names)))

    def derivative(self, result: Any, own: Sequence[Equation], arguments: Sequence[Any]) -> core.Jaxpr:
        """`_derivative`, which is traced once for equal layers."""
        key = structure(own, arguments, [result], lambda _: None, own_params)
        if key is None:
            return _derivative(result, own, arguments)
        if key not in self._derivatives:
            self._derivatives[key] = _derivative(result, own, arguments)
        return self._derivatives[key]

    def read_by(self, kinds: Sequence[Hashable]) -> Iterator[Any]:
        """The variables that equations of such kinds read."""
        yield from dict.fromkeys(x for kind in kinds for e in self._readers.get(kind, ()) for x in variables(e.invars))


def _kind(equation: Equation) -> Hashable:
    params = sorted((key, str(value)) for key, value in equation.params.items() if key not in _SAID_ELSEWHERE)
    return equation.primitive.name, tuple(params)


def gradients_of(call: Call, equations: Equations) -> Gradients | None:
    """The backward pass of a site, if the jaxpr has it."""
    own = _equations_of(call, equations.makers)
    if len(own) > _MOST_EQUATIONS:
        return None
    arguments = free_variables(own)
    derivative = equations.derivative(call.site.result, own, arguments)
    every: list[Any] = derivative.invars
    cotangent, *inputs = every
    steps = [(_kind(equation), equation) for equation in derivative.eqns]
    behind = Makers(derivative).behind([cotangent])
    late = [one for one in steps if not behind.isdisjoint(one[1].outvars)]
    base = dict(zip(inputs, arguments, strict=True))
    _replay([one for one in steps if behind.isdisjoint(one[1].outvars)], equations, base)
    kinds = [kind for kind, equation in late if cotangent in variables(equation.invars)]
    for candidate in _like(cotangent, equations.read_by(kinds)):
        known = base | {cotangent: candidate}
        matched = _replay(late, equations, known)
        wanted = zip(filter(_is_differentiated, arguments), derivative.outvars[1:], strict=True)
        found = {x: known[y] for x, y in wanted if x in call.arguments and among(y, known)}
        products = [equation for equation in matched if equation.primitive.name == "dot_general"]
        if products and found and candidate not in definitions(own):
            return Gradients(call, candidate, found, products)
    return None


def _like(cotangent: Any, candidates: Iterable[Any]) -> Iterator[Any]:
    """The candidates of a cotangent's type."""
    for x in candidates:
        if (x.aval.shape, x.aval.dtype) == (cotangent.aval.shape, cotangent.aval.dtype):
            yield x


def _is_differentiated(x: Any) -> bool:
    return is_float(x.aval.dtype)


def _equations_of(call: Call, makers: Makers) -> list[Equation]:
    """The equations that make a site's result of the arguments of its call, in order."""
    found, stops, open_ = dict[int, Equation](), set(call.arguments), [call.site.result]
    while open_:
        x = open_.pop()
        equation = None if x in stops else makers.maker(x)
        if equation is not None and makers.number(equation) not in found:
            found[makers.number(equation)] = equation
            open_ += variables(equation.invars)
    return [found[number] for number in sorted(found)]


def _derivative(result: Any, own: Sequence[Equation], arguments: Sequence[Any]) -> core.Jaxpr:
    """The function of a cotangent and of arguments that gives the result and the floats' cotangents."""
    floats = [i for i, x in enumerate(arguments) if _is_differentiated(x)]

    def forward(*arrays: Any) -> Any:
        values = dict(zip(arguments, arrays, strict=True))
        for equation in own:
            outputs = applied(equation, [read(values, x) for x in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
        return values[result]

    def function(cotangent: Any, *arrays: Any) -> list[Any]:
        def of_floats(*given: Any) -> Any:
            every = list(arrays)
            for i, x in zip(floats, given, strict=True):
                every[i] = x
            return forward(*every)

        y, pullback = jax.vjp(of_floats, *(arrays[i] for i in floats))
        return [y, *pullback(cotangent)]

    types = [x.aval for x in (result, *arguments)]
    jaxpr: core.Jaxpr = straight(jax.make_jaxpr(function)(*types), types).jaxpr
    return jaxpr


def _replay(steps: Sequence[tuple[Hashable, Equation]], equations: Equations, known: dict[Any, Any]) -> list[Equation]:
    """Adds the variables of equations whose like the jaxpr has; returns those found there."""
    found = []
    for kind, equation in steps:
        if equation.effects or any(x not in known for x in variables(equation.invars)):
            continue
        like = equations.like(kind, equation, known)
        if like is not None:
            known.update(zip(equation.outvars, like.outvars, strict=True))
            found.append(like)
    return found
