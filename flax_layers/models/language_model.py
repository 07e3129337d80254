"""The common base of language models: logits and a loss from the features that the head projects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import jax
from flax import nnx

from flax_layers.decoding.kv_cache import KVCache
from flax_layers.decoding.text_cache import TextCache, varying_scalings
from flax_layers.fused import fused_whole
from flax_layers.lm_head import LMHead, logits_of, loss_of, token_logprobs_of
from flax_layers.models.origin import end_tokens
from flax_layers.moe.balancing import RouterStatistics
from flax_layers.packing import counted_labels, segment_positions
from flax_layers.sharding import MeshAxes, axis_rules

Positions = jax.Array | Literal["restart"] | None
Method = TypeVar("Method", bound=Callable[..., Any])


def under_rules(method: Method) -> Method:
    """A method that runs under the model's rules; every public one that traces the model's arrays needs it."""

    @functools.wraps(method)
    def entered(self: Any, *arguments: Any, **options: Any) -> Any:
        with axis_rules(self.rules):
            return method(self, *arguments, **options)

    return entered  # type: ignore[return-value]


class LanguageModel(nnx.Module):
    """A model whose `_features` a head projects to the vocabulary, tied to the token embedding or not.

    Attributes:
      max_length: the name of the config's field that bounds the number of tokens.
      origin: the config's: settings of the checkpoint that the parameters came with.
      rules: how a mesh shards parameters and activations, see `flax_layers.sharding`; None: as rules in force say.
      soft_cap: of the logits, soft_cap * tanh(logits / soft_cap), also in losses; None: none.
    """

    max_length: ClassVar[str]
    config: Any
    head: LMHead
    layers: Any
    origin: str | None = None
    rules: tuple[tuple[str, MeshAxes], ...] | None = None
    soft_cap: float | None = None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text, by the settings of the checkpoint that the parameters came with."""
        return end_tokens(self.origin)

    def _features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array:
        """The features that the head projects."""
        raise NotImplementedError

    def _features_and_statistics(
        self, tokens: jax.Array, token_mask: jax.Array | None, options: dict[str, Any]
    ) -> tuple[Any, RouterStatistics | None]:
        """The features that the head projects, and the routers' statistics, stacked along the layers that have one."""
        return self._features(tokens, **options), None

    def _auxiliary_loss(self, statistics: RouterStatistics) -> jax.Array:
        """The loss that the statistics add to the mean loss."""
        raise NotImplementedError

    def _embedding(self) -> jax.Array | None:
        """The embedding that a tied head projects with."""
        raise NotImplementedError

    def _layers(self) -> Any:
        """The layers one by one."""
        return self.layers

    def _check_length(self, count: int) -> None:
        limit = getattr(self.config, "max_tokens", getattr(self.config, self.max_length))
        if isinstance(count, int) and count > limit:  # a symbolic one is not known
            raise ValueError(f"{count} tokens exceed config.{self.max_length}={limit}")

    @under_rules
    @fused_whole
    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: Positions = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, T, V) of tokens (B, T), or (T, V) of (T,).

        Args:
          tokens: integers.
          positions: (T,) or (B, T) integers; "restart" for 0, 1, ... anew in each segment; default 0 to T - 1.
          mask, segment_ids: as in Attention.

        Raises:
          ValueError: more tokens than the config allows, or "restart" without segment_ids.
        """
        self._check_length(tokens.shape[-1])
        features = self._features(tokens, _resolved(positions, segment_ids), mask, segment_ids)
        return logits_of(self.head, features, self._embedding(), self.soft_cap)

    @under_rules
    def init_cache(self, batch_size: int, capacity: int) -> list[KVCache] | TextCache:
        """Empty caches of all layers, for `capacity` tokens a row.

        They are a TextCache where rotary frequencies depend on how many of these tokens there are, as beyond the
        original context of a LongRopeScaling.

        Raises:
          ValueError: a capacity beyond what the config allows.
        """
        self._check_length(capacity)
        layers = self._layers()
        caches = [layer.attention.init_cache(batch_size, capacity) for layer in layers]
        return TextCache.empty(caches) if varying_scalings(layers, capacity) else caches

    @under_rules
    @fused_whole
    def loss(
        self,
        tokens: jax.Array,
        labels: jax.Array,
        weights: jax.Array | None = None,
        *,
        positions: Positions = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        across_segments: bool = False,
        weight_sum: bool = False,
        auxiliary: bool = True,
        token_mask: jax.Array | None = None,
        tokens_per_expert: bool = False,
        dropped_choices: bool = False,
        **options: Any,
    ) -> Any:
        """Mean cross-entropy, () float32, of the tokens' logits with labels, without an array of all logits.

        A model with experts adds the auxiliary losses of its config, as transformers does with output_router_logits.

        Args:
          tokens: (B, T) or (T,).
          labels: of the same shape: the next token of each; -100 for tokens that do not count.
          weights: of the same shape; default 1.
          positions, mask, segment_ids: as in `__call__`.
          across_segments: whether the label of a segment's last token counts where another segment follows in its row.
            By default it does not: that label is the next sequence's first token.
          weight_sum: whether the sum of the labels' weights is returned too. Microbatches of packed rows have different
            sums: their mean is sum(losses) / sum(weight sums), with reduction="sum".
          auxiliary: whether auxiliary losses are added. To reduction="sum" they are added times the sum of weights.
          token_mask: of tokens' shape, bool: False for tokens that auxiliary losses and counts leave out, as padding;
            transformers' attention_mask. Default all count.
          tokens_per_expert: whether to return how many tokens each expert of each layer has.
          dropped_choices: whether to return how many choices of experts each layer has dropped: with the config's
            capacity_factor, over a mesh.
          **options: as in `LMHead.loss`.

        Returns:
          The mean, or as `reduction` says; with `weight_sum`, `tokens_per_expert` or `dropped_choices` a tuple of it
          and of these: the sum of weights, () float32, as in `LMHead.loss`, the tokens of each expert, (layers
          with experts, E) int32, and the dropped choices, (layers with experts,) int32.

        Raises:
          ValueError: more tokens than the config allows, labels, weights or a token_mask of another shape, an option
            of experts for a model without, or auxiliary losses beside reduction="none".
        """
        self._check_length(tokens.shape[-1])
        if token_mask is not None and token_mask.shape != tokens.shape:
            raise ValueError(f"token_mask has shape {token_mask.shape}; it must be that of tokens, {tokens.shape}")
        if segment_ids is not None and not across_segments:
            labels, ignored = counted_labels(labels, segment_ids, options.get("ignore_index", -100))
            options["ignore_index"] = ignored
        seen = {"positions": _resolved(positions, segment_ids), "mask": mask, "segment_ids": segment_ids}
        options = self._capped(options)
        features, statistics = self._features_and_statistics(tokens, token_mask, seen)
        loss, total = loss_of(self.head, features, labels, weights=weights, embedding=self._embedding(), **options)
        if statistics is None and (tokens_per_expert or dropped_choices or token_mask is not None):
            raise ValueError(
                "tokens_per_expert, dropped_choices and token_mask want a model with experts: a Llama of a MoEConfig "
                "of which a layer has them"
            )
        if statistics is not None and auxiliary:
            loss = _with_auxiliary(loss, total, self._auxiliary_loss(statistics), options.get("reduction", "mean"))
        results = (loss, *((total,) if weight_sum else ()))
        if statistics is not None:
            results += (statistics.counts,) * tokens_per_expert + (statistics.dropped,) * dropped_choices
        return results if len(results) > 1 else loss

    @under_rules
    @fused_whole
    def token_logprobs(
        self,
        tokens: jax.Array,
        labels: jax.Array,
        *,
        positions: Positions = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        across_segments: bool = False,
        token_mask: jax.Array | None = None,
        **options: Any,
    ) -> Any:
        """Log-probabilities of labels after each token, float32, without an array of all logits.

        Args:
          tokens: (B, T) or (T,).
          labels: of the same shape, the next token of each, or with one more axis, of k candidates; -100 gives 0.
          positions, mask, segment_ids, across_segments: as in `loss`.
          token_mask: of tokens' shape, bool: where it is False the result is 0, and the head works on the other tokens
            alone.
          **options: as in `LMHead.token_logprobs`: temperature, entropy, ignore_index, soft_cap, chunk_bytes.

        Returns:
          Of the shape of labels; with `entropy` a pair of them and of the entropies, of tokens' shape.

        Raises:
          ValueError: more tokens than the config allows, or labels or a mask of another shape.
        """
        self._check_length(tokens.shape[-1])
        if segment_ids is not None and not across_segments:
            labels, ignored = counted_labels(labels, segment_ids, options.get("ignore_index", -100))
            options["ignore_index"] = ignored
        options = self._capped(options)
        features = self._features(tokens, _resolved(positions, segment_ids), mask, segment_ids)
        return token_logprobs_of(self.head, features, labels, mask=token_mask, embedding=self._embedding(), **options)

    def _capped(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of the head's operators, with the model's own soft cap unless they have one."""
        return options if self.soft_cap is None else {"soft_cap": self.soft_cap, **options}


def _resolved(positions: Positions, segment_ids: jax.Array | None) -> jax.Array | None:
    if not isinstance(positions, str):
        return positions
    if positions != "restart":
        raise ValueError(f"{positions=} must be an array, 'restart' or None")
    if segment_ids is None:
        raise ValueError("positions='restart' begins anew in each segment: give segment_ids")
    return segment_positions(segment_ids)


def _with_auxiliary(loss: jax.Array, total: jax.Array, auxiliary: jax.Array, reduction: str) -> jax.Array:
    """The loss plus the auxiliary loss, which is one of means."""
    if reduction == "none":
        raise ValueError("auxiliary losses are of all tokens: beside reduction='none' give auxiliary=False")
    return loss + (auxiliary * total if reduction == "sum" else auxiliary)
