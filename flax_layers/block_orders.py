"""Transformer blocks of other orders than the pre-norm one: norms after sub-layers, around them, or one for both."""

from __future__ import annotations

import jax

from flax_layers.attention import Attention
from flax_layers.linear import add
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.norm import LayerNorm, RMSNorm
from flax_layers.ordered_block import Layer, OrderedBlock, within


class _NormBehindBlock(OrderedBlock):
    """A block with a norm after each sub-layer."""

    def __init__(
        self,
        attention: Attention,
        attention_norm: RMSNorm | LayerNorm,
        mlp: GatedMLP | MLP,
        mlp_norm: RMSNorm | LayerNorm,
    ):
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm


class PostNormBlock(_NormBehindBlock):
    """Transformer block with a norm after each sum, the order of the first Transformer and of BERT.

        x1 = attention_norm(x + attention(x));  y = mlp_norm(x1 + mlp(x1))

    From "Attention Is All You Need" (arXiv 1706.03762) and BERT (arXiv 1810.04805).

    Args:
      attention: called with (B, T, D) or (T, D); BERT's has is_causal=False and rope_theta=None.
      attention_norm, mlp_norm: over D features.
      mlp: called with (..., D).
    """

    def _ordered(self, x: jax.Array, attention: Layer, mlp: Layer) -> jax.Array:
        x = self.attention_norm(within(add(x, attention(x))))
        return self.mlp_norm(add(x, mlp(x)))


class NormBeforeSumBlock(_NormBehindBlock):
    """Transformer block with a norm after each sub-layer, before the sum, the order of OLMo 2.

        x1 = x + attention_norm(attention(x));  y = x1 + mlp_norm(mlp(x1))

    From OLMo 2 (arXiv 2501.00656), whose norms are RMSNorms.

    Args:
      attention: called with (B, T, D) or (T, D).
      attention_norm, mlp_norm: over D features.
      mlp: called with (..., D).
    """

    def _ordered(self, x: jax.Array, attention: Layer, mlp: Layer) -> jax.Array:
        x = within(add(x, self.attention_norm(attention(x))))
        return add(x, self.mlp_norm(mlp(x)))


class SandwichNormBlock(OrderedBlock):
    """Transformer block with a norm before each sub-layer and one after it, the order of Gemma 2.

        x1 = x + attention_out_norm(attention(attention_norm(x)));  y = x1 + mlp_out_norm(mlp(mlp_norm(x1)))

    From Gemma 2 (arXiv 2408.00118), whose norms are RMSNorms with scale_offset=1.

    Args:
      attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: over D features.
      attention: called with (B, T, D) or (T, D).
      mlp: called with (..., D).
    """

    def __init__(
        self,
        attention_norm: RMSNorm | LayerNorm,
        attention: Attention,
        attention_out_norm: RMSNorm | LayerNorm,
        mlp_norm: RMSNorm | LayerNorm,
        mlp: GatedMLP | MLP,
        mlp_out_norm: RMSNorm | LayerNorm,
    ):
        self.attention_norm, self.attention, self.attention_out_norm = attention_norm, attention, attention_out_norm
        self.mlp_norm, self.mlp, self.mlp_out_norm = mlp_norm, mlp, mlp_out_norm

    def _ordered(self, x: jax.Array, attention: Layer, mlp: Layer) -> jax.Array:
        x = within(add(x, self.attention_out_norm(attention(self.attention_norm(x)))))
        return add(x, self.mlp_out_norm(mlp(self.mlp_norm(x))))


class ParallelBlock(OrderedBlock):
    """Transformer block whose two sub-layers read one norm, side by side, the order of GPT-J and Falcon.

        h = norm(x);  y = x + attention(h) + mlp(h)

    From GPT-J (Wang and Komatsuzaki, 2021) and Falcon (arXiv 2311.16867), whose norm is a LayerNorm.

    Args:
      norm: over D features.
      attention: called with (B, T, D) or (T, D).
      mlp: called with (..., D).
    """

    def __init__(self, norm: RMSNorm | LayerNorm, attention: Attention, mlp: GatedMLP | MLP):
        self.norm, self.attention, self.mlp = norm, attention, mlp

    def _ordered(self, x: jax.Array, attention: Layer, mlp: Layer) -> jax.Array:
        h = self.norm(x)
        return add(x, attention(h), mlp(h))
