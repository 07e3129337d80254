"""`coda.fuse` of a function that holds a loss and its gradient: logits do not exist, as where the loss is fused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from coda_jax.fusion.losses import row_gradients
from coda_jax.fusion.losses.loss import LEAST_VOCABULARY
from coda_jax.jaxprs.walk import equations
from tests import tolerance
from tests.test_fuse import largest_error
from tests.test_fuse_loss import (
    LOSSES,
    VOCABULARY,
    arrays_of_logits,
    gradient_operators,
    of_any_form,
    padded,
    picked,
    summed_with_gradients,
    widened,
    with_gradients,
)
from tests.test_fuse_loss import sizes as flat_sizes

integer_labels = LOSSES["integer_labels"]
ONE_LOOP, TWO_LOOPS = ["linear_cross_entropy"], ["token_logprobs"]


def sizes():
    """x (4, 16, 16), w, and labels of the vocabulary."""
    x, w, labels = flat_sizes()
    return x.reshape(4, 16, -1), w, labels.reshape(4, 16)


def check_values(f, *args, bound=1e-5):
    """The results are plain JAX's."""
    found, expected = (jax.jit(g)(*args) for g in (coda.fuse(f), f))
    assert largest_error(found, expected) < bound
    return found


def weights_of(labels):
    return (labels % 3 != 0).astype(jnp.float32)


def masked_mean(each, labels):
    return jnp.sum(jnp.where(labels % 5 != 1, each, 0.0)) / jnp.sum(labels % 5 != 1)


FORMS = {  # a loss of logits and labels, and what it becomes beside its gradient
    **{name: (lambda z, y, loss=loss: jnp.mean(loss(z, y)), ONE_LOOP) for name, loss in LOSSES.items()},
    "by_hand": (lambda z, y: jnp.mean(LOSSES["by_hand"](z, y)), []),  # the largest logit has a gradient, which is 0
    "masked": (lambda z, y: masked_mean(integer_labels(z, y), y), ONE_LOOP),
    "ignored": (lambda z, y: masked_mean(integer_labels(z, jnp.where(y % 5 != 1, y, -100)), y), ONE_LOOP),
    "weighted": (lambda z, y: jnp.sum(weights_of(y) * integer_labels(z, y)) / jnp.sum(weights_of(y)), ONE_LOOP),
    "negative": (lambda z, y: -jnp.sum(jnp.sin(y) * integer_labels(z, y)), ONE_LOOP),
    "focal": (lambda z, y: jnp.mean((1 - jnp.exp(-integer_labels(z, y))) ** 2 * integer_labels(z, y)), ONE_LOOP),
    "squared": (lambda z, y: jnp.mean(integer_labels(z, y)) ** 2, TWO_LOOPS),
    "of_texts": (lambda z, y: jnp.sum(jnp.exp(jnp.mean(integer_labels(z, y), axis=1) / 9)), TWO_LOOPS),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", FORMS)
def test_a_loss_beside_its_gradient(name):
    """Logits whose cotangent depends on the loss's own results are made twice."""
    x, w, labels = sizes()
    of_logits, operators = FORMS[name]

    def f(x, w):
        return of_logits(widened(x @ w), labels)

    check_values(with_gradients(f), x, w)
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = x.astype(dtype), w.astype(dtype)
        with jax.enable_x64(True):
            exact = jax.jit(with_gradients(f))(*(y.astype(jnp.float64) for y in narrow))
            exact = jax.tree.map(lambda y: np.asarray(y, np.float64), exact)
        options = {"xla_allow_excess_precision": False}  # plain JAX rounds the logits then
        plain = jax.jit(with_gradients(f), compiler_options=options)(*narrow)
        found = jax.jit(coda.fuse(with_gradients(f)))(*narrow)
        for leaves in zip(*map(jax.tree.leaves, (found, exact, plain)), strict=True):
            tolerance.check(*leaves, name=f"{name} in {np.dtype(dtype)}")
    assert gradient_operators(with_gradients(f), *narrow) == operators
    assert arrays_of_logits(coda.fuse(with_gradients(f)), x, w) == (not operators)
    assert arrays_of_logits(with_gradients(f), x, w)


@pytest.mark.parametrize("argnums", [0, 1])
def test_one_gradient_alone(argnums):
    """The gradient of hidden states, or of the head, without the value of the loss."""
    x, w, labels = sizes()
    f = jax.grad(lambda x, w: jnp.mean(integer_labels(x @ w, labels)), argnums=argnums)
    check_values(f, x, w)
    assert gradient_operators(f, x, w) == ONE_LOOP


def with_aux(f):
    return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)


AUX = {
    "of_each": lambda z, y: (integer_labels(z, y), jax.nn.logsumexp(z, axis=-1)),
    "sums": lambda z, y: (jnp.sum(weights_of(y) * integer_labels(z, y)), jnp.sum(jax.nn.logsumexp(z, axis=-1) ** 2)),
    "accuracy": lambda z, y: (jnp.mean(jnp.argmax(z, axis=-1) == y), jnp.argmax(z, axis=-1)),
    "padded_accuracy": lambda z, y: jnp.argmax(jax.nn.log_softmax(z), axis=-1),
}


@pytest.mark.parametrize("name", AUX)
def test_results_beside_a_loss(name):
    """All numbers of each token are made in the one loop."""
    x, w, labels = sizes()
    w = w.at[:, 5].set(w[:, 3]).at[:, VOCABULARY - 1].set(9 * w[:, 7])
    labels = labels.at[:, ::2].set(jnp.argmax(x @ w, axis=-1)[:, ::2] % 1000)

    def f(x, w):
        z = padded(-1e9)(widened(x @ w)) if name == "padded_accuracy" else widened(x @ w)
        return jnp.mean(integer_labels(z, labels)), AUX[name](z, labels)

    (_, found), _ = check_values(with_aux(f), x, w)
    _, expected = jax.jit(f)(x, w)
    if "accuracy" in name:
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))
    assert gradient_operators(with_aux(f), x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)) == ONE_LOOP


def shifted(z, *, fixed=True):
    """The largest logits, and the exponentials of what is above or below them."""
    largest = jnp.max(z, axis=-1, keepdims=True)
    largest = jax.lax.stop_gradient(largest) if fixed else largest
    return largest[..., 0], jnp.exp(z - largest)


STAYS = {  # what else reads logits
    "largest": lambda z, y: jnp.mean(integer_labels(z, y)) + jnp.mean(shifted(z)[0]),
    "largest_probability": lambda z, y: (
        jnp.mean(integer_labels(z, y)) + jnp.mean(jax.lax.stop_gradient(1 / jnp.sum(shifted(z)[1], axis=-1)))
    ),
    "sum_of_exponentials": lambda z, y: jnp.mean(jnp.log(jnp.sum(shifted(z)[1], axis=-1)) - picked(z, y)),
    "weights_of_the_largest": lambda z, y: jnp.mean(integer_labels(z, y) * jnp.sin(shifted(z)[0])),
    "mask_of_the_largest": lambda z, y: jnp.mean(jnp.where(shifted(z)[0] > 1, integer_labels(z, y), 0.0)),
    "square_of_probabilities": lambda z, y: (
        jnp.mean(integer_labels(z, y)) - 0.1 * jnp.mean(jnp.sum(jax.nn.softmax(z) ** 2, axis=-1))
    ),
    "square": lambda z, y: jnp.mean(integer_labels(z, y)) + jnp.mean(z**2),
    "other_labels": lambda z, y: jnp.mean(integer_labels(z, y)) + jnp.mean(integer_labels(z, (y + 1) % 1000)),
    "soft_labels": lambda z, y: jnp.mean(
        optax.softmax_cross_entropy(z, jax.nn.softmax(jnp.sin(y[..., None] * jnp.arange(VOCABULARY))))
    ),
    "temperature": lambda z, y: jnp.mean(integer_labels(z / 3.0, y)),
    "near_fill": lambda z, y: jnp.mean(integer_labels(padded(-20.0)(z), y)),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_gradient_of_logits_that_something_else_reads_is_plain_jaxs(name):
    x, w, labels = sizes()
    f = with_gradients(lambda x, w: STAYS[name](x @ w, labels))
    check_values(f, x, w)
    assert gradient_operators(f, x, w) == []


def test_a_largest_logit_that_is_a_result():
    x, w, labels = sizes()

    def f(x, w):
        z = x @ w
        return jnp.mean(integer_labels(z, labels)), (shifted(z)[0], jnp.max(jax.nn.log_softmax(z), axis=-1))

    check_values(with_aux(f), x, w)


def tied(weights, tokens):
    """A loss whose head is the embedding."""
    x = weights["embedding"][tokens]
    h = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    z = jnp.einsum("btd,vd->btv", h, weights["embedding"])[:, :-1]
    mask = weights_of(tokens[:, 1:])
    return jnp.sum(mask * integer_labels(z, tokens[:, 1:])) / jnp.sum(mask)


def tied_arguments():
    _, w, tokens = sizes()
    up = jnp.sin(jnp.arange(16.0 * 32) ** 1.5).reshape(16, 32) / 4
    return {"embedding": w.T, "up": up, "down": up.T}, tokens


def train_step(weights, tokens):
    """A step of an optimizer, whose state is its first."""
    optimizer = optax.adamw(1e-2)
    value, gradient = jax.value_and_grad(tied)(weights, tokens)
    updates, state = optimizer.update(gradient, optimizer.init(weights), weights)
    return optax.apply_updates(weights, updates), state, value


def accumulated(weights, tokens):
    """Gradients that a loop over batches adds."""

    def add(total, tokens):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(tied)(weights, tokens)), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, weights)
    return jax.lax.scan(add, zeros, jnp.stack([tokens, tokens // 2]))[0]


STEPS = {
    "step": train_step,
    "accumulated": accumulated,
    "checkpoint": jax.value_and_grad(jax.checkpoint(tied)),
    "scaled": jax.value_and_grad(lambda *args: 1024 * tied(*args)),
    "one_text": lambda weights, tokens: jax.value_and_grad(tied)(weights, tokens.reshape(1, -1)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_training(name):
    args, f = tied_arguments(), STEPS[name]
    check_values(f, *args)
    assert "linear_cross_entropy" in {name for one in coda.fuse.report(f, *args).products for name in one.epilogue}
    every = (x.aval.shape for e, _ in equations(jax.make_jaxpr(coda.fuse(f))(*args).jaxpr) for x in e.outvars)
    assert not any(len(shape) > 2 and shape[-1] == VOCABULARY for shape in every)


def test_two_heads():
    x, w, labels = sizes()

    def f(x, w):
        return sum(jnp.mean(integer_labels(z, labels)) for z in (x @ w, jnp.tanh(x) @ w))

    check_values(with_gradients(f), x, w)
    assert [one.epilogue for one in coda.fuse.report(with_gradients(f), x, w).products] == [tuple(ONE_LOOP)] * 6


def test_side_effects_stay_in_their_order(capfd):
    x, w, labels = sizes()

    def f(x, w):
        jax.debug.print("labels {}", labels[0, 1], ordered=True)
        value, gradients = with_gradients(lambda x, w: jnp.mean(integer_labels(x @ w, labels)))(x, w)
        jax.debug.print("loss {:.3f}", value, ordered=True)
        jax.debug.print("gradient {:.3f}", gradients[0][0, 0, 0], ordered=True)
        return value, gradients

    printed = []
    for g in (f, coda.fuse(f)):
        found = jax.block_until_ready(jax.jit(g)(x, w))
        jax.effects_barrier()
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] and printed[0].count("\n") == 3
    assert largest_error(found, jax.jit(f)(x, w)) < 1e-5


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("kind, columns", [("Auto", None), ("Auto", "model"), ("Explicit", None)])
def test_gradients_over_a_mesh(kind, columns):
    """Gradients are sharded as plain JAX's."""
    x, w, labels = sizes()
    b = jnp.sin(jnp.arange(VOCABULARY) ** 1.5)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    specs = jax.P("data"), jax.P(None, columns), jax.P(), jax.P("data")
    with jax.set_mesh(mesh):
        args = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip((x, w, b, labels), specs, strict=True)]
        plain = summed_with_gradients(of_any_form)
        found, expected = (jax.jit(g)(*args) for g in (coda.fuse(plain), plain))
        operators = [name for one in coda.fuse.report(plain, *args).products for name in one.epilogue]
    assert [y.sharding for y in jax.tree.leaves(found)] == [y.sharding for y in jax.tree.leaves(expected)]
    assert largest_error(*(jax.tree.map(np.asarray, y) for y in (found, expected))) < 1e-5
    assert operators.count("linear_cross_entropy") >= (21 if kind == "Auto" else 6)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("sums", ["by_jax", "by_hand"])
def test_gradients_in_shard_map(sums):
    """Each device has the loss of its own text, and the sum of the weights' gradients."""
    x, w, labels = sizes()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def each(x, w, labels):
        w = jax.lax.pcast(w, ("data",), to="varying") if sums == "by_hand" else w
        value, (dx, dw) = with_gradients(lambda x, w: jnp.mean(integer_labels(x @ w, labels)))(x, w)
        return jax.lax.pmean(value, "data"), dx, jax.lax.psum(dw, "data") if sums == "by_hand" else dw

    data = jax.P("data")
    f = jax.shard_map(each, mesh=mesh, in_specs=(data, jax.P(), data), out_specs=(jax.P(), data, jax.P()))
    found, expected = (jax.jit(g)(x, w, labels) for g in (coda.fuse(f), f))
    assert largest_error(*(jax.tree.map(np.asarray, y) for y in (found, expected))) < 1e-5
    assert "linear_cross_entropy" in {n for one in coda.fuse.report(f, x, w, labels).products for n in one.epilogue}


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("options", [{}, {"memory": "same"}])
def test_the_gradient_of_a_fused_loss_that_is_fused(has_aux, options):
    """A function that is nothing but a loss has no other product; the fused one in it is opened all the same."""
    x, w, labels = sizes()

    def loss(x, w, labels):
        value = jnp.mean(integer_labels(x @ w, labels))
        return (value, {"loss": value}) if has_aux else value

    gradient, inner = (jax.value_and_grad(f, (0, 1), has_aux=has_aux) for f in (loss, coda.fuse(loss, **options)))
    fused = coda.fuse(inner)
    assert largest_error(jax.jit(fused)(x, w, labels), jax.jit(gradient)(x, w, labels)) < 1e-5
    if has_aux:
        assert [one.epilogue for one in coda.fuse.report(inner, x, w, labels).products] == [tuple(ONE_LOOP)] * 3
    totals = [
        coda.explain(g, x, w, labels, platform="cuda", device="H100").totals for g in (fused, coda.fuse(gradient))
    ]
    assert totals[0].passes_bytes <= 1.01 * totals[1].passes_bytes


def test_rows_are_not_followed_from_other_products(monkeypatch):
    """As those in front of a norm's sum and of exponentials of losses: it is a walk over all equations."""
    regions = []
    init = row_gradients._GradientRegion.__init__

    def counted(self, makers, logits):
        regions.append(logits)
        init(self, makers, logits)

    def loss(layers, x, w, labels):
        for up, down in layers:
            h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
            x = x + jnp.tanh(h @ up) @ down
        return jnp.mean(jnp.exp(integer_labels(x @ w, labels)))

    monkeypatch.setattr(row_gradients._GradientRegion, "__init__", counted)
    width = LEAST_VOCABULARY
    x, up, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 16, width), (width, 32), (width, 2 * width)))
    jax.make_jaxpr(coda.fuse(jax.value_and_grad(loss)))([(up, up.T)] * 3, x, w, jnp.zeros((4, 16), int))
    assert not regions  # the loss itself is found as one of its logits
