"""The token embedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Embed(nnx.Embed):
    """flax.nnx.Embed, whose gradient is summed in float32.

    y = embedding[tokens]

    A row's gradient is a sum over the tokens that name it, thousands of frequent ones. flax.nnx.Embed casts the table
    to `dtype` and takes rows of the result, so that this sum runs, and stagnates, in `dtype`. Here rows are taken and
    then cast: the same y, no pass over the table, and the sum is rounded once, to `param_dtype`.

    Arguments and `attend` are flax.nnx.Embed's.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The rows (..., features) that inputs (...) name; NaN for those that the table does not have.

        Args:
          inputs: (...) integers.
          out_sharding: of the result, on a mesh with explicit axes.

        Raises:
          ValueError: inputs are not integers.
        """
        if not jnp.issubdtype(jnp.result_type(inputs), jnp.integer):
            raise ValueError(f"tokens are integers, got {jnp.result_type(inputs)}")
        table = self.embedding[...]
        wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))  # XLA takes rows, then widens them
        return wide.at[inputs].get(mode="fill", out_sharding=out_sharding).astype(self.dtype)
