"""The order of elements along an axis in which a kernel stores floats of 8 bits fastest: a JAX primitive of its own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

BLOCK = 16  # elements that are reordered among themselves

contraction_order_p = jex_core.Primitive("contraction_order")


def contraction_order(x: jax.Array, axis: int = -1) -> jax.Array:
    """x with the elements along `axis` in the order in which a kernel stores floats of 8 bits fastest.

    In each block of 16, position p holds element 0 8 1 9 2 10 3 11 4 12 5 13 6 14 7 15 of it:

        x.reshape(..., n // 16, 2, 8).swapaxes(-1, -2).reshape(..., n)

    A product that sums over the axis is the same if both factors have this order. An ordinary JAX function, also
    outside of epilogues. An epilogue may return contraction_order(y) or contraction_order(y.T): the order is along the
    last axis of what is stored.

    Args:
      x: any shape and dtype.
      axis: whose size is a multiple of 16.

    Returns:
      An array of the shape and dtype of x. The derivative restores the order of x in the cotangent.

    Raises:
      ValueError: the size is no multiple of 16, or symbolic; x has no such axis.
    """
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"contraction_order: axis = {axis}; x has shape {x.shape}")
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ValueError(f"contraction_order: axis {axis} has the symbolic size {size}; it must be known")
    if size % BLOCK:
        raise ValueError(f"contraction_order: axis {axis} has size {size}; it must be a multiple of {BLOCK}")
    out: jax.Array = contraction_order_p.bind(x, axis=axis % x.ndim, back=False)
    return out


def _with_xla(x: jax.Array, *, axis: int, back: bool) -> jax.Array:
    sharding = jax.typeof(x).sharding
    spec = [*sharding.spec, *[None] * x.ndim][: x.ndim]
    is_sharded = any(entry is not None for entry in spec)
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    two_axes = (BLOCK // 2, 2) if back else (2, BLOCK // 2)

    def sharding_for(*spec: Any) -> Any:
        return jax.sharding.NamedSharding(sharding.mesh, jax.P(*spec)) if is_sharded else None

    if spec[axis] is not None and size % (BLOCK * _devices(sharding.mesh, spec[axis])):  # blocks on several devices
        spec[axis] = None
        x = jax.sharding.reshard(x, sharding_for(*spec))
    blocks_sharding = sharding_for(*spec[: axis + 1], None, None, *spec[axis + 1 :])
    blocks = jax.lax.reshape(x, (*before, size // BLOCK, *two_axes, *after), out_sharding=blocks_sharding)
    return jax.lax.reshape(blocks.swapaxes(axis + 1, axis + 2), x.shape, out_sharding=sharding_for(*spec))


def _devices(mesh: Any, names: Any) -> int:
    count = 1
    for name in names if isinstance(names, tuple) else (names,):
        count *= mesh.shape[name]
    return count


def _transposed(cotangent: Any, x: Any, *, axis: int, back: bool) -> list[Any]:
    is_zero = isinstance(cotangent, ad.Zero)
    return [ad.Zero(x.aval) if is_zero else contraction_order_p.bind(cotangent, axis=axis, back=not back)]


def _batch(arguments: Sequence[Any], dimensions: Sequence[int], *, axis: int, back: bool) -> tuple[jax.Array, int]:
    ((x,), (dimension,)) = arguments, dimensions
    return contraction_order_p.bind(x, axis=axis + (dimension <= axis), back=back), dimension


@contraction_order_p.def_abstract_eval
def _type(x: Any, *, axis: int, back: bool) -> Any:
    return jax.make_jaxpr(lambda x: _with_xla(x, axis=axis, back=back))(x).out_avals[0]


contraction_order_p.def_impl(jax.jit(_with_xla, static_argnames=("axis", "back")))
mlir.register_lowering(contraction_order_p, mlir.lower_fun(_with_xla, multiple_results=False))
ad.deflinear2(contraction_order_p, _transposed)
batching.primitive_batchers[contraction_order_p] = _batch
