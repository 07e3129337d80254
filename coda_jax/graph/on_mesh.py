"""Functions that were traced for no mesh, evaluated on one: what they make of constants lies as what it meets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.jaxprs.bind import Bind, bind
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, placed, vary, varying_axes


def on_mesh(
    jaxpr: core.ClosedJaxpr, arrays: Sequence[jax.Array], function: Callable[..., list[Any]] | None = None
) -> list[Any]:
    """The results of a jaxpr, or of the function that it was traced of.

    Over manual mesh axes all vary alike; over explicit ones arrays of one shape are sharded alike.
    """
    axes = varying_axes(*arrays)
    binds = bind_on_mesh(*arrays)
    if binds is bind:
        return core.jaxpr_as_fun(jaxpr)(*arrays)
    if function is not None:
        return function(*vary(axes, *arrays))

    def apply(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        return binds(equation.primitive, inputs, equation.params)

    return list(vary(axes, *evaluate(jaxpr.jaxpr, jaxpr.consts, vary(axes, *arrays), apply)))


def bind_on_mesh(*arrays: jax.Array) -> Bind:
    """What binds a primitive beside these arrays: `jaxprs.bind.bind` where no mesh axis is manual or explicit."""
    axes = varying_axes(*arrays)
    if not axes and not any(any(explicit_cuts(x)) for x in arrays):
        return bind
    return functools.partial(_bound, axes)


def _bound(
    axes: frozenset[str], primitive: core.Primitive, inputs: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    if primitive.name == "reshard":  # to no mesh
        return inputs
    arrays = vary(axes, *(jnp.asarray(x, jax.typeof(x).dtype) for x in inputs))
    return bind(primitive, _alike(arrays), params)


def _alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Those that are sharded over no explicit axis, as the first of their shape that is."""
    sharded: dict[tuple[Any, ...], Any] = {}
    for x in arrays:
        if any(explicit_cuts(x)):
            sharded.setdefault(x.shape, explicit_sharding(x))
    return [placed(x, sharded.get(x.shape)) if sharded and not any(explicit_cuts(x)) else x for x in arrays]
