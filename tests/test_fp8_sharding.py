"""Transposed and ordered results, and maxima of a whole product, of products that a mesh shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from tests.partitioned import mesh_of, partitioned_on_cpus, run

P = PartitionSpec
E4M3 = jnp.float8_e4m3fn
M, K, N = 64, 32, 128
RNG = np.random.default_rng(11)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def random(*shape):
    """Small integers: sums are exact in any order."""
    return jnp.asarray(RNG.integers(-3, 4, shape), jnp.float32)


A, B, X = random(M, K), random(K, N), random(M, N).at[-1, -1].set(400)  # the largest is on the last device


def everything(acc, x):
    y = acc + x
    q = coda.saturate(y / 4, E4M3)
    return y.T, q, coda.contraction_order(q), coda.contraction_order(q.T), jnp.max(jnp.abs(y)) / 448


def fused(a, b, x):
    return coda.gemm(a, b, x, epilogue=everything)


def check(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


WANT = jax.jit(lambda a, b, x: everything(a @ b, x))(A, B, X)

# Shardings of a, b and x; the shards of a and b that are multiplied.
LAYOUTS = {
    "rows": ((P("data"), P(), P("data")), (M // 2, K), (K, N)),
    "columns": ((P("data"), P(None, "model"), P("data", "model")), (M // 2, K), (K, N // 2)),
    "columns alone": ((P(), P(None, ("data", "model")), P(None, ("data", "model"))), (M, K), (K, N // 4)),
    "K": ((P("data", "model"), P("model"), P("data")), (M // 2, K // 2), (K // 2, N)),
    "K, scattered": ((P("data", "model"), P("model"), P("data", "model")), (M // 2, K // 2), (K // 2, N)),
}


@KINDS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_values(kind, layout):
    specs, part_of_a, part_of_b = LAYOUTS[layout]
    got, parts, _ = run(fused, (A, B, X), specs, kind)
    check(got, WANT)
    assert parts == [("everything", part_of_a, part_of_b)]


def test_types():
    """Over explicit axes those of a transposed result are in the other order."""
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        a, b, x = (
            jax.device_put(value, NamedSharding(mesh, spec))
            for value, spec in ((A, P("data")), (B, P(None, "model")), (X, P("data", "model")))
        )
        specs = [jax.typeof(y).sharding.spec for y in jax.jit(fused)(a, b, x)]
    assert specs == [P("model", "data"), P("data", "model"), P("data", "model"), P("model", "data"), P()]


@pytest.mark.parametrize("n", [M, N])
def test_out_sharding(n):
    """It is of the product; a transposed result has its axes in the other order, also where M is N."""
    mesh = mesh_of(AxisType.Explicit)

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=lambda acc: (acc, acc.T), out_sharding=P("data", "model"))

    b = random(K, n)
    with jax.set_mesh(mesh):
        over_k = (
            jax.device_put(A, NamedSharding(mesh, P(None, "model"))),
            jax.device_put(b, NamedSharding(mesh, P("model"))),
        )
        got = jax.jit(multiply)(*over_k)
        assert [jax.typeof(y).sharding.spec for y in got] == [P("data", "model"), P("model", "data")]
    check(jax.device_get(got), (A @ b, (A @ b).T))


@KINDS
@pytest.mark.parametrize("m", [32, 48, 64])
def test_blocks_of_the_order_stay_on_a_device(kind, m):
    """Rows are sharded only where each device has whole blocks of 16: of 48 rows, two devices would have half a one."""
    a = random(m, K)

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=lambda acc: coda.contraction_order(acc.T))

    got, ((_, of_a, of_b),), _ = run(multiply, (a, B), (P("data"), P()), kind)
    check(got, coda.contraction_order((a @ B).T))
    assert of_a == ((m // 2 if m % 32 == 0 else m), K) and of_b == (K, N)


@KINDS
@pytest.mark.parametrize("n", [32, 48])
def test_blocks_of_columns_stay_on_a_device(kind, n):
    b = random(K, n)

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=coda.contraction_order)

    got, ((_, _, of_b),), _ = run(multiply, (A, b), (P(), P(None, "model")), kind)
    check(got, coda.contraction_order(A @ b))
    assert of_b == (K, n // 2 if n % 32 == 0 else n)


@KINDS
def test_axes_of_the_rows(kind):
    a = random(4, 16, K)

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=lambda acc: (acc.T, jnp.max(acc)))

    got, ((_, of_a, of_b),), _ = run(multiply, (a, B), (P("data"), P(None, "model")), kind)
    check(got, (jnp.moveaxis(a @ B, 2, 0), jnp.max(a @ B)))
    assert of_a == (2, 16, K) and of_b == (K, N // 2)


@KINDS
def test_several_arrays(kind):
    b = (random(K, 64), random(K, 32))

    def multiply(a, first, second):
        def apart(acc):
            first, second = jnp.split(acc, [64], axis=1)
            return first.T, coda.contraction_order(second), jnp.max(acc)

        return coda.gemm(a, (first, second), epilogue=apart)

    got, _, _ = run(multiply, (A, *b), (P("data"), P(None, "model"), P(None, "model")), kind)
    first, second = (A @ x for x in b)
    check(got, (first.T, coda.contraction_order(second), jnp.maximum(jnp.max(first), jnp.max(second))))


@KINDS
def test_gradients(kind):
    def loss(a, b, x):
        y, q, *_, largest = fused(a, b, x)
        return jnp.sum(y * jnp.arange(M)) + jnp.sum(q.astype(jnp.float32)) + largest

    def plain(a, b, x):
        y, q, *_, largest = everything(a @ b, x)
        return jnp.sum(y * jnp.arange(M)) + jnp.sum(q.astype(jnp.float32)) + largest

    specs, *_ = LAYOUTS["columns"]
    got, _, _ = run(jax.grad(loss, (0, 1, 2)), (A, B, X), specs, kind)
    for one, other in zip(got, jax.jit(jax.grad(plain, (0, 1, 2)))(A, B, X), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_a_region_of_manual_axes():
    """In a shard_map a maximum is that of each device's product."""
    mesh = mesh_of(AxisType.Auto)

    def each(a, b, x):
        y, *_, largest = fused(a, b, x)
        return y, largest[None]

    with partitioned_on_cpus(), jax.set_mesh(mesh):
        y, largest = jax.jit(
            jax.shard_map(each, in_specs=(P("data"), P(), P("data")), out_specs=(P(None, "data"), P("data")))
        )(A, B, X)
    check(y, WANT[0])
    check(jnp.max(largest), WANT[-1])
