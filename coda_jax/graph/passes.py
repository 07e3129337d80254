"""One value by XLA, from what it reads, on the axes that arrays have."""

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
from coda_jax.graph.values import Map, Turned
from coda_jax.jaxprs.bind import Bind
from coda_jax.primitives.mesh_types import vary, varying_axes


def in_pass(value: Map | Turned, inputs: Sequence[Part | Pieces]) -> Part | Pieces:
    """A map or a transpose, of what it reads."""
    if isinstance(value, Turned):
        matrix: jax.Array = unflattened.flat(whole(inputs[0]))
        return matrix.T
    arrays = [x for of in inputs for x in jax.tree.leaves(of.parts if isinstance(of, Pieces) else of)]
    bind, axes = bind_on_mesh(*arrays), varying_axes(*arrays)
    given = [_varied(axes, x) for x in inputs]
    if value.is_weight:
        return given[0]
    with default_types():
        if value.pullback is None:
            (made,) = in_pieces(value.jaxpr, list(map(_seen, given)), bind)
        elif is_of_8_bits(value.dtype):  # products alone read it, which are differentiated but once
            primal, is_read = value.primal()
            (made,) = in_pieces(primal, [_seen(x) for x in itertools.compress(given, is_read)], bind)
        else:
            made = _by_its_pullback(value, list(map(whole, given)), bind)
    return _varied(axes, made)


def _seen(x: Any) -> Any:
    return Pieces(list(map(_seen, x.parts))) if isinstance(x, Pieces) else jax.tree.map(as_seen, x)


def _varied(axes: frozenset[str], x: Any) -> Any:
    if not axes:
        return x
    if isinstance(x, Pieces):
        return Pieces([_varied(axes, of) for of in x.parts])
    return jax.tree.map(lambda of: vary(axes, of)[0], x)


def _by_its_pullback(value: Map, inputs: Sequence[Part], bind: Bind) -> Part:
    """A map with a pullback, by which the pass is differentiated once more."""

    primal, is_read = value.primal()

    def made(*inputs: Part) -> Part:
        (y,) = in_pieces(primal, [_seen(x) for x, flag in zip(inputs, is_read, strict=True) if flag], bind)
        return y

    def forward(*inputs: Part) -> tuple[Part, tuple[Part, ...]]:
        y = made(*inputs)
        return y, (y, *inputs)

    def backward(kept: tuple[Part, ...], dy: Part) -> tuple[Part, ...]:
        found = in_pieces(value.backward(), list(map(_seen, [*kept, dy])), bind)
        return tuple(_like(x, whole(d)) for x, d in zip(kept[1:], found, strict=True))

    function = jax.custom_vjp(made)
    function.defvjp(forward, backward)
    return function(*inputs)


def _like(x: Part, of_x: Part) -> Part:
    """A cotangent with the axes and the dtype that x has."""
    if not isinstance(x, Unflattened):
        flat: jax.Array = unflattened.flat(of_x)
        return flat.astype(x.dtype)
    is_alike = isinstance(of_x, Unflattened) and of_x.halves == x.halves
    array = of_x.array if isinstance(of_x, Unflattened) and is_alike else unflattened.flat(of_x).reshape(x.array.shape)
    return Unflattened(array.astype(x.array.dtype), x.rows, x.halves)
