"""The output projection of a language model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.linear import default_kernel_init, project
from flax_layers.stream import Normalized, Stream


class LMHead(nnx.Module):
    """Projection to the vocabulary.

    logits = x @ kernel,  or  x @ embedding^T  where the weight is tied to the token embedding

    The row factor of a final norm is applied in the product's epilogue.

    Args:
      in_features: D.
      vocab_size: V.
      tied: whether the module owns no kernel and is given the embedding at each call.
      dtype: compute dtype; default the promotion of input and kernel.
      param_dtype: storage dtype of `kernel` (D, V).
      kernel_init: initialiser of `kernel`.
      rngs: source of keys.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        *,
        tied: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.kernel = (
            nnx.data(None) if tied else nnx.Param(kernel_init(rngs.params(), (in_features, vocab_size), param_dtype))
        )
        self.in_features = in_features
        self.vocab_size = vocab_size
        self.dtype = dtype

    def __call__(self, x: jax.Array | Stream | Normalized, *, embedding: jax.Array | None = None) -> jax.Array:
        """Logits (..., V) of x (..., D).

        Args:
          x: (..., D).
          embedding: (V, D), required of a tied head and refused by an untied one.

        Raises:
          ValueError: x or embedding of another shape, or an embedding where none belongs or none where one does.
        """
        if embedding is None:
            if self.kernel is None:
                raise ValueError("a tied LMHead has no kernel: give it embedding=")
            return project(x, self.kernel[...], dtype=self.dtype)
        if self.kernel is not None:
            raise ValueError("an LMHead with its own kernel takes no embedding=")
        if embedding.shape != (self.vocab_size, self.in_features):
            raise ValueError(f"embedding has shape {embedding.shape}, not {(self.vocab_size, self.in_features)}")
        return project(x, embedding, dtype=self.dtype, transpose_b=True)
