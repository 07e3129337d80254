"""Graphs at their edges: dtypes of results, values that are several results, maps on which nothing can be composed."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import coda_jax as coda
from coda_jax.graph.derivative import cotangents_of
from coda_jax.graph.function import graph_of
from coda_jax.graph.values import Leaf, Product, make_map
from tests.gemm_cases import assert_close
from tests.test_graph_plan import total

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, N = 12, 8, 16
P = PartitionSpec


def random(i, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(i), shape, dtype)


def compared(f, in_jax, *args, **options):
    """Values and gradients of a graph and of the same in JAX."""
    graph = graph_of(f, args, dtype=jnp.float32, **options)
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    both = graph, lambda *args: jax.tree.leaves(in_jax(*args))
    assert_close(*(jax.jit(one)(*args) for one in both), 1e-5)
    assert_close(*(jax.jit(jax.grad(total(one), floats))(*args) for one in both), 1e-4)


def test_each_cotangent_has_its_arrays_dtype():
    """Also where one value is several: of a sum both are the result's."""
    x, r = random(0, M, D), random(1, M, D, dtype=jnp.bfloat16)
    graph = graph_of(lambda x, r: make_map(jnp.add, x, r), [x, r], dtype=jnp.float32)
    dx, dr = jax.grad(total(graph), (0, 1))(x, r)
    assert (dx.dtype, dr.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(dx, jnp.cos(x + r))


def test_one_value_as_two_results():
    x, w = random(0, M, D), random(1, D, N)
    graph = graph_of(
        lambda x, w: (Product(x, w),) * 2, [x, w], dtype=jnp.float32, out_dtypes=[jnp.float32, jnp.bfloat16]
    )
    wide, narrow = graph(x, w)
    assert_close(wide, x @ w)
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float8_e4m3fn], ids=str)
def test_results_that_are_read_too(dtype):
    """A result's dtype is not what other maps read."""

    def f(x, w, back):
        made = make_map(lambda z: (z > 0).astype(dtype), Product(x, w))
        beside = make_map(lambda z, made: jnp.where(made != 0, z, -z), Product(x, w), made)
        return beside, made

    x, w = random(0, M, D), random(1, D, N)
    graph = graph_of(f, [x, w, x], dtype=jnp.float32)
    beside, made = jax.jit(graph)(x, w, x)
    assert made.dtype == dtype
    assert_close(beside, jnp.abs(x @ w), 1e-5)


def test_a_sum_that_is_rounded_as_a_result_is_read_as_it_is():
    def f(x, w):
        sums = make_map(lambda z: jnp.sum(z, axis=1, keepdims=True), Product(x, w))
        return make_map(jnp.multiply, Product(x, w), sums), sums

    x, w = random(0, M, D), random(1, D, N)
    y, sums = graph_of(f, [x, w], dtype=jnp.float32, out_dtypes=[jnp.float32, jnp.bfloat16])(x, w)
    assert sums.dtype == jnp.bfloat16
    assert_close(y, (x @ w) * jnp.sum(x @ w, axis=1, keepdims=True), 1e-5)


def test_sums_of_an_operand_inside_of_a_map():
    def add_sums(z, x):
        return jnp.tanh(z) + jnp.sum(x, axis=1, keepdims=True)

    compared(
        lambda x, w: make_map(add_sums, Product(x, w), x),
        lambda x, w: add_sums(x @ w, x),
        random(0, M, D),
        random(1, D, N),
    )


def test_transposes_inside_of_maps():
    """A transposed tile is what an epilogue stores last: nothing there reads it."""
    x, w, t = random(0, M, D), random(1, D, M), random(2, M, M)
    of_product = lambda x, w: make_map(jnp.add, z := Product(x, w), make_map(lambda z: z.T, z))  # noqa: E731
    compared(of_product, lambda x, w: x @ w + (x @ w).T, x, w)
    compared(
        lambda x, w, t: make_map(jnp.add, Product(x, w), make_map(lambda t: t.T, t)),
        lambda x, w, t: x @ w + t.T,
        x,
        w,
        t,
    )


def test_halves_of_halves():
    """A map that is made again where it is read lies beside the product with all that it reads, or is a pass."""

    def half(z):
        one, other = jnp.split(z, 2, axis=1)
        return one * jax.nn.sigmoid(other)

    f = lambda x, w, t: make_map(jnp.add, Product(x, w), make_map(half, make_map(half, t)))  # noqa: E731
    compared(f, lambda x, w, t: x @ w + half(half(t)), random(0, M, D), random(1, D, N), random(2, M, 4 * N))


def test_a_chain_of_maps_takes_time_linear_in_its_length():
    def chain(x, w):
        h = Product(x, w)
        for _ in range(60):
            h = make_map(lambda h, t: h + t, h, make_map(jnp.tanh, h))
        return h

    started = time.perf_counter()
    assert graph_of(chain, [random(0, M, D), random(1, D, N)], dtype=jnp.float32).derivative().kept
    assert time.perf_counter() - started < 30


def test_maps_to_16_bits():
    f = lambda x, w: make_map(lambda z: z.astype(jnp.bfloat16), Product(x, w))  # noqa: E731
    x, w = random(0, M, D), random(1, D, N)
    graph = graph_of(f, [x, w], dtype=jnp.float32)
    found = jax.grad(total(graph), (0, 1))(x, w)
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w)
    for one, other in zip(found, want, strict=True):
        assert float(jnp.linalg.norm(one - other)) < 1e-2 * float(jnp.linalg.norm(other))


def test_rows_that_are_one_axis_of_some_arrays():
    x, w, t, column = random(0, 3, 4, D), random(1, D, N), random(2, M, N), random(3, M, 1)
    f = lambda x, w, t, c: make_map(lambda z, t, c: z + t * c, Product(x, w), t, c)  # noqa: E731
    compared(f, lambda x, w, t, c: x @ w + (t * c).reshape(3, 4, N), x, w, t, column, rows=(3, 4))
    squares = lambda x, w: Product(z := Product(x, w), z, transpose_b=True)  # noqa: E731
    graph = graph_of(squares, [x, w], dtype=jnp.float32, rows=(3, 4))
    z = (x @ w).reshape(M, N)
    assert_close(graph(x, w)[0].reshape(M, M), z @ z.T, 1e-5)


def test_a_weight_with_as_many_rows():
    """Rows follow from what a value is made of, not from its size."""
    x, w = random(0, 2, 4, D), random(1, D, N)
    f = lambda x, w: Product(x, make_map(lambda w, x: w * jnp.mean(x * x), w, x))  # noqa: E731
    compared(f, lambda x, w: x @ (w * jnp.mean(x * x)), x, w, rows=(2, 4))


def test_inside_a_region():
    """Weights that do not vary over a manual mesh axis get the sum of its gradients."""
    x, w, scale = random(0, M, D), random(1, D, N), random(2, N)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    block = lambda x, w, s: make_map(lambda z, s: jnp.tanh(z) * s, Product(x, w), s)  # noqa: E731

    def inside(x, w, s):
        return graph_of(block, [x, w, s], dtype=jnp.float32)(x, w, s)[0]

    f = jax.shard_map(inside, mesh=mesh, in_specs=(P("x", None), P(), P()), out_specs=P("x", None))
    in_jax = lambda x, w, s: jnp.tanh(x @ w) * s  # noqa: E731
    assert_close(*(jax.jit(jax.grad(total(one), (0, 1, 2)))(x, w, scale) for one in (f, in_jax)), 1e-4)


def test_refusals():
    x, w = Leaf((M, D), jnp.float32), Leaf((D, N), jnp.float32)
    eight = make_map(lambda x: coda.saturate(x, jnp.float8_e4m3fn), x)
    with pytest.raises(ValueError, match="both must be of 8 bits, or neither"):
        Product(eight, w)
    with pytest.raises(TypeError, match="state a pullback"):
        cotangents_of([eight], [Leaf((M, D), jnp.float32)], [x])
    with pytest.raises(TypeError, match=r"shape \(2,\) has dtype key<fry>"):
        graph_of(lambda key: key, [jax.random.split(jax.random.key(0))], dtype=jnp.float32)
    with pytest.raises(TypeError, match="has dtype float64"):
        graph_of(lambda x: x, [np.zeros((2, 2))], dtype=jnp.float32)
