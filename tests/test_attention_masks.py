"""Sliding windows and segments against a softmax over the keys seen, and what reaches cuDNN's kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from flax import nnx
from layer_checks import check_module

import flax_layers as layers
from flax_layers import attend

SEGMENTS = jnp.array([[3, 3, 3, 3, 1, 1, 1, 1, 1, 0, 0], [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7]])
INDEX = np.arange(SEGMENTS.shape[1])
CAUSAL = INDEX[:, None] >= INDEX
WINDOW = CAUSAL & (INDEX[:, None] - 3 < INDEX)
SAME = np.asarray(SEGMENTS[:, :, None] == SEGMENTS[:, None, :])


def attention(dtype=jnp.float32, **options):
    return layers.Attention(32, 4, num_kv_heads=2, dtype=dtype, rngs=nnx.Rngs(1), **options)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_a_window(dtype):
    check_module(
        attention(dtype, sliding_window=3),
        lambda m, x: m(x),
        lambda p, x: textbook.attention(p, x, 4, 2, 10000.0, seen=WINDOW),
        normal(0, *SEGMENTS.shape, 32).astype(dtype),
    )


def test_float16_over_a_cache():
    """XLA has no float16 product summed in float32 but on GPUs."""
    module, x = attention(jnp.float16), normal(0, 2, 11, 32).astype(jnp.float16)

    @nnx.jit
    def in_two_parts(module, x):
        first, cache = module(x[:, :6], cache=module.init_cache(2, 12))
        second, _ = module(x[:, 6:], cache=cache)
        return jnp.concatenate([first, second], axis=1)

    out = in_two_parts(module, x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, nnx.jit(lambda m, x: m(x))(module, x), rtol=0, atol=2e-3)


def test_segments_beside_a_window_and_a_mask():
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (2, 1, 11, 11)) | jnp.eye(11, dtype=bool)
    check_module(
        attention(sliding_window=3),
        lambda m, x: m(x, segment_ids=SEGMENTS, mask=mask),
        lambda p, x: textbook.attention(p, x, 4, 2, 10000.0, seen=WINDOW & SAME & mask[:, 0]),
        normal(0, *SEGMENTS.shape, 32),
    )


def test_segments_of_attention_that_is_not_causal_and_of_a_row_alone():
    check_module(
        attention(is_causal=False),
        lambda m, x: m(x[0], segment_ids=SEGMENTS[1])[None],
        lambda p, x: textbook.attention(p, x, 4, 2, 10000.0, seen=SAME[1]),
        normal(0, 1, SEGMENTS.shape[1], 32),
    )


@pytest.mark.smoke
def test_a_llama_of_packed_sequences_gives_what_they_give_alone():
    """Positions are not reset: rotated queries and keys depend on their distance."""
    config = layers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        sliding_window=3,
    )
    model = layers.Llama(config, rngs=nnx.Rngs(0))
    alone = jax.random.randint(jax.random.key(0), (3, 5), 0, 32)
    call = nnx.jit(lambda m, tokens, segment_ids: m(tokens, segment_ids=segment_ids))
    expected = call(model, alone, None).reshape(1, 15, 32)
    packed, mixed = (
        call(model, alone.reshape(1, 15), jnp.repeat(ids, 5)[None]) for ids in (jnp.array([2, 0, 1]), jnp.zeros(3, int))
    )
    np.testing.assert_allclose(packed, expected, rtol=0, atol=1e-5)
    assert np.abs(mixed - expected).max() > 0.1


@pytest.mark.parametrize(
    "options, window, masked",
    [
        ({}, None, False),
        ({"sliding_window": 3}, (2, 0), False),
        ({"sliding_window": 3, "segment_ids": jnp.zeros((2, 12), jnp.int32)}, None, True),
        ({"mask": jnp.ones((2, 1, 1, 12), bool)}, None, True),
    ],
)
def test_what_cudnn_is_given(options, window, masked, monkeypatch):
    """A window as its own argument, but in the mask where there is one, which has both lengths."""
    given = {}

    def stand_in(q, k, v, **arguments):
        given.update(arguments)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k = normal(0, 2, 12, 4, 8), normal(1, 2, 12, 2, 8)
    attend.attend(q, k, k, implementation="cudnn", **options)
    assert given["implementation"] == "cudnn" and given["is_causal"]
    assert given["local_window_size"] == window
    assert (given["mask"] is not None) == masked
    assert not masked or given["mask"].shape == (2, 1, 12, 12)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 3, "segment_ids": SEGMENTS},
        {"mask": jnp.arange(11) < 9},
        {"is_causal": False},
        {"is_causal": False, "mask": jnp.arange(11) < 9},
    ],
    ids=str,
)
def test_cudnn_is_given_even_lengths(options, batched, monkeypatch):
    """JAX refuses to differentiate its call of cuDNN at an odd length."""
    given, by_jax = [], jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, **arguments):
        given.append((implementation, q.shape[-3], k.shape[-3], v.shape[-3]))
        return by_jax(q, k, v, implementation="xla", **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v = normal(0, 2, 11, 4, 8), normal(1, 2, 11, 2, 8), normal(2, 2, 11, 2, 8)
    if not batched:
        q, k, v = (x[0] for x in (q, k, v))
        options = {name: x[0] if name == "segment_ids" else x for name, x in options.items()}

    def of(implementation):
        results = lambda *x: attend.attend(*x, implementation=implementation, **options)[0]  # noqa: E731
        y, pullback = jax.vjp(results, q, k, v)
        return y, *pullback(jnp.cos(y))

    for found, expected in zip(of("cudnn"), of("xla"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert given == [("cudnn", 12, 12, 12), ("xla", 11, 11, 11)]


@pytest.mark.parametrize("length", [12, 11])
def test_the_key_that_makes_an_odd_number_even_is_not_seen(length, monkeypatch):
    """Attention to another text, with a bias or without one: its score, 0, would be more than those of the others."""
    by_jax = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, **y: by_jax(*x, **y | {"implementation": "xla"}))
    q, v = jnp.ones((2, length, 4, 8)), normal(0, 2, 11, 2, 8)
    k = -jnp.ones((2, 11, 2, 8))
    for bias in (None, jnp.zeros((1, 1, 1, 11))):
        y, _ = attend.attend(q, k, v, is_causal=False, bias=bias, implementation="cudnn")
        mean = jnp.repeat(v.mean(axis=1, keepdims=True), 2, axis=2)
        np.testing.assert_allclose(y, jnp.broadcast_to(mean, y.shape), rtol=1e-5, atol=1e-6)


def test_which_implementation_is_chosen_on_a_gpu(monkeypatch):
    def chosen(length, dtype=jnp.bfloat16):
        return attend._implementation(jax.ShapeDtypeStruct((2, length, 4, 64), dtype))

    assert chosen(12) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [chosen(12), chosen(11)] == ["cudnn", "cudnn"]
    assert [chosen(1), chosen(12, jnp.float32)] == ["xla"] * 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: attention(sliding_window=0), "sliding_window=0 must be at least 1"),
        (lambda: attention(sliding_window=2, is_causal=False), "sliding_window=2 .* is_causal=False"),
        (
            lambda: attention()(normal(0, 2, 11, 32), segment_ids=SEGMENTS[0]),
            r"segment_ids has shape \(11,\); .* must be \(2, 11\)",
        ),
        (
            lambda: attention()(normal(0, 2, 11, 32), mask=jnp.ones((3, 11, 11), bool)),
            r"mask has shape \(3, 11, 11\); .* must broadcast to \(2, \d, 11, 11\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
