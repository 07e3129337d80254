"""An operator as products around a norm with a derivative of its own, for x of any number of axes and under vmap."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.operators.deferred_norm import DeferredNorm, row_flags
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.reverse_mode import Backward, OfBatch, guarded_function, named_zero


class Chain:
    """What an operator of a norm of x is beside its arrays.

    Attributes:
      products: products(*arguments, keep=False) are the outputs, all with the rows of x; with keep=True beside them
        what `backward` takes. Of that the last has the rows of x, and so have a norm's x and statistics; nothing else.
    """

    products: Callable[..., Any]

    def backward(self, kept: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, ...]:
        """The arguments' cotangents, from what is kept and those of the outputs; None is zeros."""
        raise NotImplementedError

    def with_batch(self, size: Any) -> Chain | None:
        """The chain of x with one more axis in front, of this size; None where it does not take that."""
        raise NotImplementedError

    def arguments(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments among what is kept; of a chain that returns x."""
        raise NotImplementedError


def run_chain(name: str, chain: Chain, arguments: Sequence[Any], rows: Sequence[Any]) -> list[jax.Array]:
    """The outputs of a chain of products, with its derivative.

    Args:
      name: of the operator.
      chain: what it is.
      arguments: trees of arrays; the norm is the first. They come to vary over the same manual mesh axes.
      rows: trees of flags, whether each has the rows of x. x (D,) is one row.
    """
    leaves, structure = jax.tree.flatten(list(arguments))
    leaves = vary(varying_axes(*leaves), *leaves)
    is_row = arguments[0].ndim == 1
    if is_row:
        each = zip(leaves, jax.tree.leaves(list(rows)), strict=True)
        leaves = [jnp.expand_dims(x, 0) if has_rows else x for x, has_rows in each]
    products, forward = functools.partial(chain.products, keep=False), functools.partial(chain.products, keep=True)
    function = guarded_function(products, forward, _Backward(chain, rows), leaves)
    outputs: list[jax.Array] = function(named_zero(name, leaves), *jax.tree.unflatten(structure, leaves))
    return [jnp.squeeze(x, 0) for x in outputs] if is_row else outputs


def row_spec(spec: jax.P | None, norm: DeferredNorm) -> jax.P | None:
    """The sharding of a result (..., N), with an entry for each of its axes; `run_chain` makes one row of x (D,)."""
    if spec is None:
        return None
    entries = (*[None] * (norm.ndim == 1), *spec)
    return jax.P(*entries, *[None] * (max(norm.ndim, 2) - len(entries)))


@dataclasses.dataclass(frozen=True)
class _Backward(Backward):
    """A chain's backward pass. That of a batch which shares all that has no rows is the pass of more rows.

    Attributes:
      chain: what it is.
      rows: as `run_chain` takes them.
    """

    chain: Chain
    rows: Sequence[Any]

    def __call__(self, kept: Any, cotangents: Any) -> tuple[Any, ...]:
        return self.chain.backward(kept, cotangents)

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        # Of an output that the batch shares, as x is beside a batch of weights, JAX gives the cotangent once for all.
        given = jax.tree.map(lambda x, has_batch: x if has_batch else _first_of(size, x), cotangents, batched[1])
        leaves, structure = jax.tree.flatten(kept)
        rows = jax.tree.leaves((row_flags(kept[:-1]), jax.tree.map(lambda _: True, kept[-1])))
        each = list(zip(leaves, rows, jax.tree.leaves(batched[0]), strict=True))
        chain = self.chain.with_batch(size)
        if chain is not None and all(has_rows or not has_batch for _, has_rows, has_batch in each):
            whole = [
                jnp.broadcast_to(x, (size, *x.shape)) if has_rows and not has_batch else x
                for x, has_rows, has_batch in each
            ]
            return OfBatch(_Backward(chain, self.rows), jax.tree.unflatten(structure, whole), given, self.rows)
        if all(jax.tree.leaves(batched[1])):
            return None
        axes = [0 if has_batch else None for _, _, has_batch in each]
        flags = self.chain.arguments(batched[0])

        def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
            def of_one(leaves: list[jax.Array], cotangents: Any) -> tuple[Any, ...]:
                return self.chain.backward(jax.tree.unflatten(structure, leaves), cotangents)

            found = jax.vmap(of_one, in_axes=(axes, 0), axis_size=size)(jax.tree.leaves(kept), cotangents)
            made, tree = jax.tree.flatten(found, is_leaf=_is_none)
            each = zip(made, jax.tree.leaves(flags, is_leaf=_is_none), strict=True)
            whole = [x if x is None or flag else jnp.sum(x, axis=0) for x, flag in each]
            summed: tuple[Any, ...] = jax.tree.unflatten(tree, whole)
            return summed

        return OfBatch(backward, kept, given, flags)


def _first_of(size: Any, x: jax.Array) -> jax.Array:
    """x as the first of a batch whose others are zeros."""
    return jnp.concatenate([x[None], jnp.zeros_like(x, shape=(size - 1, *x.shape))])


def _is_none(x: Any) -> bool:
    return x is None
