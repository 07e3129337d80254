"""coda.gemm through jax.export: one artifact for cpu and cuda, symbolic M, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import coda_jax as coda
from tests.gemm_cases import assert_close, jit, total

K, N = 16, 24
CHECKS = [export.DisabledSafetyCheck.custom_call("coda_gemm")]
PLATFORMS = ("cpu", "cuda")


def function(residuals):
    def epilogue(acc, x, column, row):
        y = jax.nn.gelu(acc * column + row) + x
        index = jax.lax.broadcasted_iota(jnp.float32, acc.shape, 0)
        return y, jnp.sum(y * y, axis=1), jnp.max(y, axis=0), jnp.mean(y * index)

    def run(a, b, x, column, row):
        return coda.gemm(a, b, x, column, row, epilogue=epilogue, residuals=residuals)

    return run


def arguments(m, dtype):
    rng = np.random.default_rng(m)
    shapes = ((m, K), (K, N), (m, N))
    a, b, x = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return (
        a,
        b,
        x,
        jnp.asarray(rng.standard_normal((m, 1)), jnp.float32),
        jnp.asarray(rng.standard_normal(N), jnp.float32),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::coda_jax.FallbackWarning")  # a contraction over a symbolic size, in the gradient
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_symbolic_rows_for_two_platforms(residuals):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    (m,) = export.symbolic_shape("m")
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, K), (K, N), (m, N))]
    types += [jax.ShapeDtypeStruct((m, 1), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.float32)]
    run = function(residuals)
    exported = export.export(jax.jit(run), platforms=PLATFORMS, disabled_checks=CHECKS)(*types)
    assert exported.mlir_module().count("@coda_gemm(") == 1
    loaded = export.deserialize(exported.serialize(vjp_order=1))

    def with_gradient(function):
        def loss(*xs):
            outputs = function(*xs)
            return total(outputs), outputs

        return jit(jax.grad(loss, range(5), has_aux=True))

    for rows in (1, 7) if residuals == "preactivation" else (7,):
        xs = arguments(rows, jnp.bfloat16)
        assert_close(with_gradient(loaded.call)(*xs), with_gradient(run)(*xs), rtol=1e-2)


def test_symbolic_leading_axes():
    batch, length = export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((batch, length, K), jnp.float32), jax.ShapeDtypeStruct((K, N), jnp.float32)]

    def run(a, b):
        return coda.gemm(a, b, epilogue=lambda acc: (acc, jnp.sum(acc, axis=1), jnp.sum(acc, axis=0)))

    exported = export.export(jax.jit(run), platforms=("cpu",))(*types)
    a, b = jnp.ones((2, 3, K)), jnp.ones((K, N))
    assert_close(exported.call(a, b), run(a, b))


def test_symbolic_vmap():
    (batch,) = export.symbolic_shape("batch")
    types = [jax.ShapeDtypeStruct((batch, 8, K), jnp.float32), jax.ShapeDtypeStruct((K, N), jnp.float32)]
    run = jax.vmap(lambda a, b: coda.gemm(a, b, epilogue=lambda acc: (acc, jnp.sum(acc, axis=0))), in_axes=(0, None))
    exported = export.export(jax.jit(run), platforms=("cpu",))(*types)
    a, b = jnp.ones((5, 8, K)), jnp.ones((K, N))
    assert_close(exported.call(a, b), run(a, b))
