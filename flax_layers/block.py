"""A pre-norm transformer block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flax_layers.attention import Attention
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.fused import fused_whole
from flax_layers.linear import add
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.moe.moe import MoE
from flax_layers.norm import LayerNorm, RMSNorm
from flax_layers.ordered_block import OrderedBlock, attended, entering, leaving, within
from flax_layers.sharding import constrain_parameters


class TransformerBlock(OrderedBlock):
    """Pre-norm transformer block of given modules; the residual stream flows through.

    x1 = x + r attention(attention_norm(x));  y = x1 + r mlp(mlp_norm(x1))

    `LlamaBlock` makes one from its sizes.

    Args:
      attention_norm, mlp_norm: RMSNorm or LayerNorm, or what is called as norm(x).
      attention: Attention, or what is called as attention(h, positions=, mask=, segment_ids=[, cache=]) with h
        (B, T, D).
      mlp: GatedMLP, MLP or MoE, or what is called as mlp(h).
      residual_multiplier: r, as in Granite; beside a MoE it must be 1.

    Raises:
      ValueError: a MoE beside another residual_multiplier.
    """

    def __init__(
        self,
        attention_norm: RMSNorm | LayerNorm,
        attention: Attention,
        mlp_norm: RMSNorm | LayerNorm,
        mlp: GatedMLP | MLP | MoE,
        *,
        residual_multiplier: float = 1.0,
    ):
        if isinstance(mlp, MoE) and residual_multiplier != 1:
            raise ValueError(f"{residual_multiplier=}: a MoE adds what it makes to the stream as it is, with 1")
        self.residual_multiplier = residual_multiplier
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp: Any = mlp

    @fused_whole
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        statistics: bool = False,
        token_mask: jax.Array | None = None,
    ) -> Any:
        """Applies the block to x (B, T, D) or (T, D); returns x's shape and dtype.

        positions, mask, segment_ids and cache are Attention's; with a cache the result is (y, cache). statistics and
        token_mask are MoE's; with statistics the result is (y, the MoE's statistics), which are None for another `mlp`.
        """
        block, counted = constrain_parameters(self), None
        x = entering(x)
        h, longer = attended(block.attention, block.attention_norm(x), positions, mask, segment_ids, cache)
        x = within(add(x, block._scaled(h)))
        h = block.mlp_norm(x)
        if isinstance(block.mlp, MoE):  # its sum over experts is rounded once, with the stream
            options: dict[str, Any] = {"dtype": jnp.promote_types(x.dtype, jnp.float32)}
            if statistics:
                y, counted = block.mlp(h, statistics=True, token_mask=token_mask, **options)
            else:
                y = block.mlp(h, **options)
        else:
            y = block._scaled(block.mlp(h))
        results = leaving(add(x, y)), *(() if cache is None else (longer,)), *((counted,) if statistics else ())
        return results if len(results) > 1 else results[0]

    def _scaled(self, y: jax.Array) -> jax.Array:
        return y if self.residual_multiplier == 1 else y * self.residual_multiplier
