"""Sliding windows and segments against a softmax over the keys seen, and what coda.attention and cuDNN are given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from flax import nnx
from layer_checks import check_module

import coda_jax as coda
import flax_layers as layers
from coda_jax.attend import choose
from coda_jax.attend.spec import MaskSpec
from coda_jax.extend import prefers_cudnn
from coda_jax.jaxprs.walk import equations
from flax_layers import attend
from flax_layers.packing import Segments

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
def test_cudnn_gets_windows_as_arguments_or_inside_masks(options, window, masked, monkeypatch):
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
    """cuDNN where it is measured to be faster and can compute it; else coda.attention, but for one token."""

    def chosen(length, dtype=jnp.bfloat16, width=64, keys=12, window=None, **extras):
        q, k = (jax.ShapeDtypeStruct((2, count, 4, width), dtype) for count in (length, keys))
        extras = {"mask": None, "bias": None, "segment_ids": None, "sinks": None, **extras}
        return attend._implementation(q, k, True, window, extras)

    assert [chosen(12), chosen(12, jnp.float32), chosen(1)] == [None, None, "xla"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked = []
    monkeypatch.setattr(attend, "prefers_cudnn", lambda *sizes, **masks: asked.append((sizes, masks)) or True)
    assert [chosen(12), chosen(11)] == ["cudnn", "cudnn"]
    assert chosen(1) == "xla"
    assert [chosen(12, jnp.float32), chosen(12, width=12), chosen(12, width=136)] == [None] * 3
    assert len(asked) == 2
    chosen(12, keys=10, window=3, mask=True, bias=True)
    masks = {"is_causal": True, "has_window": True, "has_segments": False, "has_mask": True, "has_bias": True}
    assert asked[2] == ((64, 12, 10), masks)
    monkeypatch.setattr(attend, "prefers_cudnn", lambda *_, **__: False)
    assert chosen(12) is None


def test_where_cudnn_is_preferred(monkeypatch):
    """On other GPUs than Hopper everywhere: the kernels here do not run there."""
    sizes, masks = (64, 128, 256), ("has_segments", "has_mask", "has_bias")
    preferred = {(width, name) for width in sizes for name in masks if prefers_cudnn(width, 512, 512, **{name: True})}
    assert preferred == {(64, "has_bias"), (256, "has_mask"), (256, "has_bias")}
    monkeypatch.setattr(choose, "machine_reason", lambda: "the GPU has compute capability 8.0")
    assert prefers_cudnn(64, 512, 512, has_segments=True)


def calls_of(function, *arrays):
    """The masks of coda.attention's calls in a function, and the function's text."""
    jaxpr = jax.make_jaxpr(function)(*arrays)
    calls = [one for one, _ in equations(jaxpr.jaxpr) if one.primitive.name == "coda_attention"]
    return [one.params["spec"].mask for one in calls], str(jaxpr)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, {"right": 0}),
        ({"is_causal": False}, {}),
        ({"sliding_window": 3}, {"left": 2, "right": 0}),
        ({"segment_ids": SEGMENTS}, {"intervals": 1}),
        ({"segment_ids": Segments.of(SEGMENTS)}, {"intervals": 1}),
        ({"segment_ids": SEGMENTS, "sliding_window": 3}, {"intervals": 1}),
        ({"segment_ids": SEGMENTS, "is_causal": False}, {"intervals": 1}),
        ({"mask": CAUSAL, "sliding_window": 3}, {"left": 2, "right": 0, "has_mask": True}),
        ({"mask": CAUSAL, "segment_ids": SEGMENTS}, {"right": 0, "has_ids": True, "has_mask": True}),
        ({"bias": jnp.zeros((4, 1, 11)), "segment_ids": SEGMENTS}, {"intervals": 1, "has_bias": True}),
    ],
)
def test_coda_attention_gets_masks_as_few_numbers(options, expected):
    """Few numbers for each query, and an array of all pairs only where the caller has one."""
    q, k = normal(0, 2, 11, 4, 8), normal(1, 2, 11, 2, 8)
    masks, text = calls_of(lambda q, k: attend.attend(q, k, k, **options)[0], q, k)
    assert masks == [MaskSpec(**expected)]
    assert "mask" in options or "11,11]" not in text


@pytest.mark.smoke
def test_a_window_beside_segments_without_a_mask():
    """The window reaches before a segment in some rows; a row alone has the same result."""
    check_module(
        attention(sliding_window=3),
        lambda m, x: m(x, segment_ids=SEGMENTS),
        lambda p, x: textbook.attention(p, x, 4, 2, 10000.0, seen=WINDOW & SAME),
        normal(0, *SEGMENTS.shape, 32),
    )
    module, x = attention(sliding_window=3), normal(1, *SEGMENTS.shape, 32)
    together = module(x, segment_ids=SEGMENTS)
    for row in range(2):
        np.testing.assert_allclose(module(x[row], segment_ids=SEGMENTS[row]), together[row], atol=1e-6)


def test_an_id_that_comes_again_is_another_segment_here_and_the_same_one_to_coda_attention():
    ids = jnp.array([[4, 4, 4, 1, 1, 4, 4, 2, 2, 4, 4]])
    q, k, v = normal(0, 1, 11, 4, 8), normal(1, 1, 11, 2, 8), normal(2, 1, 11, 2, 8)
    index = jnp.arange(11)
    runs = jnp.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    for found, names in (
        (attend.attend(q, k, v, segment_ids=ids)[0], runs),
        (coda.attention(q, k, v, is_causal=True, segment_ids=ids), ids[0]),
    ):
        seen = (index[:, None] >= index) & (names[:, None] == names)
        expected = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_several_tokens_over_a_cache(window):
    """Rows that hold different numbers of tokens: each has its own offset, and no mask of all slots is made."""
    module, x, lengths = attention(sliding_window=window), normal(0, 2, 11, 32), jnp.array([6, 4])
    _, cache = module(x[:, :6], cache=module.init_cache(2, 12))
    cache = dataclasses.replace(cache, length=lengths)
    more = jnp.stack([x[row, count : count + 5] for row, count in enumerate(lengths)])
    y, longer = module(more, cache=cache)
    for row, count in enumerate(lengths):
        alone = module(x[row, : count + 5])[count:]
        np.testing.assert_allclose(y[row], alone, rtol=1e-4, atol=1e-5)
    assert longer.length.tolist() == [11, 9]
    masks, _ = calls_of(lambda x, cache: module(x, cache=cache)[0], more, cache)
    assert masks == [MaskSpec(intervals=1)]
    assert calls_of(lambda x, cache: module(x, cache=cache)[0], more[:, :1], cache)[0] == []


def test_a_query_that_sees_nothing():
    """It has 0 and no gradient."""
    q, k, v = normal(0, 2, 11, 4, 8), normal(1, 2, 11, 2, 8), normal(2, 2, 11, 2, 8)
    mask = jnp.arange(11)[:, None] > 4
    y, pullback = jax.vjp(lambda *x: attend.attend(*x, mask=mask)[0], q, k, v)
    dq, *_ = pullback(jnp.ones_like(y))
    assert not y[:, :5].any() and y[:, 5:].all() and not dq[:, :5].any() and dq[:, 6:].any()


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
        (
            lambda: attend.attend(normal(0, 2, 11, 4, 8), *[normal(1, 2, 12, 2, 8)] * 2, segment_ids=SEGMENTS),
            "segment_ids are of 11 tokens, and there are 12 keys of another text",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
