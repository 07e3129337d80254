"""Equations of a jaxpr, evaluated again."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

Bind = Callable[[core.Primitive, Sequence[Any], dict[str, Any]], Sequence[Any]]  # of a primitive, inputs and params


def bind(primitive: core.Primitive, inputs: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """The outputs of the primitive, with the params that its equation has.

    Primitives that hold functions, as shard_map and custom_jvp_call do, have jaxprs for them in their equations.
    """
    own = primitive.get_bind_params(params)
    functions: Sequence[Any] = ()
    if isinstance(own, tuple):  # some releases return the functions apart
        functions, own = own
    outputs = primitive.bind(*functions, *inputs, **own)
    return outputs if primitive.multiple_results else [outputs]
