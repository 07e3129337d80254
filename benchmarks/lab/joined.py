"""`python -m benchmarks.lab.joined`: what a training step gains if products that read the same array are one product.

Value and gradient of Llama blocks in plain JAX under `coda.fuse`, as `jax.grad(coda.fuse(loss))`, at the sizes of
`benchmarks.fused_models`. The variants differ in the arrays that hold the weights, and in nothing else:

    separate      q, k, v, gate and up have an array each: seven products a layer forward, fourteen backward
    gate_up       gate and up are one array (D, 2 F): six and twelve
    qkv           q, k and v are one array (D, (H + 2 Hkv) Dh): five and ten
    both          both are joined: four and eight
    both_copied   parameters and gradients as "separate", which the step joins, and takes apart, in front of the blocks

Each variant takes its parameters, and returns their gradients, as it has them. So the first four copy no weights, and
what they save is the most that joining may gain; the last has the copies. All losses and gradients are compared with
those of plain JAX first. The variants run in a random order in each round. Times are the profiler's, of all kernels of
a step, without a GPU the wall clock's; what is saved is the median of the rounds' differences, with their quartiles.
Expected times are those of `coda.explain`, of products and passes, without attention. Writes
benchmarks/results/<device>_joined.csv: a row a variant and a row a class of kernels.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import compare, fused_models, hlo, results, timing, unmodified
from benchmarks.train_step import Measured, Step, compile_steps, run_interleaved, use_whole_gpu
from benchmarks.unmodified import Params, Sizes
from benchmarks.variants import Variant
from coda_jax.tools.tune import relative_medians


class Layout(NamedTuple):
    """The weights of a layer that are one array, and whether the step makes it of several."""

    gate_up: bool = False
    qkv: bool = False
    is_copied: bool = False


LAYOUTS = {
    "separate": Layout(),
    "gate_up": Layout(gate_up=True),
    "qkv": Layout(qkv=True),
    "both": Layout(gate_up=True, qkv=True),
    "both_copied": Layout(gate_up=True, qkv=True, is_copied=True),
}
PARTS = ("forward", "backward", "attention", "rest")


def join_weights(w: Params, layout: Layout) -> Params:
    """A layer's parameters in a layout, from those with an array for each weight."""
    return unmodified.join_weights(w, qkv=layout.qkv, gate_up=layout.gate_up)


def functions(sizes: Sizes) -> dict[str, Callable[..., Any]]:
    """Value and gradient: of plain JAX, and of each layout."""
    loss = fused_models.loss_of(unmodified.llama(sizes, jnp.bfloat16).apply)
    fused = coda.fuse(loss)

    def copied(layers: Sequence[Params], x: jax.Array) -> Any:
        return fused([join_weights(w, LAYOUTS["both_copied"]) for w in layers], x)

    each = {name: copied if layout.is_copied else fused for name, layout in LAYOUTS.items()}
    return {name: jax.value_and_grad(f, (0, 1)) for name, f in ({"plain": loss} | each).items()}


def arguments_of(name: str, layers: Sequence[Params], x: jax.Array) -> tuple[Any, ...]:
    """The arguments of a variant, from those of plain JAX."""
    layout = LAYOUTS.get(name, Layout())
    return (list(layers) if layout.is_copied else [join_weights(w, layout) for w in layers]), x


def steps(sizes: Sizes, arguments: tuple[Any, ...]) -> Iterator[Step]:
    for name, function in functions(sizes).items():

        def step(*given: Any, function: Callable[..., Any] = function) -> Any:
            return function(*given)

        step.__name__ = name  # timing.executions tells variants apart by it
        yield Step(name, Variant(fused=name in LAYOUTS), jax.jit(step), arguments_of(name, *arguments))


def check(measured: Sequence[Measured], sizes: Sizes, dtype: str) -> None:
    """Runs each variant once, and compares with the first, plain JAX."""
    expected: Any = None
    for one in measured:
        loss, (layers, dx) = jax.block_until_ready(one.call())
        gradient = [unmodified.split_weights(w, sizes) for w in layers], dx
        one.loss, expected = float(loss), (float(loss), gradient) if expected is None else expected
        one.distance = compare.distance(gradient, expected[1])
        limits = fused_models.LOSS_RTOL[dtype], fused_models.GRADIENT_RTOL[dtype]
        one.judge(expected[0], measured[0].name, loss_rtol=limits[0], gradient_rtol=limits[1])
        if one.failure:
            raise AssertionError(f"{one.name}: {one.failure}")


def counted(sizes: Sizes, arguments: tuple[Any, ...], device: str) -> Iterator[dict[str, Any]]:
    """The counts of `coda.explain` for each layout, by the shapes of its arguments."""
    for name, function in functions(sizes).items():
        if name not in LAYOUTS:
            continue
        types = jax.eval_shape(lambda *x, name=name: arguments_of(name, *x), *arguments)
        explained = coda.explain(function, *types, platform="cuda", device=device)
        moved = dict.fromkeys(PARTS, 0)
        for product, count in explained.products.items():
            moved[part_of(f"coda: {product.epilogue}")] += product.cost.bytes * count if product.cost else 0
        totals = explained.totals
        yield {
            "variant": name,
            "products": explained.kernels,
            "forward_mb": round(moved["forward"] / 1e6, 1),
            "backward_mb": round(moved["backward"] / 1e6, 1),
            "passes": sum(explained.passes.values()),
            "passes_mb": round(totals.passes_bytes / 1e6, 1),
            "kept_mb": round(totals.kept_bytes / 1e6, 1),
            "expected_ms": round(totals.products_ms + (totals.passes_ms or 0.0), 2),
        }


def part_of(kind: str) -> str:
    """The part of a step that a class of kernels, of `train_step.kernel_class`, belongs to."""
    if re.match(r"coda: loss_\d", kind):
        return "forward"
    if re.match(r"coda: (loss_backward|gemm)", kind):  # a bare product is one without an epilogue of the backward pass
        return "backward"
    return "attention" if kind == hlo.ATTENTION else "rest"


def warm(measured: Sequence[Measured], seconds: float) -> None:
    """Runs all variants in turn, for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for one in measured:
            jax.block_until_ready(one.call())


def rows_of(measured: Sequence[Measured], counts: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of the CSV."""
    times = [[sum(kernel.duration for kernel in kernels) / 1e3 for kernels in one.executions] for one in measured]
    for one, median, of in zip(measured, relative_medians(times), times, strict=True):
        saved = [separate - us for separate, us in zip(times[0], of, strict=True)]
        low, middle, high = statistics.quantiles(saved, n=4)
        parts = dict.fromkeys(PARTS, 0.0)
        for kind, (ms, _) in one.profile().items():
            parts[part_of(kind)] += ms
        row = {"kind": "step", **counts[one.name], "loss": one.loss, "gradient_distance": one.distance}
        row |= {"temporaries_gib": round(one.memory_gib()["temporaries"], 3), "ms": median / 1e3, "rounds": len(of)}
        row |= {"saved_us": middle, "saved_low_us": low, "saved_high_us": high}
        yield row | {f"{part}_ms": ms for part, ms in parts.items()} | {"compile_s": round(one.compile_seconds, 1)}
    for one in measured:
        for kind, (ms, count) in one.profile().items():
            yield {"kind": "kernels", "variant": one.name, "class": kind, "ms": ms, "count": count}


COUNTS = (
    f"{'variant':14}{'products':>9}{'fwd MB':>9}{'bwd MB':>9}{'passes':>8}{'MB':>7}{'kept MB':>9}{'expected ms':>12}"
)
TIMES = f"{'ms':>9}{'saved us':>10}{'quartiles':>18}{'forward':>9}{'backward':>9}{'attention':>10}{'rest':>8}"


def show(row: Mapping[str, Any]) -> None:
    """Prints the line of a variant."""
    line = (
        f"{row['variant']:14}{row['products']:9}{row['forward_mb']:9.0f}{row['backward_mb']:9.0f}{row['passes']:8}"
        f"{row['passes_mb']:7.0f}{row['kept_mb']:9.0f}{row['expected_ms']:12.2f}"
    )
    if "ms" in row:
        quartiles = f"{row['saved_low_us']:.0f} to {row['saved_high_us']:.0f}"
        line += f"{row['ms']:9.3f}{row['saved_us']:10.0f}{quartiles:>18}{row['forward_ms']:9.3f}"
        line += f"{row['backward_ms']:9.3f}{row['attention_ms']:10.3f}{row['rest_ms']:8.3f}"
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.lab.joined", __doc__)
    parser.add_argument("--rounds", type=int, default=60, help="measured executions of each variant (default 60)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of execution before these (default 5)")
    parser.add_argument("--layers", type=int, help=f"default {fused_models.LARGE.layers}")
    parser.add_argument("--device", default="H100", help="of which times are expected (default H100)")
    parser.add_argument("--explain", action="store_true", help="counts alone, on any machine; nothing is written")
    parser.add_argument("--tiny", action="store_true", help="in float32, at sizes that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or (options.layers or 1) < 1:
        parser.error("--rounds must be at least 2, --layers at least 1")
    sizes = fused_models.TINY if options.tiny else fused_models.LARGE
    sizes = dataclasses.replace(sizes, layers=options.layers or sizes.layers)
    dtype = "float32" if options.tiny else "bfloat16"
    model = unmodified.llama(sizes, jnp.dtype(dtype))
    about = {name: getattr(sizes, name) for name in ("layers", "batch", "length", "width", "hidden")} | {"dtype": dtype}
    print(f"value and gradient of Llama blocks, {about}   [{timing.clock()}]", flush=True)
    counts = {
        row["variant"]: row for row in counted(sizes, jax.eval_shape(lambda: fused_models.made(model)), options.device)
    }
    print(COUNTS + ("" if options.explain else TIMES), flush=True)
    if options.explain:
        for row in counts.values():
            show(row)
        return 0
    measured = compile_steps(steps(sizes, jax.jit(lambda: fused_models.made(model))()))
    check(measured, sizes, dtype)
    fused = measured[1:]
    warm(fused, options.seconds)
    rows = [*rows_of(run_interleaved(fused, options.rounds), counts)]
    for row in rows:
        if row["kind"] == "step":
            show(row)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    results.write("_joined", columns, rows, folder=options.out, commit=options.commit, **about)
    return 0


if __name__ == "__main__":
    use_whole_gpu()
    sys.exit(main())
