"""Results of 8 bits, transposed results and maxima of all elements on a GPU: bit for bit those of XLA's form of the
same product, whose sums are exact, again and again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue.saturate import saturate_p
from coda_jax.tiles.config import GemmConfig

BF16, E4M3, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
ordered = coda.contraction_order


def copies(acc):
    y8 = coda.saturate(acc * 0.5, E4M3)
    return ordered(y8), ordered(y8.T), jnp.max(jnp.abs(acc))


def natural(acc):
    y8 = acc.astype(E5M2)
    return y8, y8.T, acc.astype(BF16).T


def gated(acc):
    gate, up = jnp.split(acc, 2, axis=1)
    y = jnp.maximum(gate, 0) * up
    y8 = coda.saturate(y, E4M3)
    return acc, ordered(y8), ordered(y8.T), jnp.max(jnp.abs(y))


PROGRAMS = {
    "copies": (copies, (E4M3, E4M3, jnp.float32)),
    "natural": (natural, (E5M2, E5M2, BF16)),
    "gated": (gated, (BF16, E4M3, E4M3, jnp.float32)),
}
SIZES = [(128, 256, 128), (1008, 800, 336), (4096, 4160, 256), (16, 96, 64)]
CONFIGS = [
    None,
    GemmConfig(tile_m=128, tile_n=192),
    GemmConfig(tile_m=128, tile_n=256),
    GemmConfig(tile_m=64, tile_n=256),
    GemmConfig(tile_m=128, tile_n=128, box_n=32, store_slots=1),
]


@functools.partial(jax.jit, static_argnames=("name", "config", "implementation"))
def product(a, b, name, config, implementation):
    epilogue, out_dtype = PROGRAMS[name]
    return coda.gemm(
        a,
        b,
        epilogue=epilogue,
        out_dtype=out_dtype,
        transpose_b=True,
        config=config,
        implementation=implementation,
    )


def factors(m, n, k, dtype):
    """Small integers."""
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.integers(-2, 3, shape), dtype) for shape in ((m, k), (n, k)))


def check(results, expected):
    for out, of in zip(results, expected, strict=True):
        assert out.dtype == of.dtype
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(of, np.float32))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, BF16], ids=["of 8 bits", "of 16 bits"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_xla(name, dtype, size, config):
    a, b = factors(*size, dtype)
    expected = product(a, b, name, None, "xla")
    for _ in range(3):
        check(product(a, b, name, config, "cuda"), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_gpu_s_conversion_rounds_as_the_arithmetic_does(dtype):
    """Both give the same for every float32 value."""

    @jax.jit
    def different(start):
        x = jax.lax.bitcast_convert_type(start + jax.lax.iota(jnp.uint32, 2**26), jnp.float32)
        made = [saturate_p.bind(x, dtype=np.dtype(dtype), in_memory=of) for of in (True, False)]
        a, b = (jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(y), jnp.uint8) for y in made)
        are_nan = ((a & 0x7F) > largest) & ((b & 0x7F) > largest)
        return jnp.sum(jnp.where(jnp.isnan(x), ~are_nan, a != b))

    largest = np.asarray(jnp.finfo(dtype).max, dtype).view(np.uint8)
    assert sum(int(different(jnp.uint32(i << 26))) for i in range(64)) == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hundred_launches_are_equal(name):
    a, b = factors(2048, 4096, 512, E4M3)
    expected = product(a, b, name, GemmConfig(tile_m=128, tile_n=192), "cuda")
    check(expected, product(a, b, name, None, "xla"))
    for _ in range(100):
        check(product(a, b, name, GemmConfig(tile_m=128, tile_n=192), "cuda"), expected)
