"""Keys and values of the tokens that attention has seen, kept for the tokens to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from coda_jax.extend import explicit_cuts, explicit_sharding, register_pytree, with_sharding


@register_pytree()
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer, a pytree: `Attention` takes one and returns the next.

    A token's slot is its position. Slots from `length` on hold nothing of meaning: they are not attended to, and the
    next tokens overwrite them, so a cache of a smaller `length` is the same cache with its last tokens forgotten.
    Unlike nnx.MultiHeadAttention, which keeps its cache in variables of the module, nothing here is state: a cache is
    a carry of `lax.while_loop`, may be kept, copied or sharded as any array, and a model serves many of them.

    Attributes:
      k, v: (B, S, Hkv, Dh) in the compute dtype; keys are rotated.
      length: (B,) int32, tokens held by each row; None for an empty cache, so that this is known while tracing: its
        first tokens attend to one another, without the cache.
      text_length: (B,) int32, the length of each row's text, by which keys are rotated where it decides frequencies, as
        in LongRopeScaling; None: it decides none. Keys that are held keep their frequencies: see `TextCache`.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array | None = None
    text_length: jax.Array | None = None

    @classmethod
    def empty(cls, batch_size: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
        """A cache for `capacity` tokens a row."""
        if batch_size < 1 or capacity < 1:
            raise ValueError(f"{batch_size=} and {capacity=} of a cache must be at least 1")
        shape = (batch_size, capacity, num_kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def capacity(self) -> int:
        """S, the most tokens a row can hold."""
        return self.k.shape[1]

    def positions(self, count: int) -> jax.Array:
        """Positions of the next `count` tokens: (B, count), or (count,) of an empty cache."""
        new = jnp.arange(count)
        return new if self.length is None else self.length[:, None] + new

    def append(self, k: jax.Array, v: jax.Array) -> KVCache:
        """The cache with the keys and values (B, T, Hkv, Dh) of T more tokens.

        Raises:
          ValueError: k of another shape or dtype, or more tokens than the capacity. Beyond an empty cache `length` is
            known only when the program runs, and tokens past the capacity are dropped.
        """
        batch, count = k.shape[:2] if k.ndim == 4 else (None, 0)
        if (batch, *k.shape[2:]) != (self.k.shape[0], *self.k.shape[2:]) or k.dtype != self.k.dtype:
            raise ValueError(
                f"new keys {k.dtype}{k.shape} do not fit a cache of {self.k.dtype}{self.k.shape}: (B, T, Hkv, Dh)"
            )
        self._check_fits(count)
        if self.length is None:
            to_come = ((0, 0), (0, self.capacity - count), (0, 0), (0, 0))
            length = jnp.full(self.k.shape[0], count, jnp.int32)
            return dataclasses.replace(self, k=jnp.pad(k, to_come), v=jnp.pad(v, to_come), length=length)
        slots = self.positions(count)
        k, v = written(self.k, k, slots), written(self.v, v, slots)
        return dataclasses.replace(self, k=k, v=v, length=self.length + count)

    def check_room(self, more: Any) -> None:
        """Checks that there is room for `more` tokens, a number or one for each row, if the number held is known.

        Raises:
          ValueError: they exceed the capacity.
        """
        if self.length is not None and not any(isinstance(x, jax.core.Tracer) for x in (self.length, more)):
            self._check_fits(int(jnp.max(self.length + more)))

    def _check_fits(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise ValueError(f"{tokens} tokens exceed the cache's capacity of {self.capacity}")


def written(held: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """held (B, S, ...) with new (B, T, ...) in the slots (B, T) of each row; slots from S on are dropped."""
    # Not dynamic_update_slice, which would write what does not fit over older tokens.
    rows, slots = jnp.arange(held.shape[0])[:, None], _rows_as(held, slots)
    sharding = explicit_sharding(held)  # over explicit mesh axes
    return held.at[rows, slots].set(with_sharding(new, sharding), mode="drop", out_sharding=sharding)


def _rows_as(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Numbers (B, ...), one or more for each row, with their rows sharded as those of x over explicit mesh axes."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return numbers
    return with_sharding(numbers, NamedSharding(sharding.mesh, PartitionSpec(explicit_cuts(x)[0] or None)))


def decode_layers(
    layers: Iterable[Callable[..., Any]], x: Any, cache: Sequence[KVCache], lengths: jax.Array | None
) -> tuple[Any, list[KVCache]]:
    """The layers' outputs for each row's last token, a pytree of arrays (B, 1, ...), and the longer caches.

    Args:
      layers: each called as layer(x, cache=...) -> (x, cache).
      x: a pytree of arrays (B, T, ...), the embedded tokens.
      cache: one for each layer.
      lengths: (B,), the number of tokens of each row, up to T; None for T.

    Raises:
      ValueError: more tokens than a cache has room for, where that is known, outside jit.
    """
    count = jax.tree.leaves(x)[0].shape[1]
    if cache:  # all layers' caches hold equally many
        cache[0].check_room(count if lengths is None else lengths)
    longer = []
    for layer, layer_cache in zip(layers, cache, strict=True):
        x, layer_cache = layer(x, cache=layer_cache)
        if lengths is not None:  # forgets the padding
            assert layer_cache.length is not None
            layer_cache = dataclasses.replace(layer_cache, length=layer_cache.length - count + lengths)
        longer.append(layer_cache)
    if lengths is None:
        return jax.tree.map(lambda y: y[:, -1:], x), longer

    def last_token(y: jax.Array) -> jax.Array:
        last = _rows_as(y, lengths - 1)[:, None]
        return jax.vmap(lambda tokens, i: tokens[i])(y, last)

    return jax.tree.map(last_token, x), longer
