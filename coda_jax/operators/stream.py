"""The residual stream with its norm statistic, and its common base with a norm that is not applied yet."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from coda_jax.graph.author import Value
from coda_jax.graph.normed import sum_of_squares
from coda_jax.operators import pytree


class NotAnArray:
    """An object that holds an array and is none: flax's own modules and jax.numpy raise an error that says so."""

    x: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype

    @property
    def ndim(self) -> int:
        return self.x.ndim

    def array(self) -> jax.Array:
        raise NotImplementedError

    def _refuse(self) -> NoReturn:
        raise TypeError(f"got a {type(self).__name__} of shape {self.shape} for an array: give its .array()")

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        """NumPy and jnp.asarray ask for this."""
        self._refuse()

    def __repr__(self) -> str:
        # Without values: JAX quotes it where it refuses a Stream.
        fields = (f"{field.name}={_described(getattr(self, field.name))}" for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(fields)}; its array is .array())"


def _described(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return repr(x)


class _StatisticKey(GetAttrKey):
    """The key of a missing statistic, which JAX names in its messages where a statistic was expected."""

    def __str__(self) -> str:
        return f".{self.name} (absent: Stream.with_statistic() computes it)"


def _key(stream: Any, name: str) -> GetAttrKey:
    return _StatisticKey(name) if getattr(stream, name) is None else GetAttrKey(name)


@pytree.register(key=_key)
@dataclasses.dataclass(frozen=True, repr=False)
class Stream(NotAnArray):
    """The residual stream and the row sums of its squares, a pytree.

    The product that makes `x` sums its squares in the epilogue, from the values before they are rounded, so the
    RMSNorm that follows needs no pass over `x`. `sumsq` is a cache of a function of `x`, not an independent variable:
    norms differentiate through `x`, and a gradient taken through `sumsq` is zero.

    Fields are read-only. Arithmetic, `astype` and `dataclasses.replace` with another x give a Stream without the
    statistic; a norm computes it when it is missing. A linear map of the leaves is no map of a Stream:
    `jax.tree.map(lambda leaf: 0.5 * leaf, stream)` halves sumsq, which should be a quarter; `0.5 * stream` is right.

    Attributes:
      x: (..., D).
      sumsq: (...,) float32, or None when it is not known; norms accept no other dtype for it.
    """

    x: jax.Array
    sumsq: jax.Array | None = None
    _: dataclasses.KW_ONLY
    _replaced: dataclasses.InitVar[Any] = pytree.REPLACED

    def __post_init__(self, _replaced: Any) -> None:
        if _replaced is not None and self.x is not _replaced.x and self.sumsq is _replaced.sumsq:
            object.__setattr__(self, "sumsq", None)  # it is that of another x

    @classmethod
    def of(cls, x: jax.Array | Stream) -> Stream:
        """The array as a Stream without statistic; a Stream unchanged. See `with_statistic` for a carry of scan."""
        return x if isinstance(x, Stream) else cls(x)

    def array(self) -> jax.Array:
        """x."""
        return self.x

    def astype(self, dtype: DTypeLike) -> Stream:
        return Stream(self.x.astype(dtype))

    def __add__(self, other: Any) -> Stream:
        return Stream(self.x + array(other))

    def __sub__(self, other: Any) -> Stream:
        return Stream(self.x - array(other))

    def __rsub__(self, other: Any) -> Stream:
        return Stream(array(other) - self.x)

    def __mul__(self, other: Any) -> Stream:
        return Stream(self.x * array(other))

    def __truediv__(self, other: Any) -> Stream:
        return Stream(self.x / array(other))

    def __neg__(self) -> Stream:
        return Stream(-self.x)

    __radd__ = __add__
    __rmul__ = __mul__
    __array_ufunc__ = None  # numpy_array + stream comes here too

    def with_statistic(self) -> Stream:
        """The Stream with its statistic, computed if it is missing, as `scan` needs it in a carry."""
        if self.sumsq is not None and self.sumsq.dtype == jnp.float32:  # else a map of the leaves has cast it
            return self
        x: Any = self.x
        if isinstance(x, Value):  # in a block
            fields: Any = (x, sum_of_squares(x))
            return Stream(*fields)
        return Stream(self.x, jnp.sum(jnp.square(lax.stop_gradient(self.x).astype(jnp.float32)), axis=-1))


def array(x: Any) -> Any:
    """The plain array of a Stream or of a norm that is not applied yet; anything else unchanged."""
    return x.array() if isinstance(x, NotAnArray) else x
