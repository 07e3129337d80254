"""Products and the loss where some mesh axes are automatic, beside others that are manual, explicit or both.

And what cannot be split: on meshes without devices, without Shardy, in what is serialised.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax.primitives import fallbacks
from tests.gemm_cases import assert_close
from tests.nvrtc import needs_nvrtc
from tests.partitioned import collectives, partitioned_on_cpus

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
NAMES = ("data", "fsdp", "model")
M, K, N = 64, 32, 64
RNG = np.random.default_rng(5)
A, B, X = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, K), (K, N), (M, N)))


def epilogue(acc, x):
    y = jnp.tanh(acc) + x
    return y, jnp.sum(y * y, axis=1), jnp.max(y, axis=0)


def loss(a, b, x):
    y, squares, _ = coda.gemm(a, b, x, epilogue=epilogue)
    return jnp.sum(jnp.sin(y)) + jnp.sum(squares) / 8


def tanh(a, b):
    return coda.gemm(a, b, epilogue=jnp.tanh)


def in_region(f, manual, in_specs):
    """f, a sum over rows, in a shard_map over these axes of the mesh in use; it cuts the arguments so."""
    if not manual:
        return f

    def summed(*arguments):
        return jax.lax.psum(f(*arguments), manual)

    return jax.shard_map(summed, in_specs=in_specs, out_specs=P(), axis_names=set(manual))


def run(f, arguments, specs, kinds, manual, in_specs):
    """Value and gradients of f on 2 x 2 x 2 devices; shapes of the parts that a device multiplied; collectives."""
    mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=kinds)
    step = jax.value_and_grad(in_region(f, manual, in_specs), (0, 1))
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
        compiled = jax.jit(step).lower(*placed).compile()
        got = jax.device_get(compiled(*placed))
    return got, [tuple(x.shape for x in types[:2]) for _, types, _ in records], collectives(compiled)


COLUMNS_ARE_CUT = (P(("fsdp", "data")), P(None, "model"), P(("fsdp", "data"), "model"))
ROWS_BY_ONE = (P("data"), P(None, "model"), P("data", "model"))
K_IS_CUT = (P("data", "fsdp"), P("fsdp", "model"), P("data", "model"))


@pytest.mark.parametrize(
    ("kinds", "manual", "specs", "part_of_a", "part_of_b"),
    [
        ((AUTO,) * 3, ("data",), K_IS_CUT, (M // 2, K // 2), (K // 2, N // 2)),
        ((AUTO,) * 3, ("fsdp",), COLUMNS_ARE_CUT, (M // 4, K), (K, N // 2)),
        ((AUTO,) * 3, ("fsdp", "data"), COLUMNS_ARE_CUT, (M // 4, K), (K, N // 2)),
        ((AUTO, EXPLICIT, EXPLICIT), ("data",), K_IS_CUT, (M // 2, K // 2), (K // 2, N // 2)),
        ((AUTO, AUTO, EXPLICIT), ("data",), K_IS_CUT, (M // 2, K // 2), (K // 2, N // 2)),
        ((EXPLICIT, AUTO, AUTO), (), K_IS_CUT, (M // 2, K // 2), (K // 2, N // 2)),
        ((AUTO, EXPLICIT, EXPLICIT), (), ROWS_BY_ONE, (M // 2, K), (K, N // 2)),
    ],
    ids=str,
)
def test_products(kinds, manual, specs, part_of_a, part_of_b):
    """Each device multiplies its part over the axes that are free, and nothing of full size is moved.

    Two axes are free beside one that is manual: which of them an array is cut by, XLA says by device numbers alone.
    """
    in_specs = P(manual), P(), P(manual)
    got, parts, found = run(loss, (A, B, X), specs, kinds, manual, in_specs)
    assert_close(got, jax.jit(jax.value_and_grad(loss, (0, 1)))(A, B, X), rtol=1e-5)
    assert parts[0] == (part_of_a, part_of_b) and len(parts) == 3
    if EXPLICIT not in kinds:
        assert set(found) <= {"all-reduce", "collective-permute"}


@pytest.mark.parametrize("axes", [("data", "model"), ("model",)], ids=str)
def test_explicit_axes_that_are_automatic_for_a_while(axes):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(EXPLICIT,) * 2)
    result = P("data", "model")

    def multiply(a, b):
        return jax.sharding.auto_axes(tanh, axes=axes, out_sharding=result)(a, b)

    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((A, P("data")), (B, P(None, "model")))]
        compiled = jax.jit(multiply).lower(*placed).compile()
        got = compiled(*placed)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, result), 2)
    assert_close(jax.device_get(got), tanh(A, B), rtol=1e-5)
    assert [tuple(x.shape for x in types[:2]) for _, types, _ in records] == [((M // 2, K), (K, N // 4))]
    assert not collectives(compiled)


VOCABULARY, WIDTH = 96, 32
HIDDEN = jnp.asarray(RNG.standard_normal((16, 64, WIDTH)), jnp.float32)
HEAD = jnp.asarray(RNG.standard_normal((WIDTH, VOCABULARY)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, VOCABULARY, HIDDEN.shape[:2]))


def cross_entropy(x, w, labels):
    norm = coda.rms_norm(x, jnp.ones(WIDTH))
    return coda.linear_cross_entropy(norm, w, labels, chunk_bytes=VOCABULARY * 4 * 128, reduction="sum")[0]


@pytest.mark.parametrize(
    ("manual", "specs", "rows", "moved"),
    [
        (("data",), (P(("data", "fsdp")), P("fsdp"), P(("data", "fsdp"))), 128, {"all-gather", "all-reduce"}),
        (("data", "fsdp"), (P(("data", "fsdp")), P(None, "model"), P(("data", "fsdp"))), 256, {"all-reduce"}),
    ],
    ids=["FSDP", "a cut vocabulary"],
)
def test_loss(manual, specs, rows, moved):
    """A chunk is of the device's own tokens, and of as many bytes of its part of the vocabulary."""
    in_specs = (P(manual), P(), P(manual))
    got, parts, found = run(cross_entropy, (HIDDEN, HEAD, LABELS), specs, (AUTO,) * 3, manual, in_specs)
    assert_close(got, jax.jit(jax.value_and_grad(cross_entropy, (0, 1)))(HIDDEN, HEAD, LABELS), rtol=1e-5)
    assert set(found) == moved
    assert {part_of_a for part_of_a, _ in parts if part_of_a[1] == WIDTH} == {(rows, WIDTH)}


# ---- what cannot be split says so, and names a way out


def lowered(f, *arguments):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def in_shard_map(axes):
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    return lambda a, b: jax.shard_map(tanh, axis_names=set(axes), **specs)(a, b)


@needs_nvrtc
@pytest.mark.parametrize(("manual", "named"), [((), "data, model"), (("data",), "model")], ids=str)
def test_a_mesh_without_devices(manual, named, monkeypatch):
    monkeypatch.setattr(fallbacks, "_reported", set())
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    types = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((M, K), P("data")), ((K, N), P()))
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        reason = f"XLA partitions it over {named}, whose devices no lowering knows; inside a jax.shard_map over all"
        with pytest.warns(coda.FallbackWarning, match=reason):
            assert "coda_gemm(" not in lowered(in_shard_map(manual) if manual else tanh, *types)
        assert "coda_gemm(" in lowered(in_shard_map(("data", "model")), *types)  # the way out


@needs_nvrtc
def test_without_shardy(monkeypatch):
    monkeypatch.setattr(fallbacks, "_reported", set())
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with jax.set_mesh(mesh), pytest.warns(coda.FallbackWarning, match="without Shardy.*inside a jax.shard_map"):
            text = lowered(tanh, a, b)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert "coda_gemm(" not in text and "CustomSPMDPartitioning" not in text


def test_serialised_executables():
    """Over automatic axes an error with a way out; that way works."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    with partitioned_on_cpus(), jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((A, P("data")), (B, P()))]
        compiled = jax.jit(tanh).lower(*placed).compile()
        with pytest.raises(NotImplementedError, match=r"cannot be serialised.*inside a jax.shard_map over all axes"):
            serialize_executable.serialize(compiled)
        assert serialize_executable.serialize(jax.jit(in_shard_map(("data", "model"))).lower(*placed).compile())


def test_parts_of_an_axis():
    """XLA may cut by a part of a mesh axis, as where an axis of an array that is cut is reshaped to two."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))

    def project(x, w):
        norm = coda.rms_norm(x.reshape(2, -1, K), jnp.ones(K))
        return coda.norm_projection(norm, w)

    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        x, w = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((A, P("data")), (B, P())))
        compiled = jax.jit(project).lower(x, w).compile()
        got = jax.device_get(compiled(x, w))
    assert_close(got, project(A, B), rtol=1e-5)
    assert [tuple(x.shape for x in types[:2]) for _, types, _ in records] == [((1, M // 8, K), (K, N))]
