"""One value by XLA, from its inputs, on all axes that their arrays have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.epilogue.user_code import default_types
from coda_jax.graph import unflattened
from coda_jax.graph.evaluate import as_seen
from coda_jax.graph.on_mesh import bind_on_mesh
from coda_jax.graph.pieces import Part, Pieces, in_pieces, whole
from coda_jax.graph.unflattened import Unflattened
from coda_jax.graph.values import Map, Transposed
from coda_jax.jaxprs.bind import Bind
from coda_jax.primitives.mesh_types import vary, varying_axes


def in_pass(value: Map | Transposed, inputs: Sequence[Part | Pieces]) -> Part | Pieces:
    """A map or a transpose, from its inputs."""
    if isinstance(value, Transposed):
        matrix: jax.Array = unflattened.flat(whole(inputs[0]))
        return matrix.T
    arrays = [x for one in inputs for x in jax.tree.leaves(one.parts if isinstance(one, Pieces) else one)]
    bind, axes = bind_on_mesh(*arrays), varying_axes(*arrays)
    varied = [_varied(axes, x) for x in inputs]
    if value.is_weight:
        return varied[0]
    with default_types():
        if value.pullback is None:
            (result,) = in_pieces(value.jaxpr, list(map(_seen, varied)), bind)
        elif is_of_8_bits(value.dtype):  # products alone read it, which are differentiated but once
            primal, is_read = value.primal()
            (result,) = in_pieces(primal, [_seen(x) for x in itertools.compress(varied, is_read)], bind)
        else:
            result = _by_its_pullback(value, list(map(whole, varied)), bind)
    return _varied(axes, result)


def _seen(x: Any) -> Any:
    return x.map(_seen) if isinstance(x, Pieces) else jax.tree.map(as_seen, x)


def _varied(axes: frozenset[str], x: Any) -> Any:
    if not axes:
        return x
    if isinstance(x, Pieces):
        return x.map(lambda part: _varied(axes, part))
    return jax.tree.map(lambda leaf: vary(axes, leaf)[0], x)


def _by_its_pullback(value: Map, inputs: Sequence[Part], bind: Bind) -> Part:
    """A map with a pullback, by which JAX differentiates the pass."""

    primal, is_read = value.primal()

    def made(*inputs: Part) -> Part:
        (y,) = in_pieces(primal, [_seen(x) for x, flag in zip(inputs, is_read, strict=True) if flag], bind)
        return whole(y)

    def forward(*inputs: Part) -> tuple[Part, tuple[Part, ...]]:
        y = made(*inputs)
        return y, (y, *inputs)

    def backward(kept: tuple[Part, ...], dy: Part) -> tuple[Part, ...]:
        cotangents = in_pieces(value.backward(), list(map(_seen, [*kept, dy])), bind)
        return tuple(_like(x, whole(d)) for x, d in zip(kept[1:], cotangents, strict=True))

    function = jax.custom_vjp(made)
    function.defvjp(forward, backward)
    return function(*inputs)


def _like(x: Part, dx: Part) -> Part:
    """A cotangent with the axes and the dtype that x has."""
    if not isinstance(x, Unflattened):
        flat: jax.Array = unflattened.flat(dx)
        return flat.astype(x.dtype)
    is_alike = isinstance(dx, Unflattened) and dx.halves == x.halves
    array = dx.array if isinstance(dx, Unflattened) and is_alike else unflattened.flat(dx).reshape(x.array.shape)
    return Unflattened(array.astype(x.array.dtype), x.rows, x.halves)
