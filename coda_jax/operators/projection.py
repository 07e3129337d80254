"""A projection of a norm, or several, with bias: one product forward and two backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import norm_products
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, mean_and_rstd, width_of
from coda_jax.operators.norm_products import ends_of, joined_cotangents, one_or_parts, parts_of
from coda_jax.primitives.arguments import resolve_dtype
from coda_jax.primitives.product import Parts
from coda_jax.primitives.reverse_mode import differentiable

PROJECTION_NAME = "norm_projection"


def norm_projection(
    norm: DeferredNorm,
    w: jax.Array | Sequence[jax.Array],
    bias: jax.Array | Sequence[jax.Array] | None = None,
    *,
    dtype: Any = None,
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
    ends = ends_of(weights)

    def project(norm: DeferredNorm, w: Parts, bias: Any) -> tuple[list[jax.Array], norm_products.FoldedWeight]:
        def norm_shift(u: jax.Array, shift: jax.Array | None) -> Any:
            z = u if shift is None else u + shift[None, :]
            return jnp.split(z, ends, axis=1) if ends else z

        zs, weight = norm_products.multiply_normalized(
            norm,
            w,
            bias,
            epilogue=norm_shift,
            dtype=dtype,
            out_dtypes=[dtype] * (len(ends) + 1),
            implementation=implementation,
        )
        return [checkpoint_name(z, PROJECTION_NAME) for z in zs], weight

    def run(norm: DeferredNorm, w: Parts, bias: Any) -> list[jax.Array]:
        return [*project(norm, w, bias)[0], norm.x]

    def forward(norm: DeferredNorm, w: Parts, bias: Any) -> tuple[list[jax.Array], Any]:
        zs, weight = project(norm, w, bias)
        return [*zs, norm.x], (norm, w, bias, zs, weight.column_sums, weight.shift)

    def backward(kept: Any, outputs: list[jax.Array]) -> tuple[Any, ...]:
        norm, w, bias, zs, column_sums, shift = kept
        *dzs, dresidual = outputs
        dzs = [dz.astype(jnp.float32) for dz in dzs]
        each = zip(dzs, zs, _at(column_sums, ends), _at(shift, ends), strict=True)
        of_z = joined_cotangents([_cotangents(norm, dtype, *of_part) for of_part in each])
        dshifts = None if shift is None else [jnp.sum(dz, axis=range(dz.ndim - 1)) for dz in dzs]
        dshift = None if dshifts is None else jnp.concatenate(dshifts) if ends else dshifts[0]
        dnorm, dw = norm_products.backward(of_z, norm, w, dshift, dresidual, implementation=implementation)
        if bias is None or dshifts is None:
            return dnorm, dw, None
        dbias = [dz.astype(part.dtype) for dz, part in zip(dshifts, parts_of(bias), strict=True)]
        return dnorm, dw, one_or_parts(dbias)

    arguments = norm_products.vary_alike(norm, one_or_parts(weights), None if bias is None else one_or_parts(biases))
    *zs, x = differentiable("norm_projection", run, forward, backward)(*arguments)
    return one_or_parts(zs), x


def _at(vector: jax.Array | None, ends: list[int]) -> list[Any]:
    """A vector of all columns apart at `ends`."""
    return [None] * (len(ends) + 1) if vector is None else jnp.split(vector, ends) if ends else [vector]


def _cotangents(
    norm: DeferredNorm, dtype: Any, dz: jax.Array, z: jax.Array, column_sums: Any, shift: Any
) -> norm_products.Cotangents:
    """Of one of the parts of z, which are kept rounded."""
    z = z.astype(jnp.float32)
    mean, rstd = mean_and_rstd(norm)
    found = norm_products.cotangents(
        dz,
        z if shift is None else z - norm_products.in_row(shift, z),
        norm_products.scale_of_t(rstd, dtype),
        norm_products.mean_in_x(mean, dtype),
        column_sums,
        lambda t: norm_products.rounded(t, dtype),
    )
    return found._replace(t=found.t.astype(dtype))
