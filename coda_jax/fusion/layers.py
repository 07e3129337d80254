"""Equal layers, one behind the other, as calls of one function: it is traced, planned and differentiated once.

A model that calls its layers in turn is a straight jaxpr in which equations repeat, with a period of as many as a layer
has. The longest such run is cut where the fewest bytes pass from one period to the next, as the residual stream alone
does between layers. Each period becomes what a fused function would be that the model calls as its layer: a call, which
stays one where that costs nothing (`fusion.borders`).

    e1 e2 e3 e1' e2' e3' e1'' e2'' e3''     ->     f(x, w) f(x', w') f(x'', w'')

Equations that several periods read and that need no product, as tables of angles, come before the run; so do parts of
arrays, and keys of random numbers, whose numbers are others in each layer.

Proof: periods are calls of one function only if `structure`, the key of all that they compute, is equal for them.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jax.extend import core

from coda_jax.fusion.alike import own_params, structure
from coda_jax.fusion.dots import PRODUCTS, Equation
from coda_jax.fusion.straight import applied, inner_call
from coda_jax.jaxprs.def_use import DefUse, free_variables, variables
from coda_jax.jaxprs.evaluate import needed_jaxpr, read

_LEAST = 3  # periods that are worth a function
_FARTHEST = 8  # equal products, counted from one, among which the next period's is looked for
_IN_FRONT = frozenset(
    {"slice", "squeeze", "random_seed", "random_split", "random_fold_in", "random_wrap", "random_unwrap"}
)


def with_layers_as_calls(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """A straight jaxpr in which equal layers are calls of a fused function; None of one that has none.

    None too of symbolic sizes.
    """
    types: Iterator[Any] = (x.aval for e in closed.jaxpr.eqns for x in e.outvars)
    sizes = (size for aval in types if hasattr(aval, "shape") for size in aval.shape)
    if not all(isinstance(size, int) for size in sizes):
        return None
    before, every = _parted(closed.jaxpr)
    keys = list(map(_key, every))
    begin, period, count = _run(every, keys)
    if count < _LEAST:
        return None
    end = begin + count * period
    copies = [every[i : i + period] for i in range(begin, end, period)]
    results, inputs = _results(closed.jaxpr, copies), list(map(free_variables, copies))
    found = {
        structure(copy, given, _at(results, copy), lambda x: x.aval, own_params)
        for copy, given in zip(copies, inputs, strict=True)
    }
    is_chain = all(not set(_at(results, a)).isdisjoint(b) for a, b in zip(copies, inputs[1:], strict=False))
    if len(found) > 1 or None in found or not is_chain:
        return None

    def layer(*arrays: Any) -> list[Any]:
        values = dict(zip(inputs[0], arrays, strict=True))
        _apply(copies[0], values)
        return [values[x] for x in _at(results, copies[0])]

    call = inner_call("layer", layer)

    def function(*arrays: Any) -> list[Any]:
        values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))
        _apply([*before, *every[:begin]], values)
        for copy, given in zip(copies, inputs, strict=True):
            values.update(zip(_at(results, copy), call(*(values[x] for x in given)), strict=True))
        _apply(every[end:], values)
        return [read(values, x) for x in closed.jaxpr.outvars]

    return needed_jaxpr(function, closed.in_avals)


def _apply(equations: Sequence[Equation], values: dict[Any, Any]) -> None:
    """Adds the results of equations to the values of variables."""
    for equation in equations:
        outputs = applied(equation, [read(values, x) for x in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))


def _parted(jaxpr: core.Jaxpr) -> tuple[list[Equation], list[Equation]]:
    """The equations that come before all periods, and the others."""
    every: list[Equation] = jaxpr.eqns
    dots = [i for i, e in enumerate(every) if e.primitive.name in PRODUCTS]
    first, period, count = max(_runs(list(map(_key, (every[i] for i in dots)))), key=_covers, default=(0, 1, 0))
    if count < _LEAST:
        return [], every
    behind = set[Any]()  # what products make
    numbers, current = list[int](), -1  # of the periods, by their products
    dot_number = {i: j for j, i in enumerate(dots)}
    for i, equation in enumerate(every):
        if i in dot_number:
            current = (dot_number[i] - first) // period
        numbers.append(current)
        if i in dot_number or not behind.isdisjoint(variables(equation.invars)):
            behind.update(equation.outvars)
    read_in: dict[Any, set[int]] = collections.defaultdict(set)  # the periods in which a variable is read
    front = set[int]()
    for i, equation in reversed(list(enumerate(every))):
        readers = set[int]().union(*(read_in[x] for x in equation.outvars))
        is_shared = len(readers) > 1 and max(readers) - min(readers) > 1
        is_front = behind.isdisjoint(equation.outvars) and not equation.effects
        if is_front and (is_shared or equation.primitive.name in _IN_FRONT or -2 in readers):
            front.add(i)
        for x in variables(equation.invars):
            read_in[x] |= {-2} if i in front else {numbers[i]}
    return [every[i] for i in sorted(front)], [e for i, e in enumerate(every) if i not in front]


def _run(every: Sequence[Equation], keys: Sequence[Hashable]) -> tuple[int, int, int]:
    """The longest run of equal periods with products: its begin, their length and how many they are.

    It begins where the fewest bytes pass from one to the next.
    """
    is_product = [e.primitive.name in PRODUCTS for e in every]
    runs = (run for run in _runs(keys, is_product) if any(is_product[run[0] : run[0] + run[1]]))
    first, period, count = max(runs, key=_covers, default=(0, 1, 0))
    end = first + period * count
    last = {x: i for i, e in enumerate(every) for x in variables(e.invars)}

    def passed(begin: int) -> int:
        border = begin + period
        made = (x for e in every[begin:border] for x in e.outvars if last.get(x, -1) >= border)
        return sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in made)

    begin = min(range(first, min(first + period, end)), key=passed, default=first)
    return begin, period, (end - begin) // period


def _runs(keys: Sequence[Hashable], begins: Sequence[bool] | None = None) -> Iterator[tuple[int, int, int]]:
    """The runs in which keys repeat, each with its begin, its period and how often it repeats; shorter periods first.

    Args:
      keys: one for each element.
      begins: which elements say how long a period may be; all by default.
    """
    places: dict[Hashable, list[int]] = collections.defaultdict(list)
    for i in itertools.compress(range(len(keys)), begins or itertools.repeat(True)):
        places[keys[i]].append(i)
    periods = {b - a for of in places.values() for i, a in enumerate(of) for b in of[i + 1 : i + _FARTHEST]}
    for period in sorted(periods):
        is_alike = map(lambda a, b: a == b, keys, keys[period:])
        for flag, group in itertools.groupby(enumerate(is_alike), lambda numbered: numbered[1]):
            if flag:
                numbers = [i for i, _ in group]
                yield numbers[0], period, len(numbers) // period + 1


def _covers(run: tuple[int, int, int]) -> int:
    return run[1] * run[2] if run[2] >= _LEAST else 0


def _key(equation: Equation) -> Hashable:
    """A key that equations which are alike have in common."""
    inputs = tuple((x.aval, str(x.val) if isinstance(x, core.Literal) else "") for x in equation.invars)
    key = equation.primitive, own_params(equation), inputs, tuple(x.aval for x in equation.outvars)
    try:
        hash(key)
    except TypeError:  # a parameter has no hash
        return object()
    return key


def _results(jaxpr: core.Jaxpr, copies: Sequence[Sequence[Equation]]) -> list[tuple[int, int]]:
    """The results of equations of a period that are read outside of it, in any period, both by number."""
    uses = DefUse(jaxpr)
    found = set[tuple[int, int]]()
    for copy in copies:
        inside = {uses.number(equation) for equation in copy}
        for i, equation in enumerate(copy):
            for j, x in enumerate(equation.outvars):
                if x in uses.results or not inside.issuperset(uses.uses.get(x, ())):
                    found.add((i, j))
    return sorted(found)


def _at(results: Sequence[tuple[int, int]], copy: Sequence[Equation]) -> list[Any]:
    """The variables of a period that are results."""
    return [copy[i].outvars[j] for i, j in results]
