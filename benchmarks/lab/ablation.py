"""`python -m benchmarks.lab.ablation`: what the parts of an epilogue cost, each as an epilogue of its own.

All parts of a program run in the tile that is chosen for the whole of it, and so does the bare product ("none").
Overheads are over the bare product in the tile that is chosen for that one, all at one clock. Beside them stands the
energy of moving a part's bytes to and from memory, beyond the product's own, as a share of the bare product's: each
byte costs what it costs a copy, and at the power limit energy is time. Everything is checked against XLA before it is
timed. Writes benchmarks/results/<device>_ablation.csv.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import cases, results, timing
from benchmarks.lab.energy import extra_bytes
from benchmarks.lab.tile_losses import Shape
from benchmarks.programs import PROGRAMS, Program, gated_backward, swiglu
from coda_jax.tiles.config import GemmConfig
from coda_jax.tiles.table import attached_device, config_for

# Of an H200 (`make lab-energy`, 2519ddb): joules for a byte that is copied, and watts at the power limit.
JOULES_OF_BYTE, WATTS = 116e-12, 690.0


def _backward(outputs: Sequence[int], acc: jax.Array, rstd: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
    whole = gated_backward(acc, rstd, z, activation=jax.nn.silu)
    return tuple(whole[i] for i in outputs)


def _thirds(acc: jax.Array, rstd: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jnp.split(acc * rstd, 3, axis=1))


def _part(of: str, epilogue: Callable[..., Any], operands: int, tiles: int = 1) -> Program:
    """With the first operands of that program, and so many tiles in bfloat16."""
    types = PROGRAMS[of].operand_types
    return dataclasses.replace(
        PROGRAMS[of],
        epilogue=epilogue,
        operand_types=lambda m, n: types(m, n)[:operands],
        out_dtypes=(jnp.bfloat16,) * tiles,
    )


def _maxima(acc: jax.Array, *, is_rounded: bool) -> tuple[jax.Array, jax.Array]:
    """A product and its rows' largest elements, of float32 numbers or of those that are stored."""
    z = acc.astype(jnp.bfloat16).astype(jnp.float32) if is_rounded else acc
    return z, jnp.max(z, axis=1)


def _one_position(m: int, n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Rotary's operands, with the tables of one row for all."""
    rstd, *tables = PROGRAMS["rotary_qkv"].operand_types(m, n)
    return (rstd, *(jax.ShapeDtypeStruct((1, table.shape[1]), table.dtype) for table in tables))


PARTS: dict[str, dict[str, Program]] = {
    "residual_sumsq": {
        "x": PROGRAMS["residual"],
        "row sums": _part("residual_sumsq", lambda acc: (acc, jnp.sum(acc * acc, axis=1)), 0),
        "maxima": _part("residual_sumsq", functools.partial(_maxima, is_rounded=False), 0),
        "maxima, rounded": _part("residual_sumsq", functools.partial(_maxima, is_rounded=True), 0),
    },
    "swiglu": {
        "z": _part("swiglu", lambda acc, rstd: acc * rstd, 1),
        "y": _part("swiglu", functools.partial(swiglu, keep=False), 1),
    },
    "gated_backward": {
        "dz": _part("gated_backward", functools.partial(_backward, [0]), 2),
        "dz, y": _part("gated_backward", functools.partial(_backward, [0, 1]), 2, tiles=2),
        "dz, row sums": _part("gated_backward", functools.partial(_backward, [0, 2]), 2),
    },
    "column_sum": {
        "bias": _part("column_sum", lambda acc, bias: acc + bias, 1),
        "sums": _part("column_sum", lambda acc: (acc, jnp.sum(acc, axis=0)), 0),
    },
    "rotary_qkv": {
        "row scale, q, k, v": _part("rotary_qkv", _thirds, 1, tiles=3),
        "one row's tables": dataclasses.replace(PROGRAMS["rotary_qkv"], operand_types=_one_position),
    },
}


def chosen_tile(name: str, m: int, n: int, k: int) -> GemmConfig:
    """The tile of the whole program."""
    config, _ = config_for(Shape(name, "NT", m, n, k).problem, None, attached_device())
    return GemmConfig(tile_m=config.tile_m, tile_n=config.tile_n)


def measure(setting: cases.Setting, timer: Callable[..., Any]) -> list[dict[str, Any]]:
    rows = []
    print(f"{'program':16}{'m':>7}{'n':>7}{'k':>7}  {'part':20}{'us':>10}{'overhead':>10}{'MB':>8}{'copied':>8}")
    for name, m, n, k in setting.epilogues:
        if name not in PARTS:
            continue
        programs: dict[str, Program] = {"none": PROGRAMS["identity"], **PARTS[name], "all": PROGRAMS[name]}
        config = chosen_tile(name, m, n, k)
        calls = cases.part_calls(programs, m, n, k, config, setting.gemm, setting.cache_bytes)
        times = timer(calls)
        bare = times["bare"].longest
        for part, program in programs.items():
            us, moved = times[cases.label(part)].longest, extra_bytes(program, m, n)
            copied = JOULES_OF_BYTE * moved / (WATTS * 1e-6 * bare)
            about = {"program": name, "m": m, "n": n, "k": k, "part": part, "bare": bare, "kernel": us}
            rows.append({**about, "price": us / bare - 1, "extra_bytes": moved, "copied": copied})
            shown = f"{us:10.1f}{us / bare - 1:10.1%}{moved / 1e6:8.0f}{copied:8.1%}"
            print(f"{name:16}{m:7}{n:7}{k:7}  {part:20}{shown}", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.lab.ablation", __doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="of measured execution for each program")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    options = parser.parse_args(arguments)
    rows = measure(cases.setting(options.tiny), functools.partial(timing.interleaved, seconds=options.seconds))
    columns = ["program", "m", "n", "k", "part", "bare", "kernel", "price", "extra_bytes", "copied"]
    results.write("_ablation", columns, rows, folder=options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
