"""`coda.fp8.matmul` and `coda.fp8.DotGeneral`: values, gradients, scales, in Flax layers, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from flax.linen import fp8_ops

import coda_jax as coda
from tests.tolerance import check

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
M, K, N = 48, 64, 32


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def quantised(x, dtype, scale=None):
    """Values rounded to fp8 as numpy has it, and what one of them stands for, in float64."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.asarray(x, np.float32)
    scale = np.exp2(np.floor(np.log2(largest / np.abs(x).max()))) if scale is None else scale
    scale = np.float32(scale)
    return np.clip(x * scale, -largest, largest).astype(dtype).astype(np.float64), np.float64(np.float32(1) / scale)


def reference(x, w, dy, dtype=E4M3, gradient_dtype=E4M3, scales=(None, None, None)):
    """y, dx and dw of the definition, with sums in float64."""
    (qx, ux), (qw, uw) = quantised(x, dtype, scales[0]), quantised(w, dtype, scales[1])
    qdy, udy = quantised(dy, gradient_dtype, scales[2])
    return qx @ qw * (ux * uw), qdy @ qw.T * (udy * uw), qx.T @ qdy * (ux * udy)


def found(x, w, dy, **options):
    y, pullback = jax.vjp(jax.jit(functools.partial(coda.fp8.matmul, **options)), x, w)
    return y, *pullback(dy)


def arguments(dtype=jnp.bfloat16, w_dtype=None):
    return normal(0, M, K, dtype=dtype), normal(1, K, N, dtype=w_dtype or dtype), normal(2, M, N, dtype=dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("gradient_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_values_and_gradients(dtype, gradient_dtype):
    x, w, dy = arguments(dtype)
    results = found(x, w, dy, gradient_dtype=gradient_dtype)
    for name, out, expected in zip(("y", "dx", "dw"), results, reference(x, w, dy, E4M3, gradient_dtype), strict=True):
        check(out, expected, jnp.asarray(expected, dtype), dtype=dtype, name=name)


def test_dtypes_of_results():
    """dx has the dtype of x, dw that of w, y the promotion or what is asked for."""
    x, w, dy = arguments(jnp.bfloat16, jnp.float32)
    y, dx, dw = found(x, w, dy.astype(jnp.float32))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert coda.fp8.matmul(x, w, out_dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize("given", [(16.0, 64.0, 8.0), (2000.0, 1e4, 512.0)], ids=["within", "clipped"])
def test_given_scales(given):
    x, w, dy = arguments()
    options = dict(zip(("x_scale", "w_scale", "gradient_scale"), map(jnp.float32, given), strict=True))
    expected = reference(x, w, dy, scales=given)
    for name, out, exact in zip(("y", "dx", "dw"), found(x, w, dy, **options), expected, strict=True):
        check(out, exact, jnp.asarray(exact, jnp.bfloat16), dtype=jnp.bfloat16, name=name)
    gradient = jax.grad(lambda scale: jnp.sum(coda.fp8.matmul(x, w, x_scale=scale)).astype(jnp.float32))
    assert gradient(jnp.float32(16)) == 0


def test_the_other_format():
    """Factors in e5m2, the cotangent in e4m3, by one function and as a dot_general."""
    x, w, dy = arguments()
    scales = 1024.0, 2048.0, 32.0

    def product(x, w):
        return coda.fp8.matmul(
            x,
            w,
            x_scale=scales[0],
            w_scale=scales[1],
            gradient_scale=scales[2],
            dtype=E5M2,
            gradient_dtype=E4M3,
            implementation="xla",
        )

    y, pullback = jax.vjp(product, x, w)
    for out, exact in zip((y, *pullback(dy)), reference(x, w, dy, E5M2, E4M3, scales), strict=True):
        check(out, exact, jnp.asarray(exact, jnp.bfloat16), dtype=jnp.bfloat16)
    multiply = coda.fp8.DotGeneral(dtype=E5M2, implementation="xla")
    y = multiply(x, rhs=w, dimension_numbers=(((1,), (0,)), ((), ())))
    assert np.array_equal(y, coda.fp8.matmul(x, w, dtype=E5M2))


def test_zeros_and_what_is_not_finite():
    """A scale is finite for zeros; NaN and inf are not hidden."""
    x, w, dy = arguments()
    assert all(not np.any(np.asarray(out)) for out in found(jnp.zeros_like(x), w, jnp.zeros_like(dy)))
    for value in (jnp.nan, jnp.inf):
        y = coda.fp8.matmul(x.at[3, 5].set(value), w)
        assert np.all(np.isnan(np.asarray(y[3], np.float32)))


def test_many_axes_and_a_vector():
    x, w, dy = arguments()
    y = coda.fp8.matmul(x.reshape(3, 16, K), w)
    assert np.array_equal(y.reshape(M, N), coda.fp8.matmul(x, w))
    assert np.array_equal(coda.fp8.matmul(x[0], w), coda.fp8.matmul(x[:1], w)[0])
    assert [g.shape for g in found(x.reshape(3, 16, K), w, dy.reshape(3, 16, N))] == [(3, 16, N), (3, 16, K), (K, N)]


def test_vmap_has_a_scale_each():
    x, w, _ = arguments()
    batch = jnp.stack([x, x * 100])
    y = jax.vmap(coda.fp8.matmul, in_axes=(0, None))(batch, w)
    assert np.array_equal(y[0], coda.fp8.matmul(x, w)) and np.array_equal(y[1], coda.fp8.matmul(batch[1], w))


def test_scan_and_remat():
    x, w = normal(0, M, K), normal(1, 3, K, K) / 8

    def loss(w, wrapped):
        def layer(x, w):
            return jnp.tanh(coda.fp8.matmul(x, w)), None

        return jnp.sum(jax.lax.scan(wrapped(layer), x, w)[0].astype(jnp.float32))

    plain, again = (jax.jit(jax.grad(functools.partial(loss, wrapped=f)))(w) for f in (lambda f: f, jax.checkpoint))
    assert np.array_equal(plain, again)


@pytest.mark.parametrize("numbers", [(((2,), (0,)), ((), ())), (((1, 2), (1, 0)), ((), ())), (((0,), (2,)), ((), ()))])
def test_dot_general_is_that_of_jax(numbers):
    """Small integers are exact in e4m3, with a scale that is a power of two."""
    (contracting_x, contracting_w), _ = numbers
    sizes = {0: 8, 1: 7, 2: 4}
    x_shape = tuple(sizes[axis] for axis in range(3))
    w_shape = [3, 5, 2]
    for ours, theirs in zip(contracting_x, contracting_w, strict=True):
        w_shape[theirs] = x_shape[ours]
    generator = np.random.default_rng(0)
    x, w = (jnp.asarray(generator.integers(-7, 8, shape), jnp.float32) for shape in (x_shape, w_shape))
    x, w = x.at[0, 0, 0].set(7), w.at[0, 0, 0].set(7)  # 448 / 7 is a power of two
    y = coda.fp8.DotGeneral()(x, w, numbers)
    assert np.array_equal(y, jax.lax.dot_general(x, w, numbers))


class MLP(linen.Module):
    kind: object

    @linen.compact
    def __call__(self, x):
        dense = functools.partial(linen.Dense, dot_general_cls=self.kind, dtype=jnp.bfloat16)
        return dense(x.shape[-1])(jax.nn.gelu(dense(4 * x.shape[-1])(x)))


@pytest.mark.slow
def test_a_linen_model_beside_flax_and_float32():
    """Gradients err no more than those of Flax's own fp8, whose scales are of steps before, once these have settled."""
    x = normal(0, 64, 32)
    target = normal(1, 64, 32)

    def gradients(kind, variables, x):
        def loss(params):
            y = MLP(kind).apply(variables | {"params": params}, x)
            return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))

        return jax.grad(loss)(variables["params"])

    exact = gradients(None, MLP(None).init(jax.random.key(2), x), x)

    def error(kind):
        found = gradients(kind, MLP(kind).init(jax.random.key(2), x), x)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)

    ours, theirs = error(coda.fp8.DotGeneral), error(fp8_ops.Fp8DirectDotGeneralOp)
    assert 1e-3 < ours < 0.1 and ours < theirs


@pytest.mark.smoke
def test_an_nnx_model_trains():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(32, 64, dot_general=coda.fp8.DotGeneral(), dtype=jnp.bfloat16, rngs=rngs),
        jax.nn.gelu,
        nnx.Linear(64, 32, dot_general=coda.fp8.DotGeneral(gradient_dtype=E5M2), dtype=jnp.bfloat16, rngs=rngs),
    )
    x = normal(0, 64, 32)

    @nnx.jit
    def step(model):
        loss, gradient = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x).astype(jnp.float32) - 1)))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient))
        return loss

    losses = [float(step(model)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0] and np.all(np.isfinite(losses))


def test_columns_of_w_in_several_axes():
    x, w, _ = arguments()
    split = w.reshape(K, 2, N // 2)
    y = coda.fp8.matmul(x, split)
    assert y.shape == (M, 2, N // 2)
    np.testing.assert_array_equal(y.reshape(M, N), coda.fp8.matmul(x, w))
    with pytest.raises(ValueError, match=r"w \(64,\); they must be"):
        coda.fp8.matmul(x, w[:, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.zeros((M, K), np.int32)}, TypeError, "x has dtype int32"),
        ({"w": np.zeros((K + 1, N), np.float32)}, ValueError, r"\(48, 64\) and w \(65, 32\)"),
        ({"dtype": jnp.bfloat16}, TypeError, "dtype = bfloat16; it must be float8_e4m3fn or float8_e5m2"),
        ({"gradient_dtype": jnp.int8}, TypeError, "gradient_dtype = int8"),
        ({"x_scale": jnp.ones(2)}, TypeError, r"x_scale is float32 of shape \(2,\)"),
        ({"implementation": "triton"}, ValueError, "implementation = 'triton'"),
    ],
)
def test_refusals(change, error, message):
    x, w, _ = arguments()
    options = {"x": x, "w": w} | change
    with pytest.raises(error, match=message):
        coda.fp8.matmul(options.pop("x"), options.pop("w"), **options)


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        ((((2,), (1,)), ((0,), (0,))), {}, "batch axes"),
        ((((2,), (0,)), ((), ())), {"precision": jax.lax.Precision.HIGHEST}, "precision"),
        ((((2,), (0,)), ((), ())), {"algorithm": "x"}, "algorithm"),
    ],
)
def test_dot_general_refuses(numbers, options, message):
    with pytest.raises(ValueError, match=message):
        coda.fp8.DotGeneral()(normal(0, 2, 3, 4), normal(1, 4, 4, 4), numbers, **options)
