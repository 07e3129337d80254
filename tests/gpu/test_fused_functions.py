"""`coda.fuse` on the device: products are kernels, values and gradients as good as plain JAX's, and the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.plain_models import PLAIN, inputs, loss_of, weights
from tests.test_as_stored import DOORS, activation, equal_to_the_maximum, highest, softmax_of_maxima
from tests.test_fuse_loss import LOSSES, of_model

REPEATS = 50
SIZES = {
    "ragged": {"batch": 3, "length": 72, "width": 256, "hidden": 184},
    "large": {"batch": 4, "length": 512, "width": 512, "hidden": 2048},
}


def total_error(found, exact):
    """The error of all arrays as one."""
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(one)]) for one in (found, exact))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def check(loss, args, repeats=REPEATS, ratio=1.5):
    """Compares with float32, by the ratio to plain JAX's error, and repeats."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    plain, fused = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in (loss, coda.fuse(loss)))
    with jax.default_matmul_precision("highest"):
        exact = plain(*wide)
    with coda.strict():
        found = fused(*args)
    assert total_error(found, exact) <= ratio * total_error(plain(*args), exact) + 1e-6
    for _ in range(repeats):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(fused(*args)), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


def rows(*shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLAIN)
def test_models(name, sizes):
    batch, length, width, hidden = (SIZES[sizes][key] for key in ("batch", "length", "width", "hidden"))
    w = weights(jnp.bfloat16, width=width, hidden=hidden, length=length)
    check(loss_of(PLAIN[name]), (w, rows(batch, length, width)))


def test_rows_that_are_alike():
    """A deferred norm rounds its scaled weights: that error is the same in each of these rows, and adds up."""
    w = weights(jnp.bfloat16, width=256, hidden=512)
    check(loss_of(PLAIN["llama"]), (w, inputs(jnp.bfloat16, width=256)), repeats=1, ratio=2)


def by_bernoulli(key, x, rate):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


@pytest.mark.parametrize("dropout", [coda.dropout, by_bernoulli])
def test_dropout(dropout):
    w, keys = weights(jnp.bfloat16, width=256, hidden=520), jax.random.split(jax.random.key(0))

    def f(w, x):
        h = dropout(keys[0], jax.nn.gelu(x @ w["up"] + w["hidden_bias"]), 0.5)
        return x + dropout(keys[1], h @ w["down"], 0.25 if dropout is coda.dropout else 0.5)

    check(loss_of(f), (w, rows(3, 72, 256)))


@pytest.mark.parametrize("name", ["integer_labels", "one_hot", "log_softmax"])
def test_losses(name):
    width, vocabulary = 512, 4096
    generator = np.random.default_rng(0)
    w = {
        "scale": jnp.ones(width, jnp.bfloat16),
        "head": jnp.asarray(generator.standard_normal((width, vocabulary)) * width**-0.5, jnp.bfloat16),
    }
    x = inputs(jnp.bfloat16, batch=4, length=256, width=width)
    labels = jnp.asarray(generator.integers(0, vocabulary, x.shape[:2]))
    loss = of_model(LOSSES[name] if name != "one_hot" else with_one_hot(vocabulary))
    check(lambda w, x: loss(w, x, labels), (w, x), repeats=20)


def with_one_hot(vocabulary):
    return lambda z, y: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, vocabulary), axis=-1)


@pytest.mark.parametrize("kind", ["scan", "checkpoint"])
def test_layers(kind):
    w = jax.tree.map(
        lambda *xs: jnp.stack(xs), *(weights(jnp.bfloat16, seed=i, width=256, hidden=512) for i in range(3))
    )
    body = PLAIN["llama"] if kind == "scan" else jax.checkpoint(PLAIN["llama"])

    def f(w, x):
        return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0]

    check(loss_of(f), (w, rows(4, 256, 256)), repeats=20)


@pytest.mark.parametrize("made", [jnp.matmul, activation], ids=["product", "activation"])
@pytest.mark.parametrize("door", DOORS)
def test_maxima_are_elements(door, made):
    """Each row has elements that equal its maximum, and none above it; each row's gradient is not 0."""
    x, w = rows(1000, 512), rows(512, 1032) / 512**0.5

    def largest(x, w):
        z = made(x, w)
        return jnp.sum(jnp.any(z == highest(z), -1)), jnp.max(z - highest(z)), jnp.sum(z > highest(z))

    with coda.strict():
        found = jax.jit(coda.fuse(largest, memory=None))(x, w)
    assert list(map(float, found)) == [1000, 0, 0]
    for use in (equal_to_the_maximum, softmax_of_maxima):
        with coda.strict():
            _, (dx, _) = jax.jit(DOORS[door](lambda x, w, use=use: use(made(x, w))))(x, w)
        assert jnp.all(jnp.any(dx != 0, -1))
