"""Query, key and value of a pre-norm attention sub-layer, with rotary position embedding, as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.graph.author import Value
from coda_jax.graph.lines import by_xla, fused, product
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, row_flags, width_of
from coda_jax.operators.parts import parts_of
from coda_jax.operators.rotary import check_tables, rotary
from coda_jax.operators.run import norm_value, run_operator
from coda_jax.primitives.columns import axes_of_heads, in_heads
from coda_jax.primitives.dtypes import check_floats, resolve_dtype
from coda_jax.primitives.mesh_types import axes_of_dimension, without_axes
from coda_jax.tiles.choose import takes_heads

NAMES = ("query_proj", "key_proj", "value_proj")  # MaxText's


def _unit_heads(z: jax.Array, epsilon: float) -> jax.Array:
    """z (..., Dh) over its root mean square, float32."""
    z = z.astype(jnp.float32)
    return z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + epsilon)


def _beside_heads(scale: jax.Array, ndim: int) -> jax.Array:
    """scale (Dh,) as float32, broadcast against arrays (..., Dh) of `ndim` axes."""
    return jnp.expand_dims(scale.astype(jnp.float32), range(ndim - 1))


def _split(z: jax.Array, *, ends: Sequence[int]) -> list[jax.Array]:
    """Epilogue: the columns of q, of k and of v."""
    return jnp.split(z, ends, axis=1)


def _join(q: jax.Array, k: jax.Array, v: jax.Array, *, ends: Sequence[int]) -> jax.Array:
    return jnp.concatenate([q, k, v], axis=1)


def _rotate(
    z: jax.Array, cos: jax.Array | None, sin: jax.Array | None, scale: jax.Array | None, *, head: Head
) -> jax.Array:
    """Epilogue: the heads of z (M, H Dh), normalised where there is a scale, turned where there are tables."""
    rows = z.shape[0]
    heads = z.reshape(rows, z.shape[1] // head.dim, head.dim)
    if scale is not None:
        heads = _unit_heads(heads, head.epsilon) * _beside_heads(scale, heads.ndim)
    if cos is not None and sin is not None:
        heads = rotary(heads, *(_repeated(table, rows) for table in (cos, sin)))
    return heads.reshape(z.shape)


def _repeated(table: jax.Array, rows: Any) -> jax.Array:
    """A table of positions that sequences share, repeated for all rows."""
    count = table.shape[0]
    repeats = 0 if isinstance(count, int) and count == 0 else rows // count
    return jnp.tile(lax.stop_gradient(table), (repeats, 1))


def _split_and_turned(
    z: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    *,
    ends: Sequence[int],
    head: Head,
) -> list[jax.Array]:
    """Epilogue: q, k and v; with norms of heads also q and k before them, from which z is computed again."""
    q, k, v = _split(z, ends=ends)
    turned = [_rotate(x, cos, sin, scale, head=head) for x, scale in ((q, q_scale), (k, k_scale))]
    return [*turned, v, *(() if q_scale is None else (q, k))]


def _turned_back(*arrays: jax.Array, ends: Sequence[int], head: Head) -> jax.Array:
    """z again, from the results of `_split_and_turned`: a rotation can be inverted, a norm cannot."""
    if len(arrays) > 5:  # with scales
        _, _, v, q, k, *_ = arrays
    else:
        q, k, v, *tables = arrays
        if tables:
            cos, sin = tables
            q, k = (_rotate(x, cos, -sin, None, head=head) for x in (q, k))
    return _join(q, k, v, ends=ends)


class Head(NamedTuple):
    """The width of a head, and the epsilon added to its mean of squares."""

    dim: int
    epsilon: float


Tables = tuple[Value, Value] | tuple[()]  # cos and sin, (M / n, Dh / 2), of positions that n sequences share


def split_heads(
    z: Value, tables: Tables, scales: tuple[Value, Value] | tuple[()], head: Head, ends: Any
) -> list[Value]:
    """q, k and v, each (..., H Dh), from a product with the columns of all.

    Args:
      tables: by which q and k are turned; without them they are not.
      scales: (Dh,), of the norms of their heads, which are applied before.
      head: of q and k.
      ends: the columns at which q, and k, end.

    Returns:
      q, k, v, and with scales q and k before their norms.
    """
    q_scale, k_scale = scales or (None, None)
    if not (tables or scales):
        return list(fused("split", _split, z, inverse=_join, ends=ends))
    cos, sin = tables or (None, None)
    if takes_heads(head.dim):
        operands = (cos, sin, q_scale, k_scale)
        return list(
            fused("split_and_turned", _split_and_turned, z, *operands, inverse=_turned_back, ends=ends, head=head)
        )
    q, k, v = fused("split", _split, z, inverse=_join, ends=ends)
    turned = (by_xla("turned", _rotate, x, cos, sin, scale, head=head) for x, scale in ((q, q_scale), (k, k_scale)))
    return [*turned, v, *([q, k] if scales else [])]


def _qkv_projection(
    norm: Any,
    weights: tuple[Value, ...],
    tables: tuple[Value, Value],
    scales: tuple[Value, Value] | tuple[()],
    *,
    head: Head,
    ends: tuple[int, int],
    out_sharding: Sequence[jax.P | None],
    keep_weights: bool,
) -> tuple[Value, ...]:
    """q, k, v, each (..., H Dh)."""
    z = product(norm_value(norm), weights, keep_weights=keep_weights)
    each = zip(
        split_heads(z, tables, scales, head, ends), NAMES + NAMES[:2], (*out_sharding, *out_sharding[:2]), strict=False
    )
    q, k, v, *_ = (y.named(name).constrained(spec) for y, name, spec in each)
    return q, k, v


def in_whole_heads(weights: Sequence[jax.Array], head_dim: int) -> list[jax.Array]:
    """The weights, gathered over explicit mesh axes that do not shard them into whole heads; one weight over all.

    Heads of a width that the kernel does not turn may be sharded in any way.
    """
    if not takes_heads(head_dim):
        return list(weights)
    kept = [axes_of_heads(piece, head_dim) if len(weights) > 1 else () for piece in weights]
    lost = [axes_of_dimension(piece, 1) - set(axes) for piece, axes in zip(weights, kept, strict=True)]
    return [without_axes(x, 1, frozenset().union(*lost)) for x in weights]


def _table_of_rows(table: jax.Array, rows: tuple[Any, ...]) -> jax.Array:
    """A table for the product's rows: (T, Dh / 2) unchanged, for the epilogue to repeat, or one row for each."""
    table = lax.stop_gradient(table)
    if table.ndim == 2 and isinstance(table.shape[0], int) and table.shape[0] in (1, rows[-1]):
        return table
    return jnp.broadcast_to(table, (*rows, table.shape[-1])).reshape(-1, table.shape[-1])


def qkv_projection(
    norm: DeferredNorm,
    w: jax.Array | Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    qk_epsilon: float | None = None,
    dtype: Any = None,
    out_sharding: Sequence[jax.P] | None = None,
    keep_weights: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v = split(RMSNorm(x) w) with rotary(q) and rotary(k).

    With q_scale and k_scale every head of q and k is normalised before it is turned, as in Qwen3:

        q = rotary(z * rsqrt(mean(z * z over the head) + qk_epsilon) * q_scale)

    It is one product, whose epilogue scales the rows, normalises and turns the heads and stores q, k and v apart; with
    heads of other sizes than 32, 64, 96, 128, 192 and 256 XLA does so after it. The backward pass is two products and
    one elementwise pass over dq, dk, dv, which attention's kernels make in a `coda.block` of both. Kept for it are x,
    its statistic and q, k, v as attention takes them: a rotation keeps sum(z dz), so z before it is not needed; see
    graph/norm.py. A norm does not keep it: then the same product also stores q and k as they are before their norms.
    All are named "query_proj", "key_proj" and "value_proj" for `jax.checkpoint` policies.
    Where x is also the sub-layer's residual, its two cotangents are added in a pass; in a `coda.block` of both an
    epilogue adds them.

    Args:
      norm: an RMSNorm of x (..., T, D), the residual stream.
      w: (D, (H + 2 Hkv) Dh): query heads, then key heads, then value heads; or these as three arrays, of which a
        mesh may shard the heads.
      cos, sin: (T, Dh / 2) or (..., T, Dh / 2) float32, as in `rotary`. They receive no gradient.
      num_heads, num_kv_heads: H, Hkv.
      q_scale, k_scale: (Dh,), of the norms of the heads of q and of k; None, both, for no such norms.
      qk_epsilon: added to their means of squares; default that of the norm.
      dtype: compute dtype, and that of q, k and v; default the promotion of x and w.
      out_sharding: the shardings of q, k and v and their cotangents over the mesh of `jax.set_mesh`, as `mlp`'s
        hidden_sharding.
      keep_weights: as in `mlp`.
      implementation: as in `gemm`.

    Returns:
      q (..., T, H, Dh), k and v (..., T, Hkv, Dh).

    Raises:
      TypeError: norm is no DeferredNorm, or an array or dtype not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, tables that have each angle twice, a LayerNorm, or one of q_scale and k_scale
        without the other.
    """
    check_floats("qkv_projection", cos=cos, sin=sin, q_scale=q_scale, k_scale=k_scale)
    heads = num_heads + 2 * num_kv_heads
    weights = parts_of(w)
    head_dim = sum(piece.shape[-1] for piece in weights) // heads
    width = width_of("qkv_projection", norm)
    if norm.ndim < 2:
        raise ValueError(
            f"qkv_projection: x has shape {norm.shape}; it must be (..., T, D), whose positions are turned"
        )
    if len(weights) not in (1, 3):
        raise ValueError(
            f"qkv_projection: w is {len(weights)} arrays; it must be one, or three: of query, key and value"
        )
    head_counts = (heads,) if len(weights) == 1 else (num_heads, num_kv_heads, num_kv_heads)
    names = ("w",) if len(weights) == 1 else ("w[0]", "w[1]", "w[2]")
    expected = ((piece, (width, count * head_dim)) for piece, count in zip(weights, head_counts, strict=True))
    check_arrays("qkv_projection", norm, dict(zip(names, expected, strict=True)))
    if norm.mean is not None:
        raise ValueError("qkv_projection: norm is a LayerNorm; it must be an RMSNorm. norm_projection takes both")
    if (q_scale is None) != (k_scale is None):
        missing = "q_scale" if q_scale is None else "k_scale"
        raise ValueError(f"qkv_projection: {missing} is None; q and k are both normalised over their heads, or neither")
    scales: tuple[jax.Array, ...] = () if q_scale is None or k_scale is None else (q_scale, k_scale)
    for name, array in zip(("q_scale", "k_scale"), scales, strict=False):
        if array.shape != (head_dim,):
            raise ValueError(
                f"qkv_projection: {name} has shape {array.shape}; with heads of {head_dim} it must be {(head_dim,)}"
            )
    scales = tuple(without_axes(x, 0, axes_of_dimension(x, 0)) for x in scales)  # every head reads all of them
    check_tables("qkv_projection", norm.shape[:-1], head_dim, cos, sin)
    weights = tuple(in_whole_heads(weights, head_dim))
    rows = norm.shape[:-1]
    arguments = [norm, weights, tuple(_table_of_rows(table, rows) for table in (cos, sin)), scales]
    specs = (None,) * 3 if out_sharding is None else tuple(out_sharding)
    q, k, v = run_operator(
        "qkv_projection",
        _qkv_projection,
        arguments,
        row_flags(arguments),
        dtype=resolve_dtype("qkv_projection", dtype, norm.x, *weights),
        implementation=implementation,
        head=Head(head_dim, float(norm.epsilon if qk_epsilon is None else qk_epsilon)),
        ends=(num_heads * head_dim, (num_heads + num_kv_heads) * head_dim),
        out_sharding=tuple(None if spec is None else jax.P(*spec[:-1]) for spec in specs),
        keep_weights=keep_weights,
    )
    return in_heads(q, head_dim), in_heads(k, head_dim), in_heads(v, head_dim)
