"""A transformer block of layers in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from flax_layers.attention import Attention
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.fused import fused_whole
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.remat import ATTENTION_OUTPUT, LAYER_INPUT, LAYER_OUTPUT, named
from flax_layers.sharding import STREAM, constrain, constrain_parameters

Layer = Callable[[jax.Array], jax.Array]


class OrderedBlock(nnx.Module):
    """A block whose subclass says in which order its layers are called."""

    attention: Attention
    mlp: GatedMLP | MLP

    def _ordered(self, x: jax.Array, attention: Layer, mlp: Layer) -> jax.Array:
        """The stream after the block, of the stream x (..., D); `attention` is called with an array of its shape."""
        raise NotImplementedError

    @property
    def takes_segments(self) -> bool:
        """Whether segment_ids may be `Segments`: attention and block are called as this library has written them."""
        calls = (type(self).__call__, type(self.attention).__call__)
        return all((getattr(call, "__module__", None) or "").partition(".")[0] == "flax_layers" for call in calls)

    @fused_whole
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Applies the block.

        Args:
          x: (B, T, D) or (T, D), bfloat16, float16 or float32.
          positions, mask, segment_ids, cache: as in Attention.

        Returns:
          x's shape and dtype; with a cache a pair of it and the longer cache.

        Raises:
          ValueError: as in Attention.
        """
        block, longer = constrain_parameters(self), None

        def attention(h: jax.Array) -> jax.Array:
            nonlocal longer
            y, longer = attended(block.attention, h, positions, mask, segment_ids, cache)
            return y

        y = leaving(block._ordered(entering(x), attention, block.mlp))
        return y if cache is None else (y, longer)


def attended(
    attention: Callable[..., Any], h: jax.Array, positions: Any, mask: Any, segment_ids: Any, cache: KVCache | None
) -> tuple[jax.Array, KVCache | None]:
    """The attention of h, and the longer cache; a module of another library needs no `cache` where there is none."""
    options = {"positions": positions, "mask": mask, "segment_ids": segment_ids}
    if cache is None:
        return attention(h, **options), None
    result: tuple[jax.Array, KVCache] = attention(h, cache=cache, **options)
    return result


def entering(x: jax.Array) -> jax.Array:
    """The stream that enters a block."""
    return named(constrain(x, *STREAM), LAYER_INPUT)


def within(x: jax.Array) -> jax.Array:
    """The stream after attention."""
    return named(constrain(x, *STREAM), ATTENTION_OUTPUT)


def leaving(x: jax.Array) -> jax.Array:
    """The stream that leaves a block."""
    return named(constrain(x, *STREAM), LAYER_OUTPUT)
