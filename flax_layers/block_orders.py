"""Transformer blocks of other orders than the pre-norm one: norms behind the sub-layers, around them, or one for both.

Each is a `coda.block` of the layers that it is given: both passes are planned as one, whatever the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import spmd

import coda_jax as coda
from coda_jax import Stream
from flax_layers import on_values
from flax_layers.attention import Attention
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.norm import LayerNorm, RMSNorm
from flax_layers.on_values import in_stream
from flax_layers.remat import ATTENTION_OUTPUT, LAYER_INPUT, LAYER_OUTPUT, named
from flax_layers.sharding import STREAM, constrain, constrain_parameters, normalized

_Layer = Callable[[Any], Any]


class _OrderedBlock(nnx.Module):
    """A block whose subclass says in which order its layers are called.

    The layers are parts of one `coda.block`, which takes their parameters as arguments: it is traced once for all
    blocks of one structure, shapes and dtypes.
    """

    attention: Attention
    mlp: GatedMLP | MLP

    def _ordered(self, stream: Any, attention: _Layer, mlp: _Layer) -> Any:
        """What leaves the block; `attention` and `mlp` are called with a norm or with stream.x.

        All are values, or with a cache arrays.
        """
        raise NotImplementedError

    def __call__(
        self,
        x: jax.Array | Stream,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Applies the block.

        Args:
          x: (B, T, D) or (T, D), bfloat16, float16 or float32.
          positions, mask, segment_ids: as in Attention.
          cache: of the tokens before, as in Attention. Over a cache each layer is called by itself: nothing is planned
            as one.

        Returns:
          x's shape and dtype, a Stream with its statistic where x is a Stream; with a cache a pair of it and the longer
          cache.

        Raises:
          TypeError: layers that compute in several dtypes; an `mlp`, or a module in the place of a Linear, that does
            not take a `coda.Value`, as a MoE.
          ValueError: as in Attention.
        """
        block = constrain_parameters(self)
        stream = named(constrain(Stream.of(x), *STREAM), LAYER_INPUT)
        if cache is None and not _is_watched(block.attention):
            angles = block.attention._angles(x.shape, positions)
            of_values = _block(type(self).__name__, on_values.dtype_of_products(block, x))
            rules = normalized(spmd.get_logical_axis_rules())
            y = of_values(stream, *nnx.split(block), angles, mask, segment_ids, isinstance(x, Stream), rules)
            return named(constrain(_as(y, x.dtype), *STREAM), LAYER_OUTPUT)
        options = {"positions": positions, "mask": mask, "segment_ids": segment_ids}
        longer = cache

        def attention(h: Any) -> Any:
            nonlocal longer
            if cache is None:
                return block.attention(h, **options)
            attended, longer = block.attention(h, cache=cache, **options)
            return attended

        y = block._ordered(stream, attention, block.mlp)
        y = _as(Stream.of(y).with_statistic() if isinstance(x, Stream) else y, x.dtype)
        return y if cache is None else (y, longer)


_CALL = Attention.__call__


def _is_watched(attention: Any) -> bool:
    """Whether calls of layers are replaced, as by `nnx.tabulate`, which sees arrays: each is called by itself then."""
    return isinstance(attention, Attention) and Attention.__call__ is not _CALL


def _as(x: Any, dtype: Any) -> Any:
    """An array, or a Stream with its statistic, in this dtype."""
    if x.dtype == dtype:
        return x
    return Stream(x.x.astype(dtype), x.sumsq) if isinstance(x, Stream) else x.astype(dtype)


@functools.lru_cache(maxsize=64)
def _block(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """The `coda.block` of all blocks of this class that compute in this dtype.

    The rules are those in force, by which its values lie: under others it is traced anew.
    """

    def of_values(
        stream: Any, graphdef: Any, state: Any, angles: Any, mask: Any, segment_ids: Any, is_stream: bool, rules: Any
    ) -> Any:
        block = nnx.merge(graphdef, state)

        def attention(h: Any) -> Any:
            return block.attention(h, positions=angles, mask=mask, segment_ids=segment_ids).named(ATTENTION_OUTPUT)

        def mlp(h: Any) -> Any:
            return block.mlp(h).named(LAYER_OUTPUT)

        y = block._ordered(stream, attention, mlp)
        return Stream(y).with_statistic() if is_stream else y

    return coda.block(dtype=dtype, name=name)(of_values)


class _NormBehindBlock(_OrderedBlock):
    """A block with a norm behind each sub-layer."""

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
    """Transformer block with a norm behind each sum, the order of the first Transformer and of BERT.

        x1 = attention_norm(x + attention(x));  y = mlp_norm(x1 + mlp(x1))

    From "Attention Is All You Need" (arXiv 1706.03762) and BERT (arXiv 1810.04805).

    Args:
      attention: of (B, T, D) or (T, D); BERT's has is_causal=False and rope_theta=None.
      attention_norm, mlp_norm: over D features.
      mlp: of (..., D).
    """

    def _ordered(self, stream: Any, attention: _Layer, mlp: _Layer) -> Any:
        x = self.attention_norm(in_stream(stream.x + attention(stream.x), ATTENTION_OUTPUT))
        return self.mlp_norm(in_stream(x + mlp(x), LAYER_OUTPUT))


class NormBeforeSumBlock(_NormBehindBlock):
    """Transformer block with a norm behind each sub-layer, before the sum, the order of OLMo 2.

        x1 = x + attention_norm(attention(x));  y = x1 + mlp_norm(mlp(x1))

    From OLMo 2 (arXiv 2501.00656), whose norms are RMSNorms.

    Args:
      attention: of (B, T, D) or (T, D).
      attention_norm, mlp_norm: over D features.
      mlp: of (..., D).
    """

    def _ordered(self, stream: Any, attention: _Layer, mlp: _Layer) -> Any:
        x = in_stream(stream.x + self.attention_norm(attention(stream.x)), ATTENTION_OUTPUT)
        return in_stream(x + self.mlp_norm(mlp(x)), LAYER_OUTPUT)


class SandwichNormBlock(_OrderedBlock):
    """Transformer block with a norm in front of each sub-layer and one behind it, the order of Gemma 2.

        x1 = x + attention_out_norm(attention(attention_norm(x)));  y = x1 + mlp_out_norm(mlp(mlp_norm(x1)))

    From Gemma 2 (arXiv 2408.00118), whose norms are RMSNorms with scale_offset=1.

    Args:
      attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: over D features.
      attention: of (B, T, D) or (T, D).
      mlp: of (..., D).
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

    def _ordered(self, stream: Any, attention: _Layer, mlp: _Layer) -> Any:
        y = self.attention_out_norm(attention(self.attention_norm(stream)))
        x = in_stream(stream.x + y, ATTENTION_OUTPUT)
        return in_stream(x + self.mlp_out_norm(mlp(self.mlp_norm(x))), LAYER_OUTPUT)


class ParallelBlock(_OrderedBlock):
    """Transformer block whose two sub-layers read one norm, side by side, the order of GPT-J and Falcon.

        h = norm(x);  y = x + attention(h) + mlp(h)

    From GPT-J (Wang and Komatsuzaki, 2021) and Falcon (arXiv 2311.16867), whose norm is a LayerNorm.

    Args:
      norm: over D features.
      attention: of (B, T, D) or (T, D).
      mlp: of (..., D).
    """

    def __init__(self, norm: RMSNorm | LayerNorm, attention: Attention, mlp: GatedMLP | MLP):
        self.norm, self.attention, self.mlp = norm, attention, mlp

    def _ordered(self, stream: Any, attention: _Layer, mlp: _Layer) -> Any:
        h = self.norm(stream)
        return in_stream(stream.x + attention(h) + mlp(h), LAYER_OUTPUT)
