"""Forms of attention for users of JAX, each a function of q, k, v and the arrays of its mask; and float32's results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from benchmarks.attention_cases import Case

OFFSETS_ARE_RIGHT = (0, 11, 2)  # jax before it multiplies the keys' offsets by the number of query heads


def _any(case: Case) -> bool:
    return True


def _has_documents(case: Case) -> bool:
    return case.mean is not None


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to write attention.

    Attributes:
      name: of its variant.
      function: case -> f(q, k, v, *extras), which gives y (B, T, H, E).
      extras: case -> the arrays of its mask.
      includes: what its figure includes.
      has: whether it has a case.
    """

    name: str
    function: Callable[[Case], Callable[..., jax.Array]]
    extras: Callable[[Case], tuple[jax.Array, ...]] = lambda case: ()
    includes: str = ""
    has: Callable[[Case], bool] = _any


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """f(q, k, v, dy, *extras), which gives y, dq, dk and dv."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, *extras: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(lambda q, k, v: function(q, k, v, *extras), q, k, v)
        return y, *pullback(dy)

    return run


def _left_and_right(case: Case) -> tuple[int, int] | None:
    return None if case.window is None else (case.window - 1, 0)


def _segment_ids(case: Case) -> tuple[jax.Array, ...]:
    return () if case.mean is None else (jnp.asarray(case.segment_ids()),)


def _intervals(case: Case) -> tuple[jax.Array, ...]:
    """The first and the last key of each query's document, (B, T)."""
    first = np.stack([np.repeat(np.cumsum(row) - row, row) for row in case.documents])
    lengths = np.stack([np.repeat(row, row) for row in case.documents])
    return jnp.asarray(first, jnp.int32), jnp.asarray(first + lengths - 1, jnp.int32)


def _mask(case: Case) -> tuple[jax.Array, ...]:
    """Whether a query's document is a key's, (B, 1, T, T) bool."""
    return tuple((ids[:, None, :, None] == ids[:, None, None, :]) for ids in _segment_ids(case))


def bias(case: Case) -> tuple[jax.Array, ...]:
    """The array that is added to scores, (1, H, T, T) bfloat16, if the case has one."""
    if not case.has_bias:
        return ()
    shape = (1, case.heads, case.length, case.length)
    return (jax.random.normal(jax.random.key(case.seed, impl="rbg"), shape, jnp.bfloat16),)


def _dense(case: Case) -> tuple[jax.Array, ...]:
    return _mask(case) + bias(case)


def _dense_named(case: Case, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The arrays of `_dense` by the names of their arguments."""
    names = (*(["mask"] if case.mean is not None else []), *(["bias"] if case.has_bias else []))
    return dict(zip(names, arrays, strict=True))


def ours(implementation: str | None = None, *, documents: str = "ids", is_deterministic: bool = True) -> Form:
    """coda_jax.attention: documents by "ids", "intervals" or a "mask", gradients added in one order or in any."""
    has_intervals, has_mask = documents == "intervals", documents == "mask"

    def of(case: Case) -> Callable[..., jax.Array]:
        options: dict[str, Any] = {"local_window_size": _left_and_right(case), "implementation": implementation}
        if not is_deterministic:
            options["config"] = coda.AttentionConfig(deterministic=False)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> jax.Array:
            given: dict[str, Any] = {}
            if has_intervals:
                given = {"mask": coda.Intervals(*arrays)}
            elif has_mask or case.has_bias:
                given = _dense_named(case, arrays)
            elif arrays:
                given = {"segment_ids": arrays[0]}
            return coda.attention(q, k, v, is_causal=case.is_causal, **given, **options)

        return attend

    if documents != "ids":
        return Form(f"coda_{documents}", of, _intervals if has_intervals else _mask, has=_has_documents)
    name = "coda" if is_deterministic else "coda_any_order"
    return Form(name, of, lambda case: _segment_ids(case) + bias(case))


def public(implementation: str) -> Form:
    """jax.nn.dot_product_attention, to which documents are a boolean mask of all pairs."""

    def of(case: Case) -> Callable[..., jax.Array]:
        options: dict[str, Any] = {"is_causal": case.is_causal, "local_window_size": _left_and_right(case)}

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> jax.Array:
            width, value_width = q.shape[-1], v.shape[-1]
            if value_width != width:
                v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width - value_width)))
            given = _dense_named(case, arrays)
            y = jax.nn.dot_product_attention(q, k, v, implementation=implementation, **given, **options)
            return y[..., :value_width]

        return attend

    includes = "documents as a boolean mask of all pairs; narrower values padded to the width of the keys"
    return Form(implementation, of, _dense, includes)


def packed() -> Form:
    """cuDNN's packed layout, by the private function of JAX that `jax.nn.dot_product_attention` calls."""

    def offsets(case: Case) -> tuple[jax.Array, ...]:
        """The lengths of each row's documents (B, M) and where each begins (B, M + 1); -1 where there are fewer."""
        most = max(2, *map(len, case.documents))
        lengths = np.full((case.batch, most), -1, np.int32)
        starts = np.full((case.batch, most + 1), -1, np.int32)
        for i, row in enumerate(case.documents):
            lengths[i, : len(row)] = row
            starts[i, : len(row)] = np.cumsum(row) - row
        return jnp.asarray(lengths), jnp.asarray(starts)

    def of(case: Case) -> Callable[..., jax.Array]:
        from jax._src.cudnn import fused_attention_stablehlo as private

        kind = private.MaskType.PADDING_CAUSAL if case.is_causal else private.MaskType.PADDING

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, starts: jax.Array) -> jax.Array:
            each = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": starts, "kv_offsets": starts}
            options = {"scale": case.width**-0.5, "mask_type": kind, "sliding_window_length": case.window}
            return private.dot_product_attention(q, k, v, **each, **options)

        return attend

    includes = "JAX's private function; as many documents a row as these rows have"
    return Form("cudnn_packed", of, offsets, includes, _has_documents)


def forms(is_tiny: bool) -> list[Form]:
    """All forms; those that a CPU runs if tiny."""
    if is_tiny:
        return [ours(), ours(documents="intervals"), ours(documents="mask"), public("xla")]
    by_documents = [ours("cuda", documents=name) for name in ("ids", "intervals", "mask")]
    found = [*by_documents, ours("cuda", is_deterministic=False), public("cudnn")]
    return [*found, packed()] if jax.__version_info__ >= OFFSETS_ARE_RIGHT else found


RESULTS = ("y", "dq", "dk", "dv")


def last_heads(case: Case, results: Any) -> tuple[Any, ...]:
    """The parts of y, dq, dk and dv, or of y alone, that are of the last row's last key head.

    y and dq (T, H / K, ...), dk and dv (T, ...). What addresses rows or heads wrongly shows in the last ones.
    """
    group = case.heads // case.key_heads
    slices = (slice(-group, None), slice(-group, None), -1, -1)
    return tuple(x[-1, :, heads] for x, heads in zip(results, slices, strict=False))


def reference_arguments(case: Case, q: Any, k: Any, v: Any, dy: Any) -> tuple[Any, ...]:
    """The arrays of `reference`, of a case's q, k, v and cotangent of the result."""
    q, dy = (last_heads(case, (x,))[0] for x in (q, dy))
    k, v = (x[-1, :, -1] for x in (k, v))
    added = [x[0, -q.shape[1] :] for x in bias(case)]
    return q, k, v, dy, jnp.asarray(case.visible(case.batch - 1)), *added


def reference_types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of these arrays."""
    group, value_width = case.heads // case.key_heads, case.value_width or case.width
    shapes = ((group, case.width), (case.width,), (value_width,), (group, value_width))
    arrays = (jax.ShapeDtypeStruct((case.length, *shape), jnp.bfloat16) for shape in shapes)
    pairs = (case.length, case.length)
    added = [jax.ShapeDtypeStruct((group, *pairs), jnp.bfloat16)] if case.has_bias else []
    return *arrays, jax.ShapeDtypeStruct(pairs, jnp.bool), *added


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, visible: jax.Array, added: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """`last_heads` of y, dq, dk and dv in float32, from an array of all scores of a head.

    Args:
      q, dy: those of a key head's queries, (T, H / K, D) and (T, H / K, E).
      k, v: of the key head, (T, D) and (T, E).
      visible: whether a query sees a key, (T, T).
      added: the bias of these queries' heads, (H / K, T, T).
    """
    if added is None:
        added = jnp.zeros((q.shape[1], 1, 1))
    q, k, v, dy = (x.astype(jnp.float32) for x in (q, k, v, dy))

    def one(head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            scores = jnp.where(visible, q.shape[1] ** -0.5 * (q @ k.T) + head[2], -jnp.inf)
            return jax.nn.softmax(scores, axis=1) @ v

        y, pullback = jax.vjp(attend, head[0], k, v)
        return y, *pullback(head[1])

    with jax.default_matmul_precision("highest"):
        y, dq, dk, dv = jax.lax.map(one, (q.swapaxes(0, 1), dy.swapaxes(0, 1), added))
    return y.swapaxes(0, 1), dq.swapaxes(0, 1), dk.sum(0), dv.sum(0)
