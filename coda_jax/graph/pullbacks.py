"""Functions of maps with a derivative that an author states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# (output, *inputs, the output's cotangent) -> the inputs' cotangents, None where there is none
Pullback = Callable[..., Sequence[Any]]


def inner_product(y: jax.Array, dy: jax.Array) -> jax.Array:
    """The inner products of rows, (M, 1)."""
    return jnp.sum(y * dy, axis=1, keepdims=True)


def with_pullback(f: Callable[..., Any], pullback: Pullback, takes_inner: bool) -> Callable[..., Any]:
    """f with this derivative, by which JAX differentiates a function that runs the graph."""

    def forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (result,) = jax.tree.leaves(f(*inputs))
        return f(*inputs), (result, *inputs)

    function = jax.custom_vjp(lambda *inputs: f(*inputs))
    function.defvjp(forward, backward_of(pullback, takes_inner))
    return function


def backward_of(pullback: Pullback, takes_inner: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """The pullback in the form of `jax.custom_vjp`."""

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        cotangents = pullback(*kept, cotangent, *([inner_product(kept[0], cotangent)] if takes_inner else []))
        return tuple(jnp.zeros_like(x) if d is None else d for x, d in zip(kept[1:], cotangents, strict=True))

    return backward
