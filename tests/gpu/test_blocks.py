"""Blocks of all forms on the device: every product a kernel, values and gradients as good as plain JAX's, same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.block_cases import FORMS, arguments, in_block, in_jax, loss

REPEATS = 50
SIZES = {
    "ragged": {"batch": 3, "length": 77, "width": 256, "hidden": 184, "rank": 8},
    "large": {"batch": 4, "length": 512, "width": 256, "hidden": 2048, "rank": 16},
}


def errors(found, exact):
    each = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return np.array([float(jnp.linalg.norm(a - b)) / (float(jnp.linalg.norm(b)) or 1) for a, b in each])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, sizes):
    x, p = arguments(jnp.bfloat16, **SIZES[sizes])
    narrow = {key: w if key in ("cos", "sin") else w.astype(jnp.bfloat16) for key, w in p.items()}
    of_plain, block = (jax.jit(jax.value_and_grad(loss(f(name)), (0, 1))) for f in (in_jax, in_block))
    with jax.default_matmul_precision("highest"):
        exact = of_plain(x.astype(jnp.float32), jax.tree.map(jnp.float32, narrow))
    plain = of_plain(x, narrow)
    with coda.strict():
        found = block(x, narrow)
    assert np.all(errors(found, exact) <= 1.5 * errors(plain, exact).max() + 1e-6)
    again = [block(x, narrow) for _ in range(REPEATS)]
    assert all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
        for one in again
        for a, b in zip(jax.tree.leaves(found[1][0]), jax.tree.leaves(one[1][0]), strict=True)
    )
