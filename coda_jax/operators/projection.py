"""Projections, each one product forward and two backward: of an array onto the stream, of a norm to one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.graph.author import Value
from coda_jax.graph.lines import concatenate, fused, product
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, row_flags, width_of
from coda_jax.operators.feed_forward import add_residual_sumsq
from coda_jax.operators.multiply import multiply
from coda_jax.operators.parts import ends_of, one_or_parts, parts_of
from coda_jax.operators.run import norm_value, row_spec, run_operator
from coda_jax.operators.stream import Stream, array
from coda_jax.primitives.dtypes import check_floats, resolve_dtype

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

    The out-projection of attention makes the stream so, and the next norm need not read it. y is rounded once, after
    the sums. Backward dx = dy w^T and dw = x^T dy are each one product, and nothing but the arguments is kept.

    Args:
      x: (..., K), an array or a Stream.
      w: (K, N).
      bias: (N,).
      residual: (..., N), an array or a Stream. Where explicit mesh axes shard K in both x and w, y is sharded as it.
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
    for name, argument, shape in (("bias", bias, w.shape[1:]), ("residual", other, (*a.shape[:-1], w.shape[1]))):
        if argument is not None and argument.shape != shape:
            raise ValueError(
                f"project: {name} has shape {argument.shape}; beside x {a.shape} and w {w.shape} it must be {shape}"
            )
    dtype = resolve_dtype("project", dtype, a, w)
    is_row = a.ndim == 1
    if is_row:
        a, other = (None if row is None else jnp.expand_dims(row, 0) for row in (a, other))
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
) -> Any:
    """z = norm(x) w + bias.

    The backward pass is two products and one elementwise pass over dz; see graph/norm.py. Kept for it are x, its
    statistics, and of an RMSNorm z (named "norm_projection" for `jax.checkpoint` policies). Where x is also the
    sub-layer's residual, its two cotangents are added in a pass; in a `coda.block` of both an epilogue adds them.

    Args:
      norm: of x (..., D).
      w: (D, N); or several (D, Ni), still one product, of which a mesh may shard each.
      bias: (N,), or as many (Ni,).
      dtype: compute dtype, and that of z; default the promotion of x and w.
      out_sharding: the sharding of z, or of each of several, and of its cotangent over the mesh of `jax.set_mesh`, as
        `mlp`'s hidden_sharding.
      keep_weights: as in `mlp`.
      implementation: as in `gemm`.

    Returns:
      z (..., N), or a tuple of as many as w.

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
    for i, (piece, piece_bias) in enumerate(zip(weights, biases, strict=True)):
        place = f"[{i}]" if len(weights) > 1 else ""
        arrays[f"w{place}"] = (piece, (width_of("norm_projection", norm), piece.shape[-1]))
        arrays[f"bias{place}"] = (piece_bias, piece.shape[-1:])
    check_arrays("norm_projection", norm, arrays)
    dtype = resolve_dtype("norm_projection", dtype, norm.x, *weights)
    specs: list[Any] = list(out_sharding) if isinstance(out_sharding, tuple | list) else [out_sharding] * len(weights)
    bias_pieces = None if bias is None else tuple(biases)
    arguments = [norm, tuple(weights), bias_pieces]
    zs = run_operator(
        "norm_projection",
        _norm_projection,
        arguments,
        row_flags(arguments),
        dtype=dtype,
        implementation=implementation,
        out_sharding=tuple(row_spec(spec, norm) for spec in specs),
        keep_weights=keep_weights,
    )
    return one_or_parts(zs)


def _norm_projection(
    norm: Any,
    weights: tuple[Value, ...],
    biases: tuple[Value, ...] | None,
    *,
    out_sharding: Sequence[jax.P | None],
    keep_weights: bool,
) -> tuple[Value, ...]:
    """The array z of each weight."""
    z = product(norm_value(norm), weights, keep_weights=keep_weights)
    ends = ends_of(weights)
    if biases is not None:
        bias = concatenate(biases) if len(biases) > 1 else biases[0]
        zs = fused("norm_shift", _shifted, z, bias, inverse=_not_shifted, ends=ends)
    else:
        zs = fused("norm_split", _shifted, z, None, inverse=_not_shifted, ends=ends) if ends else [z]
    each = zip(zs, out_sharding, strict=True)
    return tuple(z.named(PROJECTION_NAME).constrained(spec) for z, spec in each)


def _shifted(z: jax.Array, bias: jax.Array | None, *, ends: Sequence[int]) -> list[jax.Array]:
    """Epilogue: z + bias, split at these columns."""
    z = z if bias is None else z + bias[None, :]
    return jnp.split(z, ends, axis=1) if ends else [z]


def _not_shifted(*arrays: jax.Array, ends: Sequence[int]) -> jax.Array:
    """z again, from the arrays that `_shifted` gives, and the bias."""
    zs, bias = arrays[: len(ends) + 1], arrays[len(ends) + 1 :]
    z = jnp.concatenate(zs, axis=1) if ends else zs[0]
    return z - bias[0][None, :] if bias else z
