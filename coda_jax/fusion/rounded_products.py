"""Products with weights in 8 bits: which products of a function a recipe rounds, and why others stay as they are.

A product x w is rounded, if w is a weight: an argument, of the function or of a loop that hands it on, which has none
of the rows of x, in another dtype or view. x is computed, or has the rows of most products. So are the products of its
derivative, where the function holds that: dy w^T, and x^T dy beside one of both. Loops' carries are no weights.

Products of two activations, of two weights, as of an adapter's, and of what is computed of weights stay; so do the
logits of a loss over a vocabulary, and what a kernel cannot read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.fusion.dots import Dot, Equation, is_derivative, is_dot
from coda_jax.fusion.losses.whole_logits import logits_in
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.rows import MARKS, Rows
from coda_jax.fusion.straight import is_stacked
from coda_jax.graph.on_mesh import PVARY
from coda_jax.graph.rounded import Recipe
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.def_use import DefUse, variables
from coda_jax.jaxprs.walk import num_carried, num_constants
from coda_jax.operators.rounded_dot import RoundedFactors, rounded_dot_p

_VIEWS = MARKS | PVARY
_VIEWS |= {"convert_element_type", "copy", "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"}
_VIEWS |= {"slice", "dynamic_slice", "split", "concatenate", "rev", "all_gather", "reshard", "optimization_barrier"}
_OF_GROUPS = "its rows are of groups, as of experts"
_MULTIPLE = 16  # of each size of a product in 8 bits


def weights_in(jaxpr: core.Jaxpr, flags: Sequence[bool]) -> dict[Any, Any]:
    """The weights in a straight jaxpr, each with the argument that it is of; flags: of the arguments."""
    found = {x: x for x, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    found |= {x: x for x in jaxpr.constvars}
    for equation in jaxpr.eqns:
        inputs = equation.invars
        if equation.primitive.name not in _VIEWS or isinstance(inputs[0], core.Literal):
            continue
        if equation.primitive.name == "concatenate":
            if all(not isinstance(x, core.Literal) and x in found for x in inputs):
                found |= dict.fromkeys(equation.outvars, found[inputs[0]])
        elif len(inputs) == len(equation.outvars):  # each of its own, as of a barrier
            pairs = zip(inputs, equation.outvars, strict=True)
            found |= {y: found[x] for x, y in pairs if not isinstance(x, core.Literal) and x in found}
        elif inputs[0] in found:
            found |= dict.fromkeys(equation.outvars, found[inputs[0]])
    return found


def flags_in_body(equation: Equation, flags: Sequence[Any]) -> list[Any]:
    """Flags of a body's arguments that are weights, from those of the arguments of the equation that holds it.

    A flag is true or false, or anything else in the place of true, as a name.
    """
    name, own = equation.primitive.name, list(flags)
    if is_stacked(equation):
        jaxpr = opened(callee(equation))[0]
        known = weights_in(jaxpr, own)
        loop = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
        return flags_in_body(loop, [not isinstance(x, core.Literal) and x in known for x in loop.invars])
    if name == "scan":
        consts, carried = num_constants(equation), num_carried(equation)
        return [*own[:consts], *[False] * carried, *own[consts + carried :]]
    if name == "while":
        begin, count = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        return [*own[begin : begin + count], *[False] * (len(own) - begin - count)]
    return own[1:] if name == "cond" else own


def with_rounded_products(
    closed: core.ClosedJaxpr, recipe: Recipe, flags: Sequence[bool], logits: core.ClosedJaxpr
) -> tuple[core.ClosedJaxpr, Mapping[int, str]]:
    """A straight jaxpr whose products with weights are rounded by a recipe; why others are not, by their ids.

    Args:
      closed: has no constants.
      recipe: of current scaling.
      flags: which arguments are weights.
      logits: the same function with its losses as they were written.

    Raises:
      ValueError: cotangents are of another dtype, and the function holds its derivative.
    """
    found = WeightProducts(closed.jaxpr, flags, logits)
    if recipe.dtype != recipe.gradient_dtype and found.is_derivative and found.rounded:
        raise ValueError(
            f"fuse: fp8 = {recipe} for a function that holds its own gradient, where cotangents are no other arrays; "
            "gradient_dtype must be dtype, or the loss be fused: jax.grad(coda.fuse(loss, fp8=...))"
        )
    changed: list[Any] = list(closed.jaxpr.eqns)
    rounding = RoundedFactors(recipe)
    for i in found.rounded:
        changed[i] = changed[i].replace(primitive=rounded_dot_p, params=rounded_params(changed[i], rounding))
    jaxpr = closed.jaxpr.replace(eqns=changed)
    return core.ClosedJaxpr(jaxpr, closed.consts), {id(changed[i]): why for i, why in found.reasons.items()}


def rounded_params(equation: Equation, rounding: RoundedFactors) -> dict[str, Any]:
    """The parameters of the `coda_rounded_dot` that a product becomes."""
    params = {"preferred_element_type": None, **equation.params, "precision": None}
    params["preferred_element_type"] = np.dtype(equation.outvars[0].aval.dtype)
    return {**params, "rounding": rounding}


class WeightProducts:
    """The products with weights of a straight jaxpr.

    Attributes:
      dots: all products, by number.
      weights: the variables that are weights, each with the argument that it is of.
      rounded: the numbers of the products that a recipe rounds.
      reasons: why others are not.
      is_derivative: whether the jaxpr holds a derivative.

    Args:
      jaxpr: a straight one.
      flags: which of its arguments are weights.
      logits: the same function with its losses as they were written.
    """

    def __init__(self, jaxpr: core.Jaxpr, flags: Sequence[bool], logits: core.ClosedJaxpr):
        self.rounded: set[int] = set()
        self.reasons: dict[int, str] = {}
        self._jaxpr, self.is_derivative = jaxpr, is_derivative(jaxpr)
        self._rows = Rows(DefUse(jaxpr))
        self.dots = self._rows.dots
        self.weights, self._block_rows = weights_in(jaxpr, flags), self._rows.block_rows()
        self._heads, self._gradients = self._weights_of_logits(logits), self._made_of_gradients()
        for i, dot in self.dots.items():
            if jaxpr.eqns[i].primitive is not rounded_dot_p and not dot.transpose_a:
                self._judge(i, self._why_not(dot))
        rounded = [self.dots[i] for i in self.rounded]
        self._factors = {(dot.a, dot.matrix_a[1], dot.columns) for dot in rounded}
        for i, dot in self.dots.items():
            if jaxpr.eqns[i].primitive is not rounded_dot_p and dot.transpose_a:
                self._judge(i, self._why_not_gradient(dot))
        self.reasons |= self._rows.reasons

    def _judge(self, number: int, reason: str) -> None:
        if reason:
            self.reasons[number] = reason
        else:
            self.rounded.add(number)

    def _why_not(self, dot: Dot) -> str:
        """Why a product is not rounded; empty if it is."""
        if dot.groups is not None:
            return _OF_GROUPS
        weight, (rows, k) = self.weights.get(dot.b), dot.matrix_a
        if weight is None or self._rows.of(dot.b):
            return "its second factor is computed, and no weight"
        if dot.a in self.weights and not same_shape(dot.a.aval.shape[: dot.rows_a], self._block_rows):
            return "both of its factors are weights"
        if dot.a in self._gradients:
            return "its first factor is the gradient of a product of weights"
        if weight in self._heads:
            return "it makes the logits of a loss over a vocabulary"
        return _why_no_kernel(rows, k, dot.columns)

    def _why_not_gradient(self, gradient: Dot) -> str:
        """Why x^T dy is not rounded: neither x w nor dy w^T is."""
        if gradient.groups is not None:
            return _OF_GROUPS
        (rows, m), (_, n) = gradient.matrix_a, gradient.matrix_b
        if (gradient.a, m, n) in self._factors or (gradient.b, n, m) in self._factors:
            return _why_no_kernel(m, rows, n)
        return "it is no gradient of a weight whose product is rounded"

    def _made_of_gradients(self) -> set[Any]:
        """The variables that are gradients x^T dy, where the function holds its derivative, or made of these."""
        found: set[Any] = set()
        for i, equation in enumerate(self._jaxpr.eqns if self.is_derivative else ()):
            dot = self.dots.get(i)
            if dot is not None and dot.transpose_a:
                found |= {*equation.outvars, self._rows.results[i]}
            elif not is_dot(equation) and not found.isdisjoint(variables(equation.invars)):
                found |= set(equation.outvars)
        return found

    def _weights_of_logits(self, logits: core.ClosedJaxpr) -> Collection[Any]:
        """The arguments of this jaxpr that are weights of a loss's logits."""
        own = weights_in(logits.jaxpr, [True] * len(logits.jaxpr.invars))
        places = {x: i for i, x in enumerate(logits.jaxpr.invars)}
        offset = len(self._jaxpr.invars) - len(logits.jaxpr.invars)
        found = set()
        for _, _, dot, _ in logits_in(Makers(logits.jaxpr)):
            if isinstance(dot, Dot) and own.get(dot.b) in places:
                found.add(self._jaxpr.invars[offset + places[own[dot.b]]])
        return found


def _why_no_kernel(rows: Any, k: Any, columns: Any) -> str:
    """Why no kernel of 8 bits makes a product (m, k) (k, n) and its derivative; empty if one does."""
    for name, size in (("m", rows), ("k", k), ("n", columns)):
        if not same_size(size % _MULTIPLE, 0):
            return f"{name} = {size} is no multiple of {_MULTIPLE}"
    return ""
