"""Products of groups over the axes of a mesh: which are sharded, which gathered, and values and gradients there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_in, jaxpr_of
from coda_jax.lowering.mesh_plan import units
from coda_jax.primitives.axes import BATCH, Dimension, ProductAxis
from coda_jax.primitives.derivative import Options, product
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.partitioned import mesh_of, run
from tests.ragged_cases import K, N, loop, random

P = PartitionSpec
M, G = 24, 4
SIZES = jnp.asarray([5, 0, 9, 7], jnp.int32)
A, B, VECTOR, TILE = random(0, M, K) / 3, random(1, G, K, N), random(2, G, N), random(3, M, N)


def outputs(a, b, vector, tile, sizes, out_sharding=None):
    y = coda.ragged_gemm(
        *(a, b, sizes, coda.ByGroup(vector), tile),
        epilogue=lambda acc, x, tile: (jnp.tanh(acc + x) * tile, jnp.sum(acc * acc, axis=1)),
        out_sharding=out_sharding,
    )
    return y, coda.ragged_contraction(a, y[0], sizes)


def gradients(a, b, vector, tile, sizes, out_sharding=None):
    def loss(*arrays):
        return sum(jnp.mean(jnp.tanh(x)) for x in jax.tree.leaves(outputs(*arrays, sizes, out_sharding)))

    return jax.grad(loss, range(4))(a, b, vector, tile)


def spec_of(function, *arrays):
    found, _ = equations_in(jaxpr_of(function, *arrays), (arrays, {}))
    (equation,) = (x for x, _ in found if x.primitive in PRIMITIVES)
    return equation.params["spec"]


def test_which_axes_are_sharded():
    """Rows and groups are not; of a contraction K is the rows."""
    m, n, k, g = map(ProductAxis, (Dimension.M, Dimension.N, Dimension.K, Dimension.GROUP))
    sizes = {m: 24, n: N, k: K, g: G}
    spec = spec_of(lambda a, b: coda.ragged_gemm(a, b, SIZES), A, B)
    assert units(spec, sizes) == {BATCH: 1, m: 0, n: 1, k: 1, g: 0}
    assert spec.matrices.argument_axes([2, 3, 1]) == [(m, k), (g, k, n), (None,)]
    assert spec.matrices.result_axes == [(m, n)]
    contraction = spec_of(lambda a, b: coda.ragged_contraction(a, b, SIZES), A, TILE)
    assert units(contraction, sizes) == {BATCH: 1, m: 1, n: 1, k: 0, g: 0}
    assert contraction.matrices.argument_axes([2, 2, 1]) == [(k, m), (k, n), (None,)]
    assert contraction.matrices.result_axes == [(g, m, n)]
    halves = spec_of(lambda a, b: coda.ragged_gemm(a, b, SIZES, epilogue=gate), A, B.reshape(G, K, 2, N // 2))
    assert halves.matrices.argument_axes([2, 4, 1]) == [(m, k), (g, k, None, n), (None,)]


def gate(acc):
    gate, up = jnp.split(acc, 2, axis=1)
    return jax.nn.silu(gate) * up


# How a, b, the vector, the tile and the sizes are sharded; a device's a and b, of the product and of the contraction.
LAYOUTS = {
    "replicated": ((P(),) * 5, (M, K), (G, K, N)),
    "columns": ((P(), P(None, None, "model"), P(None, "model"), P(None, "model"), P()), (M, K), (G, K, N // 2)),
    "k": ((P(None, "model"), P(None, "model"), P(), P(), P()), (M, K // 2), (G, K // 2, N)),
    "rows": ((P("data"), P(), P(), P("data"), P()), (M, K), (G, K, N)),
    "groups": ((P(), P("data"), P("data"), P(), P("data")), (M, K), (G, K, N)),
    "all": ((P("data"), P("data", None, "model"), P("data"), P("data", "model"), P("data")), (M, K), (G, K, N // 2)),
}


CASES = [pytest.param(outputs, layout) for layout in LAYOUTS] + [
    pytest.param(gradients, layout, marks=[] if layout in ("k", "all") else pytest.mark.slow) for layout in LAYOUTS
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("function", "layout"), CASES)
def test_meshes(function, layout, kind):
    specs, part_of_a, part_of_b = LAYOUTS[layout]
    arrays = (A, B, VECTOR, TILE, SIZES)
    # Where k is sharded in both, an explicit axis leaves the product's sharding open.
    sharding = P() if layout == "k" and kind is AxisType.Explicit else None
    got, parts, _ = run(functools.partial(function, out_sharding=sharding), arrays, specs, kind)
    for one, expected in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert ("lambda", part_of_a, part_of_b) in parts


@pytest.mark.parametrize("spec", [P(), P("data"), P("data", "model"), P(None, ("data", "model"))])
def test_the_sharding_of_a_result_over_explicit_axes(spec):
    """Its columns are the product's; its rows are resharded."""
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda a, b: coda.ragged_gemm(a, b, SIZES, out_sharding=spec))(A, B)
        assert jax.typeof(y).sharding.is_equivalent_to(jax.NamedSharding(mesh.abstract_mesh, spec), 2) or y.sharding
        assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)
        np.testing.assert_allclose(y, loop("bare", [A, B], np.asarray(SIZES), np.float64)[0], rtol=1e-5, atol=1e-5)


def squares(a, b, vector, row):
    """With sums for operands of all rows, of each group, and of none."""

    def epilogue(acc, x, row):
        return jnp.tanh(acc + x) * row

    return jnp.sum(coda.ragged_gemm(a, b, SIZES, coda.ByGroup(vector), row, epilogue=epilogue) ** 2)


# Inside a shard_map over the columns, and over rows that have groups of their own on each device.
BY_HAND = {
    "columns": ("model", (P(), P(None, None, "model"), P(None, "model"), P("model"))),
    "rows": ("data", (P("data"), P(), P(), P())),
}


@pytest.mark.parametrize("layout", BY_HAND)
def test_manual_axes(layout):
    over, in_specs = BY_HAND[layout]
    a = random(7, 2 * M, K) if layout == "rows" else A

    @functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=in_specs, out_specs=P())
    def each(*arrays):
        return jax.lax.psum(squares(*arrays), over)

    def whole(a, *others):
        return sum(squares(part, *others) for part in jnp.split(a, len(a) // M))

    for f in (lambda f: f, lambda f: jax.grad(f, argnums=range(4))):
        got, expected = (jax.jit(f(of))(a, B, VECTOR, VECTOR[0]) for of in (each, whole))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [coda.gemm, coda.ragged_gemm])
def test_a_batch_over_an_explicit_axis(function):
    """A batch of groups is gathered, and the results are sharded by it again. Its gradients are what JAX expects."""
    groups = function is coda.ragged_gemm
    a, sizes = random(0, 4, M, K), jnp.asarray([[5, 0, 9, 7], [1, 2, 3, 4], [0] * 4, [24, 0, 0, 0]], jnp.int32)
    b, batched = (B, (0, None, 0)) if groups else (B[0], (0, None))
    arrays = (a, b, sizes) if groups else (a, b)
    run = jax.vmap(function, batched)

    def gradients(a, b, *sizes):
        return jax.grad(lambda a, b: jnp.sum(run(a, b, *sizes) ** 2), (0, 1))(a, b)

    mesh = mesh_of(AxisType.Explicit)
    expected = [run(*arrays), *gradients(*arrays)]
    with jax.set_mesh(mesh):
        specs = (P("data"), P(*[None] * (b.ndim - 1), "model"), P("data"))[: len(arrays)]
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        got = [jax.jit(run)(*placed), *jax.jit(gradients)(*placed)]
    assert got[0].sharding.spec == P("data", None, "model")
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_offsets_that_are_given():
    """As an operator has them: sizes become offsets once."""
    from coda_jax.epilogue.groups import GroupOffsets, group_offsets

    def twice(a, b, sizes):
        offsets = GroupOffsets(group_offsets(sizes, M))
        options = Options(ragged=Dimension.M)
        (y,), _ = product(a, b, (), None, lambda _: [jnp.float32], options, offsets)
        options = Options(ragged=Dimension.K, transpose_a=True)
        return product(a, y, (), None, lambda _: [jnp.float32], options, offsets)[0][0]

    assert str(jax.make_jaxpr(twice)(A, B, SIZES)).count("cumsum[") == 1
    expected = coda.ragged_contraction(A, coda.ragged_gemm(A, B, SIZES), SIZES)
    np.testing.assert_allclose(twice(A, B, SIZES), expected, rtol=1e-5, atol=1e-5)
