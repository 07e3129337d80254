"""The types, values and comparison that the tests of tracing share."""

import jax
import jax.numpy as jnp
import numpy as np

M, N = 6, 8


def typed(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ACC = typed(M, N)


def values(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
