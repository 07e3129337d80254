"""Symmetric products on a GPU: against float64, beside the general product and in every tile bit for bit, and a
thousand launches on results full of NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.programs import Program
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests.gpu.poisoned import poisoned_call
from tests.gpu.test_gemm import compare

BF16, F16, E4M3 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn
KERNEL = "cuda"
REPEATS = 1000


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


PROGRAMS = {
    "bare": Program(lambda acc: acc),
    "two": Program(lambda acc: (acc, jnp.maximum(acc, 0.25)), out_dtypes=(BF16, F16)),
    "polynomial": Program(
        lambda acc, x, scale: scale * acc - 0.5 * x, lambda m, n: (array(m, n, dtype=BF16), array()), (BF16,)
    ),
    "vectors": Program(
        lambda acc, row, column: jnp.tanh(acc * row * column), lambda m, n: (array(n), array(n, 1)), (BF16,)
    ),
}
# Less than a tile; one square, whole and not; odd and even numbers of squares.
SIZES = [(8, 8), (64, 40), (128, 64), (136, 72), (264, 136), (384, 200), (520, 72), (1032, 520), (2048, 256)]
CLUSTERS = [GemmConfig(tile_m=m, tile_n=n, cluster_m=c, split_k=False) for m, n in SM90.tiles for c in (1, 2)]


def factor(n, k, dtype=BF16, *, transposed=False):
    """(n, k), or (k, n): of products with unit variance beside the diagonal."""
    x = jax.random.normal(jax.random.key(0), (n, k)) / k**0.25
    return (x.T if transposed else x).astype(dtype)


def operands(name, n):
    """A program's, of which tiles are symmetric and vectors a pair."""
    made = PROGRAMS[name].operands(n, n)
    if name == "vectors":
        return made[0], made[0][:, None]
    return tuple(x + x.T if x.ndim == 2 else x for x in made)


def product(of, name, transposed=False, **options):
    """A function of x twice and of the program's operands: its epilogue of x x^T, or of x^T x."""
    program = PROGRAMS[name]

    def function(a, b, *operands):
        n = a.shape[-1 if transposed else -2]
        return of(
            a,
            b,
            *operands,
            epilogue=program.epilogue,
            out_dtype=program.out_dtype(n, n),
            transpose_a=transposed,
            transpose_b=not transposed,
            **options,
        )

    return function


def symmetric(name, transposed=False, **options):
    return product(coda.symmetric_gemm, name, transposed, **{"implementation": KERNEL, **options})


def plain(name, transposed=False):
    """The textbook formula in whatever dtype its arguments have; the product and the results are rounded to it."""

    def function(a, b, *operands):
        acc = a.T @ b if transposed else a @ b.T
        if acc.dtype == jnp.float64:
            return PROGRAMS[name].epilogue(acc, *operands)
        acc = jax.lax.reduce_precision(acc, jnp.finfo(acc.dtype).nexp, jnp.finfo(acc.dtype).nmant)
        asked = PROGRAMS[name].out_dtype(*acc.shape)
        return jax.tree.map(lambda y, dtype: y.astype(dtype), PROGRAMS[name].epilogue(acc, *operands), asked)

    return function


def assert_equal(found, expected):
    for out, of in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert out.dtype == of.dtype
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(of, np.float32))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes(name, dtype, transposed):
    """A transposed factor may have any number of rows."""
    for n, k in [*SIZES, *([(136, 1), (264, 65)] if transposed else [])]:
        x = factor(n, k, dtype, transposed=transposed)
        compare(symmetric(name, transposed), plain(name, transposed), x, x, operands(name, n))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_tile_has_the_same_bits(name, size):
    """They are the general product's; but for vectors, whose factors have another order above the diagonal."""
    n, k = size
    x, others = factor(n, k), operands(name, n)
    config = GemmConfig(tile_m=128, tile_n=128, split_k=False)
    expected = jax.jit(product(coda.gemm, name, implementation=KERNEL, config=config))(x, x, *others)
    lower = np.tri(n, dtype=bool)
    for config in CLUSTERS:
        found = jax.jit(symmetric(name, config=config))(x, x, *others)
        if name == "vectors":
            found, expected = (np.where(lower, np.asarray(y, np.float32), 0) for y in (found, expected))
        assert_equal(found, expected)


@pytest.mark.parametrize("tile", SM90.split_k_tiles, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_split_k(name, tile):
    """A square in many parts; some tiles whole and some split; nothing to split."""
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1], split_k=True)
    for n, k in [(136, 4104), (768, 8192), (2056, 520), (264, 40)]:
        x = factor(n, k)
        compare(symmetric(name, config=config), plain(name), x, x, operands(name, n))


@pytest.mark.parametrize("config", [None, *CLUSTERS], ids=str)
def test_a_batch_has_the_bits_of_each(config):
    n, k, batch = 1032, 264, 5
    xs = factor(batch * n, k).reshape(batch, n, k)
    tiles = jnp.stack([operands("polynomial", n)[0] * i for i in range(1, batch + 1)])
    scales = jnp.arange(1.0, batch + 1)
    one = symmetric("polynomial", config=config or GemmConfig(split_k=False))
    together = jax.jit(jax.vmap(one))(xs, xs, tiles, scales)
    assert_equal(together, jnp.stack([jax.jit(one)(*of) for of in zip(xs, xs, tiles, scales, strict=True)]))
    assert_equal(together, jnp.swapaxes(together, 1, 2))


def test_powers_of_a_matrix():
    """Its factors are symmetric and commute, and lie in any way."""
    x = factor(520, 72)
    gram = jax.jit(symmetric("bare"))(x, x)
    for transposed in (False, True):
        for name in ("bare", "polynomial"):
            compare(symmetric(name, transposed), plain(name, transposed), gram, gram, operands(name, 520))


@pytest.mark.parametrize("tile", SM90.tiles, ids=str)
def test_results_of_8_bits(tile):
    """Sums of small integers are exact, so these are those of XLA's form."""
    n, k = 528, 144
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (n, k)), BF16)
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1])
    for epilogue in (
        lambda acc: coda.saturate(acc * 0.5, E4M3),
        lambda acc: coda.contraction_order(coda.saturate(acc * 0.5, E4M3)),
        lambda acc: (acc.astype(E4M3), acc),
    ):
        out_dtype = (E4M3, BF16) if isinstance(epilogue(jnp.ones((16, 16))), tuple) else E4M3
        of = functools.partial(coda.symmetric_gemm, epilogue=epilogue, out_dtype=out_dtype, transpose_b=True)
        found, expected = (
            jax.jit(functools.partial(of, implementation=implementation, config=config))(x, x)
            for implementation in (KERNEL, "xla")
        )
        assert_equal(found, expected)


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradients(residuals):
    """The cotangents of this loss are not symmetric."""
    n, k = 264, 136
    weights = jax.random.normal(jax.random.key(5), (n, n))

    def gradient(of):
        def loss(a, b, *operands):
            return jnp.sum(of(a, b, *operands).astype(weights.dtype) * weights.astype(a.dtype))

        return jax.grad(loss, (0, 1, 2))

    x = factor(n, k)
    compare(
        gradient(symmetric("polynomial", residuals=residuals)),
        gradient(plain("polynomial")),
        x,
        x,
        operands("polynomial", n),
    )


def launches(name, x, **options):
    """As many as `REPEATS`, on results full of NaN: the first one's results, and how many elements of others differ."""
    call = poisoned_call(PROGRAMS[name], x, x, operands(name, len(x)), transpose_b=True, symmetric=True, **options)
    first = call()

    @jax.jit
    def differing(found):
        pairs = zip(first, found, strict=True)
        as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
        return sum(jnp.sum(as_bits(x) != as_bits(y)) for x, y in pairs)

    return first, sum(differing(call()) for _ in range(REPEATS))


# Small k lets the epilogue run ahead; squares that are cut, and more tiles than multiprocessors.
REPEATED = [(1160, 136), (4096, 256)]


@pytest.mark.parametrize("shape", REPEATED, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        *CLUSTERS,
        *(GemmConfig(tile_m=m, tile_n=n, split_k=True) for m, n in SM90.split_k_tiles),
        *(GemmConfig(tile_m=128, tile_n=128, store_slots=slots, box_n=32) for slots in (1, 2, 3)),
        GemmConfig(tile_m=128, tile_n=256, store_slots=1),
        GemmConfig(tile_m=128, tile_n=192, column_passes=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_launch_gives_the_same_bits_and_writes_everything(name, config, shape):
    first, differing = launches(name, factor(*shape), config=config)
    for i, out in enumerate(first):
        missing = np.argwhere(np.isnan(np.asarray(out, np.float32)))
        assert missing.size == 0, f"output {i}: {len(missing)} elements unwritten, the first at {missing[0]}"
    assert differing == 0


@pytest.mark.parametrize("tile_n", [128, 256])
def test_blocks_that_claim_their_tiles_have_the_same_bits(tile_n):
    x = factor(4096, 256)
    config = GemmConfig(tile_m=128, tile_n=tile_n, split_k=False)
    first, differing = launches("two", x, config=config, yields=True)
    assert differing == 0
    assert_equal(tuple(first), jax.jit(product(coda.gemm, "two", implementation=KERNEL, config=config))(x, x))
