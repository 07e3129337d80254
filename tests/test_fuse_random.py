"""Random networks under `coda.fuse`: values and gradients, of all doors.

`CODA_JAX_TEST_NETWORKS=200` runs so many of each kind, which are others each time; each takes a few seconds.
"""

import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.random_networks import DISCRETE, arguments, loss_of, network, networks

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
COUNT = int(os.environ.get("CODA_JAX_TEST_NETWORKS", "0"))
BOUND = 3e-5


def settings(few):
    return hypothesis.settings(
        max_examples=COUNT or few,
        deadline=None,
        derandomize=not COUNT,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def with_gradients(loss):
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


DOORS = {
    "grad(fuse)": lambda loss: with_gradients(coda.fuse(loss)),
    "fuse(grad)": lambda loss: coda.fuse(with_gradients(loss)),
    "exact": lambda loss: with_gradients(coda.fuse(loss, exact=True)),
    "memory=None": lambda loss: with_gradients(coda.fuse(loss, memory=None, defer_norms=True)),
}


def all_of(spec, without=frozenset()):
    """A function that has the results of all doors, and as the last those of plain JAX."""
    loss = loss_of(network(spec, without))
    functions = [*(door(loss) for door in DOORS.values()), with_gradients(loss)]
    return lambda *args: [g(*args) for g in functions]


def largest_error(found, expected):
    """The largest error of all arrays, each relative to its own norm, or to a hundredth of the largest norm."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    for x, y in pairs:
        assert x.shape == y.shape and (x.dtype == y.dtype or y.dtype == np.float64)
    norms = [np.linalg.norm(np.float64(y)) for _, y in pairs]
    floor = max(1e-2 * max(norms), 1e-30)
    differences = [np.linalg.norm(np.float64(x) - np.float64(y)) for x, y in pairs]
    assert np.all(np.isfinite(norms)) or np.any(~np.isfinite(differences))
    return max(d / max(norm, floor) for d, norm in zip(differences, norms, strict=True))


def exact_results(spec, args):
    """The results of plain JAX in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        return jax.device_get(jax.jit(with_gradients(loss_of(network(spec))))(*wide))


_MASKS_OF_ONE_ROW = [("transposed", 8, 4, 8), ("split", 5, 8, 4), ("integers", 8, 10, 6)]
_TANGENTS_TRANSPOSED = [("tokens", 6, 2, 1), ("head_norm", 4, 1, 6), ("router", 6, 6, 3)]


@settings(8)
@hypothesis.example({"sizes": ((1,), 8, 1), "steps": [("split", 5, 5, 11), ("fori", 1, 9, 7, _MASKS_OF_ONE_ROW)]})
@hypothesis.example(
    {"sizes": ((8, 1), 8, 4), "steps": [("vmap", 2, 8, 6, _TANGENTS_TRANSPOSED), ("embedded", 9, 6, 4)]}
)
@hypothesis.given(networks)
def test_a_network_has_its_values_and_gradients(spec):
    args = arguments(spec)
    *found, expected = jax.jit(all_of(spec))(*args)
    errors = {name: largest_error(x, expected) for name, x in zip(DOORS, found, strict=True)}
    if not max(errors.values()) < BOUND:  # a function that magnifies the errors of float32
        exact = exact_results(spec, args)
        own = largest_error(expected, exact)
        errors = {name: largest_error(x, exact) for name, x in zip(DOORS, found, strict=True)}
        assert max(errors.values()) < BOUND + 4 * own, (errors, own)


@settings(2)
@hypothesis.given(networks)
def test_a_network_in_16_bits_is_as_near_to_float32_as_it_was(spec):
    args = arguments(spec, jnp.bfloat16)
    *found, own = jax.jit(all_of(spec, DISCRETE))(*args)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    exact = jax.jit(with_gradients(loss_of(network(spec, DISCRETE))))(*wide)
    assert jax.tree.map(jax.typeof, found[0]) == jax.tree.map(jax.typeof, own)

    def error(results):
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True)
        pairs = [(np.ravel(np.float64(x)), np.ravel(np.float64(y))) for x, y in pairs]
        x, y = map(np.concatenate, zip(*pairs, strict=True))
        return np.linalg.norm(x - y) / np.linalg.norm(y)

    errors = {name: error(x) for name, x in zip(DOORS, found, strict=True)}
    assert max(errors.values()) < 2 * error(own) + 1e-2, (errors, error(own))


@settings(2)
@hypothesis.given(networks)
def test_a_network_of_several_results_runs_as_it_is_called(spec):
    args, f = arguments(spec), network(spec)
    found, expected = coda.fuse(f)(*args), jax.jit(f)(*args)
    assert largest_error(found, expected) < 10 * BOUND
