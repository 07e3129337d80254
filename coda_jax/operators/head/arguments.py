"""The arguments of the operators over a vocabulary: their checks, and the loss head and arrays made from them."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays
from coda_jax.operators.head.arrays import Kernel, Tokens
from coda_jax.operators.head.chunks import columns_of
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.operators.multiply import multiply
from coda_jax.operators.projection import norm_projection
from coda_jax.primitives.axes import UNSHARDED, Dimension, MatrixAxis, as_matrix
from coda_jax.primitives.dtypes import check_floats, resolve_dtype
from coda_jax.primitives.mesh_types import explicit_cuts, reshaped, with_sharding

CHUNK_BYTES = 2**29  # of a chunk's logits
CHUNK_BYTES_BESIDE_A_COPY = 2**28  # where w is cast to the compute dtype, padded, or joined with a low-rank delta

LowRank = tuple[jax.Array, jax.Array]  # A (D, r), B (r, V)


class Rows(NamedTuple):
    """The leading axes of x (..., D), which the arrays of each token have too.

    Over explicit mesh axes all of these are sharded as x, whose width is gathered: mesh axes that shard one of its
    leading axes shard the rows.

    Attributes:
      sizes: of the leading axes.
      cuts: for each, the explicit mesh axes that shard it.
      mesh: of these mesh axes; None where there are none.
    """

    sizes: tuple[Any, ...]
    cuts: tuple[tuple[str, ...], ...]
    mesh: Any

    @classmethod
    def of(cls, x: jax.Array, *others: jax.Array | None) -> Rows:
        """The rows of x; the mesh is that of the first of x and the other arrays that explicit mesh axes shard."""
        sharded = [y for y in (x, *others) if y is not None and any(explicit_cuts(y))]
        return cls(x.shape[:-1], explicit_cuts(x)[:-1], jax.typeof(sharded[0]).sharding.mesh if sharded else None)

    def flat(self, x: jax.Array) -> jax.Array:
        """x (..., *rest) as (M, *rest)."""
        rest = x.ndim - len(self.sizes)
        return self._constrain(as_matrix(x, (MatrixAxis(Dimension.M, len(self.sizes)), *[UNSHARDED] * rest)))

    def norm(self, norm: DeferredNorm) -> DeferredNorm:
        """The norm of x as (M, D), its statistics as (M,), its scale and bias replicated."""
        row_fields = {name: getattr(norm, name) for name in ("x", "sumsq", "mean")}
        rows: dict[str, Any] = {name: None if x is None else self.flat(x) for name, x in row_fields.items()}
        return dataclasses.replace(norm, **rows, scale=self.replicated(norm.scale), bias=self.replicated(norm.bias))

    def split_rows(self, x: jax.Array) -> jax.Array:
        """x (M, *rest) as (..., *rest)."""
        return reshaped(x, (*self.sizes, *x.shape[1:]), cuts=(*self.cuts, *[()] * (x.ndim - 1)))

    def replicated(self, x: Any) -> Any:
        """x, gathered over explicit mesh axes."""
        return (
            x if x is None or not any(explicit_cuts(x)) else with_sharding(x, NamedSharding(self.mesh, PartitionSpec()))
        )

    def _constrain(self, x: jax.Array) -> jax.Array:
        if self.mesh is None:
            return x
        rows = tuple(axis for axes in self.cuts for axis in axes)
        return with_sharding(x, NamedSharding(self.mesh, PartitionSpec(rows or None, *[None] * (x.ndim - 1))))


class HeadArguments(NamedTuple):
    """The head, its arrays, and the leading axes of x, which are the tokens' rows."""

    head: LossHead
    tokens: Tokens
    kernel: Kernel
    rows: Rows


def head_arguments(
    operator: str,
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    low_rank: LowRank | None,
    *,
    soft_cap: float | jax.Array | None,
    transpose_w: bool,
    chunk_bytes: int | None,
    dtype: Any,
    implementation: str,
) -> HeadArguments:
    """Arguments of both operators as `linear_cross_entropy` describes them; `check_head` comes before."""
    check_options(operator, ("chunk_bytes", chunk_bytes, chunk_bytes is None or chunk_bytes > 0, "positive"))
    array = array_of(x)
    dtype = resolve_dtype(operator, dtype, array, w)
    vocabulary = vocabulary_of(w, transpose_w)
    columns = columns_of(vocabulary, dtype)
    if chunk_bytes is None:
        has_copy = w.dtype != dtype or columns != vocabulary or low_rank is not None
        chunk_bytes = CHUNK_BYTES_BESIDE_A_COPY if has_copy else CHUNK_BYTES
    cap: Any = None
    if soft_cap is not None:
        rule = "a positive number or None"
        cap = coefficient(operator, "soft_cap", soft_cap, lambda x: (x > 0) & (x < jnp.inf), rule)
    head = LossHead(
        vocabulary=vocabulary,
        columns=columns,
        chunk_bytes=chunk_bytes,
        transpose_w=transpose_w,
        dtype=dtype,
        implementation=implementation,
        soft_cap=cap if isinstance(cap, float) else None,
    )
    rows = Rows.of(array, w, *(low_rank or ()))
    cap_array = None if isinstance(cap, float) else cap
    h = rows.norm(x) if isinstance(x, DeferredNorm) else rows.flat(x)
    if low_rank is None:
        return HeadArguments(head, Tokens(h, cap=cap_array), Kernel(w), rows)
    a, b = rows.replicated(low_rank[0]), low_rank[1]
    if isinstance(h, DeferredNorm):
        inner = norm_projection(h, a, dtype=dtype, implementation=implementation)
    else:
        (inner,) = multiply(h.astype(dtype), a.astype(dtype), out_dtypes=[dtype], implementation=implementation)
    return HeadArguments(head, Tokens(h, inner, cap=cap_array), Kernel(w, b), rows)


def coefficient(operator: str, name: str, value: Any, fits: Callable[[Any], Any], rule: str) -> float | jax.Array:
    """A checked number, or an array of one, () float32, as of a schedule; NaN where it is traced and does not fit.

    Args:
      operator, name, rule: for messages.
      value: a number, or an array () of any real dtype.
      fits: whether a number or an array () obeys the rule.

    Raises:
      TypeError: it is neither.
      ValueError: another shape, or a number that does not fit.
    """
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()
    must = f"it must be {rule}, or an array () of one"
    if hasattr(value, "dtype"):
        if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
            raise TypeError(f"{operator}: {name} has dtype {value.dtype}; {must}")
        if value.shape != ():
            raise ValueError(f"{operator}: {name} has shape {value.shape}; {must}")
    elif not isinstance(value, numbers.Real):
        raise TypeError(f"{operator}: {name} is {type(value).__name__}; {must}")
    if isinstance(value, jax.core.Tracer):
        wide = value.astype(jnp.float32)
        return wide * jnp.where(fits(wide), 1.0, jnp.nan)
    number = float(value)
    check_options(operator, (name, number, fits(number), rule))
    return jnp.float32(number) if isinstance(value, jax.Array) else number


def known_labels(
    labels: jax.Array, vocabulary: int, ignore_index: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Labels as int32; which of them are to be ignored; and which of the others the vocabulary does not have."""
    narrow, ignored = int32_labels(labels, ignore_index)
    return narrow, ignored, ~ignored & ((narrow < 0) | (narrow >= vocabulary))


def int32_labels(labels: jax.Array, ignore_index: int | None) -> tuple[jax.Array, jax.Array]:
    """Labels of any integer dtype as int32, and which of them are ignore_index, a number that it need not hold.

    A label below 0 becomes -1 and one beyond int32 its greatest number: no vocabulary has either. In uint32 and uint64
    a negative ignore_index is the number that it wraps to; narrower dtypes may have that number as a label.
    """
    limits, greatest = jnp.iinfo(labels.dtype), jnp.iinfo(jnp.int32).max
    narrow = labels.clip(max(limits.min, -1), min(limits.max, greatest)).astype(jnp.int32)
    value: Any = ignore_index
    if isinstance(value, int | np.integer):
        sought = int(value)
        if limits.min == 0 and limits.bits >= 32 and -(2 ** (limits.bits - 1)) <= sought < 0:
            sought += 2**limits.bits
        value = np.asarray(sought, labels.dtype) if limits.min <= sought <= limits.max else None
    return narrow, jnp.zeros_like(narrow, bool) if value is None else labels == value


def array_of(x: jax.Array | DeferredNorm) -> jax.Array:
    return x.x if isinstance(x, DeferredNorm) else x


def vocabulary_of(w: jax.Array, transpose_w: bool) -> int:
    vocabulary: int = w.shape[0 if transpose_w else 1]
    return vocabulary


def check_head(
    operator: str,
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    labels: jax.Array,
    low_rank: LowRank | None,
    *,
    transpose_w: bool,
) -> None:
    """Raises for arrays that are no floats or integers, or whose shapes do not fit; labels' are the operator's."""
    if isinstance(x, DeferredNorm):
        check_arrays(operator, x)
    x = array_of(x)
    check_floats(operator, x=x, w=w)
    width = x.shape[-1]
    if w.ndim != 2 or w.shape[1 if transpose_w else 0] != width or 0 in w.shape:
        must = f"(V, {width})" if transpose_w else f"({width}, V)"
        raise ValueError(
            f"{operator}: w has shape {w.shape}; beside x {x.shape} it must be {must}"
            + (" with transpose_w" if transpose_w else "")
        )
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        kind = f"have dtype {labels.dtype}" if hasattr(labels, "dtype") else f"are {type(labels).__name__}"
        raise TypeError(f"{operator}: labels {kind}; they must be integers")
    if low_rank is None:
        return
    if not isinstance(low_rank, tuple | list) or len(low_rank) != 2:
        raise TypeError(f"{operator}: low_rank is {type(low_rank).__name__}; it must be a pair (A, B) or None")
    a, b = low_rank
    check_floats(operator, **{"low_rank[0]": a, "low_rank[1]": b})
    vocabulary, rank = vocabulary_of(w, transpose_w), a.shape[-1] if a.ndim else 0
    for i, (array, shape) in enumerate(((a, (width, rank)), (b, (rank, vocabulary)))):
        if array.shape != shape or rank == 0:
            must = f"({width}, r)" if i == 0 else f"({rank}, {vocabulary})"
            raise ValueError(
                f"{operator}: low_rank[{i}] has shape {array.shape}; beside x {x.shape} and w {w.shape} it must be "
                f"{must}"
            )


def check_options(operator: str, *options: tuple[str, Any, bool, str]) -> None:
    """Raises for the first option, (name, value, whether it fits, rule), that does not fit."""
    for name, value, fits, rule in options:
        if not fits:
            raise ValueError(f"{operator}: {name} = {value!r}; it must be {rule}")
