"""Llama: a decoder-only language model of pre-norm blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from coda_jax import DeferredNorm, Stream
from flax_layers.attend import Implementation
from flax_layers.block import LlamaBlock
from flax_layers.config_checks import check_activation, check_counts, check_flags, check_not_negative, check_positive
from flax_layers.decoding.kv_cache import KVCache, decode_layers
from flax_layers.embed import Embed
from flax_layers.layer_stack import run_layers, stack, unstack
from flax_layers.lm_head import LMHead, logits_of
from flax_layers.models.language_model import LanguageModel, under_rules
from flax_layers.norm import RMSNorm
from flax_layers.remat import Remat, policy_of
from flax_layers.rope_scaling import RopeScaling
from flax_layers.sharding import STREAM, Rules, constrain, normalized


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama, a Mistral, a Qwen2 or a Qwen3, with the names and defaults of Hugging Face's LlamaConfig.

    num_key_value_heads defaults to num_attention_heads, head_dim to hidden_size / num_attention_heads. attention_bias
    gives the query, key and value projections biases, and the output projection too unless attention_out_bias says
    otherwise. hidden_act is a name in `flax_layers.activation`, or a function. qk_norm normalises queries and keys.
    sliding_window, as Mistral's config names it, is how many tokens a token sees, itself and those before; default all.
    rope_theta None is no rotary embedding. Beside a plain Llama, a Qwen2 has attention_bias without
    attention_out_bias, a Qwen3 qk_norm, a Mistral a sliding_window. `origin` is what stood in the settings that a
    checkpoint came with, see `flax_layers.models.origin`; it does not count when configs are compared.

    Raises:
      ValueError: a field out of its range.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = 10000.0
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    origin: str | None = dataclasses.field(default=None, compare=False, repr=False)
    attention_out_bias: bool | None = None

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        check_counts(self, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
        check_counts(self, "num_hidden_layers", least=0)
        check_not_negative(self, "rms_norm_eps", "initializer_range")
        check_flags(self, "attention_bias", "attention_out_bias", "qk_norm", "tie_word_embeddings")
        check_activation(self, "hidden_act")
        if self.rope_theta is not None:
            check_positive(self, "rope_theta")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(
                f"LlamaConfig: rope_scaling={self.rope_scaling!r}; it must be a RopeScaling or None. "
                "config_from_hf makes one of Hugging Face's dictionary."
            )

    @property
    def resolved_head_dim(self) -> int:
        """head_dim, or what it is by default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def resolved_num_key_value_heads(self) -> int:
        """num_key_value_heads, or what it is by default."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def resolved_attention_out_bias(self) -> bool:
        """attention_out_bias, or what it is by default."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @classmethod
    def llama3_8b(cls) -> LlamaConfig:
        """Llama 3 8B."""
        return cls(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
        )

    @classmethod
    def llama3_1b(cls) -> LlamaConfig:
        """Llama 3.2 1B."""
        return cls(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(factor=32.0),
            tie_word_embeddings=True,
        )

    @classmethod
    def qwen3_0_6b(cls) -> LlamaConfig:
        """Qwen3 0.6B."""
        return cls(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_theta=1000000.0,
            qk_norm=True,
            tie_word_embeddings=True,
        )


class Llama(LanguageModel):
    """Llama: token embedding, pre-norm blocks, final norm, language-model head.

    Args:
      config: sizes.
      scan_layers: whether `layers` is one block, whose parameters are those of all blocks stacked along a new first
        axis, and the blocks are a scan: it compiles in the time of one block, and takes longer to run. The parameters
        are the same ones, layers[i].attention.qkv.kernel being layers.attention.qkv.kernel[i].
      separate_qkv: whether query, key and value have kernels of their own, as tensor parallelism wants them: see
        Attention.
      separate_gate_up: whether gate and up have kernels of their own: see GatedMLP.
      remat: what the backward pass computes again: None, nothing; "full", "save_qkv" or "save_attention"; names of the
        arrays to keep; or a policy of `jax.checkpoint_policies`. See `flax_layers.remat`.
      remat_layers: how many layers, the first, are under `remat`; default all. As many as memory asks for is fastest.
      rules: how parameters and activations lie on a mesh, as `flax_layers.sharding.FSDP`; see `flax_layers.sharding`.
      attention_implementation: Attention's implementation.
      dtype: compute dtype, also of the logits; default that of the parameters.
      param_dtype: storage dtype of the parameters.
      rngs: source of keys.

    Raises:
      ValueError: an unknown remat, scan_layers without layers, or remat_layers out of range, beside scan_layers or
        without remat.
    """

    max_length = "max_position_embeddings"

    def __init__(
        self,
        config: LlamaConfig,
        *,
        scan_layers: bool = False,
        separate_qkv: bool = False,
        separate_gate_up: bool = False,
        remat: Remat = None,
        remat_layers: int | None = None,
        rules: Rules | None = None,
        attention_implementation: Implementation | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.rules = normalized(rules)
        policy_of(remat)  # refuses what is unknown, now
        self.remat = remat if remat is None or isinstance(remat, str) or callable(remat) else tuple(remat)
        if remat_layers is not None:
            if remat is None or scan_layers:
                raise ValueError(
                    f"{remat_layers=} wants remat, and layers that are not scanned; {remat=}, {scan_layers=}"
                )
            if not 0 <= remat_layers <= config.num_hidden_layers:
                raise ValueError(f"{remat_layers=} of {config.num_hidden_layers} layers")
        self.remat_layers = remat_layers
        width = config.hidden_size
        kernel_init = nnx.initializers.normal(config.initializer_range)
        self.embed = Embed(
            config.vocab_size, width, dtype=dtype, param_dtype=param_dtype, embedding_init=kernel_init, rngs=rngs
        )
        blocks = [
            LlamaBlock(
                width,
                config.intermediate_size,
                config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rope_theta=config.rope_theta,
                rope_scaling=config.rope_scaling,
                qk_norm=config.qk_norm,
                use_bias=config.attention_bias,
                use_out_bias=config.resolved_attention_out_bias,
                separate_qkv=separate_qkv,
                separate_gate_up=separate_gate_up,
                activation=config.hidden_act,
                sliding_window=config.sliding_window,
                attention_implementation=attention_implementation,
                epsilon=config.rms_norm_eps,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.layers = stack(blocks) if scan_layers else nnx.List(blocks)
        self.norm = RMSNorm(width, epsilon=config.rms_norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.head = LMHead(
            width,
            config.vocab_size,
            tied=config.tie_word_embeddings,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.config = config
        self.origin = config.origin

    def _embedding(self) -> jax.Array | None:
        """What a tied head projects with."""
        return self.embed.embedding[...] if self.config.tie_word_embeddings else None

    def _features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> DeferredNorm:
        """What the head projects."""
        stream = Stream.of(self.embed(tokens))
        options = {"positions": positions, "mask": mask, "segment_ids": segment_ids}
        stream = run_layers(self.layers, stream, remat=self.remat, remat_layers=self.remat_layers, **options)
        return self.norm(constrain(stream, *STREAM, beside=("vocab",)))

    @under_rules
    def decode(
        self, tokens: jax.Array, cache: list[KVCache], *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, list[KVCache]]:
        """Logits of what follows the tokens, which the cache then holds too.

        Args:
          tokens: (B, T): a whole prompt, or T more tokens.
          cache: of the tokens before, as `init_cache` or this returns it.
          lengths: (B,) int32, 1 to T: how many tokens of each row there are, padding comes after; default T.

        Returns:
          Logits (B, V) after the last token of each row, and the cache.

        Raises:
          ValueError: more tokens than the cache's capacity. Under jit it is not known how many it holds: there those
            past its capacity are dropped.
        """
        stream, longer = decode_layers(self._layers(), Stream.of(self.embed(tokens)), cache, lengths)
        return logits_of(self.head, self.norm(stream), self._embedding())[:, 0], longer

    def _layers(self) -> Any:
        """The layers one by one, also where they are stacked."""
        return self.layers if isinstance(self.layers, nnx.List) else unstack(self.layers)
