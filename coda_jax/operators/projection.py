"""A projection of a norm, or several, with bias: one product forward and two backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import norm_products
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, in_row, width_of
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
    rounded,
    with_rows_of,
)
from coda_jax.primitives.arguments import resolve_dtype
from coda_jax.primitives.mesh_types import constrained
from coda_jax.primitives.product import Parts

PROJECTION_NAME = "norm_projection"


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
    ends = ends_of(weights)
    specs: list[Any] = list(out_sharding) if isinstance(out_sharding, tuple | list) else [out_sharding] * len(weights)

    def products(norm: DeferredNorm, w: Parts, bias: Parts | None, *, keep: bool) -> Any:
        (x, *arrays), of_z = norm_products.factors(norm, w, bias, dtype, keep_weights=keep_weights)
        zs = multiply(
            with_rows_of(x, specs[0]),
            *arrays,
            epilogue=of_norm(named("norm_shift", _shifted, ends=ends)),
            out_dtypes=[dtype] * len(weights),
            implementation=implementation,
        )
        zs = [checkpoint_name(constrained(z, spec), PROJECTION_NAME) for z, spec in zip(zs, specs, strict=True)]
        outputs = [*zs, norm.x]
        return (outputs, (of_z, zs)) if keep else outputs

    def backward(kept: Any, outputs: list[jax.Array]) -> tuple[Any, ...]:
        (of_z, zs), (*dzs, dresidual) = kept, outputs
        dzs = [constrained(dz, spec) for dz, spec in zip(dzs, specs, strict=True)]
        ts, sums = _cotangents(of_z, zs, dzs, ends, dtype)
        ts = one_or_parts([constrained(t, spec) for t, spec in zip(parts_of(ts), specs, strict=True)])
        return norm_products.backward(of_z, ts, sums, dresidual, implementation=implementation)

    arguments = norm_products.vary_alike(norm, one_or_parts(weights), None if bias is None else one_or_parts(biases))
    *zs, x = norm_products.chain("norm_projection", products, backward)(*arguments)
    return one_or_parts(zs), x


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
