"""An operator as a block: its lines on values, for x of any number of axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.graph import normed
from coda_jax.graph.block import Block
from coda_jax.graph.normed import NormedValue
from coda_jax.graph.static import Static
from coda_jax.operators.deferred_norm import DeferredNorm


def run_operator(
    name: str,
    lines: Callable[..., Any],
    arguments: Sequence[Any],
    rows: Sequence[Any],
    *,
    dtype: Any,
    implementation: str,
    **options: Any,
) -> Any:
    """The results of lines(*arguments, **options), a pytree of values, as arrays.

    Args:
      name: of the operator.
      lines: a function of values. That of a module: what it is traced to is kept with it.
      arguments: trees of arrays; the first has the rows, x (..., D) or a norm of it.
      rows: trees of flags, whether each array has the rows. x (D,) is one row.
      dtype: of the products' factors.
      implementation: as in `gemm`.
      options: of the lines, no arrays.
    """
    leaves, tree = jax.tree.flatten(list(arguments))
    flags = tuple(jax.tree.leaves(list(rows)))
    is_row = arguments[0].ndim == 1
    if is_row:
        leaves = [jnp.expand_dims(x, 0) if has_rows else x for x, has_rows in zip(leaves, flags, strict=True)]
    block = _block(name, lines, np.dtype(dtype), implementation, flags)
    static = {key: Static(value) for key, value in options.items()}
    found = block(*jax.tree.unflatten(tree, leaves), **static)
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), found) if is_row else found


@functools.lru_cache(maxsize=256)
def _block(
    name: str, lines: Callable[..., Any], dtype: np.dtype[Any], implementation: str, row_flags: tuple[bool, ...]
) -> Block:
    def on_values(*arguments: Any, **static: Static) -> Any:
        return lines(*arguments, **{key: of.value for key, of in static.items()})

    return Block(on_values, dtype, None, name, implementation, row_flags=row_flags)


def norm_value(norm: Any) -> NormedValue:
    """A norm of values, as a value; one of a block as it is."""
    if isinstance(norm, NormedValue):
        return norm
    x: Any = norm.x
    if norm.mean is None:
        return normed.rms_norm(x, norm.sumsq, norm.scale, norm.epsilon)
    return normed.layer_norm(x, norm.scale, norm.bias, norm.epsilon)


def row_spec(spec: jax.P | None, norm: DeferredNorm) -> jax.P | None:
    """The sharding of a result (..., N), with an entry for each of its axes; x (D,) is one row."""
    if spec is None:
        return None
    entries = (*[None] * (norm.ndim == 1), *spec)
    return jax.P(*entries, *[None] * (max(norm.ndim, 2) - len(entries)))
