"""Softmax attention with its masks: causal, sliding window, segments, and the slots of a cache."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax.extend import explicit_axes, explicit_cuts, prefers_cudnn, with_sharding, without_axes
from flax_layers.activation import soft_capped
from flax_layers.config_checks import check_implementation
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.packing import Segments
from flax_layers.remat import CONTEXT, named

# A function is called as jax.nn.dot_product_attention is, f(q, k, v, mask=, is_causal=, local_window_size=), and with
# segment_ids= where that is a parameter of it, scale=, soft_cap=, sinks= and bias= where they are given: see `attend`.
Implementation = Literal["xla", "cudnn"] | Callable[..., jax.Array]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    is_causal: bool = True,
    sliding_window: int | None = None,
    segment_ids: jax.Array | Segments | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    cache: KVCache | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """softmax(scale q k^T + bias) v over the keys that every query may see; by `coda.attention`.

    Query i sees key j where all of these hold: j <= i (is_causal); i - sliding_window < j; both are of one segment, a
    run of equal segment_ids; mask. To `coda.attention` a window is a band and segments are intervals of keys, O(T)
    numbers; beside a mask, which is an array of all pairs as it is given, they are ids.

    On a GPU cuDNN computes what it was measured to be faster at (`prefers_cudnn` in `coda_jax.attend.choose`), by
    `jax.nn.dot_product_attention`, as with implementation="cudnn". To it a window is an argument too, and segments are
    a dense mask, (B, 1, T, T). A window beside a dense mask goes into that mask, since cuDNN before 9.10.2 does not
    accept both.

    With soft_cap, as in Gemma 2, scores are soft_cap tanh(scale q k^T / soft_cap), by `coda.attention(score=)` with any
    implementation but a function, which has it as soft_cap=.

    With sinks, as in gpt-oss, a row's softmax has one term more in its sum, exp(sinks[h]), of a key without a value. It
    is `coda.attention`'s or a given function's, with sinks=; of a token alone, or with implementation="xla",
    `coda.attention`'s by XLA.

    A function as `implementation` is called with all arrays in four axes, q (B, T, H, Dh), k and v (B, T, Hkv, Dh), and
        mask: the boolean mask, broadcastable to (B, H, T, T), or None.
        is_causal: as here.
        local_window_size: (sliding_window - 1, 0), or None.
        segment_ids: (B, T) int32, rising by 1 from each segment to the next, or None. A function without a parameter of
            this name gets the segments in its mask; with it no array (T, T) is made.
        scale, soft_cap, bias, sinks: as here, each only where it is given.
    It scales by 1 / sqrt(Dh) by default, returns an array of q's shape and dtype, and is differentiated by JAX.

    Args:
      q: (B, T, H, Dh) or (T, H, Dh).
      k, v: (B, T, Hkv, Dh) or (T, Hkv, Dh); where there are no segments, S tokens of another text are allowed.
      is_causal, sliding_window, segment_ids, mask, bias: as in Attention.
      scale: of scores; default 1 / sqrt(Dh).
      soft_cap: of scores; default none.
      sinks: (H,) floats; default none.
      cache: earlier keys and values, to which k and v are appended. Over a cache that is not empty a token alone, and
        all tokens with an implementation, attend by XLA with a mask: that is bound by reading the cache.
      implementation: as in Attention.

    Returns:
      (B, T, H, Dh) or (T, H, Dh), and the longer cache. A query that sees no key has 0 by `coda.attention`, and the
      mean of all values by `jax.nn.dot_product_attention`.

    Raises:
      ValueError: segment_ids, mask or bias of another shape, segment_ids that are not integers or beside keys of
        another text, a function that returns another shape or dtype than q's, a window without is_causal, or a cache
        beside a mask, a bias, segments or attention that is not causal; implementation="cudnn" beside a soft_cap or
        sinks; sinks beside a soft_cap.
      TypeError: a mask that is not boolean, or a bias that is not of floats.
    """
    if sliding_window is not None and not is_causal:
        raise ValueError(f"{sliding_window=} reaches back from a causal query: is_causal must be True")
    check_implementation(implementation, soft_cap, has_sinks=sinks is not None)
    score_shape = checked_shapes(q, k, segment_ids, {"mask": mask, "bias": bias})
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    if cache is not None:
        if not is_causal or any(x is not None for x in (mask, bias, segment_ids)):
            raise ValueError("a cache is for causal attention, without mask, bias and segment_ids")
        empty, cache = cache.length is None, cache.append(k, v)
        if not empty:
            return _over_cache(q, cache, sliding_window, options, sinks, implementation), cache
    segments = None if segment_ids is None else Segments.of(segment_ids)
    ids = None if segments is None else segments.ids
    extras = {"mask": mask, "bias": bias, "segment_ids": ids, "sinks": sinks}
    if callable(implementation):
        function_options = {name: x for name, x in options.items() if x is not None}
        by_function = functools.partial(_by_function, implementation, is_causal, sliding_window, function_options)
        return named(_as_written(by_function, q, k, v, extras), CONTEXT), cache
    if implementation is None and soft_cap is None:
        implementation = _implementation(q, k, is_causal, sliding_window, extras)
    if implementation is None or soft_cap is not None or sinks is not None:
        masks: dict[str, Any] = {"is_causal": is_causal, "sliding_window": sliding_window, "mask": mask}
        masks |= {"segments": segments, "bias": bias, "sinks": sinks}
        return _by_coda(q, k, v, implementation=implementation, **options, **masks), cache
    return _by_jax(q, k, v, extras, scale, is_causal, sliding_window, implementation, score_shape), cache


def _by_coda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    is_causal: bool,
    sliding_window: int | None,
    scale: float | None,
    soft_cap: float | None,
    segments: Segments | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    query_offset: jax.Array | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """Attention by `coda.attention`, which names its result for policies."""
    seen: Any = mask
    options: dict[str, Any] = {"sinks": sinks}
    if soft_cap is not None:
        options["score"] = functools.partial(soft_capped, soft_cap=soft_cap)
    if segments is not None and mask is None:
        seen = coda.Intervals(segments.first, segments.last)
    elif segments is not None:
        options["segment_ids"] = segments.ids
    y: jax.Array = coda.attention(
        q,
        k,
        v,
        bias,
        seen,
        is_causal=is_causal,
        local_window_size=_window(sliding_window),
        query_offset=query_offset,
        scale=scale,
        implementation=implementation,
        **options,
    )
    return y


def _window(sliding_window: int | None) -> tuple[int, int] | None:
    return None if sliding_window is None else (sliding_window - 1, 0)


def _by_jax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: dict[str, jax.Array | None],
    scale: float | None,
    is_causal: bool,
    sliding_window: int | None,
    implementation: Literal["xla", "cudnn"],
    score_shape: tuple[Any, ...],
) -> jax.Array:
    """Attention by cuDNN or XLA; `extras` has the mask, the bias and the segments."""
    mask, bias = extras["mask"], extras["bias"]
    if extras["segment_ids"] is not None:
        mask = _with_segments(mask, extras["segment_ids"])
    window = _window(sliding_window)
    if sliding_window is not None and _is_dense(mask, bias, by_jax=implementation == "xla"):
        window, mask = None, _with_window(mask, q.shape[-3], sliding_window)
    # cuDNN does not broadcast the last two axes.
    mask, bias = (None if x is None else jnp.broadcast_to(x, (*x.shape[:-2], *score_shape[-2:])) for x in (mask, bias))
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
    options |= {"local_window_size": window, "implementation": implementation}

    def dot_product(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any, *_: None) -> jax.Array:
        return _dot_product_attention(q, k, v, mask=mask, bias=bias, **options)

    y = _as_written(dot_product, q, k, v, {"mask": mask, "bias": bias})
    return named(y, CONTEXT) if implementation == "xla" else y  # a policy finds cuDNN's results by its primitive


def checked_shapes(
    q: jax.Array, k: jax.Array, segment_ids: jax.Array | Segments | None, extras: dict[str, jax.Array | None]
) -> tuple[Any, ...]:
    """([B,] H, T, S), to which a mask and a bias broadcast.

    Raises:
      ValueError: one does not; segment_ids of another shape, or beside another number of keys.
      TypeError: a mask that is not boolean, or a bias that is not floats.
    """
    if segment_ids is not None and segment_ids.shape != q.shape[:-2]:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; for queries {q.shape} it must be {q.shape[:-2]}")
    if segment_ids is not None and k.shape[-3] != q.shape[-3]:
        raise ValueError(f"segment_ids are of {q.shape[-3]} tokens, and there are {k.shape[-3]} keys of another text")
    score_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
    for name, x in extras.items():
        if x is None:
            continue
        if name == "mask" and x.dtype != jnp.bool_:
            raise TypeError(f"mask is {x.dtype}; it must be boolean, True where a query sees a key: floats are a bias")
        if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"bias is {x.dtype}; it must be floats, which are added to the scores: booleans are a mask")
        if x.ndim > len(score_shape) or any(
            a not in (1, b) for a, b in zip(x.shape[::-1], score_shape[::-1], strict=False)
        ):
            raise ValueError(f"{name} has shape {x.shape}; for queries {q.shape} it must broadcast to {score_shape}")
    return score_shape


def _over_cache(
    q: jax.Array,
    cache: KVCache,
    sliding_window: int | None,
    options: dict[str, Any],
    sinks: jax.Array | None,
    implementation: Implementation | None,
) -> jax.Array:
    """Attention of the last tokens to all that a cache holds: of several by `coda.attention`, of one by XLA."""
    assert cache.length is not None
    count: Any = q.shape[1]
    if implementation is None and isinstance(count, int) and count > 1:
        masks: dict[str, Any] = {"is_causal": True, "sliding_window": sliding_window}
        return _by_coda(q, cache.k, cache.v, query_offset=cache.length - count, sinks=sinks, **options, **masks)
    slots = jnp.arange(cache.capacity)
    queries = (cache.length[:, None] - count + jnp.arange(count))[:, :, None]
    seen = slots <= queries
    if sliding_window is not None:
        seen &= slots > queries - sliding_window
    if options["soft_cap"] is not None or sinks is not None:
        masks = {"is_causal": False, "sliding_window": None, "mask": seen[:, None], "sinks": sinks}
        return _by_coda(q, cache.k, cache.v, implementation="xla", **options, **masks)

    def cached(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, *_: None) -> jax.Array:
        return _dot_product_attention(q, k, v, mask=mask, implementation="xla", scale=options["scale"])

    return _as_written(cached, q, cache.k, cache.v, {"mask": seen[:, None]})


def _with_segments(mask: jax.Array | None, segment_ids: jax.Array) -> jax.Array:
    same = (segment_ids[..., :, None] == segment_ids[..., None, :])[..., None, :, :]
    return same if mask is None else mask & same


def _is_dense(mask: Any, bias: Any, *, by_jax: bool) -> bool:
    """Whether a window goes into a dense mask: beside a mask or a bias, and in JAX's attention by XLA.

    JAX's own mask of a window has constants, which jax.checkpoint of JAX 0.12 miscounts if it pins some of its
    arguments.
    """
    return mask is not None or bias is not None or by_jax


def _with_window(mask: jax.Array | None, length: Any, sliding_window: int) -> jax.Array:
    index = jnp.arange(length)
    inside = index > index[:, None] - sliding_window
    return inside if mask is None else mask & inside


def _as_written(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """`_on_explicit_shards`, which `coda.fuse` leaves as it is: the implementation is chosen."""

    def attention(*arrays: Any) -> jax.Array:
        return _on_explicit_shards(function, *arrays)

    y: jax.Array = coda.opaque(attention, *arrays)
    return y


def _on_explicit_shards(
    function: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: dict[str, jax.Array | None],
) -> jax.Array:
    """function(q, k, v, mask, bias, segment_ids, sinks), on each device for its rows and heads that explicit axes cut.

    cuDNN's call does not carry such axes: its result would have the type of an unsharded array on every device. Sharded
    positions are gathered. Where heads of queries have more shards than there are key heads, each device has the key
    head of its queries.
    """
    *rows, _, heads, _ = explicit_cuts(q)
    arrays: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        **{name: extras.get(name) for name in ("mask", "bias", "segment_ids", "sinks")},
    }
    if not any((*rows, heads)):
        return function(*arrays.values())
    mesh = jax.typeof(q).sharding.mesh
    arrays |= {name: _repeated(arrays[name], math.prod(mesh.shape[axis] for axis in heads)) for name in ("k", "v")}
    heads_spec = PartitionSpec(*(axes or None for axes in rows), None, heads or None, None)

    def mask_spec(mask: jax.Array) -> PartitionSpec:
        entries = [*(axes or None for axes in rows), heads or None, None, None][-mask.ndim :]
        return PartitionSpec(*(None if size == 1 else entry for size, entry in zip(mask.shape, entries, strict=True)))

    specs = {"q": heads_spec, "k": heads_spec, "v": heads_spec}
    specs |= {name: mask_spec(arrays[name]) for name in ("mask", "bias") if arrays[name] is not None}
    if arrays["segment_ids"] is not None:
        specs["segment_ids"] = PartitionSpec(*(axes or None for axes in rows), None)
    if arrays["sinks"] is not None:
        specs["sinks"] = PartitionSpec(heads or None)
    resharded = {name: with_sharding(arrays[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}

    def on_shard(shards: dict[str, jax.Array]) -> jax.Array:
        return function(*(shards.get(name) for name in arrays))

    # All explicit axes are manual: XLA fails to partition cuDNN's call on a mesh that is partly manual.
    return jax.shard_map(on_shard, in_specs=(specs,), out_specs=heads_spec, axis_names=set(explicit_axes(mesh)))(
        resharded
    )


def _repeated(x: jax.Array, shards: int) -> jax.Array:
    """Keys or values (..., Hkv, Dh), each head repeated until so many shards divide the heads evenly."""
    count = x.shape[-2]
    if count % shards == 0:
        return x
    gathered = without_axes(x, x.ndim - 2, frozenset(explicit_cuts(x)[-2]))
    return jnp.repeat(gathered, math.lcm(count, shards) // count, axis=-2)


def _by_function(
    function: Callable[..., jax.Array],
    is_causal: bool,
    sliding_window: int | None,
    extra_options: dict[str, Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """A user's attention, which `attend` describes."""
    original = q
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
        segment_ids = None if segment_ids is None else segment_ids[None]
    options = dict(extra_options)
    if sinks is not None:
        options["sinks"] = sinks
    if bias is not None:
        options["bias"] = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if "segment_ids" in inspect.signature(function).parameters:
        options["segment_ids"] = segment_ids
    elif segment_ids is not None:
        mask = _with_segments(mask, segment_ids)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    y = function(q, k, v, mask=mask, is_causal=is_causal, local_window_size=_window(sliding_window), **options)
    if y.shape != q.shape or y.dtype != q.dtype:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"attention by {name} is {y.dtype}{y.shape}; beside queries {q.dtype}{q.shape} it must be that"
        )
    return y.reshape(original.shape)


def _dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: Literal["xla", "cudnn"],
    **options: Any,
) -> jax.Array:
    options["implementation"] = implementation
    if implementation == "cudnn" and (q.shape[-3] % 2 or k.shape[-3] % 2):
        return _with_one_more(q, k, v, **options)
    # JAX asks for a float16 product summed in float32, which XLA refuses to compile for anything but GPUs.
    if q.dtype == jnp.float16 and jax.default_backend() != "gpu":
        widened = (x.astype(jnp.float32) for x in (q, k, v))
        return jax.nn.dot_product_attention(*widened, **options).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, **options)


def _with_one_more(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None, bias: Any, is_causal: bool, **options: Any
) -> jax.Array:
    """Attention with one more query or key, which nothing sees: JAX differentiates cuDNN's only at even lengths."""
    length, more_queries, more_keys = q.shape[-3], q.shape[-3] % 2, k.shape[-3] % 2
    if mask is not None:
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(0, more_queries), (0, more_keys)])
    elif not is_causal and more_keys:
        options["key_value_seq_lengths"] = jnp.full(q.shape[0] if q.ndim == 4 else 1, k.shape[-3], jnp.int32)
    if bias is not None:
        bias = jnp.pad(bias, [(0, 0)] * (bias.ndim - 2) + [(0, more_queries), (0, more_keys)])
    q, k, v = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, count), (0, 0), (0, 0)])
        for x, count in ((q, more_queries), (k, more_keys), (v, more_keys))
    )
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, bias=bias, is_causal=is_causal, **options)
    return lax.slice_in_dim(y, 0, length, axis=-3)


def _implementation(
    q: jax.Array,
    k: jax.Array,
    is_causal: bool,
    sliding_window: int | None,
    extras: dict[str, jax.Array | None],
) -> Literal["xla", "cudnn"] | None:
    """The default: cuDNN where it is faster, XLA of JAX for a token alone, else `coda.attention`."""
    length: Any = q.shape[-3]
    if isinstance(length, int) and length == 1:
        return "xla"
    # Not lax.platform_dependent: tracing the cuDNN branch needs cuDNN, and the residuals of both branches would be
    # allocated.
    if jax.default_backend() != "gpu" or q.dtype not in (jnp.bfloat16, jnp.float16) or extras["sinks"] is not None:
        return None
    if q.shape[-1] % 8 or q.shape[-1] > _widest_head():
        return None
    if not all(isinstance(x, int) for x in (length, k.shape[-3])):  # symbolic, in an export
        return None
    is_faster = prefers_cudnn(
        q.shape[-1],
        length,
        k.shape[-3],
        is_causal=is_causal,
        has_window=sliding_window is not None,
        has_segments=extras["segment_ids"] is not None,
        has_mask=extras["mask"] is not None,
        has_bias=extras["bias"] is not None,
    )
    return "cudnn" if is_faster else None


def _widest_head() -> int:
    """The widest head of cuDNN's attention in JAX."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "0.0")
    return 256 if float(capability) >= 9.0 else 128
