"""Models in plain JAX, as people write them: what `coda.fuse` is tested with. Each gives a loss and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 2, 96, 64, 4, 96  # with enough rows that norms are deferred


class Weights:
    """Random arrays of a seed, one after the other."""

    def __init__(self, seed, dtype):
        self.generator, self.dtype = np.random.default_rng(seed), dtype

    def __call__(self, *shape, mean=0.0):
        scale = 0.1 if mean else shape[0] ** -0.5
        return jnp.asarray(mean + scale * self.generator.standard_normal(shape), self.dtype)


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def layer_norm(x, scale, bias):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)


def rotated(x):
    length, half = x.shape[-3], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def heads(x, count=HEADS):
    return x.reshape(*x.shape[:-1], count, -1)


def attention(q, k, v, **options):
    o = jax.nn.dot_product_attention(q, k, v, **options)
    return o.reshape(*o.shape[:-2], -1)


def llama(w, x):
    h = rms_norm(x, w["norm_1"])
    q, k, v = (heads(h @ w[name], count) for name, count in (("q", HEADS), ("k", 2), ("v", 2)))
    x = x + attention(rotated(q), rotated(k), v, is_causal=True) @ w["out"]
    h = rms_norm(x, w["norm_2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def gpt2(w, x):
    h = layer_norm(x, w["norm_1"], w["norm_bias"])
    q, k, v = map(heads, jnp.split(h @ w["qkv"] + w["qkv_bias"], 3, axis=-1))
    x = x + attention(q, k, v, is_causal=True) @ w["out"] + w["bias"]
    h = layer_norm(x, w["norm_2"], w["norm_bias"])
    return x + jax.nn.gelu(h @ w["up"] + w["hidden_bias"]) @ w["down"] + w["bias"]


def bert(w, x):
    q, k, v = (heads(x @ w[name]) for name in ("q", "wide_k", "wide_v"))
    x = layer_norm(x + attention(q, k, v) @ w["out"], w["norm_1"], w["norm_bias"])
    h = jax.nn.gelu(x @ w["up"] + w["hidden_bias"], approximate=False)
    return layer_norm(x + h @ w["down"], w["norm_2"], w["norm_bias"])


def gemma(w, x):
    h = rms_norm(x, 1 + w["norm_bias"])
    q, k, v = (
        jnp.einsum("btd,dhk->bthk", h, w[name].reshape(x.shape[-1], HEADS, -1)) for name in ("q", "wide_k", "wide_v")
    )
    o = attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + rms_norm(o @ w["out"], 1 + w["bias"])
    h = rms_norm(x, w["norm_2"])
    return x + rms_norm((jax.nn.gelu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], w["norm_1"])


def mixer(w, x):
    h = jnp.swapaxes(layer_norm(x, w["norm_1"], w["norm_bias"]), 1, 2)
    x = x + jnp.swapaxes(jax.nn.gelu(h @ w["tokens_up"]) @ w["tokens_down"], 1, 2)
    h = layer_norm(x, w["norm_2"], w["norm_bias"])
    return x + jax.nn.gelu(h @ w["up"] + w["hidden_bias"]) @ w["down"] + w["bias"]


def parallel(w, x):
    """GPT-J's form: attention and feed-forward of one norm; weights that are stored transposed."""
    h = layer_norm(x, w["norm_1"], w["norm_bias"])
    q, k, v = (heads(jnp.einsum("btd,ed->bte", h, w[name].T)) for name in ("q", "wide_k", "wide_v"))
    o = attention(rotated(q), rotated(k), v, is_causal=True)
    return x + o @ w["out"] + jax.nn.relu(h @ w["up"]) @ w["down"]


def adapted(w, x):
    """A gated feed-forward with low-rank adapters."""
    h = rms_norm(x, w["norm_1"])
    up = h @ w["up"] + 2.0 * ((h @ w["lora_a"]) @ w["lora_b"])
    return x + (jax.nn.silu(h @ w["gate"]) * up) @ w["down"]


PLAIN = {f.__name__: f for f in (llama, gpt2, bert, gemma, mixer, parallel, adapted)}


def weights(dtype=jnp.float32, seed=0, width=WIDTH, hidden=HIDDEN, length=LENGTH):
    new = Weights(seed, dtype)
    narrow = width // HEADS * 2
    return {
        **{name: new(width, mean=1.0) for name in ("norm_1", "norm_2")},
        **{name: new(width) * 0.1 for name in ("norm_bias", "bias")},
        **{name: new(width, width) for name in ("q", "wide_k", "wide_v", "out")},
        **{name: new(width, narrow) for name in ("k", "v")},
        "qkv": new(width, 3 * width),
        "qkv_bias": new(3 * width),
        "up": new(width, hidden),
        "gate": new(width, hidden),
        "down": new(hidden, width),
        "hidden_bias": new(hidden),
        "tokens_up": new(length, 40),
        "tokens_down": new(40, length),
        "lora_a": new(width, 8),
        "lora_b": new(8, hidden),
    }


def inputs(dtype=jnp.float32, seed=1, batch=BATCH, length=LENGTH, width=WIDTH):
    return Weights(seed, dtype)(batch, length, width, mean=0.5)


def loss_of(f):
    """The mean square of f(w, x), with other weights for each column so that no gradient is that of a constant."""

    def loss(w, x):
        y = f(w, x).astype(jnp.float32)
        return jnp.mean(jnp.square(y * (1 + jnp.arange(y.shape[-1]) / y.shape[-1])))

    loss.__name__ = f.__name__
    return loss


class NnxBlock(nnx.Module):
    def __init__(self, rngs, dtype):
        options = {"rngs": rngs, "dtype": dtype, "param_dtype": dtype}
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, **options), nnx.RMSNorm(WIDTH, **options)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **options)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, **options), nnx.Linear(HIDDEN, WIDTH, **options)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class LinenBlock(linen.Module):
    dtype: object

    @linen.compact
    def __call__(self, x):
        options = {"dtype": self.dtype, "param_dtype": self.dtype}
        h = linen.RMSNorm(**options)(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, **options)(h)
        h = linen.LayerNorm(**options)(x)
        return x + linen.Dense(WIDTH, **options)(linen.swish(linen.Dense(HIDDEN, **options)(h)))


def nnx_block(dtype):
    definition, state = nnx.split(NnxBlock(nnx.Rngs(0), dtype))
    return (lambda state, x: nnx.merge(definition, state)(x)), state


def linen_block(dtype):
    block = LinenBlock(dtype)
    return (lambda w, x: block.apply(w, x)), block.init(jax.random.key(0), inputs(dtype))


def model(name, dtype=jnp.float32):
    """A model's loss, and its arguments."""
    if name in PLAIN:
        return loss_of(PLAIN[name]), (weights(dtype), inputs(dtype))
    f, w = {"nnx_block": nnx_block, "linen_block": linen_block}[name](dtype)
    f.__name__ = name
    return loss_of(f), (w, inputs(dtype))


NAMES = [*PLAIN, "nnx_block", "linen_block"]
