"""Results of 8 bits, transposed and symmetric results and maxima of all elements, by the kernel's own epilogue on the
host: bit for bit what XLA's form has, of any shape, whichever warp is ahead and whenever the copy engine reads.
"""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_jax.epilogue import TileStore, evaluate_tiles
from coda_jax.epilogue.rounding import stored
from coda_jax.lowering import kernel
from coda_jax.tiles.arch import SM90
from tests.lockstep import Library, Piece, bits
from tests.store_cases import CASES, F32, sizes


class Kernels(Library):
    def __init__(self, folder, names, replacements=(), *, n=None):
        kernels = {name: CASES[name].kernel(*((n, n) if n else sizes(name, 20, 20)))[1] for name in names}
        super().__init__(folder, kernels, replacements)


def pieces_of(case, spec, call, m, n, blocks):
    """The tiles of a product, which blocks take in turn, and each block's consumers in turn or together."""
    halves = spec.program.halves
    of_half, columns = n // halves.n_halves, case.tile[1] // halves.n_halves
    shares = f"consumer_m = {case.tile[0] // SM90.consumers}," in call.source
    numbers = [itertools.count() for _ in range(blocks)]
    found, block = [], itertools.cycle(range(blocks))
    rows = -(-m // case.square) * case.square if case.symmetric else m
    for batch, index_m in itertools.product(range(case.batch or 1), range(-(-rows // case.tile[0]))):
        index_n = itertools.count()
        for section, (begin, end) in enumerate(spec.program.sections):
            for column in range(begin, end or of_half, columns):
                row = index_m * case.tile[0]
                if case.symmetric and column // case.square > row // case.square:
                    continue
                of = next(block)
                place = column, end or of_half, section, batch
                indices = index_m, next(index_n), True
                if shares:
                    for consumer in range(SM90.consumers):
                        of_consumer = SM90.consumers * index_m + consumer, *indices[1:]
                        row_of_consumer = row + consumer * case.tile[0] // SM90.consumers
                        found.append(Piece(of, consumer, row_of_consumer, m, *place, *of_consumer))
                else:
                    found.append(Piece(of, next(numbers[of]) % SM90.consumers, row, m, *place, *indices))
    return found


def values(rng, shape, *, has_extremes):
    """Numbers of which some are beyond e4m3, some halfway between two values of it; or far beyond, and NaN."""
    x = rng.normal(size=shape) * 2.0 ** rng.uniform(-14, 11, shape)
    x = np.where(rng.random(shape) < 0.3, np.round(x * 16) / 16, x)
    x = np.where(rng.random(shape) < 0.02, np.copysign(rng.choice([0, 448, 464, 480], shape), x), x)
    extremes = np.copysign(rng.choice([57344, 61440, np.inf, np.nan], shape), x)
    return np.where(rng.random(shape) < 0.02 * has_extremes, extremes, x).astype(np.float32)


def mirrored(x, case):
    """An array ([batch,] N, N) with what is in squares below the diagonal above it too; others as they are."""
    if not case.symmetric or x.ndim < 2:
        return x
    square = np.arange(x.shape[-1]) // case.square
    return np.where(square[:, None] >= square, x, np.swapaxes(x, -1, -2))


def check(library, name, m, n, *, seed=0, blocks=2, has_extremes=False, **options):
    """Checks that results are those of XLA's form, bit for bit, but for the signs of NaN and of zero maxima.

    A kernel of symmetric results has other numbers above the diagonal, which it may not look at.
    """
    case = CASES[name]
    spec, made = case.kernel(m, n)
    rng = np.random.default_rng(seed)
    acc = values(rng, (*[case.batch] * (case.batch is not None), m, n), has_extremes=has_extremes)
    operands = [
        np.asarray(jnp.asarray(values(rng, type_.shape, has_extremes=has_extremes)).astype(type_.dtype))
        for type_ in case.operands(m, n)
    ]
    found = library.store(name, made, pieces_of(case, spec, made.call, m, n, blocks), acc, operands, **options)
    acc, operands = mirrored(acc, case), [mirrored(x, case) for x in operands]
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


SOME = (
    *("both copies", "copies in natural order", "16 bits", "gate", "back through a gate", "maximum of any columns"),
    *("symmetric, with operands", "symmetric, three slots"),
)


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


@pytest.mark.parametrize("n", [8, 16, 48])
def test_symmetric_results_of_less_than_a_tile(tmp_path, n):
    names = [name for name in CASES if CASES[name].symmetric and n % CASES[name].units[0] == 0][:: 1 if n == 8 else 3]
    library = Kernels(tmp_path / "stores", names, n=n)
    for name, early in itertools.product(names, (False, True)):
        check(library, name, n, n, seed=n, blocks=1, stores_early=early, has_extremes=early)


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
    "transposed on the diagonal": ("symmetric", "if (is_sent(tile)) {", "if (true) {"),
    "not transposed below the diagonal": ("symmetric", "if (is_sent(tile)) {", "if (false) {"),
    "a diagonal of single tiles": (
        "symmetric, in clusters",
        "Triangle<Config::tile_m * Config::cluster_m, Config::tile_n>::",
        "Triangle<Config::tile_m, Config::tile_n>::",
    ),
    "no empty group": (
        "symmetric, three slots",
        "ptx::tma_store_commit();  // also of nothing",
        "if (is_sent(tile)) ptx::tma_store_commit();  //",
    ),
    "no wait of two slots": ("symmetric, two slots", "Layout::transposed_slots - 2 : 0;", "1 : 1;"),
    "no wait of one slot": (
        "symmetric, one slot",
        "if (is_sender()) ptx::tma_store_wait_read<0>();\n      sync();",
        "sync();",
    ),
    "a tile's place": (
        "symmetric, of few rows",
        "tile.row + i * rows, access.half, tile.column + box * Layout::box_n, tile.batch",
        "tile.column + i * rows, access.half, tile.row + box * Layout::box_n, tile.batch",
    ),
}
QUICK = {"no swizzle of bytes", "permuted words", "no barrier", "columns beyond the end", "no empty group"}


@pytest.mark.parametrize(
    "fault", [pytest.param(FAULTS[name], marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAULTS], ids=FAULTS
)
def test_a_fault_shows(tmp_path, fault):
    name, *replacement = fault
    library = Kernels(tmp_path / "fault", [name], [tuple(replacement)])
    with pytest.raises(AssertionError):
        check_edges(library, name)
