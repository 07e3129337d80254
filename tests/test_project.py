"""A projection onto the residual stream, and epilogues that sum what the next norm reads: values and what they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.chain_cases import normal
from tests.gemm_cases import assert_close, jit

M, K, D, F = 24, 16, 32, 40
X, W, RESIDUAL = normal(0, 2, M // 2, K), normal(1, K, D) / 4, normal(2, 2, M // 2, D)
BIAS, SCALE, UP, DOWN = normal(3, D), 1 + 0.1 * normal(4, D), normal(5, D, F) / 6, normal(6, F, D) / 6


def add_residual(acc, residual):
    x = acc + residual
    return x, jnp.sum(x * x, axis=1)


def of_gallery(x, w, residual):
    return coda.Stream(*coda.gemm(x, w, residual, epilogue=add_residual))


def with_max(x, w, residual):
    y, sumsq, _ = coda.gemm(
        x, w, residual, epilogue=lambda acc, r: (acc + r, jnp.sum((acc + r) ** 2, axis=1), jnp.max(jnp.exp(acc)))
    )
    return coda.Stream(y, sumsq)


def projected(x, w, residual):
    return coda.project(x, w, residual=residual)


def behind(stream):
    """A sub-layer that takes the statistic."""
    return jnp.sum(jnp.sin(coda.mlp(coda.rms_norm(stream, SCALE.astype(stream.dtype)), UP, DOWN).x))


def plain(x, w, residual):
    return coda.Stream(x @ w + residual)


@pytest.mark.parametrize("make", [of_gallery, with_max, projected])
def test_row_sums_that_are_not_differentiated_cost_nothing(make):
    """No pass over (M, D) in the backward pass, nothing kept beside the arguments; through a scan and a jit too."""

    def loss(x, w, residual):
        return behind(make(x, w, residual))

    found, expected = (
        jit(jax.value_and_grad(f, (0, 1, 2)))(X, W, RESIDUAL) for f in (loss, lambda *a: behind(plain(*a)))
    )
    assert_close(found, expected, rtol=1e-4)

    m, d = 2048, 512  # of which a pass is not "cheap"
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, 256), (256, d), (m, d), (d, F), (F, d))]

    def of_types(x, w, residual, up, down):
        stream = jax.jit(make)(x, w, residual)
        return jnp.sum(coda.mlp(coda.rms_norm(stream, jnp.ones(d, x.dtype)), up, down).x.astype(jnp.float32))

    def scanned(x, w, residual, up, down):
        def step(residual, _):
            stream = make(x, w, residual)
            return coda.mlp(coda.rms_norm(stream, jnp.ones(d, x.dtype)), up, down).x, None

        return jnp.sum(jax.lax.scan(step, residual, length=2)[0].astype(jnp.float32))

    for f in (of_types, scanned):
        explained = coda.explain(jax.grad(f, range(5)), *types, platform="cuda")
        assert not any(one.name == "coda_preactivation" for one in explained.kept)
        assert not any("mul" in one.operation and one.bytes > 4 * m * d for one in explained.passes)


def test_row_sums_that_are_differentiated_are_right():
    def loss(make):
        def of(x, w, residual):
            stream = make(x, w, residual)
            sumsq = jnp.sum(stream.x**2, -1) if stream.sumsq is None else stream.sumsq
            return jnp.sum(jnp.cos(stream.x)) + jnp.sum(jnp.sin(sumsq))

        return jit(jax.grad(of, (0, 1, 2)))(X, W, RESIDUAL)

    assert_close(loss(of_gallery), loss(plain), rtol=1e-4)

    def sums_alone(make):
        return jit(jax.grad(lambda *a: jnp.sum(jnp.sin(make(*a))), (0, 1, 2)))(X, W, RESIDUAL)

    of_sums = sums_alone(lambda *a: of_gallery(*a).sumsq)
    assert_close(of_sums, sums_alone(lambda *a: jnp.sum(plain(*a).x ** 2, -1)), rtol=1e-4)
    for gradient in jax.grad(lambda *a: jnp.sum(projected(*a).sumsq), (0, 1, 2))(X, W, RESIDUAL):
        assert not np.any(gradient)  # as a Stream says


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_an_output_that_is_not_differentiated(residuals):
    """Each of several, tile or sum, may be the only one that has a cotangent; arguments that it does not read, none."""

    def f(x, w, row, column):
        return coda.gemm(
            x,
            w,
            row,
            column,
            epilogue=lambda acc, row, column: (
                jnp.tanh(acc * row),
                jnp.sum(acc * acc * column, axis=1),
                acc + column,
                jnp.max(acc, axis=0),
                jnp.sum(row),
            ),
            residuals=residuals,
        )

    def expected(x, w, row, column):
        acc = x @ w
        return jnp.tanh(acc * row), jnp.sum(acc * acc * column, 1), acc + column, jnp.max(acc, 0), jnp.sum(row)

    arguments = (X[0], W, BIAS, normal(7, M // 2, 1))
    for chosen in ([0], [1], [2], [3], [4], [0, 3], [1, 2]):

        def loss(f, chosen=chosen):
            return lambda *a: sum(jnp.sum(jnp.sin(f(*a)[i])) for i in chosen)

        assert_close(*(jit(jax.grad(loss(g), range(4)))(*arguments) for g in (f, expected)), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_project(dtype):
    x, w, residual, bias = (a.astype(dtype) for a in (X, W, RESIDUAL, BIAS))
    for options in ({}, {"residual": residual}, {"residual": coda.Stream(residual), "bias": bias}, {"bias": bias}):
        stream = coda.project(coda.Stream(x), w, **options)
        given = options.get("residual", 0)
        wide = [jnp.asarray(a, jnp.float32) for a in (x, w, getattr(given, "x", given), options.get("bias", 0))]
        exact = wide[0] @ wide[1] + wide[2] + wide[3]
        assert stream.dtype == dtype and stream.shape == exact.shape and stream.sumsq.dtype == jnp.float32
        np.testing.assert_allclose(stream.x.astype(jnp.float32), exact, rtol=1e-2, atol=2e-2)
        np.testing.assert_allclose(stream.sumsq, jnp.sum(exact**2, -1), rtol=1e-2)
    assert coda.project(x, w, residual=residual.astype(jnp.float32)).dtype == jnp.float32
    assert coda.project(x, w, dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((X, W[1:]), {}, ValueError, r"project: x has shape \(2, 12, 16\) and w \(15, 32\); they must be"),
        ((X, W[None]), {}, ValueError, r"they must be \(..., K\) and \(K, N\)"),
        ((X, W), {"residual": X}, ValueError, r"project: residual has shape \(2, 12, 16\); .* \(2, 12, 32\)"),
        ((X, W), {"bias": X}, ValueError, r"project: bias has shape"),
        ((X.astype(jnp.int32), W), {}, TypeError, r"project: x has dtype int32"),
        ((coda.rms_norm(X, jnp.ones(K)), W), {}, TypeError, r"norm_projection applies a norm"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        coda.project(*arguments, **options)
