"""The textbook formula of log-probabilities and entropies, and random arguments for it and for coda.token_logprobs."""

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from tests import tolerance
from tests.chain_cases import EPS, normal, rms_norm
from tests.gemm_cases import as_float64, pullback

TOKENS, WIDTH, RANK = 300, 40, 8  # with the smallest chunks: 128, 128 and 44 tokens
CANDIDATES = 5


def arguments(dtype, vocabulary, *, candidates=False, transpose_w=False, lead=(TOKENS,), width=WIDTH):
    """x, the norm's scale, w, a, b, temperature, labels, some of them -100 and some twice, and a mask."""
    x, scale = normal(0, *lead, width), 1 + 0.3 * normal(1, width)
    w = 2 * normal(2, width, vocabulary) / width**0.5
    a, b = normal(4, width, RANK) / width**0.5, normal(5, RANK, vocabulary) / RANK**0.5
    rng = np.random.default_rng(3)
    shape = (*lead, CANDIDATES) if candidates else lead
    labels = np.where(rng.random(shape) < 0.1, -100, rng.integers(0, vocabulary, shape))
    if candidates:
        labels[..., 3] = labels[..., 1]
    temperature = jnp.asarray(rng.uniform(0.7, 1.5, lead), jnp.float32)
    mask = jnp.asarray(rng.random(lead) < 0.4)
    arrays = [y.astype(dtype) for y in (x, scale, w.T if transpose_w else w, a, b)]
    return [*arrays, temperature, jnp.asarray(labels, jnp.int32), mask]


def arguments_with_logits(size, tokens=300, width=40, vocabulary=136, *, offsets=0.0):
    """x, w, bfloat16, and labels of normal logits of this size around each token's offset."""
    x, w = np.array(normal(0, tokens, width)), size * np.array(normal(1, width, vocabulary)) / (width - 1) ** 0.5
    x[:, 0], w[0] = offsets, 1
    labels = np.random.default_rng(2).integers(0, vocabulary, tokens)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(labels)


def logprobs(x, scale, w, a, b, temperature, labels, mask, *, has_norm=True, **options):
    """(log-probabilities, entropies) of coda.token_logprobs, in the smallest chunks; what is None is left out."""
    h = coda.rms_norm(x, scale, epsilon=EPS) if has_norm else x
    given = {"temperature": temperature, "mask": mask, "low_rank": None if a is None else (a, b)}
    given = {name: value for name, value in given.items() if value is not None}
    return coda.token_logprobs(h, w, labels, **{"entropy": True, "chunk_bytes": 1, **given, **options})


def plain(
    x, scale, w, a, b, temperature, labels, mask, *, has_norm=True, soft_cap=None, transpose_w=False, ignore_index=-100
):
    """In float32, or float64 where the arguments are, but for the norm's result and the logits, in x's dtype."""
    h = rms_norm(x, scale) if has_norm else x
    z = h @ (w.T if transpose_w else w)
    if a is not None:
        z = z + (h @ a) @ b
    z = z.astype(jnp.promote_types(x.dtype, jnp.float32))
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    logp = jax.nn.log_softmax(z if temperature is None else z / temperature[..., None], axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    several = labels.ndim > x.ndim - 1
    each = labels if several else labels[..., None]
    ignored = each == ignore_index
    picked = jnp.where(ignored, 0.0, jnp.take_along_axis(logp, jnp.where(ignored, 0, each), axis=-1))
    entropy = jnp.where(jnp.all(ignored, axis=-1), 0.0, entropy)
    if mask is not None:
        picked, entropy = jnp.where(mask[..., None], picked, 0.0), jnp.where(mask, entropy, 0.0)
    return picked if several else picked[..., 0], entropy


def compare(chain, formula, args):
    """Log-probabilities, entropies and every cotangent by the rule; arguments that are None are not compared."""
    present = [x is not None for x in args]

    def of_present(f):
        def run(*arrays):
            remaining = iter(arrays)
            return f(*(next(remaining) if is_present else None for is_present in present))

        return run

    arrays = [x for x in args if x is not None]
    shapes = jax.eval_shape(of_present(formula), *arrays)
    cotangents = [normal(17 + i, *x.shape) for i, x in enumerate(shapes)]
    got, rough = (pullback(of_present(f), arrays, cotangents)() for f in (chain, formula))
    with jax.enable_x64(True):
        wide = [jnp.asarray(as_float64(x)) for x in arrays]
        exact = pullback(of_present(formula), wide, [as_float64(ct) for ct in cotangents])()
    for i, (x, e, r) in enumerate(zip(*map(jax.tree.leaves, (got, exact, rough)), strict=True)):
        tolerance.check(x, e, r, dtype=r.dtype, name=f"leaf {i}")
