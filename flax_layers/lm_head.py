"""The output projection of a language model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from coda_jax import linear_cross_entropy, token_logprobs
from flax_layers.activation import soft_capped
from flax_layers.adapters import LowRank
from flax_layers.axis_metadata import parameter
from flax_layers.fused import fused
from flax_layers.linear import add, default_kernel_init, product
from flax_layers.sharding import constrain


class LMHead(nnx.Module):
    """Projection to the vocabulary.

    logits = x @ kernel,  or  x @ embedding^T  where the weight is tied to the token embedding

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
        if tied:
            self.kernel = nnx.data(None)
        else:
            kernel = kernel_init(rngs.params(), (in_features, vocab_size), param_dtype)
            self.kernel = parameter(kernel, "embed", "vocab")
        self.in_features = in_features
        self.vocab_size = vocab_size
        self.dtype = dtype

    @fused
    def __call__(self, x: jax.Array, *, embedding: jax.Array | None = None, soft_cap: float | None = None) -> jax.Array:
        """Logits (..., V) of x (..., D).

        Args:
          x: (..., D).
          embedding: (V, D), required of a tied head and refused by an untied one.
          soft_cap: logits become soft_cap * tanh(logits / soft_cap), in the product's epilogue.

        Raises:
          ValueError: x or embedding of another shape, an embedding for an untied head, or none for a tied one.
        """
        weight = self._weight(embedding)
        return _capped(product(x, weight.T if self.kernel is None else weight, dtype=self.dtype), soft_cap)

    def loss(
        self,
        x: jax.Array,
        labels: jax.Array,
        *,
        weights: jax.Array | None = None,
        embedding: jax.Array | None = None,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy of the logits of x (..., D) with labels (...), without an array of all logits.

        Args:
          x: (..., D).
          labels: (...) integers; tokens with the label -100 do not count.
          weights: (...), of the tokens; default 1.
          embedding: as in `__call__`.
          **options: of `coda_jax.linear_cross_entropy`: reduction, ignore_index, label_smoothing, z_loss, soft_cap,
            chunk_bytes.

        Returns:
          The mean over the tokens, () float32, and the sum of their weights; see `coda_jax.linear_cross_entropy`.

        Raises:
          ValueError: as `__call__`, or a shape or option that `coda_jax.linear_cross_entropy` refuses.
        """
        return linear_cross_entropy(
            x,
            self._weight(embedding),
            labels,
            weights=weights,
            transpose_w=self.kernel is None,
            dtype=self.dtype,
            **options,
        )

    def token_logprobs(
        self,
        x: jax.Array,
        labels: jax.Array,
        *,
        embedding: jax.Array | None = None,
        **options: Any,
    ) -> Any:
        """Log-probabilities of labels (...), or of k labels a token (..., k), without an array of all logits.

        Args:
          x: (..., D).
          labels: integers; -100 gives 0.
          embedding: as in `__call__`.
          **options: of `coda_jax.token_logprobs`: temperature, entropy, mask, ignore_index, soft_cap, chunk_bytes.

        Returns:
          float32, of the shape of labels; with `entropy` a pair of them and of the entropies (...).

        Raises:
          ValueError: as `__call__`, or a shape or option that `coda_jax.token_logprobs` refuses.
        """
        return token_logprobs(
            x,
            self._weight(embedding),
            labels,
            transpose_w=self.kernel is None,
            dtype=self.dtype,
            **options,
        )

    def _weight(self, embedding: jax.Array | None) -> jax.Array:
        """The module's kernel (D, V), or the embedding (V, D) where it is tied."""
        if self.kernel is None:
            if embedding is None:
                raise ValueError("a tied LMHead has no kernel: give it embedding=")
            if embedding.shape != (self.vocab_size, self.in_features):
                raise ValueError(f"embedding has shape {embedding.shape}, not {(self.vocab_size, self.in_features)}")
            return constrain(embedding, "vocab", "embed")
        if embedding is not None:
            raise ValueError("an LMHead with its own kernel takes no embedding=")
        return constrain(self.kernel[...], "embed", "vocab")


class _AdaptedHead(NamedTuple):
    """An adapter in the place of an LMHead: logits = x @ w + x @ a @ b.

    Attributes:
      w: (D, V), or with `transposed` (V, D).
      low_rank: the adapter.
    """

    w: jax.Array
    transposed: bool
    low_rank: LowRank

    @classmethod
    def of(cls, head: Any, embedding: jax.Array | None) -> _AdaptedHead | None:
        if isinstance(head, nnx.LoRA) and isinstance(head.base_module, LMHead):
            base = head.base_module
            return cls(base._weight(embedding), base.kernel is None, LowRank(base, head))
        adapter = LowRank.of(head)
        if adapter is None:
            return None
        if embedding is not None:
            raise ValueError(
                f"a {type(head).__name__} has a kernel of its own, and the head is tied to the embedding: "
                "put nnx.LoRA(..., base_module=model.head) in its place"
            )
        if adapter.bias is not None:
            raise ValueError(f"a {type(head).__name__} with a bias stands in the place of a head: give use_bias=False")
        return cls(adapter.kernel, False, adapter)

    def options(self) -> dict[str, Any]:
        """The head's keyword arguments for the operators over a vocabulary."""
        lora = self.low_rank.lora
        delta = lora.lora_a[...], lora.lora_b[...]
        return {"w": self.w, "low_rank": delta, "transpose_w": self.transposed, "dtype": self.low_rank.dtype}


def _capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """soft_cap * tanh(logits / soft_cap), in float32, in the dtype of the logits."""
    if soft_cap is None:
        return logits
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return soft_capped(wide, soft_cap=soft_cap).astype(logits.dtype)


def logits_of(head: Any, x: jax.Array, embedding: jax.Array | None, soft_cap: float | None = None) -> jax.Array:
    """Logits (..., V) of an LMHead or a module in its place; arguments as in `LMHead.__call__`."""
    adapted = _AdaptedHead.of(head, embedding)
    if adapted is None and isinstance(head, LMHead):
        return head(x, embedding=embedding, soft_cap=soft_cap)
    if adapted is None:
        plain: jax.Array = head(x, embedding=embedding)
        return plain if soft_cap is None else soft_capped(plain, soft_cap=soft_cap)
    w, transposed, low_rank = adapted
    y = product(x, w.T if transposed else w, dtype=low_rank.dtype)
    return _capped(add(y, low_rank.delta(x)), soft_cap)


def loss_of(
    head: Any, x: jax.Array, labels: jax.Array, *, embedding: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """`LMHead.loss`, also of an adapter in its place."""
    adapted = _AdaptedHead.of(head, embedding)
    if adapted is None:
        result: tuple[jax.Array, jax.Array] = head.loss(x, labels, embedding=embedding, **options)
        return result
    return linear_cross_entropy(x, labels=labels, **adapted.options(), **options)


def token_logprobs_of(
    head: Any, x: jax.Array, labels: jax.Array, *, embedding: jax.Array | None, **options: Any
) -> Any:
    """`LMHead.token_logprobs`, also of an adapter in its place."""
    adapted = _AdaptedHead.of(head, embedding)
    if adapted is None:
        return head.token_logprobs(x, labels, embedding=embedding, **options)
    return token_logprobs(x, labels=labels, **adapted.options(), **options)
