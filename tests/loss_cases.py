"""The loss head's textbook formula, and random arguments for it and for coda.linear_cross_entropy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from tests import tolerance
from tests.chain_cases import EPS, normal, rms_norm
from tests.gemm_cases import as_float64, jit, pullback

TOKENS, WIDTH, VOCABULARY = 300, 40, 136  # with the smallest chunks: 128, 128 and 44 tokens


def arguments(dtype, lead=(TOKENS,), width=WIDTH, vocabulary=VOCABULARY, transpose_w=False):
    """x, scale, kernel, labels with some of them -100, weights with some of them 0."""
    x, scale = normal(0, *lead, width), 1 + 0.3 * normal(1, width)
    kernel = 2 * normal(2, width, vocabulary) / width**0.5
    rng = np.random.default_rng(3)
    labels = np.where(rng.random(lead) < 0.1, -100, rng.integers(0, vocabulary, lead))
    labels.flat[-2:] = vocabulary - 1, 0
    weights = jnp.asarray(np.where(rng.random(lead) < 0.1, 0, rng.random(lead)), jnp.float32)
    kernel = kernel.T if transpose_w else kernel
    return [x.astype(dtype), scale.astype(dtype), kernel.astype(dtype), jnp.asarray(labels, jnp.int32), weights]


def loss(x, scale, kernel, labels, weights, **options):
    h = x if scale is None else coda.rms_norm(x, scale, epsilon=EPS)
    return coda.linear_cross_entropy(h, kernel, labels, weights=weights, **{"chunk_bytes": 1, **options})


def plain(
    x,
    scale,
    kernel,
    labels,
    weights,
    *,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    soft_cap=None,
    transpose_w=False,
):
    """In float32, or float64 where the arguments are, but for the norm's result and the logits, in x's dtype."""
    h = x if scale is None else rms_norm(x, scale)
    z = h @ (kernel.T if transpose_w else kernel)
    z = z.astype(jnp.promote_types(x.dtype, jnp.float32))
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    kept = labels != ignore_index
    weights = jnp.where(kept, weights.astype(z.dtype), 0)
    target = jax.nn.one_hot(jnp.where(kept, labels, 0), z.shape[-1], dtype=z.dtype)
    target = (1 - label_smoothing) * target + label_smoothing / z.shape[-1]
    lse = jax.nn.logsumexp(z, axis=-1)
    losses = weights * (lse - jnp.sum(target * z, axis=-1) + z_loss * lse**2)
    total = jnp.sum(weights)
    if reduction == "none":
        return losses, total
    return jnp.sum(losses) / (total if reduction == "mean" else 1), total


def compare(chain, args, **options):
    """Loss and every cotangent by the rule; a loss over all tokens may err by what the plain one of a token does."""
    cotangents = [normal(17, *jax.eval_shape(chain, *args)[0].shape), jnp.float32(0.7)]
    got, rough = (pullback(f, args, cotangents)() for f in (chain, functools.partial(plain, **options)))
    each = functools.partial(plain, **{**options, "reduction": "none"})
    rough_each = np.asarray(jit(each)(*args)[0])
    with jax.enable_x64(True):
        wide = [jnp.asarray(as_float64(x)) for x in args]
        exact = pullback(functools.partial(plain, **options), wide, [as_float64(ct) for ct in cotangents])()
        error = np.abs(np.asarray(each(*wide)[0]) - rough_each).max()
    if options["reduction"] != "none":
        tokens = 1 if options["reduction"] == "mean" else np.count_nonzero(rough_each)
        rough[0][0] = np.asarray(exact[0][0]) + error * tokens
    for i, (x, e, r) in enumerate(zip(*map(jax.tree.leaves, (got, exact, rough)), strict=True)):
        dtype = jnp.float32 if i == 0 else r.dtype
        tolerance.check(x, e, r, dtype=dtype, name=f"leaf {i}")
