"""Query, key and value, and gate and up, with kernels of their own: one product still, with the packed one's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from flax_layers.checkpoints import from_hf, from_maxtext, to_hf, to_maxtext

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
CONFIGS = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "bias": {"attention_bias": True},
    "qwen2": {"attention_bias": True, "attention_out_bias": False},
    "no rotation": {"rope_theta": None},
}
TOKENS = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)


def loss(model):
    return model.loss(TOKENS[:, :-1], TOKENS[:, 1:])


def pair(name, **options):
    """The two models, with the same parameters."""
    config = layers.LlamaConfig(**SIZES, **HEADS, **CONFIGS[name])
    packed = layers.Llama(config, rngs=nnx.Rngs(0), **options)
    apart = {"separate_qkv": True, "separate_gate_up": True}
    return config, packed, from_hf(to_hf(packed, config), config, **apart, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_those_of_the_packed_kernel(name):
    config, packed, separate = pair(name)
    value, gradient = nnx.value_and_grad(loss)(packed)
    got, of_separate = nnx.value_and_grad(loss)(separate)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    expected, found = to_hf(gradient, config), to_hf(of_separate, config)
    for key in expected:
        np.testing.assert_allclose(found[key], expected[key], rtol=2e-4, atol=1e-6, err_msg=key)


def test_checkpoints_are_the_same():
    config, packed, separate = pair("bias", scan_layers=True)
    for key, array in to_hf(packed, config).items():
        np.testing.assert_array_equal(to_hf(separate, config)[key], array)
    kernel = separate.layers.attention.key.kernel[...]
    np.testing.assert_array_equal(kernel, packed.layers.attention.qkv.kernel[..., 128:192])
    mlp = separate.layers.mlp
    for i, layer in enumerate((mlp.gate, mlp.up)):
        np.testing.assert_array_equal(layer.kernel[...], packed.layers.mlp.gate_up[...][:, :, i])
    again = from_maxtext(to_maxtext(separate, config), config, separate_gate_up=True)
    np.testing.assert_array_equal(again.layers[1].mlp.up.kernel[...], mlp.up.kernel[1])


@pytest.mark.slow
def test_gpt2():
    """Its checkpoints have the three packed, which a model that has them apart refuses to be read from."""
    config = layers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    packed = layers.GPT2(config, rngs=nnx.Rngs(0))
    separate = layers.GPT2(config, separate_qkv=True, rngs=nnx.Rngs(0))
    state = nnx.to_pure_dict(nnx.state(packed))
    attention = state["layers"][0]["attention"]
    qkv = attention.pop("qkv")
    for i, name in enumerate(("query", "key", "value")):
        attention[name] = {kind: x[..., 32 * i : 32 * (i + 1)] for kind, x in qkv.items()}
    nnx.update(separate, state)
    np.testing.assert_allclose(loss(separate), loss(packed), rtol=1e-6)
    with pytest.raises(ValueError, match="query, key and value together; the model has them apart"):
        from_hf(to_hf(packed, config), config, separate_qkv=True)


def test_names():
    model = layers.Attention(64, 4, num_kv_heads=2, separate_qkv=True, rngs=nnx.Rngs(0))
    assert [x.shape for x in model.split_kernel()] == [(64, 64), (64, 32), (64, 32)]
    assert sorted(nnx.to_pure_dict(nnx.state(model))) == ["key", "out", "query", "value"]
    mlp = layers.GatedMLP(64, 96, separate_gate_up=True, rngs=nnx.Rngs(0))
    assert [x.shape for x in mlp.split_kernel()] == [(64, 96), (64, 96)]
    assert sorted(nnx.to_pure_dict(nnx.state(mlp))) == ["down", "gate", "up"]


@pytest.mark.parametrize("name", ["llama", "bias"])
def test_every_product_is_the_kernel_s(name):
    """As many as with packed kernels: none of query, key and value alone, nor of gate and up."""
    config = layers.LlamaConfig(**SIZES, **HEADS, **CONFIGS[name])
    counts = []
    for apart in (False, True):
        options = {"separate_qkv": apart, "separate_gate_up": apart}
        model = layers.Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
        tokens = jnp.zeros((2, 64), int)
        found = coda.explain(nnx.grad(lambda m, t: m.loss(t, t)), model, tokens, platform="cuda")
        assert {product.reason for product in found.products} == {None}
        counts.append(sum(found.products.values()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("widths", [(64, 32, 32), (32, 32)], ids=str)
def test_a_layer_norm_and_biases(widths):
    """norm_projection of three weights, as GPT-2's attention has them, and of two of one width."""
    keys = jax.random.split(jax.random.key(1), 8)
    x, scale, shift = jax.random.normal(keys[0], (2, 5, 64)), 1 + jax.random.normal(keys[1], (64,)), jnp.ones(64)
    weights = tuple(jax.random.normal(k, (64, n)) for k, n in zip(keys[2:5], widths, strict=False))
    biases = tuple(jax.random.normal(k, (n,)) for k, n in zip(keys[5:], widths, strict=False))

    def parts(x, scale, shift, weights, biases):
        return jnp.concatenate(coda.norm_projection(coda.layer_norm(x, scale, shift), weights, biases), axis=-1)

    def whole(x, scale, shift, weights, biases):
        w, bias = jnp.concatenate(weights, axis=1), jnp.concatenate(biases)
        return coda.norm_projection(coda.layer_norm(x, scale, shift), w, bias)

    arguments = x, scale, shift, weights, biases
    np.testing.assert_allclose(parts(*arguments), whole(*arguments), rtol=1e-5, atol=1e-5)

    def sines(f):
        return lambda *arguments: jnp.sum(jnp.sin(f(*arguments)))

    got = jax.grad(sines(parts), range(5))(*arguments)
    expected = jax.grad(sines(whole), range(5))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda norm, w: coda.qkv_projection(norm, (w, w), *[jnp.ones((4, 16))] * 2, num_heads=1, num_kv_heads=1),
            "qkv_projection: w is 2 arrays; it must be one, or three: of query, key and value",
        ),
        (
            lambda norm, w: coda.qkv_projection(norm, (w, w, w), *[jnp.ones((4, 8))] * 2, num_heads=2, num_kv_heads=1),
            r"qkv_projection: w\[0\] has shape \(64, 32\); beside x .* it must be \(64, 48\)",
        ),
        (
            lambda norm, w: coda.norm_projection(norm, (w, w), w[0]),
            "norm_projection: bias is 1 arrays; beside 2 weights it must be as many",
        ),
    ],
)
def test_refusals(call, message):
    norm = coda.rms_norm(jnp.ones((4, 64)), jnp.ones(64))
    with pytest.raises(ValueError, match=message):
        call(norm, jnp.ones((64, 32)))
