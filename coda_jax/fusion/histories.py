"""Histories of products in 8 bits, and how they come to a function's products, those in bodies too.

A function whose products with weights are rounded by a recipe gets one more argument for each of these, its history,
as `graph.rounded` has it. The product becomes a `coda_rounded_dot` that reads it, so that all that follows sees what
`coda.fp8.matmul` with a history would have made there. Bodies get theirs behind their own arguments:

    checkpoint, jitted function    behind its arguments
    scan                           stacked, a history for each step, beside what it is over
    cond                           those of all branches, behind the operands

The body of a while has no derivative, the rule of a custom_vjp is the user's, and a shard_map would add up the maxima
of devices: there scales are those of the tensors.

A history is named by its product's weight, the argument of the function that it is or is a view of, or by the line of
the program where it is none. Histories are given to `fuse` by these names. Their cotangents are the histories of the
next step. A sum of such cotangents is no history, the largest of each element is: of several batches, and of devices.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.fusion.dots import Dot, Equation
from coda_jax.fusion.losses.whole_logits import with_losses_in_sight
from coda_jax.fusion.nested import Function, as_arrays, has_products, run_cond, run_scan, with_body
from coda_jax.fusion.orders import transposed_back, with_rows_first
from coda_jax.fusion.rounded_products import WeightProducts, flags_in_body, rounded_params
from coda_jax.fusion.straight import CHECKPOINTS, JITS, at_line, is_jitted, line_of, results_with, straight
from coda_jax.graph.rounded import Recipe, next_history
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.evaluate import read, without_constants
from coda_jax.jaxprs.walk import inner_jaxprs
from coda_jax.operators.rounded_dot import RoundedFactors, rounded_dot_p
from coda_jax.primitives.mesh_types import vary, varying_axes

ARGUMENT = "fp8_histories"  # of a function that `fuse` made
# A history: the number of the argument that its product's weight is of, or the product's line where it is a constant;
# and the lengths of the loops that it is in.
_Slot = tuple[int | str, tuple[int, ...]]


@jax.custom_vjp
def overwritten(history: jax.Array) -> jax.Array:
    """A history, of which the cotangent is the next step's, made of the maxima that are its cotangent behind this."""
    return history


overwritten.defvjp(lambda history: (history, history), lambda history, maxima: (next_history(history, maxima),))


class Histories:
    """The histories of a function's products.

    Attributes:
      shapes: of them, by their names, in order.

    Args:
      closed: the function.
      names: of its arguments, by their paths.
      recipe: how its products are rounded.

    Raises:
      ValueError: the function holds its own gradient.
    """

    def __init__(self, closed: core.ClosedJaxpr, names: Sequence[str], recipe: Recipe):
        self._closed, self._names = closed, names
        self._body = _Body(closed, [True] * len(names), recipe, {})
        counts = collections.Counter[str]()
        self.shapes: dict[str, tuple[int, ...]] = {}
        for source, sizes in self._body.slots:
            name = source if isinstance(source, str) else names[source]
            counts[name] += 1
            unique = name if counts[name] == 1 else f"{name} #{counts[name]}"
            self.shapes[unique] = (*sizes, 2, recipe.history)

    def check(self, given: Any) -> None:
        """Raises for what are not these histories.

        Raises:
          TypeError: another type than a dictionary.
          ValueError: other names or shapes.
        """
        remedy = "coda.fp8.init makes them for the function, and arguments of these shapes"
        if not isinstance(given, Mapping):
            text = "missing" if given is None else f"a {type(given).__name__}"
            raise TypeError(f"fuse: {ARGUMENT} is {text}; it must be a dictionary of arrays. {remedy}")
        missing = [name for name in self.shapes if name not in given]
        extra = [f"{name}{self._why_not(name)}" for name in given if name not in self.shapes]
        wrong = [f"lacks {', '.join(missing)}"] if missing else []
        wrong += [f"has {', '.join(extra)}, for which there is no product in 8 bits"] if extra else []
        if wrong:
            raise ValueError(f"fuse: {ARGUMENT} {' and '.join(wrong)}. {remedy}")
        for name, shape in self.shapes.items():
            x = given[name]
            if not hasattr(x, "dtype") or x.shape != shape or x.dtype != FLOAT32:
                text = f"{x.dtype} of shape {x.shape}" if hasattr(x, "dtype") else repr(x)
                raise ValueError(f"fuse: {ARGUMENT}[{name!r}] is {text}; it must be float32 of shape {shape}. {remedy}")

    def _why_not(self, name: str) -> str:
        number = self._names.index(own) if (own := name.partition(" #")[0]) in self._names else -1
        reason = self._body.reasons.get(number, "")
        return f" ({reason})" if reason else ""

    def function(self, given: Mapping[str, Any]) -> core.ClosedJaxpr:
        """The function of its constants, its arguments, and histories of the types of these."""
        types: list[Any] = [x.aval for x in (*self._closed.jaxpr.constvars, *self._closed.jaxpr.invars)]
        count = len(types)
        of_histories = [jax.typeof(given[name]) for name in self.shapes]
        return jax.make_jaxpr(lambda *xs: self._body(xs[:count], xs[count:]))(*types, *of_histories)


class _Body:
    """A jaxpr as a function of its constants and arguments, and of the histories of its products.

    Attributes:
      consts: its constants.
      slots: the histories, in order.
      reasons: why products are not rounded, by the numbers of the arguments that are their weights.

    Args:
      jaxpr: open or closed.
      flags: which arguments are weights.
      recipe: how products are rounded.
      known: the bodies that were made before, each once, by their jaxprs' ids and flags.

    Raises:
      ValueError: it holds a gradient.
    """

    def __init__(self, jaxpr: Any, flags: Sequence[bool], recipe: Recipe, known: dict[Any, _Body]):
        self._jaxpr, self._known = jaxpr, known
        closed = core.ClosedJaxpr(*opened(jaxpr))
        whole = without_constants(closed)
        self.consts = closed.consts
        flat = whole if is_jitted(whole.jaxpr) else straight(whole, whole.in_avals)
        flat = with_rows_first(flat, multiplies=False)
        self._flat, self._flat_consts = without_constants(flat), flat.consts
        self._rounding = RoundedFactors(recipe, ("history",))
        self.slots: list[_Slot] = []
        self.reasons: dict[int, str] = {}
        self._counts: dict[int, int] = {}  # of histories, by the ids of equations
        self._dots: dict[int, Dot] = {}  # the products that have one, by the ids of their equations
        self._bodies: dict[int, list[_Body]] = {}  # by the ids of the equations that hold them
        self._traced: dict[Any, tuple[Sequence[Any], core.ClosedJaxpr]] = {}
        self._judge(flags)

    def _judge(self, flags: Sequence[bool]) -> None:
        """Finds the products that have histories; flags: which arguments are weights, as all constants are."""
        jaxpr, recipe = self._flat.jaxpr, self._rounding.recipe
        of_consts = len(jaxpr.invars) - len(flags)
        found = WeightProducts(jaxpr, [*[True] * of_consts, *flags], with_losses_in_sight(self._flat))
        if any(found.dots[i].transpose_a for i in found.rounded) or any(map(_is_backward, jaxpr.eqns)):
            raise ValueError(
                f"fuse: fp8 = {recipe} for a function that holds its own gradient; with histories the loss must be "
                f"fused: jax.value_and_grad(coda.fuse(loss, fp8=...)), whose argument {ARGUMENT} has as its gradient "
                "the next histories"
            )
        places = {x: i - of_consts for i, x in enumerate(jaxpr.invars)}
        for i, equation in enumerate(jaxpr.eqns):
            weights = {
                k: places[found.weights[x]]
                for k, x in enumerate(equation.invars)
                if not isinstance(x, core.Literal) and x in found.weights
            }
            slots: list[_Slot] = []
            if i in found.rounded:
                self._dots[id(equation)] = found.dots[i]
                slots = [(places[found.weights[found.dots[i].b]], ())]
            elif i in found.reasons:
                self.reasons |= dict.fromkeys(weights.values(), found.reasons[i])
            elif equation.primitive.name in _RUNS and any(map(has_products, inner_jaxprs(equation))):
                slots = self._slots_inside(equation, weights)
            if slots:
                line = line_of(equation) or "a product"
                is_known = (isinstance(source, str) or source >= 0 for source, _ in slots)
                self.slots += [slot if flag else (line, slot[1]) for slot, flag in zip(slots, is_known, strict=True)]
                self._counts[id(equation)] = len(slots)

    def _slots_inside(self, equation: Equation, weights: Mapping[int, int]) -> list[_Slot]:
        """The histories of the bodies of an equation.

        Args:
          equation: holds them.
          weights: by the numbers of its arguments that are weights, those of the arguments that these are of.
        """
        numbers = flags_in_body(equation, [1 + k if k in weights else 0 for k in range(len(equation.invars))])
        own = {k: weights[number - 1] for k, number in enumerate(numbers) if number}
        jaxprs = equation.params.get("branches") or [callee(equation)]
        bodies = [self._body(jaxpr, tuple(map(bool, numbers))) for jaxpr in jaxprs]
        for body in bodies:
            self.reasons |= {own[k]: reason for k, reason in body.reasons.items() if k in own}
        self._bodies[id(equation)] = bodies
        sizes = (equation.params["length"],) if equation.primitive.name == "scan" else ()
        slots = [slot for body in bodies for slot in body.slots]
        return [(source if isinstance(source, str) else own[source], (*sizes, *inner)) for source, inner in slots]

    def _body(self, jaxpr: Any, flags: tuple[bool, ...]) -> _Body:
        key = id(jaxpr), flags
        if key not in self._known:
            self._known[key] = _Body(jaxpr, flags, self._rounding.recipe, self._known)
        return self._known[key]

    def __call__(self, arrays: Sequence[Any], histories: Sequence[Any]) -> list[Any]:
        """The results, of the constants with the arguments, and of histories in the order of `slots`."""
        given = iter(histories)

        def own(equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
            if id(equation) not in self._counts:
                return None
            inputs = [read(values, x) for x in equation.invars]
            each = list(itertools.islice(given, self._counts[id(equation)]))
            run = self._product if id(equation) in self._dots else self._held
            results: Sequence[Any] = at_line(equation, run, equation, inputs, each)
            return results

        return results_with(self._flat, [*self._flat_consts, *arrays], own)

    def function(self, *inputs: Any) -> list[Any]:
        """The results, of the arguments and the histories behind them."""
        count = len(inputs) - len(self.slots)
        return self([*self.consts, *inputs[:count]], inputs[count:])

    def traced(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], core.ClosedJaxpr]:
        """Constants, and the jaxpr of `function` behind these: the same each time, so that equal layers stay equal."""
        types = tuple(map(jax.typeof, inputs))
        if types not in self._traced:
            closed = jax.make_jaxpr(self.function)(*types)
            self._traced[types] = closed.consts, without_constants(closed)
        return self._traced[types]

    def _product(self, equation: Equation, inputs: Sequence[Any], histories: Sequence[Any]) -> Sequence[Any]:
        """A product, rounded, with its weight as the second factor."""
        params = rounded_params(equation, self._rounding)
        histories = vary(varying_axes(*inputs), *histories)
        if self._dots[id(equation)].a is equation.invars[0]:
            return bind(rounded_dot_p, [*inputs, *histories], params)
        (sums, batch), (w, x) = params["dimension_numbers"], inputs
        rows, columns = x.ndim - len(sums[1]), w.ndim - len(sums[0])
        order = (*range(rows, rows + columns), *range(rows))
        params["dimension_numbers"] = sums[::-1], batch
        if params.get("out_sharding") is not None:
            params["out_sharding"] = transposed_back(params["out_sharding"], order)
        (y,) = bind(rounded_dot_p, [x, w, *histories], params)
        return [lax.transpose(y, order)]

    def _held(self, equation: Equation, inputs: Sequence[Any], histories: Sequence[Any]) -> Sequence[Any]:
        """An equation that holds bodies, each with its part of the histories."""
        inputs = [*as_arrays(equation, inputs), *histories]
        return _RUNS[equation.primitive.name](self._bodies[id(equation)], equation, inputs)


def _is_backward(equation: Equation) -> bool:
    """True for the backward pass of a checkpoint that has products."""
    return bool(equation.params.get("differentiated")) and any(map(has_products, inner_jaxprs(equation)))


def _scan(bodies: Sequence[_Body], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    return run_scan(lambda *_, **__: bodies[0].function, equation, inputs)


def _cond(bodies: Sequence[_Body], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    own = len(equation.invars) - 1
    begins = itertools.accumulate((len(body.slots) for body in bodies), initial=own)
    parts = zip(bodies, begins, strict=False)

    def branch(*_: Any, **__: Any) -> Function:
        body, begin = next(parts)
        return lambda *xs: body.function(*xs[:own], *xs[begin : begin + len(body.slots)])

    return run_cond(branch, equation, inputs)


def _checkpoint(bodies: Sequence[_Body], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    consts, whole = bodies[0].traced(inputs)
    return with_body(equation, whole, consts, inputs)


def _jit(bodies: Sequence[_Body], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    consts, whole = bodies[0].traced(inputs)
    (plain,) = jax.make_jaxpr(jax.jit(lambda x: 2 * x))(inputs[-1]).eqns  # the parameters for one more argument
    params, more = equation.params, len(inputs) - len(equation.invars)
    own: dict[str, Any] = {"jaxpr": whole}
    for key in ("donated_invars", "in_shardings", "in_layouts"):
        if key in params:
            (one,) = plain.params[key]
            own[key] = (*[one] * len(consts), *params[key], *[one] * more)
    return bind(equation.primitive, [*consts, *inputs], {**params, **own})


_RUNS: Mapping[str, Callable[[Sequence[_Body], Equation, Sequence[Any]], Sequence[Any]]] = {
    "scan": _scan,
    "cond": _cond,
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    **dict.fromkeys(JITS, _jit),
}
