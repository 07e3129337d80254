"""coda.explain, coda.compare and coda.tune of steps that change flax.nnx modules in place."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import coda_jax as coda
from coda_jax.tools.tune import products_of
from flax_layers import Llama, LlamaConfig

TOKENS = jax.ShapeDtypeStruct((2, 65), jnp.int32)


def step(model, optimizer, tokens):
    """README's."""
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
    optimizer.update(model, gradient)
    return loss


def made():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Llama(LlamaConfig(vocab_size=256, **sizes), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def pure_of(*nodes):
    """The step as a function that returns what it changes, and its arguments."""
    graph, state = nnx.split(nodes)

    def pure(state, tokens):
        nodes = nnx.merge(graph, state)
        return step(*nodes, tokens), nnx.state(nodes)

    return pure, (state, TOKENS)


def told(found):
    """The products, the passes, what is kept and what is held, alike for one JAX version and one model."""
    return (
        found.products,
        found.other_products,
        found.attention_calls,
        found.totals,
        sum(found.passes.values()),
        sorted(one.bytes for one in found.kept),
        found.memory,
    )


@functools.cache
def expected():
    pure, args = pure_of(*made())
    return coda.explain(pure, *args, device="H100")


def assert_untouched(*nodes):
    for leaf in jax.tree.leaves(nnx.state(nodes)):
        assert not isinstance(leaf, jax.core.Tracer)
        leaf.block_until_ready()


def calls(model, optimizer, tokens):
    return jitted(model, optimizer, tokens)


def returns_them(model, optimizer, tokens):
    return step(model, optimizer, tokens), model, optimizer


jitted = nnx.jit(step)


@pytest.mark.parametrize("form", [step, jitted, calls, returns_them], ids=["plain", "nnx.jit", "calls", "returns"])
def test_state_changed_by_a_step_is_a_result(form):
    nodes = made()
    found = coda.explain(form, *nodes, TOKENS, device="H100")
    assert sum(one.is_backward for one in found.attention_calls) and found.kernels > 20
    assert told(found) == told(expected())
    assert_untouched(*nodes)
    if form is jitted:  # and the model is as good as before
        form(*nodes, jnp.zeros(TOKENS.shape, jnp.int32))
        assert int(nodes[1].step[...]) == 1


def test_wherever_modules_stand():
    """In a dict, by name, twice, and of shapes alone."""
    nodes = made()

    def of_a_dict(state, *, again, tokens):
        assert state["model"] is again
        return step(again, state["optimizer"], tokens)

    state = {"model": nodes[0], "optimizer": nodes[1]}
    assert told(coda.explain(of_a_dict, state, again=nodes[0], tokens=TOKENS, device="H100")) == told(expected())
    assert_untouched(*nodes)
    abstract = nnx.eval_shape(made)
    assert told(coda.explain(step, *abstract, TOKENS, device="H100")) == told(expected())


def test_donated_state_is_in_the_place_of_arguments():
    nodes = made()
    memory = expected().memory
    found = coda.explain(nnx.jit(step, donate_argnums=(0, 1)), *nodes, TOKENS, device="H100").memory
    assert found.reused == memory.results - 4 and memory.reused == 0  # all but the loss
    assert found.bytes == memory.bytes - found.reused
    assert_untouched(*nodes)


def test_static_arguments_of_a_jitted_step():
    @functools.partial(nnx.jit, static_argnums=2)
    def scaled(layer, x, times):
        for _ in range(times):
            x = layer(x)
        return x

    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    assert coda.explain(scaled, layer, jnp.ones((8, 64)), 3).others == 3


def test_unchanged_state_is_no_result():
    model, _ = made()
    for wrapped in (lambda function: function, nnx.jit):
        loss = wrapped(lambda model, tokens: model.loss(tokens[:, :-1], tokens[:, 1:]))
        assert coda.explain(loss, model, TOKENS).memory.results == 4
    norm = nnx.BatchNorm(32, rngs=nnx.Rngs(0))
    found = coda.explain(lambda norm, x: norm(x), norm, jax.ShapeDtypeStruct((8, 32), jnp.float32))
    assert found.memory.results == 4 * (8 * 32 + 2 * 32)  # and both running statistics
    same = coda.explain(lambda a, b: (a, a + b), jnp.ones(8), jnp.ones(8)).memory
    assert same.results == 4 * 8


def test_a_function_that_jax_jits_leaves_nothing():
    """Its modules are copies: what it does to them is lost, and so is what that needed."""
    nodes = made()
    found = coda.explain(jax.jit(step), *nodes, TOKENS, device="H100")
    assert not any(one.is_backward for one in found.attention_calls) and found.memory.results == 4
    assert_untouched(*nodes)


@pytest.mark.smoke
def test_compare_and_tune():
    nodes = made()
    pure, args = pure_of(*nodes)
    both = coda.compare((pure, args), jitted, *nodes, TOKENS, device="H100")
    assert both.columns[0] == both.columns[1] and both.ours.kernels == expected().kernels
    assert products_of(step, *nodes, TOKENS).keys() == products_of(pure, *args).keys()
    assert_untouched(*nodes)
