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
    to `dtype` and takes rows of the result, so that this sum runs, and stagnates, in `dtype`. Here rows are taken and
    then cast, and the sum is rounded once, to `param_dtype`; inside a shard_map once on each device. Under data
    parallelism of a bfloat16 table, too, which adds the devices' sums in bfloat16, as gradients of kernels are.

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
        exchanged = self._exchanged(table, inputs)
        if exchanged is None:
            # Looked up whole over the axes that cut the tokens; the gradient lies as the table all the same.
            sizes = (None, None, *jnp.shape(inputs))[-2:] if jnp.ndim(inputs) < 3 else None
            table = constrain(table, *self.axes, beside=("batch", "length"), beside_shape=sizes)
        else:
            inputs = constrained(inputs, exchanged[:-1])
        sum_dtype = jnp.promote_types(table.dtype, jnp.float32)
        if out_sharding is None:
            out_sharding = _sharding_of_rows(table, inputs)
        # JAX sums in the table's dtype, and lays out on explicit axes what it differentiates itself.
        if sum_dtype == table.dtype or out_sharding is not None or explicit_sharding(table) is not None:
            if out_sharding is not None:
                table = without_axes(table, 1, frozenset().union(*explicit_cuts(inputs)))
            rows = table.astype(sum_dtype).at[inputs].get(mode="fill", out_sharding=out_sharding).astype(self.dtype)
        else:
            varying = vary(varying_axes(table, inputs), table, inputs)
            rows = _take(jax.typeof(table), jnp.dtype(self.dtype), self._parts(table, inputs), *varying)
        return self._laid_out(constrained(rows, exchanged))

    def _exchanged(self, table: jax.Array, inputs: Any) -> jax.P | None:
        """How rows lie as they are looked up where automatic mesh axes cut both the tokens and the table's columns.

        As those of FSDP do. Each device then looks up its columns for the tokens of all, and rows are exchanged, by an
        all-to-all, and their cotangents on the way back; the table stays, and its gradient needs no sum. None where
        that moves more than to gather the table, that is where a device has more tokens than the table has rows.
        """
        shape, of_table = jnp.shape(inputs), activation_spec(table.shape, *self.axes)
        if of_table is None or len(shape) > 2 or explicit_sharding(table) is not None:
            return None
        of_inputs = activation_spec(shape, "batch", "length") or jax.P()
        axes, columns = mesh_axes(of_inputs), mesh_axes(of_table[1:])
        sizes: Any = (*shape, table.shape[0])
        if not set(axes) & set(columns) or not all(isinstance(size, int) for size in sizes):  # not, of an export
            return None
        devices = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
        if math.prod(shape) > table.shape[0] * devices:
            return None
        rows = (tuple(axis for axis in mesh_axes([entry]) if axis not in columns) or None for entry in of_inputs)
        return jax.P(*rows, columns)

    def _parts(self, table: jax.Array, inputs: Any) -> tuple[str, ...]:
        """The mesh axes that cut the first axis of the tokens, where the table is bfloat16 and whole on all devices.

        None where other axes of the mesh have several devices, or where some are not automatic.
        """
        of_inputs = activation_spec(jnp.shape(inputs), "batch", "length")
        mesh = jax.sharding.get_abstract_mesh()
        if not of_inputs or table.dtype != jnp.bfloat16 or any(kind is not AxisType.Auto for kind in mesh.axis_types):
            return ()
        of_table = mesh_axes(activation_spec(table.shape, *self.axes) or ())
        parts = tuple(name for name in mesh_axes(of_inputs[:1]) if mesh.shape[name] > 1 and name not in of_table)
        return parts if math.prod(mesh.shape[name] for name in parts) == mesh.size else ()

    def _laid_out(self, rows: jax.Array) -> jax.Array:
        """The residual stream: rows of a cut vocabulary are summed before their axis may cut them; no table moves."""
        return constrain(constrain(rows, *STREAM, beside=self.axes[:1]), *STREAM)


class PositionEmbed(Embed):
    """Embed of learned positions."""

    axes = ("positions", "embed")


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _take(of_table: Any, dtype: Any, parts: tuple[str, ...], table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table of 16-bit elements, in `dtype`, whose gradient is summed in float32.

    Args:
      of_table: the table's type.
      parts: mesh axes that cut the tokens, all of the mesh but those of size 1. XLA would add the devices' sums before
        they are rounded, twice the bytes.
    """
    return jnp.take(table, tokens, axis=0).astype(dtype)


def _take_forward(of_table: Any, dtype: Any, parts: Any, table: jax.Array, tokens: jax.Array) -> tuple[Any, jax.Array]:
    return _take(of_table, dtype, parts, table, tokens), tokens


def _take_backward(of_table: Any, dtype: Any, parts: Any, tokens: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    def summed(tokens: jax.Array, dy: jax.Array) -> jax.Array:
        (zeros,) = vary(varying_axes(tokens, dy), jnp.zeros(of_table.shape, jnp.float32))
        return zeros.at[tokens].add(dy.astype(jnp.float32)).astype(of_table.dtype)

    if not parts:
        return summed(tokens, dy), None
    cut = jax.P(parts)
    of_parts = jax.shard_map(lambda *rows: jax.lax.psum(summed(*rows), parts), in_specs=(cut, cut), out_specs=jax.P())
    return of_parts(tokens, dy), None


_take.defvjp(_take_forward, _take_backward)
