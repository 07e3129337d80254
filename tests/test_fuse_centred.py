"""`coda.fuse` of variances by two passes: centred elements sum to 0, so that no gradient of the mean is summed."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
D, F = 128, 256


def rstd(variance):
    return jax.lax.rsqrt(variance + 1e-5)


def by_two_passes(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * rstd(jnp.mean(centred * centred, axis=-1, keepdims=True))


def by_two_differences(x):
    mean = jnp.mean(x, axis=-1)
    variance = jnp.mean(jnp.square(x - jnp.expand_dims(mean, -1)), axis=-1)
    return (x - mean[..., None]) * rstd(variance[..., None])


def by_var(x):
    return (x - x.mean(-1, keepdims=True)) * rstd(jnp.var(x, axis=-1, keepdims=True))


def by_power(x):
    centred = x - jnp.sum(x, axis=-1, keepdims=True) * (1 / x.shape[-1])
    return centred * rstd(jnp.mean(centred**2, axis=-1, keepdims=True))


def by_nnx(x, is_fast=False):
    norm = nnx.LayerNorm(D, use_fast_variance=is_fast, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
    return norm(x)


def by_linen(x):
    norm = nn.LayerNorm(use_fast_variance=False, use_bias=False, use_scale=False)
    return norm.apply({}, x)


def in_one_pass(x):
    return by_nnx(x, is_fast=True)


SPELLINGS = (by_two_passes, by_two_differences, by_var, by_power, by_nnx, by_linen)
IN_16_BITS = (jnp.bfloat16, jnp.float16)


def gradients(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


DOORS = {
    "grad(fuse)": lambda loss: gradients(coda.fuse(loss)),
    "fuse(grad)": lambda loss: coda.fuse(gradients(loss)),
}


def block(normalised):
    """The loss of a block with LayerNorms in front of its two MLPs, the second in a checkpoint."""

    def layer(w, x):
        h = (normalised(x.astype(jnp.float32)) * w["scale"] + w["bias"]).astype(x.dtype)
        return x + jax.nn.gelu(h @ w["up"]) @ w["down"]

    def loss(w, x):
        return jnp.mean(jnp.square(jax.checkpoint(layer)(w, layer(w, x)).astype(jnp.float32)))

    return loss


def arguments(dtype, rows=(2, 24)):
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"up": jax.random.normal(keys[0], (D, F)) / 12, "down": jax.random.normal(keys[1], (F, D)) / 16}
    w |= {"scale": jnp.linspace(0.5, 1.5, D), "bias": jnp.linspace(-1, 1, D)}
    return jax.tree.map(lambda x: x.astype(dtype), (w, 3 + jax.random.normal(keys[2], (*rows, D))))


def errors(found, exact):
    """The largest error, each array's relative to its own norm or to a hundredth of the largest."""
    found, exact = ([np.asarray(x, np.float64) for x in jax.tree.leaves(each)] for each in (found, exact))
    least = 1e-2 * max(map(np.linalg.norm, exact))
    return max(np.linalg.norm(x - y) / max(np.linalg.norm(y), least) for x, y in zip(found, exact, strict=True))


def check(loss, args, bound=1e-5):
    """Both doors have the values and gradients of plain JAX."""
    plain = jax.jit(gradients(loss))(*args)
    for door in DOORS.values():
        assert errors(jax.jit(door(loss))(*args), plain) < bound


@pytest.mark.smoke
@pytest.mark.parametrize(
    "normalised, dtype",
    [*((f, jnp.float32) for f in SPELLINGS), *((f, dtype) for f in (by_two_passes, by_var) for dtype in IN_16_BITS)],
)
def test_values_and_gradients(normalised, dtype):
    loss, args = block(normalised), arguments(dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    exact = jax.jit(gradients(loss))(*wide)
    own = errors(jax.jit(gradients(loss))(*args), exact)
    for door in DOORS.values():
        assert errors(jax.jit(door(loss))(*args), exact) < 1.5 * own + 1e-5


def by_rms(x):
    return x * rstd(jnp.mean(x * x, axis=-1, keepdims=True))


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 3e-6), (jnp.float64, 1e-13)])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("normalised", [by_two_passes, by_var, by_rms])
def test_second_derivatives(normalised, door, dtype, bound):
    """A product of the Hessian with a vector; the norms stand without a cast, so that float64 stays."""

    def layer(w, x):
        return x + jnp.tanh((normalised(x) * w["scale"] + w["bias"]) @ w["up"]) @ w["down"]

    def loss(w, x):
        return jnp.mean(jnp.square(layer(w, layer(w, x))))

    def of_gradient(f):
        def along(args, direction):
            _, gradient = f(*args)
            return sum(map(jnp.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))

        return jax.jit(jax.grad(along))

    with jax.enable_x64(dtype == jnp.float64):
        args = arguments(dtype)
        direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=dtype)).reshape(x.shape), args)
        expected = of_gradient(gradients(loss))(args, direction)
        assert errors(of_gradient(DOORS[door](loss))(args, direction), expected) < bound


def moved(f, dtype):
    """Bytes of passes of XLA's, and kept bytes."""
    args = jax.eval_shape(lambda: arguments(dtype, (2, 512)))
    totals = coda.explain(f, *args, platform="cuda").totals
    return totals.passes_bytes, totals.kept_bytes


@pytest.mark.smoke
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", IN_16_BITS)
@pytest.mark.parametrize("normalised", SPELLINGS)
def test_the_second_pass_reads_the_stream_and_does_no_more(normalised, dtype, door):
    """The norms' forward passes read the stream once more than a variance by one pass does, and no other pass does."""
    (fast, kept_by_fast), (found, kept) = (moved(DOORS[door](block(f)), dtype) for f in (in_one_pass, normalised))
    stream = 2 * 512 * D * 2
    norms = 3  # one is in a checkpoint, which runs twice
    vectors = 2**16
    assert found <= fast + norms * stream + vectors
    assert kept <= kept_by_fast + vectors


def product(w, x):
    return x @ w["up"]


def of_a_mean_that_is_read_elsewhere(w, x):
    y = product(w, x)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    centred = y - mean
    return jnp.mean(jnp.mean(centred * centred, axis=-1) * mean[..., 0] ** 2) + jnp.mean(jnp.abs(centred))


def of_another_mean(w, x):
    y = product(w, x)
    centred = y - jnp.mean(y * y, axis=-1, keepdims=True)
    return jnp.mean(jnp.sum(centred * centred, axis=-1) ** 2)


def of_half_a_mean(w, x):
    y = product(w, x)
    centred = y - jnp.sum(y, axis=-1, keepdims=True) / (F // 2)
    return jnp.mean(jnp.sum(centred * centred, axis=-1) ** 2)


def along_other_axes(w, x):
    y = product(w, x)
    centred = y - jnp.mean(y, axis=-1, keepdims=True)
    return jnp.mean(jnp.sum(centred * centred, axis=1) ** 2) + jnp.sum(jnp.sum(centred, axis=1) ** 2)


def of_turned_means(w, x):
    y = product(w, x[:, :2])[..., :2]  # (2, 2, 2)
    centred = y - jnp.mean(y, axis=-1)[None]
    return jnp.mean(jnp.sum(centred * centred, axis=-1) ** 2)


def of_third_powers(w, x):
    y = product(w, x)
    return jnp.mean(jnp.sum((y - jnp.mean(y, axis=-1, keepdims=True)) ** 3, axis=-1) ** 2)


def of_two_variances(w, x):
    y = product(w, x)
    centred = y - jnp.mean(y, axis=-1, keepdims=True)
    other = jnp.tanh(centred) - jnp.mean(jnp.tanh(centred), axis=-1, keepdims=True)
    return jnp.mean(jnp.sum(centred * centred, axis=-1) * jnp.sum(other * other, axis=-1))


def of_groups(w, x):
    y = product(w, x).reshape(2, 24, 4, F // 4)
    centred = y - jnp.mean(y, axis=(-2, -1), keepdims=True)
    return jnp.mean(jnp.square(centred * rstd(jnp.mean(centred * centred, axis=(-2, -1), keepdims=True))) * y)


def of_what_is_zero(w, x):
    y = product(w, x)
    centred = y - jnp.mean(y, axis=-1, keepdims=True)
    sums = jnp.sum(-2 * centred * jnp.max(y, axis=-1, keepdims=True), axis=-1)
    return jnp.mean(jnp.square(y[..., 0] + sums)) + jnp.mean(jnp.sum(y - centred, axis=-1) ** 2)


OTHERS = (
    of_a_mean_that_is_read_elsewhere,
    of_another_mean,
    of_half_a_mean,
    along_other_axes,
    of_turned_means,
    of_third_powers,
    of_two_variances,
    of_groups,
    of_what_is_zero,
)


@pytest.mark.parametrize("f", OTHERS)
def test_other_sums_and_means(f):
    check(f, arguments(jnp.float32), bound=3e-5)


def test_a_mean_that_is_rounded_is_none():
    """Elements less a mean of few bits do not sum to 0: the gradient is that of the function."""

    def loss(w, x):
        y = product(w, x).astype(jnp.float32)
        centred = y - jnp.mean(y, axis=-1, keepdims=True).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return jnp.mean(jnp.sum(centred * centred, axis=-1) ** 2)

    check(loss, arguments(jnp.float32), bound=2e-5)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
def test_over_a_mesh(kind, door):
    loss, (w, x) = block(by_var), arguments(jnp.float32, (8, 24))
    expected = jax.jit(gradients(loss))(w, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto if kind == "Manual" else AxisType[kind],))
    f = DOORS[door](loss)
    if kind == "Manual":
        sum_over = functools.partial(jax.tree.map, lambda x: jax.lax.pmean(x, "data"))

        def of_shards(w, x):
            value, (dw, dx) = f(jax.lax.pcast(w, "data", to="varying"), x)
            return sum_over(value), (sum_over(dw), dx / 8)

        specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), (jax.P(), jax.P("data")))}
        found = jax.jit(jax.shard_map(of_shards, mesh=mesh, **specs))(w, x)
    else:
        with jax.set_mesh(mesh):
            found = jax.jit(f)(w, jax.device_put(x, NamedSharding(mesh, jax.P("data"))))
    assert errors(found, expected) < 1e-5
