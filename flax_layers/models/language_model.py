"""What language models have in common: logits and a loss from the features that the head projects."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from coda_jax import DeferredNorm
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.lm_head import LMHead


class LanguageModel(nnx.Module):
    """A model whose `_features` a head projects to the vocabulary, tied to the token embedding or not.

    Attributes:
      max_length: the name of the config's field that bounds the number of tokens.
    """

    max_length: ClassVar[str]
    config: Any
    head: LMHead
    layers: Any

    def _features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array | DeferredNorm:
        """What the head projects."""
        raise NotImplementedError

    def _embedding(self) -> jax.Array | None:
        """What a tied head projects with."""
        raise NotImplementedError

    def _layers(self) -> Any:
        """The layers one by one."""
        return self.layers

    def _check_length(self, count: int) -> None:
        limit = getattr(self.config, self.max_length)
        if isinstance(count, int) and count > limit:  # a symbolic one is not known
            raise ValueError(f"{count} tokens exceed config.{self.max_length}={limit}")

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, T, V) of tokens (B, T), or (T, V) of (T,).

        Args:
          tokens: integers.
          positions: (T,) or (B, T) integers; default 0 to T - 1.
          mask, segment_ids: as in Attention.

        Raises:
          ValueError: more tokens than the config allows.
        """
        self._check_length(tokens.shape[-1])
        return self.head(self._features(tokens, positions, mask, segment_ids), embedding=self._embedding())

    def init_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """Empty caches of all layers, for `capacity` tokens a row.

        Raises:
          ValueError: a capacity beyond what the config allows.
        """
        self._check_length(capacity)
        return [layer.attention.init_cache(batch_size, capacity) for layer in self._layers()]

    def loss(
        self,
        tokens: jax.Array,
        labels: jax.Array,
        weights: jax.Array | None = None,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """Mean cross-entropy, () float32, of the tokens' logits with labels, of which no whole array exists.

        Args:
          tokens: (B, T) or (T,).
          labels: of the same shape: what follows each token; -100 where nothing is asked for.
          weights: of the same shape; default 1.
          positions, mask, segment_ids: as in `__call__`.
          **options: as in `LMHead.loss`.

        Raises:
          ValueError: more tokens than the config allows, or labels or weights of another shape.
        """
        self._check_length(tokens.shape[-1])
        features = self._features(tokens, positions, mask, segment_ids)
        return self.head.loss(features, labels, weights=weights, embedding=self._embedding(), **options)[0]
