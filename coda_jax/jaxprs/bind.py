"""Binding the primitive of a jaxpr's equation again."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

Bind = Callable[[core.Primitive, Sequence[Any], dict[str, Any]], Sequence[Any]]  # of a primitive, inputs and params


def bind(primitive: core.Primitive, inputs: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """The outputs of the primitive, with the params of its equation.

    Primitives of functions, such as shard_map and custom_jvp_call, have jaxprs in their equations instead of these.
    """
    own = primitive.get_bind_params(params)
    functions: Sequence[Any] = ()
    if isinstance(own, tuple):  # some releases return the functions separately
        functions, own = own
    outputs = primitive.bind(*functions, *inputs, **own)
    return outputs if primitive.multiple_results else [outputs]
