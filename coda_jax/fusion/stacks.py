"""Loops over arrays that are stacked along another axis than the first: each step indexes them where they lie.

JAX's scan goes along the first axis. A model whose layers are stacked along another one moves that in front of its
loop, and its gradient moves it back behind the loop. A kernel reads matrices in one order, so that XLA would copy all
layers in front of the loop, and the gradients of all behind it.

    moved = transpose(stack);  scan(body, moved) -> ys;  transpose(ys)

is here one call, of which no part is differentiated alone. It is run as a loop over the numbers of the steps: a step
takes its slice of the stack, which is a constant of the loop, and writes its y into a stack that the loop carries. So
are the loops of the call's derivative, which is JAX's own derivative of these equations. It keeps the stack, which is
there, and not what was moved.

Proof: slices are the moved array's elements, and each step writes another part of the carried stack, all of which is
written in the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import PRODUCTS, Equation
from coda_jax.fusion.straight import STACKED, applied, at_line
from coda_jax.graph.calls import is_key, traced_backward, traced_linear
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.def_use import DefUse
from coda_jax.jaxprs.evaluate import read
from coda_jax.jaxprs.walk import equations, num_carried, num_constants
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, vary, with_sharding
from coda_jax.primitives.reverse_mode import Backward, OfBatch, Rule

Body = Callable[[Equation], Callable[..., Sequence[Any]]]
_LEAST_BYTES = 128  # of what lies together in a step's slice: XLA reads lines of the cache


@dataclasses.dataclass(frozen=True)
class _Moves:
    """The transposes around a loop that it does without.

    Attributes:
      read: by the number of an argument of the loop, what is in front of a transpose, and the axis of the steps.
      written: by the number of a result, what is behind its transpose, and the axis.
    """

    read: Mapping[int, tuple[Any, int]]
    written: Mapping[int, tuple[Any, int]]


def with_stacks(closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> core.ClosedJaxpr:
    """A straight jaxpr at these arrays, whose loops with products over moved arrays are calls that move these."""
    found = {
        i: moves
        for i, moves in _moves(closed.jaxpr).items()
        if any(inner.primitive.name in PRODUCTS for inner, _ in equations(_body(closed.jaxpr.eqns[i])))
    }
    if not found:
        return closed

    def run(number: int, equation: Equation, values: dict[Any, Any]) -> Sequence[Any]:
        moves = found[number]

        def stacked(*inputs: Any) -> list[Any]:
            given = [_in_front(x, moves.read[i][1]) if i in moves.read else x for i, x in enumerate(inputs)]
            outputs = applied(equation, given)
            return [_behind(y, moves.written[i][1]) if i in moves.written else y for i, y in enumerate(outputs)]

        stacked.__name__ = f"{STACKED}{equation.primitive.name}"
        inputs = [_read(values, moves.read[i][0] if i in moves.read else x) for i, x in enumerate(equation.invars)]
        outputs: Sequence[Any] = at_line(equation, jax.jit(stacked), *inputs)
        return outputs

    return jax.make_jaxpr(lambda *xs: _evaluated(closed, xs, found, run))(*arrays)


def stacked(equation: Equation, inputs: Sequence[Any], body: Body) -> Sequence[Any]:
    """The results of a call that `with_stacks` made.

    Args:
      equation: the call.
      inputs: its arguments.
      body: the function of a step, for the equation of a loop.
    """
    loop = _Loop(core.ClosedJaxpr(*opened(callee(equation))), tuple(map(jax.typeof, inputs)), body)
    rule = Rule("fuse", lambda _, *xs: loop.run(*xs), loop.forward, loop)
    outputs: Sequence[Any] = rule.function(inputs)(rule.zero(inputs), *inputs)
    return outputs


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop(Backward):
    """A loop between transposes, and its derivative.

    Attributes:
      closed: its equations.
      types: of its arguments.
      body: the function of a step, for the equation of a loop.
    """

    closed: core.ClosedJaxpr
    types: tuple[Any, ...]
    body: Body

    def run(self, *arrays: Any) -> list[Any]:
        """The results."""
        return _in_place(self.closed, arrays, self.body)

    def forward_of(self, forward: Callable[..., Any], is_differentiated: Sequence[bool]) -> Callable[..., Any]:
        flags = tuple(flag and _has_cotangent(x) for flag, x in zip(is_differentiated, self.types, strict=True))
        return functools.partial(self._forward, flags)

    def forward(self, *arrays: Any) -> tuple[list[Any], Any]:
        """The results, and what a backward pass takes, where all floats are differentiated."""
        return self._forward(tuple(map(_has_cotangent, self.types)), *arrays)

    def _forward(self, flags: tuple[bool, ...], *arrays: Any) -> tuple[list[Any], Any]:
        linear = self._linear(flags)
        outputs = _in_place(linear.forward, arrays, _own_body)
        count = len(self.closed.out_avals)
        return outputs[:count], (outputs[count:], linear)

    def __call__(self, kept: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        arrays, linear = kept
        present = tuple(i for i, x in enumerate(cotangents) if x is not None)
        given = [*arrays, *(cotangents[i] for i in present)]
        made = iter(_in_place(linear.backward(present), given, _own_body))
        return tuple(next(made) if flag else None for flag in linear.flags)

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        return None

    @functools.cached_property
    def _linears(self) -> dict[tuple[bool, ...], _Linear]:
        return {}

    def _linear(self, flags: tuple[bool, ...]) -> _Linear:
        """The derivative by the arguments that these flags name."""
        if flags not in self._linears:
            plain = jax.make_jaxpr(lambda *xs: _with_bodies(self.closed, xs, self.body))(*self.types)
            self._linears[flags] = _Linear.of(plain, flags)
        return self._linears[flags]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Linear:
    """JAX's derivative of a loop between transposes.

    Attributes:
      plain: the function.
      flags: which of its arguments are differentiated.
      forward: gives its results, and after them all that is kept; of moved arrays what they are moved from.
      axes: of what is kept the axis that is moved in front of what the derivative reads; None of others.
      tree, keys: as `traced_linear` gives them.
    """

    plain: core.ClosedJaxpr
    flags: tuple[bool, ...]
    forward: core.ClosedJaxpr
    axes: Sequence[int | None]
    tree: Any
    keys: Sequence[Any]

    @classmethod
    def of(cls, plain: core.ClosedJaxpr, flags: tuple[bool, ...]) -> _Linear:
        closed, tree, keys = traced_linear(plain, flags)
        def_use = DefUse(closed.jaxpr)
        results, kept, axes = list(closed.jaxpr.outvars[: len(plain.out_avals)]), [], list[int | None]()
        for x in closed.jaxpr.outvars[len(results) :]:
            maker = def_use.maker(x)
            axis = None if maker is None else _axis_moved_in_front(maker)
            kept.append(x if axis is None else maker.invars[0])
            axes.append(axis)
        forward = core.ClosedJaxpr(closed.jaxpr.replace(outvars=[*results, *kept]), closed.consts)
        return cls(plain, flags, forward, axes, tree, keys)

    @functools.cached_property
    def _backwards(self) -> dict[tuple[int, ...], core.ClosedJaxpr]:
        return {}

    def backward(self, present: tuple[int, ...]) -> core.ClosedJaxpr:
        """The cotangents of the arguments, from what is kept and the cotangents of these results."""
        if present not in self._backwards:
            count = len(self.plain.out_avals)

            def of_moved(arrays: Sequence[Any]) -> list[Any]:
                each = zip(arrays, self.axes, strict=True)
                return [x if axis is None else _in_front(x, axis) for x, axis in each]

            types = self.forward.out_avals[count:]
            outs = self.plain.out_avals
            self._backwards[present] = traced_backward(self.tree, self.keys, types, outs, present, of_moved)
        return self._backwards[present]


def _has_cotangent(x: Any) -> bool:
    return not is_key(x) and is_float(x.dtype)


def _with_bodies(closed: core.ClosedJaxpr, arrays: Sequence[Any], body: Body) -> list[Any]:
    """The results of equations, with these functions as the steps of loops."""

    def run(_: int, equation: Equation, values: dict[Any, Any]) -> Sequence[Any]:
        inputs = [read(values, x) for x in equation.invars]
        outputs: Sequence[Any] = at_line(equation, _scan, equation, inputs, body(equation), _Moves({}, {}))
        return outputs

    eqns: Sequence[Equation] = closed.jaxpr.eqns
    loops = {i: _Moves({}, {}) for i, e in enumerate(eqns) if e.primitive.name == "scan"}
    return _evaluated(closed, arrays, loops, run)


def _in_place(closed: core.ClosedJaxpr, arrays: Sequence[Any], body: Body) -> list[Any]:
    """The results of equations whose loops do without transposes around them."""
    found = _moves(closed.jaxpr)

    def run(number: int, equation: Equation, values: dict[Any, Any]) -> Sequence[Any]:
        read_from = found[number].read
        inputs = [read(values, read_from[i][0] if i in read_from else x) for i, x in enumerate(equation.invars)]
        outputs: Sequence[Any] = at_line(equation, _scan, equation, inputs, body(equation), found[number])
        return outputs

    return _evaluated(closed, arrays, found, run)


def _evaluated(
    closed: core.ClosedJaxpr,
    arrays: Sequence[Any],
    found: Mapping[int, _Moves],
    run: Callable[[int, Equation, dict[Any, Any]], Sequence[Any]],
) -> list[Any]:
    """The results of equations, of which `run` gives those with these numbers, without their transposes."""
    jaxpr = closed.jaxpr
    moved = {jaxpr.eqns[i].invars[j] for i, moves in found.items() for j in moves.read}
    moved |= {x for moves in found.values() for x, _ in moves.written.values()}
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arrays], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        if number in found:
            written = found[number].written
            results = [written[i][0] if i in written else x for i, x in enumerate(equation.outvars)]
            values.update(zip(results, run(number, equation, values), strict=True))
        elif moved.isdisjoint(equation.outvars):
            inputs = [read(values, x) for x in equation.invars]
            values.update(zip(equation.outvars, applied(equation, inputs), strict=True))
    return [read(values, x) for x in jaxpr.outvars]


def _moves(jaxpr: core.Jaxpr) -> dict[int, _Moves]:
    """The loops that do without transposes around them, by number."""
    def_use = DefUse(jaxpr)
    each = ((i, e) for i, e in enumerate(def_use.equations) if _is_loop(e))
    found = {i: _Moves(_read_moved(e, def_use), _written_moved(e, def_use)) for i, e in each}
    return {i: moves for i, moves in found.items() if moves.read or moves.written}


def _is_loop(equation: Equation) -> bool:
    return equation.primitive.name == "scan" and not equation.effects


def _read_moved(equation: Equation, def_use: DefUse) -> dict[int, tuple[Any, int]]:
    """`_Moves.read` of a loop."""
    found = {}
    for i in _stacked_arguments(equation):
        x = equation.invars[i]
        maker = def_use.maker(x)
        axis = None if maker is None or x in def_use.results else _axis_moved_in_front(maker)
        if axis is not None and all(_scans(one, x) for one in def_use.readers(x)):
            found[i] = maker.invars[0], axis
    return found


def _written_moved(equation: Equation, def_use: DefUse) -> dict[int, tuple[Any, int]]:
    """`_Moves.written` of a loop."""
    found = {}
    for i in range(num_carried(equation), len(equation.outvars)):
        behind = def_use.only_reader(equation.outvars[i])
        axis = None if behind is None else _axis_moved_behind(behind)
        if axis is not None:
            found[i] = behind.outvars[0], axis
    return found


def _stacked_arguments(equation: Equation) -> range:
    return range(num_constants(equation) + num_carried(equation), len(equation.invars))


def _scans(equation: Equation, x: Any) -> bool:
    """True for a loop that reads an array step by step alone."""
    return _is_loop(equation) and all(y is not x for y in equation.invars[: _stacked_arguments(equation).start])


def _axis_moved_in_front(equation: Equation) -> int | None:
    """The axis that a transpose, if it is one, moves in front of all, if a step's slice of its argument lies well."""
    if equation.primitive.name != "transpose":
        return None
    order = list(equation.params["permutation"])
    is_one = order[1:] == sorted(order[1:])
    return order[0] if is_one and _lies_well(equation.invars[0].aval, order[0]) else None


def _axis_moved_behind(equation: Equation) -> int | None:
    """The axis that a transpose, if it is one, moves the first one to, if a step's slice of its result lies well."""
    if equation.primitive.name != "transpose":
        return None
    order = list(equation.params["permutation"])
    axis = order.index(0)
    is_one = [x for x in order if x] == list(range(1, len(order)))
    return axis if is_one and _lies_well(equation.outvars[0].aval, axis) else None


def _lies_well(aval: Any, axis: int) -> bool:
    """True where slices along an axis, which is not the first, are of pieces that lie together, on one device each."""
    if axis == 0 or is_key(aval) or not all(isinstance(size, int) for size in aval.shape):
        return False
    cuts = explicit_cuts(aval)
    return math.prod(aval.shape[axis + 1 :]) * aval.dtype.itemsize >= _LEAST_BYTES and not any(cuts[axis : axis + 1])


def _read(values: dict[Any, Any], x: Any) -> Any:
    """The array of a variable or of a literal."""
    aval: Any = x.aval
    return jnp.asarray(x.val, aval.dtype) if isinstance(x, core.Literal) else values[x]


def _in_front(x: Any, axis: int) -> Any:
    return lax.transpose(x, [axis, *(i for i in range(x.ndim) if i != axis)])


def _behind(x: Any, axis: int) -> Any:
    order = list(range(1, x.ndim))
    return lax.transpose(x, [*order[:axis], 0, *order[axis:]])


def _body(equation: Equation) -> core.Jaxpr:
    return opened(equation.params["jaxpr"])[0]


def _own_body(equation: Equation) -> Callable[..., Sequence[Any]]:
    function: Callable[..., Sequence[Any]] = core.jaxpr_as_fun(core.ClosedJaxpr(*opened(equation.params["jaxpr"])))
    return function


def _scan(equation: Equation, inputs: Sequence[Any], body: Callable[..., Sequence[Any]], moves: _Moves) -> list[Any]:
    """The results of a loop; those that are written stacked along their axes.

    Args:
      equation: the loop.
      inputs: its arguments, with stacks in the place of moved arrays.
      body: the function of a step.
      moves: the arguments and the results that are stacked along other axes than the first.
    """
    params, consts, carried = equation.params, num_constants(equation), num_carried(equation)
    others = [i for i in _stacked_arguments(equation) if i not in moves.read]

    def step(state: tuple[Sequence[Any], Sequence[Any]], each: tuple[Any, Sequence[Any]]) -> Any:
        (carry, stacks), (number, xs) = state, each
        slices = dict(zip(others, xs, strict=True))
        for i, (_, axis) in moves.read.items():
            slices[i] = lax.dynamic_index_in_dim(inputs[i], number, axis, keepdims=False, **_KNOWN)
        outputs = list(body(*inputs[:consts], *carry, *(slices[i] for i in _stacked_arguments(equation))))
        filled = [
            lax.dynamic_update_index_in_dim(stack, outputs[i], number, axis, **_KNOWN)
            for stack, (i, (_, axis)) in zip(stacks, moves.written.items(), strict=True)
        ]
        ys = [y for i, y in enumerate(outputs) if i >= carried and i not in moves.written]
        return (outputs[:carried], filled), ys

    stacks = [_zeros(x.aval) for x, _ in moves.written.values()]
    numbers = jnp.arange(params["length"], dtype=jnp.int32) if moves.read or moves.written else None
    (carry, stacks), ys = lax.scan(
        step,
        (list(inputs[consts:][:carried]), stacks),
        (numbers, [inputs[i] for i in others]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    rest, filled = iter(ys), iter(stacks)
    stacked = (next(filled) if i in moves.written else next(rest) for i in range(carried, len(equation.outvars)))
    return [*carry, *stacked]


_KNOWN = {"allow_negative_indices": False}


def _zeros(aval: Any) -> Any:
    """Zeros of this type, sharded over explicit mesh axes as it is, and varying over its manual ones."""
    zeros = with_sharding(jnp.zeros(aval.shape, aval.dtype), explicit_sharding(aval))
    (zeros,) = vary(frozenset(aval.manual_axis_type.varying), zeros)
    return zeros
