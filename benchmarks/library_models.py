"""Models of other libraries, as these have them, with no line for coda_jax: what `coda.fuse` is timed with.

Each library is imported by its own models alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from benchmarks.unmodified import Model, Params, Sizes, activations


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


PACKAGES = {"equinox_mlp": "equinox", "equinox_blocks": "equinox", "haiku_blocks": "haiku"}
MODELS: dict[str, Callable[[Sizes, Any], Model]] = {
    f.__name__: f for f in (nnx_blocks, linen_blocks, equinox_mlp, equinox_blocks, haiku_blocks)
}
