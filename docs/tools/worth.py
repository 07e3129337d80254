"""Tables of the page that says whether the library is worth it, from the CSV files in benchmarks/results."""

from __future__ import annotations

import csv

from benchmarks import report_tables
from benchmarks.markdown import table
from benchmarks.report import FAMILIES, SECTIONS, commits
from benchmarks.report_tables import EPILOGUE_LABELS, VARIANTS
from tools import pages
from tools.expected import layer_ms

RESULTS = pages.ROOT / "benchmarks" / "results"
CHIPS = ("nvidia_h200", "nvidia_h100_80gb_hbm3")
COMMANDS = {section.suffix: section.command for section in SECTIONS}  # by the suffix of a file
SIZES = {"Llama-3-1B": (2048, 8192, 32, 8, 64), "Llama-3-8B": (4096, 14336, 32, 8, 128)}


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def source(row: dict[str, str], command: str) -> str:
    return (
        f"{row['device']}, driver {row['driver']}, jax {row['jax']}, commit {row['commit']}, {row['date']}: `{command}`"
    )


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
                VARIANTS.get(row["variant"], row["variant"]),
                f"{float(row['ms']):.0f}",
                f"{float(row['ms']) / base:.2f}",
                f"{float(row['temporaries_gib']):.1f}",
                f"{float(row['peak_gib']):.1f}",
            ]
            for row in found
        ]
        head = ("step", "ms", "of plain JAX unrolled", "temporaries, GiB", "peak, GiB")
        parts += [source(found[0], COMMANDS[f"_train_step{suffix}"]), table(head, lines).rstrip()]
    return "\n\n".join(parts)


def family_steps() -> str:
    """Steps of other models than Llamas, beside plain JAX's of the same kind."""
    lines, sources = [], []
    for name in FAMILIES:
        suffix = f"_family_{name}"
        found = [row for row in rows(f"{CHIPS[-1]}{suffix}") if row["kind"] == "step"]
        sources.append(source(found[0], COMMANDS[suffix]))
        times = {row["variant"]: float(row["ms"]) for row in found}
        for row in found:
            plain = "xla_remat" if "_re" in row["variant"] else "xla"
            lines.append(
                [
                    f"{FAMILIES[name]}, {row['batch']} x {row['length']}",
                    VARIANTS[row["variant"]],
                    f"{float(row['ms']):.0f}",
                    f"{float(row['ms']) / times[plain]:.2f}",
                    f"{float(row['temporaries_gib']):.1f}",
                    f"{float(row['alone_joules']):.0f}",
                ]
            )
    head = ("model, tokens", "step", "ms", "of plain JAX's", "temporaries, GiB", "alone, J")
    return "\n\n".join([*sources, table(head, lines).rstrip()])


def fused_models() -> str:
    """Value and gradient of unmodified models, plain and under `coda.fuse`."""
    found = rows(f"{CHIPS[0]}_fused_models")
    about = found[0] | commits(found)
    sizes = f"{about['layers']} layers, {about['batch']} x {about['length']} tokens, width {about['width']}, bfloat16"
    return f"{source(about, COMMANDS['_fused_models'])}. {sizes}.\n\n{report_tables.fused_models(found).rstrip()}"


def sharded() -> str:
    """Steps under FSDP on two GPUs, each beside plain JAX's that keeps all, or that recomputes as well."""
    lines, sources = [], []
    for size in ("1b", "8b"):
        suffix = "_sharded_step" + ("" if size == "1b" else f"_{size}")
        found = [row for row in rows(f"{CHIPS[-1]}{suffix}") if row["scheme"] == "fsdp"]
        sources.append(source(found[0], COMMANDS[suffix]))
        times = {row["variant"]: float(row["ms"]) for row in found}
        for row in found:
            plain = "xla_scan_remat" if "_re" in row["variant"] else "xla"
            lines.append(
                [
                    size.upper(),
                    VARIANTS[row["variant"]],
                    f"{float(row['ms']):.0f}",
                    f"{float(row['ms']) / times[plain]:.2f}",
                    f"{float(row['tokens_per_second_a_device']):.0f}",
                    f"{float(row['exposed_ms']):.0f}",
                    f"{float(row['temporaries_gib']):.1f}",
                    f"{float(row['peak_gib']):.1f}",
                ]
            )
    memory = ("temporaries, GiB", "peak, GiB")
    head = ("Llama 3", "step", "ms", "of plain JAX's", "tokens/s a GPU", "exposed, ms", *memory)
    return "\n\n".join([*sources, table(head, lines).rstrip()])


def products() -> str:
    """XLA's time over ours, of each product with an epilogue, on each chip."""
    found = {chip: [row for row in rows(chip) if row["fused"]] for chip in CHIPS}
    gains: dict[tuple[int, str, int], dict[str, str]] = {}
    for chip, of in found.items():
        for row in of:
            key = int(row["k"]), row["program"], int(row["n"])
            gains.setdefault(key, {})[chip] = f"{float(row['xla']) / float(row['fused']):.2f}"
    lines = [
        [str(k), str(n), EPILOGUE_LABELS.get(program, program), *(of.get(chip, "") for chip in CHIPS)]
        for (k, program, n), of in sorted(gains.items())
    ]
    sources = "\n\n".join(source(of[0], "make bench") for of in found.values())
    return f"{sources}\n\n{table(['K', 'N', 'epilogue', 'H200', 'H100'], lines)}".rstrip()


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
    return "\n\n".join([*sources, table(head, lines).rstrip()])
