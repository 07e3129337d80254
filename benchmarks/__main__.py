"""`python -m benchmarks`: the bare product against XLA's, and the price of each epilogue over the bare product.

Needs a Hopper GPU. Every row is checked for correctness before it is timed. Writes benchmarks/results/<device>.csv.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import programs, results, timing
from coda_jax import ffi

Timer = Callable[[Mapping[str, Callable[[], Any]]], dict[str, timing.Times]]

# (layout, m, n, k); layout: how a and b are stored.
PRODUCTS = [
    ("A[M,K] B[N,K]", 16384, 2048, 2048),
    ("A[M,K] B[N,K]", 16384, 16384, 2048),
    ("A[M,K] B[N,K]", 16384, 2048, 8192),
    ("A[M,K] B[N,K]", 16384, 4096, 4096),
    ("A[M,K] B[K,N]", 16384, 4096, 4096),
    ("A[K,M] B[K,N]", 8192, 8192, 8192),
    ("A[K,M] B[K,N]", 2048, 2048, 16384),
]
# (program, m, n, k)
EPILOGUES = [
    (program, *shape)
    for program, shapes in (
        (
            "residual_sumsq",
            [(16384, 2048, 2048), (16384, 4096, 4096), (16384, 2048, 8192), (16384, 4096, 14336)],
        ),
        ("swiglu", [(16384, 16384, 2048), (16384, 28672, 4096)]),
        ("gated_backward", [(16384, 8192, 2048), (16384, 14336, 4096)]),
        ("norm_backward", [(16384, 2048, 16384), (16384, 4096, 28672)]),
        ("residual", [(16384, 2048, 2048), (16384, 4096, 4096)]),
        ("bias_gelu", [(16384, 8192, 2048), (16384, 16384, 4096)]),
        ("column_sum", [(16384, 2048, 2048), (16384, 4096, 4096)]),
    )
    for shape in shapes
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="of measured execution for each row")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest after each round, against throttling")
    parser.add_argument("--commit", default=results.commit(), help="written into the results")
    arguments = parser.parse_args()
    timer = functools.partial(timing.interleaved, seconds=arguments.seconds, pause=arguments.pause)
    rows = [*_bare_products(timer), *_epilogue_prices(timer)]
    columns = [
        *("kind", "program", "m", "n", "k"),
        *("xla_product", "coda_product", "ratio"),
        *("bare", "kernel", "fused", "xla", "kernel_price", "price"),
    ]
    suffix = "_paused" if arguments.pause else ""
    results.write(suffix, columns, rows, commit=arguments.commit, pause=arguments.pause)
    _compile_report()


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def _jitted(name, function):
    """jax.jit with the module name that `timing.interleaved` looks for."""
    function.__name__ = name
    return jax.jit(function)


def _bare_products(timer: Timer) -> list[dict]:
    print(f"bare product, bf16, float32 accumulation   [{timing.clock()}]")
    print(f"{'layout':16}{'m':>7}{'n':>7}{'k':>7}{'XLA':>10}{'coda':>10}   TFLOP/s  coda/XLA")
    rows = []
    for layout, m, n, k in PRODUCTS:
        transpose_a, transpose_b = layout.startswith("A[K,M]"), layout.endswith("B[N,K]")
        a = _normal(0, *((k, m) if transpose_a else (m, k)))
        b = _normal(1, *((n, k) if transpose_b else (k, n)))

        def coda_product(a, b, flags=(transpose_a, transpose_b)):
            return coda.gemm(a, b, transpose_a=flags[0], transpose_b=flags[1], implementation="cuda")

        def xla_product(a, b, flags=(transpose_a, transpose_b)):
            contract = ((0 if flags[0] else 1,), (1 if flags[1] else 0,))
            product = jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)
            return product.astype(jnp.bfloat16)

        ours, xla = _jitted("coda_product", coda_product), _jitted("xla_product", xla_product)
        programs.check(f"{layout} {m} {n} {k}", ours(a, b), xla(a, b))
        times = timer(
            {"coda_product": lambda f=ours, a=a, b=b: f(a, b), "xla_product": lambda f=xla, a=a, b=b: f(a, b)},
        )
        us = {name: time.total for name, time in times.items()}
        tflops = {name: 2e-6 * m * n * k / time for name, time in us.items()}
        ratio = tflops["coda_product"] / tflops["xla_product"]
        rows.append(dict(kind="bare", program=layout, m=m, n=n, k=k, ratio=ratio, **us))
        print(
            f"{layout:16}{m:7}{n:7}{k:7}{tflops['xla_product']:10.0f}{tflops['coda_product']:10.0f}{ratio:21.3f}",
            flush=True,
        )
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    print(f"geometric mean {mean:.3f}   [{timing.clock()}]\n")
    return rows


def _epilogue_prices(timer: Timer) -> list[dict]:
    print(f"epilogues: time over the bare product of the same shape   [{timing.clock()}]")
    print("kernel: the product with its epilogue; fused: with XLA's kernel that finishes reductions, if there are any")
    print(
        f"{'program':16}{'m':>7}{'n':>7}{'k':>7}{'bare us':>10}{'kernel us':>11}{'price':>8}"
        f"{'fused us':>10}{'price':>8}{'XLA us':>10}{'XLA/fused':>11}"
    )
    rows = []
    for name, m, n, k in EPILOGUES:
        program = programs.PROGRAMS[name]
        a, b = _normal(0, m, k), _normal(1, n, k) / jnp.bfloat16(math.sqrt(k))
        operands = program.operands(m, n)

        def bare(a, b):
            return coda.gemm(a, b, transpose_b=True, implementation="cuda")

        def fused(a, b, operands, program=program):
            return coda.gemm(a, b, *operands, epilogue=program.epilogue, transpose_b=True, implementation="cuda")

        def xla(a, b, operands, program=program):
            return coda.gemm(a, b, *operands, epilogue=program.epilogue, transpose_b=True, implementation="xla")

        bare, fused, xla = _jitted("bare", bare), _jitted("fused", fused), _jitted("xla", xla)
        programs.check(f"{name} {m} {n} {k}", fused(a, b, operands), xla(a, b, operands))
        times = timer(
            {
                "bare": lambda f=bare, a=a, b=b: f(a, b),
                "fused": lambda f=fused, a=a, b=b, o=operands: f(a, b, o),
                "xla": lambda f=xla, a=a, b=b, o=operands: f(a, b, o),
            },
        )
        bare_us, kernel_us = times["bare"].total, times["fused"].longest
        fused_us, xla_us = times["fused"].total, times["xla"].total
        price, kernel_price = fused_us / bare_us - 1, kernel_us / bare_us - 1
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
                "price": price,
                "kernel_price": kernel_price,
            }
        )
        print(
            f"{name:16}{m:7}{n:7}{k:7}{bare_us:10.1f}{kernel_us:11.1f}{kernel_price:8.1%}{fused_us:10.1f}{price:8.1%}"
            f"{xla_us:10.1f}{xla_us / fused_us:11.2f}",
            flush=True,
        )
    print(f"[{timing.clock()}]\n")
    return rows


def _compile_report() -> None:
    """Compilation time, registers and spills of each program's kernel, compiled afresh."""
    print(f"{'program':24}{'NVRTC s':>9}{'registers':>11}{'spilled bytes':>15}")
    for name, program in programs.PROGRAMS.items():
        source = programs.kernel_source(program, m=4096, n=program.columns(4096), k=4096)
        compiled = ffi.compile(source + f"// compiled afresh {datetime.datetime.now()}\n", name)
        # NVRTC keeps what it has assembled, and then reports nothing.
        usage = programs.resource_usage(compiled.log) if compiled.log else None
        found = f"{usage.registers:11}{usage.spilled_bytes:15}" if usage else f"{'-':>11}{'-':>15}"
        print(f"{name:24}{compiled.seconds:9.2f}{found}", flush=True)


if __name__ == "__main__":
    main()
