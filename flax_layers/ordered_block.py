"""A transformer block of layers in any order, as one `coda.block`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from coda_jax import Stream
from coda_jax.extend import array, store_as
from flax_layers.as_block import in_block
from flax_layers.attention import Attention
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.on_values import Angles, accepts_values, dtype_of_products, why_not, why_not_one_dtype, with_reason
from flax_layers.remat import ATTENTION_OUTPUT, LAYER_INPUT, LAYER_OUTPUT, named
from flax_layers.sharding import STREAM, constrain, constrain_parameters
from flax_layers.text_angles import angles_of

Layer = Callable[[Any], Any]
Order = Callable[[Any, Any, Layer, Layer], Any]

_FLAX_NORMS = nnx.RMSNorm, nnx.LayerNorm, nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm


class OrderedBlock(nnx.Module):
    """A block whose subclass says in which order its layers are called.

    The layers are one `coda.block`, whose arguments are their parameters: both passes are planned as one, whatever the
    order, and traced once for all blocks of one structure, shapes and dtypes.
    """

    attention: Attention
    mlp: GatedMLP | MLP

    def _ordered(self, stream: Any, attention: Layer, mlp: Layer) -> Any:
        """The stream after the block; `attention` and `mlp` are called with a norm or with stream.x.

        The arguments are values, or arrays where the block is not one `coda.block`.
        """
        raise NotImplementedError

    @property
    def takes_segments(self) -> bool:
        """Whether segment_ids may be `Segments`: attention and block are called as this library has written them."""
        module = getattr(type(self).__call__, "__module__", None) or ""
        return module.partition(".")[0] == "flax_layers" and accepts_values(self.attention)

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
          positions, mask, segment_ids, cache: as in Attention.

        Returns:
          x's shape and dtype, a Stream with its statistic where x is a Stream; with a cache a pair of it and the longer
          cache. A layer that takes no values, or has another module in the place of a Linear, is called with arrays:
          nothing is planned as one then, and a note says so.

        Raises:
          ValueError: as in Attention.
          TypeError: a norm of flax's.
        """
        block = constrain_parameters(self)
        layers = [block.attention, block.mlp]
        arrays, is_stream = (positions, mask, segment_ids, cache), isinstance(x, Stream)
        stream, longer = block._run(type(self)._ordered, layers, entering(x), *arrays, has_sums=is_stream)
        y = leaving(stream, x)
        return y if cache is None else (y, longer)

    def _run(
        self,
        order: Order,
        layers: Sequence[Any],
        stream: Stream,
        positions: Any = None,
        mask: Any = None,
        segment_ids: Any = None,
        cache: KVCache | None = None,
        *,
        has_sums: bool = True,
    ) -> tuple[Stream, KVCache | None]:
        """The stream after these layers in this order, with its statistic if has_sums, and the longer cache."""
        _check_norms(self)
        reasons = (*(why_not(layer, stream) for layer in layers), why_not_one_dtype(layers, stream))
        reason = next(filter(None, reasons), None)
        if reason is None:
            angles = None
            if self.attention in layers:
                angles = angles_of(self.attention, stream.shape, positions, cache, segment_ids, mask)
            result: tuple[Stream, KVCache | None] = in_block(
                type(self).__name__,
                _on_values,
                self._in_block(),
                stream,
                angles,
                mask,
                segment_ids,
                cache,
                dtype=dtype_of_products(layers, stream),
                order=order,
                out_dtype=stream.dtype,
                has_sums=has_sums,
            )
            return result
        options = {"positions": positions, "mask": mask, "segment_ids": segment_ids}
        longer = None

        def attention(h: Any) -> Any:
            nonlocal longer
            if cache is None:
                return self.attention(as_taken(self.attention, h), **options)
            attended, longer = self.attention(as_taken(self.attention, h), cache=cache, **options)
            return attended

        def as_taken(layer: Any, h: Any) -> Any:
            return h if accepts_values(layer) else array(h)

        y = order(self, stream, attention, lambda h: self.mlp(as_taken(self.mlp, h)))
        return Stream(with_reason(y, reason).astype(stream.dtype)).with_statistic(), longer

    def _in_block(self) -> OrderedBlock:
        """The block as its `coda.block` reads it."""
        layers = {name: getattr(self, name) for name in ("attention", "mlp")}
        in_blocks = {name: layer._in_block() for name, layer in layers.items() if accepts_values(layer)}
        if all(layer is layers[name] for name, layer in in_blocks.items()):
            return self
        block: OrderedBlock = nnx.merge(*nnx.split(self))
        for name, layer in in_blocks.items():
            setattr(block, name, layer)
        return block


def _check_norms(block: Any) -> None:
    """Raises TypeError for a block one of whose norms is flax's, which takes neither a Stream nor a value."""
    calls = [norm.__call__ for norm in _FLAX_NORMS]
    for name, module in vars(block).items():
        if name.endswith("norm") and isinstance(module, _FLAX_NORMS) and type(module).__call__ in calls:
            raise TypeError(
                f"{type(block).__name__}.{name} is flax's {type(module).__name__}; it must be a flax_layers.RMSNorm or "
                "LayerNorm"
            )


def _on_values(
    block: Any,
    stream: Any,
    angles: Angles | None,
    mask: Any,
    segment_ids: Any,
    cache: Any,
    *,
    order: Order,
    out_dtype: Any,
    has_sums: bool,
) -> Any:
    longer = None

    def attention(h: Any) -> Any:
        nonlocal longer
        y = block.attention(h, positions=angles, mask=mask, segment_ids=segment_ids, cache=cache)
        y, longer = (y, None) if cache is None else y
        return y.named(ATTENTION_OUTPUT)

    def mlp(h: Any) -> Any:
        return block.mlp(h).named(LAYER_OUTPUT)

    y: Any = store_as(order(block, stream, attention, mlp), out_dtype)
    return Stream(y).with_statistic() if has_sums else Stream(y), longer


def entering(x: jax.Array | Stream) -> Stream:
    """The stream that enters a block."""
    return named(constrain(Stream.of(x), *STREAM), LAYER_INPUT)


def leaving(stream: Stream, x: jax.Array | Stream) -> jax.Array | Stream:
    """The stream that leaves a block; an array, if an array entered."""
    stream = named(constrain(stream, *STREAM), LAYER_OUTPUT)
    return stream if isinstance(x, Stream) else stream.x
