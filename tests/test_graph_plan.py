"""Plans of graphs: values and gradients by products with epilogues, what is stored, and a feed-forward as by hand."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coda_jax as coda
from coda_jax.epilogue.code_size import instructions
from coda_jax.graph import plan as plans
from coda_jax.graph.function import graph_of
from coda_jax.graph.plan import Plan, is_of_rows
from coda_jax.graph.run import run
from coda_jax.graph.values import Leaf, Product, make_map
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.gemm_cases import assert_close
from tests.test_graph_derivative import CASES, InGraph, InJax, arrays, feed_forward, swiglu

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, F = 12, 8, 16


def graph_and_jax(case):
    f, args = CASES[case][0], arrays(case)
    graph = graph_of(functools.partial(f, InGraph), args, dtype=jnp.float32, name="block")
    return graph, functools.partial(f, InJax), args


def total(f):
    return lambda *args: sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(f(*args)))


def floats(args):
    return [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    graph, f, args = graph_and_jax(case)
    assert_close(jax.jit(graph)(*args), [f(*args)], 1e-5)
    found, want = (jax.jit(jax.grad(total(one), floats(args)))(*args) for one in (graph, f))
    assert_close(found, want, 1e-4)


@pytest.mark.parametrize("case", ["feed-forward", "norm"])
@pytest.mark.slow
def test_second_derivatives(case):
    graph, f, args = graph_and_jax(case)

    def of(one):
        squares = lambda *args: sum(jnp.sum(x * x) for x in jax.grad(total(one), floats(args))(*args))  # noqa: E731
        return jax.jit(jax.grad(squares, floats(args)))(*args)

    assert_close(of(graph), of(f), 1e-3)


def test_transforms():
    """vmap with shared weights, a loop, and a checkpoint."""
    graph, f, (x, up, down) = graph_and_jax("feed-forward")
    many = jnp.stack([x, 2 * x, -x])

    def batch(one):
        return lambda x, up, down: jax.vmap(lambda x: jax.tree.leaves(one(x, up, down))[0])(x)

    def loop(one):
        step = jax.checkpoint(lambda x, _: (jax.tree.leaves(one(x, up, down))[0], None))
        return lambda x: lax.scan(step, x, length=3)[0]

    assert_close(jax.jit(batch(graph))(many, up, down), batch(f)(many, up, down), 1e-5)
    of_batch = [jax.jit(jax.grad(total(batch(one)), (0, 1, 2)))(many, up, down) for one in (graph, f)]
    assert_close(*of_batch, 1e-4)
    assert_close(*(jax.jit(jax.grad(total(loop(one))))(0.1 * x) for one in (graph, f)), 1e-4)


def test_forward_mode_is_refused_by_name():
    graph, _, args = graph_and_jax("feed-forward")
    with pytest.raises(NotImplementedError, match="block has no forward mode"):
        jax.jvp(graph, args, args)


# --- where maps go


def stores(plan):
    return [[value.shape for value in step.stores] for step in plan.steps]


def test_maps_join_the_product_that_they_read():
    graph, *_ = graph_and_jax("feed-forward")
    assert stores(Plan(graph.outputs)) == [[(M, F)], [(M, D)]]
    assert [x.shape for x in graph.derivative().kept] == [(M, 2 * F)]  # z; the activation is made again
    backward = graph.derivative().backward().plan
    # dz, and beside it the activation, which the product after it reads; dw_down, dx with the residual's term, dw_up
    assert stores(backward) == [[(M, 2 * F), (M, F)], [(F, D)], [(M, D)], [(D, 2 * F)]]
    assert not backward.by_xla


def test_a_sum_along_rows_is_known_behind_its_product():
    x, w = Leaf((M, D), jnp.float32), Leaf((D, F), jnp.float32)
    z = Product(x, w)
    squares = make_map(lambda z: jnp.sum(z * z, axis=1, keepdims=True), z)
    y = make_map(lambda z, s: z * lax.rsqrt(s), z, squares)
    plan = Plan([y])
    assert stores(plan) == [[(M, F), (M, 1)]] and plan.by_xla == [y]
    (read,) = (x for x in plan.steps[0].stores if x.is_tile)
    assert read is z


def test_an_epilogue_is_no_longer_than_it_may_be():
    """The maps of a chain, each of which would fit alone, are a pass from the one that exceeds the limit."""
    x, w = Leaf((M, D), jnp.float32), Leaf((D, F), jnp.float32)
    y = Product(x, w)
    maps = [y := make_map(jnp.tanh, y) for _ in range(40)]
    lengths = [instructions(plans.program_beside(one, y.shape)) for one in maps]
    plan = Plan([y])
    count = next(i for i, one in enumerate(maps) if one in plan.too_long)
    assert sum(lengths[:count]) <= plans.MOST_INSTRUCTIONS < sum(lengths[: count + 1])
    assert plan.by_xla == [y] and plan.steps[0].stores == [maps[count - 1]]


def test_maps_beyond_epilogues_are_passes():
    x, w, v = Leaf((M, D), jnp.float32), Leaf((D, F), jnp.float32), Leaf((F, D), jnp.float32)
    soft = make_map(lambda z: jax.nn.softmax(z, axis=1), Product(x, w))
    y = Product(soft, v)
    plan = Plan([y])
    assert stores(plan) == [[(M, F)], [(M, D)]] and plan.by_xla == [soft]
    args = [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate((x, w, v))]
    known = dict(zip((x, w, v), args, strict=True))
    (out,) = run(plan, known, dtype=jnp.float32, out_dtypes=[jnp.float32], name="attention")
    assert_close(out, jax.nn.softmax(args[0] @ args[1], axis=1) @ args[2], 1e-5)


def test_maps_of_what_is_known_are_made_where_they_are_read():
    """Twice, and never stored; but as a factor stored once."""
    x, y, w = Leaf((M, D), jnp.float32), Leaf((M, F), jnp.float32), Leaf((D, F), jnp.float32)
    wide = make_map(jnp.tanh, y)
    one, other = (make_map(jnp.multiply, Product(x, w), wide) for _ in range(2))
    assert stores(Plan([one, other])) == [[(M, F)], [(M, F)]] and not Plan([one, other]).by_xla
    as_factor = Product(wide, w, transpose_b=True)
    assert Plan([as_factor]).by_xla == [wide]
    attached = Plan([one, as_factor])
    assert stores(attached) == [[(M, F), (M, F)], [(M, D)]] and not attached.by_xla


@pytest.mark.parametrize("n", [F, M])
def test_a_vector_lies_along_rows_or_columns(n):
    """By how it was made, not by its size."""
    x, w = Leaf((M, D), jnp.float32), Leaf((D, n), jnp.float32)
    z = Product(x, w)
    of_rows, of_columns = make_map(lambda z: (jnp.sum(z, axis=1), jnp.sum(z, axis=0)), z)
    assert [is_of_rows(v) for v in (of_rows, of_columns, make_map(jnp.tanh, of_rows))] == [True, False, True]
    again = Product(x, w)
    y = make_map(lambda z, rows, columns: z * rows[:, None] + columns, again, of_rows, of_columns)
    args = [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate((x, w))]
    product = args[0] @ args[1]
    (out,) = run(
        Plan([y]), dict(zip((x, w), args, strict=True)), dtype=jnp.float32, out_dtypes=[jnp.float32], name="vectors"
    )
    assert_close(out, product * product.sum(axis=1)[:, None] + product.sum(axis=0), 1e-5)


def test_norm_with_a_known_statistic_sends_gradients_to_x():
    """A norm whose statistic is known: its map reads the sums alone, and its gradients go to x."""

    def block(x, sumsq, w):
        return normed_product(x, sumsq, None, w)

    def in_jax(x, w):
        return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) @ w

    x, w = arrays("feed-forward")[:2]
    sumsq = jnp.sum(x * x, axis=1, keepdims=True)
    graph = graph_of(block, [x, sumsq, w], dtype=jnp.float32)
    of_graph = lambda x, w: graph(x, sumsq, w)[0]  # noqa: E731  the sums are a cache of a function of x
    found, want = (jax.jit(jax.grad(total(f), (0, 1)))(x, w) for f in (of_graph, in_jax))
    assert_close(found, want, 1e-5)


def test_cotangents_that_are_zeros():
    def two(x, w):
        z = Product(x, w)
        return make_map(lambda z: (jnp.sin(z), jnp.exp(z)), z)

    args = arrays("feed-forward")[:2]
    graph = graph_of(two, args, dtype=jnp.float32)
    found = jax.jit(jax.grad(lambda *args: jnp.sum(graph(*args)[0]), (0, 1)))(*args)
    assert_close(found, jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(*args), 1e-5)
    assert graph.derivative().backward(frozenset({1})).cotangents[1] is None


def test_work_is_linear_in_layers(monkeypatch):
    """Epilogues are traced as often for each layer more."""
    counts = collections.Counter()
    trace = plans.trace
    monkeypatch.setattr(plans, "trace", lambda *args: counts.update(["trace"]) or trace(*args))

    def traced(layers):
        def block(x, up, down):
            for _ in range(layers):
                x = feed_forward(InGraph, x, up, down)
            return x

        counts.clear()
        graph = graph_of(block, arrays("feed-forward"), dtype=jnp.float32)
        plan = graph.derivative().backward().plan
        assert len(plan.steps) == 4 * layers and not plan.by_xla
        return counts["trace"]

    few, more, most = (traced(layers) for layers in (2, 4, 8))
    assert most - more == 2 * (more - few) > 0


# --- beside the products by hand


def normed_product(x, sumsq, scale, w, epsilon=1e-6):
    """norm(x) w for an RMSNorm that is not applied."""
    width = x.shape[1]
    rstd = make_map(
        lambda x, s: lax.rsqrt(s / width + epsilon),
        x,
        sumsq,
        pullback=lambda r, x, s, dr: (x * -(dr * r**3 / width), None),
    )
    if scale is not None:
        w = make_map(jnp.multiply, make_map(lambda scale: scale[:, None], scale), w)
    acc = Product(x, w)
    pullback = lambda u, acc, r, du: (r * du, jnp.sum(du * u, axis=1, keepdims=True) / r)  # noqa: E731
    return make_map(jnp.multiply, acc, rstd, pullback=pullback)


def gated(x, sumsq, scale, up, down):
    return feed_forward_of(normed_product(x, sumsq, scale, up), down, x)


def feed_forward_of(z, down, x):
    return make_map(jnp.add, Product(make_map(swiglu, z), down), x)


def by_hand(x, sumsq, scale, up, down):
    return coda.gated_mlp(coda.rms_norm(x, scale), up, down, dtype=x.dtype).x


def plain(x, sumsq, scale, up, down):
    wide = x.astype(jnp.float32)
    y = wide * lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + 1e-6) * scale
    return feed_forward(InJax, y, up, down) - y + wide


def gated_arguments(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (64, 48)).astype(dtype)
    sumsq = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True)
    up, down = (
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys[2:], ((48, 160), (80, 48)), strict=True)
    )
    return x, sumsq, jax.random.normal(keys[1], (48,)), up, down


DIFFERENTIATED = (0, 2, 3, 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_a_gated_feed_forward_is_as_by_hand(dtype):
    """Its products have as many instructions, operands and stores, and it keeps as much."""
    args = gated_arguments(dtype)
    graph = graph_of(gated, args, dtype=dtype, name="gated")

    def programs(f):
        equations, _ = equations_of(jax.grad(total(f), DIFFERENTIATED), *args)
        return [one.params["spec"].program for one, _ in equations if one.primitive in PRIMITIVES]

    def described(program):
        kinds = collections.Counter(operand.kind.word for operand in program.operands)
        return instructions(program), kinds, len(program.stores), len(program.reductions)

    found, want = ([described(program) for program in programs(f)] for f in (graph, by_hand))
    del found[1], want[1]  # the block by hand sums the squares of its result for a norm that follows
    assert found == want and [count for count, *_ in found] == [12, 28, 1, 7, 7]
    assert [x.shape for x in graph.derivative().kept] == [(64, 160)]  # u; rstd is made again of the sums


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_its_gradients_are_as_good(dtype):
    args = gated_arguments(dtype)
    graph = graph_of(gated, args, dtype=dtype, name="gated")
    exact = jax.grad(total(plain), DIFFERENTIATED)(*(x.astype(jnp.float32) for x in args))

    def errors(f):
        found = jax.jit(jax.grad(total(f), DIFFERENTIATED))(*args)
        return [float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in zip(found, exact, strict=True)]

    found, want = errors(graph), errors(by_hand)
    assert max(found) < (2e-6 if dtype == jnp.float32 else 0.02)
    assert np.all(np.array(found) < 1.1 * np.array(want) + 1e-6)
