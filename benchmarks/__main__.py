"""`python -m benchmarks`: the bare product against XLA's and other libraries', and what each epilogue adds to it.

Needs a Hopper GPU. Every row is checked for correctness before it is timed, and runs on as many sets of arguments in
turn as are twice the L2 cache. The peers are those of benchmarks/peers that are installed. Writes
benchmarks/results/<device>.csv.
"""

from __future__ import annotations

import datetime
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import cases, peers, programs, results, timing
from benchmarks.lab.machine_code import resource_usage
from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.constants import tiles_by

Timer = Callable[[Mapping[str, Callable[[], Any]]], dict[str, timing.Times]]


def main(arguments: Sequence[str] | None = None, modules: Sequence[str] = peers.MODULES) -> int:
    parser = results.parser("benchmarks", __doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="of measured execution for each row")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest after each round, against throttling")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    options = parser.parse_args(arguments)
    timer = functools.partial(timing.interleaved, seconds=options.seconds, pause=options.pause)
    beside = peers.available(modules)
    products, epilogues, gemm, cache_bytes = cases.setting(options.tiny)
    rows = _bare_products(timer, gemm, products, cache_bytes, beside)
    rows += _epilogue_overheads(timer, gemm, epilogues, cache_bytes)
    columns = [
        *("kind", "program", "m", "n", "k"),
        *("xla_product", "coda_product", "coda_by_time_product", *(f"{peer.name}_product" for peer in beside), "ratio"),
        *("bare", "kernel", "fused", "xla", "kernel_price", "price"),
    ]
    about = {"commit": options.commit, "pause": options.pause, "tiles_by": tiles_by()}
    about["peers"] = peers.versions(beside)
    results.write("_paused" if options.pause else "", columns, rows, folder=options.out, **about)
    if not options.tiny:
        _compile_report()
    return 0


def _bare_products(
    timer: Timer, gemm: Callable[..., Any], shapes: cases.Shapes, cache_bytes: float, beside: Sequence[peers.Peer]
) -> list[dict[str, Any]]:
    names = {"coda_product": "coda", "coda_by_time_product": "by time", **{peer.name: peer.name for peer in beside}}
    print(f"bare product, bf16, float32 accumulation, TFLOP/s   [{timing.clock()}]")
    print("by time: coda's in the tile of least time at one clock (CODA_JAX_TILES_BY=time)")
    titles = "".join(f"{title:>{len(title) + 2}}" for title in names.values())
    print(f"{'layout':16}{'m':>7}{'n':>7}{'k':>7}{'XLA':>6}{titles}  coda/XLA", flush=True)
    rows = []
    for layout, m, n, k in shapes:
        tiles = {"coda_product": None, "coda_by_time_product": cases.tile_by_time(layout, m, n, k)}
        calls = cases.product_calls(layout, m, n, k, tiles, gemm, cache_bytes, beside)
        us = {name: time.total for name, time in timer(calls).items()}
        tflops = {name: 2e-6 * m * n * k / time for name, time in us.items()}
        ratio = tflops["coda_product"] / tflops["xla_product"]
        row = {name if name.endswith("_product") else f"{name}_product": time for name, time in us.items()}
        rows.append(dict(kind="bare", program=layout, m=m, n=n, k=k, ratio=ratio, **row))
        shown = "".join(f"{tflops[name]:{len(title) + 2}.0f}" for name, title in names.items())
        print(f"{layout:16}{m:7}{n:7}{k:7}{tflops['xla_product']:6.0f}{shown}{ratio:10.3f}", flush=True)
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    print(f"geometric mean {mean:.3f}   [{timing.clock()}]\n")
    return rows


def _epilogue_overheads(
    timer: Timer, gemm: Callable[..., Any], shapes: cases.Shapes, cache_bytes: float
) -> list[dict[str, Any]]:
    print(f"epilogues: time over the bare product of the same shape   [{timing.clock()}]")
    print("kernel: the product with its epilogue; fused: with XLA's kernel that finishes reductions, if there are any")
    print(
        f"{'program':16}{'m':>7}{'n':>7}{'k':>7}{'bare us':>10}{'kernel us':>11}{'overhead':>10}"
        f"{'fused us':>10}{'overhead':>10}{'XLA us':>10}{'XLA/fused':>11}"
    )
    rows = []
    for name, m, n, k in shapes:
        calls = cases.epilogue_calls(name, m, n, k, gemm, cache_bytes)
        times = timer({one: calls[one] for one in ("bare", "fused")})
        bare_us, kernel_us, fused_us = times["bare"].total, times["fused"].longest, times["fused"].total
        overhead, kernel_overhead = fused_us / bare_us - 1, kernel_us / times["bare"].longest - 1
        # XLA's passes let the chip cool, so they are timed apart; their time as at the clock of the others.
        times = timer({one: calls[one] for one in ("fused", "xla")})
        xla_us = fused_us * times["xla"].total / times["fused"].total
        rows.append(
            {
                "kind": "epilogue",
                "program": name,
                "m": m,
                "n": n,
                "k": k,
                "bare": bare_us,
                "kernel": kernel_us,
                "fused": fused_us,
                "xla": xla_us,
                "price": overhead,  # the columns of the files of record
                "kernel_price": kernel_overhead,
            }
        )
        print(
            f"{name:16}{m:7}{n:7}{k:7}{bare_us:10.1f}{kernel_us:11.1f}{kernel_overhead:10.1%}"
            f"{fused_us:10.1f}{overhead:10.1%}{xla_us:10.1f}{xla_us / fused_us:11.2f}",
            flush=True,
        )
    print(f"[{timing.clock()}]\n")
    return rows


def _compile_report() -> None:
    """Compilation time, registers and spills of each program's kernel, compiled afresh."""
    print(f"{'program':24}{'NVRTC s':>9}{'registers':>11}{'spilled bytes':>15}")
    for name, program in programs.PROGRAMS.items():
        source = programs.kernel_source(program, m=4096, n=program.columns(4096), k=4096)
        compiled = ffi.compile(source + f"// compiled afresh {datetime.datetime.now()}\n", name, SM90.target)
        # NVRTC keeps what it has assembled, and then reports no registers, though warnings it repeats.
        usage = resource_usage(compiled.log) if " registers" in compiled.log else None
        found = f"{usage.registers:11}{usage.spilled_bytes:15}" if usage else f"{'-':>11}{'-':>15}"
        print(f"{name:24}{compiled.seconds:9.2f}{found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
