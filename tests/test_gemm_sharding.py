"""coda.gemm inside shard_map with checked types, on four CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax import ffi
from tests.gemm_cases import assert_close, jit, total

M, K, N = 32, 16, 24
RNG = np.random.default_rng(9)
A, B = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, K), (K, N)))
X, ROW = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, N), (N,)))
P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    assert len(jax.devices("cpu")) >= 4, "conftest.py asks for four CPU devices"
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])


def epilogue(acc, x, row):
    y = jax.nn.silu(acc + row) + x
    return y, jnp.sum(y * y, axis=1), jnp.mean(y)


def sharded(mesh, function, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def data_parallel(mesh, **options):
    def loss(a, b, x, row):
        return jax.lax.psum(total(coda.gemm(a, b, x, row, epilogue=epilogue, **options)), "x")

    return sharded(mesh, loss, (P("x"), P(), P("x"), P()), P())


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_data_parallel_gradient(mesh, residuals):
    def by_hand(a, b, x, row):
        parts = zip(jnp.split(a, 4), jnp.split(x, 4), strict=True)
        return sum(total(epilogue(a @ b, x, row)) for a, x in parts)

    got = jit(jax.grad(data_parallel(mesh, residuals=residuals), (0, 1, 2, 3)))(A, B, X, ROW)
    assert_close(got, jit(jax.grad(by_hand, (0, 1, 2, 3)))(A, B, X, ROW))


def test_row_parallel(mesh):
    """K is sharded: a psum of the partial products, and its gradient."""

    def multiply(a, b):
        return jax.lax.psum(coda.gemm(a, b), "x")

    def loss(product):
        return jit(jax.grad(lambda a, b: total(jnp.sin(product(a, b))), (0, 1)))

    got = loss(sharded(mesh, multiply, (P(None, "x"), P("x")), P()))(A, B)
    assert_close(got, loss(jnp.matmul)(A, B))


def test_column_parallel(mesh):
    got = sharded(mesh, lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), (P(), P(None, "x")), P(None, "x"))(A, B)
    assert_close(got, jnp.tanh(A @ B))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_captured_values_may_vary_more_than_the_factors(mesh, residuals):
    def loss(multiply):
        def of(a, b, scale, x):
            return total(multiply(a, b, lambda acc: jnp.sin(acc * scale) + x))

        return of

    def fused(a, b, f):
        return coda.gemm(a, b, epilogue=f, residuals=residuals)

    def in_map(a, b, scale, x):
        return jax.lax.psum(loss(fused)(a, b, scale, x), "x")

    def by_hand(a, b, scale, x):
        return sum(loss(lambda a, b, f: f(a @ b))(a, b, scale, x) for x in jnp.split(x, 4))

    arguments = (A[:8], B, jnp.float32(1.5), X)
    got = jit(jax.grad(sharded(mesh, in_map, (P(), P(), P(), P("x")), P()), (0, 1, 2, 3)))(*arguments)
    assert_close(got, jit(jax.grad(by_hand, (0, 1, 2, 3)))(*arguments))


def test_scan_over_layers(mesh):
    weights = jnp.asarray(RNG.standard_normal((3, K, K)), jnp.float32) / 4

    def loss(multiply):
        def of(x, weights):
            return total(jax.lax.scan(lambda x, w: (multiply(x, w), None), x, weights)[0])

        return of

    fused = loss(lambda x, w: coda.gemm(x, w, x, epilogue=lambda acc, x: jnp.tanh(acc) + x))
    by_hand = loss(lambda x, w: jnp.tanh(x @ w) + x)
    in_map = sharded(mesh, lambda x, w: jax.lax.psum(fused(x, w), "x"), (P("x"), P()), P())
    got = jit(jax.grad(in_map, (0, 1)))(A, weights)
    want = jit(jax.grad(lambda x, w: sum(by_hand(x, w) for x in jnp.split(x, 4)), (0, 1)))(A, weights)
    assert_close(got, want)


@pytest.mark.parametrize("specs", [(P("x"), P(), P("x"), P()), (P("x"), P(None, "y"), P("x", "y"), P("y"))], ids=str)
def test_explicit_axes(specs):
    """Types carry the shardings: each cotangent has that of its argument."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4])

    def gradient(multiply):
        return jax.jit(jax.grad(lambda a, b, x, row: total(multiply(a, b, x, row)), (0, 1, 2, 3)))

    want = gradient(lambda a, b, *operands: epilogue(a @ b, *operands))(A, B, X, ROW)
    with jax.set_mesh(mesh):
        arguments = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((A, B, X, ROW), specs, strict=True)
        ]
        got = gradient(lambda a, b, *operands: coda.gemm(a, b, *operands, epilogue=epilogue))(*arguments)
    for x, argument in zip(got, arguments, strict=True):
        assert x.sharding.is_equivalent_to(argument.sharding, x.ndim)
    assert_close(jax.device_get(got), want)


@pytest.mark.skipif(bool(ffi.unavailable_reason()), reason=f"no NVRTC: {ffi.unavailable_reason()}")
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_cuda_lowering(mesh, residuals):
    types = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (A, B, X, ROW)]
    gradient = jax.jit(jax.grad(data_parallel(mesh, residuals=residuals), (0, 1, 2, 3)))
    lowered = gradient.trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    # With "recompute" the forward product is dead: a gradient needs the derivative's, da and db.
    assert lowered.count("@coda_gemm(") == 3
