"""Sine and cosine of generated epilogues, run on the host, against float64: every range of arguments, and products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import PROGRAMS
from coda_jax.epilogue import trace
from tests.host_execution import HostPrograms

ROWS, COLUMNS, TURNED = 128, 256, 384
LIMIT = 2e-7  # what cuda/elementwise.cuh promises


def _both(acc):
    return jnp.sin(acc), jnp.cos(acc)


def _of_product(acc, x):
    return jnp.sin(acc * x), jnp.cos(x * acc)


def _of_outer(acc, position, frequency):
    return jnp.sin(position * frequency), jnp.cos(position * frequency) + 0 * acc


def _type(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Runs a function's generated epilogue, given acc and operands."""
    tile, rotary = _type((ROWS, COLUMNS)), PROGRAMS["rotary_positions"]
    outer = (_type((ROWS, 1), jnp.int32), _type((COLUMNS,)))
    cases = {
        _both: trace(_both, tile, ()),
        _of_product: trace(_of_product, tile, (tile,)),
        _of_outer: trace(_of_outer, tile, outer),
        rotary: trace(rotary.epilogue, _type((ROWS, TURNED)), rotary.operand_types(ROWS, TURNED)),
    }
    host = HostPrograms([epilogue.program for epilogue, _ in cases.values()], tmp_path_factory.mktemp("angles"))
    return lambda function, acc, *operands: host.run(list(cases).index(function), acc, operands)


def _multiples(rng: np.random.Generator, offset: float) -> np.ndarray:
    """The float32 values nearest to multiples of pi / 2, plus `offset` quadrants, with their neighbours."""
    counts = rng.integers(-(2**21), 2**21, ROWS * COLUMNS) + offset
    nearest = (counts * (np.pi / 2)).astype(np.float32)
    return np.nextafter(nearest, rng.choice(np.array([-np.inf, np.inf], np.float32), nearest.size))


def _any_finite(rng: np.random.Generator) -> np.ndarray:
    bits = rng.integers(0, 2**32, ROWS * COLUMNS, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(bits), bits, np.float32(1e30))


ARGUMENTS = {
    "below 1": lambda rng: rng.uniform(-1, 1, ROWS * COLUMNS),
    "below 100": lambda rng: rng.uniform(-100, 100, ROWS * COLUMNS),
    "below 2^22": lambda rng: rng.uniform(-(2.0**22), 2.0**22, ROWS * COLUMNS),
    "around 2^22": lambda rng: rng.uniform(2.0**22 - 999, 2.0**22 + 999, ROWS * COLUMNS),
    "multiples of pi / 2": lambda rng: _multiples(rng, 0),
    "between the multiples": lambda rng: _multiples(rng, 0.5),
    "any finite": _any_finite,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_range(programs, name):
    x = ARGUMENTS[name](np.random.default_rng(0)).astype(np.float32).reshape(ROWS, COLUMNS)
    sine, cosine = programs(_both, x)
    assert np.abs(sine - np.sin(x.astype(np.float64))).max() < LIMIT
    assert np.abs(cosine - np.cos(x.astype(np.float64))).max() < LIMIT


def test_small_and_special_values(programs):
    special = np.array([0.0, -0.0, 1e-45, -1e-40, 1e-20, -3e-4, np.inf, -np.inf, np.nan, 2.0**22, 3.4e38], np.float32)
    x = np.resize(special, (ROWS, COLUMNS))
    sine, cosine = programs(_both, x)
    with np.errstate(invalid="ignore"):
        exact = np.sin(x.astype(np.float64))
    np.testing.assert_allclose(sine, exact, rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(cosine), np.isnan(exact))
    of_zeros = x == 0
    np.testing.assert_array_equal(np.signbit(sine[of_zeros]), np.signbit(x[of_zeros]))
    np.testing.assert_array_equal(
        np.signbit(programs(_of_product, x, np.ones_like(x))[0][of_zeros]), np.signbit(x[of_zeros])
    )


@pytest.mark.parametrize("position", [100, 10**4, 10**6, 4 * 10**6])
def test_the_product_is_not_rounded(programs, position):
    rng = np.random.default_rng(position)
    positions = rng.integers(position - 99, position, (ROWS, 1)).astype(np.int32)
    frequency = (500000.0 ** -rng.uniform(0, 1, COLUMNS)).astype(np.float32)
    exact = positions.astype(np.float64) * frequency.astype(np.float64)
    x, y = np.broadcast_to(positions, exact.shape).astype(np.float32), np.broadcast_to(frequency, exact.shape)
    for sine, cosine in (programs(_of_outer, x, positions, frequency), programs(_of_product, x, y)):
        assert np.abs(sine - np.sin(exact)).max() < LIMIT
        assert np.abs(cosine - np.cos(exact)).max() < LIMIT


def test_rotary_at_position_a_million(programs):
    """Heads of 128, of which XLA's float32 product of position and frequency would turn some by 0.03 rad too much."""
    rng = np.random.default_rng(0)
    program = PROGRAMS["rotary_positions"]
    acc, rstd = rng.normal(size=(ROWS, TURNED)), rng.uniform(0.5, 2, (ROWS, 1))
    position = rng.integers(0, 10**6, (ROWS, 1)).astype(np.int32)
    frequency = 500000.0 ** -(np.arange(64) / 64)
    arguments = [x if x.dtype == np.int32 else x.astype(np.float32) for x in (acc, rstd, position, frequency)]
    out = programs(program, *arguments)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x if x.dtype == np.int32 else x.astype(np.float64)) for x in arguments]
        exact = program.epilogue(*wide)
    for got, want in zip(out, map(np.asarray, exact), strict=True):
        assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


def test_sine_and_cosine_share_their_angle():
    def operations(f, *operands):
        return sorted(node.op for node in trace(f, _type((ROWS, COLUMNS)), operands)[0].program.nodes)

    assert operations(lambda a: jnp.sin(a) + jnp.cos(a)) == ["acc", "add", "angle", "cos", "sin"]
    assert operations(lambda a: jnp.sin(a * a) + jnp.cos(a * a)) == ["acc", "add", "angle", "cos", "sin"]
    narrow = operations(lambda a: jnp.sin(a.astype(jnp.bfloat16) * a.astype(jnp.bfloat16)).astype(jnp.float32))
    assert narrow.count("mul") == 1  # rounded to bfloat16 first, as written
