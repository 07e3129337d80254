"""The chains of either norm with biases: outputs and every cotangent against the textbook, under transformations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.lab.machine_code import resource_usage
from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from tests.chain_cases import EPS, compare, normal, rms_norm, squares
from tests.gemm_cases import assert_close, jit, total

WIDTH, HIDDEN = 40, 56


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


gelu_exact = functools.partial(jax.nn.gelu, approximate=False)


def layer_norm(x, scale, bias):
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS)
    return (y * scale.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)


def arguments(dtype, lead=(33,), layer=True, data=lambda x: x):
    """x, the norm's scale and bias, kernel up, its bias, kernel down, its bias."""
    norm = [1 + 0.3 * normal(1, WIDTH), 0.3 * normal(4, WIDTH)][: 1 + layer]
    up, down = normal(2, WIDTH, HIDDEN) / WIDTH**0.5, normal(3, HIDDEN, WIDTH) / HIDDEN**0.5
    arrays = [data(normal(0, *lead, WIDTH)), *norm, up, normal(5, HIDDEN), down, normal(6, WIDTH)]
    return [array.astype(dtype) for array in arrays]


def plain_layer(x, scale, norm_bias, up, up_bias, down, down_bias, activation=jax.nn.gelu):
    return x + (activation(layer_norm(x, scale, norm_bias) @ up + up_bias) @ down + down_bias)


def plain_rms(x, scale, up, up_bias, down, down_bias, activation=jax.nn.gelu):
    return x + (activation(rms_norm(x, scale) @ up + up_bias) @ down + down_bias)


def layer(x, scale, norm_bias, up, up_bias, down, down_bias, **options):
    norm = coda.layer_norm(x, scale, norm_bias, epsilon=EPS)
    y = coda.mlp(norm, up, down, up_bias=up_bias, down_bias=down_bias, **options)
    assert y.sumsq is None
    return y.x


def rms(x, scale, up, up_bias, down, down_bias, **options):
    norm = coda.rms_norm(x, scale, epsilon=EPS)
    return coda.mlp(norm, up, down, up_bias=up_bias, down_bias=down_bias, **options).x


def projection(x, scale, norm_bias, kernel, bias, **options):
    return coda.norm_projection(coda.layer_norm(x, scale, norm_bias, epsilon=EPS), kernel, bias, **options)


def plain_projection(x, scale, norm_bias, kernel, bias):
    return layer_norm(x, scale, norm_bias) @ kernel + bias


def projection_arguments(dtype, lead=(3, 11), data=lambda x: x):
    return arguments(dtype, lead, data=data)[:5]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "activation, dtype",
    [
        (jax.nn.gelu, jnp.float32),
        (jax.nn.gelu, jnp.bfloat16),
        (jax.nn.gelu, jnp.float16),
        (gelu_exact, jnp.bfloat16),
        (squared_relu, jnp.float32),
    ],
    ids=["tanh-float32", "tanh-bfloat16", "tanh-float16", "exact-bfloat16", "relu2-float32"],
)
def test_mlp_of_a_layer_norm(activation, dtype):
    plain = functools.partial(plain_layer, activation=activation)
    compare(functools.partial(layer, activation=activation), plain, arguments(dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mlp_of_an_rms_norm(dtype):
    compare(rms, plain_rms, arguments(dtype, layer=False))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_projection_of_a_layer_norm(dtype):
    compare(projection, plain_projection, projection_arguments(dtype))


CHAINS = {
    "layer": (layer, plain_layer, arguments),
    "rms": (rms, plain_rms, functools.partial(arguments, layer=False)),
    "projection": (projection, plain_projection, projection_arguments),
}
chains = pytest.mark.parametrize("chain, plain, make", CHAINS.values(), ids=CHAINS)


# In float32 the deferred mean costs log2(mean / std) bits of the accumulator, in 16 bits nothing.
@pytest.mark.parametrize(
    "data, dtype",
    [
        (lambda x: x + 16, jnp.bfloat16),
        (lambda x: x + 16, jnp.float16),
        (lambda x: x.at[..., 3].mul(100), jnp.bfloat16),
    ],
    ids=["mean-bfloat16", "mean-float16", "channel-bfloat16"],
)
@chains
def test_large_means_and_a_large_channel(chain, plain, make, data, dtype):
    compare(chain, plain, make(dtype, data=data))


def test_optional_arrays(dtype=jnp.bfloat16):
    """LayerNorm without biases, and a projection of an RMSNorm with one."""
    x, scale, _, up, _, down, _ = arguments(dtype)

    def bare(x, scale, up, down):
        return coda.mlp(coda.layer_norm(x, scale, epsilon=EPS), up, down).x

    compare(
        bare,
        lambda x, scale, up, down: x + jax.nn.gelu(layer_norm(x, scale, jnp.zeros_like(scale)) @ up) @ down,
        [x, scale, up, down],
    )
    compare(
        lambda x, scale, up, bias: coda.norm_projection(coda.rms_norm(x, scale, epsilon=EPS), up, bias),
        lambda x, scale, up, bias: rms_norm(x, scale) @ up + bias,
        [x, scale, up, normal(5, HIDDEN).astype(dtype)],
    )


def test_the_statistic_of_the_result():
    x, scale, up, _, down, _ = arguments(jnp.bfloat16, (2, 5), layer=False)
    y = coda.mlp(coda.rms_norm(x, scale, epsilon=EPS), up, down)
    assert y.shape == x.shape and y.sumsq.shape == (2, 5) and y.sumsq.dtype == jnp.float32
    np.testing.assert_allclose(y.sumsq, squares(y.x), rtol=1e-2)  # of the values before they are rounded


@chains
def test_parameters_and_stream_keep_their_dtypes(chain, plain, make):
    """Compute in bfloat16, parameters and stream float32: their gradients leave the products in float32."""
    everything = make(jnp.float32)
    numbers = range(len(everything))
    chain = functools.partial(chain, dtype=jnp.bfloat16)
    gradients = jit(jax.grad(lambda *a: total(chain(*a)), numbers))(*everything)
    exact = jit(jax.grad(lambda *a: total(plain(*a)), numbers))(*everything)
    for got, want in zip(gradients, exact, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))
        assert not (got.astype(jnp.bfloat16) == got).all()  # never rounded to bfloat16


@pytest.mark.parametrize("chain, plain, make", [CHAINS["layer"], CHAINS["projection"]], ids=["layer", "projection"])
def test_vmap_checkpoint_and_second_derivatives(chain, plain, make):
    x, *parameters = make(jnp.float32, (2, 3, 5))
    numbers = range(1 + len(parameters))

    def value(f):
        return lambda *a: total(f(*a))

    def summed_gradient(f):
        return lambda *a: total([jnp.sin(g) for g in jax.grad(value(f), numbers)(*a)])

    def mapped(f):
        return jax.vmap(jax.grad(value(f), numbers), (0, *[None] * len(parameters)))

    for transform in (
        mapped,
        lambda f: jax.grad(value(jax.checkpoint(f)), numbers),
        lambda f: jax.grad(summed_gradient(f)),
    ):
        got, want = (jit(transform(f))(x, *parameters) for f in (chain, plain))
        assert_close(got, want, rtol=2e-4)


@pytest.mark.parametrize("chain, plain, make", [CHAINS["layer"], CHAINS["projection"]], ids=["layer", "projection"])
@pytest.mark.slow
def test_data_parallel_gradient(chain, plain, make):
    """Under shard_map, and over an explicit mesh axis, a replicated parameter's gradient is summed over the shards."""
    x, *parameters = make(jnp.float32, (8, 5))
    numbers = range(1 + len(parameters))

    def gradient(f, x, axis=None):
        return jax.grad(lambda *a: total(f(*a)) if axis is None else jax.lax.psum(total(f(*a)), axis), numbers)(
            x, *parameters
        )

    want = jit(functools.partial(gradient, plain))(x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        got = jit(functools.partial(gradient, chain))(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
    assert jax.typeof(got[0]).sharding.spec == jax.P("data", None, None)
    assert_close(got, want, rtol=1e-4)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("data"), *[jax.P()] * len(parameters))

    def sharded(f):
        def of_shard(x, *parameters):
            return jax.grad(lambda *a: jax.lax.psum(total(f(*a)), "data"), numbers)(x, *parameters)

        return jit(jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=specs))(x, *parameters)

    assert_close(sharded(chain), sharded(plain), rtol=1e-4)


def test_no_pass_over_activations_between_the_kernels(monkeypatch):
    """Forward and backward of mlp are six products, and nothing else touches an activation; all fit the registers."""
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    x, scale, _, *parameters = arguments(jnp.bfloat16)
    sources = []
    monkeypatch.setattr(ffi, "compile_async", lambda source, name, arch: sources.append((source, name)))

    def gradient(cotangent, sumsq, x, scale, up, up_bias, down, down_bias):
        def chain(x, *rest):
            scale, up, up_bias, down = rest
            return coda.mlp(coda.DeferredNorm(x, sumsq, scale, epsilon=EPS), up, down, up_bias=up_bias).x

        y, pullback = jax.vjp(chain, x, scale, up, up_bias, down)
        return y, pullback(cotangent)

    traced = jit(gradient).trace(x, jnp.sum(x.astype(jnp.float32) ** 2, axis=-1), x, scale, *parameters)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    made = [line.strip() for line in text.splitlines() if any(f"-> tensor<33x{n}x" in line for n in (WIDTH, HIDDEN))]
    read = [line for line in made if len(re.findall(rf"{line.split(' ')[0]}\b", text)) > 1]
    assert all("custom_call" in line for line in read), read
    assert text.count("stablehlo.custom_call @coda_gemm") == len(sources) == 6
    spilled = {
        name: resource_usage(ffi.compile(source, name, SM90.target).log).spilled_bytes for source, name in sources
    }
    assert not any(spilled.values()), spilled


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mean": (5,)}, r"mlp: mean has shape \(5,\); beside x \(4, 8\) it must be \(4,\)"),
        ({"up_bias": (8,)}, r"mlp: up_bias has shape \(8,\); .* it must be \(16,\)"),
        ({"bias": (8,)}, r"mlp: the norm has a bias, which is LayerNorm's, and no mean"),
    ],
)
def test_errors_name_the_value_and_the_rule(options, message):
    x, sumsq, scale, up, down = map(jnp.ones, [(4, 8), (4,), (8,), (8, 16), (16, 8)])
    options = {name: jnp.ones(shape) for name, shape in options.items()}
    of_norm = {name: options.pop(name) for name in ("mean", "bias") if name in options}
    with pytest.raises(ValueError, match=message):
        coda.mlp(coda.DeferredNorm(x, sumsq, scale, **of_norm), up, down, **options)
