"""Every layer and a whole Llama against the textbook, output and gradients, by the tolerance rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import textbook
from flax import nnx
from layer_checks import apply, check_module, state_dict

import coda_jax as coda
import flax_layers as layers

EPS = 1e-5
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def normal(seed, *shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def scale_init(key, shape, dtype):
    return 1 + 0.3 * jax.random.normal(key, shape, dtype)


def norm(features, seed=5):
    return layers.RMSNorm(features, epsilon=EPS, scale_init=scale_init, rngs=nnx.Rngs(seed))


class NormThen(nnx.Module):
    """A norm and the module that consumes it."""

    def __init__(self, norm, then):
        self.norm, self.then = norm, then


def apart(module, x):
    return x + module.then(module.norm(x))


whole = coda.fuse(apart)  # the norm, the module and the sum are one function


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (2, 9, 129)], ids=str)
def test_rms_norm_of_an_array(shape, dtype):
    check_module(
        norm(shape[-1]), lambda m, x: m(x), lambda p, x: textbook.rms_norm(p, x, EPS), normal(0, *shape, dtype=dtype)
    )


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 9, 129)], ids=str)
def test_norm_and_linear(shape, dtype):
    features = shape[-1]
    module = NormThen(norm(features), layers.Linear(features, 72, dtype=dtype, rngs=nnx.Rngs(1)))

    def plain(p, x):
        return textbook.linear(p["then"], textbook.rms_norm(p["norm"], x, EPS))

    x = normal(0, *shape, dtype=dtype)
    check_module(module, lambda m, x: m.then(m.norm(x)), plain, x)


@dtypes
def test_norm_and_linear_over_rows_of_all_scales(dtype):
    module = NormThen(norm(64), layers.Linear(64, 72, dtype=dtype, rngs=nnx.Rngs(1)))
    x = normal(0, 40, 64, dtype=jnp.float32) * jnp.logspace(-3, 3, 40)[:, None]

    def plain(p, x):
        return textbook.linear(p["then"], textbook.rms_norm(p["norm"], x, EPS))

    check_module(module, lambda m, x: m.then(m.norm(x)), plain, x.astype(dtype), by_rows=True)


@dtypes
def test_norm_of_a_stream_that_a_product_made(dtype):
    class TwoLinear(nnx.Module):
        def __init__(self):
            self.first = layers.Linear(24, 40, dtype=dtype, rngs=nnx.Rngs(1))
            self.norm = norm(40)
            self.second = layers.Linear(40, 16, dtype=dtype, rngs=nnx.Rngs(2))

    def call(m, x, residual):
        return m.second(m.norm(residual + m.first(x)))

    def plain(p, x, residual):
        stream = residual + textbook.linear(p["first"], x)
        return textbook.linear(p["second"], textbook.rms_norm(p["norm"], stream, EPS))

    check_module(
        TwoLinear(), coda.fuse(call), plain, normal(0, 2, 9, 24, dtype=dtype), normal(1, 2, 9, 40, dtype=dtype)
    )


@pytest.mark.parametrize("call, dtype", [(whole, jnp.bfloat16), (apart, jnp.float32)])
def test_gated_mlp(call, dtype):
    module = NormThen(norm(40), layers.GatedMLP(40, 56, dtype=dtype, rngs=nnx.Rngs(1)))

    def plain(p, x):
        return x + textbook.gated_mlp(p["then"], textbook.rms_norm(p["norm"], x, EPS))

    check_module(module, call, plain, normal(0, 2, 17, 40, dtype=dtype))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "call, kv_heads, dtype",
    [
        (whole, 2, jnp.bfloat16),
        (whole, 2, jnp.float32),
        (apart, 1, jnp.float32),
        (whole, 4, jnp.bfloat16),
    ],
)
def test_attention(call, kv_heads, dtype):
    attention = layers.Attention(
        48, 4, num_kv_heads=kv_heads, head_dim=16, rope_theta=100.0, dtype=dtype, rngs=nnx.Rngs(1)
    )

    def plain(p, x):
        return x + textbook.attention(p["then"], textbook.rms_norm(p["norm"], x, EPS), 4, kv_heads, 100.0)

    check_module(NormThen(norm(48), attention), call, plain, normal(0, 2, 19, 48, dtype=dtype))


@dtypes
def test_attention_at_given_positions(dtype):
    attention = layers.Attention(32, 2, dtype=dtype, rngs=nnx.Rngs(1))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 8, 9, 30, 31]])
    check_module(
        attention,
        lambda m, x, positions: m(x, positions=positions),
        lambda p, x, positions: textbook.attention(p, x, 2, 2, 10000.0, positions),
        normal(0, 2, 5, 32, dtype=dtype),
        positions,
    )


@dtypes
def test_attention_mask(dtype):
    """A mask that hides the second sequence's first two keys gives what the sequence without them gives."""
    attention = layers.Attention(32, 2, dtype=dtype, rngs=nnx.Rngs(1))
    x = normal(0, 1, 9, 32, dtype=dtype)
    mask = (jnp.arange(9) >= 2)[None, None, None, :]
    got, alone = nnx.jit(lambda m, x: (m(x, mask=mask)[:, 2:], m(x[:, 2:], positions=jnp.arange(2, 9))))(attention, x)
    np.testing.assert_allclose(got, alone, rtol=0, atol=1e-6 if dtype == jnp.float32 else 0.02)


@pytest.mark.smoke
def test_block(dtype=jnp.bfloat16):
    module = layers.LlamaBlock(32, 48, 4, num_kv_heads=2, epsilon=EPS, dtype=dtype, rngs=nnx.Rngs(1))
    check_module(
        module,
        lambda m, x: m(x),
        lambda p, x: textbook.block(p, x, 4, 2, 10000.0, EPS),
        normal(0, 2, 17, 32, dtype=dtype),
    )


@pytest.mark.parametrize("tied, dtype", [(False, jnp.bfloat16), (True, jnp.float32)], ids=["untied", "tied"])
def test_llama(tied, dtype):
    config = layers.LlamaConfig(
        vocab_size=72,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=EPS,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    tokens = jax.random.randint(jax.random.key(0), (2, 23), 0, 72)
    check_module(
        nnx.jit(lambda: layers.Llama(config, dtype=dtype, rngs=nnx.Rngs(4)))(),
        lambda m, tokens: m(tokens),
        lambda p, tokens: textbook.llama(p, tokens, config, jnp.float64 if jax.config.jax_enable_x64 else dtype),
        tokens,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.slow
def test_loss_is_that_of_the_logits(tied):
    config = layers.LlamaConfig(
        vocab_size=72,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    model = nnx.jit(lambda: layers.Llama(config, rngs=nnx.Rngs(1)))()
    tokens, labels = jax.random.randint(jax.random.key(0), (2, 2, 23), 0, 72)
    weights = jnp.arange(46.0).reshape(2, 23)

    def of_logits(model, labels, weights):
        each = optax.softmax_cross_entropy_with_integer_labels(model(tokens), labels)
        return jnp.sum(weights * each) / jnp.sum(weights)

    def of_model(model, labels, weights):
        return model.loss(tokens, labels.at[0, 3].set(-100), weights)

    got = nnx.jit(nnx.value_and_grad(of_model))(model, labels, weights)
    want = nnx.jit(nnx.value_and_grad(of_logits))(model, labels, weights.at[0, 3].set(0))
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * float(jnp.abs(y).max()))


def test_loss_of_a_plain_array():
    head = layers.LMHead(8, 24, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x, labels = normal(0, 2, 5, 8, dtype=jnp.float32), jnp.arange(10).reshape(2, 5)
    want = optax.softmax_cross_entropy_with_integer_labels(head(x), labels)
    got, count = head.loss(x, labels, reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert count == 10


@dtypes
def test_stock_nnx_modules_with_the_same_parameters(dtype):
    """The kernels are those of nnx.Linear and the scale that of nnx.RMSNorm, under the same names and shapes."""
    module = NormThen(norm(40), layers.GatedMLP(40, 56, dtype=dtype, rngs=nnx.Rngs(1)))
    params = state_dict(module)
    options = {"use_bias": False, "dtype": dtype, "rngs": nnx.Rngs(0)}
    stock = nnx.Dict(
        norm=nnx.RMSNorm(40, epsilon=EPS, dtype=dtype, rngs=nnx.Rngs(0)),
        gate=nnx.Linear(40, 56, **options),
        up=nnx.Linear(40, 56, **options),
        down=nnx.Linear(56, 40, **options),
    )
    stock_params = {
        "norm": params["norm"],
        "gate": {"kernel": module.then.split_kernel()[0]},
        "up": {"kernel": module.then.split_kernel()[1]},
        "down": params["then"]["down"],
    }

    def composition(m, x):
        y = m["norm"](x)
        return x + m["down"](jax.nn.silu(m["gate"](y)) * m["up"](y))

    x = normal(0, 2, 17, 40, dtype=dtype)
    expected = apply(stock, stock_params, composition, x)
    got = whole(module, x)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 if dtype == jnp.float32 else 0.05)
