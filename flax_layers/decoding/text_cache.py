"""The cache of a model whose rotary frequencies depend on how long a text is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.extend import register_pytree
from flax_layers.decoding.kv_cache import KVCache, decode_layers, written
from flax_layers.rope_scaling import RotaryScaling


@register_pytree()
@dataclasses.dataclass(frozen=True)
class TextCache:
    """Keys and values of all layers, and the tokens that they are of, a pytree.

    Beyond the original context a LongRopeScaling and a DynamicRopeScaling have frequencies of the text's length. When a
    text grows to a length of other frequencies, what all layers made of its tokens changes, not only how keys are
    rotated: attention of the first layer is other, so the second layer's keys are. So the model then runs over the text
    anew, which is why its tokens are kept: once with a LongRopeScaling, at each token with a DynamicRopeScaling. Such a
    pass takes `capacity` tokens of each row.

    Attributes:
      tokens: (B, S) int32.
      layers: a KVCache of each layer, whose text_length is that by which it was made; None of an empty one. Caches of
        smaller `length`s are of the same texts with their last tokens forgotten.
    """

    tokens: jax.Array
    layers: list[KVCache]

    @classmethod
    def empty(cls, layers: list[KVCache]) -> TextCache:
        """A cache for as many tokens as empty caches of the layers have room for."""
        return cls(jnp.zeros((layers[0].k.shape[0], layers[0].capacity), jnp.int32), layers)

    @property
    def capacity(self) -> int:
        """S, the most tokens a row can hold."""
        return self.tokens.shape[1]


def varying_scalings(layers: Iterable[Any], capacity: int) -> list[RotaryScaling]:
    """The scalings of layers that have several frequencies for texts of up to so many tokens, each once."""
    turning = (layer.attention for layer in layers if getattr(layer.attention, "rope_theta", None) is not None)
    scalings = dict.fromkeys(attention.rope_scaling for attention in turning)
    return [scaling for scaling in scalings if scaling is not None and scaling._varies(capacity)]


def decode_text(
    layers: Sequence[Any],
    embedded: Callable[[jax.Array], Any],
    tokens: jax.Array,
    cache: TextCache,
    lengths: jax.Array | None,
) -> tuple[Any, TextCache]:
    """The layers' outputs for each row's last token, as if they ran over its entire text, and the longer cache.

    Args:
      layers, lengths: as in `decode_layers`.
      embedded: what enters the first layer, a pytree of arrays (B, T, ...), for tokens (B, T).
      tokens: (B, T), the next ones of each row.
      cache: of the tokens before.

    Raises:
      ValueError: as `decode_layers`.
    """
    first, caches, count = cache.layers[0], cache.layers, tokens.shape[1]
    more = jnp.full(tokens.shape[0], count, jnp.int32) if lengths is None else lengths
    if first.length is None:
        text_length = more
        texts = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, max(cache.capacity - count, 0))))
    else:
        first.check_room(more)
        text_length = first.length + more
        caches = _of_length(layers, embedded, cache, text_length)
        texts = written(cache.tokens, tokens.astype(jnp.int32), first.positions(count))
    caches = [dataclasses.replace(one, text_length=text_length) for one in caches]
    last, longer = decode_layers(layers, embedded(tokens), caches, lengths)
    return last, TextCache(texts, longer)


def _of_length(
    layers: Sequence[Any], embedded: Callable[[jax.Array], Any], cache: TextCache, text_length: jax.Array
) -> list[KVCache]:
    """The caches of the layers as they are for texts of these lengths, (B,), of which they hold the first tokens."""
    held, made = cache.layers[0].length, cache.layers[0].text_length
    assert held is not None and made is not None
    scalings = varying_scalings(layers, cache.capacity)
    is_other = jnp.any(jnp.stack([x._deciding(made) != x._deciding(text_length) for x in scalings]))

    def anew() -> list[tuple[jax.Array, jax.Array]]:
        empty = [KVCache(jnp.zeros_like(x.k), jnp.zeros_like(x.v), text_length=text_length) for x in cache.layers]
        return [(x.k, x.v) for x in decode_layers(layers, embedded(cache.tokens), empty, held)[1]]

    def as_they_are() -> list[tuple[jax.Array, jax.Array]]:
        return [(x.k, x.v) for x in cache.layers]

    # The step itself stands outside of the branches: what it computes of parameters alone is hoisted out of loops.
    if isinstance(is_other, jax.core.Tracer):
        keys_values = lax.cond(is_other, anew, as_they_are)
    else:  # outside of jit nothing is compiled for the other one
        keys_values = anew() if is_other else as_they_are()
    return [dataclasses.replace(x, k=k, v=v) for x, (k, v) in zip(cache.layers, keys_values, strict=True)]
