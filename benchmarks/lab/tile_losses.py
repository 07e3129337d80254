"""The records of `make lab-tiles`, read again: how good the cost model's choice is, and how to better it."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import pathlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import programs
from coda_jax.epilogue import trace
from coda_jax.tiles import table as tile_table
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.choose import tiles_for
from coda_jax.tiles.config import GemmConfig, KernelConfig, TileShape
from coda_jax.tiles.constants import Constants, by_time, constants_for
from coda_jax.tiles.cost_model import GemmShape, best_first, cost, may_split
from coda_jax.tiles.table import Problem
from coda_jax.tiles.traffic import EpilogueTraffic, element_traffic
from coda_jax.tools.tune import energies

KINDS = (*SM90.tiles, *((*tile, SM90.consumers) for tile in SM90.either_way_tiles))  # `TileShape.kind`
FIELDS = [field.name for field in dataclasses.fields(GemmConfig)]
CLOSE = 0.02  # loss of the cost model's choice up to which it counts as right
# Of a fit: what it counts of a larger loss, its steps, and what it leaves alone: units, and what no program tells.
LARGE = 0.15
STEPS = (-0.1, -0.05, -0.02, -0.01, 0.01, 0.02, 0.05, 0.1)
SIZES = (0.01, 0.03, 0.1, 0.25)  # of moves at random, in the logarithm
HELD = {
    ("of_block", (128, 128), 1),
    ("with_long_epilogue", (128, 128)),
    ("cooperative_column_reduction",),
    ("cooperative_heads",),
    ("memory",),
}
# From which a shape is entered in the library's table, and the k up to which: beyond it the time of one and the same
# kernel differs by more from one compilation to the next (AGENTS.md).
WORTH_AN_ENTRY, LARGEST_K = 0.04, 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product: its program in `programs.PROGRAMS`, how a and b are stored ("N" or "T" each), and its sizes."""

    program: str
    layout: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.program} {self.layout} {self.m}, {self.n}, {self.k}"

    @property
    def transposes(self) -> tuple[bool, bool]:
        transpose_a, transpose_b = (letter == "T" for letter in self.layout)
        return transpose_a, transpose_b

    @property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of a, b and the epilogue's operands."""
        transpose_a, transpose_b = self.transposes
        a = (self.k, self.m) if transpose_a else (self.m, self.k)
        b = (self.n, self.k) if transpose_b else (self.k, self.n)
        factors = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (a, b))
        return (*factors, *programs.PROGRAMS[self.program].operand_types(self.m, self.n))

    @property
    def problem(self) -> Problem:
        """As the lowering and its tables know it."""
        transpose_a, transpose_b = self.transposes
        shape = GemmShape(self.m, self.n, self.k, transpose_b=transpose_b)
        dtypes = tuple(map(np.dtype, programs.PROGRAMS[self.program].out_dtypes))
        batched = (False,) * len(self.types)
        return Problem(shape, _traced(self.program), np.dtype(jnp.bfloat16), dtypes, transpose_a, batched)


@functools.cache
def _traced(name: str) -> Any:
    """The program, which is the same for all sizes."""
    program, (m, n) = programs.PROGRAMS[name], (256, 1536)
    acc = jax.ShapeDtypeStruct((m, n), jnp.float32)
    return trace(program.epilogue, acc, program.operand_types(m, n))[0].program


Times = Mapping[Shape, Mapping[KernelConfig, float]]  # microseconds, or what else was measured


def read(path: pathlib.Path, column: str = "us") -> tuple[str, dict[Shape, dict[KernelConfig, float]]]:
    """The device, and the times of each shape's configs: by all rounds, or those in another column of the file."""
    with path.open() as file:
        rows = [_of_record(row) | row for row in csv.DictReader(file)]
    if not rows or not {column, "layout", *FIELDS} <= rows[0].keys():
        raise ValueError(f"{path} is no file of `python -m benchmarks.lab.tiles` or tiles_energy with {column}")
    times: dict[Shape, dict[KernelConfig, float]] = {}
    for row in rows:
        shape = Shape(row["program"], row["layout"], *(int(row[name]) for name in "mnk"))
        config = KernelConfig(**{name: json.loads(row[name].lower()) for name in FIELDS})
        if not config.split_k or may_split(shape.problem.shape, config.tile):  # else it is noise beside whole tiles
            times.setdefault(shape, {})[config] = float(row[column])
    return rows[0]["device"], times


def _of_record(row: Mapping[str, str]) -> dict[str, str]:
    """The fields of a config that an older file lacks."""
    always = (int(row.get("tile_m", 0)), int(row.get("tile_n", 0))) in SM90.cooperative_tiles
    return {"column_passes": row.get("turns", "1"), "cooperative": str(always), "promote": "0"}


def chosen(shape: Shape, of: Mapping[KernelConfig, float], constants: Constants) -> KernelConfig | None:
    """The one of the measured configs that the cost model chooses."""
    for tile in tiles(shape, constants):
        fitting = [config for config in of if config.tile == tile]
        if fitting:  # else it has no room for the epilogue
            return fitting[0]
    return None


def tiles(shape: Shape, constants: Constants) -> list[TileShape]:
    """As the cost model orders them."""
    return tiles_for(shape.problem.shape, shape.problem.program, _traffic(shape.program), None, constants)


@functools.cache
def _traffic(name: str) -> EpilogueTraffic:
    return EpilogueTraffic.of(_traced(name), tuple(map(np.dtype, programs.PROGRAMS[name].out_dtypes)))


def losses(times: Times, constants: Constants) -> dict[Shape, float]:
    """The excess of the cost model's choice over the config that takes least, as a share of that, by shape."""
    found = {}
    for shape, of in times.items():
        config = chosen(shape, of, constants)
        if config is not None:
            found[shape] = of[config] / min(of.values()) - 1
    return found


def repeated(path: pathlib.Path) -> list[float]:
    """The loss by the odd rounds of each shape's best tile by the even ones: no choice can be told from it."""
    (_, even), (_, odd) = (read(path, column) for column in ("us_even", "us_odd"))
    return [odd[shape][min(of, key=of.__getitem__)] / min(odd[shape].values()) - 1 for shape, of in even.items()]


def summary(path: pathlib.Path) -> str:
    """A summary of the losses of the cost model's choices.

    By time, for each program and layout and for all; by default; and the ten worst by time.
    """
    device, times = read(path)
    constants = by_time(constants_for(device))
    found = losses(times, constants)
    if not found:
        return "no shape whose tiles were measured"
    others = {
        "all, by energy and delay": list(losses(times, constants_for(device)).values()),
        "even rounds choose": repeated(path),
    }
    lines = loss_lines("by time the cost model loses", {**by_program(found), **others})
    return "\n".join([*lines, "the ten worst:", *worst_lines(found, times, constants, 10)])


def loss_lines(title: str, found: Mapping[str, Sequence[float]]) -> list[str]:
    """A table: how good the cost model's choices are that have these losses."""
    lines = [f"{title:28}{'shapes':>8}{'within 2 %':>12}{'mean loss':>11}{'worst':>8}"]
    for name, of in found.items():
        share = sum(loss <= CLOSE for loss in of) / len(of)
        lines.append(f"{name:28}{len(of):8}{share:12.1%}{statistics.mean(of):11.2%}{max(of):8.1%}")
    return lines


def worst_lines(found: Mapping[Shape, float], times: Times, constants: Constants, count: int) -> list[str]:
    """The shapes that lose most, with what the choice and the best config take."""
    lines = []
    for shape, loss in sorted(found.items(), key=lambda item: -item[1])[:count]:
        us, config = times[shape], chosen(shape, times[shape], constants)
        assert config is not None
        best = min(us, key=us.__getitem__)
        lines.append(f"  {loss:6.1%}  {shape}: {_named(config)} {us[config]:.1f} us, {_named(best)} {us[best]:.1f} us")
    return lines


def _named(config: KernelConfig) -> str:
    return f"{config.name}, cluster of {config.cluster_m}:"


def fit(times: Times, start: Constants, *, rounds: int = 30, moves: int = 20_000) -> Constants:
    """The constants of the cost model with the least losses by time, as far as a search from `start` finds them.

    It changes one after the other by up to 10 % as long as that helps, and then, `moves` times, one to three of them at
    random, which is kept unless it is worse: on its own, each would stop at what a few shapes have in common. Counted
    are each shape's loss, up to 15 %, and 2 % more where it is more than 2 %: the order of tiles, not their times.
    Tiles that `start` does not have are left out.
    """
    names, first, structure = _flat(start)
    numbers: Sequence[float] = first
    searched = [i for i, name in enumerate(names) if name not in HELD and name[0] not in ("power", "idle")]
    of_shapes = []
    for shape, of in times.items():
        traffic = element_traffic(_traced(shape.program), _traffic(shape.program))
        known = {config.tile: us for config, us in of.items() if config.tile.kind in start.of_block}
        best = min(known.values())
        of_shapes.append((shape.problem.shape, traffic, [(tile, us / best - 1) for tile, us in known.items()]))

    def objective(numbers: Sequence[float]) -> float:
        by, total = by_time(Constants(**jax.tree.unflatten(structure, numbers))), 0.0
        for shape, traffic, of in of_shapes:
            _, loss = min((cost(shape, tile, traffic, by), loss) for tile, loss in of)
            total += min(loss, LARGE) + (CLOSE if loss > CLOSE else 0)
        return total / len(of_shapes)

    reached = objective(numbers)
    for _ in range(rounds):
        before = reached
        for i in searched:
            near = [[*numbers[:i], numbers[i] * (1 + step), *numbers[i + 1 :]] for step in STEPS]
            found, best = min((objective(point), point) for point in near)
            if found < reached - 1e-9:
                reached, numbers = found, best
        if reached == before:
            break
    chance = random.Random(0)
    for _ in range(moves):
        point, size = list(numbers), chance.choice(SIZES)
        for i in chance.sample(searched, chance.randint(1, 3)):
            point[i] *= math.exp(chance.gauss(0, size))
        if (found := objective(point)) <= reached:
            reached, numbers = found, point
    for i in searched if moves else ():  # what moved without need goes back, as far as it can
        for share in (1.0, 0.75, 0.5, 0.25):
            point = [*numbers[:i], numbers[i] ** (1 - share) * first[i] ** share, *numbers[i + 1 :]]
            if (found := objective(point)) <= reached:
                reached, numbers = found, point
                break
    return Constants(**jax.tree.unflatten(structure, [float(f"{number:.3g}") for number in numbers]))


def _flat(constants: Constants) -> tuple[list[tuple[Any, ...]], list[float], Any]:
    """The path to each number, such as ("of_block", (128, 128), 1), the numbers, and a dict of fields as a pytree."""
    fields = {field.name: getattr(constants, field.name) for field in dataclasses.fields(constants)}
    found, structure = jax.tree.flatten_with_path(fields)
    paths = [tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path) for path, _ in found]
    return paths, [number for _, number in found], structure


def shown(constants: Constants) -> str:
    """As constants.py has them."""
    lines = []
    for field in dataclasses.fields(constants):
        of = getattr(constants, field.name)
        lines.append(
            f"    {field.name}={ {tile: of[tile] for tile in KINDS if tile in of} if isinstance(of, dict) else of },"
        )
    return "\n".join(["Constants(", *lines, ")"])


def table(times: Times, constants: Constants) -> dict[str, Any]:
    """Entries for the shapes with k up to 8192 where the cost model's choice loses more than 4 % both of time and of
    energy, by their keys. None where it would choose a tile that has not been measured.
    """
    entries = {}
    measured = {config.tile.kind for of in times.values() for config in of}
    for shape, of in times.items():
        config = chosen(shape, of, constants)
        if config is None or shape.k > LARGEST_K or tiles(shape, constants)[0].kind not in measured:
            continue
        energy = energies(shape.problem.shape, of, constants)
        best = best_first({one: (energy[one], us) for one, us in of.items()})[0]
        if min(each[config] / each[best] for each in (of, energy)) > 1 + WORTH_AN_ENTRY:
            key = shape.problem.key
            assert key is not None
            entries[key] = tile_table.entry(best, epilogue=shape.program, us=of[best], cost_model_us=of[config])
    return dict(sorted(entries.items()))


def by_program(found: Mapping[Shape, float]) -> dict[str, list[float]]:
    """Losses in ascending order, for each program and layout and for all shapes."""
    groups: dict[str, list[float]] = {}
    for shape, loss in found.items():
        groups.setdefault(f"{shape.program} {shape.layout}", []).append(loss)
    return {name: sorted(of) for name, of in [*sorted(groups.items()), ("all", found.values())]}
