"""`python -m benchmarks.plots`: pictures of what `python -m benchmarks` and `python -m benchmarks.lab.tiles` wrote.

For each CSV of the first in benchmarks/results: <name>_products.png, the bare product beside its peers;
<name>_fused.png, products with an epilogue beside XLA's time for the same function; <name>_roofline.png, the products
below what the chip can do. For each of the second <name>.png, how often the cost model's tile is how slow. And for each
of `python -m benchmarks.train_step` <name>_memory.png, the step's memory beside that of plain JAX.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

from benchmarks import results
from benchmarks.lab import tile_losses
from benchmarks.report_tables import EPILOGUE_LABELS
from coda_jax.tiles.arch import chip_of
from coda_jax.tiles.constants import by_time, constants_for

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = Mapping[str, str]
STEPS = {  # the forms of a training step whose memory is shown
    "coda": "coda_jax",
    "coda_recompute": 'coda_jax, remat="save_attention"',
    "xla": "plain JAX, unrolled",
    "xla_scan": "plain JAX, scanned",
    "xla_scan_remat": "plain JAX, scanned, jax.checkpoint",
}
PRODUCT = "_product"  # ends the name of a column that has a bare product's microseconds


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file of `python -m benchmarks`; none of another one."""
    return [row for row in rows_of(path) if row.get("kind") in ("bare", "epilogue")]


def rows_of(path: pathlib.Path) -> list[Row]:
    with path.open() as file:
        return list(csv.DictReader(file))


def tflops(row: Row, column: str) -> float:
    return 2e-6 * int(row["m"]) * int(row["n"]) * int(row["k"]) / float(row[column])


def intensity(row: Row) -> float:
    """Floating-point operations for each byte of a, b and the result in bfloat16."""
    m, n, k = (int(row[name]) for name in "mnk")
    return m * n * k / (m * k + k * n + m * n)


def product_columns(rows: Sequence[Row]) -> list[str]:
    return [column for column in rows[0] if column.endswith(PRODUCT) and all(row[column] for row in rows)]


def shown(column: str) -> str:
    return column.removesuffix(PRODUCT).replace("_", " ").replace("xla", "XLA")


def products(rows: Sequence[Row]) -> plt.Figure:
    """Bars of TFLOP/s, a group a shape."""
    columns = product_columns(rows)
    width = 0.8 / len(columns)
    figure, axes = plt.subplots(figsize=(max(8, len(rows) * max(1.4, 0.3 * len(columns))), 4.5))
    for i, column in enumerate(columns):
        places = np.arange(len(rows)) + (i - (len(columns) - 1) / 2) * width
        axes.bar(places, [tflops(row, column) for row in rows], width, label=shown(column))
    labels = [f"{row['program']}\n{row['m']}, {row['n']}, {row['k']}" for row in rows]
    axes.set_xticks(np.arange(len(rows)), labels, fontsize="x-small")
    axes.set(ylabel="TFLOP/s", title=f"bare product, a and b stored as shown; M, N, K\n{rows[0]['clock']}")
    axes.legend(fontsize="small", ncols=len(columns), loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    axes.grid(axis="y", alpha=0.3)
    return figure


def fused(rows: Sequence[Row]) -> plt.Figure:
    """Horizontal bars: of each fused product of the commonest depth its time beside XLA's for the same function, in
    times of the bare product; those that gain most stand on top.
    """
    depth = statistics.mode(row["k"] for row in rows)
    chosen = sorted((row for row in rows if row["k"] == depth), key=_gain, reverse=True)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.42 * len(chosen)))
    for column, label, colour, shift in (("xla", "XLA", "#b8bcc4", 0.19), ("fused", "coda_jax", "#2f6db3", -0.19)):
        shares = [float(row[column]) / float(row["bare"]) for row in chosen]
        bars = axes.barh(np.arange(len(chosen)) + shift, shares, 0.36, label=label, color=colour)
        axes.bar_label(bars, [f"{float(row[column]):.0f} us" for row in chosen], padding=3, fontsize="x-small")
    axes.set_yticks(np.arange(len(chosen)), [EPILOGUE_LABELS.get(row["program"], row["program"]) for row in chosen])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("time over that of the bare product (dotted)")
    figure.suptitle(f"products with an epilogue, K = {depth}\n{_measured(rows[0])}", fontsize="medium")
    axes.legend(fontsize="small", loc="lower right", frameon=False, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1, y=0.01)
    return figure


def _measured(row: Row) -> str:
    return ", commit ".join(row[name] for name in ("device", "commit") if row.get(name))


def _gain(row: Row) -> float:
    return float(row["xla"]) / float(row["fused"])


def roofline(rows: Sequence[Row]) -> plt.Figure:
    """TFLOP/s against flops a byte, and the chip's two lines where its data sheet is known."""
    figure, axes = plt.subplots(figsize=(8, 5))
    device = rows[0]["device"]
    chip = chip_of(device)
    intensities = np.array([intensity(row) for row in rows])
    for column, marker in zip(product_columns(rows), "osD^vP*X<>", strict=False):
        axes.plot(intensities, [tflops(row, column) for row in rows], marker, label=shown(column), alpha=0.8)
    if chip:
        x = np.geomspace(min(50.0, intensities.min()), 2 * intensities.max(), 200)
        label = f"{chip.tflops:.0f} TFLOP/s, {chip.tbytes} TB/s"
        axes.plot(x, np.minimum(chip.tflops, chip.tbytes * x), color="black", linewidth=1, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte of a, b and the result", ylabel="TFLOP/s")
    axes.set_title(f"bare products\n{rows[0]['clock']}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, which="both")
    return figure


def tiles(path: pathlib.Path) -> plt.Figure:
    """Steps of how many shapes, of 100, lose no more than so much by the cost model's choice of a tile."""
    device, times = tile_losses.read(path)
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, of in tile_losses.by_program(tile_losses.losses(times, by_time(constants_for(device)))).items():
        shares = 100 * np.arange(1, len(of) + 1) / len(of)
        style = {"color": "black", "linewidth": 2} if name == "all" else {"alpha": 0.8}
        axes.step([100 * loss for loss in of], shares, where="post", label=f"{name} ({len(of)})", **style)
    axes.axvline(100 * tile_losses.CLOSE, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="time over that of the best tile, %", ylabel="shapes that lose no more, %", ylim=(0, 101), xlim=(0, None)
    )
    axes.set_title(f"the cost model's choice of a tile by time\n{device}")
    axes.legend(fontsize="small", loc="lower right")
    axes.grid(alpha=0.3)
    return figure


def memory(rows: Sequence[Row]) -> plt.Figure:
    """Bars of GiB: what each form of a training step has beside parameters and gradients, and both together."""
    of = {row["variant"]: row for row in rows if row["kind"] == "step" and row.get("peak_gib")}
    chosen = [of[variant] for variant in STEPS if variant in of]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.42 * len(chosen)))
    temporaries = np.array([float(row["temporaries_gib"]) for row in chosen])
    peaks = np.array([float(row["peak_gib"]) for row in chosen])
    places = np.arange(len(chosen))
    colours = ["#2f6db3" if row["variant"].startswith("coda") else "#b8bcc4" for row in chosen]
    axes.barh(places, peaks - temporaries, 0.6, color="#4a4e57")
    bars = axes.barh(places, temporaries, 0.6, left=peaks - temporaries, color=colours)
    labels = [f"{peak:.1f} GiB, {float(row['ms']):.0f} ms" for peak, row in zip(peaks, chosen, strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize="small")
    axes.set_yticks(places, [STEPS[row["variant"]] for row in chosen])
    axes.invert_yaxis()
    axes.set(xlabel="peak of the step's memory, GiB", xlim=(0, 1.3 * peaks.max()))
    parts = {
        "parameters, gradients": "#4a4e57",
        "temporaries, coda_jax": "#2f6db3",
        "temporaries, plain JAX": "#b8bcc4",
    }
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in parts.values()]
    axes.legend(handles, list(parts), fontsize="small", loc="upper right", frameon=False)
    first = chosen[0]
    about = f"training step of {first['batch']} x {first['length']} tokens, {first['layers']} layers"
    figure.suptitle(f"{about}, {first['param_dtype']}\n{_measured(first)}", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(path: pathlib.Path) -> list[pathlib.Path]:
    """The plots of one CSV, beside it."""
    if path.stem.endswith("_tiles"):
        return [_saved(tiles(path), path.with_suffix(".png"))]
    if path.stem.endswith("_train_step"):
        return [_saved(memory(rows_of(path)), path.with_name(f"{path.stem}_memory.png"))]
    rows = read(path)
    bare, with_epilogue = ([row for row in rows if row["kind"] == kind] for kind in ("bare", "epilogue"))
    wanted = {"products": (products, bare), "fused": (fused, with_epilogue), "roofline": (roofline, bare)}
    written = []
    for name, (draw, of) in wanted.items():
        if of:
            written.append(_saved(draw(of), path.with_name(f"{path.stem}_{name}.png")))
    return written


def _saved(figure: plt.Figure, path: pathlib.Path) -> pathlib.Path:
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=results.FOLDER, help="folder of the CSVs")
    folder = parser.parse_args(arguments).results
    written = [one for path in sorted(folder.glob("*.csv")) for one in write(path)]
    for path in written:
        print(f"written: {path}")
    if not written:
        print(f"{folder} has no CSV of `python -m benchmarks`", file=sys.stderr)
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
