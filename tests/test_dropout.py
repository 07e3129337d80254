"""`coda.dropout`: what its bits are like, that the element's place alone decides them, and that epilogues make them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.lab import machine_code
from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from tests.nvrtc import needs_nvrtc
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
KEY = jax.random.key(3)


def kept(key, shape, rate):
    return np.asarray(coda.dropout(key, jnp.ones(shape), rate)) != 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1e-12])
def test_the_part_that_is_dropped(rate):
    mask = kept(KEY, (256, 1024), rate)
    assert abs(mask.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / mask.size)
    for means, count in ((mask.mean(0), 256), (mask.mean(1), 1024)):  # of columns, of rows: as of independent bits
        assert np.var(means) == pytest.approx(rate * (1 - rate) / count, rel=0.25, abs=1e-12)


def test_neighbours_and_keys_are_independent():
    mask = kept(KEY, (512, 512), 0.5) * 2.0 - 1
    pairs = [mask[:, d:] * mask[:, :-d] for d in (1, 2, 3, 8, 64, 256)] + [mask[d:] * mask[:-d] for d in (1, 2, 8, 64)]
    pairs += [mask * (kept(key, mask.shape, 0.5) * 2.0 - 1) for key in jax.random.split(KEY, 3)]
    pairs += [mask[:, 1:-1] * mask[:, 2:] * mask[:, :-2]]  # a third of what an exclusive or of neighbours would show
    for pair in pairs:
        assert abs(pair.mean()) < 5 / np.sqrt(pair.size)
    counts = np.bincount(np.packbits(mask > 0), minlength=256)  # of all bytes: chi squared with 255 degrees of freedom
    expected = counts.sum() / 256
    assert abs(np.sum((counts - expected) ** 2 / expected) - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.smoke
def test_values_and_gradients():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 7)), jnp.float32)
    mask = kept(KEY, x.shape, 0.25)
    assert jnp.allclose(coda.dropout(KEY, x, 0.25), jnp.where(mask, x / 0.75, 0))
    gradient = jax.grad(lambda x: jnp.sum(coda.dropout(KEY, x, 0.25) * x))(x)
    assert jnp.allclose(gradient, jnp.where(mask, 2 * x / 0.75, 0))
    assert coda.dropout(KEY, x, 0) is x
    assert coda.dropout(KEY, x.astype(jnp.bfloat16), 0.5).dtype == jnp.bfloat16
    assert coda.dropout(KEY, jnp.float32(1), 0.5).shape == ()
    keys = jax.random.split(KEY, 3)
    each = jnp.stack([coda.dropout(*pair, 0.5) for pair in zip(keys, x, strict=True)])
    assert jnp.array_equal(jax.vmap(lambda key, x: coda.dropout(key, x, 0.5))(keys, x), each)
    assert jnp.array_equal(coda.dropout(jax.random.PRNGKey(3), x, 0.5), coda.dropout(KEY, x, 0.5))


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="x is int32; it must be an array of floats"):
        coda.dropout(KEY, jnp.arange(3), 0.5)
    for rate in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"rate = .*; it must be at least 0 and less than 1"):
            coda.dropout(KEY, jnp.ones(3), rate)


def residual_mlp(w, x, key):
    keys = jax.random.split(key)
    h = coda.dropout(keys[0], jax.nn.gelu(x @ w["up"]), 0.1)
    return x + coda.dropout(keys[1], h @ w["down"], 0.2)


def loss(w, x, key):
    return jnp.sum(jnp.sin(residual_mlp(w, x, key)).astype(jnp.float32))


def arguments(dtype=jnp.float32):
    generator = np.random.default_rng(0)
    shapes = {"up": (64, 128), "down": (128, 64)}
    w = {name: jnp.asarray(generator.standard_normal(shape) * 0.1, dtype) for name, shape in shapes.items()}
    return w, jnp.asarray(generator.standard_normal((8, 16, 64)), dtype), KEY


DOORS = {
    "grad(fuse)": lambda f: jax.value_and_grad(coda.fuse(f), (0, 1)),
    "fuse(grad)": lambda f: coda.fuse(jax.value_and_grad(f, (0, 1))),
    "checkpoint": lambda f: jax.value_and_grad(coda.fuse(jax.checkpoint(f)), (0, 1)),
}


@pytest.mark.parametrize("door", DOORS)
def test_epilogues_make_it_and_nothing_is_drawn_or_kept(door):
    args = arguments()
    assert largest_error(jax.jit(DOORS[door](loss))(*args), jax.value_and_grad(loss, (0, 1))(*args)) < 1e-5
    explained = coda.explain(DOORS[door](loss), *arguments(jnp.bfloat16), platform="cuda")
    assert explained.others == 0
    assert not any("random" in one.operation and one.bytes_written >= 8 * 16 * 64 for one in explained.passes)
    assert not any(one.array.startswith(("bool[8,16", "float8_e4m3fn[8,16")) for one in explained.kept)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("data",), (None, "data"), (None, None, "data")])
def test_shards_have_the_same_bits(spec, axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[axis_type],))
    w, x, key = arguments()
    expected = [
        jax.device_get(f(key)) for f in (lambda key: coda.dropout(key, x, 0.5), lambda k: residual_mlp(w, x, k))
    ]
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    with jax.set_mesh(mesh):
        assert np.array_equal(jax.device_get(coda.dropout(key, sharded, 0.5)), expected[0])
        if axis_type == "Auto" or spec[-1] is None:  # products over explicit axes that cut K say how they are sharded
            found = jax.device_get(jax.jit(coda.fuse(residual_mlp))(w, sharded, key))
            assert np.allclose(found, expected[1], atol=1e-5)


def test_64_bits():
    expected = coda.dropout(KEY, jnp.ones((3, 8)), 0.5)
    with jax.enable_x64(True):
        assert jnp.array_equal(coda.dropout(KEY, jnp.ones((3, 8), jnp.float32), 0.5), expected)
        assert 3.0 / 0.7 in coda.dropout(KEY, jnp.full(8, 3.0), 0.3)


@pytest.mark.parametrize("shift", [0, 1, 16, 31, 32, 40])
def test_shifts_of_an_epilogue(shift):
    """Bits, shifted also by more than there are."""

    def epilogue(acc, x):
        return acc * 0 + jax.lax.shift_right_logical(x, jnp.int32(shift)).astype(jnp.float32)

    numbers = np.asarray([-(2**31), -(2**31) + 7, -1, 0, 1, 12345, 2**31 - 1, 77], np.int32)
    found = coda.gemm(jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.asarray(numbers), epilogue=epilogue)
    shifted = numbers.view(np.uint32).astype(np.uint64) >> np.uint64(shift)
    assert np.array_equal(found[0], shifted.astype(np.uint32).view(np.int32).astype(np.float32))


@needs_nvrtc
def test_the_compiler_knows_that_integers_wrap():
    """C++ has no overflow of signed integers: a product's sign would be that of its factors."""

    def epilogue(acc, x, y):
        return jnp.where((x + y) * jnp.int32(0x12345677) < 0, acc, -acc)

    def product(*arrays):
        return coda.gemm(*arrays, epilogue=epilogue)

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 64), (64, 128))]
    types += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((128, 1), (128,))]
    (kernel,) = coda.explain(product, *types, platform="cuda", source=True).products
    instructions = machine_code.disassembly(ffi.compile(kernel.source, "wraps", SM90.target).cubin)
    assert any("0x12345677" in line for line in instructions)
