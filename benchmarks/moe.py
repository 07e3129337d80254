"""`python -m benchmarks.moe`: grouped products of mixtures of experts, ours beside XLA's and other libraries'.

Three parts, each with groups that are equal, drawn at random, and with one that has half of the rows:
products    each grouped product of an expert layer alone
experts     the experts' MLPs on rows that are sorted by expert: forward, and with all gradients
layer       the same from tokens and a router's choice: the sort, the gather of rows, the weighted sum

Everything is compared with group after group by XLA before it is timed. Times are the profiler's, of all kernels, the
variants interleaved in random order in one process. What takes ten times as long as our batched product is timed
apart, beside that product, and told at its clock. TFLOP/s count the rows that there are. A tile's speed is that of
whole tiles, over the same of `jax.vmap` of `coda.gemm` on equal groups ("coda_batched") in the same run: of products
that sum over rows, of k blocks. XLA's temporaries are those of `memory_analysis`; a program that does not fit the
device has them in the place of its time. Writes benchmarks/results/<device>_moe.csv.

`python -m benchmarks.moe tiles` times every tile on each single product, the fastest first, and writes
<device>_moe_tiles.csv.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import grouped, grouped_forms, peers, results, timing
from benchmarks.grouped import Case, Work
from benchmarks.grouped_forms import Form
from benchmarks.train_step import use_whole_gpu
from coda_jax.tiles.config import TILES, GemmConfig

PARTS = ("products", "experts", "layer")
REFERENCE = "coda_batched"
OURS = ("coda", "coda_mlp", REFERENCE)  # of which none may fail
SLOW = 10  # times the reference's time, from which a variant is timed apart
SLOW_ROUNDS = 5
RUN_AHEAD_BYTES = 2e8  # of results from which each execution is waited for: many at once would fill the memory
COLUMNS = (
    *("shape", "rows", "experts", "hidden", "intermediate", "kind", "largest", "part", "variant"),
    *("ms", "tflops", "tiles", "tile", "tile_work", "tile_speed", "temporaries_gib", "error", "failure", "includes"),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """What is computed on the arrays of a case, by every form.

    Attributes:
      name: in tables.
      flops: of the rows that there are.
      function: form -> f(*arrays, routing).
      arrays: all but the routing.
      routing: sizes of groups (G,) -> the last argument.
      tolerance: the largest error, in shares of the largest value of a result: one rounding to bfloat16, or several.
      product: whether it is a single product.
    """

    name: str
    flops: int
    function: Callable[[Form], Callable[..., Any]]
    arrays: Callable[[], Sequence[jax.Array]]
    routing: Callable[[np.ndarray], jax.Array]
    tolerance: float = 1e-2
    product: bool = False


Beside = Sequence[peers.GroupedPeer]


def _of_form(product: grouped.Product, form: Form) -> Callable[..., jax.Array]:
    return form.product(product)


def parts_of(case: Case, names: Sequence[str]) -> Iterator[Part]:
    if "products" in names:
        for name, product in grouped.products(case).items():
            arrays = functools.partial(grouped.product_arrays, product, case)
            function = functools.partial(_of_form, product)
            yield Part(name, product.flops(case), function, arrays, jnp.asarray, product=True)

    def experts(count: int) -> Callable[[], Sequence[jax.Array]]:
        return lambda: grouped.expert_arrays(case)[:count]

    def tokens(count: int) -> Callable[[], Sequence[jax.Array]]:
        def arrays() -> Sequence[jax.Array]:
            _, w_gate_up, w_down, _ = grouped.expert_arrays(case)
            x, dy = (grouped.normal(seed, (case.tokens, case.hidden)) for seed in (5, 6))
            weights = jax.nn.softmax(grouped.normal(7, (case.tokens, case.top_k)).astype(jnp.float32), axis=1)
            return (x, weights, w_gate_up, w_down, dy)[:count]

        return arrays

    if "experts" in names:
        yield Part("experts", case.flops, lambda form: form.experts, experts(3), jnp.asarray, 2e-2)
        yield Part("experts, gradients", 3 * case.flops, grouped_forms.gradients, experts(4), jnp.asarray, 3e-2)
    if "layer" in names:
        ids = functools.partial(grouped.routed, case=case)
        routing = lambda sizes: jnp.asarray(ids(sizes))  # noqa: E731
        yield Part("layer", case.flops, lambda form: form.whole_layer, tokens(4), routing, 2e-2)
        yield Part("layer, gradients", 3 * case.flops, grouped_forms.layer_gradients, tokens(5), routing, 3e-2)


@dataclasses.dataclass
class Variant:
    """A part in one form, or of another library.

    Attributes:
      form: None of a library outside of XLA.
      work: of its kernels; None if they are not all ours.
      compiled: None if it cannot be compiled or does not fit.
    """

    name: str
    form: Form | None = None
    includes: str = ""
    work: list[Work] | None = None
    compiled: Any = None
    temporaries: int | None = None
    failure: str = ""


def named(form: Form, part: Part) -> Callable[..., Any]:
    """A function of the form's name, by which `timing.executions` tells programs apart."""
    inner = part.function(form)

    def run(*arguments: jax.Array) -> Any:
        return inner(*arguments)

    run.__name__ = form.name
    return run


def compile_all(forms: Sequence[Form], part: Part, types: Sequence[Any], in_use: int) -> dict[str, Variant]:
    """All forms of a part, side by side. in_use: bytes of arrays that stay on the device."""

    def one(form: Form) -> Variant:
        variant = Variant(form.name, form, form.includes)
        function = named(form, part)
        try:
            if form.name.startswith("coda"):
                variant.work = grouped.work_of(function, *types)
            lowered = jax.jit(function).lower(*types)
            variant.compiled = _compiled(lowered, form.compiler_options)
        except Exception as error:  # another library's, or no memory for XLA to choose a kernel by trying
            variant.failure = _said(error)
            if "RESOURCE_EXHAUSTED" in variant.failure:
                variant.compiled = _compiled(lowered, {"xla_gpu_autotune_level": 0})
                variant.failure = "does not fit"
            elif form.name in OURS:
                raise
        if variant.compiled is not None:
            sizes = variant.compiled.memory_analysis()
            variant.temporaries = sizes.temp_size_in_bytes
            if not fits(in_use + sizes.temp_size_in_bytes + sizes.output_size_in_bytes):
                variant.compiled, variant.failure = None, "does not fit"
        return variant

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return {variant.name: variant for variant in pool.map(one, forms)}


def _compiled(lowered: Any, options: Mapping[str, Any]) -> Any:
    # What a command buffer launches has no module's name in the trace.
    every = dict(options) if jax.default_backend() != "gpu" else {"xla_gpu_enable_command_buffer": "", **options}
    return lowered.compile(compiler_options={name: one for name, one in every.items() if _known(name)})


def _known(option: str) -> bool:
    return jax.default_backend() == "gpu" or not option.startswith("xla_gpu")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def fits(size: float) -> bool:
    """Whether the device has so many bytes; a CPU has."""
    about = jax.devices()[0].memory_stats()
    return about is None or size < 0.97 * about["bytes_limit"]


def check(name: str, found: Any, expected: Any, tolerance: float) -> float:
    """The largest error of any result, in shares of its largest value.

    Raises:
      AssertionError: it is beyond the tolerance, or no number.
    """
    errors = [_error(x, y) for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]
    error = max(float(one) for one in errors) if all(math.isfinite(one) for one in errors) else math.nan
    if not error < tolerance:
        raise AssertionError(f"{name}: results differ from group after group by {error} of the largest value")
    return error


@jax.jit
def _error(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))


def measure(
    case: Case, part: Part, beside: Beside, forms: Sequence[Form], kinds: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """A row a variant and kind of sizes, in the order of the kinds."""
    arrays = part.arrays()
    every_sizes = {kind: grouped.sizes_of(kind, case) for kind in kinds}
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*arrays, part.routing(every_sizes[kinds[0]]))]
    in_use = sum(x.nbytes for x in arrays)
    variants = compile_all(forms, part, types, in_use)
    longest = int(max(sizes.max() for sizes in every_sizes.values()))
    in_turn = jax.jit(part.function(grouped_forms.in_turn(longest)))
    for kind, sizes in every_sizes.items():
        arguments = (*arrays, part.routing(sizes))
        expected = jax.block_until_ready(in_turn(*arguments))
        said = f"{case.name}, {part.name}, {kind}"
        calls, errors = checked_calls(said, variants, arguments, expected, part.tolerance, kind)
        for peer in beside:
            variants[peer.name] = Variant(peer.name, includes=peer.includes)
            try:
                if (prepared := peer.prepare(part.name, arguments)) is None:
                    del variants[peer.name]
                    continue
                found = prepared.to_jax(prepared.call())
                errors[peer.name] = check(f"{said}: {peer.name}", found, expected, part.tolerance)
                calls[peer.name] = timing.Outside(prepared.call, peer.synchronize)
            except Exception as error:  # of another library, which shall not keep ours from being timed
                variants[peer.name].failure = _said(error)
        del expected
        us = times(calls, seconds)
        for name, variant in variants.items():
            if name in us or variant.failure:
                yield {
                    **_sizes(case, kind, sizes, part.name),
                    **_figures(part, variant, sizes, us.get(name), us.get(REFERENCE), variants.get(REFERENCE)),
                    "error": errors.get(name, ""),
                }


def checked_calls(
    said: str,
    variants: Mapping[str, Variant],
    arguments: Sequence[jax.Array],
    expected: Any,
    tolerance: float,
    kind: str,
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The calls of the variants that are right, and their errors; of the reference also where it is for other sizes.

    Raises:
      AssertionError: one of ours is wrong.
    """
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for name, variant in variants.items():
        fits_sizes = variant.form is not None and (kind == "equal" or not variant.form.only_equal)
        if variant.compiled is None or not (fits_sizes or name.startswith(REFERENCE)):
            continue
        run = functools.partial(variant.compiled, *arguments)
        try:
            found = jax.block_until_ready(run())
            if fits_sizes:
                errors[name] = check(f"{said}: {name}", found, expected, tolerance)
        except (jax.errors.JaxRuntimeError, AssertionError) as error:
            if name in OURS:
                raise
            variant.failure, variant.compiled = _said(error), None
            continue
        size = sum(x.nbytes for x in jax.tree.leaves(found))
        calls[name] = run if size < RUN_AHEAD_BYTES else functools.partial(_finished, run)
    return calls, errors


def _finished(run: Callable[[], Any]) -> Any:
    return jax.block_until_ready(run())


def times(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Microseconds of each call; those of slow ones at the clock of the reference, beside which they are timed."""
    walls = {name: _wall(call) for name, call in calls.items()}
    level = SLOW * walls.get(REFERENCE, min(walls.values(), default=0.0))
    fast = {name: call for name, call in calls.items() if walls[name] <= level}
    found = {name: one.total for name, one in timing.interleaved(fast, seconds=seconds).items()} if fast else {}
    for name in calls.keys() - fast.keys():
        beside = {one: calls[one] for one in (REFERENCE, name) if one in calls}
        executed = timing.executions(beside, rounds=SLOW_ROUNDS)
        us = {
            one: statistics.median(sum(kernel.duration for kernel in of) for of in every[1:]) / 1e3
            for one, every in executed.items()
        }
        found[name] = us[name] * (found[REFERENCE] / us[REFERENCE] if REFERENCE in found else 1)
    return found


def _wall(call: Callable[[], Any]) -> float:
    timing.wait(call, call())
    start = time.perf_counter()
    timing.wait(call, call())
    return time.perf_counter() - start


def _sizes(case: Case, kind: str, sizes: np.ndarray, part: str) -> dict[str, Any]:
    return {
        "shape": case.name,
        "rows": case.rows,
        "experts": case.experts,
        "hidden": case.hidden,
        "intermediate": case.intermediate,
        "kind": kind,
        "largest": int(sizes.max()),
        "part": part,
    }


def _figures(
    part: Part, variant: Variant, sizes: np.ndarray, us: float | None, of_batch: float | None, batch: Variant | None
) -> dict[str, Any]:
    """What a row says beside its sizes."""
    row: dict[str, Any] = {"variant": variant.name, "includes": variant.includes, "failure": variant.failure}
    if variant.temporaries is not None:
        row["temporaries_gib"] = round(variant.temporaries / 2**30, 3)
    if us is not None:
        row |= {"ms": us / 1e3, "tflops": part.flops / us / 1e6}
    if variant.work:
        row["tile_work"] = sum(one.flops(sizes) for one in variant.work) / part.flops
        if len(variant.work) == 1:
            (one,) = variant.work
            row |= {"tile": one.rows_at_once, "tiles": one.units(sizes)}
        if us is not None and of_batch is not None and batch is not None and batch.work:
            multiplied = [sum(one.flops(sizes) for one in work) for work in (variant.work, batch.work)]
            row["tile_speed"] = multiplied[0] / us / (multiplied[1] / of_batch)
    return row


def shown(row: Mapping[str, Any]) -> str:
    """A line of the table."""

    def number(name: str, width: int, digits: int) -> str:
        value = row.get(name, "")
        return f"{value:{width}.{digits}f}" if isinstance(value, float) else f"{value:>{width}}"

    figures = number("ms", 9, 3) + number("tflops", 7, 0) + number("tiles", 7, 0) + number("tile", 5, 0)
    figures += number("tile_work", 7, 3) + number("tile_speed", 7, 3) + number("temporaries_gib", 8, 2)
    return f"{row['kind']:7}{row['part']:20}{row['variant']:14}{figures}  {row['failure']}"


HEADER = (
    f"{'sizes':7}{'part':20}{'variant':14}{'ms':>9}{'TFLOP/s':>7}{'tiles':>7}{'rows':>5}{'work':>7}"
    f"{'speed':>7}{'GiB':>8}  (tiles and rows of a tile, their work over that of the rows, their speed)"
)


def forms_of(options: argparse.Namespace, part: Part, beside: Sequence[Form]) -> list[Form]:
    """The forms of a part that are asked for; the reference always."""
    if options.command:
        return tile_forms(options)
    forms = [grouped_forms.batched(), grouped_forms.ours(options.config if part.product else None)]
    if not part.product:
        forms.append(grouped_forms.expert_mlp())
    forms += [grouped_forms.XLA, grouped_forms.XLA_FUSION, grouped_forms.XLA_BATCHED, *beside]
    return [form for form in forms if form.name == REFERENCE or _asked(form.name, options)]


def _asked(name: str, options: argparse.Namespace) -> bool:
    return not options.variants or name in options.variants.split(",")


def tile_configs(chosen: Sequence[str] = ()) -> dict[str, GemmConfig]:
    """Every tile and cluster by its name, "128x192_2"; or those named."""
    every = {f"{m}x{n}_{c}": GemmConfig(tile_m=m, tile_n=n, cluster_m=c) for m, n in TILES for c in (1, 2)}
    return {name: every[name] for name in chosen} if chosen else every


def tile_forms(options: argparse.Namespace) -> list[Form]:
    """Ours in every tile, and the batched product in its own; with --batched in every tile too."""
    forms = [grouped_forms.batched(), grouped_forms.ours()]
    for name, config in tile_configs(options.tiles).items():
        forms.append(dataclasses.replace(grouped_forms.ours(config), name=f"coda_{name}"))
        if options.batched:
            forms.append(dataclasses.replace(grouped_forms.batched(config), name=f"coda_batched_{name}"))
    return forms


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser("benchmarks.moe", __doc__)
    parser.add_argument("command", nargs="?", choices=["tiles"], help="every tile on each single product")
    parser.add_argument("--seconds", type=float, default=0.4, help="of measurement of the variants of a part")
    parser.add_argument("--shapes", default=",".join(grouped.CASES), help=f"of {', '.join(grouped.CASES)}")
    parser.add_argument("--kinds", help=f"of {', '.join(grouped.KINDS)} (default all; of tiles: random)")
    parser.add_argument("--parts", default=",".join(PARTS[::-1]), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--products", default="", help="some of the single products: parts of their names")
    parser.add_argument("--variants", default="", help="only those; coda_batched is always there")
    parser.add_argument("--peers", default=",".join(peers.GROUPED_MODULES), help="modules of benchmarks/peers")
    parser.add_argument("--config", help="tile_m,tile_n,cluster_m of our single products")
    parser.add_argument("--tiles", default="", help="of the command tiles: only those, as 128x192_2")
    parser.add_argument("--batched", action="store_true", help="of tiles: batched products in each tile too")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds or ("random" if options.command else ",".join(grouped.KINDS))
    cases = grouped.TINY if options.tiny else grouped.CASES
    if options.tiny:
        options.shapes = ",".join(cases)
    for name, allowed in (("shapes", cases), ("kinds", grouped.KINDS), ("parts", PARTS), ("tiles", tile_configs())):
        chosen = [one for one in getattr(options, name).split(",") if one]
        if unknown := [one for one in chosen if one not in allowed]:
            parser.error(f"--{name}: {unknown[0]} is none of {', '.join(allowed)}")
        setattr(options, name, chosen)
    options.cases = [cases[name] for name in options.shapes]
    if options.command:
        options.parts = ["products"]
    if options.config:
        try:
            sizes = dict(zip(("tile_m", "tile_n", "cluster_m"), map(int, options.config.split(",")), strict=True))
            options.config = GemmConfig(**sizes)
        except ValueError as error:
            parser.error(f"--config: {error}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    beside = [] if options.command else peers.available(filter(None, options.peers.split(",")), "load_grouped")
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        print(f"{case}   [{timing.clock()}]\n{HEADER}", flush=True)
        for part in parts_of(case, options.parts):
            if part.product and options.products not in part.name:
                continue
            forms = forms_of(options, part, [one for one in beside if isinstance(one, Form)])
            outside = [one for one in beside if not isinstance(one, Form) and _asked(one.name, options)]
            measured = measure(case, part, outside, forms, options.kinds, options.seconds)
            for _, of_kind in itertools.groupby(measured, lambda row: row["kind"]):
                found = list(of_kind)
                if options.command:
                    found.sort(key=lambda row: row.get("ms", math.inf))
                print(*map(shown, found), sep="\n", flush=True)
                rows += found
        about = {"commit": options.commit, "peers": peers.versions(beside)}
        suffix = "_moe_tiles" if options.command else "_moe"
        results.write(suffix, COLUMNS, rows, folder=options.out, **about)  # what there is, if time runs out
    return 0


if __name__ == "__main__":
    if importlib.util.find_spec("quack"):  # whose arrays are torch's
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")
    use_whole_gpu()
    sys.exit(main())
