"""Graphs whose rows are several axes of the arrays, sharded over a mesh or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coda_jax.graph.function import graph_of
from tests.gemm_cases import assert_close
from tests.test_graph_derivative import CASES, InGraph, InJax, arrays
from tests.test_graph_fp8 import arguments as fp8_arguments
from tests.test_graph_fp8 import block as fp8_block
from tests.test_graph_fp8 import in_jax as fp8_in_jax
from tests.test_graph_plan import DIFFERENTIATED, gated, gated_arguments, plain, total

pytestmark = pytest.mark.usefixtures("quick_to_compile")
P = PartitionSpec
ROWS = (4, 16)


def of_rows(args, rows, count):
    """The arrays that have so many rows, with these axes in their place."""
    return [x.reshape(*rows, *x.shape[1:]) if x.ndim == 2 and x.shape[0] == count else x for x in args]


@pytest.mark.parametrize("case", ["feed-forward", "norm", "one weight twice", "several results"])
def test_values_and_gradients(case):
    f, args = CASES[case][0], arrays(case)
    given = of_rows(args, (3, 4), 12)
    graph = graph_of(functools.partial(f, InGraph), given, dtype=jnp.float32, rows=(3, 4))
    (y,) = jax.jit(graph)(*given)
    want = f(InJax, *args)
    assert y.shape == (3, 4, want.shape[1])
    assert_close(y.reshape(want.shape), want, 1e-5)
    every = range(len(args))
    found = jax.jit(jax.grad(total(graph), every))(*given)
    gradients = jax.grad(total(functools.partial(f, InJax)), every)(*args)
    assert [x.shape for x in found] == [x.shape for x in given]
    assert_close([x.reshape(of.shape) for x, of in zip(found, gradients, strict=True)], list(gradients), 1e-4)


@pytest.mark.slow
def test_copies_along_k():
    """Transposed ones have the rows as one axis."""
    args = fp8_arguments()
    given = [args[0].reshape(6, 8, -1), *args[1:]]
    graph = graph_of(fp8_block, given, dtype=jnp.bfloat16, out_dtypes=[jnp.float32] * 2, rows=(6, 8))
    y, largest = jax.jit(graph)(*given)
    want, of_all = fp8_in_jax(*args)
    assert_close((y.reshape(want.shape), largest), (want, of_all), 2e-2)
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)[0]))  # noqa: E731
    found = jax.jit(jax.grad(loss(graph), (0, 1, 2, 3)))(*given)
    gradients = jax.grad(loss(fp8_in_jax), (0, 1, 2, 3))(*args)
    for x, of in zip(found, gradients, strict=True):
        assert float(jnp.linalg.norm(x.reshape(of.shape) - of)) <= 1e-2 * float(jnp.linalg.norm(of))


# x, its sums, the norm's scale, up, down
PLANS = {
    "data": (P("x", None, None), P("x", None, None), P(), P(), P()),
    "sequences too": (P("x", "y", None), P("x", "y", None), P(), P(), P()),
    "fsdp": (P("x", None, None), P("x", None, None), P(), P("y", None), P("y", None)),
}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [*((AxisType.Auto, plan) for plan in PLANS), (AxisType.Explicit, "data"), (AxisType.Explicit, "fsdp")],
    ids=str,
)
def test_meshes(kind, plan):
    """Over explicit axes cotangents are sharded as what they are of."""
    args = gated_arguments(jnp.float32)
    given = of_rows(args, ROWS, 64)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    graph = graph_of(gated, given, dtype=jnp.float32, rows=ROWS)
    want = jax.grad(total(plain), DIFFERENTIATED)(*args)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, PLANS[plan], strict=True)]
        found = jax.device_get(jax.jit(jax.grad(total(graph), DIFFERENTIATED))(*sharded))
    for x, of in zip(found, want, strict=True):
        assert_close(np.reshape(x, of.shape), of, 1e-4)
