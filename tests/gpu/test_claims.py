"""Kernels whose blocks claim their tiles: the same bits as those of kernels whose blocks have tiles of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from coda_jax.lowering import cuda
from coda_jax.tiles import arch
from coda_jax.tiles.config import GemmConfig
from tests.gpu.poisoned import poisoned_call
from tests.gpu.test_repeats import CASES, LARGE, _arguments, _differing

REPEATS = 100
# One k block a tile: the producer is as many tiles ahead as there are stages, and claims are overwritten the soonest.
SHORT = (4096, 4096, 64)
CLIPPED, FEW_ROWS = (4104, 2080, 136), (72, 66016, 520)


# All tiles by the blocks that run at one time; turns of a few tiles; of one.
@pytest.mark.parametrize("nanoseconds", [0, 5000, 1000])
@pytest.mark.parametrize("shape", [CLIPPED, LARGE, SHORT, FEW_ROWS], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "transpose_a", "transpose_b", "config"),
    [case for case in CASES if not (case[-1] and case[-1].split_k)],
    ids=str,
)
def test_same_bits(name, dtype, transpose_a, transpose_b, config, shape, nanoseconds, monkeypatch):
    monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(arch.SM90, yield_nanoseconds=nanoseconds),))
    a, b, operands = _arguments(name, shape, dtype, transpose_a, transpose_b)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "config": config or GemmConfig(split_k=False)}
    arguments = (PROGRAMS[name], a, b, operands)
    want = poisoned_call(*arguments, **options)()
    sources = []
    call = poisoned_call(*arguments, **options, yields=True, rewrite=lambda source: sources.append(source) or source)
    assert all("claims = true" in source for source in sources) and sources
    assert sum(_differing(want, call()) for _ in range(REPEATS)) == 0


@pytest.mark.parametrize("b_is_shared", [False, True])
def test_batched(b_is_shared, monkeypatch):
    monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(arch.SM90, yield_nanoseconds=1000),))
    keys = jax.random.split(jax.random.key(0), 2)
    a = jax.random.normal(keys[0], (6, 520, 264), jnp.bfloat16)
    b = jax.random.normal(keys[1], (264, 784) if b_is_shared else (6, 264, 784), jnp.bfloat16)

    def product():
        config = GemmConfig(tile_m=128, tile_n=128, split_k=False)
        one = lambda a, b: coda.gemm(a, b, epilogue=jax.nn.gelu, implementation="cuda", config=config)  # noqa: E731
        return jax.jit(jax.vmap(one, in_axes=(0, None if b_is_shared else 0)))

    want = product()(a, b)
    monkeypatch.setattr(cuda, "is_of_several", lambda ctx: True)
    claiming = product()
    assert sum(_differing([want], [claiming(a, b)]) for _ in range(REPEATS)) == 0
