"""A graph whose products have factors of 8 bits: maps quantise, copies along k are stored where the tile is made."""

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from coda_jax.graph.function import graph_of
from coda_jax.graph.values import Product, Transposed, make_map, transposed
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.gemm_cases import assert_close

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, F = 48, 32, 64
E4M3 = jnp.float8_e4m3fn
SCALES = (2.0, 8.0, 2.0, 8.0, 16.0, 32.0)  # of x, up, hidden, down, and the cotangents of both products


def quantised(x, scale, of_cotangent):
    """x rounded to 8 bits, straight through: the cotangent that comes back is that of a product times its own scale."""
    pullback = lambda q, x, s, t, dq: (dq * s / t, None, None)  # noqa: E731
    return make_map(lambda x, s, t: coda.saturate(x * s, E4M3), x, scale, of_cotangent, pullback=pullback)


def product(x, w, units, scale, history):
    """x w of factors that are rounded; its cotangent is rounded where it is made, and the largest goes to the history.

    units: what the sums stand for, 1 / (s_x s_w). The history's cotangent is the next step's maximum, no derivative.
    """
    acc = Product(x, w, transpose_b=True)
    pullback = lambda y, acc, unit, s, h, dy: (  # noqa: E731
        coda.saturate(dy * unit * s, E4M3),
        None,
        None,
        jnp.max(jnp.abs(dy * unit)),
    )
    return make_map(lambda acc, unit, s, h: acc * unit, acc, units, scale, history, pullback=pullback)


def block(x, up, down, history, *scales):
    of_x, of_up, of_hidden, of_down, of_dz, of_dy = scales
    one = make_map(lambda s, t: 1 / (s * t), of_x, of_up)
    other = make_map(lambda s, t: 1 / (s * t), of_hidden, of_down)
    z = product(quantised(x, of_x, of_dz), transposed(quantised(up, of_up, of_dz)), one, of_dz, history)
    hidden = make_map(jax.nn.gelu, z)
    largest = make_map(lambda h: jnp.max(jnp.abs(h)), hidden)
    y = product(quantised(hidden, of_hidden, of_dy), transposed(quantised(down, of_down, of_dy)), other, of_dy, history)
    return make_map(jnp.add, y, x), largest


def in_jax(x, up, down, history, *scales):
    """The same, written with custom_vjp functions."""
    of_x, of_up, of_hidden, of_down, of_dz, of_dy = scales

    def q(x, s):
        return coda.saturate(x * s, E4M3).astype(jnp.float32)

    @jax.custom_vjp
    def multiply(x, w, history, of_x, of_w, of_dy):
        return q(x, of_x) @ q(w, of_w) / (of_x * of_w)

    def forward(x, w, history, of_x, of_w, of_dy):
        return multiply(x, w, history, of_x, of_w, of_dy), (q(x, of_x), q(w, of_w), of_x, of_w, of_dy)

    def backward(kept, dy):
        x, w, of_x, of_w, of_dy = kept
        dacc = dy / (of_x * of_w)
        rounded = q(dacc, of_dy)
        dx, dw = rounded @ w.T * of_x / of_dy, x.T @ rounded * of_w / of_dy
        return dx, dw, jnp.max(jnp.abs(dacc)), None, None, None

    multiply.defvjp(forward, backward)
    hidden = jax.nn.gelu(multiply(x, up, history, of_x, of_up, of_dz))
    y = multiply(hidden, down, history, of_hidden, of_down, of_dy)
    return y + x, jnp.max(jnp.abs(hidden))


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((M, D), (D, F), (F, D))
    arrays = [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in zip(keys, shapes, strict=True)]
    return *arrays, jnp.float32(0), *map(jnp.float32, SCALES)


@pytest.fixture(scope="module")
def graph():
    return graph_of(block, arguments(), dtype=jnp.bfloat16, out_dtypes=[jnp.float32] * 2, name="mlp_fp8")


def loss(f):
    return lambda *args: jnp.sum(jnp.sin(f(*args)[0]))


@pytest.mark.smoke
def test_values_and_gradients(graph):
    args = arguments()
    assert_close(jax.jit(graph)(*args), list(in_jax(*args)), 2e-2)  # a sum in another order may round to the next value
    found, want = (jax.jit(jax.grad(loss(f), (0, 1, 2, 3)))(*args) for f in (graph, in_jax))
    for x, y in zip(found, want, strict=True):
        assert float(jnp.linalg.norm(x - y)) <= 1e-2 * float(jnp.linalg.norm(y))


def test_copies_are_stored_by_the_epilogue_that_makes_the_tile(graph):
    """Six products of 8 bits, each along k. Backward z is read, and the hidden tile's transposed copy made of it."""
    args = arguments()
    equations, _ = equations_of(jax.grad(loss(graph), (0, 1, 2, 3)), *args)
    products = [one for one, _ in equations if one.primitive in PRIMITIVES]
    assert len(products) == 6
    for one in products:
        spec = one.params["spec"]
        assert spec.transpose_b and not spec.transpose_a
        assert {x.aval.dtype for x in one.invars[:2]} == {jnp.dtype(E4M3)}
    (hidden,) = (
        step
        for step in graph.derivative().forward_plan.steps
        if step.product.b.shape == (F, D) and step.product.shape[1] == F
    )
    copies = [value for value in hidden.stores if value.dtype == jnp.dtype(E4M3)]
    assert [(type(value) is Transposed, value.shape) for value in copies] == [(False, (M, F))]
    assert any(value.shape == () for value in hidden.stores)  # the largest
    backward = graph.derivative().backward(frozenset({1})).plan
    of_dz = backward.steps[0].stores
    assert sorted(value.shape for value in of_dz) == sorted([(), (M, F), (F, M), (F, M)])
    transposes = [
        one for one, _ in equations if one.primitive.name == "transpose" and one.outvars[0].aval.size == M * F
    ]
    assert not transposes
