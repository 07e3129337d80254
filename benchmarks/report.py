"""`make report`: benchmarks/REPORT.md and the README's table, from the CSV files in benchmarks/results.

Nothing is measured here: each table says which command wrote its file, on which device and of which commit. `--check`
writes nothing and fails where a text is not what the files give.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import attention_tables, block_tables, fp8_tables, moe_tables, report_tables, results, tile_report
from benchmarks.grouped import CASES
from benchmarks.markdown import geometric_mean, table
from benchmarks.report_tables import Row, number, product_times

REPORT = pathlib.Path(__file__).parent / "REPORT.md"
README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- make report: the table of results -->\n", "<!-- end of the table of results -->"
INTRODUCTION = """# What was measured

Written by `make report` from the CSV files in `benchmarks/results`; do not edit it. `docs/measurements` has what these
tables do not show: earlier runs, other chips, experiments, and why.

Times are device times of all kernels by the profiler, bfloat16 with float32 accumulation, random data. Variants of one
row run interleaved in random order and are compared round by round, so they share one clock; the chip is at its power
limit, as in training. Where a table says "alone", each variant runs by itself, back to back, at the clock that its own
power leaves it. Timing at one clock favours kernels that take more power. Numbers of two chips of one kind differ by 1
to 2 %.
"""


class Section(NamedTuple):
    """A section of the report: how one kind of file is shown, and what writes it."""

    title: str
    suffix: str  # of the file's name, after the device
    command: str
    show: Callable[[Any], str]
    picture: str = ""  # suffix of one that is shown below


FAMILIES = {"gemma2_2b": "Gemma 2 2B", "gemma3_1b": "Gemma 3 1B", "qwen2_1_5b": "Qwen2.5 1.5B"}
SECTIONS = [
    Section("Training step", "_train_step", "make bench-train_step", report_tables.training_step),
    Section("Training step, float32 parameters", "_train_step_float32",
            'make bench-train_step ARGS="--param-dtype float32 --variants coda,xla"', report_tables.training_step),
    Section("Training step of packed rows", "_train_step_packed",
            'make bench-train_step ARGS="--variants coda,xla,coda_packed,xla_packed"', report_tables.training_step),
    Section("Training step of packed rows, float32 parameters", "_train_step_float32_packed",
            'make bench-train_step ARGS="--param-dtype float32 --variants coda,xla,coda_packed,xla_packed"',
            report_tables.training_step),
    Section("Training step of packed rows in fp8", "_train_step_packed_fp8",
            'make bench-train_step ARGS="--variants coda,xla,coda_packed,xla_packed,coda_packed_fp8,xla_packed_fp8"',
            report_tables.training_step),
    Section("Training step in fp8", "_train_step_fp8",
            'make bench-train_step ARGS="--variants coda,coda_fp8,coda_fp8_current,xla,xla_fp8,xla_fp8_flax --alone 3"',
            report_tables.training_step),
    Section("Training step of Llama-3-8B's layers in fp8", "_train_step_8b_fp8",
            'make bench-train_step ARGS="--model 8b --layers 16 --variants coda,coda_recompute,coda_fp8,'
            'coda_fp8_recompute --repeats 3 --alone 3"', report_tables.training_step),
    *(
        Section(f"Training step of a {title}", f"_family_{name}",
                f'make bench-family_step ARGS="--model {name} --alone 2"', report_tables.training_step)
        for name, title in FAMILIES.items()
    ),
    Section("Training step on several GPUs", "_sharded_step",
            'make bench-sharded_step ARGS="--variants coda,coda_recompute,coda_scan_recompute,xla,xla_scan_remat '
            '--repeats 4"',
            report_tables.sharded_step),
    Section("Training step on several GPUs, Llama-3-8B", "_sharded_step_8b",
            'make bench-sharded_step ARGS="--model 8b --schemes fsdp --variants coda_recompute,xla_scan_remat '
            '--repeats 4"',
            report_tables.sharded_step),
    Section("Kernels of a step on several GPUs", "_sharded_kernels",
            'XLA_FLAGS=--xla_gpu_enable_command_buffer= make bench-sharded_step ARGS="--schemes one,dp,fsdp '
            '--variants coda,xla --repeats 2"',
            report_tables.sharded_kernels),
    Section("A product beside a collective", "_overlap",
            'make lab-overlap ARGS="--ctas 0 --rounds 10"', report_tables.overlap),
    Section("Loss curve", "_loss_curve", "make bench-loss_curve", report_tables.loss_curve, "_loss_curve"),
    Section("Loss curve in fp8", "_loss_curve_fp8", 'make bench-loss_curve ARGS="--fp8 --steps 2000"',
            report_tables.loss_curve, "_loss_curve_fp8"),
    *(
        Section(f"Attention, {title}", f"_attention_{kind}", f'make bench-attention ARGS="--cases ^{kind}"',
                attention_tables.attention)
        for kind, title in attention_tables.KINDS.items()
    ),
    Section("Attention, score functions", "_attention_scores", "make lab-attention_score_times",
            attention_tables.scores),
    Section("The loss over a large vocabulary", "_loss_head", "make bench-loss_head", report_tables.loss_head),
    Section("A layer without attention", "_layer", "make bench-layer", report_tables.layer),
    Section("Bare products", "", "make bench", report_tables.products, "_products"),
    Section("Bare products, alone", "_energy_products", 'make lab-energy ARGS="--products --seconds 1"',
            report_tables.energy_products),
    Section("Epilogues", "", "make bench", report_tables.epilogues, "_fused"),
    Section("Parts of epilogues", "_ablation", "make lab-ablation", report_tables.ablation),
    Section("Joined products", "_joined", "make lab-joined", report_tables.joined),
    Section("Energy of a training step's products", "_energy_step", "make lab-energy ARGS=--step",
            report_tables.energy_step),
    Section("Tiles, at one clock", "_tiles", "make lab-tiles", tile_report.at_one_clock, "_tiles"),
    Section("Tiles, alone", "_tiles_energy", "make lab-tiles_energy", tile_report.alone),
    Section("Training step of a mixture of experts", "_moe_step", "make bench-moe_step", report_tables.training_step),
    *(
        Section(f"Mixture of experts, {case.name}", f"_moe_{name}", f'make bench-moe ARGS="--shapes {name}"',
                moe_tables.experts)
        for name, case in CASES.items()
    ),
    Section("Products in fp8", "_fp8", 'make bench-fp8 ARGS="--alone 0.8 --seconds 0.4"', fp8_tables.products),
    Section("Training steps of blocks of several forms", "_blocks", 'make bench-blocks ARGS="--repeats 5 --alone 4"',
            block_tables.steps),
    Section("Unmodified models under coda.fuse", "_fused_models", "make bench-fused_models",
            report_tables.fused_models),
    Section("Launch", "_launch", "make bench-launch", report_tables.launch),
]  # fmt: skip
TAKES_PATH = ("_tiles", "_tiles_energy")  # their readers, which the cost model's tools share, want the file itself


def rows_of(path: pathlib.Path) -> list[Row]:
    with path.open() as file:
        return list(csv.DictReader(file))


def suffix_of(path: pathlib.Path, row: Row) -> str:
    return path.stem.removeprefix(row["device"].replace(" ", "_").lower())


def commits(rows: Sequence[Row]) -> Row:
    """The commits that rows were measured at, one after the other."""
    return {"commit": ", ".join(dict.fromkeys(row["commit"] for row in rows))}


def source(path: pathlib.Path, row: Row, command: str) -> str:
    clock = row["clock"].removeprefix(f"{row['device']}, ")
    about = f"driver {row['driver']}, jax {row['jax']}, commit {row['commit']}, {row['date']}, clock at the end {clock}"
    return f"{row['device']}, {about}; `{command}`, [{path.name}](results/{path.name})"


def report(folder: pathlib.Path) -> str:
    files = {path: rows for path in sorted(folder.glob("*.csv"), reverse=True) if (rows := rows_of(path))}
    text = INTRODUCTION
    for section in SECTIONS:
        for path, rows in files.items():
            if suffix_of(path, rows[0]) != section.suffix:
                continue
            about = source(path, rows[0] | commits(rows), section.command)
            text += f"\n## {section.title}, {rows[0]['device']}\n\n{about}\n\n"
            text += section.show(path if section.suffix in TAKES_PATH else rows)
            picture = path.with_name(f"{path.stem.removesuffix(section.suffix)}{section.picture}.png")
            if section.picture and picture.exists():
                text += f"\n![{section.title.lower()}](results/{picture.name})\n"
    return text


def packed_steps(folder: pathlib.Path, device: str) -> list[Row]:
    """The rows of our step of packed rows and of plain JAX's, if this device has a record of both."""
    path = folder / f"{device}_train_step_packed.csv"
    steps = {row["variant"]: row for row in rows_of(path) if row["kind"] == "step"} if path.exists() else {}
    found = [steps[name] for name in ("coda_packed", "xla_packed") if steps.get(name, {}).get("ms")]
    return found if len(found) == 2 else []


def headline(folder: pathlib.Path, device: str = "nvidia_h200", depth: str = "2048") -> str:
    """The README's table, of one device: a step's time and memory, an epilogue and the bare product.

    The step of packed rows is in it where the device has a record of one.
    """
    paths = {suffix: folder / f"{device}{suffix}.csv" for suffix in ("", "_train_step")}
    rows, steps = rows_of(paths[""]), rows_of(paths["_train_step"])
    step = {row["variant"]: row for row in steps if row["kind"] == "step"}
    of_step = [step[name] for name in ("coda", "xla", "xla_scan_remat")]
    ours = of_step[0]
    swiglu = next(row for row in rows if row["program"] == "swiglu" and row["k"] == depth)
    times = product_times(rows)
    xla = geometric_mean([it / our for it, our in zip(times["xla_product"], times["coda_product"], strict=True)])
    lines = [
        ["training step, ms", *(f"{number(row, 'ms'):.0f}" for row in of_step)],
        ["its peak memory, GiB", *(f"{number(row, 'peak_gib'):.1f}" for row in of_step)],
        ["product + SwiGLU, us", f"{number(swiglu, 'fused'):.0f}", f"{number(swiglu, 'xla'):.0f}", ""],
        ["bare product, mean time over ours", "1", f"{xla:.2f}", ""],
    ]
    if of_packed := packed_steps(folder, device):
        lines.insert(2, ["training step of packed rows, ms", *(f"{number(row, 'ms'):.0f}" for row in of_packed), ""])
    first = rows[0]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in (ours, *of_packed, first)))
    note = (
        f"{first['device']}, commit {commits}, at the power limit: `make bench-train_step`, `make bench`. The step is "
        f"value and gradient of the loss of a Llama-3-1B on {ours['batch']} x {ours['length']} tokens, "
        f"{ours['param_dtype']}; its peak memory has parameters and gradients in it."
    )
    note = "\n" + textwrap.fill(note, 118, break_on_hyphens=False, break_long_words=False) + "\n"
    return table(["", "coda_jax", "plain JAX, unrolled", "plain JAX, scanned, `jax.checkpoint`"], lines) + note


def texts(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """The texts that the files should have."""
    readme = README.read_text()
    before, rest = readme.split(BEGIN)
    return {REPORT: report(folder), README: f"{before}{BEGIN}{headline(folder)}{END}{rest.split(END)[1]}"}


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a text is out of date, and write nothing")
    options = parser.parse_args(None if arguments is None else list(arguments))
    old = {path: path.read_text() if path.exists() else "" for path in (REPORT, README)}
    new = texts(results.FOLDER)
    changed = [path for path in new if new[path] != old[path]]
    for path in changed:
        if options.check:
            print(f"{path.name} is not what benchmarks/results gives: make report", file=sys.stderr)
        else:
            path.write_text(new[path])
            print(f"written: {path.name}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
