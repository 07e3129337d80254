"""What language models have in common: logits and a loss from the features that the head projects."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from flax_layers.lm_head import LMHead
from flax_layers.stream import Normalized


class LanguageModel(nnx.Module):
    """A model whose `_features` a head projects to the vocabulary, tied to the token embedding or not."""

    head: LMHead

    def _features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array | Normalized:
        """What the head projects."""
        raise NotImplementedError

    def _embedding(self) -> jax.Array | None:
        """What a tied head projects with."""
        raise NotImplementedError

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
        features = self._features(tokens, positions, mask, segment_ids)
        return self.head.loss(features, labels, weights=weights, embedding=self._embedding(), **options)[0]
