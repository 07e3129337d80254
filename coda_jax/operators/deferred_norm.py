"""A norm that has not been applied: an array, its statistics, scale and bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.graph import normed
from coda_jax.graph.author import Value
from coda_jax.operators import pytree
from coda_jax.operators.stream import NotAnArray, Stream
from coda_jax.primitives.dtypes import check_floats
from coda_jax.primitives.mesh_types import explicit_cuts, with_sharding
from coda_jax.primitives.reverse_mode import differentiable


@pytree.register(meta_fields=("epsilon",))
@dataclasses.dataclass(frozen=True, repr=False)
class DeferredNorm(NotAnArray):
    """A norm of x that has not been applied: RMSNorm, or LayerNorm where there is a mean; a pytree.

        RMSNorm(x) = rstd * x * scale                            rstd = rsqrt(sumsq / D + epsilon)
        LayerNorm(x) = rstd * (x - mean) * scale + bias

    `rms_norm` and `layer_norm` make one. The operator that reads it applies the norm, in its products' epilogues except
    in the loss. x is multiplied without it, in the compute dtype: float16 overflows where x does, beyond 65504.

    As for a `Stream`, a linear map of the leaves is no map of the norm. `dataclasses.replace` refuses another x beside
    the statistics of this one; `with_array` gives the norm of the same values.

    Attributes:
      x: (..., D), the array that is normalised.
      sumsq: (...,) float32, row sums of x * x, or of (x - mean)^2. Like mean it is a cache of a function of x:
        gradients go to x.
      scale: (D,).
      mean: (...,) float32, the means of the rows of x; None for RMSNorm.
      bias: (D,) or None; only beside a mean.
      epsilon: added to the mean of squares, or to the variance.

    Raises:
      ValueError: `dataclasses.replace` of x or mean without what depends on it.
    """

    x: jax.Array
    sumsq: jax.Array
    scale: jax.Array
    mean: jax.Array | None = None
    bias: jax.Array | None = None
    epsilon: float = 1e-6
    _: dataclasses.KW_ONLY
    _replaced: dataclasses.InitVar[Any] = pytree.REPLACED

    def __post_init__(self, _replaced: Any) -> None:
        if _replaced is None:
            return
        other = [name for name in ("x", "mean") if getattr(self, name) is not getattr(_replaced, name)]
        stale = ["sumsq"] if other and self.sumsq is _replaced.sumsq else []
        if "x" in other and self.mean is not None and self.mean is _replaced.mean:
            stale.append("mean")
        if stale:
            raise ValueError(
                f"DeferredNorm: {' and '.join(other)} replaced, and {' and '.join(stale)} not, which would be that of "
                "another array; make the norm anew with coda.rms_norm or coda.layer_norm, or give the statistics too. "
                "The same values in another array: norm.with_array(x)"
            )

    def with_array(self, x: jax.Array) -> DeferredNorm:
        """The norm of the same values in another array, for instance a cast one; the statistics are kept."""
        return DeferredNorm(x, self.sumsq, self.scale, self.mean, self.bias, self.epsilon)

    def cotangent(self, x: Any, scale: Any = None, bias: Any = None) -> DeferredNorm:
        """The norm's cotangent, from those of its fields. The statistics, functions of x, have none."""
        none: Any = None
        return DeferredNorm(x, none, scale, none, bias, self.epsilon)

    @property
    def __jax_array__(self) -> NoReturn:
        """Refuses JAX's functions, which all ask for it. (A Stream has none: array + stream would ask for it.)"""
        self._refuse()

    def rstd(self) -> jax.Array:
        """rsqrt(sumsq / D + epsilon), (...,) float32; its gradient goes to x."""
        return _known(self.x, self.mean, self.sumsq, self.epsilon)[1]

    def array(self) -> jax.Array:
        """The normalised array itself, (..., D) in the dtype of x, for consumers that are not products."""
        x = self.x.astype(jnp.float32)
        scale = in_row(self.scale.astype(jnp.float32), x)
        if self.mean is None:
            y = self.rstd()[..., None] * x * scale
        else:  # not from the cached statistics: from x XLA makes statistics and result in one pass
            centred = x - jnp.mean(x, axis=-1, keepdims=True)
            rstd = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + float(self.epsilon))
            y = centred * rstd * scale
        return (y if self.bias is None else y + in_row(self.bias.astype(jnp.float32), x)).astype(self.x.dtype)


def in_row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A vector (N,) broadcast against x (..., N); where explicit mesh axes shard it, it is resharded as x's columns."""
    (mesh_axes,), columns = explicit_cuts(vector), explicit_cuts(x)[-1]
    if mesh_axes and mesh_axes != columns:
        mesh = jax.typeof(vector).sharding.mesh
        vector = with_sharding(vector, jax.sharding.NamedSharding(mesh, jax.P(columns or None)))
    return jnp.expand_dims(vector, range(x.ndim - 1))


@overload
def rms_norm(x: Value, scale: Any, *, epsilon: float = ...) -> Value: ...


@overload
def rms_norm(x: jax.Array | Stream, scale: jax.Array, *, epsilon: float = ...) -> DeferredNorm: ...


def rms_norm(x: jax.Array | Stream | Value, scale: Any, *, epsilon: float = 1e-6) -> Any:
    """x * rsqrt(mean(x * x, -1) + epsilon) * scale, applied by the product that reads it.

    Args:
      x: (..., D); a Stream brings its statistic, that of an array is computed. In a block a value, or a Stream of one;
        then the norm is a value too, which is applied where anything but a product reads it.
      scale: (D,).
      epsilon: added to the mean of squares.

    Raises:
      TypeError: an array that is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit.
    """
    untyped: Any = x
    stream: Any = Stream.of(untyped)
    if isinstance(stream.x, Value):
        return normed.rms_norm(stream.x, stream.sumsq, scale, epsilon)
    stream = stream.with_statistic()
    assert stream.sumsq is not None
    norm = DeferredNorm(stream.x, stream.sumsq, scale, epsilon=epsilon)
    check_arrays("rms_norm", norm)
    return norm


@overload
def layer_norm(x: Value, scale: Any, bias: Any = None, *, epsilon: float = ...) -> Value: ...


@overload
def layer_norm(
    x: jax.Array | Stream, scale: jax.Array, bias: jax.Array | None = None, *, epsilon: float = ...
) -> DeferredNorm: ...


def layer_norm(x: jax.Array | Stream | Value, scale: Any, bias: Any = None, *, epsilon: float = 1e-6) -> Any:
    """(x - mean(x, -1)) * rsqrt(var(x, -1) + epsilon) * scale + bias, applied by the product that reads it.

    Args:
      x: (..., D). The statistics are one pass over it; the variance is that of centred values. In a block as for
        `rms_norm`.
      scale, bias: (D,).
      epsilon: added to the variance.

    Raises:
      TypeError: an array that is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit.
    """
    untyped: Any = x
    array: Any = Stream.of(untyped).x
    if isinstance(array, Value):
        return normed.layer_norm(array, scale, bias, epsilon)
    check_floats("layer_norm", x=array)
    wide = lax.stop_gradient(array).astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1)
    sumsq = jnp.sum(jnp.square(wide - mean[..., None]), axis=-1)
    norm = DeferredNorm(array, sumsq, scale, mean, bias, epsilon)
    check_arrays("layer_norm", norm)
    return norm


def width_of(name: str, norm: DeferredNorm) -> int:
    """D; raises if an operator's argument is no norm."""
    if not isinstance(norm, DeferredNorm):
        raise TypeError(f"{name}: norm is {type(norm).__name__}; it must be a DeferredNorm, as coda.rms_norm makes one")
    return norm.shape[-1]


def check_arrays(
    name: str, norm: DeferredNorm, arrays: Mapping[str, tuple[jax.Array | None, tuple[int, ...]]] | None = None
) -> None:
    """Raises if an array of the norm, or of `arrays`, has another shape than is expected, or a dtype not accepted."""
    rows, width = norm.x.shape[:-1], norm.x.shape[-1:]
    expected = {
        "sumsq": (norm.sumsq, rows),
        "mean": (norm.mean, rows),
        "scale": (norm.scale, width),
        "bias of the norm": (norm.bias, width),
        **(arrays or {}),
    }
    check_shapes(name, norm.x, expected)
    if norm.mean is None and norm.bias is not None:
        raise ValueError(f"{name}: the norm has a bias, which is LayerNorm's, and no mean; without it it is an RMSNorm")


def check_shapes(name: str, x: jax.Array, expected: Mapping[str, tuple[jax.Array | None, tuple[int, ...]]]) -> None:
    """Raises if an array beside x has another shape than is expected, or one of them a dtype not accepted."""
    check_floats(name, x=x, **{argument: array for argument, (array, _) in expected.items()})
    for argument, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: {argument} has shape {array.shape}; beside x {x.shape} it must be {shape}")


def _known(
    x: jax.Array, mean: jax.Array | None, sumsq: jax.Array, epsilon: float
) -> tuple[jax.Array | None, jax.Array]:
    """mean and rsqrt(sumsq / D + epsilon) from known statistics, differentiated as functions of x (..., D).

    The cotangent of x is (dmean - (x - mean) * drstd * rstd**3) / D. Both have the shape of sumsq, (...,) or (..., 1).
    """

    def run(x: jax.Array, mean: jax.Array | None, sumsq: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        return mean, lax.rsqrt(sumsq / x.shape[-1] + float(epsilon))

    def forward(x: jax.Array, mean: jax.Array | None, sumsq: jax.Array) -> tuple[Any, Any]:
        mean, rstd = _known(x, mean, sumsq, epsilon)
        return (mean, rstd), (x, mean, rstd)

    return differentiable("the deferred norm", run, forward, _known_backward)(x, mean, sumsq)


def _known_backward(kept: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[jax.Array | None, ...]:
    (x, mean, rstd), (dmean, drstd) = kept, cotangents

    def column(rows: jax.Array) -> jax.Array:
        return rows if rows.ndim == x.ndim else rows[..., None]

    centred = x.astype(jnp.float32) if mean is None else x.astype(jnp.float32) - column(mean)
    dx = -centred * column(drstd * rstd**3)
    if mean is not None:
        dx += column(dmean)
    dx = (dx / x.shape[-1]).astype(x.dtype)
    return dx, None, None


def mean_and_rstd(norm: DeferredNorm) -> tuple[jax.Array | None, jax.Array]:
    """mean and rstd of the rows of x, (..., 1) float32; the mean of an RMSNorm is None. Their gradients go to x."""
    if norm.mean is None:
        return None, norm.rstd()[..., None]
    return _known(norm.x, norm.mean[..., None], norm.sumsq[..., None], norm.epsilon)


def row_flags(tree: Any) -> Any:
    """A flag for each array of a tree: True if it has the rows of x, as a norm's x and its statistics do."""

    def flags_of(x: Any) -> Any:
        if not isinstance(x, DeferredNorm):
            return False
        flags: Any = jax.tree.map(lambda _: True, x)
        return dataclasses.replace(flags, scale=False, bias=None if x.bias is None else False)

    return jax.tree.map(flags_of, tree, is_leaf=lambda x: isinstance(x, DeferredNorm))
