"""Query, key and value of a pre-norm attention sub-layer, with rotary position embedding, as one chain of products."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import norm_products
from coda_jax.operators.chain import Chain, run_chain
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, row_flags, width_of
from coda_jax.operators.norm_products import Sums, multiply, named, of_norm, with_rows_of
from coda_jax.primitives.columns import axes_of_heads, in_heads
from coda_jax.primitives.derivative import Parts
from coda_jax.primitives.dtypes import check_floats, resolve_dtype
from coda_jax.primitives.mesh_types import axes_of_dimension, constrained, placed_alike, without_axes
from coda_jax.tiles.choose import takes_heads

NAMES = ("query_proj", "key_proj", "value_proj")  # MaxText's


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + Dh/2]) of every head: [a, b] -> [a cos - b sin, b cos + a sin].

    The convention of Hugging Face's Llama. Computed in float32, rounded once.

    Args:
      x: (..., T, H, Dh).
      cos, sin: (..., T, Dh / 2) float32.

    Raises:
      TypeError: an array that is not bfloat16, float16 or float32.
      ValueError: tables of another shape, as those that have each angle twice, or an odd Dh.
    """
    check_floats("rotary", x=x, cos=cos, sin=sin)
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotary: x has shape {x.shape}; it must be (..., T, H, Dh), whose Dh is even")
    _check_tables("rotary", x.shape[:-2], x.shape[-1], cos, sin)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (jnp.expand_dims(y[..., None, :], range(x.ndim - y.ndim - 1)) for y in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _check_tables(operator: str, rows: tuple[Any, ...], head_dim: int, cos: jax.Array, sin: jax.Array) -> None:
    """Raises ValueError where tables do not have an angle for each pair of a head, of these rows (..., T)."""
    half = head_dim // 2
    for name, table in (("cos", cos), ("sin", sin)):
        try:
            lead = jnp.broadcast_shapes(rows, table.shape[:-1])
        except ValueError:
            lead = None
        if table.ndim == 0 or table.shape[-1] != half or lead is None:
            is_doubled = table.ndim > 0 and table.shape[-1] == head_dim
            raise ValueError(
                f"{operator}: {name} has shape {table.shape}; beside rows {rows} and heads of {head_dim} it must be "
                f"(T, {half}) or (..., T, {half}), an angle for each pair"
                + (f". A table of Hugging Face's has each twice: give {name}[..., :{half}]" if is_doubled else "")
            )


def _unit_heads(z: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """z (..., Dh) over its root mean square, and the reciprocal of that, float32."""
    z = z.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + epsilon)
    return z * rstd, rstd


def _of_heads(scale: jax.Array, ndim: int) -> jax.Array:
    """scale (Dh,) float32 beside arrays (..., Dh) of so many axes."""
    return jnp.expand_dims(scale.astype(jnp.float32), range(ndim - 1))


def _unit_heads_backward(z: jax.Array, scale: jax.Array, dy: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Cotangents of z (..., Dh) and scale (Dh,) through y = _unit_heads(z) * scale, float32."""
    unit, rstd = _unit_heads(z, epsilon)
    dunit = dy * _of_heads(scale, dy.ndim)
    dz = rstd * (dunit - unit * jnp.mean(unit * dunit, axis=-1, keepdims=True))
    return dz, jnp.sum(unit * dy, axis=range(dy.ndim - 1))


@dataclasses.dataclass(frozen=True)
class _QKVProjection(Chain):
    """`qkv_projection` of a norm of x (..., T, D), forward and backward: what it is beside its arrays.

    Attributes:
      rows: the leading axes of x.
      head_dim: Dh.
      ends: where the columns of q and of k end.
      epsilon: of the norms of heads.
      dtype: compute dtype.
      out_sharding: how q, k and v lie.
      keep_weights: whether w with the norm's scale is kept for the backward pass.
      implementation: as in `gemm`.
    """

    rows: tuple[Any, ...]
    head_dim: int
    ends: tuple[int, int]
    epsilon: float
    dtype: Any
    out_sharding: tuple[jax.P | None, ...]
    keep_weights: bool
    implementation: str

    def products(self, norm: DeferredNorm, w: Parts, tables: Any, scales: tuple[Any, ...], *, keep: bool) -> Any:
        """q, k, v and x; beside them, if asked for, what `backward` takes."""
        cos, sin = tables
        (x, scaled, *arrays), of_z = norm_products.factors(norm, w, None, self.dtype, keep_weights=self.keep_weights)
        in_epilogue = takes_heads(self.head_dim)
        keeps_columns = bool(keep and scales)  # a rotation keeps sum(z dz), a norm of heads does not
        name = f"row_scale{'_norm' if scales else ''}_rotary{'_kept' if keeps_columns else ''}"
        made = multiply(
            with_rows_of(x, self.out_sharding[0]),
            self._in_whole_heads(scaled),
            *arrays,
            *((self._of_rows(cos), self._of_rows(sin), *scales) if in_epilogue else ()),
            epilogue=of_norm(
                named(name, self.split_and_turned, keep=keeps_columns)
                if in_epilogue
                else named("row_scale_split", self.split)
            ),
            out_dtypes=[self.dtype] * (5 if in_epilogue and keeps_columns else 3),
            implementation=self.implementation,
        )
        specs = (*self.out_sharding, *self.out_sharding[:2])
        q, k, v, *before = (constrained(in_heads(y, self.head_dim), spec) for y, spec in zip(made, specs, strict=False))
        if not in_epilogue:
            before = [q, k] if keeps_columns else []
            q, k = self._turned([q, k], cos, sin, scales)
        if keep:
            of_names = zip([q, k, v, *before], NAMES + NAMES[:2], strict=False)
            q, k, v, *before = (checkpoint_name(y, name) for y, name in of_names)
        outputs = [q, k, v, norm.x]
        return (outputs, (of_z, tables, scales, (*before, v) if before else (q, k, v))) if keep else outputs

    def backward(self, kept: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, ...]:
        of_z, (cos, sin), scales, zs = kept
        *dqkv, dresidual = cotangents
        if all(dy is None for dy in dqkv):
            return of_z.norm.cotangent(dresidual), None, (None, None), (None,) * len(scales)
        dqkv = [jnp.zeros_like(z) if dy is None else dy for z, dy in zip(zs, dqkv, strict=True)]
        dqkv = [constrained(dy, spec) for dy, spec in zip(dqkv, self.out_sharding, strict=True)]
        wide = [dy.astype(jnp.float32) for dy in dqkv]
        dz = [rotary(wide[0], cos, -sin), rotary(wide[1], cos, -sin), wide[2]]
        dscales: list[jax.Array] = []
        for i, scale in enumerate(scales):
            dz[i], dscale = _unit_heads_backward(zs[i], scale, dz[i], self.epsilon)
            dscales.append(dscale.astype(scale.dtype))
        # A rotation keeps sum(z dz): without norms of heads z before it is not needed.
        pairs = zip(zs, dz if scales else wide, strict=True)
        products = [jnp.sum(y.astype(jnp.float32) * dy, axis=(-2, -1)) for y, dy in pairs]
        t_scale, *_ = of_z.of_cotangents(self.dtype)
        if not isinstance(of_z.w, tuple):
            dz = [jnp.concatenate(placed_alike(dz, -2), axis=-2)]
        columns = (y.reshape(*self.rows, y.shape[-2] * y.shape[-1]) for y in dz)
        ts = [(t_scale * y).astype(self.dtype) for y in columns]
        if len(ts) > 1:
            specs = (None if spec is None else jax.P(*spec[:-1]) for spec in self.out_sharding)
            ts = [constrained(t, spec) for t, spec in zip(ts, specs, strict=True)]
        t = norm_products.one_or_parts(ts)
        sums = Sums(products[0] + products[1] + products[2])
        dnorm, dw, _ = norm_products.backward(of_z, t, sums, dresidual, implementation=self.implementation)
        return dnorm, dw, (None, None), tuple(dscales)

    def with_batch(self, size: Any) -> _QKVProjection | None:
        is_open = all(spec is None for spec in self.out_sharding)
        return dataclasses.replace(self, rows=(size, *self.rows)) if is_open else None

    def arguments(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        of_z, tables, scales, _ = kept
        return of_z.norm, of_z.w, tables, scales

    def _in_whole_heads(self, w: Parts) -> Parts:
        """w, gathered over explicit mesh axes that do not cut q, k and v in whole heads; where it is one, over all."""
        parts = norm_products.parts_of(w)
        kept = [axes_of_heads(part, self.head_dim) if len(parts) > 1 else () for part in parts]
        lost = [axes_of_dimension(part, 1) - set(axes) for part, axes in zip(parts, kept, strict=True)]
        made: Parts = norm_products.one_or_parts([without_axes(x, 1, frozenset().union(*lost)) for x in parts])
        return made

    def _of_rows(self, table: jax.Array) -> jax.Array:
        """A table for the product's rows: (T, Dh / 2) as it is, which the epilogue repeats."""
        if table.ndim == 2 and isinstance(table.shape[0], int) and table.shape[0] in (1, self.rows[-1]):
            return table
        return jnp.broadcast_to(table, (*self.rows, table.shape[-1])).reshape(-1, table.shape[-1])

    def _turned(self, zs: Sequence[jax.Array], cos: jax.Array, sin: jax.Array, scales: Sequence[Any]) -> Any:
        """q and k (..., H, Dh), normalised where there are scales."""
        if scales:
            units = (_unit_heads(z, self.epsilon)[0] for z in zs)
            ys = [unit * _of_heads(scale, unit.ndim) for unit, scale in zip(units, scales, strict=True)]
        else:
            ys = list(zs)
        return [rotary(y, cos, sin).astype(z.dtype) for y, z in zip(ys, zs, strict=True)]

    # The epilogues, of z = rstd * acc and no shift.

    def split(self, z: jax.Array, _: None) -> list[jax.Array]:
        return jnp.split(z, self.ends, axis=1)

    def split_and_turned(
        self, z: jax.Array, _: None, cos: jax.Array, sin: jax.Array, *scales: jax.Array, keep: bool
    ) -> list[jax.Array]:
        q, k, v = self.split(z, _)
        rows = z.shape[0]
        cos, sin = (jnp.tile(table, (rows // table.shape[0], 1)) for table in (cos, sin))
        heads = [x.reshape(rows, x.shape[1] // self.head_dim, self.head_dim) for x in (q, k)]
        turned = [x.reshape(rows, -1) for x in self._turned(heads, cos, sin, scales)]
        return [*turned, v, *((q, k) if keep else ())]


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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v = split(RMSNorm(x) w) with rotary(q) and rotary(k), and x itself.

    With q_scale and k_scale every head of q and k is normalised before it is turned, as in Qwen3:

        q = rotary(z * rsqrt(mean(z * z over the head) + qk_epsilon) * q_scale)

    It is one product, whose epilogue scales the rows, normalises and turns the heads and stores q, k and v apart; with
    heads of other sizes than 32, 64, 96, 128, 192 and 256 XLA does so after it. The backward pass is two products and
    one elementwise pass over dq, dk, dv. Kept for it are x, its statistic and q, k, v as attention takes them: a
    rotation keeps sum(z dz), so z before it is not needed; see norm_products.py. A norm does not keep it: then the same
    product also stores q and k as they are before their norms. All are named "query_proj", "key_proj" and "value_proj"
    for `jax.checkpoint` policies.
    The residual of the sub-layer should be the returned x: its cotangent is then added in the epilogue of the
    product that makes dx.

    Args:
      norm: an RMSNorm of x (..., T, D), the residual stream.
      w: (D, (H + 2 Hkv) Dh): query heads, then key heads, then value heads; or these three apart, of which a mesh may
        cut the heads.
      cos, sin: (T, Dh / 2) or (..., T, Dh / 2) float32, as `rotary` takes them. They receive no gradient.
      num_heads, num_kv_heads: H, Hkv.
      q_scale, k_scale: (Dh,), of the norms of the heads of q and of k; None, both, for no such norms.
      qk_epsilon: added to their means of squares; default that of the norm.
      dtype: compute dtype, and that of q, k and v; default the promotion of x and w.
      out_sharding: how q, k and v and their cotangents lie over the mesh of `jax.set_mesh`, as `mlp`'s hidden_sharding.
      keep_weights: as in `mlp`.
      implementation: as in `gemm`.

    Returns:
      q (..., T, H, Dh), k and v (..., T, Hkv, Dh), x (..., T, D).

    Raises:
      TypeError: norm is no DeferredNorm, or an array or dtype not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, tables that have each angle twice, a LayerNorm, or one of q_scale and k_scale
        without the other.
    """
    check_floats("qkv_projection", cos=cos, sin=sin, q_scale=q_scale, k_scale=k_scale)
    heads = num_heads + 2 * num_kv_heads
    weights = norm_products.parts_of(w)
    head_dim = sum(part.shape[-1] for part in weights) // heads
    width = width_of("qkv_projection", norm)
    if norm.ndim < 2:
        raise ValueError(
            f"qkv_projection: x has shape {norm.shape}; it must be (..., T, D), whose positions are turned"
        )
    if len(weights) not in (1, 3):
        raise ValueError(
            f"qkv_projection: w is {len(weights)} arrays; it must be one, or three: of query, key and value"
        )
    of_each = (heads,) if len(weights) == 1 else (num_heads, num_kv_heads, num_kv_heads)
    names = ("w",) if len(weights) == 1 else ("w[0]", "w[1]", "w[2]")
    expected = ((part, (width, count * head_dim)) for part, count in zip(weights, of_each, strict=True))
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
    _check_tables("qkv_projection", norm.shape[:-1], head_dim, cos, sin)
    chain = _QKVProjection(
        rows=norm.shape[:-1],
        head_dim=head_dim,
        ends=(num_heads * head_dim, (num_heads + num_kv_heads) * head_dim),
        epsilon=float(norm.epsilon if qk_epsilon is None else qk_epsilon),
        dtype=resolve_dtype("qkv_projection", dtype, norm.x, *weights),
        out_sharding=(None,) * 3 if out_sharding is None else tuple(out_sharding),
        keep_weights=keep_weights,
        implementation=implementation,
    )
    arguments = [norm, norm_products.one_or_parts(weights), (cos, sin), scales]
    q, k, v, x = run_chain("qkv_projection", chain, arguments, row_flags(arguments))
    return q, k, v, x
