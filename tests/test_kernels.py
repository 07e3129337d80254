"""Whole kernels compiled for Hopper: every program fits the registers that a thread has."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.lab.machine_code import disassembly, machine_instructions, resource_usage
from benchmarks.programs import PROGRAMS, Program, kernel_source
from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests.nvrtc import needs_nvrtc

# Bytes a thread stores and loads once a tile, none of it in the loops: an address that waits for its turn while a long
# elementwise program needs the registers.
SPILLED = {"gated_backward": 8, "geglu_backward": 76, "gelu_erf": 32, "exp_sum": 8, "rotary_96": 32}
SPILLED_IN_TILE = {
    ("gated_backward", (128, 192)): 8,
    ("swiglu_backward", (128, 192)): 8,
    ("swiglu_backward", (64, 256)): 48,
    ("swiglu_backward", (64, 192)): 8,
    ("swiglu_backward", (64, 64)): 52,
    ("swiglu_backward", (128, 256)): 40,
    ("rotary_qkv", (128, 256)): 24,
    ("qk_norm_rotary", (128, 256)): 44,
    ("qk_norm_rotary_64", (128, 256)): 16,
    ("rotary_repeated", (128, 256)): 28,
}


pytestmark = needs_nvrtc
FP8 = jnp.float8_e5m2


# The others are slow: the small cases of kernels-diff, on record, hold registers and spills of most kinds of program.
SOME = {"gated_backward", "logsumexp_pick", "norm_backward", "qk_norm_rotary", "residual_sumsq", "swiglu"}
programs = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME)) for name in PROGRAMS]
)


@programs
def test_registers_suffice(name):
    program = PROGRAMS[name]
    log = ffi.compile(kernel_source(program, m=4096, n=program.columns(4096), k=4096), name, SM90.target).log
    usage = resource_usage(log)
    assert usage.registers <= 168  # of 65536 for the block's 384 threads
    assert usage.spilled_bytes <= SPILLED.get(name, 0)
    assert "serialized" not in log  # wgmma, where the assembler does not see through a call


@programs
def test_claiming_tiles_takes_no_more_registers(name):
    program = PROGRAMS[name]
    source = kernel_source(program, m=16384, n=program.columns(4096), k=4096, yields=True)
    assert "claims = true" in source
    usage = resource_usage(ffi.compile(source, name, SM90.target).log)
    assert usage.registers <= 168
    assert usage.spilled_bytes <= SPILLED.get(name, 0) + 8


CACHED = 8192  # instructions of 16 bytes: with more a kernel takes several times as long
LONG = {
    "softplus": Program(jax.nn.softplus),
    "power": Program(lambda acc: jnp.abs(acc) ** 2.5),
    "tangent": Program(jnp.tan),
    "polynomial": Program(lambda acc: functools.reduce(lambda sum, c: sum * acc + c, range(60), acc)),
    "cosines": Program(lambda acc: sum(jnp.cos(i * acc) for i in range(1, 6))),
    "clamps": Program(lambda acc: functools.reduce(lambda x, i: jnp.clip(x * i, -i, i + 0.5), range(1, 12), acc)),
    "powers": Program(lambda acc: sum((acc + i) ** -3 for i in range(6))),
    "quotients": Program(lambda acc: sum(1.5 / (acc + i) for i in range(8))),
    "rounds": Program(lambda acc: sum(lax.round(acc * i, lax.RoundingMethod.AWAY_FROM_ZERO) for i in range(1, 9))),
    "cases": Program(
        lambda acc: lax.select_n(lax.rem(acc.astype(jnp.int32), 12), *(acc + i for i in range(12))),
    ),
    "integers": Program(
        lambda acc, i: (
            sum(lax.div((acc * k).astype(jnp.int32), jnp.broadcast_to(i, acc.shape)) for k in (1, 2, 3)) * 0.5
        ),
        lambda m, n: (jax.ShapeDtypeStruct((n,), jnp.int32),),
    ),
}


@pytest.mark.parametrize("tile", [(128, 128), (128, 192), (128, 256)], ids=str)
@pytest.mark.parametrize("name", ["geglu_backward", "mish", "every_vector", *LONG])
def test_the_instruction_cache_holds_long_epilogues(name, tile):
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1])
    source = kernel_source({**PROGRAMS, **LONG}[name], 4096, 4096, 4096, config=config)
    assert machine_instructions(ffi.compile(source, name, SM90.target).cubin) <= CACHED


@programs
def test_column_passes_spill_little(name):
    is_one_head = name in ("rotary_256", "qk_norm_rotary_192")  # the tile
    config = None if is_one_head else GemmConfig(tile_m=128, column_passes=2)
    log = ffi.compile(
        kernel_source(PROGRAMS[name], 264, PROGRAMS[name].columns(400), 136, config=config), name, SM90.target
    ).log
    assert resource_usage(log).spilled_bytes <= 32
    assert "serialized" not in log


@pytest.mark.slow
def test_column_passes_share_their_code():
    def size(passes):
        config = GemmConfig(tile_m=128, tile_n=192, column_passes=passes)
        return machine_instructions(
            ffi.compile(kernel_source(PROGRAMS["mish"], 264, 400, 136, config=config), "mish", SM90.target).cubin
        )

    whole, *sizes = map(size, (1, 2, 3, 6))
    assert whole > CACHED
    for passes, of_passes in zip((2, 3, 6), sizes, strict=True):
        assert of_passes < 1200 + whole / passes  # what is not the epilogue's, and to move the accumulator up


@pytest.mark.parametrize("tile", list(SM90.tiles)[1:], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "identity",
        "residual_sumsq",
        "swiglu",
        "swiglu_backward",
        "gated_backward",
        "column_sum",
        "every_vector",
        "parts_of_sum",
    ],
)
def test_every_tile(name, tile):
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1], split_k=False)
    log = ffi.compile(kernel_source(PROGRAMS[name], 264, 400, 136, config=config), name, SM90.target).log
    assert resource_usage(log).spilled_bytes <= SPILLED_IN_TILE.get((name, tile), 0)
    assert "serialized" not in log


@pytest.mark.parametrize(
    "name", ["rotary_qkv", "rotary_repeated", "rotary_neighbours", "rotary_256", "qk_norm_rotary", "qk_norm_rotary_64"]
)
def test_heads_in_a_shared_tile(name):
    program, config = PROGRAMS[name], GemmConfig(tile_m=128, tile_n=256)
    source = kernel_source(program, 264, program.columns(400), 136, config=config, transpose_b=False)
    log = ffi.compile(source, name, SM90.target).log
    assert resource_usage(log).spilled_bytes <= SPILLED_IN_TILE.get((name, (128, 256)), 0)
    assert "serialized" not in log


def _heads_of_192(acc):
    return acc.reshape(acc.shape[0], -1, 192)


def _norm_of_neighbours(acc, scale, bias):
    centred = _heads_of_192(acc) - jnp.mean(_heads_of_192(acc), axis=-1, keepdims=True)
    y = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6) * scale + bias
    return jnp.stack([y[..., 1::2], y[..., 0::2]], axis=-1).reshape(acc.shape)


def _softmax_of_neighbours(acc, x, cos, sin, bias):
    y = jax.nn.softmax(_heads_of_192(acc + x + bias), axis=-1)
    a, b, cos, sin = y[..., 0::2], y[..., 1::2], cos[:, None, :], sin[:, None, :]
    y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(acc.shape)
    return y * jnp.tanh(y), jnp.sum(y, axis=0)


def _rotary_whole_tables(acc, cos, sin, bias):
    x = _heads_of_192(acc + bias)
    rotated = jnp.concatenate([-x[..., 96:], x[..., :96]], axis=-1)
    y = (x * cos[:, None, :] + rotated * sin[:, None, :]).reshape(acc.shape)
    return y, jnp.sum(y * y, axis=1), jnp.sum(y, axis=0)


HEADS_OF_192 = {
    "norm": (_norm_of_neighbours, lambda m, n: [(192,), (1, 192)]),
    "softmax": (_softmax_of_neighbours, lambda m, n: [(m, n), (m, 96), (m, 96), (n,)]),
    "whole tables": (_rotary_whole_tables, lambda m, n: [(m, 192), (m, 192), (n,)]),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", HEADS_OF_192)
def test_heads_of_192_columns_do_not_spill(name, dtype):
    """In a tile of 128 x 192 these spill 0.9 to 4.1 kB, and take longer."""
    epilogue, shapes = HEADS_OF_192[name]
    program = Program(epilogue, lambda m, n: tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(m, n)))
    compiled = ffi.compile(kernel_source(program, 4096, 3840, 4096), name, SM90.target)
    assert resource_usage(compiled.log).spilled_bytes == 0
    assert machine_instructions(compiled.cubin) <= CACHED


def test_a_rotary_embedding_of_192_columns_keeps_the_wider_tile():
    def rotary(acc, cos, sin):
        a, b = jnp.split(_heads_of_192(acc), 2, axis=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(acc.shape)

    program = Program(rotary, lambda m, n: (jax.ShapeDtypeStruct((m, 96), jnp.float32),) * 2)
    source = kernel_source(program, 4096, 3840, 4096)
    assert "tile_m = 128, tile_n = 192" in source
    assert resource_usage(ffi.compile(source, "rotary", SM90.target).log).spilled_bytes <= 32


@pytest.mark.parametrize("tile", SM90.split_k_tiles, ids=str)
@pytest.mark.parametrize("name", ["residual_sumsq", "gated_backward"])
def test_split_k(name, tile):
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1], split_k=True)
    usage = resource_usage(
        ffi.compile(kernel_source(PROGRAMS[name], 264, 400, 136, config=config), name, SM90.target).log
    )
    assert usage.spilled_bytes <= SPILLED.get(name, 0)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_layout_and_dtype(transpose_a, transpose_b, dtype):
    source = kernel_source(PROGRAMS["identity"], 264, 400, 136, dtype, transpose_a=transpose_a, transpose_b=transpose_b)
    assert resource_usage(ffi.compile(source, "identity", SM90.target).log).spilled_bytes == 0


OF_8_BITS = [GemmConfig(tile_m=m, tile_n=n, promote=False) for m, n in SM90.tiles]
OF_8_BITS += [GemmConfig(tile_m=m, tile_n=n, promote=False, split_k=True) for m, n in SM90.split_k_tiles]
OF_8_BITS += [GemmConfig(tile_m=128, tile_n=192, promote=promote, cooperative=True) for promote in (False, 128, 512)]
SOME_OF_8_BITS = [config for config in OF_8_BITS if config.promote == 512 or config.tile_n == 64]


@pytest.mark.parametrize(
    "config", [pytest.param(x, marks=[pytest.mark.slow] * (x not in SOME_OF_8_BITS)) for x in OF_8_BITS], ids=str
)
def test_factors_of_8_bits(config):
    """The instruction, and that a second accumulator fits beside the first; claimed tiles too."""
    for yields in (False, True) if config.promote else (False,):
        source = kernel_source(PROGRAMS["residual_sumsq"], 16384, 4096, 4096, FP8, config=config, yields=yields)
        made = ffi.compile(source, "residual_sumsq", SM90.target)
        usage = resource_usage(made.log)
        assert usage.registers <= 168 and usage.spilled_bytes == 0 and "serialized" not in made.log
        products = [line for line in disassembly(made.cubin) if "GMMA" in line]
        assert products and all(f"QGMMA.64x{config.tile_n}x32.F32.E5M2.E5M2" in line for line in products)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias_gelu", "swiglu", "norm_backward", "accumulate", "column_sum"])
def test_promotion_leaves_room_for_an_epilogue(name):
    source = kernel_source(PROGRAMS[name], 4096, PROGRAMS[name].columns(4096), 8192, FP8)
    assert "promote_blocks = 4;" in source
    assert resource_usage(ffi.compile(source, name, SM90.target).log).spilled_bytes == 0
