"""Kernels of factors of 8 bits: exact integers, the error of the tensor cores' sums, promotion, repeats, races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from coda_jax.epilogue.rounding import round_to
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests.gpu.poisoned import poisoned_call

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
# Whole tiles, ragged ones in every dimension, one row, and more tiles than there are multiprocessors.
SHAPES = [(256, 512, 256), (1009, 784, 336), (1, 200, 48), (4096, 4104, 272), (130, 264, 4112)]
PROMOTED = [GemmConfig(tile_m=128, tile_n=192, cooperative=True, promote=promote) for promote in (False, 128, 512)]
WHOLE = [GemmConfig(tile_m=m, tile_n=n, promote=False) for m, n in SM90.tiles]
CONFIGS = [
    *WHOLE,
    *(GemmConfig(tile_m=m, tile_n=n, cluster_m=1, promote=False) for m, n in SM90.tiles),
    *(GemmConfig(tile_m=m, tile_n=n, split_k=True, promote=False) for m, n in SM90.split_k_tiles),
    *PROMOTED,
]


def integers(shape, dtype, seed):
    """Small ones: with them a product's float32 sums are exact, also cut 13 bits below the largest addend."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def exact(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64).T


@functools.partial(jax.jit, static_argnames=("config", "out_dtype"))
def multiply(a, b, config=None, out_dtype=jnp.float32):
    return coda.gemm(a, b, transpose_b=True, out_dtype=out_dtype, implementation="cuda", config=config)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
def test_integers_are_exact(config, shape):
    m, n, k = shape
    a, b = integers((m, k), E4M3, 1), integers((n, k), E4M3, 2)
    np.testing.assert_array_equal(multiply(a, b, config), exact(a, b))


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(
    "config", [GemmConfig(tile_m=m, tile_n=n, promote=False) for m, n in SM90.tiles] + PROMOTED, ids=str
)
def test_factors_have_dtypes_of_their_own(config, dtypes):
    a, b = integers((264, 1040), dtypes[0], 1), integers((400, 1040), dtypes[1], 2)
    np.testing.assert_array_equal(multiply(a, b, config), exact(a, b))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_of_a_factor(dtype):
    """By a permutation; subnormal numbers too."""
    values = np.arange(256, dtype=np.uint8).view(dtype)
    a = jnp.asarray(np.where(np.isfinite(values.astype(np.float32)), values, np.zeros((), dtype)))
    a = jnp.broadcast_to(a, (128, 256))
    order = np.random.default_rng(0).permutation(256)
    out = multiply(a, jnp.asarray(np.eye(256)[order], E4M3))
    np.testing.assert_array_equal(out, np.asarray(a, np.float32)[:, order])


def test_a_batch_and_an_epilogue_with_reductions():
    a, b = integers((3, 136, 400), E5M2, 1), integers((3, 264, 400), E4M3, 2)
    row = jnp.arange(264, dtype=jnp.float32)

    def epilogue(acc, row):
        y = acc * 2 + row
        return y, jnp.sum(y, axis=1), jnp.max(y, axis=0)

    product = functools.partial(coda.gemm, transpose_b=True, epilogue=epilogue, out_dtype=jnp.float32)
    y, sums, largest = jax.jit(jax.vmap(product, (0, 0, None)))(a, b, row)
    expected = np.stack([exact(*one) for one in zip(a, b, strict=True)]) * 2 + np.asarray(row)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(sums, expected.sum(axis=2))
    np.testing.assert_array_equal(largest, expected.max(axis=1))


# Error of products over their norm, measured on an H100: by data and promotion, at K = 2048, 4096, 8192 and 16384.
LENGTHS = (2048, 4096, 8192, 16384)
MEASURED = {
    ("normal", False): (0.085e-2, 0.13e-2, 0.20e-2, 0.31e-2),
    ("normal", 2048): (0.085e-2,) * 4,
    ("normal", 512): (0.034e-2,) * 4,
    ("normal", 128): (0.013e-2,) * 4,
    ("positive", False): (3.5e-2, 7.5e-2, 14e-2, 25e-2),
    ("positive", 2048): (3.5e-2,) * 4,
    ("positive", 512): (0.58e-2,) * 4,
    ("positive", 128): (0.056e-2,) * 4,
}


def random(data, k):
    keys = jax.random.split(jax.random.key(k), 2)
    draw = jax.random.normal if data == "normal" else lambda *of: jnp.abs(jax.random.normal(*of))
    return tuple(draw(key, (size, k)).astype(E4M3) for key, size in zip(keys, (384, 768), strict=True))


def error(a, b, **options):
    reference = exact(a, b)
    return np.linalg.norm(np.asarray(multiply(a, b, **options), np.float64) - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize(("data", "promote"), MEASURED)
def test_the_error_is_that_of_the_tensor_cores(data, promote):
    """The error is no less than measured either: with less, sums would be promoted more often than asked for."""
    for k, measured in zip(LENGTHS, MEASURED[data, promote], strict=True):
        of_k = error(*random(data, k), config=GemmConfig(split_k=False, promote=promote))
        assert 0.4 * measured < of_k < 1.6 * measured, k


def test_long_products_are_promoted_by_default():
    for k, promote in ((4096, False), (8192, 512)):
        a, b = random("positive", k)
        np.testing.assert_array_equal(multiply(a, b), multiply(a, b, GemmConfig(promote=promote)))
        assert (error(a, b) < 1e-2) == bool(promote)


@pytest.mark.parametrize("layout", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("k", [256, 8192])
@pytest.mark.filterwarnings("ignore::coda_jax.FallbackWarning")
def test_other_layouts_by_xla(layout, k):
    """Exact integers; and of long sums that are positive an error as of promotion."""
    product = functools.partial(coda.gemm, transpose_a=layout[0], transpose_b=layout[1], out_dtype=jnp.float32)
    for of_a, of_b in ((integers((256, k), E4M3, 1), integers((512, k), E4M3, 2)), random("positive", k)):
        out = jax.jit(product)(of_a.T if layout[0] else of_a, of_b if layout[1] else of_b.T)
        reference = exact(of_a, of_b)
        assert np.linalg.norm(np.asarray(out, np.float64) - reference) <= 1e-2 * np.linalg.norm(reference)
        if of_a.shape[0] == 256:
            np.testing.assert_array_equal(out, reference)


REPEATS = 300


@pytest.mark.parametrize("shape", [(1160, 1552, 272), (4096, 4096, 512), (2056, 2064, 4112)], ids=str)
@pytest.mark.parametrize("config", [None, GemmConfig(tile_m=128, tile_n=256, promote=False), *PROMOTED], ids=str)
@pytest.mark.parametrize("name", ["residual_sumsq", "swiglu", "column_sum"])
def test_every_launch_gives_the_same_bits_and_writes_everything(name, config, shape):
    program, (m, n, k) = PROGRAMS[name], shape
    n = program.columns(n)
    keys = jax.random.split(jax.random.key(3), 2)
    a, b = jax.random.normal(keys[0], (m, k)).astype(E4M3), jax.random.normal(keys[1], (n, k)).astype(E5M2)
    call = poisoned_call(program, a, b, program.operands(m, n), transpose_b=True, config=config)
    first = call()
    for i, out in enumerate(first):
        assert not np.isnan(np.asarray(out, np.float32)).any(), f"output {i} has elements that are not written"
    differing = jax.jit(lambda one, other: sum(jnp.sum(x != y) for x, y in zip(one, other, strict=True)))
    assert sum(differing(first, call()) for _ in range(REPEATS)) == 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_in_an_epilogue(dtype):
    """The conversions of the device, on all float32 numbers of a grid, ties and what is beyond the range."""
    dtype = np.dtype(dtype)
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    halfway = np.concatenate([values, (values[1:] + values[:-1]) / 2, values * 1.0625, values * 2])
    near = [np.nextafter(halfway, np.float32(to), dtype=np.float32) for to in (-np.inf, np.inf)]
    x = np.resize(np.concatenate([halfway, *near, [np.inf, -np.inf, np.nan]]).astype(np.float32), (128, 128))
    zeros = jnp.zeros((128, 16), E4M3)
    product = functools.partial(coda.gemm, transpose_b=True, out_dtype=jnp.float32, implementation="cuda")
    twice = functools.partial(product, epilogue=lambda acc, x: (acc + x).astype(dtype).astype(jnp.float32))
    rounded = jax.jit(twice)(zeros, zeros, x)
    np.testing.assert_array_equal(rounded, round_to(jnp.asarray(x), dtype).astype(jnp.float32))
