"""The token embedding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from coda_jax.extend import explicit_cuts, explicit_sharding, vary, varying_axes, without_axes
from flax_layers.sharding import STREAM, constrain

TABLE = ("vocab", "embed")


class Embed(nnx.Embed):
    """flax.nnx.Embed, whose gradient is summed in float32.

    y = embedding[tokens]

    A row's gradient is a sum over the tokens that name it, thousands of frequent ones. flax.nnx.Embed casts the table
    to `dtype` and takes rows of the result, so that this sum runs, and stagnates, in `dtype`. Here rows are taken and
    then cast, and the sum is rounded once, to `param_dtype`; inside a shard_map once on each device.

    Arguments and `attend` are flax.nnx.Embed's, but for `promote_dtype`, which only `attend` looks at.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The rows (..., features) that inputs (...) name; NaN for those that the table does not have.

        Args:
          inputs: (...) integers; negative ones count from the end, as in NumPy.
          out_sharding: of the result, on a mesh with explicit axes; default as the inputs, and columns as the table's.

        Raises:
          ValueError: inputs are not integers.
        """
        if not jnp.issubdtype(jnp.result_type(inputs), jnp.integer):
            raise ValueError(f"tokens are integers, got {jnp.result_type(inputs)}")
        # Looked up whole over the axes that cut the tokens; the gradient lies as the table all the same.
        table = constrain(constrain(self.embedding[...], *TABLE), *TABLE, beside=("batch", "length"))
        sum_dtype = jnp.promote_types(table.dtype, jnp.float32)
        if out_sharding is None:
            out_sharding = _sharding_of_rows(table, inputs)
        # JAX sums in the table's dtype, and lays out on explicit axes what it differentiates itself.
        if sum_dtype == table.dtype or out_sharding is not None or explicit_sharding(table) is not None:
            if out_sharding is not None:
                table = without_axes(table, 1, frozenset().union(*explicit_cuts(inputs)))
            rows = table.astype(sum_dtype).at[inputs].get(mode="fill", out_sharding=out_sharding)
            return _laid_out(rows.astype(self.dtype))
        varying = vary(varying_axes(table, inputs), table, inputs)
        return _laid_out(_take(jax.typeof(table), jnp.dtype(self.dtype), *varying))


def _laid_out(rows: jax.Array) -> jax.Array:
    """The residual stream: rows of a cut vocabulary are summed before their axis may cut them, so no table moves."""
    return constrain(constrain(rows, *STREAM, beside=("vocab",)), *STREAM)


def _sharding_of_rows(table: jax.Array, inputs: Any) -> Any:
    """Over explicit axes: the rows lie as what names them, their columns as the table's; None if that is anywhere.

    An axis that cuts the tokens and the table's columns, as that of FSDP does, cuts the rows: the columns are gathered.
    """
    of_table = explicit_sharding(table)
    if of_table is None:
        return None
    of_inputs = explicit_sharding(inputs)
    rows = (None,) * jnp.ndim(inputs) if of_inputs is None else of_inputs.spec
    columns = of_table.spec[1] if isinstance(of_table.spec[1], tuple) else (of_table.spec[1],)
    taken = {axis for entry in rows for axis in (entry if isinstance(entry, tuple) else (entry,))}
    spec = jax.P(*rows, tuple(axis for axis in columns if axis not in taken) or None)
    # Beside a manual axis JAX cannot differentiate a gather that is told how to lie.
    return (
        None
        if all(axis is None for axis in (*spec, *of_table.spec))
        else jax.sharding.NamedSharding(of_table.mesh, spec)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _take(of_table: Any, dtype: Any, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table of 16-bit elements, in `dtype`, whose gradient is summed in float32; `of_table` is its type."""
    return jnp.take(table, tokens, axis=0).astype(dtype)


def _take_forward(of_table: Any, dtype: Any, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(of_table, dtype, table, tokens), tokens


def _take_backward(of_table: Any, dtype: Any, tokens: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    (zeros,) = vary(varying_axes(tokens, dy), jnp.zeros(of_table.shape, jnp.float32))
    return zeros.at[tokens].add(dy.astype(jnp.float32)).astype(of_table.dtype), None


_take.defvjp(_take_forward, _take_backward)
