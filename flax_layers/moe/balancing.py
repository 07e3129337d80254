"""How evenly tokens are spread over experts: statistics of each layer, and auxiliary losses of these."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flax_layers.moe.router import Routing


class RouterStatistics(NamedTuple):
    """The statistics of a router, over the tokens that count. For several layers each has a leading axis L.

    They are sums, so that those of shards of a batch may be added up.

    Attributes:
      counts: (E,) int32, the tokens of each expert.
      probabilities: (E,) float32, sums of each expert's probability.
      squared_lse: () float32, the sum of logsumexp(logits)^2.
      tokens: () int32, how many tokens there are.
      dropped: () int32, how many choices of all tokens found no place on the device of their expert: with a
        capacity_factor, over a mesh.
    """

    counts: jax.Array
    probabilities: jax.Array
    squared_lse: jax.Array
    tokens: jax.Array
    dropped: jax.Array | int = 0


def router_statistics(
    routing: Routing, token_mask: jax.Array | None = None, dropped: jax.Array | int = 0
) -> RouterStatistics:
    """The statistics of tokens (...).

    Args:
      routing: what the router decided.
      token_mask: (...) bool, False for tokens that do not count, as padding; default all count.
      dropped: the number of choices that were dropped.
    """
    experts = routing.logits.shape[-1]
    is_chosen = routing.ids[..., None] == jnp.arange(experts, dtype=routing.ids.dtype)
    probabilities, squared = routing.probabilities, jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    if token_mask is None:
        tokens = jnp.asarray(math.prod(squared.shape), jnp.int32)
    else:
        is_chosen = is_chosen & token_mask[..., None, None]
        probabilities = jnp.where(token_mask[..., None], probabilities, 0)
        squared = jnp.where(token_mask, squared, 0)
        tokens = jnp.sum(token_mask, dtype=jnp.int32)
    counts = jnp.sum(is_chosen, axis=range(is_chosen.ndim - 1), dtype=jnp.int32)
    probabilities = jnp.sum(probabilities, axis=range(squared.ndim))
    return RouterStatistics(counts, probabilities, jnp.sum(squared), tokens, jnp.asarray(dropped, jnp.int32))


def load_balancing_loss(statistics: RouterStatistics) -> jax.Array:
    """E * sum over experts of (fraction of tokens that have it) * (mean probability), () float32.

    As transformers' `load_balancing_loss_func`: both are means over the tokens of all layers. It is k where all experts
    have as many tokens. Its gradient goes to the probabilities. Switch Transformer, arXiv 2101.03961, equations 4 to 6.

    Args:
      statistics: of one layer, or of several with a leading axis.
    """
    tokens = jnp.maximum(jnp.sum(statistics.tokens), 1).astype(jnp.float32)
    experts = statistics.counts.shape[-1]
    counts, probabilities = (
        jnp.sum(x.reshape(-1, experts).astype(jnp.float32), axis=0) / tokens
        for x in (statistics.counts, statistics.probabilities)
    )
    return experts * jnp.sum(counts * probabilities)


def router_z_loss(statistics: RouterStatistics) -> jax.Array:
    """The mean of logsumexp(logits)^2 over the tokens of all layers, () float32: ST-MoE, arXiv 2202.08906, equation 5.

    Args:
      statistics: of one layer, or of several with a leading axis.
    """
    return jnp.sum(statistics.squared_lse) / jnp.maximum(jnp.sum(statistics.tokens), 1).astype(jnp.float32)


def auxiliary_loss(statistics: RouterStatistics, balance: float, z: float) -> jax.Array:
    """balance * load_balancing_loss + z * router_z_loss, () float32."""
    return balance * load_balancing_loss(statistics) + z * router_z_loss(statistics)
