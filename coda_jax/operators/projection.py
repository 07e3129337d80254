"""Projections, each one product forward and two backward: of an array onto the stream, of a norm to one or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.epilogue.rounding import rounded
from coda_jax.operators import norm_products
from coda_jax.operators.chain import Chain, row_spec, run_chain
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, in_row, row_flags, width_of
from coda_jax.operators.feed_forward import add_residual_sumsq
from coda_jax.operators.norm_products import (
    NormProduct,
    Sums,
    cotangents,
    ends_of,
    joined_sums,
    multiply,
    named,
    of_norm,
    one_or_parts,
    parts_of,
    with_rows_of,
)
from coda_jax.operators.stream import Stream, array
from coda_jax.primitives.derivative import Parts
from coda_jax.primitives.dtypes import check_floats, resolve_dtype
from coda_jax.primitives.mesh_types import constrained

PROJECTION_NAME = "norm_projection"


def project(
    x: jax.Array | Stream,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | Stream | None = None,
    dtype: Any = None,
    implementation: str = "auto",
) -> Stream:
    """x w + bias + residual, with the row sums of its squares for an RMSNorm.

        y = x w + bias + residual,   sumsq = sum_j y[..., j]^2     one product

    As the out-projection of attention makes the stream, which the next norm then need not read. y is rounded once; the
    sums are taken before. Backward dx = dy w^T and dw = x^T dy are each one product, and nothing but the arguments is
    kept.

    Args:
      x: (..., K), an array or a Stream.
      w: (K, N).
      bias: (N,).
      residual: (..., N), an array or a Stream. Where explicit mesh axes cut K in both x and w, y lies as it does.
      dtype: compute dtype, of the product's inputs; default the promotion of x and w.
      implementation: as in `gemm`.

    Returns:
      y (..., N) in the residual's dtype, without one in the compute dtype; its row sums of squares (...,) float32,
      through which no gradient flows.

    Raises:
      TypeError: x is a DeferredNorm, or an array or dtype not bfloat16, float16 or float32.
      ValueError: shapes that do not fit.
    """
    if isinstance(x, DeferredNorm):
        raise TypeError("project: x is a DeferredNorm; norm_projection applies a norm, and its .array() is an array")
    a, other = array(x), None if residual is None else array(residual)
    check_floats("project", x=a, w=w, bias=bias, residual=other)
    if w.ndim != 2 or a.ndim == 0 or a.shape[-1] != w.shape[0]:
        raise ValueError(f"project: x has shape {a.shape} and w {w.shape}; they must be (..., K) and (K, N)")
    for name, given, shape in (("bias", bias, w.shape[1:]), ("residual", other, (*a.shape[:-1], w.shape[1]))):
        if given is not None and given.shape != shape:
            raise ValueError(
                f"project: {name} has shape {given.shape}; beside x {a.shape} and w {w.shape} it must be {shape}"
            )
    dtype = resolve_dtype("project", dtype, a, w)
    is_row = a.ndim == 1
    if is_row:
        a, other = (None if of_row is None else jnp.expand_dims(of_row, 0) for of_row in (a, other))
    y, sumsq = multiply(
        a.astype(dtype),
        w.astype(dtype),
        other,
        bias,
        epilogue=add_residual_sumsq,
        out_dtypes=[dtype if other is None else other.dtype, jnp.float32],
        implementation=implementation,
        like=other,
    )
    return Stream(jnp.squeeze(y, 0), jnp.squeeze(sumsq, 0)) if is_row else Stream(y, sumsq)


def norm_projection(
    norm: DeferredNorm,
    w: jax.Array | Sequence[jax.Array],
    bias: jax.Array | Sequence[jax.Array] | None = None,
    *,
    dtype: Any = None,
    out_sharding: jax.P | Sequence[jax.P] | None = None,
    keep_weights: bool = False,
    implementation: str = "auto",
) -> tuple[Any, jax.Array]:
    """z = norm(x) w + bias, and x itself.

    The residual of the sub-layer should be the returned x: its cotangent is then added in the epilogue of the product
    that makes dx. The backward pass is two products and one elementwise pass over dz; see norm_products.py. Kept for it
    are x, its statistics, and z (named "norm_projection" for `jax.checkpoint` policies).

    Args:
      norm: of x (..., D).
      w: (D, N); or several (D, Ni), one product still, of which a mesh may cut each.
      bias: (N,), or as many (Ni,).
      dtype: compute dtype, and that of z; default the promotion of x and w.
      out_sharding: how z, or each of several, and its cotangent lie over the mesh of `jax.set_mesh`, as `mlp`'s
        hidden_sharding.
      keep_weights: as in `mlp`.
      implementation: as in `gemm`.

    Returns:
      z (..., N), or a tuple of as many as w; x (..., D).

    Raises:
      TypeError: norm is no DeferredNorm, or an array or dtype not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or a norm with a bias and no mean.
    """
    weights = parts_of(w)
    biases = (None,) * len(weights) if bias is None else parts_of(bias)
    if len(biases) != len(weights):
        raise ValueError(
            f"norm_projection: bias is {len(biases)} arrays; beside {len(weights)} weights it must be as many"
        )
    arrays: dict[str, Any] = {}
    for i, (part, of_part) in enumerate(zip(weights, biases, strict=True)):
        place = f"[{i}]" if len(weights) > 1 else ""
        arrays[f"w{place}"] = (part, (width_of("norm_projection", norm), part.shape[-1]))
        arrays[f"bias{place}"] = (of_part, part.shape[-1:])
    check_arrays("norm_projection", norm, arrays)
    dtype = resolve_dtype("norm_projection", dtype, norm.x, *weights)
    specs: list[Any] = list(out_sharding) if isinstance(out_sharding, tuple | list) else [out_sharding] * len(weights)
    chain = _NormProjection(
        ends=ends_of(weights),
        dtype=dtype,
        specs=[row_spec(spec, norm) for spec in specs],
        keep_weights=keep_weights,
        implementation=implementation,
    )
    arguments = [norm, one_or_parts(weights), None if bias is None else one_or_parts(biases)]
    *zs, x = run_chain("norm_projection", chain, arguments, row_flags(arguments))
    return one_or_parts(zs), x


@dataclasses.dataclass(frozen=True)
class _NormProjection(Chain):
    """`norm_projection` of a norm of x (..., D), forward and backward: what it is beside its arrays.

    Attributes:
      ends: where the columns of each z but the last end.
      dtype: compute dtype.
      specs: how each z lies.
      keep_weights: whether w with the norm's scale is kept for the backward pass.
      implementation: as in `gemm`.
    """

    ends: list[int]
    dtype: Any
    specs: list[Any]
    keep_weights: bool
    implementation: str

    def products(self, norm: DeferredNorm, w: Parts, bias: Parts | None, *, keep: bool) -> Any:
        """Each z, and x; beside them, if asked for, what `backward` takes."""
        (x, *arrays), of_z = norm_products.factors(norm, w, bias, self.dtype, keep_weights=self.keep_weights)
        zs = multiply(
            with_rows_of(x, self.specs[0]),
            *arrays,
            epilogue=of_norm(named("norm_shift", _shifted, ends=self.ends)),
            out_dtypes=[self.dtype] * len(self.specs),
            implementation=self.implementation,
        )
        zs = [checkpoint_name(constrained(z, spec), PROJECTION_NAME) for z, spec in zip(zs, self.specs, strict=True)]
        outputs = [*zs, norm.x]
        return (outputs, (of_z, zs)) if keep else outputs

    def backward(self, kept: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, ...]:
        (of_z, zs), (*dzs, dresidual) = kept, cotangents
        if all(dz is None for dz in dzs):
            return of_z.norm.cotangent(dresidual), None, None
        dzs = [jnp.zeros_like(z) if dz is None else dz for z, dz in zip(zs, dzs, strict=True)]
        dzs = [constrained(dz, spec) for dz, spec in zip(dzs, self.specs, strict=True)]
        ts, sums = _cotangents(of_z, zs, dzs, self.ends, self.dtype)
        ts = one_or_parts([constrained(t, spec) for t, spec in zip(parts_of(ts), self.specs, strict=True)])
        return norm_products.backward(of_z, ts, sums, dresidual, implementation=self.implementation)

    def with_batch(self, size: Any) -> _NormProjection | None:
        return self if all(spec is None for spec in self.specs) else None

    def arguments(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        of_z, _ = kept
        return of_z.norm, of_z.w, of_z.bias


def _shifted(u: jax.Array, shift: jax.Array | None, *, ends: list[int]) -> Any:
    z = u if shift is None else u + shift[None, :]
    return jnp.split(z, ends, axis=1) if ends else z


def _cotangents(
    of_z: NormProduct, zs: Sequence[jax.Array], dzs: Sequence[jax.Array], ends: list[int], dtype: Any
) -> tuple[Parts, Sums]:
    """t, and the sums, of parts of z that are kept rounded."""
    t_scale, mean, column_sums, shift = of_z.of_cotangents(dtype)

    def of_part(dz: jax.Array, z: jax.Array, column_sums: Any, shift: Any) -> tuple[jax.Array, Sums]:
        dz, z = dz.astype(jnp.float32), z.astype(jnp.float32)
        u = z if shift is None else z - in_row(shift, z)
        t, sums = cotangents(dz, u, t_scale, mean, column_sums, shift, round_t=lambda t: rounded(t, dtype))
        return t.astype(dtype), sums

    def apart(vector: jax.Array | None) -> list[Any]:
        return [vector] if not ends else [None] * len(zs) if vector is None else jnp.split(vector, ends)

    ts, sums = zip(*map(of_part, dzs, zs, apart(column_sums), apart(shift)), strict=True)
    return one_or_parts(ts), joined_sums(sums)
