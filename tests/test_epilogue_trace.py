"""Tracing: refusals, captured arrays, structural equality, and the meaning of axes when sizes coincide."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coda_jax as coda
from coda_jax.epilogue import Axis, Kind, NotTileLocalError, ReductionOp, Width, emit, trace

M, N = 6, 8


def typed(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ACC = typed(M, N)


def values(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ---- refusals: the operation, the line, what to do

REFUSED = {
    "cumsum": (lambda a: jnp.cumsum(a, axis=1), "cumsum"),
    "sort": (lambda a: jnp.sort(a, axis=1), "sort"),
    "argsort": (lambda a: jnp.argsort(a, axis=1), "argsort"),
    "top_k": (lambda a: lax.top_k(a, 2)[0], "top_k"),
    "argmax": (lambda a: jnp.argmax(a, axis=1), "argmax.*Return the maximum"),
    "dot_general": (lambda a: a @ jnp.ones((N, N)), "dot_general.*coda.gemm of its own"),
    "captured_matrix": (lambda a: a @ MATRIX, r"captured array 0 has shape \(8, 8\), which does not broadcast"),
    "gram": (lambda a: jnp.einsum("mk,nk->mn", a, a), "dot_general.*coda.gemm of its own"),
    "transpose": (lambda a: a.T, "transpose.*exchanges the rows and columns"),
    "reverse": (lambda a: a[:, ::-1], "rev"),
    "roll": (lambda a: jnp.roll(a, 1, axis=1), "roll"),
    "gather": (lambda a: a[:, jnp.array([0, 3])], r"captured array|gather"),
    "column": (lambda a: a[:, 0], r"output 0 has shape \(6,\).*that of a part of the columns"),
    "row": (lambda a: a[2:3] + a, "slice.*takes 2:3 of the 6 rows"),
    "strided": (lambda a: a[:, ::3], "slice.*takes 0:8:3"),
    "every_second": (lambda a: a[:, ::2], r"output 0 has shape \(6, 4\)"),
    "dynamic_slice": (lambda a: lax.dynamic_slice_in_dim(a, 0, 4, axis=1), "dynamic_slice.*static indices"),
    "update": (lambda a: a.at[:, 0].set(0.0), "scatter"),
    "quarters": (
        lambda a: jnp.concatenate(jnp.split(a, 4, axis=1)[::-1], axis=1),
        "joins 2 and 2 and 2 and 2.*one by one",
    ),
    "two_parts": (lambda a: a[:, :3] * a[:, 3:6], "combines columns 0:3 with columns 3:6"),
    "repeated_rows": (
        lambda a: jnp.sum(jnp.broadcast_to(a[:, :1], (M, 5)), axis=0),
        "of repeated rows or columns|of a part of the columns",
    ),
    "no_columns": (lambda a: a[:, :0], "takes columns 0:0 of 8"),
    "sum_of_a_part": (lambda a: a[:, :3].sum(1), "reduction of a part of the columns"),
    "odd_heads": (lambda a: a[:, :6].reshape(M, 2, 3), "heads of 3 of 8 columns"),
    "two_head_sizes": (
        lambda a: (a.reshape(M, 2, 4).reshape(M, N), a.reshape(M, 4, 2).reshape(M, N)),
        "heads of 2 columns beside heads of 4",
    ),
    "half_of_the_heads": (
        lambda a: (a.reshape(M, 2, 4)[:, :, :2] + a.reshape(M, 2, 4)[:, :, 1:3]),
        "takes 1:3 of the 4 column of a heads",
    ),
    "halves_and_neighbours": (
        lambda a: jnp.concatenate([a.reshape(M, 2, 4)[..., 2:], a.reshape(M, 2, 4)[..., 1::2]], axis=-1).reshape(M, N),
        "halves of heads beside even and odd columns|takes every second column",
    ),
    "not_whole_heads": (lambda a: (a.reshape(M, 2, 4).reshape(M, N), a[:, :2]), "no whole heads of 4"),
    "counting_in_heads": (
        lambda a: (a.reshape(M, 2, 4) + jnp.arange(4.0)).reshape(M, N),
        "neither the rows nor the columns",
    ),
    "rows_apart": (lambda a: jnp.split(a, 2, axis=0)[0], r"split.*rows apart into \(3, 3\)"),
    "uneven_concatenate": (lambda a: jnp.concatenate([a, a[:, :4]], axis=1), "joins 8 and 4 elements along axis 1"),
    "three_times": (lambda a: jnp.concatenate([a, a, a], axis=1), "joins 8 and 8 and 8 elements along axis 1"),
    "halves_and_twice": (
        lambda a: jnp.concatenate([jnp.concatenate(jnp.split(a, 2, axis=1)[::-1], axis=1), a], axis=1),
        "joins 8 and 8 elements along axis 1",
    ),
    "concatenate_rows": (lambda a: jnp.concatenate([a, a], axis=0), "joins 8 and 8|joins 6 and 6"),
    "pad_more": (lambda a: jnp.pad(a, 1), "pads axis 0 by 1 and 1"),
    "sum_within_heads": (lambda a: a.reshape(M, 2, 4).sum(-1), r"\(6, 2\), a value for each head.*not returned"),
    "flatten": (lambda a: a.reshape(-1), "reshapes"),
    "row_index_of_product": (lambda a: a.reshape(2, 3, N), "reshapes"),
    "softmax": (lambda a: jax.nn.softmax(a, axis=-1), "with the reduction 'reduce_max'.*only after all tiles"),
    "layer_norm": (lambda a: a - jnp.mean(a, axis=1, keepdims=True), "'sub'.*with the reduction 'reduce_sum'"),
    "logsumexp": (lambda a: coda.logsumexp(a, axis=0), "reduce_logsumexp.*is a log-sum-exp along columns"),
    "weighted_logsumexp": (lambda a: jax.nn.logsumexp(a, axis=1, b=2.0 + a), "with the reduction 'reduce_max'"),
    "log_softmax": (lambda a: a - coda.logsumexp(a, keepdims=True), "with the reduction 'reduce_logsumexp'"),
    "variance": (lambda a: jnp.var(a, axis=1), "combines the tile with the reduction"),
    "vector_sum": (lambda a: a * jnp.sum(VECTOR), "combines the tile with the result of 'reduce_sum'.*before the call"),
    "vector_cumsum": (lambda a: a * jnp.cumsum(VECTOR), "combines the tile with the result of 'cumsum'"),
    "product": (lambda a: jnp.prod(a, axis=1), "reduce_prod.*logarithms"),
    "scan": (lambda a: lax.fori_loop(0, 3, lambda _, x: x * 2, a), "scan.*Unroll"),
    "while": (lambda a: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x * 2, a), "while.*Unroll"),
    "cond": (lambda a: lax.cond(VECTOR[0] > 0, lambda x: x, lambda x: -x, a), "cond|combines"),
    "sum_of_integers": (lambda a: jnp.sum(a.astype(jnp.int32), axis=1), "reduction of int32 values.*float32"),
    "integer_tile": (lambda a: a.astype(jnp.int32), "output 0 is a tile of dtype int32"),
    "bool_tile": (lambda a: (a, a > 0), "output 1 is a tile of dtype bool"),
    "stacked_output": (lambda a: jnp.stack([a, a]), "stack"),
    "extra_axis": (lambda a: a[None], r"output 0 has shape \(1, 6, 8\)"),
    "fp8": (lambda a: a.astype(jnp.float8_e4m3fn).astype(jnp.float32), "float8_e4m3fn.*computes in"),
    "bits": (lambda a: lax.bitcast_convert_type(a, jnp.int32), "bitcast_convert_type"),
    "complex": (lambda a: jnp.abs(lax.complex(a, a)), "complex"),
    "digamma": (lambda a: lax.digamma(a), "digamma.*not an operation that epilogues know"),
    "random": (lambda a: a * jax.random.bernoulli(jax.random.key(0), 0.5, a.shape), "combines the tile with|random"),
    "debug_print": (lambda a: [jax.debug.print("{}", a[0, 0]), a][1], "slice|calls back"),
    "callback": (lambda a: jax.pure_callback(lambda x: x, a, a), "pure_callback.*calls back into Python"),
}  # fmt: skip
MATRIX = jnp.ones((N, N))
VECTOR = jnp.arange(float(N))


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name):
    f, message = REFUSED[name]
    with pytest.raises(NotTileLocalError, match=message) as info:
        trace(f, ACC, ())
    assert "epilogue 'lambda'" in str(info.value)


def test_refusal_names_the_users_line():
    def my_epilogue(acc):
        scaled = acc * 2
        return jnp.cumsum(scaled, axis=0)

    line = my_epilogue.__code__.co_firstlineno + 2
    message = rf"epilogue 'my_epilogue': 'cumsum' at .*test_epilogue_trace.py:{line}.*Allowed in an epilogue"
    with pytest.raises(NotTileLocalError, match=message):
        trace(my_epilogue, ACC, ())


@pytest.mark.parametrize("shape", [(2, 1, N), (2, M, N), (M,), (5,), (M, 2), (1, 4, 1), (2 * M, N), (1, 3)])
def test_refused_operand_shape(shape):
    with pytest.raises(NotTileLocalError, match=r"operand 'bias' has shape .* does not broadcast"):
        trace(lambda acc, bias: acc, ACC, (typed(*shape),))


def test_row_shaped_operand_of_length_m_says_what_to_do():
    with pytest.raises(NotTileLocalError, match=r"Pass it with shape \(M, 1\)"):
        trace(lambda acc, scale: acc, ACC, (typed(M),))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((M, N), jnp.int32), ((M, N), jnp.bool_), ((N,), jnp.int8), ((N,), jnp.uint32)]
)
def test_refused_operand_dtype(shape, dtype):
    with pytest.raises(NotTileLocalError, match=f"operand 'x' of shape .* has dtype {np.dtype(dtype)}"):
        trace(lambda acc, x: acc, ACC, (typed(*shape, dtype=dtype),))


def test_refused_float64():
    with jax.enable_x64(True):
        with pytest.raises(NotTileLocalError, match="float64"):
            trace(lambda acc: acc.astype(jnp.float64), ACC, ())
        with pytest.raises(NotTileLocalError, match="has dtype float64"):
            trace(lambda acc, x: acc + x, ACC, (typed(N, dtype=jnp.float64),))


def test_64_bit_mode():
    """Where 64-bit types are enabled, constants of Python are 64-bit until they meet the tile."""
    with jax.enable_x64(True):

        def f(acc):
            return jnp.where(acc > 0, acc * 2, 0.5), jnp.mean(acc, axis=1), jnp.round(acc, 2)

        assert trace(f, ACC, ())[0].out_avals[0].dtype == jnp.float32
        with pytest.raises(NotTileLocalError, match="makes int64 indices"):
            trace(lambda acc: acc * jnp.arange(N), ACC, ())


def test_captured_key_is_refused():
    key = jax.random.key(0)
    with pytest.raises(NotTileLocalError, match="pass random numbers"):
        trace(lambda acc: acc * jax.random.normal(key, acc.shape), ACC, ())


# ---- operands and axes


def test_operand_kinds():
    shapes = [(), (1,), (1, 1), (N,), (1, N), (M, 1), (M, N), (N // 2,), (1, N // 2), (M, N // 2)]
    epilogue, _ = trace(lambda acc, *x: acc[:, :4], ACC, [typed(*s) for s in shapes])
    kinds = (
        [Kind.SCALAR] * 3
        + [Kind.ROW_VECTOR] * 2
        + [Kind.COLUMN_VECTOR, Kind.TILE]
        + [Kind.ROW_VECTOR] * 2
        + [Kind.TILE]
    )
    assert [o.kind for o in epilogue.program.operands] == kinds
    assert [o.width for o in epilogue.program.operands] == [Width.FULL] * 7 + [Width.HALF] * 3


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
        epilogue.program.evaluate(acc, *operands), jax.tree.leaves(f(acc, *operands)), strict=True
    ):
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    names = sorted(["tile", "row_sum", "column_sum", "column_max", "all", "index", "finish"])
    assert [names[s.output] for s in epilogue.program.stores] == ["index", "tile"]


def test_square_transpose_is_seen():
    with pytest.raises(NotTileLocalError, match="transpose"):
        trace(lambda acc: acc + acc.T, typed(8, 8), ())
    with pytest.raises(NotTileLocalError, match="indexed by the row with one indexed by the column"):
        trace(lambda acc, column: acc + column.T, typed(8, 8), (typed(8, 1),))


def test_transposed_and_back():
    epilogue, _ = trace(lambda acc, column: acc + column.T[0][:, None], ACC, (typed(M, 1),))
    assert epilogue.program.ways == 1


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
    _close(coda.logsumexp(x), want)
    _close(jax.jit(jax.vmap(lambda row: coda.logsumexp(row, 0, keepdims=True)))(x)[:, 0], want)
    _close(jax.vmap(lambda row: coda.logsumexp(row, 0), in_axes=1)(x.T), want)
    assert not jax.jit(jax.jacrev(coda.logsumexp))(x)[2].any()
    _close(jax.jit(jax.jacrev(coda.logsumexp))(finite), jax.jit(jax.jacrev(partial(jax.nn.logsumexp, axis=1)))(finite))
    row = values(N)
    _close(jax.jit(jax.hessian(lambda r: coda.logsumexp(r, 0)))(row), jax.jit(jax.hessian(jax.nn.logsumexp))(row))
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
        return epilogue.program.evaluate(acc, x, c)

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
    np.testing.assert_allclose(epilogue.program.evaluate(acc, ct)[0], f(acc, ct), rtol=1e-5, atol=1e-6)


def test_explicit_rounding_survives_jit():
    """XLA drops float32 -> bfloat16 -> float32 from the plain function; the epilogue's evaluation must round."""

    def f(acc):
        return acc.astype(jnp.bfloat16).astype(jnp.float32) + acc.astype(jnp.float16)

    epilogue, _ = trace(f, ACC, ())
    acc = values(M, N) * jnp.float32(10.0) ** jnp.arange(-9, -1)
    (out,) = jax.jit(epilogue.evaluate)(acc)
    expected = np.asarray(acc.astype(jnp.bfloat16)).astype(np.float32) + np.asarray(acc).astype(np.float16).astype(
        np.float32
    )
    np.testing.assert_array_equal(out, expected)


def test_gradient_of_rounding_is_that_of_astype():
    def f(acc):
        return (acc.astype(jnp.bfloat16) * 3).astype(jnp.float32) ** 2

    epilogue, _ = trace(f, ACC, ())
    acc, ct = values(M, N), values(M, N, seed=1)
    np.testing.assert_array_equal(jax.vjp(epilogue.evaluate, acc)[1]([ct])[0], jax.vjp(f, acc)[1](ct)[0])


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


# ---- captured arrays


def _apply(w, b):
    """An epilogue that closes over w and b, as coda.gemm runs it."""
    acc = jnp.ones((M, N)) * 0.5

    def f(acc, x):
        return jax.nn.silu(acc * w) * x + jax.jit(lambda y: y * b)(acc)

    epilogue, captured = trace(f, typed(M, N), (typed(M, N),))
    assert len(captured) == 2
    (out,) = epilogue.evaluate(acc, values(M, N, seed=5), *captured)
    (same,) = epilogue.program.evaluate(acc, values(M, N, seed=5), *captured)
    return out, same


def _reference(w, b):
    acc = jnp.ones((M, N)) * 0.5
    return jax.nn.silu(acc * w) * values(M, N, seed=5) + acc * b


def _close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_captured_under_transformations():
    w, b = values(N, seed=1), values(M, 1, seed=2)
    for out in (*_apply(w, b), *jax.jit(_apply)(w, b)):
        _close(out, _reference(w, b))
    gradient = jax.grad(lambda w, b: (_reference(w, b) ** 2).sum(), (0, 1))(w, b)
    for i in range(2):
        actual = jax.jit(jax.grad(lambda w, b, i=i: (_apply(w, b)[i] ** 2).sum(), (0, 1)))(w, b)
        jax.tree.map(_close, actual, gradient)
    ws = values(3, N, seed=3)
    _close(jax.vmap(_apply, (0, None))(ws, b)[0], jax.vmap(_reference, (0, None))(ws, b))
    _close(lax.map(lambda w: _apply(w, b)[1], ws), jax.vmap(_reference, (0, None))(ws, b))
    carried = lax.scan(lambda total, w: (total + _apply(w, b)[0].sum(), None), 0.0, ws)[0]
    _close(carried, sum(_reference(w, b).sum() for w in ws))


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
    assert kinds == {(Kind.COLUMN_VECTOR, "bfloat16"), (Kind.ROW_VECTOR, "bool"), (Kind.TILE, "float16")}
    assert len(captured) == 3


def test_the_same_array_is_captured_once():
    w = values(N)
    _, captured = trace(lambda acc: acc * w + jax.jit(lambda x: x - w)(acc), ACC, ())
    assert len(captured) == 1


def test_unused_captured_array_is_dropped():
    epilogue, captured = trace(lambda acc: [acc @ MATRIX, acc][1], ACC, ())
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
    _close(epilogue.evaluate(acc, *captured)[0], acc * 2 * w)
    _close(jax.grad(lambda a: epilogue.evaluate(a, *captured)[0].sum())(acc), jnp.full((M, N), 35.0))
    _close(jax.jit(jax.grad(lambda a: epilogue.evaluate(a, *captured)[0].sum()))(acc), jnp.full((M, N), 35.0))


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
        np.testing.assert_array_equal(jax.jit(epilogue.evaluate)(acc)[0], expected)
        value, pullback = jax.jit(lambda acc, e=epilogue: jax.vjp(e.evaluate, acc))(acc)
        np.testing.assert_array_equal(value[0], expected)
        np.testing.assert_array_equal(pullback([jnp.ones_like(acc)])[0], jnp.full_like(acc, slope))


def test_bf16_operands_are_seen_as_float32():
    seen = []

    def f(acc, x, i):
        return [seen.append((x.dtype, i.dtype)), acc * jax.nn.silu(x) + i][1]

    trace(f, ACC, (typed(M, N, dtype=jnp.bfloat16), typed(N, dtype=jnp.int32)))
    assert seen == [(jnp.float32, jnp.int32)]
