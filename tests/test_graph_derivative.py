"""Graphs of products and maps: their values and those of their cotangents' graphs, beside JAX's own derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.graph.derivative import cotangents_of
from coda_jax.graph.evaluate import evaluate
from coda_jax.graph.norm import scaled_backward
from coda_jax.graph.values import Leaf, Map, Product, make_map, reachable
from tests.gemm_cases import assert_close

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, F = 12, 8, 16
E4M3 = jnp.float8_e4m3fn


def swiglu(z):
    gate, up = jnp.split(z, 2, axis=1)
    return jax.nn.silu(gate) * up


class InJax:
    """The operations that a case is written in, here in plain JAX, so that JAX differentiates it."""

    @staticmethod
    def product(a, b, **options):
        a, b = (x.T if options.get(f"transpose_{name}") else x for name, x in (("a", a), ("b", b)))
        return jnp.matmul(a, b)

    @staticmethod
    def make_map(f, *inputs, pullback=None):
        return f(*inputs)


class InGraph:
    product, make_map = staticmethod(Product), staticmethod(make_map)


def feed_forward(of, x, up, down):
    return of.make_map(jnp.add, of.product(of.make_map(swiglu, of.product(x, up)), down), x)


def norm(of, x, scale, up):
    """Read three times; a vector, and a sum along rows."""
    rstd = of.make_map(lambda x: jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6), x)
    y = of.make_map(lambda x, rstd, scale: x * rstd * scale, x, rstd, scale)
    return of.make_map(lambda z, x: jnp.tanh(z) + jnp.sum(x), of.product(y, up), x)


def several_results(of, x, up):
    one, _, other = of.make_map(lambda z: (jnp.sin(z), z * z, z), of.product(x, up))
    return of.make_map(lambda one, other: one * other, one, other)


def layouts(of, a, b, c, d):
    first = of.product(a, b, transpose_a=True)
    second = of.product(first, c, transpose_b=True)
    return of.product(of.make_map(jnp.sin, second), d, transpose_a=True, transpose_b=True)


def one_weight_twice(of, x, w):
    return of.product(of.make_map(jnp.tanh, of.product(x, w)), w, transpose_b=True)


def labels(of, x, up, rows):
    return of.make_map(lambda z, rows: jnp.where(rows > 0, z, 0.5 * z), of.product(x, up), rows)


def integers(rng, shape):
    return jnp.asarray(rng.integers(-1, 2, shape), jnp.int32)


# name -> function of arrays or values, shapes
CASES = {
    "feed-forward": (feed_forward, [(M, D), (D, 2 * F), (F, D)]),
    "norm": (norm, [(M, D), (D,), (D, F)]),
    "several results": (several_results, [(M, D), (D, F)]),
    "layouts": (layouts, [(D, M), (D, F), (D, F), (F, M)]),
    "one weight twice": (one_weight_twice, [(M, D), (D, D)]),
    "labels": (labels, [(M, D), (D, F), (M, 1)]),
}


def arrays(case):
    _, shapes = CASES[case]
    rng = np.random.default_rng(0)
    last = integers(rng, shapes[-1]) if case == "labels" else None
    made = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    return made if last is None else [*made[:-1], last]


def graph(f, args):
    leaves = [Leaf(x.shape, x.dtype) for x in args]
    return leaves, f(InGraph, *leaves)


def gradients(f, args):
    """The gradients of the sum of the result's sines, by the graph of the cotangents."""
    leaves, out = graph(f, args)
    dout = Leaf(out.shape, jnp.float32)
    found = cotangents_of([out], [dout], leaves)
    known = dict(zip(leaves, args, strict=True))
    (y,) = evaluate([out], known, jnp.float32)
    known[dout] = jnp.cos(y)
    made = iter(evaluate([x for x in found if x is not None], known, jnp.float32))
    return [None if x is None else next(made) for x in found]


def in_jax(f, args):
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    loss = lambda *args: jnp.sum(jnp.sin(f(InJax, *args)))  # noqa: E731
    return jax.grad(loss, floats)(*args)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_values_and_cotangents(case):
    f, args = CASES[case][0], arrays(case)
    leaves, out = graph(f, args)
    assert_close(evaluate([out], dict(zip(leaves, args, strict=True)), jnp.float32), [f(InJax, *args)])
    found = gradients(f, args)
    assert [x is None for x in found] == [x.dtype == jnp.int32 for x in args]
    assert_close([x for x in found if x is not None], list(in_jax(f, args)))


@pytest.mark.parametrize("case", ["feed-forward", "norm", "layouts"])
@pytest.mark.slow
def test_second_derivatives(case):
    """A graph of cotangents is differentiated by JAX as any function, and so are the pullbacks in it."""
    f, args = CASES[case][0], arrays(case)
    of_graph = lambda *args: sum(jnp.sum(x * x) for x in gradients(f, args))  # noqa: E731
    of_jax = lambda *args: sum(jnp.sum(x * x) for x in in_jax(f, args))  # noqa: E731
    every = range(len(args))
    assert_close(jax.grad(of_graph, every)(*args), jax.grad(of_jax, every)(*args), 1e-4)


def test_a_backward_pass_is_products_and_maps():
    """Four products of a feed-forward, as by hand, of which none is of zeros."""
    leaves, out = graph(feed_forward, arrays("feed-forward"))
    dout = Leaf(out.shape, jnp.float32)
    found = reachable(cotangents_of([out], [dout], leaves))
    forward = reachable([out])
    made = [x for x in found if isinstance(x, Product) and x not in forward]
    assert len(made) == 4 and all(isinstance(x, Leaf | Product | Map) for x in found)
    assert {(x.transpose_a, x.transpose_b) for x in made} == {(False, True), (True, False)}


def test_a_pullback_in_other_terms():
    """It is given the result, and is the derivative in all orders, also of what runs the graph."""

    def exponential(of, x, w):
        pullback = lambda y, z, dy: (2 * y * dy,)  # noqa: E731  twice the truth, so that it is seen
        return of.make_map(jnp.exp, of.product(x, w), pullback=pullback)

    @jax.custom_vjp
    def doubled(z):
        return jnp.exp(z)

    doubled.defvjp(lambda z: (jnp.exp(z), jnp.exp(z)), lambda y, dy: (2 * y * dy,))
    of_jax = lambda of, x, w: doubled(of.product(x, w))  # noqa: E731
    args = [0.1 * x for x in arrays("feed-forward")[:2]]
    assert_close(gradients(exponential, args), list(in_jax(of_jax, args)))
    leaves, out = graph(exponential, args)
    run = lambda *args: evaluate([out], dict(zip(leaves, args, strict=True)), jnp.float32)[0]  # noqa: E731
    total = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1))(*args)  # noqa: E731
    assert_close(total(run), total(functools.partial(of_jax, InJax)))


def test_a_pullback_may_leave_inputs_out():
    def scaled(of, x, w, scale):
        pullback = lambda y, z, scale, dy: (dy * scale, None)  # noqa: E731
        return of.make_map(lambda z, scale: z * scale, of.product(x, w), scale, pullback=pullback)

    x, w = arrays("feed-forward")[:2]
    dx, dw, dscale = gradients(scaled, [x, w, jnp.float32(3)])
    assert dscale is None
    assert_close([dx, dw], list(in_jax(lambda of, x, w: of.product(x, w) * 3, [x, w])))


def test_inner_products_of_a_result_that_a_linear_map_reads_too():
    """The cotangent of a result is more than what its readers give it."""

    def block(of, x, w, rstd):
        by_pullback = functools.partial(make_map, jnp.multiply, pullback=scaled_backward, takes_inner=True)
        y = (jnp.multiply if of is InJax else by_pullback)(of.product(x, w), rstd)
        return y, of.make_map(lambda y: 2 * y, y)

    args = [*arrays("feed-forward")[:2], jnp.linspace(1.0, 2.0, M)[:, None]]
    leaves = [Leaf(x.shape, x.dtype) for x in args]
    outs = block(InGraph, *leaves)
    dys = [Leaf(out.shape, jnp.float32) for out in outs]
    rng = np.random.default_rng(1)
    given = [jnp.asarray(rng.standard_normal(out.shape), jnp.float32) for out in outs]
    known = dict(zip([*leaves, *dys], [*args, *given], strict=True))
    found = evaluate(cotangents_of(outs, dys, leaves), known, jnp.float32)
    _, pullback = jax.vjp(functools.partial(block, InJax), *args)
    assert_close(found, list(pullback(tuple(given))))


def test_a_product_reads_a_recovered_factor():
    """The derivative of a second product reads what is computed from the results of a map, here twice the factor."""
    leaves = x, w, v = [Leaf(shape, jnp.float32) for shape in ((M, D), (D, F), (F, D))]
    z = Product(x, w)
    y = make_map(jnp.exp, z)
    z.recovered = make_map(lambda y: 2 * jnp.log(y), y)
    a = Product(y, v)
    b = Product(z, v)
    out = make_map(jnp.add, a, b)
    dout = Leaf(out.shape, jnp.float32)
    of_x, of_w, of_v = (0.3 * one for one in arrays("feed-forward"))
    known = {x: of_x, w: of_w[:, :F], v: of_v, dout: jnp.ones(out.shape)}
    (dv,) = evaluate(cotangents_of([out], [dout], leaves)[2:], known, jnp.float32)
    of_z = of_x @ of_w[:, :F]
    assert_close([dv], [(jnp.exp(of_z) + 2 * of_z).T @ known[dout]])


@pytest.mark.smoke
def test_a_cotangent_is_rounded_where_its_value_is():
    x, w = Leaf((M, D), jnp.float32), Leaf((D, F), jnp.float32)
    y = make_map(jnp.tanh, Product(x, w))
    for is_rounded in (True, False):
        y.is_rounded = is_rounded
        out = make_map(jnp.sin, y)
        found = reachable(cotangents_of([out], [Leaf(out.shape, jnp.float32)], [x, w]))
        (dy,) = (one for one in found if one.cotangent_of is y)
        assert dy.is_rounded == is_rounded


def test_quantised_factors():
    """A feed-forward whose factors are rounded to 8 bits by maps, straight through."""

    def quantised(of, x, scale):
        straight = lambda q, x, scale, dq: (dq, None)  # noqa: E731
        return of.make_map(lambda x, scale: coda.saturate(x * scale, E4M3), x, scale, pullback=straight)

    def rounded(x):
        return x + jax.lax.stop_gradient(coda.saturate(x, E4M3).astype(jnp.float32) - x)

    def plain(x, up, down):
        return rounded(jax.nn.gelu(rounded(x) @ rounded(up))) @ rounded(down)

    def block(of, x, up, down, scale):
        z = of.product(quantised(of, x, scale), quantised(of, up, scale))
        return of.product(quantised(of, of.make_map(jax.nn.gelu, z), scale), quantised(of, down, scale))

    x, up, down = arrays("feed-forward")
    args = [x, up[:, :F], down, jnp.float32(1)]
    leaves, out = graph(block, args)
    known = dict(zip(leaves, args, strict=True))
    assert_close(evaluate([out], known, jnp.float32), [plain(*args[:3])], 1e-4)
    with pytest.raises(
        TypeError, match="its cotangent is float32; a map of the product, whose pullback rounds to 8 bits"
    ):
        cotangents_of([out], [Leaf(out.shape, jnp.float32)], leaves[:3])


def test_zeros_are_no_cotangents():
    leaves = [Leaf((M, D), jnp.float32), Leaf((D, F), jnp.float32), Leaf((M, D), jnp.float32)]
    x, w, _ = leaves
    z = Product(x, w)
    constant = make_map(lambda z: jnp.zeros_like(z), z)
    assert cotangents_of([constant, z], [Leaf(z.shape, jnp.float32), None], leaves) == [None] * 3
    found = cotangents_of([make_map(jnp.add, z, constant)], [Leaf(z.shape, jnp.float32)], leaves)
    assert [x is None for x in found] == [False, False, True]
    frozen = Leaf((D, F), jnp.float32, has_cotangent=False)
    y = Product(x, frozen)
    (dx, dw) = cotangents_of([y], [Leaf(y.shape, jnp.float32)], [x, frozen])
    assert isinstance(dx, Product) and dw is None


def test_mistakes_are_told_where_they_are_made():
    x, w = Leaf((M, D), jnp.float32), Leaf((D, F), jnp.float32)
    with pytest.raises(ValueError, match=r"shapes \(12, 8\) and \(12, 8\), which sum over 8 and 12"):
        Product(x, x)
    with pytest.raises(ValueError, match="must be both matrices"):
        Product(x, Leaf((D,), jnp.float32))
    with pytest.raises(TypeError, match="'two' has a pullback and 2 results"):

        def two(x):
            return x, x

        make_map(two, x, pullback=lambda *_: (None,))

    def outer(traced):
        make_map(lambda x: x * traced, x)
        return traced

    with pytest.raises(TypeError, match="closes over an array"):
        jax.jit(outer)(jnp.ones(()))
    z = make_map(jnp.tanh, x, pullback=lambda y, x, dy: (dy, dy))
    with pytest.raises(TypeError, match="gives 2 cotangents; it must give a cotangent for each of 1 inputs"):
        cotangents_of([z], [Leaf(z.shape, jnp.float32)], [x])
    with pytest.raises(KeyError, match=r"no array of a leaf of shape \(8, 16\)"):
        evaluate([Product(x, w)], {x: jnp.ones((M, D))}, jnp.float32)
    with pytest.raises(ValueError, match="branches on a traced value"):
        make_map(lambda x: x if x > 0 else -x, x)
