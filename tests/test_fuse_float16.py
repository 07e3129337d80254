"""`coda.fuse` of float16 products: what the function has in float32 keeps that range, in memory too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")

ROWS, WIDTH, COLUMNS, VOCABULARY = 64, 32, 128, 100


def arguments(dtype=jnp.float16, columns=COLUMNS):
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal((ROWS, WIDTH)), generator.standard_normal((WIDTH, columns)) / 4
    labels = generator.integers(0, VOCABULARY, ROWS)
    return jnp.asarray(x, jnp.float16).astype(dtype), jnp.asarray(w, jnp.float16).astype(dtype), jnp.asarray(labels)


def logits(x, w):
    return (x @ w).astype(jnp.float32)


def padded(x, w, labels):
    z = logits(x, w)
    return jax.nn.softmax(jnp.where(jnp.arange(z.shape[-1]) < VOCABULARY, z, -1e9))


def smoothed(x, w, labels):
    z = logits(x, w)
    is_real = jnp.arange(z.shape[-1]) < VOCABULARY
    logprobs = jax.nn.log_softmax(jnp.where(is_real, z, -1e9))
    targets = 0.9 * jax.nn.one_hot(labels, z.shape[-1]) + 0.1 / VOCABULARY * is_real
    return -jnp.mean(jnp.sum(targets * logprobs, axis=-1))


def large(x, w, labels):
    z = 1e5 * logits(x, w)
    return jnp.sum(z, axis=-1) / 1e5, jnp.max(z, axis=-1) / 1e5


def normed(x, w, labels):
    z = (100 * logits(x, w)) ** 2
    return (z / jnp.mean(z, axis=-1, keepdims=True)).astype(x.dtype) @ w.T


def with_small_cotangents(x, w, labels):
    """The cotangent of what is divided is less than float16's smallest number."""
    z = 1e5 * jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return ((z - jnp.max(z, axis=-1, keepdims=True)) / 1e5).astype(x.dtype) @ w.T


FUNCTIONS = {f.__name__: f for f in (padded, smoothed, large, normed, with_small_cotangents)}


def with_cotangents(f):
    """The values of f, and the cotangents of x and w."""

    def both(x, w, labels):
        values, pullback = jax.vjp(lambda x, w: f(x, w, labels), x, w)
        generator = np.random.default_rng(1)
        return values, pullback(
            jax.tree.map(lambda y: jnp.asarray(generator.standard_normal(y.shape) / 100, y.dtype), values)
        )

    return both


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"chunk_losses": False}], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_values_beyond_the_range_of_float16(name, options):
    f = FUNCTIONS[name]
    exact = jax.jit(with_cotangents(f))(*arguments(jnp.float32))
    own = jax.jit(with_cotangents(f))(*arguments())
    for g in (with_cotangents(coda.fuse(f, **options)), coda.fuse(with_cotangents(f), **options)):
        found = jax.jit(g)(*arguments())
        assert all(map(np.all, map(np.isfinite, jax.tree.leaves(found))))
        for each in zip(*map(jax.tree.leaves, (found, own, exact)), strict=True):
            one, plain, truth = map(jnp.float32, each)
            assert largest_error(one, truth) < 2 * largest_error(plain, truth) + 1e-3
    assert largest_error(jax.tree.map(jnp.float32, jax.jit(coda.fuse(f, **options))(*arguments())), exact[0]) < 1e-2


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"chunk_losses": False}], ids=str)
def test_a_smoothed_loss_of_a_padded_vocabulary(options):
    args = arguments(columns=1040)
    expected = jax.jit(jax.value_and_grad(smoothed, (0, 1)))(*args)
    for g in (
        jax.value_and_grad(coda.fuse(smoothed, **options), (0, 1)),
        coda.fuse(jax.value_and_grad(smoothed, (0, 1)), **options),
    ):
        found = jax.jit(g)(*args)
        assert np.isfinite(found[0])
        assert largest_error(*(jax.tree.map(jnp.float32, x) for x in (found, expected))) < 2e-3


def test_values_that_the_function_has_in_float16_are_stored_so():
    """Arrays that float32 values are cast to, or cast of, keep their two bytes."""

    def f(w, x):
        h = jax.nn.gelu((x @ w[0]).astype(jnp.float32)).astype(jnp.float16)
        return jnp.sum(jnp.sin((h @ w[1]).astype(jnp.float32)))

    shapes = [(512, 1024), (1024, 512)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes], jax.ShapeDtypeStruct((2048, 512), "float16")
    totals = [
        coda.explain(jax.value_and_grad(g), *args, platform="cuda", device="H100").totals for g in (coda.fuse(f), f)
    ]
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), args)

    def in_bfloat16(w, x):
        h = jax.nn.gelu((x @ w[0]).astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.sum(jnp.sin((h @ w[1]).astype(jnp.float32)))

    other = coda.explain(jax.value_and_grad(coda.fuse(in_bfloat16)), *others, platform="cuda", device="H100").totals
    assert totals[0].kept_bytes == other.kept_bytes <= totals[1].kept_bytes
    assert totals[0].passes_bytes == other.passes_bytes < totals[1].passes_bytes
