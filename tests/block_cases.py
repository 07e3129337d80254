"""Blocks of several forms, as an author writes them, and as plain JAX."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import coda_jax as coda

BATCH, LENGTH, WIDTH, HIDDEN, HEADS, RANK = 2, 12, 64, 40, 2, 4  # heads of 32 columns, which tiles have whole


def swiglu(z):
    gate, up = jnp.split(z, 2, axis=1)
    return jax.nn.silu(gate) * up


def thirds(z):
    return jnp.split(z, 3, axis=1)


def joined(*parts):
    return jnp.concatenate(parts[:3], axis=1)


def turned(y, cos, sin):
    a, b = jnp.split(y.reshape(y.shape[0], HEADS, -1), 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).reshape(y.shape)


def rotary(z, cos, sin):
    q, k, v = thirds(z)
    return turned(q, cos, sin), turned(k, cos, sin), v


def rotary_back(q, k, v, cos, sin):
    return jnp.concatenate([turned(q, cos, -sin), turned(k, cos, -sin), v], axis=1)


def attention(q, k, v):
    heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)  # noqa: E731
    return jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True).reshape(q.shape)


class InJax:
    """Plain JAX in the place of the library: what a block is compared with."""

    @staticmethod
    def map(x, f, *operands):
        rows = x.shape[:-1]
        flat = lambda y: y.reshape(-1, y.shape[-1]) if y.shape[:-1] == rows else y  # noqa: E731
        made = f(*map(flat, (x, *operands)))
        return jax.tree.map(lambda y: y.reshape(*rows, y.shape[-1]), made)

    @staticmethod
    def rms_norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    @staticmethod
    def layer_norm(x, scale, bias=None):
        c = x - jnp.mean(x, axis=-1, keepdims=True)
        y = c * lax.rsqrt(jnp.mean(c * c, axis=-1, keepdims=True) + 1e-6) * scale
        return y if bias is None else y + bias

    @staticmethod
    def opaque(f, *arrays):
        return f(*arrays)


class InBlock:
    rms_norm, layer_norm, opaque = staticmethod(coda.rms_norm), staticmethod(coda.layer_norm), staticmethod(coda.opaque)

    @staticmethod
    def map(x, f, *operands):
        back = {thirds: joined, rotary: rotary_back}.get(f)
        return x.map(f, *operands, inverse=back)


def attend(of, z):
    return of.opaque(attention, *of.map(z, thirds))


def gated(of, x, p):
    return of.map(x @ p["up"], swiglu) @ p["down"]


def norm_less(of, x, p):
    return of.map(x @ p["up"], lambda z, b: swiglu(z + b), p["up_bias"]) @ p["down"] + p["bias"]


def adapter(of, x, p):
    """Low-rank, inside of the chain."""
    h = of.rms_norm(x, p["s1"])
    z = of.map(h @ p["up"], lambda z, low: swiglu(z + 2.0 * low), (h @ p["a"]) @ p["b"])
    return x + z @ p["down"]


def llama(of, x, p):
    q, k, v = of.map(of.rms_norm(x, p["s1"]) @ p["qkv"], rotary, p["cos"], p["sin"])
    x = x + of.opaque(attention, q, k, v) @ p["out"]
    return x + gated(of, of.rms_norm(x, p["s2"]), p)


def parallel(of, x, p):
    """GPT-J's."""
    h = of.layer_norm(x, p["s1"], p["bias"])
    return x + attend(of, h @ p["qkv"]) @ p["out"] + gated(of, h, p)


def norm_before_sum(of, x, p):
    """OLMo 2's."""
    x = x + of.rms_norm(attend(of, x @ p["qkv"]) @ p["out"], p["s1"])
    return x + of.rms_norm(gated(of, x, p), p["s2"])


def sandwich(of, x, p):
    """Gemma 2's."""
    x = x + of.rms_norm(attend(of, of.rms_norm(x, p["s1"]) @ p["qkv"]) @ p["out"], p["s2"])
    return x + of.rms_norm(gated(of, of.rms_norm(x, p["s2"]), p), p["s1"])


def post_norm(of, x, p):
    """BERT's."""
    x = of.layer_norm(x + (attend(of, x @ p["qkv"]) @ p["out"] + p["bias"]), p["s1"], p["bias"])
    return of.layer_norm(x + gated(of, x, p), p["s2"])


# name -> block, products forward and backward, passes over activations forward and backward
FORMS = {
    "norm-less": (norm_less, (2, 4), (0, 0)),
    "adapter": (adapter, (4, 8), (0, 0)),
    "llama": (llama, (4, 8), (0, 1)),
    "parallel": (parallel, (4, 8), (1, 3)),
    "norm before the sum": (norm_before_sum, (4, 8), (2, 3)),
    "sandwich": (sandwich, (4, 8), (2, 3)),
    "post-norm": (post_norm, (4, 8), (2, 3)),
}


def arguments(dtype=jnp.float32, batch=BATCH, length=LENGTH, width=WIDTH, hidden=HIDDEN, rank=RANK):
    """x and the weights; cos and sin have the rows of x."""
    shapes = {
        "s1": (width,),
        "s2": (width,),
        "bias": (width,),
        "up_bias": (2 * hidden,),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 2 * hidden),
        "down": (hidden, width),
        "a": (width, rank),
        "b": (rank, 2 * hidden),
    }
    keys = iter(jax.random.split(jax.random.key(0), 1 + len(shapes)))
    x = jax.random.normal(next(keys), (batch, length, width)).astype(dtype)
    p = {name: jax.random.normal(next(keys), shape) / (len(shape) * shape[0] ** 0.5) for name, shape in shapes.items()}
    half = width // HEADS // 2
    angles = jnp.arange(length)[None, :, None] * 0.1 * jnp.arange(1, 1 + half)
    angles = jnp.broadcast_to(angles, (batch, length, half))
    return x, {**p, "cos": jnp.cos(angles), "sin": jnp.sin(angles)}


def in_block(name, dtype=None, **options):
    block = coda.block(dtype=dtype, name=name.replace(" ", "_").replace("-", "_"), **options)
    return block(functools.partial(FORMS[name][0], InBlock))


def in_jax(name):
    return functools.partial(FORMS[name][0], InJax)


def loss(f):
    return lambda *args: sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(f(*args)))
