"""coda.gemm inside shard_map with checked types, on CPU devices."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from coda_jax.lowering import cuda, kernel, launch
from coda_jax.operators.head import row_function
from coda_jax.tiles import arch
from coda_jax.tiles.traffic import CLAIMS_BYTES
from tests.gemm_cases import assert_close, jit, total
from tests.nvrtc import kernels, needs_nvrtc

M, K, N = 32, 16, 24
RNG = np.random.default_rng(9)
A, B = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, K), (K, N)))
X, ROW = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, N), (N,)))
P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    assert len(jax.devices("cpu")) >= 4, "conftest.py asks for four CPU devices"
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])


def epilogue(acc, x, row):
    y = jax.nn.silu(acc + row) + x
    return y, jnp.sum(y * y, axis=1), jnp.mean(y)


def sharded(mesh, function, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def data_parallel(mesh, **options):
    def loss(a, b, x, row):
        return jax.lax.psum(total(coda.gemm(a, b, x, row, epilogue=epilogue, **options)), "x")

    return sharded(mesh, loss, (P("x"), P(), P("x"), P()), P())


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_data_parallel_gradient(mesh, residuals):
    def by_hand(a, b, x, row):
        parts = zip(jnp.split(a, 4), jnp.split(x, 4), strict=True)
        return sum(total(epilogue(a @ b, x, row)) for a, x in parts)

    got = jit(jax.grad(data_parallel(mesh, residuals=residuals), (0, 1, 2, 3)))(A, B, X, ROW)
    assert_close(got, jit(jax.grad(by_hand, (0, 1, 2, 3)))(A, B, X, ROW))


@pytest.mark.smoke
def test_row_parallel(mesh):
    """K is sharded: a psum of the partial products, and its gradient."""

    def multiply(a, b):
        return jax.lax.psum(coda.gemm(a, b), "x")

    def loss(product):
        return jit(jax.grad(lambda a, b: total(jnp.sin(product(a, b))), (0, 1)))

    got = loss(sharded(mesh, multiply, (P(None, "x"), P("x")), P()))(A, B)
    assert_close(got, loss(jnp.matmul)(A, B))


@pytest.mark.smoke
def test_column_parallel(mesh):
    got = sharded(mesh, lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), (P(), P(None, "x")), P(None, "x"))(A, B)
    assert_close(got, jnp.tanh(A @ B))


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_captured_values_may_vary_more_than_the_factors(mesh, residuals):
    def loss(multiply):
        def of(a, b, scale, x):
            return total(multiply(a, b, lambda acc: jnp.sin(acc * scale) + x))

        return of

    def fused(a, b, f):
        return coda.gemm(a, b, epilogue=f, residuals=residuals)

    def in_map(a, b, scale, x):
        return jax.lax.psum(loss(fused)(a, b, scale, x), "x")

    def by_hand(a, b, scale, x):
        return sum(loss(lambda a, b, f: f(a @ b))(a, b, scale, x) for x in jnp.split(x, 4))

    arguments = (A[:8], B, jnp.float32(1.5), X)
    got = jit(jax.grad(sharded(mesh, in_map, (P(), P(), P(), P("x")), P()), (0, 1, 2, 3)))(*arguments)
    assert_close(got, jit(jax.grad(by_hand, (0, 1, 2, 3)))(*arguments))


def test_scan_over_layers(mesh):
    weights = jnp.asarray(RNG.standard_normal((3, K, K)), jnp.float32) / 4

    def loss(multiply):
        def of(x, weights):
            return total(jax.lax.scan(lambda x, w: (multiply(x, w), None), x, weights)[0])

        return of

    fused = loss(lambda x, w: coda.gemm(x, w, x, epilogue=lambda acc, x: jnp.tanh(acc) + x))
    by_hand = loss(lambda x, w: jnp.tanh(x @ w) + x)
    in_map = sharded(mesh, lambda x, w: jax.lax.psum(fused(x, w), "x"), (P("x"), P()), P())
    got = jit(jax.grad(in_map, (0, 1)))(A, weights)
    want = jit(jax.grad(lambda x, w: sum(by_hand(x, w) for x in jnp.split(x, 4)), (0, 1)))(A, weights)
    assert_close(got, want)


@pytest.mark.parametrize("specs", [(P("x"), P(), P("x"), P()), (P("x"), P(None, "y"), P("x", "y"), P("y"))], ids=str)
def test_explicit_axes(specs):
    """Types carry the shardings: each cotangent has that of its argument."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4])

    def gradient(multiply):
        return jax.jit(jax.grad(lambda a, b, x, row: total(multiply(a, b, x, row)), (0, 1, 2, 3)))

    want = gradient(lambda a, b, *operands: epilogue(a @ b, *operands))(A, B, X, ROW)
    with jax.set_mesh(mesh):
        arguments = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((A, B, X, ROW), specs, strict=True)
        ]
        got = gradient(lambda a, b, *operands: coda.gemm(a, b, *operands, epilogue=epilogue))(*arguments)
    for x, argument in zip(got, arguments, strict=True):
        assert x.sharding.is_equivalent_to(argument.sharding, x.ndim)
    assert_close(jax.device_get(got), want)


@needs_nvrtc
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_cuda_lowering(mesh, residuals):
    types = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (A, B, X, ROW)]
    gradient = jax.grad(data_parallel(mesh, residuals=residuals), (0, 1, 2, 3))
    # With "recompute" the forward product is dead: a gradient needs the derivative's, da and db.
    assert kernels(gradient, *types) == 3


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def products(mesh, manual, **options):
    """tanh(a b), in a shard_map over the manual axes if there are any."""

    def product(a, b):
        return coda.gemm(a, b, epilogue=jnp.tanh, **options)

    of_a = P("x") if "x" in manual else P()
    specs = {"in_specs": (of_a, P()), "out_specs": of_a}
    return jax.shard_map(product, axis_names=set(manual), **specs) if manual else product


def lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@needs_nvrtc
@pytest.mark.parametrize(
    ("kind", "rows", "manual", "over"),
    [
        (AUTO, "x", (), "x, y"),
        (AUTO, None, (), "x, y"),  # where arrays lie on automatic axes no type says
        (AUTO, "x", ("x",), "y"),
        (AUTO, "x", ("x", "y"), None),
        (EXPLICIT, "x", (), "x"),
        (EXPLICIT, None, (), None),
        (EXPLICIT, "x", ("x",), None),
        (EXPLICIT, ("x", "y"), ("x",), "y"),
        (EXPLICIT, "x", ("x", "y"), None),
    ],
)
def test_each_device_runs_the_kernel_on_its_part(kind, rows, manual, over):
    """Over automatic axes XLA asks for the kernel once it has partitioned the program."""
    a, b = (x.astype(jnp.bfloat16) for x in (A, B))
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        a, b = jax.device_put(a, P(rows)), jax.device_put(b, P())
        multiply = products(mesh, manual, implementation="cuda")
        text = lowered(multiply, a, b)
        is_asked = kind is AUTO and len(manual) < 2
        assert (text.count("@coda_gemm("), text.count("@CustomSPMDPartitioning(")) == (not is_asked, is_asked)
        (product,) = coda.explain(multiply, a, b, platform="cuda").products
    assert product.reason is None
    assert ("on each device's part" in product.tile) == (over is not None)
    assert over is None or product.tile.endswith(f"over {over}")


@needs_nvrtc
@pytest.mark.parametrize(("kind", "manual"), [(EXPLICIT, ()), (EXPLICIT, ("x", "y")), (AUTO, ("x", "y"))])
def test_kernels_make_way_where_there_are_several_devices(kind, manual):
    """For collectives that run beside them; alone on its device a kernel's blocks stay to its end."""

    def k_blocks(text):
        return [int(number) for number in re.findall(r"yield_k_blocks = (\d+)", text)]

    a, b = (x.astype(jnp.bfloat16) for x in (A, B))
    assert k_blocks(lowered(coda.gemm, a, b)) == [0]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        (found,) = k_blocks(lowered(products(mesh, manual), jax.device_put(a, P("x")), jax.device_put(b, P())))
    assert found > 100


@needs_nvrtc
def test_kernels_that_claim_their_tiles_have_a_counter(monkeypatch):
    """One more result, zeroed before. Not on one device, of split-K, or of no more tiles than run at one time."""
    spec = PROGRAMS["residual_sumsq"]

    def made(m=4096, **options):
        types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, 4096), (4096, 256))]
        operands = spec.operand_types(m, 256)
        config = coda.GemmConfig(tile_m=64, tile_n=64, **options)
        multiply = functools.partial(coda.gemm, epilogue=spec.epilogue, config=config)
        return lowered(multiply, *types, *operands)

    text = made(split_k=False)
    assert "claims = false" in text and "flags = -1 " in text and "yield_k_blocks = 0 " in text
    monkeypatch.setattr(cuda, "is_of_several", lambda ctx: True)
    text = made(split_k=False)
    assert "claims = true" in text and "flags = 5 " in text and "yield_k_blocks = 0 " not in text
    text = made(split_k=True)
    assert "claims = false" in text and "yield_k_blocks = 0 " in text
    assert "claims = true" in made(2049, split_k=False) and "claims = false" in made(2048, split_k=False)


def kernel_of(program, tile):
    """The kernel of a product of a program of several devices, and its tile's config."""
    operands = PROGRAMS[program].operand_types(8192, 4096)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 512), (512, 4096))]
    config = coda.GemmConfig(tile_m=tile[0], tile_n=tile[1], split_k=False)
    multiply = functools.partial(coda.gemm, epilogue=PROGRAMS[program].epilogue, config=config)
    ((_, spec),) = row_function.products_of(jax.make_jaxpr(multiply)(*types, *operands).jaxpr)
    config = launch.problem_of([*types, *operands], spec).config(config, None)
    return kernel.lower([*types, *operands], spec, config, yields=True), config


@pytest.mark.parametrize("tile", arch.SM90.tiles, ids=str)
def test_a_turn_takes_about_a_millisecond(tile):
    """At 700 TFLOP/s of 132 multiprocessors: a collective waits so long, or twice, for a place beside a product."""
    found, config = kernel_of("identity", tile)
    flops = 2 * config.tile_m * config.tile_n * 64 * found.call.yield_k_blocks
    assert 0.95e-3 < flops / (700e12 / 132) < 1.05e-3


@pytest.mark.parametrize("program", ["identity", "column_sum", "residual_sumsq"])
@pytest.mark.parametrize("tile", arch.SM90.tiles, ids=str)
def test_claims_have_a_place_in_shared_memory(tile, program, monkeypatch):
    """A kernel's blocks have tiles of their own where a block's shared memory ends before the claims."""
    found, _ = kernel_of(program, tile)
    needed = found.call.smem_bytes
    assert "claims = true" in found.call.source
    for end, claims in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(arch.SM90, shared_bytes=end),))
        found, _ = kernel_of(program, tile)
        assert (f"claims = {str(claims).lower()}" in found.call.source) and (found.call.flags >= 0) is claims
        assert found.call.smem_bytes <= end


def test_claims_are_as_the_kernel_has_them():
    """Their bytes stand in cuda/claims.cuh too."""
    text = (pathlib.Path(__file__).parents[1] / "cuda" / "claims.cuh").read_text()
    slots, slot_bytes = map(int, re.search(r"slots = (\d+), bytes = (\d+) \* slots", text).group(1, 2))
    assert slots * slot_bytes == CLAIMS_BYTES


@needs_nvrtc
def test_shardings_that_no_type_has_are_seen_too(mesh):
    types = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (A, B)]
    shardings = (NamedSharding(mesh, P("x")), NamedSharding(mesh, P()))
    multiply = jax.jit(coda.gemm, in_shardings=shardings)
    assert "@CustomSPMDPartitioning(" in lowered(multiply, *types)
    (product,) = coda.explain(multiply, *types, platform="cuda").products
    assert product.tile.endswith("over 4 devices")
    (product,) = coda.explain(coda.gemm, *types, platform="cuda").products
    assert "each device's part" not in product.tile
    with jax.set_mesh(mesh):
        (product,) = coda.explain(coda.gemm, *(x.astype(jnp.bfloat16) for x in (A, B)), platform="cuda").products
    assert product.tile.endswith("over x")


@needs_nvrtc
def test_export_says_the_way_out(mesh):
    a, b = (x.astype(jnp.bfloat16) for x in (A, B))
    multiply = jax.jit(functools.partial(coda.gemm, implementation="cuda"))
    with jax.set_mesh(mesh):
        check = [jax.export.DisabledSafetyCheck.custom_call("coda_gemm")]
        with pytest.raises(NotImplementedError, match=r"an exported program cannot carry.*explicit axes"):
            jax.export.export(multiply, platforms=["cuda"], disabled_checks=check)(a, b)


def test_products_that_xla_partitions_gather_nothing(mesh):
    a, b = jax.device_put(A, NamedSharding(mesh, P("x"))), jax.device_put(B, NamedSharding(mesh, P()))
    compiled = jax.jit(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh)).lower(a, b).compile()
    assert "all-gather" not in compiled.as_text() and "all-reduce" not in compiled.as_text()
    assert compiled(a, b).sharding.is_equivalent_to(a.sharding, 2)
