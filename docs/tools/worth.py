"""Tables of the page that says whether the library is worth it, from the CSV files in benchmarks/results."""

from __future__ import annotations

import csv
from collections.abc import Iterable

from tools import pages
from tools.expected import layer_ms

RESULTS = pages.ROOT / "benchmarks" / "results"
CHIPS = ("nvidia_h200", "nvidia_h100_80gb_hbm3")
STEPS = {  # variants of a step, as a reader knows them
    "coda": "flax_layers",
    "coda_scan": "flax_layers, scanned",
    "coda_recompute": 'flax_layers, `remat="save_attention"`',
    "coda_recompute_3": "the same in 3 of 16 layers",
    "xla": "plain JAX, unrolled",
    "xla_scan": "plain JAX, scanned",
    "xla_scan_remat": "plain JAX, scanned, `jax.checkpoint`",
    "coda_fp8": "flax_layers, fp8, delayed scales",
    "coda_fp8_current": "flax_layers, fp8, current scales",
    "xla_fp8": "plain JAX, fp8, constant scales",
    "xla_fp8_flax": "plain JAX, fp8, Flax's scales",
}
COMMANDS = {  # by the suffix of a file
    "": "make bench-train_step",
    "_fp8": 'make bench-train_step ARGS="--variants coda,coda_fp8,coda_fp8_current,xla,xla_fp8,xla_fp8_flax --alone 3"',
}
PROGRAMS = {
    "residual": "residual",
    "residual_sumsq": "residual, row sums of squares",
    "swiglu": "SwiGLU",
    "gated_backward": "back through SwiGLU",
    "geglu_backward": "back through GeGLU",
    "norm_backward": "back through a norm",
    "bias_gelu": "bias, GELU",
    "gelu_backward": "back through GELU",
    "gelu_erf": "GELU by erf",
    "column_sum": "bias, column sums",
    "rotary_qkv": "rotary embedding of q and k",
    "logsumexp_pick": "log-sum-exp, the label's logit",
}
SIZES = {"Llama-3-1B": (2048, 8192, 32, 8, 64), "Llama-3-8B": (4096, 14336, 32, 8, 128)}


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def source(row: dict[str, str], command: str) -> str:
    return (
        f"{row['device']}, driver {row['driver']}, jax {row['jax']}, commit {row['commit']}, {row['date']}: `{command}`"
    )


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    shown = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def steps(suffix: str = "") -> str:
    """Steps of a Llama-3-1B, beside plain JAX's unrolled one; `suffix` is that of the files, as "_fp8"."""
    parts = []
    for chip in CHIPS:
        name = f"{chip}_train_step{suffix}"
        if not (RESULTS / f"{name}.csv").exists():
            continue
        found = [row for row in rows(name) if row["kind"] == "step" and row["ms"]]
        base = next(float(row["ms"]) for row in found if row["variant"] == "xla")
        lines = [
            [
                STEPS.get(row["variant"], row["variant"]),
                f"{float(row['ms']):.0f}",
                f"{float(row['ms']) / base:.2f}",
                f"{float(row['temporaries_gib']):.1f}",
                f"{float(row['peak_gib']):.1f}",
            ]
            for row in found
        ]
        head = ("step", "ms", "of plain JAX unrolled", "temporaries, GiB", "peak, GiB")
        parts += [source(found[0], COMMANDS[suffix]), table(head, lines)]
    return "\n\n".join(parts)


def products() -> str:
    """XLA's time over ours, of each product with an epilogue, on each chip."""
    found = {chip: [row for row in rows(chip) if row["fused"]] for chip in CHIPS}
    gains: dict[tuple[int, str, int], dict[str, str]] = {}
    for chip, of in found.items():
        for row in of:
            key = int(row["k"]), row["program"], int(row["n"])
            gains.setdefault(key, {})[chip] = f"{float(row['xla']) / float(row['fused']):.2f}"
    lines = [
        [str(k), str(n), PROGRAMS.get(program, program), *(of.get(chip, "") for chip in CHIPS)]
        for (k, program, n), of in sorted(gains.items())
    ]
    sources = "\n\n".join(source(of[0], "make bench") for of in found.values())
    return f"{sources}\n\n{table(['K', 'N', 'epilogue', 'H200', 'H100'], lines)}"


def layers() -> str:
    """A layer without attention, forward and backward, on 16384 tokens: the cost model, and what was measured."""
    lines, sources = [], []
    for chip in CHIPS:
        measured = [row for row in rows(f"{chip}_layer") if row["pass"] == "forward, backward"]
        sources.append(source(measured[0], "make bench-layer"))
        for name, sizes in SIZES.items():
            ms = {row["variant"]: float(row["ms"]) for row in measured if int(row["width"]) == sizes[0]}
            expected = layer_ms(*sizes, tokens=16384, device=measured[0]["device"])
            times = (expected, ms["coda"], min(ms["xla"], ms["xla_packed"]))
            lines.append([name, measured[0]["device"].removeprefix("NVIDIA "), *(f"{time:.2f}" for time in times)])
    head = ("layer of", "chip", "expected, ms", "measured, ms", "plain JAX, ms")
    return "\n\n".join([*sources, table(head, lines)])
