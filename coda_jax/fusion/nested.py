"""Equations that hold jaxprs of their own, run with these fused: loops, branches, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.straight import CHECKPOINTS, without_constants
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.walk import equations, inner_jaxprs, num_carried, num_constants

Function = Callable[..., Sequence[Any]]


class Nested:
    """Runs an equation, with the bodies in it that have products fused.

    Args:
      fused: the function that a closed jaxpr becomes; the second argument is the name of what holds it.
    """

    def __init__(self, fused: Callable[[core.ClosedJaxpr, str], Function]):
        self._fused = fused

    def __call__(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        run = _RULES.get(equation.primitive.name)
        if run is None or not any(map(has_products, inner_jaxprs(equation))):
            return bind(equation.primitive, inputs, equation.params)
        arrays = [
            jnp.asarray(x, v.aval.dtype) if jnp.ndim(x) == 0 and not _is_key(v) else x
            for x, v in zip(inputs, equation.invars, strict=True)
        ]
        return run(self._fused, equation, arrays)


def has_products(jaxpr: core.Jaxpr) -> bool:
    return any(equation.primitive.name == "dot_general" for equation, _ in equations(jaxpr))


def _scan(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params, consts, carried = equation.params, num_constants(equation), num_carried(equation)
    body = fused(_closed(params["jaxpr"]), "scan")

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = list(body(*inputs[:consts], *carry, *xs))
        return outputs[:carried], outputs[carried:]

    carry, stacked = lax.scan(
        step,
        list(inputs[consts : consts + carried]),
        list(inputs[consts + carried :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _cond(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    index, *operands = inputs
    branches = [fused(_closed(branch), "cond") for branch in equation.params["branches"]]
    results: Sequence[Any] = lax.switch(index, [lambda *xs, f=f: list(f(*xs)) for f in branches], *operands)
    return results


def _while(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = core.jaxpr_as_fun(_closed(params["cond_jaxpr"])), fused(_closed(params["body_jaxpr"]), "while")
    cond_consts, body_consts = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
    results: Sequence[Any] = lax.while_loop(
        lambda state: cond(*cond_consts, *state)[0],
        lambda state: list(body(*body_consts, *state)),
        list(inputs[of_cond + of_body :]),
    )
    return results


def _checkpoint(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    body = fused(_closed(callee(equation)), "checkpoint")
    if not params.get("differentiated"):
        rule = jax.checkpoint(lambda *xs: list(body(*xs)), prevent_cse=params["prevent_cse"], policy=params["policy"])
        results: Sequence[Any] = rule(*inputs)
        return results
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]  # a backward pass: its barrier stays
    closed = jax.make_jaxpr(lambda *xs: list(body(*xs)))(*types)
    whole = without_constants(closed)
    given = whole if isinstance(callee(equation), core.ClosedJaxpr) else whole.jaxpr
    return bind(equation.primitive, [*closed.consts, *inputs], {**params, "jaxpr": given})


def _shard_map(fused: Callable[..., Function], equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    body = fused(_closed(params["jaxpr"]), "shard_map")
    mapped = jax.shard_map(
        lambda *xs: list(body(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=list(params["out_specs"]),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    results: Sequence[Any] = jax.jit(mapped)(*inputs)  # one that is not compiled refuses custom_vjp's zeros
    return results


def _closed(jaxpr: Any) -> core.ClosedJaxpr:
    return core.ClosedJaxpr(*opened(jaxpr))


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key))


_RULES: Mapping[str, Callable[..., Sequence[Any]]] = {
    "scan": _scan,
    "cond": _cond,
    "while": _while,
    "shard_map": _shard_map,
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
}
