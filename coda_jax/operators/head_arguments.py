"""What the operators over a vocabulary are given, checked, and as the loss head takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, of_rows
from coda_jax.operators.head_arrays import Kernel, Tokens
from coda_jax.operators.loss_head import LossHead
from coda_jax.operators.norm_products import multiply
from coda_jax.operators.projection import norm_projection
from coda_jax.operators.token_chunks import columns_of
from coda_jax.primitives.arguments import check_floats, resolve_dtype

LowRank = tuple[jax.Array, jax.Array]  # A (D, r), B (r, V)


class HeadArguments(NamedTuple):
    """The head, its arrays, and the leading axes of x."""

    head: LossHead
    tokens: Tokens
    kernel: Kernel
    lead: tuple[Any, ...]


def head_arguments(
    operator: str,
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    low_rank: LowRank | None,
    *,
    soft_cap: float | None,
    transpose_w: bool,
    chunk_bytes: int | None,
    dtype: Any,
    implementation: str,
) -> HeadArguments:
    """Arguments of both operators as `linear_cross_entropy` describes them; `check_head` comes before."""
    array = array_of(x)
    dtype = resolve_dtype(operator, dtype, array, w)
    vocabulary = vocabulary_of(w, transpose_w)
    columns = columns_of(vocabulary, dtype)
    if chunk_bytes is None:  # a copy of w in the compute dtype may stand beside the logits
        chunk_bytes = 2**29 if w.dtype == dtype and columns == vocabulary and low_rank is None else 2**28
    head = LossHead(
        vocabulary=vocabulary,
        columns=columns,
        chunk_bytes=chunk_bytes,
        transpose_w=transpose_w,
        dtype=dtype,
        implementation=implementation,
        soft_cap=None if soft_cap is None else float(soft_cap),
    )
    h = of_rows(x) if isinstance(x, DeferredNorm) else x.reshape(-1, array.shape[-1])
    if low_rank is None:
        return HeadArguments(head, Tokens(h), Kernel(w), array.shape[:-1])
    a, b = low_rank
    if isinstance(h, DeferredNorm):
        inner, of_norm = norm_projection(h, a, dtype=dtype, implementation=implementation)
        h = h.with_array(of_norm)
    else:
        (inner,) = multiply(h.astype(dtype), a.astype(dtype), out_dtypes=[dtype], implementation=implementation)
    return HeadArguments(head, Tokens(h, inner), Kernel(w, b), array.shape[:-1])


def known_labels(
    labels: jax.Array, vocabulary: int, ignore_index: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Labels as int32; which of them are to be ignored; and which of the others the vocabulary does not have."""
    wide = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    ignored = jnp.zeros_like(wide, bool) if ignore_index is None else wide == ignore_index
    unknown = ~ignored & ((wide < 0) | (wide >= vocabulary))
    return wide.astype(jnp.int32), ignored, unknown  # not before: a label beyond int32 is not to become another


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
        given = f"have dtype {labels.dtype}" if hasattr(labels, "dtype") else f"are {type(labels).__name__}"
        raise TypeError(f"{operator}: labels {given}; they must be integers")
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


def head_options(soft_cap: float | None, chunk_bytes: int | None) -> list[tuple[str, Any, bool, str]]:
    """What `check_options` takes, of the options of both operators."""
    return [
        ("soft_cap", soft_cap, soft_cap is None or 0 < soft_cap < float("inf"), "a positive number or None"),
        ("chunk_bytes", chunk_bytes, chunk_bytes is None or chunk_bytes > 0, "positive"),
    ]
