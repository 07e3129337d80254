"""A tile that is read beside what is reduced from it: each reader sees it as it is stored, in both doors and in blocks.

Plain JAX is the reference: there the array and its maximum are of the same numbers. A maximum of unrounded numbers
equals none of the rounded, and a difference from it may have the wrong sign.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, F = 64, 32, 48


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (M, D), (D, F), (F, D)
    scales = 1, D**-0.5, F**-0.5
    drawn = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return [(scale * x).astype(jnp.bfloat16) for scale, x in zip(scales, drawn, strict=True)]


def wide(x):
    return x.astype(jnp.float32)


def activation(x, w):  # rounded once, as an epilogue rounds it
    return jax.nn.silu(jnp.matmul(x, w, preferred_element_type=jnp.float32)).astype(jnp.bfloat16)


def highest(z):
    return z.max(-1, keepdims=True)


def gradient_of_a_maximum(z):
    return jnp.mean(wide(jnp.abs(z).max(-1)))


def equal_to_the_maximum(z):
    return jnp.sum(wide(jnp.where(z == highest(z), z, 0)))


def at_least_the_maximum(z):
    return jnp.sum(wide(z >= highest(z)) * wide(z))


def distance_from_the_minimum(z):
    return jnp.mean(jnp.sqrt(wide(z - z.min(-1, keepdims=True)) + 1e-3))


def divided_by_the_maximum(z):
    return jnp.mean(jnp.sqrt(1 - jnp.square(wide(z / highest(jnp.abs(z))))))


def maximum_of_columns(z):
    return jnp.sum(wide(jnp.where(z == z.max(0), z, 0)))


def maximum_of_heads(z):
    z = z.reshape(M, 3, -1)
    return jnp.sum(wide(jnp.where(z == highest(z), z, 0)))


def maximum_of_all(z):
    return jnp.sum(wide(jnp.where(z == z.max(), 2, 0)))


def softmax_of_maxima(z):
    return jnp.max(jnp.exp(wide(z - highest(z)))) + jnp.sum(jnp.exp(wide(z - highest(z))))


def counted(z):
    count = jnp.sum(wide(z > 0.5), -1, keepdims=True)
    return jnp.max(jnp.sum(wide(z > 0.5) / jnp.maximum(count, 1e-6), -1)) + jnp.sum(count)


def largest_four(z):
    return jnp.sum(wide(jnp.where(z >= jax.lax.top_k(z, 4)[0][:, -1:], z, 0)))


USES = [
    gradient_of_a_maximum,
    equal_to_the_maximum,
    at_least_the_maximum,
    distance_from_the_minimum,
    divided_by_the_maximum,
    maximum_of_columns,
    maximum_of_heads,
    maximum_of_all,
    softmax_of_maxima,
    counted,
    largest_four,
]
DOORS = {
    "grad(fuse)": lambda f: jax.value_and_grad(coda.fuse(f, memory=None), (0, 1)),
    "fuse(grad)": lambda f: coda.fuse(jax.value_and_grad(f, (0, 1)), memory=None),
}


def assert_close(got, expected, tolerance):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


@pytest.mark.parametrize("made", [jnp.matmul, activation], ids=["product", "activation"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("door", DOORS)
def test_all_readers_see_the_same_rounding(door, use, made):
    x, w, _ = arrays()

    def f(x, w):
        return use(made(x, w))

    expected, got = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w), jax.jit(DOORS[door](f))(x, w)
    assert_close(got[0], expected[0], 2e-4)
    if use is not divided_by_the_maximum:  # its derivative is infinite at the maximum
        assert_close(got[1], expected[1], 0.01)


@pytest.mark.parametrize("door", DOORS)
def test_a_selection_in_front_of_a_product(door):
    """The epilogue of the next product reads the maximum and the tile."""
    x, w, w2 = arrays()

    def f(x, w):
        z = activation(x, w)
        return jnp.mean(jnp.square(wide(jnp.where(z < highest(z), z, 0) @ w2)))

    assert_close(jax.jit(DOORS[door](f))(x, w), jax.jit(jax.value_and_grad(f, (0, 1)))(x, w), 0.01)


@pytest.mark.parametrize("variance", ["of the difference", "of squares"])
@pytest.mark.parametrize("door", DOORS)
def test_rows_of_equal_elements_are_normalised_to_zeros(door, variance):
    """A LayerNorm divides z - mean(z) by its own size, so that a mean of other numbers would give ones."""
    x, w, w2 = arrays()
    w = jnp.broadcast_to(w[:, :1], w.shape)

    def f(x, w):
        z = wide(x @ w)
        mean = jnp.mean(z, -1, keepdims=True)
        squares = jnp.mean(jnp.square(z - mean), -1, keepdims=True)
        if variance == "of squares":
            squares = jnp.maximum(jnp.mean(z * z, -1, keepdims=True) - mean * mean, 0)
        h = ((z - mean) * jax.lax.rsqrt(squares + 1e-5)).astype(x.dtype)
        return jnp.mean(jnp.square(wide(h @ w2)))

    value, gradients = jax.jit(DOORS[door](f))(x, w)
    assert value < 1e-4 and all(jnp.linalg.norm(wide(x)) < 1e-2 for x in gradients)


def test_a_maximum_of_one_map_is_compared_in_the_next():
    x, w, w2 = arrays()

    @coda.block
    def block(x, w, w2):
        z = (x @ w).map(jax.nn.silu)
        largest = z.map(highest)
        return z.map(lambda z, largest: jnp.where(z == largest, z, 0.0), largest) @ w2

    def plain(x, w, w2):
        z = activation(x, w)
        return jnp.where(z == highest(z), z, 0) @ w2

    def both(f):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.mean(jnp.square(wide(f(*args)))), (0, 1, 2)))

    assert_close(both(block)(x, w, w2), both(plain)(x, w, w2), 0.01)


@pytest.mark.parametrize(("norm", "count"), [(coda.rms_norm, 0), (coda.layer_norm, 1)])
def test_a_mean_is_of_what_is_stored_and_a_mean_square_is_not(norm, count):
    """A mean square only multiplies: no kernel of an RMSNorm rounds for it."""

    @coda.block
    def block(x, w, w2, scale):
        stream = x + (x @ w) @ w2
        return stream + (norm(stream, scale) @ w) @ w2

    types = [*map(jax.typeof, arrays()), jax.ShapeDtypeStruct((D,), jnp.bfloat16)]
    jax.eval_shape(jax.value_and_grad(lambda *args: jnp.sum(wide(block(*args))), (0, 1, 2, 3)), *types)
    (traced,) = block._graphs.values()
    (derivative,) = traced.graph._derivatives.values()
    assert len(derivative.as_stored) == count
