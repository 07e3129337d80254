"""The benchmark of tiles from end to end on a CPU, and what is read from its file."""

import csv
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks import plots, programs
from benchmarks.lab import tile_losses, tiles, tiles_energy
from benchmarks.lab.tile_losses import Shape
from coda_jax.tiles import table as tile_table
from coda_jax.tiles.choose import candidates
from coda_jax.tiles.constants import by_time, constants_for
from coda_jax.tiles.cost_model import cost
from coda_jax.tiles.traffic import EpilogueTraffic, element_traffic
from coda_jax.tools import tune
from tests.nvrtc import needs_nvrtc

MODELS = {name: tiles.MODELS[name] for name in ("Llama 3 1B", "Llama 3 8B", "GPT-2")}


@pytest.mark.slow
def test_measured_and_written(tmp_path, monkeypatch, capsys):
    """A row a shape and tile, as many shapes as the budget allows; a wrong product fails."""
    monkeypatch.setattr(tiles, "candidates", lambda *about: candidates(*about)[:2])
    monkeypatch.setattr(tiles, "CHUNK_FUNCTIONS", 3)
    options = ["--tiny", "--seconds=0", f"--out={tmp_path}", "--commit=none"]
    grid = tiles.shapes(tiles.TINY_MODELS, [64])[-2:]
    monkeypatch.setattr(tiles, "shapes", lambda models, tokens: list(grid))
    assert tiles.main(options) == 0
    shown = capsys.readouterr().out
    assert "samples agree" in shown and "the ten worst" in shown
    (path,) = tmp_path.glob("*_tiles.csv")
    device, times = tile_losses.read(path)
    assert device == "cpu" and set(times) == set(grid)
    for shape, of in times.items():
        problem = shape.problem
        assert set(of) == set(candidates(problem.shape, problem.program, problem.out_dtypes)[:2])
        assert min(of.values()) > 0
    before = path.read_text()
    assert tiles.main([*options, "--budget=0"]) == 1 and path.read_text() == before  # what there is stays
    monkeypatch.setattr(tiles.programs, "check", lambda *_: (_ for _ in ()).throw(AssertionError("wrong")))
    with pytest.raises(AssertionError, match="wrong"):
        tiles.main(options)


def test_alone(tmp_path, monkeypatch, capsys):
    """On a device that always takes 100 W, energy is time; shapes that are measured fill a chip and not its cache."""
    monkeypatch.setattr(tiles, "candidates", lambda *about: candidates(*about)[:2])
    monkeypatch.setattr(tiles_energy, "SELDOM", {})
    options = ["--tiny", "--shapes=2", "--seconds=0.02", f"--out={tmp_path}", "--commit=none"]
    assert tiles_energy.main(options, counter=lambda: 100 * time.perf_counter()) == 0
    (path,) = tmp_path.glob("*_tiles_energy.csv")
    (_, joules), (_, seconds) = (tile_losses.read(path, column) for column in ("joules", "seconds"))
    assert len(joules) == 2
    for shape, of in joules.items():
        assert len(of) == 2 and list(of.values()) == pytest.approx([100 * seconds[shape][t] for t in of], rel=0.1)
    with pytest.raises(SystemExit):
        tiles_energy.main(["--report", f"--out={tmp_path / 'empty'}"])
    chip = [shape for shape in tiles.shapes(tiles.MODELS, tiles.TOKENS) if tiles_energy.is_measured(shape)]
    assert len(chip) > 300 and all(sum(tiles.array_bytes(shape)) > 1.2e8 for shape in chip)


def test_report_of_tiles_alone(tmp_path, capsys):
    """The choice by energy and delay loses nothing on a device of which the cost model is true; that by time does."""
    constants = constants_for("NVIDIA H200")
    shapes = [Shape("identity", "NN", 16384, 4096, 4096), Shape("residual_sumsq", "NN", 16384, 2048, 8192)]
    alone, at_one_clock = (times_by(of, shapes=shapes) for of in (constants, H200_BY_TIME))
    rows = [
        {**vars(shape), **vars(config), "joules": 700 * cost, "seconds": cost, "device": "NVIDIA H200"}
        for shape, of in alone.items()
        for config, cost in of.items()
        if cost < float("inf")
    ]
    written(tmp_path / "nvidia_h200_tiles_energy.csv", rows)
    written(tmp_path / "nvidia_h200_tiles.csv", rows_of(at_one_clock))
    assert tiles_energy.main(["--report", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-3:] for line in shown[2:4]] == [["100.0%", "0.00%", "0.0%"]] * 2
    assert shown[4].startswith("time, chosen by time") and shown[4].split()[-2] != "0.00%"
    (power,) = (float(line.split()[3]) for line in shown if line.startswith("  128 x 256: "))
    assert power == pytest.approx(constants.power[128, 256], abs=0.01)


def test_table_needs_time_and_energy():
    shape = Shape("identity", "NN", 16384, 2048, 8192)
    problem = shape.problem
    found = candidates(problem.shape, problem.program, problem.out_dtypes, "NVIDIA H200")
    first, square = found[0], next(config for config in found if config.tile.size == (128, 128))
    assert first.tile.size == (128, 256)  # which takes 5 % less power
    of = constants_for("NVIDIA H200")
    assert not tile_losses.table({shape: {first: 100.0, square: 94.0}}, of)
    (entry,) = tile_losses.table({shape: {first: 100.0, square: 88.0}}, of).values()
    assert (entry["config"]["tile_n"], entry["us"]) == (128, 88)


def test_grid():
    """Shapes of real models in the layouts of training, each once, none with an array beyond 5 GB."""
    grid = tiles.shapes(tiles.MODELS, tiles.TOKENS)
    assert len(grid) == len(set(grid)) > 700
    assert {Shape("swiglu", "NN", 4096, 28672, 4096), Shape("gated_backward", "NT", 16384, 8192, 2048)} <= set(grid)
    assert {Shape("identity", "NT", 1024, 2048, 16384), Shape("identity", "TN", 2048, 16384, 65536)} <= set(grid)
    assert Shape("swiglu", "NN", 16384, 57344, 8192) in grid and Shape("swiglu", "NN", 65536, 57344, 8192) not in grid


@needs_nvrtc
@pytest.mark.parametrize("name", ["identity", "residual_sumsq", "swiglu", "gated_backward"])
def test_keys_are_those_of_the_lowering(name):
    shape = Shape(name, "NT", 256, 512, 128)
    epilogue = programs.PROGRAMS[name].epilogue
    found = tune.products_of(lambda *xs: coda.gemm(*xs, epilogue=epilogue, transpose_b=True), *shape.types)
    assert list(found) == [shape.problem.key]


@needs_nvrtc
def test_the_grids_epilogues_are_those_of_a_models_products():
    """Else what a table says of them is never found."""
    rows, width, features = 256, 128, 512
    shapes = [(rows, width), (width,), (width, 2 * features), (features, width)]
    x, *parameters = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sumsq = jax.ShapeDtypeStruct((rows,), jnp.float32)

    def loss(x, sumsq, scale, *weights):
        return jnp.sum(coda.gated_mlp(coda.DeferredNorm(x, sumsq, scale), *weights).x.astype(jnp.float32))

    step = jax.value_and_grad(loss, argnums=(0, 2, 3, 4))
    found = tune.products_of(step, x, sumsq, *parameters)
    of_grid = [
        Shape("swiglu", "NN", rows, 2 * features, width),
        Shape("residual_sumsq", "NN", rows, width, features),
        Shape("gated_backward", "NT", rows, features, width),
    ]
    assert {shape.problem.key for shape in of_grid} <= set(found)


def times_by(constants, tokens=(256, 1024, 16384), shapes=None):
    """As on a device of which a cost model with these constants is true."""
    found = {}
    for shape in shapes or tiles.shapes(MODELS, tokens):
        problem = shape.problem
        traffic = element_traffic(problem.program, EpilogueTraffic.of(problem.program, problem.out_dtypes))
        found[shape] = {
            config: cost(problem.shape, config.tile, traffic, constants)
            for config in candidates(problem.shape, problem.program, problem.out_dtypes)
        }
    return found


H200_BY_TIME = by_time(constants_for("NVIDIA H200"))
WIDE, FLAT, SHARED, PROMOTED = (128, 192), (64, 256), (128, 256), (128, 192, 2)


@pytest.mark.slow
def test_fit():
    """The constants are found under which nothing is lost; under the true ones nothing is."""
    assert max(tile_losses.losses(times_by(H200_BY_TIME), H200_BY_TIME).values()) == 0
    of_block = {**H200_BY_TIME.of_block, WIDE: (1.1, 1.06), FLAT: (1.2, 0.95)}
    times = times_by(dataclasses.replace(H200_BY_TIME, of_block=of_block, load=5.0))
    assert statistics.mean(tile_losses.losses(times, H200_BY_TIME).values()) > 0.02
    fitted = tile_losses.fit(times, H200_BY_TIME, moves=200)
    assert statistics.mean(tile_losses.losses(times, fitted).values()) < 0.002
    assert fitted.of_block[128, 128][1] == fitted.with_long_epilogue[128, 128] == 1
    of_tiles = {name: of for name, of in vars(H200_BY_TIME).items() if isinstance(of, dict)}
    of_others = {
        name: {tile: of[tile] for tile in of if tile not in (SHARED, PROMOTED)} for name, of in of_tiles.items()
    }
    without = dataclasses.replace(H200_BY_TIME, **of_others)
    assert {config.tile.size for of in times.values() for config in of} > set(without.of_block)
    assert set(tile_losses.fit(times, without, rounds=1, moves=0).of_block) == set(without.of_block)
    assert tile_losses.shown(fitted).startswith("Constants(\n    of_block={(128, 128): (")


def rows_of(times):
    return [
        {**vars(shape), **vars(config), "us": us, "us_even": us, "us_odd": us, "device": "NVIDIA H200"}
        for shape, of in times.items()
        for config, us in of.items()
    ]


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_read_alone(tmp_path, monkeypatch, capsys):
    """Report, table and picture from the file; the table has the shapes that lose more than 4 %, and the best tiles."""
    of_block = {**H200_BY_TIME.of_block, FLAT: (1.0, 0.9)}
    times = times_by(dataclasses.replace(H200_BY_TIME, of_block=of_block), [1024])
    path = tmp_path / "nvidia_h200_tiles.csv"
    written(path, rows_of(times))
    monkeypatch.setattr(tile_table, "SHIPPED", tmp_path)
    assert tiles.main([f"--out={tmp_path}", "--report", "--table"]) == 0
    constants = constants_for("NVIDIA H200")
    lost = {}
    for shape, of in times.items():
        energy, first = tune.energies(shape.problem.shape, of, constants), tile_losses.chosen(shape, of, constants)
        best = min(of, key=lambda config: energy[config] * of[config])
        if min(energy[first] / energy[best], of[first] / of[best]) > 1.04 and shape.k <= 8192:
            lost[shape] = best, of[best], of[first]
    entries = tile_table.read(tmp_path / "nvidia_h200.json")["NVIDIA H200"]
    assert set(entries) == {shape.problem.key for shape in lost} and 0 < len(lost) < len(times)
    for shape, (best, us, cost_model_us) in lost.items():
        entry = entries[shape.problem.key]
        assert (entry["config"]["tile_m"], entry["config"]["tile_n"]) == FLAT == best.tile.size
        assert (entry["us"], entry["cost_model_us"]) == pytest.approx((us, cost_model_us), abs=0.01)
    worst = max(tile_losses.losses(times, H200_BY_TIME).values())
    assert f"{worst:6.1%}" in capsys.readouterr().out
    (axes,) = plots.tiles(path).axes
    line = next(line for line in axes.lines if line.get_label().startswith("all"))
    assert np.all(np.diff(line.get_xdata()) >= 0) and line.get_ydata()[-1] == 100
    assert line.get_xdata()[-1] == pytest.approx(100 * worst, abs=0.1)
    assert plots.main([f"--results={tmp_path}"]) == 0 and (tmp_path / "nvidia_h200_tiles.png").stat().st_size > 0
    plots.plt.close("all")
    other = "NVIDIA H100 80GB HBM3"
    (tmp_path / "b_tiles.csv").write_text(path.read_text().replace("NVIDIA H200", other))
    assert tiles.main([f"--out={tmp_path}", "--report"]) == 0
    assert f"{other}, b_tiles.csv" in (shown := capsys.readouterr().out) and f"NVIDIA H200, {path.name}" in shown
    with pytest.raises(SystemExit):
        tiles.main([f"--out={tmp_path / 'empty'}", "--report"])
    (tmp_path / "b_tiles.csv").write_text("kind\n")
    with pytest.raises(ValueError, match="no file of"):
        tile_losses.read(tmp_path / "b_tiles.csv")
