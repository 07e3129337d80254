"""For plans of models: what products, attention and the loss's head cost on a chip, by their sizes; and the tables and
plots that show it. Nothing is traced.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend import costs as _attention
from coda_jax.attend.spec import MaskSpec as _MaskSpec
from coda_jax.operators.head.arguments import CHUNK_BYTES as _CHUNK_BYTES
from coda_jax.operators.head.arguments import CHUNK_BYTES_BESIDE_A_COPY as _CHUNK_BYTES_BESIDE_A_COPY
from coda_jax.operators.head.arrays import Kernel as _Kernel
from coda_jax.operators.head.arrays import Tokens as _Tokens
from coda_jax.operators.head.chunks import chunk_size as _chunk_size
from coda_jax.operators.head.chunks import columns_of as _columns_of
from coda_jax.operators.head.loss_head import LossHead as _LossHead
from coda_jax.operators.head.shifted_heads import ExponentialHead as _ExponentialHead
from coda_jax.tiles.cost_model import GemmShape as GemmShape
from coda_jax.tools.costs import bare_us as bare_us
from coda_jax.tools.devices import DEFAULT_DEVICE as DEFAULT_DEVICE
from coda_jax.tools.devices import device_named as device_named
from coda_jax.tools.devices import fits as fits
from coda_jax.tools.devices import fraction_note as fraction_note
from coda_jax.tools.devices import gib_of_chip as gib_of_chip
from coda_jax.tools.plot import BESIDE as BESIDE
from coda_jax.tools.plot import OURS as OURS
from coda_jax.tools.plot import canvas as canvas
from coda_jax.tools.plot import legend as legend
from coda_jax.tools.text import columns as columns

__all__ = [
    "BESIDE",
    "DEFAULT_DEVICE",
    "OURS",
    "GemmShape",
    "bare_us",
    "canvas",
    "causal_attention_ms",
    "columns",
    "device_named",
    "fits",
    "fraction_note",
    "gib_of_chip",
    "legend",
    "loss_chunk",
]


def causal_attention_ms(batch: int, length: int, heads: int, width: int, *, is_backward: bool) -> float:
    """Milliseconds of causal attention of so many heads to rows of so many tokens, by `coda.attention`'s kernels."""
    q = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.bfloat16)
    seen = _attention.pairs(_MaskSpec(right=0), length, length)
    flops = _attention.flops((q, q, q), seen, is_backward=is_backward) or 0
    return _attention.nanoseconds(flops, is_backward=is_backward) / 1e6


def loss_chunk(tokens: int, features: int, vocabulary: int, *, has_copy: bool) -> tuple[int, int]:
    """The tokens of a chunk of `coda.linear_cross_entropy`, and the columns that it has for each.

    Args:
      tokens, features, vocabulary: of x (tokens, features) and the head's weight, in bfloat16.
      has_copy: whether a copy of the weight is held, as one that is gathered or cast.
    """
    bfloat16 = np.dtype(jnp.bfloat16)
    columns = _columns_of(vocabulary, bfloat16)
    logits_bytes = _CHUNK_BYTES_BESIDE_A_COPY if has_copy else _CHUNK_BYTES
    options = _LossHead(vocabulary, columns, logits_bytes, False, bfloat16, "auto")
    weight = _Kernel(jax.ShapeDtypeStruct((features, vocabulary), bfloat16))  # type: ignore[arg-type]
    x = _Tokens(jax.ShapeDtypeStruct((tokens, features), bfloat16))  # type: ignore[arg-type]
    head = _ExponentialHead.of(options, x, weight, None)
    return _chunk_size(tokens, 2 * columns, head.chunk_bytes) or tokens, columns
