"""Random networks of operators that people write in plain JAX: what `coda.fuse` is tested with.

A network is a list of steps. Each makes an array (rows..., width) of the last one, h, and of an earlier one, z, with
weights that it picks by number. Some steps hold steps of their own, in a loop, a branch, a checkpoint or under vmap.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType

import coda_jax as coda

SIZES = [  # rows, width, heads
    *[((12,), 8, 2), ((1,), 8, 1), ((2, 8), 16, 4), ((1, 8), 16, 1), ((8, 8), 8, 2), ((8, 1), 8, 4), ((2, 3, 4), 8, 2)],
    *[((1, 1, 1), 8, 2), ((4, 4, 4), 4, 2), ((3, 1, 5), 8, 8), ((2, 16), 2, 1), ((1, 6), 6, 6), ((16,), 16, 4)],
]
ACTIVATIONS = [
    *[jax.nn.silu, jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.sigmoid, jax.nn.softplus, jnp.abs, jnp.sin, jnp.arctan],
    lambda x: jax.nn.gelu(x, approximate=False),
    lambda x: jnp.square(jax.nn.relu(x)),
    lambda x: jnp.where(x > 0, x, 0.1 * x),
    lambda x: jax.nn.relu6(3 * x) / 3,
    lambda x: jnp.clip(x, -0.5, 2.0),
    lambda x: jnp.maximum(x, -x / 2),
    lambda x: x / (1 + jnp.abs(x)),
    lambda x: jnp.log1p(jnp.exp(-jnp.abs(x))),
    lambda x: x * jnp.minimum(1, jnp.exp(x)),
    lambda x: x * 2,
    lambda x: x**3 / (1 + x**2),
    lambda x: jax.nn.elu(x) + jax.nn.hard_tanh(x),
    lambda x: jax.nn.swish(x) - jax.nn.leaky_relu(x),
    lambda x: jax.scipy.special.erf(x),
    lambda x: 1 / jnp.sqrt(1 + x * x),
    lambda x: x,
]


class Net:
    """Weights by kind, and what a step picks of them."""

    def __init__(self, w, ids, i, j, heads, fuse):
        self.w, self.ids, self.i, self.j, self.heads, self.fuse = w, ids, i, j, heads, fuse

    def of(self, kind, number=None):
        arrays = self.w[kind]
        return arrays[(self.i if number is None else number) % len(arrays)]

    @property
    def scale(self):
        return self.of("scale", self.j)

    @property
    def bias(self):
        return self.of("bias", self.j)

    @property
    def activation(self):
        return ACTIVATIONS[(self.i + 7 * self.j) % len(ACTIVATIONS)]


def weights(spec, dtype, seed=0):
    rows, width, heads = spec["sizes"]
    generator, length = np.random.default_rng(seed), rows[-1]

    def new(*shape, mean=0.0, scale=None):
        scale = shape[0] ** -0.5 if scale is None else scale
        return jnp.asarray(mean + scale * generator.standard_normal(shape), dtype)

    each = width // heads
    return {
        "square": [new(width, width) for _ in range(4)],
        "stack": [new(2, width, width, scale=width**-0.5)],
        "wide": [new(width, 2 * width) for _ in range(2)],
        "heads": [new(width, heads, each) for _ in range(2)],
        "out": [new(heads, each, width, scale=width**-0.5)],
        "one": [new(width, 1)],
        "low": [new(width, 2)],
        "rank": [new(2, width)],
        "tokens": [new(length, length)],
        "position": [new(length, width, scale=0.5)],
        "batch": [new(*rows[:1], *(1 for _ in rows[1:]), width, scale=0.5)],
        "scale": [new(width, mean=1.0, scale=0.2) for _ in range(3)],
        "bias": [new(width, scale=0.3) for _ in range(3)],
        "head_scale": [new(each, mean=1.0, scale=0.2)],
        "number": [new(mean=1.0, scale=0.2)],
    }


def arguments(spec, dtype=jnp.float32):
    """The weights, the input and ids of tokens."""
    rows, width, _ = spec["sizes"]
    generator = np.random.default_rng(1)
    x = jnp.asarray(0.3 + generator.standard_normal((*rows, width)), dtype)
    return weights(spec, dtype), x, jnp.asarray(generator.integers(0, width, rows), jnp.int32)


# --- steps


def _rms_norm(n, h, z):
    wide, k = h.astype(jnp.float32), (n.i + n.j) % 6
    square = jnp.mean(wide * wide, -1, keepdims=True) if k % 2 else jnp.mean(jnp.square(wide), -1)[..., None]
    if k == 0:
        y = wide * jax.lax.rsqrt(square + 1e-2)
    elif k == 1:
        y = wide / jnp.sqrt(square + 1e-2)
    elif k == 2:
        y = n.scale * (wide * (square + 1e-2) ** -0.5)
    elif k == 3:
        y = wide * (1.0 / jnp.sqrt(1e-2 + square)) * (1 + n.bias)
    elif k == 4:
        y = (wide * n.scale) * jax.lax.rsqrt(square + 1e-2)
    else:
        y = (wide * jax.lax.rsqrt(square + 1e-2)).astype(h.dtype) * n.scale
    return y.astype(h.dtype)


def _layer_norm(n, h, z):
    wide, k = h.astype(jnp.float32), (n.i + n.j) % 4
    mean = wide.mean(-1, keepdims=True)
    if k == 0:
        y = (wide - mean) * jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), -1, keepdims=True) + 1e-1)
    elif k == 1:
        y = (wide - mean) / jnp.sqrt(wide.var(-1, keepdims=True) + 1e-1)
    elif k == 2:
        y = (wide - mean) * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) - mean**2 + 1e-1)
    else:
        y = jax.nn.standardize(wide, axis=-1, epsilon=1e-1)
    return (y * n.scale + n.bias).astype(h.dtype)


def _heads(n, h):
    return h.reshape(*h.shape[:-1], n.heads, -1)


def _flat(y):
    return y.reshape(*y.shape[:-2], -1)


def _head_norm(n, h, z):
    q = _heads(n, h @ n.of("square"))
    q = q * jax.lax.rsqrt(jnp.mean(q * q, -1, keepdims=True) + 1e-2) * n.of("head_scale")
    return _flat(q)


def _rotated(n, h, z):
    q = _heads(n, h @ n.of("square") if n.j % 2 else h)
    if q.shape[-1] % 2:
        return _flat(q)
    half, length = q.shape[-1] // 2, q.shape[-3]
    angles = jnp.arange(length)[:, None] * 100.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None].astype(h.dtype), jnp.sin(angles)[:, None].astype(h.dtype)
    if n.i % 2:
        a, b = jnp.split(q, 2, axis=-1)
        return _flat(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1))
    a, b = q[..., ::2], q[..., 1::2]
    return _flat(jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(q.shape))


def _by_heads(n, h, z):
    q = jnp.einsum("...d,dnk->...nk", h, n.of("heads"))
    q = n.activation(q) * n.of("head_scale") if n.j % 2 else jnp.swapaxes(jnp.swapaxes(q, -1, -2) * 2, -1, -2)
    return jnp.einsum("...nk,nkd->...d", q, n.of("out"))


def _attention(n, h, z):
    q, k, v = (_heads(n, x @ n.of("square", i)) for i, x in ((n.i, h), (n.i + 1, z), (n.j, h)))
    if h.ndim < 3:
        q, k, v = q[None], k[None], v[None]
    lead = q.shape[:-3]
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    o = jax.nn.dot_product_attention(q, k, v, is_causal=bool(n.j % 2)).reshape(*lead, *q.shape[1:])
    return _flat(o).reshape(h.shape) @ n.of("square", n.j + 1)


def _plain_attention(n, h, z):
    """softmax(q k^T) v in the words of many programs, with masks of many kinds."""
    q, k, v = (_heads(n, x @ n.of("square", i)) for i, x in ((n.i, h), (n.i + 1, z), (n.j, h)))
    if n.i % 3 == 1:  # one head of keys
        k, v = (jnp.broadcast_to(x[..., :1, :], x.shape) for x in (k, v))
    s = jnp.einsum("...tnd,...snd->...nts", q, k)
    s = s / jnp.sqrt(q.shape[-1]) if n.j % 2 else s.astype(jnp.float32) * 0.5
    rows, keys = jnp.arange(h.shape[-2])[:, None], jnp.arange(h.shape[-2])
    valid = (keys < 1 + n.i % h.shape[-2]) | (jnp.sum(z[..., 0] * 0, -1)[..., None, None, None] > 1)
    masks = [
        None,
        keys <= rows,
        (keys <= rows) & (rows - keys < 3),
        valid,
        keys // 2 == rows // 2,
        abs(rows - keys) < 2,
    ]
    mask = masks[(n.i + n.j) % len(masks)]
    if mask is not None:
        fill = (-jnp.inf, -1e9, jnp.finfo(jnp.float32).min)[n.j % 3]
        s = s + jnp.where(mask, 0.0, fill).astype(s.dtype) if n.i % 2 else jnp.where(mask, s, fill)
    if n.i % 4 == 2:
        e = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
        p = e / jnp.sum(e, -1, keepdims=True)
    else:
        p = jax.nn.softmax(s, axis=-1)
    p = p * jax.nn.sigmoid(n.of("number").astype(p.dtype)) if n.j % 4 == 3 else p
    o = jnp.einsum("...nts,...snd->...tnd", p.astype(h.dtype), v)
    y = _flat(o) @ n.of("square", n.j + 1)
    return y + jnp.sum(p, axis=(-3, -2)).astype(h.dtype)[..., None] if n.i % 5 == 4 else y


def _own_attention(n, h, z):
    scores = jnp.einsum("...td,...sd->...ts", h @ n.of("square"), z) / h.shape[-1]
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jax.nn.softmax(scores.astype(jnp.float32), -1).astype(h.dtype) @ h


def _linear_attention(n, h, z):
    k, v = jax.nn.softmax(h @ n.of("square"), -1), z @ n.of("square", n.j)
    return h @ jnp.einsum("...tk,...tv->...kv", k, v) / h.shape[-2]


def _gram(n, h, z):
    gram = jnp.einsum("...d,...e->de", h, z) / (h.size / h.shape[-1])
    return h @ jnp.tanh(gram) + z


def _einsum(n, h, z):
    w, k = n.of("square"), n.j % 6
    if k == 0:
        return jnp.einsum("...d,ed->...e", h, w)
    if k == 1:
        return jnp.einsum("de,...d->...e", w, h)
    if k == 2:
        return jnp.moveaxis(jnp.einsum("de,...d->e...", w, h), 0, -1)
    if k == 3:
        return jnp.tensordot(h, w, axes=([-1], [1]))
    if k == 4:
        return jax.lax.dot_general(w, h, (((0,), (h.ndim - 1,)), ((), ()))).transpose(*range(1, h.ndim), 0)
    return jnp.matmul(h, w, preferred_element_type=jnp.float32).astype(h.dtype)


def _split(n, h, z):
    y = h @ n.of("wide")
    a, b = jnp.split(y, 2, -1) if n.j % 2 else (y[..., : h.shape[-1]], y[..., h.shape[-1] :])
    return n.activation(a) * b if n.j % 3 else jnp.concatenate([b, a], -1)[..., ::2]


def _interleaved(n, h, z):
    y = h @ n.of("wide")
    return y[..., ::2] * jax.nn.sigmoid(y[..., 1::2])


def _tokens(n, h, z):
    w, k = n.of("tokens"), n.j % 3
    if k == 0:
        return jnp.swapaxes(n.activation(jnp.swapaxes(h, -1, -2) @ w), -1, -2) + z
    return jnp.einsum("ts,...sd->...td", w, h) if k == 1 else jnp.matmul(w, h)


def _mean_over_tokens(n, h, z):
    mean = jnp.mean(h, -2, keepdims=True) if n.i % 2 else jnp.mean(h, axis=tuple(range(h.ndim - 1)))
    return n.activation(mean) * z + (mean @ n.of("square", n.j) if n.j % 2 else h)


def _shift(n, h, z):
    before = jnp.concatenate([jnp.zeros_like(h[..., :1, :]), h[..., :-1, :]], -2)
    return before * n.scale + h * (1 - n.scale)


def _pad(n, h, z):
    lead = [(0, 0)] * (h.ndim - 1)
    return jnp.pad(h, [*lead, (1, 1)])[..., 2:] + jnp.roll(z, 1, -1) + jnp.flip(h, -1)


def _cumsum(n, h, z):
    return jnp.cumsum(h, -2 if n.i % 2 else -1) / h.shape[-1] + z @ n.of("square")


def _mask(n, h, z):
    mask = [n.ids % 2 == 0, jnp.arange(h.shape[-2]) < h.shape[-2] // 2][n.i % 2]
    if mask.ndim != h.ndim - 1 and n.i % 2 == 0:  # under vmap ids have other axes
        mask = jnp.any(mask)
    return jnp.where(mask[..., None], n.activation(h), z * jnp.float32(0.5).astype(h.dtype))


def _jitted(n, h, z):
    table = np.linspace(0.5, 1.5, h.shape[-1], dtype=np.float32)
    return jax.jit(lambda h: (h * table).astype(h.dtype) @ n.of("square"))(h) + z


def _dropout(n, h, z):
    key = jax.random.fold_in(jax.random.key(7), n.i)
    shape = h.shape if n.j % 2 else (*h.shape[:-2], 1, h.shape[-1])
    mask = jax.random.bernoulli(key, 0.8, shape)
    if n.i % 3 == 0:
        mask = mask & (n.of("position") > -1)
    y = n.activation(h @ n.of("square"))
    return z + (jnp.where(mask, y / 0.8, 0) if n.j % 3 else y * mask / 0.8)


def _table(n, h, z):
    table = n.of("position")
    if n.i % 3 == 0 and n.of("batch").ndim == h.ndim:
        table = n.of("batch")
    elif n.i % 3 == 1:
        table = n.of("position")[:, :1]
    return h * table + z if n.j % 2 else n.activation(h @ n.of("square") + table)


def _embedded(n, h, z):
    if n.ids.ndim != h.ndim - 1:
        return h
    rows = n.of("square")
    e = jnp.take(rows, n.ids, axis=0) if n.j % 2 else jax.nn.one_hot(n.ids, h.shape[-1], dtype=h.dtype) @ rows
    return h + n.activation(e)


def _picked(n, h, z):
    ids = n.ids if n.ids.ndim == h.ndim - 1 else jnp.zeros(h.shape[:-1], int)
    logits = jax.nn.log_softmax(h @ n.of("square"), -1)
    return jnp.take_along_axis(logits, ids[..., None], -1) * z * 0.2 + h


def _hard(n, h, z):
    best = jnp.argmax(z, -1)
    weight = jax.nn.one_hot(best, h.shape[-1], dtype=h.dtype) + (z > h).astype(h.dtype) * 0.5
    count = jnp.sum((h > 0).astype(jnp.int32), -1, keepdims=True)
    return h * weight + jnp.floor(z) * 0.1 + count.astype(h.dtype) * 0.1


def _integers(n, h, z):
    k = jax.lax.stop_gradient(jnp.round(h * 4)).astype(jnp.int32)
    flags = (k % 2 == 0) & (z > 0) | ~(h > 0)
    return jnp.where(flags, h, 0) @ n.of("square") + jnp.bitwise_and(k, 3).astype(h.dtype) * 0.1


def _router(n, h, z):
    probs = jax.nn.softmax(h @ n.of("low"), -1)
    parts = jnp.stack([h @ n.of("square"), n.activation(z @ n.of("square", n.j))], -2)
    return jnp.einsum("...e,...ed->...d", probs, parts)


def _experts(n, h, z):
    """Rows by their ids' expert, some of them of none; under vmap, where JAX multiplies no such rows, nothing."""
    if n.ids.ndim != h.ndim - 1:
        return h
    w, rows, ids = n.of("stack"), h.reshape(-1, h.shape[-1]), n.ids.reshape(-1) % 2
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=2).astype(jnp.int32)
    sizes = jnp.maximum(sizes - n.i % 2, 0)
    u = jax.lax.ragged_dot(rows[order], w, sizes)
    u = n.activation(u) * jax.lax.ragged_dot(rows[order], w + 0.1, sizes) if n.j % 2 else n.activation(u + n.bias)
    y = jax.lax.ragged_dot(u, w, sizes)
    y = y * jax.nn.sigmoid(rows[order][:, :1]) if n.j % 3 else y + rows[order] * n.scale
    return y[jnp.argsort(order)].reshape(h.shape) + (z if n.i % 3 else 0)


def _recurrent(n, h, z):
    def step(c, x):
        c = jnp.tanh(c @ n.of("square") + x)
        return c, c * n.bias

    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(h[..., 0, :]), jnp.moveaxis(h, -2, 0))[1], 0, -2)


def _one_axis(n, h, z):
    flat = h.reshape(-1, h.shape[-1])
    return n.activation(flat @ n.of("square") + n.bias).reshape(h.shape) + z


def _weight_of_weights(n, h, z):
    return h @ (n.of("square") @ n.of("square", n.j)) if n.j % 2 else h @ jnp.tanh(n.of("square") * n.scale[:, None])


def _repeated_heads(n, h, z):
    k = (h @ n.of("square"))[..., : h.shape[-1] // n.heads]
    return _flat(jnp.repeat(k[..., None, :], n.heads, -2) * _heads(n, z))


def _statistics(n, h, z):
    largest = jnp.max(jnp.abs(h), -1, keepdims=True) if n.i % 2 else jnp.max(jnp.abs(h))
    return (
        h / (largest + 0.5) + (z - jnp.mean(z, -1, keepdims=True)) * jax.nn.sigmoid(jnp.sum(h * n.bias, -1))[..., None]
    )


_FUNCTIONS = [
    *[_rms_norm, _layer_norm, _head_norm, _rotated, _by_heads, _attention, _plain_attention, _plain_attention],
    *[_own_attention, _linear_attention, _gram, _einsum, _split, _interleaved],
    *[_tokens, _shift, _pad, _mean_over_tokens, _cumsum, _mask, _dropout, _jitted],
    *[_table, _embedded, _picked, _hard, _integers, _router, _experts],
    *[_recurrent, _one_axis, _weight_of_weights, _repeated_heads, _statistics],
]
STEPS = {
    "product": lambda n, h, z: h @ n.of("square"),
    "dense": lambda n, h, z: n.activation(h @ n.of("square") + n.bias),
    "gated": lambda n, h, z: n.activation(h @ n.of("square")) * (h @ n.of("square", n.j)),
    "transposed": lambda n, h, z: h @ n.of("square").T + z * n.scale,
    "tied": lambda n, h, z: n.activation(h @ n.of("square")) @ n.of("square").T,
    "activation": lambda n, h, z: n.activation(h),
    "residual": lambda n, h, z: h + z,
    "multiplied": lambda n, h, z: h * jnp.tanh(z),
    "softmax": lambda n, h, z: jax.nn.softmax(h @ n.of("square"), -1) @ n.of("square", n.j),
    "log_softmax": lambda n, h, z: jax.nn.log_softmax(h) * n.scale,
    "logsumexp": lambda n, h, z: h - jax.nn.logsumexp(z, -1, keepdims=True),
    "lora": lambda n, h, z: h @ n.of("square") + 2.0 * ((h @ n.of("low")) @ n.of("rank")),
    "gate_of_one": lambda n, h, z: jax.nn.sigmoid(h @ n.of("one")) * z + h @ n.of("one") @ n.of("one").T,
    "unit": lambda n, h, z: h / (0.1 + jnp.sqrt(jnp.sum(jnp.square(h), -1, keepdims=True) + 1e-4)),
    "precise": lambda n, h, z: jnp.matmul(h, n.of("square"), precision="highest"),
    "number": lambda n, h, z: h * n.of("number") + 1 - z / 3,
    "stopped": lambda n, h, z: h + jax.lax.stop_gradient(z @ n.of("square")),
    "named": lambda n, h, z: checkpoint_name(n.activation(h @ n.of("square")), "hidden"),
    "named_product": lambda n, h, z: n.activation(checkpoint_name(h @ n.of("square") + n.bias, "product")),
    "sorted": lambda n, h, z: jnp.sort(h, -1) @ n.of("square"),
    "expanded": lambda n, h, z: jnp.squeeze(n.activation(h[..., None, :] * n.scale[:, None][:, 0]), -2),
    "outer": lambda n, h, z: jnp.sum(h[..., :, None] * n.of("square") * z[..., None, :], -2) * 0.3,
    "sum_of_all": lambda n, h, z: h * jnp.tanh(jnp.mean(z * h)) + jnp.linalg.norm(z) * 0.1,
    "flags": lambda n, h, z: jnp.where(jnp.isfinite(h) & (jnp.sign(z) != 0), h, 0),
    "reordered": lambda n, h, z: h.T.reshape(h.shape[-1], -1).T.reshape(h.shape) @ n.of("square"),
    **{f.__name__.strip("_"): f for f in _FUNCTIONS},
}
ROUNDED = STEPS | {  # with products in 8 bits
    "product": lambda n, h, z: coda.fp8.matmul(h, n.of("square")),
    "dense": lambda n, h, z: n.activation(coda.fp8.matmul(h, n.of("square")) + n.bias),
    "gated": lambda n, h, z: n.activation(coda.fp8.matmul(h, n.of("square"))) * (h @ n.of("square", n.j)),
    "tied": lambda n, h, z: coda.fp8.matmul(n.activation(coda.fp8.matmul(h, n.of("square"))), n.of("square").T),
    "lora": lambda n, h, z: coda.fp8.matmul(h, n.of("square")) + 2.0 * ((h @ n.of("low")) @ n.of("rank")),
    "residual": lambda n, h, z: h + coda.fp8.matmul(z, n.of("square"), recipe=coda.fp8.Recipe(dtype="float8_e5m2")),
}
DISCRETE = {"hard", "integers", "sorted", "flags"}  # in 16 bits they are other functions


# --- what holds steps


def _scan(run, n, h, z):
    def body(c, w):
        y = run(n, {**n.w, "square": [w, *n.w["square"][1:]]}, c, z)
        return y / (1 + jnp.mean(jnp.abs(y))), jnp.mean(y)

    h, means = jax.lax.scan(body, h, n.of("stack"), reverse=bool(n.i % 2), unroll=1 + n.j % 2)
    return h + jnp.sum(means)


def _vmap(run, n, h, z):
    if h.ndim < 3:
        return run(n, n.w, h, z)
    w = {**n.w, "batch": [n.of("position")]}  # it has no axis of the batch
    axis = n.i % (h.ndim - 2)
    if n.ids.ndim != h.ndim - 1:
        return jax.vmap(lambda h, z: run(n, w, h, z), axis, axis)(h, z)
    return jax.vmap(lambda h, z, ids: run(n, w, h, z, ids), axis, axis)(h, z, n.ids)


def _while(run, n, h, z):
    def body(i, c):
        y = run(n, n.w, c, z)
        return y / (1 + jnp.mean(jnp.abs(y))) + i * 0.1

    return jax.lax.fori_loop(0, 2, body, h)


def _by_its_rule(f, i):
    """A function of arrays and ids whose gradient is a rule's: plain JAX's, with the cotangents clipped."""

    def backward(kept, d):
        *arrays, ids = kept
        return *jax.vjp(lambda *xs: f(*xs, ids), *arrays)[1](jnp.clip(d, -0.1 - i, 0.1 + i)), None

    g = jax.custom_vjp(f)
    g.defvjp(lambda *args: (f(*args), args), backward)
    return g


_POLICY = jax.checkpoint_policies
POLICIES = [
    *[None, _POLICY.dots_saveable, _POLICY.save_only_these_names("hidden"), _POLICY.save_only_these_names("product")],
    *[_POLICY.dots_with_no_batch_dims_saveable, _POLICY.everything_saveable, _POLICY.nothing_saveable],
    _POLICY.save_from_both_policies(_POLICY.dots_saveable, _POLICY.save_only_these_names("hidden")),
]
HOLDERS = {
    "scan": _scan,
    "vmap": _vmap,
    "fori": _while,
    "cond": lambda run, n, h, z: jax.lax.cond(
        n.ids.ravel()[0] % 2 == n.i % 2, lambda h: run(n, n.w, h, z), lambda h: h - 1, h
    ),
    "switch": lambda run, n, h, z: jax.lax.switch(
        jnp.int32(n.i % 3), [lambda h: h, lambda h: run(n, n.w, h, z), lambda h: h @ n.of("square")], h
    ),
    "checkpoint": lambda run, n, h, z: jax.checkpoint(
        lambda w, h, z: run(n, w, h, z), policy=POLICIES[n.i % len(POLICIES)]
    )(n.w, h, z),
    "fused": lambda run, n, h, z: n.fuse(lambda w, h, z: run(n, w, h, z))(n.w, h, z),
    "with_a_rule": lambda run, n, h, z: _by_its_rule(lambda w, h, z, ids: run(n, w, h, z, ids), n.i)(n.w, h, z, n.ids),
    "jit": lambda run, n, h, z: jax.jit(lambda w, h, z: run(n, w, h, z))(n.w, h, z),
    "scan_of_checkpoints": lambda run, n, h, z: _scan(
        lambda n, w, h, z: jax.checkpoint(lambda w, h, z: run(n, w, h, z))(w, h, z), n, h, z
    ),
}

_number = st.integers(0, 11)
_step = st.tuples(st.sampled_from(sorted(STEPS)), _number, _number, _number)
_holder = st.tuples(
    st.sampled_from(sorted(HOLDERS)), _number, _number, _number, st.lists(_step, min_size=1, max_size=3)
)
networks = st.fixed_dictionaries(
    {
        "sizes": st.sampled_from(SIZES),
        "steps": st.lists(st.one_of(_step, _step, _step, _holder), min_size=3, max_size=9),
    }
)


def network(spec, without=frozenset(), fuse=lambda f: f, kinds=STEPS):
    """The function that a spec describes: of the weights, the input and the ids; its results are several streams."""
    heads = spec["sizes"][2]

    def run(steps, w, streams, ids):
        streams = list(streams)
        for name, pick, i, j, *inner in steps:
            if name in without:
                continue
            n, h, z = Net(w, ids, i, j, heads, fuse), streams[-1], streams[pick % len(streams)]
            if name in kinds:
                y = kinds[name](n, h, z)
            else:

                def held(n, w, h, z, ids=ids, steps=inner[0]):
                    return run(steps, w, [z, h], ids)[-1]

                y = HOLDERS[name](held, n, h, z)
            assert y.shape == h.shape and y.dtype == h.dtype, (name, i, j, y.shape, y.dtype, h.shape)
            streams.append(y)
        return streams

    def function(w, x, ids):
        streams = run(spec["steps"], w, [x], ids)
        return streams[-1], streams[len(streams) // 2], ids + 1

    return function


# --- losses over a vocabulary


def _logprobs(z, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], -1)[..., 0]


def _cross_entropy(z, labels):
    return jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[..., None], -1)[..., 0]


def _z_loss(z, labels):
    lse = jax.nn.logsumexp(z, -1)
    return lse - jnp.sum(z * jax.nn.one_hot(labels, z.shape[-1]), -1) + 0.01 * lse**2


def _smoothed(z, labels):
    soft = jax.nn.one_hot(labels, z.shape[-1]) * 0.9 + 0.1 / z.shape[-1]
    return -jnp.sum(soft * jax.nn.log_softmax(z), -1)


def _padded(z, labels):
    return -_logprobs(jnp.where(jnp.arange(z.shape[-1]) < z.shape[-1] - 24, z, -1e9), labels)


@jax.custom_vjp
def _by_rule(z, labels):
    return _z_loss(z, labels)


def _rule(kept, d):
    z, labels = kept
    lse = jax.nn.logsumexp(z, -1, keepdims=True)
    p = jnp.exp(z - lse)
    return d[..., None] * (p * (1 + 0.02 * lse) - jax.nn.one_hot(labels, z.shape[-1])), None


_by_rule.defvjp(lambda z, labels: (_z_loss(z, labels), (z, labels)), _rule)

TOKEN_LOSSES = {
    "log_softmax": lambda z, labels: -_logprobs(z, labels),
    "logsumexp": _cross_entropy,
    "z_loss": _z_loss,
    "smoothed": _smoothed,
    "padded": _padded,
    "capped": lambda z, labels: -_logprobs(3 * jnp.tanh(z / 3), labels),
    "by_rule": _by_rule,
    "focal": lambda z, labels: -_logprobs(z, labels) * (1 - jnp.exp(_logprobs(z, labels))),
}
SUMS = {
    "mean": lambda x, labels: x.mean(),
    "masked": lambda x, labels: jnp.sum(jnp.where(labels > 2, x, 0)) / jnp.maximum(jnp.sum(labels > 2), 1),
    "weighted": lambda x, labels: jnp.sum(x * (labels + 1)) / jnp.sum(labels + 1),
    "rows": lambda x, labels: jnp.mean(jnp.exp(-jnp.mean(x, -1))),
}
vocabularies = st.fixed_dictionaries(
    {
        "loss": st.sampled_from(sorted(TOKEN_LOSSES)),
        "sum": st.sampled_from(sorted(SUMS)),
        "bias": st.booleans(),
        "shifted": st.booleans(),
        "accuracy": st.booleans(),
        "constrained": st.booleans(),
        "rows": st.sampled_from([(2, 9), (12,), (1, 5), (3, 2, 4)]),
    }
)


def vocabulary_arguments(spec, dtype=jnp.float32):
    """The weights, an input and labels."""
    generator = np.random.default_rng(0)
    shapes = {"square": (16, 16), "head": (16, 1024), "bias": (1024,)}
    w = {name: jnp.asarray(generator.standard_normal(shape) / 4, dtype) for name, shape in shapes.items()}
    x = jnp.asarray(generator.standard_normal((*spec["rows"], 16)), dtype)
    return w, x, jnp.asarray(generator.integers(0, 1000, spec["rows"]), jnp.int32)


def vocabulary_loss(spec):
    """The loss that a spec describes, and an accuracy beside it or nothing."""

    def loss(w, x, labels):
        z = (jnp.tanh(x @ w["square"]) @ w["head"]).astype(jnp.float32)
        if spec["bias"]:
            z = z + w["bias"].astype(jnp.float32)
        z = constrained(z) if spec["constrained"] else z
        if spec["shifted"]:
            z, labels = z[..., :-1, :], labels[..., 1:]
        each = TOKEN_LOSSES[spec["loss"]](z, labels)
        beside = jnp.mean(jnp.argmax(z, -1) == labels) if spec["accuracy"] else ()
        return SUMS[spec["sum"]](each, labels), beside

    return loss


def constrained(h):
    """The rows cut over the first automatic axis of the mesh in use that divides them; else nothing is said."""
    mesh = jax.sharding.get_abstract_mesh()
    names = [
        name
        for name, kind, size in zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
        if kind == AxisType.Auto and h.shape[0] % size == 0
    ]
    return with_sharding_constraint(h, jax.P(names[0])) if names else h


def loss_of(function):
    """A number, and what a step of training reports beside it."""

    @functools.wraps(function)
    def loss(w, x, ids):
        y, other, ids = function(w, x, ids)
        y, other = y.astype(jnp.float32), other.astype(jnp.float32)
        total = jnp.mean(jnp.square(y * (1 + jnp.arange(y.shape[-1]) / y.shape[-1])))
        return total + jnp.mean(jnp.sin(other)), {"ids": ids, "mean": y.mean(), "other": other}

    return loss


# --- what stands beside products: other dtypes, numbers and masks, and meshes


def _wide(x, dtype="float64"):
    """x in a dtype, in its 32 bits where x64 is off."""
    return x.astype(jax.dtypes.canonicalize_dtype(dtype))


def _cast(dtype):
    return lambda w, h, ids: h.astype(dtype).astype(h.dtype)


def _of_float64(f):
    return lambda w, h, ids: f(w, _wide(h), ids).astype(h.dtype)


def _reduced(w, h, ids):
    return jax.lax.reduce_precision(h, 4, 3)


BESIDE = {
    "product": lambda w, h, ids: h @ w["square"].astype(h.dtype),
    "kept in float32": lambda w, h, ids: (h.astype(jnp.float32) @ w["square"]).astype(h.dtype),
    "router": lambda w, h, ids: h * jax.nn.softmax(h.astype(jnp.float32) @ w["low"])[..., :1].astype(h.dtype),
    "half": lambda w, h, ids: (h.astype(jnp.float16) @ w["square"].astype(jnp.float16)).astype(h.dtype),
    "bias": lambda w, h, ids: jax.nn.relu(h + w["vector"].astype(h.dtype)),
    "scale": lambda w, h, ids: (h * w["vector"]).astype(h.dtype),
    "number": lambda w, h, ids: h * w["number"].astype(h.dtype) + 1,
    "weight of 8 bits": lambda w, h, ids: h @ w["square8"].astype(h.dtype),
    "mask of integers": lambda w, h, ids: jnp.where((ids % 2 == 0)[..., None], jnp.tanh(h), 0),
    "mask of bools": lambda w, h, ids: h * (ids > 3)[..., None] + jnp.where(h > 0, h, 0.1),
    "columns": lambda w, h, ids: jnp.where(jnp.arange(h.shape[-1]) < 3, h, h * 2),
    "integers": lambda w, h, ids: (h + jnp.floor(h).astype(jnp.int32) % 3).astype(h.dtype),
    "counted": lambda w, h, ids: h * jnp.sum(h > 0, -1, keepdims=True).astype(h.dtype),
    "best": lambda w, h, ids: h + jax.nn.one_hot(jnp.argmax(h, -1), h.shape[-1], dtype=h.dtype),
    "table": lambda w, h, ids: (h * np.linspace(0.5, 1.5, h.shape[-1])).astype(h.dtype),
    "norm": lambda w, h, ids: (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 0.1) * w["vector"]).astype(
        h.dtype
    ),
    "float64": _of_float64(lambda w, h, ids: jnp.tanh(h) * _wide(w["vector"])),
    "statistics in float64": _of_float64(lambda w, h, ids: h - h.mean(-1, keepdims=True)),
    "product in float64": _of_float64(lambda w, h, ids: h @ _wide(w["square"])),
    "e4m3": _cast(jnp.float8_e4m3fn),
    "e5m2": _cast(jnp.float8_e5m2),
    "no kernel's": _cast(jnp.float8_e4m3fnuz),
    "arithmetic in 8 bits": lambda w, h, ids: (h.astype(jnp.float8_e5m2) * 2).astype(h.dtype),
    "reduced": _reduced,
    "constrained": lambda w, h, ids: constrained(h),
    "constrained hidden": lambda w, h, ids: jax.nn.gelu(constrained(h @ w["square"].astype(h.dtype))),
    "scan": lambda w, h, ids: jax.lax.scan(
        lambda c, s: (jnp.tanh(c @ w["square"].astype(h.dtype) + s.astype(h.dtype)), None), h, w["stack"]
    )[0],
    "loop": lambda w, h, ids: jax.lax.scan(lambda c, s: (jnp.sin(c * s).astype(c.dtype), None), h, w["stack"])[0],
    "checkpoint": lambda w, h, ids: jax.checkpoint(
        lambda w, h: jax.nn.gelu(h @ w["square"].astype(h.dtype) * w["number"].astype(h.dtype))
    )(w, h),
    "branch": lambda w, h, ids: jax.lax.cond(ids.size > 3, lambda h: jax.nn.relu(h) * 2, lambda h: h, h),
}
SETTINGS = ["plain", "x64", "automatic", "explicit", "shard_map inside", "shard_map around", "shard_map unchecked"]
beside = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([(8, 4), (8,), (8, 1), (0, 4), (8, 0)]),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "setting": st.sampled_from(SETTINGS),
        "ids": st.sampled_from(["int32", "int64", "int8", "uint8"]),
        "weights": st.sampled_from(["float32", "float64"]),
        "steps": st.lists(st.one_of(st.just("product"), st.sampled_from(sorted(BESIDE))), min_size=2, max_size=7),
        "has_vocabulary": st.booleans(),
        "sharded": st.booleans(),
    }
)


def beside_arguments(spec):
    """The weights, the input and ids; the dtypes of 64 bits are so only under x64."""
    generator = np.random.default_rng(0)
    shapes = {"square": (8, 8), "low": (8, 2), "vector": (8,), "number": (), "stack": (2, 8), "head": (8, 1024)}
    w = {name: jnp.asarray(0.5 * generator.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    w |= {name: _wide(w[name], spec["weights"]) for name in ("vector", "number", "stack")}
    w["square8"] = w["square"].astype(jnp.float8_e4m3fn)
    x = jnp.asarray(generator.standard_normal((*spec["rows"], 8)), spec["dtype"])
    return w, x, _wide(jnp.asarray(generator.integers(0, 8, spec["rows"])), spec["ids"])


def beside_network(spec):
    """The function that a spec describes: rows of a stream, or each token's loss over a vocabulary."""

    def function(w, x, ids):
        h = x
        for name in spec["steps"]:
            h = BESIDE[name](w, h, ids)
        if not spec["has_vocabulary"]:
            return h
        z = (h @ w["head"].astype(h.dtype)).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(z), ids[..., None].astype(jnp.int32), -1)

    return function
