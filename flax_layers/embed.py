"""The token embedding."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

from coda_jax.extend import constrained, explicit_cuts, explicit_sharding, vary, varying_axes, without_axes
from flax_layers.axis_metadata import name_parameters
from flax_layers.sharding import STREAM, activation_spec, constrain, mesh_axes


class Embed(nnx.Embed):
    """flax.nnx.Embed, whose gradient is summed in float32.

    y = embedding[tokens]

    A row's gradient is a sum over the tokens that name it, thousands of frequent ones. flax.nnx.Embed casts the table
    to `dtype` and reads rows of the result, so that this sum runs, and stagnates, in `dtype`. Here rows are read and
    then cast, and the sum is rounded once, to `param_dtype`; inside a shard_map, and under data parallelism of a
    bfloat16 table, once on each device. There the devices' sums are added in bfloat16, as gradients of kernels are.

    Arguments and `attend` are flax.nnx.Embed's, but for `promote_dtype`, which only `attend` looks at.

    Attributes:
      axes: names of the table's axes, for sharding rules.
    """

    axes: ClassVar[tuple[str, str]] = ("vocab", "embed")

    @functools.wraps(nnx.Embed.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        name_parameters(self, {"embedding": self.axes})

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
        table = constrain(self.embedding[...], *self.axes)
        exchange_spec = self._exchange_spec(table, inputs)
        if exchange_spec is None:
            # The table is gathered over the axes that shard the tokens; its gradient is still sharded as the table.
            sizes = (None, None, *jnp.shape(inputs))[-2:] if jnp.ndim(inputs) < 3 else None
            table = constrain(table, *self.axes, beside=("batch", "length"), beside_shape=sizes)
        else:
            inputs = constrained(inputs, exchange_spec[:-1])
        sum_dtype = jnp.promote_types(table.dtype, jnp.float32)
        if out_sharding is None:
            out_sharding = _sharding_of_rows(table, inputs)
        # JAX's own gradient is summed in the table's dtype, and is sharded over explicit axes.
        if sum_dtype == table.dtype or out_sharding is not None or explicit_sharding(table) is not None:
            if out_sharding is not None:
                table = without_axes(table, 1, frozenset().union(*explicit_cuts(inputs)))
            rows = table.astype(sum_dtype).at[inputs].get(mode="fill", out_sharding=out_sharding).astype(self.dtype)
        else:
            varying = vary(varying_axes(table, inputs), table, inputs)
            rows = _take(jax.typeof(table), jnp.dtype(self.dtype), self._token_axes(table, inputs), *varying)
        return self._as_stream(constrained(rows, exchange_spec))

    def _exchange_spec(self, table: jax.Array, inputs: Any) -> jax.P | None:
        """The sharding of looked up rows where automatic mesh axes shard both the tokens and the table's columns.

        FSDP's axes do. Each device then looks up its columns for the tokens of all, and an all-to-all exchanges the
        rows, and their cotangents in the backward pass; the table is not sent, and its gradient needs no sum. None
        where gathering the table sends less: where a device has more tokens than the table has rows.
        """
        shape, table_spec = jnp.shape(inputs), activation_spec(table.shape, *self.axes)
        if table_spec is None or len(shape) > 2 or explicit_sharding(table) is not None:
            return None
        inputs_spec = activation_spec(shape, "batch", "length") or jax.P()
        axes, columns = mesh_axes(inputs_spec), mesh_axes(table_spec[1:])
        sizes: Any = (*shape, table.shape[0])
        if not set(axes) & set(columns) or not all(isinstance(size, int) for size in sizes):  # symbolic, in an export
            return None
        devices = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
        if math.prod(shape) > table.shape[0] * devices:
            return None
        rows = (tuple(axis for axis in mesh_axes([entry]) if axis not in columns) or None for entry in inputs_spec)
        return jax.P(*rows, columns)

    def _token_axes(self, table: jax.Array, inputs: Any) -> tuple[str, ...]:
        """The mesh axes that shard the first axis of the tokens, where the table is bfloat16 and replicated.

        There are none where other axes of the mesh have several devices, or where some are not automatic.
        """
        inputs_spec = activation_spec(jnp.shape(inputs), "batch", "length")
        mesh = jax.sharding.get_abstract_mesh()
        if not inputs_spec or table.dtype != jnp.bfloat16 or any(kind is not AxisType.Auto for kind in mesh.axis_types):
            return ()
        table_axes = mesh_axes(activation_spec(table.shape, *self.axes) or ())
        token_axes = tuple(
            name for name in mesh_axes(inputs_spec[:1]) if mesh.shape[name] > 1 and name not in table_axes
        )
        return token_axes if math.prod(mesh.shape[name] for name in token_axes) == mesh.size else ()

    def _as_stream(self, rows: jax.Array) -> jax.Array:
        """The residual stream: rows of a sharded vocabulary are summed before its mesh axis may shard them."""
        return constrain(constrain(rows, *STREAM, beside=self.axes[:1]), *STREAM)


class PositionEmbed(Embed):
    """Embed of learned positions."""

    axes = ("positions", "embed")


def _sharding_of_rows(table: jax.Array, inputs: Any) -> Any:
    """The rows' sharding over explicit axes: the tokens' for rows, the table's for columns; None if neither has any.

    An axis that shards the tokens and the table's columns, as FSDP's does, shards the rows: the columns are gathered.
    """
    table_sharding = explicit_sharding(table)
    if table_sharding is None:
        return None
    inputs_sharding = explicit_sharding(inputs)
    rows = (None,) * jnp.ndim(inputs) if inputs_sharding is None else inputs_sharding.spec
    columns = table_sharding.spec[1] if isinstance(table_sharding.spec[1], tuple) else (table_sharding.spec[1],)
    taken = {axis for entry in rows for axis in (entry if isinstance(entry, tuple) else (entry,))}
    spec = jax.P(*rows, tuple(axis for axis in columns if axis not in taken) or None)
    # Beside a manual axis JAX cannot differentiate a gather with an out_sharding.
    return (
        None
        if all(axis is None for axis in (*spec, *table_sharding.spec))
        else jax.sharding.NamedSharding(table_sharding.mesh, spec)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _take(table_type: Any, dtype: Any, token_axes: tuple[str, ...], table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table of 16-bit elements, in `dtype`, whose gradient is summed in float32.

    Args:
      table_type: the table's type.
      token_axes: mesh axes that shard the tokens, all of the mesh but those of size 1. XLA would add the devices' sums
        before they are rounded, which sends twice the bytes.
    """
    return jnp.take(table, tokens, axis=0).astype(dtype)


def _take_forward(
    table_type: Any, dtype: Any, token_axes: Any, table: jax.Array, tokens: jax.Array
) -> tuple[Any, jax.Array]:
    return _take(table_type, dtype, token_axes, table, tokens), tokens


def _take_backward(
    table_type: Any, dtype: Any, token_axes: Any, tokens: jax.Array, dy: jax.Array
) -> tuple[jax.Array, None]:
    def summed(tokens: jax.Array, dy: jax.Array) -> jax.Array:
        (zeros,) = vary(varying_axes(tokens, dy), jnp.zeros(table_type.shape, jnp.float32))
        return zeros.at[tokens].add(dy.astype(jnp.float32)).astype(table_type.dtype)

    if not token_axes:
        return summed(tokens, dy), None
    rows_spec = jax.P(token_axes)
    on_all_devices = jax.shard_map(
        lambda *rows: jax.lax.psum(summed(*rows), token_axes), in_specs=(rows_spec, rows_spec), out_specs=jax.P()
    )
    return on_all_devices(tokens, dy), None


_take.defvjp(_take_forward, _take_backward)
