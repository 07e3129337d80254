"""Scores of attention: scale, soft cap, bias, windows, in blocks of queries too; and attention to another text."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.attend import blocks
from flax_layers.attend import attend
from tests.chain_cases import normal
from tests.layer_checks import state_dict

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, T, H, KV, DH, D = 2, 13, 4, 2, 8, 24
Q, K, V = normal(0, B, T, H, DH), normal(1, B, T, KV, DH), normal(2, B, T, KV, DH)
BIAS = normal(3, H, T, T)
MASK = jax.random.bernoulli(jax.random.key(4), 0.7, (B, 1, T, T)) | jnp.eye(T, dtype=bool)


def plain(q, k, v, *, scale=None, cap=None, bias=None, mask=None, window=None, is_causal=True):
    k, v = (jnp.repeat(y, H // KV, axis=2) for y in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (DH**-0.5 if scale is None else scale)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    age = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = (age >= 0) | (not is_causal)
    seen = seen if window is None else seen & (age < window)
    seen = seen if mask is None else seen & mask
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)


def with_gradients(f, *arrays):
    return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), tuple(range(len(arrays))))(*arrays)


def assert_same(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got, wanted)


def in_blocks_of(rows, monkeypatch):
    """Blocks have no more than so many queries."""
    for name in ("_MOST_BYTES", "_MOST_CPU_BYTES"):
        monkeypatch.setattr(blocks, name, 1)
    monkeypatch.setattr(blocks, "_LEAST_ROWS", rows)
    jax.clear_caches()  # they are not arguments of what is jitted


@pytest.mark.smoke
@pytest.mark.parametrize("is_in_blocks", [False, True])
@pytest.mark.parametrize("window, has_bias, has_mask", [*itertools.product([None, 4], [False, True], [False, True])])
def test_soft_caps(is_in_blocks, window, has_bias, has_mask, monkeypatch):
    """In one block of queries or several, of which the last is shorter."""
    in_blocks_of(5 if is_in_blocks else T, monkeypatch)
    given = {"bias": BIAS if has_bias else None, "mask": MASK if has_mask else None}
    wanted = with_gradients(lambda *x: plain(*x, scale=0.5, cap=2.0, window=window, **given), Q, K, V)
    options = {"scale": 0.5, "soft_cap": 2.0, "sliding_window": window, **given}
    assert_same(with_gradients(lambda *x: attend(*x, **options)[0], Q, K, V), wanted)


def test_no_array_of_all_scores(monkeypatch):
    """Neither forward nor backward, where one block would take too much."""
    in_blocks_of(3, monkeypatch)
    step = jax.grad(lambda q: jnp.sum(attend(q, K, V, soft_cap=2.0)[0] ** 2))
    shapes = re.findall(r"tensor<((?:\d+x)+)f32>", jax.jit(step).lower(Q).as_text())
    sizes = {math.prod(map(int, shape.split("x")[:-1])) for shape in shapes}
    assert B * H * 3 * T in sizes and max(sizes) < B * H * T * T


@pytest.mark.parametrize("has_batch", [True, False])
def test_scale_and_bias_without_a_cap(has_batch):
    arrays = (Q, K, V) if has_batch else (Q[0], K[0], V[0])
    wanted = with_gradients(lambda q, k, v, bias: plain(q, k, v, scale=0.3, bias=bias), Q[:1], K[:1], V[:1], BIAS)
    if has_batch:
        wanted = with_gradients(lambda q, k, v, bias: plain(q, k, v, scale=0.3, bias=bias), Q, K, V, BIAS)
    got = with_gradients(lambda q, k, v, bias: attend(q, k, v, scale=0.3, bias=bias)[0], *arrays, BIAS)
    assert_same(jax.tree.map(jnp.ravel, got), jax.tree.map(jnp.ravel, wanted))


def test_a_layer_of_scale_cap_and_bias():
    """In a block, with a gradient of the bias; the same layer by a function that takes them."""
    seen = []

    def own(q, k, v, *, mask, is_causal, local_window_size, scale, soft_cap, bias):
        seen.append((scale, soft_cap, bias.shape))
        return plain(q, k, v, scale=scale, cap=soft_cap, bias=bias, mask=mask)

    options = {"num_kv_heads": KV, "head_dim": DH, "qk_norm": True}
    layer = layers.Attention(D, H, scale=0.4, soft_cap=1.5, qk_scale_offset=1.0, **options, rngs=nnx.Rngs(0))
    options |= {"scale": 0.4, "soft_cap": 1.5, "qk_scale_offset": 1.0}
    by_function = layers.Attention(D, H, **options, implementation=own, rngs=nnx.Rngs(0))
    x = normal(5, B, T, D)
    got = with_gradients(lambda x, bias: layer(x, bias=bias), x, BIAS)
    assert_same(got, with_gradients(lambda x, bias: by_function(x, bias=bias), x, BIAS))
    assert seen[0] == (0.4, 1.5, (1, H, T, T)) and float(jnp.abs(got[1][1]).max()) > 1e-4


def test_bad_attention_arguments_are_refused():
    with pytest.raises(ValueError, match=r"bias has shape \(3, 13, 13\)"):
        attend(Q, K, V, bias=BIAS[:3])
    for make in (lambda **of: attend(Q, K, V, **of), lambda **of: layers.Attention(D, H, **of, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match="cuDNN's attention by JAX has none"):
            make(soft_cap=2.0, implementation="cudnn")
        with pytest.raises(ValueError, match="implementation='flash' must be None, 'xla', 'cudnn' or a function"):
            make(soft_cap=2.0, implementation="flash")
    layer = layers.CrossAttention(D, H, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"context \(1, 5, 24\) beside x \(2, 13, 24\)"):
        layer(normal(0, B, T, D), normal(1, 1, 5, D))
    with pytest.raises(ValueError, match=r"context \(5, 24\) beside x \(2, 13, 24\); they must be \(B, S, C\)"):
        layer(normal(0, B, T, D), normal(1, 5, D))
    with pytest.raises(ValueError, match=r"context \(24,\) beside x \(24,\); they must be"):
        layer(normal(0, D), normal(1, D))
    with pytest.raises(
        ValueError, match=r"^context has shape \(2, 5, 16\); its last axis must be context_features=24$"
    ):
        layer(normal(0, B, T, D), normal(1, B, 5, 16))
    of_others = layers.CrossAttention(D, H, context_features=16, rngs=nnx.Rngs(0))
    norm = layers.RMSNorm(16, rngs=nnx.Rngs(1))
    for x in (normal(0, B, T, 16), norm(normal(0, B, T, 16))):
        with pytest.raises(ValueError, match=r"^x has shape \(2, 13, 16\); its last axis must be in_features=24$"):
            of_others(x, normal(1, B, 5, 16))
    with pytest.raises(
        ValueError, match=r"^context has shape \(2, 5, 24\); its last axis must be context_features=16$"
    ):
        of_others(normal(0, B, T, D), normal(1, B, 5, D))


def test_a_mask_is_boolean_and_a_bias_floats():
    run = layers.Attention(D, H, head_dim=DH, rngs=nnx.Rngs(0))
    x = normal(0, B, T, D)
    with pytest.raises(TypeError, match=r"mask is float32; it must be boolean, True where a query sees a key"):
        run(x, mask=jnp.ones((T, T)))
    with pytest.raises(TypeError, match=r"bias is bool; it must be floats, which are added to the scores"):
        run(x, bias=jnp.ones((T, T), bool))
    with pytest.raises(TypeError, match=r"mask is int32; it must be boolean"):
        attend(Q, K, V, mask=jnp.ones((T, T), jnp.int32))


def cross(options, x, context, p, *, mask=None, bias=None):
    """The same in plain jnp, of a layer's parameters."""
    heads = lambda y: y.reshape(*y.shape[:-1], -1, DH)  # noqa: E731
    q, k, v = (
        heads(y @ p[name]["kernel"] + p[name]["bias"])
        for name, y in (("query", x), ("key", context), ("value", context))
    )
    if options.get("qk_norm"):
        unit = lambda y, scale: y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale  # noqa: E731
        q, k = unit(q, p["q_norm"]["scale"]), unit(k, p["k_norm"]["scale"])
    y = plain(q, k, v, mask=mask, bias=bias, is_causal=False)
    return y.reshape(*x.shape[:-1], -1) @ p["out"]["kernel"] + p["out"]["bias"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_cross_attention(qk_norm):
    """To a text of another length and width, with padding and a bias."""
    layer = layers.CrossAttention(
        D,
        H,
        context_features=16,
        num_kv_heads=KV,
        head_dim=DH,
        qk_norm=qk_norm,
        epsilon=1e-6,
        use_bias=True,
        use_out_bias=True,
        scale=None,
        soft_cap=None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        kernel_init=nnx.initializers.normal(0.3),
        implementation="xla",
        rngs=nnx.Rngs(0),
    )
    x, context, bias = normal(0, B, T, D), normal(1, B, 7, 16), normal(2, H, T, 7)
    mask = jnp.arange(7) < jnp.array([7, 4])[:, None, None, None]
    graphdef, state = nnx.split(layer)

    def ours(state, x, context, bias):
        return x + nnx.merge(graphdef, state)(x, context, mask=mask, bias=bias)

    def theirs(p, x, context, bias):
        return x + cross({"qk_norm": qk_norm}, x, context, p, mask=mask, bias=bias)

    value, gradients = with_gradients(ours, state, x, context, bias)
    wanted, expected = with_gradients(theirs, state_dict(state), x, context, bias)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert_same((nnx.to_pure_dict(gradients[0]), *gradients[1:]), expected)


def test_cross_attention_behind_a_norm():
    layer, norm = layers.CrossAttention(D, H, rngs=nnx.Rngs(0)), layers.RMSNorm(D, rngs=nnx.Rngs(1))
    x, context = normal(0, B, T, D), normal(1, B, 5, D)
    whole = coda.fuse(lambda x: x + layer(norm(x), context))
    np.testing.assert_allclose(whole(x), x + layer(norm(x), context), atol=1e-5)
    np.testing.assert_allclose(layer(x[0], context[0]), layer(x, context)[0], atol=1e-5)
