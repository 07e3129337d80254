"""XLA's scheduler is told how long a product takes."""

import csv
import functools
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from coda_jax.lowering import launch, select
from coda_jax.tiles.config import GemmConfig

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


def told(function, *shapes, platform="cuda"):
    """Nanoseconds, in the order of the calls."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = jax.jit(function).trace(*types).lower(lowering_platforms=(platform,)).as_text()
    return [int(found) for found in re.findall(r'latency_metadata = "(\d+)"', text)]


@pytest.mark.parametrize("device", ["nvidia_h100_80gb_hbm3", "nvidia_h200"])
def test_about_what_was_measured(device, monkeypatch):
    """Within a third for each bare product, and a tenth in the middle."""
    with (RESULTS / f"{device}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "bare" and row["program"] == "A[M,K] B[N,K]"]
    name = rows[0]["device"]
    for module in (launch, select):
        monkeypatch.setattr(module, "attached_device", lambda: name)
    ratios = []
    for row in rows:
        m, n, k = (int(row[size]) for size in "mnk")
        (expected,) = told(lambda a, b: coda.gemm(a, b, transpose_b=True), (m, k), (n, k))
        ratios.append(expected / float(row["coda_product"]) / 1e3)
    assert len(ratios) >= 5 and all(2 / 3 < ratio < 1.5 for ratio in ratios), ratios
    assert 0.9 < statistics.median(ratios) < 1.1, ratios


def test_every_call_says_it():
    """In a scan and its gradient too; a part of a split product says what the part takes."""

    def loss(x, w):
        def layer(x, _):
            return coda.gemm(x, w, epilogue=jax.nn.gelu), None

        return jnp.sum(jax.lax.scan(layer, x, length=2)[0].astype(jnp.float32))

    assert len(told(jax.grad(loss, (0, 1)), (256, 128), (128, 128))) == 3
    small, large = (told(coda.gemm, (m, 4096), (4096, 4096))[0] for m in (1024, 16384))
    assert 8 < large / small < 17
    config = GemmConfig(tile_m=64, tile_n=64)
    assert told(lambda a, b: coda.gemm(a, b, config=config), (4096, 4096), (4096, 4096)) > told(
        coda.gemm, (4096, 4096), (4096, 4096)
    )
    assert told(coda.gemm, (256, 128), (128, 128), platform="cpu") == []


def test_a_split_call_says_it_after_partitioning(tmp_path):
    """XLA's partitioner gives its own attributes to what it puts in the place of a call, and not inside of a loop."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def arrays(*shapes_and_specs):
        return [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in shapes_and_specs
        ]

    def with_row_sums(acc):
        return acc, jnp.sum(acc * acc, axis=1)

    a, b = arrays(((4096, 1024), P("data")), ((1024, 2048), P()))
    part = told(functools.partial(coda.gemm, epilogue=with_row_sums), (2048, 1024), (1024, 2048))
    function = jax.jit(functools.partial(coda.gemm, epilogue=with_row_sums))
    lowered = function.trace(a, b).lower(lowering_platforms=("cuda",))
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
    with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for coda_gemm"):  # on CPUs
        lowered.compile(compiler_options=dump)
    (after,) = tmp_path.glob("*.after_spmd-partitioning.*.txt")
    (call,) = [line for line in after.read_text().splitlines() if 'custom_call_target="coda_gemm"' in line]
    assert [int(found) for found in re.findall(r'latency_metadata="(\d+)"', call)] == part


def test_several_results_share_it():
    """XLA counts what is said of a call again for each result that is taken of it."""
    one = told(coda.gemm, (4096, 1024), (1024, 2048))[0]
    two = told(
        lambda a, b: coda.gemm(a, b, epilogue=lambda acc: (acc, jnp.sum(acc, axis=1))), (4096, 1024), (1024, 2048)
    )[0]
    assert one <= 3 * two < 1.2 * one
