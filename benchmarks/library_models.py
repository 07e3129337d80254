"""Models of other libraries, as these have them, with no line for coda_jax: what `coda.fuse` is timed with.

Each library is imported by its own models alone.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from benchmarks.unmodified import Draw, Model, Params, Sizes, activations


def of_nnx(make: Callable[[nnx.Rngs], Any], batch: Callable[[jax.Array], jax.Array], **options: Any) -> Model:
    """The model that nnx modules are."""
    graphdef, _, others = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    del others  # the counts of keys, which nothing draws from

    def init(key: jax.Array) -> Params:
        return nnx.state(make(nnx.Rngs(key)), nnx.Param)

    def apply(params: Params, x: jax.Array) -> jax.Array:
        result: jax.Array = nnx.merge(graphdef, params)(x)
        return result

    return Model(apply, init, batch, **options)


class NnxBlock(nnx.Module):
    def __init__(self, sizes: Sizes, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype, "param_dtype": dtype}
        self.norm_1, self.norm_2 = (nnx.LayerNorm(sizes.width, **options) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(sizes.heads, sizes.width, decode=False, **options)
        self.up, self.down = (
            nnx.Linear(*shape, **options) for shape in ((sizes.width, sizes.hidden), (sizes.hidden, sizes.width))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


def nnx_blocks(sizes: Sizes, dtype: Any) -> Model:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(*(NnxBlock(sizes, dtype, rngs) for _ in range(sizes.layers)))

    return of_nnx(make, lambda key: activations(sizes, dtype, key))


class LinenBlocks(linen.Module):
    sizes: Sizes
    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"dtype": self.dtype, "param_dtype": self.dtype}
        for _ in range(self.sizes.layers):
            h = linen.RMSNorm(**options)(x)
            x = x + linen.MultiHeadDotProductAttention(self.sizes.heads, **options)(h)
            h = linen.LayerNorm(**options)(x)
            x = x + linen.Dense(self.sizes.width, **options)(linen.swish(linen.Dense(self.sizes.hidden, **options)(h)))
        return x


def linen_blocks(sizes: Sizes, dtype: Any) -> Model:
    blocks = LinenBlocks(sizes, dtype)
    x = jax.ShapeDtypeStruct((1, sizes.length, sizes.width), dtype)
    return Model(
        blocks.apply,  # type: ignore[arg-type]
        lambda key: blocks.init(key, jnp.zeros(x.shape, x.dtype)),
        lambda key: activations(sizes, dtype, key),
    )


def of_equinox(make: Callable[[jax.Array], Any], batch: Callable[[jax.Array], jax.Array]) -> Model:
    """The model that a module of equinox is, of one row, applied to each."""
    eqx = importlib.import_module("equinox")
    abstract = eqx.filter_eval_shape(make, jax.random.key(0))
    _, static = eqx.partition(abstract, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def init(key: jax.Array) -> Params:
        return eqx.filter(make(key), eqx.is_array)

    def apply(params: Params, x: jax.Array) -> jax.Array:
        result: jax.Array = jax.vmap(eqx.combine(params, static))(x)
        return result

    return Model(apply, init, batch)


def equinox_mlp(sizes: Sizes, dtype: Any) -> Model:
    """An MLP of tokens."""
    eqx = importlib.import_module("equinox")

    def make(key: jax.Array) -> Any:
        return eqx.nn.MLP(sizes.width, sizes.width, sizes.hidden, 2, jax.nn.gelu, dtype=dtype, key=key)

    def batch(key: jax.Array) -> jax.Array:
        return activations(sizes, dtype, key).reshape(-1, sizes.width)

    return of_equinox(make, batch)


def equinox_blocks(sizes: Sizes, dtype: Any) -> Model:
    """A transformer of rows (T, D)."""
    eqx = importlib.import_module("equinox")

    class Block(eqx.Module):  # type: ignore[misc, name-defined]
        attention: Any
        norm_1: Any
        norm_2: Any
        up: Any
        down: Any

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(
                sizes.heads,
                sizes.width,
                use_query_bias=True,
                use_key_bias=True,
                use_value_bias=True,
                use_output_bias=True,
                dtype=dtype,
                key=keys[0],
            )
            self.norm_1, self.norm_2 = (eqx.nn.LayerNorm(sizes.width, dtype=dtype) for _ in range(2))
            self.up = eqx.nn.Linear(sizes.width, sizes.hidden, dtype=dtype, key=keys[1])
            self.down = eqx.nn.Linear(sizes.hidden, sizes.width, dtype=dtype, key=keys[2])

        def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
            h = jax.vmap(self.norm_1)(x)
            x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool)))
            h = jax.vmap(self.up)(jax.vmap(self.norm_2)(x))
            return x + jax.vmap(self.down)(jax.nn.gelu(h))

    def make(key: jax.Array) -> Any:
        return eqx.nn.Sequential([Block(one) for one in jax.random.split(key, sizes.layers)])

    return of_equinox(make, lambda key: activations(sizes, dtype, key))


def haiku_blocks(sizes: Sizes, dtype: Any) -> Model:
    hk = importlib.import_module("haiku")

    def blocks(x: jax.Array) -> jax.Array:
        for _ in range(sizes.layers):
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            initializer = hk.initializers.VarianceScaling(1.0)
            attention = hk.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads, w_init=initializer)
            x = x + attention(h, h, h, mask=jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool)))
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.Linear(sizes.width)(jax.nn.gelu(hk.Linear(sizes.hidden)(h)))
        return x

    transformed = hk.without_apply_rng(hk.transform(blocks))
    x = jax.ShapeDtypeStruct((1, sizes.length, sizes.width), dtype)
    return Model(
        transformed.apply,
        lambda key: transformed.init(key, jnp.zeros(x.shape, x.dtype)),
        lambda key: activations(sizes, dtype, key),
    )


def of_transformers(family: str, sizes: Sizes, dtype: Any, **options: Any) -> Model:
    """The model of tokens that transformers before 5 has in linen.

    Args:
      family: as in the names of its classes.
      sizes, dtype: as everywhere.
      options: of its configuration.
    """
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(vocab_size=sizes.vocabulary, **options)
    model = getattr(transformers, f"Flax{family}Model")(config, dtype=dtype, _do_init=False)

    def init(key: jax.Array) -> Params:
        return jax.tree.map(lambda x: x.astype(dtype), model.init_weights(key, (1, sizes.length)))

    def apply(params: Params, tokens: jax.Array) -> jax.Array:
        result: jax.Array = model(tokens, params=params).last_hidden_state
        return result

    def batch(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (sizes.batch, sizes.length), 0, sizes.vocabulary)

    return Model(apply, init, batch, is_inner=False)


def _hf_options(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": max(sizes.length, 128),  # a Llama's must not be fewer than a head's size
    }


def transformers_bert(sizes: Sizes, dtype: Any) -> Model:
    return of_transformers("Bert", sizes, dtype, **_hf_options(sizes))


def transformers_llama(sizes: Sizes, dtype: Any) -> Model:
    return of_transformers("Llama", sizes, dtype, num_key_value_heads=sizes.kv_heads, **_hf_options(sizes))


def transformers_gpt2(sizes: Sizes, dtype: Any) -> Model:
    options = {"n_embd": sizes.width, "n_inner": sizes.hidden, "n_layer": sizes.layers, "n_head": sizes.heads}
    return of_transformers("GPT2", sizes, dtype, n_positions=sizes.length, **options)


def keras_blocks(sizes: Sizes, dtype: Any) -> Model:
    """Keras' own layers, on its backend of JAX."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = importlib.import_module("keras")
    layers, policy = keras.layers, jnp.dtype(dtype).name
    x = inputs = keras.Input((sizes.length, sizes.width), dtype=policy)
    for _ in range(sizes.layers):
        h = layers.LayerNormalization(dtype=policy)(x)
        attention = layers.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads, dtype=policy)
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(dtype=policy)(x)
        h = layers.Dense(sizes.hidden, activation="gelu", dtype=policy)(h)
        x = x + layers.Dense(sizes.width, dtype=policy)(h)
    model = keras.Model(inputs, x)
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def init(key: jax.Array) -> Params:
        draw = Draw(key, dtype)
        matrix = lambda shape: (draw.array(*shape) * math.prod(shape) ** -0.25).astype(dtype)  # noqa: E731
        return [matrix(shape) if len(shape) > 1 else draw.vector(*shape, 1.0) for shape in shapes]

    def apply(params: Params, x: jax.Array) -> jax.Array:
        result: jax.Array = model.stateless_call(params, others, x)[0]
        return result

    return Model(apply, init, lambda key: activations(sizes, dtype, key))


# The modules that models need beside flax, and what pip calls them.
PACKAGES = {
    "equinox_mlp": ("equinox", "equinox"),
    "equinox_blocks": ("equinox", "equinox"),
    "haiku_blocks": ("haiku", "dm-haiku"),
    "keras_blocks": ("keras", "keras"),
    "transformers_bert": ("transformers.models.bert.modeling_flax_bert", "transformers<5"),
    "transformers_llama": ("transformers.models.llama.modeling_flax_llama", "transformers<5"),
    "transformers_gpt2": ("transformers.models.gpt2.modeling_flax_gpt2", "transformers<5"),
}
MODELS: dict[str, Callable[[Sizes, Any], Model]] = {
    f.__name__: f
    for f in (
        *(nnx_blocks, linen_blocks, equinox_mlp, equinox_blocks, haiku_blocks, keras_blocks),
        *(transformers_bert, transformers_llama, transformers_gpt2),
    )
}
