"""`coda.fuse` on the device: products are kernels, values and gradients as good as plain JAX's, and the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests import test_fuse_fp8, test_fuse_ragged, test_fuse_recipe
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


@pytest.mark.parametrize("recipe", [test_fuse_fp8.DELAYED, test_fuse_fp8.E5M2], ids=["delayed", "current"])
def test_norms_that_are_deferred_through_products_in_8_bits(recipe):
    """As near to float32 without 8 bits as where the normalised array is rounded, and the same bits each time."""
    w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), test_fuse_fp8.weights())
    args = w, rows(8, 48, test_fuse_fp8.D), dict.fromkeys(w, test_fuse_fp8.histories()["down"])
    loss = test_fuse_fp8.loss_of(test_fuse_fp8.once, recipe)

    def unrounded(w, x, h, recipe):
        return test_fuse_fp8.feed_forward(w, x, recipe, h, jnp.matmul)

    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
        exact = jax.jit(jax.grad(test_fuse_fp8.loss_of(unrounded, recipe), (0, 1)))(*wide)
    plain, fused = (jax.jit(jax.grad(f, (0, 1, 2))) for f in (loss, coda.fuse(loss, defer_norms=True)))
    with coda.strict():
        found = fused(*args)
    assert total_error(found[:2], exact) <= 1.3 * total_error(plain(*args)[:2], exact)
    for _ in range(REPEATS):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(fused(*args)), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


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


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("is_joined", [False, True])
def test_experts(is_joined, top):
    """In plain JAX; the router is given, for one that is rounded would choose other experts."""
    w = test_fuse_ragged.weights(jnp.bfloat16, 256, 184, 5, is_joined)
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((1003, 5)), jnp.float32)

    def layer(w, x):
        return test_fuse_ragged.plain_layer(w, x, top, logits=logits)

    check(loss_of(layer), (w, rows(1003, 256)), repeats=20)


@pytest.mark.parametrize("kind", ["scan", "checkpoint"])
def test_layers(kind):
    w = jax.tree.map(
        lambda *xs: jnp.stack(xs), *(weights(jnp.bfloat16, seed=i, width=256, hidden=512) for i in range(3))
    )
    body = PLAIN["llama"] if kind == "scan" else jax.checkpoint(PLAIN["llama"])

    def f(w, x):
        return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0]

    check(loss_of(f), (w, rows(4, 256, 256)), repeats=20)


@pytest.mark.parametrize("form", [test_fuse_recipe.unrolled, test_fuse_recipe.checkpointed])
def test_histories(form):
    """Products in 8 bits with delayed scales: gradients and histories are those on a CPU but for roundings."""
    w, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (test_fuse_recipe.layers(2), rows(4, 128, 32)))
    loss = test_fuse_recipe.loss_of(form, test_fuse_recipe.plain)
    step = coda.fuse(loss, fp8=coda.fp8.Recipe(scaling="delayed", history=3))
    run = jax.jit(jax.value_and_grad(lambda w, h, x: step(w, x, fp8_histories=h), (0, 1)))
    found = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        own_w, own_x = jax.device_put((w, x), device)
        histories = jax.device_put(coda.fp8.init(step, w, x), device)
        histories = coda.fp8.calibrate(step, histories, own_w, own_x)
        found.append([run(own_w, histories, own_x) for _ in range(REPEATS if not found else 1)])
    ((own, *others), ((_, (gradients, histories)),)) = found
    assert total_error(own[1][0], gradients) < 0.05
    assert total_error(own[1][1], histories) < 0.02
    for other in others:
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


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
        with coda.strict(door != "fuse(grad)"):  # JAX's derivative multiplies cotangents in float32
            _, (dx, _) = jax.jit(DOORS[door](lambda x, w, use=use: use(made(x, w))))(x, w)
        assert jnp.all(jnp.any(dx != 0, -1))
