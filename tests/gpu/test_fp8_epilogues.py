"""Kernels that store floats of 8 bits, transposed tiles and tiles in contraction order, and take maxima of a whole
product: bit for bit what JAX computes, of small integers, whose products are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests import test_fp8_language as language
from tests import test_fp8_transposed as transposed
from tests import test_whole_maximum as whole

E4M3 = jnp.float8_e4m3fn
CPU = jax.devices("cpu")[0]
NO_KERNEL = {"slices", "of heads"}  # transposed, these take XLA's form


def check(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def expected(epilogue, a, b, dtype=None):
    """Returns what the epilogue computes operation by operation, tiles in this dtype."""
    with jax.default_device(CPU):
        acc = jnp.asarray(np.asarray(a, np.float32) @ np.asarray(b, np.float32))
        outputs = jax.tree.leaves(epilogue(acc))
        return [x if dtype is None or x.ndim < 2 else x.astype(dtype) for x in outputs]


def run(a, b, *operands, **options):
    return jax.jit(functools.partial(coda.gemm, implementation="cuda", **options))(
        a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), *operands
    )


@pytest.mark.parametrize("name", language.VALUES)
def test_values(name):
    epilogue, want = language.VALUES[name]
    got = run(language.A, language.B, language.X8, epilogue=epilogue)
    language.same_bits(got, want(language.ACC, language.wide(language.X8)))


@pytest.mark.parametrize("name", [name for name in transposed.RESULTS if name not in NO_KERNEL])
def test_results(name):
    a, b, epilogue = transposed.A, transposed.B, transposed.RESULTS[name]
    check(run(a, b, epilogue=epilogue, out_dtype=E4M3), expected(epilogue, a, b, E4M3))


@pytest.mark.parametrize("shape", [(16, 16), (272, 400), (1040, 784)], ids=str)
def test_copies_and_the_maximum(shape):
    """Copies and the maximum are exact for tiles at the edge, for a few and for many."""
    m, n = shape
    a, b = transposed.random(m, 336), transposed.random(336, n)

    def epilogue(acc):
        q = coda.saturate(acc * 2, E4M3)
        return q, coda.contraction_order(q), coda.contraction_order(q.T), acc.T.astype(jnp.bfloat16), jnp.max(acc)

    check(run(a, b, epilogue=epilogue), expected(epilogue, a, b))


# Halves of 40 columns have rows of 40 bytes, heads of 8 are smaller than a box.
@pytest.mark.parametrize("name", [name for name in whole.WHOLE if "halves" not in name and "heads" not in name])
def test_maxima(name):
    epilogue, _ = whole.WHOLE[name]
    check(run(whole.A, whole.B, epilogue=epilogue), expected(epilogue, whole.A, whole.B))


@pytest.mark.parametrize("axes", [(0, None), (0, 0)], ids=str)
def test_batches(axes):
    a = transposed.random(3, 144, 64)
    b = transposed.random(*([3] if axes[1] == 0 else []), 64, 96)

    def epilogue(acc):
        return acc.T.astype(E4M3), jnp.max(jnp.abs(acc))

    got = jax.jit(jax.vmap(lambda a, b: run(a, b, epilogue=epilogue), in_axes=axes))(a, b)
    for i in range(3):
        check([x[i] for x in got], expected(epilogue, a[i], b[i] if axes[1] == 0 else b))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradients(residuals):
    """The gradients of transposed results of 8 bits are alike by the kernel and by XLA's form."""
    a, b = transposed.A.astype(jnp.bfloat16), transposed.B.astype(jnp.bfloat16)

    def loss(a, b, implementation):
        q, t, largest = coda.gemm(
            a,
            b,
            epilogue=lambda acc: (q := coda.saturate(acc * acc / 16, E4M3), coda.contraction_order(q.T), jnp.max(acc)),
            residuals=residuals,
            implementation=implementation,
        )
        return jnp.sum(q.astype(jnp.float32)) + jnp.sum(t.astype(jnp.float32) * 2) + largest

    got, want = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(a, b, how) for how in ("cuda", "xla"))
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2 * np.abs(other).max())
