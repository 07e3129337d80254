"""The ways in which the benchmark of a training step is written, and the parameters that they share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from benchmarks import plain_fp8, plain_llama
from flax_layers import Llama, LlamaConfig, fp8
from flax_layers.layer_stack import stack
from flax_layers.sharding import Rules, axis_rules

LLAMA_3_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    rope_theta=500000.0,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
)
LLAMA_3_8B = LlamaConfig.llama3_8b()
MODELS = {"1b": LLAMA_3_1B, "8b": LLAMA_3_8B}
TINY = dataclasses.replace(
    LLAMA_3_1B,
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to write the step: coda_jax's layers or plain JAX, unrolled or a scan, with or without remat.

    Attributes:
      packed: whether rows are of several documents, each of which ends with `END` and attends to itself alone.
      fp8: the layers' products: by a recipe with "delayed" or "current" scales, or by XLA with "constant" or "flax"
        ones; None for the compute dtype.
    """

    fused: bool
    scan: bool = False
    remat: str | None = None
    remat_layers: int | None = None
    packed: bool = False
    fp8: str | None = None
    compiler_options: Mapping[str, Any] | None = None


END = 0  # the token that a document of a packed row ends with
VARIANTS = {
    "coda": Variant(fused=True),
    "coda_scan": Variant(fused=True, scan=True),
    "coda_recompute": Variant(fused=True, remat="save_attention"),
    # In no more memory than a plain scan with remat takes.
    "coda_recompute_3": Variant(fused=True, remat="save_attention", remat_layers=3),
    "xla": Variant(fused=False),
    "xla_scan": Variant(fused=False, scan=True),
    "xla_scan_remat": Variant(fused=False, scan=True, remat="full"),
    # Not among the defaults:
    "coda_full": Variant(fused=True, remat="full"),
    "coda_scan_recompute": Variant(fused=True, scan=True, remat="save_attention"),
    "coda_packed": Variant(fused=True, packed=True),
    "xla_packed": Variant(fused=False, packed=True),
    "coda_packed_fp8": Variant(fused=True, packed=True, fp8="delayed"),
    "xla_packed_fp8": Variant(fused=False, packed=True, fp8="constant"),
    "coda_fp8": Variant(fused=True, fp8="delayed"),
    "coda_fp8_current": Variant(fused=True, fp8="current"),
    "coda_fp8_recompute": Variant(fused=True, fp8="delayed", remat="save_attention"),
    "xla_fp8": Variant(fused=False, fp8="constant"),
    "xla_fp8_flax": Variant(fused=False, fp8="flax"),
    # XLA may then write a product's result into its slice of the stacked array at once.
    "coda_scan_slices": Variant(fused=True, scan=True, compiler_options={"xla_gpu_enable_dynamic_slice_fusion": True}),
}
DEFAULTS = list(VARIANTS)[:7]
# The variants of models that are no Llamas.
UNROLLED = {name: VARIANTS[name] for name in ("coda", "coda_recompute", "xla")} | {
    "xla_remat": Variant(fused=False, remat="full")
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The setting that all variants of a benchmark have in common.

    Attributes:
      config: sizes.
      dtype: compute dtype.
      param_dtype: of the parameters.
      separate_qkv: of the fused model.
      rules: how arrays are sharded over a mesh, of `flax_layers.sharding`.
    """

    config: LlamaConfig
    dtype: Any
    param_dtype: Any
    separate_qkv: bool = False
    rules: Rules | None = None


def form_of(variant: Variant) -> tuple[bool, bool, str | None]:
    """Variants of one form have the same parameters."""
    return variant.fused, variant.scan, variant.fp8


class Parameters:
    """The same parameters in the form that each variant takes; arrays that forms have in common are shared."""

    def __init__(self, setting: Setting):
        self.setting, self.config = setting, setting.config
        # The generator that XLA compiles in no time: a program for each shape of parameters otherwise takes a second.
        rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))
        dtypes = {"dtype": setting.dtype, "param_dtype": setting.param_dtype}
        self.model = Llama(setting.config, separate_qkv=setting.separate_qkv, **dtypes, rngs=rngs)
        self._forms: dict[tuple[bool, bool, str | None], Any] = {}

    def of(self, variant: Variant) -> Any:
        key = form_of(variant)
        if key not in self._forms:
            self._forms[key] = self._make(variant)
        return self._forms[key]

    def of_next_step(self, variant: Variant, parameters: Any, gradient: Any) -> Any:
        """The same parameters, with the maxima of this step among those by which the next one's scales are chosen."""
        if variant.fused:
            weights, histories = nnx.split_state(parameters, nnx.Param, fp8.History)
            maxima = nnx.filter_state(gradient, fp8.History)
            return nnx.merge_state(weights, jax.tree.map(coda.fp8.next_history, histories, maxima))
        layers = zip(parameters["layers"], gradient["layers"], strict=True)
        return parameters | {"layers": [p | {"fp8": of["fp8"]} for p, of in layers]}

    def _make(self, variant: Variant) -> Any:
        if variant.fused:
            weights = nnx.state(self._scanned() if variant.scan else self.model, nnx.Param)
            model = nnx.eval_shape(lambda: fused(variant, self.setting))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.state(model, fp8.History))
            return nnx.merge_state(weights, zeros)
        if variant.fp8 == "flax":
            plain = self.of(dataclasses.replace(variant, fp8=None))
            return plain | {"layers": [p | {"fp8": plain_fp8.flax_state()} for p in plain["layers"]]}
        if variant.fp8 is not None:
            return self.of(dataclasses.replace(variant, fp8=None))
        if not variant.scan:
            params = nnx.to_pure_dict(nnx.state(self.model, nnx.Param))
            return plain_llama.from_fused(params, self.config)
        plain = self.of(dataclasses.replace(variant, scan=False))
        return plain | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *plain["layers"])}

    def _scanned(self) -> Llama:
        """The model with stacked layers, sharing the other arrays."""
        graphdef, state = nnx.split(self.model)
        model = nnx.merge(graphdef, state)
        model.layers = stack(list(self.model.layers))
        return model

    def plain_gradient(self, variant: Variant, gradient: Any) -> plain_llama.Params:
        """A variant's gradient under the names of the plain, unrolled model."""
        if not variant.fused:
            layers = gradient["layers"]
            if not variant.scan:
                return gradient | {"layers": [{name: p[name] for name in p if name != "fp8"} for p in layers]}
            count = self.config.num_hidden_layers
            return gradient | {"layers": [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)]}
        tree = nnx.to_pure_dict(gradient)
        if variant.scan:
            count = self.config.num_hidden_layers
            tree["layers"] = {i: jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(count)}
        return plain_llama.from_fused(tree, self.config)


def fused(variant: Variant, setting: Setting) -> Llama:
    """The fused model of a variant, with parameters of its own."""
    config, recipe = setting.config, None if variant.fp8 is None else coda.fp8.Recipe(scaling=variant.fp8)
    return Llama(
        config,
        scan_layers=variant.scan,
        remat=variant.remat,
        remat_layers=variant.remat_layers and min(variant.remat_layers, config.num_hidden_layers),
        fp8=recipe,
        separate_qkv=setting.separate_qkv,
        rules=setting.rules,
        dtype=setting.dtype,
        param_dtype=setting.param_dtype,
        rngs=nnx.Rngs(0),
    )


def layer_kernel(name: str) -> str:
    """The name that a layer's kernel has where a LlamaBlock is called by itself, as LlamaBlock_1; others as they are.

    A step has loss_1, loss_5 and so on, a scan scan_1, and a layer under remat="save_attention" checkpoint_1.
    """
    found = re.fullmatch(r"(loss|scan|checkpoint)(_backward)?_(\d+)", name)
    if found is None:
        return name
    number = int(found[3])
    if found[2] is None:
        return f"LlamaBlock_{number % 4}"
    if found[1] == "checkpoint":  # the product that makes gate and up again is the first one
        return "LlamaBlock_2" if number == 0 else f"LlamaBlock_backward_{number - 1}"
    return f"LlamaBlock_backward_{number % 8}"


def step(name: str, variant: Variant, setting: Setting, *, gradient_shardings: Any = None) -> Callable[..., Any]:
    """value_and_grad of the loss, jitted: f(parameters of the variant, tokens, labels)."""
    config, dtype = setting.config, setting.dtype

    def documents(tokens: jax.Array) -> jax.Array | None:
        """The number of each token's document in its row."""
        ends = tokens[:, :-1] == END
        return jnp.pad(jnp.cumsum(ends, axis=1, dtype=jnp.int32), ((0, 0), (1, 0))) if variant.packed else None

    if variant.fused:
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: fused(variant, setting)), fp8.DIFFERENTIATED)

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, params).loss(tokens, labels, segment_ids=documents(tokens))
    else:

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            options = {"remat": variant.remat is not None, "segment_ids": documents(tokens)}
            multiply = plain_fp8.MULTIPLICATIONS[variant.fp8]
            with axis_rules(setting.rules):
                return plain_llama.loss(
                    params, tokens, labels, config=config, dtype=dtype, multiply=multiply, **options
                )

    loss.__name__ = name  # timing.executions tells variants apart by it
    function = jax.value_and_grad(loss)
    function.__name__ = name
    return jax.jit(function, out_shardings=None if gradient_shardings is None else (None, gradient_shardings))
