"""Arrays that an epilogue closes over, and derivatives of its own, through tracing and transformations."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import evaluate, trace
from coda_jax.epilogue.operand_kinds import COLUMN_VECTOR, ROW_VECTOR, TILE
from tests.trace_cases import ACC, M, N, close, typed, values


def _apply(w, b):
    """An epilogue that closes over w and b, as coda.gemm runs it."""
    acc = jnp.ones((M, N)) * 0.5

    def f(acc, x):
        return jax.nn.silu(acc * w) * x + jax.jit(lambda y: y * b)(acc)

    epilogue, captured = trace(f, typed(M, N), (typed(M, N),))
    assert len(captured) == 2
    (out,) = epilogue.call(acc, values(M, N, seed=5), *captured)
    (same,) = evaluate(epilogue.program, acc, values(M, N, seed=5), *captured)
    return out, same


def _reference(w, b):
    acc = jnp.ones((M, N)) * 0.5
    return jax.nn.silu(acc * w) * values(M, N, seed=5) + acc * b


def test_captured_under_transformations():
    w, b = values(N, seed=1), values(M, 1, seed=2)
    for out in (*_apply(w, b), *jax.jit(_apply)(w, b)):
        close(out, _reference(w, b))
    gradient = jax.grad(lambda w, b: (_reference(w, b) ** 2).sum(), (0, 1))(w, b)
    for i in range(2):
        actual = jax.jit(jax.grad(lambda w, b, i=i: (_apply(w, b)[i] ** 2).sum(), (0, 1)))(w, b)
        jax.tree.map(close, actual, gradient)
    ws = values(3, N, seed=3)
    close(jax.vmap(_apply, (0, None))(ws, b)[0], jax.vmap(_reference, (0, None))(ws, b))
    close(lax.map(lambda w: _apply(w, b)[1], ws), jax.vmap(_reference, (0, None))(ws, b))
    carried = lax.scan(lambda total, w: (total + _apply(w, b)[0].sum(), None), 0.0, ws)[0]
    close(carried, sum(_reference(w, b).sum() for w in ws))


def _scaled(w, scale, acc):
    return acc * w + scale


def test_captured_array_does_not_enter_the_program():
    programs = set()
    for seed in range(3):
        w, scale = values(N, seed=seed), jnp.float32(seed)
        programs.add(trace(partial(_scaled, w, scale), ACC, ())[0].program)
    assert len(programs) == 1


def test_captured_kinds_and_dtypes():
    w, mask = values(M, 1).astype(jnp.bfloat16), np.arange(N) % 2 == 0
    tile = np.ones((M, N), np.float16)
    epilogue, captured = trace(lambda acc: jnp.where(mask, acc * w, tile), ACC, ())
    kinds = {(o.kind, o.dtype.name) for o in epilogue.program.operands}
    assert kinds == {(COLUMN_VECTOR, "bfloat16"), (ROW_VECTOR, "bool"), (TILE, "float16")}
    assert len(captured) == 3


def test_the_same_array_is_captured_once():
    w = values(N)
    _, captured = trace(lambda acc: acc * w + jax.jit(lambda x: x - w)(acc), ACC, ())
    assert len(captured) == 1


def test_unused_captured_array_is_dropped():
    epilogue, captured = trace(lambda acc: [acc @ jnp.ones((N, N)), acc][1], ACC, ())
    assert captured == () and epilogue.program.operands == ()


def test_epilogue_holds_no_array():
    def traced():
        w = values(N)
        return trace(lambda acc: jax.nn.relu(acc * w), ACC, ())[0], weakref.ref(w)

    epilogue, array = traced()
    gc.collect()
    assert len(epilogue.program.operands) == 1 and array() is None


def test_custom_derivatives_are_kept():
    @jax.custom_jvp
    def f(x):
        return x * 2

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * 7))

    @jax.custom_vjp
    def g(x, w):
        return x * w

    g.defvjp(lambda x, w: (g(x, w), w), lambda w, ct: (ct * 5, jnp.zeros_like(w)))
    w = values(N)
    epilogue, captured = trace(lambda acc: g(f(acc), w), ACC, ())
    acc = values(M, N)
    close(epilogue.call(acc, *captured)[0], acc * 2 * w)
    close(jax.grad(lambda a: epilogue.call(a, *captured)[0].sum())(acc), jnp.full((M, N), 35.0))
    close(jax.jit(jax.grad(lambda a: epilogue.call(a, *captured)[0].sum()))(acc), jnp.full((M, N), 35.0))


def test_rounding_inside_custom_derivatives_survives_jit():
    """A straight-through estimator: the value is rounded, the derivative is what the rule says."""

    @jax.custom_vjp
    def round_vjp(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    round_vjp.defvjp(lambda x: (round_vjp(x), None), lambda _, ct: (ct * 3,))

    @jax.custom_jvp
    def round_jvp(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    round_jvp.defjvp(lambda primals, tangents: (round_jvp(*primals), tangents[0] * 5))
    acc = values(M, N)
    expected = np.asarray(acc.astype(jnp.bfloat16)).astype(np.float32)
    for f, slope in ((round_vjp, 3.0), (round_jvp, 5.0)):
        epilogue, _ = trace(lambda acc, f=f: f(acc), ACC, ())
        np.testing.assert_array_equal(jax.jit(epilogue.call)(acc)[0], expected)
        value, pullback = jax.jit(lambda acc, e=epilogue: jax.vjp(e.call, acc))(acc)
        np.testing.assert_array_equal(value[0], expected)
        np.testing.assert_array_equal(pullback([jnp.ones_like(acc)])[0], jnp.full_like(acc, slope))
