"""`python -m benchmarks.plots`: pictures of what `python -m benchmarks` and `python -m benchmarks.lab.tiles` wrote.

For each CSV of the first in benchmarks/results: <name>_products.png, the bare product beside its peers;
<name>_epilogues.png, what an epilogue adds to the product's time against the product's depth; <name>_roofline.png, the
products below what the chip can do. For each of the second <name>.png, how often the cost model's tile is how slow.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np

from benchmarks import results
from benchmarks.lab import tile_losses
from coda_jax.tiles.constants import by_time, constants_for

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = Mapping[str, str]
PRODUCT = "_product"  # ends the name of a column that has a bare product's microseconds


class Chip(NamedTuple):
    """Of the data sheet: TFLOP/s of dense bfloat16, and TB/s of memory."""

    tflops: float
    tbytes: float


CHIPS = {  # by the beginning of JAX's device kind
    "NVIDIA H200": Chip(989.4, 4.8),
    "NVIDIA H100 80GB HBM3": Chip(989.4, 3.35),
    "NVIDIA H100 PCIe": Chip(756.0, 2.0),
}


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file of `python -m benchmarks`; none of another one."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row.get("kind") in ("bare", "epilogue")]


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


def epilogues(rows: Sequence[Row]) -> plt.Figure:
    """Lines of an epilogue's overhead against K: the kernel alone, and with what finishes its reductions."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for i, name in enumerate(dict.fromkeys(row["program"] for row in rows)):
        of = sorted((row for row in rows if row["program"] == name), key=lambda row: (int(row["k"]), int(row["n"])))
        depths, colour = [int(row["k"]) for row in of], f"C{i}"
        marker = "osD^vP*X<>"[i // 10 % 10]
        kernel, whole = ([100 * float(row[column]) for row in of] for column in ("kernel_price", "price"))
        axes.plot(depths, kernel, f"{marker}-", color=colour, label=name)
        axes.plot(depths, whole, f"{marker}:", color=colour, alpha=0.6)
    axes.set(xscale="log", xlabel="K", ylabel="over the bare product, %")
    axes.set_xticks(depths := sorted({int(row["k"]) for row in rows}), [str(depth) for depth in depths], rotation=45)
    axes.minorticks_off()
    axes.set_title(f"what an epilogue adds (dotted: with XLA's kernel that finishes reductions)\n{rows[0]['clock']}")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure


def roofline(rows: Sequence[Row]) -> plt.Figure:
    """TFLOP/s against flops a byte, and the chip's two lines where its data sheet is known."""
    figure, axes = plt.subplots(figsize=(8, 5))
    device = rows[0]["device"]
    chip = next((chip for name, chip in CHIPS.items() if device.startswith(name)), None)
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


def write(path: pathlib.Path) -> list[pathlib.Path]:
    """The plots of one CSV, beside it."""
    if path.stem.endswith("_tiles"):
        return [_saved(tiles(path), path.with_suffix(".png"))]
    rows = read(path)
    bare, fused = ([row for row in rows if row["kind"] == kind] for kind in ("bare", "epilogue"))
    wanted = {"products": (products, bare), "epilogues": (epilogues, fused), "roofline": (roofline, bare)}
    written = []
    for name, (draw, of) in wanted.items():
        if of:
            written.append(_saved(draw(of), path.with_name(f"{path.stem}_{name}.png")))
    return written


def _saved(figure: plt.Figure, path: pathlib.Path) -> pathlib.Path:
    figure.tight_layout()
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
