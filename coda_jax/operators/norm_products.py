"""The products around a deferred norm, forward and backward; after CODA (arXiv 2605.19269).

RMSNorm is LayerNorm without a mean. With the rows' mean and their sums of (centred) squares known:

    rstd[m] = rsqrt(sumsq[m] / D + epsilon),   sumsq[m] = sum_j (x[m, j] - mean[m])^2
    z = norm(x) W + b = u + shift,   u = rstd * (x W' - mean * cs)
    W' = cast(scale[:, None] * W),   cs = column sums of the rounded W',   shift = norm_bias W + b

The scale is folded where W is cast anyway. Backward, from dz, with t = cast(rstd * dz) and
s[m] = sum_n dz[m, n] u[m, n], which the epilogue that makes dz also computes:

    dx = t W'^T - (sum_n t cs) / D - (x - mean) * (rstd^2 s / D)  [+ the residual stream's own cotangent]
    G = x^T t - sum_m mean * t;   dW = scale[:, None] * G + norm_bias[:, None] * sum_m dz
    dscale[j] = sum_n W[j, n] G[j, n];   dnorm_bias[j] = sum_n W[j, n] sum_m dz[m, n];   db = sum_m dz

So the gradient of a norm needs no pass over rows of its own: s is a row sum in the epilogue that makes t, and the
terms with s are added in the epilogue of t W'^T.

The mean is subtracted as the products have added it: cs sums the rounded W', and mean * t the rounded t. With the exact
ones their rounding errors, times mean / std, would stay. x is multiplied with its mean in it: a float32 stream that is
rounded to 16 bits for the product loses the digits that its mean takes. The epilogue that makes x sees one tile of a
row; so a LayerNorm's mean and sumsq are a pass of their own over x, where an RMSNorm's sumsq comes with x.

In float16 rstd, 5e-5 for a stream of 2e4, would take t out of the range where it has all its digits, and the weight's
gradient with it. There t = cast(dz), rstd multiplies the first product, and G = ((x - mean) * rstd)^T t with the
normalised x formed in a pass of its own. In float16 these may overflow, beyond 65504: x itself, the cotangents as in
any float16 program, and u, whose absolute value is below sqrt(D) times the norm of a column of W'.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import has_narrow_range
from coda_jax.epilogue.groups import GroupOffsets
from coda_jax.epilogue.rounding import rounded
from coda_jax.operators.deferred_norm import DeferredNorm, in_row, mean_and_rstd
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.derivative import Options, Parts, product
from coda_jax.primitives.mesh_types import constrained, explicit_sharding, placed, placed_alike


def parts_of(x: Parts) -> tuple[jax.Array, ...]:
    """The arrays that x is joined of; one array is its only part."""
    parts: tuple[jax.Array, ...] = tuple(x) if isinstance(x, Sequence) else (x,)
    return parts


def one_or_parts(arrays: Sequence[Any]) -> Any:
    """Undoes `parts_of`: one array as it is, several as a tuple."""
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def ends_of(parts: Sequence[jax.Array]) -> list[int]:
    """The column at which each part but the last ends, as `jnp.split` takes it."""
    return [sum(x.shape[-1] for x in parts[: i + 1]) for i in range(len(parts) - 1)]


def named(name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """function(..., **options) under a name that messages and tables show."""

    def with_options(*arrays: Any) -> Any:
        return function(*arrays, **options)

    with_options.__name__ = name
    return with_options


def with_rows_of(x: jax.Array, spec: jax.P | None) -> jax.Array:
    """x (..., D), its rows lying as those of a result with this PartitionSpec: what cuts columns there cuts no rows."""
    return constrained(x, None if spec is None or x.ndim == 0 else jax.P(*spec[: x.ndim - 1], None))


def multiply(
    a: Parts,
    b: Parts,
    *operands: Parts | None,
    epilogue: Callable[..., Any] | None = None,
    out_dtypes: Sequence[Any],
    implementation: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    k_axes: int = 1,
    halves: bool = False,
    input_output_aliases: tuple[tuple[int, int], ...] = (),
    like: jax.Array | None = None,
    group_sizes: jax.Array | GroupOffsets | None = None,
) -> list[jax.Array]:
    """The flat outputs of epilogue(a @ b, *operands) in these dtypes, sharded as `like` over explicit mesh axes.

    The epilogue gets the operands that are None as None. Arrays may have any number of axes, and a, b and tiles be
    several arrays, as `product` says. With group_sizes (G,) int32, or their offsets, the rows of a are of groups: each
    has its own matrix of b, and with transpose_a, where rows are summed over, its own result.
    """
    given = epilogue
    if epilogue is not None and any(x is None for x in operands):
        present = [x is not None for x in operands]

        def given(acc: jax.Array, *arrays: jax.Array) -> Any:
            remaining = iter(arrays)
            return epilogue(acc, *(next(remaining) if is_present else None for is_present in present))

        given.__name__ = epilogue.__name__
    options = Options(
        transpose_a,
        transpose_b,
        implementation=implementation,
        k_axes=k_axes,
        halves=halves,
        input_output_aliases=input_output_aliases,
        out_sharding=None if like is None else explicit_sharding(like),
        ragged=None if group_sizes is None else Dimension.K if transpose_a else Dimension.M,
    )
    dtypes = [np.dtype(dtype) for dtype in out_dtypes]
    return product(a, b, [x for x in operands if x is not None], given, lambda _: dtypes, options, group_sizes)[0]


class NormProduct(NamedTuple):
    """norm(x) w + bias = u + shift: what its cotangents need of going forward.

    Attributes:
      norm: of x (..., D).
      w: (D, N) or (D, 2, F); or several (D, Ni).
      bias: (N,), or as many as w; None for none.
      column_sums: (N,) float32, those of W' where there is a mean.
      shift: (N,) float32, what the two biases add.
      scaled: W' as w is; None where it is made anew for them.
    """

    norm: DeferredNorm
    w: Any
    bias: Any
    column_sums: jax.Array | None
    shift: jax.Array | None
    scaled: Any

    def of_cotangents(self, dtype: Any) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
        """`cotangents` takes them after dz and u: t_scale (..., 1) or (), mean (..., 1), column_sums and shift (N,)."""
        mean, rstd = mean_and_rstd(self.norm)
        if has_narrow_range(dtype):  # t is cast(dz), and x is multiplied with it when it is normalised
            mean, rstd = None, jnp.ones_like(rstd, shape=())
        return rstd, mean, self.column_sums, self.shift


def factors(
    norm: DeferredNorm, w: Parts, bias: Parts | None, dtype: Any, *, keep_weights: bool
) -> tuple[tuple[Any, ...], NormProduct]:
    """The arguments of `multiply` for an epilogue that is `of_norm`, and the `NormProduct` to keep.

    W', its column sums and the shift are each one reduction in the pass that casts w (D, N) or (D, 2, F).
    """
    weights = parts_of(w)
    scaled = [scaled_weight(norm.scale, part, dtype) for part in weights]
    sums = None
    if norm.mean is not None:
        sums = _columns([jnp.sum(rounded(part.astype(jnp.float32), dtype), axis=0) for part in scaled])
    shift = None if bias is None else _columns([part.astype(jnp.float32) for part in parts_of(bias)])
    if norm.bias is not None:
        of_bias = norm.bias
        of_norm = _columns([jnp.sum(_beside(of_bias, part) * part.astype(jnp.float32), axis=0) for part in weights])
        shift = of_norm if shift is None else of_norm + placed(shift, explicit_sharding(of_norm))
    mean, rstd = mean_and_rstd(norm)
    arrays = (norm.x.astype(dtype), one_or_parts(scaled), rstd, mean, sums, shift)
    return arrays, NormProduct(norm, w, bias, sums, shift, one_or_parts(scaled) if keep_weights else None)


def of_norm(epilogue: Callable[..., Any]) -> Callable[..., Any]:
    """Epilogue of the product of `factors`: epilogue(u, shift or None, *operands)."""

    def of_normalized(acc: jax.Array, rstd: Any, mean: Any, column_sums: Any, shift: Any, *operands: Any) -> Any:
        return epilogue((acc if mean is None else acc - mean * column_sums[None, :]) * rstd, shift, *operands)

    of_normalized.__name__ = epilogue.__name__
    return of_normalized


def _columns(parts: Sequence[jax.Array]) -> jax.Array:
    """One vector (N,), from a vector for each weight."""
    vectors = [part.reshape(-1) for part in parts]
    return jnp.concatenate(placed_alike(vectors, 0)) if len(vectors) > 1 else vectors[0]


def scaled_weight(scale: jax.Array, w: jax.Array, dtype: Any, *, transpose: bool = False) -> jax.Array:
    """W' in the compute dtype, (D, ...), or with `transpose` (N, D), as w is; a float32 product, rounded once."""
    of_w = scale.astype(jnp.float32) if transpose else _beside(scale, w)
    return (of_w * w.astype(jnp.float32)).astype(dtype)


def _beside(vector: jax.Array, w: jax.Array) -> jax.Array:
    """A vector (D,) float32 beside w (D, ...)."""
    return jnp.expand_dims(vector.astype(jnp.float32), range(1, w.ndim))


class Sums(NamedTuple):
    """Float32 sums of dz and t along rows and columns, which `backward` takes beside t.

    Attributes:
      s: (...,), row sums of dz * u.
      centring: (...,), row sums of t * cs, of a LayerNorm.
      mean_t: (N,), column sums of mean * t, where x is multiplied with its mean in it.
      dshift: (N,), column sums of dz, where there is a shift.
    """

    s: Any
    centring: Any = None
    mean_t: Any = None
    dshift: Any = None

    @classmethod
    def structure(cls, t_scale: Any, mean: Any, column_sums: Any, shift: Any) -> Any:
        """The pytree of the sums that `cotangents` makes of these."""
        return jax.tree.structure(cls(t_scale, column_sums, mean, shift))


def cotangents(
    dz: jax.Array,
    u: jax.Array,
    t_scale: jax.Array,
    mean: Any,
    column_sums: Any,
    shift: Any,
    *,
    round_t: Callable[[Any], Any],
) -> tuple[jax.Array, Sums]:
    """t = t_scale * dz, and sums of both; dz and u are (..., N) float32.

    A LayerNorm sums the rounded t, which is what is multiplied.
    """
    t = t_scale * dz
    if column_sums is not None:
        t = round_t(t)
    rows = range(t.ndim - 1)
    return t, Sums(
        jnp.sum(dz * u, axis=-1),
        None if column_sums is None else jnp.sum(t * in_row(column_sums, t), axis=-1),
        None if mean is None else jnp.sum(mean * t, axis=rows),
        None if shift is None else jnp.sum(dz, axis=rows),
    )


def joined_sums(parts: Sequence[Sums]) -> Sums:
    """The sums over all columns, from the sums over each weight's columns."""
    s, centring, mean_t, dshift = ([x for x in of_all if x is not None] for of_all in zip(*parts, strict=True))
    return Sums(
        functools.reduce(operator.add, s),
        functools.reduce(operator.add, centring) if centring else None,
        _columns(mean_t) if mean_t else None,
        one_or_parts(dshift) if dshift else None,
    )


def norm_backward(
    acc: jax.Array, x: jax.Array, mean: Any, x_scale: jax.Array, drift: Any, dresidual: Any, rstd: Any
) -> jax.Array:
    """Epilogue of t W'^T: the norm's own terms and the residual's cotangent, added before the one rounding."""
    centred = acc if drift is None else acc - drift
    dx = (centred if rstd is None else centred * rstd) - (x if mean is None else x - mean) * x_scale
    return dx if dresidual is None else dx + dresidual


def weight_backward(
    acc: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    mean_t: Any = None,
    bias: Any = None,
    dshift: Any = None,
    *,
    ends: Sequence[int] = (),
) -> list[jax.Array]:
    """Epilogue of x^T t: the cotangents of the weight, apart at `ends`, and of the norm's parameters as row sums."""
    g = acc if mean_t is None else acc - mean_t[None, :]
    if bias is None:
        dw, sums = g * scale, [jnp.sum(g * w, axis=1)]
    else:
        dshift = dshift[None, :]
        dw, sums = g * scale + bias * dshift, [jnp.sum(g * w, axis=1), jnp.sum(w * dshift, axis=1)]
    return [*(jnp.split(dw, ends, axis=1) if ends else [dw]), *sums]


def backward(
    of_z: NormProduct, t: Parts, sums: Sums, dresidual: jax.Array | None, *, implementation: str
) -> tuple[DeferredNorm, Any, Any]:
    """Cotangents of the norm, x among it, of w and of the bias, through z, and through x itself where dresidual is.

    Args:
      of_z: z as the product that it is.
      t: in the compute dtype, (..., N) or (..., 2, F), or one for each of several weights.
      sums: of dz and t; its dshift is one array for each of the weights.
      dresidual: (..., D), added to dx, or None.
    """
    norm, w, bias, *_ = of_z
    x, weights, dtype = norm.x, parts_of(w), parts_of(t)[0].dtype
    mean, rstd = mean_and_rstd(norm)
    scaled = of_z.scaled
    if scaled is None:  # and without a barrier XLA would take the forward's
        scale, same = lax.optimization_barrier((norm.scale, weights))
        scaled = one_or_parts([scaled_weight(scale, part, dtype) for part in same])
    (dx,) = multiply(
        t,
        scaled,
        x,
        mean,
        jnp.square(rstd) * (sums.s[..., None] / x.shape[-1]),
        None if sums.centring is None else sums.centring[..., None] / x.shape[-1],
        dresidual,
        rstd if has_narrow_range(dtype) else None,
        epilogue=norm_backward,
        out_dtypes=[x.dtype],
        implementation=implementation,
        transpose_b=True,
        k_axes=weights[0].ndim - 1,
        like=x,
    )
    left = x.astype(dtype)
    if has_narrow_range(dtype):
        wide = x.astype(jnp.float32)
        left = (rstd * (wide if mean is None else wide - mean)).astype(dtype)
    is_one = len(weights) == 1
    of_bias = () if norm.bias is None else (norm.bias[:, None], _columns(parts_of(sums.dshift)))
    made = multiply(
        left,
        t,
        w,
        norm.scale[:, None],
        sums.mean_t,
        *of_bias,
        epilogue=weight_backward if is_one else named("weights_backward", weight_backward, ends=ends_of(weights)),
        out_dtypes=[part.dtype for part in weights] + [jnp.float32] * (2 if of_bias else 1),
        implementation=implementation,
        transpose_a=True,
        k_axes=x.ndim - 1,
        like=weights[0],
    )
    dbias = None if bias is None else jax.tree.map(lambda dz_sums, x: dz_sums.astype(x.dtype), sums.dshift, bias)
    dw, (dscale, *dnorm_bias) = made[: len(weights)], made[len(weights) :]
    dnorm = norm.cotangent(
        dx,
        dscale.astype(norm.scale.dtype),
        None if norm.bias is None else dnorm_bias[0].astype(norm.bias.dtype),
    )
    return dnorm, one_or_parts(dw), dbias
