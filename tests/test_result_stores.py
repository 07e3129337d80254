"""Results of 8 bits, transposed results and maxima of all elements, by the kernel's own epilogue on the host: bit for
bit what XLA's form has, of any shape, whichever warp is ahead and whenever the copy engine reads.
"""

import dataclasses
import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coda_jax as coda
from benchmarks.epilogues import EpilogueCase
from benchmarks.programs import lowered, spec_of
from coda_jax.epilogue import TileStore, evaluate_tiles, trace
from coda_jax.epilogue.rounding import stored
from coda_jax.lowering import kernel
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.tiles.config import CONSUMERS, GemmConfig
from tests.lockstep import Library, Piece, bits

BF16, F16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
ordered = coda.contraction_order


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """An epilogue whose operations are exact or rounded once, its stores' dtypes, and the tile.

    `units`: M and N are multiples of these.
    """

    epilogue: object
    out_dtypes: tuple
    tile: tuple = (128, 128)
    units: tuple = (16, 16)
    operands: object = lambda m, n: ()
    batch: int | None = None
    yields: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    @functools.cache  # noqa: B019
    def kernel(self, m, n):
        operands = self.operands(m, n)
        traced, captured = trace(self.epilogue, array(m, n), operands)
        assert not captured
        spec = spec_of(EpilogueCase(self.epilogue, None, self.out_dtypes), traced, transpose_b=True)
        batch = () if self.batch is None else (self.batch,)
        types = (array(*batch, m, 64, dtype=BF16), array(n, 64, dtype=BF16), *operands)
        spec = spec.replace(batched=(bool(batch),) + (False,) * (len(types) - 1))
        assert unsupported_reason(types, spec) is None
        config = GemmConfig(tile_m=self.tile[0], tile_n=self.tile[1], cluster_m=1, split_k=False, **self.options)
        return spec, lowered(types, spec, config, yields=self.yields)

    def __hash__(self):
        return id(self)


def gate(z):
    of_gate, up = jnp.split(z, 2, axis=1)
    return jnp.maximum(of_gate, 0) * up


def saturated(y):
    return coda.saturate(y, E4M3)


def forward(acc, rstd, w_scale, y_scale):
    z = acc * rstd * w_scale
    y = gate(z)
    y8 = saturated(y * y_scale)
    return z, ordered(y8), ordered(y8.T), jnp.max(jnp.abs(y))


def backward(acc, z, scale):
    of_gate, up = jnp.split(z.astype(F32), 2, axis=1)
    t = jnp.concatenate([acc * up, acc * jnp.maximum(of_gate, 0)], axis=1)
    t8, y8 = saturated(t * scale), saturated(of_gate * up)
    return ordered(t8), ordered(t8.T), ordered(y8.T), jnp.max(jnp.abs(t))


def halves_of_heads(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 64), 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1).reshape(acc.shape)


def both(quantise, order, transposed_order):
    def epilogue(acc):
        y8 = quantise(acc)
        return order(y8), transposed_order(y8.T)

    return epilogue


def plain(y):
    return y


CASES = {
    "natural order": Case(saturated, (E4M3,)),
    "contraction order": Case(lambda acc: ordered(saturated(acc)), (E4M3,), tile=(128, 192)),
    "as XLA converts": Case(
        lambda acc: (acc.astype(E4M3), ordered(acc.astype(E4M3)), acc.astype(E5M2), ordered(coda.saturate(acc, E5M2))),
        (E4M3, E4M3, E5M2, E5M2),
    ),
    "both copies": Case(
        lambda acc, s: (*both(saturated, ordered, ordered)(acc * s), jnp.max(jnp.abs(acc))),
        (E4M3, E4M3),
        tile=(128, 192),
        operands=lambda m, n: (array(),),
    ),
    "copies in natural order": Case(both(lambda y: y.astype(E5M2), plain, plain), (E5M2, E5M2)),
    "copies of two orders": Case(both(saturated, ordered, plain), (E4M3, E4M3), tile=(64, 256)),
    "copies of the other two": Case(both(saturated, plain, ordered), (E4M3, E4M3), tile=(128, 256)),
    "transposed alone": Case(lambda acc: (ordered(saturated(acc).T), acc), (E4M3, BF16), tile=(128, 256)),
    "transposed in natural order": Case(lambda acc: saturated(acc).T, (E4M3,), options={"subtile_n": 16}),
    "16 bits": Case(
        lambda acc: (acc, acc.T), (BF16, BF16), tile=(128, 192), units=(8, 8), options={"box_n": 32, "subtile_n": 16}
    ),
    "16 bits transposed alone": Case(lambda acc: acc.T, (F16,), tile=(128, 256), units=(8, 8)),
    "beside float32": Case(lambda acc: (saturated(acc), acc, saturated(acc).T), (E4M3, F32, E4M3), units=(16, 16)),
    "gate": Case(
        forward,
        (BF16, E4M3, E4M3),
        tile=(128, 192),
        units=(16, 32),
        operands=lambda m, n: (array(m, 1), array(n), array()),
    ),
    "back through a gate": Case(
        backward,
        (E4M3, E4M3, E4M3),
        tile=(128, 192),
        operands=lambda m, n: (array(m, 2 * n, dtype=BF16), array()),
    ),
    "operands of 8 bits": Case(
        lambda acc, x, y: saturated(acc + x.astype(F32) + y.astype(F32)),
        (E4M3,),
        operands=lambda m, n: (array(m, n, dtype=E4M3), array(m, n, dtype=E5M2)),
    ),
    "operands of a shared tile": Case(
        lambda acc, x: (acc + x.astype(F32)).T,
        (BF16,),
        tile=(128, 256),
        operands=lambda m, n: (array(m, n, dtype=E4M3),),
    ),
    "heads": Case(lambda acc: ordered(saturated(halves_of_heads(acc))), (E4M3,), units=(1, 64)),
    "slices": Case(
        lambda acc: (ordered(acc[:, :96].astype(E4M3)), acc[:, 96:], jnp.max(acc)), (E4M3, BF16), units=(1, 16)
    ),
    "a batch": Case(both(saturated, ordered, ordered), (E4M3, E4M3), batch=2),
    "maxima of a batch": Case(lambda acc: (saturated(acc), jnp.max(acc)), (E4M3,), units=(1, 16), batch=2),
    "maximum alone": Case(jnp.max, (), units=(1, 8)),
    "maximum of any columns": Case(lambda acc: (jnp.max(jnp.abs(acc)), acc), (F32,), units=(1, 4)),
    "maximum of claimed tiles": Case(lambda acc: (acc, jnp.max(acc)), (BF16,), units=(1, 8), yields=True),
    "three slots": Case(both(saturated, ordered, ordered), (E4M3, E4M3), options={"store_slots": 3, "box_n": 32}),
    "one slot": Case(both(saturated, ordered, ordered), (E4M3, E4M3), options={"store_slots": 1, "box_n": 32}),
    "columns in passes": Case(both(saturated, ordered, ordered), (E4M3, E4M3), options={"column_passes": 2}),
}
LEAST_ROWS = 128  # of a tile, lest a kernel for fewer is another
LEAST_COLUMNS = {"heads": 128}  # two heads: the halves of one are those of all columns
SLICED = "slices"  # whose N is part of the kernel


class Kernels(Library):
    def __init__(self, folder, names, replacements=()):
        kernels = {name: CASES[name].kernel(*sizes(name, 20, 20))[1] for name in names}
        super().__init__(folder, kernels, replacements)


def sizes(name, m, n):
    """M and N of a case that are near these numbers of 16 rows and columns."""
    (unit_m, unit_n), has_slices = CASES[name].units, name == SLICED
    m = max(LEAST_ROWS, 16 * m + (5 if unit_m == 1 else 8 if unit_m == 8 else 0))
    n = -(-(16 * n + (4 if unit_n == 4 else 8 if unit_n == 8 else 0)) // unit_n) * unit_n
    return m, 336 if has_slices else max(n, LEAST_COLUMNS.get(name, 0))


def pieces_of(case, spec, call, m, n, blocks):
    """The tiles of a product, which blocks take in turn, and each block's consumers in turn or together."""
    halves = spec.program.halves
    of_half, columns = n // halves.n_halves, case.tile[1] // halves.n_halves
    shares = f"consumer_m = {case.tile[0] // CONSUMERS}," in call.source
    numbers = [itertools.count() for _ in range(blocks)]
    found, block = [], itertools.cycle(range(blocks))
    for batch, index_m in itertools.product(range(case.batch or 1), range(-(-m // case.tile[0]))):
        index_n = itertools.count()
        for section, (begin, end) in enumerate(spec.program.sections):
            for column in range(begin, end or of_half, columns):
                of = next(block)
                place, row = (column, end or of_half, section, batch), index_m * case.tile[0]
                indices = index_m, next(index_n), True
                if shares:
                    for consumer in range(CONSUMERS):
                        of_consumer = CONSUMERS * index_m + consumer, *indices[1:]
                        row_of_consumer = row + consumer * case.tile[0] // CONSUMERS
                        found.append(Piece(of, consumer, row_of_consumer, m, *place, *of_consumer))
                else:
                    found.append(Piece(of, next(numbers[of]) % CONSUMERS, row, m, *place, *indices))
    return found


def values(rng, shape, *, has_extremes):
    """Numbers of which some are beyond e4m3, some halfway between two values of it; or far beyond, and NaN."""
    x = rng.normal(size=shape) * 2.0 ** rng.uniform(-14, 11, shape)
    x = np.where(rng.random(shape) < 0.3, np.round(x * 16) / 16, x)
    x = np.where(rng.random(shape) < 0.02, np.copysign(rng.choice([0, 448, 464, 480], shape), x), x)
    extremes = np.copysign(rng.choice([57344, 61440, np.inf, np.nan], shape), x)
    return np.where(rng.random(shape) < 0.02 * has_extremes, extremes, x).astype(np.float32)


def check(library, name, m, n, *, seed=0, blocks=2, has_extremes=False, **options):
    """Checks that results are those of XLA's form, bit for bit, but for the signs of NaN and of zero maxima."""
    case = CASES[name]
    spec, made = case.kernel(m, n)
    rng = np.random.default_rng(seed)
    acc = values(rng, (*[case.batch] * (case.batch is not None), m, n), has_extremes=has_extremes)
    operands = [
        np.asarray(jnp.asarray(values(rng, type_.shape, has_extremes=has_extremes)).astype(type_.dtype))
        for type_ in case.operands(m, n)
    ]
    found = library.store(name, made, pieces_of(case, spec, made.call, m, n, blocks), acc, operands, **options)
    each = [expected_of(spec.program, one, operands) for one in (acc if case.batch else [acc])]
    stores, maxima = ([np.stack(of) for of in zip(*part, strict=True)] for part in zip(*each, strict=True))
    if case.batch is None:
        stores, maxima = ([x[0] for x in part] for part in (stores, maxima))
    for number, (out, expected, dtype) in enumerate(zip(found, stores, spec.store_dtypes, strict=False)):
        expected = np.asarray(stored(jnp.asarray(expected), dtype))
        got = out.view(expected.dtype)
        assert got.shape == expected.shape
        same = (out == expected.view(bits(expected))) | (np.isnan(got.astype(F32)) & np.isnan(expected.astype(F32)))
        places = np.argwhere(~same)[:4].tolist()
        assert same.all(), (
            f"result {number}: {(~same).sum()} elements, at {places}: {got[~same][:4]}, {expected[~same][:4]}"
        )
    partials = found[len(stores) :]
    for reduction, of_tiles, expected in zip(spec.program.reductions, partials, maxima, strict=False):
        assert not case.yields or of_tiles.ndim == 2, "a launch of more blocks than multiprocessors"
        total = np.asarray(kernel.finished(reduction, jnp.asarray(of_tiles.view(np.float32))))
        np.testing.assert_array_equal(total, expected)


def expected_of(program, acc, operands):
    """Stores and maxima. Those of XLA on a CPU lose NaN, so numpy takes them, of what is reduced."""
    stores, _ = evaluate_tiles(program, jnp.asarray(acc), *operands)
    reduced = [TileStore(0, one.width, one.values) for one in program.reductions]
    of_maxima, _ = evaluate_tiles(dataclasses.replace(program, stores=tuple(reduced)), jnp.asarray(acc), *operands)
    return list(map(np.asarray, stores)), [np.max(np.asarray(x)) for x in of_maxima]


def seed_of(*of):
    return zlib.crc32(repr(of).encode())


SOME = ("both copies", "copies in natural order", "16 bits", "gate", "back through a gate", "maximum of any columns")


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    return Kernels(tmp_path_factory.mktemp("stores"), SOME)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Kernels(tmp_path_factory.mktemp("stores"), list(CASES))


SHAPES = st.tuples(st.integers(1, 26), st.integers(1, 34))
ORDERS = st.fixed_dictionaries(
    {
        "blocks": st.integers(1, 3),
        "has_extremes": st.booleans(),
        "lane_first": st.integers(0, 31),
        "warp_first": st.integers(0, 4),
        "stores_early": st.booleans(),
    }
)


@pytest.mark.parametrize("name", SOME)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(shape=SHAPES, order=ORDERS)
def test_some_shapes(some, name, shape, order):
    check(some, name, *sizes(name, *shape), seed=seed_of(name, shape, order), **order)


def test_copies_and_their_slots(some):
    """Both copies in natural order, of two tiles a consumer: a slot is filled again only when its box has been read."""
    check(some, "copies in natural order", *sizes("copies in natural order", 8, 32), blocks=1)


def check_edges(library, name):
    """Part of a tile, whole tiles, and a little more; stores read late, and early with the sender's warp ahead."""
    for number, (m, n) in enumerate([(8, 12), (16, 24), (17, 25)]):
        for early in (False, True):
            check(
                library,
                name,
                *sizes(name, m, n),
                seed=number,
                has_extremes=number == 1,
                stores_early=early,
                warp_first=3 * early,
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_edges(library, name):
    check_edges(library, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=SHAPES, order=ORDERS)
def test_any_shape_in_any_order(library, name, shape, order):
    check(library, name, *sizes(name, *shape), seed=seed_of(name, shape, order), **order)


FAULTS = {
    "no swizzle of bytes": ("both copies", "Turned::offset(lane, chunk)", "lane * Turned::row_bytes + 16 * chunk"),
    "no swizzle of words": (
        "16 bits",
        "Turned::offset(lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2)",
        "(lane / 16 * 8 + lane % 8) * Turned::row_bytes + 16 * (chunk + lane / 8 % 2)",
    ),
    "no swizzle of operands": (
        "operands of 8 bits",
        "const ptx::uint32 from = bytes_offset(lane);",
        "const ptx::uint32 from = lane / 4 * row_bytes + 2 * (lane & 3);",
    ),
    "no permutation": ("contraction order", "one[0], next[0], one[1], next[1]", "one[0], one[1], next[0], next[1]"),
    "permuted words": ("both copies", "j % 2 ? 0x7351 : 0x6240", "j % 2 ? 0x6240 : 0x7351"),
    "permuted pairs": ("copies of the other two", "0x5140", "0x5410"),
    "the other rows": ("copies in natural order", "lane < 16 ? 0x6240 : 0x7351", "lane < 16 ? 0x7351 : 0x6240"),
    "rows of another thread": ("copies in natural order", "8 * (lane / 4) % 32 + lane % 4", "lane & ~4"),
    "not transposed": (
        "transposed alone",
        "upper[0], lower[0], upper[1], lower[1]",
        "upper[0], upper[1], lower[0], lower[1]",
    ),
    "a block's rows": ("both copies", "64 * (block % blocks_per_box)", "64 * (0 * block)"),
    "a box's rows": ("16 bits", "tile.row + i * rows, access.half", "tile.row, access.half"),
    "no half": ("back through a gate", "tile.row + i * rows, access.half", "tile.row + i * rows, 0"),
    "columns beyond the end": ("maximum alone", "if (8 * j < columns_left)", "if (true)"),
    "rows beyond the end": (
        "maximum alone",
        "if (row_of(tile, block, r) < operands.params.m)",
        "",
    ),
    "words of other warps": ("maximum alone", "int at = first + lane * warps;", "int at = first;"),
    "a tile's maximum": ("maximum alone", "float& total = this->whole[index];", "float total = this->whole[index];"),
    "no barrier": ("both copies", "    sync();\n    if (is_sender()) {", "    if (is_sender()) {"),
    "no second barrier": (
        "one slot",
        "if (is_sender()) ptx::tma_store_wait_read<0>();\n      sync();",
        "if (is_sender()) ptx::tma_store_wait_read<0>();",
    ),
    "no wait": ("three slots", "if (is_sender()) ptx::tma_store_wait_read<pending>();", ";"),
    "a shorter wait": ("both copies", "Layout::transposed_slots - 2 : 0;", "Layout::transposed_slots - 2 : 1;"),
    "no fence": (
        "transposed in natural order",
        "ptx::fence_async_proxy();\n    if constexpr (Layout::transposed_slots > 1)",
        "if constexpr (Layout::transposed_slots > 1)",
    ),
    "always saturated": ("as XLA converts", "if constexpr (!saturates) bytes", "if constexpr (false) bytes"),
    "never saturated": ("as XLA converts", "if constexpr (!saturates) bytes", "if constexpr (true) bytes"),
    "beside wide boxes": (
        "beside float32",
        "bytes_of(store.dtype) == 4) return 2;",
        "bytes_of(store.dtype) == 4) return 1;",
    ),
}
QUICK = {"no swizzle of bytes", "permuted words", "no barrier", "columns beyond the end"}


@pytest.mark.parametrize(
    "fault", [pytest.param(FAULTS[name], marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAULTS], ids=FAULTS
)
def test_a_fault_shows(tmp_path, fault):
    name, *replacement = fault
    library = Kernels(tmp_path / "fault", [name], [tuple(replacement)])
    with pytest.raises(AssertionError):
        check_edges(library, name)
