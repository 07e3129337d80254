"""coda.symmetric_gemm beside coda.gemm: values, gradients, batches, meshes, what is refused, and what is launched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from tests.nvrtc import needs_nvrtc

N, K = 64, 128
BF16 = jnp.bfloat16


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def polynomial(acc, gram):
    return 2.0 * acc - 0.5 * gram


def scaled(acc, scale, by_row, by_column, gram):
    return scale * by_row * jnp.tanh(acc * 0.1) * by_column + gram, acc


def operands(n=N, dtype=jnp.float32):
    """A scalar, a vector as row and as column, and a symmetric tile."""
    x, v = normal(n, n, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    return jnp.float32(0.7), v, v[:, None], x + x.T


@pytest.mark.smoke
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_values_are_those_of_the_general_product(turned, dtype):
    x, others, stored = normal(*((K, N) if turned else (N, K)), dtype=dtype), operands(dtype=dtype), (None, jnp.float32)
    found = coda.symmetric_gemm(
        x,
        x,
        *others,
        epilogue=scaled,
        out_dtype=stored,
        transpose_a=turned,
        transpose_b=not turned,
        residuals="recompute",
        implementation="auto",
        config=coda.GemmConfig(tile_m=128, tile_n=128),
    )
    expected = coda.gemm(x, x, *others, epilogue=scaled, out_dtype=stored, transpose_a=turned, transpose_b=not turned)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[1], found[1].T)


def test_powers_of_a_matrix():
    x = normal(N, K)
    gram = coda.symmetric_gemm(x, x, transpose_b=True)
    np.testing.assert_array_equal(
        coda.symmetric_gemm(gram, gram, gram, epilogue=polynomial), coda.gemm(gram, gram, gram, epilogue=polynomial)
    )


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradients_are_those_of_the_general_product(residuals):
    """With a cotangent that is not symmetric, and of factors that are two arguments."""
    weights = normal(N, N, seed=5)

    def loss(of, x, y, *operands):
        z, acc = of(x, y, *operands, transpose_b=True, epilogue=scaled, residuals=residuals)
        return jnp.sum(jnp.sin(z) * weights) + jnp.sum(acc * weights**2)

    x = normal(N, K)
    found, expected = (
        jax.grad(functools.partial(loss, of), tuple(range(6)))(x, x, *operands())
        for of in (coda.symmetric_gemm, coda.gemm)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.abs(found[0] - found[0].mean()).max() > 0.1
    no_cotangents_are_symmetric = jax.grad(functools.partial(loss, coda.symmetric_gemm), 5)(x, x, *operands())
    assert np.abs(no_cotangents_are_symmetric - no_cotangents_are_symmetric.T).max() > 0.1


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)], ids=str)
def test_a_batch(in_axes):
    xs = normal(3, K, N) if in_axes[0] == 0 else normal(K, N)
    scales = jnp.arange(3.0) if in_axes[1] == 0 else jnp.float32(2.0)

    def one(of, x, scale):
        return of(x, x, scale, transpose_a=True, epilogue=lambda acc, scale: acc * scale)

    found, expected = (
        jax.vmap(functools.partial(one, of), in_axes)(xs, scales) for of in (coda.symmetric_gemm, coda.gemm)
    )
    np.testing.assert_array_equal(found, expected)


def test_a_batch_does_not_become_rows():
    """With one b a batch of a is more rows of one product, which would not be square."""
    powers = jnp.stack([jnp.eye(N), 2 * jnp.eye(N)])
    matrix = operands()[3]
    found = jax.vmap(coda.symmetric_gemm, (0, None))(powers, matrix)
    np.testing.assert_array_equal(found, jnp.stack([matrix, 2 * matrix]))


def test_bad_arguments_are_refused():
    x = normal(N, K)
    for match, of in {
        "must be a matrix": lambda: coda.symmetric_gemm(x[None], x),
        "K = 128 in a and K = 64 in b": lambda: coda.symmetric_gemm(x, x),
        r"has shape \(64, 63\)": lambda: coda.symmetric_gemm(x, x[:63], transpose_b=True),
        "output 0 is no tile": lambda: coda.symmetric_gemm(
            x, x, transpose_b=True, epilogue=lambda acc: acc.sum(axis=1)
        ),
        "output 1 is no tile": lambda: coda.symmetric_gemm(x, x, transpose_b=True, epilogue=lambda acc: (acc, acc.T)),
        "combines columns": lambda: coda.symmetric_gemm(
            x, x, transpose_b=True, epilogue=lambda acc: jnp.multiply(*jnp.split(acc, 2, axis=1))
        ),
        "implementation": lambda: coda.symmetric_gemm(x, x, transpose_b=True, implementation="gpu"),
    }.items():
        with pytest.raises(ValueError, match=match):
            of()


def test_of_a_forward_and_backward_pass_the_forward_product_alone_is_symmetric():
    def loss(x):
        return jnp.sum(jnp.sin(coda.symmetric_gemm(x, x, transpose_b=True, epilogue=jnp.tanh, residuals="recompute")))

    text = str(jax.make_jaxpr(jax.grad(loss))(normal(N, K)))
    assert text.count("symmetric=True, program") == 1 and text.count("symmetric=False, program") == 3


@needs_nvrtc
def test_half_of_the_tiles_are_counted():
    x = jax.ShapeDtypeStruct((16, 2048, 8192), BF16)
    device = "NVIDIA H100 80GB HBM3"
    half, whole = (
        coda.explain(jax.vmap(lambda x, of=of: of(x, x, transpose_b=True)), x, device=device)
        for of in (coda.symmetric_gemm, coda.gemm)
    )
    (of_half,), (of_whole,) = half.products, whole.products
    assert of_half.cost.flops == 16 * 2048 * 2049 * 8192 and of_whole.cost.flops == 16 * 2 * 2048**2 * 8192
    assert 1.6 < of_whole.cost.us / of_half.cost.us < 1.9
    assert of_half.reason is None and "128 x 128" in of_half.tile


def test_float32_results_take_the_xla_form():
    x = jax.ShapeDtypeStruct((256, 256), BF16)
    (product,) = coda.explain(
        lambda x: coda.symmetric_gemm(x, x, transpose_b=True, out_dtype=jnp.float32), x, device="NVIDIA H200"
    ).products
    assert "float32 and symmetric" in product.reason


@pytest.mark.parametrize("axis_types", ["Auto", "Explicit"])
def test_meshes(axis_types):
    """A mesh cuts the batch, then each device has symmetric products; or also what makes general products of them."""
    types = (getattr(jax.sharding.AxisType, axis_types),) * 2
    mesh = jax.make_mesh((4, 2), ("batch", "rows"), axis_types=types)
    xs = normal(8, N, K)

    @jax.jit
    def grams(xs):
        return jax.vmap(lambda x: coda.symmetric_gemm(x, x, transpose_b=True, out_sharding=P()))(xs)

    expected = grams(xs)
    with jax.set_mesh(mesh):
        for spec in (P("batch"), P("batch", "rows"), P(None, None, "rows")):
            found = grams(jax.device_put(xs, NamedSharding(mesh, spec)))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
