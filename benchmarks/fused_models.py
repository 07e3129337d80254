"""`python -m benchmarks.fused_models`: value and gradient of models that have no line for coda_jax, and of `coda.fuse`.

Models in plain JAX (`benchmarks.unmodified`) and of the libraries that are installed (`benchmarks.library_models`), at
sizes of a 1B model. Each has these variants: the plain step; value_and_grad of the fused loss, "grad_of_fuse"; the
fused value_and_grad, "fuse_of_grad"; and for a Llama the blocks of flax_layers. Losses and gradients are compared
before anything is timed, and the variants run interleaved in one process. Times are the profiler's, of all kernels of
a step; without a GPU the wall clock's. Beside them: XLA's temporaries, which products are coda_jax's, and what
`coda.explain` says is left to XLA and kept. Writes benchmarks/results/<device>_fused_models.csv: a row a variant and
a row a class of kernels.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import compare, library_models, results, timing, unmodified
from benchmarks.train_step import Measured, Step, compile_steps, run_interleaved, use_whole_gpu
from benchmarks.unmodified import Model, Params, Sizes
from benchmarks.variants import Variant

LARGE = Sizes(layers=2, batch=16, length=1024, width=2048, hidden=8192, heads=32, kv_heads=8, patch=16, vocabulary=1000)
TINY = Sizes(layers=2, batch=2, length=24, width=64, hidden=96, heads=4, kv_heads=2, patch=4, vocabulary=40)
MODELS = unmodified.MODELS | library_models.MODELS
LOSS_RTOL, GRADIENT_RTOL = {"float32": 1e-5, "bfloat16": 3e-3}, {"float32": 1e-5, "bfloat16": 0.1}


def absent(name: str) -> str:
    """The package of a model that is not installed, if one is not."""
    module, package = library_models.PACKAGES.get(name, ("jax", "jax"))
    try:
        return "" if importlib.util.find_spec(module) else package
    except ModuleNotFoundError:  # what the module is in is not there
        return package


def loss_of(apply: unmodified.Apply, has_loss: bool = False) -> Callable[[Params, jax.Array], jax.Array]:
    """The mean square of a model's result, with other weights for each column: no gradient is that of a constant.

    The model itself where its result is the loss.
    """
    if has_loss:
        return apply

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        y = apply(params, batch).astype(jnp.float32)
        return jnp.mean(jnp.square(y * (1 + jnp.arange(y.shape[-1]) / y.shape[-1])))

    return loss


def functions(model: Model) -> dict[str, Callable[..., Any]]:
    """Value and gradient of each variant."""
    of = (0, 1) if model.is_inner else (0,)
    loss = loss_of(model.apply, model.has_loss)
    found = {
        "plain": jax.value_and_grad(loss, of),
        "grad_of_fuse": jax.value_and_grad(coda.fuse(loss), of),
        "fuse_of_grad": coda.fuse(jax.value_and_grad(loss, of)),
    }
    if model.peer is not None:
        found["flax_layers"] = jax.value_and_grad(loss_of(model.peer.apply), of)
    return found


def arguments_of(model: Model, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if name != "flax_layers" or model.peer is None:
        return arguments
    return model.peer.parameters(arguments[0]), arguments[1]


def made(model: Model) -> tuple[Params, jax.Array]:
    """Parameters and a batch."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"))  # the generator that XLA compiles in no time
    return model.init(keys[0]), model.batch(keys[1])


def steps(model: Model, arguments: tuple[Any, ...]) -> Iterator[Step]:
    for name, function in functions(model).items():

        def step(*given: Any, function: Callable[..., Any] = function) -> Any:
            return function(*given)

        step.__name__ = name  # timing.executions tells variants apart by it
        variant = Variant(fused=name == "flax_layers")
        yield Step(name, variant, jax.jit(step), arguments_of(model, name, arguments))


def check(measured: Sequence[Measured], model: Model, dtype: str) -> None:
    """Runs every variant once and compares with the first, the plain one; notes losses and failures."""
    expected: Any = None
    for one in measured:
        if one.failure:
            continue
        with one.noting_lack_of_memory():
            loss, gradient = jax.block_until_ready(one.call())
        if one.failure:
            continue
        if one.variant.fused and model.peer is not None:
            gradient = model.peer.plain(gradient[0]), *gradient[1:]
        one.loss, expected = float(loss), (float(loss), gradient) if expected is None else expected
        one.distance = compare.distance(gradient, expected[1], floor=1e-2)
        one.judge(expected[0], measured[0].name, loss_rtol=LOSS_RTOL[dtype], gradient_rtol=GRADIENT_RTOL[dtype])
        del gradient


def counted(model: Model, arguments: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The counts that `coda.explain` gives of each variant, by the shapes of its arguments."""
    for name, function in functions(model).items():
        types = jax.eval_shape(lambda *x, name=name: arguments_of(model, name, x), *arguments)
        explained = coda.explain(function, *types, platform="cuda")
        ours, totals = sum(explained.products.values()), explained.totals
        yield {
            "variant": name,
            "fused_products": ours,
            "products": ours + sum(explained.other_products.values()),
            "passes": sum(explained.passes.values()),
            "passes_mb": round(totals.passes_bytes / 1e6, 1),
            "kept_mb": round(totals.kept_bytes / 1e6, 1),
        }


def left(model: Model, arguments: tuple[Any, ...]) -> dict[str, int]:
    """The reasons why products of the loss are not coda_jax's, with how many have each."""
    report = coda.fuse.report(loss_of(model.apply, model.has_loss), *arguments)
    return dict(collections.Counter(one.reason for one in report.products if one.reason))


def rows_of(name: str, measured: Sequence[Measured], counts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the CSV."""
    timed = {one.name: one.milliseconds() for one in measured if one.executions}
    rows: list[dict[str, Any]] = []
    for one in measured:
        row = {"kind": "step", "model": name, **counts[one.name], "loss": one.loss, "gradient_distance": one.distance}
        row |= {f"{kind}_gib": round(size, 3) for kind, size in one.memory_gib().items()}
        if one.name in timed:
            row |= {"ms": timed[one.name], "ratio": timed.get("plain", float("nan")) / timed[one.name]}
        rows.append(row | {"compile_s": round(one.compile_seconds, 1), "failure": one.failure})
    for one in measured:
        for kind, (ms, count) in one.profile().items() if one.executions else ():
            rows.append(
                {"kind": "kernels", "model": name, "variant": one.name, "class": kind, "ms": ms, "count": count}
            )
    return rows


HEADINGS = (
    f"{'model':20}{'variant':14}{'ms':>9}{'plain/it':>9}{'temp GiB':>10}{'products':>10}{'passes':>8}{'MB':>9}"
    f"{'kept MB':>9}{'gradient':>10}"
)


def show(row: Mapping[str, Any]) -> None:
    """Prints the line of a variant."""
    time = f"{row['ms']:9.2f}{row['ratio']:9.3f}" if "ms" in row else " " * 18
    memory = f"{row['temporaries_gib']:10.2f}" if "temporaries_gib" in row else " " * 10
    products = f"{row['fused_products']}/{row['products']}"
    distance = f"{row['gradient_distance']:10.1e}" if "gradient_distance" in row else ""
    print(
        f"{row['model']:20}{row['variant']:14}{time}{memory}{products:>10}{row['passes']:8}{row['passes_mb']:9.0f}"
        f"{row['kept_mb']:9.0f}{distance}  {row.get('failure', '')}",
        flush=True,
    )


def run(name: str, sizes: Sizes, dtype: str, *, repeats: int, explain: bool) -> list[dict[str, Any]]:
    """Measures a model, or counts alone; prints a line a variant and returns the rows of the CSV."""
    model = MODELS[name](sizes, jnp.dtype(dtype))
    shapes = jax.eval_shape(lambda: made(model))
    counts = {row["variant"]: row for row in counted(model, shapes)}
    if explain:
        rows = [{"kind": "counts", "model": name, **row} for row in counts.values()]
    else:
        measured = compile_steps(steps(model, jax.jit(lambda: made(model))()))
        check(measured, model, dtype)
        run_interleaved(measured, repeats)
        rows = rows_of(name, measured, counts)
    for row in rows:
        if row["kind"] != "kernels":
            show(row)
    if explain:
        for reason, count in left(model, shapes).items():
            print(f"{'':20}left, {count}: {reason}", flush=True)
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser("benchmarks.fused_models", __doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], metavar="MODEL")
    parser.add_argument("--repeats", type=int, default=10, help="measured executions of each variant (default 10)")
    for name in ("layers", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, help=f"default {getattr(LARGE, name)}")
    parser.add_argument("--explain", action="store_true", help="counts alone, on any machine; nothing is written")
    parser.add_argument("--tiny", action="store_true", help="in float32, at sizes that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.layers or 1, options.batch or 1, options.length or 1) < 1:
        parser.error("--repeats, --layers, --batch and --length must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a variant's results are wrong."""
    options = parse(arguments)
    given = {name: getattr(options, name) for name in ("layers", "batch", "length") if getattr(options, name)}
    sizes = dataclasses.replace(TINY if options.tiny else LARGE, **given)
    dtype = "float32" if options.tiny else "bfloat16"
    about = {name: getattr(sizes, name) for name in ("layers", "batch", "length", "width", "hidden")} | {"dtype": dtype}
    print(f"value and gradient of a loss, {about}   [{timing.clock()}]\n{HEADINGS}", flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        if package := absent(name):
            print(f"{name:20}skipped: {package} is not installed", flush=True)
            continue
        try:
            rows += run(name, sizes, dtype, repeats=options.repeats, explain=options.explain)
        except Exception as error:  # the other models are measured all the same
            traceback.print_exc()
            failure = f"wrong: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            rows.append({"kind": "step", "model": name, "failure": failure})
    if not options.explain:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        results.write("_fused_models", columns, rows, folder=options.out, commit=options.commit, **about)
    return int(any(row.get("failure", "").startswith("wrong") for row in rows))


if __name__ == "__main__":
    use_whole_gpu()
    sys.exit(main())
