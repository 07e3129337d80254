"""The cost model's choice of tiles, by its formulas and constants alone; and what a kernel of a tile then has."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.lab.tile_losses import Shape
from benchmarks.programs import PROGRAMS, kernel_source
from coda_jax.epilogue import trace
from coda_jax.operators.feed_forward import gated
from coda_jax.tiles.choose import candidates, choose_config
from coda_jax.tiles.config import TileShape
from coda_jax.tiles.constants import by_time, constants_for
from coda_jax.tiles.cost_model import GemmShape, _clusters, best_first, cost, relative_power, split_tiles
from coda_jax.tiles.traffic import ElementTraffic, EpilogueTraffic, element_traffic, keeps_tables

DEVICE, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
H200 = constants_for(DEVICE)


@pytest.mark.parametrize(
    "device, name, k, is_cooperative",
    [
        (H100, "rotary_qkv", 4096, True),
        (H100, "rotary_qkv", 1536, False),
        (H100, "qk_norm_rotary", 4096, True),
        (DEVICE, "rotary_qkv", 4096, False),
        (DEVICE, "rotary_qkv", 16384, True),
        (H100, "rotary_positions", 8192, False),  # sines and cosines have not been timed there
        (H100, "rotary_whole_tables", 8192, False),  # nor tables that each head loads
    ],
)
def test_consumers_share_a_tile_of_heads_whose_tables_they_keep(device, name, k, is_cooperative):
    problem = Shape(name, "NN", 16384, PROGRAMS[name].columns(10240), k).problem
    config = choose_config(problem.shape, problem.program, problem.out_dtypes, None, device)
    assert config.tile.cooperative == is_cooperative


@pytest.mark.parametrize("device", [DEVICE, H100])
@pytest.mark.parametrize(
    "m, n, k, tile, is_split",
    [
        (16, 2048, 2048, (64, 64), False),
        (16, 4096, 4096, (64, 64), False),
        (64, 4096, 14336, (64, 64), False),  # memory, not a multiprocessor, bounds it: parts would gain nothing
        (16, 28672, 4096, (64, 256), False),
        (256, 4096, 14336, (128, 128), True),
    ],
)
def test_tiles_of_few_rows(device, m, n, k, tile, is_split):
    problem = Shape("identity", "NN", m, n, k).problem
    config = choose_config(problem.shape, problem.program, problem.out_dtypes, None, device)
    assert (config.tile.size, config.split_k) == (tile, is_split)


@pytest.mark.parametrize(
    "name, m, n", [("identity", 257, 1024), ("gated_backward", 256, 1024), ("rotary_256", 16, 1024)]
)
def test_tiles_of_few_rows_only_for_what_has_been_timed(name, m, n):
    problem = Shape(name, "NT", m, n, 1024).problem
    arguments = problem.shape, problem.program, problem.out_dtypes
    assert (64, 64) not in {config.tile.size for config in candidates(*arguments)}
    if name != "rotary_256":
        assert choose_config(*arguments, coda.GemmConfig(tile_m=64, tile_n=64)).tile.size == (64, 64)


def test_the_last_of_few_rows():
    """Tiles of 64 x 64 up to 256 rows, and a CTA alone where a tile has all rows."""

    def tiles(m):
        problem = Shape("identity", "NT", m, 1024, 1024).problem
        return [config.tile for config in candidates(problem.shape, problem.program, problem.out_dtypes)]

    assert [(64, 64) in {tile.size for tile in tiles(m)} for m in (256, 257)] == [True, False]
    assert [{tile.cluster_m for tile in tiles(m) if tile.tile_m == 128} for m in (128, 129)] == [{1}, {1, 2}]


def test_memory_time_hides_nine_tenths_of_multiplications():
    """A tenth of the multiplications, where reading takes longer; else all of them, beside a tenth of the reading."""
    traffic, shape = ElementTraffic(0, 2, 0, False, 0.0, False), GemmShape(16, 4096, 14336)
    no_block = dict.fromkeys(H200.of_block, (0.0, 0.0))

    def cost_if(factor):
        alone = {tile: factor * time for tile, time in H200.alone.items()}
        constants = dataclasses.replace(H200, alone=alone, of_block=no_block)
        return cost(shape, TileShape(64, 64, 1, False, False), traffic, constants)

    hidden, seen = cost_if(0.6) - cost_if(0.4), cost_if(2.2) - cost_if(2.0)
    assert hidden == pytest.approx(seen / 10, rel=1e-3)


@pytest.mark.parametrize("m, groups, clusters", [(4096, 16, 40), (4, 16, 9), (40, 30, 30)])
def test_groups_end_within_tiles(m, groups, clusters):
    """Half a tile more for each group, and one at least for each that has rows."""
    shape = GemmShape(m, 256, 64, ragged="m", groups=groups)
    assert _clusters(shape, TileShape(128, 128, 2, False, False)) == clusters


def test_no_product_is_faster_than_memory():
    traffic, shape = ElementTraffic(0, 2, 0, False, 0.0, False), GemmShape(16, 4096, 14336)
    at_once = dataclasses.replace(
        H200, alone=dict.fromkeys(H200.alone, 0.0), of_block=dict.fromkeys(H200.of_block, (0.0, 0.0)), store=0.0
    )
    least = H200.start[0] + H200.memory * 2e-6 * (16 + 4096) * 14336
    for tile in (TileShape(64, 64, 1, False, False), TileShape(64, 128, 1, False, False)):
        assert cost(shape, tile, traffic, at_once) == pytest.approx(least, rel=2e-3)
        assert cost(shape, tile, traffic, H200) > least


@pytest.mark.parametrize(
    "name, tile, keeps",
    [
        ("rotary_qkv", (128, 256), True),
        ("rotary_qkv", (128, 128), False),
        ("rotary_qkv", (64, 256), False),
        ("qk_norm_rotary", (128, 256), True),
        ("rotary_neighbours", (128, 256), True),
        ("rotary_256", (128, 256), False),
        ("rotary_whole_tables", (128, 256), False),
        ("layer_norm_of_neighbours", (128, 256), False),
        ("identity", (128, 256), False),
    ],
)
def test_tables_are_kept_where_registers_have_room(name, tile, keeps):
    assert keeps_tables(Shape(name, "NN", 256, 1536, 256).problem.program, tile) == keeps
    source = kernel_source(PROGRAMS[name], 256, 1536, 256, config=coda.GemmConfig(tile_m=tile[0], tile_n=tile[1]))
    assert f"keeps_tables = {str(keeps).lower()};" in source


@pytest.mark.parametrize("dtype, keeps", [(jnp.float32, True), (jnp.bfloat16, False), (jnp.float16, False)])
def test_tables_of_16_bits_count_twice(dtype, keeps):
    def norms_and_rotary(acc, *tables):
        heads = acc.reshape(acc.shape[0], -1, 128)
        heads = heads * jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True))
        (a, b), (cos, sin) = jnp.split(heads, 2, axis=-1), (x[:, None] for x in tables)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(acc.shape)

    tables = [jax.ShapeDtypeStruct((256, 64), dtype)] * 2
    program = trace(norms_and_rotary, jax.ShapeDtypeStruct((256, 512), jnp.float32), tables)[0].program
    assert keeps_tables(program, (128, 256)) == keeps


def test_instructions_are_counted_for_an_element():
    """A pair of halves or neighbours has two elements; the part with most instructions counts."""
    for name in ("rotary_qkv", "rotary_neighbours"):
        problem = Shape(name, "NN", 256, 1536, 256).problem
        assert element_traffic(problem.program, EpilogueTraffic.of(problem.program, problem.out_dtypes)).arithmetic == 4


def test_least_energy_and_delay_and_of_equals_the_fastest():
    """Energy counts as much as time; of what is within 0.75 % of the least geometric mean of both, time alone."""
    costs = {
        "less energy": (97.0, 102.0),
        "least": (99.0, 99.6),
        "as good": (101.0, 98.5),
        "faster": (105.0, 96.0),
        "unknown": (math.inf, math.inf),
        "slow": (100.0, 108.0),
    }
    assert best_first(costs) == ["as good", "least", "less energy", "faster", "slow", "unknown"]
    assert best_first({}) == []


def test_of_tiles_that_take_as_much_the_faster_is_chosen():
    """128 x 256 takes 3 % less energy here than 128 x 128, and 1.6 % more time at one clock."""
    problem = Shape("identity", "NT", 16384, 2048, 3072).problem
    program, dtypes = problem.program, problem.out_dtypes
    traffic = element_traffic(program, EpilogueTraffic.of(program, dtypes))
    wide, square = TileShape(128, 256, 2, False, True), TileShape(128, 128, 2, False, False)
    energy, time = ([cost(problem.shape, one, traffic, c) for one in (wide, square)] for c in (H200, by_time(H200)))
    assert energy[0] * time[0] < energy[1] * time[1] and time[0] > time[1]
    assert choose_config(problem.shape, program, dtypes, None, DEVICE).tile == square


def test_power_is_what_the_cost_model_makes_of_a_time():
    """A split tile keeps the whole chip at work, or as much of it as there are parts."""
    whole, split = TileShape(128, 192, 2, False, False), TileShape(128, 192, 2, True, False)
    of = dataclasses.replace(H200, power={**H200.power, (128, 192): 0.9})
    assert relative_power(GemmShape(2048, 16384, 16384), split, of) == pytest.approx(0.9)
    assert relative_power(GemmShape(2048, 16384, 16384), whole, of) < 0.9
    tiles, parts = split_tiles(GemmShape(768, 768, 16384), split)
    assert relative_power(GemmShape(768, 768, 16384), split, of) == pytest.approx(1 - 0.1 * tiles * parts / 66)


def test_column_sums_count_where_nothing_hides_them():
    shape = GemmShape(16384, 4096, 4096)
    none, one = (ElementTraffic(0, 2, count, False, 0.0, False) for count in (0, 1))
    for size, counts in (((128, 256), True), ((128, 128), False)):
        tile = TileShape(*size, 2, False, size == (128, 256))
        assert (cost(shape, tile, one, H200) > cost(shape, tile, none, H200)) == counts


@pytest.mark.parametrize("waves, saved", [(3, False), (4, True), (8, True)])
def test_an_idle_chip_takes_less_after_many_waves(waves, saved):
    """And a product that is over soon is waited for, whatever it takes."""
    whole, one_more = (GemmShape(256 * 66 * waves + 256 * more, 128, 4096) for more in (0, 1))
    tile, traffic = TileShape(128, 128, 2, False, False), ElementTraffic(0, 2, 0, False, 0.0, False)
    of = dataclasses.replace(H200, memory=0.0)
    alone, plain = ((cost(one_more, tile, traffic, c) - cost(whole, tile, traffic, c)) for c in (of, by_time(of)))
    assert (alone < 0.6 * plain) if saved else (alone == plain)
    power = relative_power(one_more, tile, H200)
    assert (power == pytest.approx((waves + alone / plain) / (waves + 1), rel=1e-3)) if saved else (power == 1)


@pytest.mark.parametrize("epilogue", ["identity", "residual", "norm_backward", "accumulate"])
def test_cooperative_tiles_preload_most_epilogue_operands(epilogue):
    """All of it but one box, or as much as fits beside three stages; where it loads nothing there are four."""
    shape = Shape(epilogue, "NN", 16384, 2048, 16384)
    types, dtypes = shape.types[2:], shape.problem.out_dtypes
    config = coda.GemmConfig(tile_m=128, tile_n=256)
    config = choose_config(shape.problem.shape, shape.problem.program, dtypes, config, DEVICE)
    if not types:
        assert config.stages == 4
    else:
        row = config.box_n * sum(type_.dtype.itemsize for type_ in types if type_.ndim == 2 and type_.shape[1] > 1)
        assert config.stages == 3 and 64 * row * config.load_slots >= 24 * 1024
    assert config.box_n * max(dtype.itemsize for dtype in dtypes) in (64, 128)


def test_candidates_begin_with_what_is_chosen(monkeypatch):
    """By energy and delay, and by time."""
    problem = Shape("identity", "NN", 16384, 4096, 4096).problem
    found = set()
    for by in ("energy_delay", "time"):
        monkeypatch.setenv("CODA_JAX_TILES_BY", by)
        first, *_ = candidates(problem.shape, problem.program, problem.out_dtypes, DEVICE)
        assert first == choose_config(problem.shape, problem.program, problem.out_dtypes, None, DEVICE)
        found.add(first.tile.size)
    assert found == {(128, 256), (128, 128)}


@pytest.mark.parametrize(
    "name, tile, passes",
    [
        ("gated_backward", (128, 192), 1),
        ("geglu_backward", (128, 192), 2),
        ("mish", (128, 192), 2),
        ("mish", (128, 128), 2),
        ("mish", (64, 256), 2),
        ("mish", (64, 128), 1),
        ("mish", (128, 256), 2),
    ],
)
def test_column_passes_are_as_many_as_the_instruction_cache_asks_for(name, tile, passes):
    problem = Shape(name, "NT", 16384, 8192, 2048).problem
    config = coda.GemmConfig(tile_m=tile[0], tile_n=tile[1])
    assert choose_config(problem.shape, problem.program, problem.out_dtypes, config, DEVICE).column_passes == passes


def test_boxes_are_as_wide_as_turns_of_cached_code_allow():
    """Two of 64 columns in 128 x 128 would be two passes, of 11,000 instructions in all."""
    types = tuple(jax.ShapeDtypeStruct((4096, 4096), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    program = trace(lambda acc, x: jnp.tan(acc) + jnp.abs(x) ** 2.5, types[0], types[1:])[0].program
    config = coda.GemmConfig(tile_m=128, tile_n=128)
    config = choose_config(GemmShape(4096, 4096, 4096), program, [np.dtype(jnp.bfloat16)], config, DEVICE)
    assert (config.box_n, config.column_passes) == (32, 4)


@pytest.mark.parametrize("sums, tile", [((), (128, 192)), (("rows",), (128, 192)), (("rows", "columns"), (128, 128))])
def test_sums_of_both_halves_beside_rows_leave_128_x_192(sums, tile):
    """As those of a gate with a bias: there alone they spill kilobytes."""

    def gate_with_bias(acc, z, bias):
        hidden, pullback = jax.vjp(gated(jax.nn.gelu), z + bias[None, :])
        (dz,) = pullback(acc)
        made = {"rows": jnp.sum(dz * z, axis=1), "columns": jnp.sum(dz, axis=0)}
        return dz, hidden, *(made[name] for name in sums)

    shapes = [((16384, 8192), jnp.float32), ((16384, 16384), jnp.bfloat16), ((16384,), jnp.bfloat16)]
    acc, *operands = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    program = trace(gate_with_bias, acc, operands)[0].program
    dtypes = [np.dtype(jnp.bfloat16)] * 2
    assert choose_config(GemmShape(16384, 8192, 2048), program, dtypes, None, DEVICE).tile.kind == tile


@pytest.mark.parametrize("transposes, tile", [(False, (128, 192)), (True, (128, 128))])
def test_transposed_copies_beside_halves_leave_128_x_192(transposes, tile):
    def gate(acc, z, scale):
        _, pullback = jax.vjp(gated(jax.nn.silu), z)
        dz8 = coda.saturate(scale * pullback(acc)[0], jnp.float8_e4m3fn)
        return [dz8, dz8.T][: 1 + transposes]

    shapes = [((16384, 8192), jnp.float32), ((16384, 16384), jnp.bfloat16), ((), jnp.float32)]
    acc, *operands = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    program = trace(gate, acc, operands)[0].program
    dtypes = [np.dtype(jnp.float8_e4m3fn)] * (1 + transposes)
    shape = GemmShape(16384, 8192, 2048, transpose_b=True, element_bytes=1)
    assert choose_config(shape, program, dtypes, None, DEVICE).tile.kind == tile


def test_heads_that_are_long_have_a_tile_of_two():
    """In 128 x 128 one head of 128 columns is all, so that there are no passes."""

    def heads(acc, x):
        y = acc.reshape(acc.shape[0], -1, 128)
        a, b = jnp.split(jnp.tan(y) + jnp.log1p(y * y), 2, axis=-1)
        return jnp.concatenate([a + jnp.sum(y, axis=-1, keepdims=True), b], axis=-1).reshape(acc.shape) + x

    types = tuple(jax.ShapeDtypeStruct((4096, 4096), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    program = trace(heads, types[0], types[1:])[0].program
    config = choose_config(GemmShape(4096, 4096, 4096), program, [np.dtype(jnp.bfloat16)], None, DEVICE)
    assert program.halves.head == 128 and (config.tile_n, config.column_passes) == (256, 2)
    assert candidates(GemmShape(4096, 4096, 4096), program, [np.dtype(jnp.bfloat16)], DEVICE)[0] == config


@pytest.mark.parametrize(
    "name, config, possible",
    [
        ("residual", {"tile_n": 192, "tile_m": 128, "box_n": 32}, {1, 2, 3, 6}),
        ("swiglu", {"tile_n": 192, "tile_m": 128, "box_n": 32}, {1, 3}),
        ("rotary_qkv", {"tile_n": 128, "tile_m": 128, "box_n": 32}, {1, 2}),  # two heads of 64
        ("qk_norm_rotary", {"tile_n": 128, "tile_m": 128, "box_n": 32}, {1}),
        ("qk_norm_rotary", {"tile_n": 256, "tile_m": 128, "box_n": 32}, {1, 2}),
        ("rotary_neighbours", {"tile_n": 128, "tile_m": 128, "box_n": 16}, {1, 2}),  # boxes have both neighbours
    ],
)
def test_column_passes_are_whole_boxes_and_whole_heads(name, config, possible):
    problem = Shape(name, "NT", 16384, PROGRAMS[name].columns(8192), 2048).problem

    def with_passes(passes):
        given = coda.GemmConfig(column_passes=passes, **config)
        return choose_config(problem.shape, problem.program, problem.out_dtypes, given, DEVICE).column_passes

    for passes in range(1, 13):
        if passes in possible:
            assert with_passes(passes) == passes
        else:
            with pytest.raises(
                ValueError,
                match=rf"GemmConfig: column_passes = {passes}; it must be one of \[1,? ?.*\], groups of whole boxes",
            ):
                with_passes(passes)
    with pytest.raises(ValueError, match="GemmConfig: column_passes = 17; it must be one of"):
        coda.GemmConfig(column_passes=17)
