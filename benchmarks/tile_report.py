"""The report's tables of tiles: how often each is the best, and what the cost model's choices lose."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.lab import tile_losses
from benchmarks.markdown import grouped, table
from coda_jax.tiles.constants import by_time, constants_for


def at_one_clock(path: pathlib.Path) -> str:
    """The tables of a file of `benchmarks.lab.tiles`."""
    device, times = tile_losses.read(path)
    constants = constants_for(device)
    found = tile_losses.by_program(tile_losses.losses(times, by_time(constants)))
    found["all, by energy times time"] = list(tile_losses.losses(times, constants).values())
    found["all, by every second round"] = tile_losses.repeated(path)
    text = (
        "What the cost model's choice by time takes more than the best tile measured. The last row is the best tile "
        "by the even rounds, judged by the odd ones: no choice can do better.\n\n"
    )
    return f"{text}{_losses(found)}\n{_tiles(times)}"


def alone(path: pathlib.Path) -> str:
    """The tables of a file of `benchmarks.lab.tiles_energy`."""
    device, joules = tile_losses.read(path, "joules")
    _, seconds = tile_losses.read(path, "seconds")
    constants = constants_for(device)
    found = {
        "time, chosen by energy times time": tile_losses.losses(seconds, constants),
        "energy, chosen by energy times time": tile_losses.losses(joules, constants),
        "time, chosen by time": tile_losses.losses(seconds, by_time(constants)),
    }
    text = (
        "What the cost model's choices take more than the best tile measured, each tile alone at the power limit.\n\n"
    )
    return f"{text}{_losses({name: list(of.values()) for name, of in found.items()})}\n{_tiles(seconds)}"


def _losses(found: Mapping[str, Sequence[float]]) -> str:
    lines = []
    for name, of in found.items():
        close = sum(loss <= tile_losses.CLOSE for loss in of) / len(of)
        lines.append(
            [name, str(len(of)), f"{close:.1%}", f"{statistics.mean(of):.2%}", f"{max(of):.1%}"],
        )
    return table(["epilogue, layout", "shapes", "within 2 %", "mean loss", "worst"], lines)


def _tiles(times: tile_losses.Times) -> str:
    """How often each tile is the best; its time over the best one's."""
    over = [
        ((tiling.tile_m, tiling.tile_n), us / min(of.values())) for of in times.values() for tiling, us in of.items()
    ]
    lines = []
    for (m, n), of in sorted(grouped(over, lambda one: one[0]).items()):
        ratios = [ratio for _, ratio in of]
        best = sum(ratio == 1 for ratio in ratios)
        lines.append([f"{m} x {n}", str(len(ratios)), str(best), f"{statistics.median(ratios):.3f}"])
    return table(["tile", "measured", "the best", "median of time over the best"], lines)
