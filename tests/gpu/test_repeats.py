"""Races: every output element is written, and a thousand launches give the same bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import PROGRAMS
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests.gpu.poisoned import poisoned_call

REPEATS = 1000
# Small k lets the epilogue run ahead of everything else; more tiles than SMs make both consumers work. The first has
# edges that clip; races of the epilogue's rings showed in the second alone, in a few launches of a hundred.
CLIPPED, LARGE = (1160, 1552, 136), (4096, 4096, 256)
# With split-K 8 blocks to a tile; and whole tiles beside some that are split.
SPLIT, SOME_SPLIT = (264, 400, 4104), (2056, 2064, 520)
CASES = [
    *((name, jnp.bfloat16, False, True, None) for name in PROGRAMS),
    ("residual_sumsq", jnp.float16, False, False, None),
    ("swiglu", jnp.bfloat16, True, False, None),
    ("column_sum", jnp.float16, True, True, None),
    ("residual_sumsq", jnp.bfloat16, False, True, GemmConfig(cluster_m=1)),
    ("swiglu_backward", jnp.bfloat16, False, False, GemmConfig(stages=2)),
    ("residual_sumsq", jnp.bfloat16, False, True, GemmConfig(load_slots=5, store_slots=1, subtile_n=16, stages=5)),
    ("norm_backward", jnp.bfloat16, False, True, GemmConfig(tile_m=128, tile_n=256)),
    ("accumulate", jnp.bfloat16, True, False, GemmConfig(tile_m=128, tile_n=256)),
    ("qk_norm_rotary", jnp.bfloat16, False, False, GemmConfig(tile_m=128, tile_n=256)),
    ("rotary_neighbours", jnp.bfloat16, False, False, GemmConfig(tile_m=128, tile_n=256)),
    ("parts_of_sum", jnp.bfloat16, False, True, GemmConfig(tile_m=128, tile_n=256)),
    ("residual_sumsq", jnp.bfloat16, False, True, GemmConfig(tile_m=128, tile_n=192, column_passes=3)),
    ("column_sum", jnp.bfloat16, False, False, GemmConfig(tile_m=128, tile_n=256, column_passes=2)),
    ("gated_backward", jnp.bfloat16, False, True, GemmConfig(tile_m=128, tile_n=128, column_passes=4)),
    ("qk_norm_rotary_64", jnp.bfloat16, False, False, GemmConfig(tile_m=128, tile_n=128, column_passes=2)),
    *(
        (name, jnp.bfloat16, transpose_a, transpose_b, GemmConfig(tile_m=tile_m, tile_n=tile_n))
        for tile_m, tile_n in list(SM90.tiles)[1:]
        for name, transpose_a, transpose_b in (
            ("residual_sumsq", False, False),
            ("gated_backward", False, True),
            ("rotary_qkv", False, False),
            ("column_sum", True, False),
        )
    ),
    *(
        (name, jnp.bfloat16, transpose_a, transpose_b, GemmConfig(tile_m=tile_m, tile_n=tile_n, split_k=True))
        for tile_m, tile_n in SM90.split_k_tiles
        for name, transpose_a, transpose_b in (
            ("identity", True, False),
            ("residual_sumsq", False, False),
            ("gated_backward", False, True),
        )
    ),
    ("column_sum", jnp.bfloat16, True, False, GemmConfig(split_k=True, cluster_m=1)),
]


def _arguments(name, shape, dtype=jnp.bfloat16, transpose_a=False, transpose_b=True):
    m, k = shape[0], shape[2]
    n = PROGRAMS[name].columns(shape[1])
    key = jax.random.split(jax.random.key(3), 2)
    a = jax.random.normal(key[0], (k, m) if transpose_a else (m, k)).astype(dtype)
    b = jax.random.normal(key[1], (n, k) if transpose_b else (k, n)).astype(dtype)
    return a, b, PROGRAMS[name].operands(m, n)


@jax.jit
def _differing(first, second):
    bits = {2: jnp.uint16, 4: jnp.uint32}

    def as_bits(x):
        return jax.lax.bitcast_convert_type(x, bits[x.dtype.itemsize])

    return sum(jnp.sum(as_bits(x) != as_bits(y)) for x, y in zip(first, second, strict=True))


def _count_differing(call, repeats):
    first = call()
    total = jnp.zeros((), jnp.int32)
    for _ in range(repeats):
        total += _differing(first, call())
    return first, int(total)


@pytest.mark.parametrize(
    ("name", "dtype", "transpose_a", "transpose_b", "config", "shape"),
    [
        (*case, shape)
        for case in CASES
        for shape in ([SPLIT, SOME_SPLIT] if case[-1] and case[-1].split_k else [CLIPPED, LARGE])
    ],
)
def test_every_launch_gives_the_same_bits_and_writes_everything(name, dtype, transpose_a, transpose_b, config, shape):
    a, b, operands = _arguments(name, shape, dtype, transpose_a, transpose_b)
    call = poisoned_call(
        PROGRAMS[name], a, b, operands, transpose_a=transpose_a, transpose_b=transpose_b, config=config
    )
    first, differing = _count_differing(call, REPEATS)
    for i, out in enumerate(first):
        missing = np.argwhere(np.isnan(np.asarray(out, np.float32)))
        assert missing.size == 0, f"output {i}: {len(missing)} elements unwritten, the first at {missing[0]}"
    assert differing == 0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wait moved or dropped such that nothing can deadlock: what stands in the kernel, and what replaces it."""

    replacements: tuple[tuple[str, str], ...]
    program: str = "residual_sumsq"
    config: GemmConfig = GemmConfig(tile_m=128, tile_n=128, store_slots=1, split_k=True)  # noqa: RUF009  frozen
    shape: tuple[int, int, int] = LARGE


READ_TOO_EARLY = (
    ("ring.wait_full(loaded);", ""),
    (
        "if (lane == 0) ptx::mbarrier_arrive(ring.empty(loaded.slot));",
        "ring.wait_full(loaded);\n if (lane == 0) ptx::mbarrier_arrive(ring.empty(loaded.slot));",
    ),
)
FAULTS = {
    "multiply before the operands have arrived": Fault(
        (
            ("stages.wait_full(at);\n          if constexpr (k_in_groups)", "if constexpr (k_in_groups)"),
            ("          previous = at;\n", "stages.wait_full(at);\n previous = at;\n"),
        )
    ),
    "read a tile operand before it has arrived": Fault(READ_TOO_EARLY),
    "read a tile operand before it has arrived, in a cooperative tile": Fault(
        READ_TOO_EARLY, config=GemmConfig(tile_m=128, tile_n=256)
    ),
    "overwrite a result that is still being stored": Fault(
        (("if (lane == 0) ptx::tma_store_wait_read<Layout::store_slots - 1>();", ""),),
        program="identity",
        config=GemmConfig(tile_m=128, tile_n=128, store_slots=1),
    ),
    "add a part of a tile before it is there": Fault(
        (
            (
                "while (ptx::load_acquire(flags + 4 * (others.first + lane * others.stride) + warp) == 0) "
                "__nanosleep(32);",
                "",
            ),
        ),
        config=GemmConfig(store_slots=1, split_k=True),
        shape=SPLIT,
    ),
    "refill a tile operand's slot without a fence": Fault(
        (
            (
                "if constexpr (!is_fenced) {\n        ptx::fence_async_proxy();",
                "if constexpr (!is_fenced) {",
            ),
        ),
        program="norm_backward",
        config=GemmConfig(tile_m=64, tile_n=128, load_slots=1),
    ),
    # The fourth warp is kept from reading for so long that the others have come to their next tile.
    "overwrite vectors that another warp still reads": Fault(
        (
            ("vectors = vectors == first ? first + Layout::vector_bytes : first;", "vectors = first;"),
            (
                "void load_vectors(int at, OfColumns& column_words) const {",
                "void load_vectors(int at, OfColumns& column_words) const {\n if (warp == 3) __nanosleep(4000);",
            ),
        ),
        program="bias_gelu",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_missing_wait_shows(fault):
    """The test above would catch a missing wait: with one gone, the bits differ from the right kernel's."""
    a, b, operands = _arguments(fault.program, fault.shape)

    def plant(source):
        for there, instead in fault.replacements:
            assert source.count(there) == 1, there
            source = source.replace(there, instead)
        return source

    arguments = (PROGRAMS[fault.program], a, b, operands)
    right = poisoned_call(*arguments, transpose_b=True, config=fault.config)()
    broken = poisoned_call(*arguments, transpose_b=True, config=fault.config, rewrite=plant)
    assert any(int(_differing(right, broken())) > 0 for _ in range(REPEATS))
