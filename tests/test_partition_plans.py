"""The moves for a product whose arguments and results are sharded in given ways; the digests that name products."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax import ffi
from coda_jax.epilogue import ReductionOp
from coda_jax.lowering.mesh_plan import plan, units
from coda_jax.lowering.on_devices import across
from coda_jax.lowering.record import key_of
from coda_jax.operators.head import row_function
from coda_jax.primitives.axes import BATCH, Dimension, ProductAxis
from coda_jax.primitives.dtypes import wire_dtype
from coda_jax.primitives.mesh_types import mesh_axes_of
from coda_jax.tiles import table

P = PartitionSpec
M, K, N = 16, 8, 24
SIZES = {"x": 2, "y": 4}
M0, M1, M2 = (ProductAxis(Dimension.M, i) for i in range(3))
(N0, N1), K0 = (ProductAxis(Dimension.N, i) for i in range(2)), ProductAxis(Dimension.K)


def spec_of(function, *shapes, dtype=jnp.float32):
    """The spec of the only product in a function of arrays of these shapes, and the shapes of its arguments."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    ((types, spec),) = row_function.products_of(jaxpr.jaxpr)
    return spec, [x.shape for x in types]


def planned(spec, shapes, arguments, results):
    cuts = [mesh_axes_of(of_one, len(shape)) for of_one, shape in zip(arguments, shapes, strict=True)]
    asked = [mesh_axes_of(of_one, 2) for of_one in results]
    return plan(spec, shapes, cuts, asked, SIZES)


# How a, b and the product are to lie -> how a device's parts of a and b lie, the product, and over which axes products
# are summed. An axis that a spec loses is gathered, one that only the product has is scattered.
MOVES = {
    "data parallel": ((P("x"), P(), P("x")), (P("x"), P(), P("x")), ()),
    "tensor parallel, columns": ((P(), P(None, "y"), P(None, "y")), (P(), P(None, "y"), P(None, "y")), ()),
    "tensor parallel, rows": ((P("x", "y"), P("y"), P("x")), (P("x", "y"), P("y"), P("x")), ("y",)),
    "scattered over m": ((P("x", "y"), P("y"), P(("x", "y"))), (P("x", "y"), P("y"), P(("x", "y"))), ("y",)),
    "scattered over n": ((P("x", "y"), P("y"), P("x", "y")), (P("x", "y"), P("y"), P("x", "y")), ("y",)),
    "one of two is scattered": (
        (P(None, ("x", "y")), P(("x", "y")), P(None, "x")),
        (P(None, ("x", "y")), P(("x", "y")), P(None, "x")),
        ("x", "y"),
    ),
    "FSDP, rows of b": ((P("x"), P("x"), P("x")), (P("x"), P(), P("x")), ()),
    "FSDP, columns of b": ((P("x"), P(None, "x"), P("x")), (P("x"), P(), P("x")), ()),
    "FSDP, the gradient of b": ((P(None, "x"), P("x"), P(None, "x")), (P(None, "x"), P("x"), P(None, "x")), ("x",)),
    "FSDP and tensor": ((P("x"), P("x", "y"), P("x", "y")), (P("x"), P(None, "y"), P("x", "y")), ()),
    "sequence": ((P(("x", "y")), P(None, "y"), P("x", "y")), (P("x"), P(None, "y"), P("x", "y")), ()),
    "k of a alone": ((P(None, "y"), P(), P()), (P(), P(), P()), ()),
    "k of b alone": ((P(), P("y"), P()), (P(), P(), P()), ()),
    "k of each by another axis": ((P(None, "x"), P("y"), P()), (P(), P(), P()), ()),
    "k of a by one axis more": ((P(None, ("x", "y")), P("y"), P()), (P(None, "y"), P("y"), P()), ("y",)),
    "k of b by one axis more": ((P(None, "y"), P(("y", "x")), P()), (P(None, "y"), P("y"), P()), ("y",)),
    "m lies as n is asked for": ((P("x"), P(), P(None, "x")), (P(), P(None, "x"), P(None, "x")), ()),
    "n lies as m is asked for": ((P(), P(None, "x"), P("x")), (P("x"), P(), P("x")), ()),
    "m is asked for by another axis": ((P("x"), P(), P("y")), (P("y"), P(), P("y")), ()),
    "m is asked for by one axis more": ((P("x"), P(), P(("x", "y"))), (P(("x", "y")), P(), P(("x", "y"))), ()),
    "nothing is asked for": ((P("x"), P(None, "y"), P()), (P("x"), P(None, "y"), P("x", "y")), ()),
    "one axis cuts m and n": ((P("x"), P(None, "x"), P()), (P("x"), P(), P("x")), ()),
    "an axis is scattered behind another": (
        (P(None, "y"), P("y"), P(None, ("x", "y"))),
        (P(None, "y"), P("y", "x"), P(None, ("x", "y"))),
        ("y",),
    ),
    "the order of axes": ((P(("y", "x")), P(), P(("y", "x"))), (P(("y", "x")), P(), P(("y", "x"))), ()),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    *given, asked = MOVES[name][0]
    *factors, result = MOVES[name][1]
    spec, shapes = spec_of(coda.gemm, (M, K), (K, N))
    made = planned(spec, shapes, given, [asked])
    *got, of_result = *made.argument_specs(spec, (2, 2)), *made.result_specs(spec)
    for found, want in zip((*got, of_result), (*factors, result), strict=True):
        assert mesh_axes_of(found, 2) == mesh_axes_of(want, 2), (found, want)
    assert made.over(Dimension.K) == MOVES[name][2]


@pytest.mark.parametrize(
    ("shapes", "specs", "asked", "cuts"),
    [
        (((6, 8), (8, 24)), (P(("x", "y")), P()), P(), {M0: ("x",)}),  # 6 / 2 rows, which 4 does not divide
        (((6, 8), (8, 24)), (P(("y", "x")), P()), P(), {M0: ("x",)}),
        (((6, 8), (8, 24)), (P(None, "y"), P("y")), P("y"), {K0: ("y",)}),  # a sum that cannot be scattered
        (((16, 6), (6, 24)), (P(None, "y"), P("y")), P(), {}),
        (((16, 8), (8, 4)), (P(None, "y"), P("y")), P(None, ("x", "y")), {K0: ("y",), N0: ("x",)}),
        (((2, 8, 8), (8, 24)), (P("x", "y"), P()), P("x", "y"), {M0: ("x",), M1: ("y",)}),
        (((16, 8), (8, 2, 12)), (P(), P(None, "x", "y")), P(), {N0: ("x",), N1: ("y",)}),
    ],
    ids=str,
)
def test_parts_are_whole(shapes, specs, asked, cuts):
    spec, shapes = spec_of(coda.gemm, *shapes)
    rank = sum(map(len, shapes)) - 2
    given = [mesh_axes_of(of_one, len(shape)) for of_one, shape in zip(specs, shapes, strict=True)]
    made = plan(spec, shapes, given, [mesh_axes_of(asked, rank)], SIZES)
    assert {dim: axes for dim, axes in made.shards.items() if axes} == cuts
    assert not any(made.scatters.values())


def test_operands_say_how_columns_lie():
    """Operands say how columns are sharded where neither factors nor results do, and not against them."""
    spec, shapes = spec_of(lambda a, b, row: coda.gemm(a, b, row, epilogue=jnp.add), (M, K), (K, N), (N,))
    assert planned(spec, shapes, (P("x"), P(), P("y")), (P(),)).over(Dimension.N) == ("y",)
    assert planned(spec, shapes, (P("x"), P(), P("y")), (P("x"),)).over(Dimension.N) == ("y",)
    assert planned(spec, shapes, (P("x"), P(), P("y")), (P(("x", "y")),)).over(Dimension.N) == ()
    assert planned(spec, shapes, (P(), P(None, "x"), P("y")), (P(),)).over(Dimension.N) == ("x",)


def rotated(acc):
    a, b = jnp.split(acc.reshape(acc.shape[0], -1, 8), 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1).reshape(acc.shape)


@pytest.mark.parametrize(
    ("rows", "found"),
    [((24,), {M0: 6}), ((4, 6), {M0: 1, M1: 0}), ((2, 2, 6), {M0: 1, M1: 0, M2: 0})],
    ids=str,
)
def test_units_are_whole_heads_and_whole_tables(rows, found):
    """The first of several axes of rows alone is sharded; each part has the table's rows a whole number of times."""

    def epilogue(acc, table):
        heads = rotated(acc).reshape(acc.shape[0], -1, 8)
        return (heads * jnp.tile(table, (acc.shape[0] // 6, 1))[:, None, :]).reshape(acc.shape)

    spec, _ = spec_of(lambda a, b, table: coda.gemm(a, b, table, epilogue=epilogue), (*rows, K), (K, N), (6, 8))
    sizes = {K0: K, N0: N} | {ProductAxis(Dimension.M, i): size for i, size in enumerate(rows)}
    assert units(spec, sizes) == {BATCH: 1, K0: 1, N0: 8} | found


# ---- in which dtype sums over devices are


@pytest.mark.parametrize(
    ("dtype", "results", "wire"),
    [
        (jnp.bfloat16, [jnp.bfloat16], jnp.bfloat16),
        (jnp.bfloat16, [jnp.bfloat16, jnp.bfloat16], jnp.bfloat16),
        (jnp.bfloat16, [jnp.bfloat16, jnp.float32], jnp.float32),
        (jnp.bfloat16, [jnp.float32], jnp.float32),
        (jnp.bfloat16, [jnp.float16], jnp.float32),
        (jnp.bfloat16, [], jnp.float32),
        (jnp.float16, [jnp.float16], jnp.float32),
        (jnp.float32, [jnp.float32], jnp.float32),
        (jnp.float32, [jnp.bfloat16], jnp.float32),
    ],
    ids=str,
)
def test_the_dtype_of_sums_over_devices(dtype, results, wire):
    def epilogue(acc):
        return (*(acc * (i + 1) for i, _ in enumerate(results)), jnp.sum(acc, axis=1))

    types = [*results, jnp.float32]
    spec, _ = spec_of(
        lambda a, b: coda.gemm(a, b, epilogue=epilogue, out_dtype=tuple(types)), (M, K), (K, N), dtype=dtype
    )
    assert wire_dtype(spec, np.dtype(dtype)) == wire


NUMBERS = {
    "finite": [0.5, -1.0, 30.0, -30.0],
    "nothing": [-np.inf] * 4,
    "nothing on some": [-np.inf, 2.0, -np.inf, 1.0],
    "nothing but one": [-np.inf, -np.inf, -200.0, -np.inf],
    "large": [3e38, 1e38, -3e38, 1.0],
    "infinite": [np.inf, 0.0, -np.inf, 1.0],
}


@pytest.mark.parametrize("op", ReductionOp, ids=str)
def test_reductions_over_devices(op):
    """Also where a device has -inf alone, as of what a mask leaves out, and where all have."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    parts = jnp.asarray(list(NUMBERS.values()), jnp.float32).T
    on_devices = jax.shard_map(lambda x: across(op, x, ("x",)), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    plain = {
        ReductionOp.SUM: jnp.sum,
        ReductionOp.MAX: jnp.max,
        ReductionOp.MIN: jnp.min,
        ReductionOp.LOGSUMEXP: jax.nn.logsumexp,
    }[op]
    for row in jax.jit(on_devices)(parts):
        np.testing.assert_allclose(row, plain(parts, axis=0), rtol=1e-6)


# ---- by what calls and records are named


def named(function=jnp.tanh, *, a=(32, 16), b=(16, 24), mesh=(2, 2), dtype=jnp.bfloat16, name="coda_gemm", **options):
    """The digests in what is lowered for a GPU, by which JAX's persistent cache knows what callbacks will make."""
    mesh = jax.make_mesh(mesh, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: math.prod(mesh)])
    with jax.set_mesh(mesh):
        types = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("x"))) for shape in (a, b)]
        if name == "coda_gemm":
            step = lambda a, b: coda.gemm(a, b, epilogue=function, **options)  # noqa: E731
        else:
            labels = jax.ShapeDtypeStruct(a[:1], jnp.int32, sharding=NamedSharding(mesh, P("x")))
            types = [*types, labels]
            step = lambda a, b, labels: coda.linear_cross_entropy(a, b, labels, **options)  # noqa: E731
        text = jax.jit(step).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (found,) = set(re.findall(rf'{name} = "(\w+)"', text))
    return found


def other_table(monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    table.write(path, {"NVIDIA H200": {"key": {}}})
    monkeypatch.setenv("CODA_JAX_TUNED", str(path))


SETTINGS = {
    "strict": lambda monkeypatch, tmp_path: coda.strict(),
    "the table of tiles": other_table,
    "what tiles are chosen by": lambda monkeypatch, tmp_path: monkeypatch.setenv("CODA_JAX_TILES_BY", "time"),
    "the kernel's headers": lambda monkeypatch, tmp_path: monkeypatch.setattr(ffi, "headers_hash", lambda: "other"),
}


@pytest.mark.parametrize("name", ["coda_gemm", "coda_row_shards"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_the_persistent_cache_knows(setting, name, monkeypatch, tmp_path):
    monkeypatch.setenv("CODA_JAX_TUNED", "")
    before = named(name=name)
    assert named(name=name) == before
    with SETTINGS[setting](monkeypatch, tmp_path) or monkeypatch.context():
        assert named(name=name) != before


def doubled(acc):
    return acc * 2


def tripled(acc):
    return acc * 3


def test_products_that_the_persistent_cache_knows():
    """Each by another name, whatever shapes they share; the name of a function and its line are none of it."""
    square = {"a": (16, 16), "b": (16, 16)}
    found = [
        named(doubled, **square),
        named(tripled, **square),
        named(doubled, **square, transpose_a=True),
        named(doubled, **square, transpose_b=True),
        named(doubled, **square, out_dtype=jnp.float32),
        named(doubled, **square, config=coda.GemmConfig(tile_m=64)),
        named(doubled, **square, implementation="cuda"),
    ]
    assert len(set(found)) == len(found)
    assert named(lambda x: x * 2, **square) == found[0]


def test_losses_that_the_persistent_cache_knows():
    found = [
        named(name="coda_row_shards", **options)
        for options in (
            {},
            {"label_smoothing": 0.1},
            {"soft_cap": 3.0},
            {"implementation": "cuda"},
            {"dtype": jnp.float32},
        )
    ]
    assert len(set(found)) == len(found)


def test_products_on_record_are_told_apart():
    """By the mesh too: a device's part of the same arrays is another on another mesh."""

    def types(a=(M, K), b=(K, N), dtype=jnp.bfloat16, sizes=(2, 2), names=("x", "y")):
        mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * 2)
        return [jax.core.ShapedArray(shape, dtype, sharding=NamedSharding(mesh, P())) for shape in (a, b)]

    spec, _ = spec_of(coda.gemm, (M, K), (K, N))
    found = [
        key_of(types(), spec),
        key_of(types(sizes=(4, 1)), spec),
        key_of(types(sizes=(1, 4)), spec),
        key_of(types(names=("x", "z")), spec),
        key_of(types(a=(2 * M, K)), spec),
        key_of(types(dtype=jnp.float16), spec),
        key_of(types(), spec.replace(transpose_b=True)),
        key_of(types(), spec.replace(out_dtypes=(np.dtype(jnp.float32), np.dtype(jnp.float32)))),
    ]
    assert len(set(found)) == len(found)
    elsewhere = dataclasses.replace(spec, site=dataclasses.replace(spec.site, line=7))
    assert key_of(types(), elsewhere) == found[0]
