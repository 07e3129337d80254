"""Products of groups on a device: values in poisoned outputs, foreign rows that hold NaN, the same bits each time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.epilogues import EpilogueCase
from benchmarks.programs import spec_of
from coda_jax.epilogue import ByGroup, trace
from coda_jax.epilogue.groups import group_offsets
from coda_jax.primitives.axes import Dimension
from coda_jax.tiles import arch
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests import tolerance
from tests.gpu.poisoned import poisoned
from tests.test_ragged_gradients import check_gradients

REPEATS = 300


def silu_gate(acc):
    gate, up = jnp.split(acc, 2, axis=1)
    return jax.nn.silu(gate) * up


def kept_gate(acc):
    return acc, silu_gate(acc)


def scaled(acc, column, tile):
    return acc * column + tile


def biased(acc, bias, scale):
    return jax.nn.gelu(acc * scale + bias)


def row_sums(acc, column):
    y = acc * column
    return y, jnp.sum(y * y, axis=1)


def parts(acc):
    return jnp.split(acc, [acc.shape[1] // 4], axis=1)


def identity(acc):
    return acc


@dataclasses.dataclass(frozen=True)
class Case:
    """An epilogue of rows in groups: its operands for so many rows, columns and groups, and its outputs' dtypes."""

    epilogue: object
    operands: object = lambda m, n, groups, key: ()
    out_dtypes: tuple = (jnp.bfloat16,)


def _normal(key, shape, dtype=jnp.bfloat16):
    return jax.random.normal(key, shape).astype(dtype)


CASES = {
    "identity": Case(identity),
    "float32": Case(identity, out_dtypes=(jnp.float32,)),
    "silu_gate": Case(silu_gate),
    "kept_gate": Case(kept_gate, out_dtypes=(jnp.bfloat16, jnp.bfloat16)),
    "scaled": Case(scaled, lambda m, n, groups, key: (_normal(key, (m, 1), jnp.float32), _normal(key, (m, n)))),
    "biased": Case(
        biased, lambda m, n, groups, key: (ByGroup(_normal(key, (groups, n))), ByGroup(_normal(key, (groups,))))
    ),
    "row_sums": Case(row_sums, lambda m, n, groups, key: (_normal(key, (m, 1), jnp.float32),), (jnp.bfloat16,)),
    "parts": Case(parts, out_dtypes=(jnp.bfloat16, jnp.float32)),
}
SIZES = {
    "equal": [128, 128, 128, 128],
    "unaligned": [100, 1, 0, 333, 17, 255, 129, 0],
    "not all rows": [3, 0, 250, 64],
    "none": [0, 0, 0],
    "one": [777],
    "many": [(7 * i) % 23 for i in range(64)],
}
MORE_ROWS = 45  # in no group


def _spec(case, m, n, operands, sizes, offsets, **options):
    acc = jax.ShapeDtypeStruct((m, n), jnp.float32)
    traced, (*captured, kept) = trace(case.epilogue, acc, operands, offsets)
    assert not captured
    program = EpilogueCase(case.epilogue, None, case.out_dtypes)
    spec = spec_of(program, traced, **options)
    return spec, [*(x.array if isinstance(x, ByGroup) else x for x in operands), kept]


def _rows_of(sizes):
    ends = np.cumsum(sizes)
    return list(zip(ends - sizes, ends, strict=True))


def _grouped(name, sizes, n, k, *, transpose_b=False, seed=0, dtype, **options):
    """A call on poisoned outputs, and the plain formula group by group, in a dtype."""
    case, groups = CASES[name], len(sizes)
    m = sum(sizes) + MORE_ROWS
    keys = jax.random.split(jax.random.key(seed), 3)
    a = _normal(keys[0], (m, k), dtype).at[sum(sizes) :].set(jnp.nan)
    b = (jax.random.normal(keys[1], (groups, n, k) if transpose_b else (groups, k, n)) / np.sqrt(k)).astype(dtype)
    operands = case.operands(m, n, groups, keys[2])
    offsets = group_offsets(jnp.asarray(sizes, jnp.int32), m)
    spec, arrays = _spec(case, m, n, operands, sizes, offsets, ragged=Dimension.M, transpose_b=transpose_b)
    call = poisoned(spec, (a, b, *arrays), **options)

    def plain(working):
        host = jax.tree.map(lambda x: np.asarray(x).astype(working) if x.dtype != jnp.int32 else x, (a, b, arrays))
        found = []
        for group, (first, end) in enumerate(_rows_of(np.asarray(sizes))):
            matrix = host[1][group].T if transpose_b else host[1][group]
            acc = jnp.asarray(host[0][first:end]) @ jnp.asarray(matrix)
            mine = []
            for x, operand in zip(host[2], operands, strict=False):
                by_group = isinstance(operand, ByGroup)
                mine.append(jnp.asarray(x[group : group + 1].reshape(1, -1) if by_group else x[first:end]))
            found.append(jax.tree.leaves(case.epilogue(acc, *mine)))
        results = [np.concatenate([np.asarray(x) for x in each]) for each in zip(*found, strict=True)]
        return [np.concatenate([x, np.zeros((MORE_ROWS, *x.shape[1:]), x.dtype)]) for x in results]

    def check(outputs):
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            exact = plain(np.float64)
        with jax.default_device(jax.devices("cpu")[0]):
            rough = plain(dtype)
        stores = len(spec.program.stores)
        for out, reference, other in zip(outputs[:stores], exact, rough, strict=False):
            tolerance.check(out, reference.astype(np.float64), other.astype(out.dtype), name=name)
        for out, reference in zip(outputs[stores:], exact[stores:], strict=True):  # partial sums, a tile each
            total, rows = np.asarray(out, np.float64).sum(0)[: sum(sizes)], reference[: sum(sizes)]
            assert np.all(np.abs(total - rows) <= 0.02 * np.abs(rows) + 0.02), np.max(np.abs(total - rows))

    return call, check


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("case", ["bare", "bias", "swiglu", "half vectors", "fragile"])
def test_gradients(case, residuals, transpose_b):
    sizes = np.array(SIZES["unaligned"], np.int32)
    with coda.strict():
        check_gradients(case, int(sizes.sum()) + MORE_ROWS, 8, jnp.bfloat16, sizes, residuals, transpose_b=transpose_b)


def test_reductions_of_each_group():
    sizes = np.array(SIZES["unaligned"], np.int32)
    check_gradients("of each group", int(sizes.sum()) + MORE_ROWS, 8, jnp.bfloat16, sizes, "preactivation")


def test_group_offset_and_loops():
    """Groups from the third on; and products of a batch, one after the other."""
    sizes = jnp.array(SIZES["unaligned"], jnp.int32)
    a, b = _normal(jax.random.key(0), (3, 900, 128)), _normal(jax.random.key(1), (5, 128, 256))
    product = jax.vmap(lambda a: coda.ragged_gemm(a, b, sizes, group_offset=2, implementation="cuda"))
    out = np.asarray(jax.jit(product)(a), np.float32)
    ends = np.cumsum(sizes)
    for batch in range(3):
        for g in range(8):
            rows = slice(ends[g] - sizes[g], ends[g])
            want = np.asarray(a[batch, rows], np.float32) @ np.asarray(b[g - 2], np.float32) if 2 <= g < 7 else 0
            assert np.all(np.abs(out[batch, rows] - want) <= 0.01 * np.abs(want) + 0.1)
        assert not out[batch, ends[-1] :].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CASES)
def test_rows_in_groups(name, sizes):
    call, check = _grouped(name, sizes, 640, 200, dtype=jnp.bfloat16)
    check(call())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("size", SM90.tiles, ids=str)
def test_tiles_of_rows_in_groups(size, cluster_m, dtype):
    config = GemmConfig(tile_m=size[0], tile_n=size[1], cluster_m=cluster_m)
    for name in ("identity", "kept_gate", "row_sums"):
        if name == "kept_gate" and size[1] % 128:
            continue  # halves of whole chunks of columns
        call, check = _grouped(name, SIZES["unaligned"], 528, 328, config=config, dtype=dtype)
        check(call())


@pytest.mark.parametrize("name", ["identity", "silu_gate", "biased"])
def test_transposed_b(name):
    call, check = _grouped(name, SIZES["unaligned"], 640, 200, transpose_b=True, dtype=jnp.bfloat16)
    check(call())


def _contracted(sizes, m, n, *, dtype=jnp.bfloat16, seed=0, **options):
    rows = sum(sizes) + MORE_ROWS
    keys = jax.random.split(jax.random.key(seed), 2)
    a, b = (_normal(key, (rows, size), dtype) for key, size in zip(keys, (m, n), strict=True))
    a, b = a.at[sum(sizes) :].set(jnp.nan), b.at[sum(sizes) :].set(jnp.inf)
    offsets = group_offsets(jnp.asarray(sizes, jnp.int32), rows)
    case = Case(identity, out_dtypes=(dtype,))
    spec, arrays = _spec(case, m, n, (), sizes, offsets, ragged=Dimension.K, transpose_a=True)
    call = poisoned(spec, (a, b, *arrays), **options)

    def check(outputs):
        (out,) = outputs
        host = [np.asarray(x) for x in (a, b)]
        for group, (first, end) in enumerate(_rows_of(np.asarray(sizes))):
            x, y = (h[first:end].astype(np.float64) for h in host)
            rough = (x.T.astype(np.float32) @ y.astype(np.float32)).astype(dtype)
            tolerance.check(out[group], x.T @ y, rough, name=f"group {group} of {end - first}")

    return call, check


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_k_in_groups(sizes):
    call, check = _contracted(sizes, 264, 400)
    check(call())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("size", SM90.tiles, ids=str)
def test_tiles_of_k_in_groups(size, cluster_m, dtype):
    config = GemmConfig(tile_m=size[0], tile_n=size[1], cluster_m=cluster_m)
    call, check = _contracted(SIZES["unaligned"], 264, 528, config=config, dtype=dtype)
    check(call())


@jax.jit
def _differing(first, second):
    bits = {2: jnp.uint16, 4: jnp.uint32}

    def as_bits(x):
        return jax.lax.bitcast_convert_type(x, bits[x.dtype.itemsize])

    return sum(jnp.sum(as_bits(x) != as_bits(y)) for x, y in zip(first, second, strict=True))


def _large_sizes(groups, rows):
    shares = np.random.default_rng(5).multinomial(rows, np.random.default_rng(6).dirichlet(np.ones(groups)))
    return shares.tolist()


@pytest.mark.parametrize("config", [None, GemmConfig(cluster_m=1), GemmConfig(tile_m=128, tile_n=256)], ids=str)
@pytest.mark.parametrize("name", ["kept_gate", "scaled", "k"])
def test_every_launch_gives_the_same_bits(name, config):
    sizes = _large_sizes(24, 8000)
    if name == "k":
        call, _ = _contracted(sizes, 1024, 1040, config=config)
    else:
        call, _ = _grouped(name, sizes, 2048, 256, config=config, dtype=jnp.bfloat16)
    first = call()
    for out in first:
        assert not np.isnan(np.asarray(out, np.float32)).any()
    assert sum(int(_differing(first, call())) for _ in range(REPEATS)) == 0


@pytest.mark.parametrize("nanoseconds", [0, 1000])
@pytest.mark.parametrize("config", [GemmConfig(tile_m=128, tile_n=128), GemmConfig(tile_m=128, tile_n=256)], ids=str)
@pytest.mark.parametrize("name", ["kept_gate", "scaled", "k"])
def test_claimed_tiles(name, config, nanoseconds, monkeypatch):
    """The same bits as those of blocks that have tiles of their own."""
    monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(arch.SM90, yield_nanoseconds=nanoseconds),))
    sizes, sources = _large_sizes(24, 8000), []

    def kept(source):
        sources.append(source)
        return source

    def call(**options):
        if name == "k":
            return _contracted(sizes, 1024, 1040, config=config, **options)[0]
        return _grouped(name, sizes, 2048, 256, config=config, dtype=jnp.bfloat16, **options)[0]

    want, claiming = call()(), call(yields=True, rewrite=kept)
    assert sources and all("claims = true" in source for source in sources)
    assert sum(int(_differing(want, claiming())) for _ in range(REPEATS // 3)) == 0


FAULTS = {
    "store a neighbour's rows": ("m", (("if (rows < 16) {", "if (rows < 0) {"),)),
    "leave rows of none": ("m", (("epilogue.store_zeros(work.tile);", ";"),)),
    "an offset by one": ("m", (("min(max(offsets[group], 0), rows)", "min(max(offsets[group] + 1, 0), rows)"),)),
    "k behind the end": ("k", (("if (left < Config::tile_k) zero_behind(consumer, at.slot, left);", ""),)),
    "one factor alone is zeroed": (
        "k",
        (
            (
                "for (int chunk = 0; chunk < chunks_of_a + chunks_of_b; ++chunk)",
                "for (int chunk = 0; chunk < chunks_of_a; ++chunk)",
            ),
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_shows(fault):
    kind, replacements = fault

    def plant(source):
        for there, instead in replacements:
            assert source.count(there) == 1, there
            source = source.replace(there, instead)
        return source

    make = (
        functools.partial(_contracted, m=264, n=400)
        if kind == "k"
        else functools.partial(_grouped, "identity", n=640, k=200, dtype=jnp.bfloat16)
    )
    call, check = make(sizes=SIZES["unaligned"], rewrite=plant)
    with pytest.raises(AssertionError):
        check(call())
