"""Blocks at their edges: what they capture, shapes as JAX has them, small sizes, masks, keys, regions, Flax."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core as jex_core
from jax.sharding import AxisType, PartitionSpec

import coda_jax as coda
from tests.block_cases import loss, swiglu
from tests.gemm_cases import assert_close
from tests.test_block import D, F, M, compared, random

pytestmark = pytest.mark.usefixtures("quick_to_compile")
P = PartitionSpec


@pytest.mark.parametrize("lead", [(M,), (2, M // 2)])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
def test_a_block_that_ends_in_a_gate_of_halves(wanted, lead):
    """The product's cotangent is made by a pass, of both halves' cotangents, and is read as the halves that w has."""
    x, w = random(0, *lead, D), random(1, D, 2, F)

    @coda.block
    def f(x, w):
        return (x @ w).map(coda.gated(jax.nn.silu))

    def plain(x, w):
        return swiglu(x.reshape(M, D) @ w.reshape(D, 2 * F)).reshape(*lead, F)

    got, want = (jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), wanted)(x, w) for f in (f, plain))
    assert_close(got, want, 1e-4)


def test_a_loop_that_is_differentiated_in_other_arguments():
    """The loop is traced once, for all of them: what its backward pass keeps is told apart."""
    x, w = random(0, M, D), random(1, D, D)

    def looped(f):
        traced = jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0])(x, w)
        return lambda x, w: jex_core.jaxpr_as_fun(traced)(x, w)[0]

    f, plain = looped(coda.block(lambda x, w: (x @ w).map(jnp.tanh))), looped(lambda x, w: jnp.tanh(x @ w))
    for wanted in ((0, 1), (0,), (1,), (0, 1)):
        got, want = (jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), wanted)(x, w) for f in (f, plain))
        assert_close(got, want, 1e-4)


@pytest.mark.parametrize("kind", ["map", "opaque"])
def test_captured_arrays_are_read_at_each_call(kind):
    x, w, b = random(0, M, D), random(1, D, F), random(2, F)
    held = {"b": b}

    @coda.block
    def f(x, w):
        add = lambda z: z + held["b"]  # noqa: E731
        return (x @ w).map(add) if kind == "map" else coda.opaque(add, x @ w)

    assert_close(f(x, w), x @ w + b, 1e-5)
    held["b"] = 2 * b
    assert_close(f(x, w), x @ w + 2 * b, 1e-5)

    def of(c):
        held["b"] = c
        return jnp.sum(jnp.sin(f(x, w)))

    assert_close(jax.grad(of)(b), jnp.sum(jnp.cos(x @ w + b), axis=0), 1e-4)
    with pytest.raises(TypeError, match="closes over an array; give it as an operand"):
        coda.block(lambda x, w: (x @ w).map(lambda z: z * b, pullback=lambda y, z, dy: [dy * b]))(x, w)


@pytest.mark.parametrize(
    ("one", "other"),
    [((2, 8, 8), (1, 8, 1)), ((2, 4, 8), (4, 8)), ((2, 4, 8), (2, 1, 8)), ((2, 4, 8), (3,))],
)
def test_arithmetic_of_other_shapes_is_refused(one, other):
    """JAX would broadcast some of them, along an axis of the rows."""
    with pytest.raises(ValueError, match=r"add of shapes .*; arithmetic takes values of one shape"):
        coda.block(lambda x, m: x + m)(random(0, *one), random(1, *other))


def test_arithmetic_of_shapes_beside():
    for shape in ((2, 3, D), (2, 3, 1), (D,), (1, D), (1, 1, D), ()):
        compared(coda.block(lambda x, y: x * y - y), lambda x, y: x * y - y, random(0, 2, 3, D), random(1, *shape))
    for f in (lambda b, x: b * x, lambda b, x: b - x, lambda b, x: jnp.float32(2) * x / b):
        compared(coda.block(name="f")(f), f, random(0, M, D), random(1, M, D))
    compared(coda.block(lambda x, y: x + y), lambda x, y: x + y, random(0, 1, D, D), random(1, 1, D))
    x, w, b = random(0, M, D), random(1, D, F), random(2, F)
    compared(coda.block(lambda x, w, b: b * (x @ w)), lambda x, w, b: b * (x @ w), x, w, b)
    assert_close(coda.block(lambda x: b[:D] - x)(x), b[:D] - x, 1e-6)  # an array of JAX on the left
    assert_close(coda.block(lambda x, w: (x @ w) * np.arange(F))(x, w), (x @ w) * np.arange(F), 1e-5)


def test_several_axes_of_columns_stay():
    x, w = random(0, M, D), random(1, D, 2, 3)
    assert coda.block(lambda x, w: (x @ w) * 2)(x, w).shape == (M, 2, 3)
    compared(coda.block(lambda x, w: x @ (2 * w)), lambda x, w: jnp.einsum("md,dhf->mhf", x, 2 * w), x, w)
    compared(
        coda.block(lambda x, w: (x @ w).map(jnp.ones_like) + x @ w),
        lambda x, w: 1 + x @ w,
        random(0, 2, 3, D),
        random(1, D, F),
    )


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_columns_of_heads_before_a_function(heads):
    """JAX gives the function's cotangent, also for two heads, whose two axes are as those of gate and up."""
    x, w = random(0, 3, 4, 6), random(1, 6, heads, 8)

    def plain(x, w):
        return jnp.sin(jnp.einsum("btk,knh->btnh", x, w))

    block = coda.block(dtype=jnp.float32)(lambda x, w: coda.opaque(jnp.sin, x @ w))
    for f in (lambda f: f(x, w), lambda f: jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))(x, w)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), f(block), f(plain))


def test_a_weight_of_the_rows_shape():
    x, w, a = random(0, 4, 8, 4), random(1, 4, 8), random(2, 8, 3)
    compared(coda.block(lambda x, w: x @ (2 * w)), lambda x, w: x @ (2 * w), x, w)
    compared(coda.block(lambda x, w, a: x @ (w @ a)), lambda x, w, a: x @ (w @ a), x, w, a)
    compared(coda.block(lambda x, w: x @ w.T), lambda x, w: x @ w.T, random(0, 4, 8, 8), random(1, 4, 8))


@pytest.mark.parametrize("shape", [(1, 1, D), (1, D), (3, 1, D)], ids=str)
def test_one_row_keeps_its_dtype(shape):
    x, w, v = (random(i, *s, dtype=jnp.bfloat16) for i, s in enumerate([shape, (D, 2 * F), (F, D)]))
    block = coda.block(lambda x, w, v: x + (coda.rms_norm(x, np.ones(D, np.float32)) @ w).map(swiglu) @ v)
    assert block(x, w, v).dtype == jnp.bfloat16
    assert coda.block(lambda x, w: x @ w)(x, random(1, D, 1, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("strict"):
        wide = coda.block(dtype=jnp.bfloat16)(lambda x, w, v: x + (x @ w).map(swiglu) @ v)
        assert wide(x.astype(jnp.float32), w, v).dtype == jnp.float32


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32], ids=str)
def test_masks_of_tiles(dtype):
    """No epilogue reads one: where it is read is a pass."""
    x, w, v = random(0, M, D), random(1, D, F), random(2, F, D)
    mask = (random(3, M, F) > 0).astype(dtype)
    keep = lambda z, m: jnp.where(m > 0, z, 0)  # noqa: E731
    compared(
        coda.block(lambda x, w, v, m: (x @ w).map(keep, m) @ v),
        lambda x, w, v, m: keep(x @ w, m) @ v,
        x,
        w,
        v,
        mask,
        argnums=(0, 1, 2),
    )
    own = lambda z: jnp.round(z).astype(dtype)  # noqa: E731
    compared(
        coda.block(lambda x, w, v: (z := x @ w).map(keep, z.map(own)) @ v),
        lambda x, w, v: keep(x @ w, own(x @ w)) @ v,
        x,
        w,
        v,
    )


def test_a_constant_tile():
    count = lambda x: jnp.arange(M * F, dtype=jnp.float32).reshape(M, F)  # noqa: E731
    compared(
        coda.block(lambda x, w: (x @ w) + x.map(count)), lambda x, w: x @ w + count(x), random(0, M, D), random(1, D, F)
    )


@pytest.mark.smoke
def test_regions():
    """Norms, stated pullbacks and constants inside of shard_map, which checks what varies."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x, w, s = random(0, M, D), random(1, D, D), random(2, D)

    def of(f):
        inside = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        return lambda *args: inside(*args)

    def block(x, w, s):
        h = coda.rms_norm(x, s)
        return (h @ w + 1).map(lambda z: jax.nn.softmax(z, axis=1)) + h

    def plain(x, w, s):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * s
        return jax.nn.softmax(h @ w + 1, axis=1) + h

    compared(of(coda.block(block)), plain, x, w, s)


def test_keys_among_residuals():
    noise = jax.checkpoint(lambda z, k: z * z * jax.random.normal(k, z.shape))
    x, w, key = random(0, M, D), random(1, D, F), jax.random.key(0)
    f = coda.block(lambda x, w, k: coda.opaque(noise, x @ w, k))
    compared(f, lambda x, w, k: noise(x @ w, k), x, w, key, argnums=(0, 1))
    with pytest.raises(TypeError, match="returns random keys"):
        coda.block(lambda x, k: coda.opaque(lambda x, k: jax.random.split(k), x, k))(x, key)


def test_a_long_chain():
    f = lambda x: functools.reduce(lambda a, _: a * 1.001 + 0.001, range(400), x)  # noqa: E731
    compared(coda.block(f), f, random(0, M, D))


def test_blocks_are_copied_as_functions_are():
    block = coda.block(lambda x, w: x @ w)
    jax.grad(loss(block))(random(0, M, D), random(1, D, F))
    assert copy.deepcopy({"block": block})["block"] is block


def test_check_of_integers():
    f = coda.block(lambda x, w: ((x @ w).map(jnp.tanh), (x @ w).map(lambda z: jnp.argmax(z, axis=1))))
    assert coda.check(f, random(0, M, D), random(1, D, F))["output[1]"] == 0


def test_variables_of_flax():
    """In a method of a module, and as they are."""

    class Layer(nnx.Module):
        def __init__(self):
            self.w, self.b, self.s = (nnx.Param(random(i, *s)) for i, s in enumerate([(D, D), (D,), (D,)]))

        @coda.block
        def __call__(self, x):
            return x + (coda.rms_norm(x, self.s) @ self.w[...] + self.b).map(jnp.tanh)

    layer, x = Layer(), random(3, 2, 3, D)
    captured = coda.block(lambda x: x + (coda.rms_norm(x, layer.s) @ layer.w + layer.b[...]).map(jnp.tanh))

    def plain(x, w, b, s):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * s
        return x + jnp.tanh(h @ w + b)

    want = plain(x, layer.w[...], layer.b[...], layer.s[...])
    assert_close(layer(x), want, 1e-5)
    assert_close(captured(x), want, 1e-5)
    grads = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x))))(layer)
    exact = jax.grad(loss(plain), (1, 2, 3))(x, layer.w[...], layer.b[...], layer.s[...])
    assert_close([grads.w[...], grads.b[...], grads.s[...]], list(exact), 1e-4)


def test_calls_by_keyword():
    f = coda.block(lambda x, w: x @ w)
    assert_close(f(w=random(1, D, F), x=random(0, M, D)), random(0, M, D) @ random(1, D, F), 1e-5)


@pytest.mark.parametrize(
    ("pullback", "message"),
    [
        (lambda y, z, dy: [dy[0]], r"pullback of map 'tanh': cotangent 0 has shape \(16,\); its input has \(12, 16\)"),
        (lambda y, z, dy: dy, "pullback of map 'tanh': gives a JitTracer|gives a DynamicJaxprTracer"),
        (lambda y, z, dy: [dy, dy], "gives 2 cotangents; it must give a cotangent for each of 1 inputs"),
    ],
)
def test_pullbacks_of_wrong_shapes(pullback, message):
    block = coda.block(lambda x, w: (x @ w).map(jnp.tanh, pullback=pullback))
    with pytest.raises(TypeError, match=message):
        jax.grad(loss(block))(random(0, M, D), random(1, D, F))


def test_complex_numbers_are_refused():
    with pytest.raises(TypeError, match="unsupported operand"):
        coda.block(lambda x: x * 1j)(random(0, M, D))
