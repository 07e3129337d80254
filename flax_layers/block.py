"""A pre-norm transformer block."""

from __future__ import annotations

from typing import Any, overload

import jax

from coda_jax import Stream
from flax_layers.attention import Attention
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.moe.moe import MoE
from flax_layers.norm import LayerNorm, RMSNorm
from flax_layers.on_values import in_stream, why_not, why_not_one_dtype
from flax_layers.ordered_block import Layer, OrderedBlock, entering, leaving
from flax_layers.remat import ATTENTION_OUTPUT, LAYER_OUTPUT, named
from flax_layers.sharding import STREAM, constrain, constrain_parameters


class TransformerBlock(OrderedBlock):
    """Pre-norm transformer block of given modules; the residual stream flows through.

    x1 = x + r attention(attention_norm(x));  y = x1 + r mlp(mlp_norm(x1))

    `LlamaBlock` makes one from its sizes.

    Args:
      attention_norm, mlp_norm: RMSNorm or LayerNorm, or what returns a norm of a Stream, as `coda_jax.rms_norm` does.
      attention: Attention, or what is called as attention(h, positions=, mask=, segment_ids=[, cache=]) with the norm's
        array (B, T, D).
      mlp: GatedMLP, MLP or MoE, or what is called as mlp(h) with the norm's array.
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

    @overload  # type: ignore[override]
    def __call__(
        self,
        x: Stream,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: None = None,
    ) -> Stream: ...
    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: None = None,
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array | Stream, *, positions: jax.Array | None = None, cache: KVCache
    ) -> tuple[Any, KVCache]: ...
    def __call__(
        self,
        x: jax.Array | Stream,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        statistics: bool = False,
        token_mask: jax.Array | None = None,
    ) -> Any:
        """Applies the block to x (B, T, D); an array in gives an array out, a Stream a Stream.

        positions, mask, segment_ids and cache are Attention's; with a cache the result is (y, cache). statistics and
        token_mask are MoE's; with statistics the result is (y, the MoE's statistics), which are None for another `mlp`.
        """
        block, stream = constrain_parameters(self), entering(x)
        arrays, counted, is_stream = (positions, mask, segment_ids, cache), None, isinstance(x, Stream)
        layers = [block.attention, block.mlp]
        if not any(why_not(layer, stream) for layer in layers) and not why_not_one_dtype(layers, stream):
            stream, longer = block._run(TransformerBlock._ordered, layers, stream, *arrays, has_sums=is_stream)
        else:
            stream, longer = block._run(TransformerBlock._attended, layers[:1], stream, *arrays)
            stream = named(constrain(stream, *STREAM), ATTENTION_OUTPUT)
            if isinstance(block.mlp, MoE):
                options: dict[str, Any] = {"statistics": True, "token_mask": token_mask} if statistics else {}
                result = block.mlp(block.mlp_norm(stream), residual=True, **options)
                stream, counted = result if statistics else (result, None)
            else:
                stream, _ = block._run(TransformerBlock._fed, layers[1:], stream, has_sums=is_stream)
        y = leaving(stream, x)
        extras = (*(() if cache is None else (longer,)), *((counted,) if statistics else ()))
        return (y, *extras) if extras else y

    def _ordered(self, stream: Any, attention: Layer, mlp: Layer) -> Any:
        return self._fed(Stream(self._attended(stream, attention, mlp)), attention, mlp)

    def _attended(self, stream: Any, attention: Layer, mlp: Layer) -> Any:
        """The stream after the first sub-layer."""
        return in_stream(stream.x + self._scaled(attention(self.attention_norm(stream))), ATTENTION_OUTPUT)

    def _fed(self, stream: Any, attention: Layer, mlp: Layer) -> Any:
        """The stream after the second sub-layer."""
        return in_stream(stream.x + self._scaled(mlp(self.mlp_norm(stream))), LAYER_OUTPUT)

    def _scaled(self, y: Any) -> Any:
        return y if self.residual_multiplier == 1 else y * self.residual_multiplier
