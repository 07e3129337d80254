"""The layers in linen: values and names of the nnx modules, blocks of them, transformations, training."""

import collections
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import coda_jax as coda
import flax_layers
from flax_layers import linen as layers
from flax_layers import sharding

SIZES = {"in_features": 16, "hidden_features": 24, "num_heads": 2}
CONFIG = flax_layers.LlamaConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def of_nnx(name, options, variables):
    """The nnx module with a linen module's parameters."""
    module = getattr(flax_layers, name)(**options, rngs=nnx.Rngs(5))
    nnx.update(module, variables["params"])
    return module


@pytest.mark.parametrize(
    "name, options, x",
    [
        ("Linear", {"in_features": 16, "out_features": 24}, normal(0, 2, 5, 16)),
        ("RMSNorm", {"num_features": 16}, normal(0, 2, 5, 16)),
        ("GatedMLP", {"in_features": 16, "hidden_features": 24, "activation": jax.nn.gelu}, normal(0, 2, 5, 16)),
        ("Attention", {"in_features": 16, "num_heads": 2, "sliding_window": 2}, normal(0, 2, 5, 16)),
        ("LlamaBlock", SIZES, normal(0, 2, 5, 16)),
        ("LMHead", {"in_features": 16, "vocab_size": 24}, normal(0, 2, 5, 16)),
    ],
)
def test_parameters_have_the_names_and_shapes_of_the_nnx_module(name, options, x):
    variables = jax.eval_shape(getattr(layers, name)(**options).init, jax.random.key(1), x)
    module = nnx.eval_shape(lambda: getattr(flax_layers, name)(**options, rngs=nnx.Rngs(5)))
    expected = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert jax.tree.map(np.shape, variables) == {"params": jax.tree.map(np.shape, expected)}


@pytest.mark.smoke
def test_a_llama_has_the_values_of_the_nnx_module_and_generates_there():
    module, tokens = layers.Llama(config=CONFIG), jnp.arange(10).reshape(2, 5)
    variables = jax.jit(module.init)(jax.random.key(1), tokens)
    model = of_nnx("Llama", {"config": CONFIG}, variables)
    logits = jax.jit(module.apply)(variables, tokens)
    np.testing.assert_allclose(logits, nnx.jit(lambda m, x: m(x))(model, tokens), rtol=1e-5, atol=1e-6)
    made = flax_layers.generate(model, tokens, max_new_tokens=1).tokens
    np.testing.assert_array_equal(made[:, 0], jnp.argmax(logits[:, -1], axis=-1))


class Block(nn.Module):
    """Two sub-layers around a residual stream."""

    @nn.compact
    def __call__(self, x):
        normalized = layers.RMSNorm(num_features=16, name="attention_norm")(x)
        x = x + layers.Attention(in_features=16, num_heads=2, name="attention")(normalized)
        normalized = layers.RMSNorm(num_features=16, name="mlp_norm")(x)
        return x + layers.GatedMLP(in_features=16, hidden_features=24, name="mlp")(normalized)


@pytest.mark.slow
def test_a_block_of_linen_modules():
    """It computes what the block of the nnx modules does: the same values and gradients, from the same products."""
    x = normal(0, 2, 5, 16)
    variables = jax.jit(Block().init)(jax.random.key(1), x)
    block = of_nnx("LlamaBlock", SIZES, variables)
    graphdef, params = nnx.split(block)

    @coda.fuse
    def of_linen(variables, x):
        return jnp.sum(Block().apply(variables, x) ** 2)

    @coda.fuse
    def of_block(params, x):
        return jnp.sum(nnx.merge(graphdef, params)(x) ** 2)

    got, dx = jax.jit(jax.grad(of_linen, (0, 1)))(variables, x)
    expected, expected_dx = jax.jit(jax.grad(of_block, (0, 1)))(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        (got["params"], dx),
        (nnx.to_pure_dict(expected), expected_dx),
    )
    factors = []
    for f, p in ((of_linen, variables), (of_block, params)):
        found = collections.Counter[tuple[str, str]]()
        for one, count in coda.explain(jax.grad(f), p, x, platform="cuda").products.items():
            found[one.a, one.b] += count
        factors.append(found)
    assert factors[0] == factors[1]


class LanguageModel(nn.Module):
    """Embedding, two blocks under nn.scan and nn.remat, norm, head."""

    @nn.compact
    def __call__(self, tokens):

        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.remat(layers.LlamaBlock)(**SIZES, name="block")(x), None

        blocks = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = blocks(name="layers")(nn.Embed(24, 16)(tokens), None)
        return layers.LMHead(in_features=16, vocab_size=24)(layers.RMSNorm(num_features=16)(x))


@pytest.mark.slow
def test_a_linen_model_under_scan_and_remat_trains():
    model, tokens = LanguageModel(), jax.random.randint(jax.random.key(0), (4, 9), 0, 24)
    params = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])
    kernels = params["params"]["layers"]["block"]["attention"]["qkv"]["kernel"]
    assert kernels.shape == (2, 16, 48) and (kernels[0] != kernels[1]).all()
    optimizer = optax.sgd(0.3)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(30):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("wrap", [lambda cls: cls, nn.remat], ids=["plain", "remat"])
def test_arguments_are_given_by_keyword(wrap):
    cls = wrap(layers.GatedMLP)
    with pytest.raises(TypeError, match=r"GatedMLP takes its arguments by keyword, got 16$"):
        cls(16, hidden_features=24)
    with pytest.raises(TypeError, match=r"GatedMLP takes its arguments by keyword, got 16, 24$"):
        cls(16, 24)
    with pytest.raises(TypeError, match=r"GatedMLP takes its arguments by keyword, got \(16, 24\)$"):
        cls((16, 24))
    assert pickle.loads(pickle.dumps(layers.GatedMLP)) is layers.GatedMLP
    assert "flax_layers.GatedMLP" in layers.GatedMLP.__doc__


@pytest.mark.slow
def test_sharding_rules():
    """Variables are made where the rules lay them, activations are constrained, logits are those of one device."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model, tokens = layers.Llama(config=CONFIG, rules=sharding.FSDP_TENSOR), jnp.arange(20).reshape(4, 5)
    expected = jax.jit(layers.Llama(config=CONFIG).init_with_output)(jax.random.key(0), tokens)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(model.init, jax.random.key(0), tokens)
        shardings = sharding.parameter_shardings(abstract, mesh, sharding.FSDP_TENSOR)
        variables = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0), tokens)
        logits = jax.jit(model.apply)(variables, tokens)
        assert str(jax.make_jaxpr(model.apply)(variables, tokens)).count("sharding_constraint") > 10
    down = variables["params"]["layers"][0]["mlp"]["down"]["kernel"]
    assert down.sharding.spec == jax.P(("tensor", "fsdp"), None)
    assert down.addressable_shards[0].data.size == down.size // 4
    for got, want in zip(jax.tree.leaves((logits, variables)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
