"""Functions that were traced without a mesh, evaluated on one: constants are sharded as the arrays beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.elementwise import OPERATIONS
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.jaxprs.bind import Bind, bind
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee_in, opened
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.primitives.mesh_types import (
    cutting_evenly,
    explicit_cuts,
    explicit_sharding,
    partition_spec,
    reshaped,
    vary,
    varying_axes,
    with_sharding,
)

ELEMENTWISE = frozenset(OPERATIONS) | {"convert_element_type", "copy", "add_any", "stop_gradient", "reduce_precision"}
PVARY = frozenset({"pvary", "pcast"})  # over manual mesh axes a graph lets all its arguments vary alike


def on_mesh(
    jaxpr: core.ClosedJaxpr, arrays: Sequence[jax.Array], function: Callable[..., list[Any]] | None = None
) -> list[Any]:
    """The results of a jaxpr, or of the function that it was traced from.

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


def is_on_mesh(*arrays: jax.Array) -> bool:
    """True for arrays that vary over a manual mesh axis, or are sharded over an explicit one."""
    return bool(varying_axes(*arrays)) or any(any(explicit_cuts(x)) for x in arrays)


def bind_on_mesh(*arrays: jax.Array) -> Bind:
    """The function that binds beside these arrays: `jaxprs.bind.bind` where no mesh axis is manual or explicit."""
    return functools.partial(_bound, varying_axes(*arrays)) if is_on_mesh(*arrays) else bind


def _bound(
    axes: frozenset[str], primitive: core.Primitive, inputs: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    if primitive.name == "reshard":  # to no mesh
        return inputs
    if primitive.name in CUSTOM_DERIVATIVES:  # traced without a mesh too; a graph has the derivative already
        return evaluate(
            *opened(callee_in(params)),
            inputs,
            lambda equation, xs: _bound(axes, equation.primitive, xs, equation.params),
        )
    arrays = vary(axes, *(jnp.asarray(x, jax.typeof(x).dtype) for x in inputs))
    if primitive.name == "reshape" and any(explicit_cuts(arrays[0])):
        return [_reshaped(arrays[0], params["new_sizes"])]
    alike = _beside_the_first if primitive.name in ELEMENTWISE else _alike
    return bind(primitive, alike(arrays), params)


def _alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, those of one shape sharded as the first of them that is sharded over explicit axes."""
    sharded: dict[tuple[Any, ...], Any] = {}
    for x in arrays:
        if any(explicit_cuts(x)):
            sharded.setdefault(x.shape, explicit_sharding(x))
    return [with_sharding(x, sharded.get(x.shape)) for x in arrays]


def _beside_the_first(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays that broadcast against each other, sharded as the first that is sharded of those with most elements."""
    cuts = [explicit_cuts(x) for x in arrays]
    sharded = [i for i, names in enumerate(cuts) if any(names)]
    if not sharded:
        return list(arrays)
    first = max(sharded, key=lambda i: arrays[i].size)
    mesh = jax.typeof(arrays[first]).sharding.mesh

    def beside(x: jax.Array) -> jax.Array:
        if x.ndim != arrays[first].ndim:
            return x
        same = (same_size(*pair) for pair in zip(x.shape, arrays[first].shape, strict=True))
        target = [names if is_same else () for names, is_same in zip(cuts[first], same, strict=True)]
        return with_sharding(x, jax.sharding.NamedSharding(mesh, partition_spec(target)))

    return [x if own == cuts[first] else beside(x) for x, own in zip(arrays, cuts, strict=True)]


def are_on_explicit_axes(arrays: Sequence[Any]) -> bool:
    """True for arrays, not types, some of them sharded over explicit mesh axes, and none varying over a manual one."""
    if not all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in arrays) or varying_axes(*arrays):
        return False
    return not jax.sharding.get_abstract_mesh().manual_axes and any(any(explicit_cuts(x)) for x in arrays)


def typed(x: Any) -> Any:
    """The type of an array or a type, with its sharding over explicit mesh axes; one that varies over manual axes."""
    if isinstance(x, jax.core.ShapedArray) and x.manual_axis_type.varying:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=explicit_sharding(x))


def reshaped_as(x: jax.Array, shape: Sequence[Any]) -> jax.Array:
    """x in this shape, over explicit mesh axes too."""
    if same_shape(x.shape, shape):
        return x
    return _reshaped(x, shape) if any(explicit_cuts(x)) else x.reshape(tuple(shape))


def placed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """x, sharded over explicit mesh axes as an array of its shape."""
    return with_sharding(x, explicit_sharding(like)) if any(explicit_cuts(like)) else x


def _reshaped(x: jax.Array, shape: Sequence[Any]) -> jax.Array:
    """x in this shape: mesh axes of an axis that is split shard the first new axis, if evenly; else x is gathered."""
    first = next((i for i, pair in enumerate(zip(x.shape, shape, strict=False)) if not same_size(*pair)), None)
    if first is None:
        first = min(x.ndim, len(shape))
    lead, (split_axes, *others) = explicit_cuts(x)[:first], [*explicit_cuts(x)[first:], ()]
    kept = (
        cutting_evenly(split_axes, jax.typeof(x).sharding.mesh.shape, shape[first])
        if split_axes and first < len(shape)
        else ()
    )
    target = [*lead, kept, *(() for _ in others)][: x.ndim]
    x = with_sharding(x, jax.sharding.NamedSharding(jax.typeof(x).sharding.mesh, partition_spec(target)))
    return reshaped(x, tuple(shape), cuts=[*lead, kept, *(() for _ in shape)][: len(shape)])
