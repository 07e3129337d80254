"""Identities of programs: where they hold, and that they keep what a function means at the ends of float32's range."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coda_jax.epilogue import evaluate, trace

M, N = 20, 16
ACC = np.random.default_rng(0).normal(size=(M, N)).astype(np.float32) * 2
TOLERANCE = 4e-6


def test_halved_tanh_becomes_logistic_where_nothing_else_needs_the_tanh():
    def operations(f):
        program = trace(f, ACC, ())[0].program
        np.testing.assert_allclose(evaluate(program, ACC)[0], f(ACC), rtol=TOLERANCE, atol=TOLERANCE)
        return {node.op for node in program.nodes} & {"tanh", "logistic"}

    assert operations(jax.nn.gelu) == {"logistic"}
    assert operations(jax.grad(lambda a: jax.nn.gelu(a).sum())) == {"logistic"}
    assert operations(jax.grad(lambda a: jnp.tanh(a).sum())) == {"tanh"}
    assert operations(jax.grad(lambda a: (jnp.tanh(a) * (1 + jnp.tanh(a)) * 0.5).sum())) == {"tanh"}
    assert operations(lambda a: (1 + jnp.tanh(a)) * (0.5 + jnp.tanh(a))) == {"tanh"}
    assert operations(lambda a: (jnp.tanh(a + 1) + 1) * 0.5) == {"logistic"}
    assert operations(lambda a: (1 + jnp.tanh(a)) * 0.5 + jnp.tanh(a)) == {"tanh"}
    assert operations(lambda a: 0.25 * (1 + jnp.tanh(a))) == {"tanh"}
    assert operations(lambda a: 0.5 * (2 + jnp.tanh(a))) == {"tanh"}


def test_literals_of_a_product_are_multiplied_once():
    def products(f, tolerance=TOLERANCE):
        program, acc = trace(f, ACC, ())[0].program, jnp.asarray(ACC)
        np.testing.assert_allclose(evaluate(program, acc)[0], f(acc), rtol=tolerance, atol=tolerance - TOLERANCE)
        return [node.op for node in program.nodes].count("mul")

    assert products(lambda a: 0.5 * a * (jnp.exp(a) * 3)) == 2
    assert products(lambda a: -3.0 * (0.7 * (jnp.exp(a) * 0.5))) == 1
    assert products(lambda a: (y := jnp.exp(a) * 3 * a) * 0.5 + y) == 3  # y is needed by itself
    assert products(lambda a: 1e30 * (1e-30 * (a * a))) == 3  # 1e30 * a might overflow in another order
    assert products(lambda a: functools.reduce(lambda x, _: x * 6e4, range(9), a * 1e-38)) == 10  # 6e4^9 is infinite
    assert products(lambda a: 0.5 * a * (jnp.exp(a) * 0.3)) == 3  # a * exp(a) might overflow
    assert products(jax.grad(lambda a: jax.nn.gelu(a).sum()), 3e-5) == 7  # of 13; 1 + tanh(x) cancels for x near -3
    assert products(lambda a: (a.astype(jnp.bfloat16) * 3 * 0.5).astype(jnp.float32)) == 2  # each may be rounded


@pytest.mark.parametrize(("x", "c"), [(3e19, 0.01), (1e-20, 100.0), (2.2e19, 0.5), (1e-25, 1e4)], ids=str)
def test_literals_do_not_leave_the_range_of_float32(x, c):
    """(0.01 * a) * (0.01 * t) at 3e19 is 9e34, though a * t is infinite; with 100 and 1e-20 it is 1e-36."""
    acc = jnp.full((M, N), x, jnp.float32)
    for f in (
        lambda a, t: (c * a) * (c * t),
        lambda a, t: c * ((c * a) * t),
        lambda a, t: (c * a) * (t * (1 / c)),
        lambda a, t: (c * (a * t)) * (1 / c),
    ):
        program = trace(f, acc, (acc,))[0].program
        np.testing.assert_allclose(evaluate(program, acc, acc)[0], f(acc, acc), rtol=TOLERANCE)


Tree = tuple[Any, Any] | float | int  # a product, a literal, or the number of what varies


def _random_tree(rng: np.random.Generator, size: int) -> Tree:
    if size == 1:
        is_literal = rng.random() < 0.5
        return float(np.float32(rng.choice([-1, 1]) * 2 ** rng.uniform(-8, 8))) if is_literal else int(rng.integers(4))
    left = int(rng.integers(1, size))
    return _random_tree(rng, left), _random_tree(rng, size - left)


def _product(tree: Tree, values: Any, seen: list[Any]) -> Any:
    if not isinstance(tree, tuple):
        return tree if isinstance(tree, float) else values[tree]
    x, y = (_product(one, values, seen) for one in tree)
    seen.append(x * y)
    return seen[-1]


def test_random_products_keep_their_range():
    """Nothing in a product's program leaves float32's normal range if nothing in the product does."""
    rng, fewer, kept = np.random.default_rng(0), 0, 0
    for _ in range(200):
        tree = (_random_tree(rng, int(rng.integers(2, 8))), 0)
        values = (10 ** rng.uniform(-37, 38, size=(4, M, N))).astype(np.float32)

        def f(acc, *operands, tree=tree):
            return _product(tree, (acc, *operands), [])

        program = trace(f, values[0], values[1:])[0].program
        seen: list[Any] = []
        exact = _product(tree, values.astype(np.float64), seen)
        is_normal = np.all([np.broadcast_to((abs(x) > 2.0**-125) & (abs(x) < 2.0**127), (M, N)) for x in seen], axis=0)
        out = np.asarray(evaluate(program, *values)[0])
        np.testing.assert_allclose(out[is_normal], exact[is_normal], rtol=TOLERANCE, err_msg=f"{tree}\n{program}")
        fewer += [node.op for node in program.nodes].count("mul") < len(seen)
        kept += int(is_normal.sum())
    assert fewer > 50 and kept > 4000
