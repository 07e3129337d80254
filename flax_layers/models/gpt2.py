"""GPT-2: a decoder-only language model with learned positions, layer norms and biases."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax.extend import explicit_cuts, without_axes
from flax_layers.attend import Implementation
from flax_layers.attention import Attention
from flax_layers.block import TransformerBlock
from flax_layers.config_checks import check_activation, check_counts, check_flags, check_not_negative
from flax_layers.decoding.kv_cache import KVCache, decode_layers
from flax_layers.embed import Embed, PositionEmbed
from flax_layers.fp8 import Recipes, layer_recipes
from flax_layers.layer_stack import run_layers
from flax_layers.lm_head import LMHead, logits_of
from flax_layers.mlp import MLP
from flax_layers.models.language_model import LanguageModel, under_rules
from flax_layers.norm import LayerNorm
from flax_layers.sharding import STREAM, Rules, constrain, normalized


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2, with the names and defaults of Hugging Face's GPT2Config.

    n_inner defaults to 4 n_embd. There is no dropout. `origin` holds the settings that a checkpoint came with, see
    `flax_layers.models.origin`; it does not count when configs are compared.

    Raises:
      ValueError: a field out of its range.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    origin: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "n_positions", "n_embd", "n_head", "n_inner")
        check_counts(self, "n_layer", least=0)
        check_not_negative(self, "layer_norm_epsilon", "initializer_range")
        check_flags(self, "tie_word_embeddings")
        check_activation(self, "activation_function")


def gpt2_block(
    config: GPT2Config,
    *,
    separate_qkv: bool = False,
    attention_implementation: Implementation | None = None,
    fp8: coda.fp8.Recipe | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> TransformerBlock:
    """The block of GPT-2: LayerNorms, attention without rotary embedding, an MLP, all with biases.

    Args:
      config: sizes.
      separate_qkv, attention_implementation: of Attention.
      fp8: of Attention and of the MLP.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of the parameters.
      rngs: source of keys.
    """
    width = config.n_embd
    norm = partial(LayerNorm, width, epsilon=config.layer_norm_epsilon, param_dtype=param_dtype, rngs=rngs)
    options: dict[str, Any] = {
        "use_bias": True,
        "dtype": dtype,
        "param_dtype": param_dtype,
        "kernel_init": nnx.initializers.normal(config.initializer_range),
        "rngs": rngs,
    }
    return TransformerBlock(
        norm(),
        Attention(
            width,
            config.n_head,
            rope_theta=None,
            separate_qkv=separate_qkv,
            implementation=attention_implementation,
            fp8=fp8,
            **options,
        ),
        norm(),
        MLP(width, config.n_inner or 4 * width, activation=config.activation_function, fp8=fp8, **options),
    )


class GPT2(LanguageModel):
    """GPT-2: token and position embeddings, pre-norm blocks, final norm, head tied to the token embedding or not.

    Positions are below n_positions; those of packed sequences begin anew with each by positions="restart".

    Args:
      config: sizes.
      separate_qkv: whether query, key and value have kernels of their own, as tensor parallelism needs them: see
        Attention.
      rules: how a mesh shards parameters and activations, as `flax_layers.sharding.FSDP`; see `flax_layers.sharding`.
      attention_implementation: Attention's implementation.
      fp8: a `coda.fp8.Recipe` by which attention's products and those of dense feed-forward layers train in 8 bits, or
        a sequence, one or None for each layer; default all in the compute dtype, in which embedding, experts and head
        always are.
      dtype: compute dtype, also of the logits; default that of the parameters.
      param_dtype: storage dtype of the parameters.
      rngs: source of keys.
    """

    max_length = "n_positions"

    def __init__(
        self,
        config: GPT2Config,
        *,
        separate_qkv: bool = False,
        rules: Rules | None = None,
        attention_implementation: Implementation | None = None,
        fp8: Recipes = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.rules = normalized(rules)
        init = nnx.initializers.normal(config.initializer_range)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embed = Embed(config.vocab_size, config.n_embd, embedding_init=init, **options)
        self.position_embed = PositionEmbed(config.n_positions, config.n_embd, embedding_init=init, **options)
        layout: dict[str, Any] = {"separate_qkv": separate_qkv, "attention_implementation": attention_implementation}
        block = partial(gpt2_block, config, **layout, **options)
        self.layers = nnx.List(block(fp8=recipe) for recipe in layer_recipes(fp8, config.n_layer))
        self.norm = LayerNorm(config.n_embd, epsilon=config.layer_norm_epsilon, param_dtype=param_dtype, rngs=rngs)
        self.head = LMHead(
            config.n_embd, config.vocab_size, tied=config.tie_word_embeddings, kernel_init=init, **options
        )
        self.config = config
        self.origin = config.origin

    def _embedding(self) -> jax.Array | None:
        return self.embed.embedding[...] if self.config.tie_word_embeddings else None

    @under_rules
    def decode(
        self, tokens: jax.Array, cache: list[KVCache], *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, list[KVCache]]:
        """Logits after the tokens, and the cache, which then holds these too; see `Llama.decode`."""
        x = self._embedded(tokens, cache[0].positions(tokens.shape[1]))
        x, longer = decode_layers(self.layers, x, cache, lengths)
        return logits_of(self.head, self.norm(x), self._embedding())[:, 0], longer

    def _features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array:
        """The features that the head projects."""
        if positions is None:
            positions = jnp.arange(tokens.shape[-1])
        x = run_layers(self.layers, self._embedded(tokens, positions), mask=mask, segment_ids=segment_ids)
        return constrain(self.norm(x), *STREAM, beside=("vocab",))

    def _embedded(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Tokens and positions; the positions' columns are gathered over explicit mesh axes that shard the tokens."""
        x, position_rows = self.embed(tokens), self.position_embed(positions)
        token_axes = frozenset().union(*explicit_cuts(x)[:-1])
        return x + without_axes(position_rows, position_rows.ndim - 1, token_axes)
