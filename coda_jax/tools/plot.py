"""The plots of `coda.explain`, and what other plots share, with matplotlib, which only this file imports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coda_jax.epilogue.dtypes import FLOATS_OF_8_BITS
from coda_jax.tiles.arch import chip_of
from coda_jax.tools.costs import Cost

if TYPE_CHECKING:
    from coda_jax.tools.explain import Explanation, Product

OURS, LIMIT, XLA, BESIDE = "#5fa8d3", "#12263a", "#d5d8de", "#e09f3e"
_MOST_BARS = 24


def explanation(explained: Explanation, where: Any) -> Any:
    """See `Explanation.plot`."""
    timed = [(product, count, product.cost) for product, count in explained.products.items()]
    shown = [(product, count, cost) for product, count, cost in timed if cost is not None and cost.us is not None]
    if not shown:
        raise ValueError(
            "plot: no product has an expected time; explain for a GPU: platform='cuda', or a device's name"
        )
    shown.sort(key=lambda row: -row[1] * (row[2].us or 0.0))
    with canvas(where, rows=min(len(shown), _MOST_BARS)) as (figure, (bars, roofline)):
        _bars(bars, shown, explained)
        _roofline(roofline, shown, explained.device or "")
    return figure


def pyplot() -> Any:
    """The module matplotlib.pyplot; raises ImportError, naming what to install."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"plot: it needs matplotlib, pip install matplotlib: {error}") from error
    return plt


@contextlib.contextmanager
def canvas(where: Any, *, rows: int, columns: int = 2) -> Any:
    """The figure and its axes: the given ones, or those of a new figure, which is written to the path `where`."""
    if not isinstance(where, str | os.PathLike):
        axes = [where] if columns == 1 and not isinstance(where, Sequence) else list(where)
        if len(axes) != columns:
            raise ValueError(f"plot: {len(axes)} axes are given; it draws on {columns}")
        yield axes[0].figure, axes
        return
    plt = pyplot()
    height = max(4.2, 1.6 + 0.36 * rows)
    figure, axes = plt.subplots(
        1, columns, figsize=(15 if columns == 2 else 10, height), width_ratios=[3, 2][:columns], squeeze=False
    )
    try:
        yield figure, list(axes[0])
        figure.tight_layout()
        figure.savefig(where, dpi=130)
    finally:
        plt.close(figure)


def _bars(axes: Any, shown: Sequence[tuple[Product, int, Cost]], explained: Explanation) -> None:
    """Bars of each kind of product's milliseconds: expected, by the data sheet, and XLA's form behind them."""
    rest = shown[_MOST_BARS:]
    shown = shown[:_MOST_BARS]
    labels = [
        f"{i + 1}  {count} × {product.epilogue}  {_sizes(product)}" for i, (product, count, _) in enumerate(shown)
    ]
    for y, (_, count, cost) in enumerate(shown):
        us, xla_us, least = cost.us or 0.0, cost.xla_us or 0.0, cost.roofline_us or 0.0
        if xla_us > us:
            axes.barh(y, count * xla_us / 1e3, 0.72, color=XLA, label="XLA's form, at least")
        axes.barh(y, count * us / 1e3, 0.72, color=OURS, label="expected, fused")
        limit = count * least / 1e3
        axes.plot([limit, limit], [y - 0.42, y + 0.42], color=LIMIT, linewidth=2.2, label="the data sheet's limit")
        axes.text(count * max(us, xla_us) / 1e3, y, f"  {count * us / 1e3:.3g} ms", va="center", fontsize=8)
    totals = explained.totals
    if rest:
        labels.append(f"{len(rest)} smaller kinds of product")
        axes.barh(len(shown), sum(count * (cost.us or 0.0) for _, count, cost in rest) / 1e3, 0.72, color=OURS)
    if totals.passes_ms:
        labels.append(f"passes left to XLA, {totals.passes_bytes / 1e9:.3g} GB")
        axes.barh(len(labels) - 1, totals.passes_ms, 0.72, color=BESIDE, label="passes between products")
        axes.text(totals.passes_ms, len(labels) - 1, f"  {totals.passes_ms:.3g} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.16, y=0.02)
    axes.set_xlabel("milliseconds in one call")
    share = totals.roofline_ms / totals.products_ms
    axes.set_title(
        f"products: {totals.products_ms:.3g} ms expected, {share:.0%} of the roofline; {explained.device}", fontsize=11
    )
    # Below the axes' own label, as bars and their times may be anywhere above it.
    legend(axes, "upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.5, ncols=2, frameon=False)


def _roofline(axes: Any, shown: Sequence[tuple[Product, int, Cost]], device: str) -> None:
    """Plots TFLOP/s against flops a byte, with the numbers of the bars."""
    import numpy as np
    from matplotlib.ticker import LogLocator

    points = [(cost.flops / cost.bytes, cost.tflops or 0.0, count * (cost.us or 0.0)) for _, count, cost in shown]
    intensities, rates, times = (np.array(column) for column in zip(*points, strict=True))
    chip = chip_of(device)
    if chip is not None:
        narrow = any(product.a.startswith(FLOATS_OF_8_BITS) for product, *_ in shown)
        tflops = chip.tflops_of(1 if narrow else 2)  # of factors of 8 bits, if there are any
        balance = tflops / chip.tbytes
        x = np.geomspace(min(balance / 6, intensities.min() / 1.5), max(balance * 12, intensities.max() * 1.5), 200)
        axes.plot(x, np.minimum(tflops, chip.tbytes * x), color="black", linewidth=1.4)
        axes.text(x[-1], tflops * 1.03, f"{tflops:.0f} TFLOP/s", ha="right", va="bottom", fontsize=8)
        axes.text(x[0] * 2, chip.tbytes * x[0] * 1.6, f"{chip.tbytes} TB/s", ha="left", va="bottom", fontsize=8)
        axes.axvline(balance, color="grey", linewidth=0.8, linestyle=":")
        axes.text(
            balance * 1.04, 0.02, "compute bound →", transform=axes.get_xaxis_transform(), fontsize=8, color="grey"
        )
    axes.scatter(intensities, rates, s=20 + 180 * times / times.max(), color=OURS, alpha=0.7, edgecolors="white")
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP a byte of all that is read and written", ylabel="TFLOP/s expected"
    )
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, rates.min() / 2), top * 1.15)
    numbered = range(min(len(points), _MOST_BARS))
    _labels(axes, [(intensities[i], rates[i], f"{i + 1} {shown[i][0].epilogue}") for i in numbered])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_title("roofline; areas are times", fontsize=11)
    axes.grid(alpha=0.25, which="both")


def _labels(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Writes the labels of points in a column right of the axes, in the points' order, without overlap.

    Matplotlib's layout makes room for them, as for everything outside of axes.
    """
    import numpy as np

    points = sorted(points, key=lambda point: -point[1])
    bottom, top = np.log(axes.get_ylim())
    inches = axes.get_window_extent().height / axes.figure.dpi * 0.85  # a layout may shrink the axes so far
    size = min(7.0, 72 * inches / (1.3 * len(points)))
    gap = 1.3 * size / 72 / inches
    heights = [(np.log(rate) - bottom) / (top - bottom) for _, rate, _ in points]
    for i in range(1, len(points)):
        heights[i] = min(heights[i], heights[i - 1] - gap)
    heights[-1] = max(heights[-1], 0.0)
    for i in reversed(range(len(points) - 1)):  # labels below the axes are moved up again
        heights[i] = max(heights[i], heights[i + 1] + gap)
    line = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)}
    for (x, rate, label), height in zip(points, heights, strict=True):
        where = {"xytext": (1.04, height), "textcoords": "axes fraction", "annotation_clip": False}
        axes.annotate(label, (x, rate), va="center", fontsize=size, arrowprops=line, **where)


def legend(axes: Any, loc: str = "lower right", **options: Any) -> None:
    """Draws a legend with each label once."""
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        handles.setdefault(label, handle)
    axes.legend(handles.values(), handles.keys(), fontsize=8, loc=loc, **options)


def _sizes(product: Product) -> str:
    """The sizes of a product's factors: "16384,2048ᵀ @ 16384,2048"."""
    return " @ ".join(side.partition("[")[2].replace("]", "").replace("^T", "ᵀ") for side in (product.a, product.b))
