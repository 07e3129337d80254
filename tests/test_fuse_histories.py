"""`coda.fuse(f, fp8=recipe)` with delayed scaling: values, gradients and histories, as of products that take these."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
from benchmarks import plain_llama
from flax_layers import Llama, LlamaConfig, fp8
from tests.test_fuse_fp8 import assert_alike, normal, products_in_8_bits
from tests.test_fuse_recipe import D, checkpointed, layer, layers, loss_of, plain, scanned, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning", "ignore:block:coda_jax.FallbackWarning")
H = 3
RECIPE = coda.fp8.Recipe(scaling="delayed", history=H, gradient_dtype=jnp.float8_e5m2)


def jitted(multiply, w, x):
    for i in range(2):
        one = jax.jit(functools.partial(layer, multiply), donate_argnums=1)  # it stays a call
        x = one(jax.tree.map(lambda one, i=i: one[i], w), jnp.sin(x))
    return x


def in_branch(multiply, w, x):
    return jax.lax.cond(jnp.sum(x) < 1e4, lambda x: unrolled(multiply, w, x), lambda x: x + multiply(x, w["q"][0]), x)


def in_einsum(multiply, w, x):
    """The unrolled layers with weights as first factors."""
    del multiply
    return unrolled(lambda x, w: jnp.einsum("btd,dk->kbt", x, w).transpose(1, 2, 0), w, x)


FORMS = dict.fromkeys((unrolled, scanned, checkpointed, in_branch, in_einsum), unrolled) | {jitted: jitted}


def with_histories(form):
    """The form in plain JAX, with a history for each product, in order."""

    def loss(w, x, histories):
        given = iter(histories)
        return loss_of(form, lambda x, w: coda.fp8.matmul(x, w, recipe=RECIPE, history=next(given)))(w, x)

    return loss


def in_order(names, histories):
    """The histories of products that run, in the order of the form in plain JAX."""
    every = [histories[name] for name in names]
    if every[0].ndim == 3:
        return [one[i] for i in range(2) for one in every]
    return every[-8:]


def both_gradients(step, *args):
    return jax.jit(jax.value_and_grad(lambda w, h: step(w, *args, fp8_histories=h), (0, 1)))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_values_gradients_and_histories_are_those_of_products_that_take_them(form):
    w, x = layers(2), normal(7, 2, 32, D)
    step = coda.fuse(loss_of(form, plain), fp8=RECIPE, defer_norms=False)
    histories = coda.fp8.init(step, w, x)
    names = list(histories)
    for i, (name, zeros) in enumerate(histories.items()):
        maxima = 1 + jnp.abs(normal(20 + i, *zeros.shape))
        histories[name] = maxima * jnp.array([[1.0], [1e-2]])
    unused = names[:-8]
    run, expected = both_gradients(step, x), jax.jit(jax.value_and_grad(with_histories(FORMS[form]), (0, 2)))
    for _ in range(2):
        before = in_order(names, histories)
        value, (gradient, maxima) = expected(w, x, before)
        found, (own, after) = run(w, histories)
        assert_alike((found, own), (value, gradient), 1e-5)
        assert_alike(in_order(names, after), [*map(coda.fp8.next_history, before, maxima)])
        assert all(bool((after[name] == histories[name]).all()) for name in unused)  # of a branch that is not taken
        histories = after
    assert run._cache_size() == 1
    assert len(unused) == (form is in_branch)
    assert products_in_8_bits(run, w, histories) >= 12


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "scanned, recomputed"])
def test_a_plain_llama_trains_as_the_layers(stacked):
    """Step by step, with histories that a first step with current scales fills."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = Llama(config, fp8=RECIPE, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 1024, (2, 33))

    def loss(params, tokens, labels):
        return plain_llama.loss(params, tokens, labels, config=config, dtype=jnp.float32, remat=stacked)

    def plain_params(state):
        params = plain_llama.from_fused(nnx.to_pure_dict(nnx.filter_state(state, nnx.Param)), config)
        for one in params["layers"]:
            one["qkv"] = jnp.concatenate([one.pop(name) for name in "qkv"], axis=1)
            one["gate_up"] = jnp.concatenate([one.pop(name) for name in ("gate", "up")], axis=1)
        each = params["layers"]
        return params | {"layers": jax.tree.map(lambda *xs: jnp.stack(xs), *each) if stacked else each}

    def own_histories():
        each = [(one.attention.qkv, one.attention.out, one.mlp, one.mlp.down) for one in model.layers]
        names = ["fp8_history", "fp8_history", "gate_up_history", "fp8_history"]
        products = ("qkv", "out", "gate_up", "down")
        arrays = [[getattr(x, name)[...] for x, name in zip(one, names, strict=True)] for one in each]
        if stacked:
            return {f"params['layers']['{x}']": jnp.stack(xs) for x, *xs in zip(products, *arrays, strict=True)}
        return {
            f"params['layers'][{i}]['{x}']": one for i in range(2) for x, one in zip(products, arrays[i], strict=True)
        }

    def own_loss(model):
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    params, batch = plain_params(nnx.state(model)), (tokens[:, :-1], tokens[:, 1:])
    step = coda.fuse(loss, fp8=RECIPE)
    types = jax.eval_shape(lambda *x: x, params, *batch)
    histories = coda.fp8.init(loss, types[0], labels=types[2], tokens=types[1], fp8=RECIPE)
    histories = coda.fp8.calibrate(step, histories, params, *batch)
    fp8.calibrate(model, own_loss)
    run, theirs = (
        both_gradients(step, *batch),
        nnx.value_and_grad(own_loss, argnums=nnx.DiffState(0, fp8.DIFFERENTIATED)),
    )
    for _ in range(3):
        assert_alike(histories, own_histories(), 1e-4)
        value, (gradients, histories) = run(params, histories)
        own_value, own = nnx.jit(theirs)(model)
        own = fp8.update(model, own)
        assert_alike((value, gradients), (own_value, plain_params(own)), 1e-4)
        params = jax.tree.map(lambda x, dx: x - 0.1 * dx, params, gradients)
        nnx.update(model, jax.tree.map(lambda x, dx: x - 0.1 * dx, nnx.state(model, nnx.Param), own))
    assert_alike(histories, own_histories(), 1e-4)
    assert run._cache_size() == 1


def test_names():
    """Weights that are no argument have the line; scales are the tensors' own where no history can come."""
    w, x = layers(1), normal(7, 16, D)
    w, constant = jax.tree.map(lambda one: one[0], w), normal(8, D, D) / 6

    @jax.custom_vjp
    def own(x, w):
        return jnp.cumsum(x @ w, axis=0)

    own.defvjp(lambda x, w: (own(x, w), w), lambda w, dy: (dy @ w.T, jnp.ones_like(w)))

    def function(params, x):
        x = jnp.tanh(x @ params["q"]) @ params["q"]
        x = own(x @ constant, params["q"])
        return jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: 1 + jnp.abs(x @ params["q"]), x)

    names = [*coda.fp8.init(function, w, x)]
    assert names[:2] == ["params['q']", "params['q'] #2"]
    assert len(names) == 3
    assert names[2].startswith("test_fuse_histories.py:")
    fused = functools.partial(coda.fuse(function, fp8=RECIPE), fp8_histories=coda.fp8.init(function, w, x, fp8=RECIPE))
    assert products_in_8_bits(fused, w, x) == 5


def product_loss(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x) @ w["up"]) ** 2)


@pytest.mark.parametrize(
    ("given", "rows", "error", "message"),
    [
        ({}, 16, TypeError, r"fp8_histories is missing; it must be a dictionary of arrays. coda.fp8.init makes them"),
        ({"fp8_histories": [1]}, 16, TypeError, r"fp8_histories is a list; it must be a dictionary"),
        ({"fp8_histories": {"w['down']": 0}}, 16, ValueError, r"lacks w\['up'\] and has w\['down'\], for which there"),
        ({"fp8_histories": {"w['up']": 0}}, 15, ValueError, r"has w\['up'\] \(m = 15 is no multiple of 16\)"),
        (
            {"fp8_histories": {"w['up']": jnp.zeros((2, 9))}},
            16,
            ValueError,
            r"float32 of shape \(2, 9\); it must .*\(2, 3\)",
        ),
    ],
)
def test_what_it_refuses(given, rows, error, message):
    with pytest.raises(error, match=message):
        coda.fuse(product_loss, fp8=RECIPE)({"up": normal(0, D, 48)}, normal(1, rows, D), **given)


def test_functions_that_it_refuses():
    w, x = {"up": normal(0, D, 48)}, normal(1, 16, D)
    for f in (jax.value_and_grad(product_loss), jax.grad(jax.checkpoint(product_loss))):
        with pytest.raises(
            ValueError, match=r"holds its own gradient; .*jax.value_and_grad\(coda.fuse\(loss, fp8=...\)\)"
        ):
            coda.fp8.init(coda.fuse(f, fp8=RECIPE), w, x)
    with pytest.raises(TypeError, match=r"fp8.init: fuse\(product_loss\) has no fp8"):
        coda.fp8.init(coda.fuse(product_loss), w, x)
    with pytest.raises(TypeError, match=r"fp8.calibrate: tanh returns .*, and no loss"):
        coda.fp8.calibrate(jnp.tanh, {}, x, fp8=RECIPE)
