"""Kernels whose blocks claim their tiles: the same bits as those of kernels whose blocks have tiles of their own."""

import pytest

from benchmarks.programs import PROGRAMS
from coda_jax.primitives import kernel
from coda_jax.tiles.config import GemmConfig
from tests.gpu.poisoned import poisoned_call
from tests.gpu.test_repeats import CASES, CLIPPED, LARGE, _arguments, _differing

REPEATS = 100
# One k block a tile: the producer is as many tiles ahead as there are stages, and claims are overwritten the soonest.
SHORT = (4096, 4096, 64)


# All tiles by the blocks that run at one time; turns of a few tiles; of one.
@pytest.mark.parametrize("nanoseconds", [0, 5000, 1000])
@pytest.mark.parametrize("shape", [CLIPPED, LARGE, SHORT, (40, 400, 520)], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "transpose_a", "transpose_b", "config"),
    [case for case in CASES if not (case[-1] and case[-1].split_k)],
    ids=str,
)
def test_same_bits(name, dtype, transpose_a, transpose_b, config, shape, nanoseconds, monkeypatch):
    monkeypatch.setattr(kernel, "YIELD_NANOSECONDS", nanoseconds)
    a, b, operands = _arguments(name, shape, dtype, transpose_a, transpose_b)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "config": config or GemmConfig(split_k=False)}
    arguments = (PROGRAMS[name], a, b, operands)
    want = poisoned_call(*arguments, **options)()
    call = poisoned_call(*arguments, **options, yields=True)
    assert sum(_differing(want, call()) for _ in range(REPEATS)) == 0
