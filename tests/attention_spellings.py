"""Attention as people write it: what `coda.fuse` recognises, and as which masks; and what it leaves, and why."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import coda_jax as coda
from tests.attention_scores import t5_buckets

B, T, S, H, K, D = 2, 16, 12, 4, 2, 8
NEG = jnp.finfo(jnp.float32).min
SCALE = 1 / math.sqrt(D)


class Spelling(NamedTuple):
    """A function of arrays.

    Attributes:
      function: of the arguments.
      arguments: float32 ones are made bfloat16 by tests.
      says: the mask that it becomes, in `coda.explain`'s words; of one that is left a part of the reason.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    says: str


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


q, k, v = normal(0, B, T, H, D), normal(1, B, T, H, D), normal(2, B, T, H, D)
k_groups, v_groups = normal(3, B, T, K, D), normal(4, B, T, K, D)
k_other, v_other = normal(5, B, S, H, D), normal(6, B, S, H, D)
q_heads, k_heads, v_heads = (x.swapaxes(1, 2) for x in (q, k, v))
ids = jnp.asarray(np.repeat([[0, 1, 2, 3], [0, 0, 1, 2]], T // 4, axis=1))
is_token = jnp.arange(T)[None] < jnp.array([[T], [10]])  # (B, T)
dense = jnp.tril(jnp.ones((T, T), bool))[None, None] & is_token[:, None, None]
per_head = normal(7, H)
softmax = jax.nn.softmax


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) * SCALE


def out(p, v):
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def attended(change=lambda s, *xs: s):
    """softmax(change(scores)) v."""
    return lambda q, k, v, *xs: out(softmax(change(scores(q, k), *xs), axis=-1), v)


def by(make_p):
    """make_p(scores) v."""
    return lambda q, k, v, *xs: out(make_p(scores(q, k), *xs), v)


def causal():
    return jnp.tril(jnp.ones((T, T), bool))


def masked(mask, fill=-jnp.inf):
    return attended(lambda s, *xs: jnp.where(mask(*xs), s, fill))


def masked_after(change, fill=-1e9):
    return attended(lambda s, *xs: jnp.where(causal(), change(s, *xs), fill))


def _distance():
    return jnp.arange(T)[:, None] - jnp.arange(T)[None]


def divided(e):
    return e / e.sum(-1, keepdims=True)


def of_ids(ids):
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def index(size=T):
    return jnp.arange(size)


PRODUCTS = {
    "einsum": Spelling(attended(), (q, k, v), "none"),
    "scores bths": Spelling(
        lambda q, k, v: jnp.einsum("bths,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bths", q, k) * SCALE, axis=-1), v),
        (q, k, v),
        "none",
    ),
    "scores bhst, softmax over axis 2": Spelling(
        lambda q, k, v: jnp.einsum("bhst,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhst", q, k), axis=2), v),
        (q, k, v),
        "none",
    ),
    "k and v first": Spelling(
        lambda q, k, v: jnp.einsum("bshd,bhts->bthd", v, softmax(jnp.einsum("bshd,bthd->bhts", k, q) * SCALE)),
        (q, k, v),
        "none",
    ),
    "matmul of heads": Spelling(
        lambda q, k, v: softmax(q @ k.swapaxes(-1, -2) * SCALE) @ v, (q_heads, k_heads, v_heads), "none"
    ),
    "matmul, transposes, merged heads": Spelling(
        lambda q, k, v: (
            (softmax(jnp.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)) / jnp.sqrt(D)) @ v.swapaxes(1, 2))
            .transpose(0, 2, 1, 3)
            .reshape(B, T, H * D)
        ),
        (q, k, v),
        "none",
    ),
    "vmap over heads and sequences": Spelling(
        jax.vmap(jax.vmap(lambda q, k, v: softmax(q @ k.T * SCALE) @ v)), (q_heads, k_heads, v_heads), "none"
    ),
    "vmap over heads behind tokens": Spelling(
        jax.vmap(jax.vmap(lambda q, k, v: softmax(q @ k.T * SCALE) @ v, in_axes=1, out_axes=1)), (q, k, v), "none"
    ),
    "heads merged with sequences, a mask that is not": Spelling(
        lambda q, k, v, m: (
            softmax(
                jnp.where(
                    m, (q.reshape(B * H, T, D) @ k.reshape(B * H, T, D).swapaxes(1, 2)).reshape(B, H, T, T), -1e9
                ).reshape(B * H, T, T)
            )
            @ v.reshape(B * H, T, D)
        ),
        (q_heads, k_heads, v_heads, dense),
        "a dense mask",
    ),
    "no sequences": Spelling(
        lambda q, k, v: jnp.einsum("hts,shd->thd", softmax(jnp.einsum("thd,shd->hts", q, k)), v),
        (q[0], k[0], v[0]),
        "none",
    ),
    "one head of many keys": Spelling(
        lambda q, k, v: softmax(q @ k.T) @ v, (normal(20, 4, D), normal(21, 1024, D), normal(22, 1024, D)), "none"
    ),
    "scale on q": Spelling(
        lambda q, k, v: out(softmax(jnp.einsum("bthd,bshd->bhts", q * SCALE, k)), v), (q, k, v), "none"
    ),
    "scale on q and k": Spelling(
        lambda q, k, v: out(softmax(jnp.einsum("bthd,bshd->bhts", q * D**-0.25, k * D**-0.25)), v), (q, k, v), "none"
    ),
    "a negative scale": Spelling(attended(lambda s: -2 * s), (q, k, v), "none"),
    "a learned scale of each head": Spelling(
        attended(lambda s, a: s * jnp.exp(a)[None, :, None, None]), (q, k, v, per_head), "none"
    ),
    "float32 softmax, cast back": Spelling(
        lambda q, k, v: out(softmax(scores(q, k).astype(jnp.float32)).astype(v.dtype), v), (q, k, v), "none"
    ),
    "float32 scores": Spelling(
        lambda q, k, v: out(
            softmax(jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * SCALE), v
        ),
        (q, k, v),
        "none",
    ),
    "q and k cast to float32": Spelling(
        lambda q, k, v: out(softmax(scores(q.astype(jnp.float32), k.astype(jnp.float32))), v), (q, k, v), "none"
    ),
    "names on all": Spelling(
        lambda q, k, v: checkpoint_name(out(checkpoint_name(softmax(checkpoint_name(scores(q, k), "s")), "p"), v), "o"),
        (q, k, v),
        "none",
    ),
    "values that depend on other scores": Spelling(
        lambda q, k, v: out(softmax(scores(q, k)), v + scores(q, k[:, ::-1]).sum((1, 2))[..., None, None]),
        (q, k, v),
        "none",
    ),
}


def _late(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return out(e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


SOFTMAXES = {
    "exp(s - max) / sum": Spelling(by(lambda s: divided(jnp.exp(s - s.max(-1, keepdims=True)))), (q, k, v), "none"),
    "exp(s - stop_gradient(max)) / sum": Spelling(
        by(lambda s: divided(jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True))))), (q, k, v), "none"
    ),
    "exp(s) / sum": Spelling(by(lambda s: divided(jnp.exp(s))), (q, k, v), "none"),
    "exp(s - logsumexp)": Spelling(
        by(lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))), (q, k, v), "none"
    ),
    "exp(log_softmax)": Spelling(by(lambda s: jnp.exp(jax.nn.log_softmax(s))), (q, k, v), "none"),
    "e * (1 / sum)": Spelling(
        by(lambda s: (lambda e: e * (1.0 / e.sum(-1, keepdims=True)))(jnp.exp(s))), (q, k, v), "none"
    ),
    "divided behind the values": Spelling(_late, (q, k, v), "none"),
    "softmax(where=)": Spelling(by(lambda s, m: softmax(s, axis=-1, where=m)), (q, k, v, dense), "a dense mask"),
    "where(m, e, 0) / sum": Spelling(by(lambda s: divided(jnp.where(causal(), jnp.exp(s), 0))), (q, k, v), "causal"),
    "e * m / sum": Spelling(by(lambda s: divided(jnp.exp(s) * causal().astype(jnp.float32))), (q, k, v), "causal"),
    "a mask on probabilities too": Spelling(
        by(lambda s: jnp.where(causal(), softmax(jnp.where(causal(), s, -1e30)), 0)), (q, k, v), "causal"
    ),
    "probabilities gated by heads": Spelling(
        by(lambda s, g: softmax(s) * jax.nn.sigmoid(g)[None, :, None, None]), (q, k, v, per_head), "none"
    ),
    "probabilities scaled by heads in einsum": Spelling(
        by(lambda s, g: jnp.einsum("bhts,h->bhts", softmax(s), g)), (q, k, v, per_head), "none"
    ),
}
_constant = np.tril(np.ones((T, T), bool))
_jax_constant = jnp.tril(jnp.ones((T, T), bool))
_banded = _constant & ~np.tril(_constant, -5)
lengths = jnp.array([T, 10])
prefix = jnp.array([5, 9])
slopes = 2.0 ** -jnp.arange(1.0, H + 1)


def _window(d):
    return (d >= 0) & (d < 5)


MASKS = {
    "causal tril, -inf": Spelling(masked(causal), (q, k, v), "causal"),
    "causal tril, -1e9": Spelling(masked(causal, -1e9), (q, k, v), "causal"),
    "causal tril, the least float": Spelling(masked(causal, NEG), (q, k, v), "causal"),
    "causal by iotas": Spelling(
        masked(
            lambda: jax.lax.broadcasted_iota(jnp.int32, (T, T), 0) >= jax.lax.broadcasted_iota(jnp.int32, (T, T), 1)
        ),
        (q, k, v),
        "causal",
    ),
    "causal by arange": Spelling(masked(lambda: index()[:, None] >= index()), (q, k, v), "causal"),
    "not causal's opposite": Spelling(masked(lambda: ~(index()[:, None] < index())), (q, k, v), "causal"),
    "causal triu(-inf) added": Spelling(
        attended(lambda s: s + jnp.triu(jnp.full((T, T), -jnp.inf), 1)), (q, k, v), "causal"
    ),
    "causal where(m, 0, -1e9) added": Spelling(
        attended(lambda s: s + jnp.where(causal(), 0.0, -1e9)), (q, k, v), "causal"
    ),
    "causal (1 - m) * -1e9 added": Spelling(
        attended(lambda s: s + (1.0 - causal().astype(jnp.float32)) * -1e9), (q, k, v), "causal"
    ),
    "causal s * m - 1e10 * (1 - m)": Spelling(
        attended(lambda s: s * causal().astype(s.dtype) - 1e10 * (1 - causal().astype(s.dtype))), (q, k, v), "causal"
    ),
    "causal, an array of NumPy": Spelling(masked(lambda: _constant), (q, k, v), "causal"),
    "causal, an array that is closed over": Spelling(masked(lambda: _jax_constant, -1e9), (q, k, v), "causal"),
    "a window, an array of NumPy": Spelling(masked(lambda: _banded), (q, k, v), "from i - 4 to i + 0"),
    "a window": Spelling(masked(lambda: _window(index()[:, None] - index())), (q, k, v), "from i - 4 to i + 0"),
    "a window of both sides": Spelling(
        masked(lambda: jnp.abs(index()[:, None] - index()) <= 3), (q, k, v), "from i - 3 to i + 3"
    ),
    "a window by tril and triu": Spelling(
        masked(lambda: causal() & jnp.triu(jnp.ones((T, T), bool), -4)), (q, k, v), "from i - 4 to i + 0"
    ),
    "a prefix": Spelling(
        masked(lambda n: (causal() | (index() < n[:, None, None]))[:, None], -1e30), (q, k, v, prefix), "an interval"
    ),
    "key lengths": Spelling(
        masked(lambda n: (index() < n[:, None])[:, None, None], -1e30), (q, k, v, lengths), "an interval"
    ),
    "causal and key lengths": Spelling(
        masked(lambda n: causal() & (index() < n[:, None])[:, None, None], NEG), (q, k, v, lengths), "an interval"
    ),
    "positions of a cache": Spelling(
        masked(lambda n: (index() <= (index(S) + n[:, None])[..., None])[:, None], NEG),
        (q[:, :S], k, v, jnp.array([4, 2])),
        "an interval",
    ),
    "ids": Spelling(masked(of_ids, -1e30), (q, k, v, ids), "ids"),
    "ids and causal": Spelling(masked(lambda x: of_ids(x) & causal(), -1e30), (q, k, v, ids), "causal, ids"),
    "ids and causal, added": Spelling(
        attended(lambda s, x: s + jnp.where(of_ids(x) & causal(), 0.0, -0.7 * float(np.finfo(np.float32).max))),
        (q, k, v, ids),
        "causal, ids",
    ),
    "ids under vmap": Spelling(
        jax.vmap(
            lambda q, k, v, x: jnp.einsum(
                "hts,shd->thd",
                softmax(jnp.where(x[:, None] == x[None, :], jnp.einsum("thd,shd->hts", q, k), -1e30)),
                v,
            )
        ),
        (q, k, v, ids),
        "ids",
    ),
    "padding of keys": Spelling(masked(lambda m: m[:, None, None, :], -1e30), (q, k, v, is_token), "ids"),
    "padding of keys, added": Spelling(
        attended(lambda s, m: s + (1.0 - m[:, None, None, :].astype(jnp.float32)) * NEG), (q, k, v, is_token), "ids"
    ),
    "padding of queries and keys": Spelling(
        masked(lambda m: (m[:, :, None] & m[:, None, :])[:, None], NEG), (q, k, v, is_token), "ids"
    ),
    "padding of queries and keys, multiplied": Spelling(
        masked(lambda m: (m[:, :, None].astype(jnp.float32) * m[:, None, :].astype(jnp.float32))[:, None] > 0, NEG),
        (q, k, v, is_token),
        "ids",
    ),
    "ids and padding": Spelling(
        masked(lambda x, m: of_ids(x) & m[:, None, None, :], -1e9), (q, k, v, ids, is_token), "ids, a dense mask"
    ),
    "two nested wheres": Spelling(
        attended(lambda s, m: jnp.where(m[:, None, None, :], jnp.where(causal(), s, -1e30), -1e30)),
        (q, k, v, is_token),
        "causal, ids",
    ),
    "dense (B, 1, T, S)": Spelling(masked(lambda m: m, -1e30), (q, k, v, dense), "a dense mask"),
    "dense (T, S)": Spelling(masked(lambda m: m, -1e30), (q, k, v, dense[0, 0]), "a dense mask"),
    "dense, added": Spelling(attended(lambda s, b: s + b), (q, k, v, jnp.where(dense, 0, -1e9)), "a bias"),
    "a window in an image": Spelling(
        masked(
            lambda: (abs(index()[:, None] // 4 - index() // 4) <= 1) & (abs(index()[:, None] % 4 - index() % 4) <= 1)
        ),
        (q, k, v),
        "a dense mask",
    ),
}
BIASES = {
    "a bias of keys": Spelling(attended(lambda s, b: s + b[:, None, None]), (q, k, v, normal(10, B, T)), "a bias"),
    "a dense bias": Spelling(attended(lambda s, b: s + b), (q, k, v, normal(8, H, T, T)), "a bias"),
    "a dense bias, subtracted and scaled": Spelling(
        attended(lambda s, b: 0.5 * (s - b)), (q, k, v, normal(8, H, T, T)), "a bias"
    ),
    "a bias and causal": Spelling(
        attended(lambda s, b: jnp.where(causal(), s + b, -1e9)), (q, k, v, normal(8, H, T, T)), "causal, a bias"
    ),
}


def of_distances(s, slopes):
    return s - slopes[:, None, None] * jnp.abs(index()[:, None] - index())


POSITIONS = {
    "ALiBi": Spelling(attended(lambda s: of_distances(s, jnp.exp2(-8 * jnp.arange(1, H + 1) / H))), (q, k, v), "none"),
    "ALiBi, slopes of numpy, causal": Spelling(
        masked_after(lambda s: of_distances(s, 2.0 ** -np.arange(1, H + 1, dtype=np.float32))), (q, k, v), "causal"
    ),
    "ALiBi, learned slopes": Spelling(attended(of_distances), (q, k, v, per_head), "none"),
    "ALiBi of keys, causal": Spelling(
        masked_after(lambda s, slopes: s + slopes[None, :, None, None] * index()), (q, k, v, per_head), "causal, a bias"
    ),
    "T5's table": Spelling(
        attended(
            lambda s, table: s + table[jnp.clip(index()[None, :] - index()[:, None] + 8, 0, 15)].transpose(2, 0, 1)
        ),
        (q, k, v, normal(9, 16, H)),
        "none",
    ),
    "T5's buckets, causal": Spelling(
        masked_after(
            lambda s, table: s + table.at[:, t5_buckets(index() - index()[:, None], False)].get(mode="clip")[None]
        ),
        (q, k, v, normal(11, H, 32)),
        "causal",
    ),
    "ALiBi in 16 bits": Spelling(
        attended(
            lambda s: (
                s
                + (jnp.asarray([0.5, 0.25, 0.125, 0.0625], jnp.bfloat16)[:, None, None] * -abs(_distance())).astype(
                    jnp.bfloat16
                )
            )
        ),
        (q, k, v),
        "none",
    ),
    "distances, a cap and documents": Spelling(
        attended(lambda s, ids: jnp.where(of_ids(ids), 5 * jnp.tanh(s / 5) - 0.1 * abs(_distance()), -jnp.inf)),
        (q, k, v, ids),
        "ids",
    ),
    "a decay of each query": Spelling(
        attended(lambda s, w: s - w[:, None, :, None] * jnp.log1p(abs(_distance()).astype(jnp.float32))),
        (q, k, v, jnp.abs(normal(11, B, T))),
        "none",
    ),
}


def _repeated(q, k, v):
    k, v = (jnp.repeat(x, H // K, 2) for x in (k, v))
    return masked(causal, -1e30)(q, k, v)


def _in_groups(q, k, v):
    s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) * SCALE
    return jnp.einsum("bkgts,bskd->btkgd", softmax(jnp.where(causal(), s, -1e30)), v).reshape(B, T, H, D)


def _reshaped_scores(q, k, v):
    s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k).reshape(B, H, T, T) * SCALE
    p = softmax(jnp.where(causal(), s, -1e30)).reshape(B, K, H // K, T, T)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, H, D)


def _broadcast(q, k, v):
    k, v = (jnp.broadcast_to(x[:, :, :, None], (B, T, K, H // K, D)).reshape(B, T, H, D) for x in (k, v))
    return attended()(q, k, v)


def _axial(q, k, v):
    s = jnp.einsum("bijhd,bklhd->bhijkl", q, k) * SCALE
    return jnp.einsum("bhijkl,bklhd->bijhd", softmax(s, axis=(-2, -1)), v)


def _of_jax(**options):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


HEADS = {
    "repeat": Spelling(_repeated, (q, k_groups, v_groups), "causal"),
    "groups of heads": Spelling(_in_groups, (q, k_groups, v_groups), "causal"),
    "scores reshaped to heads": Spelling(_reshaped_scores, (q, k_groups, v_groups), "causal"),
    "broadcast_to and reshape": Spelling(_broadcast, (q, k_groups, v_groups), "none"),
    "one head of keys": Spelling(
        lambda q, k, v: jnp.einsum("bhts,bsd->bthd", softmax(jnp.einsum("bthd,bsd->bhts", q, k) * SCALE), v),
        (q, k_groups[:, :, 0], v_groups[:, :, 0]),
        "none",
    ),
    "one head of keys, heads of values": Spelling(
        lambda q, k, v: jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bsd->bhts", q, k) * SCALE), v),
        (q, k_groups[:, :, 0], v),
        "none",
    ),
    "keys of all sequences": Spelling(
        lambda q, k, v: jnp.einsum("bhts,shd->bthd", softmax(jnp.einsum("bthd,shd->bhts", q, k)), v),
        (q, k[0], v[0]),
        "none",
    ),
    "queries of all sequences": Spelling(
        lambda q, k, v: jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("thd,bshd->bhts", q, k)), v),
        (q[0], k, v),
        "none",
    ),
    "keys of another length": Spelling(attended(), (q, k_other, v_other), "none"),
    "causal, aligned at the end": Spelling(
        masked(lambda: index(S)[:, None] + (T - S) >= index(), -1e30), (q[:, :S], k, v), "to i + 4"
    ),
    "wider values": Spelling(attended(), (q, k, normal(12, B, T, H, 16)), "none"),
    "keys of two axes": Spelling(_axial, tuple(x.reshape(B, 4, 4, H, D) for x in (q, k, v)), "none"),
    "jax.nn": Spelling(_of_jax(), (q, k, v), "none"),
    "jax.nn, causal, groups": Spelling(_of_jax(is_causal=True), (q, k_groups, v_groups), "causal"),
    "jax.nn, a window": Spelling(_of_jax(is_causal=True, local_window_size=(7, 0)), (q, k, v), "from i - 7 to i + 0"),
    "jax.nn, a mask": Spelling(
        lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=m, implementation="xla"),
        (q, k, v, dense),
        "a dense mask",
    ),
    "jax.nn, a bias": Spelling(
        lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, bias=b, implementation="xla"),
        (q, k, v, normal(8, 1, H, T, T)),
        "a bias",
    ),
    "jax.nn, lengths": Spelling(
        lambda q, k, v, n: jax.nn.dot_product_attention(
            q, k, v, query_seq_lengths=n, key_value_seq_lengths=n, implementation="xla"
        ),
        (q, k, v, lengths),
        "an interval",
    ),
}
CURVES = {
    "a gate of all pairs": Spelling(attended(lambda s, a: jnp.tanh(s * a)), (q, k, v, normal(12, B, H, T, T)), "none"),
    "a learned cap of each head": Spelling(
        attended(lambda s, a: 3 * jnp.tanh(s * a[:, None, None])),
        (q, k, v, 1 + jnp.abs(per_head)),
        "none",
    ),
    "a learned cap, causal": Spelling(
        attended(lambda s, a: jnp.where(causal(), a * jnp.tanh(s / 3), -1e9)), (q, k, v, jnp.float32(3.0)), "causal"
    ),
    "a soft cap": Spelling(attended(lambda s: 5 * jnp.tanh(s / 5)), (q, k, v), "none"),
    "a soft cap and causal": Spelling(
        attended(lambda s: jnp.where(causal(), 5 * jnp.tanh(s / 5), -1e30)), (q, k, v), "causal"
    ),
    "clipped scores": Spelling(attended(lambda s: 2 * jnp.clip(s, -1, 1)), (q, k, v), "none"),
    "squares of sigmoids": Spelling(attended(lambda s: -jnp.square(jax.nn.sigmoid(3 * s - 1))), (q, k, v), "none"),
    "the magnitude of a cap": Spelling(
        attended(lambda s: jnp.maximum(jnp.abs(jnp.tanh(s)), 0.1) ** 3 - 2), (q, k, v), "none"
    ),
    "a cap and a bias": Spelling(
        attended(lambda s, b: 5 * jnp.tanh(s / 5) + b), (q, k, v, normal(8, H, T, T)), "a bias"
    ),
}


def _column(sink):
    return jnp.broadcast_to(sink[None, :, None, None], (B, H, T, 1))


def _with_sink(s, sink, scale=1.0):
    z = jnp.concatenate([s, _column(sink).astype(s.dtype)], -1)
    return softmax(z * scale if scale != 1 else z)[..., :-1]


def _by_exponentials(s, sink):
    """As MaxText has it."""
    z = jnp.concatenate([s, _column(sink)], -1)
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return e[..., :-1], e.sum(-1, keepdims=True)


def _divided_behind(q, k, v, sink):
    e, total = _by_exponentials(jnp.where(causal(), scores(q, k), -1e9), sink)
    return out(e, v) / total.swapaxes(1, 2)


SINKS = {
    "a sink": Spelling(by(_with_sink), (q, k, v, per_head), "sinks"),
    "a sink in front, causal": Spelling(
        by(lambda s, sink: softmax(jnp.concatenate([_column(sink), jnp.where(causal(), s, -1e9)], -1))[..., 1:]),
        (q, k, v, per_head),
        "causal, sinks",
    ),
    "a sink and padding": Spelling(
        by(lambda s, sink, m: _with_sink(jnp.where(m[:, None, None], s, -jnp.inf), sink)),
        (q, k, v, per_head, is_token),
        "ids, sinks",
    ),
    "exponentials with a sink, causal": Spelling(_divided_behind, (q, k, v, per_head), "causal, sinks"),
    "log_softmax with a sink": Spelling(
        by(lambda s, sink: jnp.exp(jax.nn.log_softmax(jnp.concatenate([s, _column(sink)], -1)))[..., :-1]),
        (q, k, v, per_head),
        "sinks",
    ),
}


RECOGNISED = {**PRODUCTS, **SOFTMAXES, **MASKS, **BIASES, **POSITIONS, **CURVES, **SINKS, **HEADS}


def _dropped(p, key, rate=0.25):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, p.shape), p / (1 - rate), 0)


def _mixed(s, w):
    return jnp.einsum("bhts,hg->bgts", softmax(jnp.einsum("bhts,hg->bgts", s, w)), w)


def _beside(result):
    """The attention's result, and something else of the scores or of the probabilities."""

    def function(q, k, v):
        s = scores(q, k)
        p = softmax(s)
        return out(p, v), result(s, p)

    return function


_key = jax.random.key(5)
_qkv = (q, k, v)
LEFT = {
    "dropout": Spelling(by(lambda s, key: _dropped(softmax(s), key)), (*_qkv, _key), "dropout"),
    "coda.dropout": Spelling(by(lambda s, key: coda.dropout(key, softmax(s), 0.25)), (*_qkv, _key), "dropout"),
    "a sink of each query": Spelling(
        by(lambda s, sink: softmax(jnp.concatenate([s, sink], -1))[..., :-1]),
        (*_qkv, normal(15, B, H, T, 1)),
        "a sink of",
    ),
    "two sinks": Spelling(
        by(lambda s, sink: softmax(jnp.concatenate([s, sink], -1))[..., :-2]), (*_qkv, normal(15, B, H, T, 2)), "joined"
    ),
    "a scale behind a sink": Spelling(by(lambda s, sink: _with_sink(s, sink, 2.0)), (*_qkv, per_head), "with a sink"),
    "e / (1 + sum)": Spelling(
        by(lambda s: (lambda e: e / (1 + e.sum(-1, keepdims=True)))(jnp.exp(s))), _qkv, "the sum"
    ),
    "two products of scores": Spelling(
        lambda q, k, v, a, b: out(softmax(scores(q, k) + jnp.einsum("bthd,bsd->bhts", a, b)), v),
        (*_qkv, normal(13, B, T, H, 4), normal(14, B, T, 4)),
        "two products",
    ),
    "masks and a bias that may be -inf": Spelling(
        lambda q, k, v, m, b: jax.nn.dot_product_attention(q, k, v, mask=m, bias=b, implementation="xla"),
        (*_qkv, dense, normal(8, 1, H, T, T)),
        "which may hide all keys",
    ),
    "padding to which -1e9 is added": Spelling(
        attended(lambda s, m: s + jnp.where(m[:, None, None, :], 0, -1e9)), (*_qkv, is_token), "a number is added"
    ),
    "a mask of small numbers": Spelling(masked(causal, -10.0), _qkv, "puts -10"),
    "one query": Spelling(attended(), (q[:, :1], k, v), "one query"),
    "a router": Spelling(
        lambda x, w, e: softmax(x @ w) @ e, (normal(1, 64, D), normal(2, D, 16), normal(3, 16, D)), "fewer than"
    ),
    "wide heads": Spelling(
        attended(), (normal(0, 1, 4, 2, 264), normal(1, 1, 4, 2, 264), normal(2, 1, 4, 2, 264)), "widths 264"
    ),
    "precision": Spelling(
        lambda q, k, v: out(softmax(jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")), v), _qkv, "precision"
    ),
    "probabilities returned": Spelling(_beside(lambda s, p: p), _qkv, "are a result"),
    "entropy": Spelling(_beside(lambda s, p: -(p * jnp.log(p)).sum()), _qkv, "reads its scores or probabilities"),
    "the rows' maxima returned": Spelling(_beside(lambda s, p: s.max(-1)), _qkv, "are a result"),
    "the log-sum-exp returned": Spelling(_beside(lambda s, p: jax.nn.logsumexp(s, -1)), _qkv, "reads its scores"),
    "softmax over queries": Spelling(by(lambda s: softmax(s, axis=2)), _qkv, "over other axes"),
    "softmax over heads": Spelling(by(lambda s: softmax(s, axis=1)), _qkv, "over other axes"),
    "softmax over rows and keys": Spelling(by(lambda s: softmax(s, axis=(2, 3))), _qkv, "over other axes"),
    "the best scores": Spelling(
        by(lambda s: softmax(jnp.where(s < jax.lax.top_k(s, 4)[0][..., -1:], -jnp.inf, s))), _qkv, ""
    ),
    "a threshold by the row's maximum": Spelling(
        by(lambda s: softmax(jnp.where(s < s.max(-1, keepdims=True) - 2, -jnp.inf, s))), _qkv, "rows' maxima"
    ),
    "talking heads": Spelling(by(_mixed), (*_qkv, normal(17, H, H)), ""),
    "a difference of softmaxes": Spelling(
        lambda q, k, v: out(softmax(scores(q, k)) - 0.5 * softmax(scores(k, q)), v), _qkv, "sub of probabilities"
    ),
    "normalised again": Spelling(by(lambda s, key: divided(_dropped(softmax(s), key))), (*_qkv, _key), "probabilities"),
    "sigmoid": Spelling(by(jax.nn.sigmoid), _qkv, ""),
    "scores over their deviation": Spelling(by(lambda s: softmax(s / s.std(-1, keepdims=True))), _qkv, ""),
    "a maximum over rows": Spelling(
        by(lambda s: divided(jnp.exp(s - s.max(-2, keepdims=True)))), _qkv, "varies along the sum"
    ),
    "the sum of another row": Spelling(
        by(lambda s: (lambda e: e / e.sum(-1)[:, :, None, :])(jnp.exp(s))), _qkv, "other axes"
    ),
    "the sum of other exponentials": Spelling(
        by(lambda s: jnp.exp(s) / jnp.exp(0.5 * s).sum(-1, keepdims=True)), _qkv, "div of exponentials"
    ),
    "values of rows": Spelling(
        lambda q, k, v: jnp.einsum("bhts,bthd->bshd", softmax(scores(q, k)), v), _qkv, "over other axes"
    ),
    "p + p^T": Spelling(by(lambda s: (lambda p: p + p.swapaxes(-1, -2))(softmax(s))), _qkv, "other axes"),
    "stopped probabilities": Spelling(by(lambda s: jax.lax.stop_gradient(softmax(s))), _qkv, "is stopped"),
    "a stopped sum": Spelling(
        by(lambda s: (lambda e: e / jax.lax.stop_gradient(e.sum(-1, keepdims=True)))(jnp.exp(s))), _qkv, "is stopped"
    ),
    "integers": Spelling(by(lambda s: (softmax(s) * 8).astype(jnp.int32).astype(jnp.float32)), _qkv, "cast to int32"),
    "squares": Spelling(by(lambda s: softmax(s) ** 2), _qkv, "probabilities"),
    "a mask in the sum alone": Spelling(
        by(lambda s: (lambda e: e / (e * causal()).sum(-1, keepdims=True))(jnp.exp(s))), _qkv, "of its own"
    ),
    "a sum of some keys": Spelling(
        by(lambda s: (lambda e: e / e[..., :8].sum(-1, keepdims=True))(jnp.exp(s))), _qkv, "exponentials"
    ),
    "sorted scores": Spelling(by(lambda s: softmax(jnp.sort(s, -1))), _qkv, ""),
    "moved scores": Spelling(by(lambda s: softmax(jnp.roll(s, 1, -1))), _qkv, ""),
}
