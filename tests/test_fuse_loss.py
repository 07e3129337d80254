"""`coda.fuse` of a language model's loss: logits never exist where they are read at labels alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coda_jax as coda
from coda_jax.jaxprs.walk import equations
from tests import plain_models
from tests.plain_models import WIDTH, rms_norm
from tests.test_fuse import largest_error

VOCABULARY = 1040


def picked(logprobs, labels):
    return jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]


LOSSES = {
    "integer_labels": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y),
    "one_hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, VOCABULARY)),
    "log_softmax": lambda z, y: -picked(jax.nn.log_softmax(z), y),
    "log_softmax_one_hot": lambda z, y: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, VOCABULARY), axis=-1),
    "logsumexp": lambda z, y: jax.nn.logsumexp(z, axis=-1) - picked(z, y),
    "negative": lambda z, y: -(picked(z, y) - jax.nn.logsumexp(z, axis=-1)),
    "by_hand": lambda z, y: jnp.log(jnp.sum(jnp.exp(z - z.max(-1, keepdims=True)), -1)) + z.max(-1) - picked(z, y),
}


def arguments(dtype=jnp.float32):
    new = plain_models.Weights(3, dtype)
    w = {"scale": new(WIDTH, mean=1.0), "head": new(WIDTH, VOCABULARY), "tied": new(VOCABULARY, WIDTH)}
    x = plain_models.inputs(dtype)[:, :24]  # fewer tokens than columns
    labels = jnp.asarray(np.random.default_rng(4).integers(0, VOCABULARY, x.shape[:2]))
    return w, x, labels


def of_model(loss, *, is_tied=False):
    def function(w, x, labels):
        h = rms_norm(x, w["scale"])
        z = (jnp.einsum("btd,vd->btv", h, w["tied"]) if is_tied else h @ w["head"]).astype(jnp.float32)
        weights = (labels % 3 != 0).astype(jnp.float32)
        return jnp.sum(weights * loss(z, labels)) / jnp.sum(weights)

    return function


def with_gradients(f):
    return jax.value_and_grad(f, argnums=(0, 1))


def arrays_of_logits(f, *args):
    """True if an array of all tokens' logits, or their cotangents, is made outside of the loss's own chunks."""
    shapes = [v.aval.shape for equation, _ in equations(jax.make_jaxpr(f)(*args).jaxpr) for v in equation.outvars]
    return any(shape[-1:] == (VOCABULARY,) and len(shape) > 2 for shape in shapes)


@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_one_of_chunks(name, is_tied):
    args, f = arguments(), of_model(LOSSES[name], is_tied=is_tied)
    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    assert arrays_of_logits(with_gradients(f), *args) and not arrays_of_logits(with_gradients(fused), *args)
    assert [one.epilogue for one in coda.fuse.report(f, *args).products] == [("token_logprobs",)]


MEANS = {
    "mean": lambda loss, y: jnp.mean(loss),
    "weighted": lambda loss, y: jnp.sum(loss * jnp.sin(y)) / 7,
    "masked": lambda loss, y: jnp.sum(jnp.where(y % 3 == 0, loss, 0.0)) / jnp.sum(y % 3 == 0),
    "masked_out": lambda loss, y: jnp.sum(jnp.where(y % 3 == 0, 0.0, -2.0 * loss)),
    "of_rows": lambda loss, y: jnp.mean(jnp.mean(loss, axis=1)),
    "with_its_square": lambda loss, y: jnp.mean(loss) + jnp.mean(loss**2),
}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", ["integer_labels", "one_hot", "log_softmax"])
def test_a_sum_of_losses(name, mean):
    """A sum over all tokens forms its gradients in the forward pass; any other function of the losses does not."""
    w, x, labels = arguments()
    x = jnp.concatenate([x, 1 - x])
    labels = jnp.concatenate([labels, labels // 2])

    def f(w, x):
        return MEANS[mean](LOSSES[name](rms_norm(x, w["scale"]) @ w["head"], labels), labels)

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(w, x), jax.jit(with_gradients(f))(w, x)) < 1e-5
    is_summed = "linear_cross_entropy" in str(jax.make_jaxpr(fused)(w, x))
    assert is_summed == (mean not in ("of_rows", "with_its_square"))


def test_in_16_bits():
    args, f = arguments(jnp.bfloat16), of_model(LOSSES["integer_labels"])
    exact = with_gradients(f)(*jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args))
    own, found = (
        largest_error(
            jax.tree.map(lambda x: x.astype(jnp.float32), jax.jit(with_gradients(g))(*args)),
            exact,
        )
        for g in (f, coda.fuse(f))
    )
    assert found < 1.2 * own


def test_labels_that_are_not_in_the_vocabulary():
    w, x, labels = arguments()
    labels = labels.at[0, :3].set(jnp.array([-1, VOCABULARY, -VOCABULARY - 1]))
    for name in ("integer_labels", "one_hot", "log_softmax"):
        f = lambda w, x, y, loss=LOSSES[name]: loss(x @ w["head"], y)  # noqa: E731
        found, expected = coda.fuse(f)(w, x, labels), f(w, x, labels)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        mask = (labels >= 0) & (labels < VOCABULARY)
        total = lambda w, g, mask=mask: jnp.sum(jnp.where(mask, g(w, x, labels), 0.0))  # noqa: E731
        gradients = [jax.grad(total)(w, g) for g in (coda.fuse(f), f)]
        gradients += [jax.grad(coda.fuse(total))(w, f), jax.grad(total)(w, f)]
        assert largest_error(*gradients[:2]) < 1e-5 and largest_error(*gradients[2:]) < 1e-5
        mean = lambda w, f=f: jnp.mean(f(w, x, labels))  # noqa: E731
        assert jnp.isnan(coda.fuse(mean)(w)) == jnp.isnan(mean(w))


@pytest.mark.parametrize("reads", ["logits", "another"])
def test_logits_that_something_else_reads_stay(reads):
    def f(w, x, labels):
        z = x @ w["head"]
        loss = jnp.mean(LOSSES["integer_labels"](z, labels))
        accuracy = jnp.mean(jnp.argmax(z, -1) == labels) if reads == "logits" else jnp.mean(jnp.abs(z))
        return loss + accuracy

    args = arguments()
    fused = coda.fuse(f)
    assert largest_error(with_gradients(fused)(*args), with_gradients(f)(*args)) < 1e-5
    assert arrays_of_logits(fused, *args)


def test_the_loss_as_it_was():
    args, f = arguments(), of_model(LOSSES["integer_labels"])
    for fused in (coda.fuse(f, exact=True), coda.fuse(f, chunk_losses=False)):
        assert arrays_of_logits(fused, *args)
        assert largest_error(with_gradients(fused)(*args), with_gradients(f)(*args)) < 1e-5


def test_a_loss_in_a_scan():
    def f(w, x, labels):
        losses = jax.lax.scan(lambda c, xy: (c + of_model(LOSSES["log_softmax"])(w, *xy), None), 0.0, (x, labels))[0]
        return losses / x.shape[0]

    w, x, labels = arguments()
    args = w, jnp.stack([x, 2 * x]), jnp.stack([labels, labels])
    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    assert not arrays_of_logits(with_gradients(fused), *args)


def with_a_gradient_of_the_shift(z, y):
    shift = z.max(-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(z - jax.lax.stop_gradient(shift)), -1)) + shift[..., 0] - picked(z, y)


def with_one_shift(z, y):
    shifted = z - jnp.max(z)
    return jnp.log(jnp.sum(jnp.exp(shifted), -1)) - picked(shifted, y)


@pytest.mark.parametrize("loss", [with_a_gradient_of_the_shift, with_one_shift])
def test_a_loss_of_another_form_is_not_replaced(loss):
    args, f = arguments(), of_model(loss)
    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    assert arrays_of_logits(fused, *args)


def test_a_number_of_tokens_that_is_not_known():
    (w, x, labels), f = arguments(), of_model(LOSSES["integer_labels"])
    batch = jax.export.symbolic_shape("batch")
    types = [jax.ShapeDtypeStruct((*batch, *y.shape[1:]), y.dtype) for y in (x, labels)]
    exported = jax.export.export(jax.jit(coda.fuse(f)))(w, *types)
    assert largest_error(exported.call(w, x, labels), f(w, x, labels)) < 1e-5
