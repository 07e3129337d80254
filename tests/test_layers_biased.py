"""Layers with biases, LayerNorm, QK-norm or without rotary embedding, and GPT-2, against the textbook and stock nnx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from flax import nnx
from layer_checks import apply, check_module, state_dict

import coda_jax as coda
import flax_layers as layers
from flax_layers.activation import activation_of
from flax_layers.models import gpt2_block

EPS = 1e-5
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def normal(seed, *shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def randomised(module):
    """The module with random biases and scales: zeros and ones would hide an error."""
    state = nnx.state(module, nnx.Param)
    leaves = [
        x + 0.3 * jax.random.normal(jax.random.key(i), x.shape, x.dtype) if x.ndim == 1 else x
        for i, x in enumerate(jax.tree.leaves(state))
    ]
    nnx.update(module, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return module


class NormThen(nnx.Module):
    """A norm and the module that consumes it."""

    def __init__(self, norm, then):
        self.norm, self.then = norm, then


def apart(module, x):
    return x + module.then(module.norm(x))


whole = coda.fuse(apart)  # the norm, the module and the sum are one function


def layer_norm(p, x):
    y = x.astype(textbook.wide(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS)
    return (y * p["scale"].astype(y.dtype) + p["bias"].astype(y.dtype)).astype(x.dtype)


def linear(p, x):
    return textbook.linear(p, x) + p["bias"].astype(x.dtype) if "bias" in p else textbook.linear(p, x)


def mlp(p, x, activation):
    return linear(p["down"], activation_of(activation)(linear(p["up"], x)))


def attention(p, x, heads, rotate):
    """Causal; with QK-norm where p has its scales."""
    batch, length, _ = x.shape
    q, k, v = (y.reshape(batch, length, heads, -1) for y in jnp.split(linear(p["qkv"], x), 3, axis=-1))
    if "q_norm" in p:
        q, k = textbook.rms_norm(p["q_norm"], q, 1e-6), textbook.rms_norm(p["k_norm"], k, 1e-6)
    if rotate:
        q, k = (textbook.rotary(y, jnp.arange(length), 10000.0) for y in (q, k))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(textbook.wide(x.dtype)) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return linear(p["out"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, -1))


def make_norm(features):
    return layers.LayerNorm(features, epsilon=EPS, rngs=nnx.Rngs(0))


def test_layer_norm_of_an_array(dtype=jnp.bfloat16):
    check_module(randomised(make_norm(129)), lambda m, x: m(x), layer_norm, 16 + normal(0, 2, 9, 129, dtype=dtype))


@dtypes
def test_layer_norm_and_linear(dtype):
    module = NormThen(make_norm(40), layers.Linear(40, 24, use_bias=True, dtype=dtype, rngs=nnx.Rngs(1)))

    def plain(p, x):
        return linear(p["then"], layer_norm(p["norm"], x))

    x = normal(0, 2, 9, 40, dtype=dtype)
    check_module(randomised(module), lambda m, x: m.then(m.norm(x)), plain, x)


@pytest.mark.parametrize("activation, call, dtype", [("gelu", apart, jnp.bfloat16), ("relu2", apart, jnp.float32)])
def test_mlp_of_a_layer_norm(activation, call, dtype):
    then = layers.MLP(40, 56, activation=activation, use_bias=True, dtype=dtype, rngs=nnx.Rngs(1))

    def plain(p, x):
        return x + mlp(p["then"], layer_norm(p["norm"], x), activation)

    check_module(randomised(NormThen(make_norm(40), then)), call, plain, normal(0, 2, 17, 40, dtype=dtype))


def test_mlp_of_an_rms_norm_with_offset(dtype=jnp.bfloat16):
    """As in Gemma the scale is 1 + w; a fresh norm has w = 0."""
    norm = layers.RMSNorm(40, epsilon=EPS, scale_offset=1.0, rngs=nnx.Rngs(0))
    assert not norm.scale[...].any()
    module = randomised(NormThen(norm, layers.MLP(40, 56, dtype=dtype, rngs=nnx.Rngs(1))))

    def plain(p, x):
        return x + mlp(p["then"], textbook.rms_norm({"scale": 1 + p["norm"]["scale"]}, x, EPS), "gelu")

    check_module(module, whole, plain, normal(0, 2, 17, 40, dtype=dtype))


@pytest.mark.parametrize(
    "options, call, dtype",
    [
        ({"use_bias": True, "rope_theta": None}, apart, jnp.bfloat16),
        ({"use_bias": True}, whole, jnp.float32),
        ({"qk_norm": True}, whole, jnp.bfloat16),
        ({"qk_norm": True, "use_bias": True}, whole, jnp.float32),
    ],
    ids=["gpt2", "bias", "qk_norm", "qk_norm_bias"],
)
def test_attention(options, call, dtype):
    then = layers.Attention(48, 4, head_dim=16, dtype=dtype, rngs=nnx.Rngs(1), **options)
    is_layer_norm = options.get("rope_theta", 0) is None
    norm = make_norm(48) if is_layer_norm else layers.RMSNorm(48, epsilon=EPS, rngs=nnx.Rngs(0))

    def plain(p, x):
        y = layer_norm(p["norm"], x) if is_layer_norm else textbook.rms_norm(p["norm"], x, EPS)
        return x + attention(p["then"], y, 4, rotate=not is_layer_norm)

    check_module(randomised(NormThen(norm, then)), call, plain, normal(0, 2, 19, 48, dtype=dtype))


@pytest.mark.slow
def test_gpt2(dtype=jnp.bfloat16):
    """A vocabulary that is no multiple of 8, as GPT-2's 50257."""
    config = layers.GPT2Config(vocab_size=71, n_positions=32, n_embd=32, n_layer=1, n_head=4, initializer_range=0.2)
    model = nnx.jit(lambda: randomised(layers.GPT2(config, dtype=dtype, rngs=nnx.Rngs(1))))()

    def plain(p, tokens):
        embedding, positions = (p[name]["embedding"] for name in ("embed", "position_embed"))
        working = jnp.float64 if jax.config.jax_enable_x64 else dtype
        x = embedding.astype(working)[tokens] + positions.astype(working)[: tokens.shape[1]]
        layer = p["layers"][0]
        x = x + attention(layer["attention"], layer_norm(layer["attention_norm"], x), 4, rotate=False)
        x = x + mlp(layer["mlp"], layer_norm(layer["mlp_norm"], x), "gelu_new")
        return layer_norm(p["norm"], x) @ embedding.astype(working).T

    tokens = jax.random.randint(jax.random.key(0), (2, 23), 0, 71)
    check_module(model, lambda m, tokens: m(tokens), plain, tokens)
    labels = jnp.roll(tokens, -1, axis=1)

    @nnx.jit
    def losses(model):
        logits = model(tokens).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return model.loss(tokens, labels), jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    np.testing.assert_allclose(*losses(model), rtol=1e-2)


def test_stock_nnx_modules_with_the_same_parameters():
    """Norm, kernels and biases are those of nnx.LayerNorm and nnx.Linear, under the same names and shapes."""
    module = randomised(NormThen(make_norm(40), layers.MLP(40, 56, use_bias=True, rngs=nnx.Rngs(1))))
    params = state_dict(module)
    stock = nnx.Dict(
        norm=nnx.LayerNorm(40, epsilon=EPS, use_fast_variance=False, rngs=nnx.Rngs(0)),
        up=nnx.Linear(40, 56, rngs=nnx.Rngs(0)),
        down=nnx.Linear(56, 40, rngs=nnx.Rngs(0)),
    )

    def composition(m, x):
        return x + m["down"](jax.nn.gelu(m["up"](m["norm"](x)), approximate=False))

    x = normal(0, 2, 17, 40, dtype=jnp.float32)
    expected = apply(stock, {"norm": params["norm"], **params["then"]}, composition, x)
    np.testing.assert_allclose(apart(module, x), expected, rtol=0, atol=1e-5)


def test_the_residual_s_cotangent_joins_the_norm_s():
    """The gradient of a LayerNorm is one pass, which adds the residual's cotangent; no other is left to XLA.

    Attention's kernels join the cotangents of q, k and v, with the sums along rows that the norm's derivative reads.
    """
    config = layers.GPT2Config(vocab_size=64, n_positions=16, n_embd=256, n_layer=1, n_head=4)
    block = gpt2_block(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 16, 256), jnp.bfloat16)
    found = coda.explain(jax.grad(lambda x: block(x).sum()), x, platform="cuda").blocks
    backward = [text.splitlines() for text in found if "backward" in text.splitlines()[0]]
    assert [lines[0] for lines in backward] == ["block 'TransformerBlock', backward"]
    passes = [line.partition(":")[0] for line in backward[0] if line.startswith("XLA")]
    assert [one for one in passes if "(" in one] == ["XLA  add (32, 256)"] * 2
    (line,) = [line for line in backward[0] if "in the place of its results" in line]
    assert line.startswith("the derivative of 'attention': ") and "split columns backward" in line


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_activations_by_name(name):
    want = {"gelu": functools.partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu, "silu": jax.nn.silu}
    want |= {"swish": jax.nn.silu, "relu2": lambda x: jax.nn.relu(x) ** 2}
    x = jnp.linspace(-4, 4, 101)
    np.testing.assert_array_equal(layers.ACTIVATIONS[name](x), want.get(name, jax.nn.gelu)(x))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: layers.MLP(8, 8, activation="mish", rngs=nnx.Rngs(0)), ValueError, "activation='mish' is unknown"),
        (
            lambda: layers.LayerNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 9))),
            ValueError,
            r"LayerNorm over 8 features got an input of shape \(2, 9\)",
        ),
        (
            lambda: nnx.eval_shape(
                lambda: layers.GPT2(layers.GPT2Config(9, 4, 8, 1, 1), rngs=nnx.Rngs(0))(jnp.zeros(5, int))
            ),
            ValueError,
            r"5 tokens exceed config\.n_positions=4",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(call, error, message):
    with pytest.raises(error, match=message):
        call()
