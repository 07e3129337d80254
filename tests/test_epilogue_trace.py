"""Tracing: structural equality, and the meaning of axes when sizes coincide."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue import Axis, NotTileLocalError, ReductionOp, Width, emit, evaluate, trace
from coda_jax.epilogue.operand import Columns
from coda_jax.epilogue.operand_kinds import COLUMN_VECTOR, KINDS, ROW_VECTOR, SCALAR, TILE
from tests.trace_cases import ACC, M, N, close, typed, values

# ---- operands and axes


def test_operand_kinds():
    shapes = [(), (1,), (1, 1), (N,), (1, N), (M, 1), (M, N), (N // 2,), (1, N // 2), (M, N // 2)]
    epilogue, _ = trace(lambda acc, *x: acc[:, :4], ACC, [typed(*s) for s in shapes])
    kinds = [SCALAR] * 3 + [ROW_VECTOR] * 2 + [COLUMN_VECTOR, TILE] + [ROW_VECTOR] * 2 + [TILE]
    assert [o.kind for o in epilogue.program.operands] == kinds
    assert [o.width for o in epilogue.program.operands] == [Width.FULL] * 7 + [Width.HALF] * 3


def test_a_shape_is_of_one_kind():
    """Sizes that coincide included; of what is marked alike, of a head's columns and of the product's apart."""
    for m, n in itertools.product((1, 2, 3, 4), repeat=2):
        for shape in [(), *itertools.product((1, 2, 3, 4)), *itertools.product((1, 2, 3, 4), repeat=2)]:
            fitting = [kind for kind in KINDS if kind.fits(shape, m, n)]
            apart = {(kind.mark, kind.columns is Columns.OF_HEAD) for kind in fitting}
            assert len(apart) == len(fitting), (m, n, shape, fitting)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (1, 8), (8, 1), (1, 1), (2, 2), (16, 8), (8, 16)])
def test_axes_do_not_depend_on_sizes(m, n):
    """M == N, M == 1 and N == 1 must not confuse rows with columns."""

    def f(acc, row, column, tile):
        y = acc * row + column
        return {
            "tile": y + tile,
            "row_sum": jnp.sum(y, axis=1),
            "column_sum": jnp.sum(y * y, axis=0),
            "column_max": jnp.max(y, axis=0, keepdims=True),
            "all": jnp.sum(y),
            "index": y + jnp.arange(m)[:, None] * 10 + jnp.arange(n),
            "finish": jnp.sum(y, axis=1, keepdims=True) * column + jnp.max(tile, axis=1, keepdims=True),
        }

    acc, operands = values(m, n), (values(n, seed=1), values(m, 1, seed=2), values(m, n, seed=3))
    epilogue, _ = trace(f, acc, operands)
    for out, expected in zip(
        evaluate(epilogue.program, acc, *operands), jax.tree.leaves(f(acc, *operands)), strict=True
    ):
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    names = sorted(["tile", "row_sum", "column_sum", "column_max", "all", "index", "finish"])
    assert {names[s.output] for s in epilogue.program.stores} == {"index", "tile"}


def test_square_transpose_is_seen():
    with pytest.raises(NotTileLocalError, match="transpose"):
        trace(lambda acc: acc + acc.T, typed(8, 8), ())
    with pytest.raises(NotTileLocalError, match="indexed by the row with one indexed by the column"):
        trace(lambda acc, column: acc + column.T, typed(8, 8), (typed(8, 1),))


def test_transposed_and_back():
    epilogue, _ = trace(lambda acc, column: acc + column.T[0][:, None], ACC, (typed(M, 1),))
    assert epilogue.program.halves.count == 1


def test_reductions_have_the_right_axis():
    def f(acc):
        return (acc.sum(1), acc.max(0), acc.min(), jnp.split(acc, 2, axis=1)[0].sum(0))

    reductions = trace(f, typed(8, 8), ())[0].program.reductions
    assert {(r.op, r.axis, r.width) for r in reductions} == {
        (ReductionOp.SUM, Axis.ROW, Width.FULL),
        (ReductionOp.MAX, Axis.COLUMN, Width.FULL),
        (ReductionOp.MIN, Axis.ROW, Width.FULL),
        (ReductionOp.SUM, Axis.COLUMN, Width.HALF),
    }


def test_logsumexp_is_one_reduction():
    """Ours and JAX's are the same program; one that adds something else than it subtracts is none."""

    def by_hand(a, added=lambda largest, a: largest):
        largest = jnp.max(a, axis=1, keepdims=True)
        return jnp.log(jnp.sum(jnp.exp(a - largest), axis=1)) + jnp.squeeze(added(largest, a), 1)

    programs = {
        trace(f, ACC, ())[0].program
        for f in (
            lambda a: coda.logsumexp(a),
            lambda a: jax.nn.logsumexp(a, axis=-1),
            lambda a: jax.scipy.special.logsumexp(a, axis=1),
            lambda a: jax.vmap(jax.nn.logsumexp)(a),
            by_hand,
        )
    }
    assert len(programs) == 1
    (reduction,) = programs.pop().reductions
    assert (reduction.op, reduction.axis) == (ReductionOp.LOGSUMEXP, Axis.ROW)
    with pytest.raises(NotTileLocalError, match="with the reduction 'reduce_max'"):
        trace(lambda a: by_hand(a, lambda largest, a: 2 * largest), ACC, ())
    with pytest.raises(NotTileLocalError, match="with the reduction 'reduce_max'"):
        trace(lambda a: (lambda g: jnp.log(jnp.sum(jnp.exp(a - g), axis=1)) + g)(jnp.max(a, axis=1)), typed(8, 8), ())


def test_logsumexp_outside_of_an_epilogue():
    x = values(M, N).at[2].set(-jnp.inf).at[3, 1].set(-jnp.inf)
    finite = x[3:]
    want = jax.nn.logsumexp(x, axis=1)
    close(coda.logsumexp(x), want)
    close(jax.jit(jax.vmap(lambda row: coda.logsumexp(row, 0, keepdims=True)))(x)[:, 0], want)
    close(jax.vmap(lambda row: coda.logsumexp(row, 0), in_axes=1)(x.T), want)
    assert not jax.jit(jax.jacrev(coda.logsumexp))(x)[2].any()
    close(jax.jit(jax.jacrev(coda.logsumexp))(finite), jax.jit(jax.jacrev(partial(jax.nn.logsumexp, axis=1)))(finite))
    row = values(N)
    close(jax.jit(jax.hessian(lambda r: coda.logsumexp(r, 0)))(row), jax.jit(jax.hessian(jax.nn.logsumexp))(row))
    with pytest.raises(TypeError, match="x has dtype int32; it must be floating"):
        coda.logsumexp(jnp.arange(4), 0)
    with pytest.raises(ValueError, match=r"axis = 2; x has shape \(6, 8\)"):
        coda.logsumexp(x, 2)


def test_identity():
    epilogue, captured = trace(None, ACC, ())
    assert captured == () and len(epilogue.program.stores) == 1
    assert epilogue.program == trace(lambda acc: acc, ACC, ())[0].program


def test_symbolic_rows():
    (m,) = jax.export.symbolic_shape("m")

    def f(acc, x, c):
        return (acc * c + x, jnp.mean(acc, axis=1), jnp.mean(acc), jnp.concatenate([acc[:, 4:], acc[:, :4]], axis=1))

    epilogue, _ = trace(f, typed(m, N), (typed(m, N, dtype=jnp.bfloat16), typed(m, 1)))
    assert [s.output for s in epilogue.program.stores] == [0, 3]
    assert epilogue.out_avals[1].shape == (m,)

    def whole(acc, x, c):
        return evaluate(epilogue.program, acc, x, c)

    exported = jax.export.export(jax.jit(whole))(typed(m, N), typed(m, N, dtype=jnp.bfloat16), typed(m, 1))
    acc, x, c = values(5, N), values(5, N, seed=1).astype(jnp.bfloat16), values(5, 1, seed=2)
    for out, expected in zip(exported.call(acc, x, c), f(acc, x.astype(jnp.float32), c), strict=True):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_symbolic_rows_of_a_gradient():
    """Slices of a symbolic array are gathers, and their derivatives scatters."""
    (m,) = jax.export.symbolic_shape("m")

    def f(acc, ct):
        return jax.vjp(lambda a: jax.nn.silu(a[:, :4]) * a[:, 4:], acc)[1](ct)[0]

    epilogue, _ = trace(f, typed(m, N), (typed(m, N // 2),))
    acc, ct = values(5, N), values(5, N // 2, seed=1)
    np.testing.assert_allclose(evaluate(epilogue.program, acc, ct)[0], f(acc, ct), rtol=1e-5, atol=1e-6)


def test_explicit_rounding_survives_jit():
    """XLA drops float32 -> bfloat16 -> float32 from the plain function; the epilogue's evaluation must round."""

    def f(acc):
        return acc.astype(jnp.bfloat16).astype(jnp.float32) + acc.astype(jnp.float16)

    epilogue, _ = trace(f, ACC, ())
    acc = values(M, N) * jnp.float32(10.0) ** jnp.arange(-9, -1)
    (out,) = jax.jit(epilogue.call)(acc)
    expected = np.asarray(acc.astype(jnp.bfloat16)).astype(np.float32) + np.asarray(acc).astype(np.float16).astype(
        np.float32
    )
    np.testing.assert_array_equal(out, expected)


def test_gradient_of_rounding_is_that_of_astype():
    def f(acc):
        return (acc.astype(jnp.bfloat16) * 3).astype(jnp.float32) ** 2

    epilogue, _ = trace(f, ACC, ())
    acc, ct = values(M, N), values(M, N, seed=1)
    np.testing.assert_array_equal(jax.vjp(epilogue.call, acc)[1]([ct])[0], jax.vjp(f, acc)[1](ct)[0])


def test_bf16_operands_are_seen_as_float32():
    seen = []

    def f(acc, x, i):
        return [seen.append((x.dtype, i.dtype)), acc * jax.nn.silu(x) + i][1]

    trace(f, ACC, (typed(M, N, dtype=jnp.bfloat16), typed(N, dtype=jnp.int32)))
    assert seen == [(jnp.float32, jnp.int32)]


# ---- equality


def _programs(make):
    return [trace(make(), ACC, (typed(N), typed(M, N, dtype=jnp.bfloat16)))[0].program for _ in range(2)]


@pytest.mark.parametrize(
    "f",
    [
        lambda acc, b, x: jax.nn.silu(acc + b) * x,
        lambda acc, b, x: jax.nn.relu(acc) + jax.nn.gelu(x) + b,
        lambda acc, b, x: (jnp.split(acc, 2, axis=1)[1] * 2, jnp.mean(acc, axis=1), jnp.cumsum(jnp.sum(x, axis=0))),
        lambda acc, b, x: jax.vjp(jax.nn.softplus, acc)[1](x)[0] + b,
    ],
)
def test_fresh_lambdas_are_equal(f):
    first, second = _programs(lambda: lambda acc, b, x: f(acc, b, x))
    assert first == second and hash(first) == hash(second) and str(first) == str(second)
    assert first is not second
    texts = [emit(p, [np.dtype(jnp.bfloat16)] * len(p.stores), [False, False]) for p in (first, second)]
    assert texts[0] == texts[1]


def test_different_mathematics_is_different():
    operands = (typed(N), typed(M, N))
    variants = [
        lambda a, b, x: a + b,
        lambda a, b, x: a - b,
        lambda a, b, x: a + x,
        lambda a, b, x: a + b + 0.0,
        lambda a, b, x: a + b + (-0.0),
        lambda a, b, x: a + b + jnp.nan,
        lambda a, b, x: (a + b).astype(jnp.bfloat16),
        lambda a, b, x: a**2 + b,
        lambda a, b, x: a**3 + b,
        lambda a, b, x: (a, a.sum(1)),
        lambda a, b, x: (a, a.sum(0)),
        lambda a, b, x: (a, a.max(1)),
        lambda a, b, x: (a, a.sum(1) / 2),
        lambda a, b, x: (a, a.sum(1) / 3),
        lambda a, b, x: (a.sum(1), a),
    ]
    assert len({trace(f, ACC, operands)[0].program for f in variants}) == len(variants)


def test_program_does_not_depend_on_sizes():
    def f(acc, b, x):
        return (jax.nn.gelu(acc + b) * x, jnp.sum(acc, axis=1), jnp.split(acc, 2, axis=1)[0], jnp.sum(x, axis=0))

    programs = {trace(f, typed(m, n), (typed(n), typed(m, n)))[0].program for m, n in [(6, 8), (8, 8), (128, 256)]}
    assert len(programs) == 1


def test_dead_code_and_common_subexpressions_are_gone():
    def f(acc, x):
        jnp.exp(acc) + jnp.sum(acc * 3) + jnp.cumsum(acc, axis=1)
        return jax.nn.silu(acc) + jax.nn.silu(acc) * x

    program = trace(f, ACC, (typed(M, N),))[0].program
    assert not program.reductions
    ops = [node.op for node in program.nodes]
    assert ops.count("logistic") == 1 and "exp" not in ops


@pytest.mark.parametrize(("sums", "order"), [(0, [0, 1]), (1, [0, 1]), (2, [1, 0])])
def test_the_order_of_stores(sums, order):
    """Beside several sums along columns a value that is computed first is stored first; outputs are as f has them."""

    def f(acc):
        early = acc * 2
        late = jnp.sin(early)
        return late, early, *(jnp.sum(x, axis=0) for x in (early, late)[:sums])

    acc = values(M, N)
    epilogue, _ = trace(f, acc, ())
    assert [store.output for store in epilogue.program.stores] == order
    a, b = values(M, 16), values(16, N, seed=1)
    for got, want in zip(coda.gemm(a, b, epilogue=f), f(a @ b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
