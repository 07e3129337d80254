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
device has them in the place of its time. Writes a file a shape,
benchmarks/results/<device>_moe_<shape>.csv.

`python -m benchmarks.moe tiles` times every tile on each single product, the fastest first, and writes
<device>_moe_tiles_<shape>.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import grouped, grouped_forms, peers, results, timing
from benchmarks.grouped import Case
from benchmarks.grouped_forms import Form
from benchmarks.grouped_timing import REFERENCE, Part, measure
from benchmarks.train_step import use_whole_gpu
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig

PARTS = ("products", "experts", "layer")
COLUMNS = (
    *("shape", "rows", "experts", "hidden", "intermediate", "kind", "largest", "part", "variant"),
    *("ms", "tflops", "tiles", "tile", "tile_work", "tile_speed", "temporaries_gib", "error", "failure", "includes"),
)


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
        # XLA's gradient of the weights is a sum of products that it rounds to bfloat16.
        yield Part("layer, gradients", 3 * case.flops, grouped_forms.layer_gradients, tokens(5), routing, 0.3)


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
        forms += [grouped_forms.expert_mlp(), grouped_forms.fused()]
    forms += [grouped_forms.XLA, grouped_forms.XLA_CUDNN, grouped_forms.XLA_BATCHED, *beside]
    return [form for form in forms if form.name == REFERENCE or _asked(form.name, options)]


def _asked(name: str, options: argparse.Namespace) -> bool:
    return not options.variants or name in options.variants.split(",")


def tile_configs(chosen: Sequence[str] = ()) -> dict[str, GemmConfig]:
    """Every tile and cluster by its name, "128x192_2"; or those named."""
    every = {f"{m}x{n}_{c}": GemmConfig(tile_m=m, tile_n=n, cluster_m=c) for m, n in SM90.tiles for c in (1, 2)}
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
    options.cases = {name: cases[name] for name in options.shapes}
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
    for name, case in options.cases.items():
        rows: list[dict[str, Any]] = []
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
        suffix = f"_moe_tiles_{name}" if options.command else f"_moe_{name}"
        results.write(suffix, COLUMNS, rows, folder=options.out, **about)
    return 0


if __name__ == "__main__":
    if importlib.util.find_spec("quack"):  # whose arrays are torch's
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")
    use_whole_gpu()
    sys.exit(main())
