"""`make lab-tiles_energy`: what a product takes in each tile by itself, in energy and time.

Shapes of real models as in `make lab-tiles`, those that fill the chip for a tenth of a millisecond or more, in random
order; of the tiles those that may be the best, the others in some shapes (`SELDOM`). A tile runs back to back, at the
clock that its own power leaves it, while the device's counter runs: this is what it costs in training at the power
limit, where `benchmarks.lab.tiles` compares at one clock. All tiles come to the same power, so that energy shows in the
time too, and better: in a third of a second the counter errs by several percent.
Writes benchmarks/results/<device>_tiles_energy.csv, a row a shape and tile. `--report` says from that file alone what
the cost model's choice takes more than the best tile measured.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import results, timing
from benchmarks.alone import device_counter, executed
from benchmarks.lab import tile_losses, tiles
from benchmarks.lab.tile_losses import Shape
from coda_jax.tiles.config import KernelConfig
from coda_jax.tiles.constants import by_time, constants_for

FLOPS = (7e10, 2.5e12)  # of a product: long enough to be measured, short enough for many of them
MOST_BYTES, MOST_K = 3e9, 32768
SELDOM = {(64, 256): 3, (64, 128): 6}  # tiles that are seldom the best: in every so many shapes


def is_measured(shape: Shape) -> bool:
    least, most = FLOPS
    fits = 2 * timing.L2_BYTES < sum(tiles.array_bytes(shape)) < MOST_BYTES and shape.k <= MOST_K
    return fits and least < 2 * shape.m * shape.n * shape.k < most


def configs(number: int, one: tiles.Compiled) -> dict[str, KernelConfig]:
    """The configs of the number-th shape that are measured, in random order."""
    found = {name: config for name, config in one.configs.items() if number % SELDOM.get(config.tile.size, 1) == 0}
    return dict(random.sample(list(found.items()), len(found)))


def measure(
    ready: Sequence[tiles.Compiled], counter: Callable[[], float], seconds: float, budget: float
) -> Iterator[dict[str, Any]]:
    """Rows of as many shapes as the budget of seconds allows."""
    started = time.perf_counter()
    for number, one in enumerate(ready):
        arguments = one.make()
        calls = {name: functools.partial(one.calls[name], *arguments) for name in one.calls}
        if number == 0:  # a cold chip takes less
            executed(next(iter(calls.values())), counter, 4 * seconds)
        for name, config in configs(number, one).items():
            execution = executed(calls[name], counter, seconds)
            yield {**dataclasses.asdict(one.shape), **dataclasses.asdict(config), **execution._asdict()}
        if time.perf_counter() - started > budget:
            return


def summary(path: pathlib.Path) -> str:
    """A summary of the losses of the cost model's choices against the best tile measured.

    In time and in energy, and in time of its choices for one clock; the five worst in time; and, from the file of
    `benchmarks.lab.tiles` beside it, each tile's power.
    """
    device, joules = tile_losses.read(path, "joules")
    times = {
        shape: {config: 1e6 * seconds for config, seconds in of.items()}
        for shape, of in tile_losses.read(path, "seconds")[1].items()
    }
    constants = constants_for(device)
    lost = {
        "time": tile_losses.losses(times, constants),
        "energy": tile_losses.losses(joules, constants),
        "time, chosen by time": tile_losses.losses(times, by_time(constants)),
    }
    if not lost["time"]:
        return "no shape whose tiles were measured"
    lines = tile_losses.loss_lines("the cost model loses in", {name: list(of.values()) for name, of in lost.items()})
    lines += ["the five worst in time:", *tile_losses.worst_lines(lost["time"], times, constants, 5)]
    at_one_clock = path.with_name(path.name.replace("_tiles_energy", "_tiles"))
    if at_one_clock.exists():
        lines.append("time alone over that at one clock, to that of 128 x 128, median (shapes):")
        powers = relative_powers(times, tile_losses.read(at_one_clock)[1])
        lines += [f"  {m} x {n}: {statistics.median(of):.3f} ({len(of)})" for (m, n), of in powers.items()]
    return "\n".join(lines)


def relative_powers(alone: tile_losses.Times, at_one_clock: tile_losses.Times) -> dict[tuple[int, int], list[float]]:
    """The power of each tile, over that of 128 x 128, in each shape that both have: whole tiles in clusters of two."""
    found: dict[tuple[int, int], list[float]] = {}
    for shape in alone.keys() & at_one_clock.keys():
        both = [
            {config.tile.size: of[config] for config in of if config.cluster_m == 2 and not config.split_k}
            for of in (alone[shape], at_one_clock[shape])
        ]
        for tile in both[0].keys() & both[1].keys() - {(128, 128)}:
            ratio = [of[tile] / of[128, 128] for of in both if (128, 128) in of]
            if len(ratio) == 2:
                found.setdefault(tile, []).append(ratio[0] / ratio[1])
    return dict(sorted(found.items()))


def main(arguments: Sequence[str] | None = None, counter: Callable[[], float] | None = None) -> int:
    parser = results.parser("benchmarks.lab.tiles_energy", __doc__)
    parser.add_argument("--shapes", type=int, default=40, help="how many of the grid's, in random order")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of measuring, then no more are begun")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement")
    parser.add_argument("--seed", type=int, default=11, help="of the shapes' order")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    parser.add_argument("--report", action="store_true", help="how good the cost model's choices are in the CSVs")
    options = parser.parse_args(arguments)
    if options.report:
        found = sorted(options.out.glob("*_tiles_energy.csv"))
        if not found:
            parser.error(f"{options.out} has no file *_tiles_energy.csv")
        for path in found:
            print(f"{path.name}\n{summary(path)}")
        return 0
    grid = tiles.shapes(*((tiles.TINY_MODELS, tiles.TINY_TOKENS) if options.tiny else (tiles.MODELS, tiles.TOKENS)))
    grid = grid if options.tiny else [shape for shape in grid if is_measured(shape)]
    random.Random(options.seed).shuffle(grid)
    build = functools.partial(tiles.compiled, implementation="auto" if options.tiny else "cuda")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        ready = list(pool.map(build, range(options.shapes), grid))
    rows = list(measure(ready, counter or device_counter(), options.seconds, options.budget))
    columns = [*(field.name for field in dataclasses.fields(Shape)), *tile_losses.FIELDS, "joules", "seconds"]
    path = results.write("_tiles_energy", columns, rows, folder=options.out, commit=options.commit)
    print(summary(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
