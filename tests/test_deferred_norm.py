"""A norm that is not applied yet carries what it normalises: the chain is kept by value, and its loss is said."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.primitives import fallbacks
from tests.chain_cases import EPS, compare, mlp_arguments, normal, plain_mlp, rms_norm
from tests.gemm_cases import assert_close

X = normal(0, 2, 5, 32)


def products(f, *arguments):
    """Names of the products in a function's program."""
    explained = coda.explain(f, *arguments)
    return sorted(product.epilogue for product, count in explained.products.items() for _ in range(count))


def sub_layers(wrap=lambda f: f, between=lambda norm: norm):
    """The gradient of two layers of which norm and what consumes it are called apart."""
    params = [mlp_arguments(jnp.float32)[1:]] * 2

    def loss(params, x):
        stream = coda.Stream(x)
        for scale, gate_up, down in params:
            normalized = between(coda.rms_norm(stream, scale, epsilon=EPS))
            stream = wrap(functools.partial(_consume, gate_up, down))(normalized)
        return jnp.sum(stream.x**2)

    return jax.grad(loss, (0, 1)), (params, mlp_arguments(jnp.float32)[0])


def _consume(gate_up, down, normalized):
    return coda.gated_mlp(normalized, gate_up, down)


def through_jit(f):
    return jax.jit(f)


def through_checkpoint(f):
    return jax.checkpoint(f)


def through_scan(f):
    def scanned(normalized):
        def step(normalized, _):
            stream = f(normalized)
            return coda.rms_norm(stream, normalized.scale, epsilon=normalized.epsilon), stream

        _, streams = jax.lax.scan(step, normalized, length=1)
        return jax.tree.map(lambda x: x[0], streams)

    return scanned


@pytest.mark.parametrize("wrap", [through_jit, through_checkpoint, through_scan])
def test_the_chain_goes_through_boundaries(wrap):
    """Half a sub-layer under jit, remat or a scan: the same values, from the same kinds of products."""
    plain, arguments = sub_layers()
    wrapped, _ = sub_layers(wrap)
    assert_close(jax.jit(wrapped)(*arguments), jax.jit(plain)(*arguments), rtol=1e-4)
    expected, found = (set(products(f, *arguments)) for f in (plain, wrapped))
    assert found == expected and {"gated_mlp_backward_0", "gated_mlp_backward_2"} <= found
    assert not coda.explain(wrapped, *arguments).notes


def test_the_chain_needs_no_identity():
    """A copy of the norm, leaf by leaf, is as good: x, its statistic and the residual are one value."""
    copied, arguments = sub_layers(between=lambda norm: jax.tree.map(lambda x: x + 0, norm))
    plain, _ = sub_layers()
    assert products(copied, *arguments) == products(plain, *arguments)


def test_another_residual():
    """Legal, right, and said once, with what it costs; without a residual nothing is said."""
    arguments = [*mlp_arguments(jnp.float32), normal(9, *mlp_arguments(jnp.float32)[0].shape)]

    def fused(x, scale, gate_up, down, other):
        return coda.gated_mlp(coda.rms_norm(x, scale, epsilon=EPS), gate_up, down, residual=other).x

    def plain(x, scale, gate_up, down, other):
        return plain_mlp(x, scale, gate_up, down) - x + other

    compare(fused, plain, arguments)
    compare(
        lambda x, scale, gate_up, down: (
            coda.gated_mlp(coda.rms_norm(x, scale, epsilon=EPS), gate_up, down, residual=False).x
        ),
        lambda x, scale, gate_up, down: plain_mlp(x, scale, gate_up, down) - x,
        arguments[:4],
    )


def test_a_residual_of_another_dtype():
    x, scale, gate_up, down = mlp_arguments(jnp.bfloat16)
    norm = coda.rms_norm(x, scale)
    other = jnp.ones(x.shape, jnp.float32)
    assert coda.gated_mlp(norm, gate_up, down, residual=other).dtype == jnp.float32
    assert (
        jax.grad(lambda other: coda.gated_mlp(norm, gate_up, down, residual=other).x.sum())(other).dtype == jnp.float32
    )


def test_a_note_is_an_identity():
    def f(x):
        return fallbacks.with_fallback_note(x, "here", "a reason").sum()

    x = normal(3, 4, 8)
    assert_close(jax.jit(jax.grad(f))(x), jnp.ones_like(x), rtol=0)
    assert_close(jax.vmap(lambda x: fallbacks.with_fallback_note(x, "here", "a reason"))(x), x, rtol=0)
    with jax.disable_jit():
        assert_close(fallbacks.with_fallback_note(x, "here", "a reason"), x, rtol=0)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(fallbacks.with_fallback_note(x, "here", "a reason"), "data"),
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P(),
    )
    assert_close(jax.jit(summed)(x), x.sum(0, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_of_norms(dtype):
    x, scale, bias = (16 + 2 * normal(0, 9, 24)).astype(dtype), normal(1, 24), normal(2, 24)
    got, want = coda.rms_norm(x, scale, epsilon=EPS).array(), rms_norm(x, scale)
    assert got.dtype == dtype
    rtol = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(*(y.astype(jnp.float32) for y in (got, want)), rtol=rtol)
    wide = np.asarray(x, np.float64)
    wide = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + EPS)
    got = coda.layer_norm(x, scale, bias, epsilon=EPS).array()
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got.astype(jnp.float32), wide * scale + bias, rtol=1e-2, atol=0.03 if dtype != jnp.float32 else 1e-4
    )


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: coda.mlp(X, X[0], X[0]), TypeError, r"mlp: norm is \w+; it must be a DeferredNorm, as coda.rms_norm"),
        (lambda: coda.rms_norm(X, jnp.ones(31)), ValueError, r"rms_norm: scale has shape \(31,\); .* must be \(32,\)"),
        (lambda: jnp.sin(coda.rms_norm(X, jnp.ones(32))), TypeError, r"got a DeferredNorm of shape \(2, 5, 32\)"),
        (lambda: coda.gated("silu"), TypeError, "gated: activation = 'silu'; it must be a function"),
        (
            lambda: coda.gated(lambda gate, up: gate * up),
            TypeError,
            r"gated: activation = <lambda> cannot be called with one array, the gate; .* wants of_both=True",
        ),
        (
            lambda: coda.gated(jnp.tanh, of_both=True),
            TypeError,
            r"gated: activation = tanh cannot be called with two arrays, gate and up; with of_both=True",
        ),
        (lambda: coda.gated(coda.gated(jnp.tanh)), TypeError, "it must be a function, and not gated itself"),
        (
            lambda: coda.qkv_projection(
                coda.layer_norm(X, jnp.ones(32)),
                jnp.ones((32, 96)),
                *[jnp.ones((5, 16))] * 2,
                num_heads=1,
                num_kv_heads=1,
            ),
            ValueError,
            "norm is a LayerNorm; it must be an RMSNorm",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(call, error, message):
    with pytest.raises(error, match=message):
        call()


REPLACES = [dataclasses.replace, *([copy.replace] if hasattr(copy, "replace") else [])]


@pytest.mark.parametrize("replace", REPLACES)
def test_a_stream_with_another_x_has_not_the_old_statistic(replace):
    stream = coda.Stream(X).with_statistic()
    scale = jnp.ones(X.shape[-1])
    halved = replace(stream, x=0.5 * stream.x)
    assert halved.sumsq is None
    np.testing.assert_allclose(coda.rms_norm(halved, scale).array(), coda.rms_norm(0.5 * X, scale).array(), rtol=1e-6)
    given = jnp.ones(X.shape[:-1])
    assert replace(stream, x=0.5 * stream.x, sumsq=given).sumsq is given
    assert replace(stream, sumsq=given).sumsq is given and replace(stream, sumsq=None).sumsq is None
    assert replace(stream).sumsq is stream.sumsq and replace(stream, x=stream.x).sumsq is stream.sumsq
    assert jax.jit(lambda s: replace(s, x=s.x + 1))(stream).sumsq is None


@pytest.mark.parametrize("replace", REPLACES)
@pytest.mark.parametrize("make", [coda.rms_norm, coda.layer_norm])
def test_a_norm_of_another_x_is_refused(replace, make):
    norm = make(X, jnp.ones(X.shape[-1]))
    with pytest.raises(ValueError, match=r"x replaced, and sumsq.* not, .*make the norm anew with coda.rms_norm"):
        replace(norm, x=0.5 * norm.x)
    assert replace(norm, epsilon=1.0, scale=2 * norm.scale).sumsq is norm.sumsq
    same = norm.with_array(norm.x.astype(jnp.bfloat16))
    assert same.dtype == jnp.bfloat16 and (same.sumsq is norm.sumsq) and (same.mean is norm.mean)
    other = make(0.5 * X, norm.scale)
    again = replace(norm, x=other.x, sumsq=other.sumsq, mean=other.mean)
    np.testing.assert_array_equal(again.array(), other.array())
    if norm.mean is not None:
        with pytest.raises(ValueError, match=r"x replaced, and mean not"):
            replace(norm, x=other.x, sumsq=other.sumsq)
        with pytest.raises(ValueError, match=r"mean replaced, and sumsq not"):
            replace(norm, mean=None)


@pytest.mark.parametrize(
    "through",
    [
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        jax.jit(lambda x: x),
        jax.lax.optimization_barrier,
        jax.vmap(lambda x: x),
        lambda x: jax.tree.map(lambda leaf: leaf, x),
        lambda x: jax.lax.scan(lambda x, _: (x, None), x, length=2)[0],
        lambda x: jax.vjp(lambda x: x, x)[1](x)[0],
    ],
)
def test_copies_keep_the_statistic(through):
    stream = coda.Stream(normal(0, 32, 32)).with_statistic()
    norm = coda.layer_norm(stream, jnp.ones(32))
    jax.tree.map(np.testing.assert_array_equal, through((stream, norm)), (stream, norm))


def test_a_statistic_that_a_map_of_the_leaves_has_cast_is_computed_again():
    stream = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), coda.Stream(X).with_statistic())
    rstd = coda.rms_norm(stream, jnp.ones(X.shape[-1])).rstd()
    np.testing.assert_array_equal(rstd, coda.rms_norm(stream.x, jnp.ones(X.shape[-1])).rstd())


STREAM = coda.Stream(X)
NORMS = (coda.rms_norm(X, jnp.ones(32)), coda.layer_norm(X, jnp.ones(32)))


@pytest.mark.parametrize("value", [STREAM, STREAM.with_statistic(), *NORMS])
def test_pytrees(value):
    """As jax.tree_util.register_dataclass would register them."""
    leaves, structure = jax.tree.flatten(value)
    doubled = jax.tree.map(lambda x: 2 * x, value)
    assert type(doubled) is type(value) and jax.tree.structure(doubled) == structure
    np.testing.assert_array_equal(doubled.x, 2 * X)
    assert getattr(doubled, "epsilon", None) == getattr(value, "epsilon", None)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    assert paths == [f".{n}" for n in ("x", "sumsq", "scale", "mean", "bias") if getattr(value, n, None) is not None]
    assert len(leaves) == len(paths)
    assert jax.tree.structure(pickle.loads(pickle.dumps(value))) == structure
    assert jax.jit(lambda x: x)(value).array().shape == X.shape
    assert jax.tree.structure(coda.rms_norm(X, jnp.ones(32), epsilon=1.0)) != structure


@pytest.mark.parametrize("value", [STREAM, *NORMS], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "function",
    [
        nnx.Linear(32, 4, rngs=nnx.Rngs(0)),
        nnx.Linear(32, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(32, rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        layers.Linear(32, 4, rngs=nnx.Rngs(0)),
        layers.LayerNorm(32, rngs=nnx.Rngs(0)),
        layers.LMHead(32, 4, rngs=nnx.Rngs(0)),
        layers.MoE(32, 8, 4, 2, rngs=nnx.Rngs(0)),
        layers.LlamaBlock(32, 48, 2, rngs=nnx.Rngs(0)),
        jnp.asarray,
        np.asarray,
    ],
    ids=lambda f: f"{type(f).__module__}.{type(f).__name__}" if isinstance(f, nnx.Module) else f.__name__,
)
def test_streams_as_arrays_are_refused_with_a_hint(function, value):
    with pytest.raises(TypeError, match=rf"{type(value).__name__}.*\.array\(\)"):
        function(value)
    function(value.array())


def test_a_stream_s_array_and_text():
    assert STREAM.array() is STREAM.x
    assert repr(STREAM) == "Stream(x=float32[2,5,32], sumsq=None; its array is .array())"
    assert "epsilon=1e-06" in repr(NORMS[0])


@pytest.mark.parametrize("loop", [jax.lax.scan, jax.lax.fori_loop])
def test_a_carry_without_statistic(loop):
    """JAX's message names the way out."""

    def layer(stream):
        return coda.project(stream, jnp.ones((32, 32)), residual=stream)

    with pytest.raises(TypeError, match=r"sumsq \(absent: Stream\.with_statistic\(\) computes it\) is a .*NoneType"):
        if loop is jax.lax.scan:
            loop(lambda s, _: (layer(s), None), STREAM, length=2)
        else:
            loop(0, 2, lambda _, s: layer(s), STREAM)
