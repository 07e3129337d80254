"""Outputs and every cotangent of coda.gemm against the textbook formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coda_jax as coda
from tests.gemm_cases import CASES, Case, arguments, compare, jit, residual_sumsq

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.smoke
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16(case, residuals):
    compare(case, arguments(case, 40, 48, 56, jnp.bfloat16), residuals=residuals)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", ["scaled", "swiglu_backward"])
def test_other_dtypes(name, dtype):
    compare(BY_NAME[name], arguments(BY_NAME[name], 24, 32, 40, dtype))


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_transposes(transpose_a, transpose_b):
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    compare(BY_NAME["scaled"], arguments(BY_NAME["scaled"], 24, 32, 40, jnp.bfloat16, **flags), **flags)


@pytest.mark.parametrize("size", [(1, 8, 8), (8, 1, 8), (8, 8, 1), (127, 128, 129), (136, 392, 64)], ids=str)
def test_sizes(size):
    compare(BY_NAME["residual_sumsq"], arguments(BY_NAME["residual_sumsq"], *size, jnp.bfloat16))


@pytest.mark.parametrize("size", [(16, 16, 16), (1, 1, 4), (8, 16, 4)], ids=str)
def test_rows_and_columns_of_one_size(size):
    """Reductions along both axes where sizes cannot tell them apart, with the derivative in the epilogue."""

    def both(acc, column, row):
        y = jnp.sin(acc) * column + row
        return jnp.sum(y * acc, axis=1), jnp.sum(y, axis=0), y

    case = Case("both", both, lambda m, n: [((m, 1), jnp.float32), ((n,), jnp.float32)])
    for residuals in ("preactivation", "recompute"):
        compare(case, arguments(case, *size, jnp.float32), residuals=residuals)


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_rows_of_different_scale(residuals):
    """Row scales from 1e-3 to 1e3, judged row by row."""
    case = BY_NAME["residual_sumsq"]
    a, b, x = arguments(case, 40, 48, 56, jnp.bfloat16)
    scale = jnp.logspace(-3, 3, 40, dtype=jnp.float32)[:, None]
    compare(case, [(a * scale).astype(a.dtype), b, (x * scale).astype(x.dtype)], by_rows=True, residuals=residuals)


def test_a_large_channel_and_a_large_mean():
    case = BY_NAME["scaled"]
    a, b, *operands = arguments(case, 40, 48, 56, jnp.bfloat16)
    compare(case, [a.at[:, 3].multiply(100), b, *operands])

    def centred(acc, mean):
        return jnp.square(acc - mean)

    case = Case("centred", centred, lambda m, n: [((m, 1), jnp.float32)])
    a, b, _ = arguments(case, 40, 48, 56, jnp.bfloat16)
    a = (a + 16).astype(a.dtype)
    mean = (a.astype(jnp.float32) @ b.astype(jnp.float32)).mean(axis=1, keepdims=True)
    compare(case, [a, b, mean])


def _ties(dtype):
    """Small integers: everything is exact, and maxima are attained several times."""
    keys = jax.random.split(jax.random.key(3), 3)
    a = jax.random.randint(keys[0], (24, 8), -1, 2).astype(dtype)
    b = jax.random.randint(keys[1], (8, 32), -1, 2).astype(dtype)
    weights = jax.random.randint(keys[2], (24,), 1, 4).astype(jnp.float32) * 24
    return a, b, weights


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reduction", [jnp.max, jnp.min])
def test_ties_split_as_in_jax(reduction, axis, residuals):
    a, b, _ = _ties(jnp.bfloat16)
    product = a.astype(jnp.float32) @ b.astype(jnp.float32)
    extreme = reduction(product, axis=axis, keepdims=True)
    assert (jnp.sum(product == extreme, axis=axis) > 1).any()

    def fused(a, b):
        out = coda.gemm(a, b, epilogue=lambda acc: reduction(acc, axis=axis), residuals=residuals)
        return jnp.sum(out * jnp.arange(out.size))

    def plain(a, b):
        out = reduction(a @ b, axis=axis)
        return jnp.sum(out * jnp.arange(out.size))

    got = jit(jax.grad(fused, (0, 1)))(a.astype(jnp.float32), b.astype(jnp.float32))
    want = jit(jax.grad(plain, (0, 1)))(a.astype(jnp.float32), b.astype(jnp.float32))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-5)
    rounded = jit(jax.grad(fused, (0, 1)))(a, b)
    for x, y in zip(rounded, want, strict=True):  # each share of a tie is rounded to bfloat16 once
        assert np.abs(np.asarray(x, np.float64) - np.asarray(y)).max() <= 2.0**-7 * np.abs(y).max()


def test_leading_axes():
    case = BY_NAME["residual_sumsq"]
    a, b, x = arguments(case, 24, 16, 8, jnp.bfloat16)
    y, sumsq = coda.gemm(a.reshape(2, 3, 4, 8), b, x.reshape(2, 3, 4, 16), epilogue=residual_sumsq)
    want_y, want_sumsq = coda.gemm(a, b, x, epilogue=residual_sumsq)
    np.testing.assert_array_equal(y, want_y.reshape(2, 3, 4, 16))
    np.testing.assert_array_equal(sumsq, want_sumsq.reshape(2, 3, 4))


@pytest.mark.parametrize("lead", [(3, 4), (2, 12)])
def test_leading_axes_of_each_kind_of_output(lead):
    """N = 12 or 24 = M as well: column reductions keep their shape, row reductions take the leading axes."""
    n = 12 if lead == (3, 4) else 24
    a, b = jnp.ones((*lead, 8)), jnp.ones((8, n))
    scale = jnp.ones((*lead, 1))

    def f(acc, scale, row):
        y = acc * scale + row
        return y, jnp.sum(y, axis=1), jnp.sum(y, axis=0), jnp.max(y, axis=1, keepdims=True), jnp.mean(y), row

    outputs = coda.gemm(a, b, scale, jnp.ones((1, n)), epilogue=f)
    assert [x.shape for x in outputs] == [(*lead, n), lead, (n,), (*lead, 1), (), (1, n)]


ROW_AXES = {
    "sum of everything times a row": lambda acc, row: jnp.sum(acc) * row,
    "row sums, summed": lambda acc, row: jnp.sum(acc, axis=1).sum() + row,
    "outer product": lambda acc, row: jnp.sum(acc, axis=1)[None, :] * row[:, None],
    "one number": lambda acc, row: jnp.sum(acc, keepdims=True),
    "transposed": lambda acc, row: jnp.max(acc, axis=1, keepdims=True).T,
    "gone": lambda acc, row: jnp.sum(jnp.sum(acc, axis=1) ** 2)[None],
}


@pytest.mark.parametrize("f", ROW_AXES.values(), ids=ROW_AXES)
@pytest.mark.parametrize(("lead", "n"), [((2, 3), 6), ((2, 4), 6), ((1, 1), 6), ((1, 1), 1)])
def test_leading_axes_stand_where_the_rows_stood(f, lead, n):
    """Told from how an output is computed, not from its size."""
    a, b, row = jnp.ones((*lead, 5)), jnp.ones((5, n)), jnp.ones(n)
    m = lead[0] * lead[1]
    out = coda.gemm(a, b, row, epilogue=f)
    flat = coda.gemm(a.reshape(m, 5), b, row, epilogue=f)
    followed = jax.eval_shape(lambda acc: f(acc, row), jax.ShapeDtypeStruct((997, n), jnp.float32)).shape
    assert out.shape == tuple(s for old in followed for s in (lead if old == 997 else (old,)))
    np.testing.assert_array_equal(out.reshape(flat.shape), flat)


def test_none_among_the_outputs():
    a, b = jnp.ones((8, 16)), jnp.ones((16, 8))
    assert coda.gemm(a, b, epilogue=lambda acc: None) is None
    y, nothing = coda.gemm(a, b, epilogue=lambda acc: (acc, None), out_dtype=(jnp.bfloat16, None))
    assert nothing is None and y.dtype == jnp.bfloat16


def test_output_dtypes():
    a, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)

    def f(acc):
        return {"tile": acc, "pair": (acc * 2, jnp.sum(acc, axis=1))}

    def dtypes(**options):
        outputs = coda.gemm(a, b, epilogue=f, **options)
        return [x.dtype.name for x in jax.tree.leaves(outputs)]

    assert dtypes() == ["bfloat16", "float32", "bfloat16"]  # leaves in key order: pair, tile
    assert dtypes(out_dtype=jnp.float32) == ["float32", "float32", "float32"]
    assert dtypes(out_dtype={"tile": "float16", "pair": jnp.float32}) == ["float32", "float32", "float16"]
    assert dtypes(out_dtype={"tile": None, "pair": (jnp.float16, None)}) == ["float16", "float32", "bfloat16"]
    assert coda.gemm(a, b.astype(jnp.float16)).dtype == jnp.bfloat16
    assert coda.gemm(a.astype(jnp.float32), b).dtype == jnp.float32


def test_mixed_dtypes_promote():
    """bfloat16 with float16 is multiplied in float32: neither dtype holds both factors."""
    a, b = jnp.full((2, 1), 1e-30, jnp.bfloat16), jnp.full((1, 8), 1 + 2.0**-10, jnp.float16)
    out = coda.gemm(a, b, out_dtype=jnp.float32)
    np.testing.assert_array_equal(out, jnp.full((2, 8), a[0, 0].astype(jnp.float32) * (1 + 2.0**-10)))


@pytest.mark.smoke
def test_weight_gradient_leaves_in_float32():
    """The cotangent of float32 parameters is not rounded on its way."""
    a, w = jax.random.normal(jax.random.key(0), (64, 8)), jax.random.normal(jax.random.key(1), (8, 8))
    dw = jax.grad(lambda w: jnp.sum(coda.gemm(a, w)))(w)
    assert dw.dtype == jnp.float32
    np.testing.assert_allclose(dw, jnp.broadcast_to(a.sum(0)[:, None], (8, 8)), rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (8, 16, 0)], ids=str)
def test_empty_products(shape):
    m, n, k = shape
    a, b, x = jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n))

    def f(acc, x):
        return acc * x + 1, jnp.sum(acc + x, axis=1), jnp.sum(x * x, axis=0)

    y, rows, columns = coda.gemm(a, b, x, epilogue=f)
    np.testing.assert_array_equal(y, jnp.full((m, n), 1.0))
    np.testing.assert_array_equal(rows, jnp.full((m,), float(n)))
    np.testing.assert_array_equal(columns, jnp.full((n,), float(m)))
    gradients = jax.grad(lambda *xs: sum(map(jnp.sum, coda.gemm(*xs, epilogue=f))), (0, 1, 2))(a, b, x)
    assert [g.shape for g in gradients] == [a.shape, b.shape, x.shape]


KINDS = {
    "scalar": lambda m, n: (),
    "row": lambda m, n: (n,),
    "row2": lambda m, n: (1, n),
    "column": lambda m, n: (m, 1),
    "tile": lambda m, n: (m, n),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(1, 40),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32]),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=3),
    own=st.sampled_from([None, jnp.float32]),
    axis=st.sampled_from([0, 1]),
    residuals=st.sampled_from(["preactivation", "recompute"]),
)
@pytest.mark.slow
def test_shapes_and_operands(m, n, k, dtype, kinds, own, axis, residuals):
    def f(acc, *operands):
        y = acc
        for i, x in enumerate(operands):
            y = y * x if i % 2 else jnp.sin(y) + x
        return y, jnp.sum(y * acc, axis=axis)

    case = Case("drawn", f, lambda m, n: [(KINDS[kind](m, n), own) for kind in kinds])
    compare(case, arguments(case, m, n, k, dtype, seed=m), residuals=residuals)


@pytest.mark.parametrize("out_dtype", [None, jnp.float16, (jnp.float16, jnp.float32, None)])
def test_dtypes_do_not_depend_on_the_number_of_rows(out_dtype):
    """With one row, z is a row vector, and what does not depend on acc is a function of vectors."""

    def f(acc, z):
        return acc + z, jnp.tanh(z), jnp.sum(acc * z, axis=1)

    def dtypes(rows):
        a, b, z = (jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 8), (8, 16), (rows, 16)))
        return [y.dtype for y in jax.jit(lambda *x: coda.gemm(*x, epilogue=f, out_dtype=out_dtype))(a, b, z)]

    assert dtypes(1) == dtypes(2)


@pytest.mark.parametrize("residuals, least, most", [("preactivation", 0.1, 0.3), ("recompute", 0, 0.004)])
def test_the_gradient_of_an_exponential_of_a_large_difference(residuals, least, most):
    """The docstring's example: an acc of 160 is off by up to 0.5 in bfloat16, and its exponential by as much."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((32, 256), (256, 64)))
    a, weights = (3 * a).astype(a.dtype), jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)
    lse = jax.nn.logsumexp(a.astype(jnp.float32) @ b.astype(jnp.float32), axis=1, keepdims=True)

    def value(a):
        out = coda.gemm(
            a, b, lse, epilogue=lambda acc, lse: jnp.exp(acc - lse), out_dtype=jnp.float32, residuals=residuals
        )
        return jnp.vdot(weights, out)

    exact = jax.grad(lambda a: jnp.vdot(weights, jnp.exp(a @ b.astype(jnp.float32) - lse)))(a.astype(jnp.float32))
    error = jnp.linalg.norm(jax.grad(value)(a).astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert least <= error <= most
