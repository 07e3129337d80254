"""coda.attention: softmax attention whose masks are few numbers for each query."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.attend import blocks
from coda_jax.attend.masks import Intervals, Masks, Sizes
from coda_jax.attend.primitive import attend
from coda_jax.attend.probabilities import checked_dropout, checked_sinks
from coda_jax.attend.score import Score, trace
from coda_jax.attend.score.hiding import band, shown
from coda_jax.attend.spec import AttentionConfig, AttentionSpec, MaskSpec
from coda_jax.epilogue.call_site import call_site
from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.epilogue.values import same_size

_DTYPES = (*FLOATS, "float64")
_IMPLEMENTATIONS = (None, "cuda", "xla", "cudnn")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | Intervals | None = None,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_offset: int | jax.Array | None = None,
    score: Callable[..., jax.Array] | None = None,
    operands: Sequence[Any] = (),
    sinks: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    scale: float | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    config: AttentionConfig | None = None,
) -> Any:
    """softmax(score(scale query key^T) + bias) value over the keys that each query sees.

    It takes the place of `jax.nn.dot_product_attention`, and differs in one thing: a query that sees no key has the
    result 0 and no gradient, where JAX's has the mean of all values.

    A query sees a key where every mask that is given lets it: is_causal, local_window_size, segment_ids, mask and
    both lengths. Masks take O(T) memory, but for dense ones.

    Args:
      query: (B, T, N, H), or (T, N, H) without a batch; bfloat16, float16 or float32, or float64, which XLA computes.
      key: (B, S, K, H) or (S, K, H), of query's dtype. N is a multiple of K: the first N / K heads of query have
        head 0 of key.
      value: (B, S, K, Hv) or (S, K, Hv), of query's dtype.
      bias: added to the scores, of a floating dtype and a shape that broadcasts to (B, N, T, S). It has a gradient.
      mask: bool of such a shape, True where a query sees a key; or `Intervals`.
      is_causal: whether query i sees keys up to i + query_offset alone, for any T and S.
      local_window_size: (left, right), or a number for both: query i sees keys from i + query_offset - left to
        i + query_offset + right.
      segment_ids: int32 (B, T), or (T,) for all sequences: a query sees keys of its own id alone. Equal ids need not
        stand together.
      key_value_segment_ids: of the keys, (B, S) or (S,); by default segment_ids, where T is S.
      query_seq_lengths: int32 (B,): row i of the result is 0 where i >= query_seq_lengths.
      key_value_seq_lengths: int32 (B,): nobody sees key j where j >= key_value_seq_lengths. Both lengths count rows
        of the arrays; query_offset moves neither.
      query_offset: the position of query 0 among the keys: for is_causal and local_window_size query i is at position
        i + query_offset. An int, or int32 (B,), each sequence's own; default 0. No other mask reads it.
      score: a JAX function of whole arrays, score(s, *operands), that makes a score of each scaled product s
        (B, N, T, S), float32, and is local to it: elementwise operations, positions by jnp.arange or
        jax.lax.broadcasted_iota, arrays that broadcast against s, and entries table[.., index] of tables of up to 256,
        at an elementwise index. -inf, or any number below -2^96, hides a key: jnp.where(.., s, -jnp.inf). None: s
        itself.
      operands: arrays that score takes, with gradients; floating ones are float32 in it. So have arrays that score
        closes over, in their own dtypes.
      sinks: (N,), of a floating dtype: exp(sink) of its head is a term of each row's sum, so that a query may attend
        to nothing. It has a gradient. A query that sees no key has the result 0 here too.
      dropout_key: of `jax.random.key`, or one of two uint32: what is dropped. None where dropout_rate is 0.
      dropout_rate: the part of the probabilities that is set to 0, in [0, 1); the others are divided by
        1 - dropout_rate. What is dropped are the bits of `coda.dropout` (dropout_key, probabilities (B, N, T, S),
        dropout_rate). No array of them is made.
      scale: a number; default 1 / sqrt(H).
      return_residual: whether to return the log-sum-exp of each row of scores, too.
      implementation: None uses the kernels where they can run, and warns once per reason on a GPU where they cannot;
        "cuda" raises there; "xla" never uses them; "cudnn" calls `jax.nn.dot_product_attention` by cuDNN, with a dense
        mask in the place of masks that it does not know.
      config: how the kernels compute it.

    Returns:
      (B, T, N, Hv) or (T, N, Hv), of query's dtype. With return_residual also the log-sum-exp (B, T, N) or (T, N),
      float32 (float64 of float64 arrays), of the sink too if there is one, -inf where a query sees nothing and has
      none; dropout does not change it. JAX's is of key's dtype and has no gradient;
      this one has its gradient (but for "cudnn"), so that attention to parts of the keys can be joined: y1 and y2
      with lse1 and lse2 are y1 exp(lse1 - lse) + y2 exp(lse2 - lse), where lse = jnp.logaddexp(lse1, lse2).

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
      NotTileLocalError: a score that is not local; it names the operation and its line.
      NotImplementedError: implementation="cuda" where the kernels cannot run, when the call is lowered; forward-mode
        differentiation.

    Numerics: scores, softmax and sums are float32; probabilities are rounded to the arrays' dtype where they are
    factors. Numbers that are not finite reach the rows that see them, and no others. Reverse mode only, of
    any order: the backward pass recomputes the probabilities, and derivatives beyond the first are computed by XLA. The
    result and the log-sum-exp are named "context" for policies of `jax.checkpoint`: one that keeps this name runs the
    forward pass once. Call it under jit.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check_options(implementation, config, return_residual)
    _check_score(score, operands, implementation)
    has_batch = query.ndim != 3
    _check_factors(query, key, value)
    scale = _checked_scale(scale, query.shape[-1])
    if not has_batch:
        query, key, value = (x[None] for x in (query, key, value))
    sizes = Sizes(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    masks = Masks.checked(
        sizes,
        is_causal=is_causal,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_offset=query_offset,
        mask=mask,
        bias=bias,
    )
    sinks = checked_sinks(sinks, sizes)
    rate, row_bits = checked_dropout(dropout_key, dropout_rate, query)
    if implementation == "cudnn":
        if sinks is not None or row_bits is not None:
            raise ValueError(
                "attention: implementation = 'cudnn' with sinks or dropout, which JAX's call does not have"
            )
        y, lse = _by_cudnn(query, key, value, masks, sizes, scale, return_residual)
    else:
        mask_spec, arrays = masks.reduced(sizes)
        mask_spec = dataclasses.replace(mask_spec, has_sinks=sinks is not None, dropout_rate=rate)
        arrays = arrays._replace(sinks=sinks, row_bits=row_bits)
        if scale <= 0:  # the kernels take the greatest score of a row before they scale it
            query, scale = (-query, -scale) if scale else (query * 0, 1.0)
        traced, read, mask_spec = _traced(score, operands, sizes, mask_spec)
        spec = AttentionSpec(mask_spec, scale, implementation, config, traced, call_site())
        y, lse = attend(query, key, value, *arrays.present, *read, spec=spec)
        lse = jnp.swapaxes(lse, 1, 2)
    if not return_residual:
        return y if has_batch else y[0]
    return (y, lse) if has_batch else (y[0], lse[0])


def _by_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, masks: Masks, sizes: Sizes, scale: float, return_residual: bool
) -> tuple[jax.Array, Any]:
    """Attention by cuDNN, and the log-sum-exp (B, T, N) if it is asked for."""
    options: dict[str, Any] = {"is_causal": masks.is_causal, "local_window_size": masks.window}
    options |= {"query_seq_lengths": masks.query_lengths, "key_value_seq_lengths": masks.key_lengths}
    mask, is_seen = masks.dense, None
    if mask is not None or not masks.are_jax_own:
        spec, arrays = masks.reduced(sizes)
        mask = blocks.seen(spec, arrays.present, sizes.queries, sizes.keys)
        options = {}
    if mask is not None:
        is_seen = jnp.any(mask, axis=-1).swapaxes(1, 2)  # (B or 1, T or 1, N or 1)
    found: Any = jax.nn.dot_product_attention(  # type: ignore[call-overload]
        query,
        key,
        value,
        masks.bias,
        mask,
        scale=scale,
        implementation="cudnn",
        return_residual=return_residual,
        **options,
    )
    y, lse = found if return_residual else (found, None)
    if is_seen is not None:
        y = jnp.where(is_seen[..., None], y, 0)
    if lse is not None:
        lse = lse.astype(jnp.promote_types(lse.dtype, jnp.float32))
        lse = lse if is_seen is None else jnp.where(is_seen, lse, -jnp.inf)
    return y, lse


def _check_options(implementation: Any, config: Any, return_residual: Any) -> None:
    if implementation not in _IMPLEMENTATIONS:
        allowed = ", ".join(map(repr, _IMPLEMENTATIONS))
        raise ValueError(f"attention: implementation = {implementation!r}; it must be one of {allowed}")
    if config is not None and not isinstance(config, AttentionConfig):
        raise ValueError(f"attention: config is {type(config).__name__}; it must be an AttentionConfig or None")
    if not isinstance(return_residual, bool):
        raise ValueError(f"attention: return_residual = {return_residual!r}; it must be True or False")


def _check_score(score: Any, operands: Any, implementation: Any) -> None:
    if score is not None and not callable(score):
        raise ValueError(f"attention: score is {type(score).__name__}; it must be a function or None")
    if not isinstance(operands, tuple | list):
        raise ValueError(f"attention: operands is {type(operands).__name__}; it must be a tuple of arrays")
    if score is None and operands:
        raise ValueError(f"attention: {len(operands)} operands without a score; they are what score= takes beside s")
    if score is not None and implementation == "cudnn":
        raise ValueError("attention: implementation='cudnn' has no score functions; use None, 'cuda' or 'xla'")


def _traced(
    score: Callable[..., Any] | None, operands: Sequence[Any], sizes: Sizes, mask: MaskSpec
) -> tuple[Score | None, tuple[jax.Array, ...], MaskSpec]:
    """The score, what it reads, and the mask with a band that the score is known to have."""
    if score is None:
        return None, (), mask
    traced, read = trace(score, operands, (sizes.batch, sizes.heads, sizes.queries, sizes.keys))
    if mask.intervals:
        return traced, read, mask
    left, right, is_all, _ = band(traced, [x.shape for x in read], sizes.queries, sizes.keys)
    mask = dataclasses.replace(mask, left=_narrower(mask.left, left), right=_narrower(mask.right, right))
    return (*(shown(traced, read) if is_all else (traced, read)), mask)


def _narrower(one: int | None, other: int | None) -> int | None:
    return min((x for x in (one, other) if x is not None), default=None)


def _check_factors(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.ndim not in (3, 4):
        raise ValueError(f"attention: query has shape {query.shape}; it must be (B, T, N, H) or (T, N, H)")
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if x.ndim != query.ndim:
            raise ValueError(
                f"attention: {name} has shape {x.shape} beside query {query.shape}; both must have a batch, or neither"
            )
        if x.dtype != query.dtype or x.dtype.name not in _DTYPES:
            types = ", ".join(f"{name} {x.dtype}" for name, x in named.items())
            raise ValueError(f"attention: {types}; all must be of one dtype, {', '.join(_DTYPES)}")
    if not same_size(query.shape[-1], key.shape[-1]) or same_size(query.shape[-1], 0):
        raise ValueError(
            f"attention: query has heads of width {query.shape[-1]}, key of {key.shape[-1]}; both must have one width"
        )
    if not all(map(same_size, key.shape[:-1], value.shape[:-1])):
        raise ValueError(f"attention: key has shape {key.shape}, value {value.shape}; only the last axis may differ")
    if query.ndim == 4 and not same_size(query.shape[0], key.shape[0]):
        raise ValueError(f"attention: query has a batch of {query.shape[0]}, key of {key.shape[0]}; both must be one")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if same_size(kv_heads, 0) or not same_size(heads % kv_heads, 0):
        raise ValueError(f"attention: query has {heads} heads, key {kv_heads}; query's must be a multiple of key's")


def _checked_scale(scale: Any, width: Any) -> float:
    if scale is None:
        return 1 / math.sqrt(width)
    try:
        number = float(scale) if isinstance(scale, numbers.Real) or jnp.ndim(scale) == 0 else math.nan
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"attention: scale = {scale}; it must be a finite number, and no array that is traced")
    return number
