"""Functions with a derivative of their own, by `jax.custom_jvp` and `jax.custom_vjp`, as equations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.graph.on_mesh import ELEMENTWISE, PVARY
from coda_jax.graph.values import is_float, is_seen
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.evaluate import inlined

CUSTOM_VJPS = CUSTOM_DERIVATIVES - {"custom_jvp_call"}


@dataclasses.dataclass(frozen=True)
class Rule:
    """The functions of a custom_vjp_call as jaxprs; its derivative is that of its rule alone.

    Attributes:
      forward: of the arguments, the results and then all that is kept.
      backward: of what is kept and the results' cotangents, the cotangents of the arguments that are floats.
      is_differentiated: which these are.
      is_recursive: whether the forward function gives the results of the function itself, with its derivative.
    """

    forward: core.ClosedJaxpr
    backward: core.ClosedJaxpr
    is_differentiated: Sequence[bool]
    is_recursive: bool = False


def rule_of(equation: Equation, types: Sequence[Any]) -> Rule:
    """The rule of a custom_vjp_call at arguments of these types; it raises what the user's functions raise.

    The first arguments may be what the function closes over, which JAX refuses to differentiate. What is
    differentiated is not known here: their cotangents are NaN.
    """
    floats = [i for i, x in enumerate(types) if is_float(x.dtype)]
    for count in range(len(floats)):
        try:
            return _rule_of(equation, types, floats[:count])
        except Exception as error:
            if type(error).__name__ != "CustomVJPException":
                raise
    return _rule_of(equation, types, floats)


def _rule_of(equation: Equation, types: Sequence[Any], refused: Sequence[int]) -> Rule:
    flags, trees = [is_float(x.dtype) for x in types], list[Any]()
    varies = [flag and i not in refused for i, flag in enumerate(flags)]

    def forward(*arrays: Any) -> list[Any]:
        def function(*varied: Any) -> list[Any]:
            given = iter(varied)
            inputs = [next(given) if flag else x for x, flag in zip(arrays, varies, strict=True)]
            return list(bind(equation.primitive, inputs, equation.params))

        results, pullback = jax.vjp(function, *itertools.compress(arrays, varies))
        kept, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return [*results, *kept]

    count = len(equation.outvars)
    of_results = jax.make_jaxpr(forward)(*types)

    def backward(*arrays: Any) -> list[Any]:
        kept, cotangents = arrays[:-count], arrays[-count:]
        nothing = [jnp.full(types[i].shape, jnp.nan, types[i].dtype) for i in refused]
        return [*nothing, *jax.tree.unflatten(trees[-1], kept)(list(cotangents))]

    results, kept = of_results.out_avals[:count], of_results.out_avals[count:]
    return Rule(of_results, jax.make_jaxpr(backward)(*kept, *results), flags)


def may_be_opened(equation: Equation) -> bool:
    """True for a custom_vjp_call of floats whose rule sees no symbolic zeros, and that closes over no traced array.

    JAX refuses the gradient of such an array, which is an argument of the call.
    """
    params = equation.params
    is_alone = not params.get("symbolic_zeros") and not params.get("num_consts", 0) and not equation.effects
    return is_alone and all(is_float(x.aval.dtype) for x in equation.outvars)


def opened_rule(equation: Equation) -> Rule | None:
    """The rule as straight jaxprs, all calls in it inlined; None where it is none or calls functions with others.

    The result of the forward function may be that of the function itself, as a rule is often written.
    """
    try:
        rule = rule_of(equation, [x.aval for x in equation.invars])
    except Exception:  # the user's code may refuse a derivative: it does so where it is asked for one
        return None
    forward, backward = (inlined(closed, CALLS) for closed in (rule.forward, rule.backward))
    if any(e.primitive.name in CUSTOM_VJPS for e in backward.jaxpr.eqns):
        return None
    others = [e for e in forward.jaxpr.eqns if e.primitive.name in CUSTOM_VJPS]
    if any(not _is_itself(e, forward.jaxpr, equation) for e in others):
        return None
    return Rule(inlined(forward), inlined(backward), rule.is_differentiated, is_recursive=bool(others))


def _is_itself(inner: Equation, forward: core.Jaxpr, equation: Equation) -> bool:
    """True for a call in the forward function that makes its results, of its arguments, by the same function."""
    is_alike = (
        list(inner.invars) == list(forward.invars) and list(inner.outvars) == forward.outvars[: len(inner.outvars)]
    )
    return is_alike and str(callee(inner)) == str(callee(equation))


def tangents_jaxpr(equation: Equation) -> core.ClosedJaxpr:
    """The tangents of a custom_jvp_call's results, from its arguments, and the tangents of those that are floats."""
    types = [x.aval for x in equation.invars]  # with its axes of a mesh
    floats = [x for x in types if is_float(x.dtype)]

    def tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        given = iter(tangents)
        every = [next(given) if is_float(x.dtype) else np.zeros(x.shape, jax.dtypes.float0) for x in primals]
        return jax.jvp(lambda *xs: bind(equation.primitive, xs, equation.params), primals, every)[1]

    return jax.make_jaxpr(tangents)(types, floats)


def is_elementwise(jaxpr: Any) -> bool:
    """True for a function of elementwise operations alone, of dtypes that maps see."""
    equations: list[Equation] = opened(jaxpr)[0].eqns
    for equation in equations:
        name = equation.primitive.name
        if not all(is_seen(x.aval.dtype) for x in (*equation.invars, *equation.outvars)):
            return False
        if name in ELEMENTWISE or name in PVARY or (name == "broadcast_in_dim" and not equation.invars[0].aval.shape):
            continue
        if name not in ("jit", "pjit", "custom_jvp_call") or not is_elementwise(callee(equation)):
            return False
    return True


def has_elementwise_derivative(equation: Equation) -> bool:
    """True for a custom_jvp_call that is elementwise, and its tangents; a batch of `vmap` may transpose these."""
    return is_elementwise(callee(equation)) and is_elementwise(tangents_jaxpr(equation))
