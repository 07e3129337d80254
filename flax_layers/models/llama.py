"""Llama: a decoder-only language model of pre-norm blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from flax_layers.activation import Activation
from flax_layers.attend import Implementation
from flax_layers.attention import Attention
from flax_layers.block import TransformerBlock
from flax_layers.config_checks import check_alike
from flax_layers.decoding.kv_cache import KVCache, decode_layers
from flax_layers.decoding.text_cache import TextCache, decode_text
from flax_layers.embed import Embed
from flax_layers.fp8 import Recipes, layer_recipes
from flax_layers.layer_stack import run_layers, stack, unstack
from flax_layers.linear import default_kernel_init
from flax_layers.lm_head import LMHead, logits_of
from flax_layers.mlp import GatedMLP
from flax_layers.models.language_model import LanguageModel, under_rules
from flax_layers.models.llama_config import LlamaConfig as LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.parts import attention_options
from flax_layers.moe.balancing import RouterStatistics, auxiliary_loss
from flax_layers.moe.moe import MoE
from flax_layers.norm import RMSNorm
from flax_layers.remat import Remat, policy_of
from flax_layers.rope_scaling import RotaryScaling
from flax_layers.sharding import STREAM, Rules, constrain, normalized


class LlamaBlock(TransformerBlock):
    """The block of Llama and its kin: RMSNorms, attention with rotary embedding, a gated MLP or a module in its place.

    Args:
      in_features: D.
      hidden_features: F of the gated feed-forward layer.
      num_heads: query heads.
      num_kv_heads: key and value heads; default num_heads.
      head_dim: default D / num_heads.
      rope_theta, rope_scaling, partial_rotary_factor, qk_norm, use_bias, use_out_bias, separate_qkv, sliding_window,
        scale: as in Attention.
      residual_multiplier: as in TransformerBlock.
      attention_implementation: Attention's implementation.
      activation, separate_gate_up: of GatedMLP.
      mlp: a module in the place of the gated MLP, as a `MoE`; called as in TransformerBlock.
      epsilon: of all norms.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of the parameters.
      kernel_init: initialiser of the kernels.
      fp8: a `coda.fp8.Recipe` by which attention and the gated MLP train in 8 bits; default in the compute dtype.
      rngs: source of keys.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10000.0,
        rope_scaling: RotaryScaling | None = None,
        partial_rotary_factor: float = 1.0,
        qk_norm: bool = False,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        separate_qkv: bool = False,
        separate_gate_up: bool = False,
        activation: str | Activation = "silu",
        sliding_window: int | None = None,
        scale: float | None = None,
        residual_multiplier: float = 1.0,
        attention_implementation: Implementation | None = None,
        epsilon: float = 1e-6,
        mlp: Any = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        fp8: coda.fp8.Recipe | None = None,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "rngs": rngs}
        options["fp8"] = fp8
        super().__init__(
            RMSNorm(in_features, epsilon=epsilon, param_dtype=param_dtype, rngs=rngs),
            Attention(
                in_features,
                num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                partial_rotary_factor=partial_rotary_factor,
                qk_norm=qk_norm,
                epsilon=epsilon,
                use_bias=use_bias,
                use_out_bias=use_out_bias,
                separate_qkv=separate_qkv,
                sliding_window=sliding_window,
                scale=scale,
                implementation=attention_implementation,
                **options,
            ),
            RMSNorm(in_features, epsilon=epsilon, param_dtype=param_dtype, rngs=rngs),
            GatedMLP(in_features, hidden_features, activation=activation, separate_gate_up=separate_gate_up, **options)
            if mlp is None
            else mlp,
            residual_multiplier=residual_multiplier,
        )


class Llama(LanguageModel):
    """Llama: token embedding, pre-norm blocks, final norm, language-model head.

    Args:
      config: sizes; a `MoEConfig` gives layers mixtures of experts, as Mixtral and Qwen3-MoE have them.
      scan_layers: whether `layers` is one block, whose parameters are those of all blocks stacked along a new first
        axis, and the blocks are a scan: it compiles in the time of one block, and takes longer to run. The parameters
        are the same ones, layers[i].attention.qkv.kernel being layers.attention.qkv.kernel[i].
      separate_qkv: whether query, key and value have kernels of their own, as tensor parallelism needs them: see
        Attention.
      separate_gate_up: whether gate and up have kernels of their own: see GatedMLP.
      remat: what the backward pass recomputes: None, nothing; "full", "save_qkv" or "save_attention"; names of the
        arrays to keep; or a policy of `jax.checkpoint_policies`. See `flax_layers.remat`.
      remat_layers: how many layers, from the first, are under `remat`; default all. As few as memory allows is fastest.
      rules: how a mesh shards parameters and activations, as `flax_layers.sharding.FSDP`; see `flax_layers.sharding`.
      attention_implementation: Attention's implementation.
      fp8: a `coda.fp8.Recipe` by which attention's products and those of dense feed-forward layers train in 8 bits, or
        a sequence, one or None for each layer; default all in the compute dtype, in which embedding, experts and head
        always are.
      dtype: compute dtype, also of the logits; default that of the parameters.
      param_dtype: storage dtype of the parameters.
      rngs: source of keys.

    Raises:
      ValueError: an unknown remat, scan_layers without layers or with layers that differ in a window, a rotary
        embedding, experts or a recipe, another number of recipes than of layers, or remat_layers out of range, beside
        scan_layers or without remat.
      TypeError: a configuration of another class of models.
    """

    max_length = "max_position_embeddings"
    _config_class: ClassVar[type[LlamaConfig]] = LlamaConfig

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
        fp8: Recipes = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_class(self, config)
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
        recipes = layer_recipes(fp8, config.num_hidden_layers)
        if scan_layers:  # before parameters are made
            check_alike([attention_options(config, i) | {"fp8": recipe} for i, recipe in enumerate(recipes)])
        width = config.hidden_size
        kernel_init = nnx.initializers.normal(config.initializer_range)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "rngs": rngs}
        layout: dict[str, Any] = {"separate_qkv": separate_qkv, "separate_gate_up": separate_gate_up}
        layout |= {"attention_implementation": attention_implementation}
        self.embed = Embed(
            config.vocab_size, width, dtype=dtype, param_dtype=param_dtype, embedding_init=kernel_init, rngs=rngs
        )
        blocks = [self._block(config, i, fp8=recipe, **layout, **options) for i, recipe in enumerate(recipes)]
        self.layers = stack(blocks) if scan_layers else nnx.List(blocks)
        self.norm = self._norm(config, param_dtype=param_dtype, rngs=rngs)
        self.head = LMHead(
            width,
            config.vocab_size,
            tied=config.tie_word_embeddings,
            **options,
        )
        self.config = config
        self.origin = config.origin
        self.soft_cap = config.soft_cap

    def _block(self, config: Any, layer: int, **options: Any) -> Any:
        """The block of a layer.

        Args:
          config: the model's.
          layer: its number.
          **options: separate_qkv, separate_gate_up and attention_implementation as of the model; fp8, of the layer;
            dtype, param_dtype, kernel_init and rngs.
        """
        expert_options = {name: options[name] for name in ("dtype", "param_dtype", "kernel_init", "rngs")}
        return LlamaBlock(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            activation=config.hidden_act,
            residual_multiplier=config.residual_multiplier,
            mlp=experts_of(config, layer, **expert_options),
            **attention_options(config, layer),
            **options,
        )

    def _norm(self, config: Any, **options: Any) -> Any:
        """The final norm; options are param_dtype and rngs."""
        return RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, **options)

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        """The stream that enters the first layer; the factor of the embedding is rounded to the stream's dtype."""
        x, scale = self.embed(tokens), self.config.embedding_factor
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def _projected(self, stream: jax.Array) -> jax.Array:
        """The features that the head projects, from the last layer's stream, with the factor of logits."""
        h, factor = self.norm(stream), self.config.logits_factor
        return h if factor == 1 else (h.astype(jnp.float32) * factor).astype(h.dtype)

    def _embedding(self) -> jax.Array | None:
        """The embedding that a tied head projects with."""
        return self.embed.embedding[...] if self.config.tie_word_embeddings else None

    def _features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array:
        """The features that the head projects."""
        options = {"positions": positions, "mask": mask, "segment_ids": segment_ids}
        return self._run(tokens, options)[0]

    def _features_and_statistics(
        self, tokens: jax.Array, token_mask: jax.Array | None, options: dict[str, Any]
    ) -> tuple[jax.Array, RouterStatistics | None]:
        if not isinstance(self.config, MoEConfig):
            return self._run(tokens, options)
        return self._run(tokens, {**options, "token_mask": token_mask}, statistics=True)

    def _auxiliary_loss(self, statistics: RouterStatistics) -> jax.Array:
        config = self.config
        return auxiliary_loss(statistics, config.router_aux_loss_coef, config.router_z_loss_coef)

    def _run(
        self, tokens: jax.Array, options: dict[str, Any], *, statistics: bool = False
    ) -> tuple[jax.Array, RouterStatistics | None]:
        """The final norm, and the routers' statistics if they are asked for."""
        left = run_layers(
            self.layers,
            self._embedded(tokens),
            remat=self.remat,
            remat_layers=self.remat_layers,
            statistics=statistics,
            **options,
        )
        stream, counted = left if statistics else (left, None)
        return constrain(self._projected(stream), *STREAM, beside=("vocab",)), counted

    @under_rules
    def decode(self, tokens: jax.Array, cache: Any, *, lengths: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """Logits after the tokens, and the cache, which then holds these too.

        Args:
          tokens: (B, T): an entire prompt, or T more tokens.
          cache: of the tokens before, as `init_cache` or this returns it.
          lengths: (B,) int32, 1 to T: how many tokens of each row there are, padding comes after; default T.

        Returns:
          Logits (B, V) after the last token of each row, and the cache.

        Raises:
          ValueError: more tokens than the cache's capacity. Under jit the number that it holds is not known: there
            tokens past its capacity are dropped.
        """
        layers = self._layers()
        longer: list[KVCache] | TextCache
        if isinstance(cache, TextCache):
            stream, longer = decode_text(layers, self._embedded, tokens, cache, lengths)
        else:
            stream, longer = decode_layers(layers, self._embedded(tokens), cache, lengths)
        return logits_of(self.head, self._projected(stream), self._embedding(), self.soft_cap)[:, 0], longer

    def _layers(self) -> Any:
        """The layers one by one, also where they are stacked."""
        return self.layers if isinstance(self.layers, nnx.List) else unstack(self.layers)


def check_class(model: Llama, config: Any) -> None:
    """Checks that a configuration is of the model's class.

    Raises:
      TypeError: it is another class's, whose models compute other things.
    """
    expected, plain = type(model)._config_class, (LlamaConfig, MoEConfig)
    fits = isinstance(config, expected) and (expected is not LlamaConfig or _family(config) in plain)
    if not fits:
        raise TypeError(
            f"{type(model).__name__} takes a {expected.__name__}, not a {type(config).__name__}; "
            "flax_layers.models.model_class(config) is the class of a configuration"
        )


def _family(config: LlamaConfig) -> type:
    """The library's class of configurations of which this is one."""
    return next(cls for cls in type(config).__mro__ if cls.__module__.startswith("flax_layers."))


def experts_of(config: LlamaConfig, layer: int, **options: Any) -> MoE | None:
    """The mixture of experts of a layer that has one; options of MoE beside what the configuration says."""
    if not isinstance(config, MoEConfig) or not config.has_experts(layer):
        return None
    return MoE(
        config.hidden_size,
        config.resolved_moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        scoring=config.scoring_func,
        normalized=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        groups=config.n_group,
        groups_kept=config.topk_group,
        use_balance_bias=config.use_balance_bias,
        shared_features=config.shared_expert_intermediate_size,
        use_shared_gate=config.shared_expert_gate,
        capacity_factor=config.capacity_factor,
        **({"activation": config.hidden_act} | options),
    )
