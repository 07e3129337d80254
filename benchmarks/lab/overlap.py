"""`python -m benchmarks.lab.overlap`: a product while a collective runs, and each alone, on all GPUs of this host.

The product is the gate and up projection of a Llama-3-8B with its SwiGLU, 16384 tokens a GPU; the collective gathers
the weights of one of its layers (218 M bfloat16), or sums their gradients in float32 by a reduce-scatter. Nothing ties
the two together, so XLA may run them side by side. NCCL reads NCCL_MAX_CTAS when it starts: each number of thread
blocks is a process of its own, `--ctas 0` leaves NCCL's default. `--yields` are values of `Arch.yield_nanoseconds`:
after so long a block of the product ends, with 0 at the product's end. Times are the wall clock's of programs back to
back, the variants interleaved, medians. Writes benchmarks/results/<device>_overlap.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from benchmarks import results, timing
from benchmarks.beside import kernels, overlap
from benchmarks.sharded_step import each_once, interleaved, yielding
from coda_jax.tiles.arch import SM90

TOKENS, WIDTH, FEATURES, LAYER = 16384, 4096, 14336, 218_112_000
P = PartitionSpec


def swiglu(acc: jax.Array) -> jax.Array:
    gate, up = jnp.split(acc, 2, axis=1)
    return jax.nn.silu(gate) * up


def fused(x: jax.Array, w: jax.Array) -> jax.Array:
    return coda.gemm(x, w, epilogue=swiglu)


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    return swiglu(x @ w)


def gather(weights: jax.Array) -> jax.Array:
    return jax.lax.all_gather(weights, "data", tiled=True)


def scatter(gradients: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(gradients, "data", tiled=True)


def programs(scale: int, yields: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Each alone, and each product beside each collective; sizes are divided by `scale`."""
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,))
    tokens, width, features = TOKENS // scale, WIDTH // scale, FEATURES // scale
    layer = LAYER // scale // (count * count) * (count * count)
    keys = jax.random.split(jax.random.key(0), 4)

    def placed(key: jax.Array, shape: tuple[int, ...], spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> jax.Array:
        make = jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=NamedSharding(mesh, spec))
        return make(key)

    x = placed(keys[0], (tokens * count, width), P("data"))
    w = placed(keys[1], (width, 2 * features), P())
    weights = placed(keys[2], (layer,), P("data"))
    gradients = placed(keys[3], (layer,), P(), jnp.float32)
    products = {f"coda {nanoseconds}": fused for nanoseconds in yields} | {"xla": plain}
    moves = {"gather": (gather, weights, P("data"), P()), "scatter": (scatter, gradients, P(), P("data"))}
    found: dict[str, Callable[[], Any]] = {}

    def add(name: str, function: Callable[..., Any], in_specs: Any, out_specs: Any, arguments: Sequence[Any]) -> None:
        on_parts = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        with yielding(int(name.split()[1]) if name.startswith("coda") else 0):
            compiled = jax.jit(on_parts).lower(*arguments).compile()
        found[name] = lambda: compiled(*arguments)

    for name, product in products.items():
        add(name, product, (P("data"), P()), P("data"), (x, w))
    for name, (move, array, of_array, of_result) in moves.items():
        add(name, move, of_array, of_result, (array,))
        for of_product, product in products.items():

            def both(x: Any, w: Any, y: Any, product: Any = product, move: Any = move) -> Any:
                return product(x, w), move(y)

            add(f"{of_product} and {name}", both, (P("data"), P(), of_array), (P("data"), of_result), (x, w, array))
    return found


def measure(scale: int, yields: Sequence[int], rounds: int, burst: int) -> list[dict[str, Any]]:
    """A row for each program: milliseconds, and what its profile says is exposed."""
    calls = programs(scale, yields)
    ms = interleaved(calls, rounds, burst)
    rows = []
    for name, call in calls.items():
        row: dict[str, Any] = {"program": name, "ms": ms[name]}
        longer = max(ms[part] for part in name.split(" and "))
        row["over_longer"] = ms[name] / longer
        if of_step := kernels(call):
            row |= {f"{field}_ms": value for field, value in overlap(of_step)._asdict().items()}
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.lab.overlap", __doc__)
    parser.add_argument("--ctas", default="0,8,4", help="values of NCCL_MAX_CTAS, 0 for NCCL's default")
    parser.add_argument("--yields", default=f"0,{SM90.yield_nanoseconds}", help="values of `Arch.yield_nanoseconds`")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds (default 12)")
    parser.add_argument("--burst", type=int, default=10, help="executions back to back (default 10)")
    parser.add_argument("--scale", type=int, default=1, help="what sizes are divided by, for a CPU")
    parser.add_argument("--one", type=pathlib.Path, help=argparse.SUPPRESS)  # a process's own file
    options = parser.parse_args(arguments)
    if options.one:
        rows = measure(options.scale, each_once(options.yields), options.rounds, options.burst)
        with options.one.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
        return 0
    found: list[dict[str, Any]] = []
    for ctas in options.ctas.split(","):
        environment = {key: value for key, value in os.environ.items() if key != "NCCL_MAX_CTAS"}
        environment |= {"NCCL_MAX_CTAS": ctas} if ctas != "0" else {}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rows.csv"
            sizes = [f"--{name}={getattr(options, name)}" for name in ("yields", "rounds", "burst", "scale")]
            command = [sys.executable, "-m", "benchmarks.lab.overlap", f"--one={path}", *sizes]
            subprocess.run(command, env=environment, check=True)
            with path.open(newline="") as file:
                rows: list[dict[str, Any]] = [{"nccl_max_ctas": ctas, **row} for row in csv.DictReader(file)]
        for row in rows:
            shown = "".join(f" {name} {float(row[name]):8.3f}" for name in row if name.endswith(("ms", "longer")))
            print(f"NCCL_MAX_CTAS {ctas:>2} {row['program']:24}{shown}", flush=True)
        found += rows
    print(f"[{timing.clock()}]")
    columns = list(dict.fromkeys(name for row in found for name in row))
    results.write("_overlap", columns, found, folder=options.out, commit=options.commit, devices=len(jax.devices()))
    return 0


def overlapping() -> None:
    """XLA's flag for computation beside collectives, before JAX starts its GPUs."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "latency_hiding_scheduler" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_latency_hiding_scheduler=true"


if __name__ == "__main__":
    overlapping()
    sys.exit(main())
