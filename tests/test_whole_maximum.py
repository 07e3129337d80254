"""The maximum of a whole product as a reduction of its own: which functions are one, values, ties, batches, groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue import Axis, NotTileLocalError, ReductionOp, trace

M, K, N = 24, 16, 40
RNG = np.random.default_rng(5)


def random(*shape):
    return jnp.asarray(RNG.integers(-3, 4, shape), jnp.float32)


A, B, X = random(M, K), random(K, N), random(M, N)

# What each reduces, in a program of the kernel.
WHOLE = {
    "max": (lambda acc: jnp.max(acc), [Axis.ALL]),
    "method": (lambda acc: acc.max(), [Axis.ALL]),
    "kept axes": (lambda acc: jnp.max(acc, keepdims=True).reshape(()), [Axis.ALL]),
    "of rows": (lambda acc: jnp.max(jnp.max(acc, axis=1)), [Axis.ALL]),
    "of rows with their axis": (lambda acc: jnp.max(jnp.max(acc, axis=1, keepdims=True)), [Axis.ALL]),
    "of columns": (lambda acc: jnp.max(jnp.max(acc, axis=0)), [Axis.ALL]),
    "absolute": (lambda acc: jnp.max(jnp.abs(acc)), [Axis.ALL]),
    "finished": (lambda acc: 448 / jnp.maximum(jnp.max(jnp.abs(acc)), 1e-3), [Axis.ALL]),
    "of 16 bits": (lambda acc: jnp.max((acc / 3).astype(jnp.bfloat16)), [Axis.ALL]),
    "two": (lambda acc: (jnp.max(acc), jnp.max(-acc)), [Axis.ALL, Axis.ALL]),
    "shared": (lambda acc: (jnp.max(acc), jnp.max(acc) * 2), [Axis.ALL]),
    "of halves": (lambda acc: jnp.max(jnp.multiply(*jnp.split(acc, 2, axis=1))), [Axis.ALL]),
    "of joined halves": (
        lambda acc: jnp.max(jnp.concatenate([-x for x in jnp.split(acc, 2, axis=1)], axis=1)),
        [Axis.ALL],
    ),
    "of heads": (lambda acc: jnp.max(acc.reshape(M, -1, 8) * 2), [Axis.ALL]),
    "of a condition": (lambda acc: jnp.any(acc > 20), [Axis.ALL]),
    "beside those of rows": (lambda acc: (jnp.max(acc), jnp.max(acc, axis=1)), [Axis.ALL, Axis.ROW]),
    "from those of rows": (lambda acc: (rows := jnp.max(acc, axis=1), jnp.max(rows)), [Axis.ROW]),
    "a minimum": (lambda acc: jnp.min(acc), [Axis.ROW]),
    "a sum": (lambda acc: jnp.sum(acc), [Axis.ROW]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_programs_and_values(name):
    epilogue, axes = WHOLE[name]
    program = trace(epilogue, jax.ShapeDtypeStruct((M, N), jnp.float32), ())[0].program
    assert sorted(reduction.axis.value for reduction in program.reductions) == sorted(axis.value for axis in axes)
    got = jax.jit(functools.partial(coda.gemm, epilogue=epilogue))(A, B)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(epilogue(A @ B)), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("at", [(0, 0), (M - 1, N - 1)])
def test_not_a_number(at):
    x = jnp.zeros((M, N)).at[at].set(jnp.nan)
    assert jnp.isnan(coda.gemm(A, B, x, epilogue=lambda acc, x: jnp.max(acc + x)))


def test_the_tile_does_not_meet_it():
    for implementation in ("auto", "cuda"):
        with pytest.raises(
            NotTileLocalError, match=r"combines the tile with the reduction 'reduce_max'.*known only after"
        ):
            jax.eval_shape(
                functools.partial(coda.gemm, epilogue=lambda acc: acc / jnp.max(acc), implementation=implementation),
                A,
                B,
            )


def test_reduction():
    """The program says of the reduction that it is a maximum along all axes."""
    epilogue, _ = trace(lambda acc: jnp.max(acc), jax.ShapeDtypeStruct((M, N), jnp.float32), ())
    (reduction,) = epilogue.program.reductions
    assert reduction.op is ReductionOp.MAX and "max along all full: v0" in str(epilogue.program)
    assert epilogue.program.row_axes == ((),)


def total(f, *arguments):
    return jax.jit(jax.grad(lambda *x: sum(jnp.sum(3 * y) for y in jax.tree.leaves(f(*x))), argnums=(0, 1, 2)))(
        *arguments
    )


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("nested", [False, True])
def test_ties(nested, residuals):
    """Among equal ones as JAX shares the cotangent: of a maximum of maxima first by rows."""

    def epilogue(acc, x):
        y = jnp.round(jnp.abs(acc) * x / 8)
        return jnp.max(jnp.max(y, axis=1)) if nested else jnp.max(y)

    a, b = jnp.ones((M, K)), jnp.ones((K, N))
    x = jnp.ones((M, N)).at[::3].set(4).at[0, 5:].set(4.1)

    def smooth(acc, x):
        return epilogue(acc, x) + jnp.max(acc * x)

    fused = functools.partial(coda.gemm, epilogue=smooth, residuals=residuals)
    for one, other in zip(total(fused, a, b, x), total(lambda a, b, x: smooth(a @ b, x), a, b, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert np.abs(other).max() > 0


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, 0)], ids=str)
def test_batches(axes):
    shapes = ((M, K), (K, N), (M, N))
    arguments = [random(3, *shape) if axis == 0 else random(*shape) for axis, shape in zip(axes, shapes, strict=True)]

    def plain(a, b, x):
        return jnp.max(jnp.abs(a @ b + x)), a @ b

    def fused(a, b, x):
        return coda.gemm(a, b, x, epilogue=lambda acc, x: (jnp.max(jnp.abs(acc + x)), acc))

    got, want = (jax.jit(jax.vmap(f, in_axes=axes))(*arguments) for f in (fused, plain))
    assert got[0].shape == (3,)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_leading_axes():
    a = random(2, 3, M, K)
    got = coda.gemm(a, B, epilogue=lambda acc: jnp.max(acc))
    assert got.shape == () and got == jnp.max(a @ B)


def test_groups():
    """One of each group, as other reductions over rows."""
    sizes, b = jnp.array([8, 0, 10], jnp.int32), random(3, K, N)
    got = jax.jit(lambda *x: coda.ragged_gemm(*x, epilogue=lambda acc: (acc, jnp.max(jnp.abs(acc)))))(A, b, sizes)[1]
    np.testing.assert_array_equal(got, [jnp.max(jnp.abs(A[:8] @ b[0])), -jnp.inf, jnp.max(jnp.abs(A[8:18] @ b[2]))])
