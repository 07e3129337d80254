"""Decoder blocks of several architectures, each as a `coda.block` and as plain JAX, on the same parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks.plain_llama import rms_norm, rotate

Params = dict[str, jax.Array]
HEAD_DIM = 128


def swiglu(z: jax.Array) -> jax.Array:
    gate, up = jnp.split(z, 2, axis=1)
    return jax.nn.silu(gate) * up


def geglu(z: jax.Array) -> jax.Array:
    gate, up = jnp.split(z, 2, axis=1)
    return jax.nn.gelu(gate) * up


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal, of queries, keys and values (B, T, D); cuDNN's on a GPU."""
    heads = (y.reshape(*y.shape[:-1], -1, min(HEAD_DIM, y.shape[-1])) for y in (q, k, v))
    implementation = "cudnn" if jax.default_backend() == "gpu" and q.dtype != jnp.float32 else "xla"
    return jax.nn.dot_product_attention(*heads, is_causal=True, implementation=implementation).reshape(q.shape)


def turned(y: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of y (M, D), each head by cos and sin (M, Dh / 2)."""
    a, b = jnp.split(y.reshape(y.shape[0], -1, 2 * cos.shape[-1]), 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).reshape(y.shape)


def rotary(z: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v = jnp.split(z, 3, axis=1)
    return turned(q, cos, sin), turned(k, cos, sin), v


def rotary_back(q: jax.Array, k: jax.Array, v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return jnp.concatenate([turned(q, cos, -sin), turned(k, cos, -sin), v], axis=1)


# --- as blocks


def attend(z: coda.Value, p: Any, cos: Any, sin: Any) -> coda.Value:
    attended: coda.Value = coda.opaque(attention, *z.map(rotary, cos, sin, inverse=rotary_back))
    return attended @ p["out"]


def llama(x: Any, p: Any, cos: Any, sin: Any) -> Any:
    x = x + attend(coda.rms_norm(x, p["norm_1"]) @ p["qkv"], p, cos, sin)
    h = coda.rms_norm(x, p["norm_2"]) @ p["up"]
    return (x + h.map(swiglu) @ p["down"]).with_statistic()


def gptj(x: Any, p: Any, cos: Any, sin: Any) -> Any:
    h = coda.layer_norm(x, p["norm_1"], p["bias"])
    return x + attend(h @ p["qkv"], p, cos, sin) + (h @ p["up"]).map(jax.nn.gelu) @ p["down"]


def olmo2(x: Any, p: Any, cos: Any, sin: Any) -> Any:
    x = x + coda.rms_norm(attend(x.x @ p["qkv"], p, cos, sin), p["norm_1"])
    return x + coda.rms_norm((x.x @ p["up"]).map(swiglu) @ p["down"], p["norm_2"])


def gemma2(x: Any, p: Any, cos: Any, sin: Any) -> Any:
    x = x + coda.rms_norm(attend(coda.rms_norm(x, p["norm_1"]) @ p["qkv"], p, cos, sin), p["norm_2"])
    h = coda.rms_norm(x, p["norm_3"]) @ p["up"]
    return x + coda.rms_norm(h.map(geglu) @ p["down"], p["norm_4"])


def by_operators(x: Any, p: Any, cos: Any, sin: Any) -> Any:
    """A Llama block of the library's operators."""
    heads = p["qkv"].shape[1] // (6 * cos.shape[-1])
    norm = coda.rms_norm(x, p["norm_1"])
    qkv = coda.qkv_projection(norm, p["qkv"], cos, sin, num_heads=heads, num_kv_heads=heads)
    rows = x.shape[:-1]
    x = coda.project(attention(*(y.reshape(*rows, -1) for y in qkv)), p["out"], residual=x)
    return coda.gated_mlp(coda.rms_norm(x, p["norm_2"]), p["up"], p["down"])


# --- as plain JAX, with the products as checkpoints have them


def plain_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    if bias is None:
        return rms_norm(x, scale, 1e-6)
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def plain_attend(x: jax.Array, p: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
    q, k, v = (x @ p[name] for name in "qkv")
    q, k = (rotate(y.reshape(*y.shape[:-1], -1, 2 * cos.shape[-1]), cos, sin).reshape(y.shape) for y in (q, k))
    return attention(q, k, v) @ p["out"]


def plain_gated(x: jax.Array, p: Any, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return (activation(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def plain_llama(x: jax.Array, p: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x = x + plain_attend(plain_norm(x, p["norm_1"]), p, cos, sin)
    return x + plain_gated(plain_norm(x, p["norm_2"]), p, jax.nn.silu)


def plain_gptj(x: jax.Array, p: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
    h = plain_norm(x, p["norm_1"], p["bias"])
    return x + plain_attend(h, p, cos, sin) + jax.nn.gelu(h @ p["up"]) @ p["down"]


def plain_olmo2(x: jax.Array, p: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x = x + plain_norm(plain_attend(x, p, cos, sin), p["norm_1"])
    return x + plain_norm(plain_gated(x, p, jax.nn.silu), p["norm_2"])


def plain_gemma2(x: jax.Array, p: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x = x + plain_norm(plain_attend(plain_norm(x, p["norm_1"]), p, cos, sin), p["norm_2"])
    return x + plain_norm(plain_gated(plain_norm(x, p["norm_3"]), p, jax.nn.gelu), p["norm_4"])


@dataclasses.dataclass(frozen=True)
class Form:
    """An architecture.

    Attributes:
      block: written with values, of a Stream.
      plain: the same of arrays.
      norms: how many scales it has.
      behind: those of them, from 1, that stand behind a sub-layer: small, so that the stream does not grow.
      is_gated: whether "up" holds a gate too.
      operators: the block by the library's operators, where these have it.
    """

    block: Callable[..., Any]
    plain: Callable[..., jax.Array]
    norms: int
    is_gated: bool = True
    operators: Callable[..., Any] | None = None
    behind: tuple[int, ...] = ()


FORMS = {
    "llama": Form(llama, plain_llama, 2, operators=by_operators),
    "gptj": Form(gptj, plain_gptj, 1, is_gated=False),
    "olmo2": Form(olmo2, plain_olmo2, 2, behind=(1, 2)),
    "gemma2": Form(gemma2, plain_gemma2, 4, behind=(2, 4)),
}


def parameters(form: Form, key: jax.Array, width: int, hidden: int, dtype: Any) -> Params:
    """The parameters of one block."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, hidden * (1 + form.is_gated)),
        "down": (hidden, width),
    }
    keys = jax.random.split(key, len(shapes))
    made = {
        name: jax.random.normal(key, shape, dtype) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    scales = {f"norm_{i}": jnp.full(width, 0.2 if i in form.behind else 1.0, dtype) for i in range(1, form.norms + 1)}
    return made | scales | {"bias": jnp.zeros(width, dtype)}


def as_plain(form: Form, p: Params) -> Params:
    """The parameters, or their gradients, as the plain form has them."""
    q, k, v = jnp.split(p["qkv"], 3, axis=1)
    others = {name: x for name, x in p.items() if name not in ("qkv", "up")}
    gate_up = (
        dict(zip(("gate", "up"), jnp.split(p["up"], 2, axis=1), strict=True)) if form.is_gated else {"up": p["up"]}
    )
    return others | {"q": q, "k": k, "v": v} | gate_up


def made_block(name: str, dtype: Any) -> Callable[..., Any]:
    return coda.block(dtype=dtype, name=name)(FORMS[name].block)


def tables(length: int, width: int, batch: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin (B, T, Dh / 2) of the positions."""
    half = min(HEAD_DIM, width) // 2
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] / 500000.0 ** (jnp.arange(half) / half)
    return tuple(jnp.broadcast_to(f(angle), (batch, length, half)) for f in (jnp.cos, jnp.sin))  # type: ignore[return-value]


def hidden_states(
    layer: Callable[..., Any], layers: list[Params], x: jax.Array, *, fused: bool, remat: bool
) -> jax.Array:
    """x (B, T, D) through the layers."""
    cos, sin = tables(x.shape[1], x.shape[2], x.shape[0])
    one = functools.partial(layer, cos=cos, sin=sin)
    if remat:
        one = jax.checkpoint(one)
    stream: Any = coda.Stream.of(x).with_statistic() if fused else x
    for p in layers:
        stream = one(stream, p)
        if fused:
            stream = coda.Stream.of(stream)
    return stream.x if fused else stream
