"""optax's Muon with the layers' dimension numbers: what it takes, as which matrices, and that it trains."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layers as layers
from tests.tiny_models import GPT2, LLAMA

QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, tie_word_embeddings=True, attention_bias=True)
MODELS = {
    "llama": lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0)),
    "llama stacked": lambda: layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0)),
    "qwen3": lambda: layers.Llama(QWEN3, rngs=nnx.Rngs(0)),
    "qwen3 stacked": lambda: layers.Llama(QWEN3, scan_layers=True, rngs=nnx.Rngs(0)),
    "gpt2": lambda: layers.GPT2(GPT2, rngs=nnx.Rngs(0)),
}
# Elements of the products' weights in two layers; D = 16, F = 24 and D = 32, F = 128.
OF_LLAMA = 2 * (16 * 48 + 16 * 16 + 2 * 16 * 24 + 24 * 16)
OF_GPT2 = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)


def muon(**options):
    """With two iterations instead of five, which compile in less time."""
    return optax.contrib.muon(0.02, ns_steps=2, **options)


def of_the_layers():
    return muon(muon_weight_dimension_numbers=layers.muon_dimension_numbers)


def pure(params):
    return nnx.to_pure_dict(params)


def elements(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("of", [lambda params: params, nnx.as_pure, pure], ids=["variables", "arrays", "dictionaries"])
@pytest.mark.parametrize("name", MODELS)
def test_muon_takes_matrices_and_adam_the_rest(name, of):
    params = of(nnx.state(nnx.eval_shape(MODELS[name]), nnx.Param))
    state = jax.eval_shape(of_the_layers().init, params).inner_states
    taken, rest = elements(state["muon"].inner_state[0].mu), elements(state["adam"].inner_state[0].mu)
    assert taken == (OF_GPT2 if name == "gpt2" else OF_LLAMA)
    assert taken + rest == elements(params)


def updates(tx, params, gradients):
    return jax.jit(tx.update)(gradients, tx.init(params), params)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama stacked"])
def test_every_matrix_by_itself(name):
    """As Muon takes the same matrices apart, gate and up too, and those of each layer."""
    params = nnx.state(MODELS[name](), nnx.Param)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    got = pure(updates(of_the_layers(), params, gradients))["layers"]

    def matrices(layer):
        gate_up = layer["mlp"]["gate_up"]
        kernels = [layer["attention"]["qkv"], layer["attention"]["out"], layer["mlp"]["down"]]
        return [gate_up[:, 0], gate_up[:, 1], *(linear["kernel"] for linear in kernels)]

    def apart(layers):
        if name == "llama":
            return [matrices(layers[i]) for i in range(2)]
        return [matrices(jax.tree.map(lambda x, i=i: x[i], layers)) for i in range(2)]

    expected = updates(muon(), apart(pure(params)["layers"]), apart(pure(gradients)["layers"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), apart(got), expected)


@pytest.mark.parametrize("name", [pytest.param("qwen3 stacked", marks=pytest.mark.slow), "gpt2"])
def test_training_with_an_nnx_optimizer(name):
    model, tokens = MODELS[name](), jax.random.randint(jax.random.key(0), (4, 9), 0, 64)
    optimizer = nnx.Optimizer(model, of_the_layers(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5 and jnp.isfinite(losses[-1])
