"""`coda.fuse` of a loss over a vocabulary with a `jax.custom_vjp`: its rule is evaluated in chunks of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.fusion.losses import row_losses
from coda_jax.jaxprs.walk import equations
from tests.test_fuse import largest_error

VOCABULARY, WIDTH, TOKENS = 1040, 16, (2, 161)  # two chunks of 128 tokens and a shorter one


@jax.custom_vjp
def cross_entropy(logits, targets, z_loss):
    return forward(logits, targets, z_loss)[0]


def forward(logits, targets, z_loss):
    largest = logits.max(axis=-1, keepdims=True)
    shifted = logits - largest
    exponentials = jnp.exp(shifted)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    logprobs = shifted - jnp.log(total)
    log_z = jnp.squeeze(jnp.log(total) + largest, axis=-1)
    z_term = z_loss * jax.lax.square(log_z)
    kept = logits, targets, z_loss, exponentials, total, logprobs, log_z
    return (z_term - jnp.sum(targets * logprobs, axis=-1), z_term), kept


def backward(kept, cotangents):
    logits, targets, z_loss, exponentials, total, logprobs, log_z = kept
    d = cotangents[0][..., None]  # what is logged beside it has no derivative
    dz = (1 + 2 * z_loss * log_z)[..., None] * exponentials / total - targets
    return (d * dz).astype(logits.dtype), (-d * logprobs).astype(targets.dtype), jnp.zeros_like(z_loss)


cross_entropy.defvjp(forward, backward)


@jax.custom_vjp
def clipped(logits, targets):
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


clipped.defvjp(  # not linear in its cotangent, and not the derivative
    lambda z, y: (clipped(z, y), (z, y)),
    lambda kept, d: (jnp.clip(d, -1e-3, 1e-3)[..., None] * (jax.nn.softmax(kept[0]) - 0.5 * kept[1]), None),
)


@jax.custom_vjp
def of_labels(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


of_labels.defvjp(  # not the derivative
    lambda z, y: (of_labels(z, y), (z, y)),
    lambda kept, d: (d[..., None] * (jax.nn.softmax(kept[0]) - 0.5 * targets_of(kept[1])), None),
)


def targets_of(labels, vocabulary=VOCABULARY):
    return jax.nn.one_hot(labels, vocabulary)


def masked_mean(loss, mask):
    return jnp.sum(loss * mask) / (jnp.sum(mask) + 1e-8)


def plain(z, labels, mask):
    return masked_mean(cross_entropy(z, targets_of(labels), 1e-2)[0], mask)


def with_aux(z, labels, mask):
    loss, z_term = cross_entropy(z, targets_of(labels), 1e-2)
    return masked_mean(loss, mask), masked_mean(z_term, mask)


def with_largest(z, labels, mask):
    loss, z_term = cross_entropy(z, targets_of(labels), 1e-2)
    return masked_mean(loss, mask), (jnp.max(loss), z_term)


def not_linear(z, labels, mask):
    return 3 * masked_mean(clipped(z, targets_of(labels)), mask)


def not_summed(z, labels, mask):
    loss, z_term = cross_entropy(z, targets_of(labels), 1e-2)
    return jnp.max(loss * mask) + jnp.mean(jnp.sort(loss * z_term))


def smoothed(z, labels, mask):
    return masked_mean(cross_entropy(z, 0.9 * targets_of(labels) + 0.1 / VOCABULARY, 0.0)[0], mask)


def selected(z, labels, mask):
    """With targets as T5X makes them."""
    is_label = labels[..., None] == jnp.arange(VOCABULARY).reshape((1,) * labels.ndim + (-1,))
    ones, zeros = jnp.full(is_label.shape, 1.0), jnp.full(is_label.shape, 0.0)
    return masked_mean(cross_entropy(z, jax.lax.select(is_label, ones, zeros), 1e-2)[0], mask)


def scaled(z, labels, mask):
    return plain(z / jnp.sqrt(WIDTH), labels, mask)


def shifted(z, labels, mask):
    return plain(z[:, :-1], labels[:, 1:], mask[:, 1:])


def flat(z, labels, mask):
    return plain(z.reshape(-1, z.shape[-1]), labels.reshape(-1), mask.reshape(-1))


def capped_and_padded(z, labels, mask):
    z = jnp.where(jnp.arange(VOCABULARY) < 1030, 3 * jnp.tanh((z + jnp.cos(jnp.arange(VOCABULARY))) / 3), -1e9)
    return plain(z, labels % 1030, mask)


def beside_numbers(z, labels, mask):
    return plain(z * (1 + mask[..., None]), labels, mask) + jnp.mean(jax.nn.logsumexp(z, axis=-1))


LOSSES = {
    f.__name__: f
    for f in (
        plain,
        with_aux,
        with_largest,
        not_linear,
        not_summed,
        smoothed,
        selected,
        scaled,
        shifted,
        flat,
        capped_and_padded,
        beside_numbers,
    )
}


def arguments(dtype=jnp.float32):
    generator = np.random.default_rng(0)
    w = jnp.asarray(generator.standard_normal((WIDTH, VOCABULARY)) / 4, dtype)
    x = jnp.asarray(generator.standard_normal((*TOKENS, WIDTH)), dtype)
    labels = jnp.asarray(generator.integers(0, VOCABULARY, TOKENS))
    return w, x, labels, jnp.float32(labels % 3 != 0)


def of_head(loss, *, is_tied=False):
    def function(w, x, labels, mask):
        h = jnp.tanh(x)
        z = jnp.einsum("btd,vd->btv", h, w.T) if is_tied else h @ w
        return loss(z.astype(jnp.float32), labels, mask)

    return function


def with_gradients(f, name):
    return jax.value_and_grad(f, argnums=(0, 1), has_aux=name.startswith("with"))


def arrays_of_logits(f, *args):
    """True if an array of all tokens' logits, or their cotangents, is made."""
    shapes = [v.aval.shape for e, _ in equations(jax.make_jaxpr(f)(*args).jaxpr) for v in e.outvars]
    return any(shape[-1:] == (VOCABULARY,) and np.prod(shape[:-1]) > 300 for shape in shapes)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(row_losses, "CHUNK_BYTES", 4 * VOCABULARY * 128)


@pytest.mark.parametrize("name, is_tied", [*((name, False) for name in LOSSES), ("plain", True), ("shifted", True)])
def test_a_rule_of_logits_is_evaluated_in_chunks(name, is_tied, small_chunks):
    args, f = arguments(), of_head(LOSSES[name], is_tied=is_tied)
    found, expected = (jax.jit(with_gradients(g, name))(*args) for g in (coda.fuse(f), f))
    assert largest_error(found, expected) < 1e-5
    assert not arrays_of_logits(with_gradients(coda.fuse(f), name), *args)
    assert [one.epilogue for one in coda.fuse.report(f, *args).products] == [("chunks of a custom_vjp",)]


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_fused_gradient_is_the_rules(name, small_chunks):
    args, f = arguments(), of_head(LOSSES[name])
    found, expected = (jax.jit(g)(*args) for g in (coda.fuse(with_gradients(f, name)), with_gradients(f, name)))
    assert largest_error(found, expected) < 1e-5


ENDS = {
    "plain": "linear_cross_entropy",
    "selected": "linear_cross_entropy",
    "scaled": "chunks of a loss and its gradient",
    "not_linear": "chunks of a loss and its gradient",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_fused_gradient_has_no_array_of_all_logits(name, small_chunks):
    args, f = arguments(jnp.bfloat16), of_head(LOSSES[name], is_tied=name == "scaled")
    products = coda.fuse.report(with_gradients(f, name), *args).products
    assert [one.epilogue for one in products] == [(ENDS[name],)] * 3
    assert ENDS[name] == "linear_cross_entropy" or not arrays_of_logits(coda.fuse(with_gradients(f, name)), *args)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_fused_gradient_moves_less_than_the_plain_one(name, chunks, monkeypatch):
    monkeypatch.setattr(row_losses, "CHUNK_BYTES", 4 * 8192 * 8192 // chunks)
    own = functools.partial(targets_of, vocabulary=8192)
    shapes = (512, 8192), (4, 2048, 512), (4, 2048), (4, 2048)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32
    args = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]
    monkeypatch.setitem(globals(), "targets_of", own)
    monkeypatch.setitem(globals(), "VOCABULARY", 8192)
    f = with_gradients(of_head(LOSSES[name]), name)
    found, plain = (coda.explain(g, *args, platform="cuda", device="H100").totals for g in (coda.fuse(f), f))
    assert found.passes_bytes < 0.75 * plain.passes_bytes
    assert found.kept_bytes <= plain.kept_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["scaled", "not_linear"])
def test_in_16_bits_a_fused_gradient_is_as_near_to_float32(name, dtype, small_chunks):
    args, f = arguments(dtype), with_gradients(of_head(LOSSES[name]), name)
    exact = f(*(x.astype(jnp.float32) for x in args[:2]), *args[2:])
    error, own = (
        largest_error(jax.tree.map(jnp.float32, found), exact)
        for found in (jax.jit(g)(*args) for g in (coda.fuse(f), f))
    )
    assert error < 2 * own + 1e-3


OF_ALL_TOKENS = {
    "squared": lambda z, y, m: scaled(z, y, m) ** 2,
    "returned": lambda z, y, m: (scaled(z, y, m), z),
    "normalized": lambda z, y, m: scaled(z / jnp.std(z), y, m),
    "read_by_tokens": lambda z, y, m: scaled(z, y, m) + jnp.sum(jnp.sin(jnp.cumsum(z, axis=1))),
    "with_another_product": lambda z, y, m: scaled(z, y, m) + jnp.sum(jnp.sin(jnp.tanh(z) @ jnp.ones((VOCABULARY, 8)))),
}


@pytest.mark.parametrize("name", OF_ALL_TOKENS)
def test_a_cotangent_that_depends_on_other_tokens_is_no_chunks(name, small_chunks):
    args, f = arguments(), with_gradients(of_head(OF_ALL_TOKENS[name]), "with" * (name == "returned"))
    assert largest_error(jax.jit(coda.fuse(f))(*args), jax.jit(f)(*args)) < 1e-5
    products = coda.fuse.report(f, *arguments(jnp.bfloat16)).products
    assert ("chunks of a loss and its gradient",) not in [one.epilogue for one in products]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "not_linear"])
def test_in_16_bits_it_is_as_near_to_float32(name, dtype, small_chunks):
    args, f = arguments(dtype), of_head(LOSSES[name])
    exact = with_gradients(f, name)(*(x.astype(jnp.float32) for x in args[:2]), *args[2:])
    each = (jax.jit(with_gradients(g, name))(*args) for g in (coda.fuse(f), f))
    error, own = (largest_error(jax.tree.map(jnp.float32, found), exact) for found in each)
    assert error < 2 * own + 1e-3
    assert [one.epilogue for one in coda.fuse.report(f, *args).products] == [("chunks of a custom_vjp",)]


@pytest.mark.parametrize("name", ["plain", "with_aux", "not_linear"])
def test_fused_losses_keep_and_move_fewer_bytes(name):
    shapes = (512, 8192), (4, 2048, 512), (4, 2048), (4, 2048)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32
    args = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, dtypes, strict=True)]
    loss = {"plain": plain, "with_aux": with_aux, "not_linear": not_linear}[name]

    def f(w, x, labels, mask):
        z = (x @ w).astype(jnp.float32)
        own = functools.partial(targets_of, vocabulary=8192)
        return loss_with_targets(loss, own)(z, labels, mask)

    def explained(g):
        return coda.explain(with_gradients(g, name), *args, platform="cuda", device="H100").totals

    found, own = explained(coda.fuse(f)), explained(f)
    assert found.kept_bytes < (2**16 if name == "not_linear" else 0.3 * own.kept_bytes)
    # One that is not linear makes its logits twice.
    assert found.passes_bytes < (1.6 if name == "not_linear" else 0.85) * own.passes_bytes


def loss_with_targets(loss, targets):
    """The loss with targets of another vocabulary."""

    def function(z, labels, mask):
        original = globals()["targets_of"]
        globals()["targets_of"] = targets
        try:
            return loss(z, labels, mask)
        finally:
            globals()["targets_of"] = original

    return function


@pytest.mark.parametrize("around", ["scan", "checkpoint", "vmap"])
def test_inside_of_transformations(around, small_chunks):
    own = of_head(plain)
    f = {
        "scan": lambda w, x, y, m: jax.lax.scan(lambda s, _: (s + own(w, x, y, m), None), 0.0, None, length=2)[0],
        "checkpoint": lambda w, x, y, m: jax.checkpoint(own)(w, x, y, m),
        "vmap": lambda w, x, y, m: jnp.sum(jax.vmap(own, (None, 0, 0, 0))(w, x[None], y[None], m[None])),
    }[around]
    args = arguments()
    found, expected = (jax.jit(with_gradients(g, ""))(*args) for g in (coda.fuse(f), f))
    assert largest_error(found, expected) < 1e-5


def test_its_second_derivative_is_that_of_the_rule():
    def second(f, args):
        return jax.grad(lambda x: jnp.sum(jnp.sin(100 * jax.grad(f, 1)(args[0], x, *args[2:]))))(args[1])

    args, f = arguments(), of_head(not_summed)
    assert largest_error(second(coda.fuse(f), args), second(f, args)) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_loss_of_a_sure_token_is_0(dtype, small_chunks):
    """Logits that are summed are rounded as the label's logit is, or they would not cancel."""
    w, x, *_ = arguments(dtype)

    def f(w, x):
        z = (x @ w).astype(jnp.float32)
        best = jax.lax.stop_gradient(jnp.argmax(x @ w, axis=-1))
        return cross_entropy(z, targets_of(best), 0.0)[0]

    x = (40 * x).astype(dtype)
    found, expected = (np.asarray(jax.jit(g)(w, x)) for g in (coda.fuse(f), f))
    assert np.sum(expected < 1e-3) > 10
    assert np.abs(found - expected).max() < 1e-4


STAYS = {
    "top_k": (lambda z, y, m: (plain(z, y, m), jax.lax.top_k(z, 3)[0]), "top_k reads them, which does not treat each"),
    "returned": (lambda z, y, m: (plain(z, y, m), z), "they are a result"),
    "over_tokens": (lambda z, y, m: plain(jnp.cumsum(z, axis=1), y, m), "cumsum reads them"),
}


@pytest.mark.parametrize("name", STAYS)
def test_logits_that_are_read_otherwise_stay_whole(name):
    args, (loss, reason) = arguments(), STAYS[name]
    f = of_head(loss)
    assert largest_error(jax.jit(coda.fuse(f))(*args), jax.jit(f)(*args)) < 1e-5
    (found,) = coda.fuse.report(f, *args).logits
    assert reason in found.reason and found.bytes == 4 * VOCABULARY * args[2].size
