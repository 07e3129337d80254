"""coda.tune and its tables: what is found, kept, looked up, and ignored. Times are invented."""

import dataclasses
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import coda_jax as coda
from coda_jax.tiles import table as tile_table
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.choose import candidates
from coda_jax.tiles.constants import constants_for
from coda_jax.tiles.cost_model import relative_power
from coda_jax.tools import tune
from tests.nvrtc import needs_nvrtc
from tests.tuned import DEVICE, A, B, cut, cuts, fastest, is_no_worse, own_table, product, write

H200 = constants_for(DEVICE)


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    yield from own_table(tmp_path, monkeypatch, lambda: DEVICE)


@needs_nvrtc
def test_found_kept_and_used(table):
    """The best tile of each product is lowered from then on, in other functions too; explain says so."""

    def layer(a, b):
        y = coda.gemm(a, b, epilogue=jnp.tanh)
        odd = coda.gemm(a, b[:, :7])
        fixed = coda.gemm(a, b, config=coda.GemmConfig(tile_n=192))
        return y, odd, fixed, coda.gemm(a, b, epilogue=jnp.tanh), coda.gemm(a, b, implementation="xla")

    (default,) = set(cut(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), A, B))
    other = next(tile for tile in SM90.tiles if tile != default[:2])
    found = tune.tune_with(fastest(other), DEVICE, layer, A, B)
    (one,) = found.products
    assert (one.epilogue, one.config.tile_m, one.config.tile_n) == ("tanh", *other)
    assert (one.us, one.cost_model_us) == (pytest.approx(800), pytest.approx(1000))
    assert f"{other[0]} x {other[1]}, cluster of 2" in str(found) and str(table) in str(found)
    entry = json.loads(table.read_text())["devices"][DEVICE][one.key]
    assert entry["cost_model_us"] == 1000 and entry["config"]["tile_n"] == other[1]

    assert cut(lambda x, y: coda.gemm(x, y, epilogue=lambda z: jnp.tanh(z)), A, B) == [(*other, 2)]
    assert cut(product, A, B)[0][:2] != other  # another program
    assert cut(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), A.update(shape=(4095, 1024)), B)[0][:2] != other
    shown = str(coda.explain(layer, A, B, platform="cuda"))
    assert f"{other[0]} x {other[1]} (tuned)" in shown and "128 x 192 (config)" in shown


@needs_nvrtc
def test_gains_within_noise_are_none(table):
    other = next(tile for tile in SM90.tiles if tile != cut(product, A, B)[0][:2])
    (one,) = tune.tune_with(fastest(other, gain=0.005), DEVICE, product, A, B).products
    assert (one.config.tile_m, one.config.tile_n) != other and one.us == one.cost_model_us


@needs_nvrtc
def test_a_tile_of_less_power_may_take_longer(table):
    """The tile of two that takes less energy times time is chosen, though it may take longer."""
    types = [jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2
    by_gain = {
        gain: tune.tune_with(fastest((128, 128), gain=gain), DEVICE, product, *types).products[0].config.tile.size
        for gain in (0.01, 0.03)
    }
    assert by_gain[0.01] == (128, 256) and by_gain[0.03] == (128, 128)


@needs_nvrtc
def test_tiles_by_time(table, monkeypatch):
    """The fastest is kept, whatever power it takes, in an entry that products do not take that are lowered by both. The
    library's entries count for either; on an H100, where both choose alike, so do the user's.
    """
    types = [jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2
    measure = fastest((128, 128), gain=0.011)
    by_both = tune.tune_with(measure, DEVICE, product, *types)
    write(tile_table.shipped_path(DEVICE), {"tile_m": 64, "tile_n": 128}, key=by_both.products[0].key)
    monkeypatch.setenv("CODA_JAX_TILES_BY", "time")
    assert cut(product, *types) == [(64, 128, 2)]
    assert tile_table.user_key("key", DEVICE) == "key by time"
    assert tile_table.user_key("key", "NVIDIA H100 80GB HBM3") == "key"
    by_time = tune.tune_with(measure, DEVICE, product, *types)
    tile_table._load.cache_clear()
    assert by_both.products[0].config.tile.size != by_time.products[0].config.tile.size == (128, 128)
    assert len(json.loads(table.read_text())["devices"][DEVICE]) == 2
    assert cut(product, *types) == [(128, 128, 2)]
    monkeypatch.setenv("CODA_JAX_TILES_BY", "energy_delay")
    assert cut(product, *types)[0] == by_both.products[0].config.tile[:3]
    monkeypatch.setenv("CODA_JAX_TILES_BY", "clock")
    with pytest.raises(RuntimeError, match="CODA_JAX_TILES_BY = 'clock'; it must be 'energy_delay' or 'time'"):
        cut(product, *types)


@needs_nvrtc
@pytest.mark.parametrize(
    "device, tile", [("NVIDIA H100 80GB HBM3", (128, 192)), (DEVICE, (128, 128)), ("NVIDIA GH200 480GB", (128, 128))]
)
def test_each_device_has_a_cost_model(device, tile, monkeypatch):
    """An H100 reads less from L2; what is exported, and what other devices run, has an H200's tile."""
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", device)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32768, 512), (512, 1024))]
    assert cut(product, *types) == [(*tile, 2)]
    assert f"{tile[0]} x {tile[1]} (cost model)" in str(coda.explain(product, *types, platform="cuda"))
    (one,) = tune.tune_with(fastest(tile), device, product, *types).products
    assert (one.config.tile_m, one.config.tile_n) == tile and one.us == one.cost_model_us
    exported = export.export(
        jax.jit(lambda a, b: product(a, b)),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("coda_gemm")],
    )
    assert cuts(exported(*types).mlir_module()) == [(128, 128, 2)]


@needs_nvrtc
@pytest.mark.parametrize("k, split", [(16384, True), (1024, False)])
def test_split_k_is_chosen_where_it_pays(k, split):
    types = [jax.ShapeDtypeStruct((k, 768), jnp.bfloat16)] * 2
    shown = str(coda.explain(lambda a, b: coda.gemm(a, b, transpose_a=True), *types, platform="cuda"))
    assert ("split-K (cost model)" in shown) == split and "(cost model)" in shown


@needs_nvrtc
@pytest.mark.parametrize(
    "k, epilogue, is_cooperative",
    [
        (8192, None, True),
        (2048, None, False),
        (8192, lambda acc, x: acc + x, True),
        (16384, lambda acc, x: jax.nn.gelu(acc) + x, True),
        (4096, lambda acc, x: jax.nn.gelu(acc) + x, False),
        (8192, lambda acc, x: jnp.sin(acc) + x, False),
        (8192, lambda acc, x: jnp.sum(acc * x, axis=1), False),
        (8192, lambda acc, x: (acc + x, jax.nn.logsumexp(acc, axis=1)), False),
    ],
)
def test_consumers_share_a_tile_where_products_are_long_and_the_epilogue_is_short(k, epilogue, is_cooperative):
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16384, k), (k, 2048), (16384, 2048))]

    def function(a, b, x):
        return coda.gemm(a, b, *([x] if epilogue else []), epilogue=epilogue)

    shown = str(coda.explain(function, *types, platform="cuda"))
    assert ("128 x 256 (cost model)" in shown) == is_cooperative and "(cost model)" in shown


@needs_nvrtc
@pytest.mark.parametrize("seed", range(20))
def test_tuned_config_costs_no_more_energy_times_time(table, seed):
    random = np.random.default_rng(seed)

    def seconds(work):
        return {config: 1e-3 * random.uniform(1, 1.05) for config in work.configs}

    (one,) = tune.tune_with(lambda works: map(seconds, works), DEVICE, product, A, B).products
    (work,) = tune.products_of(product, A, B).values()
    assert is_no_worse(one, dataclasses.replace(work, device=DEVICE))


@needs_nvrtc
def test_of_tiles_that_take_as_much_the_fastest_is_kept(table):
    """Every tile takes the same energy, so that time is the less, the more power."""

    def seconds(work):
        return {config: 1e-3 / relative_power(work.problem.shape, config.tile, H200) for config in work.configs}

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16384, 8192), (8192, 2048))]
    (one,) = tune.tune_with(lambda works: map(seconds, works), DEVICE, product, *types).products
    (work,) = tune.products_of(product, *types).values()
    assert one.us == pytest.approx(1e6 * min(seconds(work).values())) and one.cost_model_us > 1.02 * one.us


@needs_nvrtc
def test_a_cooperative_tile_is_not_split():
    with pytest.raises(ValueError, match="split_k = True with tiles of 128x256; it must be one of 128x128, 128x192"):
        coda.GemmConfig(tile_m=128, tile_n=256, split_k=True)
    a = jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16)
    product = functools.partial(coda.gemm, transpose_a=True, config=coda.GemmConfig(tile_n=256, split_k=True))
    assert "64 x 256, split-K (config)" in str(coda.explain(product, a, a, platform="cuda"))


def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="tune: it measures on a Hopper GPU; JAX runs on cpu here"):
        coda.tune(product, A, B)


@pytest.mark.slow
@needs_nvrtc
def test_programs_that_are_measured():
    """One launch a set of arguments, or a pair of sets, cut as asked, whatever the caller's table, aliases and
    implementation. XLA would make one of two launches on the same.
    """
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 128), (128, 192), (64, 192))]

    def f(a, b, x):
        return coda.gemm(
            a, b, x.astype(jnp.float32), epilogue=lambda acc, x: acc + x, out_dtype=jnp.float32,
            input_output_aliases={0: 0},
        )  # fmt: skip

    (work,) = tune.products_of(f, *types).values()
    assert (tune.number_of_sets(work), tune.number_of_launches(work)) == (8, 64)
    for config in (work.configs[0], work.configs[-1]):
        lowered = jax.jit(tune.launches(work, config)).trace(*[work.types] * 8).lower(lowering_platforms=("cuda",))
        assert cuts(lowered.as_text()) == [(config.tile_m, config.tile_n, config.cluster_m)] * 64
    calls = re.findall(r"call @coda_gemm\w*\((.*?)\)|custom_call @coda_gemm\((.*?)\)", lowered.as_text())
    assert len(calls) == len(set(calls)) == 64
    sets = tune.random_sets(work, jax.local_devices()[0])()
    assert [[x.shape for x in arguments] for arguments in sets] == [[x.shape for x in types]] * 8
    assert not jnp.array_equal(sets[0][0], sets[1][0])


@needs_nvrtc
def test_groups_that_are_measured():
    """All rows are in a group, of every layout of the rows: else tiles would be measured that only write zeros."""
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((96, 128), (4, 128, 64))]

    def loss(a, b, sizes):
        return coda.ragged_gemm(a, b, sizes).astype(jnp.float32).sum()

    works = tune.products_of(jax.value_and_grad(loss, (0, 1)), *types, sizes).values()
    assert len(works) == 3
    for work in works:
        sets = tune.random_sets(work, jax.local_devices()[0])()
        assert [[x.shape for x in arguments] for arguments in sets] == [[x.shape for x in work.types]] * len(sets)
        for *_, offsets in sets:
            assert (offsets[0], offsets[-1]) == (0, 96) and jnp.all(jnp.diff(offsets) >= 0)
        assert not jnp.array_equal(sets[0][-1], sets[1][-1])


@pytest.mark.slow
@needs_nvrtc
def test_measured_on_a_device(monkeypatch):
    """Every config of every product has a time; XLA's form stands for the kernels here."""

    def launches(work, config):
        assert config in work.configs
        return lambda *sets: [tune.coda_gemm_p.bind(*of, spec=work.spec.replace(implementation="xla")) for of in sets]

    monkeypatch.setattr(tune, "launches", launches)
    monkeypatch.setattr(tune, "candidates", lambda *about: candidates(*about)[:2])

    def f(a, b, x):
        mask = coda.gemm(a, b, x > 0, epilogue=lambda acc, mask: jnp.where(mask, acc, 0))
        return jax.vmap(coda.gemm)(jnp.stack([a] * 2), jnp.stack([b] * 2)), mask

    small = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 32), (32, 64), (16, 1))]
    works = list(tune.products_of(f, *small).values())
    found = tune.measure_on(works, device=jax.local_devices()[0])
    assert [list(of) for of in found] == [work.configs for work in works] and len(works) == 2
    assert all(0 < seconds < 0.1 for of in found for seconds in of.values())
    monkeypatch.setattr(tune, "interleaved", lambda calls: [1.0] * len(calls))
    for work, of in zip(works, tune.measure_on(works, device=jax.local_devices()[0]), strict=True):
        assert set(of.values()) == {1 / tune.number_of_launches(work)} and tune.number_of_launches(work) == 64


@needs_nvrtc
@pytest.mark.parametrize(
    "sizes, sets, launches",
    [((16384, 4096, 4096), 1, 1), ((4096, 2048, 2048), 5, 11), ((256, 1024, 4096), 8, 64), ((16384, 8192, 16), 8, 8)],
)
def test_short_products_are_launched_often(sizes, sets, launches):
    m, n, k = sizes
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))]
    (work,) = tune.products_of(product, *types).values()
    assert (tune.number_of_sets(work), tune.number_of_launches(work)) == (sets, launches)


def test_relative_medians():
    """A clock that differs from round to round falls on all variants alike."""
    generator = np.random.default_rng(0)
    clocks = np.exp(generator.normal(0, 0.2, 101))
    slow, fast = tune.relative_medians([1.02 * clocks, 0.98 * clocks])
    assert slow / fast == pytest.approx(1.02 / 0.98)
    assert slow == pytest.approx(1.02 * np.median(clocks), rel=1e-3)


def test_interleaved():
    """Seconds a call, of bursts that end before the next one starts."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 3000, lambda _, x: jnp.sin(x), x))
    fast = jax.jit(lambda x: x + 1)
    x = jnp.ones(100)
    seconds = tune.interleaved([lambda: slow(x), lambda: fast(x)])
    assert seconds[0] > 3 * seconds[1] > 0
