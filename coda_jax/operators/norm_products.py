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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.rounding import ROUNDED_DTYPES, round_to
from coda_jax.operators.deferred_norm import DeferredNorm, mean_and_rstd
from coda_jax.primitives.mesh_types import explicit_sharding, vary, varying_axes
from coda_jax.primitives.product import Options, Parts, product


def parts_of(x: Parts) -> tuple[jax.Array, ...]:
    """The arrays that one is joined of; of one array it alone."""
    parts: tuple[jax.Array, ...] = tuple(x) if isinstance(x, Sequence) else (x,)
    return parts


def one_or_parts(arrays: Sequence[Any]) -> Any:
    """What `parts_of` was given."""
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def ends_of(parts: Sequence[jax.Array]) -> list[int]:
    """Where the columns of all but the last end, as `jnp.split` takes it."""
    return [sum(x.shape[-1] for x in parts[: i + 1]) for i in range(len(parts) - 1)]


def vary_alike(*trees: Any) -> list[Any]:
    """The trees of arrays, all varying over the same manual mesh axes."""
    leaves, structure = jax.tree.flatten(list(trees))
    return jax.tree.unflatten(structure, vary(varying_axes(*leaves), *leaves))


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
) -> list[jax.Array]:
    """The flat outputs of epilogue(a @ b, *operands) in these dtypes, sharded as `like` over explicit mesh axes.

    The epilogue gets the operands that are None as None. Arrays may have any number of axes, and a, b and tiles be
    several arrays, as `product` says.
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
    )
    dtypes = [np.dtype(dtype) for dtype in out_dtypes]
    return product(a, b, [x for x in operands if x is not None], given, lambda _: dtypes, options)[0]


class FoldedWeight(NamedTuple):
    """What the product with a normalised x needs of the parameters.

    Attributes:
      w: (D, N) or (D, 2, F), W'; or several (D, Ni), as the weight.
      column_sums: (N,) float32, those of W' where there is a mean.
      shift: (N,) float32, what the two biases add to z.
    """

    w: Any
    column_sums: jax.Array | None
    shift: jax.Array | None


def fold_norm(norm: DeferredNorm, w: Parts, bias: Parts | None, dtype: Any) -> FoldedWeight:
    """W', its column sums and the shift, each one reduction in the pass that casts w (D, N) or (D, 2, F)."""
    weights = parts_of(w)
    scaled = [scaled_weight(norm.scale, part, dtype) for part in weights]
    sums = None
    if norm.mean is not None:
        sums = _columns([jnp.sum(rounded(part.astype(jnp.float32), dtype), axis=0) for part in scaled])
    shift = None if bias is None else _columns([part.astype(jnp.float32) for part in parts_of(bias)])
    if norm.bias is not None:
        of_bias = norm.bias
        of_norm = _columns([jnp.sum(_beside(of_bias, part) * part.astype(jnp.float32), axis=0) for part in weights])
        shift = of_norm if shift is None else of_norm + shift
    return FoldedWeight(one_or_parts(scaled), sums, shift)


def _columns(parts: Sequence[jax.Array]) -> jax.Array:
    """(N,) of what is there for each column of one weight or of several."""
    vectors = [part.reshape(-1) for part in parts]
    return jnp.concatenate(vectors) if len(vectors) > 1 else vectors[0]


def scaled_weight(scale: jax.Array, w: jax.Array, dtype: Any, *, transpose: bool = False) -> jax.Array:
    """W' in the compute dtype, (D, ...), or with `transpose` (N, D), as w is; a float32 product, rounded once."""
    of_w = scale.astype(jnp.float32) if transpose else _beside(scale, w)
    return (of_w * w.astype(jnp.float32)).astype(dtype)


def _beside(vector: jax.Array, w: jax.Array) -> jax.Array:
    """A vector (D,) float32 beside w (D, ...)."""
    return jnp.expand_dims(vector.astype(jnp.float32), range(1, w.ndim))


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 values rounded to `dtype`, still float32; XLA may drop a pair of conversions, but not this."""
    dtype = np.dtype(dtype)
    return round_to(x, dtype).astype(jnp.float32) if dtype in ROUNDED_DTYPES else x


def multiply_normalized(
    norm: DeferredNorm,
    w: Parts,
    bias: Parts | None,
    *operands: jax.Array,
    epilogue: Callable[..., Any],
    dtype: Any,
    **options: Any,
) -> tuple[list[jax.Array], FoldedWeight]:
    """The product x W' with epilogue(u, shift or None, *operands), and the parameters folded for it.

    Args:
      norm, w, bias: u + shift is norm(x) w + bias.
      dtype: compute dtype.
      **options: of `multiply`.
    """

    def of_normalized(acc: jax.Array, rstd: Any, mean: Any, column_sums: Any, shift: Any, *operands: Any) -> Any:
        return epilogue((acc if mean is None else acc - mean * column_sums[None, :]) * rstd, shift, *operands)

    of_normalized.__name__ = epilogue.__name__
    mean, rstd = mean_and_rstd(norm)
    weight = fold_norm(norm, w, bias, dtype)
    arrays = multiply(
        norm.x.astype(dtype),
        weight.w,
        rstd,
        mean,
        weight.column_sums,
        weight.shift,
        *operands,
        epilogue=of_normalized,
        halves=parts_of(w)[0].ndim == 3,
        **options,
    )
    return arrays, weight


def scale_of_t(rstd: jax.Array, dtype: Any) -> jax.Array:
    """What dz is multiplied with to make t: rstd, but 1 in float16."""
    return jnp.ones_like(rstd, shape=()) if dtype == jnp.float16 else rstd


def mean_in_x(mean: jax.Array | None, dtype: Any) -> jax.Array | None:
    """The mean that is in x where x is multiplied with t: not in float16."""
    return None if dtype == jnp.float16 else mean


class Cotangents(NamedTuple):
    """What `backward` takes of dz: t (M, N), and sums of dz and t along rows and columns, float32.

    Attributes:
      t: in the compute dtype, `scale_of_t` times dz, (..., N) or (..., 2, F), or one for each of several weights.
      s: (...,), row sums of dz * u.
      centring: (...,), row sums of t * cs, of a LayerNorm.
      mean_t: (N,), column sums of mean * t, where x is multiplied with its mean in it.
    """

    t: Any
    s: jax.Array
    centring: jax.Array | None = None
    mean_t: jax.Array | None = None


def cotangents(
    dz: jax.Array, u: jax.Array, t_scale: jax.Array, mean: Any, column_sums: Any, round_t: Callable[[Any], Any]
) -> Cotangents:
    """`Cotangents` from dz and u (..., N) float32; a LayerNorm sums the rounded t, which is what is multiplied."""
    t = t_scale * dz
    if column_sums is not None:
        t = round_t(t)
    s = jnp.sum(dz * u, axis=-1)
    centring = None if column_sums is None else jnp.sum(t * in_row(column_sums, t), axis=-1)
    return Cotangents(t, s, centring, None if mean is None else jnp.sum(mean * t, axis=range(t.ndim - 1)))


def joined_cotangents(parts: Sequence[Cotangents]) -> Cotangents:
    """Of all columns, from those of each weight's."""
    if len(parts) == 1:
        return parts[0]
    centring = [part.centring for part in parts if part.centring is not None]
    mean_t = [part.mean_t for part in parts if part.mean_t is not None]
    return Cotangents(
        tuple(part.t for part in parts),
        sum(part.s for part in parts[1:]) + parts[0].s,
        sum(centring[1:]) + centring[0] if centring else None,
        jnp.concatenate(mean_t) if mean_t else None,
    )


def in_row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A vector (N,) beside x (..., N)."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


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
    of_z: Cotangents,
    norm: DeferredNorm,
    w: Parts,
    dshift: jax.Array | None,
    dresidual: jax.Array | None,
    *,
    implementation: str,
) -> tuple[DeferredNorm, Any]:
    """Cotangents of the norm, x among it, and of w, through z, and through x itself where dresidual is.

    Args:
      of_z: the cotangents of z.
      norm: of x (..., D).
      w: (D, N) or (D, 2, F), or several, as going forward.
      dshift: (N,) float32, column sums of dz; needed where the norm has a bias.
      dresidual: (..., D), added to dx, or None.
    """
    x, t, weights = norm.x, parts_of(of_z.t), parts_of(w)
    dtype = t[0].dtype
    mean, rstd = mean_and_rstd(norm)
    # W' is made anew: XLA would keep the forward's alive, a copy of all weights.
    scale, same = lax.optimization_barrier((norm.scale, weights))
    (dx,) = multiply(
        of_z.t,
        one_or_parts([scaled_weight(scale, part, dtype) for part in same]),
        x,
        mean,
        jnp.square(rstd) * (of_z.s[..., None] / x.shape[-1]),
        None if of_z.centring is None else of_z.centring[..., None] / x.shape[-1],
        dresidual,
        rstd if dtype == jnp.float16 else None,
        epilogue=norm_backward,
        out_dtypes=[x.dtype],
        implementation=implementation,
        transpose_b=True,
        k_axes=weights[0].ndim - 1,
        like=x,
    )
    left = x.astype(dtype)
    if dtype == jnp.float16:
        wide = x.astype(jnp.float32)
        left = (rstd * (wide if mean is None else wide - mean)).astype(dtype)
    dw, sums = _split(
        multiply(
            left,
            of_z.t,
            w,
            norm.scale[:, None],
            of_z.mean_t,
            None if norm.bias is None else norm.bias[:, None],
            None if norm.bias is None else dshift,
            epilogue=_apart(weights),
            out_dtypes=[part.dtype for part in weights] + [jnp.float32] * (1 + (norm.bias is not None)),
            implementation=implementation,
            transpose_a=True,
            k_axes=x.ndim - 1,
            like=weights[0],
        ),
        len(weights),
    )
    dscale, *dbias = sums
    dnorm = DeferredNorm(
        dx,
        jnp.zeros_like(norm.sumsq),
        dscale.astype(norm.scale.dtype),
        None if norm.mean is None else jnp.zeros_like(norm.mean),
        None if norm.bias is None else dbias[0].astype(norm.bias.dtype),
        norm.epsilon,
    )
    return dnorm, one_or_parts(dw)


def _apart(weights: Sequence[jax.Array]) -> Callable[..., Any]:
    """`weight_backward`, with the cotangents of several weights apart."""
    if len(weights) == 1:
        return weight_backward

    def weights_backward(acc: jax.Array, *operands: Any) -> list[jax.Array]:
        return weight_backward(acc, *operands, ends=ends_of(weights))

    return weights_backward


def _split(arrays: list[jax.Array], count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    return arrays[:count], arrays[count:]


def bias_cotangent(dz_sums: jax.Array | None, bias: jax.Array | None) -> jax.Array | None:
    """Column sums of dz as the cotangent of a bias, if there is one."""
    return None if bias is None or dz_sums is None else dz_sums.astype(bias.dtype)
