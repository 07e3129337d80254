"""Feed-forwards of several forms as graphs: their gradients, and how many passes over activations are left to XLA."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from coda_jax.graph.function import graph_of
from coda_jax.graph.values import make_map
from tests.gemm_cases import assert_close
from tests.test_graph_derivative import InGraph, InJax, swiglu
from tests.test_graph_plan import normed_product, total

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, F, RANK = 64, 48, 80, 8


def applied_norm(of, x, scale):
    """RMSNorm of a value that is read by more than products. In a graph the row sums are a cache of a function of x."""
    width = x.shape[1]
    if of is InJax:
        return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale
    sums = make_map(lambda x: jnp.sum(lax.stop_gradient(x * x), axis=1, keepdims=True), x)
    pullback = lambda r, x, s, dr: (x * -(dr * r**3 / width), None)  # noqa: E731
    rstd = make_map(lambda x, s: lax.rsqrt(s / width + 1e-6), x, sums, pullback=pullback)
    return make_map(lambda x, rstd, scale: x * rstd * scale, x, rstd, scale)


def gated(of, z, down):
    return of.product(of.make_map(swiglu, z), down)


def no_norm(of, x, up, up_bias, down, down_bias):
    hidden = of.make_map(lambda z, b: jax.nn.gelu(z + b), of.product(x, up), up_bias)
    return of.make_map(lambda y, b, x: y + b + x, of.product(hidden, down), down_bias, x)


def adapter(of, x, up, a, b, down):
    """Low-rank, inside of the chain."""
    z = of.make_map(lambda z, low: z + 2 * low, of.product(x, up), of.product(of.product(x, a), b))
    return of.make_map(jnp.add, gated(of, z, down), x)


def post_norm(of, x, up, down, scale):
    return applied_norm(of, of.make_map(jnp.add, gated(of, of.product(x, up), down), x), scale)


def norm_before_sum(of, x, up, down, scale):
    """As OLMo 2's."""
    return of.make_map(jnp.add, applied_norm(of, gated(of, of.product(x, up), down), scale), x)


def sandwich(of, x, before, up, down, after):
    """As Gemma 2's: a norm before, which is not applied, and one behind."""
    if of is InJax:
        z = applied_norm(of, x, before) @ up
    else:
        sums = make_map(lambda x: jnp.sum(lax.stop_gradient(x * x), axis=1, keepdims=True), x)
        z = normed_product(x, sums, before, up)
    return of.make_map(jnp.add, applied_norm(of, gated(of, z, down), after), x)


def parallel(of, x, gate, up, down, other):
    """Two branches of one array, as GPT-J's."""
    first, second = gated(of, of.product(x, up), down), of.product(of.make_map(jnp.tanh, of.product(x, gate)), other)
    return of.make_map(lambda x, y, z: x + y + z, x, first, second)


UP, DOWN, SCALE = (D, 2 * F), (F, D), (D,)
# name -> block, shapes of its arrays, products forward and backward, passes over activations forward and backward
FORMS = {
    "no norm": (no_norm, [(D, F), (F,), DOWN, (D,)], (2, 4), (0, 0)),
    "adapter": (adapter, [UP, (D, RANK), (RANK, 2 * F), DOWN], (4, 8), (0, 0)),
    "post-norm": (post_norm, [UP, DOWN, SCALE], (2, 4), (1, 1)),
    "norm before the sum": (norm_before_sum, [UP, DOWN, SCALE], (2, 4), (1, 1)),
    "sandwich": (sandwich, [SCALE, UP, DOWN, SCALE], (2, 4), (1, 1)),
    "parallel": (parallel, [(D, D), UP, DOWN, (D, D)], (4, 8), (0, 0)),
}


def arguments(name):
    shapes = [(M, D), *FORMS[name][1]]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    each = enumerate(zip(keys, shapes, strict=True))
    return [
        jax.random.normal(key, shape) / (shape[0] ** 0.5 if i and len(shape) > 1 else 1) for i, (key, shape) in each
    ]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow
def test_forms(name):
    f, _, products, passes = FORMS[name]
    args = arguments(name)
    graph = graph_of(functools.partial(f, InGraph), args, dtype=jnp.float32, name="block")
    in_jax = functools.partial(f, InJax)
    assert_close(jax.jit(graph)(*args), [in_jax(*args)], 1e-5)
    every = range(len(args))
    found, want = (jax.jit(jax.grad(total(one), every))(*args) for one in (graph, in_jax))
    assert_close(found, want, 1e-5)
    plans = graph.derivative().forward_plan, graph.derivative().backward().plan
    assert tuple(len(plan.steps) for plan in plans) == products
    assert tuple(sum(x.is_tile and x.shape[0] == M for x in plan.by_xla) for plan in plans) == passes
