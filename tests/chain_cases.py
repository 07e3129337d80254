"""The chains around a deferred norm, their textbook formulas, and random arguments for both."""

import jax
import jax.numpy as jnp

import coda_jax as coda
from tests import tolerance
from tests.gemm_cases import as_float64, pullback

EPS, ROWS, WIDTH, HIDDEN = 1e-5, 33, 40, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def mlp_arguments(dtype, lead=(ROWS,), width=WIDTH, hidden=HIDDEN):
    x, scale = normal(0, *lead, width), 1 + 0.3 * normal(1, width)
    gate_up, down = normal(2, width, 2 * hidden) / width**0.5, normal(3, hidden, width) / hidden**0.5
    return [array.astype(dtype) for array in (x, scale, gate_up, down)]


def qkv_arguments(dtype, lead=(3, 11), width=WIDTH, head_dim=HEAD_DIM):
    x, scale = normal(0, *lead, width), 1 + 0.3 * normal(1, width)
    kernel = normal(2, width, (HEADS + 2 * KV_HEADS) * head_dim) / width**0.5
    return [array.astype(dtype) for array in (x, scale, kernel)]


def squares(x):
    wide = jax.lax.stop_gradient(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(wide * wide, axis=-1)


def rms_norm(x, scale):
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS) * scale.astype(y.dtype)).astype(x.dtype)


def plain_mlp(x, scale, gate_up, down, activation=jax.nn.silu):
    gate, up = jnp.split(rms_norm(x, scale) @ gate_up, 2, axis=-1)
    return x + (activation(gate) * up) @ down


def mlp(x, scale, gate_up, down, **options):
    return coda.gated_mlp(coda.rms_norm(x, scale, epsilon=EPS), gate_up, down, **options).x


def angles(x, kernel, dtype=jnp.float32):
    half = kernel.shape[1] // (HEADS + 2 * KV_HEADS) // 2
    angle = jnp.arange(x.shape[-2], dtype=dtype)[:, None] * 10.0 ** -jnp.linspace(0, 3, half).astype(dtype)
    return jnp.cos(angle), jnp.sin(angle)


def qk_norm_arguments(dtype, lead=(3, 11), width=WIDTH, head_dim=HEAD_DIM):
    scales = [(1 + 0.3 * normal(seed, head_dim)).astype(dtype) for seed in (4, 5)]
    return [*qkv_arguments(dtype, lead, width, head_dim), *scales]


def plain_qkv(x, scale, kernel, q_scale=None, k_scale=None):
    z = (rms_norm(x, scale) @ kernel).reshape(*x.shape[:-1], HEADS + 2 * KV_HEADS, -1)
    q, k, v = jnp.split(z, [HEADS, HEADS + KV_HEADS], axis=-2)
    if q_scale is not None:
        q, k = rms_norm(q, q_scale), rms_norm(k, k_scale)
    cos, sin = (y[:, None, :] for y in angles(x, kernel, jnp.promote_types(x.dtype, jnp.float32)))

    def turned(y):
        a, b = jnp.split(y.astype(cos.dtype), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(y.dtype)

    return turned(q), turned(k), v


def qkv(x, scale, kernel, q_scale=None, k_scale=None, **options):
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "q_scale": q_scale, "k_scale": k_scale}
    norm = coda.rms_norm(x, scale, epsilon=EPS)
    return coda.qkv_projection(norm, kernel, *angles(x, kernel), **heads, **options)


def compare(chain, plain, arguments):
    cotangents = [normal(17 + i, *x.shape) for i, x in enumerate(jax.tree.leaves(jax.eval_shape(plain, *arguments)))]
    got = pullback(chain, arguments, cotangents)()
    rough = pullback(plain, arguments, cotangents)()
    with jax.enable_x64(True):
        wide = [jnp.asarray(as_float64(x)) for x in arguments]
        exact = pullback(plain, wide, [as_float64(ct) for ct in cotangents])()
    for i, (x, e, r) in enumerate(zip(*map(jax.tree.leaves, (got, exact, rough)), strict=True)):
        tolerance.check(x, e, r, dtype=r.dtype, name=f"leaf {i}")
